// SPDX-License-Identifier: Apache-2.0
/*
 * pools.h: the driver's stream-ordered pools in the account. A pool counts with what is in use in
 * it. If it keeps freed memory for allocations to come, it counts with all that it has.
 */
#ifndef NVSHARE_POOLS_H
#define NVSHARE_POOLS_H

#include "account.h"

/* A pool's memory is on a GPU. NULL: it is host memory, or another process counts it. */
void nvs_memory_pool(uint64_t pool, struct nvs_gpu *gpu);

/*
 * A pool keeps freed memory, up to a release threshold in bytes (CU_MEMPOOL_ATTR_RELEASE_THRESHOLD):
 * from now on it counts with all that it has of the GPU, for which the driver is asked.
 */
void nvs_memory_pool_keeps(uint64_t pool, struct nvs_gpu *gpu, uint64_t threshold);
/* A pool is about to be destroyed: waits for threads that ask the driver about it. Or it was not after all. */
void nvs_memory_pool_going(uint64_t pool, bool going);

extern atomic_bool nvs_memory_pools_keep; /* any pool does */
/* The pool, if it keeps memory, may have shrunk. */
void nvs_memory_pool_recount(uint64_t pool);
/* The same, or grown by an allocation. now: not only when the host waits next. */
void nvs_memory_pool_grew(struct nvs_gpu *gpu, uint64_t pool, bool now);

/* Pools with more than their threshold give it back when the host waits. */
void nvs_memory_pools_recount(void);
extern atomic_bool nvs_memory_pools_shrink; /* there are any that may */

/*
 * Where there is no limit and nothing is swapped, an allocation from a pool is not entered: the pool
 * counts by what the driver says that it has, each second, and before a limit that has come since
 * refuses anything. What such a pool has in use when it is destroyed counts no more. False: the
 * allocation is to be entered.
 */
bool nvs_pool_unlist(struct nvs_gpu *gpu, uint64_t pool);
static inline bool nvs_memory_pool_unlisted(struct nvs_gpu *gpu, uint64_t pool)
{
	return nvs_likely(nvs_unlimited(gpu)) && pool &&
	       (atomic_load_explicit(&gpu->unlisted, memory_order_relaxed) == pool || nvs_pool_unlist(gpu, pool));
}

/* What such pools have may have changed, since they were all looked at. */
enum { NVS_POOLS_SHRANK = 1, NVS_POOLS_GREW };
extern atomic_uint nvs_memory_pools_change;
static inline void nvs_memory_pools_changed(unsigned how)
{
	if (atomic_load_explicit(&nvs_memory_pools_change, memory_order_relaxed) < how)
		atomic_store(&nvs_memory_pools_change, how);
}
void nvs_memory_pools_tick(uint64_t now); /* nvs_client_lock is held */
void nvs_memory_pools_ask(void);
/* Where there is a limit now: asks before something is claimed. how: at such a change, or a greater one. */
static inline void nvs_memory_pools_ask_for(const struct nvs_gpu *gpu, unsigned how)
{
	if (nvs_unlikely(atomic_load_explicit(&nvs_memory_pools_change, memory_order_relaxed) >= how) &&
	    !nvs_unlimited(gpu))
		nvs_memory_pools_ask();
}

/* Others than this process's GPU may use the pool's memory, so that it never moves. */
void nvs_memory_pool_share(uint64_t pool);
bool nvs_memory_pool_shared(uint64_t pool);

/* Whether the pool is known; *gpu as above. */
bool nvs_memory_pool_find(uint64_t pool, struct nvs_gpu **gpu);

/*
 * Takes from the pools of a GPU what they keep, as the driver does when the GPU is full: only if so
 * many bytes more exceed the limit, by no more than pools keep, and while no stream captures. wait:
 * for streams that may use it, two seconds at most. False: nothing was taken.
 */
bool nvs_memory_pools_trim(struct nvs_gpu *gpu, uint64_t bytes, bool wait);

void nvs_memory_pools_fork_child(void);

/* ---- for memory.c; the lock of the account is held ---- */

/*
 * What a pool would count with in addition if so many bytes more were in use, and that they are.
 * False: the pool is not counted on this GPU.
 */
bool nvs_pool_grows(uint64_t pool, struct nvs_gpu *gpu, uint64_t bytes, uint64_t *grows);
void nvs_pool_enter(uint64_t pool, uint64_t bytes);
/* An allocation that was counted in full is in the pool. False: the pool is not counted on this GPU. */
bool nvs_pool_takes_in(uint64_t pool, struct nvs_gpu *gpu, uint64_t bytes);
/* An allocation in the pool ends, or its claim does. */
void nvs_pool_uncount(struct nvs_gpu *gpu, uint64_t pool, uint64_t bytes);
/* The pool ends: it keeps nothing. Its allocations live on, and count by themselves. */
void nvs_pool_ends(const struct nvs_entry *pool);

#endif
