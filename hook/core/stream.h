// SPDX-License-Identifier: Apache-2.0
/* stream.h: which GPU a stream or a context belongs to, and what captures. */
#ifndef NVSHARE_STREAM_H
#define NVSHARE_STREAM_H

#include <stdbool.h>

#include "thread.h"

/* The calling thread's current context, NULL if it has none. */
void *nvs_current_context(void);

/* The GPU of that context, NULL if there is none. */
struct nvs_gpu *nvs_gpu_of_current(void);

/* The same, of a current context that is known. Without one the driver refuses anyway. */
static inline struct nvs_gpu *nvs_gpu_here(const void *ctx)
{
	if (!ctx)
		return NULL;
	return atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)
		? nvs_gpus : nvs_gpu_of_current();
}

/* The record of a stream, made if need be. NULL if the call can't be attributed to a GPU (no current context). */
struct nvs_stream *nvs_stream_find(struct nvs_thread *t, void *key);

/* The same for the calling thread. */
struct nvs_stream *nvs_stream_here(void *key);

/* Whether the stream is known to belong to this context. */
bool nvs_stream_in_context(struct nvs_stream *s, void *ctx);

/* Work is about to go to the stream. Called with the in-flight flag up. */
void nvs_stream_mark(struct nvs_stream *s);

/* The same of a GPU, in a stream of another GPU: any of its contexts may have the work. */
void nvs_contexts_mark(struct nvs_gpu *gpu);

void nvs_stream_created(void *handle);
void nvs_stream_created_in(void *handle, void *ctx); /* a known context */

/* What was known of a stream that is forgotten. */
struct nvs_stream_was {
	struct nvs_gpu *gpu; /* NULL: nothing */
	void *ctx;
	bool capturing;      /* still counted */
};

/* Forgets a stream that is about to be destroyed. One of the next two follows. */
struct nvs_stream_was nvs_stream_going(void *handle);
void nvs_stream_destroyed(const struct nvs_stream_was *was);
/* It was not destroyed after all. */
void nvs_stream_kept(void *handle, const struct nvs_stream_was *was);

/* A context of this GPU exists; own: not the primary one, nor part of it. */
void nvs_context_created(void *ctx, struct nvs_gpu *gpu, bool own);

/* The context that a green context was turned into. */
void nvs_context_from_green(void *ctx, void *green);

/* What is known of a context. */
struct nvs_context_known {
	struct nvs_gpu *gpu; /* NULL: nothing */
	void *green;         /* a green context was turned into it */
	unsigned attached;   /* uses that cuCtxAttach has added */
	bool own;            /* cuCtxCreate has made it */
};
struct nvs_context_known nvs_context_look(const void *ctx);

/* The GPU of a context, NULL if it is not known. */
static inline struct nvs_gpu *nvs_gpu_of_context(const void *ctx)
{
	return nvs_context_look(ctx).gpu;
}

/* Its bit; 0 if it is not known. */
static inline unsigned nvs_gpu_bit_of_context(const void *ctx)
{
	struct nvs_gpu *gpu = nvs_gpu_of_context(ctx);

	return gpu ? gpu->bit : 0;
}

/* The same; the driver is asked if need be. */
struct nvs_gpu *nvs_gpu_having_context(void *ctx);

/* Any context of a GPU, or (NULL) of any. NULL: none is known. */
void *nvs_context_any(const struct nvs_gpu *gpu);

/* The context lies on this GPU: a drain of the GPU looks at it too. */
void nvs_context_note(void *ctx, struct nvs_gpu *gpu);

/* What a call that destroys contexts keeps off. */
struct nvs_context_held {
	bool drain, move;
};

/*
 * Brackets a call that destroys contexts: waits for a drain of the GPU, 5 s at most, then for memory that
 * moves, 60 s at most, and keeps the next one of each off, and loads. Goes on without what did not end.
 */
struct nvs_context_held nvs_context_hold(struct nvs_gpu *gpu);
void nvs_context_unhold(struct nvs_gpu *gpu, struct nvs_context_held h);

/*
 * Whether a thread of the shim loads a module into a context of the GPU: who destroys contexts waits
 * for that. Nobody waits longer than NVS_LOAD_NS: the driver may wait for a library that another thread opens.
 */
#define NVS_LOAD_NS (5 * NVS_S)
bool nvs_gpu_loads(struct nvs_gpu *gpu);

/* cuCtxAttach adds a use (1), cuCtxDetach takes one away (-1). False: there is none, so the context ends. */
bool nvs_context_count(void *ctx, int by);

/* Forgets a context, or (ctx NULL) the primary one of a GPU and its parts. gpu NULL does nothing. */
struct nvs_context_known nvs_context_destroyed(void *ctx, struct nvs_gpu *gpu);
/* It was not destroyed after all. was: what nvs_context_destroyed returned. */
void nvs_context_kept(void *ctx, struct nvs_gpu *gpu, const struct nvs_context_known *was);
void *nvs_context_of_green(void *green);

/*
 * Brackets a real begin of capture: no drain enters the context any more, and no stream is asked
 * about that would break it. Waits a tenth of a second at most for a drain of this context. False:
 * the stream is not known, or captures already; nvs_capture_began is not called.
 */
bool nvs_capture_begin(void *key);
void nvs_capture_began(void *key, int result);
/* After a real end of capture, or of the stream. */
void nvs_capture_ended(void *key);

/* Whether a call on this stream is recorded into a graph and not executed. */
bool nvs_capturing(void *key);

/* The thread ends: so do its default streams, and what they capture. */
void nvs_stream_thread_ended(struct nvs_thread *t);

void nvs_stream_fork_child(void);

#endif
