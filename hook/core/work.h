// SPDX-License-Identifier: Apache-2.0
/*
 * work.h: contexts and streams, and whether they may have work that runs. Records are never freed,
 * only reused, so that a stale pointer is harmless; nvs_gate.generation tells when one is stale.
 * Under nvs_table_lock nothing is waited for, and no driver function is called.
 */
#ifndef NVSHARE_WORK_H
#define NVSHARE_WORK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver.h"
#include "lock.h"

struct nvs_gpu;
struct nvs_thread;

struct nvs_context {
	_Atomic(void *) ctx; /* NULL: the record is free */
	void *green;
	struct nvs_gpu *gpu;
	bool own;          /* made by cuCtxCreate: outlives the primary context */
	unsigned attached; /* by cuCtxAttach: so many cuCtxDetach do not end it */
	atomic_bool dirty; /* work since the last drain */
};

#define NVS_THROTTLE_EVENTS 3

/* The bound on the work that a stream has ahead of the GPU; see throttle.c. */
struct nvs_throttle {
	atomic_flag busy;
	atomic_uint count;   /* calls since the last event */
	atomic_uint batch;   /* calls per event, 0: not set up */
	atomic_uint ended;   /* futex: batches that a thread has ended */
	bool off;            /* events do not work here */
	bool pending[NVS_THROTTLE_EVENTS];
	uint8_t next;        /* the first two take turns */
	unsigned last_calls; /* calls of the batch before the last event */
	unsigned unwaited;   /* batches since one was waited for */
	uint64_t passed_ns;  /* when the last event was seen to pass; 0: nobody waited for it */
	uint64_t took_ns;    /* GPU time of the last batch that is known */
	unsigned offs;       /* nvs_gpu.preempt.offs when the last event was seen to pass */
	uint64_t patience_ns; /* for the third event; see nvs_throttle_behind */
	void *event[NVS_THROTTLE_EVENTS];
};

struct nvs_stream {
	_Atomic(void *) key;    /* handle; CU_STREAM_LEGACY, CU_STREAM_PER_THREAD; NULL: none */
	struct nvs_thread *owner; /* of a per-thread default stream */
	_Atomic(struct nvs_context *) context; /* NULL: not known */
	struct nvs_gpu *gpu;
	atomic_bool dirty;      /* work since the last drain */
	atomic_bool capturing;  /* a capture was begun on the stream */
	struct nvs_stream *next; /* in the same bucket */
	struct nvs_throttle throttle;
};

#define NVS_MAX_CONTEXTS 8192 /* no GPU has memory for so many */
#define NVS_MAX_STREAMS  16384 /* further ones share the record of their GPU */

extern struct nvs_lock nvs_table_lock;
extern struct nvs_context nvs_contexts[NVS_MAX_CONTEXTS];
extern unsigned nvs_contexts_used;
extern struct nvs_stream nvs_streams[NVS_MAX_STREAMS];
extern unsigned nvs_streams_used;

/* The record of a context, made if need be; NULL: the table is full. nvs_table_lock is held. */
struct nvs_context *nvs_context_add(void *ctx, struct nvs_gpu *gpu, void *green);

static inline bool nvs_key_is_default(void *key)
{
	return key <= CU_STREAM_PER_THREAD;
}

#endif
