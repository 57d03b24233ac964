// SPDX-License-Identifier: Apache-2.0
/*
 * identify.h: which GPUs the process is on, by the driver's word.
 */
#ifndef NVSHARE_IDENTIFY_H
#define NVSHARE_IDENTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* What the driver says is the UUID of a device; false: it does not say. No lock is held. */
bool nvs_device_uuid(int dev, uint8_t *uuid);

/*
 * The process may have been moved to another GPU while it was checkpointed: its devices
 * then have other UUIDs. Client thread, without its lock, before it attaches again. It waits
 * for as long as the process is checkpointed. False: the process ends, and the driver cannot be
 * asked any more.
 */
bool nvs_gpus_identify(void);

#endif
