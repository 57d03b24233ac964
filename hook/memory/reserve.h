// SPDX-License-Identifier: Apache-2.0
/*
 * reserve.h: the budget of the process, its part of the container's memory limit.
 *
 * For each GPU the scheduler has granted `reserved` bytes, and `used` bytes are counted. While used
 * stays below reserved, nobody is asked; more is reserved in steps. Without a limit the scheduler is
 * told and no answer is waited for.
 *
 * Locks, outermost first: a budget's ask, nvs_client_lock, nvs_memory_lock. None is held over a
 * driver call, and only ask while an answer is waited for.
 */
#ifndef NVSHARE_RESERVE_H
#define NVSHARE_RESERVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"
#include "query.h"
#include "wire.h"

static inline uint64_t nvs_minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

struct nvs_budget {
	_Atomic uint64_t used, peak; /* bytes; read without the lock below, and used changes without it */
	_Atomic uint64_t reserved;   /* bytes that may be used without asking; changed under the lock */
	atomic_bool unlimited;       /* when last looked at: no limit, and nothing is swapped */
	/* Guarded by nvs_memory_lock. */
	uint64_t asking;    /* part of used whose reservation is not answered yet */
	uint64_t graphs;    /* part of used that graphs own */
	uint64_t limit;     /* of the container, last known; 0: none */
	uint64_t others;    /* bytes of the container's other processes, last known */
	uint64_t tight;     /* value of others for which waiting was in vain */
	uint64_t acked;     /* reserved, in the scheduler's last answer */
	uint64_t sent;      /* serial of the last RESERVE */
	uint64_t answered;  /* no answer is awaited up to this serial */
	uint32_t code;      /* of the last answer ... */
	uint64_t coded;     /* ... which was to this serial */
	bool known;         /* was attached once, so that limit is valid */
	bool busy;          /* a thread waits for an answer */
	bool deaf;          /* the scheduler did not answer; its answers are not waited for */
	bool swap;          /* the scheduler has to find room for each promise: it is always asked */
	/* Guarded by nvs_client_lock. */
	bool account;       /* the scheduler keeps account of memory */
	/* Guarded by itself. */
	struct nvs_lock ask;
	atomic_uint event;  /* futex: an answer came, or none will */
};

/* This thread has a lock of memory, or waits for it. Only a signal handler sees that. */
extern __thread bool nvs_memory_locked __attribute__((tls_model("initial-exec")));

/* Whether memory is counted: not in a signal handler above a lock of memory, nor while the process ends. */
static inline bool nvs_counting(void)
{
	return nvs_active() && !nvs_memory_locked &&
	       !atomic_load_explicit(&nvs_exiting, memory_order_relaxed);
}

extern struct nvs_lock nvs_memory_lock;

void nvs_budget_init(struct nvs_budget *b);

/* Whether there is no limit now, and nothing is swapped: the page tells first. Takes no lock. */
static inline bool nvs_unlimited(const struct nvs_gpu *gpu)
{
	return atomic_load_explicit(&gpu->budget->unlimited, memory_order_relaxed) &&
	       !__atomic_load_n(&atomic_load_explicit(&gpu->slot, memory_order_acquire)->mem_limit, __ATOMIC_RELAXED);
}

/* Whether little is left below the container's limit. nvs_memory_lock is held. */
static inline bool nvs_budget_is_tight(const struct nvs_budget *b)
{
	return b->limit && b->used + b->others > b->limit - b->limit / 8;
}

/* Counts so many bytes, out of what is reserved. False: that is not enough. Takes no lock. */
static inline bool nvs_budget_take(struct nvs_budget *b, uint64_t bytes)
{
	uint64_t used = atomic_load_explicit(&b->used, memory_order_relaxed), reserved;

	do {
		reserved = atomic_load_explicit(&b->reserved, memory_order_relaxed);
		if (used > reserved || bytes > reserved - used)
			return false;
	} while (!atomic_compare_exchange_weak(&b->used, &used, used + bytes));
	if (nvs_likely(used + bytes <= atomic_load(&b->reserved)))
		return true;
	atomic_fetch_sub(&b->used, bytes); /* it is being returned to the scheduler */
	return false;
}

/* Reserves more, and counts so many bytes. False: refused. Waits some seconds at most. */
bool nvs_reserve(struct nvs_gpu *gpu, uint64_t bytes);

/* Waits until the scheduler has answered for the GPU, or is absent; some seconds at most. */
void nvs_reserve_attach(struct nvs_gpu *gpu);

/* After a change of used: tells the scheduler if need be. Never waits. */
void nvs_reserve_settle(struct nvs_gpu *gpu);

/* Whether the scheduler has to be told, as far as is known without the page. nvs_memory_lock is held. */
bool nvs_reserve_due(const struct nvs_budget *b);

/*
 * The limits of a GPU, or (gpu NULL) of any by its UUID. Of one that the process has begun to use it
 * waits until the scheduler has answered for it, as an allocation does, once; of another it asks as
 * nvs_query_limits. False: no scheduler knows.
 */
bool nvs_limits_of(struct nvs_gpu *gpu, const uint8_t *uuid, struct nvs_limits *out);

/* ---- the client's side; nvs_client_lock is held ---- */

void nvs_reserve_attached(struct nvs_gpu *gpu);
void nvs_reserve_answered(struct nvs_gpu *gpu, const struct nvs_frame *f);
void nvs_reserve_lost(void); /* no answer will come: the connection is lost */
/* Returns reservations that were not used for long. Returns when to call again, ns. */
uint64_t nvs_reserve_tick(void);

void nvs_reserve_fork_child(void);

#endif
