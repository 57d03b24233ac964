// SPDX-License-Identifier: Apache-2.0
/*
 * many-threads: many threads of one process launch kernels on one GPU, in a stream of
 * their own or all in one, and wait for them now and then. Prints how many kernels there
 * were. The same binary runs on the simulated and on a real driver.
 */
#include "spin.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#define STACK (64 << 10) /* bytes of each thread; the driver's own calls need a part */

static CUcontext ctx;
static CUfunction spin;
static _Atomic unsigned long long launches;
static double kernel_us;
static int depth;    /* launches between two waits of a thread */
static bool one_stream;
static atomic_bool stop;

static void on_signal(int sig)
{
	(void)sig;
	stop = true;
}

static void *launch_main(void *unused)
{
	uint64_t ns = (uint64_t)(kernel_us * 1000), record = 0;
	void *params[] = { &ns, &record };
	CUstream stream = NULL;

	CHECK(cuCtxSetCurrent(ctx));
	if (!one_stream)
		CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	while (!stop) {
		for (int i = 0; i < depth; i++)
			CHECK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
		CHECK(cuStreamSynchronize(stream));
		launches += (unsigned)depth;
	}
	return unused;
}

int main(int argc, char **argv)
{
	struct sigaction sa = { .sa_handler = on_signal };
	int threads = argc > 1 ? atoi(argv[1]) : 0;
	pthread_attr_t attr;
	pthread_t *thread;
	uint64_t begin;
	CUmodule module;
	CUdevice dev;

	kernel_us = argc > 2 ? atof(argv[2]) : 0;
	depth = argc > 3 ? atoi(argv[3]) : 0;
	one_stream = argc > 4 && strcmp(argv[4], "one") == 0;
	if (threads < 1 || kernel_us <= 0 || depth < 1 || argc > 5 || (argc == 5 && !one_stream && strcmp(argv[4], "own"))) {
		fprintf(stderr, "usage: many-threads THREADS KERNEL_US LAUNCHES_BETWEEN_WAITS [own | one]\n"
				"own: each thread has a stream (the default), one: all use the default stream\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	sigaction(SIGTERM, &sa, NULL);
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuModuleLoadData(&module, ptx));
	CHECK(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	thread = calloc((size_t)threads, sizeof *thread);
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, STACK);
	begin = now_ns();
	for (int i = 0; thread && i < threads; i++)
		if ((errno = pthread_create(&thread[i], &attr, launch_main, NULL)) != 0) {
			perror("many-threads: pthread_create");
			return 1;
		}
	printf("ready\n");
	while (!stop)
		pause();
	for (int i = 0; thread && i < threads; i++)
		pthread_join(thread[i], NULL);
	printf("%llu launches in %.2f s\n", launches, (double)(now_ns() - begin) / 1e9);
	return 0;
}
