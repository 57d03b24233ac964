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

#include "compiler.h"
#include "driver.h"
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
	atomic_uint generation;   /* of what threads remember; grows if it may not hold */
	atomic_int captures;      /* open stream captures in the process */
};

extern struct nvs_gate nvs_gate;

static inline bool nvs_active(void)
{
	return atomic_load_explicit(&nvs_gate.active, memory_order_acquire);
}

/* One per thread that ever came to the gate; reused when the thread ends. */
struct nvs_thread {
	_Alignas(NVS_CACHE_LINE) atomic_uint in_flight; /* bit per channel */
	unsigned flag;              /* this and what follows: of the last call */
	unsigned generation;        /* it holds while this is nvs_gate's */
	void *key;                  /* its stream; NULL: nothing is remembered */
	struct nvs_stream *stream;
	struct nvs_channel *channel;
	_Atomic uint64_t *count;    /* in calls */
	struct nvs_thread *next;    /* never changes once listed */
	atomic_bool taken;
	/* Under the client's lock: the channel it waits at plus one, and its last look. */
	unsigned waits_at;
	uint64_t looked_ns;
	/* Gated calls since the start of the process; only this thread writes. */
	_Alignas(NVS_CACHE_LINE) _Atomic uint64_t calls[NVS_MAX_CHANNELS];
};

extern __thread struct nvs_thread *nvs_self __attribute__((tls_model("initial-exec")));

/* Channel of the current context. Without one the driver refuses anyway. */
static inline int nvs_channel_here(const void *ctx)
{
	if (!ctx)
		return -1;
	return atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)
		? 0 : nvs_channel_of_current();
}

/* This thread's record; NULL if there is no memory for one. */
struct nvs_thread *nvs_thread_register(void);

/* The last call says nothing about the next (context switch). */
static inline void nvs_thread_forget(void)
{
	if (nvs_self)
		nvs_self->key = NULL;
}

/* Enters a call that works on several channels at once (bit mask). */
struct nvs_thread *nvs_gate_enter_all(void *const *keys, unsigned count, size_t stride);

/*
 * Enters a call that needs the channel's memory and not the GPU: a submission
 * that is only recorded, or one that tells others where memory is. NULL: do
 * without. To be left as ever.
 */
struct nvs_thread *nvs_gate_enter_memory(unsigned channel);

enum nvs_need {
	NVS_NEED_GPU,    /* the call submits work */
	NVS_NEED_MEMORY, /* the call only needs the memory that it names */
};

/*
 * Waits until the channel may be open. Never called with a flag up. Returns
 * true with the channel's flag up if this one call is to go on while the gate
 * is closed: the call needs only memory, and all memory is on the GPU; or the
 * running drain waits for more than GPU work, see channel.c. A signal handler
 * may jump out of the wait.
 */
bool nvs_gate_wait(struct nvs_thread *t, unsigned channel, enum nvs_need need);

/* Whether a call on this stream is recorded into a graph and not executed. */
bool nvs_capturing(void *key);

/* Ends what nvs_gate.active stands for: every call passes from now on. */
void nvs_gate_stop(void);

/*
 * Whether the work ahead of the GPU is to be kept short: somebody else may get
 * the GPU after this client. Nobody takes turns where all hold it at the same
 * time, and a launch shall cost nothing there, but a client with a core limit
 * has to leave when its time is used up. A latency client holds the GPU at the
 * same time as others that are kept from it.
 */
static inline bool nvs_throttled(const struct nvs_slot *slot)
{
	uint32_t all_at_once = NVS_GRANT_CONCURRENT | NVS_GRANT_LATENCY;

	return __atomic_load_n(&slot->present, __ATOMIC_RELAXED) &&
	       ((__atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & all_at_once) !=
			NVS_GRANT_CONCURRENT ||
		__atomic_load_n(&slot->core_limit, __ATOMIC_RELAXED));
}

/* Whether nvs_depth_step has to see this call; if not, it is counted. */
static inline bool nvs_depth_due(struct nvs_stream *s)
{
	unsigned count = atomic_load_explicit(&s->depth.count, memory_order_relaxed) + 1;

	if (count > atomic_load_explicit(&s->depth.batch, memory_order_relaxed))
		return true;
	atomic_store_explicit(&s->depth.count, count, memory_order_relaxed);
	return false;
}

/* Keeps the work ahead of the GPU short. Never called with a flag up. */
void nvs_depth_step(struct nvs_stream *s, void *key);

/* What the stream had ahead, with others, took so long after the gate closed. */
void nvs_depth_drained(struct nvs_stream *s, uint64_t took_ns);

/* Waits until no thread is in a gated call on the channel; see gate.c. */
void nvs_gate_quiesce(unsigned channel);

/* Whether a thread is in a gated call on the channel. */
bool nvs_gate_busy(unsigned channel);

/* Gated calls on the channel since the start of the process. */
uint64_t nvs_gate_calls(unsigned channel);

/* All records, also of threads that are no more; next leads on. */
struct nvs_thread *nvs_gate_threads(void);

/* After fork: one thread, nothing in flight. */
void nvs_gate_fork_child(void);

static inline void nvs_gate_count(_Atomic uint64_t *calls)
{
	atomic_store_explicit(calls, atomic_load_explicit(calls, memory_order_relaxed) + 1,
			      memory_order_relaxed);
}

/* Means something only while this thread's flag for the channel is up. */
static inline bool nvs_gate_is_open(unsigned channel)
{
	struct nvs_channel *c = &nvs_channels[channel];
	const struct nvs_slot *slot = atomic_load_explicit(&c->slot, memory_order_acquire);

	return __atomic_load_n(&slot->word, __ATOMIC_SEQ_CST) ==
	       atomic_load_explicit(&c->epoch, memory_order_seq_cst);
}

/* nvs_gate_enter for whatever is not the common case. */
struct nvs_thread *nvs_gate_enter_slow(void *key);

/*
 * Enters a gated call. Returns the thread to hand to nvs_gate_leave, or NULL
 * if the call is not gated. Keeps errno.
 *
 * Here stands only the common case, which needs no stack: the same stream as
 * before, nothing unusual since, the gate open. All else begins anew in
 * nvs_gate_enter_slow, with the flag down.
 */
static inline struct nvs_thread *nvs_gate_enter(void *key)
{
	struct nvs_thread *t = nvs_self;
	const struct nvs_slot *slot;
	struct nvs_channel *c;

	if (nvs_unlikely(!t || t->key != key ||
			 t->generation != atomic_load_explicit(&nvs_gate.generation,
							       memory_order_acquire) ||
			 atomic_load_explicit(&t->in_flight, memory_order_relaxed)))
		return nvs_gate_enter_slow(key);
	c = t->channel;
	/*
	 * If the slot changes after this, the old one may say that the gate is
	 * open for a moment longer than the scheduler wants. The epoch is what
	 * counts: our own client thread sets it, and looks at the flag afterwards.
	 */
	slot = atomic_load_explicit(&c->slot, memory_order_acquire);
	if (nvs_unlikely(nvs_throttled(slot)) && nvs_depth_due(t->stream))
		return nvs_gate_enter_slow(key);
	atomic_store_explicit(&t->in_flight, t->flag, memory_order_seq_cst);
	if (nvs_unlikely(__atomic_load_n(&slot->word, __ATOMIC_SEQ_CST) !=
				 atomic_load_explicit(&c->epoch, memory_order_seq_cst) ||
			 !atomic_load_explicit(&t->stream->dirty, memory_order_relaxed))) {
		atomic_store_explicit(&t->in_flight, 0, memory_order_release);
		return nvs_gate_enter_slow(key);
	}
	nvs_gate_count(t->count);
	return t;
}

static inline void nvs_gate_leave(struct nvs_thread *t)
{
	atomic_store_explicit(&t->in_flight, 0, memory_order_release);
}

#endif
