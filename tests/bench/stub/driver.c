// SPDX-License-Identifier: Apache-2.0
/*
 * driver.c: a libcuda.so.1 that does nothing, so that only the cost of a library in
 * front of it shows. No work runs, and each event has passed.
 *
 * NVSHARE_BENCH_GPUS is the number of GPUs, default 1. They have the simulated GPUs'
 * UUIDs, which the scheduler knows.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_GPUS  8
#define MAX_DEPTH 16

enum { INVALID_VALUE = 1, NO_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

struct context { int dev; };
struct stream { struct context *ctx; };

static struct context primary[MAX_GPUS];
static __thread struct context *stack[MAX_DEPTH];
static __thread int top;

/* Declares and begins the definition of a function of the API; the body follows. */
#define API(name, ...) \
	int name(__VA_ARGS__); \
	int name(__VA_ARGS__)
/* A function that only returns: it is measured, or has nothing to do. */
#define NOTHING(name, ...) API(name, __VA_ARGS__) { return 0; }
#pragma GCC diagnostic ignored "-Wunused-parameter"

static int gpus(void)
{
	const char *n = getenv("NVSHARE_BENCH_GPUS");
	int count = n ? atoi(n) : 1;

	return count < 1 ? 1 : count > MAX_GPUS ? MAX_GPUS : count;
}

NOTHING(cuInit, unsigned flags)
API(cuDriverGetVersion, int *v) { *v = 13000; return 0; }
API(cuDeviceGetCount, int *n) { *n = gpus(); return 0; }
API(cuDeviceGet, int *dev, int i) { *dev = i; return i >= 0 && i < gpus() ? 0 : NO_DEVICE; }
/* It has no virtual memory management (102), as some virtual GPUs have none. */
API(cuDeviceGetAttribute, int *v, int attribute, int dev) { *v = attribute != 102; return 0; }
API(cuDeviceGetName, char *name, int len, int dev)
{
	if (len < 5)
		return INVALID_VALUE;
	memcpy(name, "none", 5);
	return 0;
}
API(cuDeviceGetUuid, unsigned char *uuid, int dev)
{
	static const unsigned char base[16] = { 0x51, 0x60, 0, 0, 0, 0, 0x40, 0, 0x80 };

	memcpy(uuid, base, sizeof(base));
	uuid[15] = (unsigned char)dev;
	return 0;
}
API(cuDeviceGetUuid_v2, unsigned char *uuid, int dev) { return cuDeviceGetUuid(uuid, dev); }
API(cuDeviceTotalMem_v2, size_t *n, int dev) { *n = (size_t)16 << 30; return 0; }
API(cuMemGetInfo_v2, size_t *left, size_t *all) { *left = *all = (size_t)16 << 30; return 0; }

API(cuDevicePrimaryCtxRetain, void **ctx, int dev)
{
	primary[dev].dev = dev;
	*ctx = &primary[dev];
	return 0;
}
NOTHING(cuDevicePrimaryCtxRelease_v2, int dev)
API(cuDevicePrimaryCtxGetState, int dev, unsigned *flags, int *active)
{
	*flags = 0;
	*active = 1;
	return 0;
}
API(cuCtxGetCurrent, void **ctx) { *ctx = stack[top]; return 0; }
API(cuCtxSetCurrent, void *ctx) { stack[top] = ctx; return 0; }
API(cuCtxPushCurrent_v2, void *ctx)
{
	if (top + 1 == MAX_DEPTH)
		return INVALID_VALUE;
	stack[++top] = ctx;
	return 0;
}
API(cuCtxPopCurrent_v2, void **ctx)
{
	if (ctx)
		*ctx = stack[top];
	stack[top] = NULL;
	top -= top > 0;
	return 0;
}
API(cuCtxGetDevice, int *dev)
{
	if (!stack[top])
		return INVALID_CONTEXT;
	*dev = stack[top]->dev;
	return 0;
}
NOTHING(cuCtxSynchronize, void)

API(cuStreamCreate, void **stream, unsigned flags)
{
	struct stream *s = malloc(sizeof(*s));

	s->ctx = stack[top];
	*stream = s;
	return 0;
}
API(cuStreamDestroy_v2, void *stream) { free(stream); return 0; }
API(cuStreamGetCtx, void *stream, void **ctx)
{
	*ctx = (uintptr_t)stream <= 2 ? stack[top] : ((struct stream *)stream)->ctx;
	return 0;
}
API(cuStreamGetDevice, void *stream, int *dev)
{
	void *ctx;

	cuStreamGetCtx(stream, &ctx);
	*dev = ctx ? ((struct context *)ctx)->dev : 0;
	return 0;
}
API(cuStreamIsCapturing, void *stream, int *status) { *status = 0; return 0; }
NOTHING(cuStreamQuery, void *stream)
NOTHING(cuStreamSynchronize, void *stream)
API(cuThreadExchangeStreamCaptureMode, int *mode) { *mode = 0; return 0; }

API(cuEventCreate, void **event, unsigned flags) { *event = malloc(1); return 0; }
API(cuEventDestroy_v2, void *event) { free(event); return 0; }
NOTHING(cuEventRecord, void *event, void *stream)
NOTHING(cuEventQuery, void *event)

API(cuModuleLoadData, void **module, const void *image) { *module = primary; return 0; }
API(cuModuleGetFunction, void **f, void *module, const char *name) { *f = primary; return 0; }
NOTHING(cuLaunchKernel, void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
	unsigned bz, unsigned shared, void *stream, void **params, void **extra)
NOTHING(cuLaunchKernelEx, const void *config, void *f, void **params, void **extra)

/* Each address is free, and none is given out twice, as by a real driver. */
API(cuMemAlloc_v2, unsigned long long *p, size_t n)
{
	static __thread unsigned long long next;

	if (!next)
		next = (unsigned long long)(uintptr_t)&next << 16;
	*p = next += 512;
	return 0;
}
NOTHING(cuMemFree_v2, unsigned long long p)
API(cuMemAllocAsync, unsigned long long *p, size_t n, void *stream) { return cuMemAlloc_v2(p, n); }
NOTHING(cuMemFreeAsync, unsigned long long p, void *stream)
API(cuDeviceGetMemPool, void **pool, int dev) { *pool = primary; return 0; }
NOTHING(cuMemPoolSetAttribute, void *pool, int attribute, void *value)
API(cuMemPoolGetAttribute, void *pool, int attribute, void *value) { *(uint64_t *)value = 1 << 20; return 0; }
NOTHING(cuMemPoolTrimTo, void *pool, size_t keep)
API(cuMemAllocHost_v2, void **p, size_t n) { *p = malloc(n); return *p ? 0 : 2; }
API(cuMemFreeHost, void *p) { free(p); return 0; }
NOTHING(cuMemcpyAsync, unsigned long long to, unsigned long long from, size_t n, void *stream)
NOTHING(cuMemcpyHtoDAsync_v2, unsigned long long to, const void *from, size_t n, void *stream)

/* Not measured; peers look them up at their start. */
API(cuMemAllocManaged, unsigned long long *p, size_t n, unsigned flags) { return cuMemAlloc_v2(p, n); }
NOTHING(cuMemcpy, unsigned long long to, unsigned long long from, size_t n)
NOTHING(cuMemcpyHtoD_v2, unsigned long long to, const void *from, size_t n)
NOTHING(cuMemcpyDtoH_v2, void *to, unsigned long long from, size_t n)
NOTHING(cuMemcpyDtoD_v2, unsigned long long to, unsigned long long from, size_t n)
NOTHING(cuMemcpyDtoHAsync_v2, void *to, unsigned long long from, size_t n, void *stream)
NOTHING(cuMemcpyDtoDAsync_v2, unsigned long long to, unsigned long long from, size_t n, void *stream)
API(cuGetErrorName, int error, const char **text) { *text = "CUDA_ERROR"; return 0; }
API(cuGetErrorString, int error, const char **text) { *text = "an error"; return 0; }

API(cuGetProcAddress_v2, const char *symbol, void **p, int version, uint64_t flags, int *status)
{
	/* In this library: another library may come first in the search order. */
	void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	char newer[80];

	*p = NULL;
	if (self && snprintf(newer, sizeof(newer), "%s_v2", symbol) < (int)sizeof(newer)) {
		*p = dlsym(self, newer);
		if (!*p)
			*p = dlsym(self, symbol);
	}
	if (status)
		*status = !*p;
	return *p ? 0 : NOT_FOUND;
}
API(cuGetProcAddress, const char *symbol, void **p, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(symbol, p, version, flags, NULL);
}
