// SPDX-License-Identifier: Apache-2.0
/*
 * pool.c: how much freed memory pools cache, when they release it, and what the
 * application is told of it.
 */
#include "pool.h"

#include <sys/mman.h>

#include "stream.h"
#include "swap.h"

#define RECORD_BYTES (256ull << 10) /* of records at a time */

/* The driver's pools have whole blocks of so many bytes (H100), which small allocations share. */
#define BLOCK_BYTES (32ull << 20)

atomic_uint nvs_swap_excess;

/* ---- records; the lock is held ---- */

void *nvs_pool_record(struct nvs_pools *all, size_t bytes)
{
	void *p;

	bytes = (bytes + 15) / 16 * 16;
	if (all->records_left < bytes) {
		p = mmap(NULL, RECORD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (p == MAP_FAILED)
			return NULL;
		all->records = p;
		all->records_left = RECORD_BYTES;
	}
	p = all->records;
	all->records += bytes;
	all->records_left -= bytes;
	return p;
}

struct nvs_pool *nvs_pool_find(struct nvs_pools *all, void *handle)
{
	struct nvs_pool *p = all->first;

	while (p && (p->gone || p->handle != handle))
		p = p->next;
	return p;
}

/* Whether nothing of it is left, so that its record may be used again. */
static bool is_over(const struct nvs_pool *p)
{
	return p->gone && !p->used && !p->cached && !p->queues;
}

struct nvs_pool *nvs_pool_new(struct nvs_pools *all, void *handle, uint64_t threshold)
{
	struct nvs_pool *p = nvs_pool_find(all, handle);

	if (p)
		return p; /* another thread was faster */
	for (p = all->first; p && !is_over(p);)
		p = p->next;
	if (!p) {
		p = nvs_pool_record(all, sizeof(*p));
		if (!p)
			return NULL;
		p->next = all->first;
		all->first = p;
	}
	p->handle = handle;
	p->threshold = threshold;
	p->used_high = p->reserved_high = 0;
	p->gone = false;
	return p;
}

/* ---- account; the lock is held ---- */

/* What the driver would have reserved. */
static uint64_t reserved_by(const struct nvs_pool *p)
{
	return (p->used + p->cached + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

static void note_highs(struct nvs_pool *p)
{
	if (p->used > p->used_high)
		p->used_high = p->used;
	if (reserved_by(p) > p->reserved_high)
		p->reserved_high = reserved_by(p);
}

void nvs_pool_count(struct nvs_pool *p, uint64_t bytes)
{
	p->used += bytes;
	note_highs(p);
}

/* Bytes that stay cached at a synchronisation. */
static uint64_t allowance(struct nvs_gpu *gpu, const struct nvs_pool *p)
{
	uint64_t left = p->threshold > p->used ? p->threshold - p->used : 0;

	if (p->gone || immovable(gpu->swap))
		return 0;
	return left > CACHE_BYTES ? left : CACHE_BYTES;
}

static void note_excess(struct nvs_gpu *gpu, const struct nvs_pool *p)
{
	if (p->cached > allowance(gpu, p) &&
	    !(atomic_load_explicit(&nvs_swap_excess, memory_order_relaxed) & gpu->bit))
		atomic_fetch_or(&nvs_swap_excess, gpu->bit);
}

static void block_unused(struct nvs_pools *all, struct nvs_block *b)
{
	b->next = all->unused_blocks;
	all->unused_blocks = b;
}

struct nvs_block *nvs_pool_cache(struct nvs_pools *all, struct nvs_pool *p, struct nvs_freelist *l,
				 CUdeviceptr address, uint64_t serial)
{
	struct nvs_gpu *gpu = all->gpu;
	struct nvs_swap *s = gpu->swap;
	struct nvs_block none, *b = all->unused_blocks;

	if (b)
		all->unused_blocks = b->next;
	else
		b = nvs_pool_record(all, sizeof(*b));
	if (!b) { /* the system has no memory */
		none.address = address;
		nvs_alloc_cache(&none);
		p->used -= none.bytes;
		return NULL;
	}
	b->address = address;
	b->serial = serial;
	if (!nvs_alloc_cache(b)) {
		p->used -= b->bytes;
		block_unused(all, b);
		return NULL;
	}
	p->used -= b->bytes;
	p->cached += b->bytes;
	nvs_freelist_add(l, b);
	note_highs(p);
	note_excess(gpu, p);
	/* While others have the GPU, nothing is cached that they need. */
	if (!s->hold && s->resident > nvs_swap_capacity(gpu))
		nvs_swap_kick(s);
	return b;
}

void nvs_pool_uncache(struct nvs_pools *all, struct nvs_pool *p, struct nvs_freelist *l, struct nvs_block *b)
{
	nvs_freelist_remove(l, b);
	p->cached -= b->bytes;
	block_unused(all, b);
}

bool nvs_pools_have_cached(struct nvs_gpu *gpu)
{
	for (const struct nvs_pool *p = gpu->swap->pools->first; p; p = p->next)
		if (p->cached)
			return true;
	return false;
}

uint64_t nvs_pools_cached(struct nvs_gpu *gpu)
{
	uint64_t bytes = gpu->swap->pools->releasing;

	for (const struct nvs_pool *p = gpu->swap->pools->first; p; p = p->next)
		bytes += p->free.bytes;
	return bytes;
}

void nvs_pools_free(struct nvs_gpu *gpu, struct nvs_pool *pool, CUdeviceptr p)
{
	if (!nvs_pool_cache(gpu->swap->pools, pool, &pool->free, p, 0))
		nvs_alloc_release(gpu, p);
}

/* ---- release; the lock is held, and given up meanwhile ---- */

static bool release_one(struct nvs_gpu *gpu, struct nvs_pool *p)
{
	struct nvs_pools *all = gpu->swap->pools;
	struct nvs_block *b = p->free.oldest;
	CUdeviceptr address;
	uint64_t bytes;

	if (!b)
		return false;
	address = b->address;
	bytes = b->bytes;
	all->releasing += bytes;
	nvs_pool_uncache(all, p, &p->free, b);
	nvs_alloc_release(gpu, address);
	all->releasing -= bytes;
	return true;
}

bool nvs_pools_release_one(struct nvs_gpu *gpu)
{
	for (struct nvs_pool *p = gpu->swap->pools->first; p; p = p->next)
		if (release_one(gpu, p))
			return true;
	return false;
}

void nvs_pools_trim(struct nvs_gpu *gpu)
{
	struct nvs_pools *all = gpu->swap->pools;
	struct nvs_swap *s = gpu->swap;
	bool excess = false, trim;

	if (!(atomic_load(&nvs_swap_excess) & gpu->bit) || !nvs_driver_enter())
		return;
	nvs_swap_lock(s);
	trim = all->trim;
	all->trim = false;
	for (struct nvs_pool *p = all->first; trim && p; p = p->next) {
		while (p->cached > allowance(gpu, p) && release_one(gpu, p))
			;
		excess = excess || p->cached > allowance(gpu, p);
	}
	if (trim && !excess)
		atomic_fetch_and(&nvs_swap_excess, ~(gpu->bit));
	nvs_swap_unlock(s);
	nvs_driver_leave();
}

void nvs_swap_trim(void)
{
	unsigned excess = atomic_load(&nvs_swap_excess);

	NVS_FOR_EACH_GPU(gpu) {
		if (!(excess & gpu->bit) || !nvs_counting())
			continue;
		nvs_pools_look(gpu, NULL);
		nvs_swap_lock(gpu->swap);
		gpu->swap->pools->trim = true;
		nvs_swap_unlock(gpu->swap);
		nvs_swap_kick(gpu->swap);
	}
}

/* ---- what the application does with its pools ---- */

/* Finds a pool of memory that moves, and locks its GPU's memory. NULL: there is none, nothing is locked. */
static struct nvs_pool *locked_pool(void *handle, struct nvs_gpu **on)
{
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_pool *p;

		if (!gpu->swap->pools->first || !nvs_counting())
			continue;
		nvs_swap_lock(gpu->swap);
		p = nvs_pool_find(gpu->swap->pools, handle);
		*on = gpu;
		if (p)
			return p;
		nvs_swap_unlock(gpu->swap);
	}
	return NULL;
}

void nvs_swap_pool_set(void *handle, int attribute, uint64_t value)
{
	struct nvs_gpu *gpu;
	struct nvs_pool *p = locked_pool(handle, &gpu);

	if (!p)
		return;
	if (attribute == CU_POOL_RELEASE_THRESHOLD) {
		p->threshold = value;
		note_excess(gpu, p);
	} else if (attribute == CU_POOL_RESERVED_HIGH) {
		p->reserved_high = 0;
	} else if (attribute == CU_POOL_USED_HIGH) {
		p->used_high = 0;
	}
	nvs_swap_unlock(gpu->swap);
}

void nvs_swap_pool_tell(void *handle, int attribute, uint64_t *value)
{
	struct nvs_gpu *gpu;
	struct nvs_pool *p = locked_pool(handle, &gpu);

	if (!p)
		return;
	switch (attribute) {
	case CU_POOL_RESERVED_CURRENT:
		*value += reserved_by(p);
		break;
	case CU_POOL_RESERVED_HIGH:
		*value += p->reserved_high;
		break;
	case CU_POOL_USED_CURRENT:
		*value += p->used;
		break;
	default:
		*value += p->used_high;
	}
	nvs_swap_unlock(gpu->swap);
}

void nvs_swap_pool_trim(void *handle, uint64_t keep)
{
	struct nvs_gpu *gpu;
	struct nvs_pool *p = locked_pool(handle, &gpu);

	if (!p)
		return;
	nvs_swap_unlock(gpu->swap);
	nvs_pools_look(gpu, p);
	nvs_swap_lock(gpu->swap);
	while (p->free.oldest && p->used + p->cached - p->free.oldest->bytes >= keep &&
	       release_one(gpu, p))
		;
	nvs_swap_unlock(gpu->swap);
}

void nvs_swap_pool_destroyed(void *handle)
{
	struct nvs_gpu *gpu;
	struct nvs_pool *p = locked_pool(handle, &gpu);

	if (!p)
		return;
	p->gone = true;
	nvs_swap_unlock(gpu->swap);
	nvs_pools_look(gpu, p);
	nvs_swap_lock(gpu->swap);
	while (release_one(gpu, p))
		;
	nvs_pool_end_queues(gpu->swap->pools, p);
	note_excess(gpu, p);
	nvs_swap_unlock(gpu->swap);
}
