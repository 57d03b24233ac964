// SPDX-License-Identifier: Apache-2.0
/*
 * array.c: wrappers that allocate and free arrays. Only the driver knows the layout of an
 * array, so that arrays never move.
 */
#include "memory.h"
#include "swap.h"
#include "wrap.h"

enum { OLD_2D, OLD_3D, NEW_2D, NEW_3D };

/* Reads a descriptor of any version. False: an array of these flags has no memory of its own. */
static bool read_descriptor(int version, const void *desc, struct cu_array3d *d)
{
	if (!desc)
		return false;
	if (version == NEW_3D) {
		*d = *(const struct cu_array3d *)desc;
	} else if (version == NEW_2D) {
		const struct cu_array *a = desc;

		*d = (struct cu_array3d){ a->width, a->height, 0, a->format, a->channels, 0 };
	} else if (version == OLD_3D) {
		const struct cu_array3d_v1 *a = desc;

		*d = (struct cu_array3d){ a->width, a->height, a->depth, a->format, a->channels,
					  a->flags };
	} else {
		const struct cu_array_v1 *a = desc;

		*d = (struct cu_array3d){ a->width, a->height, 0, a->format, a->channels, 0 };
	}
	return !(d->flags & (CU_ARRAY3D_SPARSE | CU_ARRAY3D_DEFERRED_MAPPING));
}

FREE(cuArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)
FREE(cuMipmappedArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)

/* Wrappers below; only their types are needed here. */
NVS_EXPORT int cuArray3DCreate_v2(void **array, const void *desc);
NVS_EXPORT int cuMipmappedArrayCreate(void **array, const void *desc, uint levels);

/* Where the driver does not tell: 4 bytes for each channel, and all levels of a pyramid. */
static uint64_t guess(const struct cu_array3d *d, uint levels)
{
	uint64_t rows = nvs_times(d->height ? d->height : 1, d->depth ? d->depth : 1);

	return nvs_times(nvs_times(d->width, rows), 4ull * d->channels * (levels > 1 ? 2 : 1));
}

/*
 * The bytes of an array with the padding of its layout. The driver tells them only of
 * arrays of deferred mapping, so such an array is made for a moment: it takes no memory.
 */
static uint64_t array_bytes(const struct cu_array3d *d, uint levels, bool mipmapped, struct nvs_gpu *gpu)
{
	struct cu_array_requirements r = { 0 };
	struct cu_array3d twin = *d;
	int known = -1;
	void *a = NULL;

	twin.flags |= CU_ARRAY3D_DEFERRED_MAPPING;
	if (!gpu)
		return 0; /* nothing is counted */
	if (mipmapped && nvs_driver.mipmap_requirements &&
	    CALL(cuMipmappedArrayCreate, &a, &twin, levels) == CUDA_SUCCESS) {
		known = nvs_driver.mipmap_requirements(&r, a, gpu->device.dev);
		CALL(cuMipmappedArrayDestroy, a);
	} else if (!mipmapped && nvs_driver.array_requirements &&
		   CALL(cuArray3DCreate_v2, &a, &twin) == CUDA_SUCCESS) {
		known = nvs_driver.array_requirements(&r, a, gpu->device.dev);
		CALL(cuArrayDestroy, a);
	}
	return known == CUDA_SUCCESS && r.size ? r.size : guess(d, levels);
}

#define ARRAY(name, P, A, version, levels, mipmapped) \
	WRAPPER(name, P) \
	{ \
		struct cu_array3d d; \
		struct nvs_claim claim; \
		unsigned tries = 0; \
		struct nvs_gpu *gpu; \
		int result; \
		void *ctx; \
		if (!nvs_counting() || !read_descriptor(version, desc, &d)) \
			return CALL(name, NVS_SPREAD A); \
		ctx = nvs_current_context(); \
		gpu = nvs_gpu_here(ctx); \
		if (!nvs_claim(&claim, gpu, array_bytes(&d, levels, mipmapped, gpu))) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		do \
			result = CALL(name, NVS_SPREAD A); \
		while (nvs_unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && \
		       nvs_swap_retry(claim.gpu, &tries)); \
		if (result == CUDA_SUCCESS) \
			nvs_claim_keep(&claim, NVS_MEMORY_ARRAY, (uintptr_t)*array, claim.bytes, \
				       ctx); \
		else \
			nvs_claim_drop(&claim); \
		return result; \
	}

ARRAY(cuArrayCreate, (void **array, const void *desc), (array, desc), OLD_2D, 1, false)
ARRAY(cuArrayCreate_v2, (void **array, const void *desc), (array, desc), NEW_2D, 1, false)
ARRAY(cuArray3DCreate, (void **array, const void *desc), (array, desc), OLD_3D, 1, false)
ARRAY(cuArray3DCreate_v2, (void **array, const void *desc), (array, desc), NEW_3D, 1, false)
ARRAY(cuMipmappedArrayCreate, (void **array, const void *desc, uint levels), (array, desc, levels),
      NEW_3D, levels, true)
