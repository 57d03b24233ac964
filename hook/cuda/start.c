// SPDX-License-Identifier: Apache-2.0
/*
 * start.c: what happens when the driver is first initialised, and in a child of fork.
 */
#include "start.h"

#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "clock.h"
#include "futex.h"
#include "gate.h"
#include "glibc.h"
#include "hook.h"
#include "identify.h"
#include "lock.h"
#include "log.h"
#include "memory.h"
#include "coverage.h"
#include "place.h"
#include "stream.h"
#include "swap.h"

/*
 * In a forked child CUDA is as if never initialised, and so is the shim. Other
 * threads may have held any lock at the fork, so everything starts afresh.
 */
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
	const struct nvs_driver_table *v = &nvs_driver;
	int count = 0;
	unsigned n = 0;

	if (!v->device_count || !v->device_get || v->device_count(&count) != CUDA_SUCCESS)
		return 0;
	for (int i = 0; i < count && n < NVS_MAX_CHANNELS; i++) {
		size_t bytes = 0;

		if (v->device_get(&d[n].dev, i) != CUDA_SUCCESS)
			break;
		if (!nvs_device_uuid(d[n].dev, d[n].uuid))
			memset(d[n].uuid, 0, NVS_UUID_SIZE);
		if (v->device_total_mem && v->device_total_mem(&bytes, d[n].dev) == CUDA_SUCCESS)
			d[n].total_mem = bytes;
		n++;
	}
	if (count > NVS_MAX_CHANNELS)
		nvs_debugf("the process sees %d GPUs; nobody arbitrates its work on all but the first %d", count,
			   NVS_MAX_CHANNELS);
	return n;
}

/*
 * pthread_atfork is in a static part of some glibc versions and calls this. It
 * is weak because musl has no such function, and a program that musl loads
 * must not fail for it; it never gets here.
 */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *)
	__attribute__((weak));
extern void *__dso_handle __attribute__((visibility("hidden")));

void nvs_at_fork(void)
{
	static atomic_bool once;

	if (!atomic_exchange(&once, true) && __register_atfork)
		__register_atfork(NULL, NULL, fork_child, __dso_handle);
}

static void start(void)
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
		(void)atexit(nvs_client_exit);
	nvs_client_start(devices, count, coverage.interposed, coverage.bypassed);
}

/*
 * Of several threads that initialise the driver at once the others wait, lest
 * what they submit slips through before there is a gate. Not for ever: they
 * may hold what the first one needs, the linker's lock in a constructor.
 */
static void wait_ready(void)
{
	uint64_t start_ns = nvs_now();

	while (!atomic_load(&ready) && !starting && nvs_now() - start_ns < READY_WAIT_NS)
		nvs_nap(100 * NVS_US);
}

void nvs_before_start(void)
{
	if (!atomic_load(&started))
		nvs_place_follow();
}

void nvs_start(void)
{
	if (atomic_load(&ready))
		return;
	if (atomic_exchange(&started, true)) {
		wait_ready();
		return;
	}
	starting = true;
	start();
	starting = false;
	atomic_store(&ready, true);
}
