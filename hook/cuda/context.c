// SPDX-License-Identifier: Apache-2.0
/*
 * context.c: wrappers that note which contexts there are, and of which GPU.
 */
#include <string.h>

#include "rm.h"
#include "swap.h"
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

WRAPPER(cuCtxCreate, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuCtxCreate, ctx, flags, dev), ctx, dev, true);
}

WRAPPER(cuCtxCreate_v2, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuCtxCreate_v2, ctx, flags, dev), ctx, dev, true);
}

WRAPPER(cuCtxCreate_v3, (void **ctx, void *affinity, int num, uint flags, int dev))
{
	return created(CALL(cuCtxCreate_v3, ctx, affinity, num, flags, dev), ctx, dev, true);
}

WRAPPER(cuCtxCreate_v4, (void **ctx, void *params, uint flags, int dev))
{
	return created(CALL(cuCtxCreate_v4, ctx, params, flags, dev), ctx, dev, true);
}

WRAPPER(cuGLCtxCreate, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuGLCtxCreate, ctx, flags, dev), ctx, dev, true);
}

WRAPPER(cuGLCtxCreate_v2, (void **ctx, uint flags, int dev))
{
	return created(CALL(cuGLCtxCreate_v2, ctx, flags, dev), ctx, dev, true);
}

WRAPPER(cuVDPAUCtxCreate, (void **ctx, uint flags, int dev, uint32_t vdp, void *get_proc))
{
	return created(CALL(cuVDPAUCtxCreate, ctx, flags, dev, vdp, get_proc), ctx, dev, true);
}

WRAPPER(cuVDPAUCtxCreate_v2, (void **ctx, uint flags, int dev, uint32_t vdp, void *get_proc))
{
	return created(CALL(cuVDPAUCtxCreate_v2, ctx, flags, dev, vdp, get_proc), ctx, dev, true);
}

/*
 * While a context is destroyed: the driver waits for its work, so the channels
 * are on; and nobody drains it. The channels first: who drains may wait for them.
 * A process that is away comes back before, perhaps on another GPU: until then its
 * contexts are known, and no channels are kept on.
 */
struct hold {
	struct nvs_gpu *gpu;
	uint8_t kept[NVS_UUID_SIZE]; /* the GPU then: the process may move while the call is in the driver */
	bool drain;
};

static struct hold hold_context(struct nvs_gpu *gpu)
{
	struct hold h = { .gpu = gpu };

	if (nvs_is_away())
		nvs_away_wait();
	if (gpu) {
		memcpy(h.kept, gpu->device.uuid, NVS_UUID_SIZE);
		nvs_rm_keep_on(h.kept);
	}
	h.drain = nvs_context_hold(gpu);
	return h;
}

static void unhold_context(const struct hold *h)
{
	if (h->drain)
		nvs_context_unhold(h->gpu);
	if (h->gpu)
		nvs_rm_let_go(h->kept);
}

WRAPPER(cuCtxAttach, (void **ctx, uint flags))
{
	int result = CALL(cuCtxAttach, ctx, flags);

	if (result == CUDA_SUCCESS && nvs_active())
		nvs_context_attached(*ctx);
	return result;
}

static int detached(int result, void *ctx)
{
	if (result != CUDA_SUCCESS)
		nvs_context_attached(ctx);
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
		struct nvs_context_was was = nvs_context_destroyed(ctx, gpu); \
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
DESTROY(cuCtxDetach, nvs_active() && nvs_context_detaches(ctx))

#define SWITCH(name, P, A) \
	WRAPPER(name, P) \
	{ \
		nvs_thread_forget(); \
		return CALL(name, A); \
	}
SWITCH(cuCtxSetCurrent, (void *ctx), ctx)
SWITCH(cuCtxPushCurrent, (void *ctx), ctx)
SWITCH(cuCtxPushCurrent_v2, (void *ctx), ctx)
SWITCH(cuCtxPopCurrent, (void **ctx), ctx)
SWITCH(cuCtxPopCurrent_v2, (void **ctx), ctx)

WRAPPER(cuDevicePrimaryCtxRetain, (void **ctx, int dev))
{
	return created(CALL(cuDevicePrimaryCtxRetain, ctx, dev), ctx, dev, false);
}

static void primary_reset(struct nvs_gpu *gpu, uint64_t stamp)
{
	nvs_context_destroyed(NULL, gpu);
	if (nvs_counting())
		nvs_memory_primary_gone(gpu, stamp);
	nvs_swap_context_gone(NULL, gpu);
}

/* The primary context is gone if nobody holds it any more. */
static void primary_gone(int dev, struct nvs_gpu *gpu, uint64_t stamp)
{
	uint flags;
	int alive = 1;

	if (gpu && nvs_driver.primary_state &&
	    nvs_driver.primary_state(dev, &flags, &alive) == CUDA_SUCCESS && !alive)
		primary_reset(gpu, stamp);
}

#define PRIMARY(name, gone) \
	WRAPPER(name, (int dev)) \
	{ \
		struct nvs_gpu *gpu = nvs_active() ? nvs_gpu_of_device(dev) : NULL; \
		uint64_t stamp = nvs_memory_stamp(); \
		struct hold held = hold_context(gpu); \
		int result = CALL(name, dev); \
		if (gpu && result == CUDA_SUCCESS) \
			gone; \
		unhold_context(&held); \
		nvs_thread_forget(); \
		return result; \
	}
PRIMARY(cuDevicePrimaryCtxRelease, primary_gone(dev, gpu, stamp))
PRIMARY(cuDevicePrimaryCtxRelease_v2, primary_gone(dev, gpu, stamp))
PRIMARY(cuDevicePrimaryCtxReset, primary_reset(gpu, stamp))
PRIMARY(cuDevicePrimaryCtxReset_v2, primary_reset(gpu, stamp))

/*
 * A green context is part of its GPU's primary context. What the driver turns
 * it into names it in all calls about contexts and is asked for at once.
 */
static void green_seen(void *green)
{
	void *ctx = NULL;

	if (nvs_driver.ctx_from_green && nvs_driver.ctx_from_green(&ctx, green) == CUDA_SUCCESS)
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
	struct nvs_context_was was = nvs_context_destroyed(ctx, gpu); /* first, see DESTROY */
	int result = CALL(cuGreenCtxDestroy, green);

	if (gpu && result != CUDA_SUCCESS)
		nvs_context_kept(ctx, gpu, &was);
	unhold_context(&held);
	return result;
}
