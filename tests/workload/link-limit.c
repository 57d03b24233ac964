// SPDX-License-Identifier: Apache-2.0
/*
 * link-limit: how fast memory goes over the link between host and GPU, by one
 * process out, by one in, and by both at the same time: what no exchange of two
 * tenants' memory can beat. Then both again, while as much memory of the GPU as goes
 * out is given up and obtained: the driver clears it before anybody gets it, and on an
 * H200 with the engine that copies in. An exchange that leaves tenants nothing of each
 * other's cannot do without that.
 *
 * usage: link-limit [MIB [SECONDS]]
 *
 * Each process copies between MIB of the GPU and MIB of host memory, made as the
 * scheduler's arenas are (memfd, shared, registered), in pieces of 32 MiB. Prints
 * one JSON line: GB/s (10^9) of each, and how long it took to touch and to register
 * the host memory, seconds. Ends after 60 s whatever happens.
 */
#include "spin.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#define PIECE (32ull << 20)
#define AHEAD 4

static struct shared {
	_Atomic uint64_t ready, begin;
	double rate[2], touch_s[2], register_s[2];
} *shared;

/* Obtains memory of the GPU and gives it up. */
static void turn_over(const CUmemAllocationProp *prop)
{
	CUmemGenericAllocationHandle handle;

	CHECK(cuMemCreate(&handle, PIECE, prop, 0));
	CHECK(cuMemRelease(handle));
}

static void copies(int in, int both, int clear, uint64_t size, double seconds)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	uint64_t t, first = 0, last = 0, n = 0, left = (uint64_t)(seconds * 1e9), pieces = size / PIECE;
	CUevent mark[AHEAD];
	CUdeviceptr device;
	CUcontext ctx;
	CUstream stream;
	CUdevice dev;
	char *host;
	int fd;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(60);
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuStreamCreate(&stream, 1));
	CHECK(cuMemAlloc_v2(&device, size));
	t = now_ns();
	fd = memfd_create("link-limit", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)size) ||
	    (host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0)) == MAP_FAILED) {
		perror("link-limit: host memory");
		exit(1);
	}
	shared->touch_s[in] = (double)(now_ns() - t) / 1e9;
	t = now_ns();
	CHECK(cuMemHostRegister_v2(host, size, 1));
	shared->register_s[in] = (double)(now_ns() - t) / 1e9;
	for (int i = 0; i < AHEAD; i++)
		CHECK(cuEventCreate(&mark[i], 2));
	atomic_fetch_add(&shared->ready, 1);
	while (atomic_load(&shared->ready) < (uint64_t)(1 + both))
		usleep(100);
	for (uint64_t i = 0;; i++) {
		uint64_t at = i % pieces * PIECE;

		if (i >= AHEAD) {
			CHECK(cuEventSynchronize(mark[i % AHEAD]));
			last = now_ns();
			n = i - AHEAD;
			if (!n)
				first = last; /* the queue is full from here on */
			if (last - first >= left)
				break;
			if (clear && !in)
				turn_over(&prop);
		}
		if (in)
			CHECK(cuMemcpyHtoDAsync_v2(device + at, host + at, PIECE, stream));
		else
			CHECK(cuMemcpyDtoHAsync_v2(host + at, device + at, PIECE, stream));
		CHECK(cuEventRecord(mark[i % AHEAD], stream));
	}
	shared->rate[in] = (double)(n * PIECE) / (double)(last - first);
	CHECK(cuStreamSynchronize(stream));
	_exit(0);
}

/* which: 1 out, 2 in, 3 both. */
static void run(int which, int clear, uint64_t size, double seconds)
{
	pid_t pid[2] = { 0, 0 };
	int failed = 0;

	memset(shared, 0, sizeof *shared);
	for (int i = 0; i < 2; i++) {
		if (!(which & 1 << i))
			continue;
		pid[i] = fork();
		if (pid[i] < 0) {
			perror("link-limit: fork");
			exit(1);
		}
		if (pid[i] == 0)
			copies(i, which == 3, clear, size, seconds);
	}
	for (int i = 0; i < 2; i++) {
		int status = 0;

		if (pid[i] > 0)
			waitpid(pid[i], &status, 0);
		if (status && !failed) { /* the other one may wait for it */
			failed = 1;
			if (i == 0 && pid[1] > 0)
				kill(pid[1], SIGKILL);
		}
	}
	if (failed)
		exit(1);
}

int main(int argc, char **argv)
{
	uint64_t size = (argc > 1 ? strtoull(argv[1], NULL, 10) : 1024) << 20;
	double seconds = argc > 2 ? atof(argv[2]) : 2, out, in, both[2], touch, reg;

	if (size < 2 * PIECE || seconds <= 0) {
		fputs("usage: link-limit [MIB, at least 64 [SECONDS]]\n", stderr);
		return 2;
	}
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED) {
		perror("link-limit: mmap");
		return 1;
	}
	run(1, 0, size, seconds);
	out = shared->rate[0];
	touch = shared->touch_s[0];
	reg = shared->register_s[0];
	run(2, 0, size, seconds);
	in = shared->rate[1];
	run(3, 0, size, seconds);
	memcpy(both, shared->rate, sizeof both);
	run(3, 1, size, seconds);
	printf("{\"mib\":%llu,\"out_alone\":%.2f,\"in_alone\":%.2f,\"out_both\":%.2f,\"in_both\":%.2f,"
	       "\"out_cleared\":%.2f,\"in_cleared\":%.2f,\"touch_s\":%.4f,\"register_s\":%.4f}\n",
	       (unsigned long long)(size >> 20), out, in, both[0], both[1], shared->rate[0], shared->rate[1],
	       touch, reg);
	return 0;
}
