// SPDX-License-Identifier: Apache-2.0
/*
 * array.c: wrappers of what allocates and frees arrays. They are the driver's
 * own, with a layout that only it knows: where memory is swapped they stay.
 */
#include "memory.h"
#include "swap.h"
#include "wrap.h"

enum { OLD_2D, OLD_3D, NEW_2D, NEW_3D };

/* The four descriptors as one. Arrays of these flags get no memory of their own. */
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

/* Bits of an element; block-compressed and planar formats: of a pixel, rounded up. */
static uint bits_of(uint format, uint channels)
{
	switch (format) {
	case 0x01: case 0x08: /* 8-bit integers */
		return 8 * channels;
	case 0x02: case 0x09: case 0x10: /* 16-bit integers, half */
		return 16 * channels;
	case 0x03: case 0x0a: case 0x20: /* 32-bit integers, float */
		return 32 * channels;
	case 0x91: case 0x92: case 0x97: case 0x98: /* BC1, BC4 */
		return 4;
	case 0x93: case 0x94: case 0x95: case 0x96: /* BC2, BC3 */
	case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e: /* BC5 to BC7 */
		return 8;
	case 0xc0: case 0xc6:
		return 8;
	case 0xc1: case 0xc3: case 0xc7: case 0xc9:
		return 16;
	case 0xc2: case 0xc4: case 0xc8: case 0xca: case 0x50:
		return 32;
	case 0xc5: case 0xcb:
		return 64;
	case 0xb0: /* NV12 */
		return 12;
	case 0xa2: case 0xa5: /* NV16, YUY2 */
		return 16;
	case 0x9f: case 0xa1: case 0xb2: case 0xb4: /* P010, P016, 4:4:4 of 8 bits */
		return 24;
	case 0xa3: case 0xa4: case 0xa6: case 0xa7: case 0xa8: case 0xa9:
		return 32;
	default:
		return 8 * channels;
	}
}

/* What the elements take, at least. */
static uint64_t elements_bytes(const struct cu_array3d *d, uint levels)
{
	size_t w = d->width, h = d->height ? d->height : 1, z = d->depth ? d->depth : 1;
	uint64_t sum = 0;

	for (uint l = 0; l < levels && l < 32; l++) {
		sum += nvs_times(nvs_times(nvs_times(w, h), z), bits_of(d->format, d->channels)) / 8;
		w = w > 1 ? w / 2 : 1;
		h = h > 1 ? h / 2 : 1;
		if (!(d->flags & CU_ARRAY3D_LAYERED))
			z = z > 1 ? z / 2 : 1;
	}
	return sum;
}

FREE(cuArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)
FREE(cuMipmappedArrayDestroy, NVS_MEMORY_ARRAY, (void *array), (array), array)

/* Wrappers below; only their types are needed here. */
NVS_EXPORT int cuArray3DCreate_v2(void **array, const void *desc);
NVS_EXPORT int cuMipmappedArrayCreate(void **array, const void *desc, uint levels);

/*
 * What an array takes with its layout's padding. The driver tells for arrays of
 * deferred mapping only, so one is made just like it: that takes no memory.
 */
static uint64_t array_bytes(const struct cu_array3d *d, uint levels, bool mipmapped, struct nvs_gpu *gpu)
{
	int dev = gpu ? gpu->device.dev : 0, known = -1;
	uint64_t estimate = elements_bytes(d, levels);
	struct cu_array_requirements r = { 0 };
	struct cu_array3d twin = *d;
	void *a = NULL;

	twin.flags |= CU_ARRAY3D_DEFERRED_MAPPING;
	if (!gpu) {
		return estimate;
	} else if (mipmapped) {
		if (nvs_driver.mipmap_requirements &&
		    CALL(cuMipmappedArrayCreate, &a, &twin, levels) == CUDA_SUCCESS) {
			known = nvs_driver.mipmap_requirements(&r, a, dev);
			CALL(cuMipmappedArrayDestroy, a);
		}
	} else if (nvs_driver.array_requirements &&
		   CALL(cuArray3DCreate_v2, &a, &twin) == CUDA_SUCCESS) {
		known = nvs_driver.array_requirements(&r, a, dev);
		CALL(cuArrayDestroy, a);
	}
	return known == CUDA_SUCCESS && r.size > estimate ? r.size : estimate;
}

#define ARRAY(name, P, A, version, levels, mipmapped) \
	WATCH(name, P) \
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
