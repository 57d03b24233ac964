// SPDX-License-Identifier: Apache-2.0
#include "lease.h"

static uint32_t low(uint64_t epoch)
{
	return (uint32_t)epoch;
}

static bool grants(uint32_t word)
{
	return word != NVS_WORD_CLOSED && word != NVS_WORD_NONE;
}

/* The 64-bit epoch of a word: the next one from `last` on with this low half. */
static uint64_t widen(uint64_t last, uint32_t word)
{
	uint64_t epoch = (last & ~0xffffffffull) | word;

	return epoch < last ? epoch + (1ull << 32) : epoch;
}

static void see(struct lease *l, uint64_t epoch)
{
	if (epoch > l->last)
		l->last = epoch;
}

/* Whether something wants a grant: a thread, or work that a preemption left. */
static bool wants(const struct lease *l)
{
	return l->waiting || l->unfinished;
}

static void open_gate(struct lease *l, uint64_t epoch, struct lease_out *out)
{
	see(l, epoch);
	l->gate = LEASE_OPEN;
	l->epoch = l->opened = epoch;
	l->guessed = false;
	l->requested = false;
	l->unfinished = false;
	out->actions |= LEASE_ACT_OPEN;
	out->epoch = epoch;
}

static void free_gate(struct lease *l, struct lease_out *out)
{
	l->gate = LEASE_FREE;
	l->epoch = 0;
	l->unfinished = false;
	out->actions |= LEASE_ACT_FREE;
}

static void drain(struct lease *l, uint64_t epoch, enum nvs_release reason, struct lease_out *out)
{
	l->gate = LEASE_DRAINING;
	l->epoch = epoch;
	l->reason = reason;
	out->actions |= LEASE_ACT_CLOSE | LEASE_ACT_DRAIN;
}

static void lease_ask(struct lease *l, struct lease_out *out)
{
	if (l->link != LEASE_ATTACHED || l->gate != LEASE_CLOSED || l->requested || !wants(l))
		return;
	l->requested = true;
	out->actions |= LEASE_ACT_REQUEST;
}

static void attach(struct lease *l, struct lease_out *out)
{
	l->link = LEASE_ATTACHING;
	l->requested = !l->epoch && wants(l);
	out->actions |= LEASE_ACT_ATTACH;
	out->epoch = l->epoch;
	out->want = l->requested;
	out->preempted = l->unfinished;
	if (!l->epoch) {
		/* A scheduler that lost its state may count from 1 again. */
		l->closed = 0;
		l->last = 0;
	}
}

static void lease_release(struct lease *l, struct lease_out *out)
{
	out->actions |= LEASE_ACT_RELEASE;
	out->epoch = l->epoch;
	out->reason = l->reason;
	out->preempted = l->unfinished;
	l->closed = low(l->epoch);
	l->epoch = 0;
	l->gate = LEASE_CLOSED;
	l->requested = false;
	lease_ask(l, out);
}

static void on_use(struct lease *l, struct lease_out *out)
{
	if (l->link != LEASE_UNUSED)
		return;
	l->link = LEASE_DETACHED;
	if (l->up)
		attach(l, out);
}

static void on_up(struct lease *l, struct lease_event ev, struct lease_out *out)
{
	l->up = true;
	l->requested = false;
	if (l->link == LEASE_UNUSED)
		return;
	l->link = LEASE_DETACHED;
	if (l->gate == LEASE_FREE || (l->gate == LEASE_CLOSED && ev.work && !l->unfinished))
		drain(l, 0, NVS_RELEASE_REVOKED, out); /* ATTACH only when drained */
	else if (l->gate != LEASE_DRAINING || l->epoch)
		attach(l, out);
}

static void on_down(struct lease *l)
{
	l->up = false;
	l->requested = false;
	if (l->link != LEASE_UNUSED)
		l->link = LEASE_DETACHED;
	if (l->gate == LEASE_DRAINED) {
		l->closed = low(l->epoch);
		l->epoch = 0;
		l->gate = LEASE_CLOSED;
	}
}

static void on_attached(struct lease *l, struct lease_event ev, struct lease_out *out)
{
	if (l->link != LEASE_ATTACHING)
		return;
	if (ev.code != NVS_OK) {
		l->link = LEASE_REJECTED;
		if (l->gate != LEASE_DRAINING)
			free_gate(l, out);
		return;
	}
	l->link = LEASE_ATTACHED;
	l->opened = 0; /* it may count from below */
	out->actions |= LEASE_ACT_PAGE;
	switch (l->gate) {
	case LEASE_OPEN:
		if (ev.word != low(l->epoch)) /* not adopted, or revoked since */
			drain(l, l->epoch, NVS_RELEASE_REVOKED, out);
		break;
	case LEASE_DRAINED:
		lease_release(l, out);
		break;
	case LEASE_FREE:
		drain(l, 0, NVS_RELEASE_REVOKED, out);
		break;
	case LEASE_CLOSED:
		lease_ask(l, out);
		break;
	case LEASE_DRAINING:
		break;
	}
}

static void on_grant(struct lease *l, struct lease_event ev, struct lease_out *out)
{
	if (l->link != LEASE_ATTACHED || low(ev.epoch) == l->closed)
		return;
	see(l, ev.epoch);
	if (l->gate == LEASE_OPEN || (l->gate == LEASE_CLOSED && ev.word == low(ev.epoch)))
		open_gate(l, ev.epoch, out);
}

static void on_word(struct lease *l, uint32_t word, struct lease_out *out)
{
	if (l->link != LEASE_ATTACHED || l->gate != LEASE_CLOSED || !grants(word) || word == l->closed)
		return;
	open_gate(l, widen(l->last, word), out);
	l->guessed = true;
}

static void on_revoke(struct lease *l, struct lease_event ev, struct lease_out *out)
{
	if (l->link != LEASE_ATTACHED || low(ev.epoch) == l->closed)
		return;
	/* The page is faster: since it was sent, that grant was given back, and another came. */
	if (ev.epoch < l->opened)
		return;
	see(l, ev.epoch);
	switch (l->gate) {
	case LEASE_OPEN:
		drain(l, ev.epoch, NVS_RELEASE_REVOKED, out);
		break;
	case LEASE_DRAINING:
		l->epoch = ev.epoch;
		l->reason = NVS_RELEASE_REVOKED;
		break;
	case LEASE_CLOSED: /* nobody had opened it, but a call may have gone ahead */
		if (!l->unfinished && (ev.work || ev.code & NVS_REVOKE_STEP)) {
			drain(l, ev.epoch, NVS_RELEASE_REVOKED, out);
			if (ev.code & NVS_REVOKE_STEP)
				out->actions |= LEASE_ACT_STEP;
			break;
		}
		l->epoch = ev.epoch;
		l->reason = NVS_RELEASE_REVOKED;
		lease_release(l, out);
		break;
	case LEASE_DRAINED:
	case LEASE_FREE:
		break;
	}
}

static void on_drained(struct lease *l, struct lease_out *out)
{
	if (l->gate != LEASE_DRAINING)
		return;
	switch (l->link) {
	case LEASE_REJECTED:
		free_gate(l, out);
		return;
	case LEASE_ATTACHING:
		l->gate = l->epoch ? LEASE_DRAINED : LEASE_CLOSED;
		return;
	case LEASE_ATTACHED:
		if (l->epoch) {
			lease_release(l, out);
			return;
		}
		break;
	case LEASE_DETACHED:
	case LEASE_UNUSED:
		if (l->epoch)
			l->closed = low(l->epoch);
		break;
	}
	l->epoch = 0;
	l->gate = LEASE_CLOSED;
	if (l->up && l->link == LEASE_DETACHED)
		attach(l, out);
	else
		lease_ask(l, out);
}

/* A lease that nobody arbitrates is not preempted: no grant would bring the work back. */
static void on_preempted(struct lease *l, struct lease_out *out)
{
	if (l->gate != LEASE_DRAINING || !l->up || l->link == LEASE_REJECTED)
		return;
	l->unfinished = true;
	on_drained(l, out);
}

struct lease_out lease_step(struct lease *l, struct lease_event ev)
{
	struct lease_out out = { 0 };

	switch (ev.type) {
	case LEASE_EV_USE:
		on_use(l, &out);
		break;
	case LEASE_EV_UP:
		on_up(l, ev, &out);
		break;
	case LEASE_EV_DOWN:
		on_down(l);
		break;
	case LEASE_EV_ATTACHED:
		on_attached(l, ev, &out);
		break;
	case LEASE_EV_GRANT:
		on_grant(l, ev, &out);
		break;
	case LEASE_EV_REVOKE:
		on_revoke(l, ev, &out);
		break;
	case LEASE_EV_WANT:
		l->waiting++;
		lease_ask(l, &out);
		break;
	case LEASE_EV_LEAVE:
		if (l->waiting)
			l->waiting--;
		break;
	case LEASE_EV_WORD:
		on_word(l, ev.word, &out);
		break;
	case LEASE_EV_NUDGE:
		l->requested = false;
		lease_ask(l, &out);
		break;
	case LEASE_EV_IDLE:
		/* A RELEASE of a wrong epoch is ignored, and the GPU kept. */
		if (l->link == LEASE_ATTACHED && l->gate == LEASE_OPEN && !l->guessed)
			drain(l, l->epoch, NVS_RELEASE_IDLE, &out);
		break;
	case LEASE_EV_DRAINED:
		on_drained(l, &out);
		break;
	case LEASE_EV_PREEMPTED:
		on_preempted(l, &out);
		break;
	case LEASE_EV_FINISHED:
		l->unfinished = false;
		break;
	case LEASE_EV_GIVE_UP:
		if (l->link != LEASE_ATTACHED && l->link != LEASE_UNUSED &&
		    (l->gate == LEASE_CLOSED || l->gate == LEASE_OPEN || l->gate == LEASE_DRAINED))
			free_gate(l, &out);
		break;
	}
	return out;
}
