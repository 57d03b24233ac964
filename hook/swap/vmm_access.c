// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_access.c: the access that the application gives itself to what it has mapped.
 */
#include "vmm_impl.h"

/* Whether the driver is to change a mapping for this caller. */
static bool is_claimed(struct place p, const void *worker)
{
	const struct memory *m = nvs_vmm_at(p);

	return m ? m->worker == worker : nvs_vmm_chunk(p)->state == CHUNK_PINNED;
}

/* Claims the mappings of a range that are on the GPU for this caller; others get their access when they come in. */
static void claim_mappings(struct nvs_swap *s, struct place at, uint64_t end, const void *worker,
			 int flags)
{
	for (; at.granule < end; at = nvs_vmm_next(at)) {
		struct memory *m = nvs_vmm_at(at);
		unsigned seen = atomic_load(&s->kick);

		for (; m && !nvs_vmm_idle(m); m = nvs_vmm_at(at), seen = atomic_load(&s->kick))
			nvs_vmm_pause(s, seen);
		if (m && nvs_vmm_chunk(at)->state == CHUNK_HERE) {
			m->worker = worker;
			nvs_vmm_chunk(at)->state = CHUNK_BUSY;
		} else if (m) {
			m->access = (uint8_t)flags;
		}
	}
}

/* Makes one driver call for mappings side by side. The lock is held, and given up meanwhile. */
static int access_of_range(struct nvs_swap *s, struct place at, uint64_t end,
			   const struct cu_access *a, size_t count, const void *worker)
{
	int result = CUDA_SUCCESS;

	while (at.granule < end) {
		struct place to = at;

		while (to.granule < end && is_claimed(to, worker))
			to = nvs_vmm_next(to);
		if (to.granule > end)
			to.granule = (uint32_t)end;
		if (to.granule == at.granule) {
			at = nvs_vmm_next(at);
			continue;
		}
		nvs_swap_unlock(s);
		if (result == CUDA_SUCCESS)
			result = nvs_memory_driver.set_access(address_of(at), bytes_of(to.granule - at.granule),
						       a, count);
		nvs_swap_lock(s);
		for (; at.granule < to.granule; at.granule++) { /* what was not claimed may be mapped anew */
			struct memory *m = nvs_vmm_at(at);

			if (!m || m->worker != worker)
				continue;
			if (result == CUDA_SUCCESS)
				m->access = (uint8_t)a[count - 1].flags;
			m->worker = NULL;
			nvs_vmm_chunk(m->at)->state = CHUNK_HERE;
		}
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
	claim_mappings(s, at, end, &end, flags);
	result = access_of_range(s, at, end, a, count, &end);
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
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

	return nvs_memory_driver.set_access(address_of(p), bytes_of(nvs_vmm_chunk(p)->granules), &a, 1);
}

/* The memory of a chunk that copies have no access to; NULL: they have. */
static const struct memory *closed(struct place p)
{
	const struct memory *m = nvs_vmm_region(p)->kind >= REGION_APP ? nvs_vmm_at(p) : NULL;

	return m && m->shown && m->access != CU_MEM_ACCESS_READWRITE ? m : NULL;
}

int nvs_vmm_leaving(struct place p)
{
	return closed(p) ? set_access(p, CU_MEM_ACCESS_READWRITE) : CUDA_SUCCESS;
}

void nvs_vmm_arrived(struct place p)
{
	const struct memory *m = closed(p);

	if (m)
		set_access(p, m->access);
}
