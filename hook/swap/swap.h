// SPDX-License-Identifier: Apache-2.0
/*
 * swap.h: device memory that can leave the GPU and come back to its address.
 *
 * Where the scheduler swaps (a slot's room is not 0), what the application
 * allocates is made of chunks of physical memory that are mapped into addresses
 * of ours. While another client has the GPU, chunks are copied to the arena and
 * their physical memory is given up, as many as room demands (move.c); at
 * the next grant they come back before the gate opens. Everywhere else none of
 * this is used, and an allocation is the driver's.
 *
 * A chunk is on the GPU, in the arena, or was never used and is nowhere yet.
 * While the gate is open, and until what was submitted is done, all are on the
 * GPU (nvs_swap.hold). Bytes that the book counts and that are in no chunk are
 * fixed: the driver's own allocations, arrays, pools, what is shared.
 *
 * Locks, outermost first: nvs_drain_lock, nvs_client_lock, a GPU's swap lock,
 * nvs_memory_lock. No driver call is made under a swap lock.
 */
#ifndef NVSHARE_SWAP_H
#define NVSHARE_SWAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "memory_abi.h"
#include "gpu.h"

/* Looks which GPUs can do it. Called once, after the driver's start. */
void nvs_swap_init(void);

/* Whether any can: said in REGISTER. */
bool nvs_swap_capable(void);

/* Whether allocations of the GPU are to be made movable now. */
bool nvs_swap_on(struct nvs_gpu *gpu);

/* The same, without waiting for what is not known yet. */
bool nvs_swap_is_on(struct nvs_gpu *gpu);

/* Whether the container wants managed memory in place of the driver's usual. */
bool nvs_swap_managed(struct nvs_gpu *gpu);

/*
 * Allocates for a context. CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, or -1: it is
 * the driver's to allocate. While the GPU is held this may wait for room.
 */
int nvs_swap_alloc(struct nvs_gpu *gpu, void *ctx, size_t bytes, CUdeviceptr *p);

/*
 * CUDA_SUCCESS or an error; -1: not ours. wait: for the context's work, as the
 * driver does.
 */
int nvs_swap_free(CUdeviceptr p, bool wait);

/* The allocation that p lies in. False: not ours. base 0: ours, but no allocation. */
struct nvs_swap_range {
	CUdeviceptr base;
	size_t bytes;
	void *owner;          /* context; of a pool's memory NULL */
	struct nvs_pool *pool; /* async.c */
	struct nvs_gpu *gpu;
	uint64_t serial;      /* no allocation at this address had it before */
	CUdeviceptr mapped;   /* what the driver would call the allocation */
	size_t mapped_bytes;
	/* The application's own mapping: nothing that can be freed. */
	bool mapping, rdma;
	bool pinned;           /* it stays on the GPU for good */
	int access, handle_types;
};
bool nvs_swap_find(CUdeviceptr p, struct nvs_swap_range *r);

/* The GPU whose memory that moves an address may lie in; NULL: none. Takes no lock. */
struct nvs_gpu *nvs_swap_gpu_of(CUdeviceptr p);

/*
 * The same in a stream (of cuda_abi.h's keys) and from a pool; its memory is of no
 * context. -1: it is the driver's to do.
 */
int nvs_swap_alloc_async(struct nvs_gpu *gpu, void *pool, void *stream, size_t bytes, CUdeviceptr *p);
int nvs_swap_free_async(CUdeviceptr p, void *stream);

/* The driver did this to a pool, or a stream is about to go. */
void nvs_swap_pool_set(void *pool, int attribute, uint64_t value);
void nvs_swap_pool_trim(void *pool, uint64_t keep);
void nvs_swap_pool_destroyed(void *pool);
void nvs_swap_stream_going(void *stream);

/* Adds to what the driver says of a pool what it has of ours. */
void nvs_swap_pool_tell(void *pool, int attribute, uint64_t *value);

/* A bit for each GPU whose pools cache more than they shall. */
extern atomic_uint nvs_swap_excess;
void nvs_swap_trim(void);

/* Stream-ordered frees so far. Read before the host waits for work. */
extern _Atomic uint64_t nvs_swap_frees;

/*
 * The host has waited for a context, or (ctx NULL) for a stream of cuda_abi.h's keys, or
 * (both NULL) for the current context: for all work that was submitted when there had been
 * so many frees.
 */
void nvs_swap_host_waited(uint64_t frees, const void *ctx, void *stream);

/*
 * The allocation that p lies in comes to the GPU and stays there for good: others
 * get to know where it is, or use it without a grant. False: not ours.
 */
bool nvs_swap_pin(CUdeviceptr p, struct nvs_swap_range *r);

/*
 * The process ends. If all that a GPU has is on the GPU, it stays there from now on,
 * so that calls after this need no more than a grant. The client's lock is held.
 */
bool nvs_swap_leave(struct nvs_gpu *gpu);

/*
 * The process ends, and the mover has ended with it: brings in what can come in now, on
 * the calling thread, and opens the gate once all is there. False: no memory has to
 * come in. No lock is held.
 */
bool nvs_swap_fill_at_exit(struct nvs_gpu *gpu);

/* What stream memory operations name of such memory likewise (memop.c). */
void nvs_swap_pin_word(CUdeviceptr p);
void nvs_swap_pin_ops(const struct cu_mem_op *op, uint count);

/*
 * cuIpc* for memory of ours. CUDA_SUCCESS or an error; -1: it is the driver's to do.
 */
int nvs_ipc_export(struct cu_ipc_handle *handle, CUdeviceptr p);
int nvs_ipc_open(CUdeviceptr *p, const struct cu_ipc_handle *handle);
int nvs_ipc_close(CUdeviceptr p);
void nvs_ipc_fork_child(void);
void nvs_async_fork_child(void);

/*
 * There is a context on a GPU. From the second GPU on nothing moves any more in
 * this process: copies and kernels of one GPU reach into another's memory, under
 * the grant of one. Waits for what is away.
 */
void nvs_swap_context_made(struct nvs_gpu *gpu);

/* A context is gone, or (NULL) a GPU's primary one: so is its memory. */
void nvs_swap_context_gone(const void *ctx, struct nvs_gpu *gpu);

/*
 * The driver refused to allocate on a GPU: whether to ask again, because
 * the scheduler may make room. tries: 0 at first.
 */
bool nvs_swap_retry(struct nvs_gpu *gpu, unsigned *tries);

/*
 * The limit refused to have so many bytes more: whether to ask it again, because
 * freed memory was given up that was kept for reuse. No lock is held.
 */
bool nvs_swap_release_cached(struct nvs_gpu *gpu, uint64_t bytes);

/* Bytes that are reserved and kept although nothing is allocated there. No lock is held. */
uint64_t nvs_swap_cached(struct nvs_gpu *gpu);

/* ---- the client's side; nvs_client_lock is held ---- */

/* After each step of a lease. Returns false: the gate is not to open yet. */
bool nvs_swap_lease(struct nvs_gpu *gpu, enum lease_gate gate, bool opens);

/* A call may pass a closed gate: whether all it may touch is there. */
bool nvs_swap_all_here(struct nvs_gpu *gpu);

void nvs_swap_attached(struct nvs_gpu *gpu);
void nvs_swap_room_changed(struct nvs_gpu *gpu);
/* Takes fd. */
void nvs_swap_arena(struct nvs_gpu *gpu, const struct nvs_arena *a, int fd);
void nvs_swap_tick(uint64_t now);
/* Tells the scheduler what is where. code: enum nvs_moved_flags. */
void nvs_swap_tell_locked(struct nvs_gpu *gpu, uint32_t code);
/* Tells the scheduler what has changed, before it decides for others. */
void nvs_swap_tell_news(struct nvs_gpu *gpu);

void nvs_swap_fork_child(void);

#endif
