// SPDX-License-Identifier: Apache-2.0
/*
 * gang-job: a job with a rank on each GPU, whose ranks meet in their streams in each round, as in a
 * collective, and read each other's buffers.
 *
 * usage: gang-job RANKS MIB SEED
 *
 * A process for each rank fills MIB of device memory, by cuMemAlloc, small pieces among them, and by the calls of
 * virtual memory management. Two buffers of each rank are open in the others: one by a descriptor, as NCCL's, and
 * one by a handle of cuIpcGetMemHandle. In each round the GPU checks a part of the weights, which stay, and the cache, which
 * it then writes anew; it writes the buffers, meets the others, and checks theirs. At the end it checks all. The job goes on until
 * its standard input ends, and prints one JSON line:
 *
 *   rounds   how many there were
 *   wrong    words of 8 bytes with a wrong value
 *   mib      how much memory each rank has
 *
 * Its work in a round takes GANG_JOB_WORK_MS (5).
 */
#include "cudadrv.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS 8
#define BUFFER (2ull << 20)
#define PIECE (8ull << 20)
#define SMALL (100ull << 10)
#define PIECES 1024

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry nvshare_spin(.param .u64 a, .param .u64 b) { ret; }\n"
	".visible .entry nvshare_fill(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }\n"
	".visible .entry nvshare_check(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) { ret; }\n";

/* What the ranks share. */
static struct shared {
	atomic_uint_fast64_t arrived[RANKS], wrong[RANKS];
	atomic_uint_fast64_t last; /* no round begins after it; rank 0 says so */
	atomic_bool stop;          /* the standard input has ended */
	CUipcMemHandle ipc[RANKS];
} *job;

static int ranks, rank, sockets[RANKS][2];
static uint64_t mib, seed;

struct piece {
	CUdeviceptr at;
	uint64_t bytes, seed;
};

/* A rank's GPU. */
static struct {
	CUdevice dev;
	CUstream stream;
	CUfunction spin, fill, look;
	CUdeviceptr result;
} gpu;

static void check(CUresult rc, const char *what)
{
	if (rc) {
		fprintf(stderr, "gang-job: rank %d: %s: error %d\n", rank, what, rc);
		exit(1);
	}
}

#define CHECK(call) check(call, #call)

/* Waits until all ranks have come as often as this one. */
static void meet(void *arg)
{
	uint64_t here = atomic_fetch_add(&job->arrived[rank], 1) + 1;
	struct timespec nap = { 0, 100000 };

	(void)arg;
	for (int i = 0; i < ranks; i++)
		while (atomic_load(&job->arrived[i]) < here)
			nanosleep(&nap, NULL);
}

static void fill(const struct piece *p)
{
	void *params[] = { (void *)&p->at, (void *)&p->bytes, (void *)&p->seed };

	CHECK(cuLaunchKernel(gpu.fill, 1, 1, 1, 1, 1, 1, 0, gpu.stream, params, NULL));
}

/* Counts the words of a piece that differ. */
static void look(const struct piece *p)
{
	void *params[] = { (void *)&p->at, (void *)&p->bytes, (void *)&p->seed, &gpu.result };
	uint64_t bad = 1;

	CHECK(cuLaunchKernel(gpu.look, 1, 1, 1, 1, 1, 1, 0, gpu.stream, params, NULL));
	CHECK(cuMemcpyDtoHAsync_v2(&bad, gpu.result, 8, gpu.stream));
	CHECK(cuStreamSynchronize(gpu.stream));
	if (bad)
		fprintf(stderr, "gang-job: rank %d: %" PRIu64 " words are wrong at %#llx\n", rank, bad, (unsigned long long)p->at);
	atomic_fetch_add(&job->wrong[rank], bad);
}

/* ---- memory ---- */

static CUdeviceptr map(CUmemGenericAllocationHandle h, uint64_t bytes)
{
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, gpu.dev }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUdeviceptr p;

	CHECK(cuMemAddressReserve(&p, bytes, 0, 0, 0));
	CHECK(cuMemMap(p, bytes, 0, h, 0));
	CHECK(cuMemSetAccess(p, bytes, &access, 1));
	return p;
}

static CUmemGenericAllocationHandle create(uint64_t bytes, int exported)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = exported,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, gpu.dev } };
	CUmemGenericAllocationHandle h;

	CHECK(cuMemCreate(&h, bytes, &prop, 0));
	return h;
}

static CUdeviceptr piece(int i, uint64_t bytes)
{
	CUdeviceptr p;

	if (i % 4 == 3 && bytes == PIECE) {
		CUmemGenericAllocationHandle h = create(bytes, 0);

		p = map(h, bytes);
		CHECK(cuMemRelease(h));
	} else {
		CHECK(cuMemAlloc_v2(&p, bytes));
	}
	return p;
}

static int pieces(struct piece *all, uint64_t left)
{
	int n = 0;

	for (; left && n < PIECES; n++) {
		uint64_t size = n % 4 == 2 ? SMALL : PIECE;

		all[n].bytes = left < size ? left : size;
		all[n].at = piece(n, all[n].bytes);
		all[n].seed = seed + (uint64_t)(rank * PIECES + n);
		fill(&all[n]);
		left -= all[n].bytes;
	}
	return n;
}

/* ---- what others open ---- */

static void give(int to, int fd)
{
	char control[CMSG_SPACE(sizeof fd)] = { 0 }, none = 0;
	struct iovec iov = { &none, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);

	c->cmsg_len = CMSG_LEN(sizeof fd);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	if (sendmsg(sockets[to][1], &m, 0) != 1) {
		perror("gang-job: sendmsg");
		exit(1);
	}
}

static int take(void)
{
	char control[CMSG_SPACE(sizeof(int))], none;
	struct iovec iov = { &none, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	int fd;

	if (recvmsg(sockets[rank][0], &m, 0) != 1 || !CMSG_FIRSTHDR(&m)) {
		perror("gang-job: recvmsg");
		exit(1);
	}
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

/* Buffers 0 and 1 are this rank's own; theirs are those of the rank before it. */
static void open_buffers(struct piece *own, struct piece *theirs)
{
	int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks, fd;
	CUmemGenericAllocationHandle h = create(BUFFER, CU_MEM_HANDLE_TYPE_POSIX_FD);

	CHECK(cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FD, 0));
	own[0].at = map(h, BUFFER);
	CHECK(cuMemRelease(h));
	give(next, fd);
	close(fd);
	CHECK(cuMemAlloc_v2(&own[1].at, BUFFER));
	CHECK(cuIpcGetMemHandle(&job->ipc[rank], own[1].at));
	meet(NULL);
	fd = take();
	CHECK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FD));
	theirs[0].at = map(h, BUFFER);
	CHECK(cuMemRelease(h));
	close(fd);
	CHECK(cuIpcOpenMemHandle_v2(&theirs[1].at, job->ipc[before], 1));
	for (int i = 0; i < 2; i++)
		own[i].bytes = theirs[i].bytes = BUFFER;
	meet(NULL);
}

/* ---- rounds ---- */

static uint64_t buffer_seed(uint64_t round, int of, int i) { return round * 1000 + (uint64_t)(of * 2 + i); }

static void one_round(uint64_t round, struct piece *all, int n, struct piece *own, struct piece *theirs)
{
	uint64_t zero = 0, work = 5000000;
	const char *ms = getenv("GANG_JOB_WORK_MS");
	void *params[] = { &work, &zero };

	if (ms)
		work = strtoull(ms, NULL, 10) * 1000000;
	for (int i = 0; i < n; i++)
		if (i < n / 4 || (uint64_t)i % 4 == round % 4)
			look(&all[i]);
	for (int i = 0; i < n / 4; i++) { /* the cache */
		all[i].seed++;
		fill(&all[i]);
	}
	CHECK(cuLaunchKernel(gpu.spin, 1, 1, 1, 1, 1, 1, 0, gpu.stream, params, NULL));
	for (int i = 0; i < 2; i++) {
		own[i].seed = buffer_seed(round, rank, i);
		theirs[i].seed = buffer_seed(round, (rank + ranks - 1) % ranks, i);
		fill(&own[i]);
	}
	CHECK(cuLaunchHostFunc(gpu.stream, meet, NULL));
	CHECK(cuStreamSynchronize(gpu.stream));
	for (int i = 0; i < 2; i++)
		look(&theirs[i]);
	CHECK(cuLaunchHostFunc(gpu.stream, meet, NULL)); /* they are read */
	CHECK(cuStreamSynchronize(gpu.stream));
}

static int work(void)
{
	struct piece all[PIECES], own[2], theirs[2];
	CUcontext ctx;
	CUmodule m;
	int n;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&gpu.dev, rank));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, gpu.dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuStreamCreate(&gpu.stream, CU_STREAM_NON_BLOCKING));
	CHECK(cuModuleLoadData(&m, ptx));
	CHECK(cuModuleGetFunction(&gpu.spin, m, "nvshare_spin"));
	CHECK(cuModuleGetFunction(&gpu.fill, m, "nvshare_fill"));
	CHECK(cuModuleGetFunction(&gpu.look, m, "nvshare_check"));
	CHECK(cuMemAlloc_v2(&gpu.result, 8));
	open_buffers(own, theirs);
	n = pieces(all, (mib << 20) - 2 * BUFFER);
	CHECK(cuStreamSynchronize(gpu.stream));
	meet(NULL);
	if (rank == 0) {
		printf("filled\n");
		fflush(stdout);
	}
	for (uint64_t round = 1; round <= atomic_load(&job->last); round++) {
		one_round(round, all, n, own, theirs);
		if (rank == 0 && !atomic_load(&job->stop))
			atomic_store(&job->last, round + 1);
		meet(NULL);
	}
	for (int i = 0; i < n; i++)
		look(&all[i]);
	meet(NULL); /* nobody frees what another one reads */
	return 0;
}

int main(int argc, char **argv)
{
	uint64_t wrong = 0;
	struct pollfd in = { 0, POLLIN, 0 };
	char c;

	ranks = argc == 4 ? atoi(argv[1]) : 0;
	mib = argc == 4 ? strtoull(argv[2], NULL, 10) : 0;
	seed = argc == 4 ? strtoull(argv[3], NULL, 10) : 0;
	if (ranks < 1 || ranks > RANKS || mib < 16) {
		fputs("usage: gang-job RANKS MIB SEED\n", stderr);
		return 2;
	}
	job = mmap(NULL, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (job == MAP_FAILED)
		return 1;
	job->last = 1;
	for (int i = 0; i < ranks; i++)
		if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets[i]))
			return 1;
	for (rank = 0; rank < ranks; rank++)
		if (fork() == 0)
			return work();
	for (int left = ranks, status; left > 0; left--) {
		while (waitpid(-1, &status, WNOHANG) == 0)
			atomic_store(&job->stop, poll(&in, 1, 20) > 0 && read(0, &c, 1) == 0);
		if (status)
			return 1; /* and all ranks end */
	}
	for (int i = 0; i < ranks; i++)
		wrong += atomic_load(&job->wrong[i]);
	printf("{\"rounds\":%" PRIu64 ",\"wrong\":%" PRIu64 ",\"mib\":%" PRIu64 "}\n", (uint64_t)job->last, wrong, mib);
	return 0;
}
