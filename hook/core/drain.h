// SPDX-License-Identifier: Apache-2.0
/* drain.h: whether the GPU has finished what was submitted. */
#ifndef NVSHARE_DRAIN_H
#define NVSHARE_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

enum nvs_drained {
	NVS_DRAINED,
	NVS_DRAIN_UNPROVEN, /* a capture hides what still runs */
	NVS_DRAIN_STOPPED,  /* the process ends, and there is work that the driver is not asked about */
};

/*
 * Waits until the GPU has finished what was submitted on it. The gate is closed, no call is in
 * flight. While a capture is open, which a synchronised context would invalidate, streams are looked
 * at one by one, for at most patience_ns.
 */
enum nvs_drained nvs_drain(struct nvs_gpu *gpu, uint64_t patience_ns);

/*
 * Forgets the work that nvs_drain has waited for. The gate is still closed. took_ns: from the closed
 * gate to the end of the work; 0: not known.
 */
void nvs_drain_forget(struct nvs_gpu *gpu, uint64_t took_ns);

/* A call passed the closed gate: the next drain looks at everything again. */
void nvs_streams_touch(struct nvs_gpu *gpu);

/* Whether anything was submitted on the GPU since the last drain. Asks no driver. */
bool nvs_gpu_has_work(struct nvs_gpu *gpu);

enum nvs_streams_state {
	NVS_STREAMS_IDLE,
	NVS_STREAMS_BUSY,
	NVS_STREAMS_UNKNOWN, /* a capture is open, or a stream cannot be asked about */
};

/* What the streams with work do now. No lock is held; nothing is waited for. */
enum nvs_streams_state nvs_streams_sample(struct nvs_gpu *gpu);

/* Whether all streams that can be asked about are idle now; a drain confirms the guess. */
bool nvs_streams_idle(struct nvs_gpu *gpu);

/*
 * Has the driver see what has ended in the streams of the GPU, by asking each, the caller's default
 * ones too, and synchronising those that are idle. A busy one is not waited for: a stream memory
 * operation in it may wait for the caller. False: one was busy, a capture is open, a drain is under
 * way, or the driver lacks a function.
 */
bool nvs_streams_settle(struct nvs_gpu *gpu);

#endif
