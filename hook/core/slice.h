// SPDX-License-Identifier: Apache-2.0
/*
 * slice.h: the time slice that the GPU's own scheduler gives this process, as the
 * scheduler daemon says (SLICE), and whether slices can be set at all (CONTROLS).
 */
#ifndef NVSHARE_SLICE_H
#define NVSHARE_SLICE_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

/* What core asks of the layers above it. No lock is held. */
struct nvs_slice_ops {
	/* Sets the slice of all contexts, and of those to come. 0: the driver's own. */
	bool (*set)(struct nvs_gpu *gpu, uint64_t slice_ns);
	/* Tries the controls that were not tried, and says what is known of them. */
	void (*prove)(struct nvs_gpu *gpu, struct nvs_controls *c);
	/* The process's contexts are on other GPUs than before. */
	void (*moved)(void);
};

extern const struct nvs_slice_ops nvs_slice_ops;

/* The scheduler daemon wants this slice. nvs_client_lock is held. */
void nvs_slice_want(struct nvs_gpu *gpu, uint64_t slice_ns);

/* Tells the driver what it was not told yet. Client thread, no lock is held. */
void nvs_slices_apply(void);

/*
 * Whether the controls are to be looked at. Lowers *next, the nanoseconds until the
 * question is to be asked again. Client thread; nvs_client_lock is held.
 */
bool nvs_controls_due(struct nvs_gpu *gpu, uint64_t now, uint64_t *next);

/*
 * Tries the controls, and tells the scheduler daemon what is new. Sends controls to the
 * driver; no lock is held.
 */
void nvs_controls_look(struct nvs_gpu *gpu);

#endif
