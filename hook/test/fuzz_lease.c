// SPDX-License-Identifier: Apache-2.0
/*
 * fuzz_lease.c: the channel's state machine fed with any sequence of events,
 * as from a scheduler that keeps to nothing. What must hold even then is
 * checked after each step.
 *
 * Input: 3 bytes an event: type, which word and code, which epoch.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "lease.h"

#define MUST(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond); \
			abort(); \
		} \
	} while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	/* Epochs with equal low halves, next to each other, across the wrap. */
	static const uint64_t epochs[] = { 1, 2, 3, 7, 0xfffffffe, 0x100000001, 0x100000002,
					   0x1fffffffe, 0x200000001, 0x500000007 };
	enum { EPOCHS = sizeof(epochs) / sizeof(epochs[0]) };
	struct lease l = { 0 };
	enum { CLOSED, OPEN, FREE } gate = CLOSED;
	bool draining = false, work = false; /* work: of `held`, or unarbitrated, not drained */
	uint64_t held = 0, revoked = 0;
	unsigned waiting = 0;

	for (; size >= 3; data += 3, size -= 3) {
		struct lease_event ev = { 0 };
		struct lease_out out;
		struct lease before = l;
		uint32_t word = (uint32_t)(data[1] & 0x80 ? held : epochs[data[1] % EPOCHS]);

		ev.type = (enum lease_event_type)(data[0] % (LEASE_EV_GIVE_UP + 1));
		switch (ev.type) {
		case LEASE_EV_ATTACHED:
			ev.code = data[2] % 8 == 7 ? NVS_ERR_UNKNOWN_GPU : NVS_OK;
			ev.word = data[1] % 4 ? word : NVS_WORD_CLOSED;
			break;
		case LEASE_EV_WORD:
			ev.word = data[2] % 4 ? word : NVS_WORD_CLOSED;
			break;
		case LEASE_EV_GRANT:
		case LEASE_EV_REVOKE: /* the frame's epoch is checked before, see client.c */
			ev.epoch = data[2] & 0x80 && held ? held : epochs[data[2] % EPOCHS];
			ev.word = data[1] % 4 ? (uint32_t)ev.epoch : word;
			break;
		case LEASE_EV_DRAINED:
			if (!draining)
				continue; /* answers LEASE_ACT_DRAIN only */
			draining = work = false;
			break;
		case LEASE_EV_PREEMPTED:
			if (draining && l.up && l.link != LEASE_REJECTED)
				draining = work = false; /* what is off does not run */
			break;
		case LEASE_EV_LEAVE:
			waiting -= waiting > 0;
			break;
		case LEASE_EV_WANT:
			waiting++;
			break;
		default:
			break;
		}
		out = lease_step(&l, ev);

		if (out.actions & LEASE_ACT_CLOSE)
			gate = CLOSED;
		if (out.actions & LEASE_ACT_OPEN) {
			MUST(!draining && l.link == LEASE_ATTACHED);
			/* Never for an epoch given back, as far as its word tells. */
			MUST((uint32_t)out.epoch != before.closed);
			MUST((uint32_t)out.epoch != NVS_WORD_CLOSED &&
			     (uint32_t)out.epoch != NVS_WORD_NONE);
			gate = OPEN;
			held = out.epoch;
			work = true;
		}
		if (out.actions & LEASE_ACT_FREE) {
			MUST(!draining && l.link != LEASE_ATTACHED && l.link != LEASE_UNUSED);
			gate = FREE;
			work = true;
		}
		if (out.actions & LEASE_ACT_DRAIN) {
			MUST(out.actions & LEASE_ACT_CLOSE);
			MUST(!draining && gate == CLOSED);
			draining = true;
		}
		if (ev.type == LEASE_EV_REVOKE &&
		    (l.epoch == ev.epoch || out.epoch == ev.epoch)) /* not ignored */
			revoked = ev.epoch;
		if (out.actions & LEASE_ACT_RELEASE) {
			/* Only drained, only attached, only what was held or asked back. */
			MUST(gate == CLOSED && !draining && !work && l.link == LEASE_ATTACHED);
			MUST(out.epoch && (out.epoch == held || out.epoch == revoked));
			MUST(out.reason == NVS_RELEASE_REVOKED || out.reason == NVS_RELEASE_IDLE);
			MUST(l.closed == (uint32_t)out.epoch && l.gate == LEASE_CLOSED);
		}
		/* A drain ends in one release, or the scheduler that asked is gone. */
		if (ev.type == LEASE_EV_DRAINED && before.link == LEASE_ATTACHED && before.epoch)
			MUST(out.actions & LEASE_ACT_RELEASE);
		if (out.actions & LEASE_ACT_ATTACH) {
			MUST(l.up && l.link == LEASE_ATTACHING);
			/* What may still run is declared, or there is nothing. */
			MUST(out.epoch || (gate == CLOSED && !draining && !work));
			MUST(!out.epoch || out.epoch == held || out.epoch == revoked);
		}
		if (out.actions & LEASE_ACT_REQUEST)
			MUST(l.link == LEASE_ATTACHED && gate == CLOSED && !draining && (waiting || l.unfinished));
		if (out.actions & LEASE_ACT_PAGE)
			MUST(l.link == LEASE_ATTACHED);
		MUST((l.gate == LEASE_DRAINING) == draining);
		MUST((l.gate == LEASE_OPEN) == (gate == OPEN));
		MUST((l.gate == LEASE_FREE) == (gate == FREE));
		MUST(l.waiting == waiting);
		MUST(!l.unfinished || (gate == CLOSED && !draining));
		MUST(!(l.gate == LEASE_OPEN && !l.epoch));
		MUST(l.up || l.link <= LEASE_DETACHED);
		/* Who waits at an attached, closed gate has asked, and so has unfinished work. */
		if ((waiting || l.unfinished) && l.link == LEASE_ATTACHED && l.gate == LEASE_CLOSED)
			MUST(l.requested);
	}
	return 0;
}
