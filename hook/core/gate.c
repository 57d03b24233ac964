// SPDX-License-Identifier: Apache-2.0
#include "gate.h"

#include <string.h>

#include "ops.h"
#include "stream.h"
#include "throttle.h"
#include "wait.h"

/* This thread, which is to pass a gate. NULL: no gate is to be passed; inside a gated call; no memory. */
static struct nvs_thread *passing_thread(void)
{
	struct nvs_thread *t = atomic_load(&nvs_gate.active) ? nvs_thread_here() : NULL;

	return t && !atomic_load_explicit(&t->in_flight, memory_order_relaxed) ? t : NULL;
}

static bool gate_try(struct nvs_thread *t, struct nvs_gpu *gpu)
{
	atomic_store_explicit(&t->in_flight, gpu->bit, memory_order_seq_cst);
	if (nvs_likely(nvs_gate_is_open(gpu)))
		return true;
	atomic_store_explicit(&t->in_flight, 0, memory_order_release);
	return false;
}

/*
 * The next call on this stream takes the short way. Not on a default stream where there are several
 * GPUs: each context has one, and may be switched past us. generation: from before all was looked
 * at.
 */
static void remember(struct nvs_thread *t, void *key, struct nvs_stream *s, unsigned generation)
{
	t->key = NULL;
	if (key <= CU_STREAM_PER_THREAD && !atomic_load(&nvs_gate.single))
		return;
	atomic_signal_fence(memory_order_seq_cst);
	t->generation = generation;
	t->stream = s;
	t->gpu = s->gpu;
	t->flag = s->gpu->bit;
	t->count = &t->calls[s->gpu->number];
	atomic_signal_fence(memory_order_seq_cst);
	t->key = key; /* last: a signal handler sees all or nothing */
}

/*
 * Nothing runs when a call is recorded, but the driver looks up its memory: the call waits until
 * that is there, and keeps it there with its flag. It does not wait for the GPU: a drain may wait
 * for the end of the capture.
 */
struct nvs_thread *nvs_gate_enter_memory(struct nvs_gpu *gpu)
{
	struct nvs_thread *t = passing_thread();

	while (t) {
		atomic_store(&t->in_flight, gpu->bit);
		if (nvs_gate_is_open(gpu) || nvs_memory_ops.all_there(gpu))
			break;
		atomic_store(&t->in_flight, 0);
		if (nvs_gate_wait(t, gpu, NVS_NEED_MEMORY, 0) || !atomic_load(&nvs_gate.active))
			break;
	}
	return t;
}

struct nvs_thread *nvs_gate_enter_slow(void *key)
{
	unsigned generation = atomic_load(&nvs_gate.generation);
	struct nvs_thread *t = passing_thread();
	struct nvs_stream *s;
	struct nvs_gpu *gpu;
	bool capturing = false;

	if (!t)
		return NULL;
	s = t->key == key && t->generation == generation ? t->stream : nvs_stream_find(t, key);
	if (!s)
		return NULL;
	if (nvs_unlikely(atomic_load(&nvs_gate.captures))) {
		t->key = NULL;
		capturing = nvs_capturing(key);
		if (capturing && !nvs_memory_ops.moves(s->gpu))
			return NULL;
	} else {
		remember(t, key, s, generation);
	}
	gpu = s->gpu;
	if (capturing)
		return nvs_gate_enter_memory(gpu);
	for (;;) {
		/* After each wait: a thousand threads may have waited at the gate for one stream. */
		if (nvs_throttled(gpu, atomic_load_explicit(&gpu->slot, memory_order_acquire)))
			nvs_throttle_step(s, key);
		if (nvs_likely(gate_try(t, gpu)) || nvs_gate_wait(t, gpu, NVS_NEED_GPU, 0))
			break;
		if (!atomic_load(&nvs_gate.active))
			return NULL; /* the process ends */
	}
	if (!atomic_load_explicit(&s->dirty, memory_order_seq_cst))
		nvs_stream_mark(s);
	nvs_gate_count(&t->calls[gpu->number]);
	return t;
}

/* The closed one with the lowest UUID of these GPUs; NULL: all are open. */
static struct nvs_gpu *first_closed(unsigned gpus)
{
	struct nvs_gpu *first = NULL;

	NVS_FOR_EACH_GPU(gpu)
		if (gpus & gpu->bit && !nvs_gate_is_open(gpu) &&
		    (!first || memcmp(gpu->device.uuid, first->device.uuid, NVS_UUID_SIZE) < 0))
			first = gpu;
	return first;
}

/*
 * All flags go up together or not at all. A thread waits for one GPU after the other, in the order
 * of their UUIDs, which all processes have, and the process does not release those that it has
 * (nvs_gate_keeps): of two processes that want the same GPUs one gets all. False: the process ends.
 */
static bool enter_together(struct nvs_thread *t, unsigned gpus)
{
	unsigned passed = 0; /* GPUs whose gate nvs_gate_wait let us pass */

	for (;;) {
		struct nvs_gpu *closed;

		atomic_store(&t->in_flight, gpus);
		closed = first_closed(gpus & ~passed);
		if (!closed)
			break;
		atomic_store(&t->in_flight, 0);
		passed = nvs_gate_wait(t, closed, NVS_NEED_GPU, gpus) ? closed->bit : 0;
		if (!passed && !atomic_load(&nvs_gate.active))
			return false;
	}
	NVS_FOR_EACH_GPU(gpu)
		if (gpus & gpu->bit)
			nvs_gate_count(&t->calls[gpu->number]);
	return true;
}

struct nvs_thread *nvs_gate_enter_all(void *const *keys, unsigned count, size_t stride)
{
	struct nvs_thread *t = passing_thread();
	unsigned gpus = 0;

	for (unsigned i = 0; t && i < count; i++) {
		void *key = *(void *const *)((const char *)keys + i * stride);
		struct nvs_stream *s = nvs_stream_find(t, NVS_KEY_LEGACY(key));

		if (s)
			gpus |= s->gpu->bit;
	}
	if (!t || !enter_together(t, gpus))
		return NULL;
	for (unsigned i = 0; i < count; i++) {
		void *key = *(void *const *)((const char *)keys + i * stride);
		struct nvs_stream *s = nvs_stream_find(t, NVS_KEY_LEGACY(key));

		if (s)
			nvs_stream_mark(s);
	}
	return t;
}

struct nvs_thread *nvs_gate_enter_several(void *key, unsigned gpus)
{
	struct nvs_thread *t = passing_thread();
	struct nvs_stream *s = t ? nvs_stream_find(t, key) : NULL;

	if (!s || gpus == s->gpu->bit || (atomic_load(&nvs_gate.captures) && nvs_capturing(key)))
		return nvs_gate_enter(key);
	if (nvs_throttled(s->gpu, atomic_load_explicit(&s->gpu->slot, memory_order_acquire)))
		nvs_throttle_step(s, key);
	if (!enter_together(t, gpus | s->gpu->bit))
		return NULL;
	nvs_stream_mark(s);
	NVS_FOR_EACH_GPU(gpu)
		if (gpus & gpu->bit)
			nvs_contexts_mark(gpu);
	return t;
}
