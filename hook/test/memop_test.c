// SPDX-License-Identifier: Apache-2.0
/*
 * memop_test.c: stream memory operations, which need no grant, on memory that is
 * swapped. Run like swap_test. A neighbour has the GPU whenever the tenant does
 * not ask for it, and leaves no room for what the tenant has.
 */
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>

#include "tenant.h"

#define GPU (96 * MIB)
#define LARGE (40 * MIB)
#define AWAY (32 * MIB) /* of LARGE, when the neighbour has the GPU: the last to be moved out */
#define FIXED (4 * MIB)

static const char *self;

/* ---- where a word may be ---- */

static CUdeviceptr vmm(uint64_t bytes)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle h;
	CUdeviceptr p;

	CU(cuMemAddressReserve(&p, 2 * bytes, 0, 0, 0));
	CU(cuMemCreate(&h, bytes, &prop, 0));
	CU(cuMemMap(p + bytes, bytes, 0, h, 0));
	CU(cuMemSetAccess(p + bytes, bytes, &access, 1));
	CU(cuMemRelease(h));
	return p + bytes;
}

static CUdeviceptr plain(uint64_t bytes)
{
	CUdeviceptr p;

	CU(cuMemAlloc_v2(&p, bytes));
	return p;
}

static CUdeviceptr pooled(uint64_t bytes)
{
	CUdeviceptr p;

	CU(cuMemAllocAsync(&p, bytes, NULL));
	return p;
}

/* ---- how it may be named; each returns once it is written ---- */

static CUstream own; /* not the one that the rest works in */

static CUstreamBatchMemOpParams op_of(int what, CUdeviceptr p, uint64_t value)
{
	CUstreamBatchMemOpParams o = { .value = { .operation = what, .address = p, .value = value } };

	return o;
}

static void write_32(CUdeviceptr p, uint64_t value)
{
	CU(cuStreamWriteValue32(own, p, (uint32_t)value, 0));
}

static void write_64(CUdeviceptr p, uint64_t value)
{
	CU(cuStreamWriteValue64_v2(own, p, value, 0));
}

static void batch(CUdeviceptr p, uint64_t value)
{
	CUstreamBatchMemOpParams op[2] = { op_of(CU_STREAM_MEM_OP_BARRIER, 0, 0),
					   op_of(CU_STREAM_MEM_OP_WRITE_VALUE_64, p, value) };

	CU(cuStreamBatchMemOp_v2(own, 2, op, 0));
}

static void through_resolver(CUdeviceptr p, uint64_t value)
{
	CUresult (*f)(CUstream, CUdeviceptr, uint64_t, unsigned);

	CU(cuGetProcAddress("cuStreamWriteValue64", (void **)&f, 12000,
			    CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM));
	CU(f(NULL, p, value, 0));
	CU(cuStreamSynchronize(CU_STREAM_PER_THREAD));
}

/* ---- tenants ---- */

static int neighbour(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer b = { plain(mib * MIB), mib * MIB, 0 };

	run_fill(&b, seed, NULL);
	for (unsigned i = 0; i < rounds; i++)
		work(5);
	return 0;
}

static uint64_t read_word(CUdeviceptr p)
{
	uint64_t v;

	CU(cuMemcpyDtoH_v2(&v, p, 8));
	return v;
}

/* Fills memory that moves, and idles until the neighbour has moved it out. */
static struct buffer large(uint64_t seed)
{
	struct buffer b = { plain(LARGE), LARGE, 0 };

	run_fill(&b, seed, NULL);
	CU(cuCtxSynchronize());
	return b;
}

/* late: the word is away when it is first named. */
static void writes(CUdeviceptr (*where)(uint64_t), uint64_t bytes, uint64_t fixed,
		   void (*how)(CUdeviceptr, uint64_t), bool late)
{
	struct buffer rest = { where(bytes), bytes / 2, 0 };
	CUdeviceptr p = rest.p + bytes / 2;
	struct buffer b = large(1);

	run_fill(&rest, 2, NULL);
	CU(cuMemsetD8_v2(p, 0, 8));
	CU(cuCtxSynchronize());
	CHECK(swapper_fixed() == 0);
	if (!late)
		how(p, 1);
	for (unsigned i = 2; i < 6; i++) {
		EVENTUALLY(swapper_away() >= AWAY);
		how(p, i);
		CU(cuStreamWaitValue32(own, p, i, CU_STREAM_WAIT_VALUE_EQ));
		CU(cuStreamSynchronize(own));
		if (!late)
			CHECK(swapper_away() >= AWAY); /* it asked for no turn */
		late = false;
		EVENTUALLY(swapper_fixed() == fixed);
		CHECK(read_word(p) == i);
		verify(&rest);
		verify(&b);
	}
}

static int tenant_large(uint64_t mib, unsigned late, uint64_t seed)
{
	(void)mib, (void)seed;
	writes(plain, FIXED, FIXED, write_32, late);
	return 0;
}

static int tenant_small(uint64_t mib, unsigned late, uint64_t seed)
{
	(void)mib, (void)seed;
	writes(plain, 1024, 2 * MIB, write_64, late); /* with the slab that it is in */
	return 0;
}

static int tenant_mapped(uint64_t mib, unsigned late, uint64_t seed)
{
	(void)mib, (void)seed;
	writes(vmm, FIXED, FIXED, write_64, late);
	return 0;
}

static int tenant_batch(uint64_t mib, unsigned late, uint64_t seed)
{
	(void)mib, (void)seed;
	writes(pooled, FIXED, FIXED, batch, late);
	return 0;
}

static int tenant_resolved(uint64_t mib, unsigned late, uint64_t seed)
{
	(void)mib, (void)seed;
	writes(plain, FIXED, FIXED, through_resolver, late);
	return 0;
}

/* A stream that does nothing but wait, since before the turn, keeps nobody from the GPU. */
static int tenant_waits(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p = plain(FIXED);
	struct buffer b = large(seed);

	(void)mib, (void)rounds;
	CU(cuMemsetD8_v2(p, 0, 8));
	CU(cuCtxSynchronize());
	EVENTUALLY(swapper_away() >= AWAY);
	CU(cuStreamWaitValue32(own, p, 1, CU_STREAM_WAIT_VALUE_EQ)); /* comes in for this */
	EVENTUALLY(swapper_away() >= AWAY && swapper_fixed() == FIXED);
	CHECK(cuStreamQuery(own) == CUDA_ERROR_NOT_READY);
	CU(cuStreamWriteValue32(NULL, p, 1, 0));
	CU(cuStreamSynchronize(own));
	verify(&b);
	CU(cuMemFree_v2(p));
	return 0;
}

/* A free waits for what is pending in the context also where there was no grant for it. */
static int tenant_frees(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p = plain(FIXED);
	struct buffer b = large(seed);
	volatile uint32_t *flag;
	void *host;
	pid_t pid;

	(void)mib, (void)rounds;
	/* Another process writes the flag: shared memory, registered here. */
	host = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(host != MAP_FAILED);
	flag = host;
	CU(cuMemHostRegister_v2(host, 4096, 0));
	CU(cuStreamWriteValue32(own, p, 0, 0));
	EVENTUALLY(swapper_away() >= AWAY);
	CU(cuStreamWaitValue32(own, (uintptr_t)host, 1, CU_STREAM_WAIT_VALUE_EQ));
	CU(cuStreamWriteValue32(own, p, 1, 0));
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		nap_ms(100);
		*flag = 1;
		_exit(0);
	}
	CU(cuMemFree_v2(p));
	CHECK(*flag == 1);
	CU(cuStreamSynchronize(own));
	CHECK(waitpid(pid, NULL, 0) == pid);
	verify(&b);
	return 0;
}

/* Freed in the stream behind a wait for it: it is there until the wait is over. */
static int tenant_streams(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p;
	struct buffer b = large(seed);

	(void)mib, (void)rounds;
	CU(cuMemAllocAsync(&p, FIXED, own));
	CU(cuMemsetD32Async(p, 0, 1, own));
	CU(cuStreamSynchronize(own));
	EVENTUALLY(swapper_away() >= AWAY);
	CU(cuStreamWaitValue32(own, p, 1, CU_STREAM_WAIT_VALUE_EQ)); /* comes in for this */
	CU(cuMemFreeAsync(p, own));
	EVENTUALLY(swapper_away() >= AWAY && swapper_fixed() == FIXED);
	CHECK(cuStreamQuery(own) == CUDA_ERROR_NOT_READY);
	CU(cuStreamWriteValue32(NULL, p, 1, 0));
	CU(cuStreamSynchronize(own));
	verify(&b);
	EVENTUALLY(swapper_fixed() == 0);
	return 0;
}

/*
 * What was launched waits, and so does the drain, for the write of another stream.
 * That needs no grant, or it would wait for half an hour.
 */
static int tenant_drains(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p = plain(FIXED), other = plain(64);
	struct buffer b = large(seed);
	uint64_t ns = 1000000, zero = 0;
	void *params[] = { &ns, &zero };
	CUgraphExec exec;
	CUgraph g;
	CUstream s;

	(void)mib;
	CU(cuMemsetD8_v2(p, 0, 8));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	CU(cuStreamWaitValue32(s, p, 1, CU_STREAM_WAIT_VALUE_EQ));
	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
	CU(cuStreamEndCapture(s, &g));
	CU(cuGraphInstantiateWithFlags(&exec, g, 0));
	for (unsigned i = 0; i < rounds; i++) {
		CU(cuGraphLaunch(exec, s));
		CHECK(cuStreamQuery(s) == CUDA_ERROR_NOT_READY);
		nap_ms(100); /* the turn is over by then, or nothing is tested */
		if (i == 0)
			CU(cuStreamWriteValue32(own, other, 1, 0)); /* named first now; it is here */
		CU(cuStreamWriteValue32(own, p, 1, 0));
		CU(cuStreamSynchronize(s));
		CU(cuStreamWriteValue32(own, p, 0, 0));
		CU(cuStreamSynchronize(own));
		verify(&b);
	}
	return 0;
}

static void set(CUDA_BATCH_MEM_OP_NODE_PARAMS *p, CUstreamBatchMemOpParams *op, CUdeviceptr at,
		uint64_t value)
{
	*op = op_of(CU_STREAM_MEM_OP_WRITE_VALUE_64, at, value);
	*p = (CUDA_BATCH_MEM_OP_NODE_PARAMS){ ctx, 1, op, 0 };
}

/* Nodes, and captures: named when the memory is away, replayed when it was away. */
static int tenant_graphs(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p[4] = { plain(FIXED), plain(FIXED), plain(FIXED), plain(FIXED) };
	CUgraphNodeParams any = { .type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP };
	struct buffer b = large(seed);
	CUDA_BATCH_MEM_OP_NODE_PARAMS params;
	CUstreamBatchMemOpParams op;
	CUgraphNode node, second;
	CUgraphExec exec[2];
	CUgraph g[2];

	(void)mib;
	EVENTUALLY(swapper_away() >= AWAY);
	CU(cuGraphCreate(&g[0], 0));
	set(&params, &op, p[0], 1);
	CU(cuGraphAddBatchMemOpNode(&node, g[0], NULL, 0, &params));
	EVENTUALLY(swapper_fixed() == FIXED);
	EVENTUALLY(swapper_away() >= AWAY);
	set(&any.u.memOp, &op, p[1], 2);
	CU(cuGraphAddNode_v2(&second, g[0], &node, NULL, 1, &any));
	EVENTUALLY(swapper_fixed() == 2 * FIXED);
	CU(cuGraphInstantiateWithFlags(&exec[0], g[0], 0));
	EVENTUALLY(swapper_away() >= AWAY);
	set(&params, &op, p[2], 3);
	CU(cuGraphExecBatchMemOpNodeSetParams(exec[0], node, &params));
	EVENTUALLY(swapper_fixed() == 3 * FIXED);
	EVENTUALLY(swapper_away() >= AWAY);
	CU(cuStreamBeginCapture_v2(own, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	CU(cuStreamWriteValue64(own, p[3], 4, 0));
	CU(cuStreamEndCapture(own, &g[1]));
	CU(cuGraphInstantiateWithFlags(&exec[1], g[1], 0));
	EVENTUALLY(swapper_fixed() == 4 * FIXED);
	for (unsigned i = 0; i < rounds; i++) {
		EVENTUALLY(swapper_away() >= AWAY);
		for (unsigned j = 0; j < 4; j++)
			CU(cuMemsetD8_v2(p[j], 0, 8));
		CU(cuGraphLaunch(exec[0], NULL));
		CU(cuGraphLaunch(exec[1], NULL));
		CU(cuCtxSynchronize());
		CHECK(read_word(p[0]) == 0);
		for (unsigned j = 1; j < 4; j++)
			CHECK(read_word(p[j]) == j + 1);
		verify(&b);
	}
	return 0;
}

/* Host memory, and what is freed or allocated anew. */
static int tenant_others(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p = plain(FIXED);
	struct buffer b = large(seed);
	volatile uint32_t *flag;
	void *host;

	(void)mib, (void)rounds;
	CU(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
	flag = host;
	*flag = 0;
	EVENTUALLY(swapper_away() >= AWAY);
	for (uint32_t i = 1; i < 100; i++) {
		CU(cuStreamWriteValue32(own, (uintptr_t)host, i, 0));
		CU(cuStreamWaitValue32(own, (uintptr_t)host, i, CU_STREAM_WAIT_VALUE_GEQ));
	}
	CU(cuStreamSynchronize(own));
	CHECK(*flag == 99 && swapper_fixed() == 0 && swapper_away() >= AWAY); /* in no turn of its own */
	write_32(p, 1);
	EVENTUALLY(swapper_fixed() == FIXED);
	CU(cuMemFree_v2(p));
	EVENTUALLY(swapper_fixed() == 0);
	p = plain(FIXED);
	CU(cuMemsetD8_v2(p, 7, 8));
	EVENTUALLY(swapper_away() >= AWAY);
	CHECK(swapper_fixed() == 0);
	CHECK(read_word(p) == 0x0707070707070707ull);
	verify(&b);
	return 0;
}

/* What wrong calls return, one number each, on standard output. */
static int tenant_errors(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p = plain(FIXED), v = vmm(FIXED), gone = plain(FIXED);
	uint64_t addresses[] = { 0, 1, p + 1, p + FIXED, p + FIXED + 64 * MIB, v - 8, v + FIXED, gone, ~0ull,
				 ~0ull - 7, 1ull << 47, (uintptr_t)&p };
	unsigned counts[] = { 0, 1, 2, 256, 257, 0x7fffffff, 0x80000000, ~0u };
	CUstreamBatchMemOpParams *op, many[256] = { 0 };
	CUDA_BATCH_MEM_OP_NODE_PARAMS params;
	CUgraphNode node;
	CUgraph g;
	char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)mib, (void)rounds, (void)seed;
	CHECK(page != MAP_FAILED && munmap(page + 4096, 4096) == 0);
	op = (void *)(page + 4096 - sizeof(*op)); /* nothing is behind it */
	CU(cuMemFree_v2(gone));
	CU(cuGraphCreate(&g, 0));
#define SAY(call) printf("%s: %d\n", #call, call)
	for (size_t i = 0; i < sizeof(addresses) / sizeof(addresses[0]); i++) {
		CUdeviceptr a = addresses[i];

		SAY(cuStreamWriteValue32(own, a, 1, 0));
		SAY(cuStreamWaitValue64(own, a, 1, 0));
		*op = op_of(CU_STREAM_MEM_OP_WAIT_VALUE_32, a, 0);
		SAY(cuStreamBatchMemOp(own, 1, op, 0));
	}
	*op = op_of(CU_STREAM_MEM_OP_BARRIER, p, p);
	SAY(cuStreamBatchMemOp(own, 1, op, 0));
	for (int type = -1; type < 20; type += type == 0 ? 7 : 1) { /* none that there is */
		memset(op, 0xff, sizeof(*op));
		op->operation = type;
		SAY(cuStreamBatchMemOp(own, 1, op, 0));
	}
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		unsigned n = counts[i];

		params = (CUDA_BATCH_MEM_OP_NODE_PARAMS){ ctx, n, NULL, 0 };
		SAY(cuStreamBatchMemOp_v2(own, n, NULL, 0));
		SAY(cuGraphAddBatchMemOpNode(&node, g, NULL, 0, &params));
		params.paramArray = n > 256 ? op : many;
		SAY(cuStreamBatchMemOp_v2(own, n, params.paramArray, 0));
		SAY(cuGraphAddBatchMemOpNode(&node, g, NULL, 0, &params));
	}
	SAY(cuGraphAddBatchMemOpNode(&node, g, NULL, 0, NULL));
	SAY(cuGraphExecBatchMemOpNodeSetParams(NULL, NULL, NULL));
	SAY(cuGraphAddNode_v2(&node, g, NULL, NULL, 0, NULL));
	return 0;
}

/* ---- cases ---- */

static const struct swapper_config usual = { .gpu = GPU, .arena = 16 * MIB, .quantum_ms = 30 };

static pid_t start(const char *kind, uint64_t mib, unsigned rounds, unsigned seed)
{
	return start_tenant(self, kind, mib, rounds, seed);
}

/* Runs it beside a neighbour that needs all but mib of the GPU. */
static void beside(const char *kind, uint64_t mib, unsigned rounds, struct swapper_config c)
{
	pid_t a, b;

	schedule(c);
	b = start("neighbour", 94 - mib, 1000000, 1);
	a = start(kind, 0, rounds, 2);
	CHECK(went_well(a));
	kill(b, SIGKILL);
	CHECK(waitpid(b, NULL, 0) == b);
	CHECK(swapper_seen().stuck_error == 0 && swapper_seen().stuck_memory == 0);
	swapper_end();
}

#define WRITES(kind) \
	static void kind##_memory_stays(void) { beside(#kind, 14, 0, usual); } \
	static void kind##_memory_comes_in_first(void) { beside(#kind, 14, 1, usual); }
WRITES(large)
WRITES(small)
WRITES(mapped)
WRITES(batch)
static void what_is_resolved_is_ours(void) { beside("resolved", 14, 1, usual); }
static void nodes_and_captures(void) { beside("graphs", 22, 3, usual); }
static void a_wait_is_in_nobodys_way(void) { beside("waits", 14, 0, usual); }
static void a_free_waits_for_it(void) { beside("frees", 14, 0, usual); }
static void a_stream_frees_behind_it(void) { beside("streams", 14, 0, usual); }
static void host_memory_and_new_memory(void) { beside("others", 14, 0, usual); }

static void a_drain_ends_with_the_wait(void)
{
	struct swapper_config c = usual;

	c.grace_ms = 3600000;
	beside("drains", 14, 5, c);
}

/* Runs it, and keeps what it says. */
static void output_of(bool native, char *text, size_t size)
{
	size_t n = 0;
	ssize_t got;
	int to[2];
	pid_t pid;

	CHECK(pipe(to) == 0);
	fflush(NULL);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		dup2(to[1], 1);
		close(to[0]);
		if (native)
			unsetenv("LD_PRELOAD");
		execl(self, self, "errors", "0", "0", "0", (char *)NULL);
		_exit(127);
	}
	close(to[1]);
	while ((got = read(to[0], text + n, size - 1 - n)) > 0)
		n += (size_t)got;
	text[n] = 0;
	close(to[0]);
	CHECK(went_well(pid));
}

static void wrong_calls_fail_as_ever(void)
{
	static char native[16384], ours[16384];

	schedule(usual);
	output_of(true, native, sizeof(native));
	output_of(false, ours, sizeof(ours));
	if (strcmp(native, ours) != 0)
		fprintf(stderr, "native:\n%sours:\n%s", native, ours);
	CHECK(strstr(native, "cuGraphAddNode_v2") && strcmp(native, ours) == 0);
	swapper_end();
}

static int tenant_native(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p = plain(FIXED);

	(void)mib, (void)rounds;
	CU(cuMemsetD8_v2(p, 0, 8));
	CU(cuStreamSynchronize(NULL)); /* the other stream does not wait for this one */
	write_64(p, seed);
	CU(cuStreamWaitValue64(own, p, seed, CU_STREAM_WAIT_VALUE_EQ));
	CU(cuStreamSynchronize(own));
	CHECK(read_word(p) == seed);
	return 0;
}

static void off_is_as_ever(void) { check_off(usual, self, "native", 0, 0, 3); }

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(large_memory_stays),
	CASE(large_memory_comes_in_first),
	CASE(small_memory_stays),
	CASE(small_memory_comes_in_first),
	CASE(mapped_memory_stays),
	CASE(mapped_memory_comes_in_first),
	CASE(batch_memory_stays),
	CASE(batch_memory_comes_in_first),
	CASE(what_is_resolved_is_ours),
	CASE(nodes_and_captures),
	CASE(a_wait_is_in_nobodys_way),
	CASE(a_free_waits_for_it),
	CASE(a_stream_frees_behind_it),
	CASE(a_drain_ends_with_the_wait),
	CASE(host_memory_and_new_memory),
	CASE(wrong_calls_fail_as_ever),
	CASE(off_is_as_ever),
};

static const struct tenant_kind kinds[] = {
	{ "neighbour", neighbour },
	{ "large", tenant_large },
	{ "small", tenant_small },
	{ "mapped", tenant_mapped },
	{ "batch", tenant_batch },
	{ "resolved", tenant_resolved },
	{ "graphs", tenant_graphs },
	{ "waits", tenant_waits },
	{ "frees", tenant_frees },
	{ "streams", tenant_streams },
	{ "drains", tenant_drains },
	{ "others", tenant_others },
	{ "errors", tenant_errors },
	{ "native", tenant_native },
};

static void open_tenant(void)
{
	tenant_open();
	CU(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
}

int main(int argc, char **argv)
{
	self = argv[0];
	return run_tenant_or_case(kinds, sizeof(kinds) / sizeof(kinds[0]), open_tenant,
				  cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
