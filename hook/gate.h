// SPDX-License-Identifier: Apache-2.0
/*
 * gate.h: the way to the GPU.
 *
 * A thread raises its own in-flight flag, then compares the grant page's word
 * with the epoch this process holds, and only then calls the driver. Whoever
 * closes the gate changes the epoch first and then waits until every flag is
 * clear, so no submission slips through after a release. All four accesses are
 * sequentially consistent: one of the two sides sees the other.
 */
#ifndef NVSHARE_GATE_H
#define NVSHARE_GATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "hook.h"
#include "stream.h"
#include "wire.h"

#define NVS_CACHE_LINE 64

/* What a gated call reads of a channel. Written under the client's lock. */
struct nvs_channel {
	_Alignas(NVS_CACHE_LINE) _Atomic(const struct nvs_slot *) slot;
	_Atomic uint32_t epoch; /* NVS_WORD_NONE: closed */
};

extern struct nvs_channel nvs_channels[NVS_MAX_CHANNELS];

/* Read by every gated call, written rarely. */
struct nvs_gate {
	_Alignas(NVS_CACHE_LINE) atomic_bool active; /* false: every call passes */
	atomic_bool single;       /* one GPU in this process: channel 0 */
	atomic_uint generation;   /* of the threads' cached streams */
	atomic_int captures;      /* open stream captures in the process */
};

extern struct nvs_gate nvs_gate;

/* One per thread that ever came to the gate; reused when the thread ends. */
struct nvs_thread {
	_Alignas(NVS_CACHE_LINE) atomic_uint in_flight; /* bit per channel */
	unsigned generation;
	void *key;                  /* stream of the last call */
	struct nvs_stream *stream;  /* its record */
	struct nvs_thread *next;    /* never changes once listed */
	atomic_bool taken;
	/* Gated calls since the start of the process; only this thread writes. */
	_Alignas(NVS_CACHE_LINE) _Atomic uint64_t calls[NVS_MAX_CHANNELS];
};

extern __thread struct nvs_thread *nvs_self __attribute__((tls_model("initial-exec")));

/* This thread's record; NULL if there is no memory for one. */
struct nvs_thread *nvs_thread_register(void);

/* The stream of the last call is no longer known (context switch). */
static inline void nvs_thread_forget(void)
{
	if (nvs_self)
		nvs_self->stream = NULL;
}

/* Enters a call that works on several channels at once (bit mask). */
struct nvs_thread *nvs_gate_enter_all(void *const *keys, unsigned count, size_t stride);

/*
 * Waits until the channel may be open. Never called with a flag up. Returns
 * true with the channel's flag up if this one call is to go on while the gate
 * is closed: the running drain waits for more than GPU work, see channel.c.
 */
bool nvs_gate_wait(struct nvs_thread *t, unsigned channel);

/* Whether a call on this stream is recorded into a graph and not executed. */
bool nvs_capturing(void *key);

/* Keeps the work ahead of the GPU short. Never called with a flag up. */
void nvs_depth_step(struct nvs_stream *s, void *key);

/* Waits until no thread is in a gated call on the channel; see gate.c. */
void nvs_gate_quiesce(unsigned channel);

/* Whether a thread is in a gated call on the channel. */
bool nvs_gate_busy(unsigned channel);

/* Gated calls on the channel since the start of the process. */
uint64_t nvs_gate_calls(unsigned channel);

/* After fork: one thread, nothing in flight. */
void nvs_gate_fork_child(void);

/* Means something only while this thread's flag for the channel is up. */
static inline bool nvs_gate_is_open(unsigned channel)
{
	struct nvs_channel *c = &nvs_channels[channel];
	const struct nvs_slot *slot = atomic_load_explicit(&c->slot, memory_order_acquire);

	return __atomic_load_n(&slot->word, __ATOMIC_SEQ_CST) ==
	       atomic_load_explicit(&c->epoch, memory_order_seq_cst);
}

static inline bool nvs_gate_try(struct nvs_thread *t, unsigned channel)
{
	atomic_store_explicit(&t->in_flight, 1u << channel, memory_order_seq_cst);
	if (nvs_likely(nvs_gate_is_open(channel)))
		return true;
	atomic_store_explicit(&t->in_flight, 0, memory_order_release);
	return false;
}

/*
 * Enters a gated call. Returns the thread to hand to nvs_gate_leave, or NULL
 * if the call is not gated. Keeps errno.
 */
static inline struct nvs_thread *nvs_gate_enter(void *key)
{
	struct nvs_thread *t = nvs_self;
	struct nvs_stream *s;
	unsigned channel;

	if (nvs_unlikely(!atomic_load_explicit(&nvs_gate.active, memory_order_acquire)))
		return NULL;
	if (nvs_unlikely(!t)) {
		t = nvs_thread_register();
		if (!t)
			return NULL;
	}
	if (nvs_unlikely(atomic_load_explicit(&t->in_flight, memory_order_relaxed)))
		return NULL; /* inside a gated call */
	s = t->stream;
	if (nvs_unlikely(!s || t->key != key ||
			 t->generation != atomic_load_explicit(&nvs_gate.generation,
							       memory_order_acquire) ||
			 (key <= CU_STREAM_PER_THREAD &&
			  !atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)))) {
		s = nvs_stream_find(t, key);
		if (!s)
			return NULL;
	}
	if (nvs_unlikely(atomic_load_explicit(&nvs_gate.captures, memory_order_acquire)) &&
	    nvs_capturing(key))
		return NULL;
	channel = s->channel;
	if (nvs_unlikely(__atomic_load_n(
		    &atomic_load_explicit(&nvs_channels[channel].slot, memory_order_acquire)
			     ->present, __ATOMIC_RELAXED)))
		nvs_depth_step(s, key);
	while (nvs_unlikely(!nvs_gate_try(t, channel))) {
		if (nvs_gate_wait(t, channel))
			break;
		if (!atomic_load(&nvs_gate.active))
			return NULL; /* the process ends */
	}
	if (nvs_unlikely(!atomic_load_explicit(&s->dirty, memory_order_relaxed)))
		nvs_stream_mark(s);
	atomic_store_explicit(&t->calls[channel],
			      atomic_load_explicit(&t->calls[channel], memory_order_relaxed) + 1,
			      memory_order_relaxed);
	return t;
}

static inline void nvs_gate_leave(struct nvs_thread *t)
{
	atomic_store_explicit(&t->in_flight, 0, memory_order_release);
}

#endif
