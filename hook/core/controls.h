// SPDX-License-Identifier: Apache-2.0
/* controls.h: the compute channels of this process off a GPU, and on again. No lock is held. */
#ifndef NVSHARE_CONTROLS_H
#define NVSHARE_CONTROLS_H

#include <stdbool.h>

#include "gpu.h"
#include "rm.h"

/* Whether the controls were seen to work with this version of the driver. */
bool nvs_controls_listed(const struct nvs_rm_state *s);

/* Whether the driver's controls work for this process, as far as a test without work tells. */
bool nvs_channels_work(const struct nvs_gpu *gpu);
/* Takes the process's compute channels off the GPU, or puts them on. False: as before. Ends within seconds. */
bool nvs_channels_switch(const struct nvs_gpu *gpu, bool on);
/* Whether they are all on, or off, and nobody keeps them on. */
bool nvs_channels_are(const struct nvs_gpu *gpu, bool on);

/*
 * effect.c: whether channels stand still that the driver says are off (NVS_RM_OK), work goes on
 * (NVS_RM_FAKED), or it could not be seen now (NVS_RM_UNTRIED): an event in a stream of its own comes
 * with the channels on, and must not with the channels off. Stops this process's work on the GPU for
 * some 2 ms. Drainer thread; no lock is held. Ends within seconds.
 */
enum nvs_rm_result nvs_effect_look(struct nvs_gpu *gpu);

#endif
