// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_memory.c: the memories that the application's handles stand for, from cuMemCreate
 * to the last reference.
 */
#include "vmm_impl.h"

atomic_bool nvs_vmm_used;

static _Atomic uint64_t serials;

/* ---- handles ---- */

static unsigned long long handle_of(const struct memory *m)
{
	return NVS_VMM_MARK << 48 | (m->serial & 0xffff) << 32 | nvs_vmm_number(m->home);
}

static struct memory *memory_find(unsigned long long handle)
{
	struct place p = nvs_vmm_numbered((uint32_t)handle);
	struct memory *m;

	if (!nvs_vmm_is(handle) || !p.span || p.span->head[p.granule] != p.granule + 1 ||
	    region_of(p)->kind != REGION_MEMORY)
		return NULL;
	m = &region_of(p)->memory;
	return m->serial && m->handles && handle_of(m) == handle ? m : NULL;
}

struct memory *nvs_vmm_at(struct place p)
{
	uint32_t number = p.span->memory[p.granule];

	return number && number != OF_DRIVER ? &region_of(nvs_vmm_numbered(number - 1))->memory : NULL;
}

/* ---- one thread at a time ---- */

bool nvs_vmm_idle(const struct memory *m)
{
	return chunk_of(m->home)->state != CHUNK_BUSY;
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
	struct place home;

	if (!nvs_swap_on(gpu) || !handle || !suits(gpu->swap, n, prop, flags))
		return NVS_VMM_DRIVER;
	home = nvs_region_alloc(gpu, REGION_MEMORY, (uint32_t)(n / GRANULE));
	if (home.span) {
		struct memory *m = &region_of(home)->memory;

		*m = (struct memory){ .home = home, .granules = region_of(home)->granules, .handles = 1,
				      .handle_types = prop->head.handle_types, .rdma = prop->rdma,
				      .serial = 1ull << 62 | ++serials };
		*handle = handle_of(m);
		atomic_store_explicit(&nvs_vmm_used, true, memory_order_release);
	}
	nvs_swap_unlock(gpu->swap);
	return home.span ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- end ---- */

void nvs_vmm_destroy(struct nvs_gpu *gpu, struct memory *m)
{
	m->serial = 0;
	nvs_region_free(gpu, m->home);
}

void nvs_vmm_forget(struct memory *m)
{
	m->serial = 0;
	nvs_region_drop(m->home);
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
		if (m->drivers) {
			*handle = chunk_of(m->home)->handle;
			result = NVS_VMM_DRIVER;
			nvs_vmm_forget(m);
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
		*handle = handle_of(m);
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
