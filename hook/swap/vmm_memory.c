// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_memory.c: the memories that the application's handles stand for, from cuMemCreate
 * to the last reference.
 */
#include <sys/mman.h>

#include "clock.h"
#include "reserve.h"
#include "vmm_impl.h"

#define PIECE_NS (50 * NVS_MS) /* a wait looks again after this time */

atomic_bool nvs_vmm_used;

static _Atomic uint64_t serials;

/* ---- the table ---- */

static struct memory *memory_new(struct nvs_gpu *gpu, uint32_t granules)
{
	struct nvs_swap *s = gpu->swap;
	uint32_t index = s->handles.free, generation;
	struct memory *m;

	if (!s->handles.memory) {
		void *p = mmap(NULL, MAX_MEMORIES * sizeof(*m), PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (p == MAP_FAILED)
			return NULL;
		s->handles.memory = p;
	}
	if (!index) {
		if (s->handles.used + 1 == MAX_MEMORIES)
			return NULL;
		index = ++s->handles.used;
	} else {
		s->handles.free = s->handles.memory[index].next;
	}
	m = &s->handles.memory[index];
	generation = m->generation;
	*m = (struct memory){ .index = index, .generation = generation, .granules = granules,
			      .handles = 1, .serial = 1ull << 62 | ++serials };
	return m;
}

void nvs_vmm_forget(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;

	m->granules = 0;
	m->generation++;
	m->next = s->handles.free;
	s->handles.free = m->index;
}

static unsigned long long handle_of(const struct nvs_gpu *gpu, const struct memory *m)
{
	unsigned long long generation = m->generation & ((1u << GENERATION_BITS) - 1);

	return NVS_VMM_MARK << 48 | (unsigned long long)gpu->number << (INDEX_BITS + GENERATION_BITS) |
	       generation << INDEX_BITS | m->index;
}

static struct memory *memory_find(unsigned long long handle)
{
	const struct nvs_swap *s = nvs_vmm_gpu(handle)->swap;
	uint32_t index = (uint32_t)handle & (MAX_MEMORIES - 1);
	struct memory *m;

	if (!nvs_vmm_is(handle) || !index || index > s->handles.used)
		return NULL;
	m = &s->handles.memory[index];
	return m->granules && m->handles && handle_of(nvs_vmm_gpu(handle), m) == handle ? m : NULL;
}

struct memory *nvs_vmm_at(struct place p)
{
	uint32_t index = p.span->memory[p.granule];

	return index && index != OF_DRIVER ? &p.span->gpu->swap->handles.memory[index] : NULL;
}

/* ---- one thread at a time ---- */

bool nvs_vmm_idle(const struct memory *m)
{
	return !m->worker && !(m->at.span && nvs_vmm_chunk(m->at)->state == CHUNK_BUSY);
}

void nvs_vmm_pause(struct nvs_swap *s, unsigned seen)
{
	nvs_swap_unlock(s);
	nvs_swap_wait(s, seen, PIECE_NS);
	nvs_swap_lock(s);
}

struct memory *nvs_vmm_of(struct nvs_swap *s, unsigned long long handle)
{
	for (;;) {
		unsigned seen = atomic_load(&s->kick);
		struct memory *m = memory_find(handle);

		if (!m || nvs_vmm_idle(m))
			return m;
		nvs_vmm_pause(s, seen);
	}
}

void nvs_vmm_done(struct nvs_swap *s, struct memory *m)
{
	m->worker = NULL;
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
	nvs_swap_lock(s);
}

/* ---- places ---- */

void nvs_vmm_occupy(struct place p, uint32_t what, struct chunk c)
{
	struct region *r = nvs_vmm_region(p);
	uint32_t end = p.granule + c.granules - (p.span->head[p.granule] - 1);

	for (uint32_t i = 0; i < c.granules; i++)
		p.span->memory[p.granule + i] = what;
	p.span->chunk[p.granule] = c;
	if (r->end < end)
		r->end = end;
}

void nvs_vmm_vacate(struct place p)
{
	struct chunk *c = nvs_vmm_chunk(p);

	for (uint32_t i = 0; i < c->granules; i++)
		p.span->memory[p.granule + i] = 0;
	c->state = CHUNK_NONE;
}

/* ---- creation ---- */

/* Creates physical memory at once, if the GPU is held, or all fits that is promised. Returns CUresult. */
static int obtain(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t bytes = bytes_of(m->granules), since = 0;

	while (s->hold || nvs_swap_still(gpu)) {
		unsigned seen = atomic_load(&s->kick);
		bool told = since != 0;
		int result;

		if (s->resident + bytes <= nvs_swap_capacity(gpu)) {
			s->claiming -= bytes; /* it will count as the driver's */
			nvs_swap_unlock(s);
			result = nvs_chunk_create(gpu, bytes, &m->real);
			nvs_swap_lock(s);
			if (result == CUDA_SUCCESS)
				return result;
			m->real = 0;
			s->claiming += bytes;
			if (result != CUDA_ERROR_OUT_OF_MEMORY)
				return result;
			since = since ? since : nvs_now();
		} else if (!s->hold) {
			break;
		} else {
			since = 0;
		}
		if (!nvs_swap_refused(gpu, bytes, seen, since, told))
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return CUDA_SUCCESS;
}

/* Whether chunks have all properties that are asked for. */
static bool suits(const struct nvs_swap *s, size_t n, const struct cu_alloc_full *p,
		  unsigned long long flags)
{
	return n && n % GRANULE == 0 && n / GRANULE < UINT32_MAX && !flags &&
	       p->head.type == CU_MEM_ALLOCATION_PINNED &&
	       !(p->head.handle_types & ~(s->posix_fd ? CU_MEM_HANDLE_POSIX_FD : 0)) &&
	       p->rdma <= s->rdma && !p->compression && !p->usage;
}

/* Charges bytes that are in no chunk yet. Returns CUresult or NVS_VMM_DRIVER. */
static int claim(struct nvs_gpu *gpu, uint64_t bytes, struct nvs_claim *c)
{
	struct nvs_swap *s = gpu->swap;
	bool ok;

	nvs_swap_lock(s);
	s->claiming += bytes;
	nvs_swap_unlock(s);
	ok = nvs_claim(c, gpu, bytes);
	if (ok && c->gpu) {
		nvs_claim_exists(c);
		return CUDA_SUCCESS;
	}
	nvs_swap_lock(s);
	s->claiming -= bytes;
	nvs_swap_unlock(s);
	return ok ? NVS_VMM_DRIVER : CUDA_ERROR_OUT_OF_MEMORY;
}

int nvs_vmm_create(unsigned long long *handle, size_t n, const struct cu_alloc_prop *head,
		   unsigned long long flags)
{
	const struct cu_alloc_full *prop = (const struct cu_alloc_full *)head;
	struct nvs_gpu *gpu = nvs_gpu_of_location(&head->location);
	int result;
	struct nvs_claim c;
	struct nvs_swap *s;
	struct memory *m;

	if (!nvs_swap_on(gpu) || !handle || !suits(gpu->swap, n, prop, flags))
		return NVS_VMM_DRIVER;
	s = gpu->swap;
	result = claim(gpu, n, &c);
	if (result != CUDA_SUCCESS)
		return result;
	nvs_swap_lock(s);
	m = memory_new(gpu, (uint32_t)(n / GRANULE));
	if (m) {
		m->handle_types = prop->head.handle_types;
		m->rdma = prop->rdma;
		result = obtain(gpu, m); /* no other thread knows it yet */
	}
	if (m && result == CUDA_SUCCESS) {
		*handle = handle_of(gpu, m);
		atomic_store_explicit(&nvs_vmm_used, true, memory_order_release);
	} else {
		s->claiming -= n;
		if (m)
			nvs_vmm_forget(gpu, m);
		else
			result = NVS_VMM_DRIVER;
	}
	nvs_swap_unlock(s);
	if (result != CUDA_SUCCESS)
		nvs_claim_drop(&c);
	return result;
}

/* ---- end ---- */

/* Frees the chunk of a memory; may wait. */
static void drop_chunk(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk *c = nvs_vmm_chunk(m->at);
	uint64_t bytes = bytes_of(m->granules);

	nvs_arena_free(gpu, m->at);
	if (c->state == CHUNK_HERE) {
		c->state = CHUNK_BUSY;
		nvs_swap_unlock(s);
		nvs_chunk_unmap(m->at, 1);
		nvs_swap_lock(s);
		s->resident -= bytes;
	} else {
		s->away -= bytes;
	}
	s->claimed -= bytes;
	nvs_vmm_vacate(m->at);
	if (!m->shown)
		nvs_region_drop(m->at);
	m->at.span = NULL;
}

void nvs_vmm_destroy(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_claim c = { .gpu = gpu, .bytes = bytes_of(m->granules) };

	m->worker = &c;
	if (m->at.span) {
		drop_chunk(gpu, m);
	} else if (m->real) {
		nvs_swap_unlock(s);
		nvs_memory_driver.mem_release(m->real);
		nvs_swap_lock(s);
	} else {
		s->claiming -= c.bytes;
	}
	nvs_vmm_forget(gpu, m);
	nvs_swap_unlock(s);
	nvs_claim_drop(&c);
	nvs_swap_kick(s);
	nvs_swap_lock(s);
}

int nvs_vmm_release(unsigned long long *handle)
{
	struct nvs_gpu *gpu = nvs_vmm_gpu(*handle);
	struct nvs_swap *s = gpu->swap;
	int result = CUDA_SUCCESS;
	struct memory *m;

	if (nvs_memory_locked)
		return CUDA_ERROR_INVALID_VALUE; /* a signal handler, and its thread has a memory lock */
	nvs_swap_lock(s);
	m = nvs_vmm_of(s, *handle);
	if (!m) {
		result = CUDA_ERROR_INVALID_VALUE;
	} else if (--m->handles == 0) {
		if (m->pinned) {
			*handle = m->real;
			result = NVS_VMM_DRIVER;
			nvs_vmm_forget(gpu, m);
		} else if (!m->shown) {
			nvs_vmm_destroy(gpu, m);
		}
	}
	nvs_swap_unlock(s);
	return result;
}

/* ---- references and properties ---- */

int nvs_vmm_retain(unsigned long long *handle, CUdeviceptr address)
{
	struct place p = nvs_vmm_place(address);
	int result = NVS_VMM_DRIVER;
	struct nvs_swap *s;

	if (!p.span || !handle)
		return NVS_VMM_DRIVER;
	s = p.span->gpu->swap;
	nvs_swap_lock(s);
	for (;;) {
		unsigned seen = atomic_load(&s->kick);
		struct memory *m = nvs_vmm_at(p);

		if (m && !nvs_vmm_idle(m)) {
			nvs_vmm_pause(s, seen); /* it may be moving out */
			continue;
		}
		if (m) {
			m->handles++;
			*handle = handle_of(p.span->gpu, m);
			result = CUDA_SUCCESS;
		}
		break;
	}
	nvs_swap_unlock(s);
	return result;
}

int nvs_vmm_properties(struct cu_alloc_full *prop, unsigned long long handle)
{
	struct nvs_swap *s = nvs_vmm_gpu(handle)->swap;
	struct memory *m;

	if (nvs_memory_locked || !prop)
		return CUDA_ERROR_INVALID_VALUE;
	nvs_swap_lock(s);
	m = memory_find(handle);
	if (m)
		*prop = (struct cu_alloc_full){
			.head = { CU_MEM_ALLOCATION_PINNED, m->handle_types,
				  { CU_MEM_LOCATION_TYPE_DEVICE,
				    nvs_vmm_gpu(handle)->device.dev } },
			.rdma = m->rdma,
		};
	nvs_swap_unlock(s);
	return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void nvs_vmm_fork_child(void)
{
	atomic_store(&nvs_vmm_used, false);
}
