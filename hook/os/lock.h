// SPDX-License-Identifier: Apache-2.0
/*
 * lock.h: locks, and the order in which a thread takes them: that of their ranks, so that no two
 * threads wait for each other. The client thread has to hear the scheduler at any time, so the
 * driver, which may hold a call up, is not called under a lock that it takes. With NVS_LOCK_CHECKS,
 * as in debug builds and in tests, both rules are asserted.
 */
#ifndef NVSHARE_LOCK_H
#define NVSHARE_LOCK_H

#include <pthread.h>
#include <stdbool.h>

#include "glibc.h"

enum nvs_rank {
	NVS_RANK_QUERY_LIMITS, /* memory/query.c: limits of a GPU that the process does not use */
	NVS_RANK_IPC,     /* swap/ipc.c: memory of other processes */
	NVS_RANK_ASK,     /* struct nvs_budget: one thread asks the scheduler for memory */
	NVS_RANK_DRAIN,   /* struct nvs_gpu: contexts are synchronised, or destroyed */
	NVS_RANK_MOVE,    /* struct nvs_gpu: the mover uses contexts, or they are destroyed */
	NVS_RANK_QUERY,   /* struct nvs_gpu: a stream is asked about, and is not destroyed meanwhile */
	NVS_RANK_SPANS,   /* swap/space.c: addresses are reserved */
	NVS_RANK_CONTROL, /* rm/rm_control.c: a control is sent to the driver's channels, from inside a driver call too */
	/* The client thread takes those that follow: no driver call under them. */
	NVS_RANK_CLIENT,  /* core/connection.h: leases and the connection */
	NVS_RANK_SWAP,    /* struct nvs_swap */
	NVS_RANK_MEMORY,  /* memory/: what is allocated */
	NVS_RANK_TABLE,   /* core/work.h: contexts and streams */
	NVS_RANK_CHANNELS, /* rm/rm_object.c: the driver's channels; any driver call may take it */
};

struct nvs_lock {
	pthread_mutex_t mutex;
	enum nvs_rank rank;
};

#define NVS_LOCK(rank_) { PTHREAD_MUTEX_INITIALIZER, rank_ }

#ifdef NVS_LOCK_CHECKS
void nvs_lock_check(const struct nvs_lock *l); /* the thread may wait for it */
void nvs_lock_taken(const struct nvs_lock *l);
void nvs_lock_given_up(const struct nvs_lock *l);
void nvs_lock_check_driver(void); /* the thread may call the driver */
void nvs_locks_fork_child(void);
#else
static inline void nvs_lock_check(const struct nvs_lock *l) { (void)l; }
static inline void nvs_lock_taken(const struct nvs_lock *l) { (void)l; }
static inline void nvs_lock_given_up(const struct nvs_lock *l) { (void)l; }
static inline void nvs_lock_check_driver(void) { }
static inline void nvs_locks_fork_child(void) { }
#endif

static inline void nvs_lock(struct nvs_lock *l)
{
	nvs_lock_check(l);
	pthread_mutex_lock(&l->mutex);
	nvs_lock_taken(l);
}

static inline bool nvs_trylock(struct nvs_lock *l)
{
	if (nvs_late.mutex_trylock(&l->mutex) != 0)
		return false;
	nvs_lock_taken(l);
	return true;
}

static inline void nvs_unlock(struct nvs_lock *l)
{
	nvs_lock_given_up(l);
	pthread_mutex_unlock(&l->mutex);
}

#endif
