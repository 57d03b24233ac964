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
 * Waits until the GPU's gate may be open. Never called with a flag up. True, with the GPU's flag up:
 * this one call goes on while the gate is closed, because it needs only memory that is there, or
 * because of may_pass(). A signal handler may jump out. The process does not release these other
 * GPUs (keeps: a bit each) meanwhile, unless they are revoked.
 */
bool nvs_gate_wait(struct nvs_thread *t, struct nvs_gpu *gpu, enum nvs_need need, unsigned keeps);

/* The process uses this GPU: attach it. Cheap after the first time. */
void nvs_gpu_use(struct nvs_gpu *gpu);

/* Threads that left a gate without a word (longjmp) wait no more. nvs_client_lock is held. */
void nvs_gate_forget_waiters(uint64_t now);

#endif
