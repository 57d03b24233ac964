// SPDX-License-Identifier: Apache-2.0
/*
 * SIGKILL at random moments, 300 times, while others work: the state stays
 * usable, no memory and no queue entry is left behind.
 */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>

static void victim(void)
{
	struct gpu g = gpu_open(0);
	CUdeviceptr d;

	for (;;) {
		CUresult rc = cuMemAlloc_v2(&d, 1u << 20);

		CHECK(rc == 0 || rc == CUDA_ERROR_OUT_OF_MEMORY);
		CU(spin(&g, NULL, 50 * MS, 0));
		CU(spin(&g, CU_STREAM_PER_THREAD, 50 * MS, 0));
		if (!rc)
			CU(cuMemFreeAsync(d, NULL));
	}
}

int main(void)
{
	enum { KILLS = 300, AT_ONCE = 4 };
	unsigned seed = (unsigned)getpid();
	pid_t pid[AT_ONCE] = { 0 };
	struct gpu g;
	size_t f, t;

	printf("seed %u\n", seed);
	for (int i = 0; i < KILLS + AT_ONCE; i++) {
		pid_t *p = &pid[i % AT_ONCE];
		int status;

		if (*p) {
			usleep((useconds_t)(rand_r(&seed) % 3000));
			CHECK(!kill(*p, SIGKILL));
			CHECK(waitpid(*p, &status, 0) == *p);
			CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* not a failed check */
			*p = 0;
		}
		if (i < KILLS) {
			*p = fork();
			CHECK(*p >= 0);
			if (!*p)
				victim();
		}
	}
	g = gpu_open(0);
	CU(cuMemGetInfo_v2(&f, &t));
	CHECK(f == t);
	CU(spin(&g, NULL, MS, 0));
	CU(cuCtxSynchronize()); /* hours behind the dead ones' work, if it counted */
	return 0;
}
