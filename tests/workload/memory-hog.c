// SPDX-License-Identifier: Apache-2.0
/*
 * memory-hog: allocates device memory until it has enough or gets no more, and prints how
 * much it got.
 *
 * usage: memory-hog [--hold | --managed] MIB [CHUNK-MIB]
 *
 * Allocates MIB in pieces of CHUNK-MIB (64) on the first device, of managed memory with --managed, and prints one
 * JSON line:
 *
 *   mib         how much it got
 *   error       of the allocation that failed, or ""
 *   free_mib, total_mib   of cuMemGetInfo, after the allocations
 *
 * Then it ends, with status 0 even if it got less; with --hold, it ends at a signal.
 */
#include "cudadrv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *name_of(CUresult rc)
{
	const char *name = NULL;

	if (!rc)
		return "";
	cuGetErrorName(rc, &name);
	return name ? name : "unknown error";
}

static void check(CUresult rc, const char *what)
{
	if (rc) {
		fprintf(stderr, "memory-hog: %s: %s (%d)\n", what, name_of(rc), rc);
		exit(1);
	}
}

#define CHECK(call) check(call, #call)

int main(int argc, char **argv)
{
	int hold = argc > 1 && strcmp(argv[1], "--hold") == 0;
	int managed = argc > 1 && strcmp(argv[1], "--managed") == 0, first = 1 + hold + managed;
	long want = argc > first ? atol(argv[first]) : 0, got = 0;
	long chunk = argc > first + 1 ? atol(argv[first + 1]) : 64;
	size_t free_bytes = 0, total = 0;
	CUresult rc = 0;
	CUdeviceptr p;
	CUcontext ctx;
	CUdevice dev;

	if (want <= 0 || chunk <= 0) {
		fputs("usage: memory-hog [--hold | --managed] MIB [CHUNK-MIB]\n", stderr);
		return 2;
	}
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	while (!rc && got < want) {
		long n = want - got < chunk ? want - got : chunk;

		rc = managed ? cuMemAllocManaged(&p, (size_t)n << 20, 1) : cuMemAlloc_v2(&p, (size_t)n << 20);
		if (!rc)
			got += n;
	}
	CHECK(cuMemGetInfo_v2(&free_bytes, &total));
	printf("{\"mib\":%ld,\"error\":\"%s\",\"free_mib\":%zu,\"total_mib\":%zu}\n", got, name_of(rc),
	       free_bytes >> 20, total >> 20);
	fflush(stdout);
	if (hold)
		pause();
	return 0;
}
