// SPDX-License-Identifier: Apache-2.0
/* shared_state.h: what shared.c and engine.c have in common. */
#ifndef SIMGPU_SHARED_STATE_H
#define SIMGPU_SHARED_STATE_H

#include "shared.h"

#define SIM_SWEEP_NS 100000000ull /* between two looks for dead processes */

extern struct sim_state *sim_st;
extern struct sim_log *sim_lg;
extern int sim_self; /* the slot of this process, or -1 */

/* Between all threads of all processes. What follows wants it held. */
void sim_lock(void);
void sim_unlock(void);

void sim_bury_dead(void);
/* The slot of a live process, by its pid as this process sees it; -1: none. */
int sim_slot_of(uint32_t pid);
/* Of all live processes on a GPU of the node. */
uint64_t sim_used_locked(int gpu);
/* sim_lock(), once this process is neither locked nor checkpointed. */
void sim_lock_running(void);
/* Drops dead processes that have work pending on a GPU. Returns how many. */
int sim_bury_pending(int gpu, uint64_t now);
void sim_record_work(int gpu, int kind, uint64_t submit, uint64_t start, uint64_t end);

/* The compute channels of this process go off: what is in the log of it ends now, and the rest is not there. */
void sim_record_off(int gpu, uint64_t now);
/* They are on again, and so much is left. */
void sim_record_on(int gpu, uint64_t now, uint64_t left);

/* Whether a process has compute work; its clock stands still at times then. */
static inline int sim_has_work(const struct sim_slot_gpu *s)
{
	return s->v < s->tail[SIM_COMPUTE];
}

/* Brings all clocks of a GPU up to now. */
void sim_advance(int gpu, uint64_t now);

#endif
