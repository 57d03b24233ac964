// SPDX-License-Identifier: Apache-2.0
/* pointer.c: what is told of an address. */
#include "memory.h"
#include "pointer_abi.h"

#include <string.h>

/* An attribute of an area, little-endian as all hosts are; drv_mu held. */
static CUresult tell(uint64_t *value, int attribute, CUdeviceptr p, const struct area *a)
{
	int host = a->kind == PINNED || a->kind == REGISTERED;
	const struct area *range = a->kind == MAPPED ? vmm_range((uintptr_t)p) : a;

	*value = 0;
	switch (attribute) {
	case NVS_POINTER_CONTEXT: *value = (uintptr_t)a->ctx; break;
	case NVS_POINTER_MEMORY_TYPE: *value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
	case NVS_POINTER_DEVICE_POINTER: *value = p; break;
	case NVS_POINTER_HOST_POINTER:
		if (!host && a->kind != MANAGED)
			return CUDA_ERROR_INVALID_VALUE;
		*value = p;
		break;
	case NVS_POINTER_BUFFER_ID:
	case NVS_POINTER_MEMORY_BLOCK_ID: *value = a->id; break;
	case NVS_POINTER_IS_MANAGED: *value = a->kind == MANAGED; break;
	case NVS_POINTER_DEVICE_ORDINAL: *value = (uint64_t)dev_of_gpu(a->gpu); break;
	case NVS_POINTER_IS_LEGACY_CUDA_IPC_CAPABLE: *value = a->kind == DEVICE && !a->pool; break;
	case NVS_POINTER_RANGE_START_ADDR: *value = range->base; break;
	case NVS_POINTER_RANGE_SIZE: *value = range->size; break;
	case NVS_POINTER_MAPPED: *value = 1; break;
	case NVS_POINTER_ALLOWED_HANDLE_TYPES: *value = a->kind == MAPPED ? (unsigned)vmm_exportable(a->phys) : 0; break;
	case NVS_POINTER_IS_GPU_DIRECT_RDMA_CAPABLE:
		*value = a->kind == MAPPED ? (unsigned)a->phys->rdma : a->kind == DEVICE;
		break;
	case NVS_POINTER_ACCESS_FLAGS:
		*value = a->kind == MAPPED && !a->access ? 0 : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
		break;
	case NVS_POINTER_MEMPOOL_HANDLE: *value = (uintptr_t)a->pool; break;
	case NVS_POINTER_MAPPING_SIZE: *value = a->size; break;
	case NVS_POINTER_MAPPING_BASE_ADDR: *value = a->base; break;
	case NVS_POINTER_SYNC_MEMOPS:
	case NVS_POINTER_IS_HW_DECOMPRESS_CAPABLE: break;
	default: return CUDA_ERROR_INVALID_VALUE; /* P2P_TOKENS are no more */
	}
	return CUDA_SUCCESS;
}

static CUresult ask(uint64_t *value, int attribute, CUdeviceptr p)
{
	const struct area *a;
	CUresult rc;

	*value = 0;
	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, (uintptr_t)p);
	rc = a ? tell(value, attribute, p, a) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr p)
{
	uint64_t value;
	CUresult rc;

	ENTER();
	NEED(data);
	rc = ask(&value, attribute, p);
	if (!rc)
		memcpy(data, &value, nvs_pointer_bytes(attribute));
	return rc;
}

/* As documented, an unknown pointer is no error here: its values read zero. */
CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **data, CUdeviceptr p)
{
	ENTER();
	NEED(attributes && data);
	for (unsigned i = 0; i < n; i++) {
		uint64_t value[2] = { 0, 0 };

		NEED(nvs_pointer_bytes(attributes[i]) && data[i]);
		if (ask(value, attributes[i], p))
			value[0] = 0;
		memcpy(data[i], value, nvs_pointer_bytes(attributes[i]));
	}
	return CUDA_SUCCESS;
}
