// SPDX-License-Identifier: Apache-2.0
#include "shelf.h"

#include <stddef.h>

#define GRANULE   NVS_SLAB_BYTES
#define EXACT     64u /* granules up to which a bin has one size */
#define MAX_LOOKS 16u /* at places of a bin, and at bins */

uint64_t nvs_place_bytes(uint64_t bytes)
{
	if (bytes <= NVS_SLAB_LARGEST)
		return nvs_slab_size(nvs_slab_class(bytes));
	return (bytes + GRANULE - 1) / GRANULE * GRANULE;
}

/* Of a place. Larger than all that there can be: the last bin. */
static uint32_t bin_of(uint64_t bytes)
{
	uint64_t granules = bytes / GRANULE;
	uint32_t log, bin;

	if (bytes <= NVS_SLAB_LARGEST)
		return nvs_slab_class(bytes);
	if (granules <= EXACT)
		return NVS_SLAB_CLASSES + (uint32_t)granules - 1;
	log = 63 - (uint32_t)__builtin_clzll(granules);
	bin = NVS_SLAB_CLASSES + EXACT + (log - 6) * 8 + (uint32_t)(granules >> (log - 3)) - 8;
	return bin < NVS_SHELF_BINS ? bin : NVS_SHELF_BINS - 1;
}

void nvs_shelf_add(struct nvs_shelf *s, struct nvs_kept *k)
{
	uint32_t b = bin_of(k->bytes);

	k->prev = k->next = NULL;
	if (!k->no_reuse) {
		k->next = s->bin[b];
		if (k->next)
			k->next->prev = k;
		s->bin[b] = k;
		s->filled[b / 64] |= 1ull << b % 64;
	}
	k->younger = NULL;
	k->older = s->youngest;
	if (k->older)
		k->older->younger = k;
	else
		s->oldest = k;
	s->youngest = k;
	s->bytes += k->bytes;
}

void nvs_shelf_remove(struct nvs_shelf *s, struct nvs_kept *k)
{
	uint32_t b = bin_of(k->bytes);

	if (k->next)
		k->next->prev = k->prev;
	if (k->prev)
		k->prev->next = k->next;
	else if (!k->no_reuse)
		s->bin[b] = k->next;
	if (!s->bin[b])
		s->filled[b / 64] &= ~(1ull << b % 64);
	if (k->younger)
		k->younger->older = k->older;
	else
		s->youngest = k->older;
	if (k->older)
		k->older->younger = k->younger;
	else
		s->oldest = k->younger;
	s->bytes -= k->bytes;
}

/* The first bin from b on with something in it; NVS_SHELF_BINS: none. */
static uint32_t next_filled(const struct nvs_shelf *s, uint32_t b)
{
	uint64_t bits;

	if (b >= NVS_SHELF_BINS)
		return NVS_SHELF_BINS;
	bits = s->filled[b / 64] & ~0ull << b % 64;
	for (b /= 64; !bits; bits = s->filled[b])
		if (++b == (NVS_SHELF_BINS + 63) / 64)
			return NVS_SHELF_BINS;
	return b * 64 + (uint32_t)__builtin_ctzll(bits);
}

struct nvs_kept *nvs_shelf_find(const struct nvs_shelf *s, uint64_t bytes, bool roomy)
{
	uint64_t least = nvs_place_bytes(bytes), most = least;
	uint32_t last, looks = 0;

	if (roomy && bytes > NVS_SLAB_LARGEST)
		most = least + least / GRANULE / 8 * GRANULE;
	last = bin_of(most);
	for (uint32_t b = next_filled(s, bin_of(least)); b <= last && looks < MAX_LOOKS;
	     b = next_filled(s, b + 1))
		for (struct nvs_kept *k = s->bin[b]; k && looks < MAX_LOOKS; k = k->next, looks++)
			if (k->bytes >= least && k->bytes <= most)
				return k;
	return NULL;
}
