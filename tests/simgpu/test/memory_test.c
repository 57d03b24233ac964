// SPDX-License-Identifier: Apache-2.0
/* Finite memory, copies that move bytes, VMM, pools. The GPU has 64 MiB. */
#include "check.h"

#define MIB (1ull << 20)

static size_t free_bytes(void)
{
	size_t f, t;

	CU(cuMemGetInfo_v2(&f, &t));
	CHECK(t == 64 * MIB);
	return f;
}

static void memory_is_finite(void)
{
	CUdeviceptr a, b, c = 1;

	CU(cuMemAlloc_v2(&a, 40 * MIB));
	EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&b, 25 * MIB));
	CU(cuMemAlloc_v2(&b, 24 * MIB));
	CHECK(free_bytes() == 0);
	EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAllocAsync(&c, 1, NULL));
	CU(cuMemFree_v2(a));
	CHECK(free_bytes() == 40 * MIB);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(b + 1));
	CU(cuMemFree_v2(b));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(b));
	EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&a, SIZE_MAX));
	CHECK(free_bytes() == 64 * MIB);
}

static void copies_move_bytes(void)
{
	unsigned char in[1024], out[1024] = { 0 }, rect[4][16];
	CUDA_MEMCPY2D c = { 0 };
	CUdeviceptr a, b, base;
	size_t size;
	void *pinned;
	unsigned type;

	for (int i = 0; i < 1024; i++)
		in[i] = (unsigned char)(i * 7);
	CU(cuMemAlloc_v2(&a, 1024));
	CU(cuMemAlloc_v2(&b, 1024));
	CU(cuMemcpyHtoD_v2(a, in, 1024));
	CU(cuMemcpyDtoDAsync_v2(b, a, 1024, NULL));
	CU(cuMemsetD8Async(b + 100, 0xaa, 10, NULL));
	CU(cuMemsetD16_v2(b + 200, 0x1234, 2));
	CU(cuMemsetD32_v2(b + 300, 0xdeadbeef, 1));
	CU(cuMemcpyDtoH_v2(out, b, 1024));
	CHECK(!memcmp(in, out, 100) && out[100] == 0xaa && out[109] == 0xaa && out[110] == in[110]);
	CHECK(out[200] == 0x34 && out[203] == 0x12 && out[300] == 0xef && out[303] == 0xde && out[304] == in[304]);
	c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
	c.srcDevice = a;
	c.srcPitch = 64;
	c.srcXInBytes = 8;
	c.srcY = 1;
	c.dstMemoryType = CU_MEMORYTYPE_HOST;
	c.dstHost = rect;
	c.dstPitch = 16;
	c.WidthInBytes = 16;
	c.Height = 4;
	CU(cuMemcpy2D_v2(&c));
	for (int y = 0; y < 4; y++)
		CHECK(!memcmp(rect[y], in + 64 * (y + 1) + 8, 16));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(a + 1000, in, 100)); /* past the end */
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(0, in, 100));
	CU(cuMemHostAlloc(&pinned, 4096, 0));
	CU(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)pinned));
	CHECK(type == CU_MEMORYTYPE_HOST);
	CU(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a));
	CHECK(type == CU_MEMORYTYPE_DEVICE);
	CU(cuMemGetAddressRange_v2(&base, &size, a + 77));
	CHECK(base == a && size == 1024);
	CU(cuMemFreeHost(pinned));
	CU(cuMemFree_v2(a));
	CU(cuMemFree_v2(b));
}

/* Kernels that write and verify memory see what is where. fault_test.c: and die elsewhere. */
static void kernels_fill_and_check_memory(void)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_fill() { ret; }\n"
				  ".visible .entry nvshare_check() { ret; }\n";
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FD,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	uint64_t bytes = 4 << 20, seed = 7, other = 8, wrong;
	CUmemGenericAllocationHandle h[2];
	CUdeviceptr va, word;
	CUfunction fill, check;
	CUmodule m;
	char *copy = malloc(bytes);

	CU(cuModuleLoadData(&m, ptx));
	CU(cuModuleGetFunction(&fill, m, "nvshare_fill"));
	CU(cuModuleGetFunction(&check, m, "nvshare_check"));
	CU(cuMemAlloc_v2(&word, 8));
	CU(cuMemAddressReserve(&va, bytes, 0, 0, 0));
	void *f[] = { &va, &bytes, &seed }, *c[] = { &va, &bytes, &seed, &word };
#define LAUNCH(fn, params) cuLaunchKernel(fn, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL)
	for (int i = 0; i < 2; i++) {
		CU(cuMemCreate(&h[i], bytes, &prop, 0));
		CU(cuMemMap(va, bytes, 0, h[i], 0));
		if (i == 0)
			EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(copy, va, bytes));
		CU(cuMemSetAccess(va, bytes, &access, 1));
		if (i == 0)
			CU(LAUNCH(fill, f));
		else /* other physical memory: only a copy brings it back */
			CU(cuMemcpyHtoD_v2(va, copy, bytes));
		CU(LAUNCH(check, c));
		CU(cuMemcpyDtoH_v2(&wrong, word, 8));
		CHECK(wrong == 0);
		c[2] = &other;
		CU(LAUNCH(check, c));
		c[2] = &seed;
		CU(cuMemcpyDtoH_v2(&wrong, word, 8));
		CHECK(wrong == bytes / 8);
		CU(cuMemcpyDtoH_v2(copy, va, bytes));
		CU(cuMemUnmap(va, bytes));
		CU(cuMemRelease(h[i]));
	}
#undef LAUNCH
	CU(cuMemAddressFree(va, bytes));
	CU(cuMemFree_v2(word));
	free(copy);
}

static void vmm_maps_memory_at_a_fixed_address(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc rw = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle h[2];
	char text[8] = "";
	CUdeviceptr va;
	size_t granule;

	CU(cuMemGetAllocationGranularity(&granule, &prop, 0));
	CU(cuMemAddressReserve(&va, 2 * granule, 0, 0, 0));
	CU(cuMemCreate(&h[0], granule, &prop, 0));
	CU(cuMemCreate(&h[1], granule, &prop, 0));
	CHECK(free_bytes() == 64 * MIB - 2 * granule);
	CU(cuMemMap(va, granule, 0, h[0], 0));
	CU(cuMemMap(va + granule, granule, 0, h[1], 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(va, granule, 0, h[0], 0)); /* taken */
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(va, "x", 1));	  /* no access yet */
	CU(cuMemSetAccess(va, 2 * granule, &rw, 1));
	CU(cuMemcpyHtoD_v2(va + granule - 4, "abcdefg", 8)); /* across the border */
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(va, 2 * granule));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(va, granule / 2));
	CU(cuMemUnmap(va, 2 * granule));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(va, "x", 1));
	/* the handles keep the contents */
	CU(cuMemMap(va, granule, 0, h[0], 0));
	CU(cuMemMap(va + granule, granule, 0, h[1], 0));
	CU(cuMemSetAccess(va, 2 * granule, &rw, 1));
	CU(cuMemcpyDtoH_v2(text, va + granule - 4, 8));
	CHECK(!strcmp(text, "abcdefg"));
	CU(cuMemRelease(h[0])); /* a mapping keeps it */
	CHECK(free_bytes() == 64 * MIB - 2 * granule);
	CU(cuMemUnmap(va, 2 * granule));
	CHECK(free_bytes() == 64 * MIB - granule);
	CU(cuMemRelease(h[1]));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRelease(h[1]));
	CHECK(free_bytes() == 64 * MIB);
	/* a mapping gives the handle back; each reference is one more to release */
	CU(cuMemCreate(&h[0], granule, &prop, 0));
	CU(cuMemMap(va, granule, 0, h[0], 0));
	CU(cuMemRetainAllocationHandle(&h[1], (void *)(uintptr_t)(va + 5)));
	CHECK(h[1] == h[0]);
	CU(cuMemRelease(h[0]));
	CU(cuMemUnmap(va, granule));
	CHECK(free_bytes() == 64 * MIB - granule);
	CU(cuMemRelease(h[0]));
	CHECK(free_bytes() == 64 * MIB);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRetainAllocationHandle(&h[1], (void *)(uintptr_t)va));
	prop.location.type = 2; /* host */
	CU(cuMemCreate(&h[0], granule, &prop, 0));
	CHECK(free_bytes() == 64 * MIB);
	CU(cuMemRelease(h[0]));
	prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&h[0], 66 * MIB, &prop, 0));
	CU(cuMemAddressFree(va, 2 * granule));
}

static void pools_and_contexts_give_memory_back(void)
{
	CUmemoryPool pool;
	CUdeviceptr p;
	CUcontext ctx, primary;

	CU(cuDeviceGetDefaultMemPool(&pool, 0));
	CU(cuMemAllocFromPoolAsync(&p, 8 * MIB, pool, NULL));
	CHECK(free_bytes() == 56 * MIB);
	CU(cuMemFreeAsync(p, NULL));
	CHECK(free_bytes() == 64 * MIB);
	CU(cuCtxGetCurrent(&primary));
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	CU(cuMemAlloc_v2(&p, 8 * MIB));
	CU(cuCtxDestroy_v2(ctx));
	CU(cuCtxSetCurrent(primary));
	CHECK(free_bytes() == 64 * MIB);
}

static uint64_t pool_has(CUmemoryPool pool, int attribute)
{
	uint64_t bytes;

	CU(cuMemPoolGetAttribute(pool, attribute, &bytes));
	return bytes;
}

static void pools_keep_up_to_their_threshold(void)
{
	CUmemPoolProps props = { .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	uint64_t threshold = 6 * MIB;
	CUmemoryPool pool;
	CUdeviceptr p, q;

	CU(cuMemPoolCreate(&pool, &props));
	CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
	CU(cuMemAllocFromPoolAsync(&p, 8 * MIB, pool, NULL));
	CU(cuMemAllocFromPoolAsync(&q, 2 * MIB, pool, NULL));
	CU(cuMemFreeAsync(p, NULL));
	CHECK(free_bytes() == 58 * MIB);
	CHECK(pool_has(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 6 * MIB);
	CHECK(pool_has(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 2 * MIB);
	CHECK(pool_has(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) == 10 * MIB);
	/* The next one comes out of that. */
	CU(cuMemAllocFromPoolAsync(&p, 3 * MIB, pool, NULL));
	CHECK(free_bytes() == 58 * MIB);
	CU(cuMemFreeAsync(p, NULL));
	CU(cuCtxSynchronize());
	CU(cuMemPoolTrimTo(pool, 3 * MIB));
	CHECK(free_bytes() == 61 * MIB);
	/* Destroyed, it keeps nothing; its allocations live on. */
	CU(cuMemPoolDestroy(pool));
	CHECK(free_bytes() == 62 * MIB);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolTrimTo(pool, 0));
	CU(cuMemcpyHtoD_v2(q, "x", 1));
	CU(cuMemFree_v2(q));
	CHECK(free_bytes() == 64 * MIB);
}

static void pools_lie_where_they_were_made(void)
{
	CUmemPoolProps props = { .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 1 } };
	CUmemoryPool there, host;
	CUcontext ctx, other;
	CUdeviceptr p, q;
	CUstream s;

	CU(cuMemPoolCreate(&there, &props));
	props.location.type = 2;
	CU(cuMemPoolCreate(&host, &props));
	CU(cuMemAllocFromPoolAsync(&p, 8 * MIB, there, NULL));
	CU(cuMemAllocFromPoolAsync(&q, 8 * MIB, host, NULL));
	CHECK(free_bytes() == 64 * MIB);
	CU(cuCtxGetCurrent(&ctx));
	CU(cuCtxCreate_v2(&other, 0, 1));
	CHECK(free_bytes() == 56 * MIB);
	/* the stream's GPU, not the current one; and no context's */
	CU(cuStreamCreate(&s, 0));
	CU(cuCtxSetCurrent(ctx));
	CU(cuMemFreeAsync(q, NULL));
	CU(cuMemAllocAsync(&q, 4 * MIB, s));
	CHECK(free_bytes() == 64 * MIB);
	CU(cuStreamDestroy_v2(s));
	CU(cuCtxDestroy_v2(other));
	CU(cuCtxCreate_v2(&other, 0, 1));
	CHECK(free_bytes() == 52 * MIB);
	CU(cuMemFree_v2(p));
	CU(cuMemFree_v2(q));
	CHECK(free_bytes() == 64 * MIB);
	CU(cuCtxDestroy_v2(other));
	CU(cuCtxSetCurrent(ctx));
	CU(cuMemPoolDestroy(there));
	CU(cuMemPoolDestroy(host));
}

static void arrays_take_memory(void)
{
	CUDA_ARRAY3D_DESCRIPTOR d = { 1024, 1024, 0, CU_AD_FORMAT_FLOAT, 1, 0 };
	CUDA_ARRAY_MEMORY_REQUIREMENTS r;
	CUmipmappedArray m;
	CUcontext ctx, other;
	CUarray a, b;

	CU(cuArray3DCreate_v2(&a, &d));
	CHECK(free_bytes() == 60 * MIB);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuArrayGetMemoryRequirements(&r, a, 0));
	d.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
	CU(cuArray3DCreate_v2(&b, &d));
	CHECK(free_bytes() == 60 * MIB);
	CU(cuArrayGetMemoryRequirements(&r, b, 0));
	CHECK(r.size == 4 * MIB);
	CU(cuArrayDestroy(a));
	CU(cuArrayDestroy(b));
	EXPECT(CUDA_ERROR_INVALID_HANDLE, cuArrayDestroy(b));
	d.Flags = 0;
	CU(cuMipmappedArrayCreate(&m, &d, 2));
	CHECK(free_bytes() == 59 * MIB);
	CU(cuMipmappedArrayDestroy(m));
	d.Height = 1 << 20;
	EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuArray3DCreate_v2(&a, &d));
	d.Height = 1024;
	CU(cuCtxGetCurrent(&ctx));
	CU(cuCtxCreate_v2(&other, 0, 0));
	CU(cuArray3DCreate_v2(&a, &d));
	CU(cuCtxDestroy_v2(other));
	CU(cuCtxSetCurrent(ctx));
	CHECK(free_bytes() == 64 * MIB);
}

static uint64_t graph_memory(int attribute)
{
	uint64_t bytes = 0;

	CU(cuDeviceGetGraphMemAttribute(0, attribute, &bytes));
	return bytes;
}

static void graphs_take_memory_when_they_run(void)
{
	CUgraphNodeParams p = { .type = CU_GRAPH_NODE_TYPE_MEM_ALLOC };
	CUdeviceptr a;
	CUgraphExec x, y;
	CUgraphNode node;
	CUgraph g;
	CUstream s;

	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
	CU(cuMemAllocAsync(&a, 8 * MIB, s));
	CU(cuMemsetD8Async(a, 1, MIB, s));
	CU(cuMemFreeAsync(a, s));
	CU(cuStreamEndCapture(s, &g));
	CU(cuGraphInstantiateWithFlags(&x, g, 0));
	CHECK(free_bytes() == 64 * MIB && graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == 0);
	CU(cuGraphLaunch(x, s));
	CU(cuGraphLaunch(x, s));
	CHECK(free_bytes() == 56 * MIB && graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == 8 * MIB);
	CU(cuGraphDestroy(g));
	/* an explicit node; a graph that is gone leaves its memory to the next */
	CU(cuGraphCreate(&g, 0));
	p.u.alloc.poolProps.location = (CUmemLocation){ CU_MEM_LOCATION_TYPE_DEVICE, 0 };
	p.u.alloc.poolProps.allocType = 1;
	p.u.alloc.bytesize = 6 * MIB;
	CU(cuGraphAddNode_v2(&node, g, NULL, NULL, 0, &p));
	CHECK(p.u.alloc.dptr);
	CU(cuGraphInstantiateWithFlags(&y, g, 0));
	CU(cuStreamSynchronize(s));
	CU(cuGraphExecDestroy(x));
	CU(cuGraphUpload(y, s));
	CHECK(free_bytes() == 56 * MIB && graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) == 6 * MIB);
	CU(cuDeviceGraphMemTrim(0));
	CHECK(free_bytes() == 58 * MIB);
	CU(cuGraphExecDestroy(y));
	CU(cuDeviceGraphMemTrim(0));
	CHECK(free_bytes() == 64 * MIB && graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) == 8 * MIB);
	CU(cuGraphDestroy(g));
	CU(cuStreamDestroy_v2(s));
}

int main(void)
{
	gpu_open(0);
	memory_is_finite();
	copies_move_bytes();
	vmm_maps_memory_at_a_fixed_address();
	kernels_fill_and_check_memory();
	pools_and_contexts_give_memory_back();
	pools_keep_up_to_their_threshold();
	pools_lie_where_they_were_made();
	arrays_take_memory();
	graphs_take_memory_when_they_run();
	return 0;
}
