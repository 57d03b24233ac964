// SPDX-License-Identifier: Apache-2.0
/* rm_turn.h: of controls, one thread at a time does one. */
#ifndef NVSHARE_RM_TURN_H
#define NVSHARE_RM_TURN_H

#include "rm_object.h"
#include "signals.h"

#define RM_TRIES 8 /* looks at a table that changes all the time */

struct rm_result {
	enum nvs_rm_result r;
	uint32_t status;
	uint64_t us;
};

/* Room for the targets of the thread whose turn it is. */
extern struct rm_target rm_turn_targets[NVS_RM_MAX_TARGETS];

/* False: another thread has the turn for long. */
bool rm_begin_turn(struct nvs_signals *q);
void rm_end_turn(const struct nvs_signals *q);

/* Asks the RM which GPUs the subdevices are that came since the last time. */
void rm_name_subdevices(void);

/* Whether the driver refused because the object has ended. */
bool rm_gone(const struct rm_result *r);

/* For rm_with_gpu: copies the GPU to arg. */
void rm_copy_gpu(struct rm_gpu *g, void *arg);

/* With the turn. */
enum nvs_rm_result rm_put_on(const uint8_t *uuid);

#endif
