// SPDX-License-Identifier: Apache-2.0
/* context.c: initialisation and contexts. */
#include "driver.h"
#include "mps.h"
#include "rm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t drv_mu = PTHREAD_MUTEX_INITIALIZER;

enum { S_NEW, S_READY, S_FORKED, S_CLOSED };
static int state;
static int devices[SIM_MAX_GPUS], ndevices;
static struct sim_ctx *primary[SIM_MAX_GPUS];
static unsigned primary_flags[SIM_MAX_GPUS];
static unsigned long long next_id = 1;

#define STACK 64
static _Thread_local struct sim_ctx *stack[STACK];
static _Thread_local int depth; /* entries; the last one is current */
static _Thread_local uint64_t my_thread;

uint64_t thread_id(void)
{
	static uint64_t next;

	if (!my_thread)
		my_thread = __atomic_add_fetch(&next, 1, __ATOMIC_RELAXED);
	return my_thread;
}

/* ---- objects ---- */

#define OBJ_TYPES (M_MAGICS - M_CTX)
static struct obj *free_objs[OBJ_TYPES];

void *obj_new(uint32_t magic, size_t size)
{
	struct obj **list = &free_objs[magic - M_CTX];
	struct obj *o = *list;

	if (o)
		*list = o->next_free;
	else
		o = malloc(size);
	if (!o)
		return NULL;
	memset(o, 0, size);
	o->magic = magic;
	return o;
}

void obj_free(void *p)
{
	struct obj *o = p;
	uint32_t magic = o->magic;

	o->magic = 0;
	o->next_free = free_objs[magic - M_CTX];
	free_objs[magic - M_CTX] = o;
}

int obj_is(const void *p, uint32_t magic)
{
	return p && ((const struct obj *)p)->magic == magic;
}

/* ---- initialisation ---- */

static void fork_prepare(void)
{
	pthread_mutex_lock(&drv_mu);
	sim_fork_prepare();
}

static void fork_parent(void)
{
	sim_fork_parent();
	pthread_mutex_unlock(&drv_mu);
}

static void fork_child(void)
{
	sim_fork_child();
	rm_fork_child();
	pthread_mutex_init(&drv_mu, NULL);
	if (state != S_NEW)
		state = S_FORKED; /* as the driver: CUDA is gone for this child */
}

__attribute__((destructor)) static void fini(void)
{
	if (state != S_READY)
		return;
	rm_close();
	__atomic_store_n(&state, S_CLOSED, __ATOMIC_RELEASE);
	sim_leave();
}

CUresult cuInit(unsigned flags)
{
	int seen[SIM_MAX_GPUS], n;
	CUresult rc = CUDA_SUCCESS;

	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	if (state == S_FORKED)
		rc = CUDA_ERROR_NOT_INITIALIZED;
	else if (state == S_CLOSED)
		rc = CUDA_ERROR_DEINITIALIZED;
	else if (state == S_NEW) {
		if (sim_open()) {
			rc = CUDA_ERROR_NO_DEVICE;
			goto out;
		}
		n = sim_nodes(seen);
		ndevices = sim_visible(getenv("CUDA_VISIBLE_DEVICES"), seen, n, devices);
		if (!ndevices || sim_join(mps_join())) {
			rc = CUDA_ERROR_NO_DEVICE;
			goto out;
		}
		rm_open();
		pthread_atfork(fork_prepare, fork_parent, fork_child);
		state = S_READY;
	}
out:
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

struct simgpu_calls drv_calls;

struct simgpu_calls simgpu_calls(void)
{
	return (struct simgpu_calls){ .all = __atomic_load_n(&drv_calls.all, __ATOMIC_RELAXED),
				      .vmm = __atomic_load_n(&drv_calls.vmm, __ATOMIC_RELAXED) };
}

static int failed;

void simgpu_fail(void)
{
	__atomic_store_n(&failed, 1, __ATOMIC_RELEASE);
}

CUresult ctx_failed(const struct sim_ctx *c)
{
	CUresult own = c ? __atomic_load_n(&c->fault, __ATOMIC_ACQUIRE) : CUDA_SUCCESS;

	if (__atomic_load_n(&failed, __ATOMIC_ACQUIRE))
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	return own || !mps_lost() ? own : CUDA_ERROR_MPS_RPC_FAILURE;
}

int drv_closed(void)
{
	return __atomic_load_n(&state, __ATOMIC_ACQUIRE) == S_CLOSED;
}

static CUresult (*intercept)(const char *call);

void simgpu_intercept(CUresult (*fn)(const char *call))
{
	__atomic_store_n(&intercept, fn, __ATOMIC_RELEASE);
}

CUresult drv_entered(const char *call)
{
	CUresult (*fn)(const char *) = __atomic_load_n(&intercept, __ATOMIC_ACQUIRE);
	CUresult rc = fn ? fn(call) : CUDA_SUCCESS;

	if (rc)
		return rc;
	__atomic_fetch_add(&drv_calls.all, 1, __ATOMIC_RELAXED);
	switch (__atomic_load_n(&state, __ATOMIC_ACQUIRE)) {
	case S_READY:
		sim_await_running();
		return sim_process_failed() ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
	case S_CLOSED:
		return CUDA_ERROR_DEINITIALIZED;
	default:
		return CUDA_ERROR_NOT_INITIALIZED;
	}
}

CUresult cuDriverGetVersion(int *version)
{
	NEED(version);
	*version = 13000;
	return CUDA_SUCCESS;
}

int dev_count(void)
{
	return ndevices;
}

int dev_gpu(CUdevice dev)
{
	return dev >= 0 && dev < ndevices ? devices[dev] : -1;
}

int dev_of_gpu(int gpu)
{
	for (int i = 0; i < ndevices; i++)
		if (devices[i] == gpu)
			return i;
	return gpu;
}

/* ---- contexts ---- */

struct sim_ctx *ctx_current(void)
{
	return depth ? stack[depth - 1] : NULL;
}

CUresult ctx_need(struct sim_ctx **ctx)
{
	struct sim_ctx *c = ctx_current();

	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!obj_is(c, M_CTX))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	*ctx = c;
	return CUDA_SUCCESS;
}

static struct sim_ctx *ctx_new(CUdevice dev, unsigned flags)
{
	struct sim_ctx *c = obj_new(M_CTX, sizeof *c);
	struct sim_stream *s = obj_new(M_STREAM, sizeof *s);

	if (!c || !s)
		return NULL;
	c->dev = dev;
	c->gpu = devices[dev];
	c->flags = flags;
	c->id = next_id++;
	s->ctx = c;
	s->is_legacy = 1;
	s->id = 1;
	c->legacy = s;
	c->rm = rm_make_context(c->gpu);
	sim_count_context(c->gpu, 1);
	return c;
}

static void ctx_free(struct sim_ctx *c)
{
	struct sim_stream *s, *next;

	mem_release_all(c);
	array_release_all(c);
	for (s = c->per_thread; s; s = next) {
		next = s->next;
		obj_free(s);
	}
	obj_free(c->legacy);
	rm_free_context(c->rm);
	sim_count_context(c->gpu, -1);
	obj_free(c);
}

static CUresult push(struct sim_ctx *c)
{
	if (depth == STACK)
		return CUDA_ERROR_OUT_OF_MEMORY;
	stack[depth++] = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned flags, CUdevice dev)
{
	struct sim_ctx *c;

	ENTER();
	NEED(ctx);
	DEVICE(dev);
	pthread_mutex_lock(&drv_mu);
	c = ctx_new(dev, flags);
	pthread_mutex_unlock(&drv_mu);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*ctx = c;
	return push(c);
}

CUresult cuCtxCreate_v3(CUcontext *ctx, void *params, int n, unsigned flags, CUdevice dev)
{
	(void)params;
	(void)n;
	return cuCtxCreate_v2(ctx, flags, dev);
}

CUresult cuCtxCreate_v4(CUcontext *ctx, void *params, unsigned flags, CUdevice dev)
{
	(void)params;
	return cuCtxCreate_v2(ctx, flags, dev);
}

CUresult cuCtxDestroy_v2(CUcontext ctx)
{
	struct point all;

	ENTER();
	if (!obj_is(ctx, M_CTX) || ctx->primary || ctx->of)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&drv_mu);
	all = ctx->all;
	pthread_mutex_unlock(&drv_mu);
	point_wait(all);
	pthread_mutex_lock(&drv_mu);
	if (obj_is(ctx, M_CTX))
		ctx_free(ctx);
	pthread_mutex_unlock(&drv_mu);
	if (ctx_current() == ctx)
		depth--;
	return CUDA_SUCCESS;
}

/* Uses of the current context, deprecated long ago: the last one that ends destroys it. */
CUresult cuCtxAttach(CUcontext *ctx, unsigned flags)
{
	struct sim_ctx *c = ctx_current();

	ENTER();
	NEED(ctx);
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!c || c->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&drv_mu);
	c->refs++;
	pthread_mutex_unlock(&drv_mu);
	*ctx = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext ctx)
{
	int last;

	ENTER();
	if (!obj_is(ctx, M_CTX) || ctx->primary || ctx != ctx_current())
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&drv_mu);
	last = !ctx->refs;
	ctx->refs -= !last;
	pthread_mutex_unlock(&drv_mu);
	return last ? cuCtxDestroy_v2(ctx) : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev)
{
	CUresult rc = CUDA_SUCCESS;

	ENTER();
	NEED(ctx);
	DEVICE(dev);
	pthread_mutex_lock(&drv_mu);
	if (!primary[dev]) {
		primary[dev] = ctx_new(dev, primary_flags[dev]);
		if (primary[dev])
			primary[dev]->primary = 1;
	}
	if (primary[dev]) {
		primary[dev]->refs++;
		*ctx = primary[dev];
	} else {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

static CUresult primary_drop(CUdevice dev, int reset)
{
	struct point all = { { 0, 0 }, 0 };
	struct sim_ctx *gone = NULL;

	ENTER();
	DEVICE(dev);
	pthread_mutex_lock(&drv_mu);
	if (!primary[dev] && !reset) {
		pthread_mutex_unlock(&drv_mu);
		return CUDA_ERROR_INVALID_CONTEXT;
	}
	if (primary[dev] && (reset || --primary[dev]->refs == 0)) {
		gone = primary[dev];
		all = gone->all;
		primary[dev] = NULL;
	}
	pthread_mutex_unlock(&drv_mu);
	if (gone) {
		point_wait(all);
		pthread_mutex_lock(&drv_mu);
		ctx_free(gone);
		pthread_mutex_unlock(&drv_mu);
	}
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) { return primary_drop(dev, 0); }
CUresult cuDevicePrimaryCtxRelease(CUdevice dev) { return primary_drop(dev, 0); }
CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) { return primary_drop(dev, 1); }
CUresult cuDevicePrimaryCtxReset(CUdevice dev) { return primary_drop(dev, 1); }

void ctx_done(struct sim_ctx *c, struct point end)
{
	c->all = point_max(c->all, end);
	if (obj_is(c->of, M_CTX))
		c->of->all = point_max(c->of->all, end);
}

/* A green context holds its GPU's primary context, which has its memory. It has all multiprocessors here. */
CUresult cuGreenCtxCreate(CUgreenCtx *green, void *desc, CUdevice dev, unsigned flags)
{
	CUcontext of;
	CUresult rc = green ? cuDevicePrimaryCtxRetain(&of, dev) : CUDA_ERROR_INVALID_VALUE;

	(void)desc;
	(void)flags;
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	*green = ctx_new(dev, 0);
	if (*green)
		(*green)->of = of;
	pthread_mutex_unlock(&drv_mu);
	if (!*green)
		cuDevicePrimaryCtxRelease_v2(dev);
	return *green ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green)
{
	ENTER();
	NEED(ctx);
	if (!obj_is(green, M_CTX))
		return CUDA_ERROR_INVALID_CONTEXT;
	*ctx = green;
	return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
	struct point all;
	CUdevice dev;

	ENTER();
	if (!obj_is(green, M_CTX) || !green->of)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&drv_mu);
	dev = green->dev;
	all = green->all;
	pthread_mutex_unlock(&drv_mu);
	point_wait(all);
	pthread_mutex_lock(&drv_mu);
	ctx_free(green);
	pthread_mutex_unlock(&drv_mu);
	return primary_drop(dev, 0);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned flags)
{
	ENTER();
	DEVICE(dev);
	primary_flags[dev] = flags;
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned flags)
{
	return cuDevicePrimaryCtxSetFlags_v2(dev, flags);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned *flags, int *active)
{
	ENTER();
	DEVICE(dev);
	if (flags)
		*flags = primary_flags[dev];
	if (active)
		*active = primary[dev] != NULL;
	return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
	ENTER();
	if (!obj_is(ctx, M_CTX))
		return CUDA_ERROR_INVALID_CONTEXT;
	return push(ctx);
}

CUresult cuCtxPopCurrent_v2(CUcontext *ctx)
{
	ENTER();
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	depth--;
	if (ctx)
		*ctx = stack[depth];
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
	ENTER();
	if (!ctx) {
		if (depth)
			depth--;
		return CUDA_SUCCESS;
	}
	if (!obj_is(ctx, M_CTX))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth)
		stack[depth - 1] = ctx;
	else
		return push(ctx);
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *ctx)
{
	ENTER();
	NEED(ctx);
	*ctx = ctx_current();
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *dev)
{
	struct sim_ctx *c;
	CUresult rc;

	ENTER();
	NEED(dev);
	rc = ctx_need(&c);
	if (!rc)
		*dev = c->dev;
	return rc;
}

CUresult cuCtxGetDevice_v2(CUdevice *dev, CUcontext ctx)
{
	ENTER();
	NEED(dev);
	if (!ctx)
		return cuCtxGetDevice(dev);
	if (!obj_is(ctx, M_CTX))
		return CUDA_ERROR_INVALID_CONTEXT;
	*dev = ctx->dev;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned *flags)
{
	struct sim_ctx *c;
	CUresult rc;

	ENTER();
	NEED(flags);
	rc = ctx_need(&c);
	if (!rc)
		*flags = c->flags;
	return rc;
}

CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
	ENTER();
	NEED(id);
	if (!ctx)
		ctx = ctx_current();
	if (!obj_is(ctx, M_CTX))
		return CUDA_ERROR_INVALID_CONTEXT;
	*id = ctx->id;
	return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
	struct point all;
	CUresult rc;

	ENTER();
	if (!ctx && (rc = ctx_need(&ctx)))
		return rc;
	if (!obj_is(ctx, M_CTX))
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&drv_mu);
	rc = capture_guard_context(ctx);
	all = ctx->all;
	pthread_mutex_unlock(&drv_mu);
	rc = rc ? rc : ctx_failed(ctx);
	if (!rc)
		point_wait(all);
	return rc ? rc : ctx_failed(ctx);
}

CUresult cuCtxSynchronize(void)
{
	return cuCtxSynchronize_v2(NULL);
}

static size_t limits[16] = { 1024, 1 << 20, 8 << 20 };

CUresult cuCtxSetLimit(int limit, size_t value)
{
	struct sim_ctx *c;
	CUresult rc;

	ENTER();
	rc = ctx_need(&c);
	if (!rc && (limit < 0 || limit >= 16))
		rc = CUDA_ERROR_INVALID_VALUE;
	if (!rc)
		limits[limit] = value;
	return rc;
}

CUresult cuCtxGetLimit(size_t *value, int limit)
{
	struct sim_ctx *c;
	CUresult rc;

	ENTER();
	NEED(value);
	rc = ctx_need(&c);
	if (!rc && (limit < 0 || limit >= 16))
		rc = CUDA_ERROR_INVALID_VALUE;
	if (!rc)
		*value = limits[limit];
	return rc;
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned *version)
{
	ENTER();
	NEED(version);
	if (ctx && !obj_is(ctx, M_CTX))
		return CUDA_ERROR_INVALID_CONTEXT;
	*version = 3020;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	struct sim_ctx *c;
	CUresult rc;

	ENTER();
	rc = ctx_need(&c);
	if (!rc && least)
		*least = 0;
	if (!rc && greatest)
		*greatest = -5;
	return rc;
}

CUresult cuCtxSetCacheConfig(int config)
{
	struct sim_ctx *c;

	(void)config;
	ENTER();
	return ctx_need(&c);
}

CUresult cuCtxGetCacheConfig(int *config)
{
	struct sim_ctx *c;

	ENTER();
	NEED(config);
	*config = 0;
	return ctx_need(&c);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
	(void)flags;
	ENTER();
	return obj_is(peer, M_CTX) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
