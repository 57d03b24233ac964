// SPDX-License-Identifier: Apache-2.0
/*
 * nvml.c: libnvidia-ml.so.1 over the shared state: what go-nvml and GPU
 * monitors ask first. It reads, and never takes a process slot.
 */
#include "shared.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) nvmlReturn_t

typedef int nvmlReturn_t;
typedef struct device *nvmlDevice_t;

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9,
	TIMEOUT = 10,
};

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct {
	char busIdLegacy[16];
	unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;
typedef struct { unsigned pid; unsigned long long usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct {
	unsigned pid;
	unsigned long long usedGpuMemory;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t; /* v2 and v3 */

_Static_assert(sizeof(nvmlPciInfo_t) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "nvmlProcessInfo_t");

struct device {
	int gpu;   /* of the node */
	int index; /* of this process */
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[SIM_MAX_GPUS];
static int ndevices, inits;
static pid_t owner; /* process that opened the state */

static nvmlReturn_t init(void)
{
	int seen[SIM_MAX_GPUS];
	nvmlReturn_t rc = SUCCESS;

	pthread_mutex_lock(&mu);
	if (owner && owner != getpid())
		sim_fork_child(); /* the parent's descriptor is not ours to lock with */
	if (sim_open()) {
		rc = DRIVER_NOT_LOADED;
	} else {
		owner = getpid();
		ndevices = sim_nodes(seen);
		for (int i = 0; i < ndevices; i++)
			devices[i] = (struct device){ seen[i], i };
		inits++;
	}
	pthread_mutex_unlock(&mu);
	return rc;
}

API nvmlInit_v2(void) { return init(); }
API nvmlInit(void) { return init(); }

API nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	return init();
}

API nvmlShutdown(void)
{
	nvmlReturn_t rc = SUCCESS;

	pthread_mutex_lock(&mu);
	if (!inits)
		rc = UNINITIALIZED;
	else if (!--inits && owner == getpid()) /* as the driver's: nothing stays open */
		sim_close();
	pthread_mutex_unlock(&mu);
	return rc;
}

#define NEED(cond)                               \
	do {                                     \
		if (!inits)                      \
			return UNINITIALIZED;    \
		if (!(cond))                     \
			return INVALID_ARGUMENT; \
	} while (0)

static int valid(nvmlDevice_t d)
{
	return d >= devices && d < devices + ndevices;
}

static nvmlReturn_t put(char *out, unsigned len, const char *text)
{
	if (strlen(text) + 1 > len)
		return INSUFFICIENT_SIZE;
	strcpy(out, text);
	return SUCCESS;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(nvmlReturn_t rc)
{
	switch (rc) {
	case SUCCESS: return "The operation was successful";
	case UNINITIALIZED: return "NVML was not first initialized with nvmlInit()";
	case INVALID_ARGUMENT: return "A supplied argument is invalid";
	case NOT_SUPPORTED: return "The requested operation is not available on target device";
	case NOT_FOUND: return "A query to find an object was unsuccessful";
	case INSUFFICIENT_SIZE: return "An input argument is not large enough";
	case DRIVER_NOT_LOADED: return "The simulated GPU's state could not be opened";
	}
	return "Unknown error";
}

API nvmlSystemGetDriverVersion(char *out, unsigned len)
{
	NEED(out);
	return put(out, len, "580.0.0-simgpu");
}

API nvmlSystemGetNVMLVersion(char *out, unsigned len)
{
	NEED(out);
	return put(out, len, "13.580.0");
}

API nvmlSystemGetCudaDriverVersion(int *version)
{
	NEED(version);
	*version = 13000;
	return SUCCESS;
}

API nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	return nvmlSystemGetCudaDriverVersion(version);
}

API nvmlDeviceGetCount_v2(unsigned *n)
{
	NEED(n);
	*n = (unsigned)ndevices;
	return SUCCESS;
}

API nvmlDeviceGetCount(unsigned *n)
{
	return nvmlDeviceGetCount_v2(n);
}

API nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d)
{
	NEED(d && i < (unsigned)ndevices);
	*d = &devices[i];
	return SUCCESS;
}

API nvmlDeviceGetHandleByIndex(unsigned i, nvmlDevice_t *d)
{
	return nvmlDeviceGetHandleByIndex_v2(i, d);
}

API nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *d)
{
	NEED(uuid && d);
	for (int i = 0; i < ndevices; i++) {
		char mine[41];

		sim_uuid_text(devices[i].gpu, mine);
		if (!strcasecmp(mine, uuid)) {
			*d = &devices[i];
			return SUCCESS;
		}
	}
	return NOT_FOUND;
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *d)
{
	unsigned domain, bus;

	NEED(id && d);
	if (sscanf(id, "%x:%x:", &domain, &bus) == 2)
		for (int i = 0; i < ndevices; i++)
			if (bus == (unsigned)devices[i].gpu + 1) {
				*d = &devices[i];
				return SUCCESS;
			}
	return NOT_FOUND;
}

API nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *d)
{
	return nvmlDeviceGetHandleByPciBusId_v2(id, d);
}

API nvmlDeviceGetUUID(nvmlDevice_t d, char *out, unsigned len)
{
	char uuid[41];

	NEED(valid(d) && out);
	sim_uuid_text(d->gpu, uuid);
	return put(out, len, uuid);
}

API nvmlDeviceGetName(nvmlDevice_t d, char *out, unsigned len)
{
	NEED(valid(d) && out);
	return put(out, len, "NVIDIA SimGPU");
}

API nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *out)
{
	NEED(valid(d) && out);
	*out = (unsigned)d->index;
	return SUCCESS;
}

API nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned *out)
{
	NEED(valid(d) && out);
	*out = (unsigned)d->gpu;
	return SUCCESS;
}

API nvmlDeviceGetBrand(nvmlDevice_t d, int *out)
{
	NEED(valid(d) && out);
	*out = 0; /* unknown */
	return SUCCESS;
}

API nvmlDeviceGetArchitecture(nvmlDevice_t d, unsigned *out)
{
	NEED(valid(d) && out);
	*out = 9;
	return SUCCESS;
}

API nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *major, int *minor)
{
	NEED(valid(d) && major && minor);
	*major = 9;
	*minor = 0;
	return SUCCESS;
}

API nvmlDeviceGetComputeMode(nvmlDevice_t d, int *out)
{
	NEED(valid(d) && out);
	*out = 0;
	return SUCCESS;
}

API nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *out)
{
	NEED(valid(d) && out);
	out->total = sim_memory();
	out->used = sim_used(d->gpu);
	out->free = out->total - out->used;
	return SUCCESS;
}

API nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *out)
{
	NEED(valid(d) && out);
	out->total = sim_memory();
	out->used = sim_used(d->gpu);
	out->free = out->total - out->used;
	out->reserved = 0;
	return SUCCESS;
}

API nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *out)
{
	NEED(valid(d) && out);
	memset(out, 0, sizeof *out);
	out->bus = (unsigned)d->gpu + 1;
	out->pciDeviceId = 0x233510de;
	snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "0000:%02X:00.0", out->bus & 0xff);
	snprintf(out->busId, sizeof out->busId, "00000000:%02X:00.0", out->bus & 0xff);
	return SUCCESS;
}

API nvmlDeviceGetPciInfo_v2(nvmlDevice_t d, nvmlPciInfo_t *out)
{
	return nvmlDeviceGetPciInfo_v3(d, out);
}

/* Now or never: 100 while a kernel runs, else 0. */
API nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *out)
{
	NEED(valid(d) && out);
	out->gpu = sim_busy(d->gpu) ? 100 : 0;
	out->memory = out->gpu;
	return SUCCESS;
}

/* 90 W and 35 degrees, and while a kernel runs 350 W and 65. */
API nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned *milliwatts)
{
	NEED(valid(d) && milliwatts);
	*milliwatts = sim_busy(d->gpu) ? 350000 : 90000;
	return SUCCESS;
}

API nvmlDeviceGetTemperature(nvmlDevice_t d, unsigned sensor, unsigned *celsius)
{
	NEED(valid(d) && sensor == 0 && celsius);
	*celsius = sim_busy(d->gpu) ? 65 : 35;
	return SUCCESS;
}

/* Process ids as this process's pid namespace shows them; others are hidden. */
API nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *out)
{
	static struct sim_user users[SIM_MAX_SLOTS];
	unsigned room;
	int found;

	NEED(valid(d) && n);
	room = out ? *n : 0;
	pthread_mutex_lock(&mu);
	found = sim_users(d->gpu, users, SIM_MAX_SLOTS);
	for (int i = 0; i < found && i < (int)room; i++)
		out[i] = (nvmlProcessInfo_t){ users[i].pid, users[i].memory, ~0u, ~0u };
	pthread_mutex_unlock(&mu);
	*n = (unsigned)found;
	return (unsigned)found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

API nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *out)
{
	return nvmlDeviceGetComputeRunningProcesses_v3(d, n, out);
}

API nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_v1_t *out)
{
	nvmlProcessInfo_t *tmp;
	nvmlReturn_t rc;
	unsigned room;

	NEED(valid(d) && n);
	room = out ? *n : 0;
	tmp = calloc(room + 1, sizeof *tmp);
	if (!tmp)
		return INSUFFICIENT_SIZE;
	*n = room;
	rc = nvmlDeviceGetComputeRunningProcesses_v3(d, n, tmp);
	for (unsigned i = 0; i < *n && i < room; i++)
		out[i] = (nvmlProcessInfo_v1_t){ tmp[i].pid, tmp[i].usedGpuMemory };
	free(tmp);
	return rc;
}

/* No process uses a GPU for graphics or through MPS. */
#define NO_PROCESSES(name, type)                                 \
	API name(nvmlDevice_t d, unsigned *n, type *out)         \
	{                                                        \
		(void)out;                                       \
		NEED(valid(d) && n);                             \
		*n = 0;                                          \
		return SUCCESS;                                  \
	}
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

typedef struct {
	unsigned version, mode, numProcArrayEntries;
	struct {
		unsigned pid;
		unsigned long long usedGpuMemory;
		unsigned gpuInstanceId, computeInstanceId;
		unsigned long long usedGpuCcProtectedMemory;
	} *procArray;
} nvmlProcessDetailList_t;

API nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t d, nvmlProcessDetailList_t *list)
{
	nvmlProcessInfo_t all[64];
	unsigned n = 64, room;

	NEED(valid(d) && list);
	if (nvmlDeviceGetComputeRunningProcesses_v3(d, &n, all) == INSUFFICIENT_SIZE || list->mode)
		n = 0; /* mode 0: compute; more than 64 are not simulated */
	room = list->procArray ? list->numProcArrayEntries : 0;
	list->numProcArrayEntries = n;
	if (n > room)
		return INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n; i++) {
		list->procArray[i].pid = all[i].pid;
		list->procArray[i].usedGpuMemory = all[i].usedGpuMemory;
		list->procArray[i].gpuInstanceId = list->procArray[i].computeInstanceId = ~0u;
		list->procArray[i].usedGpuCcProtectedMemory = 0;
	}
	return SUCCESS;
}

typedef struct {
	unsigned pid;
	unsigned long long timeStamp;
	unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

/*
 * What a process had of the GPU since the caller's question before. (The real driver has
 * one sample of each process, of its latest period, which is a second at most.)
 */
API nvmlDeviceGetProcessUtilization(nvmlDevice_t d, nvmlProcessUtilizationSample_t *out, unsigned *n,
				    unsigned long long since)
{
	static struct sim_user users[SIM_MAX_SLOTS];
	static struct reading { uint64_t process, ran, at; } before[SIM_MAX_GPUS][SIM_MAX_SLOTS];
	uint64_t now = sim_now();
	unsigned busy = 0, room;
	struct timespec day;
	int found;

	(void)since;
	NEED(valid(d) && n);
	room = out ? *n : 0;
	clock_gettime(CLOCK_REALTIME, &day);
	pthread_mutex_lock(&mu);
	found = sim_users(d->gpu, users, SIM_MAX_SLOTS);
	for (int i = 0; i < found && i < SIM_MAX_SLOTS; i++) {
		struct reading *r = &before[d->gpu][users[i].process >> 32];
		uint64_t ran = users[i].ran - (r->process == users[i].process ? r->ran : 0);
		uint64_t took = r->process == users[i].process ? now - r->at : ran;

		if (!ran || !took)
			continue;
		if (busy < room) {
			out[busy] = (nvmlProcessUtilizationSample_t){
				.pid = users[i].pid, .smUtil = (unsigned)(100 * ran / took),
				.timeStamp = (unsigned long long)day.tv_sec * 1000000 + (unsigned long long)day.tv_nsec / 1000,
			};
			*r = (struct reading){ users[i].process, users[i].ran, now };
		}
		busy++;
	}
	pthread_mutex_unlock(&mu);
	*n = busy;
	return !busy ? NOT_FOUND : busy > room ? INSUFFICIENT_SIZE : SUCCESS;
}

typedef struct {
	unsigned version, processSamplesCount;
	unsigned long long lastSeenTimeStamp;
	struct {
		unsigned long long timeStamp;
		unsigned pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
	} *procUtilArray;
} nvmlProcessesUtilizationInfo_t;

API nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t d, nvmlProcessesUtilizationInfo_t *u)
{
	static nvmlProcessUtilizationSample_t all[SIM_MAX_SLOTS];
	unsigned n = SIM_MAX_SLOTS, room;
	nvmlReturn_t rc;

	NEED(valid(d) && u);
	rc = nvmlDeviceGetProcessUtilization(d, all, &n, u->lastSeenTimeStamp);
	if (rc)
		return rc;
	room = u->procUtilArray ? u->processSamplesCount : 0;
	u->processSamplesCount = n;
	if (n > room)
		return INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n; i++) {
		memset(&u->procUtilArray[i], 0, sizeof u->procUtilArray[i]);
		u->procUtilArray[i].timeStamp = all[i].timeStamp;
		u->procUtilArray[i].pid = all[i].pid;
		u->procUtilArray[i].smUtil = all[i].smUtil;
	}
	return SUCCESS;
}

API nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *current, unsigned *pending)
{
	(void)current;
	(void)pending;
	NEED(valid(d));
	return NOT_SUPPORTED;
}

API nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned *n)
{
	NEED(valid(d) && n);
	*n = 0;
	return SUCCESS;
}

API nvmlDeviceIsMigDeviceHandle(nvmlDevice_t d, unsigned *is)
{
	NEED(valid(d) && is);
	*is = 0;
	return SUCCESS;
}

/* Events: each line "GPU XID" of run/xid is an Xid error. */
typedef struct { long read; } *nvmlEventSet_t;
typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

enum { XID_EVENT = 8 };

static FILE *open_xids(void)
{
	char path[512];

	snprintf(path, sizeof(path), "%s/xid", sim_state_dir());
	return fopen(path, "re");
}

/* A set tells of errors after its creation. */
API nvmlEventSetCreate(nvmlEventSet_t *out)
{
	FILE *f;

	NEED(out);
	*out = calloc(1, sizeof(**out));
	if (!*out)
		return INSUFFICIENT_SIZE;
	f = open_xids();
	if (f) {
		fseek(f, 0, SEEK_END);
		(*out)->read = ftell(f);
		fclose(f);
	}
	return SUCCESS;
}

API nvmlEventSetFree(nvmlEventSet_t set)
{
	NEED(set);
	free(set);
	return SUCCESS;
}

API nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *types)
{
	NEED(valid(d) && types);
	*types = XID_EVENT;
	return SUCCESS;
}

API nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t set)
{
	NEED(valid(d) && set);
	return types & ~(unsigned long long)XID_EVENT ? NOT_SUPPORTED : SUCCESS;
}

API nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned timeout_ms)
{
	unsigned gpu, xid;
	FILE *f;

	(void)timeout_ms; /* only those who do not wait are served */
	NEED(set && out);
	f = open_xids();
	if (!f)
		return TIMEOUT;
	if (fseek(f, set->read, SEEK_SET) || fscanf(f, "%u %u\n", &gpu, &xid) != 2 || gpu >= (unsigned)ndevices) {
		fclose(f);
		return TIMEOUT;
	}
	set->read = ftell(f);
	fclose(f);
	*out = (nvmlEventData_t){ .device = &devices[gpu], .eventType = XID_EVENT, .eventData = xid };
	return SUCCESS;
}
