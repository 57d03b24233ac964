// SPDX-License-Identifier: Apache-2.0
/*
 * swap_line.c: what waits for a stream to pass it, and how far streams are.
 */
#include <errno.h>
#include <string.h>

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "futex.h"
#include "stream.h"
#include "swap_pool.h"

#define LINES_KEPT 256u         /* whether they are of use or not */
#define NAP_NS     200000       /* between two looks at what is waited for */


/* Threads' records are used again by others; this number is not. */
static uint64_t thread_number(void)
{
	static _Atomic uint64_t last;
	static __thread uint64_t number __attribute__((tls_model("initial-exec")));

	if (!number)
		number = atomic_fetch_add(&last, 1) + 1;
	return number;
}

struct caller nvs_caller_of(void *stream)
{
	return (struct caller){
		.stream = stream,
		.ctx = nvs_key_is_default(stream) ? nvs_current_context() : NULL,
		.thread = stream == CU_STREAM_PER_THREAD ? thread_number() : 0,
	};
}

/* ---- lines; the lock is held ---- */

static struct line **bucket_of(struct nvs_store *st, const struct nvs_pool *pool, void *stream)
{
	uint64_t x = ((uintptr_t)stream ^ (uintptr_t)pool >> 3) * 0x9e3779b97f4a7c15ull;

	return &st->bucket[(x >> 40) % LINE_BUCKETS];
}

struct line *nvs_line_find(struct nvs_store *st, const struct nvs_pool *pool,
			      const struct caller *who)
{
	struct line *l = *bucket_of(st, pool, who->stream);

	while (l && !(l->pool == pool && l->stream == who->stream && l->thread == who->thread &&
		      (!nvs_key_is_default(who->stream) || l->ctx == who->ctx)))
		l = l->next;
	return l;
}

void nvs_line_cut(struct nvs_store *st, struct line *l)
{
	struct line **at = bucket_of(st, l->pool, l->stream);

	while (*at != l)
		at = &(*at)->next;
	*at = l->next;
	atomic_store(&l->stream, NULL);
}

void nvs_line_end(struct nvs_store *st, struct line *l)
{
	if (!l->pool || (l->stream && !l->pool->gone) || l->shelf.oldest || l->busy ||
	    st->dead + MARKS > DEAD_EVENTS)
		return;
	if (l->stream)
		nvs_line_cut(st, l);
	for (; l->marks; l->marks--)
		st->dead_event[st->dead++] = l->mark[l->marks - 1].event;
	for (; l->spares; l->spares--)
		st->dead_event[st->dead++] = l->spare[l->spares - 1];
	l->pool->lines--;
	l->pool = NULL;
	l->next = st->free_line;
	st->free_line = l;
}

/*
 * Threads that are no more leave lines behind. One with nothing in it is made anew
 * when it is needed; it is looked for them when their number has doubled.
 */
static void sweep(struct nvs_store *st)
{
	unsigned used = 0;

	if (st->line_count < st->line_sweep)
		return;
	for (struct line *l = st->lines; l; l = l->all) {
		if (l->pool && l->stream && !l->shelf.oldest && !l->busy) {
			nvs_line_cut(st, l);
			nvs_line_end(st, l);
		}
		used += l->pool != NULL;
	}
	st->line_sweep = used < LINES_KEPT / 2 ? LINES_KEPT : 2 * used;
}

struct line *nvs_line_new(struct nvs_store *st, struct nvs_pool *pool, const struct caller *who,
			     void *ctx)
{
	struct line **at = bucket_of(st, pool, who->stream), *l;

	if (!st->free_line)
		sweep(st);
	l = st->free_line;
	if (l) {
		st->free_line = l->next;
	} else {
		l = nvs_store_memory(st, sizeof(*l));
		if (!l)
			return NULL;
		l->all = st->lines;
		st->lines = l;
		st->line_count++;
	}
	l->pool = pool;
	l->ctx = ctx;
	l->thread = who->thread;
	l->serial = l->passed = l->unmarked = l->unmarked_bytes = 0;
	l->marks = l->spares = l->events = 0;
	l->deaf = false;
	l->stream = who->stream;
	l->next = *at;
	*at = l;
	pool->lines++;
	return l;
}

void nvs_lines_bury(struct nvs_gpu *gpu)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_swap *s = gpu->swap;
	void *event[DEAD_EVENTS];
	unsigned n;

	nvs_swap_lock(s);
	n = st->dead;
	memcpy(event, st->dead_event, n * sizeof(event[0]));
	st->dead = 0;
	nvs_swap_unlock(s);
	while (n)
		nvs_driver.event_destroy(event[--n]);
}

bool nvs_line_passed(struct nvs_store *st, struct line *l, uint64_t serial)
{
	struct nvs_kept *k;
	bool any = false;

	while ((k = l->shelf.oldest) && k->serial <= serial) {
		nvs_shelf_remove(&l->shelf, k);
		nvs_shelf_add(&l->pool->shelf, k);
		any = true;
	}
	if (serial > l->passed)
		l->passed = serial;
	nvs_line_end(st, l);
	return any;
}

/* ---- how far a stream is ---- */

/*
 * Whether this thread may name the stream of a line: a default stream is another
 * one in another context or thread.
 */
static bool may_name(const struct line *l, void *stream)
{
	return stream && (!nvs_key_is_default(stream) ||
			  (nvs_current_context() == l->ctx &&
			   (!l->thread || l->thread == thread_number())));
}

/* As the driver does. Under the table's lock the stream is not destroyed. */
static int record(void *event, struct line *l)
{
	void *stream;
	int result = -1;

	pthread_mutex_lock(&nvs_table_lock);
	stream = atomic_load(&l->stream);
	if (may_name(l, stream))
		result = nvs_driver.event_record(event, stream);
	pthread_mutex_unlock(&nvs_table_lock);
	return result;
}

void nvs_line_mark(struct nvs_swap *s, struct nvs_store *st, struct line *l, void *stream)
{
	uint64_t serial = l->serial;
	void *event = NULL;
	bool ok;

	if (l->deaf || !nvs_driver.event_query || !nvs_driver.event_destroy)
		return;
	if (l->spares)
		event = l->spare[--l->spares];
	else if (l->events < MARKS)
		l->events++;
	else
		return;
	l->unmarked = l->unmarked_bytes = 0;
	l->busy++;
	nvs_swap_unlock(s);
	ok = event || nvs_driver.event_create(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
	if (ok && (stream ? nvs_driver.event_record(event, stream) : record(event, l)) != CUDA_SUCCESS) {
		nvs_driver.event_destroy(event);
		ok = false;
	}
	nvs_swap_lock(s);
	l->busy--;
	if (ok && l->events)
		l->mark[l->marks++] = (struct mark){ event, serial };
	else if (l->events)
		l->events--;
	l->deaf = l->deaf || (stream && !ok); /* of another context: it will not be otherwise next time */
	nvs_line_end(st, l);
}

void nvs_line_free_mark(struct line *l)
{
	if (l->events == MARKS && !l->spares && l->marks)
		l->spare[l->spares++] = l->mark[--l->marks].event;
}

/*
 * Whether the stream has nothing more to do. Under the table's lock it is not
 * destroyed. No other lock is held.
 */
static int ask_stream(struct line *l)
{
	int result = -1;
	void *stream;

	if (!nvs_driver.stream_query)
		return -1;
	pthread_mutex_lock(&nvs_table_lock);
	stream = atomic_load(&l->stream);
	if (may_name(l, stream))
		result = nvs_driver.stream_query(stream);
	pthread_mutex_unlock(&nvs_table_lock);
	return result;
}

enum look nvs_line_look(struct nvs_swap *s, struct nvs_store *st, struct line *l)
{
	enum look seen = LOOK_BLIND;
	uint64_t serial;
	int result;

	while (l->shelf.oldest && l->marks) {
		struct mark m = l->mark[0];

		memmove(&l->mark[0], &l->mark[1], --l->marks * sizeof(m));
		l->busy++;
		nvs_swap_unlock(s);
		/* One of a context that is gone tells nothing more: its work is over. */
		result = nvs_driver.event_query(m.event);
		nvs_swap_lock(s);
		l->busy--;
		if (!l->events) /* it went with its context meanwhile */
			break;
		if (result == CUDA_ERROR_NOT_READY) {
			memmove(&l->mark[1], &l->mark[0], l->marks++ * sizeof(m));
			l->mark[0] = m;
			return seen == LOOK_PASSED ? seen : LOOK_LATER;
		}
		l->spare[l->spares++] = m.event;
		if (nvs_line_passed(st, l, m.serial))
			seen = LOOK_PASSED;
	}
	if (!l->shelf.oldest || !l->stream) {
		nvs_line_end(st, l);
		return seen;
	}
	serial = l->serial;
	l->busy++;
	nvs_swap_unlock(s);
	result = ask_stream(l);
	nvs_swap_lock(s);
	l->busy--;
	if (result == CUDA_SUCCESS)
		return nvs_line_passed(st, l, serial) ? LOOK_PASSED : seen;
	return seen == LOOK_BLIND && result == CUDA_ERROR_NOT_READY ? LOOK_LATER : seen;
}

/* Looks at all lines with something in them; pool: at its lines. No lock is held. */
static enum look look_at_all(struct nvs_gpu *gpu, const struct nvs_pool *pool)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_swap *s = gpu->swap;
	enum look seen = LOOK_BLIND, one;
	bool dead;

	if (atomic_load(&nvs_gate.captures) || !nvs_driver.event_query || !nvs_driver.event_destroy)
		return LOOK_BLIND;
	nvs_swap_lock(s);
	for (struct line *l = st->lines; l; l = l->all) {
		if (!l->shelf.oldest || (pool && l->pool != pool))
			continue;
		one = nvs_line_look(s, st, l);
		seen = one > seen ? one : seen;
	}
	dead = st->dead > 0;
	nvs_swap_unlock(s);
	if (dead)
		nvs_lines_bury(gpu);
	return seen;
}

void nvs_pools_reap(struct nvs_gpu *gpu, const struct nvs_pool *pool)
{
	if (gpu->swap->store->lines)
		look_at_all(gpu, pool);
}

void nvs_pools_mark(struct nvs_gpu *gpu)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_swap *s = gpu->swap;

	if (!st->lines || atomic_load(&nvs_gate.captures))
		return;
	nvs_swap_lock(s);
	for (struct line *l = st->lines; l; l = l->all)
		if (l->shelf.oldest && l->stream && !l->marks)
			nvs_line_mark(s, st, l, NULL);
	nvs_swap_unlock(s);
}

bool nvs_pools_outwait(struct nvs_gpu *gpu)
{
	static const uint32_t nothing;
	enum look seen = LOOK_BLIND;
	int saved = errno;

	while (gpu->swap->store->lines && (seen = look_at_all(gpu, NULL)) == LOOK_LATER &&
	       !atomic_load(&nvs_exiting)) {
		nvs_pools_mark(gpu);
		nvs_futex_wait(&nothing, 0, NAP_NS, true); /* a nap, no cancellation point */
	}
	errno = saved;
	return seen == LOOK_PASSED;
}

/* Memory that may be used without a grant (memop.c), of which a drain knows nothing. */
static bool has_fixed(const struct line *l)
{
	for (const struct nvs_kept *k = l->shelf.oldest; k; k = k->younger)
		if (k->no_reuse)
			return true;
	return false;
}

void nvs_pools_drained(struct nvs_gpu *gpu)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_swap *s = gpu->swap;

	nvs_swap_lock(s);
	for (struct line *l = st->lines; l; l = l->all) {
		if (!l->pool || has_fixed(l))
			continue;
		for (; l->marks; l->marks--)
			l->spare[l->spares++] = l->mark[l->marks - 1].event;
		nvs_line_passed(st, l, l->serial);
	}
	nvs_swap_unlock(s);
}
