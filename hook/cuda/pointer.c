// SPDX-License-Identifier: Apache-2.0
/*
 * pointer.c: wrappers that tell of an address. For memory of ours (swap.h) the
 * answer is about the application's allocation, whether it is on the GPU or
 * not; the driver would tell of our chunk, or know nothing.
 */
#include <string.h>

#include "swap.h"
#include "wrap.h"

enum { /* CU_POINTER_ATTRIBUTE_... */
	CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, P2P_TOKENS, SYNC_MEMOPS, BUFFER_ID,
	IS_MANAGED, DEVICE_ORDINAL, IPC_CAPABLE, RANGE_START, RANGE_SIZE, MAPPED, HANDLE_TYPES,
	RDMA_CAPABLE, ACCESS_FLAGS, MEMPOOL, MAPPING_SIZE, MAPPING_BASE, BLOCK_ID,
};

#define MEMORY_TYPE_DEVICE 2u

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

/* One attribute as cuMemAlloc's memory has it; -1: the driver knows better. */
static int tell(void *data, int what, CUdeviceptr p, const struct nvs_swap_range *r)
{
	switch (what) {
	case CONTEXT:
		memcpy(data, &r->owner, sizeof(r->owner));
		break;
	case MEMORY_TYPE:
		*(uint *)data = MEMORY_TYPE_DEVICE;
		break;
	case DEVICE_POINTER:
		*(CUdeviceptr *)data = p;
		break;
	case HOST_POINTER:
		return CUDA_ERROR_INVALID_VALUE;
	case BUFFER_ID:
	case BLOCK_ID:
		*(unsigned long long *)data = 1ull << 63 | r->serial;
		break;
	case IS_MANAGED:
	case IPC_CAPABLE:
		*(unsigned char *)data = 0;
		break;
	case DEVICE_ORDINAL:
		*(int *)data = r->gpu->device.dev;
		break;
	case RANGE_START:
		*(CUdeviceptr *)data = r->base;
		break;
	case RANGE_SIZE:
		*(size_t *)data = r->bytes;
		break;
	case MAPPED:
		*(unsigned char *)data = 1;
		break;
	case HANDLE_TYPES:
		*(unsigned long long *)data = (unsigned)r->handle_types;
		break;
	case ACCESS_FLAGS:
		*(int *)data = r->mapping ? r->access : CU_MEM_ACCESS_READWRITE;
		break;
	case RDMA_CAPABLE:
		if (!r->mapping)
			return -1;
		*(unsigned char *)data = r->rdma;
		break;
	case MEMPOOL:
		*(void **)data = NULL;
		break;
	case MAPPING_SIZE:
		*(size_t *)data = r->mapped_bytes;
		break;
	case MAPPING_BASE:
		*(CUdeviceptr *)data = r->mapped;
		break;
	default:
		return -1;
	}
	return CUDA_SUCCESS;
}

WRAPPER(cuPointerGetAttribute, (void *data, int what, CUdeviceptr p))
{
	struct nvs_swap_range r;
	int result = -1;

	if (data && nvs_swap_find(p, &r))
		result = r.base ? tell(data, what, p, &r) : CUDA_ERROR_INVALID_VALUE;
	return result >= 0 ? result : CALL(cuPointerGetAttribute, data, what, p);
}

/* As the driver does, sets what it cannot tell to zero and succeeds. */
WRAPPER(cuPointerGetAttributes, (uint n, int *what, void **data, CUdeviceptr p))
{
	struct nvs_swap_range r;

	if (!what || !data || !nvs_swap_find(p, &r) || !r.base)
		return CALL(cuPointerGetAttributes, n, what, data, p);
	for (uint i = 0; i < n; i++) {
		int result = data[i] ? tell(data[i], what[i], p, &r) : CUDA_ERROR_INVALID_VALUE;

		if (result == -1)
			(void)CALL(cuPointerGetAttributes, 1, &what[i], &data[i], p);
		else if (result != CUDA_SUCCESS && data[i])
			*(void **)data[i] = NULL; /* of the host's pointer */
	}
	return CUDA_SUCCESS;
}
