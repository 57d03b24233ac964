// SPDX-License-Identifier: Apache-2.0
/*
 * turns: launches without a pause, and prints when a launch had to wait.
 *
 * usage: turns SECONDS
 *
 * Prints "ready". At the end it prints a line for each launch that took longer than
 * MIN_NS: start and end in ns of CLOCK_MONOTONIC. With a driver that does nothing, such
 * a launch waited at the gate, or the machine paused it.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MIN_NS   20000u
#define MAX_WAITS 100000u

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **ctx, int device);
int cuCtxSetCurrent(void *ctx);
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		   unsigned bz, unsigned shared, void *stream, void **params, void **extra);

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int main(int argc, char **argv)
{
	static uint64_t waits[MAX_WAITS][2];
	unsigned n = 0;
	void *ctx;
	uint64_t now, end;

	if (argc != 2 || cuInit(0) || cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx))
		return 1;
	puts("ready");
	fflush(stdout);
	now = now_ns();
	end = now + (uint64_t)(atof(argv[1]) * 1e9);
	while (now < end) {
		uint64_t start = now;

		if (cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
			return 1;
		now = now_ns();
		if (now - start > MIN_NS && n < MAX_WAITS) {
			waits[n][0] = start;
			waits[n++][1] = now;
		}
	}
	for (unsigned i = 0; i < n; i++)
		printf("%" PRIu64 " %" PRIu64 "\n", waits[i][0], waits[i][1]);
	return 0;
}
