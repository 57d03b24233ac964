// SPDX-License-Identifier: Apache-2.0
/*
 * move.c: the mover, a thread for each GPU that moves memory out and in (pass.c).
 */
#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "grant.h"
#include "log.h"
#include "pass.h"
#include "signals.h"
#include "swap.h"
#include "swap_impl.h"
#include "thread.h"

#define IDLE_NS  (1 * NVS_S)
#define LOOK_NS  (10 * NVS_S) /* between two looks for other users of the memory */
#define RETRY_NS (20 * NVS_MS) /* until a refused driver call is repeated */

enum plan { PLAN_NOTHING, PLAN_ANSWER, PLAN_OUT, PLAN_IN };

/* Opens the gate if all memory is there; else says what is to be done. */
static enum plan move_decide(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	enum plan plan;
	bool open;

	nvs_lock(&nvs_client_lock);
	nvs_swap_lock(s);
	plan = s->asked ? PLAN_ANSWER : PLAN_NOTHING;
	s->evicting = s->asked = false;
	open = s->want && (s->broken || all_here(s));
	if (s->want && !open) {
		plan = PLAN_IN;
	} else if (!atomic_load(&nvs_exiting) && !s->want && !s->hold && !s->broken && !immovable(s) && !s->leaving &&
		   gpu->lease.gate == LEASE_CLOSED && !gpu->lease.unfinished && !gpu->preempt.off && /* work waits there */
		   gpu->lease.link == LEASE_ATTACHED && s->resident > nvs_swap_capacity(gpu)) {
		s->evicting = true;
		plan = PLAN_OUT;
	}
	nvs_swap_unlock(s);
	if (open)
		nvs_gpu_filled(gpu);
	nvs_unlock(&nvs_client_lock);
	return plan;
}

/*
 * Before memory leaves: waits for calls that passed without a grant, and for their work.
 * False: a capture hides whether work is left; it is looked again when the capture ends.
 */
static bool drained(struct nvs_gpu *gpu)
{
	nvs_gate_quiesce(gpu);
	if (nvs_drain(gpu, 0) != NVS_DRAINED)
		return false;
	nvs_drain_forget(gpu, 0);
	return true;
}

/* Releases cached memory. Returns whether the rest fits into the room. */
static bool flushed(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t room, over;

	nvs_swap_lock(s);
	room = nvs_swap_capacity(gpu);
	over = s->resident > room ? s->resident - room : 0;
	nvs_swap_unlock(s);
	if (over && nvs_driver_enter()) {
		nvs_swap_flush(gpu, over);
		nvs_driver_leave();
	}
	nvs_swap_lock(s);
	over = s->resident > room ? s->resident - room : 0;
	nvs_swap_unlock(s);
	return !over;
}

/*
 * Asked before memory leaves, because what else uses it may have been loaded at any time, and
 * now and then: the scheduler is not to promise others the room that nobody can make.
 */
static bool may_leave(struct nvs_gpu *gpu)
{
	enum nvs_fixed outside = nvs_used_outside();
	bool news;

	nvs_swap_lock(gpu->swap);
	news = atomic_exchange(&gpu->swap->used_outside, outside) != outside;
	gpu->swap->looked_ns = nvs_now();
	nvs_swap_unlock(gpu->swap);
	if (news && outside)
		nvs_debugf("memory stays on the GPU: other libraries of the process use it (%u)", outside);
	return !outside;
}

static void *mover_main(void *arg)
{
	struct nvs_gpu *gpu = arg;
	struct nvs_swap *s = gpu->swap;
	uint32_t told = 0; /* the last reason for being stuck that was told */

	nvs_thread_setup("nvshare-swap");
	while (!atomic_load(&nvs_exiting)) {
		unsigned seen = atomic_load(&s->kick);
		enum plan plan;
		struct nvs_pass_result p = { 0 };
		bool again = false;

		nvs_pools_trim(gpu);
		nvs_cache_trim(gpu);
		if (nvs_swap_is_on(gpu) && nvs_elapsed(nvs_now(), s->looked_ns) >= LOOK_NS)
			may_leave(gpu);
		plan = move_decide(gpu);
		if (plan == PLAN_OUT && !flushed(gpu)) {
			again = !may_leave(gpu) || !drained(gpu);
			if (!again) {
				nvs_pools_drained(gpu);
				flushed(gpu);
				nvs_look_load(gpu);
				p = nvs_pass(gpu, NVS_PASS_OUT);
			}
		} else if (plan == PLAN_IN) {
			nvs_look_loaded(gpu); /* a load may wait for kernels, and these for later ones */
			p = nvs_pass(gpu, NVS_PASS_IN);
		}
		if (p.stuck ? p.stuck != told : p.moved || plan == PLAN_ANSWER || plan == PLAN_OUT)
			nvs_swap_tell(gpu, p.stuck ? NVS_MOVED_STUCK | p.stuck : 0);
		told = p.stuck;
		/*
		 * Moving has changed the kick, so that the loop looks once more. A pass that could not
		 * move anything has changed it, too: what else has is looked at after RETRY_NS.
		 */
		if (p.stuck && !p.moved)
			seen = atomic_load(&s->kick);
		/* More of the arena kicks. To look at memory again for which there is none costs the GPU time. */
		nvs_swap_wait(s, seen, (p.stuck && p.stuck != NVS_MOVED_NO_ARENA) || again ? RETRY_NS : IDLE_NS);
	}
	return NULL;
}

bool nvs_swap_fill_at_exit(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_signals q;
	bool away = false;

	if (!s->mover || nvs_memory_locked)
		return false;
	nvs_signals_block(&q);
	for (bool moved = true; moved && move_decide(gpu) == PLAN_IN;) {
		struct nvs_pass_result p = nvs_pass(gpu, NVS_PASS_IN_AT_EXIT);

		moved = p.moved;
		away = true;
		nvs_swap_tell(gpu, p.stuck ? NVS_MOVED_STUCK | p.stuck : 0);
		if (!moved) /* other clients have to make room first */
			nvs_swap_wait(s, atomic_load(&s->kick), RETRY_NS);
	}
	nvs_signals_restore(&q);
	return away;
}

bool nvs_mover_start(struct nvs_gpu *gpu)
{
	return nvs_thread_start(mover_main, gpu);
}
