// SPDX-License-Identifier: Apache-2.0
/*
 * freelist.h: freed blocks of device memory, by size and by age. Pure, like slab.h:
 * no memory is touched or taken, no lock, no driver.
 *
 * Small blocks are objects of slabs, of one class each; larger ones are whole granules
 * of 2 MiB. A bin holds blocks of one size; above 64 granules, blocks within an eighth
 * of each other.
 */
#ifndef NVSHARE_FREELIST_H
#define NVSHARE_FREELIST_H

#include <stdbool.h>
#include <stdint.h>

#include "slab.h"

#define NVS_FREELIST_BINS (NVS_SLAB_CLASSES + 64 + 8 * 24)

struct nvs_block {
	uint64_t address;
	uint64_t bytes;      /* see nvs_block_bytes */
	uint64_t serial;     /* of its free */
	bool no_reuse;       /* is not found, and leaves the list only when it is removed */
	struct nvs_block *next, *prev;     /* in its bin */
	struct nvs_block *younger, *older; /* in the list */
};

/* A zeroed list is empty. */
struct nvs_freelist {
	struct nvs_block *bin[NVS_FREELIST_BINS];
	uint64_t filled[(NVS_FREELIST_BINS + 63) / 64]; /* a bit for each bin that is not empty */
	struct nvs_block *oldest, *youngest;
	uint64_t bytes;
};

/* The bytes of the block that an allocation of so many bytes takes. */
uint64_t nvs_block_bytes(uint64_t bytes);

void nvs_freelist_add(struct nvs_freelist *l, struct nvs_block *b);
void nvs_freelist_remove(struct nvs_freelist *l, struct nvs_block *b);

/*
 * The youngest block for an allocation of so many bytes: of exactly its size, or with
 * `larger` at most an eighth larger. It stays in the list. NULL: none.
 */
struct nvs_block *nvs_freelist_find(const struct nvs_freelist *l, uint64_t bytes, bool larger);

#endif
