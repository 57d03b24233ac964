// SPDX-License-Identifier: Apache-2.0
/* grant.c: carries out what the lease of a GPU decides. */
#include "grant.h"

#include <string.h>

#include "clock.h"
#include "connection.h"
#include "futex.h"
#include "log.h"
#include "ops.h"
#include "thread.h"
#include "throttle.h"

#define STATS_NS (1 * NVS_S)
#define LOSS_WAIT_NS   (5 * NVS_S)    /* calls wait this long for a lost scheduler */
#define EXIT_WAIT_NS   (1 * NVS_S)    /* at the end of the process a call waits this long for a scheduler */

/* Calls pass in windows during a drain that does not end: the gap to the first. */
#define PASS_GAP_NS (1 * NVS_S) /* or an eighth of the grace, if that is less */

void nvs_gpu_wake(struct nvs_gpu *gpu)
{
	const struct nvs_slot *slot = atomic_load(&gpu->slot);

	atomic_fetch_add(&gpu->changed, 1);
	nvs_futex_wake((uint32_t *)&gpu->changed, true);
	if (slot != &nvs_free_slot && slot != &nvs_closed_slot)
		nvs_futex_wake(&slot->word, false);
}

static void set_slot(struct nvs_gpu *gpu, const struct nvs_slot *slot)
{
	const struct nvs_slot *old = atomic_load(&gpu->slot);

	atomic_store(&gpu->slot, slot);
	if (old && old != slot && old != &nvs_free_slot && old != &nvs_closed_slot)
		nvs_futex_wake(&old->word, false);
}

static void send_attach(struct nvs_gpu *gpu, const struct lease_out *out)
{
	struct nvs_frame f = nvs_frame_of(gpu, NVS_ATTACH);

	f.epoch = out->epoch;
	f.code = (out->want ? NVS_ATTACH_WANT : 0) | (out->preempted ? NVS_ATTACH_CUT : 0);
	memcpy(f.u.attach.uuid, gpu->device.uuid, NVS_UUID_SIZE);
	f.u.attach.ordinal = gpu->number;
	f.u.attach.total_mem = gpu->device.total_mem;
	gpu->request_ns = nvs_now();
	nvs_client_send(&f);
}

static void send_release(struct nvs_gpu *gpu, const struct lease_out *out)
{
	struct nvs_frame f = nvs_frame_of(gpu, NVS_RELEASE);
	uint64_t calls = nvs_gate_calls(gpu); /* none is added while the gate is closed */

	f.epoch = out->epoch;
	f.code = out->reason;
	f.u.released.drain_ns = gpu->drain_ns;
	f.u.released.calls = calls - gpu->grant_calls;
	if (out->preempted && nvs_client.page->features & NVS_FEATURE_PREEMPT)
		f.u.released.flags = NVS_RELEASED_PREEMPTED;
	nvs_client_send(&f);
	gpu->drain_ns = 0;
	gpu->grant_calls = calls;
}

static void send_request(struct nvs_gpu *gpu)
{
	struct nvs_frame f = nvs_frame_of(gpu, NVS_REQUEST);

	gpu->request_ns = nvs_now();
	nvs_client_send(&f); /* if the socket is full the next nudge tries again */
}

/* The gate is closed: when the first window of this drain would begin. */
static void plan_passes(struct nvs_gpu *gpu)
{
	uint64_t gap = gpu->grace_ns / 8;

	if (gap == 0 || gap > PASS_GAP_NS)
		gap = PASS_GAP_NS;
	gpu->wait.pass_gap_ns = gap;
	gpu->wait.pass_from_ns = gpu->closed_ns + (gpu->grace_ns ? gpu->grace_ns / 2 : gap);
	gpu->wait.pass_until_ns = 0;
}

void nvs_gpu_wake_preempter(struct nvs_gpu *gpu)
{
	atomic_fetch_add(&gpu->preempt.wanted, 1);
	nvs_futex_wake((uint32_t *)&gpu->preempt.wanted, true);
}

/* The thread of preempt.c may have to take channels off, or put them on. */
static void wake_preempter(struct nvs_gpu *gpu)
{
	if (!gpu->preempt.started || (gpu->lease.gate != LEASE_DRAINING && (!gpu->preempt.off || gpu->lease.unfinished)))
		return;
	nvs_gpu_wake_preempter(gpu);
}

void nvs_gpu_step(struct nvs_gpu *gpu, struct lease_event ev)
{
	enum lease_link before = gpu->lease.link;
	struct lease_out out = lease_step(&gpu->lease, ev);

	if (gpu->lease.link != before && (before == LEASE_ATTACHED || before == LEASE_UNUSED))
		gpu->unattached_ns = nvs_now();
	if (!(out.actions & (LEASE_ACT_OPEN | LEASE_ACT_FREE)))
		nvs_memory_ops.lease_changed(gpu, gpu->lease.gate, false);
	if (out.actions & LEASE_ACT_DRAIN)
		atomic_store(&gpu->drains.pending, true);
	if (out.actions & LEASE_ACT_CLOSE) {
		atomic_store(&gpu->epoch, NVS_WORD_NONE);
		gpu->closed_ns = nvs_now();
		nvs_throttle_wanted(gpu, gpu->closed_ns);
		plan_passes(gpu);
	}
	wake_preempter(gpu);
	if (!out.actions)
		return;
	if (out.actions & LEASE_ACT_STEP)
		gpu->wait.step_until_ns = gpu->closed_ns + NVS_STEP_NS;
	if (out.actions & LEASE_ACT_PAGE)
		set_slot(gpu, &nvs_client.page->slot[gpu->number]);
	if (out.actions & LEASE_ACT_OPEN) {
		/* Else nvs_gpu_filled() does. */
		if (nvs_memory_ops.lease_changed(gpu, gpu->lease.gate, true))
			atomic_store(&gpu->epoch, (uint32_t)out.epoch);
		gpu->drains.idle_ns = 0;
	}
	if (out.actions & LEASE_ACT_FREE) {
		atomic_store(&gpu->epoch, NVS_WORD_NONE);
		set_slot(gpu, &nvs_free_slot);
		if (nvs_memory_ops.lease_changed(gpu, gpu->lease.gate, true))
			atomic_store(&gpu->epoch, nvs_free_slot.word);
		nvs_debugf("GPU %u: running without a scheduler", gpu->number);
	}
	if (out.actions & LEASE_ACT_ATTACH)
		send_attach(gpu, &out);
	if (out.actions & LEASE_ACT_RELEASE) {
		nvs_memory_ops.before_release(gpu);
		send_release(gpu, &out);
	}
	if (out.actions & LEASE_ACT_REQUEST)
		send_request(gpu);
	if (out.actions & LEASE_ACT_DRAIN)
		atomic_store(&gpu->drains.due, true);
	if (out.actions & ~(unsigned)LEASE_ACT_REQUEST)
		nvs_gpu_wake(gpu);
}

void nvs_gpu_filled(struct nvs_gpu *gpu)
{
	if ((gpu->lease.gate != LEASE_OPEN && gpu->lease.gate != LEASE_FREE) ||
	    !nvs_memory_ops.lease_changed(gpu, gpu->lease.gate, true))
		return;
	atomic_store(&gpu->epoch, gpu->lease.gate == LEASE_FREE ? nvs_free_slot.word : (uint32_t)gpu->lease.epoch);
	gpu->drains.idle_ns = 0;
	if (gpu->lease.gate == LEASE_OPEN)
		nvs_memory_ops.gate_opened(gpu);
	nvs_gpu_wake(gpu);
}

bool nvs_gpu_room(struct nvs_gpu *gpu, uint64_t *room)
{
	const struct nvs_slot *slot = atomic_load(&gpu->slot);

	if (!slot || slot == &nvs_closed_slot)
		return false;
	*room = slot == &nvs_free_slot ? UINT64_MAX : __atomic_load_n(&slot->room, __ATOMIC_ACQUIRE);
	return true;
}

void nvs_stats_send(uint64_t now)
{
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_frame f = nvs_frame_of(gpu, NVS_STATS);

		if (gpu->lease.link != LEASE_ATTACHED || nvs_elapsed(now, gpu->stats.sent_ns) < STATS_NS)
			continue;
		gpu->stats.now.calls = nvs_gate_calls(gpu);
		nvs_memory_ops.usage(gpu, &gpu->stats.now.mem_bytes, &gpu->stats.now.mem_peak);
		if (memcmp(&gpu->stats.now, &gpu->stats.sent, sizeof(gpu->stats.sent)) == 0)
			continue;
		f.u.stats = gpu->stats.now;
		if (nvs_client_send(&f)) {
			gpu->stats.sent = gpu->stats.now;
			gpu->stats.sent_ns = now;
		}
	}
}

/* Whether a thread at the gate should run without a scheduler. The client thread looks for one. */
static bool out_of_patience(struct nvs_gpu *gpu, uint64_t now)
{
	if (gpu->lease.link == LEASE_ATTACHED)
		return false;
	if (nvs_client.link == LINK_ABSENT)
		return true;
	if (nvs_client.closed_policy)
		return false;
	if (atomic_load(&nvs_exiting) && nvs_elapsed(now, nvs_exiting_ns) > EXIT_WAIT_NS)
		return true;
	/* Counted over reconnects: the scheduler may come back and end again for ever. */
	return nvs_client.link == LINK_LOST && !nvs_client.alive &&
	       nvs_elapsed(now, gpu->unattached_ns) > LOSS_WAIT_NS;
}

bool nvs_gpu_try_give_up(struct nvs_gpu *gpu, uint64_t now)
{
	bool lost = out_of_patience(gpu, now);

	if (lost)
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_GIVE_UP });
	return lost;
}

void nvs_gpu_give_up_if_lost(struct nvs_gpu *gpu)
{
	struct nvs_signals q;

	nvs_client_enter(&q);
	nvs_gpu_try_give_up(gpu, nvs_now());
	nvs_client_leave(&q);
}
