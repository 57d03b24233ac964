// SPDX-License-Identifier: Apache-2.0
/*
 * short-request: a tenant that answers short requests: a number of small kernels in each
 * period, on a fixed schedule. A request's latency begins when the request is due, so a
 * request that waits for an earlier one is late too.
 *
 * usage: short-request START SECONDS [PERIOD-US [KERNELS [KERNEL-US [BLOCKS]]]]
 *
 * Requests are due from START on, seconds of CLOCK_MONOTONIC (0: at once), for
 * SECONDS; by default 20 kernels of 10 us every 5000 us, one block each. Prints
 * one line of JSON. The same binary runs on the simulated and on a real driver.
 */
#include "spin.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* The thread stops sleeping this long before a request is due, ns: timers are late. */
#define AWAKE 150000u
/* A request that takes longer is named, ms. */
#define SLOW_MS 5.0

static void until(uint64_t t)
{
	if (now_ns() + AWAKE < t) {
		uint64_t wake = t - AWAKE;
		struct timespec ts = { (time_t)(wake / 1000000000u), (long)(wake % 1000000000u) };

		while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL))
			;
	}
	while (now_ns() < t)
		;
}

static CUstream stream;
static CUfunction spin;
static CUevent began, ended;
static unsigned kernels = 20, blocks = 1;
static uint64_t kernel_ns = 10000, none;

/* Makes one request; returns its time on the GPU, ms. */
static double request(void)
{
	void *params[] = { &kernel_ns, &none };
	float ms;

	CHECK(cuEventRecord(began, stream));
	for (unsigned i = 0; i < kernels; i++)
		CHECK(cuLaunchKernel(spin, blocks, 1, 1, 32, 1, 1, 0, stream, params, NULL));
	CHECK(cuEventRecord(ended, stream));
	CHECK(cuStreamSynchronize(stream));
	CHECK(cuEventElapsedTime(&ms, began, ended));
	return ms;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double at(const double *sorted, unsigned n, double q)
{
	unsigned i = (unsigned)(q * n);

	return sorted[i < n ? i : n - 1];
}

int main(int argc, char **argv)
{
	double start = argc > 1 ? atof(argv[1]) : 0, seconds = argc > 2 ? atof(argv[2]) : 0;
	uint64_t period = 1000u * (uint64_t)(argc > 3 ? atoi(argv[3]) : 5000), first, ended_at;
	struct timespec wall;
	unsigned n, late = 0;
	double *latency, *gpu;
	CUdevice dev;
	CUcontext ctx;
	CUmodule module;

	if (argc > 4)
		kernels = (unsigned)atoi(argv[4]);
	if (argc > 5)
		kernel_ns = (uint64_t)(1000 * atof(argv[5]));
	if (argc > 6)
		blocks = (unsigned)atoi(argv[6]);
	n = period ? (unsigned)(seconds * 1e9 / (double)period) : 0;
	if (argc < 3 || argc > 7 || n < 1 || kernels < 1 || blocks < 1) {
		fputs("usage: short-request START SECONDS [PERIOD-US [KERNELS [KERNEL-US [BLOCKS]]]]\n", stderr);
		return 2;
	}
	latency = calloc(n, sizeof *latency);
	gpu = calloc(n, sizeof *gpu);
	if (!latency || !gpu)
		return 1;
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CHECK(cuEventCreate(&began, 0));
	CHECK(cuEventCreate(&ended, 0));
	CHECK(cuModuleLoadData(&module, ptx));
	CHECK(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	for (int i = 0; i < 5; i++)
		request();
	first = start > 0 ? (uint64_t)(start * 1e9) : now_ns();
	if (start > 0 && now_ns() > first) {
		fputs("short-request: it was not ready by START\n", stderr);
		return 1;
	}
	for (unsigned i = 0; i < n; i++) {
		uint64_t due = first + i * period;

		late += now_ns() > due;
		until(due);
		gpu[i] = request();
		latency[i] = (double)(now_ns() - due) / 1e6;
	}
	printf("{\"slow\":["); /* the first late ones: when each was due, in ns since 1970, and what it took, in ms */
	clock_gettime(CLOCK_REALTIME, &wall);
	ended_at = now_ns();
	for (unsigned i = 0, shown = 0; i < n && shown < 50; i++) {
		if (latency[i] < SLOW_MS)
			continue;
		printf("%s[%.0f,%.3f]", shown++ ? "," : "", (double)wall.tv_sec * 1e9 + (double)wall.tv_nsec - (double)(ended_at - (first + i * period)), latency[i]);
	}
	qsort(latency, n, sizeof *latency, by_value);
	qsort(gpu, n, sizeof *gpu, by_value);
	printf("],\"requests\":%u,\"behind\":%u,\"p50_ms\":%.3f,\"p90_ms\":%.3f,\"p99_ms\":%.3f,\"p999_ms\":%.3f,\"max_ms\":%.3f,"
	       "\"gpu_p50_ms\":%.3f,\"gpu_p99_ms\":%.3f,\"percentiles_ms\":[",
	       n, late, at(latency, n, 0.5), at(latency, n, 0.9), at(latency, n, 0.99), at(latency, n, 0.999),
	       latency[n - 1], at(gpu, n, 0.5), at(gpu, n, 0.99));
	for (int i = 0; i <= 100; i++) /* each percentile, then tenths of the last one */
		printf("%s%.3f", i ? "," : "", at(latency, n, i / 100.0));
	for (int i = 1; i <= 10; i++)
		printf(",%.3f", at(latency, n, 0.99 + i / 1000.0));
	printf("]}\n");
	return 0;
}
