// SPDX-License-Identifier: Apache-2.0
#include "thread.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "clock.h"
#include "futex.h"
#include "glibc.h"
#include "signals.h"

#define TIMER_SLACK_NS (1 * NVS_US) /* of our threads: they time in tens of microseconds */

__thread struct nvs_thread *nvs_self __attribute__((tls_model("initial-exec")));

static _Atomic(struct nvs_thread *) threads;
static pthread_key_t thread_key;
static atomic_bool thread_key_made;

static void (*thread_ended)(struct nvs_thread *t);

/* At the end of a thread, also one that was cancelled inside the driver. */
static void thread_end(void *arg)
{
	struct nvs_thread *t = arg;

	thread_ended(t);
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

void nvs_threads_init(void (*ended)(struct nvs_thread *t))
{
	thread_ended = ended;
	if (!atomic_load(&thread_key_made) && nvs_late.key_create(&thread_key, thread_end) == 0)
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
			nvs_late.setspecific(thread_key, t);
	}
	errno = saved;
	return t;
}

struct nvs_thread *nvs_threads(void)
{
	return atomic_load(&threads);
}

bool nvs_gate_busy(struct nvs_gpu *gpu)
{
	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next)
		if (atomic_load_explicit(&t->in_flight, memory_order_seq_cst) & gpu->bit)
			return true;
	return false;
}

bool nvs_gate_keeps(struct nvs_gpu *gpu)
{
	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next)
		if (t->waits_at && t->keeps & gpu->bit)
			return true;
	return false;
}

/* A call in flight may take long; the bound is the scheduler's grace. */
void nvs_gate_quiesce(struct nvs_gpu *gpu)
{
	for (int spins = 0; nvs_gate_busy(gpu); spins++) {
		if (spins < 100)
			sched_yield();
		else
			nvs_nap(20 * NVS_US);
	}
}

uint64_t nvs_gate_calls(struct nvs_gpu *gpu)
{
	uint64_t sum = 0;

	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next)
		sum += atomic_load_explicit(&t->calls[gpu->number], memory_order_relaxed);
	return sum;
}

void nvs_threads_fork_child(void)
{
	nvs_gate_stop();
	atomic_store(&nvs_gate.captures, 0);
	for (struct nvs_thread *t = atomic_load(&threads); t; t = t->next) {
		atomic_store(&t->in_flight, 0);
		t->key = NULL;
		t->waits_at = NULL;
			for (int i = 0; i < NVS_MAX_GPUS; i++)
			atomic_store(&t->calls[i], 0);
		atomic_store(&t->taken, t == nvs_self);
	}
}

/* ---- threads of the shim ---- */

void nvs_thread_setup(const char *name)
{
	int mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	nvs_of_shim = true;
	prctl(PR_SET_NAME, name);
	prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
	while (!nvs_driver_enter()) {
		if (nvs_driver_stopped())
			return; /* the process ends */
		nvs_suspended_wait();
	}
	nvs_driver.exchange_capture_mode(&mode);
	nvs_driver_leave();
}

bool nvs_thread_start(void *(*entry)(void *), void *arg)
{
	struct nvs_signals q;
	pthread_t thread;
	bool ok;

	nvs_signals_block(&q);
	ok = nvs_late.create(&thread, NULL, entry, arg) == 0;
	if (ok)
		nvs_late.detach(thread);
	nvs_signals_restore(&q);
	return ok;
}
