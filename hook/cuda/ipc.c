// SPDX-License-Identifier: Apache-2.0
/*
 * ipc.c: wrappers of what shares device memory with other processes and devices.
 */
#include "pointer_abi.h"
#include "swap.h"
#include "vmm.h"
#include "wrap.h"

WRAPPER(cuIpcGetMemHandle, (struct cu_ipc_handle *handle, CUdeviceptr p))
{
	int result = nvs_ipc_export(handle, p);

	return result >= 0 ? result : CALL(cuIpcGetMemHandle, handle, p);
}

#define OPEN(name) \
	WRAPPER(name, (CUdeviceptr *p, struct cu_ipc_handle handle, uint flags)) \
	{ \
		int result = nvs_ipc_open(p, &handle); \
		return result >= 0 ? result : CALL(name, p, handle, flags); \
	}
OPEN(cuIpcOpenMemHandle)
OPEN(cuIpcOpenMemHandle_v2)

WRAPPER(cuIpcCloseMemHandle, (CUdeviceptr p))
{
	int result = nvs_ipc_close(p);

	return result >= 0 ? result : CALL(cuIpcCloseMemHandle, p);
}

/* ---- other ways to share: the memory stays, the driver does the rest ---- */

WRAPPER(cuMemGetHandleForAddressRange, (void *handle, CUdeviceptr p, size_t n, int type,
				      unsigned long long flags))
{
	struct nvs_swap_range r;

	nvs_swap_pin(p, &r);
	nvs_vmm_pin(p, n);
	return CALL(cuMemGetHandleForAddressRange, handle, p, n, type, flags);
}

/* Who sets SYNC_MEMOPS hands the address to another device next (GPUDirect RDMA). */
WRAPPER(cuPointerSetAttribute, (const void *value, int what, CUdeviceptr p))
{
	struct nvs_swap_range r;

	if (what == NVS_POINTER_SYNC_MEMOPS) {
		nvs_swap_pin(p, &r);
		nvs_vmm_pin(p, 1);
	}
	return CALL(cuPointerSetAttribute, value, what, p);
}
