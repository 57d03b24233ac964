// SPDX-License-Identifier: Apache-2.0
/*
 * nvml.c: wrappers of what NVML tells about memory, so that it agrees with the driver, also for
 * processes that never initialise CUDA. Handles are void *, results are int.
 */
#include "uuid.h"
#include "wrap.h"

enum {
	NVML_SUCCESS                  = 0,
	NVML_ERROR_FUNCTION_NOT_FOUND = 13,
};

struct nvml_memory {
	unsigned long long total, free, used;
};

struct nvml_memory_v2 {
	unsigned version;
	unsigned long long total, reserved, free, used;
};

_Static_assert(sizeof(struct nvml_memory_v2) == 40, "nvmlMemory_v2_t");

#define REAL(name, ...) \
	__extension__({ \
		__typeof__(&name) real_ = NVS_REAL(name); \
		real_ ? real_(__VA_ARGS__) : NVML_ERROR_FUNCTION_NOT_FOUND; \
	})

/* Whether the container sees figures of its own: these, then. */
static bool own(void *device, unsigned long long *total, unsigned long long *free, unsigned long long *used)
{
	struct nvs_told t = { *total, *free, *used };
	uint8_t uuid[NVS_UUID_SIZE];
	char text[96];

	nvs_at_fork(); /* a process that only asks NVML never comes to cuInit */
	if (!nvs_nvml.device_uuid || nvs_nvml.device_uuid(device, text, sizeof(text)) != NVML_SUCCESS ||
	    !nvs_uuid_parse(text, uuid) || !nvs_tell(nvs_active() ? nvs_gpu_of_uuid(uuid) : NULL, uuid, &t))
		return false;
	*total = t.total;
	*free = t.available;
	*used = t.used;
	return true;
}

WRAPPER(nvmlDeviceGetMemoryInfo, (void *device, struct nvml_memory *m))
{
	int result = REAL(nvmlDeviceGetMemoryInfo, device, m);

	if (result == NVML_SUCCESS)
		own(device, &m->total, &m->free, &m->used);
	return result;
}

WRAPPER(nvmlDeviceGetMemoryInfo_v2, (void *device, struct nvml_memory_v2 *m))
{
	int result = REAL(nvmlDeviceGetMemoryInfo_v2, device, m);

	if (result == NVML_SUCCESS && own(device, &m->total, &m->free, &m->used))
		m->reserved = 0; /* for the driver: not out of the container's share */
	return result;
}
