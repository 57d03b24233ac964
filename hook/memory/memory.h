// SPDX-License-Identifier: Apache-2.0
/*
 * memory.h: the book of the device memory that the process has, per GPU.
 *
 * An allocation is claimed before the driver is called, which may ask the
 * scheduler (reserve.h), and then entered or given up. What the driver freed is
 * struck out afterwards, if it was in the book before the call: a stamp tells
 * what another thread has entered for the same address meanwhile. So bytes
 * count until they are really free, a free that fails changes nothing, and what
 * the book does not know is ignored.
 */
#ifndef NVSHARE_MEMORY_H
#define NVSHARE_MEMORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory_abi.h"
#include "reserve.h"

static inline struct nvs_gpu *nvs_gpu_of_location(const struct cu_location *l)
{
	return l->type == CU_MEM_LOCATION_TYPE_DEVICE ? nvs_gpu_of_device(l->id) : NULL;
}

/* Address spaces of keys. */
enum nvs_memory_kind {
	NVS_MEMORY_POINTER = 1,
	NVS_MEMORY_ARRAY,
	NVS_MEMORY_POOL,    /* no bytes: where what is allocated from it lies */
	NVS_MEMORY_SHARED,  /* pools that are, no bytes */
	NVS_MEMORY_HANDLE,  /* VMM: refers to physical memory */
	NVS_MEMORY_MAPPING, /* VMM: likewise */
};

struct nvs_claim {
	struct nvs_gpu *gpu; /* NULL: not counted */
	uint64_t bytes;
};

/*
 * Room for an allocation. False: the container's limit does not have it, the
 * driver is not to be called. gpu NULL: always, and nothing is counted.
 */
bool nvs_claim(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t bytes);

/* It takes more, so many bytes in all. False: the limit does not have them. */
bool nvs_claim_more(struct nvs_claim *c, uint64_t bytes);

/* What was claimed exists, or is promised to: only now it counts as the most there was. */
void nvs_claim_exists(const struct nvs_claim *c);

/* The allocation failed, or (if it is not in the book) was freed. */
void nvs_claim_drop(const struct nvs_claim *c);

/* It succeeded, with so many bytes; owner: the context it goes with, or NULL. */
void nvs_claim_keep(const struct nvs_claim *c, enum nvs_memory_kind kind, uint64_t key,
		    uint64_t bytes, const void *owner);

/* Stamp of what is in the book now; read before the driver frees something. */
uint64_t nvs_memory_stamp(void);

/* The driver freed it. Unknown keys, and those entered after stamp, are ignored. */
void nvs_memory_remove(enum nvs_memory_kind kind, uint64_t key, uint64_t stamp);

/* Pointers and arrays of a context went with it, or with a GPU's primary one. */
void nvs_memory_context_gone(const void *ctx, uint64_t stamp);
void nvs_memory_primary_gone(struct nvs_gpu *gpu, uint64_t stamp);

/* A pool lies on a GPU (-1: in host memory, or another process charges it). */
void nvs_memory_pool(uint64_t pool, struct nvs_gpu *gpu);

/* Others than this process's GPU may use what is in it: its memory is the driver's. */
void nvs_memory_pool_share(uint64_t pool);
bool nvs_memory_pool_shared(uint64_t pool);

/* Whether the pool is known; *gpu as above. */
bool nvs_memory_pool_find(uint64_t pool, struct nvs_gpu **gpu);

/*
 * Physical memory of the VMM lives as long as a handle or a mapping refers to
 * it. Handle values are the driver's and may come again while an older one's
 * memory is still mapped.
 */
void nvs_claim_keep_handle(const struct nvs_claim *c, uint64_t handle);
void nvs_memory_handle_imported(uint64_t handle); /* another process charges it */
void nvs_memory_handle_retained(uint64_t handle, uint64_t address);
void nvs_memory_handle_released(uint64_t handle, uint64_t stamp);
/* Holds a handle's memory (0: unknown) until one of the two that follow. */
uint32_t nvs_memory_hold(uint64_t handle);
void nvs_memory_unhold(uint32_t memory);
void nvs_memory_mapped(uint32_t memory, uint64_t address, uint64_t bytes);
void nvs_memory_unmapped(uint64_t address, uint64_t bytes, uint64_t stamp);

/* Bytes allocated now, and the most there ever were. Takes no lock. */
void nvs_memory_read(struct nvs_gpu *gpu, uint64_t *now, uint64_t *peak);

/* ---- memory that graphs own: the driver says how much it is ---- */

/* The process has put an allocation into a graph of this gpu. */
void nvs_memory_graph_used(struct nvs_gpu *gpu);

extern atomic_bool nvs_memory_graphs; /* it has, on any */
void nvs_memory_graph_look(void);

/* Called after whatever may change the memory of graphs. */
static inline void nvs_memory_graph_ran(void)
{
	if (__builtin_expect(atomic_load_explicit(&nvs_memory_graphs, memory_order_relaxed), 0))
		nvs_memory_graph_look();
}

void nvs_memory_fork_child(void);

#endif
