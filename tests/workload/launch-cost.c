// SPDX-License-Identifier: Apache-2.0
/*
 * launch-cost: what submitting an empty kernel costs the calling thread.
 *
 * usage: launch-cost [batches] [launches-per-batch]
 *
 * Each batch is timed as a whole and followed by a context synchronisation
 * that is not timed, so the queue never fills. Prints one JSON line: the
 * median over batches, in nanoseconds per call, for cuLaunchKernel and
 * cuLaunchKernelEx. Run it in turn with and without LD_PRELOAD and compare
 * medians of the same run only.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* The parts of the CUDA driver API that are used, as cuda.h declares them. */
typedef int CUresult;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;
struct launch_config {
	unsigned grid[3], block[3], shared;
	CUstream stream;
	void *attrs;
	unsigned num_attrs;
};
CUresult cuInit(unsigned);
CUresult cuDeviceGet(int *, int);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, int);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned,
	unsigned, unsigned, unsigned, CUstream, void **, void **);
CUresult cuLaunchKernelEx(const struct launch_config *, CUfunction, void **, void **);

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry empty() { ret; }\n";

#define CHECK(call) do { CUresult r_ = (call); if (r_) { \
	fprintf(stderr, "launch-cost: %s failed: CUDA error %d\n", #call, r_); exit(1); } } while (0)

static double now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	int batches = argc > 1 ? atoi(argv[1]) : 400;
	int launches = argc > 2 ? atoi(argv[2]) : 500;
	if (batches < 1 || launches < 1) {
		fprintf(stderr, "usage: launch-cost [batches] [launches-per-batch]\n");
		return 2;
	}
	int dev;
	CUcontext ctx;
	CUmodule mod;
	CUfunction fn;
	CUstream stream;
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuStreamCreate(&stream, 1 /* non-blocking */));
	CHECK(cuModuleLoadData(&mod, ptx));
	CHECK(cuModuleGetFunction(&fn, mod, "empty"));

	double *ns = malloc(sizeof *ns * batches);
	double median[2];
	struct launch_config cfg = {{1, 1, 1}, {1, 1, 1}, 0, stream, NULL, 0};
	for (int kind = 0; kind < 2; kind++) {
		for (int b = -20; b < batches; b++) { /* negative: warm-up */
			double t0 = now_ns();
			for (int i = 0; i < launches; i++) {
				if (kind == 0)
					CHECK(cuLaunchKernel(fn, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
				else
					CHECK(cuLaunchKernelEx(&cfg, fn, NULL, NULL));
			}
			double t1 = now_ns();
			CHECK(cuCtxSynchronize());
			if (b >= 0)
				ns[b] = (t1 - t0) / launches;
		}
		qsort(ns, batches, sizeof *ns, by_value);
		median[kind] = ns[batches / 2];
	}
	printf("{\"batches\":%d,\"launches\":%d,\"launch_ns\":%.1f,\"launch_ex_ns\":%.1f}\n",
		batches, launches, median[0], median[1]);
	return 0;
}
