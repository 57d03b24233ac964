// SPDX-License-Identifier: Apache-2.0
/* thread.h: threads that come to the gate, and threads of the shim. */
#ifndef NVSHARE_THREAD_H
#define NVSHARE_THREAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver.h"
#include "gpu.h"

/* One per thread that ever came to the gate; reused when the thread ends. */
struct nvs_thread {
	_Alignas(NVS_CACHE_LINE) atomic_uint in_flight; /* bit per GPU */
	unsigned flag;              /* this and the next five: of the last call */
	unsigned generation;        /* they hold while this is nvs_gate's */
	void *key;                  /* stream; NULL: nothing is remembered */
	struct nvs_stream *stream;
	struct nvs_gpu *gpu;
	_Atomic uint64_t *count;    /* in calls */
	struct nvs_thread *next;    /* never changes once listed */
	atomic_bool taken;
	/* Under nvs_client_lock: the GPU whose gate it waits at, and its last look. */
	struct nvs_gpu *waits_at;
	unsigned keeps;             /* GPUs that the process does not release meanwhile, a bit each */
	uint64_t looked_ns;
	/* Gated calls since the start of the process; only this thread writes. */
	_Alignas(NVS_CACHE_LINE) _Atomic uint64_t calls[NVS_MAX_GPUS];
};

extern __thread struct nvs_thread *nvs_self __attribute__((tls_model("initial-exec")));

/* Makes the thread key. ended: called when a thread with a record ends, on that thread. */
void nvs_threads_init(void (*ended)(struct nvs_thread *t));

/* This thread's record; NULL if there is no memory for one. */
struct nvs_thread *nvs_thread_register(void);

static inline struct nvs_thread *nvs_thread_here(void)
{
	return nvs_self ? nvs_self : nvs_thread_register();
}

/* All records, also of threads that have ended; next leads on. */
struct nvs_thread *nvs_threads(void);

/* The last call says nothing about the next (context switch). */
static inline void nvs_thread_forget(void)
{
	if (nvs_self)
		nvs_self->key = NULL;
}

/* Whether a thread is in a gated call on the GPU. */
bool nvs_gate_busy(struct nvs_gpu *gpu);

/* Whether a thread waits for other GPUs and needs this one too. nvs_client_lock is held. */
bool nvs_gate_keeps(struct nvs_gpu *gpu);

/* Waits until no thread is. The gate is closed: its epoch is NVS_WORD_NONE. */
void nvs_gate_quiesce(struct nvs_gpu *gpu);

/* Gated calls on the GPU since the start of the process. */
uint64_t nvs_gate_calls(struct nvs_gpu *gpu);

/* After fork: one thread, nothing in flight. */
void nvs_threads_fork_child(void);

/* Starts a thread of the shim: no signals, detached. */
bool nvs_thread_start(void *(*entry)(void *), void *arg);

/* Names the calling thread of the shim, and keeps its driver calls out of captures' way. */
void nvs_thread_setup(const char *name);

#endif
