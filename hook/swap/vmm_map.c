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
	return p.span->head[p.granule] && region_at(p)->kind == REGION_APP;
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
	got = nvs_region_reserve(gpu, REGION_APP, (uint32_t)(n / GRANULE));
	if (got.span) {
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
	if (p.granule + granules > first + region_at(p)->granules)
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

/* The lock is held, and given up meanwhile: the memory is mapped there, instead of at home. */
static int map_here(struct nvs_swap *s, struct memory *m, CUdeviceptr address)
{
	struct chunk *c = chunk_of(m->home);
	uint64_t bytes = bytes_of(m->granules);
	int result = CUDA_SUCCESS;

	c->state = CHUNK_BUSY;
	nvs_swap_unlock(s);
	if (!c->bare)
		result = nvs_memory_driver.mem_unmap(c->address, bytes);
	c->bare = c->bare || result == CUDA_SUCCESS;
	if (result == CUDA_SUCCESS)
		result = nvs_memory_driver.mem_map(address, bytes, 0, c->handle, 0);
	nvs_swap_lock(s);
	if (result == CUDA_SUCCESS) {
		c->bare = false;
		c->address = address;
	}
	nvs_vmm_done(s, m);
	return result;
}

/* Maps a memory that is mapped nowhere. The lock is held. */
static int show(struct nvs_gpu *gpu, struct memory *m, struct place at)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk *c = chunk_of(m->home);
	int result = CUDA_SUCCESS;

	if (!vacant(at, m->granules))
		return CUDA_ERROR_INVALID_VALUE; /* another thread was faster */
	nvs_vmm_occupy(at, nvs_vmm_number(m->home) + 1, m->granules);
	m->access = CU_MEM_ACCESS_NONE;
	if (c->state == CHUNK_HERE) {
		result = map_here(s, m, address_of(at));
	} else {
		bool populated;

		c->address = address_of(at); /* it may come in while this thread waits for room, or jumps out of the wait */
		populated = nvs_chunk_populate(gpu, m->home);
		if (nvs_vmm_at(at) != m)
			return CUDA_SUCCESS; /* another thread has unmapped it meanwhile */
		if (!populated && c->state == CHUNK_EMPTY) {
			result = CUDA_ERROR_OUT_OF_MEMORY;
			c->address = address_of(m->home);
		}
	}
	if (result != CUDA_SUCCESS)
		nvs_vmm_vacate(at);
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
	else if (!m->drivers && !nvs_vmm_shown(m) && at.span &&
		 at.span->gpu == nvs_vmm_gpu(*handle) && n == bytes_of(m->granules))
		result = show(at.span->gpu, m, at);
	else if (!m->drivers)
		result = nvs_vmm_hand_over(nvs_vmm_gpu(*handle), m);
	if (m && m->drivers && (result == CUDA_SUCCESS || result == NVS_VMM_DRIVER)) {
		*handle = chunk_of(m->home)->handle;
		result = NVS_VMM_DRIVER;
	}
	nvs_swap_unlock(s);
	return result;
}

void nvs_vmm_mapped(CUdeviceptr p, size_t n)
{
	struct place at = nvs_vmm_place(p);
	if (!at.span)
		return;
	nvs_swap_lock(at.span->gpu->swap);
	if (vacant(at, n / GRANULE))
		nvs_vmm_occupy(at, OF_DRIVER, (uint32_t)(n / GRANULE));
	nvs_swap_unlock(at.span->gpu->swap);
}

/* ---- ranges of whole mappings ---- */

bool nvs_vmm_whole(struct place at, CUdeviceptr p, size_t n)
{
	uint64_t end = at.granule + n / GRANULE, first;

	if (!is_reserved(at))
		return false;
	first = at.span->head[at.granule] - 1;
	if (!n || n % GRANULE || p % GRANULE || end > first + region_at(at)->granules)
		return false;
	while (at.granule < end && chunk_of(at)->state == CHUNK_MAPPED)
		at = nvs_vmm_next(at);
	return at.granule == end;
}

/* Removes the mapping at a place. The lock is held, and given up meanwhile. */
static int hide(struct nvs_gpu *gpu, struct memory *m, struct place at)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk *c = chunk_of(m->home);
	int result;

	if (c->state == CHUNK_HERE) {
		c->state = CHUNK_BUSY;
		nvs_swap_unlock(s);
		result = nvs_memory_driver.mem_unmap(c->address, bytes_of(m->granules));
		nvs_swap_lock(s);
		nvs_vmm_done(s, m);
		if (result != CUDA_SUCCESS)
			return result;
		c->bare = true;
	}
	c->address = address_of(m->home);
	nvs_vmm_vacate(at);
	if (!m->handles)
		nvs_vmm_destroy(gpu, m);
	return CUDA_SUCCESS;
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
		struct memory *m = nvs_vmm_idle_at(at);
		struct place next = nvs_vmm_next(at);

		if (m) {
			result = hide(at.span->gpu, m, at);
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
	end = is_reserved(at) ? at.span->head[at.granule] - 1 + (uint64_t)region_at(at)->granules : 0;
	if (end > at.granule + (p % GRANULE + n + GRANULE - 1) / GRANULE)
		end = at.granule + (p % GRANULE + n + GRANULE - 1) / GRANULE;
	while (at.granule < end) {
		struct memory *m = nvs_vmm_idle_at(at);

		if (m) { /* once, also if the driver has no memory for it */
			at.granule = nvs_place_of(chunk_of(m->home)->address).granule + m->granules;
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

	if (!m)
		return false;
	r->base = r->mapped = chunk_of(m->home)->address;
	r->bytes = r->mapped_bytes = bytes_of(m->granules);
	r->range = p.span->base + bytes_of(p.span->head[p.granule] - 1);
	r->range_bytes = bytes_of(region_at(p)->granules);
	r->serial = m->serial;
	r->mapping = true;
	r->access = m->access;
	r->handle_types = m->handle_types;
	r->rdma = m->rdma;
	return true;
}
