// SPDX-License-Identifier: Apache-2.0
/*
 * recovery_test.c: what would block, crash or mislead an application, and must
 * not. As client_test.c: one case per process, the shim preloaded.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "life.h"

/* The next RELEASE; a REQUEST on the way is fine. */
static struct nvs_frame released(void)
{
	struct nvs_frame f;

	do
		CHECK(fake_receive(&fake, &f, PATIENCE_MS));
	while (f.type == NVS_REQUEST);
	CHECK(f.type == NVS_RELEASE);
	return f;
}

static unsigned mapped_pages(void)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned n = 0;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		n += strstr(line, "grant-page") && strncmp(strchr(line, ' ') + 1, "r--", 3) == 0;
	fclose(f);
	return n;
}

/* ---- drains that wait for the process itself ---- */

/* A kernel that ends when the next one comes; the thread with it is at the gate. */
static void drain_waits_for_a_thread_at_the_gate(void)
{
	struct launcher l;
	struct nvs_frame f;

	begin(1);
	hold(3);
	atomic_store(&stub_state()->stuck_until, 3);
	fake_revoke(&fake, 0, 3);
	CHECK(!fake_receive(&fake, &f, 100));
	start(&l, 0, 2);
	/* Within the grace of ten seconds the GPU is still ours. */
	CHECK(released().epoch == 3);
	CHECK(launches(0) == 3);
	CHECK(test_now() >= atomic_load(&stub_state()->busy_until[0]));
	finish(&l);
	/* The way through is closed again. */
	allow(0, 0);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	CHECK(!fake_receive(&fake, &f, 100) && launches(0) == 3);
	allow(0, 1);
	fake_grant(&fake, 0, 4);
	finish(&l);
}

/* The same, and only many rounds help: each drain ends a little later. */
static void drain_waits_more_than_once(void)
{
	struct launcher l;

	begin(1);
	hold(3);
	atomic_store(&stub_state()->stuck_until, 1ul << 40);
	fake_revoke(&fake, 0, 3);
	start(&l, 0, 1);
	finish(&l); /* first window */
	nap_ms(100);
	start(&l, 0, 1);
	finish(&l); /* second window */
	CHECK(launches(0) == 3);
	atomic_store(&stub_state()->stuck_until, 0);
	CHECK(released().epoch == 3);
}

/*
 * With a grace so short that nearly every drain is reopened, threads that launch
 * all the time, and drains that end at any moment: after the release nothing.
 */
static void passes_end_with_the_release(void)
{
	struct nvs_frame revoke = { .version = NVS_WIRE_VERSION, .type = NVS_REVOKE };
	struct launcher l[4];
	unsigned long before, passed = 0;

	begin(1);
	allow(0, 1);
	stub_state()->work_ns = 3000000;
	for (int i = 0; i < 4; i++)
		start(&l[i], 0, 0);
	for (uint64_t epoch = 5; epoch < 45; epoch++) {
		allow(0, 1);
		fake_grant(&fake, 0, epoch);
		before = launches(0);
		EVENTUALLY(launches(0) > before);
		revoke.epoch = epoch;
		revoke.u.revoke.grace_ns = 2000000;
		fake_word(&fake, 0, 0);
		CHECK(send(fake.conn, &revoke, sizeof(revoke), MSG_NOSIGNAL) == sizeof(revoke));
		nap_ms(1);
		before = launches(0);
		CHECK(released().epoch == epoch);
		CHECK(test_now() >= atomic_load(&stub_state()->busy_until[0]));
		allow(0, 0);
		passed += launches(0) - before;
		before = launches(0);
		nap_ms(2);
		CHECK(launches(0) == before);
	}
	CHECK(atomic_load(&stub_state()->violations) == 0);
	CHECK(passed > 0);
	allow(0, 1);
	fake_grant(&fake, 0, 60);
	for (int i = 0; i < 4; i++)
		finish(&l[i]);
}

/* A drain that nobody waits for is left to end by itself. */
static void long_drain_ends_by_itself(void)
{
	begin(1);
	hold(2);
	stub_state()->work_ns = 2500000000u;
	CHECK(launch(NULL) == 0);
	fake_revoke(&fake, 0, 2);
	CHECK(released().epoch == 2);
	CHECK(test_now() >= atomic_load(&stub_state()->busy_until[0]) && launches(0) == 2);
}

static void capture_begins_beside_a_stuck_drain(void)
{
	void *stream, *graph;

	begin(1);
	hold(3);
	CHECK(cuStreamCreate(&stream, 0) == 0);
	atomic_store(&stub_state()->stuck_until, 2);
	fake_revoke(&fake, 0, 3);
	EVENTUALLY(atomic_load(&stub_state()->syncs) > 0); /* the drain is in the driver */
	CHECK(cuStreamBeginCapture_v2(stream, 0) == 0);
	CHECK(launch(stream) == 0);
	CHECK(cuStreamEndCapture(stream, &graph) == 0);
	CHECK(cuCtxDestroy_v2(contexts[0]) == 0); /* not held up for ever either */
	atomic_store(&stub_state()->stuck_until, 0);
	CHECK(released().epoch == 3);
}

/* The scheduler is lost in the middle of a long drain: that is no way out of the gate. */
static void loss_in_a_drain_keeps_the_gate(void)
{
	struct launcher l;
	struct nvs_frame f;

	begin(2); /* two GPUs: the client thread goes on beside the drain */
	hold(3);
	start(&l, 1, 1);
	fake_expect(&fake, NVS_REQUEST);
	allow(1, 1);
	fake_grant(&fake, 1, 4);
	finish(&l);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	stub_state()->work_ns = 9000000000u;
	CHECK(launch(NULL) == 0);
	stub_state()->work_ns = 1000;
	fake_revoke(&fake, 0, 3);
	CHECK(!fake_receive(&fake, &f, 100));
	fake_die(&fake);
	start(&l, 0, 0); /* waits at a gate that drains, for longer than a loss lasts */
	EVENTUALLY(test_now() >= atomic_load(&stub_state()->busy_until[0]));
	EVENTUALLY(atomic_load(&l.done) > 100); /* the loss has lasted, so it runs */
	fake_listen(&fake);
	fake_accept(&fake);
	do { /* of the other GPU there may be an ATTACH and a RELEASE before */
		CHECK(fake_receive(&fake, &f, PATIENCE_MS));
		if (f.type == NVS_ATTACH && f.channel == 1)
			fake_send(&fake, NVS_ATTACHED, 1, 0, 0);
	} while (f.type != NVS_ATTACH || f.channel != 0);
	CHECK(f.epoch == 0 && test_now() >= atomic_load(&stub_state()->busy_until[0]));
	/* The loss is over, however long it was: nobody runs before the answer. */
	allow(0, 0);
	nap_ms(300);
	CHECK(atomic_load(&stub_state()->violations) == 0);
	fake_send(&fake, NVS_ATTACHED, 0, 0, 0);
	nap_ms(100);
	CHECK(atomic_load(&stub_state()->violations) == 0);
	allow(0, 1);
	fake_grant(&fake, 0, 9);
	finish(&l);
}

/* Depth: the work ahead waits for what comes behind. */
static void depth_bound_lets_go(void)
{
	struct launcher l;

	begin(1);
	hold(3);
	fake.page->slot[0].present = 1;
	atomic_store(&stub_state()->stuck_until, 18);
	start(&l, 0, 17);
	EVENTUALLY(launches(0) == 18);
	CHECK(atomic_load(&stub_state()->events) > 0);
	finish(&l);
}

/* ---- what a drain must wait for ---- */

static void primary_reset_keeps_other_contexts(void)
{
	begin(1);
	hold(3);
	stub_state()->work_ns = 500000000u;
	CHECK(launch(NULL) == 0);
	CHECK(cuDevicePrimaryCtxReset_v2(0) == 0);
	fake_revoke(&fake, 0, 3);
	CHECK(released().epoch == 3);
	CHECK(test_now() >= atomic_load(&stub_state()->busy_until[0]));
}

static void destroyed_stream_has_work_left(void)
{
	void *stream, *captured;

	begin(1);
	hold(3);
	fake_revoke(&fake, 0, 3); /* a drain, so that only the stream below has work */
	CHECK(released().epoch == 3);
	CHECK(cuStreamCreate(&stream, 0) == 0 && cuStreamCreate(&captured, 0) == 0);
	fake_grant(&fake, 0, 4);
	stub_state()->work_ns = 500000000u;
	CHECK(launch(stream) == 0);
	CHECK(cuStreamDestroy_v2(stream) == 0);
	CHECK(cuStreamBeginCapture_v2(captured, 0) == 0);
	fake_revoke(&fake, 0, 4);
	CHECK(released().epoch == 4);
	CHECK(test_now() >= atomic_load(&stub_state()->busy_until[0]));
}

/* ---- schedulers that are not what they should be ---- */

static void flapping_scheduler(void)
{
	struct launcher l;
	uint64_t begun;

	begin(1);
	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	begun = test_now();
	for (int i = 0; i < 12 && !atomic_load(&l.done); i++) {
		fake_die(&fake);
		fake_listen(&fake);
		fake_accept(&fake);
		fake_expect(&fake, NVS_ATTACH);
		nap_ms(1000);
	}
	CHECK(atomic_load(&l.done) == 1); /* the loss lasted, whatever it looked like */
	CHECK(test_now() - begun >= 4000000000u);
	finish(&l);
}

/* A process that has made its context, before a scheduler that has not answered. */
static void newcomer(struct launcher *l)
{
	CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	start(l, 0, 1);
}

/* The scheduler answers: the newcomer's launch waits for its grant. */
static void serve(struct launcher *l)
{
	struct nvs_frame a;

	fake_accept(&fake);
	a = fake_attach(&fake);
	CHECK(launches(0) == 0);
	allow(0, 1);
	if (!(a.code & NVS_ATTACH_WANT))
		fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 1);
	finish(l);
}

/* Others fill the scheduler's queue of connections: there is a scheduler. */
static void full_queue_is_waited_for(void)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	struct launcher l;
	int others[64], n = 0;

	fake_init(&fake);
	fake_listen(&fake);
	snprintf(a.sun_path, sizeof(a.sun_path), "%s/%s", fake.dir, NVS_SOCKET_NAME);
	do {
		CHECK(n < 64);
		others[n] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	} while (connect(others[n], (struct sockaddr *)&a, sizeof(a)) == 0 && ++n);
	CHECK(errno == EAGAIN);
	newcomer(&l);
	nap_ms(2500);
	CHECK(launches(0) == 0);
	for (int i = 0; i < n; i++)
		close(accept(fake.listener, NULL, NULL));
	serve(&l);
	for (int i = 0; i <= n; i++)
		close(others[i]);
}

/* It does not answer, because it is stopped or has no processor, until it dies. */
static void silent_scheduler_is_waited_for(void)
{
	struct launcher l;

	fake_init(&fake);
	fake_listen(&fake);
	newcomer(&l);
	nap_ms(2500);
	CHECK(launches(0) == 0);
	allow(0, 1);
	fake_die(&fake);
	finish(&l);
}

static void attach_is_waited_for(void)
{
	struct launcher l;

	fake_init(&fake);
	fake_listen(&fake);
	newcomer(&l);
	fake_accept(&fake);
	fake_expect(&fake, NVS_ATTACH);
	nap_ms(5500);
	CHECK(launches(0) == 0);
	allow(0, 1);
	fake_die(&fake);
	finish(&l);
}

static void refuse(uint32_t code)
{
	fake.conn = accept(fake.listener, NULL, NULL);
	CHECK(fake.conn >= 0);
	fake_expect(&fake, NVS_REGISTER);
	fake_send(&fake, NVS_REFUSED, 0, code, 0);
	close(fake.conn);
}

/* Too many clients are there: it is asked again, and has room. */
static void crowded_scheduler_is_asked_again(void)
{
	struct launcher l;

	fake_init(&fake);
	fake_listen(&fake);
	newcomer(&l);
	refuse(NVS_ERR_TOO_MANY);
	nap_ms(500);
	CHECK(launches(0) == 0);
	serve(&l);
}

/* It has no room for as long as a lost scheduler is waited for. */
static void refusals_end_the_wait(void)
{
	struct launcher l;
	uint64_t begun;

	fake_init(&fake);
	fake_listen(&fake);
	allow(0, 1);
	newcomer(&l);
	refuse(NVS_ERR_TOO_MANY);
	for (begun = test_now(); !atomic_load(&l.done); )
		refuse(NVS_ERR_TOO_MANY);
	CHECK(test_now() - begun >= 4000000000u);
	finish(&l);
}

static void closed_waits_for_the_first_scheduler(void)
{
	struct launcher l;

	CHECK(setenv("NVSHARE_SCHEDULER_LOSS", "closed", 1) == 0);
	fake_init(&fake);
	newcomer(&l);
	nap_ms(500);
	CHECK(launches(0) == 0);
	fake_listen(&fake);
	refuse(NVS_ERR_VERSION);
	nap_ms(500);
	CHECK(launches(0) == 0);
	serve(&l);
}

/* ---- the process is checkpointed, and its scheduler goes ---- */

static void checkpointed_and_alone(void)
{
	begin(1);
	hold(5);
	fake_revoke(&fake, 0, 5);
	fake_expect(&fake, NVS_RELEASE);
	do /* a thread may take a second to get out of the way */
		fake_send(&fake, NVS_SUSPEND, 0, NVS_SUSPEND_PREPARE, 0);
	while (fake_expect(&fake, NVS_SUSPENDED).code != NVS_SUSPENDED_READY);
	atomic_store(&stub_state()->checkpointed, 1);
	fake_die(&fake);
}

static int vforked[2]; /* the child of vfork lives until this pipe is closed, */
static int began[2];   /* and says here that it does */

/* The thread waits in the kernel as one that is on its way into the driver may: the process cannot leave yet. */
static void *vfork_main(void *arg)
{
	char c;

	if (vfork() == 0) {
		close(vforked[1]);
		if (write(began[1], "", 1) != 1)
			_exit(1);
		close(fake.conn); /* the scheduler is to go while it lives */
		close(fake.listener);
		_exit(read(vforked[0], &c, 1) != 0);
	}
	return arg;
}

/* The scheduler goes before the process has left: it is there, and says so to the next one. */
static void loss_takes_back_a_suspension(void)
{
	pthread_t t;
	char c;

	begin(1);
	hold(5);
	fake_revoke(&fake, 0, 5);
	fake_expect(&fake, NVS_RELEASE);
	CHECK(pipe2(vforked, O_CLOEXEC) == 0 && pipe2(began, O_CLOEXEC) == 0);
	CHECK(pthread_create(&t, NULL, vfork_main, NULL) == 0 && read(began[0], &c, 1) == 1);
	fake_send(&fake, NVS_SUSPEND, 0, NVS_SUSPEND_PREPARE, 0);
	nap_ms(50);
	fake_die(&fake);
	fake_listen(&fake);
	CHECK(!(fake_accept(&fake).code & NVS_REGISTER_AWAY));
	fake_attach(&fake);
	CHECK(cuCtxSynchronize() == 0);
	close(vforked[1]);
	CHECK(pthread_join(t, NULL) == 0);
}

/* The next scheduler is asked for the wake, and restores the process. */
static void brought_back_by_a_scheduler(void)
{
	fake_listen(&fake);
	CHECK(fake_accept(&fake).code & NVS_REGISTER_AWAY);
	fake_attach(&fake);
	CHECK(fake_expect(&fake, NVS_SUSPENDED).code == NVS_SUSPENDED_WAKE);
	atomic_store(&stub_state()->checkpointed, 0);
	fake_send(&fake, NVS_SUSPEND, 0, NVS_SUSPEND_OVER, 0);
}

/* The next REQUEST; the wake may have been asked for again. */
static void requested(void)
{
	struct nvs_frame f;

	do
		CHECK(fake_receive(&fake, &f, PATIENCE_MS));
	while (f.type == NVS_SUSPENDED);
	CHECK(f.type == NVS_REQUEST);
}

/* Its calls go on, and a scheduler that comes later brings what it knows up to date. */
static void restored_by_hand(void)
{
	struct launcher l;
	uint64_t begun;

	checkpointed_and_alone();
	begun = test_now();
	start(&l, 0, 1);
	atomic_store(&stub_state()->checkpointed, 0);
	finish(&l);
	CHECK(test_now() - begun >= 4000000000u); /* not before the scheduler is lost for good */
	brought_back_by_a_scheduler();
	allow(0, 0);
	start(&l, 0, 1);
	requested(); /* and it takes turns */
	allow(0, 1);
	fake_grant(&fake, 0, 6);
	finish(&l);
	fake_die(&fake);
	fake_listen(&fake);
	CHECK(!(fake_accept(&fake).code & NVS_REGISTER_AWAY));
}

/* Nobody does: a scheduler that comes late must, and nothing that waits in the driver keeps it from that. */
static void restored_by_a_late_scheduler(void)
{
	struct launcher l;

	checkpointed_and_alone();
	start(&l, 0, 1);
	EVENTUALLY(atomic_load(&stub_state()->waiting) == 1); /* in the driver */
	nap_ms(100);
	CHECK(!atomic_load(&l.done) && atomic_load(&stub_state()->waiting) == 1);
	brought_back_by_a_scheduler();
	requested();
	fake_grant(&fake, 0, 6);
	finish(&l);
	CHECK(atomic_load(&stub_state()->violations) == 0);
}

static void *destroy(void *ctx)
{
	CHECK(cuCtxDestroy_v2(ctx) == 0);
	return NULL;
}

/* The call that waits is the end of the only context, by which the shim sees that the process is back. */
static void a_context_ends_when_it_is_restored(void)
{
	pthread_t t;

	checkpointed_and_alone();
	CHECK(pthread_create(&t, NULL, destroy, contexts[0]) == 0);
	EVENTUALLY(atomic_load(&stub_state()->waiting) == 1); /* a thread of the shim, in the driver */
	CHECK(!atomic_load(&stub_state()->destroyed));
	atomic_store(&stub_state()->checkpointed, 0);
	CHECK(pthread_join(t, NULL) == 0 && atomic_load(&stub_state()->destroyed) == 1);
}

static void *reset(void *done)
{
	CHECK(cuDevicePrimaryCtxReset_v2(0) == 0);
	atomic_store((atomic_int *)done, 1);
	return NULL;
}

/* The process is checkpointed while the call waits for another thread: it asks for the wake all the same. */
static void a_primary_context_ends_when_it_is_restored(void)
{
	struct nvs_frame f;
	atomic_int done = 0;
	pthread_t other, t;
	void *ctx;

	begin(1);
	CHECK(cuCtxCreate_v2(&ctx, 0, 0) == 0);
	hold(5);
	fake_revoke(&fake, 0, 5);
	fake_expect(&fake, NVS_RELEASE);
	atomic_store(&stub_state()->destroy_ns, UINT64_MAX);
	CHECK(pthread_create(&other, NULL, destroy, ctx) == 0);
	EVENTUALLY(atomic_load(&stub_state()->destroyed) == 1);
	CHECK(pthread_create(&t, NULL, reset, &done) == 0);
	do
		fake_send(&fake, NVS_SUSPEND, 0, NVS_SUSPEND_PREPARE, 0);
	while (fake_expect(&fake, NVS_SUSPENDED).code != NVS_SUSPENDED_READY);
	atomic_store(&stub_state()->destroy_ns, 0);
	CHECK(pthread_join(other, NULL) == 0);
	f = fake_expect(&fake, NVS_SUSPENDED);
	CHECK(f.code == NVS_SUSPENDED_WAKE && !atomic_load(&done));
	fake_send(&fake, NVS_SUSPEND, 0, NVS_SUSPEND_OVER, 0);
	CHECK(pthread_join(t, NULL) == 0 && atomic_load(&done));
}

static void closed_waits_for_a_scheduler_to_restore(void)
{
	struct launcher l;

	CHECK(setenv("NVSHARE_SCHEDULER_LOSS", "closed", 1) == 0);
	checkpointed_and_alone();
	atomic_store(&stub_state()->checkpointed, 0); /* by hand, which does not help */
	start(&l, 0, 1);
	nap_ms(8000);
	CHECK(!atomic_load(&l.done));
	brought_back_by_a_scheduler();
	requested();
	fake_grant(&fake, 0, 6);
	finish(&l);
}

static void grants_of_no_epoch(void)
{
	static const uint64_t epochs[] = { 0, 1ull << 32, 0xffffffffull, 0x5ffffffffull };
	struct launcher l;

	begin(1);
	allow(0, 0);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	for (unsigned i = 0; i < sizeof(epochs) / sizeof(epochs[0]); i++) {
		fake_send(&fake, NVS_GRANT, 0, 0, epochs[i]);
		CHECK(MUST_KNOW(fake_accept(&fake).code) == NVS_REGISTER_RECONNECT);
		fake_attach(&fake);
		CHECK(launches(0) == 0);
	}
	allow(0, 1);
	fake_grant(&fake, 0, 2);
	finish(&l);
}

static void descriptors_nobody_asked_for(void)
{
	struct nvs_frame notice = { .version = NVS_WIRE_VERSION, .type = NVS_NOTICE };
	unsigned before, i;

	begin(1);
	before = descriptors();
	for (i = 0; i < 50; i++)
		CHECK(fake_send_fds(&fake, notice, 1 + i % 8));
	hold(3);
	EVENTUALLY(descriptors() <= before); /* of WELCOME it may have been open still */
}

static void page_that_can_shrink(void)
{
	struct nvs_frame f;

	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	fake.unsealed = true;
	fake_accept(&fake);
	CHECK(recv(fake.conn, &f, sizeof(f), 0) == 0); /* not taken: end of file */
	CHECK(cuCtxCreate_v2(&contexts[0], 0, 0) == 0 && launch(NULL) == 0);
}

static void pages_do_not_pile_up(void)
{
	begin(1);
	for (int i = 0; i < 20; i++) {
		fake_send(&fake, 99, 0, 0, 0);
		close(fake.page_fd);
		fake_accept(&fake);
		fake_attach(&fake);
	}
	hold(3);
	CHECK(mapped_pages() <= 3);
}

static atomic_int handlers, let_go;

static void slow_handler(int n)
{
	(void)n;
	atomic_fetch_add(&handlers, 1);
	while (!atomic_load(&let_go))
		nap_ms(1);
}

/*
 * Somebody waits already when the grant comes, and a thread has not left the
 * gate yet when the client looks: it looks again soon, not a second later.
 */
static void early_release_after_a_slow_thread(void)
{
	struct sigaction a = { .sa_handler = slow_handler };
	uint64_t took = 0;

	CHECK(sigaction(SIGUSR1, &a, NULL) == 0);
	begin(1);
	allow(0, 1);
	fake.page->slot[0].waiters = 1;
	for (int i = 0; i < 8; i++) {
		struct launcher l;
		uint64_t begun;

		start(&l, 0, 1);
		fake_expect(&fake, NVS_REQUEST);
		atomic_store(&let_go, 0);
		CHECK(pthread_kill(l.thread, SIGUSR1) == 0);
		EVENTUALLY(atomic_load(&handlers) == i + 1);
		fake_grant(&fake, 0, 5 + (unsigned)i);
		nap_ms(50); /* the client has seen it, or the case is an easier one */
		begun = test_now();
		atomic_store(&let_go, 1);
		CHECK(fake_expect(&fake, NVS_RELEASE).code == NVS_RELEASE_IDLE);
		took += test_now() - begun;
		fake_word(&fake, 0, 0);
		finish(&l);
	}
	CHECK(took < 3000000000u); /* with a second each it would be seven */
}

/* ---- the application's own doings ---- */

static void environment_changes_later(void)
{
	char dir[sizeof(fake.dir)];

	fake_init(&fake);
	strcpy(dir, fake.dir);
	CHECK(cuInit(0) == 0);
	CHECK(setenv(NVS_RUN_DIR_ENV, "/nonexistent", 1) == 0);
	nap_ms(200);
	fake_listen(&fake);
	fake_accept(&fake);
}

static void *cancelled_main(void *arg)
{
	(void)arg;
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(pthread_cancel(pthread_self()) == 0);
	launch(NULL); /* takes the slow way, and says so */
	pthread_testcancel();
	return NULL;
}

static void cancelled_at_the_gate(void)
{
	pthread_t t;
	int null = open("/dev/null", O_WRONLY);

	CHECK(setenv("NVSHARE_DEBUG", "1", 1) == 0 && null >= 0 && dup2(null, 2) == 2);
	fake_init(&fake); /* nobody listens */
	stub_state()->gpus = 2;
	CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	CHECK(pthread_create(&t, NULL, cancelled_main, NULL) == 0);
	CHECK(pthread_join(t, NULL) == 0);
	/* Needs the lock that the thread held. */
	if (cuCtxCreate_v2(&contexts[1], 0, 1) != 0 || launch(NULL) != 0)
		exit(1); /* standard error stays shut: the shim goes on to say that there is no scheduler */
}

/* The socket of the shim to the scheduler, which is in this process too. */
static int socket_of_the_shim(void)
{
	for (int fd = 3; fd < 1024; fd++) {
		struct sockaddr_un peer = { 0 };
		socklen_t n = sizeof(peer);

		if (getpeername(fd, (struct sockaddr *)&peer, &n) == 0 && peer.sun_path[0])
			return fd;
	}
	CHECK(!"no socket");
	return -1;
}

/* As after closefrom(3): the number is soon that of a file of the application. */
static void an_application_takes_our_descriptor(void)
{
	int fd, pair[2];
	char text[8];

	begin(1);
	hold(3);
	fd = socket_of_the_shim();
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
	CHECK(send(pair[1], "mine", 4, 0) == 4);
	CHECK(dup2(pair[0], fd) == fd);
	CHECK(MUST_KNOW(fake_accept(&fake).code) == NVS_REGISTER_RECONNECT);
	fake_attach(&fake);
	/* Still open, nothing read from it, nothing written to it. */
	CHECK(recv(fd, text, sizeof(text), MSG_DONTWAIT) == 4);
	CHECK(recv(pair[1], text, sizeof(text), MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

/* Such a program prints and reads all the same: not to and from the scheduler. */
static void a_program_without_standard_streams(void)
{
	struct pollfd p;
	char text[64];

	fake_init(&fake);
	fake_listen(&fake);
	p = (struct pollfd){ .fd = fake.listener, .events = POLLIN };
	close(STDIN_FILENO);
	close(STDOUT_FILENO);
	CHECK(cuInit(0) == 0 && poll(&p, 1, PATIENCE_MS) == 1); /* the shim is connected */
	CHECK(write(STDOUT_FILENO, "text", 4) == -1 && read(STDIN_FILENO, text, sizeof(text)) == -1);
	CHECK(write(STDIN_FILENO, "text", 4) == -1 && errno == EBADF);
	fake_accept(&fake);
	CHECK(cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	fake_attach(&fake);
}

static const struct life_case cases[] = {
#define CASE(name) { #name, name }
	CASE(drain_waits_for_a_thread_at_the_gate),
	CASE(an_application_takes_our_descriptor),
	CASE(a_program_without_standard_streams),
	CASE(drain_waits_more_than_once),
	CASE(passes_end_with_the_release),
	CASE(long_drain_ends_by_itself),
	CASE(capture_begins_beside_a_stuck_drain),
	CASE(loss_in_a_drain_keeps_the_gate),
	CASE(depth_bound_lets_go),
	CASE(primary_reset_keeps_other_contexts),
	CASE(destroyed_stream_has_work_left),
	CASE(flapping_scheduler),
	CASE(full_queue_is_waited_for),
	CASE(silent_scheduler_is_waited_for),
	CASE(attach_is_waited_for),
	CASE(crowded_scheduler_is_asked_again),
	CASE(refusals_end_the_wait),
	CASE(closed_waits_for_the_first_scheduler),
	CASE(loss_takes_back_a_suspension),
	CASE(restored_by_hand),
	CASE(restored_by_a_late_scheduler),
	CASE(a_context_ends_when_it_is_restored),
	CASE(a_primary_context_ends_when_it_is_restored),
	CASE(closed_waits_for_a_scheduler_to_restore),
	CASE(grants_of_no_epoch),
	CASE(descriptors_nobody_asked_for),
	CASE(page_that_can_shrink),
	CASE(pages_do_not_pile_up),
	CASE(early_release_after_a_slow_thread),
	CASE(environment_changes_later),
	CASE(cancelled_at_the_gate),
};

int main(int argc, char **argv)
{
	return life_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
