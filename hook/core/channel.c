// SPDX-License-Identifier: Apache-2.0
/*
 * channel.c: carries out what a lease decides, the slow way through the gate,
 * and drains.
 */
#include "channel.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

#include "futex.h"
#include "gate.h"
#include "glibc.h"
#include "log.h"
#include "ops.h"
#include "wire_io.h"

#define ATTACH_WAIT_NS (5 * NVS_S)
#define GONE_NS        (2 * NVS_S)    /* who has not looked for so long does not wait */
#define NUDGE_NS       (1 * NVS_S)    /* waiting threads repeat their request */
#define WAIT_PIECE_NS  (200 * NVS_MS) /* a wait looks at the connection this often */
#define TIMER_SLACK_NS 1000ul         /* of our threads: they time in tens of microseconds */
#define EXIT_WAIT_NS   (1 * NVS_S)    /* at the end of the process a call waits this long for a drain */
#define DRAIN_PATIENCE_NS (1 * NVS_S) /* with a capture open, unless REVOKE says more */

/* Windows in which calls pass during a drain: length, first and longest gap. */
#define PASS_NS        (20 * NVS_MS)
#define PASS_GAP_NS    (1 * NVS_S)    /* or an eighth of the grace, if that is less */
#define PASS_GAP_MAX_NS (60 * NVS_S)

static const struct nvs_slot free_slot = { .word = 1 };
static const struct nvs_slot closed_slot = { .word = NVS_WORD_CLOSED };

pthread_mutex_t nvs_client_lock = PTHREAD_MUTEX_INITIALIZER;
struct nvs_client nvs_client = { .fd = -1 };
struct channel nvs_client_channels[NVS_MAX_CHANNELS];
unsigned nvs_client_count;
atomic_bool nvs_exiting;
uint64_t nvs_exiting_ns;

/* ---- lease actions; the lock is held ---- */

void nvs_channel_wake(unsigned i)
{
	const struct nvs_slot *slot = atomic_load(&nvs_channels[i].slot);

	atomic_fetch_add(&nvs_client_channels[i].changed, 1);
	nvs_futex_wake((uint32_t *)&nvs_client_channels[i].changed, true);
	if (slot != &free_slot && slot != &closed_slot)
		nvs_futex_wake(&slot->word, false);
}

static void set_epoch(unsigned i, uint32_t word)
{
	atomic_store(&nvs_channels[i].epoch, word);
}

static void set_slot(unsigned i, const struct nvs_slot *slot)
{
	const struct nvs_slot *old = atomic_load(&nvs_channels[i].slot);

	atomic_store(&nvs_channels[i].slot, slot);
	if (old && old != slot && old != &free_slot && old != &closed_slot)
		nvs_futex_wake(&old->word, false);
}

/* STATS and REQUEST are tried again anyway; the rest must arrive. */
bool nvs_channel_send(const struct nvs_frame *f)
{
	bool must = f->type != NVS_STATS && f->type != NVS_REQUEST;

	return nvs_client.fd >= 0 && nvs_send_frame(nvs_client.fd, f, must);
}

static void send_attach(unsigned i, const struct lease_out *out)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_ATTACH,
			       .channel = (uint16_t)i, .epoch = out->epoch,
			       .code = out->want ? NVS_ATTACH_WANT : 0 };

	memcpy(f.u.attach.uuid, nvs_client_channels[i].device.uuid, NVS_UUID_SIZE);
	f.u.attach.ordinal = i;
	f.u.attach.total_mem = nvs_client_channels[i].device.total_mem;
	nvs_client_channels[i].attach_ns = nvs_client_channels[i].request_ns = nvs_now();
	nvs_channel_send(&f);
}

static void send_release(unsigned i, const struct lease_out *out)
{
	struct channel *c = &nvs_client_channels[i];
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_RELEASE,
			       .channel = (uint16_t)i, .epoch = out->epoch,
			       .code = out->reason };
	uint64_t calls = nvs_gate_calls(i); /* none is added while the gate is closed */

	f.u.released.drain_ns = c->drain_ns;
	f.u.released.calls = calls - c->grant_calls;
	nvs_channel_send(&f);
	c->drain_ns = 0;
	c->grant_calls = calls;
}

static void send_request(unsigned i)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_REQUEST,
			       .channel = (uint16_t)i };

	nvs_client_channels[i].request_ns = nvs_now();
	nvs_channel_send(&f); /* if the socket is full the next nudge tries again */
}

/* The gate is closed: when the first window of this drain would begin. */
static void plan_passes(struct channel *c)
{
	uint64_t gap = c->grace_ns / 8;

	if (gap == 0 || gap > PASS_GAP_NS)
		gap = PASS_GAP_NS;
	c->pass_gap_ns = gap;
	c->pass_from_ns = c->closed_ns + (c->grace_ns ? c->grace_ns / 2 : gap);
	c->pass_until_ns = 0;
}

void nvs_channel_step(unsigned i, struct lease_event ev)
{
	struct channel *c = &nvs_client_channels[i];
	enum lease_link before = c->lease.link;
	struct lease_out out = lease_step(&c->lease, ev);

	if (c->lease.link != before && (before == LEASE_ATTACHED || before == LEASE_UNUSED))
		c->unattached_ns = nvs_now();
	if (!(out.actions & (LEASE_ACT_OPEN | LEASE_ACT_FREE)))
		nvs_memory_ops.lease_changed(i, c->lease.gate, false);
	if (!out.actions)
		return;
	if (out.actions & LEASE_ACT_CLOSE) {
		set_epoch(i, NVS_WORD_NONE);
		c->closed_ns = nvs_now();
		plan_passes(c);
	}
	if (out.actions & LEASE_ACT_STEP)
		c->step_until_ns = c->closed_ns + NVS_STEP_NS;
	if (out.actions & LEASE_ACT_PAGE)
		set_slot(i, &nvs_client.page->slot[i]);
	if (out.actions & LEASE_ACT_OPEN) {
		/* Else nvs_channel_filled() does. */
		if (nvs_memory_ops.lease_changed(i, c->lease.gate, true))
			set_epoch(i, (uint32_t)out.epoch);
		c->idle_ns = 0;
	}
	if (out.actions & LEASE_ACT_FREE) {
		set_epoch(i, NVS_WORD_NONE);
		set_slot(i, &free_slot);
		if (nvs_memory_ops.lease_changed(i, c->lease.gate, true))
			set_epoch(i, free_slot.word);
		nvs_debugf("GPU %u: running without a scheduler", i);
	}
	if (out.actions & LEASE_ACT_ATTACH)
		send_attach(i, &out);
	if (out.actions & LEASE_ACT_RELEASE) {
		nvs_memory_ops.before_release(i);
		send_release(i, &out);
	}
	if (out.actions & LEASE_ACT_REQUEST)
		send_request(i);
	if (out.actions & LEASE_ACT_DRAIN)
		atomic_store(&c->drain, true);
	if (out.actions & ~(unsigned)LEASE_ACT_REQUEST)
		nvs_channel_wake(i);
}

void nvs_channel_filled(unsigned i)
{
	struct channel *c = &nvs_client_channels[i];

	if ((c->lease.gate != LEASE_OPEN && c->lease.gate != LEASE_FREE) ||
	    !nvs_memory_ops.lease_changed(i, c->lease.gate, true))
		return;
	set_epoch(i, c->lease.gate == LEASE_FREE ? free_slot.word : (uint32_t)c->lease.epoch);
	c->idle_ns = 0;
	if (c->lease.gate == LEASE_OPEN)
		nvs_memory_ops.gate_opened(i);
	nvs_channel_wake(i);
}

bool nvs_channel_room(unsigned i, uint64_t *room)
{
	const struct nvs_slot *slot = atomic_load(&nvs_channels[i].slot);

	if (!slot || slot == &closed_slot)
		return false;
	*room = slot == &free_slot ? UINT64_MAX : __atomic_load_n(&slot->room, __ATOMIC_ACQUIRE);
	return true;
}

uint32_t nvs_channel_word(unsigned i)
{
	return __atomic_load_n(&atomic_load(&nvs_channels[i].slot)->word, __ATOMIC_SEQ_CST);
}

void nvs_channels_fork_child(void)
{
	for (unsigned i = 0; i < NVS_MAX_CHANNELS; i++) {
		if (!atomic_load(&nvs_channels[i].slot))
			continue; /* never used */
		atomic_store(&nvs_channels[i].slot, &free_slot);
		atomic_store(&nvs_channels[i].epoch, free_slot.word);
	}
}

void nvs_channel_close(unsigned i)
{
	set_slot(i, &closed_slot);
	set_epoch(i, NVS_WORD_NONE);
}

/* ---- application threads ---- */

/*
 * A signal handler may fork, exit or jump away: not while its thread has the
 * lock, which would stay locked.
 */
static void lock_masked(sigset_t *old)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, old);
	pthread_mutex_lock(&nvs_client_lock);
}

static void unlock_masked(const sigset_t *old)
{
	pthread_mutex_unlock(&nvs_client_lock);
	pthread_sigmask(SIG_SETMASK, old, NULL);
}

static void leave(struct nvs_thread *t)
{
	if (t->waits_at)
		nvs_channel_step(t->waits_at - 1, (struct lease_event){ .type = LEASE_EV_LEAVE });
	t->waits_at = 0;
}

/* The thread waits at the gate; it may have been taken for gone, or have gone from another. */
static void want(struct nvs_thread *t, unsigned i, uint64_t now)
{
	t->looked_ns = now;
	if (t->waits_at == i + 1)
		return;
	leave(t);
	t->waits_at = i + 1;
	nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_WANT });
}

void nvs_channels_forget_waiters(uint64_t now)
{
	for (struct nvs_thread *t = nvs_gate_threads(); t; t = t->next)
		if (t->waits_at && nvs_elapsed(now, t->looked_ns) > GONE_NS)
			leave(t);
}

/* Whether a thread that has waited since t0 should run without a scheduler. */
static bool out_of_patience(unsigned i, uint64_t now)
{
	struct channel *c = &nvs_client_channels[i];

	/* At the end of the process a drain does not finish, see nvs_driver_stop. */
	if (atomic_load(&nvs_exiting) && c->lease.gate == LEASE_DRAINING)
		return nvs_elapsed(now, nvs_exiting_ns) > EXIT_WAIT_NS;
	if (c->lease.link == LEASE_ATTACHED)
		return false;
	switch (nvs_client.link) {
	case LINK_ABSENT:
		return true;
	case LINK_STARTING:
		return nvs_elapsed(now, nvs_client.since_ns) > START_WAIT_NS;
	case LINK_LOST:
		/* Counted over reconnects: it may come back and fall again for ever. */
		return !nvs_client.closed_policy &&
		       nvs_elapsed(now, c->unattached_ns) > LOSS_WAIT_NS;
	case LINK_UP:
		return !nvs_client.closed_policy && c->lease.link == LEASE_ATTACHING &&
		       nvs_elapsed(now, c->attach_ns) > ATTACH_WAIT_NS;
	}
	return false;
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
static bool may_pass(unsigned i, uint64_t now)
{
	struct channel *c = &nvs_client_channels[i];

	if (c->lease.gate != LEASE_DRAINING || !nvs_memory_ops.all_there(i))
		return false;
	if (c->step_until_ns) { /* a step, and this thread makes it */
		bool in_time = now < c->step_until_ns;

		c->step_until_ns = 0;
		if (in_time) {
			c->passed++;
			nvs_channel_wake(i); /* the drain may begin */
			return true;
		}
	}
	if (now < c->pass_from_ns)
		return false;
	if (!c->pass_until_ns) {
		c->pass_until_ns = now + PASS_NS;
		nvs_channel_wake(i);
		nvs_debugf("GPU %u: the drain does not end, calls pass for a moment", i);
	}
	if (now < c->pass_until_ns) {
		c->passed++;
		return true;
	}
	c->pass_from_ns = c->pass_until_ns + c->pass_gap_ns;
	c->pass_until_ns = 0;
	c->pass_gap_ns = c->pass_gap_ns * 2 < PASS_GAP_MAX_NS ? c->pass_gap_ns * 2 : PASS_GAP_MAX_NS;
	return false;
}

/* A latency client need not wait for a grant that it will get at once. */
static bool may_go_ahead(unsigned i)
{
	const struct lease *l = &nvs_client_channels[i].lease;

	return l->link == LEASE_ATTACHED && l->gate == LEASE_CLOSED && l->requested &&
	       __atomic_load_n(&atomic_load(&nvs_channels[i].slot)->flags, __ATOMIC_RELAXED) &
		       NVS_GRANT_STANDING &&
	       nvs_memory_ops.all_there(i);
}

/*
 * The scheduler says that this channel is next: looks out for the grant
 * without sleeping, one thread of the process, once in its wait.
 */
static void spin_for_grant(struct channel *c, const struct nvs_slot *slot, uint32_t seen)
{
	uint64_t end = nvs_now() + NVS_SPIN_NS;

	if (atomic_flag_test_and_set(&c->spinning))
		return;
	while (__atomic_load_n(&slot->word, __ATOMIC_RELAXED) == seen && nvs_now() < end)
		for (int i = 0; i < 16; i++)
			nvs_cpu_relax();
	atomic_flag_clear(&c->spinning);
}

/*
 * The process ends, and with it the thread that brings memory in: the thread that waits
 * for the memory does its work. The lock is held, and given up meanwhile. False: this is
 * not what the thread waits for.
 */
static bool fill_at_exit(unsigned i, sigset_t *mask)
{
	const struct lease *l = &nvs_client_channels[i].lease;
	bool filled;

	if (!atomic_load(&nvs_exiting) || (l->gate != LEASE_OPEN && l->gate != LEASE_FREE))
		return false;
	unlock_masked(mask);
	filled = nvs_memory_ops.fill_at_exit(i);
	lock_masked(mask);
	return filled;
}

/* The lock is held; it is given up while waiting. word: of the page, as last looked at. */
static void wait_piece(unsigned i, uint32_t word, bool *spun, sigset_t *mask)
{
	struct channel *c = &nvs_client_channels[i];
	const struct nvs_slot *slot = atomic_load(&nvs_channels[i].slot);
	/*
	 * Open, yet the word is another: shut for a moment, the page tells when it is
	 * over. If the word is right, memory is on its way: that ends here, and changes
	 * no word.
	 */
	bool on_page = c->lease.link == LEASE_ATTACHED &&
		       (c->lease.gate == LEASE_CLOSED ||
			(c->lease.gate == LEASE_OPEN && word != (uint32_t)c->lease.epoch));
	uint32_t seen = on_page ? word : atomic_load(&c->changed);
	uint64_t left = nvs_elapsed(c->pass_from_ns, nvs_now()), ns = WAIT_PIECE_NS;

	if (c->lease.gate == LEASE_DRAINING && left && left < ns)
		ns = left;
	pthread_mutex_unlock(&nvs_client_lock);
	if (on_page && !*spun &&
	    __atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & NVS_GRANT_NEXT) {
		*spun = true;
		spin_for_grant(c, slot, seen);
	}
	pthread_sigmask(SIG_SETMASK, mask, NULL);
	if (on_page)
		nvs_futex_wait(&slot->word, seen, ns, false);
	else
		nvs_futex_wait((uint32_t *)&c->changed, seen, ns, true);
	lock_masked(mask);
}

bool nvs_gate_wait(struct nvs_thread *t, unsigned i, enum nvs_need need)
{
	struct channel *c = &nvs_client_channels[i];
	uint64_t start = nvs_now(), now = start, waited;
	bool spun = false, pass = false;
	int saved = errno;
	sigset_t mask;

	atomic_store(&c->used, true);
	lock_masked(&mask);
	nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_USE });
	leave(t); /* of a wait that a signal handler jumped out of */
	for (;;) {
		uint32_t word;

		want(t, i, now);
		word = nvs_channel_word(i);

		nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_WORD, .word = word });
		if (word == atomic_load(&nvs_channels[i].epoch) ||
		    !atomic_load(&nvs_gate.active))
			break;
		if (may_pass(i, now) || may_go_ahead(i) ||
		    (need == NVS_NEED_MEMORY && nvs_memory_ops.all_there(i))) {
			/* Before the lock is given up: do_drain sees flag or count. */
			atomic_store(&t->in_flight, 1u << i);
			pass = true;
			break;
		}
		if (out_of_patience(i, now)) {
			if (atomic_load(&nvs_exiting) && c->lease.gate == LEASE_DRAINING)
				nvs_gate_stop();
			nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_GIVE_UP });
			if (c->lease.gate == LEASE_FREE &&
			    atomic_load(&nvs_channels[i].epoch) == free_slot.word)
				break;
		} else if (nvs_elapsed(now, c->request_ns) > NUDGE_NS) {
			nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_NUDGE });
		}
		if (!fill_at_exit(i, &mask))
			wait_piece(i, word, &spun, &mask);
		now = nvs_now();
	}
	leave(t);
	c->idle_ns = 0; /* its call comes now */
	waited = nvs_now() - start;
	c->stats.waits++;
	c->stats.wait_ns += waited;
	if (waited > c->stats.wait_max_ns)
		c->stats.wait_max_ns = waited;
	unlock_masked(&mask);
	errno = saved;
	return pass;
}

void nvs_channel_give_up_if_lost(unsigned i)
{
	sigset_t mask;

	lock_masked(&mask);
	if (out_of_patience(i, nvs_now()))
		nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_GIVE_UP });
	unlock_masked(&mask);
}

void nvs_client_use(unsigned i)
{
	int saved = errno;
	sigset_t mask;

	if (i >= nvs_client_count || atomic_exchange(&nvs_client_channels[i].used, true))
		return;
	lock_masked(&mask);
	nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_USE });
	unlock_masked(&mask);
	errno = saved;
}

/* ---- drains ---- */

/* The lock is held; it is given up while waiting for the one call of a step. */
static void await_step(struct channel *c)
{
	while (c->step_until_ns) {
		uint64_t left = nvs_elapsed(c->step_until_ns, nvs_now());
		uint32_t seen = atomic_load(&c->changed);

		if (!left) {
			c->step_until_ns = 0;
			break;
		}
		pthread_mutex_unlock(&nvs_client_lock);
		nvs_futex_wait((uint32_t *)&c->changed, seen, left, true);
		pthread_mutex_lock(&nvs_client_lock);
	}
}

/* Not under the lock. The channel's gate is closed. */
static void do_drain(unsigned i)
{
	struct channel *c = &nvs_client_channels[i];
	enum nvs_drained result;
	uint64_t closed, deadline, passed;

	pthread_mutex_lock(&nvs_client_lock);
	await_step(c);
	closed = c->closed_ns;
	deadline = closed + (c->grace_ns ? c->grace_ns / 4 * 3 : DRAIN_PATIENCE_NS);
	passed = c->passed;
	for (;;) {
		pthread_mutex_unlock(&nvs_client_lock);
		nvs_gate_quiesce(i);
		result = nvs_drain(i, closed, nvs_elapsed(deadline, nvs_now()));
		if (result == NVS_DRAIN_STOPPED)
			return; /* the end of the process releases the GPU */
		pthread_mutex_lock(&nvs_client_lock);
		if (c->passed == passed)
			break;
		passed = c->passed; /* more work has come in meanwhile */
		nvs_streams_touch(i);
	}
	if (result == NVS_DRAIN_UNPROVEN)
		nvs_debugf("GPU %u: released with a capture open, work may still run", i);
	c->drain_ns = nvs_now() - c->closed_ns;
	nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_DRAINED });
	pthread_mutex_unlock(&nvs_client_lock);
}

void nvs_thread_setup(const char *name)
{
	int mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	nvs_driver_thread_of_shim();
	prctl(PR_SET_NAME, name);
	prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
	if (nvs_driver.exchange_capture_mode && !atomic_load(&nvs_exiting))
		nvs_driver.exchange_capture_mode(&mode);
}

static void *drainer_main(void *arg)
{
	unsigned i = (unsigned)(uintptr_t)arg;
	struct channel *c = &nvs_client_channels[i];
	unsigned done = 0;

	nvs_thread_setup("nvshare-drain");
	for (;;) {
		unsigned wanted = atomic_load(&c->drain_wanted);

		if (wanted == done) {
			nvs_futex_wait((uint32_t *)&c->drain_wanted, done, 60 * NVS_S, true);
			continue;
		}
		done = wanted;
		do_drain(i);
	}
	return NULL;
}

bool nvs_thread_start(void *(*entry)(void *), void *arg)
{
	sigset_t all, old;
	pthread_t thread;
	bool ok;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	ok = pthread_create(&thread, NULL, entry, arg) == 0;
	if (ok)
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return ok;
}

/* A thread of its own: who exits may be in a signal handler, and have any lock. */
static void *give_back_main(void *arg)
{
	static const struct timespec nap = { 0, 1000000 };
	unsigned i = (unsigned)(uintptr_t)arg;
	struct channel *c = &nvs_client_channels[i];
	bool idle = nvs_streams_idle(i), draining = false;

	pthread_mutex_lock(&nvs_client_lock);
	if (idle)
		nvs_channel_step(i, (struct lease_event){ .type = LEASE_EV_IDLE });
	pthread_mutex_unlock(&nvs_client_lock);
	if (atomic_exchange(&c->drain, false))
		do_drain(i);
	else
		draining = idle; /* by the client thread, which may have been faster */
	while (draining && !atomic_load(&nvs_exiting)) {
		nanosleep(&nap, NULL);
		pthread_mutex_lock(&nvs_client_lock);
		draining = c->lease.gate == LEASE_DRAINING;
		pthread_mutex_unlock(&nvs_client_lock);
	}
	atomic_store(&c->leaves, false);
	return NULL;
}

void nvs_channel_give_back(unsigned i)
{
	struct channel *c = &nvs_client_channels[i];

	atomic_store(&c->leaves, true);
	if (!nvs_thread_start(give_back_main, (void *)(uintptr_t)i))
		atomic_store(&c->leaves, false);
}

/*
 * With one GPU in use the client thread drains by itself; with several each
 * has a thread, so that a drain of one never delays a revoke of another; and so
 * it is under a memory limit: who allocates waits for what the client thread
 * hears.
 */
void nvs_channel_drain_all(void)
{
	unsigned used = 0;

	for (unsigned i = 0; i < nvs_client_count; i++)
		used += atomic_load(&nvs_client_channels[i].used);
	for (unsigned i = 0; i < nvs_client_count; i++) {
		struct channel *c = &nvs_client_channels[i];

		if (!atomic_exchange(&c->drain, false))
			continue;
		if ((used > 1 || nvs_memory_ops.answers_awaited(i)) && !c->drainer)
			c->drainer = nvs_thread_start(drainer_main, (void *)(uintptr_t)i);
		if (c->drainer) {
			atomic_fetch_add(&c->drain_wanted, 1);
			nvs_futex_wake((uint32_t *)&c->drain_wanted, true);
		} else {
			do_drain(i);
		}
	}
}
