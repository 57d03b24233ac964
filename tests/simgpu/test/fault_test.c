// SPDX-License-Identifier: Apache-2.0
/*
 * The GPU looks at memory when work runs: what is not mapped then, or is
 * unmapped before the work ends, kills the context.
 */
#include "check.h"

#define SIZE  (2ull << 20)
#define WORDS (SIZE / 8)

static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n"
			  ".visible .entry nvshare_fill() { ret; }\n.visible .entry nvshare_check() { ret; }\n"
			  ".visible .entry nvshare_add() { ret; }\n.visible .entry nvshare_texture() { ret; }\n"
			  ".visible .entry nvshare_texref() { ret; }\n";

static const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					  .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
static CUmemGenericAllocationHandle handle;
static CUdeviceptr va, word; /* a mapped range; 8 bytes that stay */
static CUcontext ctx;
static CUstream s, t;
static CUmodule module;

static CUfunction function(const char *name)
{
	CUfunction f;

	CU(cuModuleGetFunction(&f, module, name));
	return f;
}

static CUresult launch(const char *name, CUstream stream, uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
	void *params[] = { &a, &b, &c, &d };

	return cuLaunchKernel(function(name), 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static void map(void)
{
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	CU(cuMemMap(va, SIZE, 0, handle, 0));
	CU(cuMemSetAccess(va, SIZE, &access, 1));
}

static void unmap(void)
{
	CU(cuMemUnmap(va, SIZE));
}

static uint64_t *gate; /* pinned */

/* What comes behind this in a stream does not run before open_gate(). */
static void close_gate(CUstream stream)
{
	__atomic_store_n(gate, 0, __ATOMIC_RELEASE);
	CU(cuStreamWaitValue64_v2(stream, (uintptr_t)gate, 1, CU_STREAM_WAIT_VALUE_EQ));
}

static void open_gate(void)
{
	__atomic_store_n(gate, 1, __ATOMIC_RELEASE);
}

/* A context of its own, so that its death ends no other case. */
static void begin(void)
{
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
	CU(cuModuleLoadData(&module, ptx));
	CU(cuMemAlloc_v2(&word, 8));
	CU(cuMemAddressReserve(&va, SIZE, 0, 0, 0));
	CU(cuMemCreate(&handle, SIZE, &prop, 0));
	map();
}

static void end(int mapped)
{
	if (mapped)
		unmap();
	CU(cuMemRelease(handle));
	CU(cuMemAddressFree(va, SIZE));
	CU(cuCtxDestroy_v2(ctx));
}

/* The context is dead for every kind of call, for good. */
static void dead(void)
{
	CUevent e;

	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(s));
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(t));
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, launch("nvshare_spin", t, 1, 0, 0, 0));
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemsetD8Async(word, 0, 8, t));
	CU(cuEventCreate(&e, 0));
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventSynchronize(e));
}

static uint64_t read_word(CUdeviceptr at)
{
	uint64_t v;

	CU(cuMemcpyDtoH_v2(&v, at, 8));
	return v;
}

static void at_its_launch_a_kernel_may_name_anything(void)
{
	begin();
	unmap();
	close_gate(s);
	CU(launch("nvshare_fill", s, va, SIZE, 7, 0));
	CU(cuMemsetD8Async(word, 1, 8, t)); /* other work goes on */
	CU(cuStreamSynchronize(t));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	map(); /* in time */
	open_gate();
	CU(launch("nvshare_check", s, va, SIZE, 7, word));
	CU(cuStreamSynchronize(s));
	CHECK(read_word(word) == 0);
	end(1);
}

static void a_kernel_that_runs_on_nothing_kills_its_context(void)
{
	begin();
	unmap();
	CU(launch("nvshare_fill", s, va, SIZE, 7, 0));
	dead();
	end(0);
	begin(); /* another one lives */
	CU(launch("nvshare_fill", s, va, SIZE, 7, 0));
	CU(cuStreamSynchronize(s));
	end(1);
}

static void memory_without_access_is_nothing(void)
{
	CUmemAccessDesc none = { prop.location, 0 };

	begin();
	CU(cuMemSetAccess(va, SIZE, &none, 1));
	CU(launch("nvshare_fill", s, va, SIZE, 7, 0));
	dead();
	end(1);
}

static void a_queued_kernel_may_lose_its_memory_until_it_runs(void)
{
	begin();
	CU(launch("nvshare_fill", s, va, SIZE, 7, 0));
	CU(cuStreamSynchronize(s));
	close_gate(s);
	CU(launch("nvshare_check", s, va, SIZE, 7, word));
	unmap();
	map();
	open_gate();
	CU(cuStreamSynchronize(s));
	CHECK(read_word(word) == 0);
	close_gate(s);
	CU(launch("nvshare_check", s, va, SIZE, 7, word));
	unmap();
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s)); /* not yet */
	open_gate();
	dead();
	end(0);
}

static void a_running_kernel_dies_with_its_memory(void)
{
	begin();
	CU(launch("nvshare_add", s, va, SIZE, 3600000 * MS, 0));
	unmap();
	map(); /* too late */
	dead(); /* at once, not at its end in an hour; to destroy the context would wait for that */
}

static void both_halves_of_a_kernel_count(void)
{
	begin();
	CU(cuMemsetD8Async(va, 0, SIZE, s));
	CU(launch("nvshare_add", s, va, SIZE, 5 * MS, 0));
	CU(cuStreamSynchronize(s));
	CHECK(read_word(va) == 2 && read_word(va + SIZE - 8) == 2);
	end(1);
}

static void stamps_of_a_kernel_are_memory(void)
{
	begin();
	CU(launch("nvshare_spin", s, 5 * MS, va, 0, 0));
	CU(cuStreamSynchronize(s));
	CHECK(read_word(va + 8) - read_word(va) == 5 * MS);
	close_gate(s);
	CU(launch("nvshare_spin", s, 5 * MS, va, 0, 0));
	unmap();
	open_gate();
	dead();
	end(0);
}

/* Work of a kind that loses its memory while it is queued. */
static void queued(CUresult (*submit)(void))
{
	begin();
	close_gate(s);
	CU(submit());
	unmap();
	open_gate();
	dead();
	end(0);
	begin(); /* with its memory it is done */
	CU(submit());
	CU(cuStreamSynchronize(s));
	end(1);
}

static char *pinned;

static CUresult copy_in(void) { return cuMemcpyHtoDAsync_v2(va, pinned, SIZE, s); }
static CUresult copy_out(void) { return cuMemcpyDtoHAsync_v2(pinned, va, SIZE, s); }
static CUresult copy_within(void) { return cuMemcpyDtoDAsync_v2(va, va + SIZE / 2, SIZE / 2, s); }
static CUresult set_bytes(void) { return cuMemsetD32Async(va, 5, SIZE / 4, s); }
static CUresult write_value(void) { return cuStreamWriteValue64_v2(s, va, 5, 0); }
static CUresult wait_value(void) { return cuStreamWaitValue64_v2(s, va, 0, CU_STREAM_WAIT_VALUE_GEQ); }

static CUresult read_texture(void)
{
	CUDA_RESOURCE_DESC r = { .resType = CU_RESOURCE_TYPE_LINEAR };
	char sampling[104] = { 0 };
	CUtexObject object;

	r.res.linear.devPtr = va;
	r.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT8;
	r.res.linear.numChannels = 1;
	r.res.linear.sizeInBytes = SIZE;
	CU(cuTexObjectCreate(&object, &r, sampling, NULL));
	return launch("nvshare_texture", s, object, word, 0, 0);
}

static CUresult read_reference(void)
{
	CUtexref ref;

	CU(cuModuleGetTexRef(&ref, module, "any"));
	CU(cuTexRefSetAddress_v2(NULL, ref, va, SIZE));
	return launch("nvshare_texref", s, word, 0, 0, 0);
}

static CUresult launch_graph(CUgraph g)
{
	CUgraphExec x;

	CU(cuGraphInstantiateWithFlags(&x, g, 0));
	CU(cuGraphDestroy(g));
	return cuGraphLaunch(x, s);
}

static CUresult captured(void)
{
	CUgraph g;

	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(launch("nvshare_fill", s, va, SIZE, 9, 0));
	CU(cuStreamEndCapture(s, &g));
	return launch_graph(g);
}

static CUDA_KERNEL_NODE_PARAMS kernel_node(const char *name, void **params)
{
	return (CUDA_KERNEL_NODE_PARAMS){ .func = function(name), .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1,
					  .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1, .kernelParams = params };
}

static CUDA_MEMCPY3D copy_node(void *to, CUdeviceptr from)
{
	return (CUDA_MEMCPY3D){ .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = from,
				.dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = to,
				.WidthInBytes = 8, .Height = 1, .Depth = 1 };
}

static CUresult explicit_kernel(void)
{
	uint64_t size = SIZE, seed = 3;
	void *params[] = { &va, &size, &seed };
	CUDA_KERNEL_NODE_PARAMS k = kernel_node("nvshare_fill", params);
	CUgraphNode node;
	CUgraph g;

	CU(cuGraphCreate(&g, 0));
	CU(cuGraphAddKernelNode_v2(&node, g, NULL, 0, &k));
	return launch_graph(g);
}

static CUresult explicit_copy(void)
{
	CUDA_MEMCPY3D c = copy_node(pinned, va);
	CUgraphNode node;
	CUgraph g;

	CU(cuGraphCreate(&g, 0));
	CU(cuGraphAddMemcpyNode(&node, g, NULL, 0, &c, ctx));
	return launch_graph(g);
}

static CUresult explicit_set(void)
{
	CUDA_MEMSET_NODE_PARAMS m = { .dst = va, .value = 1, .elementSize = 4, .width = 8, .height = 1 };
	CUgraphNode node;
	CUgraph g;

	CU(cuGraphCreate(&g, 0));
	CU(cuGraphAddMemsetNode(&node, g, NULL, 0, &m, ctx));
	return launch_graph(g);
}

/* Nodes do their work in order, with the parameters they were given last. */
static void explicit_nodes_work(void)
{
	uint64_t size = SIZE, seed = 3, other = 4, wrong = 1;
	void *fill[] = { &va, &size, &seed }, *check[] = { &va, &size, &other, &word };
	CUDA_KERNEL_NODE_PARAMS k;
	CUDA_MEMSET_NODE_PARAMS m;
	CUDA_MEMCPY3D c;
	CUgraphNodeParams any = { .type = CU_GRAPH_NODE_TYPE_MEMSET };
	CUgraphNode node[4], seen[8];
	CUgraphExec x;
	CUgraph g;
	size_t n = 8;

	begin();
	CU(cuGraphCreate(&g, 0));
	k = kernel_node("nvshare_fill", fill);
	CU(cuGraphAddKernelNode_v2(&node[0], g, NULL, 0, &k));
	k = kernel_node("nvshare_check", check);
	CU(cuGraphAddKernelNode(&node[1], g, &node[0], 1, &k));
	c = copy_node(&wrong, word);
	CU(cuGraphAddMemcpyNode(&node[2], g, &node[1], 1, &c, ctx));
	any.u.set.params = (CUDA_MEMSET_NODE_PARAMS){ .dst = va, .value = 1, .elementSize = 4, .width = 2, .height = 1 };
	CU(cuGraphAddNode_v2(&node[3], g, &node[2], NULL, 1, &any));
	CU(cuGraphGetNodes(g, seen, &n));
	CHECK(n == 4 && seen[3] == node[3]);
	CU(cuGraphInstantiateWithFlags(&x, g, 0));
	CU(cuGraphLaunch(x, s));
	CU(cuStreamSynchronize(s));
	CHECK(wrong == WORDS && read_word(va) == 0x100000001);
	check[2] = &seed;
	CU(cuGraphExecKernelNodeSetParams_v2(x, node[1], &k));
	m = any.u.set.params;
	m.value = 2;
	CU(cuGraphExecMemsetNodeSetParams(x, node[3], &m, ctx));
	CU(cuGraphLaunch(x, s));
	CU(cuStreamSynchronize(s));
	CHECK(wrong == 0 && read_word(va) == 0x200000002);
	/* the graph itself still has the old parameters; new ones take effect at the next instantiation */
	c = copy_node(pinned, word);
	CU(cuGraphMemcpyNodeSetParams(node[2], &c));
	CU(cuGraphKernelNodeSetParams_v2(node[1], &k));
	CU(cuGraphMemsetNodeSetParams(node[3], &m));
	memset(pinned, 0xff, 8);
	CU(launch_graph(g));
	CU(cuStreamSynchronize(s));
	CHECK(!memcmp(pinned, "\0\0\0\0\0\0\0", 8));
	/* copies and memsets name memory at the call */
	unmap();
	c = copy_node(pinned, va);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuGraphExecMemcpyNodeSetParams(x, node[2], &c, ctx));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuGraphExecMemsetNodeSetParams(x, node[3], &m, ctx));
	CU(cuGraphExecKernelNodeSetParams(x, node[1], &k));
	end(0);
}

static void textures_read_memory(void)
{
	CUDA_RESOURCE_DESC r = { .resType = CU_RESOURCE_TYPE_LINEAR };
	CUtexObject object;
	CUtexref ref;

	begin();
	CU(cuMemsetD8Async(va, 3, SIZE, s));
	CU(read_texture());
	CU(cuStreamSynchronize(s));
	CHECK(read_word(word) == 3 * SIZE);
	CU(cuModuleGetTexRef(&ref, module, "any"));
	CU(cuTexRefSetAddress2D_v3(ref, &(CUDA_ARRAY_DESCRIPTOR){ 10, 4, CU_AD_FORMAT_UNSIGNED_INT8, 1 }, va, 512));
	CU(launch("nvshare_texref", s, word, 0, 0, 0));
	CU(cuStreamSynchronize(s));
	CHECK(read_word(word) == 3 * 40);
	unmap();
	r.res.linear.devPtr = va;
	r.res.linear.sizeInBytes = SIZE;
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuTexObjectCreate(&object, &r, pinned, NULL));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuTexRefSetAddress_v2(NULL, ref, va, SIZE));
	end(0);
}

/* The driver takes a pageable source at the call, and is done with a pageable target. */
static void pageable_memory_is_the_callers_again(void)
{
	uint64_t in = 1, out = 0;

	begin();
	CU(launch("nvshare_spin", s, 20 * MS, 0, 0, 0));
	CU(cuMemcpyHtoDAsync_v2(va, &in, 8, s));
	in = 2;
	CU(cuMemcpyDtoHAsync_v2(&out, va, 8, s));
	CHECK(out == 1);
	end(1);
}

/* What is freed in a stream stays until the stream comes to it. */
static void stream_ordered_free_comes_in_order(void)
{
	CUdeviceptr p;

	begin();
	CU(cuMemAllocAsync(&p, SIZE, s));
	close_gate(s);
	CU(launch("nvshare_fill", s, p, SIZE, 1, 0));
	CU(cuMemFreeAsync(p, s));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(p, s));
	open_gate();
	CU(cuStreamSynchronize(s));
	end(1);
}

static int calls;
static CUresult told;

static void on_host(void *unused)
{
	(void)unused;
	calls++;
}

static void on_callback(CUstream unused, CUresult status, void *data)
{
	(void)unused;
	(void)data;
	told = status;
}

/* A host function is not called any more, a callback is told. */
static void the_host_behind_a_fault(void)
{
	begin();
	close_gate(s);
	CU(launch("nvshare_fill", s, va, SIZE, 1, 0));
	CU(cuLaunchHostFunc(s, on_host, NULL));
	CU(cuStreamAddCallback(s, on_callback, NULL, 0));
	unmap();
	open_gate();
	dead();
	for (int i = 0; i < 60000 && !__atomic_load_n(&told, __ATOMIC_ACQUIRE); i++)
		usleep(1000);
	CHECK(calls == 0 && told == CUDA_ERROR_ILLEGAL_ADDRESS);
	end(0);
}

int main(void)
{
	gpu_open(0);
	CU(cuMemHostAlloc((void **)&pinned, SIZE, 0));
	CU(cuMemHostAlloc((void **)&gate, 8, 0));
	at_its_launch_a_kernel_may_name_anything();
	a_kernel_that_runs_on_nothing_kills_its_context();
	memory_without_access_is_nothing();
	a_queued_kernel_may_lose_its_memory_until_it_runs();
	both_halves_of_a_kernel_count();
	stamps_of_a_kernel_are_memory();
	queued(copy_in);
	queued(copy_out);
	queued(copy_within);
	queued(set_bytes);
	queued(write_value);
	queued(wait_value);
	queued(read_texture);
	queued(read_reference);
	queued(captured);
	queued(explicit_kernel);
	queued(explicit_copy);
	queued(explicit_set);
	explicit_nodes_work();
	textures_read_memory();
	pageable_memory_is_the_callers_again();
	stream_ordered_free_comes_in_order();
	the_host_behind_a_fault();
	a_running_kernel_dies_with_its_memory(); /* the last: its time on the GPU stays taken */
	return 0;
}
