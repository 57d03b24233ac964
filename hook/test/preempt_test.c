// SPDX-License-Identifier: Apache-2.0
/*
 * preempt_test.c: a drain that takes long is cut. The shim is inside the program, so
 * that the test asks it whether the channels are off; the GPU is the simulated one, and
 * the test is the scheduler.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cases.h"
#include "cudadrv.h"
#include "fake.h"
#include "inside.h"
#include "rm.h"
#include "rm_abi.h"

static struct fake fake;
static CUuuid gpu;
static CUcontext context;
static CUstream stream, other;
static CUfunction spin;
static uint64_t room;  /* of the page; 0: nothing is swapped */
static uint32_t flags; /* the same */
static bool primary;   /* the context is the device's own */

static struct nvs_rm_state state(void)
{
	struct nvs_rm_state s;

	CHECK(nvs_rm_state((const uint8_t *)&gpu, &s));
	return s;
}

/* A kernel of so many milliseconds. Waits at the gate, if that is shut. */
static void launch_on(CUstream s, unsigned ms)
{
	uint64_t ns = ms * 1000000ull, record = 0;
	void *params[] = { &ns, &record };

	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
}

static void *launcher(void *ms)
{
	CU(cuCtxSetCurrent(context));
	launch_on(stream, *(const unsigned *)ms);
	return NULL;
}

static void begin(void)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n";
	CUmodule module;

	nvs_rm_set_next((nvs_rm_ioctl *)dlsym(RTLD_NEXT, "ioctl"));
	fake_init(&fake);
	fake.memory = room;
	fake_listen(&fake);
	CU(cuInit(0));
	CU(cuDeviceGetUuid_v2(&gpu, 0));
	fake_accept(&fake);
	fake.page->features = NVS_FEATURE_PREEMPT;
	fake.page->slot[0].room = room;
	fake.page->slot[0].flags = flags;
	if (primary) {
		CU(cuDevicePrimaryCtxRetain(&context, 0));
		CU(cuCtxSetCurrent(context));
	} else {
		CU(cuCtxCreate_v2(&context, 0, 0));
	}
	fake_attach(&fake);
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
	CU(cuModuleLoadData(&module, ptx));
	CU(cuModuleGetFunction(&spin, module, "nvshare_spin"));
}

static struct nvs_frame expect(uint8_t type)
{
	struct nvs_frame r;

	do { /* where memory is swapped; a REQUEST may have been repeated */
		CHECK(fake_receive(&fake, &r, PATIENCE_MS));
	} while (r.type != type && (r.type == NVS_MOVED || r.type == NVS_REQUEST));
	CHECK(r.type == type);
	return r;
}

static void expect_request(void)
{
	CHECK(expect(NVS_REQUEST).channel == 0);
}

/*
 * Asks for a grant with a kernel of so many milliseconds, gets epoch 5, and launches. One that
 * is to be cut lasts for seconds: a slow machine lets the shim's threads run late.
 */
static void hold(unsigned ms)
{
	pthread_t t;

	CHECK(pthread_create(&t, NULL, launcher, &ms) == 0);
	expect_request();
	fake_grant(&fake, 0, 5);
	pthread_join(t, NULL);
}

static void hold_with(unsigned ms)
{
	begin();
	hold(ms);
}

static struct nvs_frame ask_back(uint64_t epoch)
{
	struct nvs_frame r;

	fake_revoke(&fake, 0, epoch);
	do { /* a REQUEST may have been repeated */
		CHECK(fake_receive(&fake, &r, PATIENCE_MS));
	} while (r.type == NVS_REQUEST || r.type == NVS_MOVED);
	CHECK(r.type == NVS_RELEASE && r.epoch == epoch);
	return r;
}

static bool preempted(struct nvs_frame r)
{
	return r.u.released.flags & NVS_RELEASED_PREEMPTED;
}

/* Holds with a kernel that outlasts every test, and is preempted. */
static void be_preempted(void)
{
	hold_with(60000);
	CHECK(preempted(ask_back(5)));
	CHECK(state().off);
	fake_expect(&fake, NVS_REQUEST);
}

static void end(void)
{
	fake_end(&fake);
	_exit(0); /* the kernel is not waited for */
}

/* ---- cases ---- */

/* Where memory would have to wait for it, only a drain is cut that would be fenced. */
static void where_memory_may_leave_cuts_are_late(void)
{
	struct nvs_frame r, revoke = { .version = NVS_WIRE_VERSION, .type = NVS_REVOKE,
				       .u.revoke.grace_ns = 1000000000 };

	room = 1ull << 30;
	hold_with(300);
	CHECK(!preempted(ask_back(5)) && !state().off);
	for (uint64_t epoch = 6; epoch <= 7; epoch++) {
		CU(cuStreamQuery(stream));
		fake_grant(&fake, 0, epoch);
		launch_on(stream, epoch == 6 ? 900 : 60000);
		fake_word(&fake, 0, 0);
		revoke.epoch = epoch;
		CHECK(send(fake.conn, &revoke, sizeof(revoke), MSG_NOSIGNAL) == sizeof(revoke));
		r = expect(NVS_RELEASE);
		CHECK(preempted(r) == (epoch == 7)); /* a scheduler without room_seq cannot wait for that work */
		fake.page->room_seq[0] = 1;
	}
	CHECK(state().off && r.u.released.drain_ns >= revoke.u.revoke.grace_ns / 2);
	end();
}

/*
 * Nor does memory leave for which a cut kernel waits: where all fitted the drain is cut, and what does
 * not fit any more leaves after the kernel's end.
 */
static void where_all_fits_drains_are_cut(void)
{
	struct nvs_frame r;
	CUdeviceptr p;

	room = 1ull << 30;
	flags = NVS_SLOT_STILL;
	begin();
	CU(cuMemAlloc_v2(&p, 4 << 20));
	hold(3000);
	CHECK(preempted(ask_back(5)) && state().off);
	expect_request();
	__atomic_store_n(&fake.page->slot[0].flags, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&fake.page->slot[0].room, 1, __ATOMIC_SEQ_CST);
	fake_send(&fake, NVS_ROOM, 0, 0, 0);
	r = expect(NVS_MOVED); /* the answer; nothing has left */
	CHECK(r.u.moved.away == 0 && r.u.moved.resident >= 4 << 20 && state().off);
	__atomic_store_n(&fake.page->slot[0].room, room, __ATOMIC_SEQ_CST);
	fake_grant(&fake, 0, 6);
	CU(cuStreamSynchronize(stream));
	__atomic_store_n(&fake.page->slot[0].room, 1, __ATOMIC_SEQ_CST);
	CHECK(!preempted(ask_back(6)));
	fake_send(&fake, NVS_ROOM, 0, 0, 0);
	do { /* there is no host memory for it */
		r = expect(NVS_MOVED);
	} while (!(r.code & NVS_MOVED_NO_ARENA) && !r.u.moved.away);
	end();
}

/* Memory that is freed while work is cut stays until that work has ended, as without the shim. */
static void *freer(void *p)
{
	CU(cuCtxSetCurrent(context));
	CU(cuMemFree_v2(*(CUdeviceptr *)p));
	CHECK(cuStreamQuery(other) == CUDA_SUCCESS);
	return NULL;
}

static void is_freed_after_the_work(CUdeviceptr p, uint64_t next)
{
	pthread_t t;

	CHECK(pthread_create(&t, NULL, freer, &p) == 0);
	nap_ms(100);
	fake_grant(&fake, 0, next);
	pthread_join(t, NULL);
	end();
}

/* The drain of the first grant has seen the end of one context's work, and waits for another one's. */
static void what_is_freed_waits_beside_two_contexts(void)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n";
	CUfunction first;
	CUcontext second;
	CUmodule module;
	CUstream third;
	CUdeviceptr p;

	room = 1ull << 30;
	flags = NVS_SLOT_STILL;
	begin();
	first = spin;
	CU(cuMemAlloc_v2(&p, 4 << 20));
	hold(3000);
	CU(cuCtxCreate_v2(&second, 0, 0));
	CU(cuModuleLoadData(&module, ptx));
	CU(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	CU(cuStreamCreate(&third, CU_STREAM_NON_BLOCKING));
	launch_on(third, 60000);
	CHECK(preempted(ask_back(5)));
	expect_request();
	fake_grant(&fake, 0, 6);
	CU(cuCtxSetCurrent(context));
	spin = first;
	launch_on(other, 6000);
	CU(cuStreamSynchronize(stream));
	nap_ms(100); /* the drain of the first grant goes on to the second context */
	CHECK(preempted(ask_back(6)) && cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
	expect_request();
	is_freed_after_the_work(p, 7);
}

/* Memory that is had in a green context is its primary one's, which has no work of its own. */
static void what_is_freed_waits_for_a_green_context(void)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n";
	CUmodule module;
	CUgreenCtx green;
	CUdeviceptr p;

	room = 1ull << 30;
	flags = NVS_SLOT_STILL;
	begin();
	CU(cuDevicePrimaryCtxRetain(&context, 0));
	CU(cuCtxSetCurrent(context));
	CU(cuGreenCtxCreate(&green, NULL, 0, 1));
	CU(cuCtxFromGreenCtx(&context, green));
	CU(cuCtxSetCurrent(context));
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CU(cuModuleLoadData(&module, ptx));
	CU(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	other = stream;
	CU(cuMemAlloc_v2(&p, 4 << 20));
	hold(6000);
	CHECK(preempted(ask_back(5)) && cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
	expect_request();
	is_freed_after_the_work(p, 6);
}

/*
 * Memory that was had meanwhile comes in beside the work that was cut, which may wait for a call that waits at the
 * gate. The drain of the earlier grant still waits for that work.
 */
static void memory_comes_in_beside_the_work(void)
{
	struct nvs_frame r;
	CUdeviceptr p;

	room = 1ull << 30;
	flags = NVS_SLOT_STILL;
	hold_with(15000);
	CHECK(preempted(ask_back(5)) && state().off);
	expect_request();
	__atomic_store_n(&fake.page->slot[0].flags, 0, __ATOMIC_SEQ_CST);
	CU(cuMemAlloc_v2(&p, 4 << 20));
	fake_grant(&fake, 0, 6);
	do {
		r = expect(NVS_MOVED);
	} while (!(r.code & NVS_MOVED_READY));
	CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
	launch_on(other, 1);
	CU(cuStreamSynchronize(other));
	end();
}

static atomic_bool was_reset;

static void *reset(void *unused)
{
	(void)unused;
	CU(cuDevicePrimaryCtxReset(0));
	atomic_store(&was_reset, true);
	return NULL;
}

/* A reset goes on beside a drain that does not end within five seconds, but not beside memory that moves, nor that beside it. */
static void memory_does_not_move_in_a_reset(void)
{
	CUdeviceptr p;
	pthread_t t;

	primary = true;
	room = 1ull << 30;
	flags = NVS_SLOT_STILL;
	hold_with(10000);
	CHECK(preempted(ask_back(5)) && state().off);
	expect_request();
	__atomic_store_n(&fake.page->slot[0].flags, 0, __ATOMIC_SEQ_CST);
	CU(cuMemAlloc_v2(&p, 64 << 20));
	CHECK(pthread_create(&t, NULL, reset, NULL) == 0);
	nap_ms(6000);
	fake_grant(&fake, 0, 6);
	while (!(expect(NVS_MOVED).code & NVS_MOVED_READY))
		;
	CHECK(atomic_load(&was_reset));
	CHECK(pthread_join(t, NULL) == 0);
	end();
}

static void a_long_kernel_is_cut_and_goes_on(void)
{
	uint64_t start;
	struct nvs_frame r;

	hold_with(3000);
	start = test_now();
	r = ask_back(5);
	CHECK(preempted(r) && r.code == NVS_RELEASE_REVOKED && r.u.released.calls == 1);
	CHECK(r.u.released.drain_ns >= 10000000 && r.u.released.drain_ns <= test_now() - start);
	CHECK(state().off && cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
	/* Nobody is at the gate: the kernel itself wants the next grant. */
	fake_expect(&fake, NVS_REQUEST);
	CHECK(test_now() - start < 2900000000); /* sooner than the kernel would have ended */
	nap_ms(3200);
	CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
	fake_grant(&fake, 0, 6);
	CU(cuStreamSynchronize(stream));
	CHECK(!state().off);
	ask_back(6); /* on a slow machine this drain, too, is cut; nothing is left then */
	EVENTUALLY(!state().off);
	end();
}

/* What was cut may have been about to end. It was not, if it goes on for long. */
static void one_cut_is_no_habit(void)
{
	hold_with(3000);
	CHECK(preempted(ask_back(5)));
	CHECK(!inside_cuts_soon(0));
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 6);
	CU(cuStreamSynchronize(stream));
	EVENTUALLY(inside_cuts_soon(0));
	end();
}

/* The drain of the first grant still waits for the kernel while others begin and end. */
static void many_grants_for_one_kernel(void)
{
	uint64_t epoch = 5, start = test_now();

	hold_with(2000);
	while (preempted(ask_back(epoch))) {
		/* The kernel may have ended when the last drain was cut. */
		CHECK(state().off || cuStreamQuery(stream) == CUDA_SUCCESS);
		fake_expect(&fake, NVS_REQUEST);
		fake_grant(&fake, 0, ++epoch);
		EVENTUALLY(!state().off);
		nap_ms(50);
	}
	CU(cuStreamSynchronize(stream));
	CHECK(epoch > 6 && test_now() - start >= 2000000000);
	end();
}

/* The old drain ends when the first kernel does; the new kernel is still work. */
static void work_of_the_next_grant_is_not_forgotten(void)
{
	hold_with(3000);
	CHECK(preempted(ask_back(5)));
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 6);
	EVENTUALLY(!state().off);
	launch_on(other, 60000);
	CU(cuStreamSynchronize(stream));
	nap_ms(20); /* the drain of the first grant is over */
	CHECK(preempted(ask_back(6)));
	CHECK(state().off && cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
	end();
}

/* About when the drain is cut the kernel ends by itself. */
static void the_kernel_ends_while_it_is_preempted(void)
{
	hold_with(60);
	for (unsigned i = 0; i < 60; i++) {
		uint64_t ns = 500000 + i * 150000, record = 0, epoch = 5 + i;
		void *params[] = { &ns, &record };
		bool cut;

		CU(cuStreamSynchronize(stream));
		CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
		cut = preempted(ask_back(epoch));
		if (cut)
			fake_expect(&fake, NVS_REQUEST);
		fake_grant(&fake, 0, epoch + 1);
		CU(cuStreamSynchronize(stream));
		EVENTUALLY(!state().off);
	}
	end();
}

/*
 * The work is over though it was not granted again, here because the driver only says that
 * the channels are off: they go on at once.
 */
static void nothing_is_left(void)
{
	CHECK(setenv("NVSHARE_SIMGPU_RM", "ignored", 1) == 0);
	hold_with(3000);
	CHECK(preempted(ask_back(5)));
	CHECK(state().off);
	fake_expect(&fake, NVS_REQUEST);
	CU(cuStreamSynchronize(stream));
	EVENTUALLY(!state().off);
	end();
}

/* The driver refuses, or its channels were not seen: the drain lasts as long as the kernel. */
static void drains_to_the_end(const char *rm)
{
	CHECK(setenv("NVSHARE_SIMGPU_RM", rm, 1) == 0);
	hold_with(400);
	CHECK(!preempted(ask_back(5)));
	CHECK(cuStreamQuery(stream) == CUDA_SUCCESS);
	end();
}

static void a_driver_without_the_controls(void) { drains_to_the_end("absent"); }
static void a_driver_that_refuses(void) { drains_to_the_end("refused"); }
static void a_driver_that_only_says_so(void) { drains_to_the_end("faked"); }
static void channels_that_nobody_saw(void) { drains_to_the_end("hidden"); }

/* What the controls do is not known before it was seen. */
static void a_driver_that_nobody_has_seen(void)
{
	CHECK(setenv("NVSHARE_SIMGPU_VERSION", "999.1", 1) == 0);
	drains_to_the_end("on");
}

/* libcuda asks for no version in a process without NVML, and the kernel's module may not tell it. */
static void a_driver_that_says_no_version(void)
{
	CHECK(setenv("NVSHARE_SIMGPU_VERSION", "none", 1) == 0);
	drains_to_the_end("on");
}

/* The shim says this of taking its channels off. */
static void says_of_channels(enum nvs_control said)
{
	struct nvs_frame r;

	fake.page->features |= NVS_FEATURE_CONTROLS;
	for (uint64_t start = test_now();; inside_look_again(0)) { /* on a slow machine many looks see nothing */
		CHECK(test_now() - start < PATIENCE_MS * 1000000ull);
		fake_send(&fake, NVS_NOTICE, 0, 0, 0);
		if (!fake_receive(&fake, &r, 100) || r.type != NVS_CONTROLS)
			continue;
		CHECK(r.u.controls.channels != NVS_CONTROL_FAKED);
		if (r.u.controls.channels == said)
			break;
	}
}

static void has_controls(void) { says_of_channels(NVS_CONTROL_WORKS); }

static void is_seen_to_work(bool held)
{
	CHECK(setenv("NVSHARE_SIMGPU_VERSION", "999.1", 1) == 0);
	hold_with(1);
	if (held)
		inside_hold_record(0);
	has_controls();
	CHECK(!held || inside_held_record());
	launch_on(stream, 60000);
	CHECK(preempted(ask_back(5)) && state().off);
	end();
}

static void a_driver_is_seen_to_work(void) { is_seen_to_work(false); }

/* The driver holds the first look up until the channels are on. */
static void a_driver_is_seen_to_work_later(void)
{
	is_seen_to_work(true);
}

static void a_driver_that_ignores_off(void)
{
	CHECK(setenv("NVSHARE_SIMGPU_VERSION", "999.1", 1) == 0);
	drains_to_the_end("ignored");
}

static atomic_int launched;

static void *launch_many(void *s)
{
	CU(cuCtxSetCurrent(context));
	for (int i = 0; i < 300; i++) {
		launch_on(*(CUstream *)s, 1);
		atomic_fetch_add(&launched, 1);
	}
	return NULL;
}

/* A program may be as far ahead as ever while nobody waits, since its drain would be cut. */
static void nothing_is_bounded_while_nobody_waits(void)
{
	uint64_t start = test_now();
	pthread_t t;

	hold_with(60000);
	has_controls();
	fake.page->slot[0].present = 1;
	launch_many(&stream);
	CHECK(test_now() - start < 50000000000); /* the kernel still runs */
	fake.page->slot[0].waiters = 1;
	CHECK(pthread_create(&t, NULL, launch_many, &other) == 0);
	nap_ms(300);
	CHECK(atomic_load(&launched) < 600);
	CHECK(preempted(ask_back(5)) && state().off);
	end();
}

/* Somebody has wanted the GPU a moment ago, and may want it again. */
static void what_others_want_is_bounded(void)
{
	pthread_t t;

	hold_with(60000);
	has_controls();
	CHECK(preempted(ask_back(5)));
	fake_expect(&fake, NVS_REQUEST);
	fake.page->slot[0].present = 1;
	fake_grant(&fake, 0, 6);
	CHECK(pthread_create(&t, NULL, launch_many, &stream) == 0);
	nap_ms(300);
	CHECK(atomic_load(&launched) < 300);
	end();
}

/* Others were let in for a moment, beside a grant that goes on. */
static void a_pause_bounds(void)
{
	pthread_t t;

	hold_with(60000);
	has_controls();
	fake.page->slot[0].present = 1;
	launch_many(&stream); /* nothing is bounded */
	fake_word(&fake, 0, NVS_WORD_CLOSED);
	CHECK(pthread_create(&t, NULL, launch_many, &other) == 0);
	nap_ms(200);
	CHECK(atomic_load(&launched) == 300);
	fake_word(&fake, 0, 5);
	EVENTUALLY(atomic_load(&launched) > 300);
	nap_ms(300);
	CHECK(atomic_load(&launched) < 600);
	end();
}

/* What is cut nowhere is bounded as ever: the 60th call waits for the kernel. */
static void what_is_not_cut_is_bounded(void)
{
	pthread_t t;

	CHECK(setenv("NVSHARE_SIMGPU_RM", "refused", 1) == 0);
	hold_with(60000);
	fake.page->features |= NVS_FEATURE_CONTROLS;
	inside_look_again(0);
	fake_send(&fake, NVS_NOTICE, 0, 0, 0);
	CHECK(fake_expect(&fake, NVS_CONTROLS).u.controls.slices == NVS_CONTROL_REFUSED);
	fake.page->slot[0].present = 1;
	CHECK(pthread_create(&t, NULL, launch_many, &stream) == 0);
	nap_ms(300);
	CHECK(atomic_load(&launched) < 300);
	end();
}

/* Whether the system has a thread for who asks. The test's own had theirs before. */
static void give_threads(bool any)
{
	static pthread_attr_t usual;
	pthread_attr_t none;

	if (any) {
		CHECK(pthread_setattr_default_np(&usual) == 0);
		return;
	}
	CHECK(pthread_getattr_default_np(&usual) == 0);
	CHECK(pthread_attr_init(&none) == 0 && pthread_attr_setstacksize(&none, (size_t)1 << 50) == 0);
	CHECK(pthread_setattr_default_np(&none) == 0);
}

/* Nobody takes the channels off, so that what is far ahead would not be cut later either. */
static void without_a_thread_nothing_is_cut(void)
{
	pthread_t t;

	hold_with(400);
	has_controls();
	give_threads(false);
	CHECK(!preempted(ask_back(5)));
	give_threads(true);
	CHECK(cuStreamQuery(stream) == CUDA_SUCCESS);
	fake.page->slot[0].present = 1;
	fake_grant(&fake, 0, 6);
	launch_on(stream, 60000);
	nap_ms(3500); /* nobody has wanted the GPU for long enough */
	CHECK(pthread_create(&t, NULL, launch_many, &stream) == 0);
	nap_ms(300);
	CHECK(atomic_load(&launched) < 300);
	end();
}

/* There was no thread that could try the controls. Later there is. */
static void the_controls_are_tried_later(void)
{
	hold_with(1);
	give_threads(false);
	fake.page->features |= NVS_FEATURE_CONTROLS;
	fake_send(&fake, NVS_NOTICE, 0, 0, 0);
	nap_ms(300);
	give_threads(true);
	has_controls();
	end();
}

/* A drain was to be cut, or its channels to go on, just when there was no context. */
static void the_next_context_has_controls_too(void)
{
	hold_with(1);
	has_controls();
	CU(cuCtxDestroy_v2(context));
	CHECK(nvs_rm_channels((const uint8_t *)&gpu, true) == NVS_RM_UNSEEN);
	says_of_channels(NVS_CONTROL_UNSEEN);
	CU(cuCtxCreate_v2(&context, 0, 0));
	has_controls();
	end();
}

/* Who waits for the GPU keeps the channels on. They are not tried again in that drain. */
static void off_is_refused_once(void)
{
	hold_with(3000);
	nvs_rm_keep_on((const uint8_t *)&gpu);
	fake_revoke(&fake, 0, 5);
	EVENTUALLY(inside_cut_failed(0));
	nvs_rm_let_go((const uint8_t *)&gpu);
	CHECK(!preempted(fake_expect(&fake, NVS_RELEASE)));
	CHECK(cuStreamQuery(stream) == CUDA_SUCCESS);
	end();
}

/* The next drain may be cut, so work may be far ahead again. */
static void a_refusal_bounds_for_a_time(void)
{
	hold_with(3000);
	has_controls();
	EVENTUALLY(inside_unbound(0));
	nvs_rm_keep_on((const uint8_t *)&gpu);
	fake_revoke(&fake, 0, 5);
	EVENTUALLY(inside_cut_failed(0));
	nvs_rm_let_go((const uint8_t *)&gpu);
	CHECK(!preempted(fake_expect(&fake, NVS_RELEASE)));
	CHECK(!inside_unbound(0));
	fake_grant(&fake, 0, 6);
	launch_on(stream, 60000);
	EVENTUALLY(inside_unbound(0));
	CHECK(preempted(ask_back(6)) && state().off);
	end();
}

static atomic_uint refused; /* the driver refuses this control, for a time */

static int refusing_ioctl(int fd, unsigned long request, ...)
{
	static nvs_rm_ioctl *next;
	struct rm_control *c;
	va_list list;
	void *arg;

	va_start(list, request);
	arg = va_arg(list, void *);
	va_end(list);
	c = arg;
	if (request == RM_CONTROL && c->command == atomic_load(&refused)) {
		c->status = RM_NOT_PERMITTED;
		return 0;
	}
	next = next ? next : (nvs_rm_ioctl *)dlsym(RTLD_NEXT, "ioctl");
	return next(fd, request, arg);
}

static void a_driver_that_refuses_is_tried_again(void)
{
	hold_with(1);
	atomic_store(&refused, RM_CHANNELS);
	nvs_rm_set_next(refusing_ioctl);
	says_of_channels(NVS_CONTROL_REFUSED);
	atomic_store(&refused, 0);
	has_controls();
	end();
}

/* Channels are not tried before slices work. */
static void refused_slices_are_tried_again(void)
{
	hold_with(1);
	atomic_store(&refused, RM_SET_SLICE);
	nvs_rm_set_next(refusing_ioctl);
	says_of_channels(NVS_CONTROL_UNTRIED);
	CHECK(state().slice == NVS_RM_REFUSED);
	atomic_store(&refused, 0);
	has_controls();
	end();
}

/* An earlier scheduler knows no flags: RELEASE and REQUEST are what it is told. */
static void an_earlier_scheduler(void)
{
	hold_with(60000);
	fake.page->features = 0;
	CHECK(ask_back(5).u.released.flags == 0);
	CHECK(state().off);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 6);
	EVENTUALLY(!state().off);
	end();
}

static void threads_wait_at_the_gate(void)
{
	unsigned ms = 0;
	pthread_t t;

	be_preempted();
	CHECK(pthread_create(&t, NULL, launcher, &ms) == 0);
	nap_ms(100);
	CHECK(state().off);
	fake_grant(&fake, 0, 6);
	pthread_join(t, NULL);
	EVENTUALLY(!state().off);
	end();
}

/* The scheduler is gone for good: the work goes on without one, though nobody is at the gate. */
static void the_scheduler_is_lost(void)
{
	be_preempted();
	fake_die(&fake);
	nap_ms(500);
	CHECK(state().off);
	EVENTUALLY(!state().off);
	end();
}

static void the_scheduler_starts_anew(void)
{
	struct nvs_frame a;

	be_preempted();
	fake_die(&fake);
	fake_listen(&fake);
	fake_accept(&fake);
	fake.page->features = NVS_FEATURE_PREEMPT;
	a = fake_attach(&fake);
	CHECK(a.epoch == 0 && a.code & NVS_ATTACH_WANT);
	CHECK(state().off);
	fake_grant(&fake, 0, 1);
	EVENTUALLY(!state().off);
	CHECK(preempted(ask_back(1)));
	end();
}

/* It dies while the shim drains; the next one hears of the epoch that was held. */
static void the_scheduler_dies_while_it_drains(void)
{
	struct nvs_frame a;

	hold_with(60000);
	fake_revoke(&fake, 0, 5);
	fake_die(&fake);
	fake_listen(&fake);
	fake_accept(&fake);
	fake.page->features = NVS_FEATURE_PREEMPT;
	a = fake_attach(&fake);
	if (a.epoch == 5)
		CHECK(preempted(fake_expect(&fake, NVS_RELEASE)));
	else
		CHECK(a.code & NVS_ATTACH_WANT); /* the channels were off before it died */
	EVENTUALLY(state().off);
	end();
}

static void a_context_is_destroyed(void)
{
	hold_with(3000);
	CHECK(preempted(ask_back(5)));
	CHECK(state().off);
	CU(cuCtxDestroy_v2(context)); /* waits for the kernel */
	end();
}

/* Another context of a preempted process ends, or could not: its work goes on with its next grant only. */
static void another_context_is_destroyed(void)
{
	CUcontext second, popped;

	begin();
	CU(cuCtxCreate_v2(&second, 0, 0));
	CU(cuCtxPopCurrent_v2(&popped));
	fake_word(&fake, 0, 5);
	fake_grant(&fake, 0, 5);
	launch_on(stream, 60000);
	CHECK(preempted(ask_back(5)));
	CHECK(state().off);
	fake_expect(&fake, NVS_REQUEST);
	CU(cuCtxDestroy_v2(second));
	EVENTUALLY(state().off);
	nap_ms(100);
	CHECK(state().off);
	fake_grant(&fake, 0, 6);
	EVENTUALLY(!state().off);
	nap_ms(100);
	CHECK(!state().off);
	CHECK(preempted(ask_back(6)) && state().off);
	end();
}

/* A reference to the primary context that is given back ends nothing while another is held. */
static void references_come_and_go(void)
{
	CUcontext primary, again;

	begin();
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	hold(60000);
	CHECK(preempted(ask_back(5)) && state().off);
	for (int i = 0; i < 100; i++) {
		CU(cuDevicePrimaryCtxRetain(&again, 0));
		CHECK(again == primary);
		CU(cuDevicePrimaryCtxRelease_v2(0));
		CHECK(state().off && !state().keepers);
	}
	end();
}

/* The last reference: the driver waits for the work, so it goes on. */
static void the_last_reference_is_the_end(void)
{
	begin();
	CU(cuDevicePrimaryCtxRetain(&context, 0));
	CU(cuDevicePrimaryCtxRetain(&context, 0));
	CU(cuCtxSetCurrent(context));
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CU(cuDevicePrimaryCtxRelease_v2(0));
	hold(2000);
	CHECK(preempted(ask_back(5)) && state().off);
	CU(cuDevicePrimaryCtxRelease_v2(0)); /* without a grant */
	CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_INVALID_CONTEXT);
	end();
}

/* How long a call may take that waits for no work, on a machine that is slow: the kernel takes far longer. */
#define AT_ONCE_NS 2000000000ull

/* A drain is under way that cannot be cut. */
static void a_reference_waits_for_no_drain(void)
{
	CUcontext primary;
	uint64_t start;

	CHECK(setenv("NVSHARE_SIMGPU_RM", "refused", 1) == 0);
	begin();
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	hold(60000);
	fake_revoke(&fake, 0, 5);
	EVENTUALLY(inside_synchronises(0));
	start = test_now();
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	CU(cuDevicePrimaryCtxRelease_v2(0));
	CHECK(test_now() - start < AT_ONCE_NS && inside_synchronises(0));
	end();
}

/* Nor does a capture, whatever context it is in. */
static void a_capture_waits_for_no_drain(void)
{
	enum { RELAXED = 2 };
	CUcontext primary, popped;
	CUstream elsewhere;
	CUgraph graph;
	uint64_t start;

	CHECK(setenv("NVSHARE_SIMGPU_RM", "refused", 1) == 0);
	begin();
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	CU(cuCtxPushCurrent_v2(primary));
	CU(cuStreamCreate(&elsewhere, CU_STREAM_NON_BLOCKING));
	CU(cuCtxPopCurrent_v2(&popped));
	hold(60000);
	fake_revoke(&fake, 0, 5);
	EVENTUALLY(inside_synchronises(0));
	start = test_now();
	CU(cuStreamBeginCapture_v2(elsewhere, RELAXED));
	CU(cuStreamEndCapture(elsewhere, &graph));
	CU(cuStreamBeginCapture_v2(other, RELAXED)); /* in the context that is waited for */
	CU(cuStreamEndCapture(other, &graph));
	CHECK(test_now() - start < AT_ONCE_NS && inside_synchronises(0));
	end();
}

static void *destroyer(void *unused)
{
	(void)unused;
	CU(cuCtxDestroy_v2(context));
	return NULL;
}

/* Its end waits until the process is restored, which is on another GPU. Then it comes back. */
static void a_context_ends_on_another_gpu(void)
{
	static const uint8_t there[16] = { 7 };
	struct nvs_frame r;
	pthread_t t;

	hold_with(1);
	CU(cuStreamSynchronize(stream));
	CHECK(!preempted(ask_back(5)));
	fake_send(&fake, NVS_SUSPEND, 0, NVS_SUSPEND_PREPARE, 0);
	CHECK(fake_expect(&fake, NVS_SUSPENDED).code == NVS_SUSPENDED_READY);
	CHECK(pthread_create(&t, NULL, destroyer, NULL) == 0);
	r = fake_expect(&fake, NVS_SUSPENDED);
	CHECK(r.code == NVS_SUSPENDED_WAKE);
	inside_move(0, there);
	fake_send(&fake, NVS_SUSPEND, 0, NVS_SUSPEND_OVER, 0);
	pthread_join(t, NULL);
	inside_move(0, &gpu);
	CU(cuCtxCreate_v2(&context, 0, 0));
	CHECK(!state().keepers);
	end();
}

/* The scheduler has the process moved while the call is in the driver. */
static void a_context_ends_while_the_process_moves(void)
{
	static const uint8_t there[16] = { 7 };
	pthread_t t;

	hold_with(2000);
	CHECK(pthread_create(&t, NULL, destroyer, NULL) == 0);
	EVENTUALLY(state().keepers);
	inside_move(0, there);
	pthread_join(t, NULL);
	inside_move(0, &gpu);
	CU(cuCtxCreate_v2(&context, 0, 0));
	CHECK(!state().keepers);
	end();
}

static void the_process_exits(void)
{
	hold_with(3000);
	CHECK(preempted(ask_back(5)));
	fake_end(&fake);
	exit(0);
}

static void a_child_is_forked(void)
{
	int status;
	pid_t pid;

	be_preempted();
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0)
		exit(0);
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(state().off);
	fake_grant(&fake, 0, 6);
	EVENTUALLY(!state().off);
	end();
}

static sigjmp_buf out;

static void jump(int signal)
{
	(void)signal;
	siglongjmp(out, 1);
}

static void *leaver(void *started)
{
	CU(cuCtxSetCurrent(context));
	if (sigsetjmp(out, 1) == 0) {
		atomic_store((atomic_bool *)started, true);
		launch_on(other, 0);
		CHECK(!"the gate is shut");
	}
	return NULL;
}

/* A thread jumps out of its wait: the work wants the grant all the same. */
static void a_thread_jumps_out_of_the_wait(void)
{
	struct sigaction act = { .sa_handler = jump };
	static atomic_bool started;
	pthread_t t;

	be_preempted();
	CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
	CHECK(pthread_create(&t, NULL, leaver, &started) == 0);
	EVENTUALLY(atomic_load(&started));
	nap_ms(50);
	CHECK(pthread_kill(t, SIGUSR1) == 0);
	pthread_join(t, NULL);
	CHECK(state().off);
	fake_grant(&fake, 0, 6);
	EVENTUALLY(!state().off);
	end();
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(a_long_kernel_is_cut_and_goes_on),
	CASE(one_cut_is_no_habit),
	CASE(many_grants_for_one_kernel),
	CASE(work_of_the_next_grant_is_not_forgotten),
	CASE(the_kernel_ends_while_it_is_preempted),
	CASE(nothing_is_left),
	CASE(where_memory_may_leave_cuts_are_late),
	CASE(where_all_fits_drains_are_cut),
	CASE(memory_comes_in_beside_the_work),
	CASE(memory_does_not_move_in_a_reset),
	CASE(what_is_freed_waits_beside_two_contexts),
	CASE(what_is_freed_waits_for_a_green_context),
	CASE(a_driver_without_the_controls),
	CASE(a_driver_that_refuses),
	CASE(a_driver_that_only_says_so),
	CASE(a_driver_that_nobody_has_seen),
	CASE(a_driver_that_says_no_version),
	CASE(a_driver_is_seen_to_work),
	CASE(a_driver_is_seen_to_work_later),
	CASE(a_driver_that_ignores_off),
	CASE(channels_that_nobody_saw),
	CASE(nothing_is_bounded_while_nobody_waits),
	CASE(what_others_want_is_bounded),
	CASE(a_pause_bounds),
	CASE(what_is_not_cut_is_bounded),
	CASE(without_a_thread_nothing_is_cut),
	CASE(the_controls_are_tried_later),
	CASE(the_next_context_has_controls_too),
	CASE(off_is_refused_once),
	CASE(a_refusal_bounds_for_a_time),
	CASE(a_driver_that_refuses_is_tried_again),
	CASE(refused_slices_are_tried_again),
	CASE(an_earlier_scheduler),
	CASE(threads_wait_at_the_gate),
	CASE(the_scheduler_is_lost),
	CASE(the_scheduler_starts_anew),
	CASE(the_scheduler_dies_while_it_drains),
	CASE(a_context_is_destroyed),
	CASE(another_context_is_destroyed),
	CASE(references_come_and_go),
	CASE(the_last_reference_is_the_end),
	CASE(a_reference_waits_for_no_drain),
	CASE(a_capture_waits_for_no_drain),
	CASE(a_context_ends_on_another_gpu),
	CASE(a_context_ends_while_the_process_moves),
	CASE(the_process_exits),
	CASE(a_child_is_forked),
	CASE(a_thread_jumps_out_of_the_wait),
#undef CASE
};

int main(int argc, char **argv)
{
	alarm(2 * PATIENCE_MS / 1000);
	return run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
