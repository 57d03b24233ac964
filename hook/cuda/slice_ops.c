// SPDX-License-Identifier: Apache-2.0
/*
 * slice_ops.c: what core asks of the layer rm, which knows a GPU by its UUID.
 */
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

const struct nvs_slice_ops nvs_slice_ops = { .set = set };
