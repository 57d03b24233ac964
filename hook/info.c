// SPDX-License-Identifier: Apache-2.0
/*
 * info.c: wrappers that tell a container about its memory as if its limit were
 * the size of the GPU. Without a limit they tell what the driver does.
 */
#include "reserve.h"
#include "wrap.h"

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static bool limited(int channel, struct nvs_limits *l)
{
	return channel >= 0 && nvs_limits_of(channel, NULL, l) && l->limit;
}

/* The pre-3.2 variants have sizes of 32 bits. */
#define MEM_GET_INFO(name, size) \
	WATCH(name, (size *available, size *total)) \
	{ \
		int result = CALL(name, available, total); \
		struct nvs_limits l; \
		if (result == CUDA_SUCCESS && nvs_counting() && limited(nvs_channel_of_current(), &l)) { \
			if (total) \
				*total = (size)least(*total, l.limit); \
			if (available) \
				*available = (size)least(*available, \
							 l.limit > l.used ? l.limit - l.used : 0); \
		} \
		return result; \
	}
MEM_GET_INFO(cuMemGetInfo, uint)
MEM_GET_INFO(cuMemGetInfo_v2, size_t)

#define TOTAL_MEM(name, size) \
	WATCH(name, (size *bytes, int dev)) \
	{ \
		int result = CALL(name, bytes, dev); \
		struct nvs_limits l; \
		if (result == CUDA_SUCCESS && bytes && nvs_counting() && \
		    limited(nvs_client_channel(dev), &l)) \
			*bytes = (size)least(*bytes, l.limit); \
		return result; \
	}
TOTAL_MEM(cuDeviceTotalMem, uint)
TOTAL_MEM(cuDeviceTotalMem_v2, size_t)
