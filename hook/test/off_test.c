// SPDX-License-Identifier: Apache-2.0
/*
 * off_test.c: the shim's own view of the driver's channels, and what ends while
 * they are off. The shim is inside this program; the GPU is simulated.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cases.h"
#include "check.h"
#include "cudadrv.h"
#include "rm.h"

/* core/stream.h, whose words for the driver's types are not those of cudadrv.h */
struct nvs_gpu;
struct nvs_gpu *nvs_gpu_of_device(int dev);
struct nvs_context_held {
	bool drain, move;
};
struct nvs_context_held nvs_context_hold(struct nvs_gpu *gpu);
void nvs_context_unhold(struct nvs_gpu *gpu, struct nvs_context_held h);

static uint8_t gpu[NVS_RM_UUID];
static CUcontext context;
static CUstream stream;

/* A context, and a kernel that runs for 20 ms. */
static void begin(bool primary)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n";
	uint64_t ns = 20000000, record = 0;
	void *params[] = { &ns, &record };
	CUmodule module;
	CUfunction spin;

	CU(cuInit(0));
	CU(cuDeviceGetUuid_v2((CUuuid *)gpu, 0));
	if (primary) {
		CU(cuDevicePrimaryCtxRetain(&context, 0));
		CU(cuCtxSetCurrent(context));
	} else {
		CU(cuCtxCreate_v2(&context, 0, 0));
	}
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CU(cuModuleLoadData(&module, ptx));
	CU(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
}

static struct nvs_rm_state state(void)
{
	struct nvs_rm_state s;

	nvs_rm_state(gpu, &s);
	return s;
}

static enum nvs_rm_result off(void)
{
	return nvs_rm_channels(gpu, false);
}

static void the_shim_sees_the_channels(void)
{
	begin(false);
	CHECK(state().compute_groups == 1 && state().channels == 8 && state().other_groups == 3);
	CHECK(!strcmp(state().driver, "580.159.04") && nvs_rm_prove(gpu) == NVS_RM_OK);
	CU(cuStreamSynchronize(stream));
}

static void a_context_is_destroyed_while_they_are_off(void)
{
	begin(false);
	CHECK(off() == NVS_RM_OK);
	errno = 77;
	CU(cuCtxDestroy_v2(context)); /* waits for the kernel */
	CHECK(errno == 77 && !state().compute_groups && !state().keepers);
}

static atomic_bool drains;

/* As a drain: waits for the GPU under the lock that the end of a context wants. */
static void *drain(void *ctx)
{
	struct nvs_context_held held;

	CU(cuCtxSetCurrent(ctx));
	held = nvs_context_hold(nvs_gpu_of_device(0));
	CHECK(held.drain);
	atomic_store(&drains, true);
	CU(cuCtxSynchronize());
	nvs_context_unhold(nvs_gpu_of_device(0), held);
	return NULL;
}

static void a_context_is_destroyed_while_a_drain_waits(void)
{
	pthread_t t;

	begin(false);
	CHECK(off() == NVS_RM_OK);
	CHECK(pthread_create(&t, NULL, drain, context) == 0);
	while (!atomic_load(&drains))
		usleep(1000);
	CU(cuCtxDestroy_v2(context));
	pthread_join(t, NULL);
	CHECK(!state().compute_groups && !state().keepers);
}

static void a_primary_context_ends_while_they_are_off(void)
{
	begin(true);
	CHECK(off() == NVS_RM_OK);
	CU(cuDevicePrimaryCtxRelease_v2(0));
	CHECK(!state().compute_groups && !state().keepers);
}

static void one_that_can_not_be_destroyed_lets_go(void)
{
	begin(true);
	CHECK(cuCtxDestroy_v2(context) == CUDA_ERROR_INVALID_CONTEXT);
	CHECK(!state().keepers && off() == NVS_RM_OK && nvs_rm_channels(gpu, true) == NVS_RM_OK);
	CU(cuStreamSynchronize(stream));
}

static void the_process_ends_while_they_are_off(void)
{
	begin(false);
	CHECK(off() == NVS_RM_OK);
	exit(0);
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(the_shim_sees_the_channels),
	CASE(a_context_is_destroyed_while_they_are_off),
	CASE(a_context_is_destroyed_while_a_drain_waits),
	CASE(a_primary_context_ends_while_they_are_off),
	CASE(one_that_can_not_be_destroyed_lets_go),
	CASE(the_process_ends_while_they_are_off),
#undef CASE
};

int main(int argc, char **argv)
{
	alarm(600);
	return run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
