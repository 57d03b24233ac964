// SPDX-License-Identifier: Apache-2.0
/* pointer.c: what is told of an address. */
#include "memory.h"
#include "pointer_abi.h"

#include <string.h>

/* An attribute of an area, little-endian as all hosts are; drv_mu held. */
static CUresult tell(uint64_t *value, int attribute, CUdeviceptr p, const struct area *a)
{
	unsigned host = a->kind == PINNED || a->kind == REGISTERED, plain = a->kind == DEVICE && !a->pool;
	const struct area *range = a->kind == MAPPED ? vmm_range((uintptr_t)p) : a;

	*value = 0;
	switch (attribute) {
	case NVS_POINTER_CONTEXT: *value = (uintptr_t)a->ctx; break;
	case NVS_POINTER_MEMORY_TYPE: *value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
	case NVS_POINTER_DEVICE_POINTER:
		if (a->kind == MAPPED && !a->access)
			return CUDA_ERROR_INVALID_VALUE;
		*value = p;
		break;
	case NVS_POINTER_HOST_POINTER:
		if (!host && a->kind != MANAGED)
			return CUDA_ERROR_INVALID_VALUE;
		*value = p;
		break;
	case NVS_POINTER_BUFFER_ID:
	case NVS_POINTER_MEMORY_BLOCK_ID: *value = a->id; break;
	case NVS_POINTER_IS_MANAGED: *value = a->kind == MANAGED; break;
	case NVS_POINTER_DEVICE_ORDINAL: *value = (uint64_t)dev_of_gpu(a->gpu); break;
	case NVS_POINTER_IS_LEGACY_CUDA_IPC_CAPABLE: *value = plain; break;
	case NVS_POINTER_RANGE_START_ADDR: *value = range->base; break;
	case NVS_POINTER_RANGE_SIZE: *value = range->size; break;
	case NVS_POINTER_MAPPED: *value = 1; break;
	case NVS_POINTER_ALLOWED_HANDLE_TYPES:
		*value = a->kind == MAPPED ? (unsigned)vmm_exportable(a->phys) : a->pool ? (unsigned)pool_exportable(a->pool) : 0;
		break;
	case NVS_POINTER_IS_GPU_DIRECT_RDMA_CAPABLE:
		*value = a->kind == MAPPED ? (unsigned)a->phys->rdma : plain;
		break;
	case NVS_POINTER_ACCESS_FLAGS:
		*value = a->kind == MAPPED && !a->access ? 0 : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
		break;
	case NVS_POINTER_MEMPOOL_HANDLE: *value = (uintptr_t)a->pool; break;
	case NVS_POINTER_MAPPING_SIZE: *value = a->pool ? pool_blocks(a->size) : a->size; break;
	case NVS_POINTER_MAPPING_BASE_ADDR: *value = a->base; break;
	case NVS_POINTER_SYNC_MEMOPS: *value = !host; break;
	case NVS_POINTER_IS_HW_DECOMPRESS_CAPABLE: *value = plain; break;
	case NVS_POINTER_P2P_TOKENS: return host ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; /* they are no more */
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

/* What a list has of an address that nothing is at; 0: it is not written. */
static unsigned unknown(uint64_t *value, int attribute, CUdeviceptr p)
{
	*value = attribute == NVS_POINTER_HOST_POINTER ? p : attribute == NVS_POINTER_DEVICE_ORDINAL ? (uint64_t)-2 : 0;
	return attribute == NVS_POINTER_RANGE_START_ADDR || attribute == NVS_POINTER_RANGE_SIZE ? 0 : nvs_pointer_bytes(attribute);
}

/* The bytes that are written, also with an error; as in hook/test/pointers.txt, which is of hardware. */
static unsigned ask(CUresult *rc, uint64_t *value, int attribute, CUdeviceptr p, int list)
{
	const struct area *a;
	unsigned bytes;

	value[0] = value[1] = 0;
	*rc = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, (uintptr_t)p);
	if (a) {
		*rc = tell(value, attribute, p, a);
		bytes = nvs_pointer_bytes(attribute);
	} else {
		bytes = list ? unknown(value, attribute, p) : 0;
	}
	pthread_mutex_unlock(&drv_mu);
	return bytes;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr p)
{
	uint64_t value[2];
	CUresult rc;

	ENTER();
	NEED(data);
	memcpy(data, value, ask(&rc, value, attribute, p, 0));
	return rc;
}

/* As documented, an unknown pointer is no error here. */
CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **data, CUdeviceptr p)
{
	ENTER();
	NEED(attributes && data);
	for (unsigned i = 0; i < n; i++) {
		uint64_t value[2];
		CUresult rc;

		NEED(attributes[i] != NVS_POINTER_P2P_TOKENS && nvs_pointer_bytes(attributes[i]) && data[i]);
		memcpy(data[i], value, ask(&rc, value, attributes[i], p, 1));
	}
	return CUDA_SUCCESS;
}
