// SPDX-License-Identifier: Apache-2.0
/*
 * slice_ops.c: what core asks of the layer rm, which knows a GPU by its UUID.
 */
#include "preempt.h"
#include "rm.h"
#include "slice.h"

#define DRIVERS_OWN_US 2048 /* where it was not read before the first change; 580 on an H200 */

static uint64_t own_us[NVS_MAX_GPUS];

/*
 * Called by the client thread only. Contexts that are made later come with the driver's
 * own slice, which is why that need not be set for them.
 */
static bool set(const struct nvs_gpu *gpu, uint64_t slice_ns)
{
	const uint8_t *uuid = gpu->device.uuid;
	uint64_t *own = &own_us[gpu->number], us = (slice_ns + 999) / 1000;

	if (!*own && nvs_rm_get_slice(uuid, own) != NVS_RM_OK)
		*own = DRIVERS_OWN_US;
	if (us)
		return nvs_rm_slice(uuid, us) == NVS_RM_OK;
	if (nvs_rm_slice(uuid, *own) != NVS_RM_OK)
		return false;
	return nvs_rm_slice(uuid, 0) == NVS_RM_OK;
}

static bool works(const struct nvs_gpu *gpu)
{
	return nvs_rm_prove(gpu->device.uuid) == NVS_RM_OK;
}

static bool channels(const struct nvs_gpu *gpu, bool on)
{
	const uint8_t *uuid = gpu->device.uuid;
	struct nvs_rm_state s;
	enum nvs_rm_result r;

	if (!on) { /* all channels, or none: what was not seen would run on */
		return nvs_rm_state(uuid, &s) && !s.bare_channels && !s.overflow &&
		       nvs_rm_channels(uuid, false) == NVS_RM_OK;
	}
	r = nvs_rm_channels(uuid, true);
	/* Channels that are gone, or that nobody can reach any more, can't be put on later either. */
	return r == NVS_RM_OK || r == NVS_RM_UNSEEN || r == NVS_RM_LOST;
}

const struct nvs_preempt_ops nvs_preempt_ops = { .works = works, .channels = channels };

const struct nvs_slice_ops nvs_slice_ops = { .set = set };
