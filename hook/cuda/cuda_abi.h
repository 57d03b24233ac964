// SPDX-License-Identifier: Apache-2.0
/*
 * cuda_abi.h: the little of the CUDA driver's ABI that the shim needs.
 *
 * No CUDA header is needed to build. Handles are void *, results are int.
 * A driver function of the pre-3.2 API (no suffix, 32-bit device pointers) is
 * declared like its 64-bit successor: both pass one register, and what we do
 * not look at goes through unchanged.
 */
#ifndef NVSHARE_CUDA_ABI_H
#define NVSHARE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned long long CUdeviceptr;
typedef unsigned int uint;

enum {
	CUDA_SUCCESS         = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
};

/* Stream handles with a meaning of their own. */
#define CU_STREAM_LEGACY     ((void *)0x1)
#define CU_STREAM_PER_THREAD ((void *)0x2)

#define CU_EVENT_DISABLE_TIMING 2u

#define CU_STREAM_CAPTURE_MODE_RELAXED 2

#define CU_MEM_LOCATION_TYPE_DEVICE 1

#define CU_GRAPH_INSTANTIATE_UPLOAD 2ull

/* Flags of cuGetProcAddress. */
#define CU_GPA_DEFAULT        0ull
#define CU_GPA_LEGACY_STREAM  1ull
#define CU_GPA_PER_THREAD     2ull

struct cu_location {
	int type;
	int id;
};

/* The head of CUmemAllocationProp. */
struct cu_alloc_prop {
	int type;
	int handle_types;
	struct cu_location location;
};

/* CUmemAllocationProp. */
struct cu_alloc_full {
	struct cu_alloc_prop head;
	void *win32;
	unsigned char compression, rdma;
	unsigned short usage;
	unsigned char reserved[4];
};

/* CUmemAccessDesc. */
struct cu_access {
	struct cu_location location;
	int flags;
};

#define CU_MEM_ALLOCATION_PINNED   1
#define CU_MEM_HANDLE_POSIX_FD     1
#define CU_MEM_ACCESS_NONE         0
#define CU_MEM_ACCESS_READ         1
#define CU_MEM_ACCESS_READWRITE    3
#define CU_ATTRIBUTE_VMM           102 /* CU_DEVICE_ATTRIBUTE_... */
#define CU_ATTRIBUTE_VMM_POSIX_FD  103
#define CU_ATTRIBUTE_VMM_RDMA      110
#define CU_STREAM_NON_BLOCKING     1u
#define CU_EVENT_BLOCKING_SYNC     1u
#define CU_HOST_REGISTER_PORTABLE  1u
#define CU_MEM_ATTACH_GLOBAL       1u

/* CUmemPoolProps. */
struct cu_pool_props {
	int type;
	int handle_types;
	struct cu_location location;
	void *security;
	size_t max_size;
	unsigned short usage;
	unsigned char reserved[54];
};

/* CUmemPool_attribute; the first three are int, those that follow 64 bits or int again. */
enum {
	CU_POOL_RELEASE_THRESHOLD = 4,
	CU_POOL_RESERVED_CURRENT, CU_POOL_RESERVED_HIGH, CU_POOL_USED_CURRENT, CU_POOL_USED_HIGH,
};

/* CUDA_MEM_ALLOC_NODE_PARAMS. */
struct cu_alloc_node {
	struct cu_pool_props props;
	const void *access;
	size_t access_count;
	size_t bytes;
	CUdeviceptr p;
};

/*
 * CUstreamBatchMemOpParams, a union. The address is the first word of what writes a
 * value or waits for one; of an atomic (CUDA 13.1) it is the second.
 */
struct cu_mem_op {
	uint type;
	uint flags; /* or nothing */
	uint64_t word[5];
};

enum { /* CU_STREAM_MEM_OP_... */
	CU_MEM_OP_WAIT_32 = 1, CU_MEM_OP_WRITE_32, CU_MEM_OP_FLUSH, CU_MEM_OP_WAIT_64,
	CU_MEM_OP_WRITE_64, CU_MEM_OP_BARRIER,
};

/* The driver takes no more in a batch. */
#define CU_MEM_OPS_MAX 256u

/* CUDA_BATCH_MEM_OP_NODE_PARAMS. */
struct cu_mem_op_node {
	void *ctx;
	uint count;
	const struct cu_mem_op *ops;
	uint flags;
};

#define CU_GRAPH_NODE_TYPE_MEM_ALLOC 10
#define CU_GRAPH_NODE_TYPE_MEM_OPS   12

/* The head of CUgraphNodeParams. */
struct cu_node_params {
	int type;
	int reserved[3];
	union {
		struct cu_alloc_node alloc;
		struct cu_mem_op_node mem_ops;
		long long size[29];
	} u;
};

/* CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT */
#define CU_GRAPH_MEM_RESERVED 2

/* CUDA_ARRAY_DESCRIPTOR and CUDA_ARRAY3D_DESCRIPTOR, and of before CUDA 3.2. */
struct cu_array {
	size_t width, height;
	uint format, channels;
};
struct cu_array3d {
	size_t width, height, depth;
	uint format, channels, flags;
};
struct cu_array_v1 {
	uint width, height, format, channels;
};
struct cu_array3d_v1 {
	uint width, height, depth, format, channels, flags;
};

#define CU_ARRAY3D_LAYERED          0x01u
#define CU_ARRAY3D_SPARSE           0x40u
#define CU_ARRAY3D_DEFERRED_MAPPING 0x80u

/* CUDA_ARRAY_MEMORY_REQUIREMENTS. */
struct cu_array_requirements {
	size_t size;
	size_t alignment;
	uint reserved[4];
};

_Static_assert(sizeof(struct cu_alloc_full) == 32, "CUmemAllocationProp");
_Static_assert(sizeof(struct cu_access) == 12, "CUmemAccessDesc");
_Static_assert(sizeof(struct cu_pool_props) == 88, "CUmemPoolProps");
_Static_assert(offsetof(struct cu_alloc_node, bytes) == 104, "CUDA_MEM_ALLOC_NODE_PARAMS");
_Static_assert(sizeof(struct cu_mem_op) == 48, "CUstreamBatchMemOpParams");
_Static_assert(sizeof(struct cu_mem_op_node) == 32, "CUDA_BATCH_MEM_OP_NODE_PARAMS");
_Static_assert(offsetof(struct cu_node_params, u) == 16, "CUgraphNodeParams");
_Static_assert(sizeof(struct cu_array3d) == 40, "CUDA_ARRAY3D_DESCRIPTOR");

/* CUlaunchConfig. */
struct cu_launch_config {
	uint grid[3];
	uint block[3];
	uint shared_bytes;
	void *stream;
	void *attrs;
	uint num_attrs;
};

/* CUDA_LAUNCH_PARAMS of cuLaunchCooperativeKernelMultiDevice. */
struct cu_launch_params {
	void *function;
	uint grid[3];
	uint block[3];
	uint shared_bytes;
	void *stream;
	void **params;
};

/* The head of CUDA_GRAPH_INSTANTIATE_PARAMS. */
struct cu_instantiate_params {
	uint64_t flags;
	void *upload_stream; /* used with CU_GRAPH_INSTANTIATE_UPLOAD alone */
};

_Static_assert(offsetof(struct cu_launch_config, stream) == 32, "CUlaunchConfig");
_Static_assert(offsetof(struct cu_launch_params, stream) == 40, "CUDA_LAUNCH_PARAMS");
_Static_assert(sizeof(struct cu_launch_params) == 56, "CUDA_LAUNCH_PARAMS");

/*
 * Driver functions that the shim calls for itself, past its own wrapper if there is one.
 * D(member, "export", parameters)
 */
#define NVS_DRIVER_TABLE(D) \
	D(ctx_from_green,    "cuCtxFromGreenCtx",      (void **ctx, void *green)) \
	D(ctx_get_current,   "cuCtxGetCurrent",        (void **ctx)) \
	D(ctx_get_device,    "cuCtxGetDevice",         (int *dev)) \
	D(ctx_push,          "cuCtxPushCurrent_v2",    (void *ctx)) \
	D(ctx_pop,           "cuCtxPopCurrent_v2",     (void **ctx)) \
	D(ctx_synchronize,   "cuCtxSynchronize",       (void)) \
	D(device_count,      "cuDeviceGetCount",       (int *count)) \
	D(device_get,        "cuDeviceGet",            (int *dev, int ordinal)) \
	D(device_uuid,       "cuDeviceGetUuid",        (void *uuid, int dev)) \
	D(device_uuid_v2,    "cuDeviceGetUuid_v2",     (void *uuid, int dev)) \
	D(device_total_mem,  "cuDeviceTotalMem_v2",    (size_t *bytes, int dev)) \
	D(primary_state,     "cuDevicePrimaryCtxGetState", (int dev, uint *flags, int *active)) \
	D(array_requirements, "cuArrayGetMemoryRequirements", \
		(struct cu_array_requirements *r, void *array, int dev)) \
	D(mipmap_requirements, "cuMipmappedArrayGetMemoryRequirements", \
		(struct cu_array_requirements *r, void *array, int dev)) \
	D(graph_memory,      "cuDeviceGetGraphMemAttribute", (int dev, int what, void *value)) \
	D(driver_version,    "cuDriverGetVersion",     (int *version)) \
	D(event_create,      "cuEventCreate",          (void **event, uint flags)) \
	D(event_destroy,     "cuEventDestroy_v2",      (void *event)) \
	D(event_record,      "cuEventRecord",          (void *event, void *stream)) \
	D(event_query,       "cuEventQuery",           (void *event)) \
	D(stream_get_ctx,    "cuStreamGetCtx",         (void *stream, void **ctx)) \
	D(stream_get_device, "cuStreamGetDevice",      (void *stream, int *dev)) \
	D(stream_capturing,  "cuStreamIsCapturing",    (void *stream, int *status)) \
	D(stream_query,      "cuStreamQuery",          (void *stream)) \
	/* swap.h */ \
	D(device_attribute,  "cuDeviceGetAttribute",   (int *value, int what, int dev)) \
	D(address_reserve,   "cuMemAddressReserve", \
		(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags)) \
	D(set_access,        "cuMemSetAccess", \
		(CUdeviceptr p, size_t n, const struct cu_access *a, size_t count)) \
	D(can_access_peer,   "cuDeviceCanAccessPeer",  (int *can, int dev, int peer)) \
	D(device_mem_pool,   "cuDeviceGetMemPool",     (void **pool, int dev)) \
	D(address_free,      "cuMemAddressFree",       (CUdeviceptr p, size_t n)) \
	D(mem_export,        "cuMemExportToShareableHandle", \
		(void *out, unsigned long long handle, int type, unsigned long long flags)) \
	D(host_register,     "cuMemHostRegister_v2",   (void *p, size_t n, uint flags)) \
	D(host_unregister,   "cuMemHostUnregister",    (void *p)) \
	D(event_synchronize, "cuEventSynchronize",     (void *event)) \
	D(stream_synchronize, "cuStreamSynchronize",   (void *stream)) \
	D(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))

/* Members are NULL where the driver does not have the function. */
struct nvs_driver {
#define D(member, name, params) int (*member) params;
	NVS_DRIVER_TABLE(D)
#undef D
};

/* What the shim calls of libnvidia-ml. */
struct nvs_nvml {
	int (*device_uuid)(void *device, char *uuid, uint size);
};

#endif
