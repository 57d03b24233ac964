// SPDX-License-Identifier: Apache-2.0
/*
 * gate_test.c: threads that launch all the time against a scheduler that
 * revokes all the time. Not one launch may happen between a release and the
 * next grant, and a release may only come when the GPU is idle.
 *
 *   gate_test SECONDS
 */
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"
#include "stub.h"

#define THREADS 4

static void *context;
static atomic_bool stop;
static atomic_ulong done[THREADS];

static void *worker(void *arg)
{
	unsigned n = (unsigned)(uintptr_t)arg;
	void *stream = NULL;

	CHECK(cuCtxSetCurrent(context) == 0);
	if (n < 2)
		CHECK(cuStreamCreate(&stream, 0) == 0);
	for (unsigned i = 0; !atomic_load(&stop); i++) {
		int r = n == 3 ? cuLaunchKernel_ptsz(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL)
			       : cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);

		CHECK(r == 0);
		atomic_fetch_add(&done[n], 1);
		if (n == 1 && i % 64 == 63) { /* a stream's life inside the storm */
			CHECK(cuStreamDestroy_v2(stream) == 0);
			CHECK(cuStreamCreate(&stream, 0) == 0);
		}
		if (n == 0 && i % 256 == 255) {
			struct timespec nap = { 0, 2000000 }; /* idle: early release */

			nanosleep(&nap, NULL);
		}
	}
	return NULL;
}

static unsigned rnd(unsigned *seed, unsigned below)
{
	*seed = *seed * 1103515245u + 12345u;
	return (*seed >> 16) % below;
}

static void pause_us(unsigned us)
{
	struct timespec t = { 0, (long)us * 1000 };

	if (us)
		nanosleep(&t, NULL);
}

/* Waits for the release of epoch; other frames on the way are fine. */
static struct nvs_frame released(struct fake *f, uint64_t epoch)
{
	struct nvs_frame frame;

	for (;;) {
		CHECK(fake_receive(f, &frame, PATIENCE_MS));
		CHECK(frame.type == NVS_RELEASE || frame.type == NVS_REQUEST);
		if (frame.type == NVS_RELEASE) {
			CHECK(frame.epoch == epoch);
			return frame;
		}
	}
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 5;
	struct stub *stub = stub_state();
	pthread_t thread[THREADS];
	struct fake f;
	/* Across the place where the low half of an epoch wraps. */
	uint64_t epoch = (7ull << 32) - 500, end;
	unsigned seed = 1, grants = 0, idle = 0;

	fake_init(&f);
	fake_listen(&f);
	CHECK(cuInit(0) == 0);
	CHECK(cuCtxCreate_v2(&context, 0, 0) == 0);
	fake_accept(&f);
	fake_attach(&f);
	for (unsigned i = 0; i < THREADS; i++)
		CHECK(pthread_create(&thread[i], NULL, worker, (void *)(uintptr_t)i) == 0);
	end = test_now() + (uint64_t)(seconds * 1e9);
	while (test_now() < end) {
		struct nvs_frame r;
		unsigned long before;

		do {
			epoch++;
		} while ((uint32_t)epoch == NVS_WORD_CLOSED || (uint32_t)epoch == NVS_WORD_NONE);
		f.page->slot[0].waiters = rnd(&seed, 2);
		f.page->slot[0].present = rnd(&seed, 2);
		atomic_store(&stub->allowed[0], 1);
		if (rnd(&seed, 8) == 0) {
			/* The frame may be late, also later than the revoke of the page. */
			fake_word(&f, 0, (uint32_t)epoch);
			pause_us(rnd(&seed, 100));
			fake_word(&f, 0, 0);
			fake_send(&f, NVS_GRANT, 0, 0, epoch);
		} else {
			fake_grant(&f, 0, epoch);
			pause_us(rnd(&seed, 4) ? rnd(&seed, 400) : 0);
		}
		fake_revoke(&f, 0, epoch);
		r = released(&f, epoch);
		CHECK(test_now() >= atomic_load(&stub->busy_until[0]));
		atomic_store(&stub->allowed[0], 0);
		before = atomic_load(&stub->launches[0]);
		pause_us(rnd(&seed, 60));
		CHECK(before == atomic_load(&stub->launches[0]));
		CHECK(atomic_load(&stub->violations) == 0);
		idle += r.code == NVS_RELEASE_IDLE;
		grants++;
	}
	/* Let everybody out. */
	atomic_store(&stop, true);
	atomic_store(&stub->allowed[0], 1);
	fake_grant(&f, 0, ++epoch);
	for (unsigned i = 0; i < THREADS; i++) {
		CHECK(pthread_join(thread[i], NULL) == 0);
		CHECK(atomic_load(&done[i]) > 0);
	}
	CHECK(grants > 100);
	CHECK(atomic_load(&stub->violations) == 0);
	printf("gate: %u grants, %u released early, %lu launches, none after a release\n", grants, idle,
	       atomic_load(&stub->launches[0]));
	fake_end(&f);
	return 0;
}
