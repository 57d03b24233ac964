// SPDX-License-Identifier: Apache-2.0
/*
 * queue.c: the queues of freed blocks, one for each stream and pool. async.c says what they
 * are for.
 */
#include "pool.h"
#include "swap.h"

uint64_t nvs_caller_thread(void)
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
		.thread = stream == CU_STREAM_PER_THREAD ? nvs_caller_thread() : 0,
	};
}

static struct queue **bucket_of(struct nvs_pools *all, const struct nvs_pool *pool, void *stream)
{
	uint64_t x = ((uintptr_t)stream ^ (uintptr_t)pool >> 3) * 0x9e3779b97f4a7c15ull;

	return &all->bucket[(x >> 40) % QUEUE_BUCKETS];
}

static bool is_of(const struct queue *q, const struct caller *who)
{
	return q->stream == who->stream && q->thread == who->thread &&
	       (!nvs_key_is_default(who->stream) || q->ctx == who->ctx);
}

struct queue *nvs_queue_find(struct nvs_pools *all, const struct nvs_pool *pool, const struct caller *who)
{
	struct queue *q = *bucket_of(all, pool, who->stream);

	while (q && !(q->pool == pool && is_of(q, who)))
		q = q->next;
	return q;
}

void nvs_event_unused(struct nvs_pools *all, struct pool_event *e)
{
	e->next = all->unused_events;
	all->unused_events = e;
}

struct pool_event *nvs_event_oldest(struct queue *q)
{
	struct pool_event *e = q->oldest;

	if (!e)
		return NULL;
	q->oldest = e->next;
	if (!q->oldest)
		q->end = &q->oldest;
	return e;
}

void nvs_queue_drop_events(struct nvs_pools *all, struct queue *q)
{
	for (struct pool_event *e; (e = nvs_event_oldest(q));)
		nvs_event_unused(all, e);
	q->unmarked = q->unmarked_bytes = 0;
}

struct queue *nvs_queue_new(struct nvs_pools *all, struct nvs_pool *pool, const struct caller *who, void *ctx)
{
	struct queue **bucket = bucket_of(all, pool, who->stream), *q = *bucket;

	for (; q; q = q->next) {
		queue_end(all, q); /* of a thread that is gone */
		if (!q->pool && !q->busy)
			break;
	}
	if (!q) {
		q = nvs_pool_record(all, sizeof(*q));
		if (!q)
			return NULL;
		q->next = *bucket;
		*bucket = q;
		q->all = all->queues;
		all->queues = q;
	}
	q->pool = pool;
	q->stream = who->stream;
	q->ctx = ctx;
	q->thread = who->thread;
	q->end = &q->oldest;
	q->no_events = !ctx;
	pool->queues++;
	return q;
}

void nvs_pool_end_queues(struct nvs_pools *all, const struct nvs_pool *pool)
{
	for (struct queue *q = all->queues; q; q = q->all)
		if (q->pool == pool)
			queue_end(all, q);
}

bool nvs_queue_passed(struct nvs_pools *all, struct queue *q, uint64_t serial)
{
	struct nvs_block *b;
	bool any = false;

	while ((b = q->blocks.oldest) && b->serial <= serial) {
		nvs_freelist_remove(&q->blocks, b);
		nvs_freelist_add(&q->pool->free, b);
		any = true;
	}
	if (!q->blocks.oldest)
		nvs_queue_drop_events(all, q);
	queue_end(all, q);
	return any;
}

/* ---- what tells that streams have passed their frees ---- */

void nvs_swap_host_waited(uint64_t frees, const void *ctx, void *stream)
{
	struct caller who = { NULL, NULL, 0 };

	if (nvs_memory_locked)
		return;
	if (!ctx && stream)
		who = nvs_caller_of(stream);
	else if (!ctx)
		ctx = nvs_current_context();
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_pools *all = gpu->swap->pools;

		if (!all->queues || !nvs_counting())
			continue;
		nvs_swap_lock(gpu->swap);
		for (struct queue *q = all->queues; q; q = q->all)
			if (q->blocks.oldest && (ctx ? q->ctx == ctx : is_of(q, &who)))
				nvs_queue_passed(all, q, frees);
		nvs_swap_unlock(gpu->swap);
	}
}

/* Memory that may be used without a grant (memop.c), which a drain knows nothing of. */
static bool has_pinned(const struct queue *q)
{
	for (const struct nvs_block *b = q->blocks.oldest; b; b = b->younger)
		if (b->no_reuse)
			return true;
	return false;
}

void nvs_pools_drained(struct nvs_gpu *gpu)
{
	struct nvs_pools *all = gpu->swap->pools;
	struct nvs_swap *s = gpu->swap;

	nvs_swap_lock(s);
	for (struct queue *q = all->queues; q; q = q->all)
		if (q->pool && !has_pinned(q))
			nvs_queue_passed(all, q, UINT64_MAX);
	nvs_swap_unlock(s);
}

void nvs_pools_context_gone(struct nvs_gpu *gpu, const void *ctx)
{
	struct nvs_pools *all = gpu->swap->pools;
	struct nvs_swap *s = gpu->swap;

	nvs_swap_lock(s);
	for (struct pool_event *e = all->unused_events; e; e = e->next)
		if (ctx ? e->ctx == ctx : e->ctx && !nvs_context_look(e->ctx).own)
			e->event = e->ctx = NULL; /* the driver's event went with the context */
	for (struct queue *q = all->queues; q; q = q->all) {
		if (!q->pool || !q->ctx || (ctx ? q->ctx != ctx : nvs_context_look(q->ctx).own))
			continue;
		for (struct pool_event *e = q->oldest; e; e = e->next)
			e->event = e->ctx = NULL;
		q->stream = q->ctx = NULL;
		nvs_queue_passed(all, q, UINT64_MAX);
	}
	nvs_swap_unlock(s);
}
