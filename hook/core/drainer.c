// SPDX-License-Identifier: Apache-2.0
/*
 * drainer.c: a thread for each GPU does the drains that leases ask for, because the client thread
 * never calls the driver, but asks for a GPU's UUID before it attaches again: a call may take long, and
 * the scheduler is to be heard.
 */
#include "drainer.h"

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "futex.h"
#include "grant.h"
#include "log.h"
#include "ops.h"
#include "preempt.h"
#include "slice.h"
#include "thread.h"
#include "utilization.h"

#define DRAIN_PATIENCE_NS (1 * NVS_S) /* with a capture open, unless REVOKE says more */

/* The lock is held; it is given up while waiting for the one call of a step. */
static void await_step(struct nvs_gpu *gpu)
{
	while (gpu->wait.step_until_ns) {
		uint64_t end = gpu->wait.step_until_ns;
		uint32_t seen = atomic_load(&gpu->changed);

		nvs_unlock(&nvs_client_lock);
		nvs_futex_await((uint32_t *)&gpu->changed, seen, end);
		nvs_lock(&nvs_client_lock);
		if (nvs_now() >= gpu->wait.step_until_ns)
			gpu->wait.step_until_ns = 0;
	}
}

/*
 * The GPU has finished what a drain waited for, or will not. The lock is held. Where the drain was
 * cut meanwhile and the next grant has come, new work may run.
 */
static void end_drain(struct nvs_gpu *gpu, enum nvs_drained result, uint64_t closed, unsigned offs)
{
	bool ours = gpu->closed_ns == closed, cut = ours && gpu->lease.unfinished;

	if (result == NVS_DRAINED)
		nvs_preempt_learn(gpu, offs);
	if (ours && gpu->lease.gate == LEASE_DRAINING) {
		gpu->drain_ns = nvs_now() - closed;
		if (result == NVS_DRAINED)
			nvs_drain_forget(gpu, gpu->drain_ns);
		else
			nvs_debugf("GPU %u: released with a capture open, work may still run", gpu->number);
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_DRAINED });
	} else if (cut && result == NVS_DRAINED) {
		nvs_drain_forget(gpu, 0);
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_FINISHED });
	} else if (!cut) {
		nvs_streams_touch(gpu);
	}
}

/* Not under the lock. */
static void do_drain(struct nvs_gpu *gpu)
{
	enum nvs_drained result;
	uint64_t closed, deadline, passed;
	unsigned offs;

	nvs_lock(&nvs_client_lock);
	await_step(gpu);
	if (gpu->lease.gate != LEASE_DRAINING && !gpu->lease.unfinished) {
		nvs_unlock(&nvs_client_lock); /* cut before this thread came to it, and granted again */
		return;
	}
	closed = gpu->closed_ns;
	offs = atomic_load(&gpu->preempt.offs);
	deadline = closed + (gpu->grace_ns ? gpu->grace_ns / 4 * 3 : DRAIN_PATIENCE_NS);
	passed = gpu->wait.passed;
	for (;;) {
		nvs_unlock(&nvs_client_lock);
		nvs_gate_quiesce(gpu);
		result = nvs_drain(gpu, nvs_elapsed(deadline, nvs_now()));
		if (result == NVS_DRAIN_STOPPED)
			return; /* the end of the process releases the GPU */
		nvs_lock(&nvs_client_lock);
		if (gpu->wait.passed == passed)
			break;
		if (gpu->closed_ns != closed || gpu->lease.gate != LEASE_DRAINING) {
			result = NVS_DRAIN_UNPROVEN; /* more work has come in, and the drain was cut */
			break;
		}
		passed = gpu->wait.passed; /* more work has come in meanwhile */
		nvs_streams_touch(gpu);
	}
	end_drain(gpu, result, closed, offs);
	nvs_unlock(&nvs_client_lock);
}

/* Gives the grant back if the GPU has nothing to do and no call came meanwhile. */
static void release_if_idle(struct nvs_gpu *gpu)
{
	bool idle = nvs_streams_idle(gpu);

	nvs_lock(&nvs_client_lock);
	if (idle && !gpu->lease.waiting && nvs_gate_calls(gpu) == gpu->drains.idle_calls)
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_IDLE });
	nvs_unlock(&nvs_client_lock);
}

/* Whether the page alone has opened the gate: the GRANT, which says what to release, is on its way. */
static bool awaits_grant(struct nvs_gpu *gpu)
{
	bool awaits;

	nvs_lock(&nvs_client_lock);
	awaits = gpu->lease.link == LEASE_ATTACHED && gpu->lease.gate == LEASE_OPEN && gpu->lease.guessed;
	nvs_unlock(&nvs_client_lock);
	return awaits;
}

static void drainer_leave(struct nvs_gpu *gpu)
{
	bool idle = nvs_streams_idle(gpu), draining = false;

	while (idle && awaits_grant(gpu) && !atomic_load(&nvs_exiting))
		nvs_nap(NVS_MS);
	nvs_lock(&nvs_client_lock);
	if (idle)
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_IDLE });
	nvs_unlock(&nvs_client_lock);
	if (atomic_exchange(&gpu->drains.due, false))
		do_drain(gpu);
	else
		draining = idle; /* by another thread, which may have been faster */
	while (draining && !atomic_load(&nvs_exiting)) {
		nvs_nap(NVS_MS);
		nvs_lock(&nvs_client_lock);
		draining = gpu->lease.gate == LEASE_DRAINING;
		nvs_unlock(&nvs_client_lock);
	}
	atomic_store(&gpu->drains.leaves, false);
}

static void *leaver_main(void *arg)
{
	nvs_of_shim = true; /* it may come to run when the driver is taken down */
	drainer_leave(arg);
	return NULL;
}

static void *drainer_main(void *arg)
{
	struct nvs_gpu *gpu = arg;
	unsigned done = 0, look;

	nvs_thread_setup("nvshare-drain");
	for (;;) {
		unsigned wanted = atomic_load(&gpu->drains.wanted);

		if (wanted == done) {
			nvs_futex_wait((uint32_t *)&gpu->drains.wanted, done, 60 * NVS_S, true);
			continue;
		}
		done = wanted;
		look = atomic_exchange(&gpu->drains.look, 0);
		if (look & NVS_LOOK_IDLE)
			release_if_idle(gpu);
		if (look & NVS_LOOK_SAMPLE)
			nvs_utilization_sample(gpu);
		if (look & NVS_LOOK_CONTROLS)
			nvs_controls_try(gpu);
		if (look & NVS_LOOK_POOLS)
			nvs_memory_ops.look();
		if (look & NVS_LOOK_LEAVE)
			drainer_leave(gpu);
		if (atomic_exchange(&gpu->drains.due, false))
			do_drain(gpu);
	}
	return NULL;
}

/* False: there can be no thread. */
static bool drainer_wake(struct nvs_gpu *gpu)
{
	if (!gpu->drains.started)
		gpu->drains.started = nvs_thread_start(drainer_main, gpu);
	if (!gpu->drains.started)
		return false;
	atomic_fetch_add(&gpu->drains.wanted, 1);
	nvs_futex_wake((uint32_t *)&gpu->drains.wanted, true);
	return true;
}

void nvs_drainer_look(struct nvs_gpu *gpu, enum nvs_look why)
{
	if (nvs_active() && !(atomic_fetch_or(&gpu->drains.look, why) & why) && !drainer_wake(gpu))
		atomic_fetch_and(&gpu->drains.look, ~(unsigned)why); /* the next look tries again */
}

/*
 * On a thread of the shim: the thread that exits may be in a signal handler, and have any lock,
 * malloc's too. So a new thread is started only where memory could not leave otherwise.
 */
void nvs_gpu_give_back(struct nvs_gpu *gpu)
{
	atomic_store(&gpu->drains.leaves, true);
	if (gpu->drains.started) {
		atomic_fetch_or(&gpu->drains.look, NVS_LOOK_LEAVE);
		drainer_wake(gpu);
	} else if (!nvs_memory_ops.may_leave(gpu) || !nvs_thread_start(leaver_main, gpu)) {
		atomic_store(&gpu->drains.leaves, false);
	}
}

void nvs_drains_start(void)
{
	NVS_FOR_EACH_GPU(gpu)
		if (atomic_load(&gpu->drains.due) && !drainer_wake(gpu) && atomic_exchange(&gpu->drains.due, false))
			do_drain(gpu); /* rather than never */
}
