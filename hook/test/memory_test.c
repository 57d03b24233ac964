// SPDX-License-Identifier: Apache-2.0
/*
 * memory_test.c: accounts, limits and what is told of them, over the simulated
 * driver. Run with the shim preloaded; one case per process, "" lists them.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cudadrv.h"
#include "ledger.h"

#define MIB   (1ull << 20)
#define LIMIT (256 * MIB)
#define OOM   CUDA_ERROR_OUT_OF_MEMORY

static CUcontext contexts[2];
static const char *self;

/*
 * How long this thread has waited for anything but a processor: a busy machine does not count.
 * /proc/thread-self/schedstat begins with the nanoseconds on a processor and those waiting for one.
 */
static uint64_t blocked_ns(void)
{
	unsigned long long ran = 0, queued = 0;
	FILE *f = fopen("/proc/thread-self/schedstat", "re");

	if (f) { /* some kernels have none */
		CHECK(fscanf(f, "%llu %llu", &ran, &queued) == 2);
		fclose(f);
	}
	return test_now() - ran - queued;
}

static uint64_t blocked_since(uint64_t start)
{
	int64_t ns = (int64_t)(blocked_ns() - start); /* the clocks differ by a little */

	return ns > 0 ? (uint64_t)ns : 0;
}

static bool gpu_has(int gpu, uint64_t bytes)
{
	size_t total;

	CU(cuDeviceTotalMem_v2(&total, gpu));
	return total == bytes;
}

/* A container with these limits, and this process in it with a context each. */
static void begin(uint64_t limit0, uint64_t limit1)
{
	ledger_init();
	ledger_limit(0, limit0);
	ledger_limit(1, limit1);
	ledger_start();
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[1], 0, 1));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	EVENTUALLY(ledger_counts().attached >= 2);
	CHECK((!limit0 || gpu_has(0, limit0)) && (!limit1 || gpu_has(1, limit1)));
}

/* What the container's memory on the current context's GPU is used for. */
static uint64_t used(void)
{
	size_t available, total;

	CU(cuMemGetInfo_v2(&available, &total));
	return total - available;
}

/* Others of the container have this much on GPU 0, and this process, with a context there, knows. */
static void others_have(uint64_t own, uint64_t bytes)
{
	ledger_others(0, bytes);
	EVENTUALLY(used() == own + bytes);
}

/* What a program is told at first decides how much it takes. */
static void a_slow_scheduler_is_waited_for(void)
{
	size_t available, total;

	ledger_init();
	ledger_limit(0, LIMIT);
	ledger_limit(1, LIMIT);
	ledger_slow();
	ledger_start();
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(total == LIMIT && available == LIMIT);
	CHECK(ledger_counts().observed == 0);
	CHECK(gpu_has(1, LIMIT)); /* which it does not use */
	CHECK(ledger_counts().observed == 1 && ledger_counts().attached == 1);
}

/* A connection that is lost before the answer is waited for: it decides how memory is allocated, for good. */
static void a_scheduler_lost_at_the_start_is_waited_for(void)
{
	size_t available, total;

	ledger_init();
	ledger_limit(0, LIMIT);
	ledger_drop_next();
	ledger_start();
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(total == LIMIT && available == LIMIT);
	CHECK(ledger_counts().registered == 2 && ledger_counts().attached == 1 && ledger_counts().observed == 0);
}

/* ---- each allocator ---- */

static CUmemAllocationProp vmm_prop(int type, int gpu)
{
	return (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { type, gpu } };
}

static void every_allocator_counts(void)
{
	CUDA_ARRAY3D_DESCRIPTOR d3 = { 100, 100, 3, CU_AD_FORMAT_FLOAT, 4, 0 };
	CUDA_ARRAY_DESCRIPTOR d2 = { 1000, 1000, CU_AD_FORMAT_HALF, 2 };
	CUmipmappedArray mip;
	CUarray a2, a3, sparse;
	CUdeviceptr p, q;
	CUmemoryPool pool;
	size_t pitch;
	void *host;

	begin(LIMIT, LIMIT);
	CHECK(used() == 0);
	CU(cuMemAlloc_v2(&p, 1000));
	CHECK(used() == 1000);
	CHECK(cuMemFree_v2(p + 4) == CUDA_ERROR_INVALID_VALUE);
	CHECK(used() == 1000);
	CU(cuMemFree_v2(p));
	CHECK(used() == 0);
	CHECK(cuMemFree_v2(p) == CUDA_ERROR_INVALID_VALUE);
	CU(cuMemFree_v2(0));
	CHECK(used() == 0);
	CU(cuMemAllocPitch_v2(&p, &pitch, 100, 7, 4));
	CHECK(used() == pitch * 7 && pitch > 100);
	CU(cuMemAllocManaged(&q, 5000, CU_MEM_ATTACH_GLOBAL));
	CHECK(used() == pitch * 7 + 5000);
	CU(cuMemFree_v2(p));
	CU(cuMemFree_v2(q));
	CU(cuMemAllocAsync(&p, 3000, NULL));
	CHECK(used() == 3000);
	CU(cuMemFreeAsync(p, NULL));
	CU(cuMemAllocAsync(&p, 3000, NULL));
	CU(cuMemFree_v2(p)); /* may be mixed */
	CU(cuDeviceGetDefaultMemPool(&pool, 0));
	CU(cuMemAllocFromPoolAsync(&p, 4000, pool, NULL));
	CHECK(used() == 4000);
	CU(cuMemFreeAsync(p, NULL));
	CHECK(cuMemFreeAsync(p, NULL) != CUDA_SUCCESS);
	CHECK(used() == 0);
	/* The driver's own figure, with its padding. */
	CU(cuArrayCreate_v2(&a2, &d2));
	CHECK(used() == 62 * 65536);
	CU(cuArray3DCreate_v2(&a3, &d3));
	CHECK(used() == (62 + 8) * 65536);
	CU(cuMipmappedArrayCreate(&mip, &d3, 2));
	CHECK(used() == (62 + 8 + 8) * 65536);
	d3.Flags = CUDA_ARRAY3D_SPARSE;
	CU(cuArray3DCreate_v2(&sparse, &d3));
	CHECK(used() == (62 + 8 + 8) * 65536);
	CU(cuArrayDestroy(a2));
	CU(cuArrayDestroy(a3));
	CU(cuArrayDestroy(sparse));
	CU(cuMipmappedArrayDestroy(mip));
	CHECK(used() == 0);
	/* Host memory is not the GPU's. */
	CU(cuMemAllocHost_v2(&host, 1 << 20));
	CHECK(used() == 0);
	CHECK(cuMemAlloc_v2(&p, 0) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemAlloc_v2(&p, SIZE_MAX) == OOM);
	CHECK(used() == 0);
}

static void stream_and_pool_say_which_gpu(void)
{
	CUmemPoolProps props = { .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 1 } };
	CUmemoryPool there, host;
	CUdeviceptr p, q, r;
	CUstream s;

	begin(LIMIT, LIMIT);
	CU(cuCtxSetCurrent(contexts[1]));
	CU(cuStreamCreate(&s, 0));
	CU(cuCtxSetCurrent(contexts[0]));
	CU(cuMemPoolCreate(&there, &props));
	props.location.type = 2;
	CU(cuMemPoolCreate(&host, &props));
	CU(cuMemAllocAsync(&p, MIB, s));
	CU(cuMemAllocFromPoolAsync(&q, 2 * MIB, there, NULL));
	CU(cuMemAllocFromPoolAsync(&r, 4 * MIB, host, NULL));
	CHECK(used() == 0);
	CU(cuCtxSetCurrent(contexts[1]));
	CHECK(used() == 3 * MIB);
	CU(cuMemFreeAsync(q, s));
	CU(cuMemPoolDestroy(there));
	CU(cuMemFreeAsync(r, s));
	CHECK(used() == MIB);
	/* A pool's memory is no context's. */
	CU(cuCtxDestroy_v2(contexts[1]));
	CU(cuCtxCreate_v2(&contexts[1], 0, 1));
	CHECK(used() == MIB);
	CU(cuMemFree_v2(p));
	CHECK(used() == 0);
}

/* ---- pools that keep what is freed ---- */

static CUmemoryPool keeping(int gpu, uint64_t threshold)
{
	CUmemPoolProps props = { .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, gpu } };
	CUmemoryPool pool;

	CU(cuMemPoolCreate(&pool, &props));
	CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
	return pool;
}

static uint64_t reserved_by(CUmemoryPool pool)
{
	uint64_t bytes;

	CU(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes));
	return bytes;
}

static void what_pools_keep_counts(void)
{
	uint64_t threshold = 50 * MIB;
	CUmemoryPool pool;
	CUdeviceptr p, q;

	begin(LIMIT, 0);
	pool = keeping(0, UINT64_MAX);
	CU(cuMemAllocFromPoolAsync(&p, 100 * MIB, pool, NULL));
	CHECK(used() == 100 * MIB);
	CU(cuMemFreeAsync(p, NULL));
	CHECK(used() == 100 * MIB);
	CU(cuMemAllocFromPoolAsync(&p, 60 * MIB, pool, NULL));
	CHECK(used() == 100 * MIB);
	CU(cuMemAllocFromPoolAsync(&q, 60 * MIB, pool, NULL));
	CHECK(used() == 120 * MIB);
	CU(cuMemFree_v2(q));
	CU(cuMemFreeAsync(p, NULL));
	CHECK(used() == 120 * MIB);
	CU(cuCtxSynchronize());
	CU(cuMemPoolTrimTo(pool, 70 * MIB));
	CHECK(used() == 70 * MIB);
	/* The program may lower the threshold: what is more goes when the host waits. */
	CU(cuMemAllocFromPoolAsync(&p, 90 * MIB, pool, NULL));
	CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
	CU(cuMemFreeAsync(p, NULL));
	CU(cuCtxSynchronize());
	CHECK(used() == 50 * MIB);
	/* What is in use lives on without the pool. */
	CU(cuMemAllocFromPoolAsync(&p, 20 * MIB, pool, NULL));
	CU(cuMemPoolDestroy(pool));
	CHECK(used() == 20 * MIB);
	CU(cuMemFree_v2(p));
	CHECK(used() == 0);
	/* Nor do contexts take along what is in a pool. */
	pool = keeping(0, UINT64_MAX);
	CU(cuMemAllocFromPoolAsync(&p, 20 * MIB, pool, NULL));
	CU(cuMemAllocFromPoolAsync(&q, 10 * MIB, pool, NULL));
	CU(cuMemFreeAsync(q, NULL));
	CU(cuCtxDestroy_v2(contexts[0]));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	CHECK(used() == 30 * MIB);
}

/* A device's pool, of which the shim hears first when the threshold is set. */
static void what_the_current_pool_keeps_counts(void)
{
	uint64_t all = UINT64_MAX;
	CUmemoryPool pool;
	CUdeviceptr p, q;

	begin(LIMIT, 0);
	CU(cuMemAllocAsync(&p, 10 * MIB, NULL));
	CU(cuMemAllocAsync(&q, 20 * MIB, NULL));
	CU(cuDeviceGetMemPool(&pool, 0));
	CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
	CHECK(used() == 30 * MIB);
	CU(cuMemFreeAsync(p, NULL));
	CU(cuMemFreeAsync(q, NULL));
	CHECK(used() == 30 * MIB);
	CU(cuMemAllocAsync(&p, 25 * MIB, NULL));
	CHECK(used() == 30 * MIB);
}

/* The driver takes from its pools before it refuses; so does the limit. */
static void what_pools_keep_makes_room(void)
{
	CUmemoryPool pools[2];
	CUdeviceptr p, q;

	begin(LIMIT, 0);
	for (int i = 0; i < 2; i++) {
		pools[i] = keeping(0, UINT64_MAX);
		CU(cuMemAllocFromPoolAsync(&p, 100 * MIB, pools[i], NULL));
		CU(cuMemFreeAsync(p, NULL));
	}
	CHECK(used() == 200 * MIB);
	CU(cuMemAlloc_v2(&p, 230 * MIB));
	CHECK(used() == 230 * MIB && reserved_by(pools[0]) == 0 && reserved_by(pools[1]) == 0);
	CHECK(cuMemAlloc_v2(&q, 30 * MIB) == OOM);
	CU(cuMemFree_v2(p));
	/* Nor is a pool's own allocation refused for what another keeps. */
	CU(cuMemAllocFromPoolAsync(&p, 100 * MIB, pools[0], NULL));
	CU(cuMemFreeAsync(p, NULL));
	CU(cuMemAllocFromPoolAsync(&p, 250 * MIB, pools[1], NULL));
	CHECK(used() == 250 * MIB);
	CHECK(cuMemAllocFromPoolAsync(&q, 10 * MIB, pools[0], NULL) == OOM);
	CHECK(used() == 250 * MIB);
	/* What a stream may still be using is waited for. */
	CU(cuMemFree_v2(p));
	CU(cuMemAllocFromPoolAsync(&p, 200 * MIB, pools[0], NULL));
	CU(cuMemsetD8Async(p, 1, MIB, NULL));
	CU(cuMemFreeAsync(p, NULL));
	CU(cuMemAlloc_v2(&p, 250 * MIB));
	CHECK(used() == 250 * MIB);
}

/*
 * A stream that waits for a word, and then frees 200 MiB into a pool that keeps memory; it
 * waits for nothing that passed the gate. The program may write the word when it has its answer.
 */
static CUstream frees_after_a_word(CUmemoryPool *pool, uint32_t **word)
{
	CUdeviceptr p;
	CUstream s;

	begin(LIMIT, 0);
	*pool = keeping(0, UINT64_MAX);
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuMemHostAlloc((void **)word, sizeof(**word), 0));
	**word = 0;
	CU(cuMemAllocFromPoolAsync(&p, 200 * MIB, *pool, s));
	CU(cuStreamWaitValue32(s, (uintptr_t)*word, 1, CU_STREAM_WAIT_VALUE_EQ));
	CU(cuMemFreeAsync(p, s));
	return s;
}

static void a_refusal_waits_for_no_word(void)
{
	static const CUstream defaults[] = { NULL, CU_STREAM_PER_THREAD };
	CUmemoryPool pool;
	CUdeviceptr p, q;
	uint32_t *word;
	CUstream s = frees_after_a_word(&pool, &word);

	CHECK(cuMemAlloc_v2(&q, 100 * MIB) == OOM);
	__atomic_store_n(word, 1, __ATOMIC_RELEASE);
	CU(cuStreamSynchronize(s));
	CU(cuMemAlloc_v2(&q, 100 * MIB));
	CHECK(used() == 100 * MIB);
	CU(cuMemFree_v2(q));
	/* Into the default streams no call passes a gate that would have recorded them. */
	for (int i = 0; i < 2; i++) {
		CU(cuMemAllocFromPoolAsync(&p, 200 * MIB, pool, s));
		CU(cuMemFreeAsync(p, s));
		CU(cuStreamSynchronize(s));
		*word = 0;
		CU(cuStreamWaitValue32(defaults[i], (uintptr_t)word, 1, CU_STREAM_WAIT_VALUE_EQ));
		CU(cuMemAlloc_v2(&q, 100 * MIB));
		__atomic_store_n(word, 1, __ATOMIC_RELEASE);
		CU(cuMemFree_v2(q));
		CU(cuCtxSynchronize());
	}
}

static bool refused;

static void *cancelled_already(void *limit)
{
	CUdeviceptr p;

	CU(cuCtxSetCurrent(contexts[0]));
	CHECK(pthread_cancel(pthread_self()) == 0);
	refused = cuMemAlloc_v2(&p, *(uint64_t *)limit) == OOM;
	pthread_testcancel();
	return NULL;
}

/* A thread ends where it may; the driver's allocation is no such place. */
static void a_refusal_is_no_cancellation_point(void)
{
	uint64_t bytes = 100 * MIB;
	CUmemoryPool pool;
	uint32_t *word;
	pthread_t t;
	void *ended;

	frees_after_a_word(&pool, &word);
	CHECK(pthread_create(&t, NULL, cancelled_already, &bytes) == 0);
	CHECK(pthread_join(t, &ended) == 0);
	CHECK(refused && ended == PTHREAD_CANCELED);
	__atomic_store_n(word, 1, __ATOMIC_RELEASE);
}

static void vmm_counts_until_the_last_reference(void)
{
	CUmemAllocationProp prop = vmm_prop(CU_MEM_LOCATION_TYPE_DEVICE, 1);
	CUmemGenericAllocationHandle h[3], again;
	const size_t g = 2 * MIB;
	CUdeviceptr va;

	begin(LIMIT, LIMIT);
	CU(cuMemAddressReserve(&va, 8 * g, 0, 0, 0));
	/* On the GPU that the properties name, not on the current one. */
	CU(cuMemCreate(&h[0], g, &prop, 0));
	CHECK(used() == 0);
	CU(cuCtxSetCurrent(contexts[1]));
	CHECK(used() == g);
	CU(cuMemMap(va, g, 0, h[0], 0));
	CU(cuMemRelease(h[0]));
	CHECK(used() == g);
	CHECK(cuMemRelease(h[0]) != CUDA_SUCCESS);
	CHECK(used() == g);
	/* The value comes again while the memory is still mapped. */
	CU(cuMemCreate(&h[1], 2 * g, &prop, 0));
	CHECK(h[1] == h[0]);
	CHECK(used() == 3 * g);
	CU(cuMemMap(va + g, 2 * g, 0, h[1], 0));
	CU(cuMemMap(va + 4 * g, 2 * g, 0, h[1], 0)); /* twice */
	CHECK(cuMemMap(va, g, 0, h[1], 0) != CUDA_SUCCESS);
	CHECK(used() == 3 * g);
	/* Over two mappings of two memories. */
	CU(cuMemUnmap(va, 3 * g));
	CHECK(used() == 2 * g);
	CHECK(cuMemUnmap(va, 3 * g) != CUDA_SUCCESS);
	CU(cuMemRelease(h[1]));
	CHECK(used() == 2 * g);
	CU(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(va + 5 * g)));
	CU(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(va + 4 * g)));
	CU(cuMemUnmap(va + 4 * g, 2 * g));
	CHECK(used() == 2 * g);
	CU(cuMemRelease(again));
	CHECK(used() == 2 * g);
	CU(cuMemRelease(again));
	CHECK(used() == 0);
	prop = vmm_prop(2, 0); /* host memory */
	CU(cuMemCreate(&h[2], g, &prop, 0));
	CHECK(used() == 0);
	CU(cuMemRelease(h[2]));
	prop = vmm_prop(CU_MEM_LOCATION_TYPE_DEVICE, 1);
	CHECK(cuMemCreate(&h[2], LIMIT + g, &prop, 0) == OOM);
	/* It outlives contexts. */
	CU(cuMemCreate(&h[2], g, &prop, 0));
	CU(cuCtxDestroy_v2(contexts[1]));
	CU(cuCtxCreate_v2(&contexts[1], 0, 1));
	CHECK(used() == g);
	CU(cuMemRelease(h[2]));
	CHECK(used() == 0);
}

static void contexts_take_their_memory_along(void)
{
	CUDA_ARRAY_DESCRIPTOR d = { 1024, 64, CU_AD_FORMAT_UNSIGNED_INT8, 1 };
	CUcontext extra, primary;
	CUdeviceptr p, q;
	CUarray a;

	begin(LIMIT, LIMIT);
	CU(cuMemAlloc_v2(&p, MIB));
	CU(cuCtxCreate_v2(&extra, 0, 0));
	CU(cuMemAlloc_v2(&q, 2 * MIB));
	CU(cuArrayCreate_v2(&a, &d));
	CHECK(used() == 3 * MIB + 65536);
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	CU(cuCtxSetCurrent(primary));
	CU(cuMemAllocManaged(&q, 4 * MIB, 1));
	CHECK(used() == 7 * MIB + 65536);
	CU(cuDevicePrimaryCtxReset_v2(0));
	CU(cuCtxSetCurrent(contexts[0]));
	CHECK(used() == 3 * MIB + 65536);
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	CU(cuCtxSetCurrent(primary));
	CU(cuMemAlloc_v2(&q, 8 * MIB));
	CU(cuCtxSetCurrent(contexts[0]));
	CU(cuDevicePrimaryCtxRelease_v2(0));
	CHECK(used() == 3 * MIB + 65536);
	CU(cuCtxDestroy_v2(extra));
	CHECK(used() == MIB);
	CU(cuMemFree_v2(p));
	CHECK(used() == 0);
}

static void a_context_ends_with_its_last_use(void)
{
	CUcontext again;
	CUdeviceptr p;

	begin(LIMIT, 0);
	CU(cuCtxAttach(&again, 0));
	CHECK(again == contexts[0]);
	CU(cuMemAlloc_v2(&p, 8 * MIB));
	CU(cuCtxDetach(again));
	CHECK(used() == 8 * MIB);
	CU(cuCtxDetach(contexts[0]));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	CHECK(used() == 0);
}

static void graphs_count_when_they_have_memory(void)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params = { .poolProps = { .allocType = 1, .location = { 1, 0 } } };
	CUgraphNodeParams generic = { .type = CU_GRAPH_NODE_TYPE_MEM_ALLOC };
	CUgraphNode node;
	CUdeviceptr p, q;
	CUgraphExec exec;
	CUgraph graph;
	CUstream s;

	begin(LIMIT, LIMIT);
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(cuMemAllocAsync(&p, 8 * MIB, s));
	CHECK(used() == 0);
	CHECK(cuMemAllocAsync(&q, LIMIT + 1, s) == OOM); /* leaves the capture alone */
	CU(cuMemFreeAsync(p, s));
	CU(cuStreamEndCapture(s, &graph));
	/* Other allocations are not recorded meanwhile, and not after it. */
	CU(cuMemAllocAsync(&q, MIB, s));
	CHECK(used() == MIB);
	CHECK(cuGraphAddMemFreeNode(&node, graph, NULL, 0, q) == CUDA_ERROR_INVALID_VALUE);
	CU(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CHECK(used() == MIB);
	CU(cuGraphLaunch(exec, s));
	CHECK(used() == 9 * MIB);
	CU(cuGraphLaunch(exec, s));
	CHECK(used() == 9 * MIB);
	CU(cuStreamSynchronize(s));
	CU(cuGraphExecDestroy(exec));
	CHECK(used() == 9 * MIB); /* the driver keeps it */
	CU(cuDeviceGraphMemTrim(0));
	CHECK(used() == MIB);
	CU(cuGraphDestroy(graph));
	/* The driver lets a graph free only what a graph has allocated: the account need not follow that. */
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	CHECK(cuMemFreeAsync(q, s) == CUDA_ERROR_INVALID_VALUE);
	CU(cuStreamEndCapture(s, &graph));
	CHECK(used() == MIB);
	CU(cuMemFree_v2(q));
	CHECK(used() == 0);
	CU(cuGraphDestroy(graph));
	CU(cuGraphCreate(&graph, 0));
	params.bytesize = generic.u.alloc.bytesize = LIMIT + 1;
	generic.u.alloc.poolProps = params.poolProps;
	CHECK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params) == OOM);
	CHECK(cuGraphAddNode(&node, graph, NULL, 0, &generic) == OOM);
	CHECK(cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &generic) == OOM);
	params.bytesize = generic.u.alloc.bytesize = 3 * MIB;
	CU(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
	CU(cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &generic));
	CHECK(used() == 0);
	CU(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CU(cuGraphUpload(exec, s));
	CHECK(used() == 6 * MIB);
	CU(cuGraphExecDestroy(exec));
	CU(cuDeviceGraphMemTrim(0));
	CHECK(used() == 0);
}

static CUgraph graph_of(unsigned mib, CUstream s)
{
	CUdeviceptr p;
	CUgraph g;

	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(cuMemAllocAsync(&p, mib * MIB, s));
	CU(cuStreamEndCapture(s, &g));
	return g;
}

/* What a graph allocates and does not free, and its child graphs, has to fit together. */
static void nodes_of_a_graph_count_together(void)
{
	CUgraphNode node;
	CUgraphExec exec;
	CUdeviceptr p;
	CUgraph g;
	CUstream s;

	begin(256 * MIB, LIMIT);
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	for (int i = 0; i < 4; i++)
		CU(cuMemAllocAsync(&p, 200 * MIB, s));
	CU(cuStreamEndCapture(s, &g));
	CHECK(cuGraphInstantiateWithFlags(&exec, g, 0) == OOM);
	/* Each may have the memory of the one before. */
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	for (int i = 0; i < 4; i++) {
		CU(cuMemAllocAsync(&p, 200 * MIB, s));
		CU(cuMemFreeAsync(p, s));
	}
	CU(cuStreamEndCapture(s, &g));
	CU(cuGraphInstantiateWithFlags(&exec, g, 0));
	CU(cuGraphExecDestroy(exec));
	g = graph_of(150, s);
	CU(cuGraphAddChildGraphNode(&node, g, NULL, 0, graph_of(150, s)));
	CHECK(cuGraphInstantiateWithFlags(&exec, g, 0) == OOM);
	CHECK(used() == 0 && ledger_reserved(0) <= 256 * MIB && ledger_counts().forced == 0);
}

/* Graphs have their memory at their first launch. */
static void the_first_launch_of_a_graph_is_limited(void)
{
	CUgraphExec exec[3];
	CUstream s;

	begin(256 * MIB, LIMIT);
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < 3; i++)
		CU(cuGraphInstantiateWithFlags(&exec[i], graph_of(150, s), 0));
	CU(cuGraphLaunch(exec[0], s));
	CHECK(used() == 150 * MIB);
	CHECK(cuGraphLaunch(exec[1], s) == OOM);
	CHECK(cuGraphUpload(exec[2], s) == OOM);
	CHECK(used() == 150 * MIB && ledger_reserved(0) <= 256 * MIB && ledger_counts().forced == 0);
	CU(cuStreamSynchronize(s));
	CU(cuGraphExecDestroy(exec[0]));
	CU(cuGraphUpload(exec[1], s)); /* has what the first one has left */
	CU(cuGraphLaunch(exec[1], s));
	CHECK(used() == 150 * MIB);
}

/* ---- limits ---- */

static void the_limit_is_the_gpu(void)
{
	CUdeviceptr p[4], q;
	size_t available, total;

	begin(LIMIT, 0);
	CU(cuDeviceTotalMem_v2(&total, 0));
	CHECK(total == LIMIT);
	CU(cuDeviceTotalMem_v2(&total, 1));
	CHECK(total > LIMIT);
	CU(cuCtxSetCurrent(contexts[1]));
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(total > LIMIT && available == total);
	CU(cuMemAlloc_v2(&q, LIMIT + 1));
	CU(cuCtxSetCurrent(contexts[0]));
	CHECK(cuMemAlloc_v2(&q, LIMIT + 1) == OOM);
	for (int i = 0; i < 4; i++)
		CU(cuMemAlloc_v2(&p[i], LIMIT / 4));
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(available == 0 && total == LIMIT);
	errno = 99;
	CHECK(cuMemAlloc_v2(&q, 1) == OOM);
	CHECK(cuMemAllocAsync(&q, 1, NULL) == OOM);
	CHECK(errno == 99);
	CU(cuMemFree_v2(p[0]));
	CU(cuMemAlloc_v2(&q, LIMIT / 4));
	/* It changes while the process runs. */
	ledger_limit(0, 2 * LIMIT);
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(available == LIMIT && total == 2 * LIMIT);
	CU(cuMemAlloc_v2(&p[0], LIMIT));
	ledger_limit(0, LIMIT);
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(available == 0 && total == LIMIT);
	CHECK(cuMemAlloc_v2(&q, 1) == OOM);
	ledger_limit(0, 0);
	CU(cuMemAlloc_v2(&q, LIMIT));
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(total > 3 * LIMIT);
}

/* The driver pads rows: 16 MiB of narrow ones take 2 GiB. */
static void padding_counts_against_the_limit(void)
{
	CUdeviceptr p;
	size_t pitch;

	begin(LIMIT, 0);
	CHECK(cuMemAllocPitch_v2(&p, &pitch, 4, 4 * MIB, 4) == OOM);
	CHECK(used() == 0 && ledger_reserved(0) <= LIMIT);
	CU(cuMemAllocPitch_v2(&p, &pitch, 4, LIMIT / 512, 4));
	CHECK(pitch == 512 && used() == LIMIT);
	CU(cuMemFree_v2(p));
	CHECK(used() == 0);
}

static void small_allocations_do_not_ask(void)
{
	CUdeviceptr p[100];
	unsigned asked;

	begin(64 * LIMIT, 0);
	CU(cuMemAlloc_v2(&p[0], 1000));
	asked = ledger_counts().asked;
	for (int i = 1; i < 100; i++)
		CU(cuMemAlloc_v2(&p[i], 100000));
	for (int i = 0; i < 100; i++)
		CU(cuMemFree_v2(p[i]));
	CHECK(ledger_counts().asked == asked);
	CHECK(ledger_reserved(0) == 64 * MIB);
	/* A lot is given back at once. */
	CU(cuMemAlloc_v2(&p[0], 1000 * MIB));
	CHECK(ledger_reserved(0) == 1024 * MIB);
	CU(cuMemFree_v2(p[0]));
	EVENTUALLY(ledger_reserved(0) == 0);
	CHECK(ledger_counts().refused == 0);
}

static void without_a_limit_nobody_waits(void)
{
	struct ledger_counts before;
	CUdeviceptr p[16];
	uint64_t start;

	begin(0, 0);
	CU(cuMemAlloc_v2(&p[0], MIB));
	EVENTUALLY(ledger_reserved(0) == 64 * MIB);
	before = ledger_counts();
	CHECK(before.asked == 1 && before.forced == 1);
	ledger_mute(true);
	start = blocked_ns();
	for (int i = 1; i < 16; i++)
		CU(cuMemAlloc_v2(&p[i], 100 * MIB));
	/* Nor does what is sent meanwhile fill the socket: that would be an end. */
	for (int i = 0; i < 2000; i++) {
		CUdeviceptr q;

		CU(cuMemAlloc_v2(&q, (unsigned)i * MIB + 1));
		CU(cuMemFree_v2(q));
	}
	CHECK(blocked_since(start) < 1900000000u);
	ledger_mute(false);
	CHECK(ledger_counts().registered == 1);
	for (int i = 0; i < 16; i++)
		CU(cuMemFree_v2(p[i]));
	EVENTUALLY(ledger_reserved(0) == 0); /* in the client's own time */
}

/* A pool counts by what the driver says of it, and a limit that comes later finds all of it. */
static void without_a_limit_the_driver_counts_pools(void)
{
	CUdeviceptr p[5], q, r;
	uint64_t all = UINT64_MAX;
	CUmemoryPool pool;

	begin(0, 0);
	CU(cuMemAlloc_v2(&q, MIB));
	EVENTUALLY(ledger_reserved(0) == 64 * MIB);
	for (int i = 0; i < 5; i++)
		CU(cuMemAllocAsync(&p[i], 40 * MIB, NULL));
	EVENTUALLY(ledger_reserved(0) == 256 * MIB);
	CU(cuMemFreeAsync(p[0], NULL));
	CU(cuMemFree_v2(p[1])); /* may be mixed */
	CU(cuCtxSynchronize());
	pool = keeping(0, UINT64_MAX);
	CU(cuMemAllocFromPoolAsync(&r, 20 * MIB, pool, NULL));
	CU(cuMemFreeAsync(r, NULL));
	CU(cuMemAllocAsync(&p[0], 40 * MIB, NULL));
	ledger_limit(0, LIMIT);
	CHECK(cuMemAllocAsync(&r, 100 * MIB, NULL) == OOM); /* it holds from the next allocation on */
	CHECK(cuMemAlloc_v2(&r, 100 * MIB) == OOM);
	CHECK(used() == 181 * MIB);
	CU(cuMemAlloc_v2(&r, 90 * MIB)); /* what the pool keeps makes room */
	CU(cuMemFree_v2(r));
	CHECK(used() == 161 * MIB);
	CHECK(cuMemAllocAsync(&r, 100 * MIB, NULL) == OOM);
	CU(cuMemAllocAsync(&p[1], 40 * MIB, NULL));
	CHECK(used() == 201 * MIB);
	/* What is freed makes room, whether it was allocated before or behind the limit. */
	CU(cuMemFreeAsync(p[0], NULL));
	CU(cuMemFreeAsync(p[1], NULL));
	CU(cuMemAlloc_v2(&r, 130 * MIB));
	CHECK(used() == 251 * MIB);
	CU(cuMemFree_v2(r));
	/* What the pool has in use is known apart from what it keeps. */
	CU(cuDeviceGetMemPool(&pool, 0));
	CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
	CU(cuMemAllocAsync(&p[0], 100 * MIB, NULL));
	CU(cuMemFreeAsync(p[0], NULL));
	EVENTUALLY(used() == 221 * MIB && reserved_by(pool) == 220 * MIB);
	CU(cuMemAllocAsync(&p[0], 100 * MIB, NULL));
	CHECK(used() == 221 * MIB);
	CHECK(cuMemAllocAsync(&p[1], 50 * MIB, NULL) == OOM);
	for (int i = 0; i < 5; i++)
		if (i != 1)
			CU(cuMemFreeAsync(p[i], NULL));
	CU(cuMemPoolDestroy(keeping(0, 1)));
	CU(cuMemAlloc_v2(&r, 250 * MIB));
	CHECK(used() == 251 * MIB);
	/* And without the limit nothing is entered again. */
	CU(cuMemFree_v2(r));
	ledger_limit(0, 0);
	EVENTUALLY(!gpu_has(0, LIMIT));
	CU(cuMemAllocAsync(&p[0], 500 * MIB, NULL));
	EVENTUALLY(ledger_reserved(0) == 512 * MIB);
}

static void a_silent_scheduler_costs_one_wait(void)
{
	CUdeviceptr p;
	uint64_t start;

	begin(LIMIT, 0);
	CU(cuMemAlloc_v2(&p, MIB));
	ledger_mute(true);
	start = blocked_ns();
	CU(cuMemAlloc_v2(&p, 100 * MIB)); /* fits, by the limit it knew */
	CHECK(blocked_since(start) > 1900000000u);
	start = blocked_ns();
	CHECK(cuMemAlloc_v2(&p, 200 * MIB) == OOM);
	CU(cuMemAlloc_v2(&p, 100 * MIB));
	CHECK(cuMemAlloc_v2(&p, 60 * MIB) == OOM);
	CHECK(blocked_since(start) < 1900000000u);
	ledger_mute(false);
	/* What it never heard of it is told. */
	EVENTUALLY(ledger_reserved(0) >= 201 * MIB);
	CU(cuMemAlloc_v2(&p, 50 * MIB));
	EVENTUALLY(ledger_reserved(0) >= 251 * MIB);
}

/* What others had when it last said so still counts. */
static void a_silent_scheduler_has_told_of_others(void)
{
	size_t available, total;
	CUdeviceptr p;

	begin(LIMIT, 0);
	CU(cuMemAlloc_v2(&p, MIB));
	others_have(MIB, 150 * MIB);
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(available == 105 * MIB);
	ledger_mute(true);
	CHECK(cuMemAlloc_v2(&p, 110 * MIB) == OOM);
	CU(cuMemAlloc_v2(&p, 100 * MIB));
	ledger_mute(false);
	EVENTUALLY(ledger_reserved(0) >= 101 * MIB);
}

static void without_a_scheduler_the_limit_stands(void)
{
	size_t available, total;
	CUdeviceptr p, q;
	uint64_t start;

	begin(LIMIT, 0);
	CU(cuMemAlloc_v2(&p, 100 * MIB));
	ledger_stop();
	start = blocked_ns();
	CHECK(cuMemAlloc_v2(&q, 200 * MIB) == OOM);
	CU(cuMemAlloc_v2(&q, 150 * MIB));
	CHECK(blocked_since(start) < 1900000000u);
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(total == LIMIT && available == 6 * MIB);
	/* The next one is told what there is, even if it is too much. */
	ledger_limit(0, 200 * MIB);
	ledger_start();
	EVENTUALLY(ledger_reserved(0) == 250 * MIB);
	CHECK(ledger_counts().refused == 0);
	CHECK(cuMemAlloc_v2(&p, 1) == OOM);
	CU(cuMemFree_v2(q));
	CU(cuMemAlloc_v2(&q, 100 * MIB));
}

static __thread bool asks;
static atomic_bool late; /* who asks the scheduler does not see yet that its wait has ended */

/* The shim's, and everybody's. */
__attribute__((no_sanitize("address"))) /* it takes arguments that were not given */
long syscall(long number, ...)
{
	static long (*_Atomic found)(long, ...);
	long (*real)(long, ...) = found;
	long a[6], result;
	va_list args;
	int error;

	va_start(args, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(args, long);
	va_end(args);
	if (!real)
		found = real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	error = errno;
	if (number == SYS_futex && asks && (a[1] & ~FUTEX_PRIVATE_FLAG) == FUTEX_WAIT && a[3] &&
	    ((const struct timespec *)a[3])->tv_sec >= 5)
		while (late)
			nap_ms(1);
	errno = error;
	return result;
}

static void *ask_for_too_much(void *result)
{
	CUdeviceptr p;

	asks = true;
	CU(cuCtxSetCurrent(contexts[0]));
	*(int *)result = cuMemAlloc_v2(&p, 200 * MIB);
	return NULL;
}

/* The scheduler dies, and the next one answers something else before the thread has noticed. */
static void another_answer_grants_nothing(void)
{
	struct ledger_counts before;
	CUdeviceptr p;
	int result = -1;
	pthread_t t;

	begin(LIMIT, 0);
	CU(cuMemAlloc_v2(&p, 100 * MIB));
	before = ledger_counts();
	ledger_mute(true);
	late = true;
	CHECK(pthread_create(&t, NULL, ask_for_too_much, &result) == 0);
	EVENTUALLY(ledger_counts().asked > before.asked);
	ledger_stop();
	ledger_mute(false);
	ledger_start();
	EVENTUALLY(ledger_counts().forced > before.forced);
	used(); /* waits for the answer */
	late = false;
	CHECK(pthread_join(t, NULL) == 0);
	CHECK(result == OOM);
	CHECK(used() == 100 * MIB);
}

static void never_a_scheduler(void)
{
	size_t available, total;
	CUdeviceptr p;

	ledger_init();
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	CU(cuMemAlloc_v2(&p, LIMIT));
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(total - available == LIMIT);
	CU(cuMemFree_v2(p));
	CU(cuDeviceTotalMem_v2(&total, 0));
	CHECK(total > 4 * LIMIT);
	/* Nobody has asked for NVML: the shim has not brought it in. */
	CHECK(!dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD));
	CHECK(!dlsym(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo"));
}

/* The first allocation comes before the scheduler has answered at all. */
static void the_first_allocation_is_limited(void)
{
	CUdeviceptr p;

	ledger_init();
	ledger_limit(0, LIMIT);
	ledger_start();
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	CHECK(cuMemAlloc_v2(&p, LIMIT + 1) == OOM);
	CU(cuMemAlloc_v2(&p, LIMIT));
}

static void others_of_the_container_count(void)
{
	size_t available, total;
	uint64_t start;
	CUdeviceptr p;

	begin(LIMIT, 0);
	others_have(0, 200 * MIB);
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(available == 56 * MIB && total == LIMIT);
	CHECK(cuMemAlloc_v2(&p, 57 * MIB) == OOM);
	start = blocked_ns();
	for (int i = 0; i < 100; i++)
		CHECK(cuMemAlloc_v2(&p, 57 * MIB) == OOM);
	CHECK(blocked_since(start) < 5000000000u); /* 15 s if each waited for the others */
	CU(cuMemAlloc_v2(&p, 50 * MIB));
	CHECK(ledger_reserved(0) == 250 * MIB); /* exactly: little is left */
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(available == 6 * MIB);
	ledger_others(0, 0);
	CU(cuMemAlloc_v2(&p, 150 * MIB));
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(available == 56 * MIB);
}

/* ---- several processes ---- */

struct child {
	pid_t pid;
	int in, out;
};

/* Runs a part of this program in a process of its own. */
static struct child spawn(const char *part)
{
	struct child c;
	int to[2], from[2];

	CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
	c.pid = fork();
	CHECK(c.pid >= 0);
	if (c.pid == 0) {
		dup2(to[0], 0);
		dup2(from[1], 1);
		execl(self, self, part, (char *)NULL);
		_exit(127);
	}
	close(to[0]);
	close(from[1]);
	c.in = to[1];
	c.out = from[0];
	return c;
}

/* Asks for MiB to be allocated (or freed, below 0); returns the result. */
static int child_alloc(const struct child *c, int mib)
{
	int result;

	CHECK(write(c->in, &mib, sizeof(mib)) == sizeof(mib));
	CHECK(read(c->out, &result, sizeof(result)) == sizeof(result));
	return result;
}

/*
 * What a process does not use it returns within 0.1 s, where it gets a processor. One that
 * allocates meanwhile waits for a while, and may have to try again.
 */
static bool child_gets(const struct child *c, int mib)
{
	uint64_t start = test_now();
	int result;

	do
		result = child_alloc(c, mib);
	while (result == OOM && test_now() - start < PATIENCE_MS * 1000000ull);
	return result == CUDA_SUCCESS;
}

static void part_allocate(void)
{
	CUdeviceptr last = 0;
	int mib, result;

	alarm(600);
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	while (read(0, &mib, sizeof(mib)) == sizeof(mib)) {
		result = mib < 0 ? cuMemFree_v2(last) : cuMemAlloc_v2(&last, (size_t)mib * MIB);
		CHECK(write(1, &result, sizeof(result)) == sizeof(result));
	}
}

static void two_processes_share_a_limit(void)
{
	struct child a, b;
	int status;

	ledger_init();
	ledger_limit(0, LIMIT);
	ledger_start();
	a = spawn("part_allocate");
	b = spawn("part_allocate");
	CHECK(child_alloc(&a, 10) == CUDA_SUCCESS);
	CHECK(child_alloc(&b, 10) == CUDA_SUCCESS);
	/* What either has reserved and does not use is no loss to the other. */
	CHECK(child_gets(&a, 200));
	CHECK(child_gets(&b, 36));
	CHECK(child_alloc(&b, 1) == OOM);
	CHECK(child_alloc(&a, 1) == OOM);
	CHECK(child_alloc(&a, -1) == CUDA_SUCCESS);
	CHECK(child_gets(&b, 200));
	/* A dead one gives back all. */
	CHECK(kill(b.pid, SIGKILL) == 0 && waitpid(b.pid, &status, 0) == b.pid);
	EVENTUALLY(ledger_reserved(0) <= 10 * MIB);
	CHECK(child_gets(&a, 240));
	close(a.in);
	CHECK(waitpid(a.pid, &status, 0) == a.pid && status == 0);
}

/* ---- many at once ---- */

#define THREADS 8

static atomic_ulong over;

static void *churn(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)arg;
	CUdeviceptr p[8] = { 0 };

	CU(cuCtxSetCurrent(contexts[seed % 2]));
	for (int i = 0; i < 1000; i++) {
		CUdeviceptr *at = &p[rand_r(&seed) % 8];
		int result = CUDA_SUCCESS;

		if (*at) {
			CU(cuMemFree_v2(*at));
			*at = 0;
		} else if (rand_r(&seed) % 2) {
			result = cuMemAlloc_v2(at, rand_r(&seed) % (16 * MIB) + 1);
		} else {
			result = cuMemAllocAsync(at, rand_r(&seed) % (16 * MIB) + 1, NULL);
		}
		CHECK(result == CUDA_SUCCESS || result == OOM);
		over += result == OOM;
	}
	for (int i = 0; i < 8; i++)
		CU(cuMemFree_v2(p[i]));
	return NULL;
}

static void threads_keep_the_account(void)
{
	pthread_t t[THREADS];

	begin(LIMIT / 4, LIMIT / 4); /* a single one of them meets it often */
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&t[i], NULL, churn, (void *)i) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	CHECK(used() == 0);
	CU(cuCtxSetCurrent(contexts[1]));
	CHECK(used() == 0);
	CHECK(over > 0);
	CHECK(ledger_counts().forced == 0); /* they never had more than the limit */
	EVENTUALLY(ledger_reserved(0) <= 2 * 64 * MIB);
}

static void threads_and_pools_that_keep(void)
{
	uint64_t all = UINT64_MAX;
	CUmemoryPool pool;
	pthread_t t[THREADS];

	begin(LIMIT / 4, LIMIT / 4);
	for (int g = 0; g < 2; g++) {
		CU(cuDeviceGetDefaultMemPool(&pool, g));
		CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
	}
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&t[i], NULL, churn, (void *)i) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	for (int g = 0; g < 2; g++) {
		CU(cuCtxSetCurrent(contexts[g]));
		CU(cuCtxSynchronize());
		CU(cuDeviceGetDefaultMemPool(&pool, g));
		CHECK(used() == reserved_by(pool));
		CU(cuMemPoolTrimTo(pool, 0));
		CHECK(used() == 0);
	}
	CHECK(over > 0);
}

static void threads_beside_a_limit_that_comes_and_goes(void)
{
	pthread_t t[THREADS];

	begin(0, 0);
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&t[i], NULL, churn, (void *)i) == 0);
	for (int i = 0; i < 30; i++)
		for (int g = 0; g < 2; g++) {
			ledger_limit(g, i % 2 ? 0 : LIMIT);
			EVENTUALLY(gpu_has(g, LIMIT) == !(i % 2)); /* the process has heard of it */
		}
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	for (int g = 0; g < 2; g++) {
		ledger_limit(g, LIMIT);
		CU(cuCtxSetCurrent(contexts[g]));
		CU(cuCtxSynchronize());
		EVENTUALLY(gpu_has(g, LIMIT) && used() == 0);
	}
}

/* A thread's own pools end with memory in use, while others allocate at the limit and wait. */
static void *come_and_go(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)arg;
	int gpu = seed % 2;

	CU(cuCtxSetCurrent(contexts[gpu]));
	for (int i = 0; i < 150; i++) {
		CUmemoryPool pool = keeping(gpu, rand_r(&seed) % 2 ? UINT64_MAX : MIB);
		CUdeviceptr p[4] = { 0 };

		for (int k = 0; k < 4; k++) {
			int result = cuMemAllocFromPoolAsync(&p[k], rand_r(&seed) % (8 * MIB) + 1, pool, NULL);

			CHECK(result == CUDA_SUCCESS || result == OOM);
			if (k % 2 && p[k - 1])
				CU(cuMemFreeAsync(p[k - 1], NULL));
		}
		if (rand_r(&seed) % 4 == 0)
			CU(cuCtxSynchronize());
		CU(cuMemPoolDestroy(pool));
		for (int k = 1; k < 4; k += 2)
			CU(cuMemFree_v2(p[k]));
	}
	return NULL;
}

static void threads_whose_pools_come_and_go(void)
{
	pthread_t t[THREADS];

	begin(LIMIT / 4, LIMIT / 4);
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&t[i], NULL, come_and_go, (void *)i) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	for (int g = 0; g < 2; g++) {
		CU(cuCtxSetCurrent(contexts[g]));
		CHECK(used() == 0);
	}
}

/* ---- against a model ---- */

enum thing { NOTHING, POINTER, POOLED, ARRAY, MIPMAP, HANDLE };
#define THINGS 200

static struct {
	enum thing what;
	int gpu, owner; /* owner: which context it goes with, 2 and up: none */
	uint64_t bytes, key;
} things[THINGS];

static CUmemoryPool model_pool[2];
static bool pools_keep;

static uint64_t model_used(int gpu)
{
	uint64_t sum = 0;

	for (int i = 0; i < THINGS; i++)
		if (things[i].what && things[i].gpu == gpu)
			sum += things[i].bytes;
	return sum;
}

/* What the pool of a GPU keeps. */
static uint64_t model_kept(int gpu)
{
	uint64_t kept = reserved_by(model_pool[gpu]);

	for (int i = 0; i < THINGS; i++)
		if (things[i].what == POOLED && things[i].gpu == gpu)
			kept -= things[i].bytes;
	return kept;
}

static unsigned seed = 1;

static uint64_t some(uint64_t most)
{
	return ((uint64_t)rand_r(&seed) << 15 ^ (uint64_t)rand_r(&seed)) % most + 1;
}

/* A thing of a random kind, on a random GPU; what the driver says must be right. */
static void model_make(int i)
{
	static const int kinds = 8;
	int current = rand_r(&seed) % 2, gpu = current, result;
	uint64_t n = some(24 * MIB), least;
	CUdeviceptr p = 0;

	CU(cuCtxSetCurrent(contexts[current]));
	things[i].owner = current;
	switch (rand_r(&seed) % kinds) {
	case 0:
	case 1:
		least = n;
		result = cuMemAlloc_v2(&p, n);
		things[i].what = POINTER;
		break;
	case 2: {
		size_t pitch;
		size_t w = some(3000), h = some(3000);

		least = (w + 511) / 512 * 512 * h; /* the simulated driver's pitch */
		result = cuMemAllocPitch_v2(&p, &pitch, w, h, 16);
		n = pitch * h;
		things[i].what = POINTER;
		break;
	}
	case 3:
		least = n;
		result = cuMemAllocManaged(&p, n, 1);
		things[i].what = POINTER;
		break;
	case 4:
		if (pools_keep)
			n = (n + 511) / 512 * 512; /* what pools count in */
		least = n;
		result = cuMemAllocAsync(&p, n, NULL);
		things[i].what = POOLED;
		things[i].owner = 2;
		break;
	case 5: {
		CUDA_ARRAY3D_DESCRIPTOR d = { some(500), some(500), some(20), CU_AD_FORMAT_HALF, 2, 0 };
		CUarray a = NULL;

		n = least = (d.Width * d.Height * d.Depth * 4 + 65535) / 65536 * 65536;
		result = cuArray3DCreate_v2(&a, &d);
		p = (uintptr_t)a;
		things[i].what = ARRAY;
		break;
	}
	case 6: {
		CUDA_ARRAY3D_DESCRIPTOR d = { some(1000), some(1000), 0, CU_AD_FORMAT_FLOAT, 1, 0 };
		CUmipmappedArray a = NULL;

		n = d.Width * d.Height * 4;
		n = least = (n + 65535) / 65536 * 65536;
		result = cuMipmappedArrayCreate(&a, &d, 1);
		p = (uintptr_t)a;
		things[i].what = MIPMAP;
		break;
	}
	default: {
		CUmemAllocationProp prop = vmm_prop(CU_MEM_LOCATION_TYPE_DEVICE, gpu = rand_r(&seed) % 2);
		CUmemGenericAllocationHandle h = 0;

		if (pools_keep && gpu != current) { /* only the current context's frees are waited for */
			CU(cuCtxSetCurrent(contexts[gpu]));
			CU(cuCtxSynchronize());
			CU(cuCtxSetCurrent(contexts[current]));
		}
		n = least = some(8) * 2 * MIB;
		result = cuMemCreate(&h, n, &prop, 0);
		p = h;
		things[i].what = HANDLE;
		things[i].owner = 2;
		break;
	}
	}
	things[i].gpu = gpu;
	if (result != CUDA_SUCCESS)
		things[i].what = NOTHING;
	CHECK(result == (model_used(gpu) - (things[i].what ? things[i].bytes : 0) + least > LIMIT
			 ? OOM : CUDA_SUCCESS));
	things[i].bytes = n;
	things[i].key = p;
}

static int destroy_thing(enum thing what, uint64_t key)
{
	switch (what) {
	case POINTER: return cuMemFree_v2(key);
	case POOLED: return rand_r(&seed) % 2 ? cuMemFreeAsync(key, NULL) : cuMemFree_v2(key);
	case ARRAY: return cuArrayDestroy((CUarray)(uintptr_t)key);
	case MIPMAP: return cuMipmappedArrayDestroy((CUmipmappedArray)(uintptr_t)key);
	case HANDLE: return cuMemRelease(key);
	default: return CUDA_SUCCESS;
	}
}

static void model_end_context(int which)
{
	CU(cuCtxDestroy_v2(contexts[which]));
	for (int i = 0; i < THINGS; i++)
		if (things[i].what && things[i].owner == which)
			things[i].what = NOTHING;
	CU(cuCtxCreate_v2(&contexts[which], 0, which));
}

/* The thresholds of the pools change, or they are trimmed. */
static void model_pools_change(void)
{
	int gpu = rand_r(&seed) % 2;
	uint64_t bytes = rand_r(&seed) % 2 ? UINT64_MAX : some(64 * MIB) / 512 * 512 + 512;

	if (rand_r(&seed) % 4 == 0)
		CU(cuMemPoolTrimTo(model_pool[gpu], bytes));
	else
		CU(cuMemPoolSetAttribute(model_pool[gpu], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes));
	CU(cuCtxSynchronize());
}

static void agree_with_the_model(void)
{
	begin(LIMIT, LIMIT);
	for (int g = 0; g < 2; g++)
		CU(cuDeviceGetMemPool(&model_pool[g], g));
	for (int step = 0; step < 100000; step++) {
		int i = rand_r(&seed) % THINGS;

		if (things[i].what) {
			enum thing what = things[i].what;

			things[i].what = NOTHING;
			if (what == POOLED)
				CU(cuCtxSetCurrent(contexts[things[i].gpu]));
			CU(destroy_thing(what, things[i].key));
			if (what != HANDLE && rand_r(&seed) % 4 == 0) /* its value may be another's */
				CHECK(destroy_thing(what, things[i].key) != CUDA_SUCCESS);
		} else {
			things[i].bytes = 0;
			model_make(i);
		}
		if (step % 5000 == 4999)
			model_end_context(step / 5000 % 2);
		if (pools_keep && step % 64 == 63)
			model_pools_change();
		if (step % 16 == 0)
			for (int g = 0; g < 2; g++) {
				uint64_t sum;

				CU(cuCtxSetCurrent(contexts[g]));
				if (pools_keep)
					CU(cuCtxSynchronize());
				sum = model_used(g) + (pools_keep ? model_kept(g) : 0);
				CHECK(used() == (sum < LIMIT ? sum : LIMIT));
			}
	}
	CHECK(ledger_counts().refused > 0);
}

static void any_sequence_agrees_with_a_model(void)
{
	agree_with_the_model();
}

static void any_sequence_with_pools_that_keep(void)
{
	pools_keep = true;
	agree_with_the_model();
}

/* ---- NVML ---- */

struct info { unsigned long long total, free, used; };
struct info2 { unsigned version; unsigned long long total, reserved, free, used; };

static void *nvml;

static void *nvml_function(const char *name)
{
	void *p = dlsym(nvml, name);

	CHECK(p);
	return p;
}
#define NVML(name, ...) ((int (*)(__VA_ARGS__))nvml_function(#name))

static void *nvml_device(unsigned i)
{
	void *dev;

	nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
	CHECK(nvml);
	CHECK(NVML(nvmlInit_v2, void)() == 0);
	CHECK(NVML(nvmlDeviceGetHandleByIndex_v2, unsigned, void **)(i, &dev) == 0);
	return dev;
}

static struct info nvml_memory(void *dev)
{
	struct info2 b = { .version = 2 };
	struct info a;

	for (int i = 0; i < 100; i++) { /* the scheduler's word may come in between */
		CHECK(NVML(nvmlDeviceGetMemoryInfo, void *, struct info *)(dev, &a) == 0);
		CHECK(NVML(nvmlDeviceGetMemoryInfo_v2, void *, struct info2 *)(dev, &b) == 0);
		if (a.total == b.total && a.free == b.free && a.used == b.used)
			break;
	}
	CHECK(a.total == b.total && a.free == b.free && a.used == b.used && b.reserved == 0);
	return a;
}

static void nvml_agrees_with_the_driver(void)
{
	size_t available, total;
	struct info m;
	CUdeviceptr p;
	void *dev;

	begin(LIMIT, 0);
	dev = nvml_device(0);
	CU(cuMemAlloc_v2(&p, 30 * MIB));
	others_have(30 * MIB, 100 * MIB);
	CU(cuMemGetInfo_v2(&available, &total));
	m = nvml_memory(dev);
	CHECK(m.total == LIMIT && m.used == 130 * MIB && m.free == LIMIT - m.used);
	CHECK(available == m.free && total == m.total);
	/* No limit, nothing to hide. */
	m = nvml_memory(nvml_device(1));
	CHECK(m.total > LIMIT && m.used == 0);
	CHECK(NVML(nvmlDeviceGetUUID, void *, char *, unsigned)(dev, (char[96]){ 0 }, 96) == 0);
}

/* A process that only asks NVML: no cuInit, as nvidia-smi. */
static void nvml_alone_is_told_the_limit(void)
{
	unsigned threads, descriptors;
	struct info m;
	void *dev;

	ledger_init();
	dev = nvml_device(0);
	m = nvml_memory(dev); /* no scheduler: as it is */
	CHECK(m.total > LIMIT);
	ledger_limit(0, LIMIT);
	ledger_others(0, 10 * MIB);
	ledger_start();
	threads = entries("/proc/self/task");
	EVENTUALLY(nvml_memory(dev).total == LIMIT);
	EVENTUALLY(ledger_connections() == 0);
	descriptors = entries("/proc/self/fd");
	EVENTUALLY((m = nvml_memory(dev)).total == LIMIT && m.used == 10 * MIB && m.free == 246 * MIB);
	EVENTUALLY(ledger_connections() == 0);
	ledger_others(0, 20 * MIB);
	EVENTUALLY(nvml_memory(dev).used == 20 * MIB);
	EVENTUALLY(ledger_connections() == 0);
	CHECK(entries("/proc/self/task") == threads);
	CHECK(entries("/proc/self/fd") == descriptors);
	CHECK(ledger_counts().attached == 0 && ledger_counts().observed >= 2);
	m = nvml_memory(nvml_device(1));
	CHECK(m.total > LIMIT);
}

static void a_scheduler_that_hangs_holds_nvml_up_shortly(void)
{
	uint64_t start;
	struct fake f;
	void *dev;

	fake_init(&f);
	fake_listen(&f); /* nobody accepts */
	dev = nvml_device(0);
	CHECK(nvml_memory(dev).total > LIMIT);
	start = blocked_ns();
	CHECK(nvml_memory(dev).total > LIMIT);
	CHECK(blocked_since(start) < 4000000000u); /* it is 0.4 s; 5 s were waited before, once */
	fake_end(&f);
}

/* A program that uses the GPU waits for its connection, and then no more. */
static void a_scheduler_that_hangs_is_waited_for_once(void)
{
	size_t available, total;
	uint64_t start;
	struct fake f;

	fake_init(&f);
	fake_listen(&f); /* nobody accepts */
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	start = blocked_ns();
	CU(cuMemGetInfo_v2(&available, &total));
	CHECK(total > LIMIT);
	CHECK(blocked_since(start) < 13000000000u); /* it is 10 s, and not another 5 s on a connection of its own */
	start = blocked_ns();
	for (int i = 0; i < 20; i++)
		CU(cuMemGetInfo_v2(&available, &total));
	CHECK(blocked_since(start) < 1000000000u);
	fake_end(&f);
}

static void *nvml_device_0;

static void *ask_nvml(void *arg)
{
	nvml_memory(nvml_device_0);
	return arg;
}

/* However many ask: the others go by what the first one hears. */
static void one_asks_for_all_threads(void)
{
	pthread_t t[64];
	struct fake f;
	int asked = 0;

	fake_init(&f);
	fake_listen(&f);
	CHECK(listen(f.listener, 128) == 0); /* nobody accepts */
	CHECK(fcntl(f.listener, F_SETFL, O_NONBLOCK) == 0);
	nvml_device_0 = nvml_device(0);
	for (int i = 0; i < 64; i++)
		CHECK(pthread_create(&t[i], NULL, ask_nvml, NULL) == 0);
	for (int i = 0; i < 64; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	while (accept4(f.listener, NULL, NULL, SOCK_CLOEXEC) >= 0)
		asked++;
	CHECK(asked > 0 && asked < 64); /* two or three as a rule: each asks twice */
	fake_end(&f);
}

static void *ask_nvml_for_ever(void *arg)
{
	for (;;)
		nvml_memory(nvml_device_0);
	return arg;
}

/* A process that never initialised CUDA forks too, while a thread asks. */
static void a_fork_beside_nvml(void)
{
	struct fake f;
	pthread_t t;
	int status;
	pid_t pid;

	fake_init(&f);
	fake_listen(&f); /* nobody accepts */
	nvml_device_0 = nvml_device(0);
	CHECK(pthread_create(&t, NULL, ask_nvml_for_ever, NULL) == 0);
	nap_ms(100);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		alarm(600);
		ask_nvml(NULL);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	fake_end(&f);
	_exit(0);
}

/* ---- life ---- */

static void a_forked_child_counts_afresh(void)
{
	CUdeviceptr p;
	int status;
	pid_t pid;

	begin(LIMIT, 0);
	CU(cuMemAlloc_v2(&p, 100 * MIB));
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		alarm(600);
		/* CUDA is gone for it; the shim does not hang and keeps no page. */
		CHECK(cuMemAlloc_v2(&p, MIB) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuMemFree_v2(p) == CUDA_ERROR_NOT_INITIALIZED);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(used() == 100 * MIB);
	CU(cuMemFree_v2(p));
	CHECK(used() == 0);
}

static sigjmp_buf back;
static volatile int jumps;

static void jump_away(int n)
{
	(void)n;
	jumps++;
	siglongjmp(back, 1);
}

/* As a program does that gives something up after a while. */
static void jump_while_asking(void (*ask)(void))
{
	struct itimerval soon = { { 0, 0 }, { 0, 50000 } };

	signal(SIGALRM, jump_away);
	if (!sigsetjmp(back, 1)) {
		setitimer(ITIMER_REAL, &soon, NULL);
		ask();
		while (!jumps)
			nap_ms(1);
	}
	signal(SIGALRM, SIG_DFL);
	alarm(600);
}

static void ask_for_memory(void)
{
	CUdeviceptr p;

	CHECK(cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS);
}

static void a_jump_out_of_asking(void)
{
	sigset_t alarms;
	CUdeviceptr p;

	/* The scheduler's thread takes no signals. */
	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	CHECK(pthread_sigmask(SIG_BLOCK, &alarms, NULL) == 0);
	begin(LIMIT, 0);
	CHECK(pthread_sigmask(SIG_UNBLOCK, &alarms, NULL) == 0);
	CU(cuMemAlloc_v2(&p, MIB));
	ledger_mute(true);
	jump_while_asking(ask_for_memory);
	ledger_mute(false);
	CU(cuMemAlloc_v2(&p, 130 * MIB));
	CHECK(cuMemAlloc_v2(&p, 200 * MIB) == OOM);
}

static void ask_nvml_once(void)
{
	ask_nvml(NULL);
}

static void a_jump_out_of_nvml(void)
{
	struct fake f;

	fake_init(&f);
	fake_listen(&f); /* nobody accepts */
	nvml_device_0 = nvml_device(0);
	jump_while_asking(ask_nvml_once);
	ask_nvml(NULL);
	fake_end(&f);
}

/* Not a test: nanoseconds of a pair, "cost [N]". */
static void cost(int n)
{
	CUdeviceptr p = 0;

	CU(cuInit(0));
	CU(cuCtxCreate_v2(&contexts[0], 0, 0));
	for (int round = 0; round < 5; round++) {
		uint64_t start = test_now();

		for (int i = 0; i < n; i++) {
			CU(cuMemAlloc_v2(&p, 4096));
			CU(cuMemFree_v2(p));
		}
		printf("%.1f ns a pair\n", (double)(test_now() - start) / n);
	}
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
#define CASE(f) { #f, f }
	CASE(every_allocator_counts),
	CASE(stream_and_pool_say_which_gpu),
	CASE(what_pools_keep_counts),
	CASE(what_the_current_pool_keeps_counts),
	CASE(what_pools_keep_makes_room),
	CASE(a_refusal_waits_for_no_word),
	CASE(a_refusal_is_no_cancellation_point),
	CASE(vmm_counts_until_the_last_reference),
	CASE(contexts_take_their_memory_along),
	CASE(a_context_ends_with_its_last_use),
	CASE(graphs_count_when_they_have_memory),
	CASE(nodes_of_a_graph_count_together),
	CASE(the_first_launch_of_a_graph_is_limited),
	CASE(the_limit_is_the_gpu),
	CASE(padding_counts_against_the_limit),
	CASE(small_allocations_do_not_ask),
	CASE(without_a_limit_nobody_waits),
	CASE(without_a_limit_the_driver_counts_pools),
	CASE(a_silent_scheduler_costs_one_wait),
	CASE(a_silent_scheduler_has_told_of_others),
	CASE(without_a_scheduler_the_limit_stands),
	CASE(another_answer_grants_nothing),
	CASE(never_a_scheduler),
	CASE(the_first_allocation_is_limited),
	CASE(others_of_the_container_count),
	CASE(two_processes_share_a_limit),
	CASE(threads_keep_the_account),
	CASE(threads_and_pools_that_keep),
	CASE(threads_beside_a_limit_that_comes_and_goes),
	CASE(threads_whose_pools_come_and_go),
	CASE(any_sequence_agrees_with_a_model),
	CASE(any_sequence_with_pools_that_keep),
	CASE(nvml_agrees_with_the_driver),
	CASE(nvml_alone_is_told_the_limit),
	CASE(a_slow_scheduler_is_waited_for),
	CASE(a_scheduler_lost_at_the_start_is_waited_for),
	CASE(a_scheduler_that_hangs_holds_nvml_up_shortly),
	CASE(a_scheduler_that_hangs_is_waited_for_once),
	CASE(one_asks_for_all_threads),
	CASE(a_fork_beside_nvml),
	CASE(a_forked_child_counts_afresh),
	CASE(a_jump_out_of_asking),
	CASE(a_jump_out_of_nvml),
};

int main(int argc, char **argv)
{
	self = argv[0];
	if (argc > 1 && strcmp(argv[1], "part_allocate") == 0) {
		part_allocate();
		return 0;
	}
	if (argc > 1 && strcmp(argv[1], "cost") == 0) {
		cost(argc > 2 ? atoi(argv[2]) : 100000);
		return 0;
	}
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		if (argc < 2) {
			puts(cases[i].name);
		} else if (strcmp(argv[1], cases[i].name) == 0) {
			alarm(600);
			cases[i].run();
			ledger_end();
			return 0;
		}
	}
	return argc >= 2;
}
