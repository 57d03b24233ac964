// SPDX-License-Identifier: Apache-2.0
/* drainer.h: a thread for each GPU does the drains that leases ask for. */
#ifndef NVSHARE_DRAINER_H
#define NVSHARE_DRAINER_H

#include "gpu.h"

/* Has the drains done that are due. Client thread. */
void nvs_drains_start(void);

enum nvs_look {
	NVS_LOOK_IDLE   = 1u << 0, /* give the grant back if the GPU has nothing to do */
	NVS_LOOK_SAMPLE = 1u << 1, /* count whether it has; see utilization.h */
	NVS_LOOK_CONTROLS = 1u << 2, /* try the controls of its own scheduler; see slice.h */
	NVS_LOOK_LEAVE    = 1u << 3, /* see nvs_gpu_give_back */
	NVS_LOOK_POOLS    = 1u << 4, /* ask what pools have; see memory/pools.h */
};

/* Has the GPU looked at. Client thread; nothing is waited for. */
void nvs_drainer_look(struct nvs_gpu *gpu, enum nvs_look why);

/*
 * At the end of the process: has the grant given back, if the GPU has nothing more to do; `leaves`
 * is true meanwhile. A program that has no drainer yet keeps it, if no memory can leave.
 * nvs_client_lock is held.
 */
void nvs_gpu_give_back(struct nvs_gpu *gpu);

#endif
