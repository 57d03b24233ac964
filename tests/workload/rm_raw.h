// SPDX-License-Identifier: Apache-2.0
/* rm_raw.h: a control of channels as the driver takes it, past the state of hook/rm. */
#ifndef WORKLOAD_RM_RAW_H
#define WORKLOAD_RM_RAW_H

#include "rm.h"
#include "rm_abi.h"
#include "rm_object.h"

/* To all channels of this process on a GPU, however often it was sent. */
static inline bool send_to_all(const uint8_t *uuid, bool on)
{
	static struct rm_target t[NVS_RM_MAX_TARGETS];
	unsigned n = rm_targets(uuid, RM_KIND_CHANNELS_ON, t);
	uint32_t status;

	for (unsigned i = 0; i < n; i++) {
		struct rm_channels c = { .disable = !on, .count = 1, .client = { t[i].client }, .channel = { t[i].object } };

		if (rm_control(&t[i], t[i].subdevice, RM_CHANNELS, &c, sizeof(c), &status) != NVS_RM_OK)
			return false;
	}
	return n > 0;
}

#endif
