// SPDX-License-Identifier: Apache-2.0
/*
 * utilization.h: how often the GPU has work of this process. While the gate is open and others want
 * the GPU, the drainer looks every few milliseconds whether a stream has work, and tells the
 * scheduler (UTIL): turns of a program that leaves the GPU idle between its kernels waste that time.
 * Nothing is added to a launch.
 */
#ifndef NVSHARE_UTILIZATION_H
#define NVSHARE_UTILIZATION_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

/* Whether a sample is due. Lowers *next, the nanoseconds to the next question. Client thread, with its lock. */
bool nvs_utilization_due(struct nvs_gpu *gpu, uint64_t now, uint64_t *next);

/* Takes a sample, and tells the scheduler now and then. Asks the driver; no lock is held. */
void nvs_utilization_sample(struct nvs_gpu *gpu);

#endif
