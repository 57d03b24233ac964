// SPDX-License-Identifier: Apache-2.0
/*
 * depth.c: keep the work ahead of the GPU short while another client is there,
 * so that a revoke is answered soon.
 *
 * Every `batch` calls an event goes into the stream; before the second batch
 * after it is begun the event must have passed. `batch` adapts until a batch
 * takes about BATCH_NS of GPU time. Nothing here synchronises a stream or a
 * context, and nothing is done while a capture is open.
 *
 * The event may never come while the thread waits here: work ahead of it may
 * wait for what this thread does next. So the wait ends after PATIENCE_NS and
 * lets another batch go; both double each time.
 */
#include <errno.h>

#include "client.h"
#include "futex.h"
#include "gate.h"

#define BATCH_NS    2500000ull
#define BATCH_FIRST 4u
#define BATCH_MAX   1024u
#define LOOK_NS     100000ull  /* between looks at an event; a batch is queued behind it */
#define PATIENCE_NS 2000000000ull
#define PATIENCE_MAX_NS 16000000000ull

static bool events_made(struct nvs_depth *d)
{
	for (int i = 0; i < 2; i++)
		if (!d->event[i] &&
		    nvs_driver.event_create(&d->event[i], CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
			return false;
	return true;
}

/*
 * took: wall time from event to event, never less than the batch's GPU time
 * while the bound holds. Growth is slow, so that one burst of short work does
 * not let a long queue in.
 */
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
static bool wait_for(struct nvs_depth *d, void *event)
{
	static const uint32_t nothing;
	uint64_t start = nvs_now(), patience = d->patience_ns ? d->patience_ns : PATIENCE_NS;

	while (nvs_driver.event_query(event) == CUDA_ERROR_NOT_READY) {
		if (nvs_now() - start >= patience) {
			d->patience_ns = patience * 2 < PATIENCE_MAX_NS ? patience * 2
									: PATIENCE_MAX_NS;
			return false;
		}
		nvs_futex_wait(&nothing, 0, LOOK_NS, true); /* a nap, no cancellation point */
	}
	return true;
}

static void end_batch(struct nvs_stream *s, void *key)
{
	struct nvs_depth *d = &s->depth;
	uint32_t epoch = atomic_load(&nvs_channels[s->channel].epoch);
	unsigned batch = atomic_load(&d->batch);
	uint64_t now;

	if (!events_made(d) || nvs_driver.event_record(d->event[d->next], key) != CUDA_SUCCESS) {
		d->off = true;
		return;
	}
	d->pending[d->next] = true;
	d->next ^= 1;
	if (d->pending[d->next] && !wait_for(d, d->event[d->next])) {
		atomic_store(&d->batch, batch * 2 < BATCH_MAX ? batch * 2 : BATCH_MAX);
		return;
	}
	d->pending[d->next] = false;
	now = nvs_now();
	/* A batch that a closed gate interrupted says nothing. */
	if (d->last_ns && d->epoch == epoch)
		atomic_store(&d->batch, adapt(batch, now - d->last_ns));
	d->last_ns = now;
	d->epoch = epoch;
}

void nvs_depth_step(struct nvs_stream *s, void *key)
{
	struct nvs_depth *d = &s->depth;
	struct nvs_driver *v = &nvs_driver;
	int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	int saved = errno;
	unsigned batch = atomic_load_explicit(&d->batch, memory_order_relaxed);
	unsigned count = atomic_load_explicit(&d->count, memory_order_relaxed) + 1;
	void *ctx = NULL;

	atomic_store_explicit(&d->count, count, memory_order_relaxed);
	if (count <= (batch ? batch : BATCH_FIRST))
		return;
	if (d->off || !atomic_load(&s->context) || atomic_load(&nvs_gate.captures) ||
	    !v->event_create || !v->event_record || !v->event_query || !v->event_destroy ||
	    !v->ctx_get_current || !v->exchange_capture_mode)
		return;
	if (atomic_flag_test_and_set(&d->busy))
		return;
	/* An event belongs to a context; the thread must be in the stream's. */
	if (v->ctx_get_current(&ctx) == CUDA_SUCCESS && nvs_stream_in_context(s, ctx)) {
		if (!batch)
			atomic_store(&d->batch, BATCH_FIRST);
		v->exchange_capture_mode(&mode);
		end_batch(s, key);
		v->exchange_capture_mode(&mode);
	}
	atomic_store_explicit(&d->count, 0, memory_order_relaxed);
	atomic_flag_clear(&d->busy);
	errno = saved;
}
