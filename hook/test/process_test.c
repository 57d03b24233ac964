// SPDX-License-Identifier: Apache-2.0
/*
 * process_test.c: what processes do beside computing: fork, exec, exit, die, be
 * stopped, take signals. As client_test.c: one case per process, the shim
 * preloaded. The scheduler is the test's own process, the application a child
 * of it; the stub's judge is in memory that both share.
 */
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/time.h>
#include <unistd.h>

#include "life.h"

extern char **environ;

/* ---- both sides ---- */

/* What the application and the test tell each other; in shared memory. */
static struct {
	atomic_int at;       /* where the application is */
	atomic_int go;       /* how far it may go */
	atomic_int failures; /* results that were not as they should be */
	atomic_int pid;      /* of a grandchild, or of a thread */
	atomic_int child[3];
} *both;

static pid_t app;
static bool asked; /* with ATTACH */

static void note(bool ok)
{
	if (!ok)
		atomic_fetch_add(&both->failures, 1);
}

static void share(void)
{
	struct stub *stub = stub_state();
	static char copy[STUB_PAGE];

	memcpy(copy, stub, sizeof(copy));
	CHECK(mmap(stub, STUB_PAGE, PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == (void *)stub);
	memcpy(stub, copy, sizeof(copy));
	both = mmap(NULL, sizeof(*both), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(both != MAP_FAILED);
}

/* Starts the application: run() in a child; its status is what run() returns. */
static void start_app(int (*run)(void))
{
	share();
	fake_init(&fake);
	fake_listen(&fake);
	fake.memory = true;
	app = fork();
	CHECK(app >= 0);
	if (app == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		alarm(600);
		close(fake.listener);
		CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
		exit(run());
	}
	fake_accept(&fake);
	asked = fake_attach(&fake).code & NVS_ATTACH_WANT;
	close(fake.page_fd);
}

/* A thread of the application waits. */
static void app_asks(void)
{
	if (!asked)
		fake_expect(&fake, NVS_REQUEST);
	asked = false;
}

/* Like fake_grant, and the application may have ended meanwhile. */
static void give(uint64_t epoch)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_GRANT, .epoch = epoch };

	fake_word(&fake, 0, (uint32_t)epoch);
	send(fake.conn, &f, sizeof(f), MSG_NOSIGNAL);
}

/* And gives it the GPU for the launch that it begins with. */
static void start_holder(int (*run)(void), uint64_t epoch)
{
	start_app(run);
	allow(0, 1);
	app_asks();
	give(epoch);
	EVENTUALLY(launches(0) > 0);
}

static void app_at(int where)
{
	EVENTUALLY(atomic_load(&both->at) >= where);
}

/* In the application. */
static void arrive(int where)
{
	atomic_store(&both->at, where);
}

static void await(int go)
{
	while (atomic_load(&both->go) < go)
		nap_ms(1);
}

static int app_ends(void)
{
	int status;

	CHECK(waitpid(app, &status, 0) == app);
	CHECK(atomic_load(&both->failures) == 0);
	CHECK(atomic_load(&stub_state()->violations) == 0);
	return status;
}

#define ENDS_WITH(code) \
	do { \
		int status_ = app_ends(); \
		if (!WIFEXITED(status_) || WEXITSTATUS(status_) != (code)) \
			fprintf(stderr, "status %#x\n", status_); \
		CHECK(WIFEXITED(status_) && WEXITSTATUS(status_) == (code)); \
	} while (0)

/* The connection ends; frames before that are fine. */
static void end_of_file(void)
{
	struct pollfd p = { .fd = fake.conn, .events = POLLIN };
	struct nvs_frame f;

	do
		CHECK(poll(&p, 1, PATIENCE_MS) == 1);
	while (recv(fake.conn, &f, sizeof(f), 0) > 0);
}

static struct nvs_frame released(void)
{
	struct nvs_frame f;

	do
		CHECK(fake_receive(&fake, &f, PATIENCE_MS));
	while (f.type == NVS_REQUEST);
	CHECK(f.type == NVS_RELEASE);
	return f;
}

/* A launch in a thread of its own, which waits at the gate. */
static void *launch_once(void *arg)
{
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	note(launch(arg) == 0);
	return NULL;
}

static pthread_t thread_at_the_gate(void)
{
	pthread_t t;

	CHECK(pthread_create(&t, NULL, launch_once, NULL) == 0);
	return t;
}

/* ---- fork, exec, spawn ---- */

static int run_forks_and_dies(void)
{
	launch(NULL);
	if (fork() == 0) { /* lives on */
		atomic_store(&both->pid, getpid());
		for (;;)
			pause();
	}
	pause();
	return 0;
}

/* A child without exec does not keep its dead parent's connection open. */
static void dead_parent_of_a_fork_is_seen(void)
{
	start_holder(run_forks_and_dies, 3);
	EVENTUALLY(atomic_load(&both->pid));
	CHECK(kill(app, SIGKILL) == 0);
	end_of_file();
	CHECK(waitpid(app, NULL, 0) == app);
	CHECK(kill(atomic_load(&both->pid), SIGKILL) == 0);
}

static bool has_socket(int pid)
{
	char path[64], link[128];
	bool found = false;

	for (int fd = 3; fd < 64; fd++) {
		ssize_t n;

		snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
		n = readlink(path, link, sizeof(link));
		found |= n > 0 && memmem(link, (size_t)n, "socket", 6);
	}
	return found;
}

static int run_spawns_and_dies(void)
{
	static char sleeper[] = "sleep", time[] = "100";
	char *args[] = { sleeper, time, NULL };
	pid_t pid[3];

	launch(NULL);
	note(posix_spawnp(&pid[0], sleeper, NULL, NULL, args, environ) == 0);
	pid[1] = vfork();
	if (pid[1] == 0) {
		execvp(sleeper, args);
		_exit(1);
	}
	pid[2] = fork();
	if (pid[2] == 0) {
		execvp(sleeper, args);
		_exit(1);
	}
	note(launch(NULL) == 0);
	for (int i = 0; i < 3; i++)
		atomic_store(&both->child[i], pid[i]);
	arrive(1);
	await(1);
	for (int i = 0; i < 3; i++)
		kill(pid[i], SIGKILL);
	return 0;
}

/* Neither do children that run something else; and the parent goes on. */
static void spawned_programs_keep_nothing(void)
{
	start_holder(run_spawns_and_dies, 3);
	app_at(1);
	CHECK(launches(0) == 2);
	for (int i = 0; i < 3; i++)
		EVENTUALLY(!has_socket(atomic_load(&both->child[i]))); /* after its exec */
	fake_revoke(&fake, 0, 3);
	CHECK(released().epoch == 3);
	atomic_store(&both->go, 1);
	ENDS_WITH(0);
	end_of_file();
}

static atomic_bool stop;

static void *busy(void *arg)
{
	void *stream, *graph;

	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	while (!atomic_load(&stop)) {
		unsigned long long p;

		note(cuStreamCreate(&stream, 0) == 0);
		note(cuMemAlloc_v2(&p, 4096) == 0);
		note(launch(arg ? stream : NULL) == 0);
		if (arg) {
			note(cuStreamBeginCapture_v2(stream, 0) == 0);
			note(launch(stream) == 0);
			note(cuStreamEndCapture(stream, &graph) == 0);
		}
		note(cuMemFree_v2(p) == 0);
		note(cuStreamDestroy_v2(stream) == 0);
	}
	return NULL;
}

static int run_forks_in_a_storm(void)
{
	pthread_t t[6];

	for (int i = 0; i < 6; i++)
		CHECK(pthread_create(&t[i], NULL, busy, i % 2 ? (void *)1 : NULL) == 0);
	for (int i = 0; i < 100; i++) {
		pid_t pid = fork();
		int status;

		if (pid == 0) { /* no lock is left as some other thread had it */
			void *stream;

			alarm(600);
			if (launch(NULL) != 0 || cuStreamCreate(&stream, 0) != 0)
				_exit(1);
			setenv(NVS_RUN_DIR_ENV, "/nonexistent", 1);
			if (cuInit(0) != 0 || launch(stream) != 0 || launch(NULL) != 0)
				_exit(2);
			if (cuStreamDestroy_v2(stream) != 0 || cuCtxDestroy_v2(contexts[0]) != 0)
				_exit(3);
			_exit(0);
		}
		note(waitpid(pid, &status, 0) == pid);
		note(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	atomic_store(&stop, true);
	arrive(1);
	for (int i = 0; i < 6; i++)
		pthread_join(t[i], NULL);
	await(1);
	return 0;
}

static void forks_while_threads_are_at_work(void)
{
	uint64_t epoch = 2;

	allow(0, 1); /* all the time: the children's launches are nobody's */
	start_app(run_forks_in_a_storm);
	app_asks();
	while (!atomic_load(&both->at)) { /* some forks with threads at the gate */
		fake_grant(&fake, 0, ++epoch);
		nap_ms(3);
		fake_revoke(&fake, 0, epoch);
		CHECK(released().epoch == epoch);
		nap_ms(2);
	}
	give(++epoch);
	atomic_store(&both->go, 1);
	ENDS_WITH(0);
}

static void fork_handler(int n)
{
	(void)n;
	if (fork() == 0)
		atomic_store(&both->pid, getpid());
}

static int run_forks_in_a_handler(void)
{
	int result;

	signal(SIGUSR1, fork_handler);
	arrive(1);
	result = launch(NULL);
	return result ? 1 : atomic_load(&both->pid) == getpid() ? 7 : 5;
}

/* The child comes back from the handler into the middle of the wait. */
static void fork_in_a_handler_at_the_gate(void)
{
	int status;

	start_app(run_forks_in_a_handler);
	app_asks();
	app_at(1);
	nap_ms(20);
	allow(0, 1);
	CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
	CHECK(kill(app, SIGUSR1) == 0);
	EVENTUALLY(atomic_load(&both->pid));
	EVENTUALLY(launches(0) == 1); /* the child has no gate */
	give(3);
	ENDS_WITH(5);
	CHECK(wait(&status) == atomic_load(&both->pid));
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

static int run_executes_itself(void)
{
	launch(NULL);
	execl("/proc/self/exe", "process_test", "another_image", (char *)NULL);
	return 1;
}

/* What run_executes_itself becomes: a client like any other. */
static void another_image(void)
{
	CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&contexts[0], 0, 0) == 0);
	CHECK(launch(NULL) == 0);
	_exit(6);
}

static void exec_is_a_new_client(void)
{
	start_holder(run_executes_itself, 3);
	end_of_file();
	CHECK(MUST_KNOW(fake_accept(&fake).code) == 0);
	CHECK(fake_attach(&fake).epoch == 0);
	fake_word(&fake, 0, 4);
	ENDS_WITH(6);
}

/* ---- ends ---- */

static int run_exits_beside_a_waiting_thread(void)
{
	thread_at_the_gate();
	await(1);
	exit(3);
}

static void exit_while_a_thread_waits(void)
{
	start_app(run_exits_beside_a_waiting_thread);
	app_asks();
	atomic_store(&both->go, 1);
	ENDS_WITH(3);
	end_of_file();
	CHECK(launches(0) == 0);
}

static int run_quick_exit(void)
{
	thread_at_the_gate();
	await(1);
	quick_exit(9);
}

static void quick_exit_while_a_thread_waits(void)
{
	start_app(run_quick_exit);
	app_asks();
	atomic_store(&both->go, 1);
	ENDS_WITH(9);
	end_of_file();
}

static int run_underscore_exit(void)
{
	stub_state()->work_ns = 1000000000u;
	launch(NULL);
	_exit(8);
}

static void underscore_exit_while_holding(void)
{
	start_holder(run_underscore_exit, 3);
	ENDS_WITH(8);
	end_of_file();
}

static int run_aborts(void)
{
	struct rlimit none = { 0, 0 };

	setrlimit(RLIMIT_CORE, &none);
	launch(NULL);
	await(1);
	abort();
}

static void abort_while_holding(void)
{
	int status;

	start_holder(run_aborts, 3);
	atomic_store(&both->go, 1);
	status = app_ends();
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
	end_of_file();
}

static void *last_thread(void *arg)
{
	pthread_join(*(pthread_t *)arg, NULL);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	note(launch(NULL) == 0);
	arrive(1);
	await(1);
	note(launch(NULL) == 0);
	exit(12); /* the shim's thread and the driver's live as long as the process */
}

static int run_main_ends_first(void)
{
	static pthread_t self;
	pthread_t t;

	self = pthread_self();
	launch(NULL);
	CHECK(pthread_create(&t, NULL, last_thread, &self) == 0);
	pthread_exit(NULL);
}

static void main_thread_ends_first(void)
{
	start_holder(run_main_ends_first, 3);
	app_at(1);
	fake_revoke(&fake, 0, 3);
	CHECK(released().epoch == 3);
	atomic_store(&both->go, 1);
	fake_expect(&fake, NVS_REQUEST);
	give(4);
	ENDS_WITH(12);
	end_of_file();
}

static bool ends_with_cuda;

/* What a runtime library does when the process ends. */
static void clean_up(void)
{
	void *stream;

	if (!ends_with_cuda)
		return;
	note(launch(NULL) == 0);
	note(cuStreamCreate(&stream, 0) == 0 && launch(stream) == 0);
	note(cuStreamDestroy_v2(stream) == 0);
	note(cuDevicePrimaryCtxRelease_v2(0) == 0);
	atomic_fetch_add(&both->at, 1);
}

__attribute__((destructor)) static void very_last(void)
{
	clean_up();
	if (ends_with_cuda)
		note(cuCtxDestroy_v2(contexts[0]) == 0);
}

static int run_cleans_up(void)
{
	void *ctx;

	ends_with_cuda = true;
	for (int i = 0; i < 2; i++)
		note(cuDevicePrimaryCtxRetain(&ctx, 0) == 0);
	note(launch(NULL) == 0);
	await(1);
	return 11; /* clean_up was registered before cuInit, so that it runs after the shim's */
}

static void start_cleaner(void)
{
	CHECK(atexit(clean_up) == 0);
	start_holder(run_cleans_up, 3);
}

static void cuda_after_exit_while_holding(void)
{
	start_cleaner();
	atomic_store(&both->go, 1);
	ENDS_WITH(11);
	CHECK(atomic_load(&both->at) == 2 && launches(0) == 5);
	CHECK(atomic_load(&stub_state()->destroyed) == 3);
	end_of_file();
}

/* Who has no grant waits for one, at the end of the process too. */
static void cuda_after_exit_without_a_grant(void)
{
	struct nvs_frame f;

	start_cleaner();
	fake_revoke(&fake, 0, 3);
	CHECK(released().epoch == 3);
	allow(0, 0);
	atomic_store(&both->go, 1);
	fake_expect(&fake, NVS_REQUEST);
	CHECK(!fake_receive(&fake, &f, 200));
	allow(0, 1);
	give(4);
	ENDS_WITH(11);
	CHECK(atomic_load(&both->at) == 2 && launches(0) == 5);
	CHECK(atomic_load(&stub_state()->destroyed) == 3);
}

static bool lingers;

static void linger(void)
{
	if (!lingers)
		return;
	arrive(1);
	await(2);
}

static int run_lingers(void)
{
	lingers = true;
	note(launch(NULL) == 0);
	note(cuCtxSynchronize() == 0); /* work that still runs is not waited for at the end */
	await(1);
	return 13;
}

static int run_lingers_later(void)
{
	note(launch(NULL) == 0);
	await(1);
	return run_lingers();
}

/*
 * The driver is asked no more, so it is not known which GPU the process is on by now: a
 * scheduler that starts does not hear of it.
 */
static void ends_without_another_scheduler(void)
{
	struct pollfd p;

	CHECK(atexit(linger) == 0); /* it runs after the shim's */
	start_holder(run_lingers, 3);
	atomic_store(&both->go, 1);
	app_at(1);
	fake_die(&fake);
	fake_listen(&fake);
	p = (struct pollfd){ .fd = fake.listener, .events = POLLIN };
	CHECK(poll(&p, 1, 1500) == 0); /* it would try again after 1 s at most */
	atomic_store(&both->go, 2);
	ENDS_WITH(13);
}

/* The driver takes long to take a process down. Nobody waits for that. */
static void the_end_gives_the_gpu_back(void)
{
	CHECK(atexit(linger) == 0);
	start_holder(run_lingers_later, 3);
	fake_revoke(&fake, 0, 3);
	CHECK(released().epoch == 3);
	fake.page->slot[0].present = 1;
	atomic_store(&both->go, 1);
	fake_expect(&fake, NVS_REQUEST);
	give(4);
	CHECK(released().epoch == 4);
	app_at(1);
	atomic_store(&both->go, 2);
	ENDS_WITH(13);
}

/* The shim's threads drain no more: the thread that waits does, and asks for the next turn. */
static void cuda_after_exit_beside_a_revoke(void)
{
	stub_state()->work_ns = 300000000u;
	start_cleaner();
	fake_revoke(&fake, 0, 3);
	atomic_store(&both->go, 1);
	CHECK(released().epoch == 3);
	fake_expect(&fake, NVS_REQUEST);
	give(4);
	ENDS_WITH(11);
	CHECK(atomic_load(&both->at) == 2 && launches(0) == 5);
	end_of_file();
}

/* ---- signals ---- */

static atomic_int handled;

static void count_signal(int n)
{
	(void)n;
	atomic_fetch_add(&handled, 1);
}

static void on_signal(int n, void (*handler)(int), int flags)
{
	struct sigaction a = { .sa_handler = handler, .sa_flags = flags };

	CHECK(sigaction(n, &a, NULL) == 0);
}

static int run_under_signals(void)
{
	on_signal(SIGUSR1, count_signal, 0); /* no SA_RESTART */
	arrive(1);
	note(launch(NULL) == 0);
	arrive(2);
	return atomic_load(&handled) > 0 ? 0 : 1;
}

static void signals_at_the_gate(void)
{
	start_app(run_under_signals);
	app_asks();
	app_at(1);
	for (int i = 0; i < 500; i++) {
		CHECK(kill(app, SIGUSR1) == 0);
		if (i % 50 == 0)
			nap_ms(1);
	}
	CHECK(launches(0) == 0 && atomic_load(&both->at) == 1);
	allow(0, 1);
	give(3);
	ENDS_WITH(0);
}

static void exit_handler(int n)
{
	(void)n;
	exit(4);
}

static int run_exits_in_a_handler(void)
{
	on_signal(SIGTERM, exit_handler, 0);
	arrive(1);
	launch(NULL);
	return 1;
}

static void exit_in_a_handler_at_the_gate(void)
{
	start_app(run_exits_in_a_handler);
	app_asks();
	app_at(1);
	nap_ms(20);
	CHECK(kill(app, SIGTERM) == 0);
	ENDS_WITH(4);
	end_of_file();
	CHECK(launches(0) == 0);
}

/* What a program does at its end, here before and after the shim's own. */
static void clean_memory_up(void)
{
	unsigned long long p;

	if (cuMemAlloc_v2(&p, 64) == 0)
		cuMemFree_v2(p);
	cuDevicePrimaryCtxReset_v2(0);
}

static _Noreturn void allocate_until(int us)
{
	struct itimerval soon = { { 0, 0 }, { 0, us } };
	unsigned long long p;
	void *ctx;

	CHECK(setenv(NVS_RUN_DIR_ENV, "/nonexistent", 1) == 0);
	atexit(clean_memory_up);
	CHECK(cuInit(0) == 0);
	if (us % 2)
		atexit(clean_memory_up);
	CHECK(cuDevicePrimaryCtxRetain(&ctx, 0) == 0 && cuCtxSetCurrent(ctx) == 0);
	on_signal(SIGALRM, exit_handler, 0);
	setitimer(ITIMER_REAL, &soon, NULL);
	for (;;) {
		cuMemAlloc_v2(&p, 4096);
		cuMemFree_v2(p);
	}
}

/* The handler has come upon a thread that is at the book of allocations. */
static void exit_in_a_handler_while_allocating(void)
{
	for (int i = 0; i < 60; i++) {
		pid_t pid = fork(), ended = 0;
		int status = 0;

		if (pid == 0)
			allocate_until(20000 + i * 137);
		EVENTUALLY(ended || (ended = waitpid(pid, &status, WNOHANG)) != 0);
		CHECK(ended == pid);
		CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 4);
	}
}

static sigjmp_buf back;

static void jump_handler(int n)
{
	(void)n;
	siglongjmp(back, 1);
}

static volatile int jumps;

/* As a program does that gives a computation up after a while, or at Ctrl-C. */
static int run_jumps_out(void)
{
	struct sigaction a = { .sa_handler = jump_handler };
	struct itimerval never = { { 0, 0 }, { 0, 0 } };

	launch(NULL);
	await(1);
	CHECK(sigaction(SIGALRM, &a, NULL) == 0);
	sigsetjmp(back, 1);
	if (++jumps < 400) {
		/* Until it waits: a jump out of the few instructions before is not survived. */
		struct itimerval soon = { { 0, 0 }, { 0, 500 + jumps % 50 * 10 } };

		setitimer(ITIMER_REAL, &soon, NULL);
		launch(NULL); /* the gate is closed */
	}
	setitimer(ITIMER_REAL, &never, NULL);
	arrive(1);
	await(2);
	note(launch(NULL) == 0);
	return 0;
}

/* Nobody waits any more: it neither asks for the GPU nor keeps it. */
static void jump_out_of_the_wait(void)
{
	struct nvs_frame f;

	start_holder(run_jumps_out, 3);
	fake_revoke(&fake, 0, 3);
	CHECK(released().epoch == 3);
	allow(0, 0);
	atomic_store(&both->go, 1);
	fake_expect(&fake, NVS_REQUEST);
	app_at(1);
	while (fake_receive(&fake, &f, 10)) /* what was asked for while it waited */
		CHECK(f.type == NVS_REQUEST);
	CHECK(launches(0) == 1);
	fake.page->slot[0].waiters = 1;
	fake_grant(&fake, 0, 4);
	f = released();
	CHECK(f.code == NVS_RELEASE_IDLE && f.epoch == 4 && f.u.released.calls == 0);
	fake_word(&fake, 0, 0);
	CHECK(!fake_receive(&fake, &f, 200));
	/* And when it wants, it gets. */
	allow(0, 1);
	atomic_store(&both->go, 2);
	fake_expect(&fake, NVS_REQUEST);
	give(5);
	ENDS_WITH(0);
	CHECK(launches(0) == 2);
}

static int run_launches(void)
{
	while (atomic_load(&both->go) < 1)
		note(launch(NULL) == 0);
	return 0;
}

static void stopped_app(int on)
{
	int status;

	CHECK(kill(app, on ? SIGSTOP : SIGCONT) == 0);
	CHECK(waitpid(app, &status, on ? WUNTRACED : WCONTINUED) == app);
	CHECK(on ? WIFSTOPPED(status) : WIFCONTINUED(status));
}

/* Revoked while it can't answer: it does when it goes on, and launches nothing before. */
static void stopped_while_holding(void)
{
	struct nvs_frame f;
	unsigned long before;

	start_holder(run_launches, 3);
	for (uint64_t epoch = 3; epoch < 23; epoch++) {
		before = launches(0);
		EVENTUALLY(launches(0) > before);
		stopped_app(1);
		fake_revoke(&fake, 0, epoch);
		before = launches(0);
		CHECK(!fake_receive(&fake, &f, 5) || f.type == NVS_REQUEST);
		CHECK(launches(0) == before);
		stopped_app(0);
		CHECK(released().epoch == epoch);
		/* The one call that was under way, at most. */
		CHECK(launches(0) <= before + 1);
		fake_grant(&fake, 0, epoch + 1);
	}
	atomic_store(&both->go, 1);
	ENDS_WITH(0);
}

/* A grant comes and goes unseen. */
static void stopped_while_waiting(void)
{
	start_app(run_launches);
	app_asks();
	for (uint64_t epoch = 3; epoch < 23; epoch++) {
		stopped_app(1);
		fake_grant(&fake, 0, epoch);
		fake_revoke(&fake, 0, epoch);
		allow(0, 0);
		stopped_app(0);
		CHECK(released().epoch == epoch);
	}
	CHECK(launches(0) == 0);
	allow(0, 1);
	fake_grant(&fake, 0, 30);
	EVENTUALLY(launches(0) > 0);
	atomic_store(&both->go, 1);
	ENDS_WITH(0);
}

static void *cancelled_any_time(void *arg)
{
	(void)arg;
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	atomic_store(&both->pid, (int)syscall(SYS_gettid));
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
	launch(NULL);
	return NULL;
}

static int run_cancels(void)
{
	pthread_t t;

	launch(NULL);
	await(1);
	CHECK(pthread_create(&t, NULL, cancelled_any_time, NULL) == 0);
	await(2);
	CHECK(pthread_cancel(t) == 0 && pthread_join(t, NULL) == 0);
	arrive(1);
	await(3);
	note(launch(NULL) == 0);
	return 0;
}

/* Whether a thread of the application sleeps, as at the gate. An emulated one's system call has another number. */
static bool app_sleeps(int thread)
{
	char path[64], line[512] = "", *state;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", app, thread);
	f = fopen(path, "r");
	CHECK(f);
	(void)!fgets(line, sizeof(line), f);
	fclose(f);
	state = strrchr(line, ')');
	return state && strncmp(state, ") S", 3) == 0;
}

/* A thread that has ended does not wait. */
static void asynchronous_cancel_at_the_gate(void)
{
	struct nvs_frame f;

	start_holder(run_cancels, 3);
	fake_revoke(&fake, 0, 3);
	CHECK(released().epoch == 3);
	atomic_store(&both->go, 1);
	fake_expect(&fake, NVS_REQUEST);
	EVENTUALLY(app_sleeps(atomic_load(&both->pid))); /* when it asks, it has a lock */
	atomic_store(&both->go, 2);
	app_at(1);
	CHECK(launches(0) == 1);
	fake.page->slot[0].waiters = 1;
	fake_grant(&fake, 0, 4);
	f = released();
	CHECK(f.code == NVS_RELEASE_IDLE && f.epoch == 4 && f.u.released.calls == 0);
	fake_word(&fake, 0, 0);
	CHECK(!fake_receive(&fake, &f, 200));
	atomic_store(&both->go, 3);
	fake_expect(&fake, NVS_REQUEST);
	give(5);
	ENDS_WITH(0);
	CHECK(launches(0) == 2);
}

static const struct life_case cases[] = {
#define CASE(name) { #name, name }
	CASE(dead_parent_of_a_fork_is_seen),
	CASE(spawned_programs_keep_nothing),
	CASE(forks_while_threads_are_at_work),
	CASE(fork_in_a_handler_at_the_gate),
	CASE(exec_is_a_new_client),
	CASE(exit_while_a_thread_waits),
	CASE(quick_exit_while_a_thread_waits),
	CASE(underscore_exit_while_holding),
	CASE(abort_while_holding),
	CASE(main_thread_ends_first),
	CASE(cuda_after_exit_while_holding),
	CASE(cuda_after_exit_without_a_grant),
	CASE(cuda_after_exit_beside_a_revoke),
	CASE(signals_at_the_gate),
	CASE(exit_in_a_handler_at_the_gate),
	CASE(exit_in_a_handler_while_allocating),
	CASE(ends_without_another_scheduler),
	CASE(the_end_gives_the_gpu_back),
	CASE(jump_out_of_the_wait),
	CASE(stopped_while_holding),
	CASE(stopped_while_waiting),
	CASE(asynchronous_cancel_at_the_gate),
};

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "another_image") == 0)
		another_image();
	return life_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
