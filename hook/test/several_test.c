// SPDX-License-Identifier: Apache-2.0
/*
 * several_test.c: calls that work on several simulated GPUs wait at the gates of all of
 * them. Run with the shim preloaded; one case per process, "" lists them. The process is
 * the client, and plays the scheduler too.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cases.h"
#include "cudadrv.h"
#include "fake.h"

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
			  ".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n";

static struct fake fake;
static CUcontext contexts[2];
static CUstream streams[2];
static CUdeviceptr memory[2]; /* one on each GPU */
static CUfunction spin[2];
static unsigned first, second; /* GPUs, in the order of their UUIDs */

/* No drain is cut: on a slow machine that would be one, and its work would ask again. */
static void begin(void)
{
	unsigned char uuid[2][NVS_UUID_SIZE];

	CHECK(setenv("NVSHARE_SIMGPU_RM", "refused", 1) == 0);
	fake_init(&fake);
	fake.memory = true;
	fake_listen(&fake);
	CU(cuInit(0));
	fake_accept(&fake);
	for (unsigned i = 0; i < 2; i++) {
		struct nvs_frame a;
		CUmodule m;

		CU(cuCtxCreate_v2(&contexts[i], 0, (int)i));
		a = fake_attach(&fake);
		CHECK(a.channel == i);
		memcpy(uuid[i], a.u.attach.uuid, NVS_UUID_SIZE);
		CU(cuModuleLoadData(&m, ptx));
		CU(cuModuleGetFunction(&spin[i], m, "nvshare_spin"));
		CU(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
		CU(cuMemAlloc_v2(&memory[i], 4096));
	}
	first = memcmp(uuid[0], uuid[1], NVS_UUID_SIZE) > 0;
	second = !first;
	CU(cuCtxSetCurrent(contexts[0]));
}

/* A thread that makes one call, with GPU 0 current. */
static struct {
	pthread_t thread;
	void (*make)(void);
	atomic_bool done;
} call;

static void *call_main(void *arg)
{
	(void)arg;
	CU(cuCtxSetCurrent(contexts[0]));
	call.make();
	atomic_store(&call.done, true);
	return NULL;
}

static void begin_call(void (*make)(void))
{
	call.make = make;
	atomic_store(&call.done, false);
	CHECK(pthread_create(&call.thread, NULL, call_main, NULL) == 0);
}

static void end_call(void)
{
	CHECK(pthread_join(call.thread, NULL) == 0);
}

static unsigned long long epoch = 3;

static void let_in(unsigned gpu)
{
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == gpu);
	CHECK(!atomic_load(&call.done));
	fake_grant(&fake, gpu, ++epoch);
}

/* The GPU is given back, and the process has work on it until then. */
static void take_away(unsigned gpu)
{
	struct nvs_frame f;

	fake_revoke(&fake, gpu, epoch);
	f = fake_expect(&fake, NVS_RELEASE);
	CHECK(f.channel == gpu);
}

/* The call needs both GPUs, and asks for one after the other. */
static void needs_both(void (*make)(void))
{
	begin_call(make);
	let_in(first);
	let_in(second);
	end_call();
	CU(cuStreamSynchronize(streams[0]));
	take_away(second);
	epoch--;
	take_away(first);
	epoch++;
}

/* ---- copies ---- */

static void peer(void) { CU(cuMemcpyPeer(memory[1], contexts[1], memory[0], contexts[0], 4096)); }
static void peer_async(void)
{
	CU(cuMemcpyPeerAsync(memory[1], contexts[1], memory[0], contexts[0], 4096, streams[0]));
}

static CUDA_MEMCPY3D_PEER between(void)
{
	return (CUDA_MEMCPY3D_PEER){ .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = memory[1],
				     .srcContext = contexts[1], .dstMemoryType = CU_MEMORYTYPE_DEVICE,
				     .dstDevice = memory[0], .dstContext = contexts[0],
				     .WidthInBytes = 4096, .Height = 1, .Depth = 1 };
}

static void peer_3d(void)
{
	CUDA_MEMCPY3D_PEER c = between();

	CU(cuMemcpy3DPeer(&c));
}

static void peer_3d_async(void)
{
	CUDA_MEMCPY3D_PEER c = between();

	CU(cuMemcpy3DPeerAsync(&c, streams[0]));
}

static void a_copy_needs_both_gpus(void)
{
	begin();
	needs_both(peer);
	needs_both(peer_async);
	needs_both(peer_3d);
	needs_both(peer_3d_async);
}

static void on_one(void) { CU(cuMemcpyPeerAsync(memory[0], contexts[0], memory[0], contexts[0], 8, streams[0])); }

static void a_copy_on_one_gpu_needs_no_other(void)
{
	begin();
	begin_call(on_one);
	let_in(0);
	end_call();
}

/* ---- graphs ---- */

static CUgraphExec exec;

static void launch(void) { CU(cuGraphLaunch(exec, streams[0])); }
static void upload(void) { CU(cuGraphUpload(exec, streams[0])); }

static void add_kernel(CUgraph g, unsigned gpu, uint64_t ns)
{
	uint64_t zero = 0;
	void *params[] = { &ns, &zero };
	CUDA_KERNEL_NODE_PARAMS p = { .func = spin[gpu], .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1,
				      .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1,
				      .kernelParams = params, .ctx = contexts[gpu] };
	CUgraphNode node;

	CU(cuGraphAddKernelNode_v2(&node, g, NULL, 0, &p));
}

static void instantiate(CUgraph g)
{
	CU(cuGraphInstantiateWithFlags(&exec, g, 0));
	CU(cuGraphDestroy(g));
}

static CUgraph new_graph(void)
{
	CUgraph g;

	CU(cuGraphCreate(&g, 0));
	return g;
}

static void a_graph_of_kernels_needs_their_gpus(void)
{
	CUgraph g;

	begin();
	g = new_graph();
	add_kernel(g, 0, 1000);
	add_kernel(g, 1, 1000);
	instantiate(g);
	needs_both(launch);
	needs_both(upload);
}

static void a_graph_of_copies_needs_their_gpus(void)
{
	CUDA_MEMCPY3D p = { .srcMemoryType = CU_MEMORYTYPE_DEVICE, .dstMemoryType = CU_MEMORYTYPE_DEVICE,
			    .WidthInBytes = 8, .Height = 1, .Depth = 1 };
	CUgraphNode node;
	CUgraph g;

	begin();
	p.srcDevice = memory[0];
	p.dstDevice = memory[1];
	g = new_graph();
	CU(cuGraphAddMemcpyNode(&node, g, NULL, 0, &p, contexts[0]));
	instantiate(g);
	needs_both(launch);
}

static void a_captured_graph_needs_its_gpus(void)
{
	uint64_t ns = 1000, zero = 0;
	void *params[] = { &ns, &zero };
	CUevent fork, join;
	CUgraph g;

	begin();
	CU(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
	CU(cuCtxSetCurrent(contexts[1]));
	CU(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
	CU(cuCtxSetCurrent(contexts[0]));
	CU(cuStreamBeginCapture_v2(streams[0], CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(cuLaunchKernel(spin[0], 1, 1, 1, 1, 1, 1, 0, streams[0], params, NULL));
	CU(cuEventRecord(fork, streams[0]));
	CU(cuStreamWaitEvent(streams[1], fork, 0));
	CU(cuLaunchKernel(spin[1], 1, 1, 1, 1, 1, 1, 0, streams[1], params, NULL));
	CU(cuEventRecord(join, streams[1]));
	CU(cuStreamWaitEvent(streams[0], join, 0));
	CU(cuStreamEndCapture(streams[0], &g));
	instantiate(g);
	needs_both(launch);
}

static void a_graph_on_another_gpu_than_its_stream_needs_both(void)
{
	CUgraph g;

	begin();
	g = new_graph();
	add_kernel(g, 1, 1000);
	instantiate(g);
	needs_both(launch);
}

static void a_graph_on_one_gpu_needs_no_other(void)
{
	CUgraph g;

	begin();
	g = new_graph();
	add_kernel(g, 0, 1000);
	instantiate(g);
	begin_call(launch);
	let_in(0);
	end_call();
	take_away(0);
	/* The handle may be given out again. */
	CU(cuGraphExecDestroy(exec));
	g = new_graph();
	add_kernel(g, 0, 1000);
	add_kernel(g, 1, 1000);
	instantiate(g);
	needs_both(launch);
}

/* The GPU is given back only when the graph's work there is done. */
static void the_drain_of_each_gpu_waits_for_the_graph(void)
{
	CUgraph g;

	begin();
	g = new_graph();
	add_kernel(g, 1, 3000000000); /* it still runs when that is looked at */
	instantiate(g);
	begin_call(launch);
	let_in(first);
	let_in(second);
	end_call();
	CHECK(cuStreamQuery(streams[0]) == CUDA_ERROR_NOT_READY);
	fake_revoke(&fake, 1, first == 1 ? epoch - 1 : epoch);
	CHECK(fake_expect(&fake, NVS_RELEASE).channel == 1);
	CHECK(cuStreamQuery(streams[0]) == CUDA_SUCCESS);
}

/* Somebody wants the first GPU, which has nothing to do while the thread waits for the second. */
static void what_it_has_is_kept_meanwhile(void)
{
	struct nvs_frame f;
	CUgraph g;

	begin();
	g = new_graph();
	add_kernel(g, 0, 1000);
	add_kernel(g, 1, 1000);
	instantiate(g);
	begin_call(launch);
	let_in(first);
	__atomic_store_n(&fake.page->slot[first].waiters, 1, __ATOMIC_SEQ_CST);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == second);
	CHECK(!fake_receive(&fake, &f, 100));
	fake_grant(&fake, second, ++epoch);
	end_call();
	CHECK(fake_expect(&fake, NVS_RELEASE).channel == first); /* now it is idle */
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(a_copy_needs_both_gpus),
	CASE(a_copy_on_one_gpu_needs_no_other),
	CASE(a_graph_of_kernels_needs_their_gpus),
	CASE(a_graph_of_copies_needs_their_gpus),
	CASE(a_captured_graph_needs_its_gpus),
	CASE(a_graph_on_another_gpu_than_its_stream_needs_both),
	CASE(a_graph_on_one_gpu_needs_no_other),
	CASE(the_drain_of_each_gpu_waits_for_the_graph),
	CASE(what_it_has_is_kept_meanwhile),
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
