// SPDX-License-Identifier: Apache-2.0
/*
 * slab_test.c: allocations of slabs and of addresses, and lists of freed
 * ones, against a model, many times. slab_test [COUNT [SEED]]: so many allocations
 * and frees.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "client.h"
#include "swap_impl.h"

/* Of what is not linked here. Nothing calls the driver. */
atomic_uint nvs_suspended;
__thread bool nvs_of_shim __attribute__((tls_model("initial-exec")));
void nvs_suspended_wait(void)
{
}

#define UNIT NVS_SLAB_ALIGN
#define UNITS (NVS_SLAB_BYTES / UNIT)

static uint64_t state;

static uint64_t rnd(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

/* ---- slabs ---- */

enum { SLABS = 192, LIVE = 60000, OWNERS = 2 };

static struct nvs_slab slabs[SLABS];
static uint32_t owner_of[SLABS][UNITS]; /* the model: which object has a unit; 0: none */
static struct { uint64_t p, bytes; } live[LIVE];
static const uint64_t base = 0x7f0000000000;

static struct nvs_slab *slab_at(uint64_t p)
{
	return &slabs[(p - base) / NVS_SLAB_BYTES];
}

static void paint(uint64_t p, uint64_t bytes, uint32_t from, uint32_t to)
{
	uint32_t *u = &owner_of[0][0] + (p - base) / UNIT;

	for (uint64_t i = 0; i < (bytes + UNIT - 1) / UNIT; i++) {
		CHECK(u[i] == from);
		u[i] = to;
	}
}

/* A slab that is not in use becomes one of that class. */
static bool add(struct nvs_slab_heap *h, uint64_t owner, uint32_t class)
{
	for (unsigned i = 0; i < SLABS; i++)
		if (!slabs[i].entry)
			return nvs_slab_add(h, &slabs[i], base + i * NVS_SLAB_BYTES, owner, class);
	return false;
}

static uint64_t a_size(void)
{
	switch (rnd(8)) {
	case 0:
		return 1 + rnd(NVS_SLAB_LARGEST);
	case 1:
		return (1 + rnd(64)) * UNIT;
	default:
		return 1 + rnd(8192);
	}
}

static void free_one(struct nvs_slab_heap *h, unsigned i)
{
	uint64_t p = live[i].p, b, n;
	struct nvs_slab *s = slab_at(p);

	CHECK(nvs_slab_find(s, p + rnd(live[i].bytes), &b, &n) && b == p && n == live[i].bytes);
	CHECK(!nvs_slab_free(h, s, p + 1));
	CHECK(nvs_slab_free(h, s, p));
	CHECK(!nvs_slab_free(h, s, p));
	CHECK(!nvs_slab_find(s, p, &b, &n));
	paint(p, live[i].bytes, i + 1, 0);
	live[i].p = 0;
	if (!s->used)
		nvs_slab_remove(h, s);
}

static void slabs_keep_to_the_model(uint64_t count)
{
	static struct nvs_slab_heap heap;
	uint64_t refused = 0, n = 0;

	for (uint32_t c = 0; c < NVS_SLAB_CLASSES; c++) {
		CHECK(nvs_slab_class(nvs_slab_size(c)) == c);
		CHECK(c == 0 || nvs_slab_class(nvs_slab_size(c - 1) + 1) == c);
	}
	CHECK(nvs_slab_size(NVS_SLAB_CLASSES - 1) == NVS_SLAB_LARGEST);
	for (; count; count--) {
		unsigned i = (unsigned)rnd(LIVE);
		struct nvs_slab *in;
		uint64_t bytes, owner;

		if (live[i].p) {
			free_one(&heap, i);
			n--;
			continue;
		}
		bytes = a_size();
		owner = rnd(OWNERS);
		while (!(live[i].p = nvs_slab_alloc(&heap, owner, bytes, &in)) &&
		       add(&heap, owner, nvs_slab_class(bytes)))
			;
		if (!live[i].p) {
			refused++;
			continue;
		}
		CHECK(slab_at(live[i].p) == in && in->owner == owner && live[i].p % UNIT == 0);
		live[i].bytes = bytes;
		paint(live[i].p, bytes, 0, i + 1);
		n++;
		CHECK(heap.live == n);
	}
	for (unsigned i = 0; i < LIVE; i++)
		if (live[i].p)
			free_one(&heap, i);
	CHECK(heap.live == 0);
	for (unsigned i = 0; i < SLABS; i++)
		CHECK(!slabs[i].entry);
	for (uint32_t c = 0; c < NVS_SLAB_CLASSES; c++)
		CHECK(!heap.partial[c]);
	/* Each class had no more slabs at a time than there are: no leak of metadata. */
	CHECK(heap.metadata <= (uint64_t)NVS_SLAB_CLASSES * SLABS * UNITS * 4);
	printf("slabs: %llu refused because there was no room, %llu KiB of metadata\n",
	       (unsigned long long)refused, (unsigned long long)heap.metadata >> 10);
}

/* ---- what is kept ---- */

enum { KEPT = 2000 };

static struct nvs_block kept[KEPT];
static bool listed[KEPT];

/* Whether a place fits an allocation as it should. */
static bool fits(const struct nvs_block *k, uint64_t bytes, bool larger)
{
	uint64_t least = nvs_block_bytes(bytes);

	return !k->no_reuse && k->bytes >= bytes &&
	       (larger ? k->bytes - least <= least / 8 : k->bytes == least);
}

static uint64_t large_size(void)
{
	return NVS_SLAB_LARGEST + 1 + rnd(1ull << (21 + rnd(18)));
}

static void free_lists_keep_to_the_model(uint64_t count)
{
	static struct nvs_freelist list;
	uint64_t serial = 0, bytes = 0, hits = 0;

	for (; count; count--) {
		unsigned i = (unsigned)rnd(KEPT);
		uint64_t size = rnd(2) ? a_size() : large_size();
		bool larger = rnd(2), there = false;
		struct nvs_block *k;

		if (!listed[i]) {
			kept[i] = (struct nvs_block){ .bytes = nvs_block_bytes(size), .serial = ++serial,
						     .no_reuse = rnd(50) == 0 };
			CHECK(kept[i].bytes >= size);
			nvs_freelist_add(&list, &kept[i]);
			CHECK(list.youngest == &kept[i]);
		} else {
			nvs_freelist_remove(&list, &kept[i]);
		}
		bytes += listed[i] ? -kept[i].bytes : kept[i].bytes;
		listed[i] = !listed[i];
		CHECK(list.bytes == bytes && !list.oldest == !bytes);
		CHECK(!list.oldest || !list.oldest->younger ||
		      list.oldest->serial < list.oldest->younger->serial);
		if (count % 16)
			continue;
		k = nvs_freelist_find(&list, size, larger);
		CHECK(!k || (fits(k, size, larger) && listed[k - kept]));
		hits += k != NULL;
		/* Of what is very large not all are looked at. */
		for (unsigned n = 0; !k && n < KEPT && size <= 64 * NVS_SLAB_BYTES; n++)
			there = there || (listed[n] && fits(&kept[n], size, false));
		CHECK(!there);
	}
	while (list.oldest)
		nvs_freelist_remove(&list, list.oldest);
	CHECK(!list.bytes && !list.youngest);
	for (uint32_t b = 0; b < NVS_FREELIST_BINS; b++)
		CHECK(!list.bin[b] && !(list.filled[b / 64] >> b % 64 & 1));
	printf("free lists: %llu found\n", (unsigned long long)hits);
}

/* ---- addresses ---- */

/* What space.c calls. */
struct nvs_memory_driver_table nvs_memory_driver_functions;
static uint64_t spans;

static int reserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags)
{
	(void)align, (void)at, (void)flags;
	*p = base + spans * (1ull << 40);
	spans++;
	return n < 1ull << 40 ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

static struct nvs_gpu gpu = { .device = { .total_mem = 4096 * GRANULE } };

enum { REGIONS = 3000, MODEL = 16384 };

static uint32_t model[4][MODEL]; /* of each span: which region has a granule */
static struct place regions[REGIONS];

static void mark(struct place p, uint32_t n, uint32_t from, uint32_t to)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t *m = &model[p.span - nvs_spans][p.granule + i];

		CHECK(*m == from);
		*m = to;
	}
}

static void addresses_keep_to_the_model(uint64_t count)
{
	nvs_memory_driver.address_reserve = reserve;
	for (; count; count--) {
		unsigned i = (unsigned)rnd(REGIONS);
		struct place *r = &regions[i], got;
		uint32_t n;

		if (r->span) {
			n = region_of(*r)->granules;
			got = nvs_place_of(address_of(*r) + rnd(bytes_of(n)));
			CHECK(got.span == r->span && got.span->head[got.granule] == r->granule + 1);
			mark(*r, n, i + 1, 0);
			nvs_region_drop(*r);
			r->span = NULL;
			continue;
		}
		n = 1 + (uint32_t)rnd(rnd(8) ? 16 : 200);
		*r = nvs_region_new(&gpu, n);
		if (!r->span) {
			CHECK(nvs_span_add(&gpu, n));
			*r = nvs_region_new(&gpu, n);
		}
		CHECK(r->span && region_of(*r)->granules == n);
		mark(*r, n, 0, i + 1);
	}
	for (unsigned i = 0; i < REGIONS; i++)
		if (regions[i].span)
			nvs_region_drop(regions[i]);
	/* All runs have grown together again. */
	CHECK(atomic_load(&nvs_spans_used) <= 3);
	for (unsigned i = 0; i < atomic_load(&nvs_spans_used); i++)
		CHECK(nvs_spans[i].run[0] == nvs_spans[i].granules &&
		      nvs_spans[i].run[nvs_spans[i].granules - 1] == nvs_spans[i].granules);
	printf("addresses: %u spans of %u granules\n", atomic_load(&nvs_spans_used),
	       nvs_spans[0].granules);
}

int main(int argc, char **argv)
{
	uint64_t count = argc > 1 ? (uint64_t)atoll(argv[1]) : 1000000;

	state = argc > 2 ? (uint64_t)atoll(argv[2]) : 88172645463325252ull;
	slabs_keep_to_the_model(count);
	free_lists_keep_to_the_model(count);
	addresses_keep_to_the_model(count / 10);
	return 0;
}
