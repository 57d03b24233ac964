// SPDX-License-Identifier: Apache-2.0
#include "suspended.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "futex.h"
#include "log.h"
#include "signals.h"
#include "stream.h"
#include "suspended_flag.h"

#define WAIT_NS   (200 * NVS_MS) /* a wait looks at the connection this often */
#define WAKE_NS   (1 * NVS_S)    /* and repeats its request this often */
#define LOCKED_NS (1 * NVS_MS)   /* the client's lock is taken: so long to the next try */
#define SAFE_NS   (1 * NVS_S)    /* threads that run have so long to get past the look at nvs_suspended */
#define EXIT_NS   (30 * NVS_S)

enum { HERE, LEAVING, SUSPENDED }; /* nvs_suspended */

atomic_uint nvs_suspended;
static atomic_bool called; /* a call of the application's waits, or has waited since PREPARE */
/* These under nvs_client_lock. */
static uint64_t asked_ns; /* for the wake */
static bool through;      /* calls go to the driver, and no scheduler has said that the process is back */
static bool trying;       /* a thread waits in the driver until it is */

static bool suspended_send(uint32_t code)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_SUSPENDED, .code = code };

	return nvs_client.link == LINK_UP && nvs_client_send(&f);
}

/* ---- calls of the driver meanwhile ---- */

/* Asks for the wake. Without waiting for the lock, which the client thread may have for long. */
static bool suspended_ask(void)
{
	struct nvs_signals q;
	bool locked;

	nvs_signals_block(&q);
	locked = nvs_trylock(&nvs_client_lock);
	if (locked) {
		uint64_t now = nvs_now();

		if (atomic_load(&nvs_suspended) == LEAVING) /* prepare_main() sees that it is needed */
			asked_ns = now;
		else if (atomic_load(&nvs_suspended) == SUSPENDED && nvs_elapsed(now, asked_ns) > WAKE_NS &&
			 suspended_send(NVS_SUSPENDED_WAKE))
			asked_ns = now;
		nvs_unlock(&nvs_client_lock);
	}
	nvs_signals_restore(&q);
	return locked;
}

static void wait_until(uint64_t end_ns)
{
	int saved = errno;

	for (;;) {
		unsigned state = atomic_load(&nvs_suspended);
		bool asked;

		if (!state || nvs_now() >= end_ns)
			break;
		if (!nvs_of_shim)
			atomic_store(&called, true);
		asked = nvs_of_shim || suspended_ask();
		nvs_futex_wait((uint32_t *)&nvs_suspended, state, asked ? WAIT_NS : LOCKED_NS, true);
	}
	errno = saved;
}

void nvs_suspended_wait(void)
{
	wait_until(UINT64_MAX);
}

void nvs_suspended_exit(void)
{
	wait_until(nvs_now() + EXIT_NS);
}

/* ---- getting ready ---- */

/* From " S 1 2 3 ..." of /proc/PID/stat: the state, and the time in user and kernel mode. */
static bool parse_stat(const char *p, char *state, unsigned long long *ticks)
{
	enum { USER = 12, SYSTEM = 13 }; /* words from here */
	int word = 0;

	*state = (char)(p[0] ? p[1] : '\0');
	*ticks = 0;
	for (; *p && word <= SYSTEM; word++) {
		unsigned long long v = 0;

		while (*p == ' ')
			p++;
		for (; *p && *p != ' '; p++)
			v = v * 10 + (unsigned long long)(*p - '0');
		if (word + 1 == USER || word + 1 == SYSTEM)
			*ticks += v;
	}
	return word > SYSTEM;
}

/*
 * State and CPU time of a thread. False: it is gone. One that sleeps in the kernel ('S') is not
 * between a look at nvs_suspended and the driver's own lock.
 */
static bool thread_state(long tid, char *state, unsigned long long *ticks)
{
	char text[512], *p;
	ssize_t n;
	int fd;

	(void)snprintf(text, sizeof(text), "/proc/self/task/%ld/stat", tid);
	fd = (int)syscall(SYS_openat, AT_FDCWD, text, O_RDONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return false;
	n = (ssize_t)syscall(SYS_read, fd, text, sizeof(text) - 1);
	close(fd);
	text[n > 0 ? n : 0] = '\0';
	p = strrchr(text, ')');
	return p && parse_stat(p + 1, state, ticks);
}

/* Waits until the thread cannot be on its way from an earlier look at nvs_suspended into the driver. */
static bool thread_safe(long tid, uint64_t end_ns)
{
	unsigned long long first, ticks;
	char state;

	if (!thread_state(tid, &state, &first))
		return true;
	while (state != 'S' && state != 'Z' && state != 'X') {
		if (nvs_now() >= end_ns)
			return false;
		nvs_nap(2 * NVS_MS);
		if (!thread_state(tid, &state, &ticks))
			return true;
		if (ticks != first)
			return true; /* it ran for longer than that takes */
	}
	return true;
}

struct entry {
	uint64_t inode, offset;
	unsigned short length;
	unsigned char type;
	char name[];
};

/* All threads that began before nvs_suspended was set; later ones have seen it. */
static bool threads_safe(uint64_t end_ns)
{
	_Alignas(uint64_t) char buf[4096];
	long self = syscall(SYS_gettid), n;
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
	bool safe = fd >= 0;

	while (safe && (n = syscall(SYS_getdents64, fd, buf, sizeof(buf))) > 0)
		for (long at = 0; safe && at < n;) {
			const struct entry *e = (const void *)(buf + at);
			long tid = 0;

			at += e->length;
			for (const char *p = e->name; *p >= '0' && *p <= '9'; p++)
				tid = tid * 10 + (*p - '0');
			safe = tid <= 0 || tid == self || thread_safe(tid, end_ns);
		}
	if (fd >= 0)
		close(fd);
	return safe;
}

/* The lock is held. */
static void come_back(void)
{
	atomic_store(&nvs_suspended, HERE);
	asked_ns = 0;
	through = false;
	nvs_futex_wake((uint32_t *)&nvs_suspended, true);
}

/* Whether a grant, a call or a waiting thread needs the driver now. The lock is held. */
static bool needed(void)
{
	if (atomic_load(&nvs_exiting))
		return true;
	NVS_FOR_EACH_GPU(gpu)
		/* On one that the scheduler does not know, work runs without a grant. */
		if ((gpu->lease.link == LEASE_ATTACHED || gpu->lease.link == LEASE_REJECTED) &&
		    (gpu->lease.gate != LEASE_CLOSED || gpu->lease.waiting || gpu->lease.unfinished ||
		     nvs_gate_busy(gpu) || nvs_gpu_has_work(gpu)))
			return true;
	return false;
}

/* The PREPAREs that were followed: the latest is the one to answer. Under nvs_client_lock. */
static uintptr_t orders;

/* A thread of its own: the scheduler is to be heard meanwhile. */
static void *prepare_main(void *order)
{
	uint64_t end = nvs_now() + SAFE_NS;
	bool safe;

	nvs_of_shim = true;
	safe = nvs_driver_wait_idle(end) && threads_safe(end);
	nvs_lock(&nvs_client_lock);
	if (atomic_load(&nvs_suspended) == LEAVING && (uintptr_t)order == orders) {
		if (safe && !asked_ns && !needed() && suspended_send(NVS_SUSPENDED_READY)) {
			atomic_store(&nvs_suspended, SUSPENDED);
			nvs_futex_wake((uint32_t *)&nvs_suspended, true);
		} else {
			come_back();
			suspended_send(NVS_SUSPENDED_BUSY);
		}
	}
	nvs_unlock(&nvs_client_lock);
	return NULL;
}

bool nvs_suspended_receive(const struct nvs_frame *f)
{
	if (f->code == NVS_SUSPEND_OVER) {
		bool was = nvs_suspended_said();

		come_back();
		NVS_FOR_EACH_GPU(gpu) { /* the driver has made its channels anew */
			gpu->slice.told = gpu->slice.told && !was;
			gpu->slice.look_ns = was ? 0 : gpu->slice.look_ns;
			gpu->slice.due = gpu->slice.due || (was && gpu->slice.ns);
		}
		return true;
	}
	if (f->code != NVS_SUSPEND_PREPARE)
		return false;
	if (atomic_load(&nvs_suspended) == SUSPENDED) { /* the answer may be lost */
		suspended_send(NVS_SUSPENDED_READY);
		return true;
	}
	if (atomic_load(&nvs_suspended) == LEAVING)
		return true;
	if (!nvs_active() || needed()) {
		suspended_send(NVS_SUSPENDED_BUSY);
		return true;
	}
	asked_ns = 0;
	through = false;
	atomic_store(&called, false);
	atomic_store(&nvs_suspended, LEAVING);
	if (!nvs_thread_start(prepare_main, (void *)++orders)) {
		come_back();
		suspended_send(NVS_SUSPENDED_BUSY);
	}
	return true;
}

void nvs_suspended_lost(void)
{
	if (atomic_load(&nvs_suspended) == LEAVING)
		come_back();
}

/* ---- without a scheduler ---- */

bool nvs_suspended_said(void)
{
	return atomic_load(&nvs_suspended) != HERE || through;
}

/*
 * Waits in the driver, as a call of the application's would, until somebody has restored the
 * process. On a thread of its own, because a call that waits there with a free gate is taken for
 * work: a scheduler that comes back would wait for its end, and never restore the process.
 */
static void *try_main(void *arg)
{
	/* None is destroyed while the process is suspended, and the driver refuses one that is gone. */
	void *ctx = nvs_context_any(NULL), *event = NULL, *popped;

	(void)arg;
	nvs_of_shim = true; /* without more: nvs_thread_setup() waits until the process is back */
	if (ctx && nvs_driver.ctx_push(ctx) == CUDA_SUCCESS) {
		if (nvs_driver.event_create(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS)
			nvs_driver.event_destroy(event);
		nvs_driver.ctx_pop(&popped);
	}
	nvs_lock(&nvs_client_lock);
	trying = false;
	if (atomic_load(&nvs_suspended) == SUSPENDED && nvs_client.link == LINK_ABSENT) {
		nvs_debugf("the process is back, and there is no scheduler: its calls go on");
		come_back();
		through = true;
	}
	nvs_unlock(&nvs_client_lock);
	return NULL;
}

void nvs_suspended_tick(uint64_t now)
{
	if (nvs_client.link == LINK_ABSENT && !trying && atomic_load(&nvs_suspended) == SUSPENDED && atomic_load(&called))
		trying = nvs_thread_start(try_main, NULL);
	/* The scheduler takes it for suspended, from REGISTER, and hears this after ATTACH only. */
	if (through && nvs_client_attached() && nvs_elapsed(now, asked_ns) > WAKE_NS && suspended_send(NVS_SUSPENDED_WAKE))
		asked_ns = now;
}

void nvs_suspended_fork_child(void)
{
	atomic_store(&nvs_suspended, HERE);
	asked_ns = 0;
	through = trying = false;
}
