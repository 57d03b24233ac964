// SPDX-License-Identifier: Apache-2.0
/* check.h: assertions for the C tests; a failure prints and ends the test. */
#ifndef SIMGPU_CHECK_H
#define SIMGPU_CHECK_H

#include "cudadrv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(cond)                                                               \
	do {                                                                      \
		if (!(cond)) {                                                    \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
			_exit(1);                                                 \
		}                                                                 \
	} while (0)

#define EXPECT(want, call)                                                                                   \
	do {                                                                                                 \
		int got_ = (call), want_ = (want);                                                           \
		if (got_ != want_) {                                                                         \
			fprintf(stderr, "%s:%d: %s = %d, want %d\n", __FILE__, __LINE__, #call, got_, want_); \
			_exit(1);                                                                            \
		}                                                                                            \
	} while (0)

#define CU(call) EXPECT(0, call)

static const char check_ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n"
	".visible .entry empty() { ret; }\n";

static inline uint64_t mono(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

struct gpu {
	CUcontext ctx;
	CUfunction spin;
};

/* cuInit, the primary context of a device, the spin kernel. */
static inline struct gpu gpu_open(int device)
{
	struct gpu g;
	CUmodule m;

	CU(cuInit(0));
	CU(cuDevicePrimaryCtxRetain(&g.ctx, device));
	CU(cuCtxSetCurrent(g.ctx));
	CU(cuModuleLoadData(&m, check_ptx));
	CU(cuModuleGetFunction(&g.spin, m, "nvshare_spin"));
	return g;
}

/* A kernel of ns; its start and end go to record (two u64), if not 0. */
static inline CUresult spin(struct gpu *g, CUstream s, uint64_t ns, CUdeviceptr record)
{
	uint64_t at = record;
	void *params[] = { &ns, &at };

	return cuLaunchKernel(g->spin, 1, 1, 1, 1, 1, 1, 0, s, params, NULL);
}

#define MS 1000000ull

/* A directory of the test's own, in $TMPDIR, which tests/suites/alone.sh removes. */
static inline void test_dir(char dir[64])
{
	const char *tmp = getenv("TMPDIR");

	CHECK(snprintf(dir, 64, "%s/test.XXXXXX", tmp && *tmp ? tmp : "/tmp") < 64);
	CHECK(mkdtemp(dir));
}

#endif
