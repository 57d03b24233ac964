// SPDX-License-Identifier: Apache-2.0
/* drainer.h: does the drains that leases ask for. No lock is held. */
#ifndef NVSHARE_DRAINER_H
#define NVSHARE_DRAINER_H

#include "gpu.h"

/* Does the drains that are due, or has them done. Client thread. */
void nvs_drains_start(void);

/*
 * At the end of the process: has the grant given back, if there is one and the GPU has
 * nothing more to do; `leaves` is true meanwhile. Takes no lock.
 */
void nvs_gpu_give_back(struct nvs_gpu *gpu);

#endif
