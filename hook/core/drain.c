// SPDX-License-Identifier: Apache-2.0
/*
 * drain.c: whether the GPU has finished what was submitted.
 */
#include <time.h>

#include "clock.h"
#include "drain.h"
#include "glibc.h"
#include "log.h"
#include "stream.h"
#include "thread.h"
#include "throttle.h"

static atomic_bool stopped;
static atomic_int in_driver;

bool nvs_driver_enter(void)
{
	atomic_fetch_add(&in_driver, 1);
	if (!nvs_of_shim || !atomic_load(&stopped))
		return true;
	atomic_fetch_sub(&in_driver, 1);
	return false;
}

void nvs_driver_leave(void)
{
	atomic_fetch_sub(&in_driver, 1);
}

void nvs_driver_stop(void)
{
	static const struct timespec nap = { 0, 1000000 };

	atomic_store(&stopped, true);
	for (int i = 0; i < 1000 && atomic_load(&in_driver); i++)
		nanosleep(&nap, NULL);
}

/* gpu->drain_lock is held. False: a capture was begun, see HOLD_NS. */
static bool synchronise_contexts(struct nvs_gpu *gpu)
{
	for (unsigned i = 0; i < NVS_MAX_CONTEXTS; i++) {
		struct nvs_context *c = &nvs_contexts[i];
		void *ctx = NULL, *popped;

		if (atomic_load(&gpu->captures))
			return false;
		pthread_mutex_lock(&nvs_table_lock);
		if (i < nvs_contexts_used && c->gpu == gpu && atomic_load(&c->dirty))
			ctx = c->ctx;
		pthread_mutex_unlock(&nvs_table_lock);
		if (!ctx)
			continue;
		if (nvs_driver.ctx_push(ctx) == CUDA_SUCCESS) {
			/* An error is the application's; its work is over all the same. */
			int result = nvs_driver.ctx_synchronize();

			if (result != CUDA_SUCCESS)
				nvs_debugf("drain of GPU %u: context %p: error %d", gpu->number, ctx,
					   result);
			nvs_driver.ctx_pop(&popped);
		}
		atomic_store(&c->dirty, false);
	}
	return true;
}

void nvs_streams_touch(struct nvs_gpu *gpu)
{
	pthread_mutex_lock(&nvs_table_lock);
	for (unsigned i = 0; i < nvs_contexts_used; i++)
		if (nvs_contexts[i].ctx && nvs_contexts[i].gpu == gpu)
			atomic_store(&nvs_contexts[i].dirty, true);
	for (unsigned i = 0; i < nvs_streams_used; i++)
		if (nvs_streams[i].key && nvs_streams[i].gpu == gpu)
			atomic_store(&nvs_streams[i].dirty, true);
	pthread_mutex_unlock(&nvs_table_lock);
}

/* took_ns: from the closed gate to the end of the work. */
static void forget_work(struct nvs_gpu *gpu, uint64_t took_ns)
{
	pthread_mutex_lock(&nvs_table_lock);
	for (unsigned i = 0; i < nvs_streams_used; i++)
		if (nvs_streams[i].gpu == gpu &&
		    atomic_exchange(&nvs_streams[i].dirty, false))
			nvs_throttle_drained(&nvs_streams[i], took_ns);
	atomic_store(&gpu->overflow.dirty, false);
	pthread_mutex_unlock(&nvs_table_lock);
	/* A context switch that went past us is noticed at the next grant. */
	atomic_fetch_add(&nvs_gate.generation, 1);
}

/*
 * While a capture is open: whether every stream with work is seen to be idle.
 * drain_lock is held, so that none of them begins to capture now.
 */
static bool streams_done(struct nvs_gpu *gpu)
{
	bool done = true;

	pthread_mutex_lock(&nvs_table_lock);
	if (atomic_load(&gpu->overflow.dirty))
		done = false;
	for (unsigned i = 0; done && i < nvs_streams_used; i++) {
		struct nvs_stream *s = &nvs_streams[i];

		if (!s->key || s->gpu != gpu || !atomic_load(&s->dirty))
			continue;
		/* Asking about a default or capturing stream would break the capture. */
		if (nvs_key_is_default(s->key) || s->capturing || nvs_capturing(s->key))
			done = false;
		else if (nvs_driver.stream_query(s->key) == CUDA_ERROR_NOT_READY)
			done = false;
	}
	pthread_mutex_unlock(&nvs_table_lock);
	return done;
}

/* Whether anything was submitted on the GPU since the last drain. */
static bool has_work(struct nvs_gpu *gpu)
{
	bool work = atomic_load(&gpu->overflow.dirty);

	pthread_mutex_lock(&nvs_table_lock);
	for (unsigned i = 0; !work && i < nvs_contexts_used; i++)
		work = nvs_contexts[i].ctx && nvs_contexts[i].gpu == gpu &&
		       atomic_load(&nvs_contexts[i].dirty);
	pthread_mutex_unlock(&nvs_table_lock);
	return work;
}

enum nvs_drained nvs_drain(struct nvs_gpu *gpu, uint64_t closed_ns, uint64_t patience_ns)
{
	static const struct timespec nap = { 0, 200000 };
	uint64_t deadline = nvs_now() + patience_ns;

	if (!nvs_driver.ctx_push || !nvs_driver.ctx_pop || !nvs_driver.ctx_synchronize)
		return NVS_DRAIN_UNPROVEN;
	for (;;) {
		bool done = false;

		if (!nvs_driver_enter())
			return has_work(gpu) ? NVS_DRAIN_STOPPED : NVS_DRAINED;
		pthread_mutex_lock(&gpu->drain_lock);
		done = synchronise_contexts(gpu) || streams_done(gpu);
		pthread_mutex_unlock(&gpu->drain_lock);
		nvs_driver_leave();
		if (done) {
			uint64_t now = nvs_now();

			forget_work(gpu, now > closed_ns ? now - closed_ns : 0);
			return NVS_DRAINED;
		}
		if (nvs_now() >= deadline)
			return NVS_DRAIN_UNPROVEN;
		nanosleep(&nap, NULL);
	}
}

static enum nvs_streams_state stream_state(struct nvs_stream *s)
{
	struct nvs_context *c = s->context;
	void *popped;
	int result;

	/* Another thread's default stream can't be asked about; a drain will find its work. */
	if (s->key == CU_STREAM_PER_THREAD || !c || !c->ctx ||
	    nvs_driver.ctx_push(c->ctx) != CUDA_SUCCESS)
		return NVS_STREAMS_UNKNOWN;
	result = nvs_driver.stream_query(s->key);
	nvs_driver.ctx_pop(&popped);
	return result == CUDA_ERROR_NOT_READY ? NVS_STREAMS_BUSY : NVS_STREAMS_IDLE;
}

/* The state, and whether a stream was left out. drain_lock is held. */
static enum nvs_streams_state streams_state(struct nvs_gpu *gpu, bool *left_out)
{
	enum nvs_streams_state state = NVS_STREAMS_IDLE;

	pthread_mutex_lock(&nvs_table_lock);
	for (unsigned i = 0; state != NVS_STREAMS_BUSY && i < nvs_streams_used; i++) {
		struct nvs_stream *s = &nvs_streams[i];

		if (!s->key || s->gpu != gpu || !atomic_load(&s->dirty))
			continue;
		switch (stream_state(s)) {
		case NVS_STREAMS_BUSY:
			state = NVS_STREAMS_BUSY;
			break;
		case NVS_STREAMS_UNKNOWN:
			*left_out = true;
			break;
		case NVS_STREAMS_IDLE:
			break;
		}
	}
	pthread_mutex_unlock(&nvs_table_lock);
	return state;
}

static enum nvs_streams_state look(struct nvs_gpu *gpu, bool *left_out)
{
	enum nvs_streams_state state;

	*left_out = false;
	if (!nvs_driver.stream_query || !nvs_driver.ctx_push || !nvs_driver.ctx_pop)
		return NVS_STREAMS_UNKNOWN;
	if (pthread_mutex_trylock(&gpu->drain_lock) != 0)
		return NVS_STREAMS_UNKNOWN;
	if (atomic_load(&gpu->captures) || !nvs_driver_enter()) {
		pthread_mutex_unlock(&gpu->drain_lock);
		return NVS_STREAMS_UNKNOWN;
	}
	state = streams_state(gpu, left_out);
	nvs_driver_leave();
	pthread_mutex_unlock(&gpu->drain_lock);
	return state;
}

enum nvs_streams_state nvs_streams_look(struct nvs_gpu *gpu)
{
	bool left_out;
	enum nvs_streams_state state = look(gpu, &left_out);

	return state == NVS_STREAMS_IDLE && left_out ? NVS_STREAMS_UNKNOWN : state;
}

bool nvs_streams_idle(struct nvs_gpu *gpu)
{
	bool left_out;

	return look(gpu, &left_out) == NVS_STREAMS_IDLE;
}

void nvs_drain_fork_child(void)
{
	atomic_store(&in_driver, 0);
	atomic_store(&stopped, false);
}
