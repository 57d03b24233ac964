// SPDX-License-Identifier: Apache-2.0
/* memory_driver.h: the driver functions that the layers above core call for themselves; see driver.h. */
#ifndef NVSHARE_MEMORY_DRIVER_H
#define NVSHARE_MEMORY_DRIVER_H

#include "memory_abi.h"

#define NVS_MEMORY_DRIVER_TABLE(D) \
	D(ctx_from_green, CtxFromGreenCtx, (void **ctx, void *green)) \
	D(device_count, DeviceGetCount, (int *count)) \
	D(device_get, DeviceGet, (int *dev, int ordinal)) \
	D(device_total_mem, DeviceTotalMem_v2, (size_t *bytes, int dev)) \
	D(primary_state, DevicePrimaryCtxGetState, (int dev, uint *flags, int *active)) \
	D(array_requirements, ArrayGetMemoryRequirements, (struct cu_array_requirements *r, void *array, int dev)) \
	D(mipmap_requirements, MipmappedArrayGetMemoryRequirements, \
		(struct cu_array_requirements *r, void *array, int dev)) \
	D(graph_memory, DeviceGetGraphMemAttribute, (int dev, int what, void *value)) \
	D(driver_version, DriverGetVersion, (int *version)) \
	D(device_attribute, DeviceGetAttribute, (int *value, int what, int dev)) \
	D(address_reserve, MemAddressReserve, \
		(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags)) \
	D(set_access, MemSetAccess, (CUdeviceptr p, size_t n, const struct cu_access *a, size_t count)) \
	D(can_access_peer, DeviceCanAccessPeer, (int *can, int dev, int peer)) \
	D(device_mem_pool, DeviceGetMemPool, (void **pool, int dev)) \
	D(address_free, MemAddressFree, (CUdeviceptr p, size_t n)) \
	D(mem_export, MemExportToShareableHandle, \
		(void *out, unsigned long long handle, int type, unsigned long long flags)) \
	D(host_register, MemHostRegister_v2, (void *p, size_t n, uint flags)) \
	D(event_synchronize, EventSynchronize, (void *event)) \
	D(mem_create, MemCreate, \
		(unsigned long long *handle, size_t n, const struct cu_alloc_prop *p, unsigned long long flags)) \
	D(mem_release, MemRelease, (unsigned long long handle)) \
	D(mem_map, MemMap, \
		(CUdeviceptr p, size_t n, size_t offset, unsigned long long handle, unsigned long long flags)) \
	D(mem_unmap, MemUnmap, (CUdeviceptr p, size_t n)) \
	D(mem_import, MemImportFromShareableHandle, (unsigned long long *handle, void *os, int type)) \
	D(pool_get_attribute, MemPoolGetAttribute, (void *pool, int attribute, void *value)) \
	D(pool_trim, MemPoolTrimTo, (void *pool, size_t keep)) \
	D(pointer_attribute, PointerGetAttribute, (void *data, int what, CUdeviceptr p)) \
	D(graph_nodes, GraphGetNodes, (void *graph, void **nodes, size_t *n)) \
	D(graph_node_type, GraphNodeGetType, (void *node, int *type)) \
	D(graph_kernel, GraphKernelNodeGetParams_v2, (void *node, struct cu_kernel_node *p)) \
	D(graph_copy, GraphMemcpyNodeGetParams, (void *node, struct cu_memcpy3d *p)) \
	D(graph_set, GraphMemsetNodeGetParams, (void *node, struct cu_memset_node *p)) \
	D(graph_mem_ops, GraphBatchMemOpNodeGetParams, (void *node, struct cu_mem_op_node *p)) \
	D(graph_child, GraphChildGraphNodeGetGraph, (void *node, void **graph)) \
	D(graph_alloc, GraphMemAllocNodeGetParams, (void *node, struct cu_alloc_node *p)) \
	D(graph_free, GraphMemFreeNodeGetParams, (void *node, CUdeviceptr *p)) \
	D(copy_to_device, MemcpyHtoDAsync_v2, (CUdeviceptr d, const void *h, size_t n, void *stream)) \
	D(copy_to_host, MemcpyDtoHAsync_v2, (void *h, CUdeviceptr d, size_t n, void *stream)) \
	D(set_words, MemsetD32Async, (CUdeviceptr d, uint value, size_t n, void *stream)) \
	D(mem_alloc, MemAlloc_v2, (CUdeviceptr *p, size_t n)) \
	D(host_alloc, MemHostAlloc, (void **p, size_t n, uint flags)) \
	D(module_load, ModuleLoadData, (void **module, const void *image)) \
	D(module_function, ModuleGetFunction, (void **function, void *module, const char *name)) \
	D(launch, LaunchKernel, \
		(void *function, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, void *stream, \
		 void **params, void **extra))

struct nvs_memory_driver_table {
#define D(member, export, params) int (*member) params;
	NVS_MEMORY_DRIVER_TABLE(D)
#undef D
};

/* The code calls it nvs_memory_driver. */
extern struct nvs_memory_driver_table nvs_memory_driver_functions;
#define nvs_memory_driver (*(nvs_driver_called(), &nvs_memory_driver_functions))

#endif
