// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "stub.h"

/* On a page of its own, so that a test can share it with other processes. */
static _Alignas(STUB_PAGE) union {
	struct stub stub;
	char page[STUB_PAGE];
} state_page = { .stub = { .gpus = 1, .work_ns = 20000 } };
#define state state_page.stub

struct context {
	int dev;
	_Atomic uint64_t busy_until;
	atomic_int waiting; /* threads in cuCtxSynchronize */
	int attached;
};
struct stream {
	struct context *ctx;
	int green; /* made by cuGreenCtxStreamCreate */
	atomic_int capturing;
	_Atomic uint64_t busy_until;
};

static __thread struct context *stack[16];
static __thread int top = -1;
static atomic_int captures[STUB_GPUS];
static struct context primary[STUB_GPUS];
static atomic_int primary_users[STUB_GPUS];
static _Atomic(struct context *) spare; /* the next context gets this handle */

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

/* The end is read before the clock, so that work without a length is never seen to run. */
static int running(_Atomic uint64_t *t)
{
	uint64_t end = atomic_load(t);

	return now() < end ||
	       atomic_load(&state.launches[0]) < atomic_load(&state.stuck_until);
}

static void nap(void)
{
	static const struct timespec t = { 0, 5000 };

	nanosleep(&t, NULL);
}

static void wait_until(_Atomic uint64_t *t)
{
	while (running(t))
		nap();
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
	struct context *c = atomic_exchange(&spare, NULL);

	(void)flags;
	if (!c)
		c = calloc(1, sizeof(*c));
	memset(c, 0, sizeof(*c));
	c->dev = dev;
	stack[++top] = c;
	*ctx = c;
	return 0;
}
int cuCtxDestroy_v2(void *ctx)
{
	struct context *c = ctx;

	if (state.refuses_destroy)
		return state.refuses_destroy;
	while (now() < atomic_load(&c->busy_until)) /* as the driver does */
		nap();
	atomic_fetch_add(&state.destroyed, 1);
	if (current() == ctx)
		top--;
	if (atomic_load(&c->waiting) == 0) {
		memset(c, 0xdb, sizeof(*c)); /* whoever still uses it fails */
		/* The one before it is left: ThreadSanitizer would see its end, and not this order. */
		atomic_store(&spare, c);
	}
	for (uint64_t start = now(); now() - start < atomic_load(&state.destroy_ns);)
		nap();
	return 0;
}
int cuCtxAttach(void **ctx, unsigned flags)
{
	struct context *c = current();

	if (!c || flags)
		return c ? 1 : 201;
	c->attached++;
	*ctx = c;
	return 0;
}
int cuCtxDetach(void *ctx)
{
	struct context *c = ctx;

	if (c != current())
		return 201;
	return c->attached-- > 0 ? 0 : cuCtxDestroy_v2(c);
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
	atomic_fetch_add(&current()->waiting, 1);
	wait_until(&current()->busy_until);
	atomic_fetch_sub(&current()->waiting, 1);
	return 0;
}
int cuDevicePrimaryCtxRetain(void **ctx, int dev)
{
	primary[dev].dev = dev;
	atomic_fetch_add(&primary_users[dev], 1);
	*ctx = &primary[dev];
	return 0;
}
int cuDevicePrimaryCtxReset_v2(int dev) { (void)dev; return 0; }
int cuDevicePrimaryCtxRelease_v2(int dev)
{
	if (atomic_load(&primary_users[dev]) == 0)
		return 201;
	atomic_fetch_sub(&primary_users[dev], 1);
	atomic_fetch_add(&state.destroyed, 1);
	return 0;
}
int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active);
int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active)
{
	*flags = 0;
	*active = atomic_load(&primary_users[dev]) > 0;
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
int cuStreamDestroy_v2(void *stream)
{
	if (state.refuses_destroy)
		return state.refuses_destroy;
	free(stream);
	return 0;
}
int cuStreamGetCtx(void *stream, void **ctx);
int cuStreamGetCtx(void *stream, void **ctx)
{
	if ((uintptr_t)stream > 2 && ((struct stream *)stream)->green)
		return 801; /* _v2 would tell */
	*ctx = (uintptr_t)stream <= 2 ? (void *)current() : (void *)((struct stream *)stream)->ctx;
	return 0;
}
static void wait_while_blocked(int dev)
{
		while (atomic_load(&state.blocked[dev]))
		nap();
}

static void wait_while_checkpointed(void)
{
	atomic_fetch_add(&state.waiting, 1);
	while (atomic_load(&state.checkpointed))
		nap();
	atomic_fetch_sub(&state.waiting, 1);
}

int cuStreamQuery(void *stream);
int cuStreamQuery(void *stream)
{
	if ((uintptr_t)stream > 2 && atomic_load(&((struct stream *)stream)->capturing))
		atomic_fetch_add(&state.broken_captures, 1);
	atomic_fetch_add(&state.asked, 1);
	wait_while_blocked((uintptr_t)stream <= 2 ? current()->dev : ((struct stream *)stream)->ctx->dev);
	return running((uintptr_t)stream <= 2 ? &state.busy_until[current()->dev]
					      : &((struct stream *)stream)->busy_until) ? 600 : 0;
}
static __thread bool own_capturing; /* the thread's default stream */

int cuStreamIsCapturing(void *stream, int *status);
int cuStreamIsCapturing(void *stream, int *status)
{
	*status = (uintptr_t)stream > 2 ? atomic_load(&((struct stream *)stream)->capturing)
					: (uintptr_t)stream == 2 && own_capturing;
	for (uint64_t end = now() + state.capturing_ns; now() < end;)
		nap();
	return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode)
{
	struct stream *s = stream;

	(void)mode;
	if ((uintptr_t)stream == 2) { /* goes with the thread */
		own_capturing = true;
		return 0;
	}
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
	wait_while_checkpointed();
	*event = calloc(1, sizeof(_Atomic uint64_t));
	atomic_fetch_add(&state.live_events, 1);
	return 0;
}
int cuEventDestroy_v2(void *event);
int cuEventDestroy_v2(void *event)
{
	free(event);
	atomic_fetch_sub(&state.live_events, 1);
	return 0;
}
int cuEventRecord(void *event, void *stream);
int cuEventRecord(void *event, void *stream)
{
	(void)stream;
	atomic_fetch_add(&state.events, 1);
	wait_while_blocked(current()->dev);
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
	uint64_t end;

	wait_while_checkpointed();
	end = now() + state.work_ns;
	if (!c)
		return 201;
	if (s && atomic_load(&s->capturing)) {
		atomic_fetch_add(&state.recorded, 1);
		return 0;
	}
	if (!atomic_load(&state.allowed[c->dev]))
		atomic_fetch_add(&state.violations, 1);
	if (state.queued) {
		uint64_t before = atomic_load(&state.busy_until[c->dev]);

		if (before > now())
			end = before + state.work_ns;
	}
	extend(&state.busy_until[c->dev], end);
	extend(&c->busy_until, end);
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
	atomic_fetch_add(&state.per_thread, 1);
	return launch(stream);
}
int cuLaunchCooperativeKernelMultiDevice(struct stub_launch *list, unsigned count, unsigned flags)
{
	int result = 0;

	(void)flags;
	for (unsigned i = 0; i < count && result == 0; i++)
		result = launch(list[i].stream);
	return result;
}
int cuLaunch(void *f) { (void)f; return launch(NULL); }
int cuLaunchGrid(void *f, int w, int h) { (void)f, (void)w, (void)h; return launch(NULL); }
int cuLaunchGridAsync(void *f, int w, int h, void *stream)
{
	(void)f, (void)w, (void)h;
	return launch(stream);
}

/* Whose parameters changed in CUDA 13. */
int cuMemcpyBatchAsync(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
		       size_t num, size_t *fail, void *stream)
{
	(void)d, (void)s, (void)n, (void)count, (void)attrs, (void)idx, (void)num;
	*fail = (size_t)-1;
	return launch(stream);
}
int cuMemcpyBatchAsync_ptsz(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
			    size_t num, size_t *fail, void *stream)
{
	return cuMemcpyBatchAsync(d, s, n, count, attrs, idx, num, fail, stream);
}
int cuMemcpyBatchAsync_v2(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
			  size_t num, void *stream)
{
	(void)d, (void)s, (void)n, (void)count, (void)attrs, (void)idx, (void)num;
	return launch(stream);
}
int cuMemcpyBatchAsync_v2_ptsz(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
			       size_t num, void *stream)
{
	return cuMemcpyBatchAsync_v2(d, s, n, count, attrs, idx, num, stream);
}

int cuGraphInstantiateWithParams(void **exec, void *graph, void *params)
{
	struct { uint64_t flags; void *stream; } *p = params;

	*exec = graph;
	return p->flags & 2 ? launch(p->stream) : 0;
}

/* A green context is its GPU's primary one here, and a stream of it knows no other. */
int cuGreenCtxCreate(void **green, void *desc, int dev, unsigned flags)
{
	struct context *c = malloc(sizeof(*c));

	(void)desc, (void)flags;
	c->dev = dev;
	*green = c;
	return 0;
}
int cuGreenCtxDestroy(void *green) { free(green); return 0; }
int cuCtxFromGreenCtx(void **ctx, void *green) { *ctx = green; return 0; }
int cuGreenCtxStreamCreate(void **stream, void *green, unsigned flags, int priority)
{
	struct stream *s = calloc(1, sizeof(*s));

	(void)flags, (void)priority;
	s->ctx = green;
	s->green = 1;
	*stream = s;
	return 0;
}

int cuGetExportTable(const void **table, const void *id)
{
	static const void *const none[2];

	(void)id;
	*table = none;
	return 0;
}

int cuMemAlloc_v2(unsigned long long *p, size_t bytes)
{
	static _Atomic unsigned long long next = 0x10000;

	(void)bytes;
	if (state.memory_result)
		return state.memory_result;
	*p = atomic_fetch_add(&next, 0x10000);
	return 0;
}
int cuMemFree_v2(unsigned long long p) { (void)p; return 0; }

/*
 * Like a driver of CUDA 13.0: by the version that the program was made for, and
 * what is not there is no error but a status.
 */
int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, void *status)
{
	static const struct { const char *name; int since; void *legacy, *thread; } table[] = {
#define BOTH(name, since, f) { name, since, (void *)f, (void *)f##_ptsz }
#define ONE(name, since, f) { name, since, (void *)f, (void *)f }
		BOTH("cuLaunchKernel", 7000, cuLaunchKernel),
		BOTH("cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync),
		BOTH("cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2),
		ONE("cuMemAlloc", 3020, cuMemAlloc_v2),
		ONE("cuInit", 2000, cuInit),
		ONE("cuGetProcAddress", 11030, cuGetProcAddress),
		ONE("cuGetProcAddress", 12000, cuGetProcAddress_v2),
		ONE("cuGetExportTable", 3000, cuGetExportTable),
		ONE("cuNotInTheTable", 1000, cuNotInTheTable),
	};
	int found = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */

	if (version > 13000 || flags > 2)
		return 1;
	*pfn = NULL;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		if (strcmp(table[i].name, symbol) != 0)
			continue;
		if (table[i].since <= version) {
			*pfn = flags & 2 ? table[i].thread : table[i].legacy;
			found = 0;
		} else if (found) {
			found = 2; /* CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT */
		}
	}
	if (status)
		*(int *)status = found;
	return 0;
}
int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags)
{
	int status = 0;
	int result = cuGetProcAddress_v2(symbol, pfn, version, flags, &status);

	return result ? result : status ? 500 : 0;
}
int cuNotInTheTable(void) { return 42; }
int cudnnCreate(void **handle) { *handle = NULL; return 43; }
