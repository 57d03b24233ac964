// SPDX-License-Identifier: Apache-2.0
/* clock.h: the time of CLOCK_MONOTONIC, in nanoseconds. */
#ifndef NVSHARE_CLOCK_H
#define NVSHARE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define NVS_US 1000ull
#define NVS_MS 1000000ull
#define NVS_S  1000000000ull

static inline uint64_t nvs_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * NVS_S + (uint64_t)t.tv_nsec;
}

/* From then to now; 0 if then was read after now. */
static inline uint64_t nvs_elapsed(uint64_t now, uint64_t then)
{
	return now > then ? now - then : 0;
}

#endif
