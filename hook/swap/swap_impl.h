// SPDX-License-Identifier: Apache-2.0
/*
 * swap_impl.h: what the sources of this folder share. swap.h says what they are for.
 *
 * Addresses come from spans: large ranges that the driver has reserved for the shim. A
 * span consists of granules of 2 MiB, and has arrays with what is known about each
 * granule. So an address is looked up with a subtraction, and an allocation needs no
 * metadata of its own.
 */
#ifndef NVSHARE_SWAP_IMPL_H
#define NVSHARE_SWAP_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "clock.h"
#include "driver.h"
#include "memory.h"
#include "freelist.h"
#include "look_abi.h"
#include "slab.h"
#include "memory_driver.h"

struct arena;
struct looker;
struct memory;
struct nvs_pool;
struct nvs_pools;
struct nvs_swap_range;

#define GRANULE NVS_SLAB_BYTES /* cuMemGetAllocationGranularity of every GPU so far */

/*
 * The most granules of a chunk: a 64th of the GPU's memory, between PIECE and PIECE_LARGE.
 * To map a chunk takes one driver call: 0.03 ms, but 0.6 to 1 ms while another process
 * moves memory out (H200, driver 580), and such calls wait for each other. Copies go on
 * meanwhile, so the copy of a chunk should take longer than that call: 2.6 ms. Larger
 * chunks come in later than they could.
 */
#define PIECES      64u
#define PIECE       16u
#define PIECE_LARGE 64u

/* The most granules for slabs that are allocated at once. */
#define SLABS_AT_ONCE 16u

/*
 * Bytes of freed memory that stay cached, mapped and counted, for the next allocation of
 * the same size. For LINGER_NS after the latest free the cache may be larger, a 16th of
 * the GPU: to release 1 GiB and to allocate it again takes 1.2 ms, the driver's own free
 * and allocation take 0.4 ms (H200). It shrinks before other memory is allocated.
 */
#define CACHE_BYTES (128ull << 20)
#define CACHE_PART  16u
#define LINGER_NS   (500 * NVS_MS)

/* The size of a span, in times the GPU's memory: addresses get fragmented. */
#define SPAN_TIMES 4u
#define MAX_SPANS  64u

enum chunk_state {
	CHUNK_NONE,  /* no chunk begins here */
	CHUNK_EMPTY, /* never used, and nowhere */
	CHUNK_HERE,  /* mapped on the GPU */
	CHUNK_AWAY,  /* in the arena */
	CHUNK_BUSY,  /* a thread is changing it without the lock */
	CHUNK_PINNED, /* the application has mapped memory of the driver: never moved */
};

/* What is known of a granule of a chunk that has left. */
struct content {
	uint64_t sum[LOOK_SUMS]; /* of what the arena has, if the chunk is COPY_KNOWN */
	bool moves;              /* the chunk leaves: this granule is to be copied */
};

/* What the arena has of a chunk, away or not. */
enum chunk_copy {
	COPY_NONE,    /* nothing */
	COPY_UNKNOWN, /* a copy */
	COPY_KNOWN,   /* a copy with its sums (look.c): what is still the same needs no copying again */
};

struct chunk {
	uint64_t handle;   /* of the driver, while on the GPU */
	uint32_t opens;    /* nvs_swap.opens when it got its memory, or TOUCHED */
	uint32_t granules;
	uint8_t state;     /* enum chunk_state */
	uint8_t copy;      /* enum chunk_copy */
};

#define TOUCHED UINT32_MAX /* work has used it, or may have */

/*
 * REGION_APP: addresses that the application has reserved. REGION_HIDDEN: addresses that
 * it does not know, for a memory that it has unmapped (vmm.h). In both, chunks may begin
 * at any granule.
 */
enum region_kind { REGION_LARGE, REGION_SLABS, REGION_APP, REGION_HIDDEN };

/* An allocation, or slabs side by side. Stands at its first granule. */
struct region {
	uint32_t granules;
	uint32_t piece;    /* granules of each chunk but the last */
	uint64_t bytes;    /* of the allocation */
	uint64_t owner;    /* context or pool, see allocation.c */
	uint32_t slabs;    /* in use */
	uint32_t end;      /* REGION_APP, REGION_HIDDEN: no chunk is behind this granule */
	uint8_t kind;
	bool published;    /* the application knows the allocation */
	bool dying;        /* is being freed */
	bool cached;
	uint32_t pinned;   /* shared, or used without a grant: stays on the GPU once it is there; a unique number, or 0 */
	uint64_t serial;   /* changes with each free in the region */
	struct nvs_block block; /* in nvs_swap.cache, while cached */
};

struct span {
	uint64_t base;
	uint32_t granules;
	uint32_t next_fit;     /* where the next search for addresses begins */
	struct nvs_gpu *gpu;
	uint32_t *head;        /* the first granule of its region plus one; 0: free */
	uint32_t *run;         /* at both ends of a free run: its length */
	uint32_t *store;       /* of a chunk with a copy: place in the arena, or NVS_STORE_NOWHERE */
	struct content *content;
	struct chunk *chunk;   /* at a chunk's first granule */
	struct region *region; /* at a region's first granule */
	struct nvs_slab *slab;
	uint32_t *memory;      /* vmm_impl.h: what is mapped there */
};

struct place {
	struct span *span;
	uint32_t granule;
};

#define FLIGHTS 3u /* runs that are copied at a time */

enum swap_mode { SWAP_UNKNOWN, SWAP_OFF, SWAP_ON };

/* The memory of a GPU. Guarded by lock where nothing else is said. */
struct nvs_swap {
	struct nvs_lock lock;
	atomic_uint kick;      /* futex: room, the lease or a chunk has changed */
	atomic_int mode;       /* enum swap_mode */
	bool capable, rdma, posix_fd;
	bool hold;             /* all chunks must be on the GPU, see swap.h */
	bool want;             /* the lease is open; the gate waits for memory */
	bool evicting;         /* chunks are moving out: no call may pass */
	bool mover;            /* the mover's thread runs */
	bool broken;           /* the driver fails: nothing moves any more */
	atomic_bool several_gpus; /* the process uses several GPUs: nothing moves any more */
	atomic_uint used_outside; /* the same, because of nvs_used_outside() */
	bool leaving;          /* the process ends with all memory on the GPU: it stays */
	uint32_t opens;        /* how often calls may have begun to use memory */
	uint64_t claimed;      /* bytes of all regions */
	uint64_t claiming;     /* bytes that are charged for regions to come */
	uint64_t pinned;       /* of claimed: in pinned regions */
	uint64_t resident;     /* of claimed: on the GPU, or about to be */
	uint64_t away;         /* of claimed: the rest, in the arena or nowhere */
	uint64_t coming;       /* of resident: not there yet */
	uint64_t going;        /* of resident: about to leave */
	uint64_t freed;        /* bytes of all regions that were ever freed */
	struct nvs_freelist cache; /* of freed regions; pools have their own */
	uint64_t cached_ns;    /* when the cache grew last */
	struct nvs_slab_heap heap;
	struct nvs_slab *idle; /* granules of slabs that are not in use */
	uint32_t idle_count, slabs_used;
	uint64_t out_bytes, in_bytes;
	uint64_t zero_bytes, clean_bytes; /* that left without a copy */
	uint64_t last_room;    /* as the scheduler said last */
	bool asked;            /* the scheduler has not been answered since */
	struct arena *arena;   /* arena.c; NULL: none */
	struct looker *look;     /* look.c; NULL: nothing has left yet */
	struct nvs_pools *pools; /* pool.h */
	struct {               /* vmm_memory.c; number 0 is none */
		struct memory *memory; /* zeroed; only what is touched takes memory */
		uint32_t used, free;
	} handles;
	/* Guarded by nvs_client_lock. */
	struct nvs_moved told;
	enum nvs_fixed told_by;
	uint64_t told_ns;
	uint64_t looked_ns;    /* for other users of the memory */
	/* The mover's. Guarded by the GPU's move lock. */
	void *ctx, *stream, *event[FLIGHTS];
};

extern struct span nvs_spans[MAX_SPANS];
extern atomic_uint nvs_spans_used;

static inline uint64_t bytes_of(uint32_t granules)
{
	return granules * GRANULE;
}

static inline uint64_t address_of(struct place p)
{
	return p.span->base + bytes_of(p.granule);
}

static inline struct chunk *chunk_of(struct place p)
{
	return &p.span->chunk[p.granule];
}

/* Steps to where the next chunk may begin. */
static inline void next_chunk(struct place *p)
{
	p->granule += chunk_of(*p)->granules;
}

static inline struct region *region_of(struct place p)
{
	return &p.span->region[p.granule];
}

/* ---- swap.c ---- */

/* Nothing is known of the GPU's memory. */
void nvs_swap_reset(struct nvs_gpu *gpu);
void nvs_pools_reset(struct nvs_pools *pools, struct nvs_gpu *gpu);

/* Signal handlers that run meanwhile see nvs_memory_locked, and leave calls to the driver. */
void nvs_swap_lock(struct nvs_swap *s);
void nvs_swap_unlock(struct nvs_swap *s);

/* Wakes all who wait for a change. */
void nvs_swap_kick(struct nvs_swap *s);

/* Sleeps until the next kick after `seen`, ns at most. The lock is not held. */
void nvs_swap_wait(struct nvs_swap *s, unsigned seen, uint64_t ns);

/* Bytes that chunks may take on the GPU now. The lock is held. */
uint64_t nvs_swap_capacity(struct nvs_gpu *gpu);

/* Tells the scheduler where memory is. No lock is held. */
void nvs_swap_tell(struct nvs_gpu *gpu, uint32_t code);

/* ---- space.c; the GPU's lock is held ---- */

/* Addresses for a region, its chunks empty. span is NULL: the spans have none. */
struct place nvs_region_new(struct nvs_gpu *gpu, uint32_t granules);

/* Reserves addresses for one more span, with so many granules at least. No lock is held. */
bool nvs_span_add(struct nvs_gpu *gpu, uint32_t least);

/* Gives addresses back. The region's chunks have no memory any more. */
void nvs_region_drop(struct place p);

/* The granule of an address; span is NULL if it lies in none. Needs no lock. */
struct place nvs_place_of(uint64_t address);

/*
 * Finds the next chunk that may be moved and is in one of these states (a bit each); with
 * CHUNK_PINNED also what stays on the GPU for good. The search begins at *at and goes round
 * once. looked: 0 at first.
 */
bool nvs_chunk_next(struct nvs_gpu *gpu, unsigned states, struct place *at, uint32_t *looked);

/* ---- chunk.c; no lock is held ---- */

/*
 * Creates physical memory of any kind that the application may want of it: it can be
 * exported, and registered with a network card. Returns CUresult.
 */
int nvs_chunk_create(struct nvs_gpu *gpu, uint64_t bytes, unsigned long long *handle);

/*
 * Creates physical memory for chunks side by side, and maps it. Returns CUresult;
 * *chunks becomes the number of chunks, from the first on, that have memory.
 */
int nvs_chunk_map(struct nvs_gpu *gpu, struct place first, uint32_t *chunks);
void nvs_chunk_unmap(struct place first, uint32_t chunks);

/* Gives the process's other GPUs access to the memory of this one. */
void nvs_swap_open_to_peers(struct nvs_gpu *gpu);

/* ---- region.c; the GPU's lock is held, and given up meanwhile ---- */

/* As nvs_region_new, and with a new span if need be. */
struct place nvs_region_reserve(struct nvs_gpu *gpu, uint32_t granules);

/*
 * A region of so many granules, charged and, if the GPU is held, with its memory. No lock
 * is held at the call; the lock is held at the return. span is NULL: refused.
 */
struct place nvs_region_alloc(struct nvs_gpu *gpu, uint32_t granules);

/* Frees a region. Waits while its chunks are being moved. */
void nvs_region_free(struct nvs_gpu *gpu, struct place p);

/* Why nothing leaves the GPU any more. Asked with the lock and, by nvs_swap_on(), without. */
static inline enum nvs_fixed fixed_by(const struct nvs_swap *s)
{
	enum nvs_fixed outside = (enum nvs_fixed)atomic_load_explicit(&s->used_outside, memory_order_relaxed);

	if (outside != NVS_FIXED_NOT) /* the stronger reason: the process keeps its context too */
		return outside;
	return atomic_load_explicit(&s->several_gpus, memory_order_relaxed) ? NVS_FIXED_SEVERAL_GPUS : NVS_FIXED_NOT;
}

static inline bool immovable(const struct nvs_swap *s)
{
	return fixed_by(s) != NVS_FIXED_NOT;
}

/* Whether all memory is on the GPU, and none is about to leave. */
static inline bool all_here(const struct nvs_swap *s)
{
	return !s->away && !s->coming && !s->evicting;
}

/* Whether all of a region is on the GPU: only then it is worth caching. Keeps the lock. */
bool nvs_region_is_here(struct place p);

/* Shrinks the cache to CACHE_BYTES, LINGER_NS after the latest free. No lock is held. */
void nvs_cache_trim(struct nvs_gpu *gpu);

/* Puts a dying region into the cache. False: it is to be freed. */
bool nvs_region_cache(struct nvs_swap *s, struct place p);

/*
 * Releases cached memory that no work uses: so many bytes at least, the oldest first.
 * Returns whether there was any. No lock is held.
 */
bool nvs_swap_flush(struct nvs_gpu *gpu, uint64_t bytes);

/*
 * So many bytes were refused: waits for a change after `seen`, 50 ms at most, and gives
 * up a scheduler that is gone. since: when the driver first refused, ns; 0: there was no
 * room. told: the scheduler knows. False: the memory is not to be had. The scheduler has
 * promised the room, so who waits for that goes on until it comes, until the GPU is not held
 * any more, or until the scheduler is lost.
 */
bool nvs_swap_refused(struct nvs_gpu *gpu, uint64_t bytes, unsigned seen, uint64_t since, bool told);

/* Gives an empty chunk its memory if the GPU is held. False: the memory is not to be had. */
bool nvs_chunk_populate(struct nvs_gpu *gpu, struct place p);

/* ---- allocation.c ---- */

/* As nvs_swap_alloc, for a pool. No lock is held. */
int nvs_swap_alloc_pooled(struct nvs_gpu *gpu, struct nvs_pool *pool, size_t bytes, CUdeviceptr *p);

/* Whether an allocation begins at p; *r describes it. The lock is held, here and below. */
bool nvs_swap_lookup(CUdeviceptr p, struct nvs_swap_range *r);

/*
 * The allocation at b->address ends, and its block stays mapped; *b describes it. False:
 * part of the block is not on the GPU, so that no work can be using it, and it is to be
 * released.
 */
bool nvs_alloc_cache(struct nvs_block *b);

/* A cached block becomes an allocation of so many bytes, which fit there. */
void nvs_alloc_reuse(CUdeviceptr p, size_t bytes);

/* Frees a cached block. The lock is given up meanwhile. */
void nvs_alloc_release(struct nvs_gpu *gpu, CUdeviceptr p);

/* ---- arena.c ---- */

#define NVS_STORE_NOWHERE 0xfe000000u /* the granule is zero; no segment has this number */

/* The lock is held for these: a chunk begins to leave. What it has in the arena, it keeps. */
void nvs_arena_begin(struct place p);

/*
 * Places in the arena for those granules of a chunk that are to be copied; copies of chunks
 * that are on the GPU give way. False: the arena is full.
 */
bool nvs_arena_alloc(struct nvs_gpu *gpu, struct place p);

/* Gives up what the arena has of a chunk, if anything; of a granule that is zero. */
void nvs_arena_free(struct nvs_gpu *gpu, struct place p);
void nvs_arena_vacate(struct nvs_gpu *gpu, struct place p);

/* What the arena has of a chunk is that of another place from now on: the chunk goes there. */
void nvs_arena_follow(struct place from, struct place to);

/*
 * Copies what is to be copied of a chunk, and clears what was zero, asynchronously in the
 * mover's stream; adds the bytes copied to *bytes. Returns CUresult. No lock is held.
 */
int nvs_arena_copy(struct nvs_gpu *gpu, struct place p, bool out, uint64_t *bytes);

/* Starts the thread that maps segments, if it could not be started when the first came. nvs_client_lock is held. */
void nvs_arena_tick(struct nvs_gpu *gpu);

/* Bytes of the arena that are mapped. The lock is held. */
uint64_t nvs_arena_bytes(struct nvs_gpu *gpu);

/* The context is gone, and with it the registration of host memory. */
void nvs_arena_unregistered(struct nvs_gpu *gpu);
void nvs_arena_fork_child(void);

/* ---- look.c ---- */

/* Reads the environment: NVSHARE_MOVE_ALL=1 is for memory to move unseen. */
void nvs_look_init(void);

/*
 * Decides for each granule of those chunks of a run that have content whether it is to
 * be copied, and gives up the arena's place of those that are zero. The mover calls it, with its
 * context current; no lock but the move lock is held. Where the kernel does not run, all is to be
 * copied.
 */
void nvs_look(struct nvs_gpu *gpu, struct place first, uint32_t chunks);

/*
 * Memory is about to leave: a thread loads the kernel, unless it is there. Until it is, all is copied.
 * The mover calls it; no lock is held.
 */
void nvs_look_load(struct nvs_gpu *gpu);

/* Waits until no load runs: 5 s at most, see NVS_LOAD_NS. */
void nvs_look_loaded(struct nvs_gpu *gpu);

/* The mover's context is another one: the kernel is to be loaded anew. */
void nvs_look_forget(struct nvs_gpu *gpu);

/* ---- async.c, queue.c, pool.c ---- */

enum look { LOOK_NOTHING, LOOK_LATER, LOOK_PASSED };

/* Finds out which frees the streams have passed; pool: of this pool only. No lock is held. */
enum look nvs_pools_look(struct nvs_gpu *gpu, const struct nvs_pool *pool);

/*
 * Somebody wants memory that waits for streams: records the events that are missing behind
 * frees. No lock is held.
 */
void nvs_pools_mark(struct nvs_gpu *gpu);

/*
 * Waits until a stream has passed a free, 20 seconds at most. False: no stream has, or there is
 * none to wait for. No lock is held.
 */
bool nvs_pools_wait(struct nvs_gpu *gpu);

/* The GPU was drained: streams have passed all frees. No lock is held. */
void nvs_pools_drained(struct nvs_gpu *gpu);

/* Releases what pools have beyond their thresholds, if the host has waited for work. No lock is held. */
void nvs_pools_trim(struct nvs_gpu *gpu);

/* A context is gone, or (NULL) the primary one of a GPU; the memory of pools stays. No lock is held. */
void nvs_pools_context_gone(struct nvs_gpu *gpu, const void *ctx);

/* The lock is held for what follows: whether pools cache anything; bytes of it that no stream uses. */
bool nvs_pools_have_cached(struct nvs_gpu *gpu);
uint64_t nvs_pools_cached(struct nvs_gpu *gpu);

/* Releases one block that no stream uses. False: there is none. The lock is given up meanwhile. */
bool nvs_pools_release_one(struct nvs_gpu *gpu);

/* The allocation at p ends, and no work uses it: its block goes to the pool, for all streams. */
void nvs_pools_free(struct nvs_gpu *gpu, struct nvs_pool *pool, CUdeviceptr p);

/* ---- outside.c ---- */

/* Whether the process has anything that uses device memory past the shim. No lock is held. */
enum nvs_fixed nvs_used_outside(void);

/* ---- move.c, pass.c ---- */

/* Starts the mover. False: no thread can be created. */
bool nvs_mover_start(struct nvs_gpu *gpu);

/*
 * Makes a context of the GPU current. The move lock is held until the caller has popped
 * the context and called nvs_driver_leave(). NULL: there is no context, nothing to undo.
 */
void *nvs_mover_context(struct nvs_gpu *gpu);

#endif
