// SPDX-License-Identifier: Apache-2.0
/*
 * nvml.c: wrappers of what NVML tells about memory, so that it agrees with what the
 * driver tells. Where no scheduler is, it is left as it is.
 */
#include "nvml.h"

#include "query.h"
#include "reserve.h"
#include "start.h"
#include "swap.h"
#include "uuid.h"
#include "wrap.h"

#define REAL(name, ...) \
	__extension__({ \
		__typeof__(&name) real_ = NVS_REAL(name); \
		real_ ? real_(__VA_ARGS__) : NVML_ERROR_FUNCTION_NOT_FOUND; \
	})

/* Where memory is swapped, a GPU is the container's alone as far as it can see. */
static struct nvs_gpu *swapped(const uint8_t *uuid)
{
	struct nvs_gpu *gpu = nvs_active() ? nvs_gpu_of_uuid(uuid) : NULL;

	return gpu && nvs_swap_is_on(gpu) ? gpu : NULL;
}

/* Whether the container sees figures of its own; those that cuMemGetInfo tells. */
static bool own(const uint8_t *uuid, struct nvs_limits *l, unsigned long long total,
		unsigned long long *free)
{
	struct nvs_gpu *gpu = swapped(uuid);
	/* Asked for before what is used: what is given up meanwhile never looks like in use again. */
	uint64_t kept = gpu && nvs_counting() ? nvs_swap_cached(gpu) : 0;

	if (!nvs_limits_of(NULL, uuid, l))
		return false;
	if (gpu) {
		l->used -= kept < l->used ? kept : l->used;
		l->limit = l->limit ? l->limit : total;
		*free = total; /* the rest can be made free */
	}
	return l->limit != 0;
}

static bool limited(void *device, struct nvs_limits *l, unsigned long long total,
		    unsigned long long *free)
{
	uint8_t uuid[NVS_UUID_SIZE];
	char text[96];

	nvs_at_fork(); /* a process that only asks NVML never comes to cuInit */
	return nvs_nvml.device_uuid &&
	       nvs_nvml.device_uuid(device, text, sizeof(text)) == NVML_SUCCESS &&
	       nvs_uuid_parse(text, uuid) && own(uuid, l, total, free);
}

/* Of a GPU that is full otherwise less is free than the container may have. */
static void clamp(const struct nvs_limits *l, unsigned long long *total, unsigned long long *free,
		  unsigned long long *used)
{
	*total = l->limit < *total ? l->limit : *total;
	*used = l->used < *total ? l->used : *total;
	*free = *free < *total - *used ? *free : *total - *used;
}

WRAPPER(nvmlDeviceGetMemoryInfo, (void *device, struct nvml_memory *m))
{
	int result = REAL(nvmlDeviceGetMemoryInfo, device, m);
	struct nvs_limits l;

	if (result == NVML_SUCCESS && limited(device, &l, m->total, &m->free))
		clamp(&l, &m->total, &m->free, &m->used);
	return result;
}

WRAPPER(nvmlDeviceGetMemoryInfo_v2, (void *device, struct nvml_memory_v2 *m))
{
	int result = REAL(nvmlDeviceGetMemoryInfo_v2, device, m);
	struct nvs_limits l;

	if (result == NVML_SUCCESS && limited(device, &l, m->total, &m->free)) {
		clamp(&l, &m->total, &m->free, &m->used);
		m->reserved = 0; /* for the driver: not out of the container's share */
	}
	return result;
}
