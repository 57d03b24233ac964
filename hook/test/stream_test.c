// SPDX-License-Identifier: Apache-2.0
/*
 * stream_test.c: contexts, streams, devices and captures keep their meaning
 * under the shim, and a release waits for the work in all of them. As
 * client_test.c: one case per process, the shim preloaded.
 */
#include <dlfcn.h>
#include <string.h>

#include "life.h"

int cuDeviceGetCount(int *n);
int cuDeviceTotalMem_v2(size_t *bytes, int dev);

typedef int launch_fn(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		      void *, void **, void **);

static struct nvs_frame released(void)
{
	struct nvs_frame f;

	do
		CHECK(fake_receive(&fake, &f, PATIENCE_MS));
	while (f.type == NVS_REQUEST);
	CHECK(f.type == NVS_RELEASE);
	return f;
}

/* The release of a drain: the GPU is idle by then. */
static void drained(int gpu, uint64_t epoch)
{
	struct nvs_frame f;

	fake_revoke(&fake, (unsigned)gpu, epoch);
	f = released();
	CHECK(f.channel == gpu && f.epoch == epoch);
	CHECK(test_now() >= atomic_load(&stub_state()->busy_until[gpu]));
}

static void in_a_thread(void *(*run)(void *), void *arg)
{
	pthread_t t;

	CHECK(pthread_create(&t, NULL, run, arg) == 0 && pthread_join(t, NULL) == 0);
}

/* ---- default streams ---- */

static void by_pointer(void *p, bool per_thread)
{
	unsigned long legacy = launches(0), thread = atomic_load(&stub_state()->per_thread);
	launch_fn *f;

	CHECK(p);
	*(void **)&f = p;
	CHECK(f(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0);
	CHECK(launches(0) == legacy + 1);
	CHECK(atomic_load(&stub_state()->per_thread) == thread + per_thread);
}

static void *resolved(const char *name, int flags)
{
	void *p = NULL;

	CHECK(cuGetProcAddress_v2(name, &p, 12000, (uint64_t)flags, NULL) == 0);
	return p;
}

static void variants_reach_their_own_export(void)
{
	begin(1);
	hold(3);
	by_pointer((void *)cuLaunchKernel, false);
	by_pointer((void *)cuLaunchKernel_ptsz, true);
	by_pointer(dlsym(RTLD_DEFAULT, "cuLaunchKernel"), false);
	by_pointer(dlsym(RTLD_DEFAULT, "cuLaunchKernel_ptsz"), true);
	by_pointer(resolved("cuLaunchKernel", 0), false);
	by_pointer(resolved("cuLaunchKernel", 1), false);
	by_pointer(resolved("cuLaunchKernel", 2), true);
	drained(0, 3);
}

static void *thread_work(void *arg)
{
	(void)arg;
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(cuLaunchKernel_ptsz(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0);
	return NULL;
}

/* Also if the thread whose default stream it is has ended. */
static void work_of_per_thread_streams_is_drained(void)
{
	begin(1);
	hold(3);
	drained(0, 3);
	fake_grant(&fake, 0, 4);
	stub_state()->work_ns = 300000000u;
	in_a_thread(thread_work, NULL);
	drained(0, 4);
}

/* ---- contexts ---- */

static void all_contexts_are_drained(void)
{
	void *more[3];

	begin(1);
	hold(3);
	for (int i = 0; i < 3; i++) {
		CHECK(cuCtxCreate_v2(&more[i], 0, 0) == 0);
		stub_state()->work_ns = i == 1 ? 300000000u : 1000;
		CHECK(launch(NULL) == 0);
	}
	CHECK(cuCtxSetCurrent(NULL) == 0);
	drained(0, 3);
}

static void *destroy(void *ctx)
{
	CHECK(cuCtxDestroy_v2(ctx) == 0);
	return NULL;
}

/* The driver waits in the call; the release waits for the call. */
static void context_destroyed_with_work_queued(void)
{
	pthread_t t;
	void *ctx;

	begin(1);
	hold(3);
	for (uint64_t epoch = 3; epoch < 6; epoch++) {
		CHECK(cuCtxCreate_v2(&ctx, 0, 0) == 0);
		stub_state()->work_ns = 200000000u;
		CHECK(launch(NULL) == 0);
		CHECK(pthread_create(&t, NULL, destroy, ctx) == 0);
		nap_ms(epoch == 4 ? 0 : 20);
		drained(0, epoch);
		CHECK(pthread_join(t, NULL) == 0);
		CHECK(cuCtxSetCurrent(contexts[0]) == 0);
		fake_grant(&fake, 0, epoch + 1);
		CHECK(launch(NULL) == 0);
	}
}

/* cuCtxDetach takes back what cuCtxAttach did; only the last one destroys. */
static void context_lives_while_attached(void)
{
	void *ctx;

	begin(1);
	hold(3);
	CHECK(cuCtxAttach(&ctx, 0) == 0 && ctx == contexts[0] && cuCtxDetach(contexts[1]) == 201);
	stub_state()->work_ns = 300000000;
	CHECK(launch(NULL) == 0 && cuCtxDetach(ctx) == 0);
	CHECK(atomic_load(&stub_state()->destroyed) == 0);
	drained(0, 3);
	CHECK(cuCtxAttach(&ctx, 0) == 0 && cuCtxDetach(ctx) == 0 && cuCtxDetach(ctx) == 0);
	CHECK(atomic_load(&stub_state()->destroyed) == 1);
}

/* The driver refuses to destroy it, and it is as attached as before. */
static void context_lives_that_cannot_be_destroyed(void)
{
	void *ctx;

	begin(1);
	hold(3);
	CHECK(cuCtxAttach(&ctx, 0) == 0 && ctx == contexts[0]);
	stub_state()->refuses_destroy = 201;
	CHECK(cuCtxDestroy_v2(ctx) == 201);
	stub_state()->refuses_destroy = 0;
	stub_state()->work_ns = 300000000;
	CHECK(launch(NULL) == 0 && cuCtxDetach(ctx) == 0);
	CHECK(atomic_load(&stub_state()->destroyed) == 0);
	drained(0, 3);
}

/* A new context with the handle of one that another thread is destroying. */
static void handle_used_again_at_once(void)
{
	unsigned long destroyed = atomic_load(&stub_state()->destroyed);
	void *old, *ctx;
	pthread_t t;

	begin(1);
	hold(3);
	CHECK(cuCtxCreate_v2(&old, 0, 0) == 0 && launch(NULL) == 0);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	stub_state()->destroy_ns = 200000000u;
	CHECK(pthread_create(&t, NULL, destroy, old) == 0);
	EVENTUALLY(atomic_load(&stub_state()->destroyed) > destroyed);
	nap_ms(20);
	stub_state()->work_ns = 600000000u;
	CHECK(cuCtxCreate_v2(&ctx, 0, 0) == 0 && ctx == old);
	CHECK(launch(NULL) == 0);
	CHECK(pthread_join(t, NULL) == 0);
	drained(0, 3);
}

static void primary_context_goes_and_comes(void)
{
	void *ctx, *stream;

	begin(1);
	hold(3);
	for (uint64_t epoch = 3; epoch < 8; epoch++) {
		CHECK(cuDevicePrimaryCtxRetain(&ctx, 0) == 0 && cuCtxSetCurrent(ctx) == 0);
		CHECK(cuStreamCreate(&stream, 0) == 0);
		CHECK(launch(stream) == 0 && launch(NULL) == 0);
		/* Streams go with their context, unseen. */
		if (epoch % 2) {
			CHECK(cuDevicePrimaryCtxRelease_v2(0) == 0);
		} else {
			CHECK(cuDevicePrimaryCtxReset_v2(0) == 0);
			CHECK(cuDevicePrimaryCtxRelease_v2(0) == 0);
		}
		CHECK(cuCtxSetCurrent(contexts[0]) == 0);
		stub_state()->work_ns = 50000000u;
		CHECK(launch(NULL) == 0);
		drained(0, epoch);
		stub_state()->work_ns = 20000;
		fake_grant(&fake, 0, epoch + 1);
	}
}

/* ---- devices ---- */

static void *launch_elsewhere(void *stream)
{
	CHECK(cuCtxSetCurrent(contexts[1]) == 0);
	CHECK(launch(stream) == 0);
	return NULL;
}

static void work_belongs_to_the_streams_gpu(void)
{
	struct nvs_frame f;
	pthread_t t;
	void *stream;

	begin(2);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0 && cuStreamCreate(&stream, 0) == 0);
	allow(1, 1);
	fake_word(&fake, 1, 7);
	CHECK(pthread_create(&t, NULL, launch_elsewhere, stream) == 0);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	CHECK(!fake_receive(&fake, &f, 50) && launches(0) == 0);
	allow(0, 1);
	stub_state()->work_ns = 200000000u;
	fake_grant(&fake, 0, 4);
	CHECK(pthread_join(t, NULL) == 0);
	CHECK(launches(0) == 1 && launches(1) == 0);
	drained(0, 4);
}

/* More than a table of contexts would have: the last one's work is drained too. */
static void many_contexts_are_drained(void)
{
	int cuCtxPopCurrent_v2(void **ctx);
	void *ctx = NULL;

	begin(1);
	hold(3);
	for (int i = 0; i < 300; i++)
		CHECK(cuCtxCreate_v2(&ctx, 0, 0) == 0 && cuCtxPopCurrent_v2(&ctx) == 0);
	CHECK(cuCtxSetCurrent(ctx) == 0);
	stub_state()->work_ns = 300000000u;
	CHECK(launch(NULL) == 0);
	drained(0, 3);
}

static void *begin_a_capture(void *arg)
{
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(cuStreamBeginCapture_v2((void *)2, 2) == 0); /* the thread's default stream */
	return arg;
}

/* The stream is gone with the thread, and so is the capture: the next drain is a plain one. */
static void a_thread_ends_inside_a_capture(void)
{
	unsigned long syncs;

	begin(1);
	hold(3);
	in_a_thread(begin_a_capture, NULL);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0 && launch(NULL) == 0);
	syncs = atomic_load(&stub_state()->syncs);
	drained(0, 3);
	CHECK(atomic_load(&stub_state()->syncs) > syncs);
}

static void *record_event(void *arg)
{
	int cuEventCreate(void **event, unsigned flags);
	int cuEventRecord(void *event, void *stream);
	void *event;

	CHECK(cuCtxSetCurrent(contexts[0]) == 0 && cuEventCreate(&event, 2) == 0);
	CHECK(cuEventRecord(event, NULL) == 0);
	return arg;
}

/*
 * The driver holds up a call of the application on one GPU, and each call of the shim
 * with it: the client thread hears the scheduler all the same, and what is known of
 * streams can be changed.
 */
static void a_blocked_driver_stops_one_gpu(void)
{
	struct launcher l;
	void *stream;
	pthread_t t;

	begin(2);
	hold(3);
	allow(1, 1);
	fake_word(&fake, 1, 7);
	start(&l, 1, 1);
	finish(&l);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0 && launch(NULL) == 0);
	stub_state()->blocked[0] = 1;
	CHECK(pthread_create(&t, NULL, record_event, NULL) == 0);
	EVENTUALLY(atomic_load(&stub_state()->events) > 0);
	/* The shim asks whether the GPU has nothing to do, and gets no answer. */
	fake.page->slot[0].waiters = 1;
	EVENTUALLY(atomic_load(&stub_state()->asked) > 0);
	CHECK(cuCtxSetCurrent(contexts[1]) == 0 && cuStreamCreate(&stream, 0) == 0);
	CHECK(launch(stream) == 0);
	drained(1, 7);
	stub_state()->blocked[0] = 0;
	CHECK(pthread_join(t, NULL) == 0);
	CHECK(released().channel == 0);
}

static void *launch_everywhere(void *arg)
{
	struct stub_launch list[2] = { 0 };

	for (int i = 0; i < 2; i++) {
		CHECK(cuCtxSetCurrent(contexts[i]) == 0);
		CHECK(cuStreamCreate(&list[i].stream, 0) == 0);
	}
	CHECK(cuLaunchCooperativeKernelMultiDevice(list, 2, 0) == 0);
	return arg;
}

/* A call for two GPUs waits for both, and keeps neither meanwhile. */
static void call_on_two_gpus_keeps_none_while_it_waits(void)
{
	struct nvs_frame f;
	pthread_t t;

	begin(2);
	CHECK(pthread_create(&t, NULL, launch_everywhere, NULL) == 0);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	fake_grant(&fake, 0, 4);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 1);
	fake_revoke(&fake, 0, 4);
	f = released();
	CHECK(f.channel == 0 && f.epoch == 4);
	fake_grant(&fake, 1, 5);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	CHECK(launches(0) == 0 && launches(1) == 0);
	allow(0, 1);
	allow(1, 1);
	fake_grant(&fake, 0, 6);
	CHECK(pthread_join(t, NULL) == 0);
	CHECK(launches(0) == 1 && launches(1) == 1);
	CHECK(atomic_load(&stub_state()->violations) == 0);
}

static void asking_is_not_using(void)
{
	unsigned before = threads();
	struct nvs_frame f;
	size_t bytes;
	int n;

	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuDeviceGetCount(&n) == 0 && threads() == before); /* before cuInit: nothing at all */
	CHECK(cuInit(0) == 0);
	fake_accept(&fake);
	CHECK(cuDeviceGetCount(&n) == 0 && n == 1 && cuDeviceTotalMem_v2(&bytes, 0) == 0);
	CHECK(!fake_receive(&fake, &f, 200)); /* a client of no GPU */
}

/* ---- captures ---- */

static atomic_int captured, stop;

static void *capture_all_the_time(void *arg)
{
	void *stream, *graph;

	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(cuStreamCreate(&stream, 0) == 0);
	while (!atomic_load(&stop)) {
		CHECK(cuStreamBeginCapture_v2(stream, 0) == 0);
		for (int i = 0; i < 20; i++)
			CHECK(launch(stream) == 0);
		CHECK(cuStreamEndCapture(stream, &graph) == 0);
		atomic_fetch_add(&captured, 1);
		nap_ms(1);
	}
	return arg;
}

/* Another thread is revoked; who captures never waits, and loses no graph. */
static void captures_go_on_through_revokes(void)
{
	struct launcher l;
	pthread_t t;
	int before;

	begin(1);
	hold(3);
	CHECK(pthread_create(&t, NULL, capture_all_the_time, NULL) == 0);
	start(&l, 0, 0);
	for (uint64_t epoch = 3; epoch < 43; epoch++) {
		before = atomic_load(&captured);
		EVENTUALLY(atomic_load(&captured) > before);
		drained(0, epoch);
		allow(0, 0);
		before = atomic_load(&captured);
		EVENTUALLY(atomic_load(&captured) > before + 2); /* with the gate closed */
		allow(0, 1);
		fake_grant(&fake, 0, epoch + 1);
	}
	atomic_store(&stop, 1);
	CHECK(pthread_join(t, NULL) == 0);
	finish(&l);
	CHECK(atomic_load(&stub_state()->broken_captures) == 0);
	CHECK(atomic_load(&stub_state()->violations) == 0);
	CHECK(atomic_load(&stub_state()->recorded) > 1000);
}

/* A drain asks whether a stream is idle: not one that begins to capture meanwhile. */
static void captures_begin_beside_a_drain(void)
{
	void *other, *stream, *graph;
	struct nvs_frame f;

	begin(1);
	allow(0, 1);
	fake_grant(&fake, 0, 3);
	CHECK(cuStreamCreate(&other, 0) == 0 && cuStreamCreate(&stream, 0) == 0);
	CHECK(cuStreamBeginCapture_v2(other, 0) == 0); /* so that streams are asked one by one */
	stub_state()->work_ns = 500000000u;
	CHECK(launch(stream) == 0);
	stub_state()->capturing_ns = 200000;
	fake_revoke(&fake, 0, 3);
	for (int i = 0; i < 200; i++) {
		CHECK(cuStreamBeginCapture_v2(stream, 0) == 0);
		nap_ms(1);
		CHECK(cuStreamEndCapture(stream, &graph) == 0);
		nap_ms(i % 3);
	}
	CHECK(cuStreamEndCapture(other, &graph) == 0);
	do
		CHECK(fake_receive(&fake, &f, PATIENCE_MS));
	while (f.type == NVS_REQUEST); /* it may have waited a moment for the grant */
	CHECK(f.type == NVS_RELEASE && f.epoch == 3);
	CHECK(atomic_load(&stub_state()->broken_captures) == 0);
}

/* The driver refuses to destroy a stream: it captures as before, and no drain breaks that. */
static void stream_lives_that_cannot_be_destroyed(void)
{
	void *stream, *graph;

	begin(1);
	hold(3);
	CHECK(cuStreamCreate(&stream, 0) == 0 && cuStreamBeginCapture_v2(stream, 0) == 0);
	stub_state()->refuses_destroy = 700;
	CHECK(cuStreamDestroy_v2(stream) == 700);
	CHECK(cuStreamDestroy_v2(NULL) == 700);
	stub_state()->refuses_destroy = 0;
	CHECK(launch(NULL) == 0);
	drained(0, 3);
	CHECK(atomic_load(&stub_state()->broken_captures) == 0);
	allow(0, 0);
	CHECK(launch(stream) == 0); /* is recorded, with the gate closed */
	CHECK(cuStreamEndCapture(stream, &graph) == 0);
	CHECK(cuStreamDestroy_v2(stream) == 0);
	/* No capture is open any more: a drain waits for the context. */
	allow(0, 1);
	fake_grant(&fake, 0, 4);
	stub_state()->work_ns = 300000000;
	CHECK(launch(NULL) == 0);
	drained(0, 4);
	CHECK(atomic_load(&stub_state()->broken_captures) == 0);
}

/* What bounds the work of a green context's streams ends with it: the driver keeps events for the primary one. */
static void a_green_context_leaves_no_events(void)
{
	void *green, *ctx, *stream;

	begin(1);
	hold(3);
	fake.page->slot[0].present = 1;
	for (int i = 0; i < 3; i++) {
		CHECK(cuGreenCtxCreate(&green, NULL, 0, 1) == 0 && cuCtxFromGreenCtx(&ctx, green) == 0);
		CHECK(cuCtxSetCurrent(ctx) == 0 && cuGreenCtxStreamCreate(&stream, green, 1, 0) == 0);
		for (int j = 0; j < 100; j++)
			CHECK(launch(stream) == 0);
		CHECK(atomic_load(&stub_state()->live_events) == 2);
		CHECK(cuCtxSetCurrent(contexts[0]) == 0 && cuGreenCtxDestroy(green) == 0);
		CHECK(atomic_load(&stub_state()->live_events) == 0);
		CHECK(cuStreamDestroy_v2(stream) == 0);
	}
}

static const struct life_case cases[] = {
#define CASE(name) { #name, name }
	CASE(variants_reach_their_own_export),
	CASE(work_of_per_thread_streams_is_drained),
	CASE(all_contexts_are_drained),
	CASE(context_destroyed_with_work_queued),
	CASE(context_lives_while_attached),
	CASE(context_lives_that_cannot_be_destroyed),
	CASE(handle_used_again_at_once),
	CASE(primary_context_goes_and_comes),
	CASE(work_belongs_to_the_streams_gpu),
	CASE(many_contexts_are_drained),
	CASE(a_thread_ends_inside_a_capture),
	CASE(a_blocked_driver_stops_one_gpu),
	CASE(call_on_two_gpus_keeps_none_while_it_waits),
	CASE(asking_is_not_using),
	CASE(captures_go_on_through_revokes),
	CASE(captures_begin_beside_a_drain),
	CASE(stream_lives_that_cannot_be_destroyed),
	CASE(a_green_context_leaves_no_events),
};

int main(int argc, char **argv)
{
	return life_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
