// SPDX-License-Identifier: Apache-2.0
/*
 * hand-over: measures the least that a hand-over of the GPU between two processes costs.
 *
 * usage: hand-over [QUANTUM-MS [KERNEL-US [SECONDS]]]
 *
 * Two processes take turns without nvshare. Each submits a quantum of kernels at once,
 * spins until the last has ended, and writes a word in shared memory on which the other
 * spins. There is no decision, message or sleep between them, so only the driver's launch
 * and the GPU's own change of context remain: the limit for exclusive sharing of a GPU.
 * Then one process does the same alone. Prints one line of JSON.
 */
#include "spin.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct shared {
	atomic_int turn;  /* the process whose turn it is: 0 or 1 */
	atomic_int ready;
	atomic_int stop;
	atomic_ulong turns, kernels;
	_Atomic uint64_t begin, end; /* of the measured time, ns */
} *shared;

/* One of the two has failed: the other must not wait. */
static void checked(CUresult rc, const char *what)
{
	if (rc)
		atomic_store(&shared->stop, 1);
	check(rc, what);
}

#undef CHECK
#define CHECK(call) checked(call, #call)

/* Takes the turns of process `me` of `tenants` until the time is over. */
static void tenant(int me, int tenants, double quantum_ms, double kernel_us, double seconds)
{
	CUdevice dev;
	CUcontext ctx;
	CUstream stream;
	CUmodule module;
	CUfunction spin;
	uint64_t ns = (uint64_t)(kernel_us * 1000), none = 0;
	void *params[] = { &ns, &none };
	int count = (int)(quantum_ms * 1000 / kernel_us);

	count = count < 1 ? 1 : count;
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CHECK(cuModuleLoadData(&module, ptx));
	CHECK(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	for (int warm = 0; warm < 20; warm++)
		CHECK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
	CHECK(cuStreamSynchronize(stream));
	atomic_fetch_add(&shared->ready, 1);
	while (atomic_load(&shared->ready) < tenants && !atomic_load(&shared->stop))
		;
	for (;;) {
		uint64_t zero = 0;

		while (atomic_load(&shared->turn) != me && !atomic_load(&shared->stop))
			;
		if (atomic_load(&shared->stop))
			break;
		atomic_compare_exchange_strong(&shared->begin, &zero, now_ns());
		for (int i = 0; i < count; i++)
			CHECK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
		while (cuStreamQuery(stream) == CUDA_ERROR_NOT_READY)
			;
		atomic_store(&shared->end, now_ns());
		atomic_fetch_add(&shared->turns, 1);
		atomic_fetch_add(&shared->kernels, (unsigned long)count);
		if ((double)(now_ns() - atomic_load(&shared->begin)) > seconds * 1e9)
			atomic_store(&shared->stop, 1);
		atomic_store(&shared->turn, (me + 1) % tenants);
	}
	_exit(0);
}

/* Returns the mean time per turn in which no kernel ran, ns; busy: the rest of 1. */
static double run(int tenants, double quantum_ms, double kernel_us, double seconds, double *busy)
{
	pid_t pids[2];
	double wall, work;
	int failed = 0;

	*shared = (struct shared){ 0 };
	for (int i = 0; i < tenants; i++) {
		pids[i] = fork();
		if (pids[i] < 0) {
			perror("hand-over: fork");
			exit(1);
		}
		if (pids[i] == 0)
			tenant(i, tenants, quantum_ms, kernel_us, seconds);
	}
	for (int i = 0; i < tenants; i++) {
		int status;

		waitpid(pids[i], &status, 0);
		failed |= status;
	}
	if (failed)
		exit(1);
	wall = (double)(shared->end - shared->begin);
	work = (double)shared->kernels * kernel_us * 1000;
	*busy = work / wall;
	return (wall - work) / (double)shared->turns;
}

int main(int argc, char **argv)
{
	double quantum = argc > 1 ? atof(argv[1]) : 5, kernel = argc > 2 ? atof(argv[2]) : 500;
	double seconds = argc > 3 ? atof(argv[3]) : 2, busy[2], gap[2];

	if (quantum <= 0 || kernel <= 0 || seconds <= 0) {
		fprintf(stderr, "usage: hand-over [QUANTUM-MS [KERNEL-US [SECONDS]]]\n");
		return 2;
	}
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED) {
		perror("hand-over: mmap");
		return 1;
	}
	for (int i = 0; i < 2; i++)
		gap[i] = run(i + 1, quantum, kernel, seconds, &busy[i]);
	printf("{\"quantum_ms\":%g,\"kernel_us\":%g,\"alone_gap_ns\":%.0f,\"alone_busy\":%.5f,"
	       "\"two_gap_ns\":%.0f,\"two_busy\":%.5f}\n",
	       quantum, kernel, gap[0], busy[0], gap[1], busy[1]);
	return 0;
}
