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
 * The channel's swap lock guards all of this.
 */
#include <errno.h>
#include <string.h>

#include "channel.h"
#include "futex.h"
#include "swap_pool.h"
#include "tables.h"
#include "wrap.h"

NVS_EXPORT int cuMemPoolGetAttribute(void *pool, int attribute, void *value);

#define MARK_FREES 16u          /* an event after so many frees, */
#define MARK_BYTES (64ull << 20) /* or so many bytes */
#define LINES_KEPT 256u         /* whether they are of use or not */
#define NAP_NS     200000       /* between two looks at what is waited for */

struct nvs_store nvs_stores[NVS_MAX_CHANNELS];

/* Whoever calls, in a stream. */
struct caller {
	void *stream;
	void *ctx;       /* of a default stream, they are one in each context */
	uint64_t thread; /* of a per-thread default stream */
};

/* Threads' records are used again by others; this number is not. */
static uint64_t thread_number(void)
{
	static _Atomic uint64_t last;
	static __thread uint64_t number __attribute__((tls_model("initial-exec")));

	if (!number)
		number = atomic_fetch_add(&last, 1) + 1;
	return number;
}

static struct caller caller_of(void *stream)
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

static struct line *line_find(struct nvs_store *st, const struct nvs_pool *pool,
			      const struct caller *who)
{
	struct line *l = *bucket_of(st, pool, who->stream);

	while (l && !(l->pool == pool && l->stream == who->stream && l->thread == who->thread &&
		      (!nvs_key_is_default(who->stream) || l->ctx == who->ctx)))
		l = l->next;
	return l;
}

/* The stream is no more; what was freed in it waits on. */
static void line_cut(struct nvs_store *st, struct line *l)
{
	struct line **at = bucket_of(st, l->pool, l->stream);

	while (*at != l)
		at = &(*at)->next;
	*at = l->next;
	atomic_store(&l->stream, NULL);
}

/* A line is over if nothing waits in it and nothing can come. */
static void line_end(struct nvs_store *st, struct line *l)
{
	if (!l->pool || (l->stream && !l->pool->gone) || l->shelf.oldest || l->busy ||
	    st->dead + MARKS > DEAD_EVENTS)
		return;
	if (l->stream)
		line_cut(st, l);
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
			line_cut(st, l);
			line_end(st, l);
		}
		used += l->pool != NULL;
	}
	st->line_sweep = used < LINES_KEPT / 2 ? LINES_KEPT : 2 * used;
}

/* ctx: of the stream. */
static struct line *line_new(struct nvs_store *st, struct nvs_pool *pool, const struct caller *who,
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

/* Destroys events that are of no use. No lock is held. */
static void bury(unsigned channel)
{
	struct nvs_store *st = &nvs_stores[channel];
	struct nvs_swap *s = &nvs_swaps[channel];
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

/* The stream has passed all its frees up to this one. Returns whether that is news. */
static bool line_passed(struct nvs_store *st, struct line *l, uint64_t serial)
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
	line_end(st, l);
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

/*
 * Records an event behind all frees so far. stream: of the line, that the caller
 * was called with; NULL: he was not. The lock is held, and given up meanwhile.
 */
static void leave_mark(struct nvs_swap *s, struct nvs_store *st, struct line *l, void *stream)
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
	line_end(st, l);
}

/* Makes sure of an event for a mark that has to be: the last one moves on. */
static void free_mark(struct line *l)
{
	if (l->events == MARKS && !l->spares && l->marks)
		l->spare[l->spares++] = l->mark[--l->marks].event;
}

enum look { LOOK_BLIND, LOOK_LATER, LOOK_PASSED };

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

/* Looks how far the stream of a line is. The lock is held, and given up meanwhile. */
static enum look look(struct nvs_swap *s, struct nvs_store *st, struct line *l)
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
		if (line_passed(st, l, m.serial))
			seen = LOOK_PASSED;
	}
	if (!l->shelf.oldest || !l->stream) {
		line_end(st, l);
		return seen;
	}
	serial = l->serial;
	l->busy++;
	nvs_swap_unlock(s);
	result = ask_stream(l);
	nvs_swap_lock(s);
	l->busy--;
	if (result == CUDA_SUCCESS)
		return line_passed(st, l, serial) ? LOOK_PASSED : seen;
	return seen == LOOK_BLIND && result == CUDA_ERROR_NOT_READY ? LOOK_LATER : seen;
}

/* Looks at all lines with something in them; pool: at its lines. No lock is held. */
static enum look look_at_all(unsigned channel, const struct nvs_pool *pool)
{
	struct nvs_store *st = &nvs_stores[channel];
	struct nvs_swap *s = &nvs_swaps[channel];
	enum look seen = LOOK_BLIND, one;
	bool dead;

	if (atomic_load(&nvs_gate.captures) || !nvs_driver.event_query || !nvs_driver.event_destroy)
		return LOOK_BLIND;
	nvs_swap_lock(s);
	for (struct line *l = st->lines; l; l = l->all) {
		if (!l->shelf.oldest || (pool && l->pool != pool))
			continue;
		one = look(s, st, l);
		seen = one > seen ? one : seen;
	}
	dead = st->dead > 0;
	nvs_swap_unlock(s);
	if (dead)
		bury(channel);
	return seen;
}

void nvs_pools_reap(unsigned channel, const struct nvs_pool *pool)
{
	if (nvs_stores[channel].lines)
		look_at_all(channel, pool);
}

void nvs_pools_mark(unsigned channel)
{
	struct nvs_store *st = &nvs_stores[channel];
	struct nvs_swap *s = &nvs_swaps[channel];

	if (!st->lines || atomic_load(&nvs_gate.captures))
		return;
	nvs_swap_lock(s);
	for (struct line *l = st->lines; l; l = l->all)
		if (l->shelf.oldest && l->stream && !l->marks)
			leave_mark(s, st, l, NULL);
	nvs_swap_unlock(s);
}

bool nvs_pools_outwait(unsigned channel)
{
	static const uint32_t nothing;
	enum look seen = LOOK_BLIND;
	int saved = errno;

	while (nvs_stores[channel].lines && (seen = look_at_all(channel, NULL)) == LOOK_LATER &&
	       !atomic_load(&nvs_exiting)) {
		nvs_pools_mark(channel);
		nvs_futex_wait(&nothing, 0, NAP_NS, true); /* a nap, no cancellation point */
	}
	errno = saved;
	return seen == LOOK_PASSED;
}

void nvs_pools_drained(unsigned channel)
{
	struct nvs_store *st = &nvs_stores[channel];
	struct nvs_swap *s = &nvs_swaps[channel];

	nvs_swap_lock(s);
	for (struct line *l = st->lines; l; l = l->all) {
		if (!l->pool)
			continue;
		for (; l->marks; l->marks--)
			l->spare[l->spares++] = l->mark[l->marks - 1].event;
		line_passed(st, l, l->serial);
	}
	nvs_swap_unlock(s);
}

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

int nvs_swap_alloc_async(int channel, void *handle, void *stream, size_t bytes, CUdeviceptr *p)
{
	struct caller who;
	struct nvs_store *st;
	struct nvs_swap *s;
	struct nvs_pool *pool;
	bool found = false;
	int result;

	if (!bytes || !p || !nvs_swap_on(channel))
		return -1;
	who = caller_of(stream);
	st = &nvs_stores[channel];
	s = &nvs_swaps[channel];
	nvs_swap_lock(s);
	pool = nvs_pool_find(st, handle);
	found = pool && reuse(st, pool, line_find(st, pool, &who), bytes, p);
	nvs_swap_unlock(s);
	if (found)
		return CUDA_SUCCESS;
	if (pool) {
		look_at_all((unsigned)channel, pool);
		nvs_swap_lock(s);
		found = reuse(st, pool, line_find(st, pool, &who), bytes, p);
		nvs_swap_unlock(s);
	} else {
		uint64_t threshold = 0;

		CALL(cuMemPoolGetAttribute, handle, CU_POOL_RELEASE_THRESHOLD, &threshold);
		nvs_swap_lock(s);
		pool = nvs_pool_new(st, handle, threshold);
		nvs_swap_unlock(s);
	}
	if (found)
		return CUDA_SUCCESS;
	if (!pool)
		return -1;
	result = nvs_swap_alloc_pooled(channel, pool, bytes, p);
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
static int wait_in_line(unsigned channel, struct line *l, CUdeviceptr p, void *stream)
{
	struct nvs_store *st = &nvs_stores[channel];
	struct nvs_swap *s = &nvs_swaps[channel];
	struct nvs_pool *pool = l->pool;
	struct nvs_kept *k = nvs_pool_keep(st, pool, &l->shelf, p, ++l->serial);

	if (!k) {
		nvs_swap_give_up(channel, p);
		return CUDA_SUCCESS;
	}
	l->unmarked++;
	l->unmarked_bytes += k->bytes;
	/* A thread's own stream cannot be asked by others, nor when the thread is gone. */
	if ((l->unmarked >= MARK_FREES || l->unmarked_bytes >= MARK_BYTES || l->thread) &&
	    !atomic_load(&nvs_gate.captures)) {
		if (l->events == MARKS && !l->spares)
			look(s, st, l);
		if (l->thread)
			free_mark(l);
		if (l->stream == stream)
			leave_mark(s, st, l, stream);
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
	st = &nvs_stores[at.span->channel];
	s = &nvs_swaps[at.span->channel];
	who = caller_of(stream);
	nvs_swap_lock(s);
	if (!nvs_swap_lookup(p, &r)) {
		nvs_swap_unlock(s);
		return CUDA_ERROR_INVALID_VALUE;
	}
	l = r.pool ? line_find(st, r.pool, &who) : NULL;
	if (r.pool && !l) {
		void *ctx;

		nvs_swap_unlock(s);
		ctx = context_of(&who);
		nvs_swap_lock(s);
		if (!nvs_swap_lookup(p, &r) || !r.pool) {
			nvs_swap_unlock(s);
			return CUDA_ERROR_INVALID_VALUE; /* another thread was faster */
		}
		l = line_find(st, r.pool, &who);
		l = l ? l : line_new(st, r.pool, &who, ctx);
	}
	result = l ? wait_in_line(r.channel, l, p, stream) : -1;
	nvs_swap_unlock(s);
	return result >= 0 ? result : free_plain(p, stream);
}

/* ---- what goes ---- */

void nvs_swap_stream_going(void *stream)
{
	if (!stream || nvs_key_is_default(stream))
		return;
	for (unsigned i = 0; i < NVS_MAX_CHANNELS; i++) {
		struct nvs_store *st = &nvs_stores[i];
		struct nvs_swap *s = &nvs_swaps[i];
		bool any = false;

		if (!st->lines || nvs_in_book)
			continue;
		nvs_swap_lock(s);
		for (struct line *l = st->lines; l; l = l->all) {
			if (l->stream != stream)
				continue;
			any = true;
			if (l->shelf.oldest)
				free_mark(l);
			if (l->shelf.oldest && !atomic_load(&nvs_gate.captures))
				leave_mark(s, st, l, stream);
			if (l->stream == stream)
				line_cut(st, l);
			line_end(st, l);
		}
		nvs_swap_unlock(s);
		if (any)
			bury(i);
	}
	/* Whoever asks the stream has done so. */
	pthread_mutex_lock(&nvs_table_lock);
	pthread_mutex_unlock(&nvs_table_lock);
}

void nvs_pool_end_lines(struct nvs_store *st, const struct nvs_pool *pool)
{
	for (struct line *l = st->lines; l; l = l->all)
		if (l->pool == pool)
			line_end(st, l);
}

void nvs_pools_context_gone(unsigned channel, const void *ctx)
{
	struct nvs_store *st = &nvs_stores[channel];
	struct nvs_swap *s = &nvs_swaps[channel];

	nvs_swap_lock(s);
	st->dead = 0;
	for (struct line *l = st->lines; l; l = l->all) {
		bool its = l->pool && (ctx ? l->ctx == ctx : !nvs_context_own(l->ctx));

		if (its) /* the events went with the context, like the work */
			l->marks = l->spares = l->events = 0;
		if (its && l->stream)
			line_cut(st, l);
		if (l->pool && (its || !ctx))
			line_passed(st, l, l->serial);
	}
	/* With a primary context goes the memory that is of no context. */
	while (!ctx && nvs_pools_give_up_one(channel))
		;
	for (struct nvs_pool *p = st->pools; !ctx && p; p = p->next)
		p->used = 0;
	nvs_swap_unlock(s);
}

void nvs_async_fork_child(void)
{
	memset(nvs_stores, 0, sizeof(nvs_stores)); /* what they had is left behind */
	atomic_store(&nvs_swap_excess, 0);
}
