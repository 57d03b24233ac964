// SPDX-License-Identifier: Apache-2.0
#include "slice.h"

#include <string.h>

#include "clock.h"
#include "connection.h"
#include "controls.h"
#include "log.h"
#include "thread.h"

#define UNKNOWN_LOOK_NS (100 * NVS_MS) /* between looks, until the scheduler was told */
#define LOOK_NS         (2 * NVS_S)    /* later: contexts come that were not seen, a control fails */

#define DRIVERS_OWN_US 2048 /* where it was not read before the first change; 580 on an H200 */

/* What was measured on an H200. Outside of it a slice is brought to the nearer end. */
#define LEAST_US 50u
#define MOST_US  1000000u

#define MOST_REFUSED_LOOKS 1024 /* one each 2 s: after half an hour a driver that refuses is believed */
#define MOST_LOOKS 5 /* for an effect, each of which stops the process for 2 ms */

void nvs_slice_want(struct nvs_gpu *gpu, uint64_t slice_ns)
{
	if (gpu->slice.ns == slice_ns)
		return;
	gpu->slice.ns = slice_ns;
	gpu->slice.due = true;
}

/* Contexts that are made later come with the driver's own slice by themselves. */
static enum nvs_rm_result slice_set(struct nvs_gpu *gpu, uint64_t slice_ns)
{
	const uint8_t *uuid = gpu->device.uuid;
	uint64_t us = slice_ns / NVS_US, own;
	enum nvs_rm_result r;

	if (slice_ns && us < LEAST_US)
		us = LEAST_US;
	if (us > MOST_US)
		us = MOST_US;
	/* After the first change contexts have what was set. */
	if (!gpu->slice.ever_set) {
		r = nvs_rm_get_slice(uuid, &own);
		if (r == NVS_RM_BUSY)
			return r;
		if (r == NVS_RM_OK)
			gpu->slice.own_us = own;
	}
	if (us) {
		gpu->slice.ever_set = true;
		return nvs_rm_slice(uuid, us);
	}
	r = nvs_rm_slice(uuid, gpu->slice.own_us ? gpu->slice.own_us : DRIVERS_OWN_US);
	return r == NVS_RM_OK ? nvs_rm_slice(uuid, 0) : r;
}

void nvs_slice_apply(struct nvs_gpu *gpu)
{
	uint64_t slice_ns = gpu->slice.ns;
	enum nvs_rm_result r;

	if (nvs_is_suspended()) /* there are no channels */
		return;
	gpu->slice.due = false;
	nvs_unlock(&nvs_client_lock);
	r = slice_set(gpu, slice_ns);
	if (r != NVS_RM_OK)
		nvs_debugf("GPU %u: its time slice stays as it is: %s", gpu->number, nvs_rm_text(r));
	nvs_lock(&nvs_client_lock);
	if (r == NVS_RM_OK)
		return;
	gpu->slice.look_ns = 0; /* the scheduler is to know */
	/* Another thread's control took long, or there is nobody who would say it again. */
	gpu->slice.due = gpu->slice.due || r == NVS_RM_BUSY || nvs_client.link == LINK_ABSENT;
}

/* ---- whether the controls work ---- */

static uint8_t on_wire(enum nvs_rm_result r)
{
	static const uint8_t control[] = {
		[NVS_RM_OK] = NVS_CONTROL_WORKS, [NVS_RM_UNTRIED] = NVS_CONTROL_UNTRIED,
		[NVS_RM_UNSEEN] = NVS_CONTROL_UNSEEN, [NVS_RM_REFUSED] = NVS_CONTROL_REFUSED,
		[NVS_RM_FAKED] = NVS_CONTROL_FAKED, [NVS_RM_LOST] = NVS_CONTROL_FAILED,
		[NVS_RM_BUSY] = NVS_CONTROL_UNTRIED,
	};

	return control[r];
}

/* A driver of a version that nobody has seen may say that channels are off, and let them go on. */
static enum nvs_rm_result prove_effect(struct nvs_gpu *gpu)
{
	enum nvs_rm_result r;

	if (atomic_load(&gpu->effect.seen))
		return NVS_RM_OK;
	r = gpu->effect.looks < MOST_LOOKS ? nvs_effect_look(gpu) : NVS_RM_UNTRIED;
	if (r == NVS_RM_OK)
		atomic_store(&gpu->effect.seen, true);
	else if (r == NVS_RM_FAKED)
		nvs_rm_has_no_effect(gpu->device.uuid);
	return r;
}

/* With the 1st, 2nd, 4th look after a refusal, and so on: what was in the way may be gone. */
static bool try_refused_again(struct nvs_gpu *gpu)
{
	unsigned n = gpu->slice.refused_looks < MOST_REFUSED_LOOKS ? ++gpu->slice.refused_looks : 0;

	return n && !(n & (n - 1));
}

static void prove_controls(struct nvs_gpu *gpu, struct nvs_controls *c)
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
	 * channels then.
	 */
	if (s.slice == NVS_RM_OK && (s.off_on == NVS_RM_UNTRIED || s.off_on == NVS_RM_UNSEEN ||
				     (s.off_on == NVS_RM_REFUSED && try_refused_again(gpu))))
		s.off_on = nvs_rm_prove_channels(uuid);
	if (s.slice == NVS_RM_OK && s.off_on == NVS_RM_OK)
		gpu->slice.refused_looks = 0;
	if (s.off_on == NVS_RM_OK && !nvs_controls_listed(&s))
		s.off_on = prove_effect(gpu);
	c->slices = on_wire(s.slice);
	c->channels = on_wire(s.off_on);
	c->groups = s.compute_groups < UINT16_MAX ? (uint16_t)s.compute_groups : UINT16_MAX;
	c->bare = s.bare_channels;
	for (const char *p = s.driver; *p && p < s.driver + sizeof(c->driver) - 1; p++)
		c->driver[p - s.driver] = (char)(*p >= ' ' && *p <= '~' ? *p : '?');
}

bool nvs_controls_due(struct nvs_gpu *gpu, uint64_t now, uint64_t *next)
{
	/* A program without a gated call has no work, and perhaps no context. */
	if (nvs_is_suspended() || nvs_client.link != LINK_UP || !(nvs_client.page->features & NVS_FEATURE_CONTROLS) ||
	    gpu->lease.link != LEASE_ATTACHED || (gpu->lease.gate != LEASE_OPEN && !nvs_gate_calls(gpu)))
		return false;
	if (now < gpu->slice.look_ns) {
		if (gpu->slice.look_ns - now < *next)
			*next = gpu->slice.look_ns - now;
		return false;
	}
	gpu->slice.look_ns = now + (gpu->slice.told ? LOOK_NS : UNKNOWN_LOOK_NS);
	return true;
}

void nvs_controls_try(struct nvs_gpu *gpu)
{
	struct nvs_frame f = nvs_frame_of(gpu, NVS_CONTROLS);

	prove_controls(gpu, &f.u.controls);
	if (f.u.controls.slices == NVS_CONTROL_UNTRIED)
		return; /* another thread uses them: the next look tells */
	nvs_lock(&nvs_client_lock);
	if (nvs_client.link == LINK_UP && gpu->lease.link == LEASE_ATTACHED &&
	    nvs_client.page->features & NVS_FEATURE_CONTROLS &&
	    (!gpu->slice.told || memcmp(&f.u.controls, &gpu->slice.controls, sizeof(gpu->slice.controls)) != 0) &&
	    nvs_client_send(&f)) {
		gpu->slice.controls = f.u.controls;
		gpu->slice.told = true;
		gpu->preempt.failures = 0;
		gpu->preempt.bound_until_ns = 0;
	}
	nvs_unlock(&nvs_client_lock);
}
