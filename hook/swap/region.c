// SPDX-License-Identifier: Apache-2.0
/*
 * region.c: regions get their memory and release it; the cache of freed regions.
 */
#include "clock.h"
#include "grant.h"
#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

/*
 * How long the driver may refuse memory that the room promises, before the application
 * is told. Other clients release physical memory before they say so; but processes
 * without the shim may take it, and a scheduler that has just started does not know all
 * clients yet. So this is longer than the slowest client takes to come back.
 */
#define REFUSED_NS (30 * NVS_S)
#define PIECE_NS   (50 * NVS_MS)

/* ---- memory for chunks; the lock is held, and given up while waiting ---- */

bool nvs_swap_refused(struct nvs_gpu *gpu, uint64_t bytes, unsigned seen, uint64_t since, bool told)
{
	struct nvs_swap *s = gpu->swap;
	bool cached = s->cache.oldest || nvs_pools_have_cached(gpu);
	/* Nobody makes room without a scheduler, or where all fits that is promised: the driver has the last word. */
	bool alone = nvs_swap_capacity(gpu) == UINT64_MAX || nvs_swap_still(gpu);

	if (since && ((alone && !cached) || nvs_now() - since > REFUSED_NS))
		return false;
	nvs_swap_unlock(s);
	nvs_gpu_give_up_if_lost(gpu);
	if (since && !told && !alone)
		nvs_swap_tell(gpu, NVS_MOVED_STUCK | NVS_MOVED_NO_MEMORY);
	if (!nvs_swap_flush(gpu, bytes))
		nvs_swap_wait(s, seen, cached ? NVS_MS : PIECE_NS);
	nvs_swap_lock(s);
	return true;
}

/* How many chunks from p to end, side by side, are empty and fit onto the GPU now. */
static uint32_t count_fitting(struct nvs_swap *s, struct place p, uint32_t end, uint64_t *bytes)
{
	uint64_t room = nvs_swap_capacity(p.span->gpu);
	uint32_t n = 0;

	for (*bytes = 0; p.granule < end; n++) {
		const struct chunk *c = chunk_of(p);

		if (c->state != CHUNK_EMPTY || s->resident + *bytes + bytes_of(c->granules) > room)
			break;
		*bytes += bytes_of(c->granules);
		next_chunk(&p);
	}
	return n;
}

/* n chunks were CHUNK_BUSY; the first `here` of them have got memory. */
static void region_settle(struct nvs_swap *s, struct place p, uint32_t n, uint32_t here)
{
	for (uint32_t i = 0; i < n; i++) {
		struct chunk *c = chunk_of(p);

		c->opens = TOUCHED;
		c->state = i < here ? CHUNK_HERE : CHUNK_EMPTY;
		if (i >= here) {
			s->resident -= bytes_of(c->granules);
			s->away += bytes_of(c->granules);
		}
		next_chunk(&p);
	}
}

/* Maps what fits with as few driver calls as possible. Returns CUresult; OUT_OF_MEMORY if nothing fits. */
static int populate_some(struct nvs_gpu *gpu, struct place p, uint32_t end, bool *fits)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t bytes;
	uint32_t n = count_fitting(s, p, end, &bytes), here = n;
	struct place at = p;
	int result;

	*fits = n;
	if (!n)
		return CUDA_ERROR_OUT_OF_MEMORY;
	s->resident += bytes;
	s->away -= bytes;
	for (uint32_t i = 0; i < n; i++) {
		p.span->chunk[at.granule].state = CHUNK_BUSY;
		next_chunk(&at);
	}
	nvs_swap_unlock(s);
	result = nvs_chunk_map(gpu, p, &here);
	if (here)
		nvs_vmm_arrived(p); /* in a range of the application, only one chunk is mapped at a time */
	nvs_swap_lock(s);
	region_settle(s, p, n, here);
	return result;
}

/* Whether chunks get their memory when they are allocated. */
static bool at_once(struct nvs_gpu *gpu)
{
	return gpu->swap->hold || nvs_swap_still(gpu);
}

/*
 * While the GPU is held, or all fits that is promised, the chunks from p to end get their memory at
 * once; otherwise when they come in. False: the memory is not to be had.
 */
static bool populate(struct nvs_gpu *gpu, struct place p, uint32_t end)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t since = 0;

	for (;;) {
		unsigned seen = atomic_load(&s->kick);
		bool told = since != 0, fits;
		int result;

		/* The mover may have been faster. */
		while (p.granule < end && p.span->chunk[p.granule].state != CHUNK_EMPTY)
			next_chunk(&p);
		if (p.granule == end || !at_once(gpu))
			return true;
		result = populate_some(gpu, p, end, &fits);
		if (!fits && !s->hold)
			return true;
		if (result == CUDA_SUCCESS) {
			since = 0;
			continue;
		}
		if (result != CUDA_ERROR_OUT_OF_MEMORY)
			return false;
		since = !fits ? 0 : since ? since : nvs_now();
		if (!nvs_swap_refused(gpu, bytes_of(p.span->chunk[p.granule].granules), seen, since,
				      told))
			return false;
	}
}

bool nvs_chunk_populate(struct nvs_gpu *gpu, struct place p)
{
	return populate(gpu, p, p.granule + p.span->chunk[p.granule].granules);
}

/* Unmaps the chunks from p to end that are on the GPU and side by side. Returns where they end. */
static struct place unmap_run(struct nvs_swap *s, struct place p, uint32_t end)
{
	struct place at = p;
	uint32_t n = 0;

	while (at.granule < end && p.span->chunk[at.granule].state == CHUNK_HERE) {
		nvs_arena_free(p.span->gpu, at);
		p.span->chunk[at.granule].state = CHUNK_BUSY;
		next_chunk(&at);
		n++;
	}
	nvs_swap_unlock(s);
	nvs_chunk_unmap(p, n);
	nvs_swap_lock(s);
	s->resident -= bytes_of(at.granule - p.granule);
	return at;
}

/* Frees a region whose chunks no other thread uses. */
static void region_release(struct nvs_swap *s, struct place p)
{
	const struct region *r = region_of(p);
	struct place at = p;

	while (at.granule < p.granule + r->granules) {
		const struct chunk *c = &p.span->chunk[at.granule];

		if (c->state == CHUNK_HERE) {
			at = unmap_run(s, at, p.granule + r->granules);
			continue;
		}
		nvs_arena_free(p.span->gpu, at);
		s->away -= bytes_of(c->granules);
		next_chunk(&at);
	}
	s->claimed -= bytes_of(r->granules);
	s->pinned -= r->pinned ? bytes_of(r->granules) : 0;
	nvs_region_drop(p);
}

void nvs_region_free(struct nvs_gpu *gpu, struct place p)
{
	struct nvs_swap *s = gpu->swap;
	struct region *r = region_of(p);
	struct nvs_claim claim = { .gpu = gpu, .bytes = bytes_of(r->granules) };

	r->dying = true;
	for (uint32_t i = 0; i < r->granules;) {
		unsigned seen = atomic_load(&s->kick);

		if (p.span->chunk[p.granule + i].state == CHUNK_BUSY) {
			nvs_swap_unlock(s);
			nvs_swap_wait(s, seen, PIECE_NS);
			nvs_swap_lock(s);
		} else {
			i += r->piece;
		}
	}
	region_release(s, p);
	nvs_swap_unlock(s);
	nvs_claim_drop(&claim);
	nvs_swap_kick(s);
	nvs_swap_lock(s);
	s->freed += claim.bytes;
}

/* ---- cache ---- */

uint64_t nvs_swap_cached(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t bytes;

	if (!atomic_load(&nvs_suspended)) /* asking NVML brings no process back */
		nvs_pools_look(gpu, NULL);
	nvs_swap_lock(s);
	bytes = s->cache.bytes + nvs_pools_cached(gpu);
	nvs_swap_unlock(s);
	return bytes;
}

static struct place uncache(struct nvs_swap *s, struct nvs_block *b)
{
	struct place p = nvs_place_of(b->address);

	nvs_freelist_remove(&s->cache, b);
	region_of(p)->cached = false;
	return p;
}

bool nvs_swap_flush(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t before;
	bool any = false, more = true;

	nvs_pools_look(gpu, NULL);
	nvs_swap_lock(s);
	before = s->freed;
	while (more && s->freed - before < bytes) {
		if (s->cache.oldest)
			nvs_region_free(gpu, uncache(s, s->cache.oldest));
		else
			more = nvs_pools_release_one(gpu);
		any = any || more;
	}
	nvs_swap_unlock(s);
	if (!any)
		nvs_pools_mark(gpu);
	return any;
}

bool nvs_swap_release_cached(struct nvs_gpu *gpu, uint64_t bytes)
{
	return gpu->swap->mover && nvs_swap_flush(gpu, bytes);
}

/* A cached region of that size. The lock is held. */
static struct place region_reuse(struct nvs_swap *s, uint32_t granules)
{
	struct nvs_block *b = nvs_freelist_find(&s->cache, bytes_of(granules), false);

	return b ? uncache(s, b) : (struct place){ NULL, 0 };
}

bool nvs_region_is_here(struct place p)
{
	const struct region *r = region_of(p);

	for (uint32_t i = 0; i < r->granules; i += r->piece)
		if (p.span->chunk[p.granule + i].state != CHUNK_HERE)
			return false;
	return true;
}

/* Shrinks the cache to so many bytes. The lock is held, and given up meanwhile. */
static void shrink(struct nvs_gpu *gpu, uint64_t left)
{
	struct nvs_swap *s = gpu->swap;

	while (s->cache.oldest && s->cache.bytes > left)
		nvs_region_free(gpu, uncache(s, s->cache.oldest));
}

void nvs_cache_trim(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	bool due;

	nvs_swap_lock(s);
	due = s->cache.bytes > CACHE_BYTES && nvs_now() - s->cached_ns >= LINGER_NS;
	nvs_swap_unlock(s);
	if (!due || !nvs_driver_enter())
		return;
	nvs_swap_lock(s);
	shrink(gpu, CACHE_BYTES);
	nvs_swap_unlock(s);
	nvs_driver_leave();
}

bool nvs_region_cache(struct nvs_swap *s, struct place p)
{
	struct region *r = region_of(p);
	uint64_t bytes = bytes_of(r->granules), most = p.span->gpu->device.total_mem / CACHE_PART;

	most = most > CACHE_BYTES ? most : CACHE_BYTES;
	if (!s->hold || r->pinned || r->kind != REGION_LARGE || bytes > most ||
	    s->resident > nvs_swap_capacity(p.span->gpu) || !nvs_region_is_here(p))
		return false;
	if (s->cache.bytes + bytes > most)
		shrink(p.span->gpu, most - bytes); /* p is dying: no other thread frees it */
	for (uint32_t i = 0; i < r->granules; i += r->piece) /* give_way() does not see it */
		nvs_arena_free(p.span->gpu, (struct place){ p.span, p.granule + i });
	r->cached = true;
	r->dying = r->published = false;
	r->block = (struct nvs_block){ .address = address_of(p), .bytes = bytes };
	nvs_freelist_add(&s->cache, &r->block);
	s->cached_ns = nvs_now();
	return true;
}

/* ---- regions ---- */

struct place nvs_region_reserve(struct nvs_gpu *gpu, uint32_t granules)
{
	struct place p = nvs_region_new(gpu, granules);

	for (bool added = true; !p.span && added;) {
		nvs_swap_unlock(gpu->swap);
		added = nvs_span_add(gpu, granules); /* asks the driver */
		nvs_swap_lock(gpu->swap);
		p = nvs_region_new(gpu, granules);
	}
	return p;
}

struct place nvs_region_alloc(struct nvs_gpu *gpu, uint32_t granules)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_claim claim;
	struct place p;
	bool ok = true;

	nvs_swap_lock(s);
	p = region_reuse(s, granules);
	if (p.span)
		return p;
	shrink(gpu, CACHE_BYTES);
	s->claiming += bytes_of(granules);
	nvs_swap_unlock(s);
	ok = nvs_claim(&claim, gpu, bytes_of(granules));
	if (ok && claim.gpu)
		nvs_claim_exists(&claim);
	nvs_swap_lock(s);
	s->claiming -= bytes_of(granules);
	if (!ok || !claim.gpu)
		return p;
	p = nvs_region_reserve(gpu, granules);
	if (p.span) {
		struct region *r = region_of(p);

		s->claimed += bytes_of(granules);
		s->away += bytes_of(granules);
		for (uint32_t i = 0; i < granules; i += r->piece)
			p.span->chunk[p.granule + i].state = CHUNK_EMPTY;
		ok = populate(gpu, p, p.granule + granules);
		if (ok)
			return p;
		nvs_region_free(gpu, p);
		p.span = NULL;
	} else {
		nvs_swap_unlock(s);
		nvs_claim_drop(&claim);
		nvs_swap_lock(s);
	}
	return p;
}
