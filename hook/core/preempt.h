// SPDX-License-Identifier: Apache-2.0
/*
 * preempt.h: a drain that takes long is cut: the channels of this process go off the
 * GPU in the middle of its work, and go on again with the next grant. Who waits for the
 * GPU, as the end of a context does, puts them on before. They go off again when it ends.
 *
 * Copies between host and GPU that have begun go on. Nothing is cut where memory of the
 * process can be moved: no memory could move then. The application's copies that wait for the
 * kernel stand before the mover's in the queues of the copy engines, and those that do not wait
 * may read a chunk that moves (tests/gpu/README.md, "What a driver lets a process do").
 */
#ifndef NVSHARE_PREEMPT_H
#define NVSHARE_PREEMPT_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

/* What core asks of the layers above it. No lock is held. */
struct nvs_preempt_ops {
	/* Whether the driver's controls work for this process, as far as a test without work tells. */
	bool (*works)(const struct nvs_gpu *gpu);
	/*
	 * Takes all compute channels of the process off the GPU, or puts them on. False:
	 * they are as before. The call ends within seconds, whatever the driver does.
	 */
	bool (*channels)(const struct nvs_gpu *gpu, bool on);
	/* Whether they are off, and nobody has asked for them to be on. */
	bool (*off)(const struct nvs_gpu *gpu);
	/* Whether they are on, and nobody keeps them on. */
	bool (*on)(const struct nvs_gpu *gpu);
};

extern const struct nvs_preempt_ops nvs_preempt_ops;

/*
 * Called by the client thread, now and then: the lock is held. *next: nanoseconds until
 * it is to be called again, if that is less.
 */
void nvs_preempt_tick(struct nvs_gpu *gpu, uint64_t now, uint64_t *next);

/* The GPU has finished what a drain waited for. offs: gpu->offs when the drain began. The lock is held. */
void nvs_preempt_learn(struct nvs_gpu *gpu, unsigned offs);

#endif
