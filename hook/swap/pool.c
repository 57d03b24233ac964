// SPDX-License-Identifier: Apache-2.0
/*
 * swap_pool.c: how much memory pools keep, when they give it up, and what is told
 * of it.
 */
#include "drain.h"
#include "stream.h"
#include "swap_pool.h"

#include <sys/mman.h>

#include "stream.h"

#define BLOCK_BYTES (256ull << 10) /* of records at a time */

atomic_uint nvs_swap_excess;

/* ---- records; the lock is held ---- */

void *nvs_store_memory(struct nvs_store *st, size_t bytes)
{
	void *p;

	bytes = (bytes + 15) / 16 * 16;
	if (st->block_left < bytes) {
		p = mmap(NULL, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (p == MAP_FAILED)
			return NULL;
		st->block = p;
		st->block_left = BLOCK_BYTES;
	}
	p = st->block;
	st->block += bytes;
	st->block_left -= bytes;
	return p;
}

struct nvs_pool *nvs_pool_find(struct nvs_store *st, void *handle)
{
	struct nvs_pool *p = st->pools;

	while (p && (p->gone || p->handle != handle))
		p = p->next;
	return p;
}

/* Nothing of it is left anywhere. */
static bool is_over(const struct nvs_pool *p)
{
	return p->gone && !p->used && !p->kept && !p->lines;
}

struct nvs_pool *nvs_pool_new(struct nvs_store *st, void *handle, uint64_t threshold)
{
	struct nvs_pool *p = nvs_pool_find(st, handle);

	if (p)
		return p; /* another thread was faster */
	for (p = st->pools; p && !is_over(p);)
		p = p->next;
	if (!p) {
		p = nvs_store_memory(st, sizeof(*p));
		if (!p)
			return NULL;
		p->next = st->pools;
		st->pools = p;
	}
	p->handle = handle;
	p->threshold = threshold;
	p->used_high = p->reserved_high = 0;
	p->gone = false;
	return p;
}

/* ---- what there is; the lock is held ---- */

static void note_highs(struct nvs_pool *p)
{
	if (p->used > p->used_high)
		p->used_high = p->used;
	if (p->used + p->kept > p->reserved_high)
		p->reserved_high = p->used + p->kept;
}

void nvs_pool_takes(struct nvs_pool *p, uint64_t bytes)
{
	p->used += bytes;
	note_highs(p);
}

/* Bytes that may be kept at a synchronisation. */
static uint64_t allowance(struct nvs_gpu *gpu, const struct nvs_pool *p)
{
	uint64_t left = p->threshold > p->used ? p->threshold - p->used : 0;

	if (p->gone || gpu->swap->spread)
		return 0;
	return left > CACHE_BYTES ? left : CACHE_BYTES;
}

static void note_excess(struct nvs_gpu *gpu, const struct nvs_pool *p)
{
	if (p->kept > allowance(gpu, p) &&
	    !(atomic_load_explicit(&nvs_swap_excess, memory_order_relaxed) & gpu->bit))
		atomic_fetch_or(&nvs_swap_excess, gpu->bit);
}

struct nvs_kept *nvs_pool_keep(struct nvs_store *st, struct nvs_pool *p, struct nvs_shelf *s,
			       CUdeviceptr address, uint64_t serial)
{
	struct nvs_gpu *gpu = st->gpu;
	struct nvs_kept spare, *k = st->free_kept;
	bool kept;

	if (k)
		st->free_kept = k->next;
	else
		k = nvs_store_memory(st, sizeof(*k));
	spare.address = address;
	if (k)
		k->address = address;
	kept = nvs_swap_lay_by(k ? k : &spare);
	p->used -= k ? k->bytes : spare.bytes;
	if (!kept || !k) {
		if (k) {
			k->next = st->free_kept;
			st->free_kept = k;
		}
		return NULL;
	}
	k->serial = serial;
	nvs_shelf_add(s, k);
	p->kept += k->bytes;
	note_highs(p);
	note_excess(gpu, p);
	/* While others have the GPU nothing may be kept from them. */
	if (!gpu->swap->hold && gpu->swap->resident > nvs_swap_room(gpu))
		nvs_swap_kick(gpu->swap);
	return k;
}

void nvs_pool_unkept(struct nvs_store *st, struct nvs_pool *p, struct nvs_shelf *s, struct nvs_kept *k)
{
	nvs_shelf_remove(s, k);
	p->kept -= k->bytes;
	k->next = st->free_kept;
	st->free_kept = k;
}

bool nvs_pools_keep(struct nvs_gpu *gpu)
{
	for (const struct nvs_pool *p = gpu->swap->store->pools; p; p = p->next)
		if (p->kept)
			return true;
	return false;
}

uint64_t nvs_pools_idle(struct nvs_gpu *gpu)
{
	uint64_t bytes = gpu->swap->store->giving;

	for (const struct nvs_pool *p = gpu->swap->store->pools; p; p = p->next)
		bytes += p->shelf.bytes;
	return bytes;
}

void nvs_pools_take_back(struct nvs_gpu *gpu, struct nvs_pool *pool, CUdeviceptr p)
{
	if (!nvs_pool_keep(gpu->swap->store, pool, &pool->shelf, p, 0))
		nvs_swap_give_up(gpu, p);
}

/* ---- giving up; the lock is held, and given up meanwhile ---- */

static bool give_up_one(struct nvs_gpu *gpu, struct nvs_pool *p)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_kept *k = p->shelf.oldest;
	CUdeviceptr address;
	uint64_t bytes;

	if (!k)
		return false;
	address = k->address;
	bytes = k->bytes;
	st->giving += bytes;
	nvs_pool_unkept(st, p, &p->shelf, k);
	nvs_swap_give_up(gpu, address);
	st->giving -= bytes;
	return true;
}

bool nvs_pools_give_up_one(struct nvs_gpu *gpu)
{
	for (struct nvs_pool *p = gpu->swap->store->pools; p; p = p->next)
		if (give_up_one(gpu, p))
			return true;
	return false;
}

void nvs_pools_tidy(struct nvs_gpu *gpu)
{
	struct nvs_store *st = gpu->swap->store;
	struct nvs_swap *s = gpu->swap;
	bool excess = false, trim;

	if (!(atomic_load(&nvs_swap_excess) & gpu->bit) || !nvs_driver_enter())
		return;
	nvs_swap_lock(s);
	trim = st->trim;
	st->trim = false;
	for (struct nvs_pool *p = st->pools; trim && p; p = p->next) {
		while (p->kept > allowance(gpu, p) && give_up_one(gpu, p))
			;
		excess = excess || p->kept > allowance(gpu, p);
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
		struct nvs_swap *s = gpu->swap;

		if (!(excess & gpu->bit) || !nvs_counting())
			continue;
		nvs_pools_reap(gpu, NULL); /* here, because a default stream is the caller's own */
		nvs_swap_lock(s);
		s->store->trim = true;
		nvs_swap_unlock(s);
		nvs_swap_kick(s);
	}
}

/* ---- what the application does with its pools ---- */

/* Locks the GPU that a pool has memory of ours on. NULL: none, nothing is locked. */
static struct nvs_pool *locked_pool(void *handle, struct nvs_gpu **on)
{
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_pool *p;

		if (!gpu->swap->store->pools || !nvs_counting())
			continue;
		nvs_swap_lock(gpu->swap);
		p = nvs_pool_find(gpu->swap->store, handle);
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
		*value += p->used + p->kept;
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
	nvs_pools_reap(gpu, p);
	nvs_swap_lock(gpu->swap);
	while (p->shelf.oldest && p->used + p->kept - p->shelf.oldest->bytes >= keep &&
	       give_up_one(gpu, p))
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
	nvs_pools_reap(gpu, p);
	nvs_swap_lock(gpu->swap);
	while (give_up_one(gpu, p))
		;
	nvs_pool_end_lines(gpu->swap->store, p);
	note_excess(gpu, p);
	nvs_swap_unlock(gpu->swap);
}
