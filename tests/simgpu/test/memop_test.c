// SPDX-License-Identifier: Apache-2.0
/* Stream memory operations: in the order of a stream, and no address but a good one. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>

static struct gpu g;
static CUstream a, b;
static CUdeviceptr word;
static volatile uint32_t *flag; /* in host memory */

static void open_gpu(void)
{
	void *p;

	g = gpu_open(0);
	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(cuMemAlloc_v2(&word, 64));
	CU(cuMemsetD8_v2(word, 0, 64));
	CU(cuMemHostAlloc(&p, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
	flag = p;
	*flag = 0;
}

static uint64_t read_word(int at)
{
	uint64_t v;

	CU(cuMemcpyDtoH_v2(&v, word + 8 * (unsigned)at, 8));
	return v;
}

/* A write comes after what is before it in its stream; a wait holds up the stream, not the host. */
static void order(void)
{
	CUdeviceptr f = (uintptr_t)flag;
	uint64_t start = mono();

	CU(spin(&g, a, 30 * MS, 0));
	CU(cuStreamWriteValue32(a, f, 1, 0));
	CU(cuStreamWaitValue32(b, f, 1, CU_STREAM_WAIT_VALUE_EQ));
	CU(cuStreamWriteValue64(b, word, 1ull << 40 | 5, 0));
	CHECK(*flag == 0 || mono() - start > 30 * MS);
	CU(cuStreamSynchronize(b));
	CHECK(mono() - start >= 30 * MS && *flag == 1);
	CHECK(read_word(0) == (1ull << 40 | 5));

	/* by somebody else, as a host's flag is; another stream goes on meanwhile */
	CU(cuStreamWaitValue32(b, f, 7, CU_STREAM_WAIT_VALUE_GEQ));
	CU(cuStreamWriteValue32(b, word, 9, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER));
	CU(cuStreamWriteValue32(a, word + 8, 4, 0));
	CU(cuStreamSynchronize(a));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
	CHECK((uint32_t)read_word(1) == 4 && (uint32_t)read_word(0) == 5);
	*flag = 8;
	CU(cuCtxSynchronize());
	CHECK((uint32_t)read_word(0) == 9);
}

static void wait_for(unsigned how, uint32_t is, uint32_t value)
{
	*flag = is;
	CU(cuStreamWaitValue32(b, (uintptr_t)flag, value, how | CU_STREAM_WAIT_VALUE_FLUSH));
}

static void conditions(void)
{
	const struct {
		unsigned how;
		uint32_t no, yes, value;
	} c[] = {
		{ CU_STREAM_WAIT_VALUE_GEQ, 3, 4, 4 },
		{ CU_STREAM_WAIT_VALUE_GEQ, 0xffffffe0, 3, 0xfffffff0 }, /* cyclic */
		{ CU_STREAM_WAIT_VALUE_EQ, 5, 4, 4 },
		{ CU_STREAM_WAIT_VALUE_AND, 5, 6, 2 },
		{ CU_STREAM_WAIT_VALUE_NOR, 0xfffffffd, 6, 2 },
	};

	for (size_t i = 0; i < sizeof c / sizeof c[0]; i++) {
		wait_for(c[i].how, c[i].no, c[i].value);
		usleep(2000);
		EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
		*flag = c[i].yes;
		CU(cuStreamSynchronize(b));
	}
}

static CUstreamBatchMemOpParams make(int what, CUdeviceptr p, uint64_t value)
{
	CUstreamBatchMemOpParams o = { .value = { .operation = what, .address = p, .value = value } };

	return o;
}

static void batches_and_graphs(void)
{
	CUstreamBatchMemOpParams op[3] = {
		make(CU_STREAM_MEM_OP_WRITE_VALUE_32, word + 16, 1),
		make(CU_STREAM_MEM_OP_BARRIER, 0, 0),
		make(CU_STREAM_MEM_OP_WRITE_VALUE_64, word + 24, 2),
	};
	CUDA_BATCH_MEM_OP_NODE_PARAMS p = { g.ctx, 3, op, 0 };
	CUgraphNode node;
	CUgraphExec exec;
	CUgraph graph;

	CU(cuStreamBatchMemOp(a, 3, op, 0));
	CU(cuStreamSynchronize(a));
	CHECK((uint32_t)read_word(2) == 1 && read_word(3) == 2);

	op[0] = make(CU_STREAM_MEM_OP_WAIT_VALUE_32, (uintptr_t)flag, 1);
	op[2].value.value = 3;
	CU(cuGraphCreate(&graph, 0));
	CU(cuGraphAddBatchMemOpNode(&node, graph, NULL, 0, &p));
	op[0] = make(CU_STREAM_MEM_OP_WRITE_VALUE_64, word + 32, 4);
	p.count = 1;
	CU(cuGraphAddBatchMemOpNode(&node, graph, &node, 1, &p));
	CU(cuGraphInstantiateWithFlags(&exec, graph, 0));
	op[0].value.value = 5;
	CU(cuGraphExecBatchMemOpNodeSetParams(exec, node, &p));
	*flag = 0;
	CU(cuGraphLaunch(exec, a));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
	CHECK(read_word(3) == 2);
	*flag = 1;
	CU(cuStreamSynchronize(a));
	CHECK(read_word(3) == 3 && read_word(4) == 5);
	CU(cuGraphExecDestroy(exec));
	CU(cuGraphDestroy(graph));

	/* captured: nothing happens before the launch */
	CU(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
	CU(cuStreamWriteValue64(a, word + 40, 6, 0));
	CU(cuStreamBatchMemOp(a, 1, op, 0));
	CU(cuStreamEndCapture(a, &graph));
	CHECK(read_word(5) == 0);
	CU(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CU(cuGraphLaunch(exec, a));
	CU(cuStreamSynchronize(a));
	CHECK(read_word(5) == 6);
}

static void wrong(void)
{
	CUstreamBatchMemOpParams op = make(99, word, 0);
	CUdeviceptr gone;

	CU(cuMemAlloc_v2(&gone, 4096));
	CU(cuMemFree_v2(gone));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32(a, gone, 1, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue64(a, 0, 1, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue64(a, word + 4, 1, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32(a, word, 1, 8));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(a, 1, &op, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(a, 0, &op, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(a, 1, NULL, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(a, 257, &op, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(a, 1, &op, 1));
}

/* What is waited for is taken away: as on a GPU that is the end. */
static void fault(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle h;
	CUdeviceptr p;

	CU(cuMemAddressReserve(&p, 2 << 20, 0, 0, 0));
	CU(cuMemCreate(&h, 2 << 20, &prop, 0));
	CU(cuMemMap(p, 2 << 20, 0, h, 0));
	CU(cuMemSetAccess(p, 2 << 20, &access, 1));
	CU(cuStreamWaitValue32(a, p, 1, 0));
	CU(cuMemUnmap(p, 2 << 20));
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(a));
	_exit(0);
}

/* A semaphore may be waited for before somebody signals it. */
static void semaphores(void)
{
	CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS wait = { .value = 2 };
	CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS signal = { .value = 1 };
	CUexternalSemaphore s;

	CU(cuImportExternalSemaphore(&s, ""));
	CU(cuWaitExternalSemaphoresAsync(&s, &wait, 1, a));
	CU(cuSignalExternalSemaphoresAsync(&s, &signal, 1, b));
	CU(cuStreamSynchronize(b));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
	signal.value = 2;
	CU(cuSignalExternalSemaphoresAsync(&s, &signal, 1, b));
	CU(cuStreamSynchronize(a));
	CU(cuDestroyExternalSemaphore(s));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuWaitExternalSemaphoresAsync(&s, NULL, 1, a));
}

int main(void)
{
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		open_gpu();
		fault();
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	open_gpu();
	order();
	conditions();
	batches_and_graphs();
	wrong();
	semaphores();
	return 0;
}
