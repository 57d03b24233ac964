// SPDX-License-Identifier: Apache-2.0
/*
 * drainer.c: does the drains that leases ask for, and tells the lease.
 */
#include "drainer.h"

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "futex.h"
#include "grant.h"
#include "log.h"
#include "ops.h"
#include "thread.h"

#define DRAIN_PATIENCE_NS (1 * NVS_S) /* with a capture open, unless REVOKE says more */

/* The lock is held; it is given up while waiting for the one call of a step. */
static void await_step(struct nvs_gpu *gpu)
{
	while (gpu->step_until_ns) {
		uint64_t left = nvs_elapsed(gpu->step_until_ns, nvs_now());
		uint32_t seen = atomic_load(&gpu->changed);

		if (!left) {
			gpu->step_until_ns = 0;
			break;
		}
		pthread_mutex_unlock(&nvs_client_lock);
		nvs_futex_wait((uint32_t *)&gpu->changed, seen, left, true);
		pthread_mutex_lock(&nvs_client_lock);
	}
}

/* Not under the lock. The GPU's gate is closed. */
static void do_drain(struct nvs_gpu *gpu)
{
	enum nvs_drained result;
	uint64_t closed, deadline, passed;

	pthread_mutex_lock(&nvs_client_lock);
	await_step(gpu);
	closed = gpu->closed_ns;
	deadline = closed + (gpu->grace_ns ? gpu->grace_ns / 4 * 3 : DRAIN_PATIENCE_NS);
	passed = gpu->passed;
	for (;;) {
		pthread_mutex_unlock(&nvs_client_lock);
		nvs_gate_quiesce(gpu);
		result = nvs_drain(gpu, closed, nvs_elapsed(deadline, nvs_now()));
		if (result == NVS_DRAIN_STOPPED)
			return; /* the end of the process releases the GPU */
		pthread_mutex_lock(&nvs_client_lock);
		if (gpu->passed == passed)
			break;
		passed = gpu->passed; /* more work has come in meanwhile */
		nvs_streams_touch(gpu);
	}
	if (result == NVS_DRAIN_UNPROVEN)
		nvs_debugf("GPU %u: released with a capture open, work may still run", gpu->number);
	gpu->drain_ns = nvs_now() - gpu->closed_ns;
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_DRAINED });
	pthread_mutex_unlock(&nvs_client_lock);
}

static void *drainer_main(void *arg)
{
	struct nvs_gpu *gpu = arg;
	unsigned done = 0;

	nvs_thread_setup("nvshare-drain");
	for (;;) {
		unsigned wanted = atomic_load(&gpu->drain_wanted);

		if (wanted == done) {
			nvs_futex_wait((uint32_t *)&gpu->drain_wanted, done, 60 * NVS_S, true);
			continue;
		}
		done = wanted;
		do_drain(gpu);
	}
	return NULL;
}

/* A thread of its own: who exits may be in a signal handler, and have any lock. */
static void *give_back_main(void *arg)
{
	static const struct timespec nap = { 0, 1000000 };
	struct nvs_gpu *gpu = arg;
	bool idle = nvs_streams_idle(gpu), draining = false;

	pthread_mutex_lock(&nvs_client_lock);
	if (idle)
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_IDLE });
	pthread_mutex_unlock(&nvs_client_lock);
	if (atomic_exchange(&gpu->drain, false))
		do_drain(gpu);
	else
		draining = idle; /* by the client thread, which may have been faster */
	while (draining && !atomic_load(&nvs_exiting)) {
		nanosleep(&nap, NULL);
		pthread_mutex_lock(&nvs_client_lock);
		draining = gpu->lease.gate == LEASE_DRAINING;
		pthread_mutex_unlock(&nvs_client_lock);
	}
	atomic_store(&gpu->leaves, false);
	return NULL;
}

void nvs_gpu_give_back(struct nvs_gpu *gpu)
{

	atomic_store(&gpu->leaves, true);
	if (!nvs_thread_start(give_back_main, gpu))
		atomic_store(&gpu->leaves, false);
}

/*
 * With one GPU in use the client thread drains by itself; with several each
 * has a thread, so that a drain of one never delays a revoke of another; and so
 * it is under a memory limit: who allocates waits for what the client thread
 * hears.
 */
void nvs_drains_start(void)
{
	unsigned used = 0;

	NVS_FOR_EACH_GPU(gpu)
		used += atomic_load(&gpu->used);
	NVS_FOR_EACH_GPU(gpu) {
	
		if (!atomic_exchange(&gpu->drain, false))
			continue;
		if ((used > 1 || nvs_memory_ops.answers_awaited(gpu)) && !gpu->drainer)
			gpu->drainer = nvs_thread_start(drainer_main, gpu);
		if (gpu->drainer) {
			atomic_fetch_add(&gpu->drain_wanted, 1);
			nvs_futex_wake((uint32_t *)&gpu->drain_wanted, true);
		} else {
			do_drain(gpu);
		}
	}
}
