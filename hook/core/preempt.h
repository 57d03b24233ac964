// SPDX-License-Identifier: Apache-2.0
/*
 * preempt.h: a drain that takes long is cut: the channels of this process go off the GPU in the
 * middle of its work, and go on again with the next grant. A call that must wait for the GPU (to
 * destroy a context, say) puts them on first; they go off again afterwards.
 *
 * Copies that have begun go on. Work that was cut keeps memory from moving: the application's copies that
 * wait for it stand before the mover's in the copy engines, and other processes may read a chunk that moves.
 * So where memory may have to leave, a drain is cut only when it would be fenced (tests/gpu/README.md).
 */
#ifndef NVSHARE_PREEMPT_H
#define NVSHARE_PREEMPT_H

#include <stdint.h>

#include "gpu.h"

/* Client thread; the lock is held. *next: nanoseconds until it is to be called again, if that is less. */
void nvs_preempt_tick(struct nvs_gpu *gpu, uint64_t now, uint64_t *next);

/* The GPU has finished what a drain waited for. offs: gpu->preempt.offs when the drain began. The lock is held. */
void nvs_preempt_learn(struct nvs_gpu *gpu, unsigned offs);

#endif
