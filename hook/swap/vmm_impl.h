// SPDX-License-Identifier: Apache-2.0
/* vmm_impl.h: what the files vmm_*.c share. vmm.h says what it is for. */
#ifndef NVSHARE_VMM_IMPL_H
#define NVSHARE_VMM_IMPL_H

#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

/*
 * What cuMemCreate has made. Guarded by the swap lock of its GPU. Such a memory is
 * - nowhere: no chunk and no handle of the driver; counted in nvs_swap.claiming;
 * - on the GPU and not mapped: a handle of the driver, counted as the driver's;
 * - one chunk where the application has mapped it (shown); or
 * - one chunk at an address that the application does not know (hidden), if the memory
 *   was unmapped while it was away and a handle still refers to it.
 */
struct memory {
	unsigned long long real; /* the driver's handle, while it is in no chunk */
	struct place at;         /* its chunk; span NULL: none */
	const void *worker;      /* of a thread that changes it without the lock; NULL: none */
	uint64_t serial;         /* unique */
	uint32_t index;
	uint32_t generation;     /* in the handle; grows when the index is used again */
	uint32_t next;           /* in the list of free ones */
	uint32_t granules;
	uint32_t handles;        /* the application's references */
	int handle_types;
	uint8_t access;
	bool rdma;
	bool shown;
	bool pinned;             /* the driver's for good; only the handle is the shim's */
};

/* A handle: the mark, then the number of the GPU, generation, index. */
#define INDEX_BITS      18
#define GENERATION_BITS 25
#define MAX_MEMORIES    (1u << INDEX_BITS)
_Static_assert(NVS_MAX_GPUS <= 32, "five bits of a handle");

/* Of a handle. For other values any GPU: its table does not have them. */
static inline struct nvs_gpu *nvs_vmm_gpu(unsigned long long handle)
{
	unsigned number = (unsigned)(handle >> (INDEX_BITS + GENERATION_BITS)) & 31;

	return &nvs_gpus[number < nvs_gpu_count ? number : 0];
}

#define OF_DRIVER UINT32_MAX /* in span.memory: mapped by the driver alone */

/* ---- vmm_memory.c; the lock is held, and given up where `may wait` is said ---- */

/* The memory that is mapped or hidden at a granule. NULL: none of the shim. */
struct memory *nvs_vmm_at(struct place p);

/* The memory of a handle, when no thread changes it; may wait. NULL: no such handle. */
struct memory *nvs_vmm_of(struct nvs_swap *s, unsigned long long handle);

/* Whether no thread changes or moves it. */
bool nvs_vmm_idle(const struct memory *m);

/* Waits for a kick after `seen`, 50 ms at most. */
void nvs_vmm_pause(struct nvs_swap *s, unsigned seen);

/* The calling thread has changed the memory; others may. */
void nvs_vmm_done(struct nvs_swap *s, struct memory *m);

/* Puts a chunk at a place, or removes the chunk there. what: for span.memory. */
void nvs_vmm_occupy(struct place p, uint32_t what, struct chunk c);
void nvs_vmm_vacate(struct place p);

/* Frees the index. The memory is counted elsewhere, or not at all. */
void nvs_vmm_forget(struct nvs_gpu *gpu, struct memory *m);

/* Frees a memory that nothing refers to; may wait. */
void nvs_vmm_destroy(struct nvs_gpu *gpu, struct memory *m);

/* ---- vmm_hand_over.c; the same ---- */

/* Unmaps a hidden memory that is on the GPU; may wait. */
void nvs_vmm_unhide(struct nvs_gpu *gpu, struct memory *m);

/*
 * Makes a memory the driver's for good; may wait, up to 10 s of that with signals blocked.
 * Returns CUresult. The handle is to be looked up again if it is not CUDA_SUCCESS.
 */
int nvs_vmm_hand_over(struct nvs_gpu *gpu, struct memory *m);

/* ---- vmm_map.c ---- */

/* The granule of an address in a range that the application has reserved; span NULL: it is in none. */
struct place nvs_vmm_place(CUdeviceptr p);

/* Whether a range that begins at a place, and at p, consists of whole mappings. The lock is held. */
bool nvs_vmm_whole(struct place at, CUdeviceptr p, size_t n);

static inline struct chunk *nvs_vmm_chunk(struct place p)
{
	return &p.span->chunk[p.granule];
}

static inline struct region *nvs_vmm_region(struct place p)
{
	return &p.span->region[p.span->head[p.granule] - 1];
}

/* The chunk after that at a place; or the next granule, where none begins: another thread may have mapped anew. */
static inline struct place nvs_vmm_next(struct place p)
{
	const struct chunk *c = nvs_vmm_chunk(p);

	p.granule += c->state == CHUNK_NONE || !c->granules ? 1 : c->granules;
	return p;
}

#endif
