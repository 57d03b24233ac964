// SPDX-License-Identifier: Apache-2.0
/*
 * stream.h: which GPU a stream belongs to, and where work may still run.
 *
 * Records of streams and contexts are never freed, only reused, so that a
 * stale pointer is harmless; nvs_gate.generation tells when it is stale.
 */
#ifndef NVSHARE_STREAM_H
#define NVSHARE_STREAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct nvs_thread;
struct nvs_context;

/* Event-based depth bound of one stream; see depth.c. */
struct nvs_depth {
	atomic_flag busy;
	atomic_uint count;   /* calls since the last event */
	atomic_uint batch;   /* calls per event, 0: not set up */
	bool off;            /* events do not work here */
	bool pending[2];
	uint8_t next;
	unsigned last_calls; /* calls of the batch before the last event */
	unsigned unwaited;   /* batches since one was waited for */
	uint64_t passed_ns;  /* when the last event was seen to pass; 0: it was not waited for */
	uint64_t took_ns;    /* GPU time of the last batch that is known */
	uint64_t patience_ns; /* longest wait for an event; 0: the usual */
	void *event[2];
};

struct nvs_stream {
	_Atomic(void *) key;    /* handle; CU_STREAM_LEGACY, CU_STREAM_PER_THREAD; NULL: none */
	struct nvs_thread *owner; /* of a per-thread default stream */
	_Atomic(struct nvs_context *) context; /* NULL: not known */
	unsigned channel;
	atomic_bool dirty;      /* work since the last drain */
	atomic_bool capturing;  /* a capture was begun on it */
	struct nvs_stream *next; /* in its bucket */
	struct nvs_depth depth;
};

/* The calling thread's current context, NULL if it has none. */
void *nvs_current_context(void);

/* Channel of the calling thread's current context, -1 if it has none. */
int nvs_channel_of_current(void);

/*
 * The record of a stream, made if need be. NULL if the call can't be attributed
 * to a GPU (no current context).
 */
struct nvs_stream *nvs_stream_find(struct nvs_thread *t, void *key);

/* Whether the stream is known to belong to this context. */
bool nvs_stream_in_context(struct nvs_stream *s, void *ctx);

/* Work is about to go to the stream. Called with the in-flight flag up. */
void nvs_stream_mark(struct nvs_stream *s);

void nvs_stream_created(void *handle);
void nvs_stream_created_in(void *handle, void *ctx); /* a known context */
void nvs_stream_destroyed(void *handle);

/* A context of this device exists; own: not the primary one, nor part of it. */
void nvs_context_created(void *ctx, int dev, bool own);

/* The context that a green context was turned into. */
void nvs_context_from_green(void *ctx, void *green);

/*
 * Brackets a call that destroys contexts: waits for a drain of the channel,
 * and keeps the next one off. channel: of nvs_context_channel; -1 does nothing.
 * False, not to be unheld: nothing done, or the drain does not end.
 */
int nvs_context_channel(void *ctx);
bool nvs_context_hold(int channel);
void nvs_context_unhold(int channel);

/* Whether no work was submitted to the context since its last drain. */
bool nvs_context_is_drained(const void *ctx);

/* Whether it is known as one that cuCtxCreate made. */
bool nvs_context_own(void *ctx);

/* Forgets a context, or (ctx NULL) the primary one of a channel and its parts. */
bool nvs_context_destroyed(void *ctx, int channel);
/* It was not destroyed after all. own: what nvs_context_destroyed returned; green: or NULL. */
void nvs_context_kept(void *ctx, int channel, bool own, void *green);
void *nvs_context_of_green(void *green);

/*
 * Brackets a real begin of capture: no context is being synchronised meanwhile,
 * and the stream is not asked about. False: it is not known, or captures
 * already; do not call nvs_capture_began.
 */
bool nvs_capture_begin(void *key);
void nvs_capture_began(void *key, int result);
/* After a real end of capture, or of the stream. */
void nvs_capture_ended(void *key);

enum nvs_drained {
	NVS_DRAINED,
	NVS_DRAIN_UNPROVEN, /* a capture hides what still runs */
	NVS_DRAIN_STOPPED,  /* the process ends, and there is work that the driver is not asked about */
};

/*
 * Waits until the GPU has finished what was submitted on the channel. The gate
 * is closed, since closed_ns, and no call is in flight. A context is never synchronised while a
 * capture is open on its GPU, that would invalidate the graph: streams are
 * looked at one by one instead, for at most patience_ns.
 */
enum nvs_drained nvs_drain(unsigned channel, uint64_t closed_ns, uint64_t patience_ns);

/* A call passed the closed gate: the next drain looks at everything again. */
void nvs_streams_touch(unsigned channel);

/* Whether all streams with work are idle now; a guess, confirmed by a drain. */
bool nvs_streams_idle(unsigned channel);

/* No driver calls of our own from now on; waits up to a second for the last. */
void nvs_driver_stop(void);

/* The calling thread is the shim's own, not the application's. */
void nvs_driver_thread_of_shim(void);

/*
 * Brackets driver calls that the shim makes for itself. False: the process ends, and
 * the shim's own threads call the driver no more. An application's thread still may:
 * the application calls the driver with it.
 */
bool nvs_driver_enter(void);
void nvs_driver_leave(void);

void nvs_stream_fork_child(void);

#endif
