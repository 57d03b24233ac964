// SPDX-License-Identifier: Apache-2.0
/*
 * alloc.c: wrappers of what allocates and frees device memory.
 */
#include "client.h"
#include "memory.h"
#include "wrap.h"

/* ---- memory: counted ---- */

static int allocated(int result, const CUdeviceptr *p, size_t bytes)
{
	if (result == CUDA_SUCCESS && nvs_active())
		nvs_memory_add(NVS_MEMORY_POINTER, *p, bytes, nvs_channel_of_current());
	return result;
}

WATCH(cuMemAlloc, (CUdeviceptr *p, size_t n))
{
	return CALL(cuMemAlloc, p, n); /* 32-bit pointers: not counted */
}

WATCH(cuMemAlloc_v2, (CUdeviceptr *p, size_t n))
{
	return allocated(CALL(cuMemAlloc_v2, p, n), p, n);
}

WATCH(cuMemAllocPitch, (CUdeviceptr *p, size_t *pitch, size_t w, size_t h, uint element))
{
	return CALL(cuMemAllocPitch, p, pitch, w, h, element);
}

WATCH(cuMemAllocPitch_v2, (CUdeviceptr *p, size_t *pitch, size_t w, size_t h, uint element))
{
	int result = CALL(cuMemAllocPitch_v2, p, pitch, w, h, element);

	return allocated(result, p, result == CUDA_SUCCESS ? *pitch * h : 0);
}

WATCH(cuMemAllocManaged, (CUdeviceptr *p, size_t n, uint flags))
{
	return allocated(CALL(cuMemAllocManaged, p, n, flags), p, n);
}

WATCH(cuMemAllocAsync, (CUdeviceptr *p, size_t n, void *s))
{
	return allocated(CALL(cuMemAllocAsync, p, n, s), p, n);
}

WATCH(cuMemAllocAsync_ptsz, (CUdeviceptr *p, size_t n, void *s))
{
	return allocated(CALL(cuMemAllocAsync_ptsz, p, n, s), p, n);
}

WATCH(cuMemAllocFromPoolAsync, (CUdeviceptr *p, size_t n, void *pool, void *s))
{
	return allocated(CALL(cuMemAllocFromPoolAsync, p, n, pool, s), p, n);
}

WATCH(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *p, size_t n, void *pool, void *s))
{
	return allocated(CALL(cuMemAllocFromPoolAsync_ptsz, p, n, pool, s), p, n);
}

/* Counted off first: afterwards another thread may own the same address. */
static void freed(enum nvs_memory_kind kind, uint64_t key)
{
	if (nvs_active())
		nvs_memory_remove(kind, key);
}

WATCH(cuMemFree, (CUdeviceptr p))
{
	return CALL(cuMemFree, p);
}

WATCH(cuMemFree_v2, (CUdeviceptr p))
{
	freed(NVS_MEMORY_POINTER, p);
	return CALL(cuMemFree_v2, p);
}

WATCH(cuMemFreeAsync, (CUdeviceptr p, void *s))
{
	freed(NVS_MEMORY_POINTER, p);
	return CALL(cuMemFreeAsync, p, s);
}

WATCH(cuMemFreeAsync_ptsz, (CUdeviceptr p, void *s))
{
	freed(NVS_MEMORY_POINTER, p);
	return CALL(cuMemFreeAsync_ptsz, p, s);
}

WATCH(cuMemCreate, (unsigned long long *handle, size_t n, const struct cu_alloc_prop *prop,
		    unsigned long long flags))
{
	int result = CALL(cuMemCreate, handle, n, prop, flags);

	if (result == CUDA_SUCCESS && nvs_active() &&
	    prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
		nvs_memory_add(NVS_MEMORY_HANDLE, *handle, n, nvs_client_channel(prop->location.id));
	return result;
}

WATCH(cuMemRelease, (unsigned long long handle))
{
	freed(NVS_MEMORY_HANDLE, handle);
	return CALL(cuMemRelease, handle);
}
