// SPDX-License-Identifier: Apache-2.0
/*
 * suspend-tenant: fills device memory, and then makes the driver calls that its standard
 * input asks for, a letter each. It answers each letter with a line: the letter, and the
 * number of words of its memory that are wrong ('k') or 0.
 *
 * usage: suspend-tenant MIB
 *
 *   k  the GPU checks all memory
 *   q  asks whether an event is over       p  the same, by cuGetProcAddress
 *   s  asks whether a stream has work      i  asks for free memory
 *   c  asks for the current context        m  loads code
 *   a  allocates and frees                 t  16 threads ask whether an event is over
 *   u  says on which GPU it is: the last digit of the UUID of GPU 0
 *   w  works until the next letter comes   f  forks a child that ends
 *   h  has managed memory from now on      x  ends by exit()
 */
#include "cudadrv.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <poll.h>
#include <unistd.h>

#define PIECE (16ull << 20)
#define THREADS 16

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n"
	".visible .entry nvshare_fill(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }\n"
	".visible .entry nvshare_check(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) { ret; }\n";

static void check(CUresult rc, const char *what)
{
	if (rc) {
		fprintf(stderr, "suspend-tenant: %s: error %d\n", what, rc);
		_exit(1);
	}
}

#define CHECK(call) check(call, #call)

static CUdeviceptr piece[4096], result;
static uint64_t bytes[4096];
static int pieces;
static CUfunction spin, fill, look;
static CUevent event;

static uint64_t wrong(void)
{
	uint64_t sum = 0;

	for (int i = 0; i < pieces; i++) {
		uint64_t seed = 100 + (uint64_t)i, bad = 1;
		void *params[] = { &piece[i], &bytes[i], &seed, &result };

		CHECK(cuLaunchKernel(look, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
		CHECK(cuMemcpyDtoH_v2(&bad, result, 8));
		sum += bad;
	}
	return sum;
}

static void *asks(void *arg)
{
	CHECK(cuEventQuery(event));
	return arg;
}

static uint64_t does(char c)
{
	size_t free_bytes, total;
	CUresult (*query)(CUevent);
	struct pollfd in = { .fd = 0, .events = POLLIN };
	uint64_t ns = 1000000, zero = 0;
	void *work[] = { &ns, &zero };
	pthread_t thread[THREADS];
	CUcontext ctx;
	CUmodule m;
	CUdeviceptr p;
	CUuuid uuid;

	switch (c) {
	case 'k':
		return wrong();
	case 'q':
		CHECK(cuEventQuery(event));
		break;
	case 'p':
		CHECK(cuGetProcAddress_v2("cuEventQuery", (void **)&query, 12000, 0, NULL));
		CHECK(query(event));
		break;
	case 's':
		CHECK(cuStreamQuery(NULL));
		break;
	case 'i':
		CHECK(cuMemGetInfo_v2(&free_bytes, &total));
		break;
	case 'c':
		CHECK(cuCtxGetCurrent(&ctx));
		break;
	case 'm':
		CHECK(cuModuleLoadData(&m, ptx));
		CHECK(cuModuleUnload(m));
		break;
	case 'a':
		CHECK(cuMemAlloc_v2(&p, PIECE));
		CHECK(cuMemFree_v2(p));
		break;
	case 'h':
		CHECK(cuMemAllocManaged(&p, 4096, 1));
		break;
	case 't':
		for (int i = 0; i < THREADS; i++)
			check(pthread_create(&thread[i], NULL, asks, NULL), "pthread_create");
		for (int i = 0; i < THREADS; i++)
			pthread_join(thread[i], NULL);
		break;
	case 'u':
		CHECK(cuDeviceGetUuid_v2(&uuid, 0));
		return (uint64_t)uuid.bytes[15];
	case 'w':
		while (poll(&in, 1, 0) == 0) {
			CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, work, NULL));
			CHECK(cuCtxSynchronize());
		}
		break;
	case 'f':
		if (fork() == 0)
			_exit(0);
		wait(NULL);
		break;
	case 'x':
		exit(0);
	}
	return 0;
}

int main(int argc, char **argv)
{
	uint64_t left = argc > 1 ? strtoull(argv[1], NULL, 10) << 20 : 0;
	CUcontext ctx;
	CUmodule m;
	char c;

	if (argc != 2) {
		fputs("usage: suspend-tenant MIB\n", stderr);
		return 2;
	}
	CHECK(cuInit(0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, 0));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuModuleLoadData(&m, ptx));
	CHECK(cuModuleGetFunction(&spin, m, "nvshare_spin"));
	CHECK(cuModuleGetFunction(&fill, m, "nvshare_fill"));
	CHECK(cuModuleGetFunction(&look, m, "nvshare_check"));
	CHECK(cuEventCreate(&event, 0));
	CHECK(cuMemAlloc_v2(&result, 8));
	for (; left && pieces < 4096; pieces++) {
		uint64_t seed = 100 + (uint64_t)pieces;
		void *params[] = { &piece[pieces], &bytes[pieces], &seed };

		bytes[pieces] = left < PIECE ? left : PIECE;
		CHECK(cuMemAlloc_v2(&piece[pieces], bytes[pieces]));
		CHECK(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
		left -= bytes[pieces];
	}
	CHECK(cuEventRecord(event, NULL));
	CHECK(cuCtxSynchronize());
	printf("filled 0\n");
	fflush(stdout);
	while (read(0, &c, 1) == 1) {
		printf("%c %" PRIu64 "\n", c, does(c));
		fflush(stdout);
	}
	return 0;
}
