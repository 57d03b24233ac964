// SPDX-License-Identifier: Apache-2.0
/*
 * nvml.c: wrappers of what NVML tells about memory and processes, so that it
 * agrees with what the driver tells. Where no scheduler is, all of it is left
 * as it is.
 */
#include "nvml.h"

#include "swap.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "query.h"
#include "reserve.h"
#include "start.h"
#include "uuid.h"
#include "wrap.h"

#define REAL(name, ...) \
	__extension__({ \
		__typeof__(&name) real_ = NVS_REAL(name); \
		real_ ? real_(__VA_ARGS__) : NVML_ERROR_FUNCTION_NOT_FOUND; \
	})

/* ---- memory ---- */

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

/* ---- processes: those of the caller's container ---- */

struct cgroup {
	long size;
	char text[2048];
};

/* Without functions that are cancellation points. Returns false if it is not to be read. */
static bool read_cgroup(const char *path, struct cgroup *g)
{
	int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return false;
	g->size = syscall(SYS_read, fd, g->text, sizeof(g->text));
	syscall(SYS_close, fd);
	return g->size > 0;
}

static bool is_neighbour(const struct cgroup *own, unsigned pid)
{
	struct cgroup other;
	char path[32];

	(void)snprintf(path, sizeof(path), "/proc/%u/cgroup", pid);
	return read_cgroup(path, &other) && other.size == own->size &&
	       memcmp(other.text, own->text, (size_t)own->size) == 0;
}

/* Keeps the entries of the caller's container; returns how many they are. */
static unsigned keep_neighbours(void *list, unsigned count, size_t size, size_t pid_at)
{
	struct cgroup own;
	int saved = errno;
	unsigned kept = 0;

	if (!read_cgroup("/proc/self/cgroup", &own))
		own.size = -1; /* like none */
	for (unsigned i = 0; i < count; i++) {
		char *from = (char *)list + i * size;
		unsigned pid;

		memcpy(&pid, from + pid_at, sizeof(pid));
		if (!is_neighbour(&own, pid))
			continue;
		if (kept != i)
			memcpy((char *)list + kept * size, from, size);
		kept++;
	}
	errno = saved;
	return kept;
}

typedef int list_fn(void *device, unsigned *count, void *list);

#define ROOM     256
#define ROOM_MAX 65536
#define ENTRY_MAX 64 /* a driver's own entries may be larger than those of its header */

/*
 * The whole list is asked for, whatever room the caller has, so that the size
 * that he is told is that of what he gets.
 */
static int running(list_fn *real, void *device, unsigned *count, void *list, size_t size)
{
	char few[ROOM * ENTRY_MAX];
	unsigned room = ROOM, n, kept;
	char *all = few;
	size_t mapped = 0;
	int result;

	if (!real)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	if (!count || !nvs_scheduler_exists())
		return real(device, count, list);
	for (;;) {
		n = room;
		result = real(device, &n, all);
		if (result != NVML_ERROR_INSUFFICIENT_SIZE || n > ROOM_MAX)
			break;
		if (mapped)
			munmap(all, mapped);
		room = n > room ? 2 * n : 2 * room;
		mapped = (size_t)room * ENTRY_MAX;
		all = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (all == MAP_FAILED || room > 4 * ROOM_MAX)
			return real(device, count, NULL);
	}
	if (result == NVML_SUCCESS) {
		kept = keep_neighbours(all, n, size, 0);
		if (kept > *count || (kept && !list))
			result = NVML_ERROR_INSUFFICIENT_SIZE;
		else if (kept)
			memcpy(list, all, kept * size);
		*count = kept;
	}
	if (mapped)
		munmap(all, mapped);
	return result;
}

#define RUNNING(name, type) \
	WRAPPER(name, (void *device, unsigned *count, type *list)) \
	{ \
		return running((list_fn *)NVS_REAL(name), device, count, list, sizeof(type)); \
	}
RUNNING(nvmlDeviceGetComputeRunningProcesses, struct nvml_process_v1)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, struct nvml_process)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, struct nvml_process)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, struct nvml_process_v1)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v2, struct nvml_process)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3, struct nvml_process)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, struct nvml_process_v1)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v2, struct nvml_process)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v3, struct nvml_process)

/* The lists that follow are filtered in place: a size asked for is that of all. */

WRAPPER(nvmlDeviceGetRunningProcessDetailList, (void *device, struct nvml_process_details *d))
{
	int result = REAL(nvmlDeviceGetRunningProcessDetailList, device, d);

	if (result == NVML_SUCCESS && d->list && nvs_scheduler_exists())
		d->count = keep_neighbours(d->list, d->count, sizeof(*d->list), 0);
	return result;
}

WRAPPER(nvmlDeviceGetProcessUtilization,
      (void *device, struct nvml_sample *list, unsigned *count, unsigned long long last_seen))
{
	int result = REAL(nvmlDeviceGetProcessUtilization, device, list, count, last_seen);

	if (result != NVML_SUCCESS || !list || !nvs_scheduler_exists())
		return result;
	*count = keep_neighbours(list, *count, sizeof(*list), 0);
	return *count ? result : NVML_ERROR_NOT_FOUND;
}

WRAPPER(nvmlDeviceGetProcessesUtilizationInfo, (void *device, struct nvml_utilizations *u))
{
	int result = REAL(nvmlDeviceGetProcessesUtilizationInfo, device, u);

	if (result != NVML_SUCCESS || !u->list || !nvs_scheduler_exists())
		return result;
	u->count = keep_neighbours(u->list, u->count, sizeof(*u->list),
				   offsetof(struct nvml_utilization, pid));
	return u->count ? result : NVML_ERROR_NOT_FOUND;
}
