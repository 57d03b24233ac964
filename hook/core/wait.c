// SPDX-License-Identifier: Apache-2.0
/*
 * wait.c: threads of the application wait at the gate of a GPU. One of them leads: it waits for the
 * page and for the lease. The others follow: they wait for a futex, and each thread that leaves the
 * gate wakes one. So of thousands of threads only a few run when the gate opens.
 */
#include "wait.h"

#include <errno.h>

#include "clock.h"
#include "connection.h"
#include "exit.h"
#include "futex.h"
#include "grant.h"
#include "log.h"
#include "ops.h"
#include "throttle.h"

#define GONE_NS        (2 * NVS_S)    /* a thread that has not looked for so long does not wait */
#define NUDGE_NS       (1 * NVS_S)    /* waiting threads repeat their request */
#define WAIT_PIECE_NS  (200 * NVS_MS) /* a wait looks at the connection this often */
#define FOLLOWER_WAKES 8              /* so many at once go to the gate when it opens */
#define FOLLOWERS_MANY 64             /* waiting threads that make each wait longer, up to FOLLOWER_PIECE_NS */
#define FOLLOWER_PIECE_NS (1 * NVS_S) /* less than GONE_NS */
#define EXIT_PIECE_NS  (5 * NVS_MS)   /* at the end of the process a waiting call looks at its work this often */

/* Windows in which calls pass during a drain: length, and the longest gap between. */
#define PASS_NS        (20 * NVS_MS)
#define PASS_GAP_MAX_NS (60 * NVS_S)

/* So many followers go to the gate. */
static void wake_followers(struct nvs_gpu *gpu, unsigned n)
{
	atomic_fetch_add(&gpu->wait.followers, 1);
	nvs_futex_wake_some((uint32_t *)&gpu->wait.followers, n);
}

/* Returns how many followers are to go to the gate now: one, or more at the gate's opening. */
static unsigned wait_leave(struct nvs_thread *t)
{
	struct nvs_gpu *gpu = t->waits_at;
	unsigned wakes = 1;

	if (!gpu)
		return 0;
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_LEAVE });
	if (gpu->wait.leader == t) {
		gpu->wait.leader = NULL;
		wakes = FOLLOWER_WAKES;
	}
	t->waits_at = NULL;
	return gpu->lease.waiting ? wakes : 0;
}

/* The thread has gone from the gate without a word: another one leads. */
static void wait_leave_unseen(struct nvs_thread *t)
{
	struct nvs_gpu *gpu = t->waits_at;

	if (wait_leave(t))
		wake_followers(gpu, 1);
}

/* The thread waits at the gate; it may have been taken for gone, or have gone from another. */
static void wait_begin(struct nvs_thread *t, struct nvs_gpu *gpu, uint64_t now)
{
	t->looked_ns = now;
	if (t->waits_at == gpu)
		return;
	wait_leave_unseen(t);
	t->waits_at = gpu;
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_WANT });
}

void nvs_gate_forget_waiters(uint64_t now)
{
	for (struct nvs_thread *t = nvs_threads(); t; t = t->next)
		if (t->waits_at && nvs_elapsed(now, t->looked_ns) > GONE_NS)
			wait_leave_unseen(t);
}

/*
 * The way out of a drain that cannot end by itself: the GPU's work waits for one of the threads at
 * the gate (its next launch, a flag in host memory, a lock that a host function wants). From half of
 * the grace on, which leaves long kernels time to end, every call passes for PASS_NS, and again
 * after ever longer gaps; the drain begins anew each time. Up to the end of the grace the GPU is
 * still ours, so nobody is disturbed; after it the scheduler has fenced us, and this is how the
 * process gets to release in the end. A slow queue that is mistaken for a stuck one grows by what
 * fits into a window.
 */
static bool may_pass(struct nvs_gpu *gpu, uint64_t now)
{
	if (gpu->lease.gate != LEASE_DRAINING || !nvs_memory_ops.all_there(gpu))
		return false;
	if (gpu->wait.step_until_ns) { /* a step, and this thread makes it */
		bool in_time = now < gpu->wait.step_until_ns;

		gpu->wait.step_until_ns = 0;
		if (in_time) {
			gpu->wait.passed++;
			nvs_gpu_wake(gpu); /* the drain may begin */
			return true;
		}
	}
	if (now < gpu->wait.pass_from_ns)
		return false;
	if (!gpu->wait.pass_until_ns) {
		gpu->wait.pass_until_ns = now + PASS_NS;
		nvs_gpu_wake(gpu);
		nvs_debugf("GPU %u: the drain does not end, calls pass for a moment", gpu->number);
	}
	if (now < gpu->wait.pass_until_ns) {
		gpu->wait.passed++;
		return true;
	}
	gpu->wait.pass_from_ns = gpu->wait.pass_until_ns + gpu->wait.pass_gap_ns;
	gpu->wait.pass_until_ns = 0;
	gpu->wait.pass_gap_ns = gpu->wait.pass_gap_ns * 2 < PASS_GAP_MAX_NS ? gpu->wait.pass_gap_ns * 2 : PASS_GAP_MAX_NS;
	return false;
}

/* A latency client need not wait for a grant that it will get at once. */
static bool may_go_ahead(struct nvs_gpu *gpu)
{
	const struct lease *l = &gpu->lease;

	return l->link == LEASE_ATTACHED && l->gate == LEASE_CLOSED && l->requested && !l->unfinished &&
	       __atomic_load_n(&atomic_load(&gpu->slot)->flags, __ATOMIC_RELAXED) &
		       NVS_GRANT_STANDING &&
	       nvs_memory_ops.all_there(gpu);
}

/* The scheduler says that this process is next: one thread spins for the grant, once in its wait. */
static void spin_for_grant(struct nvs_gpu *gpu, const struct nvs_slot *slot, uint32_t seen)
{
	uint64_t end = nvs_now() + NVS_SPIN_NS;

	if (atomic_flag_test_and_set(&gpu->wait.spinning))
		return;
	while (__atomic_load_n(&slot->word, __ATOMIC_RELAXED) == seen && nvs_now() < end)
		for (int i = 0; i < 16; i++)
			nvs_cpu_relax();
	atomic_flag_clear(&gpu->wait.spinning);
}

/* The lock is held, and given up while waiting. False: this thread leads. */
static bool wait_as_follower(struct nvs_thread *t, struct nvs_gpu *gpu, enum nvs_need need, struct nvs_signals *q)
{
	uint64_t ns = WAIT_PIECE_NS * (1 + gpu->lease.waiting / FOLLOWERS_MANY);
	uint32_t seen = atomic_load(&gpu->wait.followers);

	if (need == NVS_NEED_MEMORY || atomic_load(&nvs_exiting))
		return false;
	if (!gpu->wait.leader)
		gpu->wait.leader = t;
	if (gpu->wait.leader == t)
		return false;
	nvs_client_leave(q);
	nvs_futex_wait((uint32_t *)&gpu->wait.followers, seen, ns < FOLLOWER_PIECE_NS ? ns : FOLLOWER_PIECE_NS, true);
	nvs_client_enter(q);
	return true;
}

/* What a thread at the gate has seen. */
struct visit {
	uint32_t word;     /* of the page, as last looked at */
	bool spun, paused; /* it has spun; the gate was open, and shut for a moment */
	bool pass;         /* its call goes on, while the gate is closed */
};

/* The lock is held; it is given up while waiting. */
static void wait_piece(struct nvs_gpu *gpu, struct visit *v, struct nvs_signals *q)
{
	const struct nvs_slot *slot = atomic_load(&gpu->slot);
	/*
	 * Open, yet the word is another: shut for a moment, the page tells when it is over. If the
	 * word is right, memory is on its way, which changes no word.
	 */
	bool on_page = gpu->lease.link == LEASE_ATTACHED &&
		       (gpu->lease.gate == LEASE_CLOSED ||
			(gpu->lease.gate == LEASE_OPEN && v->word != (uint32_t)gpu->lease.epoch));
	uint32_t seen = on_page ? v->word : atomic_load(&gpu->changed);
	uint64_t left = nvs_elapsed(gpu->wait.pass_from_ns, nvs_now()), ns = WAIT_PIECE_NS;

	if (gpu->lease.gate == LEASE_DRAINING && left && left < ns)
		ns = left;
	if (gpu->lease.gate == LEASE_DRAINING && atomic_load(&nvs_exiting) && EXIT_PIECE_NS < ns)
		ns = EXIT_PIECE_NS;
	nvs_unlock(&nvs_client_lock);
	if (on_page && !v->spun &&
	    __atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & NVS_GRANT_NEXT) {
		v->spun = true;
		spin_for_grant(gpu, slot, seen);
	}
	nvs_signals_restore(q);
	if (on_page)
		nvs_futex_wait(&slot->word, seen, ns, false);
	else
		nvs_futex_wait((uint32_t *)&gpu->changed, seen, ns, true);
	nvs_client_enter(q);
}

/* The process is checkpointed, or about to be: waits until it is back. The lock is held, and given up meanwhile. */
static bool waits_suspended(struct nvs_signals *q)
{
	if (!nvs_is_suspended())
		return false;
	nvs_client_leave(q);
	nvs_suspended_wait();
	nvs_client_enter(q);
	return true;
}

/* Whether the thread leaves the gate. The lock is held. */
static bool wait_is_over(struct nvs_thread *t, struct nvs_gpu *gpu, enum nvs_need need, uint64_t now, struct visit *v)
{
	wait_begin(t, gpu, now);
	v->word = nvs_gpu_word(gpu);
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_WORD, .word = v->word });
	if (v->word == atomic_load(&gpu->epoch) || !atomic_load(&nvs_gate.active))
		return true;
	v->paused = v->paused || gpu->lease.gate == LEASE_OPEN;
	if (may_pass(gpu, now) || may_go_ahead(gpu) ||
	    (need == NVS_NEED_MEMORY && nvs_memory_ops.all_there(gpu))) {
		/* Before the lock is given up: do_drain sees flag or count. */
		atomic_store(&t->in_flight, gpu->bit);
		v->pass = true;
		return true;
	}
	if (nvs_gpu_try_give_up(gpu, now))
		return gpu->lease.gate == LEASE_FREE && atomic_load(&gpu->epoch) == nvs_free_slot.word;
	if (nvs_elapsed(now, gpu->request_ns) > NUDGE_NS)
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_NUDGE });
	return false;
}

static void count_wait(struct nvs_stats *stats, uint64_t waited)
{
	stats->waits++;
	stats->wait_ns += waited;
	if (waited > stats->wait_max_ns)
		stats->wait_max_ns = waited;
}

bool nvs_gate_wait(struct nvs_thread *t, struct nvs_gpu *gpu, enum nvs_need need, unsigned keeps)
{
	uint64_t start = nvs_now(), now;
	struct visit v = { 0 };
	int saved = errno;
	unsigned wakes;
	struct nvs_signals q;

	atomic_store(&gpu->used, true);
	nvs_client_enter(&q);
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_USE });
	wait_leave_unseen(t); /* a wait that a signal handler jumped out of */
	t->keeps = keeps;
	for (;;) {
		if (waits_suspended(&q))
			continue;
		if (wait_is_over(t, gpu, need, nvs_now(), &v))
			break;
		if (!nvs_exit_work(gpu, &q) && !wait_as_follower(t, gpu, need, &q))
			wait_piece(gpu, &v, &q);
	}
	wakes = wait_leave(t);
	gpu->drains.idle_ns = 0; /* its call comes now */
	now = nvs_now();
	if (v.paused)
		nvs_throttle_wanted(gpu, now);
	count_wait(&gpu->stats.now, now - start);
	nvs_client_leave(&q);
	if (wakes)
		wake_followers(gpu, wakes);
	errno = saved;
	return v.pass;
}

void nvs_gpu_use(struct nvs_gpu *gpu)
{
	struct nvs_signals q;

	if (gpu->number >= nvs_gpu_count || atomic_exchange(&gpu->used, true))
		return;
	nvs_client_enter(&q);
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_USE });
	nvs_client_leave(&q);
}
