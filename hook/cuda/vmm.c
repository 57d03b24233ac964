// SPDX-License-Identifier: Apache-2.0
/*
 * vmm.c: wrappers of the application's own virtual memory management, and of what shares memory.
 * What vmm.h and swap.h do not take is counted and goes to the driver.
 */
#include "vmm.h"
#include "wrap.h"

/* One load where nothing is swapped. */
static inline bool vmm_used(void)
{
	return nvs_unlikely(atomic_load_explicit(&nvs_vmm_used, memory_order_acquire));
}

/* What `ours` says, or the driver (-1). */
#define OURS(name, P, A, ours) \
	WRAPPER(name, P) \
	{ \
		int result = ours; \
		return result >= 0 ? result : CALL(name, NVS_SPREAD A); \
	}

/* ---- physical memory ---- */

WRAPPER(cuMemCreate, (unsigned long long *handle, size_t n, const struct cu_alloc_prop *prop,
		    unsigned long long flags))
{
	struct nvs_claim claim;
	unsigned tries = 0;
	int result;

	if (!nvs_counting() || !prop)
		return CALL(cuMemCreate, handle, n, prop, flags);
	result = nvs_vmm_create(handle, n, prop, flags);
	if (result != NVS_VMM_DRIVER)
		return result;
	if (!nvs_claim(&claim, nvs_gpu_of_location(&prop->location), n))
		return CUDA_ERROR_OUT_OF_MEMORY;
	do
		result = CALL(cuMemCreate, handle, n, prop, flags);
	while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_retry(claim.gpu, &tries));
	if (result == CUDA_SUCCESS)
		nvs_claim_keep_handle(&claim, *handle);
	else
		nvs_claim_drop(&claim);
	return result;
}

WRAPPER(cuMemRelease, (unsigned long long handle))
{
	uint64_t stamp;
	int result = nvs_vmm_is(handle) ? nvs_vmm_release(&handle) : NVS_VMM_DRIVER;

	if (result != NVS_VMM_DRIVER)
		return result;
	stamp = nvs_memory_stamp();
	result = CALL(cuMemRelease, handle);
	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_handle_released(handle, stamp);
	return result;
}

WRAPPER(cuMemRetainAllocationHandle, (unsigned long long *handle, void *address))
{
	int result = vmm_used() ? nvs_vmm_retain(handle, (uintptr_t)address) : NVS_VMM_DRIVER;
	struct nvs_swap_range r;

	if (result != NVS_VMM_DRIVER)
		return result;
	/* Our own chunks are none of the application's: for it this is cuMemAlloc's memory. */
	if (nvs_unlikely(nvs_swap_find((uintptr_t)address, &r)))
		return CUDA_ERROR_INVALID_VALUE;
	result = CALL(cuMemRetainAllocationHandle, handle, address);
	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_handle_retained(*handle, (uintptr_t)address);
	return result;
}

OURS(cuMemGetAllocationPropertiesFromHandle, (struct cu_alloc_full *prop, unsigned long long handle),
     (prop, handle), nvs_vmm_is(handle) ? nvs_vmm_properties(prop, handle) : NVS_VMM_DRIVER)

/* ---- sharing ---- */

OURS(cuMemExportToShareableHandle, (void *out, unsigned long long handle, int type, unsigned long long flags),
     (out, handle, type, flags), nvs_vmm_is(handle) ? nvs_vmm_share(&handle, type) : NVS_VMM_DRIVER)

WRAPPER(cuMemImportFromShareableHandle, (unsigned long long *handle, void *os, int type))
{
	int result = CALL(cuMemImportFromShareableHandle, handle, os, type);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_handle_imported(*handle);
	return result;
}

/* What is bound to a multicast object or an endpoint can be used by other GPUs and processes. */
#define SHARE_MEMORY(name, P, A) \
	OURS(name, P, A, nvs_vmm_is(memory) ? nvs_vmm_share(&memory, 0) : NVS_VMM_DRIVER)
SHARE_MEMORY(cuMulticastBindMem, (unsigned long long multicast, size_t at, unsigned long long memory, size_t offset,
				 size_t n, unsigned long long flags), (multicast, at, memory, offset, n, flags))
SHARE_MEMORY(cuMulticastBindMem_v2, (unsigned long long multicast, int dev, size_t at, unsigned long long memory,
				    size_t offset, size_t n, unsigned long long flags),
	    (multicast, dev, at, memory, offset, n, flags))
SHARE_MEMORY(cuLogicalEndpointBindMem, (uint endpoint, int dev, uint64_t at, unsigned long long memory, uint64_t offset,
				       uint64_t n, unsigned long long flags),
	    (endpoint, dev, at, memory, offset, n, flags))

#define SHARE_ADDRESS(name, P, A) \
	WRAPPER(name, P) \
	{ \
		struct nvs_swap_range r; \
		nvs_swap_pin(p, &r); \
		nvs_vmm_pin(p, n); \
		return CALL(name, NVS_SPREAD A); \
	}
SHARE_ADDRESS(cuMemGetHandleForAddressRange, (void *handle, CUdeviceptr p, size_t n, int type, unsigned long long flags),
	     (handle, p, n, type, flags))
SHARE_ADDRESS(cuMulticastBindAddr, (unsigned long long multicast, size_t at, CUdeviceptr p, size_t n,
				   unsigned long long flags), (multicast, at, p, n, flags))
SHARE_ADDRESS(cuMulticastBindAddr_v2, (unsigned long long multicast, int dev, size_t at,
				      CUdeviceptr p, size_t n, unsigned long long flags),
	     (multicast, dev, at, p, n, flags))
SHARE_ADDRESS(cuLogicalEndpointBindAddr, (uint endpoint, int dev, uint64_t at, CUdeviceptr p, uint64_t n,
					 unsigned long long flags), (endpoint, dev, at, p, n, flags))

OURS(cuIpcGetMemHandle, (struct cu_ipc_handle *handle, CUdeviceptr p), (handle, p), nvs_ipc_export(handle, p))
OURS(cuIpcOpenMemHandle, (CUdeviceptr *p, struct cu_ipc_handle handle, uint flags), (p, handle, flags),
     nvs_ipc_open(p, &handle))
OURS(cuIpcOpenMemHandle_v2, (CUdeviceptr *p, struct cu_ipc_handle handle, uint flags), (p, handle, flags),
     nvs_ipc_open(p, &handle))
OURS(cuIpcCloseMemHandle, (CUdeviceptr p), (p), nvs_ipc_close(p))

/* ---- addresses ---- */

OURS(cuMemAddressReserve, (CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags),
     (p, n, align, at, flags), nvs_counting() ? nvs_vmm_reserve(p, n, align, at, flags) : NVS_VMM_DRIVER)
OURS(cuMemAddressFree, (CUdeviceptr p, size_t n), (p, n), vmm_used() ? nvs_vmm_unreserve(p, n) : NVS_VMM_DRIVER)
OURS(cuMemSetAccess, (CUdeviceptr p, size_t n, const struct cu_access *a, size_t count), (p, n, a, count),
     vmm_used() ? nvs_vmm_set_access(p, n, a, count) : NVS_VMM_DRIVER)
OURS(cuMemGetAccess, (unsigned long long *flags, const struct cu_location *l, CUdeviceptr p), (flags, l, p),
     vmm_used() ? nvs_vmm_get_access(flags, l, p) : NVS_VMM_DRIVER)

WRAPPER(cuMemMap, (CUdeviceptr p, size_t n, size_t offset, unsigned long long handle,
		 unsigned long long flags))
{
	bool ours = vmm_used(), on = nvs_counting();
	int result = ours ? nvs_vmm_map(p, n, offset, &handle, flags) : NVS_VMM_DRIVER;
	uint32_t memory;

	if (result != NVS_VMM_DRIVER)
		return result;
	memory = on ? nvs_memory_hold(handle) : 0;
	result = CALL(cuMemMap, p, n, offset, handle, flags);
	if (on && result == CUDA_SUCCESS)
		nvs_memory_mapped(memory, p, n);
	else
		nvs_memory_unhold(memory);
	if (ours && result == CUDA_SUCCESS)
		nvs_vmm_mapped(p, n);
	return result;
}

WRAPPER(cuMemUnmap, (CUdeviceptr p, size_t n))
{
	int result = vmm_used() ? nvs_vmm_unmap(p, n) : NVS_VMM_DRIVER;

	return result != NVS_VMM_DRIVER ? result : nvs_vmm_driver_unmap(p, n);
}
