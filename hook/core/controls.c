// SPDX-License-Identifier: Apache-2.0
#include "controls.h"

#include <string.h>

/* Versions of the driver whose controls were seen to work, by their effect. With all others it is looked for. */
bool nvs_controls_listed(const struct nvs_rm_state *s)
{
	/* The scheduler's list (sched/slices.go) is the same: a test compares them. */
	static const char *const versions[] = { "580.159.04" };

	for (size_t i = 0; i < sizeof(versions) / sizeof(versions[0]); i++)
		if (!strcmp(s->driver, versions[i]))
			return true;
	return false;
}

bool nvs_channels_work(const struct nvs_gpu *gpu)
{
	struct nvs_rm_state s;

	return nvs_rm_prove(gpu->device.uuid) == NVS_RM_OK &&
	       (atomic_load(&gpu->effect.seen) || (nvs_rm_state(gpu->device.uuid, &s) && nvs_controls_listed(&s)));
}

bool nvs_channels_are(const struct nvs_gpu *gpu, bool on)
{
	struct nvs_rm_state s;

	return nvs_rm_state(gpu->device.uuid, &s) && !s.keepers && (on ? s.channels && !s.off : s.off);
}

bool nvs_channels_switch(const struct nvs_gpu *gpu, bool want_on)
{
	const uint8_t *uuid = gpu->device.uuid;
	struct nvs_rm_state s;
	enum nvs_rm_result r;

	if (!want_on) { /* all channels, or none: what was not seen would run on */
		return nvs_rm_state(uuid, &s) && !s.bare_channels && !s.overflow &&
		       nvs_rm_channels(uuid, false) == NVS_RM_OK;
	}
	r = nvs_rm_channels(uuid, true);
	/* Channels that are gone, or that nobody can reach any more, can't be put on later either. */
	return r == NVS_RM_OK || r == NVS_RM_UNSEEN || r == NVS_RM_LOST;
}
