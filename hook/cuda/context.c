// SPDX-License-Identifier: Apache-2.0
/* context.c: wrappers that note which contexts there are, and of which GPU. */
#include <string.h>

#include "clock.h"
#include "futex.h"
#include "rm.h"
#include "wait.h"
#include "wrap.h"

static int created(int result, void **ctx, int dev, bool own)
{
	if (result == CUDA_SUCCESS && nvs_active()) {
		struct nvs_gpu *gpu = nvs_gpu_of_device(dev);

		if (*ctx && gpu) {
			nvs_context_created(*ctx, gpu, own);
			nvs_gpu_use(gpu);
			nvs_swap_context_made(gpu);
		}
		nvs_thread_forget();
	}
	return result;
}

#define CREATE(name, P, A) WRAPPER(name, P) { return created(CALL(name, NVS_SPREAD A), ctx, dev, true); }
CREATE(cuCtxCreate, (void **ctx, uint flags, int dev), (ctx, flags, dev))
CREATE(cuCtxCreate_v2, (void **ctx, uint flags, int dev), (ctx, flags, dev))
CREATE(cuCtxCreate_v3, (void **ctx, void *affinity, int num, uint flags, int dev), (ctx, affinity, num, flags, dev))
CREATE(cuCtxCreate_v4, (void **ctx, void *params, uint flags, int dev), (ctx, params, flags, dev))
CREATE(cuGLCtxCreate, (void **ctx, uint flags, int dev), (ctx, flags, dev))
CREATE(cuGLCtxCreate_v2, (void **ctx, uint flags, int dev), (ctx, flags, dev))
CREATE(cuVDPAUCtxCreate, (void **ctx, uint flags, int dev, uint32_t vdp, void *get_proc), (ctx, flags, dev, vdp, get_proc))
CREATE(cuVDPAUCtxCreate_v2, (void **ctx, uint flags, int dev, uint32_t vdp, void *get_proc), (ctx, flags, dev, vdp, get_proc))

/*
 * While a context is destroyed the driver waits for its work: the channels are on, and nobody drains
 * the context. The channels come first, because a drain may wait for them. A process that is suspended
 * comes back before, perhaps on another GPU.
 */
struct hold {
	struct nvs_gpu *gpu;
	uint8_t kept[NVS_UUID_SIZE]; /* the GPU then: the process may move while the call is in the driver */
	struct nvs_context_held held;
};

static struct hold hold_context(struct nvs_gpu *gpu)
{
	struct hold h = { .gpu = gpu };

	if (nvs_is_suspended())
		nvs_suspended_wait();
	if (gpu) {
		memcpy(h.kept, gpu->device.uuid, NVS_UUID_SIZE);
		nvs_rm_keep_on(h.kept);
	}
	h.held = nvs_context_hold(gpu);
	return h;
}

static void unhold_context(const struct hold *h)
{
	if (h->gpu)
		nvs_context_unhold(h->gpu, h->held);
	if (h->gpu)
		nvs_rm_let_go(h->kept);
}

WRAPPER(cuCtxAttach, (void **ctx, uint flags))
{
	int result = CALL(cuCtxAttach, ctx, flags);

	if (result == CUDA_SUCCESS && nvs_active())
		nvs_context_count(*ctx, 1);
	return result;
}

static int detached(int result, void *ctx)
{
	if (result != CUDA_SUCCESS)
		nvs_context_count(ctx, 1);
	return result;
}

#define DESTROY(name, lives_on) \
	WRAPPER(name, (void *ctx)) \
	{ \
		if (lives_on) \
			return detached(CALL(name, ctx), ctx); \
		struct nvs_gpu *gpu = nvs_active() ? nvs_gpu_of_context(ctx) : NULL; \
		uint64_t stamp = nvs_memory_stamp(); \
		struct hold held = hold_context(gpu); \
		/* The record goes first: afterwards the handle may be somebody else's. */ \
		struct nvs_context_known was = nvs_context_destroyed(ctx, gpu); \
		int result = CALL(name, ctx); \
		if (result == CUDA_SUCCESS && nvs_counting()) \
			nvs_memory_context_gone(ctx, stamp); \
		if (result == CUDA_SUCCESS && gpu) \
			nvs_swap_context_gone(ctx, gpu); \
		if (gpu && result != CUDA_SUCCESS) \
			nvs_context_kept(ctx, gpu, &was); \
		unhold_context(&held); \
		nvs_thread_forget(); \
		return result; \
	}
DESTROY(cuCtxDestroy, false)
DESTROY(cuCtxDestroy_v2, false)
DESTROY(cuCtxDetach, nvs_active() && nvs_context_count(ctx, -1))

#define SWITCH(name, P, A) WRAPPER(name, P) { nvs_thread_forget(); int result = CALL(name, A); return result; }
SWITCH(cuCtxSetCurrent, (void *ctx), ctx)
SWITCH(cuCtxPushCurrent, (void *ctx), ctx)
SWITCH(cuCtxPushCurrent_v2, (void *ctx), ctx)
SWITCH(cuCtxPopCurrent, (void **ctx), ctx)
SWITCH(cuCtxPopCurrent_v2, (void **ctx), ctx)

/* ---- the primary context: its end is that of the last reference ---- */

WRAPPER(cuDevicePrimaryCtxRetain, (void **ctx, int dev))
{
	int result = created(CALL(cuDevicePrimaryCtxRetain, ctx, dev), ctx, dev, false);
	struct nvs_gpu *gpu = result == CUDA_SUCCESS && nvs_active() ? nvs_gpu_of_device(dev) : NULL;

	if (gpu)
		atomic_fetch_add(&gpu->primary.references, 1);
	return result;
}

/*
 * Takes a reference away. False: it is not the last. Of two releases at the same time the one that
 * may be the last comes after the other, for which it waits a second at most.
 */
static bool may_be_last(struct nvs_gpu *gpu)
{
	atomic_fetch_add(&gpu->primary.releases, 1);
	if (atomic_fetch_sub(&gpu->primary.references, 1) > 1)
		return false;
	atomic_fetch_sub(&gpu->primary.releases, 1);
	NVS_NAP_UNTIL(!atomic_load(&gpu->primary.releases), nvs_now() + NVS_S, 100 * NVS_US);
	return true;
}

static void primary_gone(struct nvs_gpu *gpu, uint64_t stamp)
{
	atomic_store(&gpu->primary.references, 0);
	nvs_context_destroyed(NULL, gpu);
	if (nvs_counting())
		nvs_memory_primary_gone(gpu, stamp);
	nvs_swap_context_gone(NULL, gpu);
}

static bool primary_lives(int dev)
{
	uint flags;
	int alive = 1;

	return nvs_memory_driver.primary_state(dev, &flags, &alive) != CUDA_SUCCESS || alive;
}

/* A primary context that is let go of. */
struct letting {
	struct nvs_gpu *gpu;
	uint64_t stamp;
	bool last;
	struct hold held;
};

static struct letting letting_begin(int dev, bool reset)
{
	struct letting l = { .gpu = nvs_active() ? nvs_gpu_of_device(dev) : NULL, .stamp = nvs_memory_stamp() };

	l.last = reset || (l.gpu && may_be_last(l.gpu));
	if (l.last)
		l.held = hold_context(l.gpu);
	return l;
}

static int letting_end(const struct letting *l, int dev, bool reset, int result)
{
	if (l->gpu && !reset && result != CUDA_SUCCESS)
		atomic_fetch_add(&l->gpu->primary.references, 1);
	else if (l->gpu && l->last && result == CUDA_SUCCESS && (reset || !primary_lives(dev)))
		primary_gone(l->gpu, l->stamp);
	if (l->last)
		unhold_context(&l->held);
	else if (l->gpu)
		atomic_fetch_sub(&l->gpu->primary.releases, 1);
	nvs_thread_forget();
	return result;
}

#define PRIMARY(name, reset) \
	WRAPPER(name, (int dev)) \
	{ \
		struct letting l = letting_begin(dev, reset); \
		return letting_end(&l, dev, reset, CALL(name, dev)); \
	}
PRIMARY(cuDevicePrimaryCtxRelease, false)
PRIMARY(cuDevicePrimaryCtxRelease_v2, false)
PRIMARY(cuDevicePrimaryCtxReset, true)
PRIMARY(cuDevicePrimaryCtxReset_v2, true)

/*
 * A green context is part of its GPU's primary one. All calls about contexts have the handle that
 * the driver turns it into, which is asked for at once.
 */
static void green_seen(void *green)
{
	void *ctx = NULL;

	if (nvs_memory_driver.ctx_from_green(&ctx, green) == CUDA_SUCCESS)
		nvs_context_from_green(ctx, green);
}

WRAPPER(cuGreenCtxCreate, (void **green, void *desc, int dev, uint flags))
{
	int result = CALL(cuGreenCtxCreate, green, desc, dev, flags);

	if (result == CUDA_SUCCESS && nvs_active()) {
		struct nvs_gpu *gpu = nvs_gpu_of_device(dev);

		green_seen(*green);
		if (gpu) {
			nvs_gpu_use(gpu);
			nvs_swap_context_made(gpu);
		}
	}
	return result;
}

/* Of the green context and its GPU, whatever is current. */
WRAPPER(cuGreenCtxStreamCreate, (void **stream, void *green, uint flags, int priority))
{
	int result = CALL(cuGreenCtxStreamCreate, stream, green, flags, priority);

	if (result == CUDA_SUCCESS && nvs_active()) {
		if (!nvs_context_of_green(green))
			green_seen(green);
		nvs_stream_created_in(*stream, nvs_context_of_green(green));
	}
	return result;
}

WRAPPER(cuCtxFromGreenCtx, (void **ctx, void *green))
{
	int result = CALL(cuCtxFromGreenCtx, ctx, green);

	if (result == CUDA_SUCCESS && nvs_active())
		nvs_context_from_green(*ctx, green);
	return result;
}

WRAPPER(cuGreenCtxDestroy, (void *green))
{
	void *ctx = nvs_active() ? nvs_context_of_green(green) : NULL;
	struct nvs_gpu *gpu = nvs_gpu_of_context(ctx);
	struct hold held = hold_context(gpu);
	struct nvs_context_known was = nvs_context_destroyed(ctx, gpu); /* first, see DESTROY */
	int result = CALL(cuGreenCtxDestroy, green);

	if (gpu && result != CUDA_SUCCESS)
		nvs_context_kept(ctx, gpu, &was);
	unhold_context(&held);
	return result;
}
