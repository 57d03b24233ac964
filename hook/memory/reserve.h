// SPDX-License-Identifier: Apache-2.0
/*
 * reserve.h: what the process may use of its container's memory limit.
 *
 * Per GPU the scheduler has granted `reserved` bytes and the book counts
 * `used`. As long as used stays below reserved nobody is asked; more is reserved
 * in steps. Without a limit the scheduler is told and not waited for.
 *
 * Locks, outermost first: a budget's ask, nvs_client_lock, nvs_memory_lock. None
 * is held over a driver call. Only ask is held while waiting for an answer.
 */
#ifndef NVSHARE_RESERVE_H
#define NVSHARE_RESERVE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"
#include "observe.h"
#include "wire.h"

struct nvs_budget {
	/* Guarded by nvs_memory_lock. */
	_Atomic uint64_t used, peak; /* bytes; read without the lock too */
	uint64_t reserved;  /* to be used without asking */
	uint64_t asking;    /* part of used whose reservation is not answered yet */
	uint64_t graphs;    /* part of used that graphs own */
	uint64_t limit;     /* of the container, last known; 0: none */
	uint64_t others;    /* bytes its other processes have, last known */
	uint64_t tight;     /* others, when waiting for them to give back was of no use */
	uint64_t acked;     /* reserved, in the scheduler's last answer */
	uint64_t sent;      /* serial of the last RESERVE */
	uint64_t answered;  /* no answer is awaited up to this serial */
	uint32_t code;      /* of the last answer */
	bool known;         /* was attached once: limit means something */
	bool busy;          /* a thread waits for an answer */
	bool deaf;          /* the scheduler did not answer; do not wait for it */
	bool swap;          /* it has to find room for what is promised: always ask */
	/* Guarded by nvs_client_lock. */
	bool account;       /* the scheduler that the GPU is attached to keeps one */
	/* Guarded by itself. */
	pthread_mutex_t ask;
	atomic_uint event;  /* futex: an answer came, or none will */
};

/* This thread has the lock of the book, or waits for it: a signal handler runs. */
extern __thread bool nvs_memory_locked __attribute__((tls_model("initial-exec")));

/*
 * Whether memory is counted: not in a signal handler that interrupted whoever
 * has the book's lock, and not any more while the process ends.
 */
static inline bool nvs_counting(void)
{
	return nvs_active() && !nvs_memory_locked &&
	       !atomic_load_explicit(&nvs_exiting, memory_order_relaxed);
}

extern pthread_mutex_t nvs_memory_lock;

void nvs_budget_init(struct nvs_budget *b);

/* Gets room for bytes that do not fit into what is reserved, and counts them. */
bool nvs_reserve(struct nvs_gpu *gpu, uint64_t bytes);

/* Waits, seconds at most, until it is known what holds for the GPU. */
void nvs_reserve_attach(struct nvs_gpu *gpu);

/* After a change of used: tells the scheduler if it has to know. Never waits. */
void nvs_reserve_settle(struct nvs_gpu *gpu);

/*
 * Whether settling is due, by what is known: the client thread, which looks at
 * the page as well, comes by now and then. nvs_memory_lock is held.
 */
bool nvs_reserve_due(const struct nvs_budget *b);

/* Whether answers about a GPU's memory may be waited for: it has a limit, or is swapped. */
bool nvs_reserve_limited(struct nvs_gpu *gpu);

/*
 * Of a GPU, or (gpu NULL) of any GPU by UUID. A GPU that the process does
 * not use is asked about over a connection of its own; that takes 200 ms at most
 * and leaves nothing behind. Returns false if there is no scheduler to tell.
 */
bool nvs_limits_of(struct nvs_gpu *gpu, const uint8_t *uuid, struct nvs_limits *out);

/* ---- the client's side; nvs_client_lock is held ---- */

void nvs_reserve_attached(struct nvs_gpu *gpu);
void nvs_reserve_answered(struct nvs_gpu *gpu, const struct nvs_frame *f);
void nvs_reserve_lost(void); /* the connection is */
/* Gives back what was long unused; returns when to come again, ns. */
uint64_t nvs_reserve_tick(void);

void nvs_reserve_fork_child(void);

#endif
