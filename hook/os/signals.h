// SPDX-License-Identifier: Apache-2.0
/*
 * signals.h: while a thread of the application has a lock that others wait for. A signal handler may
 * jump away, fork, exit or come back to us, and cancellation ends the thread: the lock would stay
 * locked. Keeps errno. Two system calls, so not for every allocation.
 */
#ifndef NVSHARE_SIGNALS_H
#define NVSHARE_SIGNALS_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

struct nvs_signals {
	uint64_t mask; /* as the kernel has it */
	int cancel, error;
};

/* glibc's own two, which it never blocks: by them it cancels threads, and changes the user of all. */
#define NVS_SIGNALS_OF_GLIBC (3ull << 31)

/* By the system call: on old systems the function is in a library that the shim does without. */
static inline void nvs_signals_mask(const uint64_t *set, uint64_t *old)
{
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, set, old, sizeof(*set));
}

static inline void nvs_signals_block(struct nvs_signals *q)
{
	uint64_t all = ~NVS_SIGNALS_OF_GLIBC;

	q->cancel = PTHREAD_CANCEL_ENABLE;
	q->error = errno;
	nvs_signals_mask(&all, &q->mask);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &q->cancel);
}

static inline void nvs_signals_restore(const struct nvs_signals *q)
{
	pthread_setcancelstate(q->cancel, NULL);
	nvs_signals_mask(&q->mask, NULL);
	errno = q->error;
}

#endif
