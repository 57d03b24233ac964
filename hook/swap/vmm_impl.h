// SPDX-License-Identifier: Apache-2.0
/* vmm_impl.h: what the files vmm_*.c share. vmm.h says what it is for. */
#ifndef NVSHARE_VMM_IMPL_H
#define NVSHARE_VMM_IMPL_H

#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

/* The number of a place, in handles and in span.memory. */
#define GRANULE_BITS 26
_Static_assert(MAX_SPANS <= 1u << (32 - GRANULE_BITS), "a place has a number of 32 bits");

static inline uint32_t nvs_vmm_number(struct place p)
{
	return (uint32_t)(p.span - nvs_spans) << GRANULE_BITS | p.granule;
}

/* span NULL: there is no such place. */
static inline struct place nvs_vmm_numbered(uint32_t number)
{
	uint32_t i = number >> GRANULE_BITS, granule = number & ((1u << GRANULE_BITS) - 1);

	if (i >= atomic_load(&nvs_spans_used) || granule >= nvs_spans[i].granules)
		return (struct place){ NULL, 0 };
	return (struct place){ &nvs_spans[i], granule };
}

/* The GPU of a handle: the mark, then 16 bits of the serial, the number of the place. For other values any. */
static inline struct nvs_gpu *nvs_vmm_gpu(unsigned long long handle)
{
	struct place p = nvs_vmm_numbered((uint32_t)handle);

	return p.span ? p.span->gpu : nvs_gpus;
}

#define OF_DRIVER UINT32_MAX /* in span.memory: mapped by the driver alone; else the number and one, or 0 */

/* ---- vmm_memory.c; the lock is held, and given up where `may wait` is said ---- */

/* Whether the application has mapped it. It is not the driver's. */
static inline bool nvs_vmm_shown(const struct memory *m)
{
	return chunk_of(m->home)->address != address_of(m->home);
}

/* The memory that is mapped at a granule. NULL: none of the shim. */
struct memory *nvs_vmm_at(struct place p);

/* The memory of a handle, when no thread changes it; may wait. NULL: no such handle. */
struct memory *nvs_vmm_of(struct nvs_swap *s, unsigned long long handle);

/* Whether no thread changes or moves it. */
bool nvs_vmm_idle(const struct memory *m);

/* The memory that is mapped at a granule, when no thread changes it; may wait. */
struct memory *nvs_vmm_idle_at(struct place p);

/* A memory is on the GPU; the calling thread has changed it, others may. */
void nvs_vmm_done(struct nvs_swap *s, struct memory *m);

/* Something is mapped at a place from now on, or no more. what: for span.memory. */
void nvs_vmm_occupy(struct place p, uint32_t what, uint32_t granules);
void nvs_vmm_vacate(struct place p);

/* The last reference to what is the driver's has ended: the place does. */
void nvs_vmm_forget(struct memory *m);

/* Frees a memory that nothing refers to; may wait. */
void nvs_vmm_destroy(struct nvs_gpu *gpu, struct memory *m);

/* ---- vmm_hand_over.c; the same ---- */

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

/* The mapping after that at a place; or the next granule, where none begins: another thread may have mapped anew. */
static inline struct place nvs_vmm_next(struct place p)
{
	p.granule += chunk_of(p)->state == CHUNK_MAPPED ? chunk_of(p)->granules : 1;
	return p;
}

#endif
