// SPDX-License-Identifier: Apache-2.0
/*
 * slice_ops.c: what core asks of the layer rm, which knows a GPU by its UUID.
 */
#include <string.h>

#include "effect.h"
#include "preempt.h"
#include "rm.h"
#include "slice.h"

#define DRIVERS_OWN_US 2048 /* where it was not read before the first change; 580 on an H200 */

/* What was measured on an H200. Outside of it a slice is brought to the nearer end. */
#define LEAST_US 50u
#define MOST_US  1000000u

#define MOST_REFUSED_LOOKS 1024 /* one each 2 s: after half an hour a driver that refuses is believed */
#define MOST_LOOKS 5 /* for an effect, each of which stops the process for 2 ms */

/*
 * Called by the client thread only. Contexts that are made later come with the driver's
 * own slice, which is why that need not be set for them.
 */
static bool set(struct nvs_gpu *gpu, uint64_t slice_ns)
{
	const uint8_t *uuid = gpu->device.uuid;
	uint64_t us = slice_ns / 1000, own;

	if (slice_ns && us < LEAST_US)
		us = LEAST_US;
	if (us > MOST_US)
		us = MOST_US;
	/* After the first change contexts have what was set. */
	if (!gpu->sliced && nvs_rm_get_slice(uuid, &own) == NVS_RM_OK)
		gpu->own_slice_us = own;
	if (us) {
		gpu->sliced = true;
		return nvs_rm_slice(uuid, us) == NVS_RM_OK;
	}
	if (nvs_rm_slice(uuid, gpu->own_slice_us ? gpu->own_slice_us : DRIVERS_OWN_US) != NVS_RM_OK)
		return false;
	return nvs_rm_slice(uuid, 0) == NVS_RM_OK;
}

/*
 * Versions of the driver whose controls were seen to work, by their effect on a GPU. The
 * answers of a driver whose version cannot be known are believed: on an H200 libcuda itself
 * asked for none, and its drains were not cut.
 */
static bool listed(const struct nvs_rm_state *s)
{
	/* The scheduler's list (sched/controls.go) is the same: a test compares them. */
	static const char *const versions[] = { "580.159.04" };

	for (size_t i = 0; i < sizeof(versions) / sizeof(versions[0]); i++)
		if (!strcmp(s->driver, versions[i]))
			return true;
	return !s->driver[0];
}

static bool works(const struct nvs_gpu *gpu)
{
	struct nvs_rm_state s;

	return nvs_rm_prove(gpu->device.uuid) == NVS_RM_OK &&
	       (atomic_load(&gpu->effective) || (nvs_rm_state(gpu->device.uuid, &s) && listed(&s)));
}

static bool off(const struct nvs_gpu *gpu)
{
	struct nvs_rm_state s;

	return nvs_rm_state(gpu->device.uuid, &s) && s.off && !s.keepers;
}

static bool on(const struct nvs_gpu *gpu)
{
	struct nvs_rm_state s;

	return nvs_rm_state(gpu->device.uuid, &s) && s.channels && !s.off && !s.keepers;
}

static bool channels(const struct nvs_gpu *gpu, bool want_on)
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

const struct nvs_preempt_ops nvs_preempt_ops = { .works = works, .channels = channels, .off = off, .on = on };

static uint8_t on_wire(enum nvs_rm_result r)
{
	switch (r) {
	case NVS_RM_OK:
		return NVS_CONTROL_WORKS;
	case NVS_RM_UNSEEN:
		return NVS_CONTROL_UNSEEN;
	case NVS_RM_REFUSED:
		return NVS_CONTROL_REFUSED;
	case NVS_RM_FAKED:
		return NVS_CONTROL_FAKED;
	case NVS_RM_LOST:
		return NVS_CONTROL_FAILED;
	case NVS_RM_UNTRIED:
	case NVS_RM_BUSY:
		break;
	}
	return NVS_CONTROL_UNTRIED;
}

/* A driver of a version that nobody has seen may say that channels are off, and let them go on. */
static enum nvs_rm_result prove_effect(struct nvs_gpu *gpu)
{
	if (atomic_load(&gpu->effective))
		return NVS_RM_OK;
	if (gpu->effect_looks++ >= MOST_LOOKS)
		return NVS_RM_UNTRIED;
	switch (nvs_effect_look(gpu)) {
	case NVS_EFFECT_SEEN:
		atomic_store(&gpu->effective, true);
		return NVS_RM_OK;
	case NVS_EFFECT_NONE:
		nvs_rm_has_no_effect(gpu->device.uuid);
		return NVS_RM_FAKED;
	case NVS_EFFECT_UNKNOWN:
		break;
	}
	return NVS_RM_UNTRIED;
}

/* With the 1st, 2nd, 4th look after a refusal, and so on: what was in the way may be gone. */
static bool try_refused_again(struct nvs_gpu *gpu)
{
	unsigned n = gpu->refused_looks < MOST_REFUSED_LOOKS ? ++gpu->refused_looks : 0;

	return n && !(n & (n - 1));
}

static void prove(struct nvs_gpu *gpu, struct nvs_controls *c)
{
	const uint8_t *uuid = gpu->device.uuid;
	struct nvs_rm_state s;

	nvs_rm_state(uuid, &s);
	if (!s.compute_groups || s.overflow) /* some that were not seen are as good as none */
		s.slice = s.off_on = NVS_RM_UNSEEN;
	else if (s.slice == NVS_RM_UNTRIED || s.slice == NVS_RM_UNSEEN ||
		 (s.slice == NVS_RM_REFUSED && try_refused_again(gpu)))
		s.slice = nvs_rm_prove(uuid);
	/*
	 * A driver that fakes the one control is not trusted with the other. UNSEEN: there were no
	 * channels when they were tried, or put on, but now there are.
	 */
	if (s.slice == NVS_RM_OK && (s.off_on == NVS_RM_UNTRIED || s.off_on == NVS_RM_UNSEEN ||
				     (s.off_on == NVS_RM_REFUSED && try_refused_again(gpu))))
		s.off_on = nvs_rm_prove_channels(uuid);
	if (s.slice == NVS_RM_OK && s.off_on == NVS_RM_OK)
		gpu->refused_looks = 0;
	if (s.off_on == NVS_RM_OK && !listed(&s))
		s.off_on = prove_effect(gpu);
	c->slices = on_wire(s.slice);
	c->channels = on_wire(s.off_on);
	c->groups = s.compute_groups < UINT16_MAX ? (uint16_t)s.compute_groups : UINT16_MAX;
	c->bare = s.bare_channels;
	for (const char *p = s.driver; *p && p < s.driver + sizeof(c->driver) - 1; p++)
		c->driver[p - s.driver] = (char)(*p >= ' ' && *p <= '~' ? *p : '?');
}

const struct nvs_slice_ops nvs_slice_ops = { .set = set, .prove = prove, .moved = nvs_rm_moved };
