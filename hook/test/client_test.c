// SPDX-License-Identifier: Apache-2.0
/*
 * client_test.c: the shim's life, one case per process, the shim preloaded.
 *
 *   client_test           lists the cases
 *   client_test CASE      runs one
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "life.h"

/* ---- cases ---- */

static void inert_until_init(void)
{
	unsigned t = threads(), d = descriptors();
	void *ctx;

	fake_init(&fake);
	fake_listen(&fake);
	d++;
	CHECK(cuCtxCreate_v2(&ctx, 0, 0) == 0 && launch(NULL) == 0);
	CHECK(threads() == t && descriptors() == d);
	stub_state()->init_result = 100; /* no device */
	CHECK(cuInit(0) == 100 && launch(NULL) == 0);
	CHECK(threads() == t && descriptors() == d);
	stub_state()->init_result = 0;
	CHECK(cuInit(0) == 0);
	CHECK(threads() == t + 1);
	CHECK(cuInit(0) == 0 && cuInit(0) == 0);
	CHECK(threads() == t + 1);
	fake_accept(&fake);
}

static void registers_what_it_proved(void)
{
	struct nvs_frame r;

	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	r = fake_accept(&fake);
	CHECK(r.u.reg.min_version == NVS_WIRE_VERSION && r.u.reg.channels == 1 && MUST_KNOW(r.code) == 0);
	CHECK(r.u.reg.interposed >= STUB_SUBMITS && r.u.reg.bypassed == 0);
}

static void attaches_a_gpu_when_used(void)
{
	struct nvs_frame a;

	stub_state()->gpus = 2;
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	CHECK(fake_accept(&fake).u.reg.channels == 2);
	CHECK(!fake_receive(&fake, &a, 100));
	CHECK(cuCtxCreate_v2(&contexts[1], 0, 1) == 0);
	a = fake_attach(&fake);
	CHECK(a.channel == 1 && a.u.attach.ordinal == 1 && a.epoch == 0);
	CHECK(a.u.attach.uuid[0] == 0x51 && a.u.attach.uuid[15] == 1);
	CHECK(a.u.attach.total_mem == 1u << 30);
}

static void waits_for_a_grant(void)
{
	struct launcher l;

	begin(1);
	allow(0, 0);
	start(&l, 0, 1);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	CHECK(launches(0) == 0);
	allow(0, 1);
	fake_word(&fake, 0, 5); /* the page alone opens the gate */
	EVENTUALLY(launches(0) == 1);
	finish(&l); /* errno is kept over the wait */
	fake_send(&fake, NVS_GRANT, 0, 0, 5);
	fake_revoke(&fake, 0, 5);
	CHECK(fake_expect(&fake, NVS_RELEASE).epoch == 5);
}

static void gpus_do_not_wait_for_each_other(void)
{
	struct launcher a, b;
	struct nvs_frame r;

	begin(2);
	allow(1, 1);
	start(&a, 0, 1);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	start(&b, 1, 0);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 1);
	fake_grant(&fake, 1, 9);
	EVENTUALLY(atomic_load(&b.done) > 100);
	/* A revoke of one is answered while the other's never ends. */
	allow(0, 1);
	stub_state()->work_ns = 3000000000u;
	fake_grant(&fake, 0, 4);
	EVENTUALLY(launches(0) == 1);
	stub_state()->work_ns = 1000;
	fake_revoke(&fake, 0, 4);
	nap_ms(20);
	fake_revoke(&fake, 1, 9);
	r = fake_expect(&fake, NVS_RELEASE);
	while (r.channel != 1)
		r = fake_expect(&fake, NVS_RELEASE);
	CHECK(r.epoch == 9);
	allow(1, 1);
	fake_grant(&fake, 1, 10);
	finish(&a);
	finish(&b);
}

static void releases_early_when_idle(void)
{
	struct launcher l;
	struct nvs_frame r;

	begin(1);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 3);
	finish(&l);
	CHECK(!fake_receive(&fake, &r, 100)); /* nobody waits: it keeps the grant */
	fake.page->slot[0].waiters = 1;
	fake_send(&fake, NVS_NOTICE, 0, 0, 0);
	r = fake_expect(&fake, NVS_RELEASE);
	CHECK(r.epoch == 3 && r.code == NVS_RELEASE_IDLE && r.u.released.calls == 1);
	/* The word still shows the epoch: that must not let anybody in. */
	allow(0, 0);
	fake.page->slot[0].waiters = 0;
	start(&l, 0, 1);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	CHECK(launches(0) == 1);
	allow(0, 1);
	fake_word(&fake, 0, 0);
	fake_grant(&fake, 0, 4);
	finish(&l);
}

/*
 * The page's word goes to 0 and comes back, without a frame: calls stop and go
 * on, the grant stays, also while somebody waits.
 */
static void stops_for_a_moment(void)
{
	struct nvs_frame r;
	struct launcher l;
	uint64_t soonest_ns = UINT64_MAX, back_ns, epoch = 3;
	unsigned before;

	begin(1);
	allow(0, 1);
	start(&l, 0, 0);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, epoch);
	fake.page->slot[0].waiters = 1;
	for (int i = 0; i < 40; i++) {
		/* On a machine without time for the launcher it is idle, and releases. */
		for (before = launches(0); launches(0) <= before + 10;)
			if (fake_receive(&fake, &r, 1)) {
				CHECK(r.type == NVS_RELEASE && r.epoch == epoch);
				fake_expect(&fake, NVS_REQUEST);
				fake_grant(&fake, 0, ++epoch);
			}
		fake_word(&fake, 0, 0);
		nap_ms(5); /* the call that was under way is over, or the next says so */
		allow(0, 0);
		nap_ms(5);
		allow(0, 1);
		before = launches(0);
		back_ns = test_now();
		fake_word(&fake, 0, (uint32_t)epoch);
		while (launches(0) == before && test_now() - back_ns < 200000000u)
			sched_yield();
		if (test_now() - back_ns < soonest_ns)
			soonest_ns = test_now() - back_ns;
	}
	CHECK(epoch < 3 + 40); /* a stop is no reason to release */
	/* It goes on when the word is back, not when it next looks by itself. */
	CHECK(soonest_ns < 100000000u);
	/* Asked back while shut, it closes for good. */
	fake_word(&fake, 0, 0);
	nap_ms(5);
	fake_revoke(&fake, 0, epoch);
	CHECK(fake_expect(&fake, NVS_RELEASE).epoch == epoch);
	fake.page->slot[0].waiters = 0;
	fake_grant(&fake, 0, epoch + 1);
	finish(&l);
}

/* A step lets one call pass while the gate is shut, and none if nobody is there. */
static void makes_one_call_for_its_gang(void)
{
	struct nvs_frame r;
	struct launcher l;
	uint64_t start_ns;
	unsigned i = 1;

	begin(1);
	allow(0, 1);
	start(&l, 0, 0);
	fake_expect(&fake, NVS_REQUEST);
	for (unsigned long made = 0; made < 20; i++) {
		fake_send(&fake, NVS_REVOKE, 0, NVS_REVOKE_STEP, i);
		r = fake_expect(&fake, NVS_RELEASE);
		CHECK(r.epoch == i && r.code == NVS_RELEASE_REVOKED);
		/* None if the machine did not let the thread run within the step. */
		CHECK(r.u.released.calls <= 1);
		made += r.u.released.calls;
		CHECK(launches(0) == made);
		fake_expect(&fake, NVS_REQUEST);
	}
	fake_grant(&fake, 0, i);
	finish(&l);
	fake_revoke(&fake, 0, i);
	CHECK(fake_expect(&fake, NVS_RELEASE).epoch == i);
	start_ns = test_now();
	fake_send(&fake, NVS_REVOKE, 0, NVS_REVOKE_STEP, i + 1);
	r = fake_expect(&fake, NVS_RELEASE);
	CHECK(r.epoch == i + 1 && r.u.released.calls == 0);
	CHECK(test_now() - start_ns >= NVS_STEP_NS);
	/* It has not left anything behind. */
	allow(0, 0);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	nap_ms(5);
	allow(0, 1);
	fake_grant(&fake, 0, i + 2);
	finish(&l);
}

/*
 * The grant comes and goes before the client thread looks at either. What went ahead
 * still runs: it is drained before the release.
 */
static void what_went_ahead_is_drained_before_a_release(void)
{
	struct nvs_frame r;

	begin(1);
	allow(0, 1);
	fake.page->slot[0].flags = NVS_GRANT_STANDING;
	stub_state()->work_ns = 300000000u;
	CHECK(cuCtxSetCurrent(contexts[0]) == 0 && launch(NULL) == 0);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	fake_send(&fake, NVS_GRANT, 0, 0, 3);
	fake_send(&fake, NVS_REVOKE, 0, 0, 3);
	r = fake_expect(&fake, NVS_RELEASE);
	CHECK(r.epoch == 3);
	CHECK(test_now() >= atomic_load(&stub_state()->busy_until[0]));
}

/* A latency client that would be let in at once asks, and does not wait. */
static void goes_ahead_of_its_grant(void)
{
	struct nvs_frame r;
	struct launcher l;

	begin(1);
	allow(0, 1);
	fake.page->slot[0].flags = NVS_GRANT_STANDING;
	start(&l, 0, 0);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	EVENTUALLY(launches(0) > 10);
	finish(&l); /* so that a pause of its thread is not an idle GPU */
	fake.page->slot[0].waiters = 1;
	fake.page->slot[0].flags = NVS_GRANT_LATENCY;
	fake_grant(&fake, 0, 3);
	/* What went ahead is drained as well before the release. */
	r = fake_expect(&fake, NVS_RELEASE);
	CHECK(r.epoch == 3 && r.code == NVS_RELEASE_IDLE);
	fake_word(&fake, 0, 0);
	/* Without the flag it waits again. */
	fake.page->slot[0].flags = 0;
	allow(0, 0);
	start(&l, 0, 1);
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == 0);
	CHECK(!fake_receive(&fake, &r, 50));
	allow(0, 1);
	fake_grant(&fake, 0, 4);
	finish(&l);
}

static uint64_t clock_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Who waits would have to move memory first: a short pause is not worth that. */
static void keeps_the_gpu_over_short_pauses(void)
{
	struct launcher l;
	struct nvs_frame r;
	uint64_t began;

	begin(1);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake.page->slot[0].waiters = 1;
	fake.page->slot[0].flags = NVS_SLOT_PATIENT;
	began = clock_ns();
	fake_grant(&fake, 0, 3);
	finish(&l);
	r = fake_expect(&fake, NVS_RELEASE);
	CHECK(r.epoch == 3 && r.code == NVS_RELEASE_IDLE);
	CHECK(clock_ns() - began >= NVS_PATIENT_IDLE_NS);
}

/*
 * The next UTIL. A launcher that the machine stops for a moment releases the GPU early,
 * which this is not about: it gets the GPU again, with *epoch one higher.
 */
static struct nvs_util expect_util(uint64_t *epoch)
{
	struct nvs_frame f;
	struct nvs_util u;

	for (;;) {
		CHECK(fake_receive(&fake, &f, PATIENCE_MS));
		if (f.type == NVS_UTIL)
			break;
		if (f.type == NVS_REQUEST)
			fake_grant(&fake, f.channel, ++*epoch);
		else
			CHECK(f.type == NVS_RELEASE && f.epoch == *epoch && f.code == NVS_RELEASE_IDLE);
	}
	u = f.u.util;
	CHECK(u.samples > 0 && u.busy <= u.samples && u.samples <= NVS_UTIL_MAX);
	return u;
}

/* While others want the GPU: how often it has work of this process. */
static void tells_how_often_the_gpu_has_work(void)
{
	struct launcher l;
	struct nvs_frame r;
	struct nvs_util u;
	uint64_t epoch = 3;

	begin(1);
	allow(0, 1);
	fake.page->features = NVS_FEATURE_UTIL;
	stub_state()->work_ns = 0; /* each launch has ended when it is asked about */
	start(&l, 0, 0);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, epoch);
	CHECK(!fake_receive(&fake, &r, 600)); /* nobody waits */
	fake.page->slot[0].waiters = 1;
	fake_send(&fake, NVS_NOTICE, 0, 0, 0);
	CHECK(expect_util(&epoch).busy == 0);
	stub_state()->work_ns = 3600000000000u; /* never ends */
	expect_util(&epoch);
	u = expect_util(&epoch);
	CHECK(u.busy == u.samples);
	/* At the same time as others: whoever is there counts, waiting or not. */
	fake.page->slot[0].waiters = 0;
	fake.page->slot[0].present = 1;
	fake.page->slot[0].flags = NVS_GRANT_CONCURRENT;
	expect_util(&epoch);
	u = expect_util(&epoch);
	CHECK(u.busy == u.samples && !u.calls);
	/* In a turn that others share: it reports although nobody waits. */
	fake.page->slot[0].present = 0;
	fake.page->slot[0].flags = NVS_GRANT_SHARED;
	expect_util(&epoch);
	u = expect_util(&epoch);
	CHECK(u.busy == u.samples);
	/* How many calls that were, to a scheduler that knows it; and, once, that there are no channels. */
	fake.page->features |= NVS_FEATURE_CONTROLS;
	for (bool calls = false, controls = false; !calls || !controls;) {
		CHECK(fake_receive(&fake, &r, PATIENCE_MS));
		calls = calls || (r.type == NVS_UTIL && r.u.util.calls);
		controls = controls || r.type == NVS_CONTROLS;
	}
	finish(&l);
	/* Without calls there is nothing to tell, though the GPU has work. */
	while (fake_receive(&fake, &r, 1500))
		CHECK(r.type == NVS_UTIL);
	/* A scheduler that does not know the frame never gets one. */
	fake.page->features = 0;
	start(&l, 0, 0);
	CHECK(!fake_receive(&fake, &r, 600));
	finish(&l);
}

/* Each stream that was ever used, but only until it was seen to be idle. */
static void an_idle_stream_is_asked_once(void)
{
	enum { STREAMS = 400 };
	static void *streams[STREAMS];
	struct nvs_util u = { 0 };
	unsigned long asked, samples = 0;
	uint64_t epoch = 3;

	begin(1);
	fake.page->features = NVS_FEATURE_UTIL;
	fake.page->slot[0].present = 1;
	fake.page->slot[0].flags = NVS_GRANT_CONCURRENT;
	stub_state()->work_ns = 0;
	hold(epoch);
	for (unsigned i = 0; i < STREAMS; i++)
		CHECK(cuStreamCreate(&streams[i], 1) == 0 && launch(streams[i]) == 0);
	nap_ms(100);
	expect_util(&epoch); /* all have been asked */
	asked = atomic_load(&stub_state()->asked);
	for (unsigned i = 0; i < 20; i++) {
		CHECK(launch(streams[0]) == 0);
		nap_ms(50);
	}
	asked = atomic_load(&stub_state()->asked) - asked;
	for (struct nvs_frame f; fake_receive(&fake, &f, 0);)
		samples += f.type == NVS_UTIL ? f.u.util.samples : 0;
	CHECK(samples > 0 && asked > 0 && asked < STREAMS + 100); /* 20 times one, and a straggler's first */
	/* What is launched later is seen. */
	stub_state()->work_ns = 3600000000000u;
	CHECK(launch(streams[7]) == 0);
	for (unsigned i = 0; u.busy == 0 || u.busy != u.samples; i++) {
		CHECK(i < 1000 && launch(streams[7]) == 0);
		u = expect_util(&epoch);
	}
}

static void runs_without_a_scheduler(void)
{
	struct launcher l;
	struct nvs_frame a;

	fake_init(&fake); /* nobody listens */
	CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	allow(0, 1);
	start(&l, 0, 0);
	EVENTUALLY(atomic_load(&l.done) > 1000);
	/* One appears: what ran unarbitrated is drained before the attach. */
	fake_listen(&fake);
	fake_accept(&fake);
	a = fake_expect(&fake, NVS_ATTACH);
	CHECK(a.epoch == 0);
	CHECK(test_now() >= atomic_load(&stub_state()->busy_until[0]));
	allow(0, 0);
	nap_ms(50);
	CHECK(atomic_load(&stub_state()->violations) == 0);
	allow(0, 1);
	fake_send(&fake, NVS_ATTACHED, 0, 0, 0);
	if (!(a.code & NVS_ATTACH_WANT))
		fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 1);
	a.code = 0;
	{
		unsigned long before = atomic_load(&l.done);

		EVENTUALLY(atomic_load(&l.done) > before + 100);
	}
	finish(&l);
}

static void holder_survives_a_restart(void)
{
	struct launcher l;
	struct nvs_frame f;
	unsigned long before;

	begin(1);
	allow(0, 1);
	start(&l, 0, 0);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 0x100000007ull);
	EVENTUALLY(atomic_load(&l.done) > 100);
	fake_die(&fake);
	before = atomic_load(&l.done);
	EVENTUALLY(atomic_load(&l.done) > before + 1000); /* runs on */
	fake_listen(&fake);
	CHECK(MUST_KNOW(fake_accept(&fake).code) == NVS_REGISTER_RECONNECT);
	f = fake_expect(&fake, NVS_ATTACH);
	CHECK(f.epoch == 0x100000007ull);
	fake_word(&fake, 0, 7); /* adopted */
	fake_send(&fake, NVS_ATTACHED, 0, 0, 0);
	before = atomic_load(&l.done);
	EVENTUALLY(atomic_load(&l.done) > before + 1000);
	fake_revoke(&fake, 0, 0x100000007ull);
	CHECK(fake_expect(&fake, NVS_RELEASE).epoch == 0x100000007ull);
	allow(0, 0);
	fake_expect(&fake, NVS_REQUEST);

	/* Again, and this time the new scheduler does not want to know. */
	allow(0, 1);
	fake_grant(&fake, 0, 0x100000008ull);
	before = atomic_load(&l.done);
	EVENTUALLY(atomic_load(&l.done) > before + 100);
	fake_die(&fake);
	fake_listen(&fake);
	fake_accept(&fake);
	fake_attach(&fake);
	CHECK(fake_expect(&fake, NVS_RELEASE).epoch == 0x100000008ull);
	allow(0, 0);
	fake_expect(&fake, NVS_REQUEST);
	CHECK(atomic_load(&stub_state()->violations) == 0);
	allow(0, 1);
	fake_grant(&fake, 0, 0x100000009ull);
	finish(&l);
}

static void waiter_opens_after_a_loss(void)
{
	struct launcher l;
	uint64_t lost;

	begin(1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	lost = test_now();
	fake_die(&fake);
	finish(&l);
	CHECK(test_now() - lost >= 4000000000u);
}

static void waiter_stays_when_closed(void)
{
	struct launcher l;

	CHECK(setenv("NVSHARE_SCHEDULER_LOSS", "closed", 1) == 0);
	begin(1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake_die(&fake);
	nap_ms(6500);
	CHECK(launches(0) == 0);
	fake_listen(&fake);
	fake_accept(&fake);
	CHECK(fake_attach(&fake).code & NVS_ATTACH_WANT);
	allow(0, 1);
	fake_grant(&fake, 0, 2);
	finish(&l);
}

static void refuses_nonsense(void)
{
	struct launcher l;

	begin(1);
	fake_send(&fake, 99, 0, 0, 0); /* no such frame: the connection is closed */
	CHECK(MUST_KNOW(fake_accept(&fake).code) == NVS_REGISTER_RECONNECT);
	fake_attach(&fake);
	CHECK(send(fake.conn, "short", 5, 0) == 5);
	fake_accept(&fake);
	fake_attach(&fake);
	fake_send(&fake, NVS_GRANT, 31, 0, 1); /* no such GPU */
	fake_accept(&fake);
	fake_attach(&fake);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 1);
	finish(&l);
}

static void unknown_gpu_runs_free(void)
{
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	fake_accept(&fake);
	CHECK(cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	fake_expect(&fake, NVS_ATTACH);
	fake_send(&fake, NVS_ATTACHED, 0, NVS_ERR_UNKNOWN_GPU, 0);
	CHECK(launch(NULL) == 0);
}

static void captures_are_left_alone(void)
{
	struct launcher l;
	void *stream, *graph;
	unsigned long syncs;

	begin(1);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 3);
	finish(&l);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(cuStreamCreate(&stream, 0) == 0);
	CHECK(launch(stream) == 0);
	CHECK(cuStreamBeginCapture_v2(stream, 0) == 0);
	syncs = atomic_load(&stub_state()->syncs);
	fake_revoke(&fake, 0, 3);
	/* What is recorded does not run, so it needs no grant. */
	for (int i = 0; i < 100; i++) {
		CHECK(launch(stream) == 0);
		nap_ms(1);
	}
	CHECK(atomic_load(&stub_state()->recorded) == 100);
	CHECK(atomic_load(&stub_state()->syncs) == syncs);
	CHECK(cuStreamEndCapture(stream, &graph) == 0);
	CHECK(fake_expect(&fake, NVS_RELEASE).epoch == 3);
	CHECK(atomic_load(&stub_state()->syncs) > syncs);
	CHECK(atomic_load(&stub_state()->broken_captures) == 0);
}

static void depth_is_bounded_beside_others(void)
{
	struct launcher l;
	uint64_t ahead = 0;

	begin(1);
	allow(0, 1);
	stub_state()->work_ns = 100000; /* of wall time; launches are faster */
	start(&l, 0, 0);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 3);
	EVENTUALLY(atomic_load(&l.done) > 1000);
	CHECK(atomic_load(&stub_state()->events) == 0); /* alone: nothing is done */
	fake.page->slot[0].present = 1;
	EVENTUALLY(atomic_load(&stub_state()->events) > 10);
	for (int i = 0; i < 50; i++) {
		uint64_t until = atomic_load(&stub_state()->busy_until[0]), now = test_now();

		ahead = until > now && until - now > ahead ? until - now : ahead;
		nap_ms(1);
	}
	CHECK(ahead < 1000000000u);
	finish(&l);
}

/* Nothing is bounded while a stream captures: the threads that wait behind one that ends a batch go on with it. */
static void a_capture_ends_the_waits(void)
{
	enum { THREADS = 40 };
	struct launcher l[THREADS];
	unsigned long done = 0;
	uint64_t began;
	void *stream, *graph;

	begin(1);
	hold(3);
	CHECK(cuStreamCreate(&stream, 0) == 0);
	fake.page->slot[0].present = 1;
	stub_state()->queued = 1;
	stub_state()->work_ns = 100000000;
	began = test_now();
	for (int i = 0; i < THREADS; i++)
		start(&l[i], 0, 1);
	nap_ms(100);
	for (int i = 0; i < THREADS; i++)
		done += atomic_load(&l[i].done);
	CHECK(done < THREADS);
	CHECK(cuStreamBeginCapture_v2(stream, 0) == 0);
	for (int i = 0; i < THREADS; i++)
		finish(&l[i]);
	CHECK(test_now() - began < 3000000000u);
	CHECK(cuStreamEndCapture(stream, &graph) == 0);
}

/* Where nobody takes turns a launch costs no event, unless a core limit may take the GPU away. */
static void depth_is_free_without_turns(void)
{
	begin(1);
	allow(0, 1);
	fake.page->slot[0].present = 1;
	fake.page->slot[0].flags = NVS_GRANT_CONCURRENT;
	fake_word(&fake, 0, 3);
	for (int i = 0; i < 1000; i++)
		CHECK(launch(NULL) == 0);
	CHECK(atomic_load(&stub_state()->events) == 0);
	fake.page->slot[0].core_limit = 50;
	for (int i = 0; i < 1000; i++)
		CHECK(launch(NULL) == 0);
	CHECK(atomic_load(&stub_state()->events) > 0);
	fake.page->slot[0].core_limit = 0;
	/* A latency client beside an exclusive holder is to leave soon. */
	fake.page->slot[0].flags = NVS_GRANT_CONCURRENT | NVS_GRANT_LATENCY;
	atomic_store(&stub_state()->events, 0);
	for (int i = 0; i < 1000; i++)
		CHECK(launch(NULL) == 0);
	CHECK(atomic_load(&stub_state()->events) > 0);
}

/*
 * Bursts of long work with a turn of somebody else after each, when nothing is
 * known but much short work before: `calls` in a burst, of `each` nanoseconds.
 * After so many bursts less than bound, in nanoseconds, is ahead of the GPU, in two that
 * follow each other. A busy machine spoils some, and gets more of them; a client that
 * learns nothing spoils all.
 */
static void expect_bursts_bounded(int bursts, int calls, uint64_t each, bool awaited, uint64_t bound)
{
	struct launcher l;
	struct nvs_frame frame;
	uint64_t ahead[2], epoch = 3;

	begin(1);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake.page->slot[0].present = 1;
	fake_grant(&fake, 0, epoch);
	finish(&l);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	stub_state()->queued = 1;
	stub_state()->work_ns = awaited ? 1000 : 5000;
	for (int i = 0; i < 3000; i++) {
		CHECK(launch(NULL) == 0);
		if (awaited)
			CHECK(cuCtxSynchronize() == 0);
	}
	stub_state()->work_ns = each;
	for (int burst = 0;; burst++) {
		uint64_t *most = &ahead[burst % 2];

		*most = 0;
		for (int i = 0; i < calls; i++) {
			uint64_t until, now;

			CHECK(launch(NULL) == 0);
			now = test_now();
			until = atomic_load(&stub_state()->busy_until[0]);
			if (until > now && until - now > *most)
				*most = until - now;
		}
		CHECK(*most > 0);
		if (burst >= bursts - 1 && ahead[0] < bound && ahead[1] < bound)
			return;
		CHECK(burst < 8 * bursts);
		fake_revoke(&fake, 0, epoch);
		do
			CHECK(fake_receive(&fake, &frame, PATIENCE_MS));
		while (frame.type == NVS_REQUEST);
		CHECK(frame.type == NVS_RELEASE && frame.epoch == epoch);
		fake_grant(&fake, 0, ++epoch);
	}
}

static void depth_is_bounded_in_bursts(void)
{
	expect_bursts_bounded(16, 100, 500000, false, 25000000); /* of 50 ms */
}

/* Turns that end before a batch was ever queued behind another. */
static void depth_learns_from_drains(void)
{
	expect_bursts_bounded(8, 24, 10000000, true, 150000000); /* of 240 ms: a drain that begins late tells, too */
}

/* Short work is not held up: the GPU never runs dry while the thread naps. */
static void depth_follows_short_work(void)
{
	struct launcher l;
	unsigned long events;
	unsigned judged = 0;

	begin(1);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake.page->slot[0].present = 1;
	fake_grant(&fake, 0, 3);
	finish(&l);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	stub_state()->queued = 1;
	stub_state()->work_ns = 10000;
	for (int i = 0; i < 3000; i++)
		CHECK(launch(NULL) == 0);
	/*
	 * About 250 calls are 2.5 ms of work. A window that took longer than the work says
	 * nothing: the machine was too slow, and each batch short. A wrong depth spoils the
	 * others, all of them; the test ends without a verdict where there are too few.
	 */
	for (uint64_t until = test_now() + (uint64_t)PATIENCE_MS * 1000000u; judged < 20 && test_now() < until;) {
		uint64_t began = test_now();

		events = atomic_load(&stub_state()->events);
		for (int i = 0; i < 10000; i++)
			CHECK(launch(NULL) == 0);
		events = atomic_load(&stub_state()->events) - events;
		if (events < 10000 / 4) /* two calls each at first */
			return;
		judged += test_now() - began < 10000 * stub_state()->work_ns * 3 / 2;
	}
	CHECK(judged < 20);
}

static void counts_memory(void)
{
	struct nvs_frame s;
	unsigned long long a, b;

	begin(1);
	CHECK(cuMemAlloc_v2(&a, 3 << 20) == 0 && cuMemAlloc_v2(&b, 1 << 20) == 0);
	CHECK(cuMemFree_v2(a) == 0);
	do
		CHECK(recv(fake.conn, &s, sizeof(s), 0) == sizeof(s));
	while (s.type != NVS_STATS || s.u.stats.mem_bytes != 1 << 20);
	CHECK(s.u.stats.mem_peak == 4 << 20);
}

/* The statistics of what the process has now. What is claimed counts before it exists, and is no peak then. */
static struct nvs_stats memory_stats(uint64_t bytes)
{
	struct nvs_frame s;

	alarm(PATIENCE_MS / 1000); /* its default ends the test, which then fails */
	do
		CHECK(recv(fake.conn, &s, sizeof(s), 0) == sizeof(s));
	while (s.type != NVS_STATS || s.u.stats.mem_bytes != bytes || s.u.stats.mem_peak < bytes);
	alarm(0);
	return s.u.stats;
}

/* One that is larger than what is reserved by default. */
static void peak_counts_a_large_allocation(void)
{
	unsigned long long p;

	begin(1);
	CHECK(cuMemAlloc_v2(&p, 300 << 20) == 0);
	CHECK(memory_stats(300 << 20).mem_peak == 300 << 20);
	/* And not what was never there. */
	stub_state()->memory_result = 2;
	CHECK(cuMemAlloc_v2(&p, 1 << 20) == 2 && cuMemAlloc_v2(&p, 500 << 20) == 2);
	stub_state()->memory_result = 0;
	CHECK(cuMemAlloc_v2(&p, 4096) == 0);
	CHECK(memory_stats((300 << 20) + 4096).mem_peak == (300 << 20) + 4096);
}

/* ---- with a limit ---- */

#define LIMIT (1024ull << 20)

static void begin_limited(void)
{
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	fake_accept(&fake);
	fake.page->slot[0].mem_limit = LIMIT;
	CHECK(cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	fake_attach(&fake);
}

static void *allocate(void *bytes)
{
	unsigned long long p;

	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(cuMemAlloc_v2(&p, (uintptr_t)bytes) == 0);
	return NULL;
}

/* Starts an allocation; returns what it asks the scheduler for. */
static struct nvs_frame ask_for(pthread_t *t, uintptr_t bytes)
{
	CHECK(pthread_create(t, NULL, allocate, (void *)bytes) == 0);
	return fake_expect(&fake, NVS_RESERVE);
}

static void grant_memory(const struct nvs_frame *asked)
{
	struct nvs_frame r = { .version = NVS_WIRE_VERSION, .type = NVS_RESERVED };

	r.u.memory = (struct nvs_reserved){ asked->u.reserve.total, asked->u.reserve.total, LIMIT,
					    asked->u.reserve.serial, { 0 } };
	CHECK(send(fake.conn, &r, sizeof(r), MSG_NOSIGNAL) == sizeof(r));
}

/* A drain takes as long as the work; who allocates has the answer before. */
static void allocates_beside_a_drain(void)
{
	struct nvs_frame f;
	pthread_t t;

	begin_limited();
	stub_state()->work_ns = 5000000000u;
	hold(5);
	fake_revoke(&fake, 0, 5);
	nap_ms(100);
	f = ask_for(&t, 500 << 20);
	grant_memory(&f);
	pthread_join(t, NULL);
	CHECK(test_now() < atomic_load(&stub_state()->busy_until[0]));
	CHECK(fake_expect(&fake, NVS_RELEASE).epoch == 5);
}

/* From now on every system call of this thread but a few ends the process. */
static void forbid_system_calls(void)
{
#define ALLOW(nr) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		ALLOW(SYS_futex), /* the shim's thread may have a lock just now */
		ALLOW(SYS_write),
		ALLOW(SYS_exit),
		ALLOW(SYS_exit_group),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(code[0]), code };

	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

static void *allocate_and_free(void *arg)
{
	unsigned long long p;

	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	forbid_system_calls();
	for (int i = 0; i < 1000; i++) {
		CHECK(cuMemAlloc_v2(&p, 4096) == 0);
		CHECK(cuMemFree_v2(p) == 0);
	}
	syscall(SYS_exit, 0);
	return arg;
}

/* What fits into the reservation is a matter of a lock and two sums. */
static void small_allocations_stay_in_the_process(void)
{
	struct nvs_frame f;
	pthread_t t;

	begin_limited();
	f = ask_for(&t, 1 << 20);
	grant_memory(&f);
	pthread_join(t, NULL);
	CHECK(pthread_create(&t, NULL, allocate_and_free, NULL) == 0);
	CHECK(pthread_join(t, NULL) == 0);
}

/* A scheduler that is older than limits would close the connection. */
static void an_old_scheduler_is_not_asked_for_memory(void)
{
	unsigned long long p;
	struct nvs_frame f;

	fake_init(&fake);
	fake.old = true;
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	fake_accept(&fake);
	CHECK(cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	CHECK(cuMemAlloc_v2(&p, 1 << 20) == 0); /* before and after ATTACHED */
	fake_attach(&fake);
	CHECK(cuMemAlloc_v2(&p, 300 << 20) == 0 && cuMemFree_v2(p) == 0);
	CHECK(!fake_receive(&fake, &f, 1500));
}

static void forks(void)
{
	struct launcher l;
	struct nvs_frame r;
	struct fake parent;
	unsigned before;
	int status;
	pid_t pid;

	begin(1);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST); /* the parent's gate is closed */
	before = descriptors();
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		alarm(600);
		/* One less: the connection. The child is inert, its calls pass. */
		if (descriptors() != before - 1 || threads() != 3)
			_exit(1);
		if (launch(NULL) != 0)
			_exit(2);
		if (cuInit(0) != 0) /* now it is a client of its own */
			_exit(3);
		_exit(launch(NULL) == 0 ? 0 : 4);
	}
	parent = fake;
	CHECK(MUST_KNOW(fake_accept(&fake).code) == 0); /* not a reconnect */
	r = fake_attach(&fake);
	if (!(r.code & NVS_ATTACH_WANT))
		fake_expect(&fake, NVS_REQUEST);
	fake_word(&fake, 0, 2); /* it may be gone before a frame could be sent */
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
	if (WEXITSTATUS(status))
		fprintf(stderr, "child: step %d\n", WEXITSTATUS(status));
	CHECK(WEXITSTATUS(status) == 0);
	/* The parent never noticed. */
	fake_grant(&parent, 0, 8);
	finish(&l);
	fake_revoke(&parent, 0, 8);
	CHECK(fake_expect(&parent, NVS_RELEASE).epoch == 8);
}

static atomic_int signalled;
static void on_signal(int n) { (void)n; atomic_store(&signalled, (int)syscall(SYS_gettid)); }

static void takes_no_signals(void)
{
	struct sigaction a = { .sa_handler = on_signal };

	begin(1);
	CHECK(sigaction(SIGUSR1, &a, NULL) == 0);
	CHECK(kill(getpid(), SIGUSR1) == 0);
	EVENTUALLY(atomic_load(&signalled));
	CHECK(atomic_load(&signalled) == getpid()); /* the main thread, not the shim's */
}

static const struct life_case cases[] = {
#define CASE(name) { #name, name }
	CASE(inert_until_init),
	CASE(registers_what_it_proved),
	CASE(attaches_a_gpu_when_used),
	CASE(waits_for_a_grant),
	CASE(gpus_do_not_wait_for_each_other),
	CASE(releases_early_when_idle),
	CASE(keeps_the_gpu_over_short_pauses),
	CASE(stops_for_a_moment),
	CASE(makes_one_call_for_its_gang),
	CASE(goes_ahead_of_its_grant),
	CASE(what_went_ahead_is_drained_before_a_release),
	CASE(tells_how_often_the_gpu_has_work),
	CASE(an_idle_stream_is_asked_once),
	CASE(runs_without_a_scheduler),
	CASE(holder_survives_a_restart),
	CASE(waiter_opens_after_a_loss),
	CASE(waiter_stays_when_closed),
	CASE(refuses_nonsense),
	CASE(unknown_gpu_runs_free),
	CASE(captures_are_left_alone),
	CASE(depth_is_bounded_beside_others),
	CASE(a_capture_ends_the_waits),
	CASE(depth_is_free_without_turns),
	CASE(depth_is_bounded_in_bursts),
	CASE(depth_learns_from_drains),
	CASE(depth_follows_short_work),
	CASE(counts_memory),
	CASE(peak_counts_a_large_allocation),
	CASE(allocates_beside_a_drain),
	CASE(small_allocations_stay_in_the_process),
	CASE(an_old_scheduler_is_not_asked_for_memory),
	CASE(forks),
	CASE(takes_no_signals),
};

int main(int argc, char **argv)
{
	return life_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
