// SPDX-License-Identifier: Apache-2.0
/* drain.c: whether the GPU has finished what was submitted. */

#include "clock.h"
#include "futex.h"
#include "drain.h"
#include "log.h"
#include "signals.h"
#include "stream.h"
#include "thread.h"
#include "throttle.h"

/* False: a capture was begun. One that begins later sees gpu->synchronised, and waits. */
static bool synchronise(struct nvs_gpu *gpu, void *ctx)
{
	bool may;
	void *popped;

	atomic_store(&gpu->synchronised, ctx);
	may = !atomic_load(&gpu->captures);
	if (may && nvs_driver.ctx_push(ctx) == CUDA_SUCCESS) {
		/* An error is the application's; its work is over all the same. */
		int result = nvs_driver.ctx_synchronize();

		if (result != CUDA_SUCCESS)
			nvs_debugf("drain of GPU %u: context %p: error %d", gpu->number, ctx, result);
		nvs_driver.ctx_pop(&popped);
	}
	atomic_store(&gpu->synchronised, NULL);
	return may;
}

/* gpu->drain_lock is held. False: a capture was begun. */
static bool synchronise_contexts(struct nvs_gpu *gpu)
{
	bool more = true;

	for (unsigned i = 0; more; i++) {
		struct nvs_context *c = &nvs_contexts[i];
		void *ctx = NULL;

		nvs_lock(&nvs_table_lock);
		more = i < nvs_contexts_used;
		if (more && c->gpu == gpu && atomic_load(&c->dirty))
			ctx = c->ctx;
		nvs_unlock(&nvs_table_lock);
		if (!ctx)
			continue;
		if (!synchronise(gpu, ctx))
			return false;
		atomic_store(&c->dirty, false);
	}
	return true;
}

void nvs_streams_touch(struct nvs_gpu *gpu)
{
	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; i < nvs_contexts_used; i++)
		if (nvs_contexts[i].ctx && nvs_contexts[i].gpu == gpu)
			atomic_store(&nvs_contexts[i].dirty, true);
	for (unsigned i = 0; i < nvs_streams_used; i++)
		if (nvs_streams[i].key && nvs_streams[i].gpu == gpu)
			atomic_store(&nvs_streams[i].dirty, true);
	nvs_unlock(&nvs_table_lock);
}

void nvs_drain_forget(struct nvs_gpu *gpu, uint64_t took_ns)
{
	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; i < nvs_streams_used; i++)
		if (nvs_streams[i].gpu == gpu &&
		    atomic_exchange(&nvs_streams[i].dirty, false))
			nvs_throttle_drained(&nvs_streams[i], took_ns);
	atomic_store(&gpu->overflow.dirty, false);
	atomic_store(&gpu->drains.pending, false);
	nvs_unlock(&nvs_table_lock);
	/* A context switch that went past us is noticed at the next grant. */
	atomic_fetch_add(&nvs_gate.generation, 1);
}

/* What a question about a stream needs. */
struct question {
	struct nvs_stream *stream; /* its record, while query_lock is held */
	void *key, *ctx;
	bool capturing, own; /* own: of the calling thread, if it is a thread's */
	bool open;           /* some stream of the GPU captures, or is about to */
};

enum which {
	WITH_WORK,        /* since it was last drained, or was idle; beside a capture */
	WITH_WORK_FORGET, /* and one that is idle now has no work any more */
	ALL,              /* and the driver sees what has ended */
};

/* The next such stream of the GPU, from *i on. False: there is none. */
static bool next_stream(struct nvs_gpu *gpu, enum which which, unsigned *i, struct question *q)
{
	bool found = false;

	nvs_lock(&nvs_table_lock);
	for (; !found && *i < nvs_streams_used; ++*i) {
		struct nvs_stream *s = &nvs_streams[*i];
		struct nvs_context *c = s->context;

		found = s->key && s->gpu == gpu && (which == ALL || atomic_load(&s->dirty));
		if (!found)
			continue;
		*q = (struct question){ s, s->key, c ? c->ctx : NULL, s->capturing,
					nvs_self && s->owner == nvs_self, atomic_load(&gpu->captures) };
		if (which == WITH_WORK_FORGET)
			atomic_store(&s->dirty, false);
	}
	nvs_unlock(&nvs_table_lock);
	return found;
}

static enum nvs_streams_state state_beside_capture(const struct question *q)
{
	/* To ask about a default or capturing stream would break the capture. */
	return nvs_key_is_default(q->key) || q->capturing || nvs_capturing(q->key) ||
	       nvs_driver.stream_query(q->key) == CUDA_ERROR_NOT_READY
		? NVS_STREAMS_BUSY : NVS_STREAMS_IDLE;
}

static enum nvs_streams_state ask_stream(const struct question *q, bool settle)
{
	void *popped;
	int result;

	/* Another thread's default stream can't be asked about; a drain will find its work. */
	if (q->open || (q->key == CU_STREAM_PER_THREAD && !q->own) || !q->ctx || nvs_driver.ctx_push(q->ctx) != CUDA_SUCCESS)
		return NVS_STREAMS_UNKNOWN;
	result = nvs_driver.stream_query(q->key);
	/*
	 * The driver sees what has ended in an idle stream. The legacy stream might be synchronised
	 * with others that are busy.
	 */
	if (settle && result == CUDA_SUCCESS && q->key != CU_STREAM_LEGACY)
		nvs_driver.stream_synchronize(q->key);
	nvs_driver.ctx_pop(&popped);
	return result == CUDA_ERROR_NOT_READY ? NVS_STREAMS_BUSY : NVS_STREAMS_IDLE;
}

/*
 * What these streams of the GPU do: BUSY if one is, else IDLE; left_out: the state of one is not
 * known. The driver is asked under query_lock alone: a thread that destroys a stream or begins a
 * capture waits for the answer, and no other thread does.
 *
 * A stream is taken for idle before it is asked, and is not if a call is in flight then: a call that
 * comes later looks at the mark after it has raised its flag.
 */
static enum nvs_streams_state ask_streams(struct nvs_gpu *gpu, enum which which, bool *left_out)
{
	enum nvs_streams_state state;
	bool more = true, busy = false, quiet;
	struct question q;

	*left_out = false;
	for (unsigned i = 0; more && (which == ALL || !busy);) {
		nvs_lock(&gpu->query_lock);
		more = next_stream(gpu, which, &i, &q);
		quiet = more && which == WITH_WORK_FORGET && !nvs_gate_busy(gpu);
		state = NVS_STREAMS_IDLE;
		if (more)
			state = which == WITH_WORK ? state_beside_capture(&q) : ask_stream(&q, which == ALL);
		if (more && which == WITH_WORK_FORGET && !(quiet && state == NVS_STREAMS_IDLE))
			nvs_stream_mark(q.stream); /* its context too, should a drain have ended meanwhile */
		nvs_unlock(&gpu->query_lock);
		*left_out = *left_out || state == NVS_STREAMS_UNKNOWN;
		busy = busy || state == NVS_STREAMS_BUSY;
	}
	return busy ? NVS_STREAMS_BUSY : NVS_STREAMS_IDLE;
}

/* While a capture is open: whether every stream with work is seen to be idle. */
static bool streams_done(struct nvs_gpu *gpu)
{
	bool left_out;

	return !atomic_load(&gpu->overflow.dirty) &&
	       ask_streams(gpu, WITH_WORK, &left_out) == NVS_STREAMS_IDLE;
}

bool nvs_gpu_has_work(struct nvs_gpu *gpu)
{
	bool work = atomic_load(&gpu->overflow.dirty);

	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; !work && i < nvs_contexts_used; i++)
		work = nvs_contexts[i].ctx && nvs_contexts[i].gpu == gpu &&
		       atomic_load(&nvs_contexts[i].dirty);
	nvs_unlock(&nvs_table_lock);
	return work;
}

enum nvs_drained nvs_drain(struct nvs_gpu *gpu, uint64_t patience_ns)
{
	uint64_t deadline = nvs_now() + patience_ns;

	for (;;) {
		bool done = false;

		if (!nvs_driver_enter())
			return nvs_gpu_has_work(gpu) ? NVS_DRAIN_STOPPED : NVS_DRAINED;
		nvs_lock(&gpu->move_lock); /* memory that still moves goes with the drain, but does not wait for its work */
		nvs_unlock(&gpu->move_lock);
		nvs_lock(&gpu->drain_lock);
		done = synchronise_contexts(gpu) || streams_done(gpu);
		nvs_unlock(&gpu->drain_lock);
		nvs_driver_leave();
		if (done)
			return NVS_DRAINED;
		if (nvs_now() >= deadline)
			return NVS_DRAIN_UNPROVEN;
		nvs_nap(200 * NVS_US);
	}
}

static enum nvs_streams_state drain_sample(struct nvs_gpu *gpu, bool *left_out)
{
	enum nvs_streams_state state = NVS_STREAMS_UNKNOWN;

	*left_out = false;
	if (!nvs_trylock(&gpu->drain_lock))
		return state;
	if (!atomic_load(&gpu->captures) && nvs_driver_enter()) {
		state = ask_streams(gpu, WITH_WORK_FORGET, left_out);
		nvs_driver_leave();
	}
	nvs_unlock(&gpu->drain_lock);
	return state;
}

enum nvs_streams_state nvs_streams_sample(struct nvs_gpu *gpu)
{
	bool left_out;
	enum nvs_streams_state state = drain_sample(gpu, &left_out);

	return state == NVS_STREAMS_IDLE && left_out ? NVS_STREAMS_UNKNOWN : state;
}

bool nvs_streams_idle(struct nvs_gpu *gpu)
{
	bool left_out;

	return drain_sample(gpu, &left_out) == NVS_STREAMS_IDLE;
}

bool nvs_streams_settle(struct nvs_gpu *gpu)
{
	struct nvs_thread *t = nvs_thread_here();
	bool left_out, idle = false;
	struct nvs_signals q;

	nvs_signals_block(&q);
	if (t && nvs_current_context()) { /* other streams are known since they were created */
		nvs_stream_find(t, CU_STREAM_LEGACY);
		nvs_stream_find(t, CU_STREAM_PER_THREAD);
	}
	if (nvs_trylock(&gpu->drain_lock)) {
		if (!atomic_load(&gpu->captures) && nvs_driver_enter()) {
			idle = ask_streams(gpu, ALL, &left_out) == NVS_STREAMS_IDLE &&
			       !atomic_load(&gpu->captures);
			nvs_driver_leave();
		}
		nvs_unlock(&gpu->drain_lock);
	}
	nvs_signals_restore(&q);
	return idle;
}
