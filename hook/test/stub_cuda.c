// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "stub.h"

static struct stub state = { .gpus = 1, .work_ns = 20000 };

struct context { int dev; };
struct stream {
	struct context *ctx;
	atomic_int capturing;
	_Atomic uint64_t busy_until;
};

static __thread struct context *stack[16];
static __thread int top = -1;
static atomic_int captures[STUB_GPUS];
static struct context primary[STUB_GPUS];

struct stub *stub_state(void)
{
	return &state;
}

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int running(_Atomic uint64_t *t)
{
	return now() < atomic_load(t) ||
	       atomic_load(&state.launches[0]) < atomic_load(&state.stuck_until);
}

static void wait_until(_Atomic uint64_t *t)
{
	static const struct timespec nap = { 0, 5000 };

	while (running(t))
		nanosleep(&nap, NULL);
}

static void extend(_Atomic uint64_t *t, uint64_t to)
{
	uint64_t old = atomic_load(t);

	while (old < to && !atomic_compare_exchange_weak(t, &old, to))
		;
}

static struct context *current(void)
{
	return top >= 0 ? stack[top] : NULL;
}

int cuInit(unsigned flags) { (void)flags; return state.init_result; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n);
int cuDeviceGetCount(int *n) { *n = state.gpus; return 0; }
int cuDeviceGet(int *dev, int ordinal) { *dev = ordinal; return ordinal < state.gpus ? 0 : 101; }
int cuDeviceGetUuid(unsigned char *uuid, int dev);
int cuDeviceGetUuid(unsigned char *uuid, int dev)
{
	memset(uuid, 0, 16);
	uuid[0] = 0x51;
	uuid[15] = (unsigned char)dev;
	return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int dev);
int cuDeviceTotalMem_v2(size_t *bytes, int dev) { (void)dev; *bytes = 1u << 30; return 0; }

int cuCtxCreate_v2(void **ctx, unsigned flags, int dev)
{
	struct context *c = malloc(sizeof(*c));

	(void)flags;
	c->dev = dev;
	stack[++top] = c;
	*ctx = c;
	return 0;
}
int cuCtxDestroy_v2(void *ctx)
{
	if (current() == ctx)
		top--;
	free(ctx);
	return 0;
}
int cuCtxGetCurrent(void **ctx) { *ctx = current(); return 0; }
int cuCtxSetCurrent(void *ctx)
{
	if (top < 0)
		top = 0;
	stack[top] = ctx;
	return 0;
}
int cuCtxPushCurrent_v2(void *ctx);
int cuCtxPushCurrent_v2(void *ctx) { stack[++top] = ctx; return 0; }
int cuCtxPopCurrent_v2(void **ctx);
int cuCtxPopCurrent_v2(void **ctx) { *ctx = stack[top--]; return 0; }
int cuCtxGetDevice(int *dev);
int cuCtxGetDevice(int *dev)
{
	if (!current())
		return 201;
	*dev = current()->dev;
	return 0;
}
int cuCtxSynchronize(void)
{
	int dev = current()->dev;

	atomic_fetch_add(&state.syncs, 1);
	if (atomic_load(&captures[dev]))
		atomic_fetch_add(&state.broken_captures, 1);
	wait_until(&state.busy_until[dev]);
	return 0;
}
int cuDevicePrimaryCtxRetain(void **ctx, int dev);
int cuDevicePrimaryCtxRetain(void **ctx, int dev)
{
	primary[dev].dev = dev;
	*ctx = &primary[dev];
	return 0;
}
int cuDevicePrimaryCtxReset_v2(int dev) { (void)dev; return 0; }
int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active);
int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active)
{
	(void)dev;
	*flags = 0;
	*active = 1;
	return 0;
}

int cuStreamCreate(void **stream, unsigned flags)
{
	struct stream *s = calloc(1, sizeof(*s));

	(void)flags;
	s->ctx = current();
	*stream = s;
	return 0;
}
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
int cuStreamGetCtx(void *stream, void **ctx);
int cuStreamGetCtx(void *stream, void **ctx)
{
	*ctx = (uintptr_t)stream <= 2 ? (void *)current() : (void *)((struct stream *)stream)->ctx;
	return 0;
}
int cuStreamQuery(void *stream);
int cuStreamQuery(void *stream)
{
	return running((uintptr_t)stream <= 2 ? &state.busy_until[current()->dev]
					      : &((struct stream *)stream)->busy_until) ? 600 : 0;
}
int cuStreamIsCapturing(void *stream, int *status);
int cuStreamIsCapturing(void *stream, int *status)
{
	*status = (uintptr_t)stream > 2 && atomic_load(&((struct stream *)stream)->capturing);
	return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode)
{
	struct stream *s = stream;

	(void)mode;
	atomic_fetch_add(&captures[s->ctx->dev], 1);
	atomic_store(&s->capturing, 1);
	return 0;
}
int cuStreamEndCapture(void *stream, void **graph)
{
	struct stream *s = stream;

	atomic_store(&s->capturing, 0);
	atomic_fetch_sub(&captures[s->ctx->dev], 1);
	*graph = &state;
	return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode);
int cuThreadExchangeStreamCaptureMode(int *mode)
{
	static __thread int now_mode;
	int old = now_mode;

	now_mode = *mode;
	*mode = old;
	return 0;
}

int cuEventCreate(void **event, unsigned flags);
int cuEventCreate(void **event, unsigned flags)
{
	(void)flags;
	*event = calloc(1, sizeof(_Atomic uint64_t));
	return 0;
}
int cuEventDestroy_v2(void *event);
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *stream);
int cuEventRecord(void *event, void *stream)
{
	(void)stream;
	atomic_fetch_add(&state.events, 1);
	atomic_store((_Atomic uint64_t *)event, atomic_load(&state.busy_until[current()->dev]));
	return 0;
}
int cuEventQuery(void *event);
int cuEventQuery(void *event) { return running(event) ? 600 : 0; }
int cuEventSynchronize(void *event);
int cuEventSynchronize(void *event)
{
	wait_until(event);
	return 0;
}

static int launch(void *stream)
{
	struct stream *s = (uintptr_t)stream <= 2 ? NULL : stream;
	struct context *c = s ? s->ctx : current();
	uint64_t end = now() + state.work_ns;

	if (!c)
		return 201;
	if (s && atomic_load(&s->capturing)) {
		atomic_fetch_add(&state.recorded, 1);
		return 0;
	}
	if (!atomic_load(&state.allowed[c->dev]))
		atomic_fetch_add(&state.violations, 1);
	extend(&state.busy_until[c->dev], end);
	if (s)
		extend(&s->busy_until, end);
	atomic_fetch_add(&state.launches[c->dev], 1);
	if (!atomic_load(&state.allowed[c->dev]))
		atomic_fetch_add(&state.violations, 1);
	return 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		   unsigned bz, unsigned shared, void *stream, void **params, void **extra)
{
	(void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;
	(void)params, (void)extra;
	return launch(stream);
}
int cuLaunchKernel_ptsz(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
			unsigned bz, unsigned shared, void *stream, void **params, void **extra)
{
	(void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;
	(void)params, (void)extra;
	return launch(stream);
}

int cuMemAlloc_v2(unsigned long long *p, size_t bytes)
{
	*p = (unsigned long long)(uintptr_t)malloc(bytes ? 1 : 1);
	return 0;
}
int cuMemFree_v2(unsigned long long p) { free((void *)(uintptr_t)p); return 0; }

int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, void *status)
{
	static const struct { const char *name; void *legacy, *thread; } table[] = {
		{ "cuLaunchKernel", (void *)cuLaunchKernel, (void *)cuLaunchKernel_ptsz },
		{ "cuMemAlloc", (void *)cuMemAlloc_v2, (void *)cuMemAlloc_v2 },
		{ "cuInit", (void *)cuInit, (void *)cuInit },
		{ "cuGetProcAddress", (void *)cuGetProcAddress_v2, (void *)cuGetProcAddress_v2 },
		{ "cuNotInTheTable", (void *)cuNotInTheTable, (void *)cuNotInTheTable },
	};

	(void)version;
	*pfn = NULL;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
		if (strcmp(table[i].name, symbol) == 0)
			*pfn = flags & 2 ? table[i].thread : table[i].legacy;
	if (status)
		*(int *)status = *pfn ? 0 : 1;
	return *pfn ? 0 : 500;
}
int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(symbol, pfn, version, flags, NULL);
}
int cuNotInTheTable(void) { return 42; }
int cudnnCreate(void **handle) { *handle = NULL; return 43; }
