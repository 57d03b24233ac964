// SPDX-License-Identifier: Apache-2.0
/*
 * swap_pool.h: what swap_async.c, swap_line.c and swap_pool.c share: the pools of the
 * application as far as they are made of memory that moves. The gpu's swap lock
 * guards all of it.
 */
#ifndef NVSHARE_SWAP_POOL_H
#define NVSHARE_SWAP_POOL_H

#include "swap.h"
#include "swap_impl.h"

#define MARKS        8u   /* events of a line */
#define DEAD_EVENTS  64u
#define LINE_BUCKETS 256u

struct nvs_pool {
	void *handle;        /* of the driver */
	bool gone;           /* destroyed: there may be another one with this handle */
	unsigned lines;      /* that are of it */
	uint64_t threshold;  /* bytes that are held on to at a synchronisation, used ones included */
	uint64_t used, used_high;      /* bytes of its allocations */
	uint64_t kept, reserved_high;  /* of what was freed; of both together */
	struct nvs_shelf shelf;        /* what any stream may have */
	struct nvs_pool *next;
};

/* An event behind the frees of a line up to this one. */
struct mark {
	void *event;
	uint64_t serial;
};

/* What one stream has freed of a pool and may still be using. */
struct line {
	struct nvs_pool *pool;   /* NULL: the record is free */
	_Atomic(void *) stream;  /* NULL: it was destroyed */
	void *ctx;
	uint64_t thread;         /* of a per-thread default stream, else 0 */
	uint64_t serial, passed; /* of the last free, and of the last that the stream has passed */
	uint64_t unmarked, unmarked_bytes; /* frees since the last mark */
	struct nvs_shelf shelf;
	struct mark mark[MARKS]; /* oldest first */
	void *spare[MARKS];      /* events */
	unsigned marks, spares, events; /* events: also those in somebody's hand */
	unsigned busy;           /* threads that have it in hand without the lock */
	bool deaf;               /* events do not work */
	struct line *next;       /* in its bucket, or of free records */
	struct line *all;        /* never changes once listed */
};

/* Of a GPU. */
struct nvs_store {
	struct nvs_gpu *gpu;
	struct nvs_pool *_Atomic pools; /* both lists only grow; a look whether they are empty needs no lock */
	struct line *_Atomic lines;
	struct line *free_line;
	unsigned line_count, line_sweep; /* records; when to look next for those of no use */
	struct line *bucket[LINE_BUCKETS];
	struct nvs_kept *free_kept;
	void *dead_event[DEAD_EVENTS]; /* to be destroyed */
	unsigned dead;
	bool trim;           /* a synchronisation was seen */
	uint64_t giving;     /* bytes that are being given up, without the lock */
	char *block;         /* where the next record comes from */
	size_t block_left;
};

/* Whoever calls, in a stream. */
struct caller {
	void *stream;
	void *ctx;       /* of a default stream, they are one in each context */
	uint64_t thread; /* of a per-thread default stream */
};

/* ---- swap_line.c ---- */

struct caller nvs_caller_of(void *stream);

/* The lock is held for what follows. */
struct line *nvs_line_find(struct nvs_store *st, const struct nvs_pool *pool, const struct caller *who);
/* ctx: of the stream. NULL: the system has no memory. */
struct line *nvs_line_new(struct nvs_store *st, struct nvs_pool *pool, const struct caller *who,
			  void *ctx);

/* The stream is no more; what was freed in it waits on. */
void nvs_line_cut(struct nvs_store *st, struct line *l);

/* A line is over if nothing waits in it and nothing can come. */
void nvs_line_end(struct nvs_store *st, struct line *l);

/* The stream has passed all its frees up to this one. Returns whether that is news. */
bool nvs_line_passed(struct nvs_store *st, struct line *l, uint64_t serial);

/*
 * Records an event behind all frees so far. stream: of the line, that the caller
 * was called with; NULL: he was not. The lock is given up meanwhile.
 */
void nvs_line_mark(struct nvs_swap *s, struct nvs_store *st, struct line *l, void *stream);

/* Makes sure of an event for a mark that has to be: the last one moves on. */
void nvs_line_free_mark(struct line *l);

/* Looks how far the stream of a line is. The lock is given up meanwhile. */
enum look { LOOK_BLIND, LOOK_LATER, LOOK_PASSED };
enum look nvs_line_look(struct nvs_swap *s, struct nvs_store *st, struct line *l);

/* Destroys events that are of no use. No lock is held. */
void nvs_lines_bury(struct nvs_gpu *gpu);

/* ---- swap_async.c and swap_pool.c ---- */

/* The lock is held for all of these. Zeroed and for good; NULL: the system has none. */
void *nvs_store_memory(struct nvs_store *st, size_t bytes);

/* Lines of a pool that is gone end, as far as they can. */
void nvs_pool_end_lines(struct nvs_store *st, const struct nvs_pool *pool);

struct nvs_pool *nvs_pool_find(struct nvs_store *st, void *handle);
struct nvs_pool *nvs_pool_new(struct nvs_store *st, void *handle, uint64_t threshold);

/* An allocation of it takes so many bytes. */
void nvs_pool_takes(struct nvs_pool *p, uint64_t bytes);

/*
 * The allocation ends, and its place goes onto a shelf. NULL: it can't be kept, and
 * is to be given up.
 */
struct nvs_kept *nvs_pool_keep(struct nvs_store *st, struct nvs_pool *p, struct nvs_shelf *s,
			       CUdeviceptr address, uint64_t serial);

/* It leaves the shelf, for an allocation or for good. */
void nvs_pool_unkept(struct nvs_store *st, struct nvs_pool *p, struct nvs_shelf *s, struct nvs_kept *k);

#endif
