// SPDX-License-Identifier: Apache-2.0
/*
 * channel.h: the state that the client thread and the application's threads
 * share; included by client.c and channel.c only.
 *
 * One lock guards the leases, the connection and their statistics. It is never
 * held over a driver call, a drain or a wait. Lease events of an application's
 * thread never ask for a drain; those are the client thread's.
 */
#ifndef NVSHARE_CHANNEL_H
#define NVSHARE_CHANNEL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client.h"
#include "lease.h"

#define NVS_MS 1000000ull
#define NVS_S  1000000000ull

#define LOSS_WAIT_NS (5 * NVS_S) /* calls wait this long for a lost scheduler */
#define START_WAIT_NS (2 * NVS_S) /* and this long for its first answer */

enum link {
	LINK_STARTING, /* no answer yet */
	LINK_UP,       /* registered */
	LINK_LOST,     /* was up; waiting for it to come back */
	LINK_ABSENT,   /* no scheduler: run open */
};

struct channel {
	struct lease lease;
	struct nvs_device device;
	atomic_uint changed;     /* futex: the lease or the connection changed */
	atomic_bool used;
	atomic_bool drain;       /* LEASE_ACT_DRAIN is to be done */
	bool drainer;            /* a thread of its own does the drains */
	atomic_flag spinning;    /* a thread spins for a grant */
	atomic_uint drain_wanted; /* futex of that thread */
	atomic_bool leaves;      /* see nvs_channel_give_back */
	uint64_t attach_ns;      /* when ATTACH was sent */
	uint64_t request_ns;     /* when REQUEST was sent */
	uint64_t closed_ns;      /* when the gate was closed */
	uint64_t drain_ns;       /* length of the last drain */
	uint64_t grace_ns;       /* of the last REVOKE */
	uint64_t unattached_ns;  /* since when no scheduler knows of us */
	/* Passes during a drain; see may_pass() in channel.c. */
	uint64_t pass_from_ns;   /* the next window begins, or has begun */
	uint64_t pass_until_ns;  /* end of the window; 0: not begun */
	uint64_t pass_gap_ns;    /* from the end of a window to the next */
	uint64_t passed;         /* calls let pass, ever */
	uint64_t step_until_ns;  /* one call may pass up to then; 0: none */
	uint64_t grant_calls;    /* gated calls before the grant */
	uint64_t idle_calls;     /* early release: calls at the last look */
	uint64_t idle_ns;        /* and since when that number holds */
	struct nvs_stats stats;
	struct nvs_stats sent;
	uint64_t sent_ns;
};

struct nvs_client {
	enum link link;
	int fd;                /* -1: none */
	bool registered;       /* ever */
	uint64_t since_ns;     /* in this link state */
	uint64_t retry_ns;     /* next attempt to connect */
	uint64_t backoff_ns;
	uint64_t hello_ns;     /* when REGISTER was sent */
	bool closed_policy;    /* NVSHARE_SCHEDULER_LOSS=closed */
	uint32_t interposed, bypassed;
	const struct nvs_page *page;
};

extern pthread_mutex_t nvs_client_lock;
extern struct nvs_client nvs_client;
extern struct channel nvs_client_channels[NVS_MAX_CHANNELS];
extern unsigned nvs_client_count; /* of channels */

extern uint64_t nvs_exiting_ns;   /* since when the process ends */

/* Nanoseconds from then to now; 0 if then was set after now was read. */
static inline uint64_t nvs_elapsed(uint64_t now, uint64_t then)
{
	return now > then ? now - then : 0;
}

/* Feeds an event to a channel's lease and does what it asks for. Locked. */
void nvs_channel_step(unsigned channel, struct lease_event ev);

/* The word of the page the channel looks at. */
uint32_t nvs_channel_word(unsigned channel);

/* Wakes the threads that wait at the channel's gate, to look again. Locked. */
void nvs_channel_wake(unsigned channel);

/* Closes the gate before there is a page to look at. Locked. */
void nvs_channel_close(unsigned channel);

/* Threads that left the gate without a word (longjmp) wait no more. Locked. */
void nvs_channels_forget_waiters(uint64_t now);

/*
 * After fork: no grants, open gates; the one thread may have been caught at a
 * gate, by a signal whose handler forked, and comes back to it.
 */
void nvs_channels_fork_child(void);

/* Sends a frame on the connection, if there is one. Locked. */
bool nvs_channel_send(const struct nvs_frame *f);

/* All memory is there: the gate of an open lease opens. Locked. */
void nvs_channel_filled(unsigned channel);

/*
 * The room in the slot. False: there is no page to look at. UINT64_MAX: the
 * process runs without a scheduler.
 */
bool nvs_channel_room(unsigned channel, uint64_t *room);

/*
 * A wait for memory looks here now and then: a channel whose scheduler is gone for too
 * long runs without one from then on, as NVSHARE_SCHEDULER_LOSS says. Not locked.
 */
void nvs_channel_give_up_if_lost(unsigned channel);

/* Does the drains that the leases asked for. Client thread, not locked. */
void nvs_channel_drain_all(void);

/*
 * At the end of the process: has the grant given back, if there is one and the GPU has
 * nothing more to do; `leaves` is true meanwhile. Takes no lock.
 */
void nvs_channel_give_back(unsigned i);

/* A thread of the shim: no signals, detached. */
bool nvs_thread_start(void *(*entry)(void *), void *arg);

/* Names the calling thread, and keeps its driver calls out of captures' way. */
void nvs_thread_setup(const char *name);

#endif
