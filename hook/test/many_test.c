// SPDX-License-Identifier: Apache-2.0
/*
 * many_test.c: a process on as many GPUs as a connection has channels, and on one more.
 * Run with the shim preloaded, on 33 simulated GPUs; one case per process, "" lists them.
 * The process is the client, and plays the scheduler too.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "cases.h"
#include "cudadrv.h"
#include "fake.h"

#define GPUS NVS_MAX_CHANNELS

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
			  ".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n";

static struct fake fake;
static CUcontext contexts[GPUS + 1];
static CUstream streams[GPUS + 1];
static CUfunction spin[GPUS + 1];
static CUdeviceptr memory[GPUS + 1];

/* On GPU i, which the process has not used yet. */
static void make_context(int i)
{
	CUmodule m;

	CU(cuCtxCreate_v2(&contexts[i], 0, i));
	if (i < GPUS) {
		struct nvs_frame a = fake_attach(&fake);

		CHECK(a.channel == i && a.u.attach.ordinal == (uint32_t)i);
	}
	CU(cuModuleLoadData(&m, ptx));
	CU(cuModuleGetFunction(&spin[i], m, "nvshare_spin"));
	CU(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
	CU(cuMemAlloc_v2(&memory[i], 4096));
}

/* No drain is cut: its work would ask again. */
static void begin(void)
{
	struct nvs_frame f;
	int count;

	CHECK(setenv("NVSHARE_SIMGPU_RM", "refused", 1) == 0);
	fake_init(&fake);
	fake.memory = true;
	fake_listen(&fake);
	CU(cuInit(0));
	f = fake_accept(&fake);
	CU(cuDeviceGetCount(&count));
	CHECK(count == GPUS + 1 && f.u.reg.channels == GPUS);
}

static void launch(int i, uint64_t ns)
{
	uint64_t zero = 0;
	void *params[] = { &ns, &zero };

	CU(cuCtxSetCurrent(contexts[i]));
	CU(cuLaunchKernel(spin[i], 1, 1, 1, 1, 1, 1, 0, streams[i], params, NULL));
}

static atomic_int launched;

static void *launch_main(void *arg)
{
	launch((int)(intptr_t)arg, 20000000);
	atomic_fetch_add(&launched, 1);
	return NULL;
}

/* The gate of each GPU is its own, and each RELEASE comes when that GPU is idle. */
static void each_gpu_gates_and_drains(void)
{
	pthread_t thread[GPUS];

	begin();
	for (int i = 0; i < GPUS; i++)
		make_context(i);
	for (int i = 0; i < GPUS; i++) {
		CHECK(pthread_create(&thread[i], NULL, launch_main, (void *)(intptr_t)i) == 0);
		CHECK(fake_expect(&fake, NVS_REQUEST).channel == i);
	}
	CHECK(atomic_load(&launched) == 0);
	for (int i = 0; i < GPUS; i++) {
		fake_grant(&fake, (unsigned)i, 100 + (uint64_t)i);
		CHECK(pthread_join(thread[i], NULL) == 0);
		CHECK(atomic_load(&launched) == i + 1);
	}
	for (int i = GPUS - 1; i >= 0; i--) {
		struct nvs_frame f;

		launch(i, 20000000);
		fake_revoke(&fake, (unsigned)i, 100 + (uint64_t)i);
		f = fake_expect(&fake, NVS_RELEASE);
		CHECK(f.channel == i && f.epoch == 100 + (uint64_t)i);
		CHECK(cuStreamQuery(streams[i]) == CUDA_SUCCESS);
	}
}

static void *copy_main(void *arg)
{
	(void)arg;
	CU(cuCtxSetCurrent(contexts[0]));
	CU(cuMemcpyPeer(memory[GPUS - 1], contexts[GPUS - 1], memory[0], contexts[0], 4096));
	return NULL;
}

/* The first and the last one: their bits do not meet. */
static void a_copy_needs_the_first_and_the_last(void)
{
	unsigned had = 0;
	pthread_t thread;

	begin();
	make_context(0);
	make_context(GPUS - 1);
	CHECK(pthread_create(&thread, NULL, copy_main, NULL) == 0);
	for (int i = 0; i < 2; i++) {
		unsigned channel = fake_expect(&fake, NVS_REQUEST).channel;

		CHECK(channel == 0 || channel == GPUS - 1);
		had |= 1u << channel;
		fake_grant(&fake, channel, 7 + (uint64_t)i);
	}
	CHECK(had == (1u | 1u << (GPUS - 1)));
	CHECK(pthread_join(thread, NULL) == 0);
}

/* What is beyond is the process's own: its work passes, whoever holds the others. */
static void one_more_is_nobodys(void)
{
	begin();
	make_context(0);
	make_context(GPUS);
	launch(GPUS, 1000);
	CU(cuStreamSynchronize(streams[GPUS]));
	CU(cuMemcpyPeer(memory[GPUS], contexts[GPUS], memory[GPUS], contexts[GPUS], 4096));
	make_context(1); /* the scheduler has heard nothing else */
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(each_gpu_gates_and_drains),
	CASE(a_copy_needs_the_first_and_the_last),
	CASE(one_more_is_nobodys),
};

int main(int argc, char **argv)
{
	int status;

	alarm(600);
	status = run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
	if (argc > 1 && status == 0)
		fake_end(&fake);
	return status;
}
