// SPDX-License-Identifier: Apache-2.0
/*
 * account.h: what is counted, and the bytes that it comes to on each GPU. The lock of the account is
 * held where nothing else is said, and never over a call of the driver.
 */
#ifndef NVSHARE_ACCOUNT_H
#define NVSHARE_ACCOUNT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "entries.h"
#include "reserve.h"

/* No allocation is larger, so that sums do not overflow. */
#define NVS_MAX_BYTES (1ull << 60)

/* Keys of different kinds may be equal. */
enum nvs_memory_kind {
	NVS_MEMORY_POINTER = 1,
	NVS_MEMORY_ARRAY,
	NVS_MEMORY_POOL,    /* of the GPU that its allocations are on */
	NVS_MEMORY_SHARED,  /* no bytes: a pool that others may use */
	NVS_MEMORY_GRAPH,   /* no bytes: the GPUs that an executable graph works on */
	NVS_MEMORY_LAUNCH,  /* not counted: what such a graph will take on a GPU (graphs.h) */
	NVS_MEMORY_HANDLE,  /* VMM: refers to physical memory */
	NVS_MEMORY_MAPPING, /* VMM: the same */
};

/* Bytes that an allocation will have, see memory.h. */
struct nvs_claim {
	struct nvs_gpu *gpu; /* NULL: not counted */
	uint64_t bytes;
	uint64_t pool;       /* that they are in; 0: none */
	bool loose;          /* the pool does not know yet */
};

extern struct nvs_entries nvs_account;
extern _Atomic uint64_t nvs_account_stamp; /* of the newest entry */

void nvs_account_lock(void);
void nvs_account_unlock(void);
/* Unlocks, and tells the scheduler about these GPUs if it has to know. gpus: a bit each. */
void nvs_account_settle(unsigned gpus);

struct nvs_entry *nvs_account_find(enum nvs_memory_kind kind, uint64_t key);
/* The key may not be there already. NULL: the system has no memory. */
struct nvs_entry *nvs_account_insert(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, uint64_t owner,
				     struct nvs_gpu *gpu);

void nvs_account_count(struct nvs_gpu *gpu, uint64_t bytes);
void nvs_account_uncount(struct nvs_gpu *gpu, uint64_t bytes);
/* Claimed memory exists: only now it may make a new peak. */
void nvs_account_exists(struct nvs_gpu *gpu);

#endif
