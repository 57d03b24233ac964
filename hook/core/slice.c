// SPDX-License-Identifier: Apache-2.0
#include "slice.h"

#include <string.h>

#include "clock.h"
#include "connection.h"
#include "log.h"
#include "thread.h"

#define UNKNOWN_LOOK_NS (100 * NVS_MS) /* between looks, until the scheduler was told */
#define LOOK_NS         (2 * NVS_S)    /* later: contexts come that were not seen, a control fails */

void nvs_slice_want(struct nvs_gpu *gpu, uint64_t slice_ns)
{
	if (gpu->slice_ns == slice_ns)
		return;
	gpu->slice_ns = slice_ns;
	gpu->slice_due = true;
}

void nvs_slices_apply(void)
{
	NVS_FOR_EACH_GPU(gpu) {
		uint64_t slice_ns;
		bool due;

		if (nvs_is_away()) /* there are no channels */
			return;
		nvs_lock(&nvs_client_lock);
		due = gpu->slice_due;
		slice_ns = gpu->slice_ns;
		gpu->slice_due = false;
		nvs_unlock(&nvs_client_lock);
		if (!due || nvs_slice_ops.set(gpu, slice_ns))
			continue;
		nvs_debugf("GPU %u: its time slice stays as it is", gpu->number);
		nvs_lock(&nvs_client_lock);
		gpu->controls_ns = 0; /* the scheduler is to know */
		if (nvs_client.link == LINK_ABSENT) /* and nobody says it again */
			gpu->slice_due = true;
		nvs_unlock(&nvs_client_lock);
	}
}

bool nvs_controls_due(struct nvs_gpu *gpu, uint64_t now, uint64_t *next)
{
	/* A program without a gated call has no work, and perhaps no context. */
	if (nvs_is_away() || nvs_client.link != LINK_UP || !(nvs_client.page->features & NVS_FEATURE_CONTROLS) ||
	    gpu->lease.link != LEASE_ATTACHED || (gpu->lease.gate != LEASE_OPEN && !nvs_gate_calls(gpu)))
		return false;
	if (now < gpu->controls_ns) {
		if (gpu->controls_ns - now < *next)
			*next = gpu->controls_ns - now;
		return false;
	}
	gpu->controls_ns = now + (gpu->controls_told ? LOOK_NS : UNKNOWN_LOOK_NS);
	return true;
}

void nvs_controls_look(struct nvs_gpu *gpu)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_CONTROLS,
			       .channel = (uint16_t)gpu->number };

	nvs_slice_ops.prove(gpu, &f.u.controls);
	if (f.u.controls.slices == NVS_CONTROL_UNTRIED)
		return; /* another thread uses them: the next look tells */
	nvs_lock(&nvs_client_lock);
	if (nvs_client.link == LINK_UP && gpu->lease.link == LEASE_ATTACHED &&
	    nvs_client.page->features & NVS_FEATURE_CONTROLS &&
	    (!gpu->controls_told || memcmp(&f.u.controls, &gpu->controls, sizeof(gpu->controls)) != 0) &&
	    nvs_client_send(&f)) {
		gpu->controls = f.u.controls;
		gpu->controls_told = true;
		gpu->cut_failures = 0;
		gpu->bound_until_ns = 0;
	}
	nvs_unlock(&nvs_client_lock);
}
