// SPDX-License-Identifier: Apache-2.0
/*
 * transfer.c: copies and memsets. They take the time of the engine and its
 * bandwidth; their bytes move at the end of that time. A copy from pageable
 * memory takes the bytes when it is submitted, and one to such memory is waited
 * for, as the driver does. An address that is not mapped is error 1 at the call;
 * if it is unmapped before the end, the context dies.
 */
#include "driver.h"

#include <string.h>

#define LINK_BYTES_PER_US   25000   /* host link, each direction */
#define DEVICE_BYTES_PER_US 1000000 /* device memory */
#define COPY_NS             2000    /* least time of one copy */

static void cost(struct op *op, int dst_dev, int src_dev)
{
	uint64_t bytes = op->width * op->height;
	uint64_t rate = DEVICE_BYTES_PER_US;

	op->engine = SIM_COMPUTE; /* on-device copies and memsets are kernels, in effect */
	op->kind = SIM_DTOD;
	if (dst_dev && !src_dev) {
		op->engine = SIM_COPY_IN;
		op->kind = SIM_HTOD;
		rate = LINK_BYTES_PER_US;
	} else if (src_dev && !dst_dev) {
		op->engine = SIM_COPY_OUT;
		op->kind = SIM_DTOH;
		rate = LINK_BYTES_PER_US;
	}
	op->ns = bytes * 1000 / rate + COPY_NS;
}

enum { ASYNC, SYNC };

static CUresult finish(CUstream s, struct op *op, int sync)
{
	return op->width && op->height ? submit(s, op, sync) : drv_enter();
}

static enum side side(const void *p, int on_gpu)
{
	return on_gpu ? ON_GPU : mem_pageable((uintptr_t)p) ? PAGEABLE : PINNED_SIDE;
}

/* d, s: 1 must be device memory, 0 host, -1 either. */
static CUresult copy(void *dst, int d, const void *src, int s, size_t n, CUstream h, int sync)
{
	struct op op = { .what = OP_COPY, .dst = dst, .src = src, .width = n, .height = 1, .dpitch = n, .spitch = n };
	CUresult rc = drv_enter();
	int gpu;

	if (rc)
		return rc;
	if (n) {
		if ((d == 1 && !mem_valid((uintptr_t)dst, n)) || (s == 1 && !mem_valid((uintptr_t)src, n)))
			return CUDA_ERROR_INVALID_VALUE;
		if ((d == 0 && !dst) || (s == 0 && !src))
			return CUDA_ERROR_INVALID_VALUE;
	}
	if (d < 0)
		d = mem_device((uintptr_t)dst, &gpu);
	if (s < 0)
		s = mem_device((uintptr_t)src, &gpu);
	if ((!d && vmm_reserved((uintptr_t)dst)) || (!s && vmm_reserved((uintptr_t)src)))
		return CUDA_ERROR_INVALID_VALUE; /* nothing is mapped there */
	op.dst_side = side(dst, d);
	op.src_side = side(src, s);
	cost(&op, d, s);
	/* a synchronous copy inside the device does not hold up the host */
	return finish(h, &op, sync && !(d && s));
}

#define P(x)  ((void *)(uintptr_t)(x))
#define PTDS  CU_STREAM_PER_THREAD
/* A synchronous function: legacy stream, and its _ptds variant. */
#define DUAL(name, params, args_legacy, args_ptds, impl)             \
	CUresult name params { return impl args_legacy; }            \
	SIM_EXPORT CUresult name##_ptds params { return impl args_ptds; }

DUAL(cuMemcpy, (CUdeviceptr d, CUdeviceptr s, size_t n), (P(d), -1, P(s), -1, n, NULL, SYNC),
     (P(d), -1, P(s), -1, n, PTDS, SYNC), copy)
DUAL(cuMemcpyHtoD_v2, (CUdeviceptr d, const void *s, size_t n), (P(d), 1, s, 0, n, NULL, SYNC),
     (P(d), 1, s, 0, n, PTDS, SYNC), copy)
DUAL(cuMemcpyDtoH_v2, (void *d, CUdeviceptr s, size_t n), (d, 0, P(s), 1, n, NULL, SYNC),
     (d, 0, P(s), 1, n, PTDS, SYNC), copy)
DUAL(cuMemcpyDtoD_v2, (CUdeviceptr d, CUdeviceptr s, size_t n), (P(d), 1, P(s), 1, n, NULL, SYNC),
     (P(d), 1, P(s), 1, n, PTDS, SYNC), copy)
CUresult cuMemcpyPeer(CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n)
{
	(void)dc;
	(void)sc;
	return copy(P(d), 1, P(s), 1, n, NULL, SYNC);
}

SIM_EXPORT CUresult cuMemcpyPeer_ptds(CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n)
{
	(void)dc;
	(void)sc;
	return copy(P(d), 1, P(s), 1, n, PTDS, SYNC);
}

CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream h)
{
	return copy(P(d), -1, P(s), -1, n, h, ASYNC);
}
PTSZ(cuMemcpyAsync, (CUdeviceptr d, CUdeviceptr s, size_t n, CUstream h), (d, s, n, PT(h)))

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *s, size_t n, CUstream h)
{
	return copy(P(d), 1, s, 0, n, h, ASYNC);
}
PTSZ(cuMemcpyHtoDAsync_v2, (CUdeviceptr d, const void *s, size_t n, CUstream h), (d, s, n, PT(h)))

CUresult cuMemcpyDtoHAsync_v2(void *d, CUdeviceptr s, size_t n, CUstream h)
{
	return copy(d, 0, P(s), 1, n, h, ASYNC);
}
PTSZ(cuMemcpyDtoHAsync_v2, (void *d, CUdeviceptr s, size_t n, CUstream h), (d, s, n, PT(h)))

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream h)
{
	return copy(P(d), 1, P(s), 1, n, h, ASYNC);
}
PTSZ(cuMemcpyDtoDAsync_v2, (CUdeviceptr d, CUdeviceptr s, size_t n, CUstream h), (d, s, n, PT(h)))

CUresult cuMemcpyPeerAsync(CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n, CUstream h)
{
	(void)dc;
	(void)sc;
	return copy(P(d), 1, P(s), 1, n, h, ASYNC);
}
PTSZ(cuMemcpyPeerAsync, (CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n, CUstream h),
     (d, dc, s, sc, n, PT(h)))

static CUresult copy2d_op(struct op *out, const CUDA_MEMCPY2D *c)
{
	struct op op = { .what = OP_COPY };
	CUresult rc = drv_enter();
	size_t span;
	char *dst;
	const char *src;
	int d, s, gpu;

	if (rc)
		return rc;
	if (!c || c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY)
		return CUDA_ERROR_INVALID_VALUE; /* no arrays here */
	dst = c->dstMemoryType == CU_MEMORYTYPE_HOST ? c->dstHost : P(c->dstDevice);
	src = c->srcMemoryType == CU_MEMORYTYPE_HOST ? c->srcHost : P(c->srcDevice);
	op.width = c->WidthInBytes;
	op.height = c->Height;
	op.dpitch = c->dstPitch ? c->dstPitch : c->WidthInBytes;
	op.spitch = c->srcPitch ? c->srcPitch : c->WidthInBytes;
	if (op.dpitch < op.width || op.spitch < op.width)
		return CUDA_ERROR_INVALID_VALUE;
	op.dst = dst + c->dstY * op.dpitch + c->dstXInBytes;
	op.src = src + c->srcY * op.spitch + c->srcXInBytes;
	d = c->dstMemoryType != CU_MEMORYTYPE_HOST && mem_device((uintptr_t)op.dst, &gpu);
	s = c->srcMemoryType != CU_MEMORYTYPE_HOST && mem_device((uintptr_t)op.src, &gpu);
	if (op.width && op.height) {
		span = (op.height - 1) * op.dpitch + op.width;
		if (c->dstMemoryType == CU_MEMORYTYPE_DEVICE && !mem_valid((uintptr_t)op.dst, span))
			return CUDA_ERROR_INVALID_VALUE;
		span = (op.height - 1) * op.spitch + op.width;
		if (c->srcMemoryType == CU_MEMORYTYPE_DEVICE && !mem_valid((uintptr_t)op.src, span))
			return CUDA_ERROR_INVALID_VALUE;
	}
	op.dst_side = side(op.dst, d);
	op.src_side = side(op.src, s);
	cost(&op, d, s);
	*out = op;
	return CUDA_SUCCESS;
}

static CUresult copy2d(const CUDA_MEMCPY2D *c, CUstream h, int sync)
{
	struct op op;
	CUresult rc = copy2d_op(&op, c);

	return rc ? rc : finish(h, &op, sync && !(op.dst_side == ON_GPU && op.src_side == ON_GPU));
}

DUAL(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *c), (c, NULL, SYNC), (c, PTDS, SYNC), copy2d)
DUAL(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *c), (c, NULL, SYNC), (c, PTDS, SYNC), copy2d)

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream h)
{
	return copy2d(c, h, ASYNC);
}
PTSZ(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *c, CUstream h), (c, PT(h)))

CUresult copy_op(struct op *op, const CUDA_MEMCPY3D *p)
{
	CUDA_MEMCPY2D c = {
		.srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcMemoryType = p->srcMemoryType,
		.srcHost = p->srcHost, .srcDevice = p->srcDevice, .srcPitch = p->srcPitch,
		.dstXInBytes = p->dstXInBytes, .dstY = p->dstY, .dstMemoryType = p->dstMemoryType,
		.dstHost = p->dstHost, .dstDevice = p->dstDevice, .dstPitch = p->dstPitch,
		.WidthInBytes = p->WidthInBytes, .Height = p->Height,
	};

	if (p->Depth != 1 || p->srcZ || p->dstZ)
		return CUDA_ERROR_NOT_SUPPORTED; /* no third dimension here */
	return copy2d_op(op, &c);
}

/* Contexts do not matter: addresses tell where memory is. */
static CUresult copy3d_peer(const CUDA_MEMCPY3D_PEER *c, CUstream h, int sync)
{
	CUDA_MEMCPY3D plain;
	struct op op;
	CUresult rc = c ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

	if (!rc) {
		memcpy(&plain, c, sizeof plain);
		rc = copy_op(&op, &plain);
	}
	return rc ? rc : finish(h, &op, sync && !(op.dst_side == ON_GPU && op.src_side == ON_GPU));
}

DUAL(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *c), (c, NULL, SYNC), (c, PTDS, SYNC), copy3d_peer)

CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *c, CUstream h)
{
	return copy3d_peer(c, h, ASYNC);
}
PTSZ(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *c, CUstream h), (c, PT(h)))

/* w: elements in a row; pitch in bytes. Like the driver, never waits. */
CUresult set_op(struct op *op, const CUDA_MEMSET_NODE_PARAMS *p)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4)
		return CUDA_ERROR_INVALID_VALUE;
	*op = (struct op){ .what = OP_SET, .dst = P(p->dst), .value = p->value, .element = (int)p->elementSize,
			   .height = p->height, .width = p->width * p->elementSize };
	op->dpitch = p->height == 1 ? op->width : p->pitch;
	if (op->width && op->height &&
	    (op->dpitch < op->width || p->dst % p->elementSize ||
	     !mem_valid(p->dst, (op->height - 1) * op->dpitch + op->width)))
		return CUDA_ERROR_INVALID_VALUE;
	cost(op, 1, 1);
	return CUDA_SUCCESS;
}

static CUresult set(CUdeviceptr d, size_t pitch, uint32_t v, int element, size_t w, size_t h, CUstream s)
{
	CUDA_MEMSET_NODE_PARAMS p = { d, pitch, v, (unsigned)element, w, h };
	struct op op;
	CUresult rc = set_op(&op, &p);

	return rc ? rc : finish(s, &op, ASYNC);
}

#define SETS(bits, type, size)                                                                                \
	DUAL(cuMemsetD##bits##_v2, (CUdeviceptr d, type v, size_t n), (d, 0, v, size, n, 1, NULL),            \
	     (d, 0, v, size, n, 1, PTDS), set)                                                                \
	DUAL(cuMemsetD2D##bits##_v2, (CUdeviceptr d, size_t p, type v, size_t w, size_t h),                   \
	     (d, p, v, size, w, h, NULL), (d, p, v, size, w, h, PTDS), set)                                   \
	CUresult cuMemsetD##bits##Async(CUdeviceptr d, type v, size_t n, CUstream s)                          \
	{                                                                                                     \
		return set(d, 0, v, size, n, 1, s);                                                           \
	}                                                                                                     \
	PTSZ(cuMemsetD##bits##Async, (CUdeviceptr d, type v, size_t n, CUstream s), (d, v, n, PT(s)))         \
	CUresult cuMemsetD2D##bits##Async(CUdeviceptr d, size_t p, type v, size_t w, size_t h, CUstream s)    \
	{                                                                                                     \
		return set(d, p, v, size, w, h, s);                                                           \
	}                                                                                                     \
	PTSZ(cuMemsetD2D##bits##Async, (CUdeviceptr d, size_t p, type v, size_t w, size_t h, CUstream s),     \
	     (d, p, v, w, h, PT(s)))

SETS(8, unsigned char, 1)
SETS(16, unsigned short, 2)
SETS(32, unsigned, 4)
