// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <string.h>

#include "clock.h"
#include "futex.h"

#define BUCKETS 1024

struct nvs_lock nvs_table_lock = NVS_LOCK(NVS_RANK_TABLE);
struct nvs_stream nvs_streams[NVS_MAX_STREAMS];
unsigned nvs_streams_used;

static _Atomic(struct nvs_stream *) buckets[BUCKETS];

/* A capture waits so long for a drain of its context. The driver looks for captures when that begins. */
#define CAPTURE_WAIT_NS (100 * NVS_MS)

/* owner: of a per-thread default stream, else not looked at. */
static _Atomic(struct nvs_stream *) *stream_bucket_of(void *key, struct nvs_thread *owner)
{
	uintptr_t of = key == CU_STREAM_PER_THREAD ? (uintptr_t)owner : (uintptr_t)key;

	return &buckets[((of * 0x9e3779b97f4a7c15ull) >> 40) % BUCKETS];
}

/* A bucket only ever grows, so that it can be read without the lock. */
static struct nvs_stream *stream_lookup(void *key, struct nvs_thread *owner, void *ctx)
{
	struct nvs_stream *s = atomic_load_explicit(stream_bucket_of(key, owner), memory_order_acquire);

	for (; s; s = s->next) {
		struct nvs_context *c;

		if (atomic_load_explicit(&s->key, memory_order_acquire) != key)
			continue;
		if (!nvs_key_is_default(key))
			return s;
		c = atomic_load(&s->context);
		if (c && c->ctx == ctx && (key == CU_STREAM_LEGACY || s->owner == owner))
			return s;
	}
	return NULL;
}

static struct nvs_stream *stream_add(void *key, struct nvs_thread *owner, void *ctx, struct nvs_gpu *gpu)
{
	_Atomic(struct nvs_stream *) *bucket = stream_bucket_of(key, owner);
	struct nvs_stream *s, *fresh = NULL;

	if (key != CU_STREAM_PER_THREAD)
		owner = NULL;
	nvs_lock(&nvs_table_lock);
	s = stream_lookup(key, owner, ctx);
	if (s)
		goto out;
	for (s = atomic_load(bucket); s && s->key; s = s->next)
		;
	if (!s && nvs_streams_used < NVS_MAX_STREAMS)
		s = fresh = &nvs_streams[nvs_streams_used++];
	if (!s) {
		s = &gpu->overflow;
		s->gpu = gpu;
		goto out;
	}
	s->owner = owner;
	s->context = ctx ? nvs_context_add(ctx, gpu, NULL) : NULL;
	s->gpu = gpu;
	s->capturing = false;
	atomic_store(&s->dirty, false);
	memset(&s->throttle, 0, sizeof(s->throttle));
	atomic_store_explicit(&s->key, key, memory_order_release);
	if (fresh) {
		s->next = atomic_load(bucket);
		atomic_store_explicit(bucket, s, memory_order_release);
	}
out:
	nvs_unlock(&nvs_table_lock);
	return s;
}

struct nvs_stream *nvs_stream_find(struct nvs_thread *t, void *key)
{
	struct nvs_stream *s = NULL;
	void *ctx = NULL, *guess = NULL; /* where the driver does not tell the stream's context */
	struct nvs_gpu *gpu;

	if (nvs_key_is_default(key)) {
		ctx = nvs_current_context();
		if (ctx)
			s = stream_lookup(key, t, ctx);
	} else {
		s = stream_lookup(key, t, NULL);
		if (!s && nvs_driver.stream_get_ctx(key, &ctx) != CUDA_SUCCESS) {
			ctx = NULL;
			guess = nvs_current_context();
		}
	}
	if (!s) {
		int dev;

		if (atomic_load(&nvs_gate.single))
			gpu = nvs_gpus;
		else if (!nvs_key_is_default(key) &&
			 nvs_driver.stream_get_device(key, &dev) == CUDA_SUCCESS)
			gpu = nvs_gpu_of_device(dev);
		else
			gpu = ctx || guess ? nvs_gpu_having_context(ctx ? ctx : guess) : NULL;
		if (!gpu)
			return NULL;
		if (guess)
			nvs_context_note(guess, gpu);
		s = stream_add(key, t, ctx, gpu);
	}
	return s;
}

struct nvs_stream *nvs_stream_here(void *key)
{
	struct nvs_thread *t = nvs_thread_here();

	return t ? nvs_stream_find(t, key) : NULL;
}

bool nvs_stream_in_context(struct nvs_stream *s, void *ctx)
{
	struct nvs_context *c = atomic_load(&s->context);

	return ctx && c && c->ctx == ctx;
}

void nvs_stream_mark(struct nvs_stream *s)
{
	struct nvs_context *c = atomic_load(&s->context);

	if (c)
		atomic_store(&c->dirty, true);
	else
		nvs_contexts_mark(s->gpu);
	atomic_store(&s->dirty, true);
}

/* table_lock is held; the capture is counted off by the caller. */
static void stream_forget(struct nvs_stream *s)
{
	s->key = NULL;
	memset(&s->throttle, 0, sizeof(s->throttle));
	s->context = NULL;
	atomic_fetch_add(&nvs_gate.generation, 1);
}

static void capture_uncount(struct nvs_gpu *gpu)
{
	atomic_fetch_sub(&gpu->captures, 1);
	atomic_fetch_sub(&nvs_gate.captures, 1);
}

static void capture_off(struct nvs_stream *s)
{
	if (atomic_exchange(&s->capturing, false))
		capture_uncount(s->gpu);
}

static void events_end(void *const event[NVS_THROTTLE_EVENTS])
{
	for (int i = 0; i < NVS_THROTTLE_EVENTS; i++)
		if (event[i])
			nvs_driver.event_destroy(event[i]);
}

struct nvs_stream_was nvs_stream_going(void *handle)
{
	struct nvs_stream *s = nvs_key_is_default(handle) ? NULL : stream_lookup(handle, NULL, NULL);
	struct nvs_stream_was was = { 0 };
	struct nvs_context *c;
	struct nvs_gpu *gpu;
	void *event[NVS_THROTTLE_EVENTS];

	if (!s)
		return was;
	gpu = s->gpu;
	nvs_lock(&gpu->query_lock); /* a thread that asks about the stream has its answer, and none asks later */
	/* Its work may run on; only a drain of the context tells. */
	if (atomic_load(&s->dirty))
		atomic_store(&gpu->overflow.dirty, true);
	nvs_lock(&nvs_table_lock);
	c = s->context;
	was = (struct nvs_stream_was){ s->gpu, c ? c->ctx : NULL, atomic_exchange(&s->capturing, false) };
	memcpy(event, s->throttle.event, sizeof(s->throttle.event));
	stream_forget(s);
	nvs_unlock(&nvs_table_lock);
	nvs_unlock(&gpu->query_lock);
	events_end(event);
	return was;
}

void nvs_stream_destroyed(const struct nvs_stream_was *was)
{
	if (was->capturing)
		capture_uncount(was->gpu);
}

void nvs_stream_kept(void *handle, const struct nvs_stream_was *was)
{
	struct nvs_stream *s;

	if (!was->gpu)
		return;
	s = stream_add(handle, NULL, was->ctx, was->gpu);
	/* Where there was no room, the record is shared, and nobody would hear of the end. */
	if (was->capturing && (s->key != handle || atomic_exchange(&s->capturing, true)))
		capture_uncount(was->gpu);
}

/* The driver has given out the handle again: the stream went unseen with its context. */
static void forget_unseen(void *handle)
{
	struct nvs_stream_was was = nvs_stream_going(handle);

	nvs_stream_destroyed(&was);
}

void nvs_stream_created(void *handle)
{
	struct nvs_gpu *gpu = nvs_gpu_of_current();
	void *ctx = NULL;

	if (!handle || !gpu)
		return;
	if (nvs_driver.stream_get_ctx(handle, &ctx) != CUDA_SUCCESS)
		ctx = nvs_current_context();
	forget_unseen(handle);
	stream_add(handle, NULL, ctx, gpu);
}

void nvs_stream_created_in(void *handle, void *ctx)
{
	struct nvs_gpu *gpu = nvs_gpu_of_context(ctx);

	if (!handle || !gpu)
		return;
	forget_unseen(handle);
	stream_add(handle, NULL, ctx, gpu);
}

/* Takes the throttle's events from a stream of a green context. False: none has any. */
static bool take_events(void *green_ctx, void *event[NVS_THROTTLE_EVENTS])
{
	bool found = false;

	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; !found && i < nvs_streams_used; i++) {
		struct nvs_stream *s = &nvs_streams[i];
		struct nvs_context *c = s->context;

		if (!s->key || !c || c->ctx != green_ctx || !c->green)
			continue;
		for (int j = 0; j < NVS_THROTTLE_EVENTS; j++)
			found = found || s->throttle.event[j];
		if (!found)
			continue;
		memcpy(event, s->throttle.event, sizeof(s->throttle.event));
		memset(s->throttle.event, 0, sizeof(s->throttle.event));
	}
	nvs_unlock(&nvs_table_lock);
	return found;
}

struct nvs_context_known nvs_context_destroyed(void *ctx, struct nvs_gpu *gpu)
{
	struct nvs_context_known was = { 0 };
	void *event[NVS_THROTTLE_EVENTS];

	if (!gpu)
		return was;
	/* The driver destroys events with their context, which for a green one is the primary. */
	while (ctx && take_events(ctx, event))
		events_end(event);
	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; i < nvs_streams_used; i++) {
		struct nvs_stream *s = &nvs_streams[i];

		struct nvs_context *c = s->context;

		if (!s->key || !c || s->gpu != gpu ||
		    (ctx ? c->ctx != ctx : c->own))
			continue;
		capture_off(s);
		stream_forget(s);
	}
	for (unsigned i = 0; i < nvs_contexts_used; i++)
		if (nvs_contexts[i].ctx && nvs_contexts[i].gpu == gpu &&
		    (ctx ? nvs_contexts[i].ctx == ctx : !nvs_contexts[i].own)) {
			was = (struct nvs_context_known){ gpu, nvs_contexts[i].green, nvs_contexts[i].attached,
							  nvs_contexts[i].own };
			nvs_contexts[i].ctx = NULL;
			nvs_contexts[i].green = NULL;
		}
	nvs_unlock(&nvs_table_lock);
	return was;
}

/* ---- captures ---- */

/* Threads that ask the driver about a stream have their answers; later questions see what is known now. */
static void await_question(struct nvs_gpu *gpu)
{
	nvs_lock(&gpu->query_lock);
	nvs_unlock(&gpu->query_lock);
}

/* A context that was turned green is part of the primary one, and is synchronised with it. */
static void await_synchronised(struct nvs_stream *s)
{
	struct nvs_context *c = s->context;
	void *ctx;

	NVS_NAP_UNTIL(!(ctx = atomic_load(&s->gpu->synchronised)) || (c && !c->green && c->ctx != ctx),
		      nvs_now() + CAPTURE_WAIT_NS, 100 * NVS_US);
}

bool nvs_capture_begin(void *key)
{
	struct nvs_stream *s = nvs_stream_here(key);

	if (!s || atomic_exchange(&s->capturing, true))
		return false;
	atomic_fetch_add(&s->gpu->captures, 1);
	atomic_fetch_add(&nvs_gate.captures, 1);
	atomic_fetch_add(&nvs_gate.generation, 1); /* every call looks whether it is captured */
	await_question(s->gpu);
	await_synchronised(s);
	return true;
}

void nvs_capture_began(void *key, int result)
{
	struct nvs_stream *s = nvs_stream_here(key);

	if (s && result != CUDA_SUCCESS)
		capture_off(s);
}

void nvs_capture_ended(void *key)
{
	struct nvs_stream *s = nvs_stream_here(key);

	if (s && s->capturing && !nvs_capturing(key))
		capture_off(s);
}

bool nvs_capturing(void *key)
{
	int status = 0;

	return nvs_driver.stream_capturing(key, &status) == CUDA_SUCCESS && status != 0;
}

void nvs_stream_thread_ended(struct nvs_thread *t)
{
	struct nvs_stream *s;

	nvs_lock(&nvs_table_lock);
	for (s = atomic_load(stream_bucket_of(CU_STREAM_PER_THREAD, t)); s; s = s->next)
		if (s->key == CU_STREAM_PER_THREAD && s->owner == t)
			capture_off(s);
	nvs_unlock(&nvs_table_lock);
}

void nvs_stream_fork_child(void)
{
	nvs_table_lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_TABLE);
	for (unsigned i = 0; i < nvs_streams_used; i++)
		stream_forget(&nvs_streams[i]);
	for (unsigned i = 0; i < nvs_contexts_used; i++)
		nvs_contexts[i].ctx = NULL;
}
