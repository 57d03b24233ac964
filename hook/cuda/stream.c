// SPDX-License-Identifier: Apache-2.0
/* stream.c: wrappers that note which streams there are, which capture, and when the host has waited for work. */
#include "wrap.h"

static int stream_created(int result, void **stream)
{
	if (result == CUDA_SUCCESS && nvs_active())
		nvs_stream_created(*stream);
	return result;
}

#define CREATE(name, P, A) WRAPPER(name, P) { return stream_created(CALL(name, NVS_SPREAD A), stream); }
CREATE(cuStreamCreate, (void **stream, uint flags), (stream, flags))
CREATE(cuStreamCreateWithPriority, (void **stream, uint flags, int priority), (stream, flags, priority))

/* The record goes first: afterwards the handle may be somebody else's. */
#define STREAM_DESTROY(name) \
	WRAPPER(name, (void *stream)) \
	{ \
		struct nvs_stream_was was; \
		int result; \
		if (!nvs_active()) \
			return CALL(name, stream); \
		nvs_swap_stream_going(stream); \
		was = nvs_stream_going(stream); \
		result = CALL(name, stream); \
		if (result == CUDA_SUCCESS) \
			nvs_stream_destroyed(&was); \
		else \
			nvs_stream_kept(stream, &was); \
		return result; \
	}
STREAM_DESTROY(cuStreamDestroy)
STREAM_DESTROY(cuStreamDestroy_v2)

#define CAPTURE(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		bool on = nvs_active() && nvs_capture_begin(key); \
		int result = CALL(name, NVS_SPREAD A); /* looked up after the wait: the process may be suspended since */ \
		if (on) \
			nvs_capture_began(key, result); \
		return result; \
	}
NVS_SZ(CAPTURE, cuStreamBeginCapture, (void *s), (s), s)
NVS_SZ(CAPTURE, cuStreamBeginCapture_v2, (void *s, int mode), (s, mode), s)
NVS_SZ(CAPTURE, cuStreamBeginCaptureToGraph, (void *s, void *graph, const void *deps, const void *edges, size_t num,
	int mode), (s, graph, deps, edges, num, mode), s)
NVS_SZ(CAPTURE, cuStreamBeginRecaptureToGraph, (void *s, int mode, void *graph, void *callback, void *data),
       (s, mode, graph, callback, data), s)
NVS_SZ(CAPTURE, cuStreamBeginCaptureToCig, (void *s, void *params), (s, params), s)

#define CAPTURE_END(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		int result = CALL(name, NVS_SPREAD A); \
		if (nvs_active()) \
			nvs_capture_ended(key); \
		return result; \
	}
NVS_SZ(CAPTURE_END, cuStreamEndCapture, (void *s, void **graph), (s, graph), s)
NVS_SZ(CAPTURE_END, cuStreamEndCaptureToCig, (void *s), (s), s)

/* ---- synchronisation: never gated ---- */

/* The host has waited: pools may release memory, and know what streams have passed. */
static int waited(int result, uint64_t frees, const void *ctx, void *stream)
{
	if (nvs_unlikely(frees != 0) && result == CUDA_SUCCESS)
		nvs_swap_host_waited(frees, ctx, stream);
	if (nvs_unlikely(atomic_load_explicit(&nvs_swap_excess, memory_order_relaxed) != 0))
		nvs_swap_trim();
	nvs_memory_waited();
	return result;
}

#define SYNCHRONISE(name, P, A, frees_, ctx, stream) \
	WRAPPER(name, P) \
	{ \
		uint64_t frees = frees_; \
		return waited(CALL(name, NVS_SPREAD A), frees, ctx, stream); \
	}
SYNCHRONISE(cuCtxSynchronize, (void), (), atomic_load(&nvs_swap_frees), NULL, NULL)
SYNCHRONISE(cuCtxSynchronize_v2, (void *ctx), (ctx), atomic_load(&nvs_swap_frees), ctx, NULL)
SYNCHRONISE(cuStreamSynchronize, (void *s), (s), atomic_load(&nvs_swap_frees), NULL, NVS_KEY_LEGACY(s))
SYNCHRONISE(cuStreamSynchronize_ptsz, (void *s), (s), atomic_load(&nvs_swap_frees), NULL, NVS_KEY_THREAD(s))
SYNCHRONISE(cuEventSynchronize, (void *event), (event), 0, NULL, NULL) /* what the event stands behind is not known */
