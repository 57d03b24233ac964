// SPDX-License-Identifier: Apache-2.0
/*
 * gate.h: the way to the GPU.
 *
 * A thread raises its own in-flight flag, then compares the grant page's word with the epoch this
 * process holds, and only then calls the driver. A thread that closes the gate changes the epoch
 * first and then waits until every flag is clear, so no submission slips through. All four accesses
 * are sequentially consistent: one of the two sides sees the other. So is the mark that the stream
 * has work, for drain.c, which takes it away.
 */
#ifndef NVSHARE_GATE_H
#define NVSHARE_GATE_H

#include <stdatomic.h>
#include <stdint.h>

#include "compiler.h"
#include "thread.h"
#include "throttle.h"

/* Enters a call that works in several streams at once, on whatever GPUs. */
struct nvs_thread *nvs_gate_enter_all(void *const *keys, unsigned count, size_t stride);

/* nvs_gate_enter_gpus where gpus is not 0. */
struct nvs_thread *nvs_gate_enter_several(void *key, unsigned gpus);

/*
 * Enters a call that needs the GPU's memory and not the GPU: one that is only recorded, or only
 * tells where memory is. NULL: do without.
 */
struct nvs_thread *nvs_gate_enter_memory(struct nvs_gpu *gpu);

static inline void nvs_gate_count(_Atomic uint64_t *calls)
{
	atomic_store_explicit(calls, atomic_load_explicit(calls, memory_order_relaxed) + 1,
			      memory_order_relaxed);
}

/* nvs_gate_enter for whatever is not the common case. */
struct nvs_thread *nvs_gate_enter_slow(void *key);

/*
 * Enters a gated call. Returns the thread to hand to nvs_gate_leave, or NULL if the call is not
 * gated. Keeps errno. Only the common case is here, which needs no stack: the same stream as before,
 * nothing unusual since, the gate open. All else begins anew in nvs_gate_enter_slow.
 */
static inline struct nvs_thread *nvs_gate_enter(void *key)
{
	struct nvs_thread *t = nvs_self;
	const struct nvs_slot *slot;
	struct nvs_gpu *gpu;

	if (nvs_unlikely(!t || t->key != key ||
			 t->generation != atomic_load_explicit(&nvs_gate.generation,
							       memory_order_acquire) ||
			 atomic_load_explicit(&t->in_flight, memory_order_relaxed)))
		return nvs_gate_enter_slow(key);
	gpu = t->gpu;
	/*
	 * If the slot changes after this, the old one may say for a moment longer that the gate is
	 * open. The epoch counts: our client thread sets it, and looks at the flag afterwards.
	 */
	slot = atomic_load_explicit(&gpu->slot, memory_order_acquire);
	if (nvs_unlikely(nvs_throttled(gpu, slot)) && nvs_throttle_due(t->stream))
		return nvs_gate_enter_slow(key);
	atomic_store_explicit(&t->in_flight, t->flag, memory_order_seq_cst);
	if (nvs_unlikely(__atomic_load_n(&slot->word, __ATOMIC_SEQ_CST) !=
				 atomic_load_explicit(&gpu->epoch, memory_order_seq_cst) ||
			 !atomic_load_explicit(&t->stream->dirty, memory_order_seq_cst))) {
		atomic_store_explicit(&t->in_flight, 0, memory_order_release);
		return nvs_gate_enter_slow(key);
	}
	nvs_gate_count(t->count);
	return t;
}

/* Enters a call that works in one stream, and on these other GPUs too (a bit each). */
static inline struct nvs_thread *nvs_gate_enter_gpus(void *key, unsigned gpus)
{
	return nvs_likely(!gpus) ? nvs_gate_enter(key) : nvs_gate_enter_several(key, gpus);
}

static inline void nvs_gate_leave(struct nvs_thread *t)
{
	atomic_store_explicit(&t->in_flight, 0, memory_order_release);
}

#endif
