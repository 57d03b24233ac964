// SPDX-License-Identifier: Apache-2.0
/*
 * wait.c: threads of the application wait at the gate of a GPU.
 *
 * One of them leads: it waits for the page and for the lease. The others follow: they wait
 * for a futex, and each thread that leaves the gate wakes one of them. So of thousands of
 * threads only a few run when the gate opens, and a follower sleeps on if the gate closes
 * before the follower was woken.
 */
#include "wait.h"

#include <errno.h>

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "futex.h"
#include "glibc.h"
#include "grant.h"
#include "log.h"
#include "ops.h"
#include "throttle.h"

#define LOSS_WAIT_NS   (5 * NVS_S)    /* calls wait this long for a lost scheduler */
#define GONE_NS        (2 * NVS_S)    /* who has not looked for so long does not wait */
#define NUDGE_NS       (1 * NVS_S)    /* waiting threads repeat their request */
#define WAIT_PIECE_NS  (200 * NVS_MS) /* a wait looks at the connection this often */
#define FOLLOWER_WAKES 8              /* so many at once go to the gate when it opens */
#define FOLLOWERS_MANY 64             /* waiting threads that make each wait longer, up to FOLLOWER_PIECE_NS */
#define FOLLOWER_PIECE_NS (1 * NVS_S) /* less than GONE_NS */
#define EXIT_WAIT_NS   (1 * NVS_S)    /* at the end of the process a call waits this long for a scheduler */
#define EXIT_PIECE_NS  (5 * NVS_MS)   /* at the end of the process a waiting call looks at its work this often */

/* Windows in which calls pass during a drain: length, and the longest gap between. */
#define PASS_NS        (20 * NVS_MS)
#define PASS_GAP_MAX_NS (60 * NVS_S)

/* So many followers go to the gate. */
static void wake_followers(struct nvs_gpu *gpu, unsigned n)
{
	atomic_fetch_add(&gpu->followers, 1);
	nvs_futex_wake_some((uint32_t *)&gpu->followers, n);
}

/* Returns how many followers are to go to the gate now: one, or more at the gate's opening. */
static unsigned wait_leave(struct nvs_thread *t)
{
	struct nvs_gpu *gpu = t->waits_at;
	unsigned wakes = 1;

	if (!gpu)
		return 0;
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_LEAVE });
	if (gpu->leader == t) {
		gpu->leader = NULL;
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
static void want(struct nvs_thread *t, struct nvs_gpu *gpu, uint64_t now)
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
 * Whether a thread at the gate should run without a scheduler. The client thread finds
 * out whether there is one, and a scheduler that lives answers each ATTACH.
 */
static bool out_of_patience(struct nvs_gpu *gpu, uint64_t now)
{
	if (gpu->lease.link == LEASE_ATTACHED)
		return false;
	if (nvs_client.link == LINK_ABSENT)
		return true;
	if (nvs_client.closed_policy)
		return false;
	if (atomic_load(&nvs_exiting) && nvs_elapsed(now, nvs_exiting_ns) > EXIT_WAIT_NS)
		return true;
	/* Counted over reconnects: the scheduler may come back and end again for ever. */
	return nvs_client.link == LINK_LOST && !nvs_client.alive &&
	       nvs_elapsed(now, gpu->unattached_ns) > LOSS_WAIT_NS;
}

/*
 * The way out of a drain that cannot end by itself: the GPU's work waits for
 * one of the threads at the gate, for its next launch, or for what it does or
 * lets go of after it (a flag in host memory, a lock that a host function
 * wants). From half of the grace on, which leaves long kernels time to end,
 * every call passes for PASS_NS, and again after ever longer gaps; the drain
 * begins anew each time. Up to the end of the grace the GPU is still ours, so
 * nobody is disturbed; after it the scheduler has fenced us and our work runs
 * beside the others' anyway, and this is how the process gets to release in the
 * end. A slow queue that is mistaken for a stuck one grows by what fits into a
 * window, and that the depth bound keeps small.
 */
static bool may_pass(struct nvs_gpu *gpu, uint64_t now)
{
	if (gpu->lease.gate != LEASE_DRAINING || !nvs_memory_ops.all_there(gpu))
		return false;
	if (gpu->step_until_ns) { /* a step, and this thread makes it */
		bool in_time = now < gpu->step_until_ns;

		gpu->step_until_ns = 0;
		if (in_time) {
			gpu->passed++;
			nvs_gpu_wake(gpu); /* the drain may begin */
			return true;
		}
	}
	if (now < gpu->pass_from_ns)
		return false;
	if (!gpu->pass_until_ns) {
		gpu->pass_until_ns = now + PASS_NS;
		nvs_gpu_wake(gpu);
		nvs_debugf("GPU %u: the drain does not end, calls pass for a moment", gpu->number);
	}
	if (now < gpu->pass_until_ns) {
		gpu->passed++;
		return true;
	}
	gpu->pass_from_ns = gpu->pass_until_ns + gpu->pass_gap_ns;
	gpu->pass_until_ns = 0;
	gpu->pass_gap_ns = gpu->pass_gap_ns * 2 < PASS_GAP_MAX_NS ? gpu->pass_gap_ns * 2 : PASS_GAP_MAX_NS;
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

/*
 * The scheduler says that this GPU is next for the process: watches for the grant
 * without sleeping, one thread of the process, once in its wait.
 */
static void spin_for_grant(struct nvs_gpu *gpu, const struct nvs_slot *slot, uint32_t seen)
{
	uint64_t end = nvs_now() + NVS_SPIN_NS;

	if (atomic_flag_test_and_set(&gpu->spinning))
		return;
	while (__atomic_load_n(&slot->word, __ATOMIC_RELAXED) == seen && nvs_now() < end)
		for (int i = 0; i < 16; i++)
			nvs_cpu_relax();
	atomic_flag_clear(&gpu->spinning);
}

/*
 * The process ends, and the shim's threads call the driver no more: who waits for the
 * drain of a revoked grant does it, once the work has ended. The lock is held, and given
 * up meanwhile. Signals are blocked. False: work still runs.
 */
static bool drain_at_exit(struct nvs_gpu *gpu)
{
	uint64_t closed = gpu->closed_ns;
	bool done;

	nvs_unlock(&nvs_client_lock);
	done = !nvs_gate_busy(gpu) && nvs_streams_idle(gpu) && nvs_drain(gpu, 0) == NVS_DRAINED;
	nvs_lock(&nvs_client_lock);
	if (done && gpu->lease.gate == LEASE_DRAINING && gpu->closed_ns == closed) {
		gpu->drain_ns = nvs_now() - closed;
		nvs_drain_forget(gpu, gpu->drain_ns);
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_DRAINED });
	}
	return done;
}

/* The same for the thread that brings memory in, once the gate may open. */
static bool fill_at_exit(struct nvs_gpu *gpu, struct nvs_signals *q)
{
	bool filled;

	nvs_client_leave(q);
	filled = nvs_memory_ops.fill_at_exit(gpu);
	nvs_client_enter(q);
	return filled;
}

/* False: there is nothing to do now. */
static bool work_at_exit(struct nvs_gpu *gpu, struct nvs_signals *q)
{
	enum lease_gate gate = gpu->lease.gate;

	if (!atomic_load(&nvs_exiting))
		return false;
	if (gate == LEASE_DRAINING)
		return drain_at_exit(gpu);
	return (gate == LEASE_OPEN || gate == LEASE_FREE) && fill_at_exit(gpu, q);
}

/* The lock is held, and given up while waiting. False: this thread leads. */
static bool wait_as_follower(struct nvs_thread *t, struct nvs_gpu *gpu, enum nvs_need need, struct nvs_signals *q)
{
	uint64_t ns = WAIT_PIECE_NS * (1 + gpu->lease.waiting / FOLLOWERS_MANY);
	uint32_t seen = atomic_load(&gpu->followers);

	if (need == NVS_NEED_MEMORY || atomic_load(&nvs_exiting))
		return false;
	if (!gpu->leader)
		gpu->leader = t;
	if (gpu->leader == t)
		return false;
	nvs_client_leave(q);
	nvs_futex_wait((uint32_t *)&gpu->followers, seen, ns < FOLLOWER_PIECE_NS ? ns : FOLLOWER_PIECE_NS, true);
	nvs_client_enter(q);
	return true;
}

/* The lock is held; it is given up while waiting. word: of the page, as last looked at. */
static void wait_piece(struct nvs_gpu *gpu, uint32_t word, bool *spun, struct nvs_signals *q)
{
	const struct nvs_slot *slot = atomic_load(&gpu->slot);
	/*
	 * Open, yet the word is another: shut for a moment, the page tells when it is
	 * over. If the word is right, memory is on its way: that ends here, and changes
	 * no word.
	 */
	bool on_page = gpu->lease.link == LEASE_ATTACHED &&
		       (gpu->lease.gate == LEASE_CLOSED ||
			(gpu->lease.gate == LEASE_OPEN && word != (uint32_t)gpu->lease.epoch));
	uint32_t seen = on_page ? word : atomic_load(&gpu->changed);
	uint64_t left = nvs_elapsed(gpu->pass_from_ns, nvs_now()), ns = WAIT_PIECE_NS;

	if (gpu->lease.gate == LEASE_DRAINING && left && left < ns)
		ns = left;
	if (gpu->lease.gate == LEASE_DRAINING && atomic_load(&nvs_exiting) && EXIT_PIECE_NS < ns)
		ns = EXIT_PIECE_NS;
	nvs_unlock(&nvs_client_lock);
	if (on_page && !*spun &&
	    __atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & NVS_GRANT_NEXT) {
		*spun = true;
		spin_for_grant(gpu, slot, seen);
	}
	nvs_signals_restore(q);
	if (on_page)
		nvs_futex_wait(&slot->word, seen, ns, false);
	else
		nvs_futex_wait((uint32_t *)&gpu->changed, seen, ns, true);
	nvs_client_enter(q);
}

bool nvs_gate_wait(struct nvs_thread *t, struct nvs_gpu *gpu, enum nvs_need need, unsigned keeps)
{
	uint64_t start = nvs_now(), now = start, waited;
	bool spun = false, pass = false, paused = false;
	int saved = errno;
	unsigned wakes;
	struct nvs_signals q;

	atomic_store(&gpu->used, true);
	nvs_client_enter(&q);
	nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_USE });
	wait_leave_unseen(t); /* a wait that a signal handler jumped out of */
	t->keeps = keeps;
	for (;;) {
		uint32_t word;

		if (nvs_is_away()) {
			nvs_client_leave(&q);
			nvs_away_wait();
			nvs_client_enter(&q);
			now = nvs_now();
			continue;
		}
		want(t, gpu, now);
		word = nvs_gpu_word(gpu);

		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_WORD, .word = word });
		if (word == atomic_load(&gpu->epoch) ||
		    !atomic_load(&nvs_gate.active))
			break;
		paused = paused || gpu->lease.gate == LEASE_OPEN;
		if (may_pass(gpu, now) || may_go_ahead(gpu) ||
		    (need == NVS_NEED_MEMORY && nvs_memory_ops.all_there(gpu))) {
			/* Before the lock is given up: do_drain sees flag or count. */
			atomic_store(&t->in_flight, gpu->bit);
			pass = true;
			break;
		}
		if (out_of_patience(gpu, now)) {
			nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_GIVE_UP });
			if (gpu->lease.gate == LEASE_FREE &&
			    atomic_load(&gpu->epoch) == nvs_free_slot.word)
				break;
		} else if (nvs_elapsed(now, gpu->request_ns) > NUDGE_NS) {
			nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_NUDGE });
		}
		if (!work_at_exit(gpu, &q) && !wait_as_follower(t, gpu, need, &q))
			wait_piece(gpu, word, &spun, &q);
		now = nvs_now();
	}
	wakes = wait_leave(t);
	gpu->idle_ns = 0; /* its call comes now */
	now = nvs_now();
	if (paused)
		nvs_throttle_wanted(gpu, now);
	waited = now - start;
	gpu->stats.waits++;
	gpu->stats.wait_ns += waited;
	if (waited > gpu->stats.wait_max_ns)
		gpu->stats.wait_max_ns = waited;
	nvs_client_leave(&q);
	if (wakes)
		wake_followers(gpu, wakes);
	errno = saved;
	return pass;
}

void nvs_gpu_look_if_lost(struct nvs_gpu *gpu, uint64_t now)
{
	if (out_of_patience(gpu, now))
		nvs_gpu_step(gpu, (struct lease_event){ .type = LEASE_EV_GIVE_UP });
}

void nvs_gpu_give_up_if_lost(struct nvs_gpu *gpu)
{
	struct nvs_signals q;

	nvs_client_enter(&q);
	nvs_gpu_look_if_lost(gpu, nvs_now());
	nvs_client_leave(&q);
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
