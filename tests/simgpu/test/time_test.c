// SPDX-License-Identifier: Apache-2.0
/* Order in time: streams, engines, events, default streams, host functions. */
#include "check.h"

#include <pthread.h>

CUresult cuStreamSynchronize_ptsz(CUstream);
CUresult cuLaunchKernel_ptsz(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
			     CUstream, void **, void **);

static struct gpu g;
static CUdeviceptr buf;
static uint64_t *at(int i) { return (uint64_t *)(uintptr_t)buf + 2 * i; } /* {start, end} of record i */
static CUdeviceptr rec(int i) { return buf + 16 * (unsigned)i; }

static void kernels_of_a_stream_follow_each_other(void)
{
	CUstream s;
	uint64_t before = mono();

	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(spin(&g, s, 20 * MS, rec(0)));
	CU(spin(&g, s, 10 * MS, rec(1)));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	CU(cuStreamSynchronize(s));
	CU(cuStreamQuery(s));
	CHECK(mono() - before >= 30 * MS);
	CHECK(at(0)[0] >= before && at(0)[1] - at(0)[0] == 20 * MS);
	CHECK(at(1)[0] == at(0)[1] && at(1)[1] - at(1)[0] == 10 * MS);
	CU(cuStreamDestroy_v2(s));
}

static void streams_share_the_engine(void)
{
	CUstream a, b;

	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(spin(&g, a, 30 * MS, rec(0)));
	CU(spin(&g, b, 5 * MS, rec(1)));
	CHECK(at(1)[0] >= at(0)[1]); /* the engine was busy */
	CU(cuCtxSynchronize());
	CHECK(mono() >= at(1)[1]);
}

static void events_order_streams(void)
{
	CUstream a, b;
	CUevent e0, e1;
	float ms = 0;

	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(cuEventCreate(&e0, 0));
	CU(cuEventCreate(&e1, 0));
	CU(cuEventQuery(e1)); /* never recorded: complete */
	CU(cuEventRecord(e0, a));
	CU(spin(&g, a, 25 * MS, rec(0)));
	CU(cuEventRecord(e1, a));
	EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(e1));
	EXPECT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, e0, e1));
	CU(cuStreamWaitEvent(b, e1, 0));
	CU(cuMemsetD8Async(rec(5), 0, 16, b));
	CU(spin(&g, b, MS, rec(1)));
	CHECK(at(1)[0] >= at(0)[1]);
	CU(cuStreamSynchronize(b));
	CU(cuEventElapsedTime(&ms, e0, e1));
	CHECK(ms >= 25.0f);
}

static void the_legacy_stream_waits_for_blocking_streams(void)
{
	CUstream blocking;

	CU(cuCtxSynchronize());
	CU(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
	CU(spin(&g, blocking, 20 * MS, rec(0)));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
	CU(cuMemcpyHtoD_v2(rec(6), "0123456789abcdef", 16)); /* copy engine, yet it waits */
	CHECK(mono() >= at(0)[1]);
	/* and blocking streams wait for the legacy stream */
	CU(spin(&g, NULL, 20 * MS, rec(0)));
	CU(cuMemcpyHtoDAsync_v2(rec(6), "0123456789abcdef", 16, blocking));
	CU(cuStreamSynchronize(blocking));
	CHECK(mono() >= at(0)[1]);
}

static void *other_thread(void *unused)
{
	uint64_t ns = 15 * MS, to = rec(1);
	void *params[] = { &ns, &to };

	CU(cuCtxSetCurrent(g.ctx));
	CU(cuLaunchKernel_ptsz(g.spin, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	CU(cuStreamSynchronize_ptsz(NULL));
	CHECK(mono() >= at(1)[1]);
	return unused;
}

static void per_thread_streams_are_of_one_thread(void)
{
	pthread_t t;

	CU(cuCtxSynchronize());
	CHECK(!pthread_create(&t, NULL, other_thread, NULL));
	CHECK(!pthread_join(t, NULL));
	CU(spin(&g, CU_STREAM_PER_THREAD, 20 * MS, rec(0)));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(CU_STREAM_PER_THREAD));
	CU(cuStreamSynchronize(CU_STREAM_PER_THREAD));
	CHECK(mono() >= at(0)[1]);
}

static volatile int ran;
static uint64_t ran_at;

static void slow_function(void *data)
{
	ran_at = mono();
	nanosleep(&(struct timespec){ 0, 20 * (long)MS }, NULL);
	ran = *(int *)data;
}

static void slow_callback(CUstream s, CUresult rc, void *data)
{
	(void)s;
	CHECK(rc == 0);
	slow_function(data);
}

static void host_functions_run_in_stream_order(void)
{
	CUstream s;
	CUevent e;
	int seven = 7, eight = 8;

	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	CU(spin(&g, s, 10 * MS, rec(0)));
	CU(cuLaunchHostFunc(s, slow_function, &seven));
	CU(cuEventRecord(e, s));
	EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	CU(cuEventSynchronize(e));
	CHECK(ran == 7 && ran_at >= at(0)[1]);
	CU(cuStreamAddCallback(s, slow_callback, &eight, 0));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	CU(cuCtxSynchronize());
	CHECK(ran == 8);
}

/* GPU 2 has a kernel of an hour in its legacy stream; the process ends before. */
static void other_engines_streams_and_gpus_do_not_wait(void)
{
	struct gpu h = gpu_open(2);
	CUdeviceptr there;
	CUstream s;

	CU(cuMemAlloc_v2(&there, 16));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(spin(&h, NULL, 3600000 * MS, 0));
	CU(cuMemcpyHtoDAsync_v2(there, "0123456789abcdef", 16, s));
	CU(cuStreamSynchronize(s));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
	CU(cuCtxSetCurrent(g.ctx));
	CU(spin(&g, NULL, MS, 0));
	CU(cuCtxSynchronize());
	/* a stream brings its own device, whatever is current */
	CU(spin(&h, s, MS, 0));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	CU(cuStreamQuery(NULL));
}

int main(void)
{
	g = gpu_open(0);
	CU(cuMemAlloc_v2(&buf, 4096));
	kernels_of_a_stream_follow_each_other();
	streams_share_the_engine();
	events_order_streams();
	the_legacy_stream_waits_for_blocking_streams();
	per_thread_streams_are_of_one_thread();
	host_functions_run_in_stream_order();
	other_engines_streams_and_gpus_do_not_wait();
	return 0;
}
