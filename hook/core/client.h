// SPDX-License-Identifier: Apache-2.0
/*
 * client.h: the process's side of the protocol: one thread, one connection,
 * a lease per GPU.
 */
#ifndef NVSHARE_CLIENT_H
#define NVSHARE_CLIENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "wire.h"

#define NVS_SHIM_VERSION (0u << 16 | 1u << 8 | 0u)

/* A GPU as the driver describes it. */
struct nvs_device {
	int dev;                     /* CUdevice */
	uint8_t uuid[NVS_UUID_SIZE];
	uint64_t total_mem;          /* bytes */
};

/* Nanoseconds of CLOCK_MONOTONIC. */
uint64_t nvs_now(void);

/*
 * Starts the client for these GPUs; channel i is devices[i]. Until the
 * scheduler has answered, or is known to be absent, gated calls wait. If no
 * thread can be made the process runs unarbitrated.
 */
void nvs_client_start(const struct nvs_device *devices, unsigned count,
		      uint32_t interposed, uint32_t bypassed);

/* The process uses this GPU: attach it. Cheap after the first time. */
void nvs_client_use(unsigned channel);

/* Channel of a CUdevice, -1 if there is none. */
int nvs_client_channel(int dev);

/* And of a GPU's UUID, raw. */
int nvs_client_channel_of_uuid(const uint8_t *uuid);

/* What a channel is. */
int nvs_client_device(unsigned channel);
uint64_t nvs_client_memory(unsigned channel); /* bytes */
const uint8_t *nvs_client_uuid(unsigned channel);

extern atomic_bool nvs_exiting; /* the process ends */

/* The process ends: last statistics, no driver calls any more. */
void nvs_client_exit(void);

/* After fork: no thread, no connection, nothing known. */
void nvs_client_fork_child(void);

/* Makes the thread key of the gate. */
void nvs_gate_init(void);

#endif
