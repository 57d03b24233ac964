// SPDX-License-Identifier: Apache-2.0
/*
 * alloc-cost: measures how long cuMemAlloc and cuMemFree take in the calling thread.
 *
 * usage: alloc-cost [SIZE:COUNT:ROUNDS...]   (default 4096:256:20 2097152:64:20 1073741824:4:8)
 *
 * For each size, in rounds: COUNT allocations, then COUNT frees; and COUNT times an
 * allocation and its free. Prints one JSON line with alloc_SIZE_ns, free_SIZE_ns and
 * both_SIZE_ns: ns per call, medians over the rounds without the first. Before each size
 * it works on the GPU, because memory that can be swapped gets its place only when its
 * process holds the GPU. Run it in turn with and without LD_PRELOAD, and compare medians
 * of the same run only.
 */
#include "spin.h"

#include <unistd.h>

#define MAX_COUNT 4096
#define MAX_ROUNDS 1000

static CUdeviceptr at[MAX_COUNT];

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(double *v, int n)
{
	qsort(v, (size_t)n, sizeof *v, by_value);
	return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static void work(void)
{
	CUdeviceptr p;

	CHECK(cuMemAlloc_v2(&p, 4096));
	CHECK(cuMemsetD8_v2(p, 0, 4096));
	CHECK(cuCtxSynchronize());
	CHECK(cuMemFree_v2(p));
}

static void size(const char *what, const char *between)
{
	static double take[MAX_ROUNDS], back[MAX_ROUNDS], both[MAX_ROUNDS];
	unsigned long long bytes;
	int count, rounds;

	if (sscanf(what, "%llu:%d:%d", &bytes, &count, &rounds) != 3 || !bytes || count < 1 || count > MAX_COUNT ||
	    rounds < 1 || rounds > MAX_ROUNDS) {
		fprintf(stderr, "alloc-cost: %s is not SIZE:COUNT:ROUNDS\n", what);
		exit(2);
	}
	work();
	for (int r = -1; r < rounds; r++) {
		uint64_t t = now_ns(), u;

		for (int i = 0; i < count; i++)
			CHECK(cuMemAlloc_v2(&at[i], bytes));
		u = now_ns();
		if (r >= 0)
			take[r] = (double)(u - t) / count;
		for (int i = 0; i < count; i++)
			CHECK(cuMemFree_v2(at[i]));
		t = now_ns();
		if (r >= 0)
			back[r] = (double)(t - u) / count;
		for (int i = 0; i < count; i++) {
			CHECK(cuMemAlloc_v2(&at[i], bytes));
			CHECK(cuMemFree_v2(at[i]));
		}
		if (r >= 0)
			both[r] = (double)(now_ns() - t) / count;
	}
	printf("%s\"alloc_%llu_ns\":%.1f,\"free_%llu_ns\":%.1f,\"both_%llu_ns\":%.1f", between,
	       bytes, median(take, rounds), bytes, median(back, rounds), bytes, median(both, rounds));
}

int main(int argc, char **argv)
{
	static char *usual[] = { "4096:256:20", "2097152:64:20", "1073741824:4:8" };
	CUcontext ctx;
	CUdevice dev;
	int n = argc > 1 ? argc - 1 : 3;
	char **sizes = argc > 1 ? argv + 1 : usual;

	alarm(60);
	(void)ptx;
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	putchar('{');
	for (int i = 0; i < n; i++)
		size(sizes[i], i ? "," : "");
	puts("}");
	return 0;
}
