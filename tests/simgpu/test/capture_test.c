// SPDX-License-Identifier: Apache-2.0
/*
 * What may be called while a stream captures. The expectations were measured
 * on driver 580.159.04 for every combination below: capture mode, blocking or
 * non-blocking stream, same or another thread, that thread's own mode. A call
 * that fails always costs the capture: the stream reads "invalidated" and
 * EndCapture gives 901 and no graph.
 */
#include "check.h"

#include <pthread.h>

enum { GLOBAL, THREAD, RELAXED };

static struct gpu g;
static CUstream cap, other, other_blocking;
static CUevent old_event, event;
static CUdeviceptr mem;
static char host[64];

static CUresult ctx_sync(void) { return cuCtxSynchronize(); }
static CUresult query_captured(void) { return cuStreamQuery(cap); }
static CUresult sync_captured(void) { return cuStreamSynchronize(cap); }
static CUresult wait_uncaptured(void) { return cuStreamWaitEvent(cap, old_event, 0); }
static CUresult query_other(void) { return cuStreamQuery(other); }
static CUresult sync_other(void) { return cuStreamSynchronize(other); }
static CUresult query_other_blocking(void) { return cuStreamQuery(other_blocking); }
static CUresult query_per_thread(void) { return cuStreamQuery(CU_STREAM_PER_THREAD); }
static CUresult query_event(void) { return cuEventQuery(old_event); }
static CUresult sync_event(void) { return cuEventSynchronize(old_event); }
static CUresult query_legacy(void) { return cuStreamQuery(NULL); }
static CUresult sync_legacy(void) { return cuStreamSynchronize(NULL); }
static CUresult record_legacy(void) { return cuEventRecord(event, NULL); }
static CUresult memset_legacy(void) { return cuMemsetD8Async(mem, 1, 64, NULL); }
static CUresult memset_sync(void) { return cuMemsetD8_v2(mem, 1, 64); }
static CUresult copy_sync(void) { return cuMemcpyHtoD_v2(mem, host, 64); }
static CUresult memset_other(void) { return cuMemsetD8Async(mem, 1, 64, other); }
static CUresult memset_other_blocking(void) { return cuMemsetD8Async(mem, 1, 64, other_blocking); }
static CUresult record_other(void) { return cuEventRecord(event, other); }
static CUresult wait_other(void) { return cuStreamWaitEvent(other, old_event, 0); }
static CUresult copy_captured(void) { return cuMemcpyHtoDAsync_v2(mem, host, 64, cap); }
static CUresult launch_captured(void) { return spin(&g, cap, 1000, 0); }

static CUresult query_captured_event(void)
{
	CU(cuEventRecord(event, cap));
	return cuEventQuery(event);
}

static CUresult mem_info(void)
{
	size_t f, t;

	return cuMemGetInfo_v2(&f, &t);
}

static CUresult alloc(void)
{
	CUdeviceptr p;
	CUresult rc = cuMemAlloc_v2(&p, 64);

	if (!rc) { /* freeing is unsafe too: where allocating was not, this is not */
		CU(cuMemFree_v2(p));
	}
	return rc;
}

static CUresult alloc_host(void)
{
	void *p;
	CUresult rc = cuMemHostAlloc(&p, 64, 0);

	if (!rc)
		CU(cuMemFreeHost(p));
	return rc;
}

static CUresult create_stream(void)
{
	CUstream s;
	CUresult rc = cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);

	return rc ? rc : cuStreamDestroy_v2(s);
}

/* ALWAYS: fails with `code` in every combination. */
enum rule { SAFE, UNSAFE, ALWAYS, LEGACY, LEGACY_UNSAFE };
static const struct row {
	const char *name;
	CUresult (*call)(void);
	enum rule rule;
	CUresult code;
} rows[] = {
#define R(call, rule, code) { #call, call, rule, code }
	R(ctx_sync, ALWAYS, 900),	R(query_captured, ALWAYS, 900),	   R(sync_captured, ALWAYS, 900),
	R(wait_uncaptured, ALWAYS, 905), R(query_captured_event, ALWAYS, 907),
	R(query_other, UNSAFE, 900),	R(sync_other, UNSAFE, 900),	   R(query_other_blocking, UNSAFE, 900),
	R(query_per_thread, UNSAFE, 900), R(query_event, UNSAFE, 900),	   R(sync_event, UNSAFE, 900),
	R(alloc, UNSAFE, 900),		R(alloc_host, UNSAFE, 900),
	R(query_legacy, LEGACY_UNSAFE, 900), R(sync_legacy, LEGACY_UNSAFE, 900),
	R(record_legacy, LEGACY, 0),	R(memset_legacy, LEGACY, 0),	   R(memset_sync, LEGACY, 0),
	R(copy_sync, LEGACY, 0),
	R(memset_other, SAFE, 0),	R(memset_other_blocking, SAFE, 0), R(record_other, SAFE, 0),
	R(wait_other, SAFE, 0),		R(copy_captured, SAFE, 0),	   R(launch_captured, SAFE, 0),
	R(mem_info, SAFE, 0),		R(create_stream, SAFE, 0),
};

struct job {
	const struct row *row;
	int mode; /* of the thread */
	CUresult rc;
};

static void *act(void *arg)
{
	struct job *j = arg;
	int mode = j->mode;

	CU(cuCtxSetCurrent(g.ctx));
	CU(cuThreadExchangeStreamCaptureMode(&mode));
	j->rc = j->row->call();
	CU(cuThreadExchangeStreamCaptureMode(&mode));
	CHECK(mode == j->mode);
	return NULL;
}

static CUresult expected(const struct row *r, int blocking, int mode, int same, int thread_mode)
{
	int unsafe = thread_mode != RELAXED && (same ? mode != RELAXED : thread_mode == GLOBAL && mode == GLOBAL);

	switch (r->rule) {
	case ALWAYS: return r->code;
	case UNSAFE: return unsafe ? r->code : 0;
	case LEGACY: return blocking ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : 0;
	case LEGACY_UNSAFE: return blocking ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : unsafe ? r->code : 0;
	default: return 0;
	}
}

static void one(const struct row *r, int blocking, int mode, int same, int thread_mode)
{
	struct job j = { r, thread_mode, -1 };
	CUresult want = expected(r, blocking, mode, same, thread_mode);
	CUgraph graph = NULL;
	int status = -1;
	pthread_t t;

	CU(cuStreamCreate(&cap, blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING));
	CU(cuEventRecord(old_event, other));
	CU(cuStreamSynchronize(other));
	CU(cuStreamBeginCapture_v2(cap, mode));
	if (same) {
		act(&j);
	} else {
		CHECK(!pthread_create(&t, NULL, act, &j));
		CHECK(!pthread_join(t, NULL));
	}
	CU(cuStreamIsCapturing(cap, &status));
	if (j.rc != want || status != (want ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE)) {
		fprintf(stderr, "%s: blocking %d mode %d same %d thread mode %d: rc %d status %d, want %d\n", r->name,
			blocking, mode, same, thread_mode, j.rc, status, want);
		_exit(1);
	}
	EXPECT(want ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : 0, cuStreamEndCapture(cap, &graph));
	CHECK(!graph == !!want);
	if (graph)
		CU(cuGraphDestroy(graph));
	CU(cuCtxSynchronize());
	CU(cuStreamDestroy_v2(cap));
}

static void the_table_holds(void)
{
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
		for (int n = 0; n < 2 * 3 * 2 * 3; n++) {
			int blocking = n % 2, mode = n / 2 % 3, same = n / 6 % 2, thread_mode = n / 12;

			one(&rows[i], blocking, mode, same, thread_mode);
		}
}

static void a_graph_runs_what_was_captured(void)
{
	CUstream a, b;
	CUevent fork, join;
	CUgraph graph;
	CUgraphExec exec;
	uint64_t *r = (uint64_t *)(uintptr_t)mem;
	char out[4] = "";
	size_t n;

	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
	CU(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
	CU(cuMemsetD8_v2(mem, 0, 256));
	CU(cuCtxSynchronize());
	CU(cuStreamBeginCapture_v2(a, GLOBAL));
	CU(spin(&g, a, 10 * MS, mem));
	CU(cuEventRecord(fork, a));
	CU(cuStreamWaitEvent(b, fork, 0)); /* b joins the capture */
	CU(spin(&g, b, 5 * MS, mem + 16));
	CU(cuMemcpyHtoDAsync_v2(mem + 128, "abc", 4, b));
	CU(cuEventRecord(join, b));
	CU(cuStreamWaitEvent(a, join, 0));
	CU(spin(&g, a, 5 * MS, mem + 32));
	CU(cuStreamEndCapture(a, &graph));
	CU(cuGraphGetNodes(graph, NULL, &n));
	CHECK(n == 4);
	CHECK(r[0] == 0); /* nothing ran */
	CU(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CU(cuGraphDestroy(graph));
	CU(cuGraphUpload(exec, a));
	for (int i = 0; i < 2; i++) {
		uint64_t before = mono();

		CU(cuGraphLaunch(exec, a));
		EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
		CU(cuStreamSynchronize(a));
		CHECK(r[0] >= before && r[1] - r[0] == 10 * MS);
		CHECK(r[2] >= r[1] && r[4] >= r[3] && mono() >= r[5]);
	}
	CU(cuMemcpyDtoH_v2(out, mem + 128, 4));
	CHECK(!strcmp(out, "abc"));
	/* a graph inside a capture */
	CU(cuStreamBeginCapture_v2(b, RELAXED));
	CU(cuGraphLaunch(exec, b));
	CU(spin(&g, b, MS, 0));
	CU(cuStreamEndCapture(b, &graph));
	CU(cuGraphGetNodes(graph, NULL, &n));
	CHECK(n == 5);
	CU(cuGraphDestroy(graph));
	CU(cuGraphExecDestroy(exec));
}

static void forks_must_join(void)
{
	CUstream a, b;
	CUevent fork;
	CUgraph graph;
	int status;

	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
	CU(cuStreamBeginCapture_v2(a, GLOBAL));
	CU(cuEventRecord(fork, a));
	CU(cuStreamWaitEvent(b, fork, 0));
	CU(spin(&g, b, MS, 0));
	EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(a, &graph));
	CHECK(!graph);
	CU(cuStreamIsCapturing(b, &status));
	CHECK(status == CU_STREAM_CAPTURE_STATUS_NONE);
	CU(spin(&g, b, MS, 0));
	CU(cuStreamSynchronize(b));
}

int main(void)
{
	g = gpu_open(0);
	CU(cuMemAlloc_v2(&mem, 4096));
	CU(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&other_blocking, CU_STREAM_DEFAULT));
	CU(cuEventCreate(&old_event, CU_EVENT_DISABLE_TIMING));
	CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	the_table_holds();
	a_graph_runs_what_was_captured();
	forks_must_join();
	return 0;
}
