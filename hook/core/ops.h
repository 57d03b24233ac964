// SPDX-License-Identifier: Apache-2.0
/* ops.h: what core asks of the layers above it, which know about memory: swap/ops.c fills the table. */
#ifndef NVSHARE_OPS_H
#define NVSHARE_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

struct nvs_memory_ops {
	/* Once, after the driver's start and before the client thread. No lock is held. */
	void (*start)(void);

	/* ---- nvs_client_lock is held ---- */

	/* Whether any GPU's memory can move: said in REGISTER. */
	bool (*capable)(void);
	/* Bytes allocated now, and the most there ever were. */
	void (*usage)(struct nvs_gpu *gpu, uint64_t *now, uint64_t *peak);
	/* ATTACHED came for the GPU, and the lease has taken note. */
	void (*attached)(struct nvs_gpu *gpu);
	/* The connection is lost: no answer will come. */
	void (*lost)(void);
	/* RESERVED, ROOM or ARENA came. fd: what came with it, or -1; the caller closes it. */
	void (*receive)(struct nvs_gpu *gpu, const struct nvs_frame *f, int fd);
	/* Called now and then. Returns when to call again, ns. */
	uint64_t (*tick)(uint64_t now);
	/* After each step of a lease. False: the gate may not open yet, memory is away. */
	bool (*lease_changed)(struct nvs_gpu *gpu, enum lease_gate gate, bool opens);
	/* The gate has opened, later than the grant, because memory is back. */
	void (*gate_opened)(struct nvs_gpu *gpu);
	/* RELEASE is sent next. */
	void (*before_release)(struct nvs_gpu *gpu);
	/* The process ends. Whether no memory is away: then later calls need no more than a grant. */
	bool (*leave)(struct nvs_gpu *gpu);

	/* ---- with nvs_client_lock or without ---- */

	/* A call is to pass a closed gate: whether all memory it may touch is there. */
	bool (*all_there)(struct nvs_gpu *gpu);
	/* Whether memory of the GPU may be away: a call that only names memory waits too. */
	bool (*moves)(struct nvs_gpu *gpu);
	/* Whether memory may have to leave the GPU for others. */
	bool (*may_leave)(struct nvs_gpu *gpu);

	/* ---- no lock is held ---- */

	/* NVS_LOOK_POOLS, which the tick has asked for. */
	void (*look)(void);
	/* The limit refused so many bytes: whether memory was given up that was only cached. */
	bool (*make_room)(struct nvs_gpu *gpu, uint64_t bytes);
	/*
	 * The process ends: brings memory in on the calling thread, as far as there is room, and
	 * opens the gate once all is there. False: no memory has to come in.
	 */
	bool (*fill_at_exit)(struct nvs_gpu *gpu);
};

extern const struct nvs_memory_ops nvs_memory_ops;

#endif
