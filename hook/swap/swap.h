// SPDX-License-Identifier: Apache-2.0
/*
 * swap.h: device memory that can leave the GPU and come back to the same address.
 *
 * Where the scheduler swaps (the slot's room is not 0), the application's allocations
 * are made of chunks: physical memory that is mapped at addresses which the shim has
 * reserved. While another client has the GPU, chunks are copied to the arena and their
 * physical memory is released, as far as the room demands (move.c). At the next grant the
 * chunks come back before the gate opens. Elsewhere the driver allocates as always.
 *
 * While all fits that is promised of the GPU (nvs_swap_still), only what is suspended has to leave: memory is had at once, and
 * what a drain that is cut leaves unfinished keeps no memory from leaving, for nobody asks for that
 * before the work is done.
 *
 * A chunk is on the GPU, away in the arena, or empty: never used, and nowhere. While the
 * gate is open, and until the submitted work is done, all chunks are on the GPU
 * (nvs_swap.hold). Memory that is counted and in no chunk is pinned: the driver's own
 * allocations, arrays, pools, what is shared.
 *
 * Locks, outermost first: move lock, nvs_client_lock, a GPU's swap lock,
 * nvs_memory_lock. No driver call is made under a swap lock.
 *
 * A function that returns -1 leaves the call to the driver; other results are CUresults.
 * Stream keys are those of driver.h.
 */
#ifndef NVSHARE_SWAP_H
#define NVSHARE_SWAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "memory_driver.h"
#include "gpu.h"

/* Finds out which GPUs can swap. Called once, after the driver's start. */
void nvs_swap_init(void);

/* Whether any GPU can: said in REGISTER. */
bool nvs_swap_capable(void);

/* Whether allocations on the GPU are to be movable now. The first call waits for the scheduler. */
bool nvs_swap_on(struct nvs_gpu *gpu);

/* The same as far as is known; never waits. */
bool nvs_swap_is_on(struct nvs_gpu *gpu);

/* Whether it is swapped, and all that is promised fits onto the GPU; or not all does. */
bool nvs_swap_still(struct nvs_gpu *gpu);
bool nvs_swap_may_leave(struct nvs_gpu *gpu);

/*
 * Whether managed memory has nothing to do with what is swapped: the driver moves it, and there may be more of
 * it than the GPU has. It counts for a limit alone.
 */
bool nvs_swap_apart(struct nvs_gpu *gpu);

/* Whether the container wants managed memory instead of device memory. */
bool nvs_swap_managed(struct nvs_gpu *gpu);

/* ---- allocations ---- */

/* Allocates for a context. While the GPU is held, this may wait for room. */
int nvs_swap_alloc(struct nvs_gpu *gpu, void *ctx, size_t bytes, CUdeviceptr *p);

/* wait: for the context's work, as the driver's free does. */
int nvs_swap_free(CUdeviceptr p, bool wait);

/* Whether p lies in memory of the shim; *r describes the allocation. base 0: there is none. */
struct nvs_swap_range {
	CUdeviceptr base;
	size_t bytes;
	void *owner;           /* context; NULL for a pool's memory */
	struct nvs_pool *pool; /* pool.h */
	void *pool_handle;     /* of the driver */
	struct nvs_gpu *gpu;
	uint64_t serial;       /* unique to this allocation */
	CUdeviceptr mapped;    /* the mapping that the driver would tell of */
	size_t mapped_bytes;
	CUdeviceptr range;     /* the allocation, or the addresses that the application has reserved */
	size_t range_bytes;
	bool mapping;          /* the application's own, not an allocation */
	bool rdma, ipc;        /* a network card may use it; it can be exported by cuIpcGetMemHandle */
	uint32_t pinned;       /* not 0: stays on the GPU for good; see struct region */
	int access, handle_types;
};
bool nvs_swap_find(CUdeviceptr p, struct nvs_swap_range *r);

/* The GPU whose movable memory an address may lie in; NULL: none. Takes no lock. */
struct nvs_gpu *nvs_swap_gpu_of(CUdeviceptr p);

/*
 * The allocation at p comes to the GPU and stays there for good: others know its
 * physical memory, or use it without a grant. May wait. False: no allocation of the shim.
 */
bool nvs_swap_pin(CUdeviceptr p, struct nvs_swap_range *r);

/* The same for what stream memory operations name, mapped memory included (memop.c). */
void nvs_swap_pin_word(CUdeviceptr p);
void nvs_swap_pin_ops(const struct cu_mem_op *op, uint count);

/* A stream of the process is about to wait for what no drain waits for: nothing looks at memory any more (look.c). */
void nvs_swap_stream_waits(void);

/* cuIpc*. */
int nvs_ipc_export(struct cu_ipc_handle *handle, CUdeviceptr p);
int nvs_ipc_open(CUdeviceptr *p, const struct cu_ipc_handle *handle);
int nvs_ipc_close(CUdeviceptr p);
void *nvs_ipc_context(CUdeviceptr p); /* in which memory at p was opened; NULL: none was */

/* ---- stream-ordered allocations and pools ---- */

/* In a stream, from a pool. The memory belongs to no context. */
int nvs_swap_alloc_async(struct nvs_gpu *gpu, void *pool, void *stream, size_t bytes, CUdeviceptr *p);
int nvs_swap_free_async(CUdeviceptr p, void *stream);

/* The driver has done this to a pool. */
void nvs_swap_pool_set(void *pool, int attribute, uint64_t value);
void nvs_swap_pool_trim(void *pool, uint64_t keep);
void nvs_swap_pool_destroyed(void *pool);

/* Adds the shim's part to what the driver tells of a pool. */
void nvs_swap_pool_tell(void *pool, int attribute, uint64_t *value);

/* The stream is about to be destroyed. */
void nvs_swap_stream_going(void *stream);

/* A bit for each GPU whose pools cache more than they may. */
extern atomic_uint nvs_swap_excess;
void nvs_swap_trim(void);

/* Stream-ordered frees so far. Read before the host waits for work. */
extern _Atomic uint64_t nvs_swap_frees;

/*
 * The host has waited for all work that was submitted before the count of frees was read:
 * of a context; or (ctx NULL) of a stream; or (both NULL) of the current context.
 */
void nvs_swap_host_waited(uint64_t frees, const void *ctx, void *stream);

/* ---- contexts ---- */

/*
 * The process has a context on the GPU. From the second GPU on no memory moves any more:
 * work on one GPU reaches the memory of another, under the grant of one. Waits until
 * memory that is away has come in.
 */
void nvs_swap_context_made(struct nvs_gpu *gpu);

/* A context is gone with its memory; NULL: the primary context of the GPU. */
void nvs_swap_context_gone(const void *ctx, struct nvs_gpu *gpu);

/* ---- when memory is short ---- */

/*
 * The driver refused to allocate: whether to ask again, because the scheduler may make
 * room. tries: 0 at first. Waits 10 ms at most, and gives up after 10 s.
 */
bool nvs_swap_retry(struct nvs_gpu *gpu, unsigned *tries);

/*
 * The limit refused so many bytes: whether to ask again, because cached memory was
 * released. No lock is held.
 */
bool nvs_swap_release_cached(struct nvs_gpu *gpu, uint64_t bytes);

/* Bytes that are cached for reuse: reserved, but part of no allocation. No lock is held. */
uint64_t nvs_swap_cached(struct nvs_gpu *gpu);

/* ---- the end of the process ---- */

/*
 * If all memory is on the GPU, it stays there from now on: later calls need only a grant.
 * True also if no memory can leave it. nvs_client_lock is held.
 */
bool nvs_swap_leave(struct nvs_gpu *gpu);

/*
 * The mover has ended: brings memory in on the calling thread, as far as there is room,
 * and opens the gate once all is there. False: no memory has to come in. No lock is held.
 */
bool nvs_swap_fill_at_exit(struct nvs_gpu *gpu);

/* ---- the client's side; nvs_client_lock is held ---- */

/* After each step of a lease. False: the gate may not open yet. */
bool nvs_swap_lease(struct nvs_gpu *gpu, enum lease_gate gate, bool opens);

/* A call is to pass a closed gate: whether all memory it may touch is there. */
bool nvs_swap_all_here(struct nvs_gpu *gpu);

void nvs_swap_attached(struct nvs_gpu *gpu);
void nvs_swap_room_changed(struct nvs_gpu *gpu);
/* A segment of the arena came. Takes fd. */
void nvs_swap_arena(struct nvs_gpu *gpu, const struct nvs_arena *a, int fd);
void nvs_swap_tick(uint64_t now);
/* Tells the scheduler where memory is. code: enum nvs_moved_flags. */
void nvs_swap_tell_locked(struct nvs_gpu *gpu, uint32_t code);
/* The same if that has changed since it was told. */
void nvs_swap_tell_news(struct nvs_gpu *gpu);

/* ---- after fork ---- */

void nvs_swap_fork_child(void);
void nvs_ipc_fork_child(void);
void nvs_async_fork_child(void);

#endif
