// SPDX-License-Identifier: Apache-2.0
/*
 * swap_impl.h: what the swap_*.c share. swap.h says what it is for.
 *
 * Addresses come from spans, large ranges that the driver reserved for us, in
 * granules of 2 MiB. All that is known about a granule stands in arrays of its
 * span, so that the way from an address to its allocation is a subtraction, and
 * no metadata has to be allocated when memory is.
 */
#ifndef NVSHARE_SWAP_IMPL_H
#define NVSHARE_SWAP_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "compiler.h"
#include "driver.h"
#include "memory.h"
#include "freelist.h"
#include "slab.h"
#include "memory_abi.h"

struct arena;
struct memory;
struct nvs_pool;
struct nvs_pools;
struct nvs_swap_range;

#define GRANULE NVS_SLAB_BYTES /* cuMemGetAllocationGranularity of every GPU so far */

/*
 * Granules of a chunk, at most: a 64th of the GPU's memory, within these. Each takes
 * one map call of the driver: 0.03 ms, but 0.6 to 1 ms while another process's memory
 * goes out (H200, driver 580), and they wait for each other. What is copied meanwhile
 * goes on, so that it is enough if a chunk's copy takes longer than that, as 2.6 ms.
 * What is larger comes in later than it could.
 */
#define PIECES      64u
#define PIECE       16u
#define PIECE_LARGE 64u

/* Granules of memory for slabs that are taken at once, at most. */
#define SLABS_AT_ONCE 16u

/*
 * Bytes of freed memory that are kept, mapped and counted, for the next request of that
 * size. For LINGER_NS after the latest free there may be more, a 16th of the GPU: to
 * give up 1 GiB and to obtain it again takes 1.2 ms, where the driver's own free and
 * allocation take 0.4 (H200). It goes before anything else is obtained.
 */
#define CACHE_BYTES (128ull << 20)
#define CACHE_PART  16u
#define LINGER_NS   500000000ull
#define CACHE_MAX   64u

/* Addresses reserved at once: as many times the GPU's memory, fragmentation with it. */
#define SPAN_TIMES 4u
#define MAX_SPANS  64u

enum chunk_state {
	CHUNK_NONE,  /* no chunk begins here */
	CHUNK_EMPTY, /* never used: nowhere */
	CHUNK_HERE,  /* mapped on the GPU */
	CHUNK_AWAY,  /* in the arena */
	CHUNK_BUSY,  /* somebody is changing it, without the lock */
	CHUNK_PINNED, /* the application's mapping of what is the driver's: never moved */
};

struct chunk {
	uint64_t handle;   /* of the driver, while on the GPU */
	uint32_t opens;    /* of the GPU, when it got its memory; TOUCHED */
	uint32_t granules;
	uint8_t state;     /* enum chunk_state */
};

#define TOUCHED UINT32_MAX /* was used, or may have been */

/*
 * The last two are of vmm.h: addresses that the application reserved, and such
 * as it does not know, for a memory that it has not mapped. Chunks are anywhere
 * in them: a piece is one granule.
 */
enum region_kind { REGION_LARGE, REGION_SLABS, REGION_APP, REGION_HIDDEN };

/* An allocation, or slabs side by side; at its first granule. */
struct region {
	uint32_t granules;
	uint32_t piece;    /* granules of each chunk but the last */
	uint64_t bytes;    /* that were asked for */
	uint64_t owner;    /* context or pool, see allocation.c */
	uint32_t slabs;    /* in use */
	uint32_t end;      /* of the last two kinds: chunks are in so many granules at most */
	uint8_t kind;
	bool published;    /* the application knows of it */
	bool dying;
	bool cached;
	bool pinned;        /* shared, or used without a grant: stays once it is there */
	uint64_t serial;   /* another one after each free in it */
};

struct span {
	uint64_t base;
	uint32_t granules;
	uint32_t next_fit;        /* where the search for addresses begins */
	struct nvs_gpu *gpu;
	uint32_t *head;        /* the first granule of its region plus one; 0: free */
	uint32_t *run;         /* at both ends of a free run: its length */
	uint32_t *store;       /* where in the arena, while away */
	struct chunk *chunk;   /* at a chunk's first granule */
	struct region *region; /* at a region's first granule */
	struct nvs_slab *slab;
	uint32_t *memory;      /* of vmm.h, mapped to the granule */
};

struct place { /* of a granule */
	struct span *span;
	uint32_t granule;
};

#define FLIGHTS 3u /* runs that are moved at a time */

enum swap_mode { SWAP_UNKNOWN, SWAP_OFF, SWAP_ON };

/* Of a GPU; what has no other guard is guarded by lock. */
struct nvs_swap {
	pthread_mutex_t lock;
	atomic_uint kick;      /* futex: room, the lease, or a chunk changed */
	atomic_int mode;       /* enum swap_mode */
	bool capable, rdma, posix_fd;
	bool hold;             /* all must be on the GPU, see swap.h */
	bool want;             /* the lease is open, the gate is not yet */
	bool evicting;         /* chunks are on their way out: no call may pass */
	bool mover;            /* its thread runs */
	bool broken;           /* the driver fails: nothing is moved any more */
	bool several_gpus;           /* the process has several GPUs: all stays */
	bool leaving;          /* the process ends, and all is there: it stays */
	uint32_t opens;        /* times that calls may have begun */
	uint32_t backing;      /* allocations that wait for room or get their memory */
	uint64_t claimed;      /* bytes of all regions */
	uint64_t claiming;     /* bytes that are being claimed for one */
	uint64_t pinned;        /* of claimed: of regions that are fixed */
	uint64_t resident;     /* of these, on the GPU or about to be */
	uint64_t away;         /* in the arena or nowhere; both add up to claimed */
	uint64_t coming;       /* of resident: not there yet */
	uint64_t going;        /* of resident: about to leave */
	uint64_t cached;       /* of claimed: in the cache; pools keep more */
	uint64_t retired;      /* bytes of all regions that were ever freed */
	struct place cache[CACHE_MAX];
	uint32_t cache_count;
	uint64_t cached_ns;    /* when one came into the cache last */
	struct nvs_slab_heap heap;
	struct nvs_slab *idle; /* granules for slabs that are not in use */
	uint32_t idle_count, slabs_used;
	uint64_t out_bytes, in_bytes;
	uint64_t last_room;    /* last that the scheduler said */
	bool asked;            /* it said so, and has no answer yet */
	struct arena *arena;   /* arena.c; NULL: none */
	struct nvs_pools *pools; /* pool.h */
	struct {               /* vmm_memory.c; number 0 is none */
		struct memory *memory; /* zeroed; only what is touched takes memory */
		uint32_t used, free;
	} handles;
	/* Guarded by nvs_client_lock. */
	struct nvs_moved told;
	uint64_t told_ns;
	/* The mover's; guarded by nvs_drain_lock of the GPU. */
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

/* To where the next chunk may begin. */
static inline void next_chunk(struct place *p)
{
	p->granule += chunk_of(*p)->granules;
}

static inline struct region *region_of(struct place p)
{
	return &p.span->region[p.granule];
}

/* ---- swap.c ---- */

/* An empty record: nothing is known of the GPU's memory. */
void nvs_swap_reset(struct nvs_gpu *gpu);
void nvs_pools_reset(struct nvs_pools *pools, struct nvs_gpu *gpu);

/* The lock; signal handlers that allocate meanwhile are told to go elsewhere. */
void nvs_swap_lock(struct nvs_swap *s);
void nvs_swap_unlock(struct nvs_swap *s);

/* Something changed that others wait for. */
void nvs_swap_kick(struct nvs_swap *s);

/* Sleeps until then; seen: kick, read before looking. The lock is not held. */
void nvs_swap_wait(struct nvs_swap *s, unsigned seen, uint64_t ns);

/* Bytes that chunks may take on the GPU now. The lock is held. */
uint64_t nvs_swap_capacity(struct nvs_gpu *gpu);

/* Tells the scheduler what is where. No lock is held. */
void nvs_swap_tell(struct nvs_gpu *gpu, uint32_t code);

/* ---- space.c; the GPU's lock is held ---- */

/* Addresses for a region, its chunks empty. span is NULL: the spans have none. */
struct place nvs_region_new(struct nvs_gpu *gpu, uint32_t granules);

/* Reserves addresses for one more span, with so many granules at least. No lock is held. */
bool nvs_span_add(struct nvs_gpu *gpu, uint32_t least);

/* Gives addresses back. Its chunks have been given up. */
void nvs_region_drop(struct place p);

/* Needs no lock: the granule of an address; span is NULL if it is not ours. */
struct place nvs_place_of(uint64_t address);

/*
 * The next chunk of a GPU that is in one of these states (a bit each) and
 * may be moved, from *at on, round once. looked: 0 at first.
 */
bool nvs_chunk_next(struct nvs_gpu *gpu, unsigned states, struct place *at, uint32_t *looked);

/* ---- chunk.c; no lock is held ---- */

/*
 * Physical memory for chunks side by side, and its mapping. Returns CUresult;
 * chunks becomes how many from the first on have it.
 */
int nvs_chunk_map(struct nvs_gpu *gpu, struct place first, uint32_t *chunks);
void nvs_chunk_unmap(struct place first, uint32_t chunks);

/* Lets the process's other GPUs reach what is on this one. */
void nvs_swap_open_to_peers(struct nvs_gpu *gpu);

/* ---- region.c; the GPU's lock is held, and given up meanwhile ---- */

/* As nvs_region_new, and with a new span if need be. */
struct place nvs_region_reserve(struct nvs_gpu *gpu, uint32_t granules);

/*
 * Memory for `granules`, claimed and, if the GPU is held, there. No lock is held;
 * returns with the lock held. span is NULL if it is not to be had.
 */
struct place nvs_region_alloc(struct nvs_gpu *gpu, uint32_t granules);

/* Frees a region, once nobody is moving it. */
void nvs_region_free(struct nvs_gpu *gpu, struct place p);

/* Whether all is on the GPU, and nothing is about to leave. The lock is held. */
static inline bool all_here(const struct nvs_swap *s)
{
	return !s->away && !s->coming && !s->evicting;
}

/* Whether all of a region is on the GPU: only then it is worth keeping. Keeps the lock. */
bool nvs_region_is_here(struct place p);

/* Gives up what lingers in the cache. No lock is held. */
void nvs_cache_trim(struct nvs_gpu *gpu);

/* Whether a region that is marked as dying was put by, for the next allocation. */
bool nvs_region_cache(struct nvs_swap *s, struct place p);

/*
 * Gives freed memory up that is kept for reuse, and that no work uses any more: so
 * many bytes at least, what was freed first first. Returns whether there was any. No
 * lock is held.
 */
bool nvs_swap_flush(struct nvs_gpu *gpu, uint64_t bytes);

/*
 * So many bytes were refused: waits until something changes after `seen`. since:
 * when the driver first refused, ns; 0: there was no room. told: the scheduler knows
 * of it. False: they are not to be had. The lock is held, and given up meanwhile.
 */
bool nvs_swap_refused(struct nvs_gpu *gpu, uint64_t bytes, unsigned seen, uint64_t since, bool told);

/*
 * Gives an empty chunk its memory if the GPU is held. False: it is not to be
 * had. The lock is held, and given up meanwhile.
 */
bool nvs_chunk_populate(struct nvs_gpu *gpu, struct place p);

/* ---- allocation.c ---- */

/* As nvs_swap_alloc; the memory is a pool's. */
int nvs_swap_alloc_pooled(struct nvs_gpu *gpu, struct nvs_pool *pool, size_t bytes, CUdeviceptr *p);

/* Whether an allocation begins there; all of it in *r. The lock is held, as for what follows. */
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

/* ---- arena.c; nvs_swap.lock is held for the first two ---- */

/* Finds places for granules that go away. False: the arena does not have them. */
bool nvs_arena_alloc(struct nvs_gpu *gpu, struct place p, uint32_t granules);
void nvs_arena_free(struct nvs_gpu *gpu, struct place p, uint32_t granules);

/* Copies a chunk, asynchronously on the mover's stream. Returns CUresult. */
int nvs_arena_copy(struct nvs_gpu *gpu, struct place p, uint32_t granules, bool out);

/* Bytes mapped; free ones of them. */
uint64_t nvs_arena_bytes(struct nvs_gpu *gpu, uint64_t *unused);

/* The context is gone, and with it what it had registered. */
void nvs_arena_unregistered(struct nvs_gpu *gpu);
void nvs_arena_fork_child(void);

/* ---- async.c, pool.c ---- */

/* Finds out which frees the streams have passed; pool: of this pool only. No lock is held. */
void nvs_pools_look(struct nvs_gpu *gpu, const struct nvs_pool *pool);

/* Waits until a stream has passed a free. False: there is none to wait for. No lock is held. */
bool nvs_pools_wait(struct nvs_gpu *gpu);

/* The GPU was drained: streams have passed all frees. No lock is held. */
void nvs_pools_drained(struct nvs_gpu *gpu);

/* Releases what pools have beyond their thresholds, if the host has waited for work. No lock is held. */
void nvs_pools_trim(struct nvs_gpu *gpu);

/* A context is gone, or (NULL) the primary one of a GPU. No lock is held. */
void nvs_pools_context_gone(struct nvs_gpu *gpu, const void *ctx);

/* The lock is held for what follows: whether pools cache anything; bytes of it that no stream uses. */
bool nvs_pools_have_cached(struct nvs_gpu *gpu);
uint64_t nvs_pools_cached(struct nvs_gpu *gpu);

/* Releases one block that no stream uses. False: there is none. The lock is given up meanwhile. */
bool nvs_pools_release_one(struct nvs_gpu *gpu);

/* The allocation at p ends, and no work uses it: its block goes to the pool, for all streams. */
void nvs_pools_free(struct nvs_gpu *gpu, struct nvs_pool *pool, CUdeviceptr p);

/* ---- move.c ---- */

/* False: no thread can be made. */
bool nvs_mover_start(struct nvs_gpu *gpu);

/*
 * Makes a context of the GPU current, with nvs_drain_lock held, until it is
 * popped and nvs_driver_leave() called. NULL: there is none.
 */
void *nvs_mover_context(struct nvs_gpu *gpu);

#endif
