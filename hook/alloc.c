// SPDX-License-Identifier: Apache-2.0
/*
 * alloc.c: wrappers of what allocates and frees device memory. An allocation
 * never waits at the gate.
 *
 * Not here, because nothing is charged: memory that another process has
 * allocated (cuIpcOpenMemHandle, cuMemPoolImportPointer, external memory), host
 * memory, sparse arrays and what is mapped into them.
 */
#include "memory.h"
#include "swap.h"
#include "wrap.h"

/* ---- where an allocation goes ---- */

static void *current_context(void)
{
	void *ctx = NULL;

	if (nvs_driver.ctx_get_current)
		nvs_driver.ctx_get_current(&ctx);
	return ctx;
}

/* Channel of the current context. Without one the driver refuses anyway. */
static int channel_here(const void *ctx)
{
	if (!ctx)
		return -1;
	return atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)
		? 0 : nvs_channel_of_current();
}

static int channel_of_stream(void *key)
{
	struct nvs_thread *t;
	struct nvs_stream *s;

	if (atomic_load_explicit(&nvs_gate.single, memory_order_relaxed))
		return 0;
	t = nvs_self ? nvs_self : nvs_thread_register();
	s = t ? nvs_stream_find(t, key) : NULL;
	return s ? (int)s->channel : -1;
}

static int channel_of_location(const struct cu_location *l)
{
	return l->type == CU_MEM_LOCATION_TYPE_DEVICE ? nvs_client_channel(l->id) : -1;
}

/* What is called on a capturing stream happens when the graph runs. */
static bool recorded(void *key)
{
	return atomic_load_explicit(&nvs_gate.captures, memory_order_acquire) && nvs_capturing(key);
}

/* ---- pointers ---- */

NVS_EXPORT int cuMemFree_v2(CUdeviceptr p); /* below; only its type is needed here */
NVS_EXPORT int cuMemAlloc_v2(CUdeviceptr *p, size_t n);
NVS_EXPORT int cuMemAllocManaged(CUdeviceptr *p, size_t n, uint flags);

/*
 * While streams capture, the driver may refuse to allocate and to free, and end
 * the capture over it. It is asked for next to nothing to find out. The free,
 * like each of the driver's, waits until the GPU is done.
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

/* Allocates where memory is not simply the driver's. Returns -1: it is. */
static int elsewhere(void *ctx, size_t n, CUdeviceptr *p)
{
	int channel = channel_here(ctx), result;

	if (!n || !p)
		return -1;
	if (nvs_swap_managed(channel))
		return cuMemAllocManaged(p, n, CU_MEM_ATTACH_GLOBAL);
	if (!nvs_swap_on(channel))
		return -1;
	result = allowed_in_capture();
	return result == CUDA_SUCCESS ? nvs_swap_alloc(channel, ctx, n, p) : result;
}

#define PITCH 512u /* what the driver rounds a row up to */

static int elsewhere_pitch(void *ctx, CUdeviceptr *p, size_t *pitch, size_t w, size_t h, uint element)
{
	size_t row = (w + PITCH - 1) / PITCH * PITCH;
	int result;

	if (!pitch || !w || !h || row < w || (element != 4 && element != 8 && element != 16))
		return -1; /* the driver knows how to refuse it */
	result = elsewhere(ctx, nvs_times(row, h), p);
	if (result == CUDA_SUCCESS)
		*pitch = row;
	return result;
}

#define NOWHERE_ELSE -1

/*
 * An allocator of the current context: `estimate` bytes at least, `size` once
 * the driver has returned. What turns out to be too large with its padding is
 * given back.
 */
#define ALLOCATOR(name, kind, P, A, estimate, key, size, other) \
	WATCH(name, P) \
	{ \
		struct nvs_claim claim; \
		unsigned tries = 0; \
		void *ctx; \
		int result; \
		if (!nvs_counting()) \
			return CALL(name, NVS_SPREAD A); \
		ctx = current_context(); \
		result = other; \
		if (result >= 0) \
			return result; \
		if (!nvs_claim(&claim, channel_here(ctx), estimate)) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		do \
			result = CALL(name, NVS_SPREAD A); \
		while (nvs_unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && \
		       nvs_swap_retry(claim.channel, &tries)); \
		if (result == CUDA_SUCCESS && (size) > claim.bytes && \
		    !nvs_claim_more(&claim, size) && CALL(cuMemFree_v2, key) == CUDA_SUCCESS) \
			result = CUDA_ERROR_OUT_OF_MEMORY; \
		if (result == CUDA_SUCCESS) \
			nvs_claim_keep(&claim, kind, key, size, ctx); \
		else \
			nvs_claim_drop(&claim); \
		return result; \
	}
#define NVS_SPREAD(...) __VA_ARGS__

/* The pre-3.2 functions have 32-bit addresses and sizes. */
ALLOCATOR(cuMemAlloc, NVS_MEMORY_POINTER, (uint *p, uint n), (p, n), n, *p, n, NOWHERE_ELSE)
ALLOCATOR(cuMemAlloc_v2, NVS_MEMORY_POINTER, (CUdeviceptr *p, size_t n), (p, n), n, *p, n,
	  elsewhere(ctx, n, p))
ALLOCATOR(cuMemAllocPitch, NVS_MEMORY_POINTER,
	  (uint *p, uint *pitch, uint w, uint h, uint element), (p, pitch, w, h, element),
	  (uint64_t)w * h, *p, (uint64_t)*pitch * h, NOWHERE_ELSE)
ALLOCATOR(cuMemAllocPitch_v2, NVS_MEMORY_POINTER,
	  (CUdeviceptr *p, size_t *pitch, size_t w, size_t h, uint element),
	  (p, pitch, w, h, element), nvs_times(w, h), *p, nvs_times(*pitch, h),
	  elsewhere_pitch(ctx, p, pitch, w, h, element))
ALLOCATOR(cuMemAllocManaged, NVS_MEMORY_POINTER, (CUdeviceptr *p, size_t n, uint flags),
	  (p, n, flags), n, *p, n, NOWHERE_ELSE)

/* A free that fails changes nothing; see memory.h. */
#define FREE(name, kind, P, A, key) \
	WATCH(name, P) \
	{ \
		uint64_t stamp = nvs_memory_stamp(); \
		int result = CALL(name, NVS_SPREAD A); \
		if (result == CUDA_SUCCESS && nvs_counting()) \
			nvs_memory_remove(kind, (uintptr_t)(key), stamp); \
		return result; \
	}

FREE(cuMemFree, NVS_MEMORY_POINTER, (uint p), (p), p)

WATCH(cuMemFree_v2, (CUdeviceptr p))
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

/* Whether a graph may have so much more memory; it is charged once it exists. */
static bool graph_may_have(int channel, uint64_t bytes)
{
	struct nvs_claim claim;

	if (channel < 0)
		return true;
	if (!nvs_claim(&claim, channel, bytes))
		return false;
	nvs_claim_drop(&claim);
	nvs_memory_graph_used(channel);
	return true;
}

/* Returns what the driver's function is still to be asked for: OOM or success. */
static int begin_async(struct nvs_claim *claim, bool *graph, int channel, size_t n, void *key)
{
	claim->channel = -1;
	*graph = recorded(key);
	if (*graph ? graph_may_have(channel, n) : nvs_claim(claim, channel, n))
		return CUDA_SUCCESS;
	return CUDA_ERROR_OUT_OF_MEMORY;
}

#define ASYNC(name, P, A, key, where) \
	WATCH(name, P) \
	{ \
		struct nvs_claim claim; \
		unsigned tries = 0; \
		bool graph; \
		int result; \
		if (!nvs_counting()) \
			return CALL(name, NVS_SPREAD A); \
		result = begin_async(&claim, &graph, where, n, key); \
		if (result != CUDA_SUCCESS) \
			return result; \
		do \
			result = CALL(name, NVS_SPREAD A); \
		while (nvs_unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && !graph && \
		       nvs_swap_retry(claim.channel, &tries)); \
		if (result != CUDA_SUCCESS) \
			nvs_claim_drop(&claim); \
		else /* a pool's memory outlives contexts */ \
			nvs_claim_keep(&claim, NVS_MEMORY_POINTER, *p, n, NULL); \
		return result; \
	}
#define ASYNC_SZ(name, P, A, channel_of) \
	ASYNC(name, P, A, NVS_KEY_LEGACY(s), channel_of(NVS_KEY_LEGACY(s))) \
	ASYNC(name##_ptsz, P, A, NVS_KEY_THREAD(s), channel_of(NVS_KEY_THREAD(s)))

static int channel_of_pool(void *pool, void *key)
{
	int channel;

	return nvs_memory_pool_find((uintptr_t)pool, &channel) ? channel : channel_of_stream(key);
}

#define FROM_POOL(key) channel_of_pool(pool, key)
ASYNC_SZ(cuMemAllocAsync, (CUdeviceptr *p, size_t n, void *s), (p, n, s), channel_of_stream)
ASYNC_SZ(cuMemAllocFromPoolAsync, (CUdeviceptr *p, size_t n, void *pool, void *s), (p, n, pool, s),
	 FROM_POOL)

#define FREE_ASYNC(name, key) \
	WATCH(name, (CUdeviceptr p, void *s)) \
	{ \
		uint64_t stamp = nvs_memory_stamp(); \
		bool graph = nvs_counting() && recorded(key); \
		int result = CALL(name, p, s); \
		if (result == CUDA_SUCCESS && nvs_counting() && !graph) \
			nvs_memory_remove(NVS_MEMORY_POINTER, p, stamp); \
		return result; \
	}
FREE_ASYNC(cuMemFreeAsync, NVS_KEY_LEGACY(s))
FREE_ASYNC(cuMemFreeAsync_ptsz, NVS_KEY_THREAD(s))

/* ---- pools: where each lies ---- */

static int pool_at(int result, void **pool, int channel)
{
	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_pool((uintptr_t)*pool, channel);
	return result;
}

WATCH(cuMemPoolCreate, (void **pool, const struct cu_pool_props *props))
{
	int result = CALL(cuMemPoolCreate, pool, props);

	return pool_at(result, pool, result == CUDA_SUCCESS ? channel_of_location(&props->location) : -1);
}

WATCH(cuMemPoolImportFromShareableHandle, (void **pool, void *os, int type,
					   unsigned long long flags))
{
	return pool_at(CALL(cuMemPoolImportFromShareableHandle, pool, os, type, flags), pool, -1);
}

WATCH(cuDeviceGetDefaultMemPool, (void **pool, int dev))
{
	return pool_at(CALL(cuDeviceGetDefaultMemPool, pool, dev), pool, nvs_client_channel(dev));
}

WATCH(cuMemGetDefaultMemPool, (void **pool, const struct cu_location *at, int type))
{
	int result = CALL(cuMemGetDefaultMemPool, pool, at, type);

	return pool_at(result, pool, result == CUDA_SUCCESS ? channel_of_location(at) : -1);
}

FREE(cuMemPoolDestroy, NVS_MEMORY_POOL, (void *pool), (pool), pool)

/* ---- arrays ---- */

enum { OLD_2D, OLD_3D, NEW_2D, NEW_3D };

/* The four descriptors as one. Arrays of these flags get no memory of their own. */
static bool read_descriptor(int version, const void *desc, struct cu_array3d *d)
{
	if (!desc)
		return false;
	if (version == NEW_3D) {
		*d = *(const struct cu_array3d *)desc;
	} else if (version == NEW_2D) {
		const struct cu_array *a = desc;

		*d = (struct cu_array3d){ a->width, a->height, 0, a->format, a->channels, 0 };
	} else if (version == OLD_3D) {
		const struct cu_array3d_v1 *a = desc;

		*d = (struct cu_array3d){ a->width, a->height, a->depth, a->format, a->channels,
					  a->flags };
	} else {
		const struct cu_array_v1 *a = desc;

		*d = (struct cu_array3d){ a->width, a->height, 0, a->format, a->channels, 0 };
	}
	return !(d->flags & (CU_ARRAY3D_SPARSE | CU_ARRAY3D_DEFERRED_MAPPING));
}

/* Bits of an element; block-compressed and planar formats: of a pixel, rounded up. */
static uint bits_of(uint format, uint channels)
{
	switch (format) {
	case 0x01: case 0x08: /* 8-bit integers */
		return 8 * channels;
	case 0x02: case 0x09: case 0x10: /* 16-bit integers, half */
		return 16 * channels;
	case 0x03: case 0x0a: case 0x20: /* 32-bit integers, float */
		return 32 * channels;
	case 0x91: case 0x92: case 0x97: case 0x98: /* BC1, BC4 */
		return 4;
	case 0x93: case 0x94: case 0x95: case 0x96: /* BC2, BC3 */
	case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e: /* BC5 to BC7 */
		return 8;
	case 0xc0: case 0xc6:
		return 8;
	case 0xc1: case 0xc3: case 0xc7: case 0xc9:
		return 16;
	case 0xc2: case 0xc4: case 0xc8: case 0xca: case 0x50:
		return 32;
	case 0xc5: case 0xcb:
		return 64;
	case 0xb0: /* NV12 */
		return 12;
	case 0xa2: case 0xa5: /* NV16, YUY2 */
		return 16;
	case 0x9f: case 0xa1: case 0xb2: case 0xb4: /* P010, P016, 4:4:4 of 8 bits */
		return 24;
	case 0xa3: case 0xa4: case 0xa6: case 0xa7: case 0xa8: case 0xa9:
		return 32;
	default:
		return 8 * channels;
	}
}

/* What the elements take, at least. */
static uint64_t elements_bytes(const struct cu_array3d *d, uint levels)
{
	size_t w = d->width, h = d->height ? d->height : 1, z = d->depth ? d->depth : 1;
	uint64_t sum = 0;

	for (uint l = 0; l < levels && l < 32; l++) {
		sum += nvs_times(nvs_times(nvs_times(w, h), z), bits_of(d->format, d->channels)) / 8;
		w = w > 1 ? w / 2 : 1;
		h = h > 1 ? h / 2 : 1;
		if (!(d->flags & CU_ARRAY3D_LAYERED))
			z = z > 1 ? z / 2 : 1;
	}
	return sum;
}

FREE(cuArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)
FREE(cuMipmappedArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)

/* Wrappers below; only their types are needed here. */
NVS_EXPORT int cuArray3DCreate_v2(void **array, const void *desc);
NVS_EXPORT int cuMipmappedArrayCreate(void **array, const void *desc, uint levels);

/*
 * What an array takes with its layout's padding. The driver tells for arrays of
 * deferred mapping only, so one is made just like it: that takes no memory.
 */
static uint64_t array_bytes(const struct cu_array3d *d, uint levels, bool mipmapped, int channel)
{
	int dev = channel >= 0 ? nvs_client_device((unsigned)channel) : 0, known = -1;
	uint64_t estimate = elements_bytes(d, levels);
	struct cu_array_requirements r = { 0 };
	struct cu_array3d twin = *d;
	void *a = NULL;

	twin.flags |= CU_ARRAY3D_DEFERRED_MAPPING;
	if (channel < 0) {
		return estimate;
	} else if (mipmapped) {
		if (nvs_driver.mipmap_requirements &&
		    CALL(cuMipmappedArrayCreate, &a, &twin, levels) == CUDA_SUCCESS) {
			known = nvs_driver.mipmap_requirements(&r, a, dev);
			CALL(cuMipmappedArrayDestroy, a);
		}
	} else if (nvs_driver.array_requirements &&
		   CALL(cuArray3DCreate_v2, &a, &twin) == CUDA_SUCCESS) {
		known = nvs_driver.array_requirements(&r, a, dev);
		CALL(cuArrayDestroy, a);
	}
	return known == CUDA_SUCCESS && r.size > estimate ? r.size : estimate;
}

#define ARRAY(name, P, A, version, levels, mipmapped) \
	WATCH(name, P) \
	{ \
		struct cu_array3d d; \
		struct nvs_claim claim; \
		unsigned tries = 0; \
		int channel, result; \
		void *ctx; \
		if (!nvs_counting() || !read_descriptor(version, desc, &d)) \
			return CALL(name, NVS_SPREAD A); \
		ctx = current_context(); \
		channel = channel_here(ctx); \
		if (!nvs_claim(&claim, channel, array_bytes(&d, levels, mipmapped, channel))) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		do \
			result = CALL(name, NVS_SPREAD A); \
		while (nvs_unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && \
		       nvs_swap_retry(claim.channel, &tries)); \
		if (result == CUDA_SUCCESS) \
			nvs_claim_keep(&claim, NVS_MEMORY_ARRAY, (uintptr_t)*array, claim.bytes, \
				       ctx); \
		else \
			nvs_claim_drop(&claim); \
		return result; \
	}

ARRAY(cuArrayCreate, (void **array, const void *desc), (array, desc), OLD_2D, 1, false)
ARRAY(cuArrayCreate_v2, (void **array, const void *desc), (array, desc), NEW_2D, 1, false)
ARRAY(cuArray3DCreate, (void **array, const void *desc), (array, desc), OLD_3D, 1, false)
ARRAY(cuArray3DCreate_v2, (void **array, const void *desc), (array, desc), NEW_3D, 1, false)
ARRAY(cuMipmappedArrayCreate, (void **array, const void *desc, uint levels), (array, desc, levels),
      NEW_3D, levels, true)

/* ---- VMM ---- */

WATCH(cuMemCreate, (unsigned long long *handle, size_t n, const struct cu_alloc_prop *prop,
		    unsigned long long flags))
{
	struct nvs_claim claim;
	unsigned tries = 0;
	int result;

	if (!nvs_counting() || !prop)
		return CALL(cuMemCreate, handle, n, prop, flags);
	if (!nvs_claim(&claim, channel_of_location(&prop->location), n))
		return CUDA_ERROR_OUT_OF_MEMORY;
	do
		result = CALL(cuMemCreate, handle, n, prop, flags);
	while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_retry(claim.channel, &tries));
	if (result == CUDA_SUCCESS)
		nvs_claim_keep_handle(&claim, *handle);
	else
		nvs_claim_drop(&claim);
	return result;
}

WATCH(cuMemImportFromShareableHandle, (unsigned long long *handle, void *os, int type))
{
	int result = CALL(cuMemImportFromShareableHandle, handle, os, type);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_handle_imported(*handle);
	return result;
}

WATCH(cuMemRetainAllocationHandle, (unsigned long long *handle, void *address))
{
	int result = CALL(cuMemRetainAllocationHandle, handle, address);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_handle_retained(*handle, (uintptr_t)address);
	return result;
}

WATCH(cuMemRelease, (unsigned long long handle))
{
	uint64_t stamp = nvs_memory_stamp();
	int result = CALL(cuMemRelease, handle);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_handle_released(handle, stamp);
	return result;
}

WATCH(cuMemMap, (CUdeviceptr p, size_t n, size_t offset, unsigned long long handle,
		 unsigned long long flags))
{
	bool on = nvs_counting();
	uint32_t memory = on ? nvs_memory_hold(handle) : 0;
	int result = CALL(cuMemMap, p, n, offset, handle, flags);

	if (on && result == CUDA_SUCCESS)
		nvs_memory_mapped(memory, p, n);
	else
		nvs_memory_unhold(memory);
	return result;
}

WATCH(cuMemUnmap, (CUdeviceptr p, size_t n))
{
	uint64_t stamp = nvs_memory_stamp();
	int result = CALL(cuMemUnmap, p, n);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_unmapped(p, n, stamp);
	return result;
}

/* ---- graphs ---- */

static bool node_may_have(const struct cu_alloc_node *n)
{
	return graph_may_have(channel_of_location(&n->props.location), n->bytes);
}

WATCH(cuGraphAddMemAllocNode, (void **node, void *graph, const void *deps, size_t count,
			       struct cu_alloc_node *params))
{
	if (nvs_counting() && params && !node_may_have(params))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return CALL(cuGraphAddMemAllocNode, node, graph, deps, count, params);
}

static bool params_may_have(const struct cu_node_params *p)
{
	return !nvs_counting() || !p || p->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
	       node_may_have(&p->u.alloc);
}

WATCH(cuGraphAddNode, (void **node, void *graph, const void *deps, size_t count,
		       struct cu_node_params *params))
{
	if (!params_may_have(params))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return CALL(cuGraphAddNode, node, graph, deps, count, params);
}

#define ADD_NODE(name) \
	WATCH(name, (void **node, void *graph, const void *deps, const void *edges, size_t count, \
		     struct cu_node_params *params)) \
	{ \
		if (!params_may_have(params)) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		return CALL(name, node, graph, deps, edges, count, params); \
	}
ADD_NODE(cuGraphAddNode_v2)
ADD_NODE(cuGraphAddNode_v3)

/*
 * After these the memory of graphs may be another; so it may after a launch, an
 * upload (hook.c) and cuGraphInstantiateWithParams (watch.c).
 */
#define LOOK(name, P, A) \
	WATCH(name, P) \
	{ \
		int result = CALL(name, NVS_SPREAD A); \
		nvs_memory_graph_ran(); \
		return result; \
	}
LOOK(cuGraphInstantiate, (void **exec, void *graph, void **bad, char *log, size_t n),
     (exec, graph, bad, log, n))
LOOK(cuGraphInstantiate_v2, (void **exec, void *graph, void **bad, char *log, size_t n),
     (exec, graph, bad, log, n))
LOOK(cuGraphInstantiateWithFlags, (void **exec, void *graph, unsigned long long flags),
     (exec, graph, flags))
LOOK(cuGraphExecDestroy, (void *exec), (exec))
LOOK(cuDeviceGraphMemTrim, (int dev), (dev))
