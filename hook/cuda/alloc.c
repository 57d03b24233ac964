// SPDX-License-Identifier: Apache-2.0
/*
 * alloc.c: wrappers of what allocates and frees device memory. An allocation never waits at the
 * gate. Memory that another process has allocated, host memory and sparse arrays are not charged.
 */
#include "wrap.h"

NVS_EXPORT int cuMemFree_v2(CUdeviceptr p); /* a wrapper below; only its type is needed */

/* ---- counted and limited ---- */

bool nvs_allocation_begin(struct nvs_allocation *a, uint64_t bytes)
{
	*a = (struct nvs_allocation){ .ctx = nvs_counting() ? nvs_current_context() : NULL };
	return nvs_claim(&a->claim, nvs_gpu_here(a->ctx), bytes);
}

bool nvs_allocation_again(struct nvs_allocation *a, int result)
{
	return nvs_unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && nvs_swap_retry(a->claim.gpu, &a->tries);
}

int nvs_allocation_end(struct nvs_allocation *a, int result, enum nvs_memory_kind kind, const void *key, uint64_t bytes)
{
	uint64_t at = result == CUDA_SUCCESS ? *(const uint64_t *)key : 0;

	bytes = bytes ? bytes : a->claim.bytes;
	if (result == CUDA_SUCCESS && bytes > a->claim.bytes && !nvs_claim_more(&a->claim, bytes) &&
	    CALL(cuMemFree_v2, at) == CUDA_SUCCESS)
		result = CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS)
		nvs_claim_keep(&a->claim, kind, at, bytes, a->ctx);
	else
		nvs_claim_drop(&a->claim);
	return result;
}

/* ---- where an allocation goes ---- */

static struct nvs_gpu *gpu_of_stream(void *key)
{
	struct nvs_stream *s;

	if (atomic_load_explicit(&nvs_gate.single, memory_order_relaxed))
		return nvs_gpus;
	s = nvs_stream_here(key);
	return s ? s->gpu : NULL;
}

/* What is called on a capturing stream happens when the graph runs. */
static bool recorded(void *key)
{
	return atomic_load_explicit(&nvs_gate.captures, memory_order_acquire) && nvs_capturing(key);
}

/* ---- pointers ---- */

NVS_EXPORT int cuMemAlloc_v2(CUdeviceptr *p, size_t n);
NVS_EXPORT int cuMemAllocManaged(CUdeviceptr *p, size_t n, uint flags);

/*
 * While streams capture, the driver may refuse to allocate and to free, and end the capture over it.
 * It is asked for next to nothing to find out.
 */
static int allowed_in_capture(void)
{
	CUdeviceptr p = 0;
	int result;

	if (!atomic_load_explicit(&nvs_gate.captures, memory_order_acquire))
		return CUDA_SUCCESS;
	result = CALL(cuMemAlloc_v2, &p, 1);
	return result == CUDA_SUCCESS ? CALL(cuMemFree_v2, p) : result;
}

NVS_EXPORT int cuDevicePrimaryCtxRetain(void **ctx, int dev);
NVS_EXPORT int cuDevicePrimaryCtxRelease_v2(int dev);

/* The context that has what is allocated while ctx is current: not a green one, but its primary one. */
static void *owner_in(void *ctx, struct nvs_gpu *gpu)
{
	void *primary = ctx;

	if (nvs_context_look(ctx).green &&
	    CALL(cuDevicePrimaryCtxRetain, &primary, gpu->device.dev) == CUDA_SUCCESS)
		CALL(cuDevicePrimaryCtxRelease_v2, gpu->device.dev); /* the green one holds it */
	return primary;
}

/* Allocates where memory is not simply the driver's. Returns -1: it is. */
static int alloc_elsewhere(size_t n, CUdeviceptr *p)
{
	struct nvs_gpu *gpu;
	void *ctx;
	int result;
	bool on;

	if (!n || !p || !nvs_counting())
		return -1;
	ctx = nvs_current_context();
	gpu = nvs_gpu_here(ctx);
	on = nvs_swap_on(gpu); /* first: it waits for the page */
	if (nvs_swap_managed(gpu))
		return cuMemAllocManaged(p, n, CU_MEM_ATTACH_GLOBAL);
	if (!on)
		return -1;
	result = allowed_in_capture();
	return result == CUDA_SUCCESS ? nvs_swap_alloc(gpu, owner_in(ctx, gpu), n, p) : result;
}

#define PITCH 512u /* what the driver rounds a row up to */

static int alloc_pitch_elsewhere(CUdeviceptr *p, size_t *pitch, size_t w, size_t h, uint element)
{
	size_t row = (w + PITCH - 1) / PITCH * PITCH;
	int result;

	if (!pitch || !w || !h || row < w || (element != 4 && element != 8 && element != 16))
		return -1; /* the driver knows how to refuse it */
	result = alloc_elsewhere(nvs_times(row, h), p);
	if (result == CUDA_SUCCESS)
		*pitch = row;
	return result;
}

WRAPPER(cuMemAlloc_v2, (CUdeviceptr *p, size_t n))
{
	int result = alloc_elsewhere(n, p);

	return result >= 0 ? result : ALLOCATING(n, NVS_MEMORY_POINTER, p, n, CALL(cuMemAlloc_v2, p, n));
}

WRAPPER(cuMemAllocPitch_v2, (CUdeviceptr *p, size_t *pitch, size_t w, size_t h, uint element))
{
	int result = alloc_pitch_elsewhere(p, pitch, w, h, element);

	return result >= 0 ? result
			   : ALLOCATING(nvs_times(w, h), NVS_MEMORY_POINTER, p, nvs_times(*pitch, h),
					CALL(cuMemAllocPitch_v2, p, pitch, w, h, element));
}

WRAPPER(cuMemAllocManaged, (CUdeviceptr *p, size_t n, uint flags))
{
	if (nvs_swap_apart(nvs_gpu_here(nvs_current_context())))
		return CALL(cuMemAllocManaged, p, n, flags);
	return ALLOCATING(n, NVS_MEMORY_POINTER, p, n, CALL(cuMemAllocManaged, p, n, flags));
}

WRAPPER(cuMemFree_v2, (CUdeviceptr p))
{
	uint64_t stamp = nvs_memory_stamp();
	struct nvs_swap_range r;
	int result;

	if (nvs_unlikely(nvs_swap_find(p, &r))) {
		bool capturing = atomic_load_explicit(&nvs_gate.captures, memory_order_acquire);

		result = capturing ? allowed_in_capture() : CUDA_SUCCESS;
		return result == CUDA_SUCCESS ? nvs_swap_free(p, !capturing) : result;
	}
	result = CALL(cuMemFree_v2, p);
	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_remove(NVS_MEMORY_POINTER, p, stamp);
	return result;
}

/* ---- stream-ordered ---- */

static atomic_uint current_changes;

static void *current_pool(struct nvs_gpu *gpu)
{
	void *pool = atomic_load_explicit(&gpu->pool, memory_order_acquire);
	unsigned changes = atomic_load(&current_changes);

	if (nvs_likely(pool != NULL))
		return pool;
	nvs_memory_driver.device_mem_pool(&pool, gpu->device.dev);
	atomic_store(&gpu->pool, pool);
	if (atomic_load(&current_changes) != changes)
		atomic_store(&gpu->pool, NULL);
	return pool;
}

/* Another pool may be the current one of any device. */
static int current_changed(int result)
{
	atomic_fetch_add(&current_changes, 1);
	NVS_FOR_EACH_GPU(gpu)
		atomic_store(&gpu->pool, NULL);
	return result;
}

WRAPPER(cuDeviceSetMemPool, (int dev, void *pool))
{
	return current_changed(CALL(cuDeviceSetMemPool, dev, pool));
}

WRAPPER(cuMemSetMemPool, (struct cu_location *at, int type, void *pool))
{
	return current_changed(CALL(cuMemSetMemPool, at, type, pool));
}

/* Allocates from memory that moves. -1: it comes from the driver's pool: not swapped, of a graph, or shared. */
static int movable(struct nvs_gpu *gpu, void *pool, size_t n, void *key, CUdeviceptr *p)
{
	if (recorded(key) || nvs_memory_pool_shared((uintptr_t)pool))
		return -1;
	return nvs_swap_alloc_async(gpu, pool, key, n, p);
}

struct async {
	struct nvs_gpu *gpu; /* NULL: the driver alone knows of it */
	void *pool;
	struct nvs_claim claim;
	bool graph, unlisted;
	unsigned tries;
};

/* -1: the driver is to be asked. */
static inline int async_begin(struct async *a, size_t n, void *key, CUdeviceptr *p)
{
	int result = nvs_swap_on(a->gpu) ? movable(a->gpu, a->pool, n, key, p) : -1;

	if (!a->gpu || result >= 0)
		return result;
	a->graph = recorded(key);
	a->unlisted = !a->graph && nvs_memory_pool_unlisted(a->gpu, (uintptr_t)a->pool);
	if (nvs_likely(a->unlisted) || (a->graph ? nvs_graph_may_have(a->gpu, n)
						 : nvs_claim_in_pool(&a->claim, a->gpu, (uintptr_t)a->pool, n)))
		return -1;
	return CUDA_ERROR_OUT_OF_MEMORY;
}

static inline bool async_again(struct async *a, int result)
{
	return nvs_unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && !a->graph && nvs_swap_retry(a->claim.gpu, &a->tries);
}

static inline int async_end(struct async *a, int result, const CUdeviceptr *p, size_t n)
{
	bool tight = true;

	if (nvs_likely(a->unlisted)) {
		nvs_memory_pools_changed(NVS_POOLS_GREW);
		return result;
	}
	if (result != CUDA_SUCCESS)
		nvs_claim_drop(&a->claim);
	else /* a pool's memory outlives contexts */
		tight = nvs_claim_keep(&a->claim, NVS_MEMORY_POINTER, *p, n, NULL);
	if (nvs_unlikely(atomic_load_explicit(&nvs_memory_pools_keep, memory_order_relaxed)) && a->claim.gpu)
		nvs_memory_pool_grew(a->claim.gpu, a->claim.pool, tight);
	return result;
}

#define ASYNC(name, P, A, key, where, pool_of) \
	WRAPPER(name, P) \
	{ \
		struct nvs_gpu *gpu = nvs_counting() ? where : NULL; \
		struct async a = { .gpu = gpu, .pool = gpu ? pool_of : NULL }; \
		int result = async_begin(&a, n, key, p); \
		if (result >= 0) \
			return result; \
		do \
			result = CALL(name, NVS_SPREAD A); \
		while (async_again(&a, result)); \
		return async_end(&a, result, p, n); \
	}
static struct nvs_gpu *gpu_of_pool(void *pool, void *key)
{
	struct nvs_gpu *gpu = gpu_of_stream(key);

	if (gpu && atomic_load_explicit(&gpu->unlisted, memory_order_relaxed) == (uintptr_t)pool)
		return gpu; /* as before */
	nvs_memory_pool_find((uintptr_t)pool, &gpu);
	return gpu;
}

#define FROM_CURRENT(name, P, A, key) ASYNC(name, P, A, key, gpu_of_stream(key), current_pool(gpu))
#define FROM_POOL(name, P, A, key) ASYNC(name, P, A, key, gpu_of_pool(pool, key), pool)
NVS_SZ(FROM_CURRENT, cuMemAllocAsync, (CUdeviceptr *p, size_t n, void *s), (p, n, s), s)
NVS_SZ(FROM_POOL, cuMemAllocFromPoolAsync, (CUdeviceptr *p, size_t n, void *pool, void *s), (p, n, pool, s), s)

#define FREE_ASYNC(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		uint64_t stamp = nvs_memory_stamp(); \
		bool graph = nvs_counting() && recorded(key); \
		int result = graph ? -1 : nvs_swap_free_async(p, key); \
		if (result >= 0) \
			return result; \
		result = CALL(name, p, s); \
		if (result == CUDA_SUCCESS && nvs_counting() && !graph) \
			nvs_memory_remove(NVS_MEMORY_POINTER, p, stamp); \
		return result; \
	}
NVS_SZ(FREE_ASYNC, cuMemFreeAsync, (CUdeviceptr p, void *s), (p, s), s)

/* ---- pools: where each lies, and what it keeps ---- */

static int pool_at(int result, void **pool, struct nvs_gpu *gpu)
{
	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_pool((uintptr_t)*pool, gpu);
	return result;
}

WRAPPER(cuMemPoolCreate, (void **pool, const struct cu_pool_props *props))
{
	uint64_t stamp = nvs_memory_stamp();
	int result = CALL(cuMemPoolCreate, pool, props);

	if (result == CUDA_SUCCESS && nvs_counting()) /* the last pool with this handle went past the shim, or goes */
		nvs_memory_remove(NVS_MEMORY_POOL, (uintptr_t)*pool, stamp);
	result = pool_at(result, pool, result == CUDA_SUCCESS ? nvs_gpu_of_location(&props->location) : NULL);
	if (result == CUDA_SUCCESS && props->handle_types)
		nvs_memory_pool_share((uintptr_t)*pool);
	return result;
}

/* Devices get access to all that is in the pool. */
WRAPPER(cuMemPoolSetAccess, (void *pool, const struct cu_access *list, size_t count))
{
	if (nvs_counting())
		nvs_memory_pool_share((uintptr_t)pool);
	return CALL(cuMemPoolSetAccess, pool, list, count);
}

/* A pool that is known may be another's, imported. */
static int pool_found_at(int result, void **pool, struct nvs_gpu *gpu)
{
	struct nvs_gpu *known;
	bool found = result == CUDA_SUCCESS && nvs_counting() && nvs_memory_pool_find((uintptr_t)*pool, &known);

	return found ? result : pool_at(result, pool, gpu);
}

#define POOL_AT(name, P, A, at, gpu) \
	WRAPPER(name, P) \
	{ \
		int result = CALL(name, NVS_SPREAD A); \
		return result == CUDA_SUCCESS ? at(result, pool, gpu) : result; \
	}
POOL_AT(cuMemPoolImportFromShareableHandle, (void **pool, void *os, int type, unsigned long long flags),
	(pool, os, type, flags), pool_at, NULL)
POOL_AT(cuDeviceGetDefaultMemPool, (void **pool, int dev), (pool, dev), pool_at, nvs_gpu_of_device(dev))
POOL_AT(cuDeviceGetMemPool, (void **pool, int dev), (pool, dev), pool_found_at, nvs_gpu_of_device(dev))
POOL_AT(cuMemGetDefaultMemPool, (void **pool, const struct cu_location *where, int type), (pool, where, type), pool_at,
	nvs_gpu_of_location(where))
POOL_AT(cuMemGetMemPool, (void **pool, struct cu_location *where, int type), (pool, where, type), pool_found_at,
	nvs_gpu_of_location(where))

WRAPPER(cuMemPoolDestroy, (void *pool))
{
	uint64_t stamp = nvs_memory_stamp();
	int result;

	if (nvs_counting())
		nvs_memory_pool_going((uintptr_t)pool, true);
	result = CALL(cuMemPoolDestroy, pool);
	if (!nvs_counting())
		return result;
	if (result != CUDA_SUCCESS) {
		nvs_memory_pool_going((uintptr_t)pool, false);
	} else {
		nvs_memory_remove(NVS_MEMORY_POOL, (uintptr_t)pool, stamp);
		nvs_memory_remove(NVS_MEMORY_SHARED, (uintptr_t)pool, stamp);
		nvs_swap_pool_destroyed(pool);
		current_changed(result);
	}
	return result;
}

WRAPPER(cuMemPoolTrimTo, (void *pool, size_t keep))
{
	int result = CALL(cuMemPoolTrimTo, pool, keep);

	if (result == CUDA_SUCCESS) {
		nvs_swap_pool_trim(pool, keep);
		if (nvs_counting())
			nvs_memory_pool_recount((uintptr_t)pool);
	}
	return result;
}

WRAPPER(cuMemPoolSetAttribute, (void *pool, int attribute, void *value))
{
	int result = CALL(cuMemPoolSetAttribute, pool, attribute, value);
	struct nvs_gpu *gpu;

	if (result == CUDA_SUCCESS && attribute >= CU_POOL_RELEASE_THRESHOLD &&
	    attribute <= CU_POOL_USED_HIGH)
		nvs_swap_pool_set(pool, attribute, *(uint64_t *)value);
	if (result == CUDA_SUCCESS && attribute == CU_POOL_RELEASE_THRESHOLD && nvs_counting() &&
	    nvs_memory_pool_find((uintptr_t)pool, &gpu))
		nvs_memory_pool_keeps((uintptr_t)pool, gpu, *(uint64_t *)value);
	return result;
}

WRAPPER(cuMemPoolGetAttribute, (void *pool, int attribute, void *value))
{
	int result = CALL(cuMemPoolGetAttribute, pool, attribute, value);

	if (result == CUDA_SUCCESS && attribute >= CU_POOL_RESERVED_CURRENT &&
	    attribute <= CU_POOL_USED_HIGH)
		nvs_swap_pool_tell(pool, attribute, value);
	return result;
}
