// SPDX-License-Identifier: Apache-2.0
/*
 * pool.h: what async.c, queue.c and pool.c share: the application's memory pools, as far as they
 * are made of memory that moves. The GPU's swap lock guards all of it, and is held
 * where no function says otherwise.
 */
#ifndef NVSHARE_POOL_H
#define NVSHARE_POOL_H

#include "freelist.h"
#include "stream.h"
#include "swap_impl.h"

#define QUEUE_BUCKETS 256u

struct nvs_pool {
	void *handle;        /* of the driver */
	bool gone;           /* destroyed: another pool may have this handle */
	unsigned queues;     /* of this pool */
	uint64_t threshold;  /* bytes that stay reserved at a synchronisation, used ones included */
	uint64_t used, used_high;        /* bytes of allocations */
	uint64_t cached, reserved_high;  /* bytes of freed blocks; of freed and allocated ones, as the driver has them */
	struct nvs_freelist free;        /* blocks for any stream */
	struct nvs_pool *next;
};

/* An event behind all frees of a queue up to one. */
struct pool_event {
	void *event; /* of the driver; NULL: not created yet */
	void *ctx;   /* of the event */
	uint64_t serial;
	struct pool_event *next;
};

/* First in, first out: what one stream has freed of a pool and may still be using. */
struct queue {
	struct nvs_pool *pool;    /* NULL: the record is unused */
	void *stream;             /* NULL: destroyed */
	void *ctx;                /* NULL: destroyed, and the work with it */
	uint64_t thread;          /* of a per-thread default stream, else 0 */
	struct nvs_freelist blocks; /* the stream's next allocations may take them at once */
	struct pool_event *oldest, **end; /* events that have not passed yet */
	uint64_t unmarked, unmarked_bytes; /* frees behind the last event */
	unsigned busy;            /* threads that use the record without the lock */
	bool no_events;           /* the stream takes none of this context */
	struct queue *next, *all; /* in its bucket, and of the GPU: neither ever changes */
};

/* Of a GPU. Records are never freed, only used again. */
struct nvs_pools {
	struct nvs_gpu *gpu;
	struct nvs_pool *_Atomic first; /* a look whether there is any needs no lock, here and below */
	struct queue *_Atomic queues;
	struct queue *bucket[QUEUE_BUCKETS];
	struct nvs_block *unused_blocks;
	struct pool_event *unused_events;
	bool trim;           /* the host has waited for work since the last trim */
	uint64_t releasing;  /* bytes that are being released, without the lock */
	char *records;       /* memory for the next records */
	size_t records_left;
};

/* ---- queue.c ---- */

/* The caller, and the stream of the call. */
struct caller {
	void *stream;
	void *ctx;       /* current, for a default stream: each context has one */
	uint64_t thread; /* for a per-thread default stream */
};

/* Records of threads are used again by other threads; this number is not. */
uint64_t nvs_caller_thread(void);

/* No lock is held. */
struct caller nvs_caller_of(void *stream);

struct queue *nvs_queue_find(struct nvs_pools *all, const struct nvs_pool *pool, const struct caller *who);

/* ctx: of the stream. NULL: the system has no memory. */
struct queue *nvs_queue_new(struct nvs_pools *all, struct nvs_pool *pool, const struct caller *who, void *ctx);

/* The stream has passed all its frees up to this one. Returns whether that is news. */
bool nvs_queue_passed(struct nvs_pools *all, struct queue *q, uint64_t serial);

/* The oldest event leaves the queue. NULL: there is none. */
struct pool_event *nvs_event_oldest(struct queue *q);
void nvs_event_unused(struct nvs_pools *all, struct pool_event *e);

/* The events of a queue tell nothing that is wanted any more. */
void nvs_queue_drop_events(struct nvs_pools *all, struct queue *q);

/* Ends a queue that is empty and stays empty. One of a living stream will be needed again. */
static inline void queue_end(struct nvs_pools *all, struct queue *q)
{
	if (!q->pool || q->blocks.oldest || q->busy ||
	    (q->stream && !nvs_key_is_default(q->stream) && !q->pool->gone))
		return;
	nvs_queue_drop_events(all, q);
	q->pool->queues--;
	q->pool = NULL;
}

/* Ends the queues of a pool that is gone, as far as they are empty. */
void nvs_pool_end_queues(struct nvs_pools *all, const struct nvs_pool *pool);

/* ---- pool.c ---- */

/* Zeroed, and never freed. NULL: the system has no memory. */
void *nvs_pool_record(struct nvs_pools *all, size_t bytes);

struct nvs_pool *nvs_pool_find(struct nvs_pools *all, void *handle);
struct nvs_pool *nvs_pool_new(struct nvs_pools *all, void *handle, uint64_t threshold);

/* An allocation of so many bytes was made in the pool. */
void nvs_pool_count(struct nvs_pool *p, uint64_t bytes);

/*
 * The allocation at an address ends, and its block is added to a list. NULL: its memory
 * can't be reused, and is to be released.
 */
struct nvs_block *nvs_pool_cache(struct nvs_pools *all, struct nvs_pool *p, struct nvs_freelist *l,
				 CUdeviceptr address, uint64_t serial);

/* A block leaves its list, for an allocation or to be released. */
void nvs_pool_uncache(struct nvs_pools *all, struct nvs_pool *p, struct nvs_freelist *l, struct nvs_block *b);

#endif
