// SPDX-License-Identifier: Apache-2.0
#include "freelist.h"

#include <stddef.h>

#define GRANULE   NVS_SLAB_BYTES
#define EXACT     64u /* granules up to which a bin has one size */
#define MAX_LOOKS 16u /* at blocks of a bin, and at bins */

uint64_t nvs_block_bytes(uint64_t bytes)
{
	if (bytes <= NVS_SLAB_LARGEST)
		return nvs_slab_size(nvs_slab_class(bytes));
	return (bytes + GRANULE - 1) / GRANULE * GRANULE;
}

/* Of a block. What is larger than all blocks there can be is in the last bin. */
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
	return bin < NVS_FREELIST_BINS ? bin : NVS_FREELIST_BINS - 1;
}

void nvs_freelist_add(struct nvs_freelist *l, struct nvs_block *b)
{
	uint32_t i = bin_of(b->bytes);

	b->prev = b->next = NULL;
	if (!b->no_reuse) {
		b->next = l->bin[i];
		if (b->next)
			b->next->prev = b;
		l->bin[i] = b;
		l->filled[i / 64] |= 1ull << i % 64;
	}
	b->younger = NULL;
	b->older = l->youngest;
	if (b->older)
		b->older->younger = b;
	else
		l->oldest = b;
	l->youngest = b;
	l->bytes += b->bytes;
}

void nvs_freelist_remove(struct nvs_freelist *l, struct nvs_block *b)
{
	uint32_t i = bin_of(b->bytes);

	if (b->next)
		b->next->prev = b->prev;
	if (b->prev)
		b->prev->next = b->next;
	else if (!b->no_reuse)
		l->bin[i] = b->next;
	if (!l->bin[i])
		l->filled[i / 64] &= ~(1ull << i % 64);
	if (b->younger)
		b->younger->older = b->older;
	else
		l->youngest = b->older;
	if (b->older)
		b->older->younger = b->younger;
	else
		l->oldest = b->younger;
	l->bytes -= b->bytes;
}

/* The first bin from b on that is not empty; NVS_FREELIST_BINS: none. */
static uint32_t next_filled(const struct nvs_freelist *l, uint32_t b)
{
	uint64_t bits;

	if (b >= NVS_FREELIST_BINS)
		return NVS_FREELIST_BINS;
	bits = l->filled[b / 64] & ~0ull << b % 64;
	for (b /= 64; !bits; bits = l->filled[b])
		if (++b == (NVS_FREELIST_BINS + 63) / 64)
			return NVS_FREELIST_BINS;
	return b * 64 + (uint32_t)__builtin_ctzll(bits);
}

struct nvs_block *nvs_freelist_find(const struct nvs_freelist *l, uint64_t bytes, bool larger)
{
	uint64_t least = nvs_block_bytes(bytes), most = least;
	uint32_t last, looks = 0;

	if (larger && bytes > NVS_SLAB_LARGEST)
		most = least + least / GRANULE / 8 * GRANULE;
	last = bin_of(most);
	for (uint32_t b = next_filled(l, bin_of(least)); b <= last && looks < MAX_LOOKS;
	     b = next_filled(l, b + 1))
		for (struct nvs_block *k = l->bin[b]; k && looks < MAX_LOOKS; k = k->next, looks++)
			if (k->bytes >= least && k->bytes <= most)
				return k;
	return NULL;
}
