// SPDX-License-Identifier: Apache-2.0
/* futex.h: bounded waits on a 32-bit word; no cancellation point. Only nvs_nap keeps errno. */
#ifndef NVSHARE_FUTEX_H
#define NVSHARE_FUTEX_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

/* For loops that wait for another CPU's store. */
static inline void nvs_cpu_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

/* Sleeps while *word is seen, for at most ns; may return early. */
static inline void nvs_futex_wait(const uint32_t *word, uint32_t seen, uint64_t ns, bool local)
{
	struct timespec t = { (time_t)(ns / NVS_S), (long)(ns % NVS_S) };

	syscall(SYS_futex, word, FUTEX_WAIT | (local ? FUTEX_PRIVATE_FLAG : 0), seen, &t, NULL, 0);
}

/* Sleeps while *word is seen, until the time `end`. Returns *word. */
static inline uint32_t nvs_futex_await(const uint32_t *word, uint32_t seen, uint64_t end)
{
	uint32_t value;
	uint64_t left;

	while ((value = __atomic_load_n(word, __ATOMIC_SEQ_CST)) == seen && (left = nvs_elapsed(end, nvs_now())) != 0)
		nvs_futex_wait(word, seen, left, true);
	return value;
}

/* A nap; may end early. No cancellation point, and errno stays: a program's own thread may nap here. */
static inline void nvs_nap(uint64_t ns)
{
	static const uint32_t nothing;
	int saved = errno;

	nvs_futex_wait(&nothing, 0, ns, true);
	errno = saved;
}

/* Naps of so many ns until the condition holds, or the time `end` has come. Whether it holds. Keeps errno. */
#define NVS_NAP_UNTIL(condition, end, ns) \
	__extension__({ \
		uint64_t end_ = end; \
		bool holds_; \
		while (!(holds_ = (condition)) && nvs_now() < end_) \
			nvs_nap(ns); \
		holds_; \
	})

/* Wakes up to n threads, those that have waited longest first. */
static inline void nvs_futex_wake_some(const uint32_t *word, unsigned n)
{
	syscall(SYS_futex, word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, n < INT_MAX ? n : INT_MAX, NULL, NULL, 0);
}

/* A page that is mapped read-only can be waited and woken on all the same. */
static inline void nvs_futex_wake(const uint32_t *word, bool local)
{
	syscall(SYS_futex, word, FUTEX_WAKE | (local ? FUTEX_PRIVATE_FLAG : 0), INT_MAX, NULL, NULL,
		0);
}

#endif
