// SPDX-License-Identifier: Apache-2.0
/*
 * grant.h: what the lease of a GPU decides is carried out: gates open and close, frames are sent,
 * drains are asked for. nvs_client_lock is held for all of these. Events of an application's thread
 * never ask for a drain.
 */
#ifndef NVSHARE_GRANT_H
#define NVSHARE_GRANT_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

/* Feeds an event to the lease and does what it asks for. */
void nvs_gpu_step(struct nvs_gpu *gpu, struct lease_event ev);

/* Wakes the threads that wait at the gate, to look again. */
void nvs_gpu_wake(struct nvs_gpu *gpu);

/* Something has changed that decides whether channels are to be off. */
void nvs_gpu_wake_preempter(struct nvs_gpu *gpu);

/* Sends the counters of each GPU that have changed, once a second. */
void nvs_stats_send(uint64_t now);

/* All memory is there: the gate of an open lease opens. */
void nvs_gpu_filled(struct nvs_gpu *gpu);

/* The room in the slot; UINT64_MAX: the process runs without a scheduler. False: there is no page to look at. */
bool nvs_gpu_room(struct nvs_gpu *gpu, uint64_t *room);

/* A GPU whose scheduler is gone for too long (true) runs without one, as NVSHARE_SCHEDULER_LOSS says. */
bool nvs_gpu_try_give_up(struct nvs_gpu *gpu, uint64_t now);
/* The same; the lock is not held. */
void nvs_gpu_give_up_if_lost(struct nvs_gpu *gpu);

#endif
