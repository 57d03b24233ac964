// SPDX-License-Identifier: Apache-2.0
/*
 * capture_test.c: graphs made as PyTorch makes them, on the simulated GPU, which
 * loses a capture wherever the driver would, while the scheduler revokes all the
 * time. The shim preloaded.
 *
 *   capture_test ROUNDS
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cudadrv.h"
#include "fake.h"

enum { GLOBAL, THREAD, RELAXED };

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n";

static struct fake fake;
static CUcontext ctx;
static CUfunction spin;
static atomic_int stop, made, launched, at_the_graph;

static void launch(CUstream s, uint64_t ns)
{
	uint64_t record = 0;
	void *params[] = { &ns, &record };

	CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, params, NULL) == 0);
}

/* Captures on a side stream that forks into another; returns the graph. */
static CUgraphExec capture(CUstream main_stream, CUstream side, CUevent event, int mode)
{
	CUgraphExec exec;
	CUgraph graph;

	CHECK(cuStreamBeginCapture_v2(main_stream, mode) == 0);
	launch(main_stream, 1000);
	CHECK(cuEventRecord(event, main_stream) == 0);
	CHECK(cuStreamWaitEvent(side, event, 0) == 0);
	for (int i = 0; i < 10; i++) /* the side stream captures too, though none began it */
		launch(i % 2 ? side : main_stream, 1000);
	CHECK(cuEventRecord(event, side) == 0);
	CHECK(cuStreamWaitEvent(main_stream, event, 0) == 0);
	CHECK(cuStreamEndCapture(main_stream, &graph) == 0);
	CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0) == 0);
	CHECK(cuGraphDestroy(graph) == 0);
	return exec;
}

static void *captures(void *arg)
{
	CUstream main_stream, side;
	CUevent event;

	CHECK(cuCtxSetCurrent(ctx) == 0);
	CHECK(cuStreamCreate(&main_stream, CU_STREAM_NON_BLOCKING) == 0);
	CHECK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING) == 0);
	CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == 0);
	for (int i = 0; !atomic_load(&stop); i++) {
		CUgraphExec exec = capture(main_stream, side, event, i % 3);

		atomic_fetch_add(&made, 1);
		if (i % 4 == 3) {
			atomic_store(&at_the_graph, 1);
			CHECK(cuGraphLaunch(exec, main_stream) == 0);
			atomic_fetch_add(&launched, 1);
			atomic_store(&at_the_graph, 0);
			CHECK(cuStreamSynchronize(main_stream) == 0);
		}
		CHECK(cuGraphExecDestroy(exec) == 0);
	}
	return arg;
}

static void *launches(void *arg)
{
	CUstream stream;

	CHECK(cuCtxSetCurrent(ctx) == 0);
	CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
	while (!atomic_load(&stop))
		launch(stream, 20000);
	return arg;
}

static void nap_us(long us)
{
	struct timespec t = { 0, us * 1000 };

	nanosleep(&t, NULL);
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 100;
	pthread_t t[2];
	CUmodule module;
	struct nvs_frame f;
	int before;

	/* Else a drain is cut, and the thread may wait for a graph in its middle (preempt_test). */
	CHECK(setenv("NVSHARE_SIMGPU_RM", "refused", 1) == 0);
	fake_init(&fake);
	fake_listen(&fake);
	fake.memory = true;
	CHECK(cuInit(0) == 0);
	CHECK(cuCtxCreate_v2(&ctx, 0, 0) == 0);
	CHECK(cuModuleLoadData(&module, ptx) == 0);
	CHECK(cuModuleGetFunction(&spin, module, "nvshare_spin") == 0);
	fake_accept(&fake);
	fake_attach(&fake);
	CHECK(pthread_create(&t[0], NULL, captures, NULL) == 0);
	CHECK(pthread_create(&t[1], NULL, launches, NULL) == 0);
	for (int i = 1; i <= rounds; i++) {
		fake.page->slot[0].present = i % 2; /* with the depth bound, and without */
		fake_grant(&fake, 0, (uint64_t)i);
		before = atomic_load(&launched);
		for (int ms = 0; i % 3 && atomic_load(&launched) == before && ms < PATIENCE_MS; ms++)
			nap_us(1000);
		nap_us(i % 7 * 50);
		fake_revoke(&fake, 0, (uint64_t)i);
		do
			CHECK(fake_receive(&fake, &f, PATIENCE_MS));
		while (f.type == NVS_REQUEST);
		CHECK(f.type == NVS_RELEASE && f.epoch == (uint64_t)i);
		/*
		 * Nothing is gated in a capture: the thread makes graphs until it
		 * launches one, and that waits for the grant.
		 */
		for (int ms = 0; !atomic_load(&at_the_graph) && ms < PATIENCE_MS; ms++)
			nap_us(1000);
		CHECK(atomic_load(&at_the_graph));
		before = atomic_load(&launched);
		nap_us(2000);
		CHECK(atomic_load(&launched) <= before + 1); /* came through, was not counted */
	}
	atomic_store(&stop, 1);
	fake_grant(&fake, 0, (uint64_t)rounds + 1);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	CHECK(atomic_load(&launched) >= rounds / 2);
	printf("capture: %d revokes, %d graphs made, %d launched, none lost\n", rounds,
	       atomic_load(&made), atomic_load(&launched));
	fake_end(&fake);
	return 0;
}
