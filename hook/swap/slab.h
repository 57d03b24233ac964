// SPDX-License-Identifier: Apache-2.0
/*
 * slab.h: small device allocations inside slabs of 2 MiB. Pure: device memory
 * is never touched, no driver is called, no lock is taken; the caller has one.
 *
 * A slab holds objects of one size class and of one owner. Classes are multiples
 * of 512 bytes, the driver's own alignment, four to a doubling, so that at most
 * a fifth of an object is lost.
 */
#ifndef NVSHARE_SLAB_H
#define NVSHARE_SLAB_H

#include <stdbool.h>
#include <stdint.h>

#define NVS_SLAB_BYTES   (2ull << 20)
#define NVS_SLAB_ALIGN   512u
#define NVS_SLAB_LARGEST (1u << 20) /* larger allocations are regions of their own */
#define NVS_SLAB_CLASSES 40

struct nvs_slab {
	uint64_t base;          /* device address */
	uint64_t owner;
	uint32_t *entry;        /* per object: its size, or FREE | the next free one */
	uint32_t objects, used;
	uint32_t first;         /* number of a free object; `objects`: there is none */
	uint32_t class;
	struct nvs_slab *next, *prev; /* slabs of the same class with a free object */
};

/* The slabs of a GPU. A zeroed heap is empty. */
struct nvs_slab_heap {
	struct nvs_slab *partial[NVS_SLAB_CLASSES];
	uint32_t *spare[NVS_SLAB_CLASSES];  /* a list of unused entries */
	uint64_t live;                      /* objects */
	uint64_t metadata;                  /* bytes taken from the system, ever */
	char *block;                        /* where the next metadata comes from */
	uint64_t block_left;
};

/* The class of a size from 1 to NVS_SLAB_LARGEST, and the size of its objects. */
uint32_t nvs_slab_class(uint64_t bytes);
uint32_t nvs_slab_size(uint32_t class);

/* The device address of a new object; 0: no slab of that class has a free one. */
uint64_t nvs_slab_alloc(struct nvs_slab_heap *h, uint64_t owner, uint64_t bytes,
			struct nvs_slab **in);

/* Makes the unused s a slab at base. False: the system has no memory for metadata. */
bool nvs_slab_add(struct nvs_slab_heap *h, struct nvs_slab *s, uint64_t base, uint64_t owner,
		  uint32_t class);

/* The base and size of the object that an address lies in. False: the object is free. */
bool nvs_slab_find(const struct nvs_slab *s, uint64_t address, uint64_t *base, uint64_t *bytes);

/* False: no object begins there. */
bool nvs_slab_free(struct nvs_slab_heap *h, struct nvs_slab *s, uint64_t address);

/*
 * The object that begins at address is neither free nor found, until it is shown
 * again: as one of so many bytes, of the same class.
 */
void nvs_slab_hide(struct nvs_slab *s, uint64_t address);
void nvs_slab_show(struct nvs_slab *s, uint64_t address, uint64_t bytes);

/* Removes a slab with all its objects. */
void nvs_slab_remove(struct nvs_slab_heap *h, struct nvs_slab *s);

#endif
