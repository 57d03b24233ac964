// SPDX-License-Identifier: Apache-2.0
#include "gate.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include "client.h"
#include "glibc.h"
#include "ops.h"

struct nvs_channel nvs_channels[NVS_MAX_CHANNELS];
struct nvs_gate nvs_gate;

__thread struct nvs_thread *nvs_self __attribute__((tls_model("initial-exec")));

static _Atomic(struct nvs_thread *) threads;
static pthread_key_t thread_key;
static atomic_bool thread_key_made;

/* At the end of a thread, also one that was cancelled inside the driver. */
static void thread_end(void *arg)
{
	struct nvs_thread *t = arg;

	nvs_self = NULL;
	t->key = NULL;
	atomic_store(&t->in_flight, 0);
	atomic_store(&t->taken, false);
}

static struct nvs_thread *take_free(void)
{
	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next) {
		bool no = false;

		if (!atomic_load_explicit(&t->taken, memory_order_relaxed) &&
		    atomic_compare_exchange_strong(&t->taken, &no, true))
			return t;
	}
	return NULL;
}

/* Lists a page or so of new records; the application's allocator is not used. */
static void add_records(void)
{
	enum { COUNT = 32 };
	struct nvs_thread *t = mmap(NULL, COUNT * sizeof(*t), PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (t == MAP_FAILED)
		return;
	for (int i = 0; i < COUNT; i++) {
		t[i].next = atomic_load(&threads);
		while (!atomic_compare_exchange_weak(&threads, &t[i].next, &t[i]))
			;
	}
}

void nvs_gate_init(void)
{
	if (!atomic_load(&thread_key_made) && pthread_key_create(&thread_key, thread_end) == 0)
		atomic_store(&thread_key_made, true);
}

struct nvs_thread *nvs_thread_register(void)
{
	int saved = errno;
	struct nvs_thread *t = take_free();

	if (!t) {
		add_records();
		t = take_free();
	}
	if (t) {
		t->key = NULL;
		nvs_self = t;
		if (atomic_load(&thread_key_made))
			pthread_setspecific(thread_key, t);
	}
	errno = saved;
	return t;
}

struct nvs_thread *nvs_gate_threads(void)
{
	return atomic_load(&threads);
}

void nvs_gate_stop(void)
{
	atomic_store(&nvs_gate.active, false);
	atomic_fetch_add(&nvs_gate.generation, 1);
}

static bool gate_try(struct nvs_thread *t, unsigned channel)
{
	atomic_store_explicit(&t->in_flight, 1u << channel, memory_order_seq_cst);
	if (nvs_likely(nvs_gate_is_open(channel)))
		return true;
	atomic_store_explicit(&t->in_flight, 0, memory_order_release);
	return false;
}

/*
 * The next call on this stream takes the short way. Not with a default stream
 * where there are several GPUs: it is another in each context, and contexts
 * can be switched past us. generation is from before all that was looked at.
 */
static void remember(struct nvs_thread *t, void *key, struct nvs_stream *s, unsigned generation)
{
	t->key = NULL;
	if (key <= CU_STREAM_PER_THREAD && !atomic_load(&nvs_gate.single))
		return;
	atomic_signal_fence(memory_order_seq_cst);
	t->generation = generation;
	t->stream = s;
	t->channel = &nvs_channels[s->channel];
	t->flag = 1u << s->channel;
	t->count = &t->calls[s->channel];
	atomic_signal_fence(memory_order_seq_cst);
	t->key = key; /* last: a signal handler sees all or nothing */
}

/*
 * Nothing runs when a call is recorded, but the driver looks up the memory that
 * it names. So it waits until that is there, and keeps it there with its flag;
 * not for the GPU: a drain may wait for the end of the capture.
 */
struct nvs_thread *nvs_gate_enter_memory(unsigned channel)
{
	struct nvs_thread *t = nvs_self ? nvs_self : nvs_thread_register();

	if (!t || atomic_load(&t->in_flight) || !atomic_load(&nvs_gate.active))
		return NULL;
	for (;;) {
		atomic_store(&t->in_flight, 1u << channel);
		if (nvs_gate_is_open(channel) || nvs_memory_ops.all_there(channel))
			break;
		atomic_store(&t->in_flight, 0);
		if (nvs_gate_wait(t, channel, NVS_NEED_MEMORY) || !atomic_load(&nvs_gate.active))
			break;
	}
	return t;
}

struct nvs_thread *nvs_gate_enter_slow(void *key)
{
	unsigned generation = atomic_load(&nvs_gate.generation), channel;
	struct nvs_thread *t = nvs_self;
	struct nvs_stream *s;
	bool capturing = false;

	if (!atomic_load(&nvs_gate.active))
		return NULL;
	if (!t)
		t = nvs_thread_register();
	if (!t || atomic_load_explicit(&t->in_flight, memory_order_relaxed))
		return NULL; /* no memory; inside a gated call */
	s = t->key == key && t->generation == generation ? t->stream : nvs_stream_find(t, key);
	if (!s)
		return NULL;
	if (nvs_unlikely(atomic_load(&nvs_gate.captures))) {
		t->key = NULL;
		capturing = nvs_capturing(key);
		if (capturing && !nvs_memory_ops.moves(s->channel))
			return NULL;
	} else {
		remember(t, key, s, generation);
	}
	channel = s->channel;
	if (capturing)
		return nvs_gate_enter_memory(channel);
	if (nvs_throttled(atomic_load_explicit(&nvs_channels[channel].slot, memory_order_acquire)))
		nvs_depth_step(s, key);
	while (nvs_unlikely(!gate_try(t, channel))) {
		if (nvs_gate_wait(t, channel, NVS_NEED_GPU))
			break;
		if (!atomic_load(&nvs_gate.active))
			return NULL; /* the process ends */
	}
	if (!atomic_load_explicit(&s->dirty, memory_order_relaxed))
		nvs_stream_mark(s);
	nvs_gate_count(&t->calls[channel]);
	return t;
}

bool nvs_gate_busy(unsigned channel)
{
	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next)
		if (atomic_load_explicit(&t->in_flight, memory_order_seq_cst) & (1u << channel))
			return true;
	return false;
}

/*
 * All flags go up together or not at all: a thread never waits at one gate
 * while it holds another.
 */
struct nvs_thread *nvs_gate_enter_all(void *const *keys, unsigned count, size_t stride)
{
	struct nvs_thread *t = nvs_self;
	unsigned mask = 0, passed = 0; /* channels that nvs_gate_wait let us pass */

	if (!atomic_load(&nvs_gate.active))
		return NULL;
	if (!t)
		t = nvs_thread_register();
	if (!t || atomic_load(&t->in_flight))
		return NULL;
	for (unsigned i = 0; i < count; i++) {
		void *key = *(void *const *)((const char *)keys + i * stride);
		struct nvs_stream *s = nvs_stream_find(t, NVS_KEY_LEGACY(key));

		if (s)
			mask |= 1u << s->channel;
	}
	for (;;) {
		unsigned closed = NVS_MAX_CHANNELS;

		atomic_store(&t->in_flight, mask);
		for (unsigned i = 0; i < NVS_MAX_CHANNELS && closed == NVS_MAX_CHANNELS; i++)
			if ((mask & ~passed & (1u << i)) && !nvs_gate_is_open(i))
				closed = i;
		if (closed == NVS_MAX_CHANNELS)
			break;
		atomic_store(&t->in_flight, 0);
		passed = nvs_gate_wait(t, closed, NVS_NEED_GPU) ? 1u << closed : 0;
		if (!passed && !atomic_load(&nvs_gate.active))
			return NULL;
	}
	for (unsigned i = 0; i < count; i++) {
		void *key = *(void *const *)((const char *)keys + i * stride);
		struct nvs_stream *s = nvs_stream_find(t, NVS_KEY_LEGACY(key));

		if (s)
			nvs_stream_mark(s);
	}
	for (unsigned i = 0; i < NVS_MAX_CHANNELS; i++)
		if (mask & (1u << i))
			atomic_fetch_add(&t->calls[i], 1);
	return t;
}

/*
 * The channel's epoch is NVS_WORD_NONE already. A call in flight may take as
 * long as the driver lets it; there is no time limit here, the scheduler has
 * one.
 */
void nvs_gate_quiesce(unsigned channel)
{
	static const struct timespec nap = { 0, 20000 };

	for (int spins = 0; nvs_gate_busy(channel); spins++) {
		if (spins < 100)
			sched_yield();
		else
			nanosleep(&nap, NULL);
	}
}

uint64_t nvs_gate_calls(unsigned channel)
{
	uint64_t sum = 0;

	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next)
		sum += atomic_load_explicit(&t->calls[channel], memory_order_relaxed);
	return sum;
}

void nvs_gate_fork_child(void)
{
	nvs_gate_stop();
	atomic_store(&nvs_gate.captures, 0);
	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next) {
		atomic_store(&t->in_flight, 0);
		t->key = NULL;
		t->waits_at = 0;
		for (int i = 0; i < NVS_MAX_CHANNELS; i++)
			atomic_store(&t->calls[i], 0);
		atomic_store(&t->taken, t == nvs_self);
	}
}
