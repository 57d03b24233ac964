// SPDX-License-Identifier: Apache-2.0
/*
 * watch.c: wrappers that let everything pass and take note of contexts,
 * streams and captures.
 */
#include <errno.h>

#include "client.h"
#include "gate.h"
#include "hook.h"
#include "memory.h"
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

/* ---- one call for several GPUs ---- */

WATCH(cuLaunchCooperativeKernelMultiDevice, (struct cu_launch_params *list, uint count, uint flags))
{
	struct nvs_thread *t = list && count
		? nvs_gate_enter_all(&list[0].stream, count, sizeof(*list)) : NULL;
	int result = CALL(cuLaunchCooperativeKernelMultiDevice, list, count, flags);

	if (t)
		nvs_gate_leave(t);
	return result;
}

/* ---- contexts ---- */

static int created(int result, void **ctx, int dev, bool own)
{
	if (result == CUDA_SUCCESS && nvs_active()) {
		nvs_context_created(*ctx, dev, own);
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

#define DESTROY(name) \
	WATCH(name, (void *ctx)) \
	{ \
		int channel = nvs_active() ? nvs_context_channel(ctx) : -1; \
		bool held = nvs_context_hold(channel); \
		int result = CALL(name, ctx); \
		if (channel >= 0 && result == CUDA_SUCCESS) \
			nvs_context_destroyed(ctx, channel); \
		if (held) \
			nvs_context_unhold(channel); \
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

/* The primary context is gone if nobody holds it any more. */
static void primary_gone(int dev, int channel)
{
	uint flags;
	int alive = 1;

	if (channel >= 0 && nvs_driver.primary_state &&
	    nvs_driver.primary_state(dev, &flags, &alive) == CUDA_SUCCESS && !alive)
		nvs_context_destroyed(NULL, channel);
}

#define PRIMARY(name, gone) \
	WATCH(name, (int dev)) \
	{ \
		int channel = nvs_active() ? nvs_client_channel(dev) : -1; \
		bool held = nvs_context_hold(channel); \
		int result = CALL(name, dev); \
		if (channel >= 0 && result == CUDA_SUCCESS) \
			gone; \
		if (held) \
			nvs_context_unhold(channel); \
		nvs_thread_forget(); \
		return result; \
	}
#define RESET (nvs_context_destroyed(NULL, channel), nvs_memory_reset((unsigned)channel))
PRIMARY(cuDevicePrimaryCtxRelease, primary_gone(dev, channel))
PRIMARY(cuDevicePrimaryCtxRelease_v2, primary_gone(dev, channel))
PRIMARY(cuDevicePrimaryCtxReset, RESET)
PRIMARY(cuDevicePrimaryCtxReset_v2, RESET)

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
	int channel = nvs_context_channel(ctx);
	bool held = nvs_context_hold(channel);
	int result = CALL(cuGreenCtxDestroy, green);

	if (channel >= 0 && result == CUDA_SUCCESS)
		nvs_context_destroyed(ctx, channel);
	if (held)
		nvs_context_unhold(channel);
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

/* The record goes first: afterwards the handle may be somebody else's. */
#define STREAM_DESTROY(name) \
	WATCH(name, (void *stream)) \
	{ \
		if (nvs_active()) \
			nvs_stream_destroyed(stream); \
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
