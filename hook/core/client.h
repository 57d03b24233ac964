// SPDX-License-Identifier: Apache-2.0
/* client.h: the process's side of the protocol: one thread, one connection, a lease per GPU. */
#ifndef NVSHARE_CLIENT_H
#define NVSHARE_CLIENT_H

#include <stdint.h>

#include "gpu.h"

#define NVS_SHIM_VERSION (0u << 16 | 1u << 8 | 0u)

/*
 * Starts the client for these GPUs; channel i is devices[i]. Until the scheduler has answered, or is
 * known to be absent, gated calls wait. If no thread can be made the process runs unarbitrated.
 */
void nvs_client_start(const struct nvs_device *devices, unsigned count,
		      uint32_t interposed, uint32_t bypassed);

/* After fork: no thread, no connection, nothing known. */
void nvs_client_fork_child(void);

#endif
