// SPDX-License-Identifier: Apache-2.0
/* pass.h: one pass, in which the mover (move.c) takes memory out or in. */
#ifndef NVSHARE_PASS_H
#define NVSHARE_PASS_H

#include <stdbool.h>
#include <stdint.h>

struct nvs_gpu;

enum nvs_direction { NVS_PASS_IN, NVS_PASS_OUT, NVS_PASS_IN_AT_EXIT };

struct nvs_pass_result {
	bool moved;
	uint32_t stuck; /* why the pass cannot go on: enum nvs_moved_flags */
};

/* Moves memory as far as possible now. */
struct nvs_pass_result nvs_pass(struct nvs_gpu *gpu, enum nvs_direction d);

#endif
