// SPDX-License-Identifier: Apache-2.0
/*
 * info.c: wrappers that tell a container about its memory as if its limit were
 * the size of the GPU. Without a limit they tell what the driver does, but where
 * memory is swapped nobody sees what others use.
 */
#include "reserve.h"
#include "swap.h"
#include "wrap.h"

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static bool limited(struct nvs_gpu *gpu, struct nvs_limits *l)
{
	return gpu && nvs_limits_of(gpu, NULL, l) && l->limit;
}

/* What cuMemGetInfo tells, of what the driver says. */
static void clamp(struct nvs_gpu *gpu, uint64_t *available, uint64_t *total)
{
	bool swapped = gpu && nvs_swap_is_on(gpu);
	/* Asked for before what is used: what is given up meanwhile never looks like in use again. */
	uint64_t kept = swapped ? nvs_swap_cached(gpu) : 0;
	struct nvs_limits l = { 0 };

	if (!limited(gpu, &l) && !swapped)
		return;
	if (swapped) {
		l.used -= kept < l.used ? kept : l.used;
		*available = *total; /* the rest can be made free */
	}
	*total = l.limit ? least(*total, l.limit) : *total;
	*available = least(*available, *total > l.used ? *total - l.used : 0);
}

WRAPPER(cuMemGetInfo_v2, (size_t *available, size_t *total))
{
	size_t a = 0, t = 0;
	int result = CALL(cuMemGetInfo_v2, &a, &t);
	uint64_t most = t, left = a;

	if (result == CUDA_SUCCESS && nvs_counting())
		clamp(nvs_gpu_of_current(), &left, &most);
	if (result == CUDA_SUCCESS && total)
		*total = most;
	if (result == CUDA_SUCCESS && available)
		*available = left;
	return result;
}

WRAPPER(cuDeviceTotalMem_v2, (size_t *bytes, int dev))
{
	int result = CALL(cuDeviceTotalMem_v2, bytes, dev);
	struct nvs_limits l;

	if (result == CUDA_SUCCESS && bytes && nvs_counting() && limited(nvs_gpu_of_device(dev), &l))
		*bytes = least(*bytes, l.limit);
	return result;
}
