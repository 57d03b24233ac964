// SPDX-License-Identifier: Apache-2.0
/*
 * preempt.c: a thread for each GPU takes channels off and puts them on, and sets their time slice,
 * which takes 0.3 to 0.8 ms and may wait for seconds. It starts with the first drain that takes long,
 * the first slice, or a look of effect.c that left them off. lease.unfinished says what is wanted,
 * gpu->preempt.off what there is.
 */
#include "preempt.h"

#include "clock.h"
#include "connection.h"
#include "controls.h"
#include "futex.h"
#include "grant.h"
#include "log.h"
#include "ops.h"
#include "slice.h"
#include "thread.h"

/*
 * The throttle keeps two batches of 2.5 ms, and a kernel, ahead of the GPU. Off and on leave it idle
 * for 0.7 ms (H200): only a drain that takes longer is cut, so of kernels beyond 2.5 ms.
 */
#define LATE_NS (10 * NVS_MS)
/* Memory of work that was cut cannot leave: where it may have to, only what would be fenced is cut. */
#define GRACE_PART 2
/* Where drains have taken longer lately. A drain with nothing to wait for ends sooner. */
#define SOON_NS (200 * NVS_US)
/*
 * For so many drains after a long one, each of which may show that the work has become short again.
 * A cut alone shows little: what was cut may have been about to end.
 */
#define LONG_DRAINS 8
#define RETRY_NS (100 * NVS_MS) /* between two tries to put channels on */
#define NUDGE_NS (1 * NVS_S)    /* unfinished work repeats its request */
#define BOUND_NS (5 * NVS_S)    /* for so long work is bounded after a drain could not be cut */
#define MOST_DOUBLINGS 10       /* of that, to 85 minutes */
#define STRAY_NS (20 * NVS_MS)  /* between two looks whether others have put channels on */

/* When the running drain is to be cut; 0: never. */
static uint64_t due_at(struct nvs_gpu *gpu)
{
	const struct lease *l = &gpu->lease;
	uint64_t late = gpu->preempt.long_drains ? SOON_NS : LATE_NS, due;

	if (l->gate != LEASE_DRAINING || !l->up || l->link == LEASE_REJECTED ||
	    gpu->preempt.uncut_ns == gpu->closed_ns || gpu->preempt.looking || atomic_load(&nvs_exiting))
		return 0;
	if (nvs_memory_ops.may_leave(gpu)) {
		if (!gpu->grace_ns || !__atomic_load_n(&nvs_client.page->room_seq[gpu->number], __ATOMIC_RELAXED))
			return 0; /* or its scheduler knows of no memory that cannot leave: it is older */
		late = gpu->grace_ns / GRACE_PART;
	}
	due = gpu->closed_ns + late;
	return due > gpu->wait.step_until_ns ? due : gpu->wait.step_until_ns; /* a call of the gang's goes first */
}

/* The lock is held, and given up meanwhile. False: they are as before, or (off) some are off and to be put on. */
static bool preempt_switch(struct nvs_gpu *gpu, bool on)
{
	bool done, off;

	gpu->preempt.switching = true;
	nvs_unlock(&nvs_client_lock);
	if (!on && !gpu->preempt.cuttable)
		gpu->preempt.cuttable = nvs_channels_work(gpu);
	done = (on || gpu->preempt.cuttable) && nvs_channels_switch(gpu, on);
	off = on ? !done : done || nvs_channels_are(gpu, false);
	nvs_lock(&nvs_client_lock);
	gpu->preempt.switching = false;
	gpu->preempt.off = off;
	return done;
}

/*
 * The drain that began then goes on to its end, and so may later ones: work is bounded for a time,
 * which doubles with each failure, because the driver may refuse for good.
 */
static void not_cut(struct nvs_gpu *gpu, uint64_t closed)
{
	gpu->preempt.uncut_ns = closed;
	gpu->preempt.bound_until_ns = nvs_now() + (BOUND_NS << gpu->preempt.failures);
	gpu->preempt.failures += gpu->preempt.failures < MOST_DOUBLINGS;
	nvs_debugf("GPU %u: the drain is not cut", gpu->number);
}

static void cut(struct nvs_gpu *gpu)
{
	uint64_t closed = gpu->closed_ns;

	if (!preempt_switch(gpu, false)) {
		not_cut(gpu, closed);
		return;
	}
	atomic_fetch_add(&gpu->preempt.offs, 1);
	gpu->preempt.failures = 0;
	gpu->preempt.bound_until_ns = 0;
	if (gpu->closed_ns != closed)
		return; /* of another drain */
	gpu->drain_ns = nvs_now() - closed;
	if (!gpu->preempt.long_drains)
		gpu->preempt.long_drains = 1;
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_PREEMPTED });
}

/* The channels of a preempted process were put on for the end of a context, which may be over. */
static void keep_off(struct nvs_gpu *gpu)
{
	bool on;

	nvs_unlock(&nvs_client_lock);
	on = !nvs_is_suspended() && !atomic_load(&nvs_exiting) && nvs_channels_are(gpu, true);
	nvs_lock(&nvs_client_lock);
	if (!on || !gpu->lease.unfinished)
		return;
	if (preempt_switch(gpu, false))
		atomic_fetch_add(&gpu->preempt.offs, 1);
	gpu->preempt.off = true; /* if not, the next look tries again */
}

static void preempt_put_on(struct nvs_gpu *gpu)
{
	bool on = preempt_switch(gpu, true);

	gpu->preempt.on_ns = nvs_now();
	if (on)
		return;
	nvs_unlock(&nvs_client_lock);
	nvs_nap(RETRY_NS);
	nvs_lock(&nvs_client_lock);
}

static void *preempter_main(void *arg)
{
	struct nvs_gpu *gpu = arg;

	nvs_thread_setup("nvshare-preempt");
	nvs_lock(&nvs_client_lock);
	for (;;) {
		uint32_t seen = atomic_load(&gpu->preempt.wanted);
		uint64_t due = due_at(gpu), now = nvs_now();

		if (gpu->preempt.off && !gpu->lease.unfinished) {
			preempt_put_on(gpu);
		} else if (due && now >= due) {
			cut(gpu);
		} else if (gpu->preempt.tells) {
			gpu->preempt.tells = false;
			nvs_slice_apply(gpu);
		} else {
			uint64_t most = gpu->preempt.off ? STRAY_NS : 60 * NVS_S;

			if (gpu->preempt.off)
				keep_off(gpu);
			nvs_unlock(&nvs_client_lock);
			nvs_futex_wait((uint32_t *)&gpu->preempt.wanted, seen, due && due - now < most ? due - now : most,
				       true);
			nvs_lock(&nvs_client_lock);
		}
	}
	return NULL;
}

void nvs_preempt_tick(struct nvs_gpu *gpu, uint64_t now, uint64_t *next)
{
	uint64_t due = gpu->preempt.started ? 0 : due_at(gpu);
	bool late = due && now >= due;

	gpu->preempt.tells = gpu->slice.due;
	if (due && !late)
		*next = due - now < *next ? due - now : *next;
	if (!gpu->preempt.started && (late || gpu->preempt.tells || gpu->preempt.off))
		gpu->preempt.started = nvs_thread_start(preempter_main, gpu);
	if (late && !gpu->preempt.started)
		not_cut(gpu, gpu->closed_ns);
	/* What makes a cut due may have changed beside a drain that no thread steps. */
	if (gpu->preempt.started && (gpu->preempt.tells || gpu->lease.gate == LEASE_DRAINING))
		nvs_gpu_wake_preempter(gpu);
	/* No thread may be at the gate to do that for the work. */
	if (gpu->lease.unfinished && nvs_elapsed(now, gpu->request_ns) > NUDGE_NS)
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_NUDGE });
	if (gpu->lease.unfinished)
		nvs_gpu_try_give_up(gpu, now);
}

void nvs_preempt_learn(struct nvs_gpu *gpu, unsigned offs)
{
	unsigned cuts = atomic_load(&gpu->preempt.offs) - offs;
	/* Cut, it was as good as over when the channels went off, or soon after they were on. */
	bool was_short = cuts == 0 ||
			 (cuts == 1 && (gpu->preempt.off || nvs_elapsed(nvs_now(), gpu->preempt.on_ns) < LATE_NS));

	if (!was_short)
		gpu->preempt.long_drains = LONG_DRAINS;
	else if (gpu->preempt.long_drains)
		gpu->preempt.long_drains--;
}
