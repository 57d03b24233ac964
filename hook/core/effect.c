// SPDX-License-Identifier: Apache-2.0
/*
 * effect.c: see controls.h. A driver call may wait for a lock of the driver's that another
 * thread has, which waits for the GPU. So the thread that records the event is never the
 * one that puts the channels on: that is a helper, which does so after a bound.
 */
#include "controls.h"

#include "clock.h"
#include "connection.h"
#include "futex.h"
#include "grant.h"
#include "stream.h"
#include "thread.h"

#define COMES_NS  (20 * NVS_MS) /* an event with the channels on: others may have the GPU first */
#define LEAST_NS  (1 * NVS_MS)  /* of looking with the channels off */
#define BOUND_NS  (10 * NVS_MS) /* after which the helper puts them on */
#define HELPER_NS (10 * NVS_S)  /* controls end within seconds */

/* Where the helper is: gpu->effect.step. */
enum { STARTED, REFUSED, OFF, LOOKED, ON };

static void effect_set(struct nvs_gpu *gpu, unsigned step)
{
	atomic_store(&gpu->effect.step, step);
	nvs_futex_wake((uint32_t *)&gpu->effect.step, true);
}

/* The looker is through. The helper may be as well, and says so already. */
static void looked(struct nvs_gpu *gpu)
{
	unsigned step = OFF;

	if (atomic_compare_exchange_strong(&gpu->effect.step, &step, LOOKED))
		nvs_futex_wake((uint32_t *)&gpu->effect.step, true);
}

/* Waits for another step than this one, and returns that. */
static unsigned await(struct nvs_gpu *gpu, unsigned step, uint64_t ns)
{
	return nvs_futex_await((uint32_t *)&gpu->effect.step, step, nvs_now() + ns);
}

/* The looker may have given up. Channels that did not go on are the preempter's. */
static void helper_end(struct nvs_gpu *gpu, unsigned step, bool off)
{
	nvs_lock(&nvs_client_lock);
	gpu->preempt.looking--;
	gpu->preempt.off = gpu->preempt.off || off;
	effect_set(gpu, step);
	nvs_unlock(&nvs_client_lock);
	nvs_gpu_wake_preempter(gpu);
}

static void *helper_main(void *arg)
{
	struct nvs_gpu *gpu = arg;
	bool on;

	nvs_thread_setup("nvshare-effect");
	if (!nvs_channels_switch(gpu, false)) {
		helper_end(gpu, REFUSED, false);
		return NULL;
	}
	effect_set(gpu, OFF);
	await(gpu, OFF, BOUND_NS);
	on = nvs_channels_switch(gpu, true);
	helper_end(gpu, on ? ON : REFUSED, !on);
	return NULL;
}

static bool helper_start(struct nvs_gpu *gpu)
{
	bool started;

	nvs_lock(&nvs_client_lock);
	effect_set(gpu, STARTED);
	started = nvs_thread_start(helper_main, gpu);
	gpu->preempt.looking += started;
	nvs_unlock(&nvs_client_lock);
	return started;
}

/* Whether the event comes within a time. *took: how long it took. */
static bool comes(void *event, uint64_t ns, uint64_t *took)
{
	uint64_t start = nvs_now();
	int result;

	do {
		result = nvs_driver.event_query(event);
		*took = nvs_now() - start;
		if (result == CUDA_ERROR_NOT_READY)
			nvs_nap(20 * NVS_US);
	} while (result == CUDA_ERROR_NOT_READY && *took < ns);
	return result == CUDA_SUCCESS;
}

static enum nvs_rm_result effect_look(struct nvs_gpu *gpu, void *stream, void *event)
{
	enum nvs_rm_result seen = NVS_RM_UNTRIED;
	uint64_t took, bound = BOUND_NS / 2;
	bool came = false, recorded;

	if (nvs_driver.event_record(event, stream) != CUDA_SUCCESS || !comes(event, COMES_NS, &took))
		return seen;
	if (4 * took > bound)
		return seen; /* with others on the GPU it may come late for another reason */
	bound = 4 * took > LEAST_NS ? 4 * took : LEAST_NS;
	if (!helper_start(gpu) || await(gpu, STARTED, HELPER_NS) != OFF)
		return seen;
	recorded = nvs_driver.event_record(event, stream) == CUDA_SUCCESS;
	if (recorded)
		came = comes(event, bound, &took);
	/* A call that waits for the GPU may have put them on meanwhile, and so may the helper. */
	if (came && nvs_channels_are(gpu, false))
		seen = NVS_RM_FAKED;
	if (recorded && !came && atomic_load(&gpu->effect.step) == OFF)
		seen = NVS_RM_OK;
	looked(gpu);
	if (await(gpu, LOOKED, HELPER_NS) != ON)
		return NVS_RM_UNTRIED;
	if (seen == NVS_RM_OK && !comes(event, COMES_NS, &took))
		return NVS_RM_UNTRIED; /* it did not come for another reason */
	return seen;
}

static enum nvs_rm_result look_in_context(struct nvs_gpu *gpu)
{
	enum nvs_rm_result seen = NVS_RM_UNTRIED;
	/* drain_lock is held, so it is not destroyed. */
	void *ctx = nvs_context_any(gpu), *stream = NULL, *event = NULL, *popped;

	if (!ctx || nvs_driver.ctx_push(ctx) != CUDA_SUCCESS)
		return seen;
	if (nvs_driver.stream_create(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
	    nvs_driver.event_create(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS)
		seen = effect_look(gpu, stream, event);
	if (event)
		nvs_driver.event_destroy(event);
	if (stream)
		nvs_driver.stream_destroy(stream);
	nvs_driver.ctx_pop(&popped);
	return seen;
}

/* Whether a drain that is being cut, or was, has the channels. The lock is held. */
static bool taken(const struct nvs_gpu *gpu)
{
	return gpu->preempt.switching || gpu->preempt.off || gpu->lease.unfinished || gpu->lease.gate == LEASE_DRAINING;
}

enum nvs_rm_result nvs_effect_look(struct nvs_gpu *gpu)
{
	enum nvs_rm_result seen = NVS_RM_UNTRIED;
	bool begun;

	nvs_lock(&nvs_client_lock);
	begun = !gpu->preempt.looking && !taken(gpu) && !atomic_load(&nvs_exiting);
	gpu->preempt.looking += begun;
	nvs_unlock(&nvs_client_lock);
	if (!begun)
		return seen;
	if (!atomic_load(&gpu->captures) && nvs_driver_enter()) {
		if (nvs_trylock(&gpu->drain_lock)) {
			if (!atomic_load(&gpu->captures)) {
				gpu->effect.looks++; /* others say nothing */
				seen = look_in_context(gpu);
			}
			nvs_unlock(&gpu->drain_lock);
		}
		nvs_driver_leave();
	}
	nvs_lock(&nvs_client_lock);
	gpu->preempt.looking--;
	nvs_unlock(&nvs_client_lock);
	nvs_gpu_wake_preempter(gpu);
	return seen;
}
