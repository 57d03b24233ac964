// SPDX-License-Identifier: Apache-2.0
/* throttle.h: the work ahead of the GPU is kept short while clients take turns. */
#ifndef NVSHARE_THROTTLE_H
#define NVSHARE_THROTTLE_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"
#include "wire.h"
#include "work.h"

/*
 * Whether somebody else may get the GPU after this client. Nobody takes turns where all hold it at
 * once, but a client with a core limit has to leave, and a latency client keeps others from the GPU.
 */
static inline bool nvs_takes_turns(const struct nvs_slot *slot)
{
	uint32_t all_at_once = NVS_GRANT_CONCURRENT | NVS_GRANT_LATENCY;

	return __atomic_load_n(&slot->present, __ATOMIC_RELAXED) &&
	       ((__atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & all_at_once) !=
			NVS_GRANT_CONCURRENT ||
		__atomic_load_n(&slot->core_limit, __ATOMIC_RELAXED));
}

/* Whether the work ahead of the GPU is to be kept short. */
static inline bool nvs_throttled(struct nvs_gpu *gpu, const struct nvs_slot *slot)
{
	return nvs_takes_turns(slot) &&
	       (__atomic_load_n(&slot->waiters, __ATOMIC_RELAXED) ||
		!atomic_load_explicit(&gpu->unbound, memory_order_relaxed));
}

/* Whether nvs_throttle_step has to see this call; if not, it is counted. */
static inline bool nvs_throttle_due(struct nvs_stream *s)
{
	unsigned count = atomic_load_explicit(&s->throttle.count, memory_order_relaxed) + 1;

	if (count > atomic_load_explicit(&s->throttle.batch, memory_order_relaxed))
		return true;
	atomic_store_explicit(&s->throttle.count, count, memory_order_relaxed);
	return false;
}

/*
 * Client thread, with its lock: nothing is bounded while nobody waits, if nobody has wanted the GPU
 * for a while and a long drain can be cut: a program whose CPU is slow does ahead what it can.
 */
void nvs_throttle_tick(struct nvs_gpu *gpu, uint64_t now);

/* The gate was closed, or shut for a moment: others want the GPU. The client's lock is held. */
void nvs_throttle_wanted(struct nvs_gpu *gpu, uint64_t now);

/*
 * The stream has something in it now that waits for somebody outside the GPU, perhaps for the thread
 * that launches behind it. Work behind that is bounded for so long at most.
 */
void nvs_throttle_behind(void *key, uint64_t patience_ns);

/* Keeps the work ahead of the GPU short. Never called with a flag up. */
void nvs_throttle_step(struct nvs_stream *s, void *key);

/* What the stream had ahead, with others, took so long after the gate closed. */
void nvs_throttle_drained(struct nvs_stream *s, uint64_t took_ns);

#endif
