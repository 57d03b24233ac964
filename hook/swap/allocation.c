// SPDX-License-Identifier: Apache-2.0
/*
 * allocation.c: allocations made of chunks, and their end.
 */
#include "drain.h"
#include "pool.h"
#include "stream.h"
#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

/* A bit of region.owner: the owner is a pool, not a context. */
#define POOLED 1ull

static _Atomic uint64_t serials; /* of allocations */

/* ---- slabs; the lock is held ---- */

static struct nvs_slab *slab_of(struct place p)
{
	return &p.span->slab[p.granule];
}

static void idle_push(struct nvs_swap *s, struct nvs_slab *b)
{
	b->prev = NULL;
	b->next = s->idle;
	if (b->next)
		b->next->prev = b;
	s->idle = b;
	s->idle_count++;
}

static void idle_remove(struct nvs_swap *s, struct nvs_slab *b)
{
	if (b->next)
		b->next->prev = b->prev;
	if (b->prev)
		b->prev->next = b->next;
	else
		s->idle = b->next;
	s->idle_count--;
}

/* Adds a slab, from new memory if need be. The lock is given up meanwhile. */
static bool slab_more(struct nvs_gpu *gpu, uint64_t owner, uint32_t class)
{
	struct nvs_swap *s = gpu->swap;
	struct place p;

	if (!s->idle) {
		uint32_t granules = 1; /* up to an eighth of what small allocations use already */

		while (granules < SLABS_AT_ONCE && granules * 16 <= s->slabs_used)
			granules *= 2;
		nvs_swap_unlock(s);
		p = nvs_region_alloc(gpu, granules);
		if (!p.span && granules > 1) {
			nvs_swap_unlock(s);
			p = nvs_region_alloc(gpu, granules = 1);
		}
		if (!p.span)
			return false;
		region_of(p)->kind = REGION_SLABS;
		region_of(p)->published = true;
		region_of(p)->slabs = 0;
		for (uint32_t i = granules; i-- > 0;) {
			struct place at = { p.span, p.granule + i };

			slab_of(at)->base = address_of(at);
			slab_of(at)->entry = NULL;
			idle_push(s, slab_of(at));
		}
	}
	p = nvs_place_of(s->idle->base);
	idle_remove(s, slab_of(p));
	if (!nvs_slab_add(&s->heap, slab_of(p), address_of(p), owner, class)) {
		idle_push(s, slab_of(p));
		return false;
	}
	p.granule = p.span->head[p.granule] - 1;
	region_of(p)->slabs++;
	s->slabs_used++;
	return true;
}

/* Removes a slab that has no object left. */
static void slab_less(struct nvs_gpu *gpu, struct place p)
{
	struct nvs_swap *s = gpu->swap;
	struct place first = { p.span, p.span->head[p.granule] - 1 };
	struct region *r = region_of(first);

	nvs_slab_remove(&s->heap, slab_of(p));
	idle_push(s, slab_of(p));
	s->slabs_used--;
	if (--r->slabs || s->idle_count - r->granules < 1)
		return; /* one region stays for the next small allocation */
	for (uint32_t i = 0; i < r->granules; i++)
		idle_remove(s, &p.span->slab[first.granule + i]);
	nvs_region_free(gpu, first);
}

static int alloc_small(struct nvs_gpu *gpu, uint64_t owner, size_t bytes, CUdeviceptr *p)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_slab *in;
	bool ok = true;

	nvs_swap_lock(s);
	while (!(*p = nvs_slab_alloc(&s->heap, owner, bytes, &in)) && ok)
		ok = slab_more(gpu, owner, nvs_slab_class(bytes));
	nvs_swap_unlock(s);
	return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static int alloc_large(struct nvs_gpu *gpu, uint64_t owner, size_t bytes, CUdeviceptr *out)
{
	struct place p = nvs_region_alloc(gpu, (uint32_t)((bytes + GRANULE - 1) / GRANULE));

	if (p.span) {
		region_of(p)->kind = REGION_LARGE;
		region_of(p)->bytes = bytes;
		region_of(p)->owner = owner;
		region_of(p)->serial = ++serials;
		region_of(p)->published = true;
		*out = address_of(p);
	}
	nvs_swap_unlock(gpu->swap);
	return p.span ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static int alloc(struct nvs_gpu *gpu, uint64_t owner, size_t bytes, CUdeviceptr *out)
{
	int result;

	if (!bytes || bytes > 1ull << 50 || !out || !nvs_swap_on(gpu))
		return -1;
	do /* memory that streams have freed becomes free when they have passed the free */
		result = (bytes <= NVS_SLAB_LARGEST ? alloc_small : alloc_large)
				(gpu, owner, bytes, out);
	while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_pools_wait(gpu));
	return result;
}

int nvs_swap_alloc(struct nvs_gpu *gpu, void *ctx, size_t bytes, CUdeviceptr *out)
{
	return alloc(gpu, (uintptr_t)ctx, bytes, out);
}

int nvs_swap_alloc_pooled(struct nvs_gpu *gpu, struct nvs_pool *pool, size_t bytes, CUdeviceptr *out)
{
	return alloc(gpu, POOLED | (uintptr_t)pool, bytes, out);
}

/* ---- looking up ---- */

/* The lock of the span's gpu is held. */
static bool allocation_find(struct place p, uint64_t address, struct nvs_swap_range *r)
{
	uint64_t base = 0, bytes = 0, owner = 0;
	struct region *g;

	*r = (struct nvs_swap_range){ .gpu = p.span->gpu };
	if (!p.span->head[p.granule])
		return false;
	g = &p.span->region[p.span->head[p.granule] - 1];
	if (g->kind >= REGION_APP)
		return nvs_vmm_find(p, r);
	if (!g->published || g->dying)
		return false;
	if (g->kind == REGION_SLABS) {
		if (!slab_of(p)->entry || !nvs_slab_find(slab_of(p), address, &base, &bytes))
			return false;
		owner = slab_of(p)->owner;
	} else {
		base = p.span->base + bytes_of(p.span->head[p.granule] - 1);
		if (address - base >= g->bytes)
			return false;
		bytes = g->bytes;
		owner = g->owner;
	}
	r->base = r->range = base;
	r->bytes = r->range_bytes = bytes;
	r->owner = owner & POOLED ? NULL : (void *)(uintptr_t)owner;
	r->pool = owner & POOLED ? (void *)(uintptr_t)(owner & ~POOLED) : NULL;
	r->pool_handle = r->pool ? r->pool->handle : NULL;
	r->rdma = !r->pool && p.span->gpu->swap->rdma;
	r->ipc = !r->pool && p.span->gpu->swap->posix_fd;
	r->serial = g->serial;
	r->pinned = g->pinned;
	r->mapped = p.span->base + bytes_of(p.span->head[p.granule] - 1);
	r->mapped_bytes = bytes_of(g->granules);
	return true;
}

bool nvs_swap_find(CUdeviceptr address, struct nvs_swap_range *r)
{
	struct place p = nvs_place_of(address);
	uint32_t head;
	bool ours;

	if (!p.span || nvs_memory_locked)
		return false;
	nvs_swap_lock(p.span->gpu->swap);
	head = p.span->head[p.granule];
	/* The driver tells of its own memory that the application has mapped there. */
	ours = allocation_find(p, address, r) || !head || p.span->region[head - 1].kind < REGION_APP;
	nvs_swap_unlock(p.span->gpu->swap);
	return ours;
}

/*
 * The driver's own free waits for the work of the context. There is nothing to wait
 * for if the GPU was drained, to the end, and the gate has been closed since then: only
 * fixed memory is used without passing the gate.
 */
static int wait_for_work(const struct nvs_swap_range *r)
{
	struct nvs_swap *s = r->gpu->swap;
	void *now = NULL, *popped, *ctx = r->owner;
	bool hold;
	int result;

	nvs_swap_lock(s);
	hold = s->hold || r->pinned;
	nvs_swap_unlock(s);
	if (!hold && !atomic_load(&r->gpu->drains.pending) && !nvs_gpu_has_work(r->gpu) && nvs_gpu_of_context(ctx))
		return CUDA_SUCCESS;
	nvs_driver.ctx_get_current(&now);
	if (now != ctx && nvs_driver.ctx_push(ctx) != CUDA_SUCCESS)
		return CUDA_SUCCESS; /* the context is gone, and its work with it */
	result = nvs_driver.ctx_synchronize();
	if (now != ctx)
		nvs_driver.ctx_pop(&popped);
	return result;
}

/* An object of a slab. The lock is held, and may be given up. */
static void free_small(struct nvs_gpu *gpu, struct place p, CUdeviceptr address)
{
	nvs_slab_free(&gpu->swap->heap, slab_of(p), address);
	p.span->region[p.span->head[p.granule] - 1].serial = ++serials;
	if (!slab_of(p)->used)
		slab_less(gpu, p);
}

int nvs_swap_free(CUdeviceptr address, bool wait)
{
	struct place p = nvs_place_of(address);
	struct nvs_swap_range r;
	struct nvs_swap *s;
	int result;

	if (!p.span || nvs_memory_locked)
		return -1;
	s = p.span->gpu->swap;
	if (!nvs_swap_find(address, &r) || r.base != address || r.mapping)
		return CUDA_ERROR_INVALID_VALUE;
	/* A pool's memory is not waited for: the application has done so. */
	result = wait && !r.pool ? wait_for_work(&r) : CUDA_SUCCESS;
	if (result != CUDA_SUCCESS)
		return result;
	nvs_swap_lock(s);
	if (!allocation_find(p, address, &r) || r.base != address) {
		result = CUDA_ERROR_INVALID_VALUE; /* another thread was faster */
	} else if (r.pool) {
		nvs_pools_free(r.gpu, r.pool, address);
	} else if (region_of(p)->kind == REGION_LARGE && p.span->head[p.granule] == p.granule + 1) {
		region_of(p)->dying = true; /* no other thread frees it */
		if (!nvs_region_cache(s, p))
			nvs_region_free(r.gpu, p);
	} else {
		free_small(r.gpu, p, address);
	}
	nvs_swap_unlock(s);
	return result;
}

/* ---- blocks of pools; the lock is held ---- */

bool nvs_swap_lookup(CUdeviceptr address, struct nvs_swap_range *r)
{
	struct place p = nvs_place_of(address);

	return allocation_find(p, address, r) && r->base == address;
}

bool nvs_alloc_cache(struct nvs_block *b)
{
	struct place p = nvs_place_of(b->address);
	struct region *r = &p.span->region[p.span->head[p.granule] - 1];

	b->no_reuse = r->pinned;
	if (r->kind == REGION_SLABS) {
		nvs_slab_hide(slab_of(p), b->address);
		b->bytes = nvs_slab_size(slab_of(p)->class);
		return true;
	}
	r->published = false;
	r->cached = true;
	b->bytes = bytes_of(r->granules);
	return nvs_region_is_here(p);
}

void nvs_alloc_reuse(CUdeviceptr address, size_t bytes)
{
	struct place p = nvs_place_of(address);
	struct region *r = &p.span->region[p.span->head[p.granule] - 1];

	r->serial = ++serials;
	if (r->kind == REGION_SLABS) {
		nvs_slab_show(slab_of(p), address, bytes);
		return;
	}
	r->bytes = bytes;
	r->cached = false;
	r->published = true;
}

void nvs_alloc_release(struct nvs_gpu *gpu, CUdeviceptr address)
{
	struct place p = nvs_place_of(address);
	struct region *r = &p.span->region[p.span->head[p.granule] - 1];

	if (r->kind == REGION_SLABS) {
		nvs_slab_show(slab_of(p), address, 1);
		free_small(gpu, p, address);
	} else {
		r->cached = false;
		nvs_region_free(gpu, p);
	}
}

/* ---- contexts ---- */

/* Whether the owner's memory is gone with a context, or (NULL) with the primary one. That of pools stays. */
static bool goes(uint64_t owner, const void *ctx)
{
	if (ctx)
		return owner == (uintptr_t)ctx;
	return !(owner & POOLED) && !nvs_context_look((void *)(uintptr_t)owner).own;
}

/* Frees one region or slab of the context. False: none is left. */
static bool one_gone(struct nvs_gpu *gpu, const void *ctx)
{
	for (unsigned i = 0; i < atomic_load(&nvs_spans_used); i++) {
		struct span *sp = &nvs_spans[i];

		if (sp->gpu != gpu)
			continue;
		for (uint32_t g = 0; g < sp->granules;
		     g += sp->head[g] ? sp->region[g].granules : sp->run[g]) {
			struct region *r = &sp->region[g];

			if (!sp->head[g] || !r->published || r->dying)
				continue;
			if (r->kind == REGION_LARGE && goes(r->owner, ctx)) {
				nvs_region_free(gpu, (struct place){ sp, g });
				return true;
			}
			for (uint32_t j = g; r->kind == REGION_SLABS && j < g + r->granules; j++)
				if (sp->slab[j].entry && goes(sp->slab[j].owner, ctx)) {
					slab_less(gpu, (struct place){ sp, j });
					return true;
				}
		}
	}
	return false;
}

void nvs_swap_context_gone(const void *ctx, struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;

	if (!s->mover)
		return;
	/* The mover takes another context for its stream. What it has in one that lives stays. */
	if (ctx ? s->ctx == ctx : !s->ctx || !nvs_context_look(s->ctx).own) {
		s->ctx = NULL;
		nvs_arena_unregistered(gpu);
	}
	nvs_pools_context_gone(gpu, ctx);
	nvs_swap_lock(s);
	while (one_gone(gpu, ctx))
		;
	nvs_swap_unlock(s);
}
