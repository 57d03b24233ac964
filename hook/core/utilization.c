// SPDX-License-Identifier: Apache-2.0
#include "utilization.h"

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "gpu.h"
#include "thread.h"

#define LOOK_NS   (5 * NVS_MS)   /* between looks */
#define SEND_NS   (250 * NVS_MS) /* between frames */
#define ACTIVE_NS (1 * NVS_S)    /* without a call the program pauses, and wants no turn */

/* Whether samples mean anything now: our gate is open, and others want the GPU or hold it too. */
static bool contended(struct nvs_gpu *gpu)
{
	const struct nvs_slot *slot = &nvs_client.page->slot[gpu->number];
	uint32_t flags = __atomic_load_n(&slot->flags, __ATOMIC_RELAXED);

	if (gpu->lease.link != LEASE_ATTACHED || gpu->lease.gate != LEASE_OPEN ||
	    nvs_gpu_word(gpu) != atomic_load(&gpu->epoch) || flags & NVS_GRANT_LATENCY)
		return false;
	if (flags & NVS_GRANT_CONCURRENT)
		return __atomic_load_n(&slot->present, __ATOMIC_RELAXED);
	return flags & NVS_GRANT_SHARED || __atomic_load_n(&slot->waiters, __ATOMIC_RELAXED);
}

static bool active(struct nvs_gpu *gpu, uint64_t now)
{
	struct nvs_utilization *u = &gpu->utilization;
	uint64_t calls = nvs_gate_calls(gpu);

	if (calls != u->calls) {
		u->calls = calls;
		u->called_ns = now;
	}
	return u->called_ns && nvs_elapsed(now, u->called_ns) < ACTIVE_NS;
}

static void utilization_tell(struct nvs_gpu *gpu, uint64_t now)
{
	struct nvs_utilization *u = &gpu->utilization;
	struct nvs_frame f = nvs_frame_of(gpu, NVS_UTIL);
	uint64_t calls = nvs_gate_calls(gpu);

	f.u.util.samples = u->samples;
	f.u.util.busy = u->busy;
	if (nvs_client.page->features & NVS_FEATURE_CONTROLS)
		f.u.util.calls = (uint32_t)(calls - u->told_calls);
	if (!u->samples || nvs_elapsed(now, u->sent_ns) < SEND_NS || !nvs_client_send(&f))
		return;
	u->samples = u->busy = 0;
	u->told_calls = calls;
	u->sent_ns = now;
}

bool nvs_utilization_due(struct nvs_gpu *gpu, uint64_t now, uint64_t *next)
{
	struct nvs_utilization *u = &gpu->utilization;
	bool due;

	if (nvs_client.link != LINK_UP || !(nvs_client.page->features & NVS_FEATURE_UTIL) ||
	    !contended(gpu) || !active(gpu, now))
		return false;
	due = now >= u->due_ns;
	if (due)
		u->due_ns = now + LOOK_NS;
	if (u->due_ns - now < *next)
		*next = u->due_ns - now;
	return due;
}

void nvs_utilization_sample(struct nvs_gpu *gpu)
{
	enum nvs_streams_state state = nvs_streams_sample(gpu);

	nvs_lock(&nvs_client_lock);
	/* A gate that was shut meanwhile has nothing behind it. */
	if (state != NVS_STREAMS_UNKNOWN && nvs_client.link == LINK_UP && contended(gpu)) {
		gpu->utilization.samples++;
		gpu->utilization.busy += state == NVS_STREAMS_BUSY;
		utilization_tell(gpu, nvs_now());
	}
	nvs_unlock(&nvs_client_lock);
}
