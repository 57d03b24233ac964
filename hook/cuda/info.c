// SPDX-License-Identifier: Apache-2.0
/*
 * info.c: wrappers that tell a container of its memory as if its limit were the size of the GPU.
 * Where memory is swapped nobody sees what others use.
 */
#include "reserve.h"
#include "wrap.h"

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

bool nvs_tell(struct nvs_gpu *gpu, const uint8_t *uuid, struct nvs_told *t)
{
	/* Asked for before what is used: what is given up meanwhile never looks like in use again. */
	uint64_t kept = gpu && nvs_swap_is_on(gpu) && nvs_counting() ? nvs_swap_cached(gpu) : 0;
	struct nvs_limits l = { 0 };
	bool limited = (gpu || uuid) && nvs_limits_of(gpu, uuid, &l) && l.limit;
	bool swapped = gpu && nvs_swap_is_on(gpu); /* known by now */

	if (!limited && !swapped)
		return false;
	if (swapped) {
		l.used -= least(kept, l.used);
		t->available = t->total; /* the rest can be made free */
	}
	t->total = l.limit ? least(t->total, l.limit) : t->total;
	t->used = least(l.used, t->total);
	/* Of a GPU that is full otherwise less is free than the container may have. */
	t->available = least(t->available, t->total - t->used);
	return true;
}

WRAPPER(cuMemGetInfo_v2, (size_t *available, size_t *total))
{
	size_t a = 0, t = 0;
	int result = CALL(cuMemGetInfo_v2, &a, &t);
	struct nvs_told told = { .total = t, .available = a };

	if (result != CUDA_SUCCESS)
		return result;
	if (nvs_counting())
		nvs_tell(nvs_gpu_of_current(), NULL, &told);
	if (total)
		*total = told.total;
	if (available)
		*available = told.available;
	return result;
}

WRAPPER(cuDeviceTotalMem_v2, (size_t *bytes, int dev))
{
	int result = CALL(cuDeviceTotalMem_v2, bytes, dev);
	struct nvs_told told = { 0 };

	if (result == CUDA_SUCCESS && bytes && nvs_counting()) {
		told.total = *bytes;
		nvs_tell(nvs_gpu_of_device(dev), NULL, &told);
		*bytes = told.total;
	}
	return result;
}
