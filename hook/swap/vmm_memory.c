// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_memory.c: the memories that the application's handles stand for, from cuMemCreate
 * to the last reference.
 */
#include <sys/mman.h>

#include "vmm_impl.h"

atomic_bool nvs_vmm_used;

static _Atomic uint64_t serials;

/* ---- the table ---- */

static struct memory *memory_new(struct nvs_gpu *gpu, struct place home)
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
	*m = (struct memory){ .home = home, .index = index, .generation = generation,
			      .granules = region_of(home)->granules, .handles = 1, .serial = 1ull << 62 | ++serials };
	region_of(home)->memory = index;
	return m;
}

void nvs_vmm_forget(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;

	if (m->home.span)
		region_of(m->home)->memory = 0;
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
	return !m->home.span || chunk_of(m->home)->state != CHUNK_BUSY;
}

struct memory *nvs_vmm_idle_at(struct place p)
{
	for (;;) {
		unsigned seen = atomic_load(&p.span->gpu->swap->kick);
		struct memory *m = nvs_vmm_at(p);

		if (!m || nvs_vmm_idle(m))
			return m;
		nvs_swap_pause(p.span->gpu->swap, seen);
	}
}

struct memory *nvs_vmm_of(struct nvs_swap *s, unsigned long long handle)
{
	for (;;) {
		unsigned seen = atomic_load(&s->kick);
		struct memory *m = memory_find(handle);

		if (!m || nvs_vmm_idle(m))
			return m;
		nvs_swap_pause(s, seen);
	}
}

void nvs_vmm_done(struct nvs_swap *s, struct memory *m)
{
	chunk_of(m->home)->state = CHUNK_HERE;
	nvs_swap_kick(s);
}

/* ---- places ---- */

void nvs_vmm_occupy(struct place p, uint32_t what, uint32_t granules)
{
	for (uint32_t i = 0; i < granules; i++)
		p.span->memory[p.granule + i] = what;
	*chunk_of(p) = (struct chunk){ .granules = granules, .state = CHUNK_MAPPED };
}

void nvs_vmm_vacate(struct place p)
{
	for (uint32_t i = 0; i < chunk_of(p)->granules; i++)
		p.span->memory[p.granule + i] = 0;
	chunk_of(p)->state = CHUNK_NONE;
}

/* ---- creation ---- */

/* Whether chunks have all properties that are asked for. */
static bool suits(const struct nvs_swap *s, size_t n, const struct cu_alloc_full *p,
		  unsigned long long flags)
{
	return n && n % GRANULE == 0 && n / GRANULE < UINT32_MAX && !flags &&
	       p->head.type == CU_MEM_ALLOCATION_PINNED &&
	       !(p->head.handle_types & ~(s->posix_fd ? CU_MEM_HANDLE_POSIX_FD : 0)) &&
	       p->rdma <= s->rdma && !p->compression && !p->usage;
}

int nvs_vmm_create(unsigned long long *handle, size_t n, const struct cu_alloc_prop *head,
		   unsigned long long flags)
{
	const struct cu_alloc_full *prop = (const struct cu_alloc_full *)head;
	struct nvs_gpu *gpu = nvs_gpu_of_location(&head->location);
	struct memory *m = NULL;
	struct place home;

	if (!nvs_swap_on(gpu) || !handle || !suits(gpu->swap, n, prop, flags))
		return NVS_VMM_DRIVER;
	home = nvs_region_alloc(gpu, REGION_MEMORY, (uint32_t)(n / GRANULE));
	if (home.span)
		m = memory_new(gpu, home);
	if (m) {
		m->handle_types = prop->head.handle_types;
		m->rdma = prop->rdma;
		*handle = handle_of(gpu, m);
		atomic_store_explicit(&nvs_vmm_used, true, memory_order_release);
	} else if (home.span) {
		nvs_region_free(gpu, home);
	}
	nvs_swap_unlock(gpu->swap);
	return m ? CUDA_SUCCESS : home.span ? NVS_VMM_DRIVER : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- end ---- */

void nvs_vmm_destroy(struct nvs_gpu *gpu, struct memory *m)
{
	struct place home = m->home;

	nvs_vmm_forget(gpu, m);
	nvs_region_free(gpu, home);
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
		if (!m->home.span) {
			*handle = m->real;
			result = NVS_VMM_DRIVER;
			nvs_vmm_forget(gpu, m);
		} else if (!nvs_vmm_shown(m)) {
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
	struct memory *m;

	if (!p.span || !handle)
		return NVS_VMM_DRIVER;
	s = p.span->gpu->swap;
	nvs_swap_lock(s);
	m = nvs_vmm_idle_at(p);
	if (m) {
		m->handles++;
		*handle = handle_of(p.span->gpu, m);
		result = CUDA_SUCCESS;
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
