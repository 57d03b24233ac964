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

/* What the swap engine does: unmap, release, and back at the same address. */
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
	CHECK(free_bytes() == 64 * MIB);
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

int main(void)
{
	gpu_open(0);
	memory_is_finite();
	copies_move_bytes();
	vmm_maps_memory_at_a_fixed_address();
	pools_and_contexts_give_memory_back();
	return 0;
}
