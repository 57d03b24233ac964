// SPDX-License-Identifier: Apache-2.0
#include "exit.h"

#include "clock.h"
#include "drain.h"
#include "drainer.h"
#include "futex.h"
#include "grant.h"
#include "ops.h"
#include "suspended.h"
#include "thread.h"
#include "throttle.h"

/* ---- before the driver's end ---- */

/*
 * The driver takes some 50 ms to take a process down, and up to 0.2 s for each GiB of its host
 * memory. A tenant that waits for the GPU need not wait for that: the grant is given back before, if
 * the work is done. The lock is held.
 */
static bool give_back(void)
{
	bool any = false;

	NVS_FOR_EACH_GPU(gpu) {
		bool wanted = nvs_takes_turns(atomic_load(&gpu->slot)) || nvs_memory_ops.may_leave(gpu);

		if (gpu->lease.gate == LEASE_OPEN && wanted && nvs_memory_ops.leave(gpu)) {
			nvs_gpu_give_back(gpu);
			any = true;
		}
	}
	return any;
}

static bool given_back(void)
{
	NVS_FOR_EACH_GPU(gpu)
		if (atomic_load(&gpu->drains.leaves))
			return false;
	return true;
}

/* A signal handler that exits may have interrupted the lock's owner. */
static bool lock_at_exit(void)
{
	return NVS_NAP_UNTIL(nvs_trylock(&nvs_client_lock), nvs_now() + 200 * NVS_MS, NVS_MS);
}

void nvs_exit(void)
{
	bool locked, draining = false;

	if (!atomic_load(&nvs_gate.active) || atomic_load(&nvs_exiting))
		return;
	nvs_suspended_exit();
	locked = lock_at_exit();
	nvs_exiting_ns = nvs_now();
	if (locked) {
		NVS_FOR_EACH_GPU(gpu)
			gpu->stats.sent_ns = 0;
		nvs_stats_send(nvs_exiting_ns);
		draining = give_back();
	}
	if (draining) {
		nvs_unlock(&nvs_client_lock);
		/* As long as nvs_driver_stop() waits, at most: work that still runs is not waited for. */
		NVS_NAP_UNTIL(given_back(), nvs_now() + NVS_S, NVS_MS);
		locked = lock_at_exit();
	}
	atomic_store(&nvs_exiting, true);
	if (locked)
		nvs_unlock(&nvs_client_lock);
	nvs_driver_stop();
}

/* ---- after it ---- */

/*
 * A thread that waits for the drain of a revoked grant does it, once the work has ended. The lock is
 * held, and given up meanwhile. False: work still runs.
 */
static bool drain_at_exit(struct nvs_gpu *gpu)
{
	uint64_t closed = gpu->closed_ns;
	bool done;

	nvs_unlock(&nvs_client_lock);
	done = !nvs_gate_busy(gpu) && nvs_streams_idle(gpu) && nvs_drain(gpu, 0) == NVS_DRAINED;
	nvs_lock(&nvs_client_lock);
	if (done && gpu->lease.gate == LEASE_DRAINING && gpu->closed_ns == closed) {
		gpu->drain_ns = nvs_now() - closed;
		nvs_drain_forget(gpu, gpu->drain_ns);
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_DRAINED });
	}
	return done;
}

/* A thread that waits for memory brings it in, once the gate may open. */
static bool fill_at_exit(struct nvs_gpu *gpu, struct nvs_signals *q)
{
	bool filled;

	nvs_client_leave(q);
	filled = nvs_memory_ops.fill_at_exit(gpu);
	nvs_client_enter(q);
	return filled;
}

bool nvs_exit_work(struct nvs_gpu *gpu, struct nvs_signals *q)
{
	enum lease_gate gate = gpu->lease.gate;

	if (!atomic_load(&nvs_exiting))
		return false;
	if (gate == LEASE_DRAINING)
		return drain_at_exit(gpu);
	return (gate == LEASE_OPEN || gate == LEASE_FREE) && fill_at_exit(gpu, q);
}
