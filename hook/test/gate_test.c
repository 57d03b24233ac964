// SPDX-License-Identifier: Apache-2.0
/*
 * gate_test.c: threads that launch all the time against a scheduler that
 * revokes all the time. Not one launch may happen between a release and the
 * next grant, a release may only come when the GPU is idle, and it must count
 * every launch.
 *
 *   gate_test [-t THREADS] [-g GPUS] [-n REVOKES | -s SECONDS] [-p]
 *
 * -p: no pauses, for as many revokes as there can be. The threads differ:
 * default streams of both kinds, own streams, streams and contexts that come
 * and go, switches between contexts and GPUs, calls for all GPUs, captures,
 * threads that end.
 */
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"
#include "stub.h"

#define MAX_THREADS 256

static int threads = 16, gpus = 1;
static void *contexts[STUB_GPUS][2]; /* two of each GPU */
static atomic_bool stop;
static atomic_bool rest; /* everybody is to be idle for a moment */
static atomic_ulong done[MAX_THREADS];

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

/* ---- the application ---- */

static bool go_on(unsigned n)
{
	atomic_fetch_add(&done[n], 1);
	while (atomic_load(&rest) && !atomic_load(&stop))
		pause_us(300);
	return !atomic_load(&stop);
}

static void launch(void *stream)
{
	CHECK(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == 0);
}

static void launch_thread(void *stream)
{
	CHECK(cuLaunchKernel_ptsz(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == 0);
}

static void use(unsigned gpu, unsigned which)
{
	CHECK(cuCtxSetCurrent(contexts[gpu][which]) == 0);
}

static void default_stream(unsigned n)
{
	do
		launch(NULL);
	while (go_on(n));
}

static void thread_stream(unsigned n)
{
	do
		launch_thread(NULL);
	while (go_on(n));
}

static void own_stream(unsigned n)
{
	void *stream;

	CHECK(cuStreamCreate(&stream, 0) == 0);
	do
		launch(stream);
	while (go_on(n));
	CHECK(cuStreamDestroy_v2(stream) == 0);
}

static void short_streams(unsigned n)
{
	do {
		void *stream[3];

		for (int i = 0; i < 3; i++)
			CHECK(cuStreamCreate(&stream[i], 0) == 0);
		for (int i = 0; i < 30; i++)
			launch(stream[i % 3]);
		for (int i = 0; i < 3; i++)
			CHECK(cuStreamDestroy_v2(stream[i]) == 0);
	} while (go_on(n));
}

/* From context to context, the stream of one GPU used while another is current. */
static void switches(unsigned n)
{
	unsigned gpu = n / 8 % (unsigned)gpus, seed = n;
	void *stream;

	CHECK(cuStreamCreate(&stream, 0) == 0);
	do {
		use(rnd(&seed, (unsigned)gpus), rnd(&seed, 2));
		for (int i = 0; i < 8; i++)
			i % 3 ? launch(NULL) : launch(stream);
	} while (go_on(n));
	use(gpu, 0);
	CHECK(cuStreamDestroy_v2(stream) == 0);
}

static void short_contexts(unsigned n)
{
	int gpu = (int)(n / 8 % (unsigned)gpus);

	do {
		void *ctx;

		CHECK(cuCtxCreate_v2(&ctx, 0, gpu) == 0);
		for (int i = 0; i < 20; i++)
			i % 2 ? launch(NULL) : launch_thread(NULL);
		CHECK(cuCtxDestroy_v2(ctx) == 0);
	} while (go_on(n));
}

/* One call that works on every GPU: all gates at once. */
static void everywhere(unsigned n)
{
	struct stub_launch list[STUB_GPUS] = { 0 };

	for (int i = 0; i < gpus; i++) {
		use((unsigned)i, 1);
		CHECK(cuStreamCreate(&list[i].stream, 0) == 0);
	}
	do
		CHECK(cuLaunchCooperativeKernelMultiDevice(list, (unsigned)gpus, 0) == 0);
	while (go_on(n));
	for (int i = 0; i < gpus; i++)
		CHECK(cuStreamDestroy_v2(list[i].stream) == 0);
}

static void *short_life(void *arg)
{
	unsigned n = (unsigned)(uintptr_t)arg;

	use(n / 8 % (unsigned)gpus, 0);
	for (int i = 0; i < 20; i++)
		i % 2 ? launch(NULL) : launch_thread(NULL);
	return NULL;
}

static void short_threads(unsigned n)
{
	do {
		pthread_t t;

		CHECK(pthread_create(&t, NULL, short_life, (void *)(uintptr_t)n) == 0);
		CHECK(pthread_join(t, NULL) == 0);
	} while (go_on(n));
}

/*
 * What is recorded passes a closed gate. One thread in the process: while
 * captures overlap without a gap no drain can be proven, see drain.c.
 */
static void captures(unsigned n)
{
	void *stream, *graph;

	CHECK(cuStreamCreate(&stream, 0) == 0);
	do {
		CHECK(cuStreamBeginCapture_v2(stream, 0) == 0);
		for (int i = 0; i < 8; i++)
			launch(stream);
		CHECK(cuStreamEndCapture(stream, &graph) == 0);
		for (int i = 0; i < 50; i++)
			launch(stream);
	} while (go_on(n));
	CHECK(cuStreamDestroy_v2(stream) == 0);
}

static void *worker(void *arg)
{
	static void (*const kinds[])(unsigned) = {
		default_stream, own_stream, short_streams, thread_stream,
		switches, short_threads, short_contexts, everywhere,
	};
	unsigned n = (unsigned)(uintptr_t)arg;

	sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){ 0 });
	use(n / 8 % (unsigned)gpus, 0);
	(n == 15 ? captures : kinds[n % 8])(n);
	return NULL;
}

/* ---- the scheduler ---- */

static struct fake fake;

static struct gpu {
	enum { CLOSED, OPEN, REVOKED } state;
	uint64_t epoch;
	uint64_t counted;      /* calls that releases told of */
	unsigned long revokes, idle;
} gpu[STUB_GPUS];

/* The next frame, and what it means. */
static void pump(void)
{
	struct stub *stub = stub_state();
	struct nvs_frame f;
	struct gpu *g;

	CHECK(fake_receive(&fake, &f, PATIENCE_MS));
	CHECK(f.channel < gpus);
	g = &gpu[f.channel];
	if (f.type == NVS_REQUEST)
		return;
	CHECK(f.type == NVS_RELEASE);
	CHECK(f.epoch == g->epoch && g->state != CLOSED);
	CHECK(f.code == NVS_RELEASE_IDLE || g->state == REVOKED);
	CHECK(test_now() >= atomic_load(&stub->busy_until[f.channel]));
	if (g->state == OPEN)
		fake_word(&fake, f.channel, 0);
	atomic_store(&stub->allowed[f.channel], 0);
	g->counted += f.u.released.calls;
	CHECK(g->counted == atomic_load(&stub->launches[f.channel]));
	g->state = CLOSED;
	g->idle += f.code == NVS_RELEASE_IDLE;
}

static void next_epoch(unsigned i)
{
	uint32_t word;

	do
		word = (uint32_t)++gpu[i].epoch;
	while (word == NVS_WORD_CLOSED || word == NVS_WORD_NONE);
	atomic_store(&stub_state()->allowed[i], 1);
	gpu[i].state = OPEN;
}

static void grant(unsigned i, unsigned *seed, bool pauses)
{
	next_epoch(i);
	fake.page->slot[i].present = rnd(seed, 2);
	fake.page->slot[i].flags = rnd(seed, 4) ? 0 : NVS_GRANT_NEXT;
	fake.page->slot[i].waiters = rnd(seed, 2);
	if (rnd(seed, 8) == 0) {
		/* The frame may be late, also later than the revoke of the page. */
		fake_word(&fake, i, (uint32_t)gpu[i].epoch);
		if (pauses)
			pause_us(rnd(seed, 100));
		fake_word(&fake, i, 0);
		fake_send(&fake, NVS_GRANT, i, 0, gpu[i].epoch);
	} else {
		fake_grant(&fake, i, gpu[i].epoch);
	}
}

static void take_back(unsigned i)
{
	fake_revoke(&fake, i, gpu[i].epoch);
	gpu[i].state = REVOKED;
	gpu[i].revokes++;
	while (gpu[i].state == REVOKED)
		pump();
}

/* Everybody is idle and somebody else waits: the client releases by itself. */
static void early_release(unsigned i)
{
	unsigned long idle = gpu[i].idle;

	atomic_store(&rest, true);
	next_epoch(i);
	fake_grant(&fake, i, gpu[i].epoch);
	fake.page->slot[i].waiters = 1;
	fake_send(&fake, NVS_NOTICE, i, 0, 0);
	while (gpu[i].state == OPEN)
		pump();
	CHECK(gpu[i].idle == idle + 1);
	atomic_store(&rest, false);
}

static void storm(unsigned long revokes, uint64_t end, bool pauses)
{
	struct stub *stub = stub_state();
	unsigned seed = 1;
	unsigned long n = 0;

	for (;;) {
		unsigned i = rnd(&seed, (unsigned)gpus);
		unsigned long before = atomic_load(&stub->launches[i]);

		if (revokes ? n >= revokes : n >= 100 && test_now() >= end)
			break;
		if (gpu[i].state == CLOSED) {
			if (pauses)
				pause_us(rnd(&seed, 60));
			CHECK(before == atomic_load(&stub->launches[i]));
			grant(i, &seed, pauses);
			if (gpus > 1)
				continue;
		}
		/* Some are revoked before anybody came, some in the middle of things. */
		if (pauses)
			pause_us(rnd(&seed, 4) ? rnd(&seed, 400) : 0);
		else if (rnd(&seed, 4))
			for (int k = 0; k < 50 && atomic_load(&stub->launches[i]) == before; k++)
				pause_us(1);
		take_back(i);
		n++;
		if (n % 1000 == 500 && gpus == 1)
			early_release(i);
		CHECK(atomic_load(&stub->violations) == 0);
		CHECK(atomic_load(&stub->broken_captures) == 0);
	}
}

int main(int argc, char **argv)
{
	struct stub *stub = stub_state();
	pthread_t thread[MAX_THREADS];
	unsigned long revokes = 0, total = 0, idle = 0, launches = 0;
	bool pauses = true;
	double seconds = 5;
	uint64_t begin;
	int c;

	while ((c = getopt(argc, argv, "t:g:n:s:p")) != -1) {
		if (c == 't')
			threads = atoi(optarg);
		else if (c == 'g')
			gpus = atoi(optarg);
		else if (c == 'n')
			revokes = strtoul(optarg, NULL, 10);
		else if (c == 's')
			seconds = atof(optarg);
		else if (c == 'p')
			pauses = false;
		else
			return 2;
	}
	CHECK(threads > 0 && threads <= MAX_THREADS && gpus > 0 && gpus <= STUB_GPUS);
	stub->gpus = gpus;
	if (!pauses) {
		stub->work_ns = 1000;
		/*
		 * The scheduler and the client's thread first, if that is allowed: with
		 * more threads than CPUs each revoke would cost time slices otherwise.
		 */
		sched_setscheduler(0, SCHED_RR, &(struct sched_param){ 1 });
	}
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	for (int i = 0; i < gpus; i++)
		for (int j = 0; j < 2; j++)
			CHECK(cuCtxCreate_v2(&contexts[i][j], 0, i) == 0);
	fake_accept(&fake);
	for (int i = 0; i < gpus; i++) {
		fake_attach(&fake);
		/* Across the place where the low half of an epoch wraps. */
		gpu[i].epoch = (7ull << 32) - 500;
	}
	for (int i = 0; i < threads; i++)
		CHECK(pthread_create(&thread[i], NULL, worker, (void *)(uintptr_t)i) == 0);
	begin = test_now();
	storm(revokes, begin + (uint64_t)(seconds * 1e9), pauses);
	seconds = (double)(test_now() - begin) / 1e9;
	/* Let everybody out. */
	atomic_store(&stop, true);
	for (int i = 0; i < gpus; i++) {
		fake.page->slot[i].waiters = 0;
		atomic_store(&stub->allowed[i], 1);
		fake_grant(&fake, (unsigned)i, ++gpu[i].epoch);
	}
	for (int i = 0; i < threads; i++) {
		CHECK(pthread_join(thread[i], NULL) == 0);
		CHECK(atomic_load(&done[i]) > 0);
	}
	for (int i = 0; i < gpus; i++) {
		total += gpu[i].revokes;
		idle += gpu[i].idle;
		launches += atomic_load(&stub->launches[i]);
	}
	CHECK(total >= 100 || revokes);
	CHECK(atomic_load(&stub->violations) == 0);
	CHECK(atomic_load(&stub->broken_captures) == 0);
	printf("gate: %d threads, %d GPUs, %lu revokes in %.1f s, %lu released early, "
	       "%lu launches, none after a release\n", threads, gpus, total, seconds, idle, launches);
	fake_end(&fake);
	return 0;
}
