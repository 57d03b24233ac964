// SPDX-License-Identifier: Apache-2.0
/*
 * shelf.h: freed places that are kept for the next allocations, by size and by
 * age. Pure, like slab.h: no memory is touched or taken, no lock, no driver.
 *
 * Small places are objects of slabs, of one class each; larger ones whole granules
 * of 2 MiB. A bin holds those of one size, of more than 64 granules those within
 * an eighth of each other.
 */
#ifndef NVSHARE_SHELF_H
#define NVSHARE_SHELF_H

#include <stdbool.h>
#include <stdint.h>

#include "slab.h"

#define NVS_SHELF_BINS (NVS_SLAB_CLASSES + 64 + 8 * 24)

struct nvs_kept {
	uint64_t address;
	uint64_t bytes;      /* of the place, see nvs_place_bytes */
	uint64_t serial;     /* the owner's */
	bool no_reuse;       /* it is only waited for */
	struct nvs_kept *next, *prev;       /* in its bin */
	struct nvs_kept *younger, *older;   /* on its shelf */
};

/* A zeroed one is empty. */
struct nvs_shelf {
	struct nvs_kept *bin[NVS_SHELF_BINS];
	uint64_t filled[(NVS_SHELF_BINS + 63) / 64]; /* a bit for each bin with something in it */
	struct nvs_kept *oldest, *youngest;
	uint64_t bytes;
};

/* What an allocation of so many bytes takes. */
uint64_t nvs_place_bytes(uint64_t bytes);

void nvs_shelf_add(struct nvs_shelf *s, struct nvs_kept *k);
void nvs_shelf_remove(struct nvs_shelf *s, struct nvs_kept *k);

/*
 * A place for an allocation of so many bytes, the last that came: of exactly its
 * size, or else (roomy) at most an eighth larger. Stays on the shelf; NULL: none.
 */
struct nvs_kept *nvs_shelf_find(const struct nvs_shelf *s, uint64_t bytes, bool roomy);

#endif
