// SPDX-License-Identifier: Apache-2.0
/*
 * start.c: what a program calls first: cuInit, and the ways to find the driver's other functions.
 * What happens then, and in a child of fork.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "exit.h"
#include "futex.h"
#include "glibc.h"
#include "lock.h"
#include "log.h"
#include "query.h"
#include "uuid.h"
#include "wrap.h"

/* In a forked child CUDA is as if never initialised, and any lock may be held: all starts afresh. */
static atomic_bool started, ready;
static __thread bool starting __attribute__((tls_model("initial-exec")));

#define READY_WAIT_NS (2 * NVS_S)

static void fork_child(void)
{
	nvs_locks_fork_child();
	nvs_threads_fork_child();
	nvs_stream_fork_child();
	nvs_driver_fork_child();
	nvs_memory_fork_child();
	nvs_swap_fork_child();
	nvs_client_fork_child();
	atomic_store(&started, false);
	atomic_store(&ready, false);
	starting = false;
}

static unsigned list_devices(struct nvs_device *d)
{
	const struct nvs_memory_driver_table *v = &nvs_memory_driver;
	int count = 0;
	unsigned n = 0;

	if (v->device_count(&count) != CUDA_SUCCESS)
		return 0;
	for (int i = 0; i < count && n < NVS_MAX_CHANNELS; i++) {
		size_t bytes = 0;

		if (v->device_get(&d[n].dev, i) != CUDA_SUCCESS)
			break;
		if (!nvs_device_uuid(d[n].dev, d[n].uuid))
			memset(d[n].uuid, 0, NVS_UUID_SIZE);
		if (v->device_total_mem(&bytes, d[n].dev) == CUDA_SUCCESS)
			d[n].total_mem = bytes;
		n++;
	}
	if (count > NVS_MAX_CHANNELS)
		nvs_debugf("the process sees %d GPUs; nvshare schedules its work on the first %d only", count,
			   NVS_MAX_CHANNELS);
	return n;
}

/* pthread_atfork is in a static part of some glibc versions and calls this. Weak: musl has no such function. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *)
	__attribute__((weak));
extern void *__dso_handle __attribute__((visibility("hidden")));

void nvs_at_fork(void)
{
	static atomic_bool once;

	if (!atomic_exchange(&once, true) && __register_atfork)
		__register_atfork(NULL, NULL, fork_child, __dso_handle);
}

static void start_client(void)
{
	static atomic_bool once;
	struct nvs_device devices[NVS_MAX_CHANNELS] = { 0 };
	struct nvs_coverage coverage;
	unsigned count;

	nvs_log_init();
	count = list_devices(devices);
	if (count == 0 || !nvs_late_find())
		return;
	coverage = nvs_coverage_check();
	nvs_at_fork();
	/* Runs before what was registered earlier, so before the driver's end. */
	if (!atomic_exchange(&once, true))
		(void)atexit(nvs_exit);
	nvs_client_start(devices, count, coverage.interposed, coverage.bypassed);
}

/*
 * Of several threads that initialise the driver the others wait, lest what they submit slips
 * through. Not for ever: they may hold what the first one needs, the linker's lock in a constructor.
 */
static void wait_ready(void)
{
	NVS_NAP_UNTIL(atomic_load(&ready) || starting, nvs_now() + READY_WAIT_NS, 100 * NVS_US);
}

/* ---- the GPU of a container that may move among several ---- */

/* What the CDI spec, or the plugin, sets where a container may move: package cdi, AnyMark. */
#define MARK_ENV "NVSHARE_GPU"
#define MARK     "any"
#define GPU_ENV  "CUDA_VISIBLE_DEVICES"

/* Other threads may read the environment: it keeps its form. The kernel writes, because it refuses a constant. */
static bool overwrite(char *at, const char *text)
{
	int ends[2];
	bool done;

	if (syscall(SYS_pipe2, ends, O_CLOEXEC) != 0)
		return false;
	done = syscall(SYS_write, ends[1], text, (size_t)NVS_UUID_TEXT) == NVS_UUID_TEXT &&
	       syscall(SYS_read, ends[0], at, (size_t)NVS_UUID_TEXT) == NVS_UUID_TEXT;
	(void)syscall(SYS_close, ends[0]);
	(void)syscall(SYS_close, ends[1]);
	return done;
}

/* Whether text names one GPU, and nothing else. */
static bool names_one(const char *text, uint8_t *uuid)
{
	char again[NVS_UUID_TEXT + 1];

	if (!nvs_uuid_parse(text, uuid))
		return false;
	nvs_uuid_format(again, uuid);
	return strcmp(text, again) == 0;
}

/*
 * Before the driver's cuInit, which reads CUDA_VISIBLE_DEVICES: where the container has begun on
 * another GPU, or has moved, the variable is changed in place. Waits up to 5 s for a scheduler that
 * lives.
 */
static void follow_place(void)
{
	const char *mark = secure_getenv(MARK_ENV);
	char *seen = secure_getenv(GPU_ENV), text[NVS_UUID_TEXT + 1];
	uint8_t uuid[NVS_UUID_SIZE], place[NVS_UUID_SIZE];
	int saved = errno;

	if (mark && strcmp(mark, MARK) == 0 && seen && names_one(seen, uuid) &&
	    nvs_query_place(uuid, place) && memcmp(uuid, place, sizeof(place)) != 0) {
		nvs_uuid_format(text, place);
		if (overwrite(seen, text))
			nvs_debugf("the container is on %s", text);
	}
	errno = saved;
}

/*
 * A program that podman exec, sshd or env -i has started in a container has the shim by
 * /etc/ld.so.preload, and nothing of the container's environment: it would begin on the first GPU that
 * it can open. What it lacks is added. Other threads may read the environment now: the list of
 * variables is replaced as a whole, and the old one stays.
 */
static void find_place(void)
{
	static const uint8_t none[NVS_UUID_SIZE];
	static char mark[] = MARK_ENV "=" MARK, sees[sizeof(GPU_ENV "=") + NVS_UUID_TEXT] = GPU_ENV "=";
	uint8_t place[NVS_UUID_SIZE];
	size_t count = 0;
	char **all;
	int saved = errno;

	if (!getauxval(AT_SECURE) && !secure_getenv("LD_PRELOAD") && !secure_getenv(MARK_ENV) &&
	    !secure_getenv(GPU_ENV) && nvs_query_place(none, place)) {
		nvs_uuid_format(sees + strlen(GPU_ENV "="), place);
		while (environ && environ[count])
			count++;
		all = mmap(NULL, (count + 3) * sizeof(*all), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (all != MAP_FAILED) {
			if (count)
				memcpy(all, environ, count * sizeof(*all));
			all[count] = mark;
			all[count + 1] = sees;
			environ = all;
			nvs_debugf("the container is on %s", sees);
		}
	}
	errno = saved;
}

static void start_once(void)
{
	if (atomic_load(&ready))
		return;
	if (atomic_exchange(&started, true)) {
		wait_ready();
		return;
	}
	starting = true;
	start_client();
	starting = false;
	atomic_store(&ready, true);
}

WRAPPER(cuInit, (uint flags))
{
	int result, saved;

	if (!atomic_load(&started)) {
		find_place();
		follow_place();
	}
	result = CALL(cuInit, flags);
	saved = errno;
	if (result == CUDA_SUCCESS)
		start_once();
	errno = saved;
	return result;
}

/* ---- the resolver: real one first, then the pointer it returned ---- */

static int substitute(int result, void **pfn)
{
	if (result == CUDA_SUCCESS && pfn)
		*pfn = nvs_substitute(*pfn);
	return result;
}

#define RESOLVER(name, P, A) WRAPPER(name, P) { return substitute(CALL(name, NVS_SPREAD A), pfn); }
#define RESOLVERS(name, P, A) RESOLVER(name, P, A) RESOLVER(name##_ptsz, P, A)
RESOLVERS(cuGetProcAddress, (const char *symbol, void **pfn, int version, uint64_t flags), (symbol, pfn, version, flags))
RESOLVERS(cuGetProcAddress_v2, (const char *symbol, void **pfn, int version, uint64_t flags, void *status),
	  (symbol, pfn, version, flags, status))
