// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "client.h"
#include "gate.h"
#include "glibc.h"
#include "log.h"

struct nvs_context {
	_Atomic(void *) ctx; /* NULL: the record is free */
	void *green;
	unsigned channel;
	atomic_bool dirty; /* work since the last drain */
};

#define MAX_CONTEXTS 256
#define MAX_STREAMS  4096 /* further ones share the record of their channel */
#define BUCKETS      1024

/* table_lock guards the tables; drain_lock[i] is held while contexts of a
 * channel are synchronised or destroyed. Taken in that order: drain, table. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t drain_lock[NVS_MAX_CHANNELS];
static struct nvs_context contexts[MAX_CONTEXTS];
static unsigned contexts_used;
static struct nvs_stream streams[MAX_STREAMS];
static unsigned streams_used;
static _Atomic(struct nvs_stream *) buckets[BUCKETS];
static struct nvs_stream overflow[NVS_MAX_CHANNELS];
static int captures_on[NVS_MAX_CHANNELS]; /* under drain_lock */

static atomic_bool stopped;
static atomic_int in_driver;

static bool driver_enter(void)
{
	atomic_fetch_add(&in_driver, 1);
	if (!atomic_load(&stopped))
		return true;
	atomic_fetch_sub(&in_driver, 1);
	return false;
}

static void driver_leave(void)
{
	atomic_fetch_sub(&in_driver, 1);
}

void nvs_driver_stop(void)
{
	static const struct timespec nap = { 0, 1000000 };

	atomic_store(&stopped, true);
	for (int i = 0; i < 1000 && atomic_load(&in_driver); i++)
		nanosleep(&nap, NULL);
}

/* ---- contexts ---- */

static struct nvs_context *context_find(void *ctx)
{
	for (unsigned i = 0; i < contexts_used; i++)
		if (contexts[i].ctx == ctx)
			return &contexts[i];
	return NULL;
}

/* table_lock is held. NULL if the table is full. */
static struct nvs_context *context_add(void *ctx, unsigned channel, void *green)
{
	struct nvs_context *c = context_find(ctx);

	if (!c)
		c = context_find(NULL);
	if (!c && contexts_used < MAX_CONTEXTS)
		c = &contexts[contexts_used++];
	if (!c)
		return NULL;
	if (c->ctx != ctx)
		atomic_store(&c->dirty, false);
	c->ctx = ctx;
	c->channel = channel;
	if (green)
		c->green = green;
	return c;
}

static void *current_context(void)
{
	void *ctx = NULL;

	if (!nvs_driver.ctx_get_current || nvs_driver.ctx_get_current(&ctx) != CUDA_SUCCESS)
		return NULL;
	return ctx;
}

int nvs_channel_of_current(void)
{
	int dev;

	if (!nvs_driver.ctx_get_device || nvs_driver.ctx_get_device(&dev) != CUDA_SUCCESS)
		return -1;
	return nvs_client_channel(dev);
}

/* Not under table_lock: asks the driver. */
static int channel_of_context(void *ctx)
{
	int channel = nvs_context_channel(ctx);

	if (channel >= 0)
		return channel;
	if (atomic_load(&nvs_gate.single))
		return 0;
	if (ctx == current_context())
		return nvs_channel_of_current();
	if (!nvs_driver.ctx_push || !nvs_driver.ctx_pop ||
	    nvs_driver.ctx_push(ctx) != CUDA_SUCCESS)
		return -1;
	channel = nvs_channel_of_current();
	nvs_driver.ctx_pop(&ctx);
	return channel;
}

void nvs_context_created(void *ctx, int dev, void *green)
{
	int channel = nvs_client_channel(dev);

	if (!ctx || channel < 0)
		return;
	pthread_mutex_lock(&table_lock);
	context_add(ctx, (unsigned)channel, green);
	pthread_mutex_unlock(&table_lock);
	nvs_client_use((unsigned)channel);
}

void nvs_context_from_green(void *ctx, void *green)
{
	int channel = channel_of_context(ctx);

	if (!ctx || channel < 0)
		return;
	pthread_mutex_lock(&table_lock);
	context_add(ctx, (unsigned)channel, green);
	pthread_mutex_unlock(&table_lock);
}

int nvs_context_channel(void *ctx)
{
	struct nvs_context *c;
	int channel = -1;

	if (!ctx)
		return -1;
	pthread_mutex_lock(&table_lock);
	c = context_find(ctx);
	if (c)
		channel = (int)c->channel;
	pthread_mutex_unlock(&table_lock);
	return channel;
}

void *nvs_context_of_green(void *green)
{
	void *ctx = NULL;

	pthread_mutex_lock(&table_lock);
	for (unsigned i = 0; green && i < contexts_used; i++)
		if (contexts[i].ctx && contexts[i].green == green)
			ctx = contexts[i].ctx;
	pthread_mutex_unlock(&table_lock);
	return ctx;
}

void nvs_context_hold(int channel)
{
	if (channel >= 0)
		pthread_mutex_lock(&drain_lock[channel]);
}

void nvs_context_unhold(int channel)
{
	if (channel >= 0)
		pthread_mutex_unlock(&drain_lock[channel]);
}

/* ---- streams ---- */

static _Atomic(struct nvs_stream *) *bucket_of(void *key)
{
	return &buckets[(((uintptr_t)key * 0x9e3779b97f4a7c15ull) >> 40) % BUCKETS];
}

static bool is_default(void *key)
{
	return key <= CU_STREAM_PER_THREAD;
}

/* A bucket only ever grows, so that it can be read without the lock. */
static struct nvs_stream *stream_lookup(void *key, struct nvs_thread *owner, void *ctx)
{
	struct nvs_stream *s = atomic_load_explicit(bucket_of(key), memory_order_acquire);

	for (; s; s = s->next) {
		struct nvs_context *c;

		if (atomic_load_explicit(&s->key, memory_order_acquire) != key)
			continue;
		if (!is_default(key))
			return s;
		c = atomic_load(&s->context);
		if (c && c->ctx == ctx && (key == CU_STREAM_LEGACY || s->owner == owner))
			return s;
	}
	return NULL;
}

static struct nvs_stream *stream_add(void *key, struct nvs_thread *owner, void *ctx, unsigned channel)
{
	_Atomic(struct nvs_stream *) *bucket = bucket_of(key);
	struct nvs_stream *s, *fresh = NULL;

	if (key != CU_STREAM_PER_THREAD)
		owner = NULL;
	pthread_mutex_lock(&table_lock);
	s = stream_lookup(key, owner, ctx);
	if (s)
		goto out;
	for (s = atomic_load(bucket); s && s->key; s = s->next)
		;
	if (!s && streams_used < MAX_STREAMS)
		s = fresh = &streams[streams_used++];
	if (!s) {
		s = &overflow[channel];
		s->channel = channel;
		goto out;
	}
	s->owner = owner;
	s->context = ctx ? context_add(ctx, channel, NULL) : NULL;
	s->channel = channel;
	s->capturing = false;
	atomic_store(&s->dirty, false);
	memset(&s->depth, 0, sizeof(s->depth));
	atomic_store_explicit(&s->key, key, memory_order_release);
	if (fresh) {
		s->next = atomic_load(bucket);
		atomic_store_explicit(bucket, s, memory_order_release);
	}
out:
	pthread_mutex_unlock(&table_lock);
	return s;
}

struct nvs_stream *nvs_stream_find(struct nvs_thread *t, void *key)
{
	unsigned generation = atomic_load_explicit(&nvs_gate.generation, memory_order_acquire);
	struct nvs_stream *s = NULL;
	void *ctx = NULL;
	int channel;

	if (is_default(key)) {
		ctx = current_context();
		if (ctx)
			s = stream_lookup(key, t, ctx);
	} else {
		s = stream_lookup(key, t, NULL);
		if (!s && (!nvs_driver.stream_get_ctx ||
			   nvs_driver.stream_get_ctx(key, &ctx) != CUDA_SUCCESS))
			ctx = current_context();
	}
	if (!s) {
		int dev;

		if (atomic_load(&nvs_gate.single))
			channel = 0;
		else if (!is_default(key) && nvs_driver.stream_get_device &&
			 nvs_driver.stream_get_device(key, &dev) == CUDA_SUCCESS)
			channel = nvs_client_channel(dev);
		else
			channel = ctx ? channel_of_context(ctx) : -1;
		if (channel < 0)
			return NULL;
		s = stream_add(key, t, ctx, (unsigned)channel);
	}
	t->key = key;
	t->stream = s;
	t->generation = generation;
	return s;
}

bool nvs_stream_in_context(struct nvs_stream *s, void *ctx)
{
	struct nvs_context *c = atomic_load(&s->context);

	return ctx && c && c->ctx == ctx;
}

void nvs_stream_mark(struct nvs_stream *s)
{
	struct nvs_context *c = atomic_load(&s->context);

	if (c) {
		atomic_store(&c->dirty, true);
	} else {
		pthread_mutex_lock(&table_lock);
		for (unsigned i = 0; i < contexts_used; i++)
			if (contexts[i].channel == s->channel)
				atomic_store(&contexts[i].dirty, true);
		pthread_mutex_unlock(&table_lock);
	}
	atomic_store(&s->dirty, true);
}

void nvs_stream_created(void *handle)
{
	int channel = nvs_channel_of_current();
	void *ctx = NULL;

	if (!handle || channel < 0)
		return;
	if (!nvs_driver.stream_get_ctx || nvs_driver.stream_get_ctx(handle, &ctx) != CUDA_SUCCESS)
		ctx = current_context();
	nvs_stream_destroyed(handle); /* a handle that went unseen with its context */
	stream_add(handle, NULL, ctx, (unsigned)channel);
}

/* table_lock is held; the capture is counted off by the caller. */
static void stream_forget(struct nvs_stream *s)
{
	s->key = NULL;
	memset(&s->depth, 0, sizeof(s->depth));
	s->context = NULL;
	atomic_fetch_add(&nvs_gate.generation, 1);
}

static void capture_off(struct nvs_stream *s)
{
	pthread_mutex_lock(&drain_lock[s->channel]);
	if (s->capturing) {
		s->capturing = false;
		captures_on[s->channel]--;
		atomic_fetch_sub(&nvs_gate.captures, 1);
	}
	pthread_mutex_unlock(&drain_lock[s->channel]);
}

void nvs_stream_destroyed(void *handle)
{
	struct nvs_stream *s = is_default(handle) ? NULL : stream_lookup(handle, NULL, NULL);
	void *event[2];

	if (!s)
		return;
	if (s->capturing)
		capture_off(s);
	pthread_mutex_lock(&table_lock);
	memcpy(event, s->depth.event, sizeof(event));
	stream_forget(s);
	pthread_mutex_unlock(&table_lock);
	for (int i = 0; i < 2; i++)
		if (event[i])
			nvs_driver.event_destroy(event[i]);
}

/* The channel is held. */
void nvs_context_destroyed(void *ctx, int channel)
{
	pthread_mutex_lock(&table_lock);
	for (unsigned i = 0; i < streams_used; i++) {
		struct nvs_stream *s = &streams[i];

		if (!s->key || !s->context || (int)s->channel != channel ||
		    (ctx && s->context->ctx != ctx))
			continue;
		if (s->capturing) {
			s->capturing = false;
			captures_on[channel]--;
			atomic_fetch_sub(&nvs_gate.captures, 1);
		}
		stream_forget(s);
	}
	for (unsigned i = 0; i < contexts_used; i++)
		if (contexts[i].ctx && (int)contexts[i].channel == channel &&
		    (!ctx || contexts[i].ctx == ctx)) {
			contexts[i].ctx = NULL;
			contexts[i].green = NULL;
		}
	pthread_mutex_unlock(&table_lock);
}

/* ---- captures ---- */

static struct nvs_stream *stream_of_capture(void *key)
{
	struct nvs_thread *t = nvs_self ? nvs_self : nvs_thread_register();

	return t ? nvs_stream_find(t, key) : NULL;
}

bool nvs_capture_begin(void *key)
{
	struct nvs_stream *s = stream_of_capture(key);

	if (!s)
		return false;
	pthread_mutex_lock(&drain_lock[s->channel]);
	captures_on[s->channel]++;
	atomic_fetch_add(&nvs_gate.captures, 1);
	pthread_mutex_unlock(&drain_lock[s->channel]);
	return true;
}

void nvs_capture_began(void *key, int result)
{
	struct nvs_stream *s = stream_of_capture(key);

	if (!s)
		return;
	pthread_mutex_lock(&drain_lock[s->channel]);
	if (result == CUDA_SUCCESS && !s->capturing) {
		s->capturing = true;
	} else {
		captures_on[s->channel]--;
		atomic_fetch_sub(&nvs_gate.captures, 1);
	}
	pthread_mutex_unlock(&drain_lock[s->channel]);
}

void nvs_capture_ended(void *key)
{
	struct nvs_stream *s = stream_of_capture(key);

	if (s && s->capturing && !nvs_capturing(key))
		capture_off(s);
}

bool nvs_capturing(void *key)
{
	int status = 0;

	return nvs_driver.stream_capturing &&
	       nvs_driver.stream_capturing(key, &status) == CUDA_SUCCESS && status != 0;
}

/* ---- drain ---- */

/* drain_lock of the channel is held, no capture is open there. */
static void synchronise_contexts(unsigned channel)
{
	for (unsigned i = 0; i < MAX_CONTEXTS; i++) {
		struct nvs_context *c = &contexts[i];
		void *ctx = NULL, *popped;

		pthread_mutex_lock(&table_lock);
		if (i < contexts_used && c->channel == channel && atomic_load(&c->dirty))
			ctx = c->ctx;
		pthread_mutex_unlock(&table_lock);
		if (!ctx)
			continue;
		if (nvs_driver.ctx_push(ctx) == CUDA_SUCCESS) {
			/* An error is the application's; its work is over all the same. */
			int result = nvs_driver.ctx_synchronize();

			if (result != CUDA_SUCCESS)
				nvs_debugf("drain of GPU %u: context %p: error %d", channel, ctx,
					   result);
			nvs_driver.ctx_pop(&popped);
		}
		atomic_store(&c->dirty, false);
	}
}

static void forget_work(unsigned channel)
{
	pthread_mutex_lock(&table_lock);
	for (unsigned i = 0; i < streams_used; i++)
		if (streams[i].channel == channel)
			atomic_store(&streams[i].dirty, false);
	atomic_store(&overflow[channel].dirty, false);
	pthread_mutex_unlock(&table_lock);
	/* A context switch that went past us is noticed at the next grant. */
	atomic_fetch_add(&nvs_gate.generation, 1);
}

/* While a capture is open: whether every stream with work is seen to be idle. */
static bool streams_done(unsigned channel)
{
	bool done = true;

	pthread_mutex_lock(&table_lock);
	if (atomic_load(&overflow[channel].dirty))
		done = false;
	for (unsigned i = 0; done && i < streams_used; i++) {
		struct nvs_stream *s = &streams[i];

		if (!s->key || s->channel != channel || !atomic_load(&s->dirty))
			continue;
		/* Asking about a default or capturing stream would break the capture. */
		if (is_default(s->key) || s->capturing || nvs_capturing(s->key))
			done = false;
		else if (nvs_driver.stream_query(s->key) == CUDA_ERROR_NOT_READY)
			done = false;
	}
	pthread_mutex_unlock(&table_lock);
	return done;
}

enum nvs_drained nvs_drain(unsigned channel, uint64_t patience_ns)
{
	static const struct timespec nap = { 0, 200000 };
	uint64_t deadline = nvs_now() + patience_ns;

	if (!nvs_driver.ctx_push || !nvs_driver.ctx_pop || !nvs_driver.ctx_synchronize)
		return NVS_DRAIN_UNPROVEN;
	for (;;) {
		bool done = false;

		if (!driver_enter())
			return NVS_DRAIN_STOPPED;
		pthread_mutex_lock(&drain_lock[channel]);
		if (!captures_on[channel]) {
			synchronise_contexts(channel);
			done = true;
		}
		pthread_mutex_unlock(&drain_lock[channel]);
		if (!done)
			done = streams_done(channel);
		driver_leave();
		if (done) {
			forget_work(channel);
			return NVS_DRAINED;
		}
		if (nvs_now() >= deadline)
			return NVS_DRAIN_UNPROVEN;
		nanosleep(&nap, NULL);
	}
}

static bool stream_idle(struct nvs_stream *s)
{
	struct nvs_context *c = s->context;
	void *popped;
	bool idle;

	/* Another thread's default stream can't be asked about; the drain will. */
	if (s->key == CU_STREAM_PER_THREAD || !c || !c->ctx)
		return true;
	if (nvs_driver.ctx_push(c->ctx) != CUDA_SUCCESS)
		return true;
	idle = nvs_driver.stream_query(s->key) != CUDA_ERROR_NOT_READY;
	nvs_driver.ctx_pop(&popped);
	return idle;
}

bool nvs_streams_idle(unsigned channel)
{
	bool idle = true;

	if (!nvs_driver.stream_query || !nvs_driver.ctx_push || !nvs_driver.ctx_pop)
		return false;
	if (pthread_mutex_trylock(&drain_lock[channel]) != 0)
		return false;
	if (captures_on[channel] || !driver_enter()) {
		pthread_mutex_unlock(&drain_lock[channel]);
		return false;
	}
	pthread_mutex_lock(&table_lock);
	for (unsigned i = 0; idle && i < streams_used; i++)
		if (streams[i].key && streams[i].channel == channel &&
		    atomic_load(&streams[i].dirty))
			idle = stream_idle(&streams[i]);
	pthread_mutex_unlock(&table_lock);
	driver_leave();
	pthread_mutex_unlock(&drain_lock[channel]);
	return idle;
}

void nvs_stream_fork_child(void)
{
	static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

	table_lock = fresh;
	for (unsigned i = 0; i < NVS_MAX_CHANNELS; i++) {
		drain_lock[i] = fresh;
		captures_on[i] = 0;
		atomic_store(&overflow[i].dirty, false);
	}
	for (unsigned i = 0; i < streams_used; i++)
		stream_forget(&streams[i]);
	for (unsigned i = 0; i < contexts_used; i++)
		contexts[i].ctx = NULL;
	atomic_store(&in_driver, 0);
	atomic_store(&stopped, false);
}
