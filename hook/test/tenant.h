// SPDX-License-Identifier: Apache-2.0
/*
 * tenant.h: what tenants of the simulated GPU do in the tests of swapping, and
 * how a test runs them, as processes of its own program.
 */
#ifndef NVSHARE_TEST_TENANT_H
#define NVSHARE_TEST_TENANT_H

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef EVENTUALLY_MS
#define EVENTUALLY_MS (3 * PATIENCE_MS)
#endif

#include "cases.h"
#include "cudadrv.h"
#include "swapper.h"

#define MIB (1ull << 20)

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n"
	".visible .entry nvshare_fill(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }\n"
	".visible .entry nvshare_check(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) { ret; }\n";

static CUfunction spin, fill, check;
static CUcontext ctx;
static CUdeviceptr wrong;
static uint64_t random_state = 88172645463325252ull;

static inline uint64_t rnd(uint64_t below)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % below;
}

struct buffer {
	CUdeviceptr p;
	uint64_t bytes, seed;
};

static inline void tenant_open(void)
{
	CUmodule m;

	CU(cuInit(0));
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	CU(cuModuleLoadData(&m, ptx));
	CU(cuModuleGetFunction(&spin, m, "nvshare_spin"));
	CU(cuModuleGetFunction(&fill, m, "nvshare_fill"));
	CU(cuModuleGetFunction(&check, m, "nvshare_check"));
	CU(cuMemAlloc_v2(&wrong, 8));
}

static inline void run_fill(struct buffer *b, uint64_t seed, CUstream s)
{
	uint64_t n = b->bytes / 8 * 8;
	void *params[] = { &b->p, &n, &seed };

	b->seed = seed;
	CU(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
}

static inline void verify_with(const struct buffer *b, CUdeviceptr result)
{
	uint64_t n = b->bytes / 8 * 8, seed = b->seed, bad = 1;
	CUdeviceptr p = b->p;
	void *params[] = { &p, &n, &seed, &result };

	CU(cuLaunchKernel(check, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	CU(cuMemcpyDtoH_v2(&bad, result, 8));
	CHECK(bad == 0);
}

static inline void verify(const struct buffer *b)
{
	verify_with(b, wrong);
}

static inline void work(unsigned ms)
{
	uint64_t ns = ms * 1000000ull, zero = 0;
	void *params[] = { &ns, &zero };

	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	CU(cuCtxSynchronize());
}

static inline uint64_t used(void)
{
	size_t left, total;

	CU(cuMemGetInfo_v2(&left, &total));
	return total - left;
}

/* Where a process says that it has taken what it wanted. */
static inline const char *taken_path(void)
{
	static char path[256];

	snprintf(path, sizeof(path), "%s/taken", getenv("NVSHARE_SIMGPU_DIR"));
	return path;
}

/* Takes so much memory, and never gives it back. There is a context. */
static inline int take_for_good(uint64_t mib)
{
	CUdeviceptr p;

	while (mib)
		if (cuMemAlloc_v2(&p, 2 * MIB) == CUDA_SUCCESS)
			mib -= 2;
		else
			nap_ms(1);
	close(open(taken_path(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
	for (;;)
		nap_ms(1000);
	return 0;
}

/* ---- tenants as processes ---- */

static inline pid_t start_tenant(const char *self, const char *kind, uint64_t mib, unsigned rounds,
				 unsigned seed)
{
	char a[3][32];
	pid_t pid;

	snprintf(a[0], 32, "%llu", (unsigned long long)mib);
	snprintf(a[1], 32, "%u", rounds);
	snprintf(a[2], 32, "%u", seed);
	fflush(NULL);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* none is left behind if the test fails */
		if (strcmp(kind, "hog") == 0)
			unsetenv("LD_PRELOAD");
		execl(self, self, kind, a[0], a[1], a[2], (char *)NULL);
		_exit(127);
	}
	return pid;
}

static inline bool went_well(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		fprintf(stderr, "tenant %d: status %#x\n", (int)pid, status);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* ---- the test ---- */

static inline void schedule(struct swapper_config c)
{
	swapper_init();
	swapper_start(&c);
}

struct tenant_kind {
	const char *name;
	int (*run)(uint64_t mib, unsigned rounds, uint64_t seed);
};

/* main() of a program that is its own tenants: these begin with open(), if there is one. */
static inline int run_tenant_or_case(const struct tenant_kind *k, size_t kinds, void (*open)(void),
				     const struct test_case *c, size_t cases, int argc, char **argv)
{
	for (size_t i = 0; argc == 5 && i < kinds; i++)
		if (strcmp(argv[1], k[i].name) == 0) {
			if (open)
				open();
			return k[i].run((uint64_t)atoll(argv[2]), (unsigned)atoi(argv[3]),
					(uint64_t)atoll(argv[4]));
		}
	return run_case(c, cases, argc, argv);
}

/* Nothing is swapped: the tenant gets on, and the scheduler hears nothing of its memory. */
static inline void check_off(struct swapper_config c, const char *self, const char *kind,
			     uint64_t mib, unsigned rounds, unsigned seed)
{
	c.off = true;
	schedule(c);
	CHECK(went_well(start_tenant(self, kind, mib, rounds, seed)));
	CHECK(swapper_seen().moved == 0 && swapper_seen().attached == 1);
	swapper_end();
}

#endif
