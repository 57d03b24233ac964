// SPDX-License-Identifier: Apache-2.0
/*
 * watch.c: wrappers that let everything pass and take note of contexts,
 * streams and captures.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "client.h"
#include "gate.h"
#include "hook.h"
#include "log.h"
#include "memory.h"
#include "rm.h"
#include "start.h"
#include "wait.h"
#include "swap.h"
#include "wrap.h"

WATCH(cuInit, (uint flags))
{
	int result = CALL(cuInit, flags);
	int saved = errno;

	if (result == CUDA_SUCCESS)
		nvs_start();
	errno = saved;
	return result;
}

/* ---- the resolver: real one first, then the pointer it returned ---- */

static int substitute(int result, void **pfn)
{
	if (result == CUDA_SUCCESS && pfn)
		*pfn = nvs_substitute(*pfn);
	return result;
}

#define RESOLVER(name) \
	WATCH(name, (const char *symbol, void **pfn, int version, uint64_t flags)) \
	{ \
		return substitute(CALL(name, symbol, pfn, version, flags), pfn); \
	}
#define RESOLVER_V2(name) \
	WATCH(name, (const char *symbol, void **pfn, int version, uint64_t flags, void *status)) \
	{ \
		return substitute(CALL(name, symbol, pfn, version, flags, status), pfn); \
	}
RESOLVER(cuGetProcAddress)
RESOLVER(cuGetProcAddress_ptsz)
RESOLVER_V2(cuGetProcAddress_v2)
RESOLVER_V2(cuGetProcAddress_v2_ptsz)

/* ---- what each library asks the driver for, in a debug build ---- */

#ifdef NVS_DEBUG_BUILD
WATCH(cuGetExportTable, (const void **table, const void *id))
{
	static struct {
		unsigned char id[16];
		unsigned count;
	} asked[64];
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	int result = CALL(cuGetExportTable, table, id);
	const unsigned char *u = id;
	unsigned i = 0, count = 0;
	int saved = errno;

	nvs_log_init(); /* a runtime asks before cuInit */
	if (u) {
		pthread_mutex_lock(&lock);
		while (i < 63 && asked[i].count && memcmp(asked[i].id, u, 16) != 0)
			i++;
		memcpy(asked[i].id, u, 16);
		count = ++asked[i].count;
		pthread_mutex_unlock(&lock);
		nvs_debugf("export table %02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-"
			   "%02x%02x%02x%02x%02x%02x: asked for %u times, result %d",
			   u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10],
			   u[11], u[12], u[13], u[14], u[15], count, result);
	}
	errno = saved;
	return result;
}
#endif

/* ---- gated by hand ---- */

WATCH(cuLaunchCooperativeKernelMultiDevice, (struct cu_launch_params *list, uint count, uint flags))
{
	struct nvs_thread *t = list && count
		? nvs_gate_enter_all(&list[0].stream, count, sizeof(*list)) : NULL;
	int result = CALL(cuLaunchCooperativeKernelMultiDevice, list, count, flags);

	if (t)
		nvs_gate_leave(t);
	return result;
}

/* Builds a graph, which is not work, and may upload it, which is. */
#define INSTANTIATE(name, KEY) \
	WATCH(name, (void **exec, void *graph, struct cu_instantiate_params *p)) \
	{ \
		struct nvs_thread *t = p && (p->flags & CU_GRAPH_INSTANTIATE_UPLOAD) \
			? nvs_gate_enter(KEY(p->upload_stream)) : NULL; \
		int result = CALL(name, exec, graph, p); \
		if (t) \
			nvs_gate_leave(t); \
		nvs_memory_graph_ran(); \
		return result; \
	}
INSTANTIATE(cuGraphInstantiateWithParams, NVS_KEY_LEGACY)
INSTANTIATE(cuGraphInstantiateWithParams_ptsz, NVS_KEY_THREAD)

/* ---- contexts ---- */

static int created(int result, void **ctx, int dev, bool own)
{
	if (result == CUDA_SUCCESS && nvs_active()) {
		struct nvs_gpu *gpu = nvs_gpu_of_device(dev);

		if (*ctx && gpu) {
			nvs_context_created(*ctx, gpu, own);
			nvs_gpu_use(gpu);
			nvs_swap_context_made(gpu);
		}
		nvs_thread_forget();
	}
	return result;
}

WATCH(cuCtxCreate, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuCtxCreate, ctx, flags, dev), ctx, dev, true);
}

WATCH(cuCtxCreate_v2, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuCtxCreate_v2, ctx, flags, dev), ctx, dev, true);
}

WATCH(cuCtxCreate_v3, (void **ctx, void *affinity, int num, uint flags, int dev))
{
	return created(CALL(cuCtxCreate_v3, ctx, affinity, num, flags, dev), ctx, dev, true);
}

WATCH(cuCtxCreate_v4, (void **ctx, void *params, uint flags, int dev))
{
	return created(CALL(cuCtxCreate_v4, ctx, params, flags, dev), ctx, dev, true);
}

WATCH(cuGLCtxCreate, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuGLCtxCreate, ctx, flags, dev), ctx, dev, true);
}

WATCH(cuGLCtxCreate_v2, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuGLCtxCreate_v2, ctx, flags, dev), ctx, dev, true);
}

WATCH(cuVDPAUCtxCreate, (void **ctx, uint flags, int dev, uint32_t vdp, void *get_proc))
{
	return created(CALL(cuVDPAUCtxCreate, ctx, flags, dev, vdp, get_proc), ctx, dev, true);
}

WATCH(cuVDPAUCtxCreate_v2, (void **ctx, uint flags, int dev, uint32_t vdp, void *get_proc))
{
	return created(CALL(cuVDPAUCtxCreate_v2, ctx, flags, dev, vdp, get_proc), ctx, dev, true);
}

/*
 * While a context is destroyed: the driver waits for its work, so the channels
 * are on; and nobody drains it. The channels first: who drains may wait for them.
 */
static bool hold_context(struct nvs_gpu *gpu)
{
	if (gpu)
		nvs_rm_keep_on(gpu->device.uuid);
	return nvs_context_hold(gpu);
}

static void unhold_context(struct nvs_gpu *gpu, bool held)
{
	if (held)
		nvs_context_unhold(gpu);
	if (gpu)
		nvs_rm_let_go(gpu->device.uuid);
}

#define DESTROY(name) \
	WATCH(name, (void *ctx)) \
	{ \
		struct nvs_gpu *gpu = nvs_active() ? nvs_gpu_of_context(ctx) : NULL; \
		uint64_t stamp = nvs_memory_stamp(); \
		bool held = hold_context(gpu); \
		/* The record goes first: afterwards the handle may be somebody else's. */ \
		bool own = gpu && nvs_context_destroyed(ctx, gpu); \
		int result = CALL(name, ctx); \
		if (result == CUDA_SUCCESS && nvs_counting()) \
			nvs_memory_context_gone(ctx, stamp); \
		if (result == CUDA_SUCCESS && gpu) \
			nvs_swap_context_gone(ctx, gpu); \
		if (gpu && result != CUDA_SUCCESS) \
			nvs_context_kept(ctx, gpu, own, NULL); \
		unhold_context(gpu, held); \
		nvs_thread_forget(); \
		return result; \
	}
DESTROY(cuCtxDestroy)
DESTROY(cuCtxDestroy_v2)
DESTROY(cuCtxDetach)

#define SWITCH(name, P, A) \
	WATCH(name, P) \
	{ \
		nvs_thread_forget(); \
		return CALL(name, A); \
	}
SWITCH(cuCtxSetCurrent, (void *ctx), ctx)
SWITCH(cuCtxPushCurrent, (void *ctx), ctx)
SWITCH(cuCtxPushCurrent_v2, (void *ctx), ctx)
SWITCH(cuCtxPopCurrent, (void **ctx), ctx)
SWITCH(cuCtxPopCurrent_v2, (void **ctx), ctx)

WATCH(cuDevicePrimaryCtxRetain, (void **ctx, int dev))
{
	return created(CALL(cuDevicePrimaryCtxRetain, ctx, dev), ctx, dev, false);
}

static void primary_reset(struct nvs_gpu *gpu, uint64_t stamp)
{
	nvs_context_destroyed(NULL, gpu);
	if (nvs_counting())
		nvs_memory_primary_gone(gpu, stamp);
	nvs_swap_context_gone(NULL, gpu);
}

/* The primary context is gone if nobody holds it any more. */
static void primary_gone(int dev, struct nvs_gpu *gpu, uint64_t stamp)
{
	uint flags;
	int alive = 1;

	if (gpu && nvs_driver.primary_state &&
	    nvs_driver.primary_state(dev, &flags, &alive) == CUDA_SUCCESS && !alive)
		primary_reset(gpu, stamp);
}

#define PRIMARY(name, gone) \
	WATCH(name, (int dev)) \
	{ \
		struct nvs_gpu *gpu = nvs_active() ? nvs_gpu_of_device(dev) : NULL; \
		uint64_t stamp = nvs_memory_stamp(); \
		bool held = hold_context(gpu); \
		int result = CALL(name, dev); \
		if (gpu && result == CUDA_SUCCESS) \
			gone; \
		unhold_context(gpu, held); \
		nvs_thread_forget(); \
		return result; \
	}
PRIMARY(cuDevicePrimaryCtxRelease, primary_gone(dev, gpu, stamp))
PRIMARY(cuDevicePrimaryCtxRelease_v2, primary_gone(dev, gpu, stamp))
PRIMARY(cuDevicePrimaryCtxReset, primary_reset(gpu, stamp))
PRIMARY(cuDevicePrimaryCtxReset_v2, primary_reset(gpu, stamp))

/*
 * A green context is part of its GPU's primary context. What the driver turns
 * it into names it in all calls about contexts and is asked for at once.
 */
static void green_seen(void *green)
{
	void *ctx = NULL;

	if (nvs_driver.ctx_from_green && nvs_driver.ctx_from_green(&ctx, green) == CUDA_SUCCESS)
		nvs_context_from_green(ctx, green);
}

WATCH(cuGreenCtxCreate, (void **green, void *desc, int dev, uint flags))
{
	int result = CALL(cuGreenCtxCreate, green, desc, dev, flags);

	if (result == CUDA_SUCCESS && nvs_active()) {
		struct nvs_gpu *gpu = nvs_gpu_of_device(dev);

		if (gpu)
			nvs_gpu_use(gpu);
		green_seen(*green);
	}
	return result;
}

WATCH(cuCtxFromGreenCtx, (void **ctx, void *green))
{
	int result = CALL(cuCtxFromGreenCtx, ctx, green);

	if (result == CUDA_SUCCESS && nvs_active())
		nvs_context_from_green(*ctx, green);
	return result;
}

WATCH(cuGreenCtxDestroy, (void *green))
{
	void *ctx = nvs_active() ? nvs_context_of_green(green) : NULL;
	struct nvs_gpu *gpu = nvs_gpu_of_context(ctx);
	bool held = hold_context(gpu);
	bool own = gpu && nvs_context_destroyed(ctx, gpu); /* first, see DESTROY */
	int result = CALL(cuGreenCtxDestroy, green);

	if (gpu && result != CUDA_SUCCESS)
		nvs_context_kept(ctx, gpu, own, green);
	unhold_context(gpu, held);
	return result;
}

/* ---- streams and captures ---- */

static int stream_created(int result, void **stream)
{
	if (result == CUDA_SUCCESS && nvs_active())
		nvs_stream_created(*stream);
	return result;
}

WATCH(cuStreamCreate, (void **stream, uint flags))
{
	return stream_created(CALL(cuStreamCreate, stream, flags), stream);
}

WATCH(cuStreamCreateWithPriority, (void **stream, uint flags, int priority))
{
	return stream_created(CALL(cuStreamCreateWithPriority, stream, flags, priority), stream);
}

/* Of the green context and its GPU, whatever is current. */
WATCH(cuGreenCtxStreamCreate, (void **stream, void *green, uint flags, int priority))
{
	int result = CALL(cuGreenCtxStreamCreate, stream, green, flags, priority);

	if (result == CUDA_SUCCESS && nvs_active()) {
		if (!nvs_context_of_green(green))
			green_seen(green);
		nvs_stream_created_in(*stream, nvs_context_of_green(green));
	}
	return result;
}

/* The record goes first: afterwards the handle may be somebody else's. */
#define STREAM_DESTROY(name) \
	WATCH(name, (void *stream)) \
	{ \
		if (nvs_active()) { \
			nvs_swap_stream_going(stream); \
			nvs_stream_destroyed(stream); \
		} \
		return CALL(name, stream); \
	}
STREAM_DESTROY(cuStreamDestroy)
STREAM_DESTROY(cuStreamDestroy_v2)

#define CAPTURE(name, P, A, key) \
	WATCH(name, P) \
	{ \
		__typeof__(&name) real = NVS_REAL(name); \
		bool on = nvs_active(); \
		int result; \
		if (!real) \
			return CUDA_ERROR_NOT_FOUND; \
		on = on && nvs_capture_begin(key); \
		result = real A; \
		if (on) \
			nvs_capture_began(key, result); \
		return result; \
	}
#define CAPTURE_SZ(name, P, A) \
	CAPTURE(name, P, A, NVS_KEY_LEGACY(s)) \
	CAPTURE(name##_ptsz, P, A, NVS_KEY_THREAD(s))
CAPTURE_SZ(cuStreamBeginCapture, (void *s), (s))
CAPTURE_SZ(cuStreamBeginCapture_v2, (void *s, int mode), (s, mode))
CAPTURE_SZ(cuStreamBeginCaptureToGraph,
	   (void *s, void *graph, const void *deps, const void *edges, size_t num, int mode),
	   (s, graph, deps, edges, num, mode))
CAPTURE_SZ(cuStreamBeginRecaptureToGraph,
	   (void *s, int mode, void *graph, void *callback, void *data),
	   (s, mode, graph, callback, data))
CAPTURE_SZ(cuStreamBeginCaptureToCig, (void *s, void *params), (s, params))

#define CAPTURE_END(name, P, A, key) \
	WATCH(name, P) \
	{ \
		__typeof__(&name) real = NVS_REAL(name); \
		int result = real ? real A : CUDA_ERROR_NOT_FOUND; \
		if (nvs_active()) \
			nvs_capture_ended(key); \
		return result; \
	}
#define CAPTURE_END_SZ(name, P, A) \
	CAPTURE_END(name, P, A, NVS_KEY_LEGACY(s)) \
	CAPTURE_END(name##_ptsz, P, A, NVS_KEY_THREAD(s))
CAPTURE_END_SZ(cuStreamEndCapture, (void *s, void **graph), (s, graph))
CAPTURE_END_SZ(cuStreamEndCaptureToCig, (void *s), (s))

/* ---- synchronisation: never gated ---- */

/* The host has waited: pools may release memory, and know what streams have passed. */
static int waited(int result, uint64_t frees, const void *ctx, void *stream)
{
	if (nvs_unlikely(frees != 0) && result == CUDA_SUCCESS)
		nvs_swap_host_waited(frees, ctx, stream);
	if (nvs_unlikely(atomic_load_explicit(&nvs_swap_excess, memory_order_relaxed) != 0))
		nvs_swap_trim();
	return result;
}

#define SYNCHRONISE(name, P, A, ctx, stream) \
	WATCH(name, P) \
	{ \
		uint64_t frees = atomic_load(&nvs_swap_frees); \
		__typeof__(&name) real = NVS_REAL(name); \
		return waited(real ? real A : CUDA_ERROR_NOT_FOUND, frees, ctx, stream); \
	}
SYNCHRONISE(cuCtxSynchronize, (void), (), NULL, NULL)
SYNCHRONISE(cuCtxSynchronize_v2, (void *ctx), (ctx), ctx, NULL)
SYNCHRONISE(cuStreamSynchronize, (void *s), (s), NULL, NVS_KEY_LEGACY(s))
SYNCHRONISE(cuStreamSynchronize_ptsz, (void *s), (s), NULL, NVS_KEY_THREAD(s))

/* What the event stands behind is not known. */
WATCH(cuEventSynchronize, (void *event))
{
	return waited(CALL(cuEventSynchronize, event), 0, NULL, NULL);
}
