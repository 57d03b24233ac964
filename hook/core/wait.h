// SPDX-License-Identifier: Apache-2.0
/* wait.h: threads of the application wait at the gate of a GPU. */
#ifndef NVSHARE_WAIT_H
#define NVSHARE_WAIT_H

#include <stdbool.h>
#include <stdint.h>

#include "thread.h"

enum nvs_need {
	NVS_NEED_GPU,    /* the call submits work */
	NVS_NEED_MEMORY, /* the call only needs the memory that it names */
};

/*
 * Waits until the GPU's gate may be open. Never called with a flag up. Returns true with the
 * GPU's flag up if this one call is to go on while the gate is closed: the call needs only
 * memory, and all memory is on the GPU; or the running drain waits for more than GPU work, see
 * may_pass(). A signal handler may jump out of the wait. The process does not release these other
 * GPUs (keeps: a bit each) meanwhile, unless the scheduler revokes them.
 */
bool nvs_gate_wait(struct nvs_thread *t, struct nvs_gpu *gpu, enum nvs_need need, unsigned keeps);

/* The process uses this GPU: attach it. Cheap after the first time. */
void nvs_gpu_use(struct nvs_gpu *gpu);

/* Threads that left a gate without a word (longjmp) wait no more. nvs_client_lock is held. */
void nvs_gate_forget_waiters(uint64_t now);

#endif
