// SPDX-License-Identifier: Apache-2.0
/*
 * signals.h: while a thread of the application has a lock that others wait for. A
 * signal handler may jump away, fork, exit or come back to us, and asynchronous
 * cancellation ends the thread: the lock would stay locked. A system call
 * each way, so not for what every allocation does.
 */
#ifndef NVSHARE_SIGNALS_H
#define NVSHARE_SIGNALS_H

#include <pthread.h>
#include <signal.h>

#include "glibc.h"

struct nvs_signals {
	sigset_t mask;
	int cancel;
};

static inline void nvs_signals_block(struct nvs_signals *q)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &q->mask);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &q->cancel);
}

static inline void nvs_signals_restore(const struct nvs_signals *q)
{
	pthread_setcancelstate(q->cancel, NULL);
	pthread_sigmask(SIG_SETMASK, &q->mask, NULL);
}

#endif
