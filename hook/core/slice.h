// SPDX-License-Identifier: Apache-2.0
/*
 * slice.h: the time slice that the scheduler daemon wants the GPU's own scheduler to give this
 * process (SLICE), and whether slices can be set at all (CONTROLS).
 */
#ifndef NVSHARE_SLICE_H
#define NVSHARE_SLICE_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

/* The scheduler daemon wants this slice. nvs_client_lock is held. */
void nvs_slice_want(struct nvs_gpu *gpu, uint64_t slice_ns);

/* Tells the driver what it was not told yet. Preempter thread; the lock is held, and given up meanwhile. */
void nvs_slice_apply(struct nvs_gpu *gpu);

/* Whether to look at the controls. Lowers *next, the ns to the next question. Client thread, with its lock. */
bool nvs_controls_due(struct nvs_gpu *gpu, uint64_t now, uint64_t *next);

/* Tries the controls, and tells the scheduler daemon what is new. No lock is held. */
void nvs_controls_try(struct nvs_gpu *gpu);

#endif
