// SPDX-License-Identifier: Apache-2.0
/* drainer.h: a thread for each GPU does the drains that leases ask for. */
#ifndef NVSHARE_DRAINER_H
#define NVSHARE_DRAINER_H

#include "gpu.h"

/* Has the drains done that are due. Client thread. */
void nvs_drains_start(void);

/*
 * Has the GPU looked at, and the grant given back if there is nothing to do.
 * Client thread, under nvs_client_lock or not; nothing is waited for.
 */
void nvs_drainer_look(struct nvs_gpu *gpu);

/*
 * At the end of the process: has the grant given back, if there is one and the GPU has
 * nothing more to do; `leaves` is true meanwhile. Takes no lock.
 */
void nvs_gpu_give_back(struct nvs_gpu *gpu);

#endif
