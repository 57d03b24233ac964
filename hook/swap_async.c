// SPDX-License-Identifier: Apache-2.0
/*
 * swap_async.c: stream-ordered allocation of memory that moves.
 *
 * An allocation is good from the moment it is made, so also from its place in
 * the stream on. What is freed in a stream is used again by the same stream at
 * once, as the driver's pools do, and by others once an event after its last use
 * has passed.
 */
#include "channel.h"
#include "swap_impl.h"
#include "wrap.h"

#define MAX_PENDING 512u /* frees that wait for their event; then the oldest is waited for */

struct pending {
	CUdeviceptr p;
	void *stream, *event;
	uint64_t thread; /* of a per-thread default stream */
};

/* Of a channel. In the order of the frees. */
static struct async {
	pthread_mutex_t lock;
	struct pending pending[MAX_PENDING];
	unsigned count;
	void *spare[16]; /* events */
	unsigned spares;
} asyncs[NVS_MAX_CHANNELS] = {
	[0 ... NVS_MAX_CHANNELS - 1] = { .lock = PTHREAD_MUTEX_INITIALIZER },
};

static void lock(struct async *a)
{
	nvs_in_book = true;
	atomic_signal_fence(memory_order_seq_cst);
	pthread_mutex_lock(&a->lock);
}

static void unlock(struct async *a)
{
	pthread_mutex_unlock(&a->lock);
	atomic_signal_fence(memory_order_seq_cst);
	nvs_in_book = false;
}

static uint64_t thread_of(void *stream)
{
	return stream == CU_STREAM_PER_THREAD ? (uintptr_t)nvs_self : 0;
}

/* The lock is held. */
static struct pending take(struct async *a, unsigned i)
{
	struct pending p = a->pending[i];

	for (a->count--; i < a->count; i++)
		a->pending[i] = a->pending[i + 1];
	return p;
}

static void recycle(struct async *a, void *event)
{
	bool kept;

	lock(a);
	kept = a->spares < sizeof(a->spare) / sizeof(a->spare[0]);
	if (kept)
		a->spare[a->spares++] = event;
	unlock(a);
	if (!kept)
		nvs_driver.event_destroy(event);
}

/* An event of a context that is gone tells nothing more: its work is over. */
static bool passed(void *event, bool wait)
{
	if (wait)
		nvs_driver.event_synchronize(event);
	return nvs_driver.event_query(event) != CUDA_ERROR_NOT_READY;
}

/*
 * Frees what streams are done with; wait: at least the oldest. Returns whether
 * there was any.
 */
static bool reap(unsigned channel, bool wait)
{
	struct async *a = &asyncs[channel];
	bool any = false;

	for (;;) {
		struct pending p = { 0 };

		lock(a);
		if (a->count)
			p = take(a, 0);
		unlock(a);
		if (!p.p)
			return any;
		if (!passed(p.event, wait)) {
			lock(a); /* back to the head; others were faster with the rest */
			for (unsigned i = a->count++; i > 0; i--)
				a->pending[i] = a->pending[i - 1];
			a->pending[0] = p;
			unlock(a);
			return any;
		}
		wait = false;
		any = true;
		nvs_swap_free(p.p, false);
		recycle(a, p.event);
	}
}

void nvs_swap_reap(unsigned channel)
{
	if (asyncs[channel].count)
		reap(channel, false);
}

/* What the same stream has freed and is of the same size. */
static bool reuse(unsigned channel, void *stream, size_t bytes, CUdeviceptr *p)
{
	struct async *a = &asyncs[channel];
	struct pending got = { 0 };

	lock(a);
	for (unsigned i = 0; i < a->count && !got.p; i++)
		if (a->pending[i].stream == stream && a->pending[i].thread == thread_of(stream) &&
		    nvs_swap_resize(a->pending[i].p, bytes))
			got = take(a, i);
	unlock(a);
	if (!got.p)
		return false;
	recycle(a, got.event);
	*p = got.p;
	return true;
}

int nvs_swap_alloc_async(int channel, void *stream, size_t bytes, CUdeviceptr *p)
{
	int result;

	if (!bytes || !p || !nvs_swap_on(channel) || !nvs_driver.event_query || !nvs_driver.event_destroy)
		return -1;
	if (reuse((unsigned)channel, stream, bytes, p))
		return CUDA_SUCCESS;
	reap((unsigned)channel, false);
	do
		result = nvs_swap_alloc(channel, NULL, bytes, p);
	while (result == CUDA_ERROR_OUT_OF_MEMORY && reap((unsigned)channel, true));
	return result;
}

/* Whether it is being freed already. */
static bool is_pending(struct async *a, CUdeviceptr p)
{
	bool found = false;

	lock(a);
	for (unsigned i = 0; i < a->count && !found; i++)
		found = a->pending[i].p == p;
	unlock(a);
	return found;
}

int nvs_swap_free_async(CUdeviceptr p, void *stream)
{
	struct nvs_swap_range r;
	struct async *a;
	void *event = NULL;
	int result;

	if (!nvs_swap_find(p, &r))
		return -1;
	a = &asyncs[r.channel];
	if (r.base != p || is_pending(a, p))
		return CUDA_ERROR_INVALID_VALUE;
	lock(a);
	if (a->spares)
		event = a->spare[--a->spares];
	unlock(a);
	/* One of a context that is gone, or another's, is of no use. */
	if (event && nvs_driver.event_record(event, stream) != CUDA_SUCCESS) {
		nvs_driver.event_destroy(event);
		event = NULL;
	}
	if (!event) {
		result = nvs_driver.event_create(&event, CU_EVENT_DISABLE_TIMING);
		if (result == CUDA_SUCCESS)
			result = nvs_driver.event_record(event, stream);
		if (result != CUDA_SUCCESS)
			return result;
	}
	while (a->count == MAX_PENDING)
		reap(r.channel, true);
	lock(a);
	if (a->count < MAX_PENDING)
		a->pending[a->count++] = (struct pending){ p, stream, event, thread_of(stream) };
	unlock(a);
	return CUDA_SUCCESS;
}

void nvs_async_fork_child(void)
{
	static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

	for (unsigned i = 0; i < NVS_MAX_CHANNELS; i++) {
		asyncs[i].lock = fresh;
		asyncs[i].count = asyncs[i].spares = 0;
	}
}
