// SPDX-License-Identifier: Apache-2.0
/*
 * lease.h: what the process may do on one GPU, as a pure state machine. The caller holds the
 * client's lock, feeds events in and carries out all actions that come back before the next event.
 */
#ifndef NVSHARE_LEASE_H
#define NVSHARE_LEASE_H

#include <stdbool.h>
#include <stdint.h>

#include "wire.h"

enum lease_link {
	LEASE_UNUSED,    /* the process has not used this GPU */
	LEASE_DETACHED,  /* used, not known to a scheduler */
	LEASE_ATTACHING, /* ATTACH sent */
	LEASE_ATTACHED,
	LEASE_REJECTED,  /* the scheduler does not arbitrate this GPU */
};

enum lease_gate {
	LEASE_CLOSED,
	LEASE_OPEN,     /* holds `epoch` */
	LEASE_DRAINING, /* closed; submitted work still runs; `epoch` 0: unarbitrated work */
	LEASE_DRAINED,  /* drained, waits for ATTACHED to send RELEASE */
	LEASE_FREE,     /* open without a scheduler */
};

struct lease {
	enum lease_link link;
	enum lease_gate gate;
	bool up;            /* the connection is registered */
	bool requested;     /* a REQUEST is with the scheduler */
	uint32_t waiting;   /* threads at the gate */
	uint32_t closed;    /* word of the last epoch given back; never opens again */
	uint64_t epoch;     /* held or draining */
	uint64_t opened;    /* newest epoch that opened the gate since it was attached */
	uint64_t last;      /* newest epoch seen, for the high half of a word */
	bool guessed;       /* the high half of epoch is; GRANT has not come yet */
	/* Preempted: the channels are off in the middle of the work, which itself wants the next grant. */
	bool unfinished;
	enum nvs_release reason;
};

enum lease_event_type {
	LEASE_EV_USE,      /* the process uses the GPU */
	LEASE_EV_UP,       /* connection registered */
	LEASE_EV_DOWN,     /* connection lost */
	LEASE_EV_ATTACHED, /* code; word: the new page's */
	LEASE_EV_GRANT,    /* epoch; word: the page's now */
	LEASE_EV_REVOKE,   /* epoch; code: enum nvs_revoke_flags */
	LEASE_EV_WANT,     /* a thread arrives at the gate */
	LEASE_EV_LEAVE,    /* a thread leaves the gate */
	LEASE_EV_WORD,     /* a waiting thread reads this word in the page */
	LEASE_EV_NUDGE,    /* waited long: ask again */
	LEASE_EV_IDLE,     /* nothing to do and others wait */
	LEASE_EV_DRAINED,  /* answers LEASE_ACT_DRAIN */
	LEASE_EV_PREEMPTED, /* answers LEASE_ACT_DRAIN too: the channels are off */
	LEASE_EV_FINISHED, /* no work was left when the channels went off */
	LEASE_EV_GIVE_UP,  /* no scheduler for too long: run without */
};

struct lease_event {
	enum lease_event_type type;
	bool work; /* UP, REVOKE: work may run that went ahead of a grant */
	uint32_t code;
	uint32_t word;
	uint64_t epoch;
};

/* Actions, to be done in this order. */
enum lease_action {
	LEASE_ACT_CLOSE   = 1u << 0, /* close the gate */
	LEASE_ACT_PAGE    = 1u << 1, /* read the grant page of this connection from now on */
	LEASE_ACT_OPEN    = 1u << 2, /* open the gate for `epoch` */
	LEASE_ACT_FREE    = 1u << 3, /* open the gate whatever the page says */
	LEASE_ACT_ATTACH  = 1u << 4, /* send ATTACH with `epoch`, `want` */
	LEASE_ACT_RELEASE = 1u << 5, /* send RELEASE of `epoch`, `reason` */
	LEASE_ACT_REQUEST = 1u << 6, /* send REQUEST */
	LEASE_ACT_DRAIN   = 1u << 7, /* wait for flags and GPU, then LEASE_EV_DRAINED */
	LEASE_ACT_STEP    = 1u << 8, /* before that, let one waiting call pass */
};

struct lease_out {
	unsigned actions; /* enum lease_action */
	uint64_t epoch;
	enum nvs_release reason;
	bool want;
	bool preempted; /* with RELEASE and ATTACH: work is left */
};

/*
 * A zeroed lease is a valid one. After each step the channels are to be off if `unfinished` says so,
 * and otherwise on.
 */
struct lease_out lease_step(struct lease *l, struct lease_event ev);

#endif
