// SPDX-License-Identifier: Apache-2.0
/* vmm_impl.h: what vmm_memory.c and vmm_map.c share. vmm.h says what it is for. */
#ifndef NVSHARE_VMM_IMPL_H
#define NVSHARE_VMM_IMPL_H

#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

/*
 * What a cuMemCreate made. Guarded by its gpu's swap lock. It is nowhere (no
 * chunk and no real handle; counted in nvs_swap.claiming), or on the GPU and not
 * mapped (a real handle; counted as the driver's), or one chunk: where the
 * application has mapped it (shown), or hidden from it, if it was unmapped while
 * it was away and something still refers to it.
 */
struct memory {
	unsigned long long real; /* the driver's handle, while it is in no chunk */
	struct place at;         /* its chunk; span NULL: none */
	const void *worker;      /* who changes it without the lock; NULL: nobody */
	uint64_t serial;         /* no other ever had it */
	uint32_t index;
	uint32_t generation;     /* of what has this index; in the handle */
	uint32_t next;           /* in the list of free ones */
	uint32_t granules;
	uint32_t handles;        /* the application's references */
	int handle_types;
	uint8_t access;
	bool rdma;
	bool shown;
	bool pinned;              /* the driver's for good; only the handle is ours */
};

/* A handle: the mark, then the number of the GPU, generation, index. */
#define INDEX_BITS      18
#define GENERATION_BITS 25
#define MAX_MEMORIES    (1u << INDEX_BITS)
_Static_assert(NVS_MAX_GPUS <= 32, "five bits of a handle");

/* Of what is no handle of ours, any: a look into its table tells. */
static inline struct nvs_gpu *nvs_vmm_gpu(unsigned long long handle)
{
	unsigned number = (unsigned)(handle >> (INDEX_BITS + GENERATION_BITS)) & 31;

	return &nvs_gpus[number < nvs_gpu_count ? number : 0];
}

#define OF_DRIVER UINT32_MAX /* in span.memory: mapped by the driver alone */

/* ---- vmm_memory.c; the lock is held, and given up where `may wait` is said ---- */

/* The memory that is mapped, or hidden, at a granule. NULL: none of ours. */
struct memory *nvs_vmm_at(struct place p);

/* The memory of a handle, once nobody changes it; may wait. NULL: not a handle. */
struct memory *nvs_vmm_of(struct nvs_swap *s, unsigned long long handle);

/* Whether nobody changes it, and it does not move. */
bool nvs_vmm_idle(const struct memory *m);

/* Waits for a change after `seen`, of the kick. */
void nvs_vmm_pause(struct nvs_swap *s, unsigned seen);

/* Lets others at a memory again. */
void nvs_vmm_done(struct nvs_swap *s, struct memory *m);

/* Puts a chunk at a place, and takes one from it. what: for span.memory. */
void nvs_vmm_occupy(struct place p, uint32_t what, struct chunk c);
void nvs_vmm_vacate(struct place p);

/* Nothing refers to it any more, and nobody changes it; may wait. */
void nvs_vmm_destroy(struct nvs_gpu *gpu, struct memory *m);

/* Takes a hidden memory that is on the GPU from its hiding place; may wait. */
void nvs_vmm_unhide(struct nvs_gpu *gpu, struct memory *m);

/* The driver's for good, *m->real* or mapped where it is; may wait. Returns CUresult. */
int nvs_vmm_hand_over(struct nvs_gpu *gpu, struct memory *m);

/* Drops its index; it is counted elsewhere or not at all. */
void nvs_vmm_forget(struct nvs_gpu *gpu, struct memory *m);

/* ---- vmm_map.c ---- */

/* The granule of an address that lies where the application has reserved; span NULL: it does not. */
struct place nvs_vmm_place(CUdeviceptr p);

static inline struct chunk *nvs_vmm_chunk(struct place p)
{
	return &p.span->chunk[p.granule];
}

static inline struct region *nvs_vmm_region(struct place p)
{
	return &p.span->region[p.span->head[p.granule] - 1];
}

#endif
