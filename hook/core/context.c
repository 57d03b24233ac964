// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <errno.h>

#include "clock.h"
#include "futex.h"
#include "log.h"

struct nvs_context nvs_contexts[NVS_MAX_CONTEXTS];
unsigned nvs_contexts_used;

/*
 * A drain may take for ever, if its work waits for the thread that wants drain_lock: after so long
 * the thread goes on beside it, but keeps memory from moving. Memory that moves is waited for longer, and not for ever either: a
 * driver call of the mover's may wait for a lock that the thread has.
 */
#define HOLD_NS (5 * NVS_S)
#define MOVE_NS (60 * NVS_S)

bool nvs_gpu_loads(struct nvs_gpu *gpu)
{
	uint64_t since = atomic_load(&gpu->load_ns);

	return since && nvs_elapsed(nvs_now(), since) < NVS_LOAD_NS;
}

static struct nvs_context *context_find(void *ctx)
{
	for (unsigned i = 0; i < nvs_contexts_used; i++)
		if (nvs_contexts[i].ctx == ctx)
			return &nvs_contexts[i];
	return NULL;
}

struct nvs_context *nvs_context_add(void *ctx, struct nvs_gpu *gpu, void *green)
{
	struct nvs_context *c = context_find(ctx);

	if (!c)
		c = context_find(NULL);
	if (!c && nvs_contexts_used < NVS_MAX_CONTEXTS)
		c = &nvs_contexts[nvs_contexts_used++];
	if (!c)
		return NULL;
	if (c->ctx != ctx) {
		atomic_store(&c->dirty, false);
		c->own = false;
		c->attached = 0;
	}
	c->ctx = ctx;
	c->gpu = gpu;
	if (green)
		c->green = green;
	return c;
}

void *nvs_current_context(void)
{
	void *ctx = NULL;

	if (nvs_driver.ctx_get_current(&ctx) != CUDA_SUCCESS)
		return NULL;
	return ctx;
}

struct nvs_gpu *nvs_gpu_of_current(void)
{
	int dev;

	if (nvs_driver.ctx_get_device(&dev) != CUDA_SUCCESS)
		return NULL;
	return nvs_gpu_of_device(dev);
}

void nvs_context_note(void *ctx, struct nvs_gpu *gpu)
{
	nvs_lock(&nvs_table_lock);
	if (!context_find(ctx))
		nvs_context_add(ctx, gpu, NULL);
	nvs_unlock(&nvs_table_lock);
}

struct nvs_gpu *nvs_gpu_having_context(void *ctx)
{
	struct nvs_gpu *gpu = nvs_gpu_of_context(ctx);

	if (gpu)
		return gpu;
	if (atomic_load(&nvs_gate.single))
		return nvs_gpus;
	if (ctx == nvs_current_context())
		return nvs_gpu_of_current();
	if (nvs_driver.ctx_push(ctx) != CUDA_SUCCESS)
		return NULL;
	gpu = nvs_gpu_of_current();
	nvs_driver.ctx_pop(&ctx);
	return gpu;
}

void nvs_context_created(void *ctx, struct nvs_gpu *gpu, bool own)
{
	struct nvs_context *c;

	nvs_lock(&nvs_table_lock);
	c = nvs_context_add(ctx, gpu, NULL);
	if (c)
		c->own = own;
	nvs_unlock(&nvs_table_lock);
}

void nvs_context_from_green(void *ctx, void *green)
{
	struct nvs_gpu *gpu = nvs_gpu_having_context(ctx);

	if (!ctx || !gpu)
		return;
	nvs_lock(&nvs_table_lock);
	nvs_context_add(ctx, gpu, green);
	nvs_unlock(&nvs_table_lock);
}

struct nvs_context_known nvs_context_look(const void *ctx)
{
	struct nvs_context_known known = { 0 };
	struct nvs_context *c;

	if (!ctx)
		return known;
	nvs_lock(&nvs_table_lock);
	c = context_find((void *)(uintptr_t)ctx);
	if (c)
		known = (struct nvs_context_known){ c->gpu, c->green, c->attached, c->own };
	nvs_unlock(&nvs_table_lock);
	return known;
}

bool nvs_context_count(void *ctx, int by)
{
	struct nvs_context *c;
	bool counted;

	nvs_lock(&nvs_table_lock);
	c = context_find(ctx);
	counted = c && (by > 0 || c->attached);
	if (counted)
		c->attached += (unsigned)by;
	nvs_unlock(&nvs_table_lock);
	return counted;
}

void *nvs_context_any(const struct nvs_gpu *gpu)
{
	void *ctx = NULL;

	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; !ctx && i < nvs_contexts_used; i++)
		if (!gpu || nvs_contexts[i].gpu == gpu)
			ctx = nvs_contexts[i].ctx;
	nvs_unlock(&nvs_table_lock);
	return ctx;
}

void *nvs_context_of_green(void *green)
{
	void *ctx = NULL;

	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; green && i < nvs_contexts_used; i++)
		if (nvs_contexts[i].ctx && nvs_contexts[i].green == green)
			ctx = nvs_contexts[i].ctx;
	nvs_unlock(&nvs_table_lock);
	return ctx;
}

/* Nobody destroys a context either into which a module is being loaded. */
static bool hold_move(struct nvs_gpu *gpu)
{
	if (!nvs_trylock(&gpu->move_lock))
		return false;
	if (!nvs_gpu_loads(gpu))
		return true;
	nvs_unlock(&gpu->move_lock);
	return false;
}

struct nvs_context_held nvs_context_hold(struct nvs_gpu *gpu)
{
	struct nvs_context_held h = { 0 };
	int saved = errno;
	uint64_t start;

	if (!gpu)
		return h;
	h.drain = NVS_NAP_UNTIL(nvs_trylock(&gpu->drain_lock), nvs_now() + HOLD_NS, 200 * NVS_US);
	start = nvs_now();
	while (!(h.move = hold_move(gpu)) && nvs_now() - start < (atomic_load(&gpu->moving) ? MOVE_NS : HOLD_NS))
		nvs_nap(200 * NVS_US);
	if (!h.drain || !h.move)
		nvs_debugf("GPU %u: a drain, or a move of memory, does not end, going on beside it", gpu->number);
	errno = saved;
	return h;
}

void nvs_context_unhold(struct nvs_gpu *gpu, struct nvs_context_held h)
{
	if (h.move)
		nvs_unlock(&gpu->move_lock);
	if (h.drain)
		nvs_unlock(&gpu->drain_lock);
}

void nvs_contexts_mark(struct nvs_gpu *gpu)
{
	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; i < nvs_contexts_used; i++)
		if (nvs_contexts[i].gpu == gpu)
			atomic_store(&nvs_contexts[i].dirty, true);
	nvs_unlock(&nvs_table_lock);
}

void nvs_context_kept(void *ctx, struct nvs_gpu *gpu, const struct nvs_context_known *was)
{
	struct nvs_context *c;

	nvs_lock(&nvs_table_lock);
	c = nvs_context_add(ctx, gpu, was->green);
	if (c) {
		c->own = was->own;
		c->attached += was->attached; /* another thread may have attached meanwhile */
		atomic_store(&c->dirty, true);
	}
	nvs_unlock(&nvs_table_lock);
}
