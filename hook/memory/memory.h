// SPDX-License-Identifier: Apache-2.0
/*
 * memory.h: the account of the device memory that the process has, for each GPU.
 *
 * Bytes are claimed before the driver allocates, which may ask the scheduler (reserve.h), and then
 * entered or dropped. Bytes that the driver has freed are removed after its call; a stamp from
 * before the call tells an allocation that another thread has entered at the same address meanwhile.
 * So bytes count until they are free, a free that fails changes nothing, and unknown addresses are
 * ignored.
 */
#ifndef NVSHARE_MEMORY_H
#define NVSHARE_MEMORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "graphs.h"
#include "memory_driver.h"
#include "pools.h"

static inline struct nvs_gpu *nvs_gpu_of_location(const struct cu_location *l)
{
	return l->type == CU_MEM_LOCATION_TYPE_DEVICE ? nvs_gpu_of_device(l->id) : NULL;
}

/*
 * Claims bytes for an allocation. False: they exceed the limit, and the driver is not to be called.
 * gpu NULL, or no bytes: nothing is counted.
 */
bool nvs_claim(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t bytes);

/* The same for an allocation from a pool, or 0. What the pool keeps is counted already. */
bool nvs_claim_in_pool(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t pool, uint64_t bytes);

/* The allocation takes more: so many bytes in all. False: they exceed the limit. */
bool nvs_claim_more(struct nvs_claim *c, uint64_t bytes);

/* The memory exists, or is promised: only now it may make a new peak. */
void nvs_claim_exists(const struct nvs_claim *c);

/* The allocation failed; or memory was freed that was claimed and never entered. */
void nvs_claim_drop(const struct nvs_claim *c);

/*
 * Enters the allocation, of so many bytes (in a pool: as claimed). owner: the context it is freed
 * with, or NULL. Returns whether the limit is near.
 */
bool nvs_claim_keep(const struct nvs_claim *c, enum nvs_memory_kind kind, uint64_t key,
		    uint64_t bytes, const void *owner);

/* The stamp of the newest entry. Read before the driver frees something. */
uint64_t nvs_memory_stamp(void);

/* The driver has freed it. Unknown keys, and entries newer than the stamp, are ignored. */
void nvs_memory_remove(enum nvs_memory_kind kind, uint64_t key, uint64_t stamp);

/* Pointers and arrays are freed with their context, or with the primary context of a GPU. */
void nvs_memory_context_gone(const void *ctx, uint64_t stamp);
void nvs_memory_primary_gone(struct nvs_gpu *gpu, uint64_t stamp);

/*
 * Physical memory of the VMM exists as long as a handle or a mapping refers to it. The driver may
 * give out the value of a released handle again while its memory is still mapped.
 */
void nvs_claim_keep_handle(const struct nvs_claim *c, uint64_t handle);
void nvs_memory_handle_imported(uint64_t handle); /* another process counts it */
void nvs_memory_handle_retained(uint64_t handle, uint64_t address);
void nvs_memory_handle_released(uint64_t handle, uint64_t stamp);
/* Refers to a handle's memory until one of the next two is called. 0: unknown. */
uint32_t nvs_memory_hold(uint64_t handle);
void nvs_memory_unhold(uint32_t memory);
void nvs_memory_mapped(uint32_t memory, uint64_t address, uint64_t bytes);
void nvs_memory_unmapped(uint64_t address, uint64_t bytes, uint64_t stamp);

/* Bytes now, and at most ever. Takes no lock. */
void nvs_memory_read(struct nvs_gpu *gpu, uint64_t *now, uint64_t *peak);

/* The host has waited for work: the driver is asked what changed before. */
static inline void nvs_memory_waited(void)
{
	if (__builtin_expect(atomic_load_explicit(&nvs_memory_pools_shrink, memory_order_relaxed), 0))
		nvs_memory_pools_recount();
	if (__builtin_expect(atomic_load_explicit(&nvs_memory_graphs_ran, memory_order_relaxed), 0))
		nvs_memory_graphs_recount();
}

void nvs_memory_fork_child(void);

#endif
