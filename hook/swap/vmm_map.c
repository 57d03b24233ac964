// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_map.c: addresses that the application reserves, and the memory that it maps there.
 */

#include "stream.h"
#include "vmm_impl.h"

/* ---- addresses ---- */

/* Whether the application has the addresses there still: another thread may free them. The lock is held. */
static bool is_reserved(struct place p)
{
	return p.span->head[p.granule] && nvs_vmm_region(p)->kind == REGION_APP;
}

struct place nvs_vmm_place(CUdeviceptr p)
{
	struct place at = nvs_place_of(p);
	struct nvs_swap *s;

	if (!at.span || nvs_memory_locked)
		return (struct place){ NULL, 0 };
	s = at.span->gpu->swap;
	nvs_swap_lock(s);
	if (!is_reserved(at))
		at.span = NULL;
	nvs_swap_unlock(s);
	return at;
}

/* The GPU whose memory will probably be mapped: the current context's. */
static struct nvs_gpu *gpu_here(void)
{
	void *ctx = nvs_current_context();

	return !ctx && atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)
		? nvs_gpus : nvs_gpu_here(ctx);
}

int nvs_vmm_reserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags)
{
	struct nvs_gpu *gpu;
	struct place got;
	struct nvs_swap *s;

	if (!p || !n || n % GRANULE || n / GRANULE >= UINT32_MAX || at || flags || align > GRANULE ||
	    (align & (align - 1)))
		return NVS_VMM_DRIVER;
	gpu = gpu_here();
	if (!nvs_swap_on(gpu))
		return NVS_VMM_DRIVER;
	s = gpu->swap;
	nvs_swap_lock(s);
	got = nvs_region_reserve(gpu, (uint32_t)(n / GRANULE));
	if (got.span) {
		region_of(got)->kind = REGION_APP;
		region_of(got)->piece = 1;
		*p = address_of(got);
		atomic_store_explicit(&nvs_vmm_used, true, memory_order_release);
	}
	nvs_swap_unlock(s);
	return got.span ? CUDA_SUCCESS : NVS_VMM_DRIVER;
}

/* Whether nothing is mapped in a range of the region. The lock is held. */
static bool vacant(struct place p, uint64_t granules)
{
	uint64_t first;

	if (!is_reserved(p))
		return false;
	first = p.span->head[p.granule] - 1;
	if (p.granule + granules > first + nvs_vmm_region(p)->granules)
		return false;
	for (uint32_t i = 0; i < granules; i++)
		if (p.span->memory[p.granule + i])
			return false;
	return true;
}

int nvs_vmm_unreserve(CUdeviceptr p, size_t n)
{
	struct place at = nvs_vmm_place(p);
	struct nvs_swap *s;
	bool ok;

	if (!at.span)
		return NVS_VMM_DRIVER;
	s = at.span->gpu->swap;
	nvs_swap_lock(s);
	ok = p == address_of(at) && at.span->head[at.granule] == at.granule + 1 &&
	     n == bytes_of(region_of(at)->granules) && vacant(at, region_of(at)->granules);
	if (ok)
		nvs_region_drop(at);
	nvs_swap_unlock(s);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- mapping ---- */

/* Maps a memory that the driver has a handle of. The lock is held, and given up meanwhile. */
static int map_real(struct nvs_swap *s, struct memory *m, struct place at, struct chunk c)
{
	uint64_t bytes = bytes_of(m->granules);
	int result;

	c.handle = m->real;
	c.state = CHUNK_BUSY;
	nvs_vmm_occupy(at, m->index, c);
	m->at = at;
	s->claimed += bytes;
	s->resident += bytes;
	nvs_swap_unlock(s);
	result = nvs_memory_driver.mem_map(address_of(at), bytes, 0, c.handle, 0);
	nvs_swap_lock(s);
	if (result == CUDA_SUCCESS) {
		nvs_vmm_chunk(at)->state = CHUNK_HERE;
		m->real = 0;
	} else {
		s->claimed -= bytes;
		s->resident -= bytes;
	}
	return result;
}

/* Makes a memory a chunk, or moves its hidden chunk, to a place. The lock is held. */
static int show(struct nvs_gpu *gpu, struct memory *m, struct place at)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk c = { .granules = m->granules, .opens = TOUCHED };
	uint64_t bytes = bytes_of(m->granules);
	int result = CUDA_SUCCESS;
	bool populated;

	m->worker = &c;
	if (m->at.span && nvs_vmm_chunk(m->at)->state == CHUNK_HERE)
		nvs_vmm_unhide(gpu, m);
	if (!vacant(at, m->granules)) { /* the lock was given up meanwhile */
		nvs_vmm_done(s, m);
		return CUDA_ERROR_INVALID_VALUE;
	}
	m->access = CU_MEM_ACCESS_NONE;
	if (m->at.span) {
		c = *nvs_vmm_chunk(m->at);
		nvs_arena_follow(m->at, at);
		nvs_vmm_vacate(m->at);
		nvs_region_drop(m->at);
		nvs_vmm_occupy(at, m->index, c);
		m->at = at;
	} else if (m->real) {
		result = map_real(s, m, at, c);
	} else {
		c.state = CHUNK_EMPTY;
		nvs_vmm_occupy(at, m->index, c);
		m->at = at;
		m->shown = true; /* it may come in while this thread waits for room */
		s->claiming -= bytes;
		s->claimed += bytes;
		s->away += bytes;
		m->worker = NULL; /* a signal handler may jump out of the wait for room */
		populated = nvs_chunk_populate(gpu, at);
		if (nvs_vmm_at(at) != m)
			return CUDA_SUCCESS; /* another thread has unmapped it meanwhile */
		if (!populated && nvs_vmm_chunk(at)->state == CHUNK_EMPTY) {
			result = CUDA_ERROR_OUT_OF_MEMORY;
			s->claiming += bytes;
			s->claimed -= bytes;
			s->away -= bytes;
		}
	}
	m->shown = result == CUDA_SUCCESS;
	if (result != CUDA_SUCCESS) {
		nvs_vmm_vacate(at);
		m->at.span = NULL;
	}
	nvs_vmm_done(s, m);
	return result;
}

int nvs_vmm_map(CUdeviceptr p, size_t n, size_t offset, unsigned long long *handle,
		unsigned long long flags)
{
	struct place at = nvs_vmm_place(p);
	bool ours = nvs_vmm_is(*handle);
	int result = NVS_VMM_DRIVER;
	struct nvs_swap *s;
	struct memory *m;

	if (!ours && !at.span)
		return NVS_VMM_DRIVER;
	if (nvs_memory_locked || !n || n % GRANULE || p % GRANULE || offset % GRANULE || flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (at.span) {
		bool free;

		s = at.span->gpu->swap;
		nvs_swap_lock(s);
		free = vacant(at, n / GRANULE);
		nvs_swap_unlock(s);
		if (!free)
			return CUDA_ERROR_INVALID_VALUE;
	}
	if (!ours)
		return NVS_VMM_DRIVER;
	s = nvs_vmm_gpu(*handle)->swap;
	nvs_swap_lock(s);
	m = nvs_vmm_of(s, *handle);
	if (!m || offset > bytes_of(m->granules) || n > bytes_of(m->granules) - offset)
		result = CUDA_ERROR_INVALID_VALUE;
	else if (!m->pinned && !m->shown && at.span &&
		 at.span->gpu == nvs_vmm_gpu(*handle) && n == bytes_of(m->granules))
		result = show(at.span->gpu, m, at);
	else if (!m->pinned)
		result = nvs_vmm_hand_over(nvs_vmm_gpu(*handle), m);
	if (m && m->pinned && (result == CUDA_SUCCESS || result == NVS_VMM_DRIVER)) {
		*handle = m->real;
		result = NVS_VMM_DRIVER;
	}
	nvs_swap_unlock(s);
	return result;
}

void nvs_vmm_mapped(CUdeviceptr p, size_t n)
{
	struct place at = nvs_vmm_place(p);
	struct chunk c = { .granules = (uint32_t)(n / GRANULE), .state = CHUNK_PINNED };

	if (!at.span)
		return;
	nvs_swap_lock(at.span->gpu->swap);
	if (vacant(at, c.granules))
		nvs_vmm_occupy(at, OF_DRIVER, c);
	nvs_swap_unlock(at.span->gpu->swap);
}

/* ---- ranges of whole mappings ---- */

bool nvs_vmm_whole(struct place at, CUdeviceptr p, size_t n)
{
	uint64_t end = at.granule + n / GRANULE, first;

	if (!is_reserved(at))
		return false;
	first = at.span->head[at.granule] - 1;
	if (!n || n % GRANULE || p % GRANULE || end > first + nvs_vmm_region(at)->granules)
		return false;
	while (at.granule < end && nvs_vmm_chunk(at)->state != CHUNK_NONE)
		at = nvs_vmm_next(at);
	return at.granule == end;
}

/* Removes a mapping. The lock is held, and given up meanwhile. */
static int hide(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk *c = nvs_vmm_chunk(m->at);
	uint64_t bytes = bytes_of(m->granules);
	struct place hidden;
	int result = CUDA_SUCCESS;

	if (!m->handles) {
		nvs_vmm_destroy(gpu, m);
		return CUDA_SUCCESS;
	}
	if (c->state == CHUNK_AWAY) {
		m->worker = &hidden;
		c->state = CHUNK_BUSY; /* stays away meanwhile */
		hidden = nvs_region_reserve(gpu, m->granules);
		c->state = CHUNK_AWAY;
		if (!hidden.span) {
			nvs_vmm_done(s, m);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		region_of(hidden)->kind = REGION_HIDDEN;
		region_of(hidden)->piece = 1;
		nvs_arena_follow(m->at, hidden);
		nvs_vmm_occupy(hidden, m->index, *c);
		nvs_vmm_vacate(m->at);
		m->at = hidden;
		m->shown = false;
		nvs_vmm_done(s, m);
		return CUDA_SUCCESS;
	}
	if (c->state == CHUNK_HERE) {
		m->worker = &hidden;
		c->state = CHUNK_BUSY;
		nvs_swap_unlock(s);
		result = nvs_memory_driver.mem_unmap(address_of(m->at), bytes);
		nvs_swap_lock(s);
		if (result == CUDA_SUCCESS) {
			nvs_arena_free(gpu, m->at);
			m->real = c->handle;
			s->resident -= bytes;
		}
	} else {
		s->away -= bytes;
		s->claiming += bytes;
	}
	if (result == CUDA_SUCCESS) {
		s->claimed -= bytes;
		nvs_vmm_vacate(m->at);
		m->at.span = NULL;
		m->shown = false;
	} else {
		c->state = CHUNK_HERE;
	}
	nvs_vmm_done(s, m);
	return result;
}

int nvs_vmm_driver_unmap(CUdeviceptr p, size_t n)
{
	uint64_t stamp = nvs_memory_stamp();
	int result = nvs_memory_driver.mem_unmap(p, n);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_unmapped(p, n, stamp);
	return result;
}

int nvs_vmm_unmap(CUdeviceptr p, size_t n)
{
	struct place at = nvs_vmm_place(p);
	uint64_t end = at.granule + n / GRANULE;
	int result = CUDA_SUCCESS;
	struct nvs_swap *s;

	if (!at.span)
		return NVS_VMM_DRIVER;
	s = at.span->gpu->swap;
	nvs_swap_lock(s);
	if (!nvs_vmm_whole(at, p, n))
		result = CUDA_ERROR_INVALID_VALUE;
	while (result == CUDA_SUCCESS && at.granule < end) {
		unsigned seen = atomic_load(&s->kick);
		struct place next = nvs_vmm_next(at);
		struct memory *m = nvs_vmm_at(at);

		if (m && !nvs_vmm_idle(m)) {
			nvs_vmm_pause(s, seen);
			continue;
		}
		if (m) {
			result = hide(at.span->gpu, m);
		} else if (at.span->memory[at.granule] == OF_DRIVER) {
			nvs_swap_unlock(s);
			result = nvs_vmm_driver_unmap(address_of(at), bytes_of(next.granule - at.granule));
			nvs_swap_lock(s);
			if (result == CUDA_SUCCESS)
				nvs_vmm_vacate(at);
		} else {
			result = CUDA_ERROR_INVALID_VALUE; /* another thread was faster */
		}
		at = next;
	}
	nvs_swap_unlock(s);
	return result;
}

/* ---- sharing by address ---- */

void nvs_vmm_pin(CUdeviceptr p, size_t n)
{
	struct place at = nvs_vmm_place(p);
	uint64_t end;
	struct nvs_swap *s;

	if (!at.span || !n)
		return;
	s = at.span->gpu->swap;
	nvs_swap_lock(s);
	end = is_reserved(at) ? at.span->head[at.granule] - 1 + (uint64_t)nvs_vmm_region(at)->end : 0;
	if (end > at.granule + (p % GRANULE + n + GRANULE - 1) / GRANULE)
		end = at.granule + (p % GRANULE + n + GRANULE - 1) / GRANULE;
	while (at.granule < end) {
		unsigned seen = atomic_load(&s->kick);
		struct memory *m = nvs_vmm_at(at);

		if (m && !nvs_vmm_idle(m)) {
			nvs_vmm_pause(s, seen);
			continue;
		}
		if (m) { /* once, also if the driver has no memory for it */
			at.granule = m->at.granule + m->granules;
			nvs_vmm_hand_over(at.span->gpu, m);
		} else {
			at.granule++;
		}
	}
	nvs_swap_unlock(s);
}

/* ---- for the rest of this folder ---- */

bool nvs_vmm_find(struct place p, struct nvs_swap_range *r)
{
	const struct memory *m = nvs_vmm_at(p);

	if (!m || !m->shown)
		return false;
	r->base = r->mapped = address_of(m->at);
	r->bytes = r->mapped_bytes = bytes_of(m->granules);
	r->range = p.span->base + bytes_of(p.span->head[p.granule] - 1);
	r->range_bytes = bytes_of(nvs_vmm_region(p)->granules);
	r->serial = m->serial;
	r->mapping = true;
	r->access = m->access;
	r->handle_types = m->handle_types;
	r->rdma = m->rdma;
	return true;
}
