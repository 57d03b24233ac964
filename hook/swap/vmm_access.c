// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_access.c: the access that the application gives itself to what it has mapped.
 */
#include "vmm_impl.h"

/*
 * Where those mappings from a place on end whose access one driver call may change: they are on the GPU, and
 * busy from now on. The place itself: what is there gets its access when it comes in.
 */
static struct place claim_mappings(struct place at, uint64_t end)
{
	struct memory *m;

	while (at.granule < end && (m = nvs_vmm_at(at)) && chunk_of(m->home)->state == CHUNK_HERE) {
		chunk_of(m->home)->state = CHUNK_BUSY;
		at = nvs_vmm_next(at);
	}
	return at;
}

/* They are no longer busy, and have this access; -1: what they had. */
static void unclaim(struct nvs_swap *s, struct place at, struct place to, int flags)
{
	for (struct memory *m; at.granule < to.granule && (m = nvs_vmm_at(at)); at = nvs_vmm_next(at)) {
		if (flags >= 0)
			m->access = (uint8_t)flags;
		nvs_vmm_done(s, m);
	}
}

/* Changes the access to the mappings of a range, side by side with one call. The lock is held, and given up meanwhile. */
static int access_of_range(struct nvs_swap *s, struct place at, uint64_t end, const struct cu_access *a, size_t count)
{
	int result = CUDA_SUCCESS, flags = a[count - 1].flags;

	while (at.granule < end && result == CUDA_SUCCESS) {
		struct memory *m = nvs_vmm_idle_at(at);
		struct place to = claim_mappings(at, end);

		if (to.granule == at.granule) {
			to = nvs_vmm_next(at);
			if (m)
				m->access = (uint8_t)flags;
			if (at.span->memory[at.granule] != OF_DRIVER) {
				at = to;
				continue;
			}
			m = NULL;
		}
		nvs_swap_unlock(s);
		result = nvs_memory_driver.set_access(address_of(at), bytes_of(to.granule - at.granule), a, count);
		nvs_swap_lock(s);
		if (m)
			unclaim(s, at, to, result == CUDA_SUCCESS ? flags : -1);
		at = to;
	}
	return result;
}

int nvs_vmm_set_access(CUdeviceptr p, size_t n, const struct cu_access *a, size_t count)
{
	struct place at = nvs_vmm_place(p);
	uint64_t end = at.granule + n / GRANULE;
	struct nvs_swap *s;
	bool others = false, ok;
	int flags, result;

	if (!at.span || !a || !count)
		return NVS_VMM_DRIVER;
	flags = a[count - 1].flags;
	s = at.span->gpu->swap;
	for (size_t i = 0; i < count; i++)
		others = others ||
			 nvs_gpu_of_location(&a[i].location) != at.span->gpu;
	nvs_swap_lock(s);
	ok = nvs_vmm_whole(at, p, n);
	nvs_swap_unlock(s);
	if (!ok || (!others && flags != CU_MEM_ACCESS_NONE && flags != CU_MEM_ACCESS_READ &&
		    flags != CU_MEM_ACCESS_READWRITE))
		return CUDA_ERROR_INVALID_VALUE;
	if (others) {
		nvs_vmm_pin(p, n);
		return NVS_VMM_DRIVER;
	}
	nvs_swap_lock(s);
	result = access_of_range(s, at, end, a, count);
	nvs_swap_unlock(s);
	return result;
}

int nvs_vmm_get_access(unsigned long long *flags, const struct cu_location *l, CUdeviceptr p)
{
	struct place at = nvs_vmm_place(p);
	const struct memory *m;
	struct nvs_swap *s;

	if (!at.span || !flags || !l)
		return NVS_VMM_DRIVER;
	s = at.span->gpu->swap;
	nvs_swap_lock(s);
	m = nvs_vmm_at(at);
	if (m)
		*flags = nvs_gpu_of_location(l) == at.span->gpu ? m->access
									     : CU_MEM_ACCESS_NONE;
	nvs_swap_unlock(s);
	return m ? CUDA_SUCCESS : NVS_VMM_DRIVER;
}

/* ---- while a chunk moves ---- */

/* The chunk is busy: no other thread changes it. */
static int set_access(struct place p, int flags)
{
	struct cu_access a = { { CU_MEM_LOCATION_TYPE_DEVICE, p.span->gpu->device.dev },
			       flags };

	return nvs_memory_driver.set_access(chunk_of(p)->address, bytes_of(chunk_of(p)->granules), &a, 1);
}

/* The access that the application has to a chunk, where it has less than copies need; else that. */
static int access_to(struct place p)
{
	struct nvs_swap *s = p.span->gpu->swap;
	int access = CU_MEM_ACCESS_READWRITE;
	const struct region *r;

	nvs_swap_lock(s);
	r = region_at(p);
	if (r->kind == REGION_MEMORY && chunk_of(p)->address != address_of(p))
		access = r->memory.access;
	nvs_swap_unlock(s);
	return access;
}

int nvs_vmm_leaving(struct place p)
{
	struct chunk *c = chunk_of(p);
	int result;

	if (c->bare) {
		result = nvs_memory_driver.mem_map(c->address, bytes_of(c->granules), 0, c->handle, 0);
		if (result != CUDA_SUCCESS)
			return result;
		c->bare = false;
	} else if (access_to(p) == CU_MEM_ACCESS_READWRITE) {
		return CUDA_SUCCESS;
	}
	return set_access(p, CU_MEM_ACCESS_READWRITE);
}

void nvs_vmm_arrived(struct place p)
{
	int access = access_to(p);

	if (access != CU_MEM_ACCESS_READWRITE)
		set_access(p, access);
}
