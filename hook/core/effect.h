// SPDX-License-Identifier: Apache-2.0
/*
 * effect.h: whether channels that the driver says are off are off. A driver that answers
 * success and changes nothing would let the work of a client go on beside the next one's.
 */
#ifndef NVSHARE_EFFECT_H
#define NVSHARE_EFFECT_H

#include "gpu.h"

enum nvs_effect {
	NVS_EFFECT_UNKNOWN, /* it could not be seen now */
	NVS_EFFECT_SEEN,
	NVS_EFFECT_NONE,    /* work went on with the channels off */
};

/*
 * Records an event in a stream of its own, in a context of the process: with the channels on
 * it comes, with the channels off it must not. Stops the GPU's work of this process for some
 * 2 ms. Drainer thread; no lock is held. Ends within seconds, whatever the driver does.
 */
enum nvs_effect nvs_effect_look(struct nvs_gpu *gpu);

#endif
