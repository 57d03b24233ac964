// SPDX-License-Identifier: Apache-2.0
/*
 * pointer.c: wrappers that tell of an address. Of memory of ours (swap.h) they tell of the
 * application's allocation, where the driver would tell of our chunk, or know nothing.
 */
#include <string.h>

#include "pointer_abi.h"
#include "vmm.h"
#include "wrap.h"

WRAPPER(cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *bytes, CUdeviceptr p))
{
	struct nvs_swap_range r;

	if (!nvs_swap_find(p, &r))
		return CALL(cuMemGetAddressRange_v2, base, bytes, p);
	if (!r.base)
		return CUDA_ERROR_NOT_FOUND;
	if (base)
		*base = r.base;
	if (bytes)
		*bytes = r.bytes;
	return CUDA_SUCCESS;
}

/*
 * An attribute as the driver has it of such memory (hook/test/pointers.txt); -1: the driver knows it
 * better. A value that the memory lacks is zero, also with an error.
 */
static int pointer_tell(uint64_t *value, int what, CUdeviceptr p, const struct nvs_swap_range *r)
{
	*value = 0;
	if (what == NVS_POINTER_HOST_POINTER || (what == NVS_POINTER_DEVICE_POINTER && r->mapping && !r->access))
		return CUDA_ERROR_INVALID_VALUE;
	if (what == NVS_POINTER_SYNC_MEMOPS && r->pinned)
		return -1; /* set, it has pinned the memory */
	switch (what) {
#define T(name, v) \
	case NVS_POINTER_##name: \
		*value = v; \
		return CUDA_SUCCESS;
		T(CONTEXT, (uintptr_t)r->owner)
		T(MEMORY_TYPE, CU_MEMORY_TYPE_DEVICE)
		T(DEVICE_POINTER, p)
		T(SYNC_MEMOPS, 1)
		T(BUFFER_ID, 1ull << 63 | r->serial)
		T(MEMORY_BLOCK_ID, 1ull << 63 | r->serial)
		T(IS_MANAGED, 0)
		T(DEVICE_ORDINAL, (uint64_t)r->gpu->device.dev)
		T(IS_LEGACY_CUDA_IPC_CAPABLE, r->ipc)
		T(RANGE_START_ADDR, r->range)
		T(RANGE_SIZE, r->range_bytes)
		T(MAPPED, 1)
		T(ALLOWED_HANDLE_TYPES, (unsigned)r->handle_types)
		T(IS_GPU_DIRECT_RDMA_CAPABLE, r->rdma)
		T(ACCESS_FLAGS, r->mapping ? (unsigned)r->access : CU_MEM_ACCESS_READWRITE)
		T(MEMPOOL_HANDLE, (uintptr_t)r->pool_handle)
		T(MAPPING_SIZE, r->mapped_bytes)
		T(MAPPING_BASE_ADDR, r->mapped)
		T(IS_HW_DECOMPRESS_CAPABLE, !r->pool && !r->mapping)
#undef T
	}
	return -1;
}

/* As the driver writes an attribute in a list of an address that nothing is at. */
static int unknown(void *data, int what, CUdeviceptr p)
{
	uint64_t value = 0;

	switch (what) {
	case NVS_POINTER_P2P_TOKENS:
		return CUDA_ERROR_INVALID_VALUE;
	case NVS_POINTER_RANGE_START_ADDR:
	case NVS_POINTER_RANGE_SIZE:
		return CUDA_SUCCESS;
	case NVS_POINTER_HOST_POINTER:
		value = p;
		break;
	case NVS_POINTER_DEVICE_ORDINAL:
		value = (uint64_t)-2; /* CU_DEVICE_INVALID */
		break;
	}
	memcpy(data, &value, nvs_pointer_bytes(what));
	return CUDA_SUCCESS;
}

/* The driver is asked while the memory is on the GPU. */
#define BY_THE_DRIVER_AT(p, call) NVS_NAMING(nvs_names_enter(p, 0), call)

/* Memory of another process is mapped, and mapped memory is of no context for the driver. */
static void add_context(int what, void *data, CUdeviceptr p)
{
	void *ctx = what == NVS_POINTER_CONTEXT && data ? nvs_ipc_context(p) : NULL;

	if (ctx)
		memcpy(data, &ctx, sizeof(ctx));
}

WRAPPER(cuPointerGetAttribute, (void *data, int what, CUdeviceptr p))
{
	struct nvs_swap_range r;
	uint64_t value;
	int result;

	if (!data || !nvs_swap_find(p, &r)) {
		result = CALL(cuPointerGetAttribute, data, what, p);
		if (result == CUDA_SUCCESS)
			add_context(what, data, p);
		return result;
	}
	if (!r.base && nvs_pointer_bytes(what))
		return CUDA_ERROR_INVALID_VALUE;
	result = r.base ? pointer_tell(&value, what, p, &r) : -1;
	if (result == -1)
		return BY_THE_DRIVER_AT(p, CALL(cuPointerGetAttribute, data, what, p));
	memcpy(data, &value, nvs_pointer_bytes(what));
	return result;
}

/* As the driver does, sets what it cannot tell to zero, or to what stands for nothing, and succeeds. */
WRAPPER(cuPointerGetAttributes, (uint n, int *what, void **data, CUdeviceptr p))
{
	struct nvs_swap_range r;
	int result = CUDA_SUCCESS;

	if (!what || !data)
		return CALL(cuPointerGetAttributes, n, what, data, p);
	if (!nvs_swap_find(p, &r)) {
		result = CALL(cuPointerGetAttributes, n, what, data, p);
		for (uint i = 0; i < n && result == CUDA_SUCCESS; i++)
			add_context(what[i], data[i], p);
		return result;
	}
	for (uint i = 0; i < n && result == CUDA_SUCCESS; i++) {
		uint64_t value;

		if (!data[i])
			continue;
		if (!r.base && nvs_pointer_bytes(what[i]))
			result = unknown(data[i], what[i], p);
		else if (!r.base || pointer_tell(&value, what[i], p, &r) == -1)
			result = BY_THE_DRIVER_AT(p, CALL(cuPointerGetAttributes, 1, &what[i], &data[i], p));
		else
			memcpy(data[i], &value, nvs_pointer_bytes(what[i]));
	}
	return result;
}

/* A program that sets SYNC_MEMOPS hands the address to another device next (GPUDirect RDMA). */
WRAPPER(cuPointerSetAttribute, (const void *value, int what, CUdeviceptr p))
{
	struct nvs_swap_range r;

	if (what == NVS_POINTER_SYNC_MEMOPS) {
		nvs_swap_pin(p, &r);
		nvs_vmm_pin(p, 1);
	}
	return CALL(cuPointerSetAttribute, value, what, p);
}
