// SPDX-License-Identifier: Apache-2.0
/*
 * swap-tenant: fills device memory, and has the GPU check again and again that the memory
 * kept its contents.
 *
 * usage: swap-tenant MIB SEED
 *
 * Allocates MIB on the first device, in pieces of 32 MiB and in small ones. The GPU
 * writes a different pattern into each piece. Then the program checks and works in turn
 * until its standard input ends, checks all memory once more, and prints one JSON line.
 * It checks a piece each time, and all where it waited for that, as for a turn: the simulated
 * GPU checks with this machine's processors.
 *
 *   rounds   how many times all memory was checked
 *   wrong    words of 8 bytes with a wrong value
 *   mib      how much memory it got
 *
 * It maps the file that SWAP_TENANT_MAPS names, as if it used that library. Its work takes SWAP_TENANT_WORK_MS (20).
 */
#include "cudadrv.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PIECE (32ull << 20)
#define SMALL (100ull << 10)
#define WORK_NS 20000000ull
#define WAITED_NS 50000000ull /* a check of a piece takes less, and another tenant's turn more */

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n"
	".visible .entry nvshare_fill(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }\n"
	".visible .entry nvshare_check(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) { ret; }\n";

static void check(CUresult rc, const char *what)
{
	if (rc) {
		fprintf(stderr, "swap-tenant: %s: error %d\n", what, rc);
		exit(1);
	}
}

#define CHECK(call) check(call, #call)

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void launch(CUfunction f, void **params)
{
	CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
}

int main(int argc, char **argv)
{
	uint64_t mib = argc > 1 ? strtoull(argv[1], NULL, 10) : 0, seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
	uint64_t left = mib << 20, wrong = 0, rounds = 0, zero = 0, work = WORK_NS;
	const char *maps = getenv("SWAP_TENANT_MAPS"), *ms = getenv("SWAP_TENANT_WORK_MS");
	CUdeviceptr piece[4096], result;
	uint64_t bytes[4096];
	CUfunction spin, fill, look;
	CUcontext ctx;
	CUmodule m;
	CUdevice dev;
	int n = 0, last = 0;

	if (argc != 3 || !mib) {
		fputs("usage: swap-tenant MIB SEED\n", stderr);
		return 2;
	}
	if (ms)
		work = strtoull(ms, NULL, 10) * 1000000;
	fcntl(0, F_SETFL, O_NONBLOCK);
	if (maps && mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, open(maps, O_RDONLY | O_CLOEXEC), 0) == MAP_FAILED) {
		perror(maps);
		return 1;
	}
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuModuleLoadData(&m, ptx));
	CHECK(cuModuleGetFunction(&spin, m, "nvshare_spin"));
	CHECK(cuModuleGetFunction(&fill, m, "nvshare_fill"));
	CHECK(cuModuleGetFunction(&look, m, "nvshare_check"));
	CHECK(cuMemAlloc_v2(&result, 8));
	while (left && n < 4096) {
		uint64_t s = seed + (uint64_t)n, size = n % 3 == 2 ? SMALL : PIECE;
		void *params[] = { &piece[n], &bytes[n], &s };

		bytes[n] = left < size ? left : size;
		CHECK(cuMemAlloc_v2(&piece[n], bytes[n]));
		launch(fill, params);
		left -= bytes[n++];
	}
	CHECK(cuCtxSynchronize());
	printf("filled\n");
	fflush(stdout);
	for (int next = 0; !last; next = (next + 1) % n) {
		uint64_t begun = now_ns();
		bool all = false;
		char c;

		last = rounds && read(0, &c, 1) == 0; /* all is checked twice, however early that ends */
		for (int k = 0; k < (all ? n : 1); k++) {
			int i = (next + k) % n;
			uint64_t s = seed + (uint64_t)i, bad = 1;
			void *params[] = { &piece[i], &bytes[i], &s, &result };

			launch(look, params);
			CHECK(cuMemcpyDtoH_v2(&bad, result, 8));
			wrong += bad;
			all = all || last || !rounds || now_ns() - begun > WAITED_NS;
		}
		rounds += all;
		void *params[] = { &work, &zero };
		launch(spin, params);
		CHECK(cuCtxSynchronize());
	}
	printf("{\"rounds\":%" PRIu64 ",\"wrong\":%" PRIu64 ",\"mib\":%" PRIu64 "}\n", rounds, wrong, mib);
	return 0;
}
