// SPDX-License-Identifier: Apache-2.0
/* lease_test.c: the channel's state machine, by example and by random walk. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "lease.h"

#define STEP(l, ...) lease_step(l, (struct lease_event){ __VA_ARGS__ })
#define ACTS(out, want) CHECK((out).actions == (unsigned)(want))

static struct lease attached(void)
{
	struct lease l = { 0 };

	ACTS(STEP(&l, .type = LEASE_EV_UP), 0);
	ACTS(STEP(&l, .type = LEASE_EV_USE), LEASE_ACT_ATTACH);
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED), LEASE_ACT_PAGE);
	return l;
}

static struct lease holding(uint64_t epoch)
{
	struct lease l = attached();

	ACTS(STEP(&l, .type = LEASE_EV_WANT), LEASE_ACT_REQUEST);
	ACTS(STEP(&l, .type = LEASE_EV_GRANT, .epoch = epoch, .word = (uint32_t)epoch),
	     LEASE_ACT_OPEN);
	STEP(&l, .type = LEASE_EV_LEAVE);
	return l;
}

static void test_grant_and_revoke(void)
{
	struct lease l = holding(9);
	struct lease_out out;

	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 9), LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	/* While draining a thread neither opens the gate nor asks. */
	ACTS(STEP(&l, .type = LEASE_EV_WANT), 0);
	ACTS(STEP(&l, .type = LEASE_EV_WORD, .word = 9), 0);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE | LEASE_ACT_REQUEST);
	CHECK(out.epoch == 9 && out.reason == NVS_RELEASE_REVOKED);
	/* The page may still show the epoch given back. */
	ACTS(STEP(&l, .type = LEASE_EV_WORD, .word = 9), 0);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 9), 0);
	ACTS(STEP(&l, .type = LEASE_EV_GRANT, .epoch = 9, .word = 9), 0);
	ACTS(STEP(&l, .type = LEASE_EV_WORD, .word = 12), LEASE_ACT_OPEN);
}

static void test_work_that_went_ahead(void)
{
	struct lease l = attached();
	struct lease_out out;

	/* GRANT and REVOKE came together: nobody opened the gate, but a call has passed. */
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 4, .work = true),
	     LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE);
	CHECK(out.epoch == 4);
	/* No work: there is nothing to wait for. */
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 5), LEASE_ACT_RELEASE);
	/* A scheduler that comes back hears of the GPU when the work is done. */
	STEP(&l, .type = LEASE_EV_DOWN);
	ACTS(STEP(&l, .type = LEASE_EV_UP, .work = true), LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	ACTS(STEP(&l, .type = LEASE_EV_DRAINED), LEASE_ACT_ATTACH);
}

static void test_thread_opens_by_the_page(void)
{
	struct lease l = attached();
	struct lease_out out;

	STEP(&l, .type = LEASE_EV_WANT);
	STEP(&l, .type = LEASE_EV_GRANT, .epoch = 0x1fffffffeull, .word = 0); /* revoked already */
	CHECK(l.gate == LEASE_CLOSED);
	out = STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 0x1fffffffeull);
	ACTS(out, LEASE_ACT_RELEASE | LEASE_ACT_REQUEST); /* nothing to drain */
	/* The high half of an epoch comes from the last one seen, and carries. */
	out = STEP(&l, .type = LEASE_EV_WORD, .word = 5);
	ACTS(out, LEASE_ACT_OPEN);
	CHECK(out.epoch == 0x200000005ull);
	ACTS(STEP(&l, .type = LEASE_EV_WORD, .word = 0), 0);
}

static void test_one_call_for_the_gang(void)
{
	struct lease l = attached();
	struct lease_out out;

	STEP(&l, .type = LEASE_EV_WANT);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 4, .code = NVS_REVOKE_STEP),
	     LEASE_ACT_CLOSE | LEASE_ACT_STEP | LEASE_ACT_DRAIN);
	CHECK(l.gate == LEASE_DRAINING);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE | LEASE_ACT_REQUEST);
	CHECK(out.epoch == 4);
	/* Of a grant that it holds it is a REVOKE like others. */
	l = holding(5);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 5, .code = NVS_REVOKE_STEP),
	     LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
}

static void test_early_release(void)
{
	struct lease l = holding(3);
	struct lease_out out;

	ACTS(STEP(&l, .type = LEASE_EV_IDLE), LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 3), 0); /* crossed on the way */
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE);
	CHECK(out.epoch == 3);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 3), 0);
	ACTS(STEP(&l, .type = LEASE_EV_IDLE), 0);
}

/* A drain that is cut: the work wants the next grant by itself, and goes on with that grant. */
static void test_preempted(void)
{
	struct lease l = holding(9);
	struct lease_out out;

	ACTS(STEP(&l, .type = LEASE_EV_PREEMPTED), 0); /* it does not drain */
	CHECK(!l.unfinished);
	STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 9);
	out = STEP(&l, .type = LEASE_EV_PREEMPTED);
	ACTS(out, LEASE_ACT_RELEASE | LEASE_ACT_REQUEST);
	CHECK(out.epoch == 9 && out.preempted && l.unfinished);
	ACTS(STEP(&l, .type = LEASE_EV_DRAINED), 0);
	ACTS(STEP(&l, .type = LEASE_EV_NUDGE), LEASE_ACT_REQUEST);
	/* A grant that nobody had opened is given back at once: nothing runs. */
	out = STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 11, .work = true);
	ACTS(out, LEASE_ACT_RELEASE | LEASE_ACT_REQUEST);
	CHECK(out.epoch == 11 && out.preempted);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 12, .work = true, .code = NVS_REVOKE_STEP),
	     LEASE_ACT_RELEASE | LEASE_ACT_REQUEST);
	ACTS(STEP(&l, .type = LEASE_EV_GRANT, .epoch = 13, .word = 13), LEASE_ACT_OPEN);
	CHECK(!l.unfinished);
	STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 13);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE);
	CHECK(!out.preempted);
}

/* The work turns out to have ended before the channels went off. */
static void test_nothing_left_to_preempt(void)
{
	struct lease l = holding(9);

	STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 9);
	STEP(&l, .type = LEASE_EV_PREEMPTED);
	ACTS(STEP(&l, .type = LEASE_EV_FINISHED), 0);
	CHECK(!l.unfinished);
	ACTS(STEP(&l, .type = LEASE_EV_NUDGE), 0); /* nobody wants the GPU any more */
}

static void test_preempted_across_a_restart(void)
{
	struct lease l = holding(40);
	struct lease_out out;

	STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 40);
	STEP(&l, .type = LEASE_EV_PREEMPTED);
	STEP(&l, .type = LEASE_EV_DOWN);
	out = STEP(&l, .type = LEASE_EV_UP, .work = true);
	ACTS(out, LEASE_ACT_ATTACH); /* nothing runs, so there is nothing to drain before */
	CHECK(!out.epoch && out.want && out.preempted && l.unfinished);
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED), LEASE_ACT_PAGE);
	CHECK(l.requested);
	/* Preempted between ATTACH and ATTACHED. */
	STEP(&l, .type = LEASE_EV_GRANT, .epoch = 41, .word = 41);
	STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 41);
	STEP(&l, .type = LEASE_EV_DOWN);
	ACTS(STEP(&l, .type = LEASE_EV_PREEMPTED), 0); /* no scheduler hears of it */
	CHECK(!l.unfinished && l.gate == LEASE_DRAINING);
	STEP(&l, .type = LEASE_EV_UP);
	ACTS(STEP(&l, .type = LEASE_EV_PREEMPTED), 0);
	out = STEP(&l, .type = LEASE_EV_ATTACHED);
	ACTS(out, LEASE_ACT_PAGE | LEASE_ACT_RELEASE | LEASE_ACT_REQUEST);
	CHECK(out.epoch == 41 && out.preempted);
	/* Nobody grants it any more: it runs without a scheduler, and under the next one again. */
	STEP(&l, .type = LEASE_EV_DOWN);
	ACTS(STEP(&l, .type = LEASE_EV_GIVE_UP), LEASE_ACT_FREE);
	CHECK(!l.unfinished);
	ACTS(STEP(&l, .type = LEASE_EV_UP), LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	out = STEP(&l, .type = LEASE_EV_PREEMPTED);
	ACTS(out, LEASE_ACT_ATTACH);
	CHECK(!out.epoch && out.want);
	/* A scheduler that does not arbitrate this GPU. */
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED, .code = NVS_ERR_UNKNOWN_GPU), LEASE_ACT_FREE);
	CHECK(!l.unfinished);
}

/* The page is faster than frames: a REVOKE may be of a grant that is long given back. */
static void test_revoke_of_an_earlier_grant(void)
{
	struct lease l = holding(9);
	struct lease_out out;

	STEP(&l, .type = LEASE_EV_IDLE);
	ACTS(STEP(&l, .type = LEASE_EV_DRAINED), LEASE_ACT_RELEASE);
	STEP(&l, .type = LEASE_EV_WANT);
	ACTS(STEP(&l, .type = LEASE_EV_WORD, .word = 12), LEASE_ACT_OPEN);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 9), 0);
	CHECK(l.gate == LEASE_OPEN && l.epoch == 12);
	STEP(&l, .type = LEASE_EV_GRANT, .epoch = 12, .word = 12);
	STEP(&l, .type = LEASE_EV_LEAVE);
	STEP(&l, .type = LEASE_EV_IDLE);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE);
	CHECK(out.epoch == 12);
	/* The page shows 12 until the scheduler has read that. */
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 9), 0);
	ACTS(STEP(&l, .type = LEASE_EV_WORD, .word = 12), 0);

	/* A scheduler that started anew may count from below. */
	l = holding(40);
	STEP(&l, .type = LEASE_EV_DOWN);
	STEP(&l, .type = LEASE_EV_UP);
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED, .word = 40), LEASE_ACT_PAGE);
	ACTS(STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 3), LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
}

/* A scheduler that lost its state counts on from far above 2^32. */
static void test_no_early_release_of_a_guessed_epoch(void)
{
	struct lease l = attached();
	struct lease_out out;

	ACTS(STEP(&l, .type = LEASE_EV_WANT), LEASE_ACT_REQUEST);
	ACTS(STEP(&l, .type = LEASE_EV_WORD, .word = 7), LEASE_ACT_OPEN);
	STEP(&l, .type = LEASE_EV_LEAVE);
	ACTS(STEP(&l, .type = LEASE_EV_IDLE), 0);
	STEP(&l, .type = LEASE_EV_GRANT, .epoch = 5ull << 32 | 7, .word = 7);
	ACTS(STEP(&l, .type = LEASE_EV_IDLE), LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE);
	CHECK(out.epoch == (5ull << 32 | 7));
}

static void test_holder_survives_a_restart(void)
{
	struct lease l = holding(40);
	struct lease_out out;

	ACTS(STEP(&l, .type = LEASE_EV_DOWN), 0);
	CHECK(l.gate == LEASE_OPEN);
	out = STEP(&l, .type = LEASE_EV_UP);
	ACTS(out, LEASE_ACT_ATTACH);
	CHECK(out.epoch == 40);
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED, .word = 40), LEASE_ACT_PAGE);
	CHECK(l.gate == LEASE_OPEN);

	/* Not adopted: close, drain, release. */
	STEP(&l, .type = LEASE_EV_DOWN);
	STEP(&l, .type = LEASE_EV_UP);
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED, .word = 0),
	     LEASE_ACT_PAGE | LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_RELEASE);
	CHECK(out.epoch == 40);
}

static void test_drain_across_a_restart(void)
{
	struct lease l = holding(40);
	struct lease_out out;

	STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 40);
	STEP(&l, .type = LEASE_EV_DOWN);
	out = STEP(&l, .type = LEASE_EV_UP);
	ACTS(out, LEASE_ACT_ATTACH);
	CHECK(out.epoch == 40); /* its work still runs */
	ACTS(STEP(&l, .type = LEASE_EV_DRAINED), 0);
	out = STEP(&l, .type = LEASE_EV_ATTACHED, .word = 40);
	ACTS(out, LEASE_ACT_PAGE | LEASE_ACT_RELEASE);
	CHECK(out.epoch == 40 && l.gate == LEASE_CLOSED);
}

static void test_without_a_scheduler(void)
{
	struct lease l = { 0 };
	struct lease_out out;

	STEP(&l, .type = LEASE_EV_USE);
	STEP(&l, .type = LEASE_EV_WANT);
	ACTS(STEP(&l, .type = LEASE_EV_GIVE_UP), LEASE_ACT_FREE);
	STEP(&l, .type = LEASE_EV_LEAVE);
	/* One appears: drain what ran unarbitrated, only then attach. */
	ACTS(STEP(&l, .type = LEASE_EV_UP), LEASE_ACT_CLOSE | LEASE_ACT_DRAIN);
	STEP(&l, .type = LEASE_EV_WANT);
	out = STEP(&l, .type = LEASE_EV_DRAINED);
	ACTS(out, LEASE_ACT_ATTACH);
	CHECK(out.epoch == 0 && out.want);
	/* A waiting thread counts as a request; no second one is sent. */
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED), LEASE_ACT_PAGE);
	ACTS(STEP(&l, .type = LEASE_EV_NUDGE), LEASE_ACT_REQUEST);
}

static void test_epochs_may_start_again(void)
{
	struct lease l = holding(1);

	STEP(&l, .type = LEASE_EV_REVOKE, .epoch = 1);
	STEP(&l, .type = LEASE_EV_DRAINED);
	STEP(&l, .type = LEASE_EV_DOWN);
	STEP(&l, .type = LEASE_EV_UP);
	STEP(&l, .type = LEASE_EV_ATTACHED);
	STEP(&l, .type = LEASE_EV_WANT);
	ACTS(STEP(&l, .type = LEASE_EV_GRANT, .epoch = 1, .word = 1), LEASE_ACT_OPEN);
}

static void test_rejected_gpu_runs_free(void)
{
	struct lease l = { 0 };

	STEP(&l, .type = LEASE_EV_UP);
	STEP(&l, .type = LEASE_EV_USE);
	STEP(&l, .type = LEASE_EV_WANT);
	ACTS(STEP(&l, .type = LEASE_EV_ATTACHED, .code = NVS_ERR_UNKNOWN_GPU), LEASE_ACT_FREE);
}

/*
 * A random scheduler, client thread and application against what must hold
 * after each step. `gate` and `draining` are what the caller's actions made.
 */
static void test_random(unsigned seed, long steps)
{
	struct lease l = { 0 };
	enum { CLOSED, OPEN, FREE } gate = CLOSED;
	uint64_t held = 0, next = 1, open_epoch = 0;
	int draining = 0, releases = 0, opens = 0;
	unsigned waiting = 0;

	srand(seed);
	for (long i = 0; i < steps; i++) {
		struct lease_event ev = { 0 };
		struct lease_out out;

		ev.type = (enum lease_event_type)(rand() % (LEASE_EV_GIVE_UP + 1));
		ev.word = rand() % 3 ? (uint32_t)held : (uint32_t)(rand() % 5);
		ev.code = rand() % 16 == 0 ? NVS_ERR_UNKNOWN_GPU : NVS_OK;
		if (ev.type == LEASE_EV_GRANT) {
			if (held && rand() % 4)
				continue;
			held = next += 1 + (uint64_t)rand() % 3;
			ev.word = rand() % 4 ? (uint32_t)held : 0;
		}
		ev.epoch = held;
		if (ev.type == LEASE_EV_REVOKE && !held)
			continue;
		if (ev.type == LEASE_EV_DRAINED && !draining)
			continue;
		if (ev.type == LEASE_EV_LEAVE && !waiting)
			continue;
		waiting += ev.type == LEASE_EV_WANT;
		waiting -= ev.type == LEASE_EV_LEAVE;
		if (ev.type == LEASE_EV_DRAINED)
			draining = 0;
		else if (ev.type == LEASE_EV_PREEMPTED && draining && l.up && l.link != LEASE_REJECTED)
			draining = 0;
		out = lease_step(&l, ev);

		if (out.actions & LEASE_ACT_CLOSE)
			gate = CLOSED;
		if (out.actions & LEASE_ACT_OPEN) {
			CHECK(!draining);
			CHECK(l.link == LEASE_ATTACHED);
			gate = OPEN;
			open_epoch = out.epoch;
			opens++;
		}
		if (out.actions & LEASE_ACT_FREE) {
			CHECK(!draining && l.link != LEASE_ATTACHED);
			gate = FREE;
		}
		if (out.actions & LEASE_ACT_DRAIN) {
			CHECK(gate == CLOSED && !draining);
			draining = 1;
		}
		if (out.actions & LEASE_ACT_RELEASE) {
			/* Never while work may run, never without an epoch. */
			CHECK(gate == CLOSED && !draining && out.epoch);
			CHECK(l.closed == (uint32_t)out.epoch && out.preempted == l.unfinished);
			if (out.epoch == held)
				held = 0;
			releases++;
		}
		if (out.actions & LEASE_ACT_ATTACH) {
			/* What still runs is declared, or there is nothing. */
			CHECK(out.epoch || (gate == CLOSED && !draining));
			if (gate == OPEN)
				CHECK(out.epoch == open_epoch);
		}
		if (out.actions & LEASE_ACT_REQUEST)
			CHECK(l.link == LEASE_ATTACHED && gate == CLOSED && !draining && (waiting || l.unfinished));
		CHECK((l.gate == LEASE_DRAINING) == draining);
		CHECK((l.gate == LEASE_OPEN) == (gate == OPEN));
		CHECK((l.gate == LEASE_FREE) == (gate == FREE));
		CHECK(l.waiting == waiting);
		CHECK(!l.unfinished || (gate == CLOSED && !draining));
		/* Who waits at an attached, closed gate has asked, and so has unfinished work. */
		if ((waiting || l.unfinished) && l.link == LEASE_ATTACHED && l.gate == LEASE_CLOSED)
			CHECK(l.requested);
	}
	CHECK(releases > 0 && opens > 0);
}

int main(void)
{
	test_grant_and_revoke();
	test_work_that_went_ahead();
	test_thread_opens_by_the_page();
	test_one_call_for_the_gang();
	test_early_release();
	test_preempted();
	test_nothing_left_to_preempt();
	test_preempted_across_a_restart();
	test_revoke_of_an_earlier_grant();
	test_no_early_release_of_a_guessed_epoch();
	test_holder_survives_a_restart();
	test_drain_across_a_restart();
	test_without_a_scheduler();
	test_epochs_may_start_again();
	test_rejected_gpu_runs_free();
	for (unsigned seed = 1; seed <= 200; seed++)
		test_random(seed, 20000);
	puts("lease: 14 examples, 200 random walks of 20000 steps");
	return 0;
}
