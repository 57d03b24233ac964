// SPDX-License-Identifier: Apache-2.0
/*
 * swap_async.c: stream-ordered allocation of memory that moves.
 *
 * An allocation is good from the moment it is made, so also from its place in
 * the stream on. What is freed in a stream stays where it is, as in the driver's
 * pools: it waits in a line, of that stream and pool, whose next allocations may
 * have it at once. When the stream has passed the free it goes to the pool's shelf,
 * for all streams. Nothing of it is given up before a synchronisation, and then only
 * what the pool has beyond its threshold (CU_MEMPOOL_ATTR_RELEASE_THRESHOLD), unless
 * memory gets short.
 *
 * Whether a stream has passed a free is told by events that are recorded behind
 * some of its frees, and by the stream itself where it has nothing more to do. A
 * line asks only when somebody wants what is in it, so that a loop over the same
 * allocations, in the same streams, soon makes no call but the event's. No question
 * is asked while a stream captures: it could break the capture.
 *
 * The GPU's swap lock guards all of this.
 */
#include <string.h>

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "stream.h"
#include "swap_pool.h"

#define MARK_FREES 16u          /* an event after so many frees, */
#define MARK_BYTES (64ull << 20) /* or so many bytes */

/* ---- allocation ---- */

/* Of exactly the size rather than of more, of its own stream's rather than all's. */
static bool reuse(struct nvs_store *st, struct nvs_pool *pool, struct line *own, size_t bytes,
		  CUdeviceptr *p)
{
	for (int roomy = 0; roomy < 2; roomy++) {
		struct nvs_shelf *from = own ? &own->shelf : NULL;
		struct nvs_kept *k = own ? nvs_shelf_find(from, bytes, roomy) : NULL;

		if (!k) {
			from = &pool->shelf;
			k = nvs_shelf_find(from, bytes, roomy);
		}
		if (!k)
			continue;
		*p = k->address;
		nvs_swap_take_up(k->address, bytes);
		nvs_pool_takes(pool, k->bytes);
		nvs_pool_unkept(st, pool, from, k);
		return true;
	}
	return false;
}

int nvs_swap_alloc_async(struct nvs_gpu *gpu, void *handle, void *stream, size_t bytes, CUdeviceptr *p)
{
	struct caller who;
	struct nvs_store *st;
	struct nvs_swap *s;
	struct nvs_pool *pool;
	bool found = false;
	int result;

	if (!bytes || !p || !nvs_swap_on(gpu))
		return -1;
	who = nvs_caller_of(stream);
	st = gpu->swap->store;
	s = gpu->swap;
	nvs_swap_lock(s);
	pool = nvs_pool_find(st, handle);
	found = pool && reuse(st, pool, nvs_line_find(st, pool, &who), bytes, p);
	nvs_swap_unlock(s);
	if (found)
		return CUDA_SUCCESS;
	if (pool) {
		nvs_pools_reap(gpu, pool);
		nvs_swap_lock(s);
		found = reuse(st, pool, nvs_line_find(st, pool, &who), bytes, p);
		nvs_swap_unlock(s);
	} else {
		uint64_t threshold = 0;

		if (nvs_driver.pool_get_attribute)
			nvs_driver.pool_get_attribute(handle, CU_POOL_RELEASE_THRESHOLD, &threshold);
		nvs_swap_lock(s);
		pool = nvs_pool_new(st, handle, threshold);
		nvs_swap_unlock(s);
	}
	if (found)
		return CUDA_SUCCESS;
	if (!pool)
		return -1;
	result = nvs_swap_alloc_pooled(gpu, pool, bytes, p);
	nvs_swap_lock(s);
	if (result == CUDA_SUCCESS)
		nvs_pool_takes(pool, nvs_place_bytes(bytes));
	nvs_swap_unlock(s);
	return result;
}

/* ---- the end of one ---- */

/* The context of a stream. No lock is held. */
static void *context_of(const struct caller *who)
{
	void *ctx = who->ctx;

	if (!nvs_key_is_default(who->stream) &&
	    (!nvs_driver.stream_get_ctx || nvs_driver.stream_get_ctx(who->stream, &ctx) != CUDA_SUCCESS))
		ctx = nvs_current_context();
	return ctx;
}

/* Memory that is no pool's is freed when the stream is done. */
static int free_plain(CUdeviceptr p, void *stream)
{
	int result = CUDA_SUCCESS;

	if (nvs_driver.stream_synchronize)
		result = nvs_driver.stream_synchronize(stream);
	return result == CUDA_SUCCESS ? nvs_swap_free(p, false) : result;
}

/* Puts it into the line. The lock is held, and given up meanwhile. */
static int wait_in_line(struct nvs_gpu *gpu, struct line *l, CUdeviceptr p, void *stream)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_swap *s = gpu->swap;
	struct nvs_pool *pool = l->pool;
	struct nvs_kept *k = nvs_pool_keep(st, pool, &l->shelf, p, ++l->serial);

	if (!k) {
		nvs_swap_give_up(gpu, p);
		return CUDA_SUCCESS;
	}
	l->unmarked++;
	l->unmarked_bytes += k->bytes;
	/* A thread's own stream cannot be asked by others, nor when the thread is gone. */
	if ((l->unmarked >= MARK_FREES || l->unmarked_bytes >= MARK_BYTES || l->thread) &&
	    !atomic_load(&nvs_gate.captures)) {
		if (l->events == MARKS && !l->spares)
			nvs_line_look(s, st, l);
		if (l->thread)
			nvs_line_free_mark(l);
		if (l->stream == stream)
			nvs_line_mark(s, st, l, stream);
		l->unmarked = l->unmarked_bytes = 0; /* also if there was none to be had */
	}
	return CUDA_SUCCESS;
}

int nvs_swap_free_async(CUdeviceptr p, void *stream)
{
	struct place at = nvs_place_of(p);
	struct nvs_swap_range r;
	struct nvs_store *st;
	struct caller who;
	struct nvs_swap *s;
	struct line *l;
	int result;

	if (!at.span || nvs_in_book)
		return -1;
	st = at.span->gpu->swap->store;
	s = at.span->gpu->swap;
	who = nvs_caller_of(stream);
	nvs_swap_lock(s);
	if (!nvs_swap_lookup(p, &r)) {
		nvs_swap_unlock(s);
		return CUDA_ERROR_INVALID_VALUE;
	}
	l = r.pool ? nvs_line_find(st, r.pool, &who) : NULL;
	if (r.pool && !l) {
		void *ctx;

		nvs_swap_unlock(s);
		ctx = context_of(&who);
		nvs_swap_lock(s);
		if (!nvs_swap_lookup(p, &r) || !r.pool) {
			nvs_swap_unlock(s);
			return CUDA_ERROR_INVALID_VALUE; /* another thread was faster */
		}
		l = nvs_line_find(st, r.pool, &who);
		l = l ? l : nvs_line_new(st, r.pool, &who, ctx);
	}
	result = l ? wait_in_line(r.gpu, l, p, stream) : -1;
	nvs_swap_unlock(s);
	return result >= 0 ? result : free_plain(p, stream);
}

/* ---- what goes ---- */

void nvs_swap_stream_going(void *stream)
{
	if (!stream || nvs_key_is_default(stream))
		return;
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_store *st = gpu->swap->store;
		struct nvs_swap *s = gpu->swap;
		bool any = false;

		if (!st->lines || nvs_in_book)
			continue;
		nvs_swap_lock(s);
		for (struct line *l = st->lines; l; l = l->all) {
			if (l->stream != stream)
				continue;
			any = true;
			if (l->shelf.oldest)
				nvs_line_free_mark(l);
			if (l->shelf.oldest && !atomic_load(&nvs_gate.captures))
				nvs_line_mark(s, st, l, stream);
			if (l->stream == stream)
				nvs_line_cut(st, l);
			nvs_line_end(st, l);
		}
		nvs_swap_unlock(s);
		if (any)
			nvs_lines_bury(gpu);
	}
	/* Whoever asks the stream has done so. */
	pthread_mutex_lock(&nvs_table_lock);
	pthread_mutex_unlock(&nvs_table_lock);
}

void nvs_pool_end_lines(struct nvs_store *st, const struct nvs_pool *pool)
{
	for (struct line *l = st->lines; l; l = l->all)
		if (l->pool == pool)
			nvs_line_end(st, l);
}

void nvs_pools_context_gone(struct nvs_gpu *gpu, const void *ctx)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_swap *s = gpu->swap;

	nvs_swap_lock(s);
	st->dead = 0;
	for (struct line *l = st->lines; l; l = l->all) {
		bool its = l->pool && (ctx ? l->ctx == ctx : !nvs_context_own(l->ctx));

		if (its) /* the events went with the context, like the work */
			l->marks = l->spares = l->events = 0;
		if (its && l->stream)
			nvs_line_cut(st, l);
		if (l->pool && (its || !ctx))
			nvs_line_passed(st, l, l->serial);
	}
	/* With a primary context goes the memory that is of no context. */
	while (!ctx && nvs_pools_give_up_one(gpu))
		;
	for (struct nvs_pool *p = st->pools; !ctx && p; p = p->next)
		p->used = 0;
	nvs_swap_unlock(s);
}

void nvs_store_reset(struct nvs_store *st, struct nvs_gpu *gpu)
{
	memset(st, 0, sizeof(*st));
	st->gpu = gpu;
}

void nvs_async_fork_child(void)
{
	atomic_store(&nvs_swap_excess, 0);
}
