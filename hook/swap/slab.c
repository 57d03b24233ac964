// SPDX-License-Identifier: Apache-2.0
#include "slab.h"

#include <stddef.h>
#include <sys/mman.h>

#define FREE        0x80000000u
#define HIDDEN      0x40000000u
#define BLOCK_BYTES (256ull << 10) /* of metadata at a time */

/* Classes 0 to 3 are 512 to 2048, then four to each doubling up to 1 MiB. */
uint32_t nvs_slab_class(uint64_t bytes)
{
	uint32_t units = (uint32_t)((bytes + NVS_SLAB_ALIGN - 1) / NVS_SLAB_ALIGN), shift = 0;

	if (units <= 4)
		return units ? units - 1 : 0;
	units--;
	while (units >> shift >= 8)
		shift++;
	return 4 * (shift + 1) + (units >> shift) - 4;
}

uint32_t nvs_slab_size(uint32_t class)
{
	if (class < 4)
		return (class + 1) * NVS_SLAB_ALIGN;
	return (class % 4 + 5) << (class / 4 - 1) << 9;
}

/* ---- metadata: slabs of the same class use it again ---- */

static uint32_t *entries_new(struct nvs_slab_heap *h, uint32_t class)
{
	uint64_t bytes = (NVS_SLAB_BYTES / nvs_slab_size(class)) * sizeof(uint32_t);
	uint32_t *e = h->spare[class];

	bytes = bytes < sizeof(void *) ? sizeof(void *) : (bytes + 7) / 8 * 8;
	if (e) {
		h->spare[class] = *(uint32_t **)(void *)e;
		return e;
	}
	if (h->block_left < bytes) {
		void *p = mmap(NULL, BLOCK_BYTES, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED)
			return NULL;
		h->block = p;
		h->block_left = BLOCK_BYTES;
		h->metadata += BLOCK_BYTES;
	}
	e = (uint32_t *)(void *)h->block;
	h->block += bytes;
	h->block_left -= bytes;
	return e;
}

static void entries_drop(struct nvs_slab_heap *h, uint32_t class, uint32_t *e)
{
	*(uint32_t **)(void *)e = h->spare[class];
	h->spare[class] = e;
}

/* ---- the list of slabs with free objects ---- */

static void link_slab(struct nvs_slab_heap *h, struct nvs_slab *s)
{
	s->prev = NULL;
	s->next = h->partial[s->class];
	if (s->next)
		s->next->prev = s;
	h->partial[s->class] = s;
}

static void unlink_slab(struct nvs_slab_heap *h, struct nvs_slab *s)
{
	if (s->next)
		s->next->prev = s->prev;
	if (s->prev)
		s->prev->next = s->next;
	else
		h->partial[s->class] = s->next;
}

/* ---- slabs and objects ---- */

bool nvs_slab_add(struct nvs_slab_heap *h, struct nvs_slab *s, uint64_t base, uint64_t owner,
		  uint32_t class)
{
	*s = (struct nvs_slab){ .base = base, .owner = owner, .class = class };
	s->entry = entries_new(h, class);
	if (!s->entry)
		return false;
	s->objects = (uint32_t)(NVS_SLAB_BYTES / nvs_slab_size(class));
	for (uint32_t i = 0; i < s->objects; i++)
		s->entry[i] = FREE | (i + 1);
	link_slab(h, s);
	return true;
}

void nvs_slab_remove(struct nvs_slab_heap *h, struct nvs_slab *s)
{
	h->live -= s->used;
	if (s->used < s->objects)
		unlink_slab(h, s);
	entries_drop(h, s->class, s->entry);
	s->entry = NULL;
}

uint64_t nvs_slab_alloc(struct nvs_slab_heap *h, uint64_t owner, uint64_t bytes,
			struct nvs_slab **in)
{
	uint32_t class = nvs_slab_class(bytes), i;
	struct nvs_slab *s = h->partial[class];

	while (s && s->owner != owner)
		s = s->next;
	if (!s)
		return 0;
	i = s->first;
	s->first = s->entry[i] & ~FREE;
	s->entry[i] = (uint32_t)bytes;
	if (++s->used == s->objects)
		unlink_slab(h, s);
	h->live++;
	*in = s;
	return s->base + (uint64_t)i * nvs_slab_size(class);
}

bool nvs_slab_find(const struct nvs_slab *s, uint64_t address, uint64_t *base, uint64_t *bytes)
{
	uint32_t size = nvs_slab_size(s->class);
	uint64_t i = (address - s->base) / size;

	if (address < s->base || i >= s->objects || s->entry[i] & (FREE | HIDDEN) ||
	    address - s->base - i * size >= s->entry[i])
		return false;
	*base = s->base + i * size;
	*bytes = s->entry[i];
	return true;
}

bool nvs_slab_free(struct nvs_slab_heap *h, struct nvs_slab *s, uint64_t address)
{
	uint32_t size = nvs_slab_size(s->class);
	uint64_t i = (address - s->base) / size;

	if (address < s->base || i >= s->objects || (address - s->base) % size ||
	    s->entry[i] & (FREE | HIDDEN))
		return false;
	s->entry[i] = FREE | s->first;
	s->first = (uint32_t)i;
	if (s->used-- == s->objects)
		link_slab(h, s);
	h->live--;
	return true;
}

void nvs_slab_hide(struct nvs_slab *s, uint64_t address)
{
	s->entry[(address - s->base) / nvs_slab_size(s->class)] |= HIDDEN;
}

void nvs_slab_show(struct nvs_slab *s, uint64_t address, uint64_t bytes)
{
	s->entry[(address - s->base) / nvs_slab_size(s->class)] = (uint32_t)bytes;
}
