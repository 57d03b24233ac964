// SPDX-License-Identifier: Apache-2.0
/* array.c: wrappers that allocate and free arrays, whose layout only the driver knows: they never move. */
#include "wrap.h"

/* A descriptor of two dimensions as one of three. */
static struct cu_array3d flat(const struct cu_array *a)
{
	return (struct cu_array3d){ a->width, a->height, 0, a->format, a->channels, 0 };
}

FREE(cuArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)
FREE(cuMipmappedArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)

/* Wrappers below; only their types are needed here. */
NVS_EXPORT int cuArray3DCreate_v2(void **array, const struct cu_array3d *desc);
NVS_EXPORT int cuMipmappedArrayCreate(void **array, const struct cu_array3d *desc, uint levels);

/* Where the driver does not tell: 4 bytes for each channel, and all levels of a pyramid. */
static uint64_t guess(const struct cu_array3d *d, uint levels)
{
	uint64_t rows = nvs_times(d->height ? d->height : 1, d->depth ? d->depth : 1);

	return nvs_times(nvs_times(d->width, rows), 4ull * d->channels * (levels > 1 ? 2 : 1));
}

/* Sparse arrays and those of deferred mapping have no memory of their own. */
static bool has_memory(uint flags)
{
	return !(flags & (CU_ARRAY3D_SPARSE | CU_ARRAY3D_DEFERRED_MAPPING));
}

/*
 * The bytes of an array with its padding. The driver tells them of arrays of deferred mapping alone,
 * so such an array is made for a moment: it takes no memory.
 */
static uint64_t array_bytes(struct cu_array3d d, uint levels, bool mipmapped)
{
	struct nvs_gpu *gpu = nvs_counting() ? nvs_gpu_here(nvs_current_context()) : NULL;
	struct cu_array_requirements r = { 0 };
	struct cu_array3d twin = d;
	int known = -1;
	void *a = NULL;

	twin.flags |= CU_ARRAY3D_DEFERRED_MAPPING;
	if (!gpu || !has_memory(d.flags))
		return 0; /* nothing is counted */
	if (mipmapped && CALL(cuMipmappedArrayCreate, &a, &twin, levels) == CUDA_SUCCESS) {
		known = nvs_memory_driver.mipmap_requirements(&r, a, gpu->device.dev);
		CALL(cuMipmappedArrayDestroy, a);
	} else if (!mipmapped && CALL(cuArray3DCreate_v2, &a, &twin) == CUDA_SUCCESS) {
		known = nvs_memory_driver.array_requirements(&r, a, gpu->device.dev);
		CALL(cuArrayDestroy, a);
	}
	return known == CUDA_SUCCESS && r.size ? r.size : guess(&d, levels);
}

/* Makes an array that takes so much memory. */
#define ARRAY(descriptor, levels, mipmapped, call) \
	desc ? ALLOCATING(array_bytes(descriptor, levels, mipmapped), NVS_MEMORY_ARRAY, array, 0, call) : call

WRAPPER(cuArrayCreate_v2, (void **array, const struct cu_array *desc))
{
	return ARRAY(flat(desc), 1, false, CALL(cuArrayCreate_v2, array, desc));
}

WRAPPER(cuArray3DCreate_v2, (void **array, const struct cu_array3d *desc))
{
	return ARRAY(*desc, 1, false, CALL(cuArray3DCreate_v2, array, desc));
}

WRAPPER(cuMipmappedArrayCreate, (void **array, const struct cu_array3d *desc, uint levels))
{
	return ARRAY(*desc, levels, true, CALL(cuMipmappedArrayCreate, array, desc, levels));
}
