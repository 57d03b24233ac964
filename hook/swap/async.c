// SPDX-License-Identifier: Apache-2.0
/*
 * async.c: stream-ordered allocation of memory that moves.
 *
 * An allocation may be used from the moment it is made, so also from its place in the
 * stream on. A freed block stays mapped, as in the driver's pools. It waits in a queue of
 * its stream and pool, and the next allocation of that stream and pool may take it at
 * once. When the stream has passed the free, the block goes to the pool, for all streams.
 * Blocks are released at a synchronisation, and only as far as the pool has more than its
 * threshold (CU_MEMPOOL_ATTR_RELEASE_THRESHOLD), or when memory gets short.
 *
 * That a stream has passed a free is known from events that are recorded behind some
 * frees, and from the host's waits for the stream or its context. Events are queried only
 * when somebody wants a block, so that a loop over the same allocations in the same
 * streams soon makes no driver call but the events'. No lock is held over a driver call;
 * a stream that another thread records an event in is not destroyed meanwhile. While a
 * stream captures, no call is made: it could break the capture.
 */
#include <errno.h>
#include <string.h>

#include "clock.h"
#include "futex.h"
#include "log.h"
#include "pool.h"
#include "stream.h"
#include "swap.h"

/* An event is recorded after so many frees or so many bytes of them. */
#define MARK_FREES 16u
#define MARK_BYTES (16ull << 20)
/* So many events of a queue stay where they are. Beyond that the last one moves on, until somebody looks. */
#define MARKS      8u
#define NAP_NS     (200 * NVS_US) /* between two looks at events that are waited for */
/* Kernels last less, mostly. A stream that waits for the thread that wants the memory never goes on. */
#define WAIT_NS    (20 * NVS_S)
#define BUSY_NS    (1 * NVS_S) /* for a driver call of another thread's; they take microseconds */

_Atomic uint64_t nvs_swap_frees;

/* ---- events; the lock is held, and given up meanwhile ---- */

/* How far the stream of a queue is, by the events. */
static enum look async_look(struct nvs_swap *s, struct nvs_pools *all, struct queue *q)
{
	enum look seen = LOOK_NOTHING;
	struct pool_event *e;

	while (q->blocks.oldest && (e = nvs_event_oldest(q))) {
		int result;

		q->busy++;
		nvs_swap_unlock(s);
		result = nvs_driver.event_query(e->event);
		nvs_swap_lock(s);
		q->busy--;
		if (!q->ctx) { /* the event went with its context meanwhile */
			e->event = NULL;
			nvs_event_unused(all, e);
			break;
		}
		if (result == CUDA_ERROR_NOT_READY) {
			e->next = q->oldest;
			if (!e->next)
				q->end = &e->next;
			q->oldest = e;
			return seen == LOOK_PASSED ? seen : LOOK_LATER;
		}
		if (nvs_queue_passed(all, q, e->serial))
			seen = LOOK_PASSED;
		nvs_event_unused(all, e);
	}
	queue_end(all, q);
	return seen;
}

/* An event of the queue's context; the driver's may not exist yet. NULL: the system has no memory. */
static struct pool_event *event_for(struct nvs_pools *all, struct queue *q)
{
	struct pool_event **at = &q->oldest, *e;
	unsigned marks = 1;

	for (; *at && (*at)->next; at = &(*at)->next)
		marks++;
	if (marks >= MARKS) {
		e = *at;
		*at = NULL;
		q->end = at;
		return e;
	}
	at = &all->unused_events;
	while (*at && (*at)->event && (*at)->ctx != q->ctx)
		at = &(*at)->next;
	e = *at;
	if (e)
		*at = e->next;
	else
		e = nvs_pool_record(all, sizeof(*e));
	if (e)
		e->ctx = q->ctx;
	return e;
}

/*
 * Records an event of a context, made if need be, on a stream of that context. The caller
 * may have another one current, or none, as a free may: the driver asks only for the
 * stream. refused: the stream takes none. No lock is held.
 */
static bool record(struct pool_event *e, void *ctx, void *stream, bool *refused)
{
	bool here = nvs_current_context() == ctx, ok;
	void *popped;

	if (!here && nvs_driver.ctx_push(ctx) != CUDA_SUCCESS)
		return false;
	ok = e->event || nvs_driver.event_create(&e->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
	if (ok) {
		ok = nvs_driver.event_record(e->event, stream) == CUDA_SUCCESS;
		*refused = !ok;
	} else {
		e->event = NULL;
	}
	if (!here)
		nvs_driver.ctx_pop(&popped);
	return ok;
}

/*
 * Records an event behind all frees so far. stream: of the queue; if it is a thread's own,
 * of the calling thread.
 */
static void mark(struct nvs_swap *s, struct nvs_pools *all, struct queue *q, void *stream)
{
	uint64_t serial = atomic_load(&nvs_swap_frees);
	struct pool_event *e;
	bool ok, refused = false;

	if (q->no_events)
		return;
	e = event_for(all, q);
	if (!e)
		return;
	q->unmarked = q->unmarked_bytes = 0;
	q->busy++;
	nvs_swap_unlock(s);
	ok = record(e, e->ctx, stream, &refused);
	nvs_swap_lock(s);
	q->busy--;
	if (!q->ctx)
		e->event = NULL;
	if (ok && q->ctx && q->blocks.oldest) {
		e->serial = serial;
		e->next = NULL;
		*q->end = e;
		q->end = &e->next;
	} else {
		nvs_event_unused(all, e);
	}
	q->no_events = q->no_events || refused; /* it will not work the next time either */
	q->unmarked += !ok; /* who wants the memory tries again */
	queue_end(all, q);
}

/*
 * Whether the calling thread can record an event of the current context, ctx, on the stream
 * of a queue: events and streams of two contexts do not go together.
 */
static bool can_name(const struct queue *q, const void *ctx)
{
	return q->stream && ctx && q->ctx == ctx &&
	       (!nvs_key_is_default(q->stream) || !q->thread || q->thread == nvs_caller_thread());
}

void nvs_pools_mark(struct nvs_gpu *gpu)
{
	struct nvs_pools *all = gpu->swap->pools;
	const void *ctx;

	if (!all->queues || atomic_load(&nvs_gate.captures))
		return;
	ctx = nvs_current_context();
	nvs_swap_lock(gpu->swap);
	for (struct queue *q = all->queues; q; q = q->all)
		if (q->blocks.oldest && q->unmarked && can_name(q, ctx))
			mark(gpu->swap, all, q, q->stream);
	nvs_swap_unlock(gpu->swap);
}

enum look nvs_pools_look(struct nvs_gpu *gpu, const struct nvs_pool *pool)
{
	struct nvs_swap *s = gpu->swap;
	enum look seen = LOOK_NOTHING, one;

	if (!s->pools->queues || atomic_load(&nvs_gate.captures))
		return LOOK_NOTHING;
	nvs_swap_lock(s);
	for (struct queue *q = s->pools->queues; q; q = q->all) {
		if (!q->oldest || (pool && q->pool != pool))
			continue;
		one = async_look(s, s->pools, q);
		seen = one > seen ? one : seen;
	}
	nvs_swap_unlock(s);
	return seen;
}

bool nvs_pools_wait(struct nvs_gpu *gpu)
{
	uint64_t end = nvs_now() + WAIT_NS;
	enum look seen;
	int saved = errno;

	nvs_pools_mark(gpu);
	while ((seen = nvs_pools_look(gpu, NULL)) == LOOK_LATER && nvs_now() < end && !atomic_load(&nvs_exiting))
		nvs_nap(NAP_NS);
	if (seen == LOOK_LATER)
		nvs_debugf("GPU %u: streams have not passed their frees, an allocation goes on without that memory",
			   gpu->number);
	errno = saved;
	return seen == LOOK_PASSED;
}

/* ---- allocation ---- */

/*
 * A block of exactly the size rather than of more, of the stream's own rather than of
 * all streams'. The lock is held.
 */
static bool async_reuse(struct nvs_pools *all, struct nvs_pool *pool, const struct caller *who, size_t bytes,
		  CUdeviceptr *p)
{
	struct queue *own = nvs_queue_find(all, pool, who);

	for (int larger = 0; larger < 2; larger++) {
		struct nvs_freelist *from = own ? &own->blocks : NULL;
		struct nvs_block *b = own ? nvs_freelist_find(from, bytes, larger) : NULL;

		if (!b) {
			from = &pool->free;
			b = nvs_freelist_find(from, bytes, larger);
		}
		if (!b)
			continue;
		*p = b->address;
		nvs_alloc_reuse(b->address, bytes);
		nvs_pool_count(pool, b->bytes);
		nvs_pool_uncache(all, pool, from, b);
		return true;
	}
	return false;
}

int nvs_swap_alloc_async(struct nvs_gpu *gpu, void *handle, void *stream, size_t bytes, CUdeviceptr *p)
{
	struct nvs_pools *all;
	struct nvs_swap *s;
	struct nvs_pool *pool = NULL;
	struct caller who;
	bool found = false;
	int result;

	if (!bytes || !p || !nvs_swap_on(gpu))
		return -1;
	who = nvs_caller_of(stream);
	all = gpu->swap->pools;
	s = gpu->swap;
	for (int i = 0; !found && (i == 0 || (i == 1 && pool)); i++) {
		if (i)
			nvs_pools_look(gpu, pool);
		nvs_swap_lock(s);
		pool = nvs_pool_find(all, handle);
		found = pool && async_reuse(all, pool, &who, bytes, p);
		nvs_swap_unlock(s);
	}
	if (!pool) {
		uint64_t threshold = 0;

		if (nvs_memory_driver.pool_get_attribute &&
		    nvs_memory_driver.pool_get_attribute(handle, CU_POOL_RELEASE_THRESHOLD, &threshold) != CUDA_SUCCESS)
			return -1; /* no pool: the driver says so */
		nvs_swap_lock(s);
		pool = nvs_pool_new(all, handle, threshold);
		nvs_swap_unlock(s);
	}
	if (found)
		return CUDA_SUCCESS;
	if (!pool)
		return -1;
	result = nvs_swap_alloc_pooled(gpu, pool, bytes, p);
	nvs_swap_lock(s);
	if (result == CUDA_SUCCESS)
		nvs_pool_count(pool, nvs_block_bytes(bytes));
	nvs_swap_unlock(s);
	return result;
}

/* ---- free ---- */

/* The context of a stream. No lock is held. */
static void *context_of(const struct caller *who)
{
	void *ctx = NULL;

	if (nvs_key_is_default(who->stream))
		return who->ctx;
	if (nvs_driver.stream_get_ctx && nvs_driver.stream_get_ctx(who->stream, &ctx) == CUDA_SUCCESS)
		return ctx;
	return nvs_current_context();
}

/* Memory that is no pool's is freed when the stream is done. */
static int free_plain(CUdeviceptr p, void *stream)
{
	int result = CUDA_SUCCESS;

	if (nvs_driver.stream_synchronize)
		result = nvs_driver.stream_synchronize(stream);
	return result == CUDA_SUCCESS ? nvs_swap_free(p, false) : result;
}

/* The allocation goes to the queue. The lock is held, and given up meanwhile. */
static void enqueue(struct nvs_gpu *gpu, struct queue *q, CUdeviceptr p, void *stream)
{
	struct nvs_pools *all = gpu->swap->pools;
	struct nvs_swap *s = gpu->swap;
	struct nvs_block *b = nvs_pool_cache(all, q->pool, &q->blocks, p, atomic_fetch_add(&nvs_swap_frees, 1) + 1);

	if (!b) {
		nvs_alloc_release(gpu, p);
		return;
	}
	q->unmarked++;
	q->unmarked_bytes += b->bytes;
	/* A thread's own stream gets no event when the thread is gone. */
	if ((q->unmarked < MARK_FREES && q->unmarked_bytes < MARK_BYTES && !q->thread) ||
	    atomic_load(&nvs_gate.captures))
		return;
	if (q->stream)
		mark(s, all, q, stream);
}

int nvs_swap_free_async(CUdeviceptr p, void *stream)
{
	struct place at = nvs_place_of(p);
	struct nvs_swap_range r;
	struct nvs_pools *all;
	struct nvs_swap *s;
	struct caller who;
	struct queue *q;

	if (!at.span || nvs_memory_locked)
		return -1;
	all = at.span->gpu->swap->pools;
	s = at.span->gpu->swap;
	who = nvs_caller_of(stream);
	if (nvs_key_is_default(stream) && !who.ctx)
		return CUDA_ERROR_INVALID_CONTEXT; /* as the driver: each context has a stream of that name */
	nvs_swap_lock(s);
	if (!nvs_swap_lookup(p, &r)) {
		nvs_swap_unlock(s);
		return CUDA_ERROR_INVALID_VALUE;
	}
	q = r.pool ? nvs_queue_find(all, r.pool, &who) : NULL;
	if (r.pool && !q) {
		void *ctx;

		nvs_swap_unlock(s);
		ctx = context_of(&who);
		nvs_swap_lock(s);
		if (!nvs_swap_lookup(p, &r) || !r.pool) {
			nvs_swap_unlock(s);
			return CUDA_ERROR_INVALID_VALUE; /* another thread was faster */
		}
		q = nvs_queue_find(all, r.pool, &who);
		q = q ? q : nvs_queue_new(all, r.pool, &who, ctx);
	}
	if (q)
		enqueue(r.gpu, q, p, stream);
	nvs_swap_unlock(s);
	return q ? CUDA_SUCCESS : free_plain(p, stream);
}

/* ---- what else tells that a stream has passed its frees ---- */

void nvs_swap_stream_going(void *stream)
{
	if (!stream || nvs_key_is_default(stream) || nvs_memory_locked)
		return;
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_pools *all = gpu->swap->pools;
		struct nvs_swap *s = gpu->swap;

		if (!all->queues)
			continue;
		nvs_swap_lock(s);
		for (struct queue *q = all->queues; q; q = q->all) {
			if (!q->pool || q->stream != stream)
				continue;
			if (q->unmarked && q->blocks.oldest && !atomic_load(&nvs_gate.captures))
				mark(s, all, q, stream);
			/* Another thread may be in a driver call with the stream, or this one below a signal handler. */
			for (uint64_t end = nvs_now() + BUSY_NS; q->busy && nvs_now() < end;) {
				nvs_swap_unlock(s);
				nvs_nap(NAP_NS);
				nvs_swap_lock(s);
			}
			if (q->stream == stream)
				q->stream = NULL;
			queue_end(all, q);
		}
		nvs_swap_unlock(s);
	}
}

void nvs_pools_reset(struct nvs_pools *all, struct nvs_gpu *gpu)
{
	memset(all, 0, sizeof(*all)); /* records of a parent process are left behind */
	all->gpu = gpu;
}

void nvs_async_fork_child(void)
{
	atomic_store(&nvs_swap_excess, 0);
	atomic_store(&nvs_swap_frees, 0);
}
