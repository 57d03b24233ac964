// SPDX-License-Identifier: Apache-2.0
/*
 * throttle.c: keep the work ahead of the GPU short while another client wants it, so that a revoke
 * is answered soon. Not while the others rest: see nvs_throttle_tick.
 *
 * Every `batch` calls an event goes into the stream, and the thread goes on when the event before it
 * has passed: at most two batches are ahead. `batch` adapts until one takes about BATCH_NS of GPU
 * time. Nothing here synchronises a stream or a context, or is done while a capture is open.
 *
 * How long a batch takes is known only where one is queued behind the other: if the event before had
 * not passed when this one was recorded. The time between two records says nothing: programs submit
 * in bursts, much faster than the GPU works. In turns so short that no batch is queued behind
 * another, the drain at their end tells.
 *
 * Work ahead of the event may wait for what this thread does next. So the wait ends after a time,
 * and then nothing is bounded before the event has passed. Where something in the stream is known to
 * wait for somebody outside the GPU, a third event right behind it tells when that is over, and has
 * a patience of its own.
 *
 * One thread ends a batch. Other threads that submit to the stream wait for that, or a thousand of
 * them would fill the stream; each batch wakes as many of them as may submit in it, and one that
 * ends it.
 */
#include <errno.h>

#include "clock.h"
#include "futex.h"
#include "gpu.h"
#include "ops.h"
#include "stream.h"
#include "throttle.h"

#define BATCH_NS    (2500 * NVS_US)
#define BATCH_FIRST 4u
#define BATCH_MAX   512u
/*
 * Where the GPU keeps up with the thread events are to cost little: after so many batches that
 * nobody waited for, up to so many calls.
 */
#define KEEPS_UP    4u
#define BATCH_AHEAD 32u
#define LOOK_NS     (100 * NVS_US) /* between looks at an event; a batch is queued behind it */
#define SPIN_NS     (500 * NVS_US) /* batches shorter than this would run out during a nap */
#define PATIENCE_NS (2 * NVS_S)
#define BEHIND      2 /* the event behind what waits */

/* Tenants that pause for less take turns: each drain of a few milliseconds counts. */
#define QUIET_NS (2 * NVS_S)

void nvs_throttle_tick(struct nvs_gpu *gpu, uint64_t now)
{
	const struct nvs_controls *c = &gpu->slice.controls;
	bool cut = c->slices == NVS_CONTROL_WORKS && c->channels == NVS_CONTROL_WORKS && !c->bare &&
		   now >= gpu->preempt.bound_until_ns && !nvs_memory_ops.may_leave(gpu);

	atomic_store(&gpu->unbound, cut && nvs_elapsed(now, gpu->wanted_ns) >= QUIET_NS);
}

void nvs_throttle_wanted(struct nvs_gpu *gpu, uint64_t now)
{
	gpu->wanted_ns = now;
	atomic_store(&gpu->unbound, false);
}

/* Puts the event into the stream. False: events do not work here. */
static bool throttle_record(struct nvs_throttle *d, unsigned i, void *key)
{
	if ((!d->event[i] && nvs_driver.event_create(&d->event[i], CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) ||
	    nvs_driver.event_record(d->event[i], key) != CUDA_SUCCESS)
		d->off = true;
	d->pending[i] = !d->off;
	return !d->off;
}

/* took: GPU time of a batch. Growth is slow, so that one burst of short work lets no long queue in. */
static unsigned adapt(unsigned batch, uint64_t took)
{
	uint64_t next = batch * BATCH_NS / (took ? took : 1);

	if (next > batch * 2ull)
		next = batch * 2ull;
	if (next < 1)
		next = 1;
	return next > BATCH_MAX ? BATCH_MAX : (unsigned)next;
}

/* False: it has not passed, and the thread has waited long enough. */
static bool wait_for(struct nvs_throttle *d, unsigned i, uint64_t patience)
{
	uint64_t start = nvs_now();

	while (d->pending[i] && nvs_driver.event_query(d->event[i]) == CUDA_ERROR_NOT_READY) {
		uint64_t waited = nvs_now() - start;

		if (waited >= patience)
			return false;
		if (d->took_ns < SPIN_NS && waited < SPIN_NS)
			nvs_cpu_relax();
		else
			nvs_nap(LOOK_NS);
	}
	d->pending[i] = false;
	return true;
}

static void end_batch(struct nvs_stream *s, void *key)
{
	struct nvs_throttle *d = &s->throttle;
	unsigned batch = atomic_load(&d->batch), calls = atomic_load(&d->count) - 1;
	unsigned offs;
	uint64_t now;

	/* What a wait was too long for bounds nothing before it has passed. */
	if (!wait_for(d, BEHIND, d->patience_ns) || !wait_for(d, d->next, 0)) {
		d->patience_ns = 0;
		return;
	}
	if (!throttle_record(d, d->next, key))
		return;
	d->next ^= 1;
	if (wait_for(d, d->next, 0)) {
		/* The GPU may have waited for us: nothing is known of this batch. */
		d->passed_ns = 0;
		if (batch < BATCH_AHEAD && ++d->unwaited >= KEEPS_UP)
			atomic_store(&d->batch, batch * 2);
		else if (batch > BATCH_AHEAD) /* of a time when calls were shorter, maybe */
			atomic_store(&d->batch, batch / 2);
		return;
	}
	if (!wait_for(d, d->next, PATIENCE_NS)) {
		d->passed_ns = 0;
		return;
	}
	d->unwaited = 0;
	now = nvs_now();
	offs = atomic_load(&s->gpu->preempt.offs);
	if (d->passed_ns && d->offs == offs) { /* the channels were on all the time */
		d->took_ns = now - d->passed_ns;
		atomic_store(&d->batch, adapt(d->last_calls, d->took_ns));
	}
	d->offs = offs;
	d->last_calls = calls;
	d->passed_ns = now;
}

/* Whether the batch of the stream can be ended by an event, here and now. */
static bool can_end(struct nvs_stream *s)
{
	return !s->throttle.off && atomic_load(&s->context) && !atomic_load(&nvs_gate.captures);
}

/* Another thread ends the batch: waits until it has. If that thread has ended in it, this one takes its place. */
static void await_end(struct nvs_throttle *d, unsigned seen)
{
	if (nvs_futex_await((uint32_t *)&d->ended, seen, nvs_now() + 2 * PATIENCE_NS) == seen)
		atomic_flag_clear(&d->busy);
}

/* The call is counted in the batch that has just begun, or ends this one. False: it is counted. */
static bool ends_batch(struct nvs_stream *s)
{
	struct nvs_throttle *d = &s->throttle;

	for (bool waited = false;; waited = true) {
		unsigned ended = atomic_load(&d->ended);
		unsigned batch = atomic_load_explicit(&d->batch, memory_order_relaxed);

		if (atomic_fetch_add(&d->count, 1) < (batch ? batch : BATCH_FIRST))
			return false;
		if (!can_end(s)) {
			if (waited) /* it was woken to end the batch, and to wake others then */
				nvs_futex_wake((uint32_t *)&d->ended, true);
			return false;
		}
		if (!atomic_flag_test_and_set(&d->busy))
			return true;
		await_end(d, ended);
	}
}

/* An event belongs to a context; the thread must be in the stream's. */
static bool in_context(struct nvs_stream *s)
{
	void *ctx = NULL;

	return nvs_driver.ctx_get_current(&ctx) == CUDA_SUCCESS && nvs_stream_in_context(s, ctx);
}

/* Threads that wait for the end of the batch go on. */
static void throttle_give_up(struct nvs_throttle *d)
{
	atomic_flag_clear(&d->busy);
	atomic_fetch_add(&d->ended, 1);
	nvs_futex_wake_some((uint32_t *)&d->ended, atomic_load(&d->batch) + 1);
}

void nvs_throttle_step(struct nvs_stream *s, void *key)
{
	struct nvs_throttle *d = &s->throttle;
	int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	int saved = errno;

	if (!ends_batch(s)) {
		errno = saved;
		return;
	}
	if (in_context(s)) {
		if (!atomic_load(&d->batch))
			atomic_store(&d->batch, BATCH_FIRST);
		nvs_driver.exchange_capture_mode(&mode);
		end_batch(s, key);
		nvs_driver.exchange_capture_mode(&mode);
	}
	atomic_store_explicit(&d->count, 0, memory_order_relaxed);
	throttle_give_up(d);
	errno = saved;
}

/* Turns may be taken, or nobody has said so far how the GPU is shared. */
static bool may_be_bounded(struct nvs_gpu *gpu)
{
	const struct nvs_slot *slot = atomic_load(&gpu->slot);

	return slot == &nvs_closed_slot || nvs_takes_turns(slot);
}

void nvs_throttle_behind(void *key, uint64_t patience_ns)
{
	struct nvs_stream *s = nvs_stream_here(key);
	int saved = errno;

	if (s && may_be_bounded(s->gpu) && can_end(s) && in_context(s) &&
	    !atomic_flag_test_and_set(&s->throttle.busy)) {
		struct nvs_throttle *d = &s->throttle;

		if (wait_for(d, BEHIND, 0) || patience_ns < d->patience_ns)
			d->patience_ns = patience_ns;
		throttle_record(d, BEHIND, key);
		throttle_give_up(d);
	}
	errno = saved;
}

void nvs_throttle_drained(struct nvs_stream *s, uint64_t took_ns)
{
	unsigned batch = atomic_load(&s->throttle.batch), less;

	if (took_ns <= 2 * BATCH_NS || batch < 2)
		return;
	less = (unsigned)((uint64_t)batch * 2 * BATCH_NS / took_ns);
	/* A thread that measures at the same time may be right as well. */
	atomic_compare_exchange_strong(&s->throttle.batch, &batch, less ? less : 1);
}
