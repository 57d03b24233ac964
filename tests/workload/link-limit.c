// SPDX-License-Identifier: Apache-2.0
/*
 * link-limit: measures how fast memory goes over the link between host and GPU: by one
 * process out, by one in, and by both at the same time. No exchange of two tenants'
 * memory can be faster. Then it measures such an exchange by two bare processes, in
 * turns: one copies its memory out and gives it up, the other obtains as much and copies
 * in. This is slower, because the driver clears memory before it gives it to a process,
 * on an H200 with the engine that copies in. Without clearing, a tenant could read
 * another's memory.
 *
 * usage: link-limit [MIB [SECONDS]]
 *
 * Each process copies between MIB of the GPU and MIB of host memory, in pieces of 32 MiB.
 * The host memory is made like the scheduler's arenas (memfd, shared, registered). Memory
 * that changes hands is made in chunks of 128 MiB, or of half of MIB. Prints one JSON
 * line: GB/s (10^9) of each measurement, and the seconds that touching and registering
 * the host memory took. Ends after 60 s at the latest.
 */
#include "spin.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#define PIECE (32ull << 20)
#define CHUNK (128ull << 20)
#define AHEAD 4
#define MAX_CHUNKS 1024

static struct shared {
	_Atomic uint64_t ready;
	double rate[2], touch_s[2], register_s[2]; /* out, in */
	/* Of exchanges: chunks given up in this one, its begin, and whether it is the last. */
	_Atomic uint64_t given, since;
	atomic_bool last;
} *shared;

/* One process of the two. */
struct side {
	CUstream stream;
	char *host;
};

static struct side begin(int me, uint64_t size)
{
	struct side s;
	CUcontext ctx;
	CUdevice dev;
	uint64_t t;
	int fd;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(60);
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuStreamCreate(&s.stream, 1));
	t = now_ns();
	fd = memfd_create("link-limit", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)size) ||
	    (s.host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0)) == MAP_FAILED) {
		perror("link-limit: host memory");
		exit(1);
	}
	shared->touch_s[me] = (double)(now_ns() - t) / 1e9;
	t = now_ns();
	CHECK(cuMemHostRegister_v2(s.host, size, 1));
	shared->register_s[me] = (double)(now_ns() - t) / 1e9;
	return s;
}

/* Returns when this many processes, in all, have called it. */
static void meet(uint64_t processes)
{
	atomic_fetch_add(&shared->ready, 1);
	while (atomic_load(&shared->ready) < processes)
		usleep(20);
}

static void copies(int in, int both, uint64_t size, double seconds)
{
	uint64_t first = 0, last = 0, n = 0, left = (uint64_t)(seconds * 1e9), pieces = size / PIECE;
	struct side s = begin(in, size);
	CUevent mark[AHEAD];
	CUdeviceptr device;

	CHECK(cuMemAlloc_v2(&device, size));
	for (int i = 0; i < AHEAD; i++)
		CHECK(cuEventCreate(&mark[i], 2));
	meet((uint64_t)(1 + both));
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
		}
		if (in)
			CHECK(cuMemcpyHtoDAsync_v2(device + at, s.host + at, PIECE, s.stream));
		else
			CHECK(cuMemcpyDtoHAsync_v2(s.host + at, device + at, PIECE, s.stream));
		CHECK(cuEventRecord(mark[i % AHEAD], s.stream));
	}
	shared->rate[in] = (double)(n * PIECE) / (double)(last - first);
	CHECK(cuStreamSynchronize(s.stream));
	_exit(0);
}

/* Memory in chunks at addresses that stay. */
struct chunks {
	CUdeviceptr base;
	uint64_t size, count;
	CUmemGenericAllocationHandle handle[MAX_CHUNKS];
	CUevent copied[MAX_CHUNKS];
};

static void obtain(struct chunks *c, uint64_t i)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	CUmemAccessDesc access = { .location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUdeviceptr at = c->base + i * c->size;

	CHECK(cuMemCreate(&c->handle[i], c->size, &prop, 0));
	CHECK(cuMemMap(at, c->size, 0, c->handle[i], 0));
	CHECK(cuMemSetAccess(at, c->size, &access, 1));
}

/* Copies all chunks out, and gives each up when it is copied. Returns the time in ns. */
static uint64_t move_out(const struct side *s, struct chunks *c)
{
	for (uint64_t i = 0; i < c->count; i++) {
		CHECK(cuMemcpyDtoHAsync_v2(s->host + i * c->size, c->base + i * c->size, c->size, s->stream));
		CHECK(cuEventRecord(c->copied[i], s->stream));
	}
	for (uint64_t i = 0; i < c->count; i++) {
		CHECK(cuEventSynchronize(c->copied[i]));
		if (i == 0)
			atomic_store(&shared->since, now_ns());
		CHECK(cuMemUnmap(c->base + i * c->size, c->size));
		CHECK(cuMemRelease(c->handle[i]));
		atomic_store(&shared->given, i + 1);
	}
	return now_ns() - atomic_load(&shared->since);
}

/* Copies all chunks in, as the other process gives memory up. Returns the time in ns. */
static uint64_t move_in(const struct side *s, struct chunks *c)
{
	for (uint64_t i = 0; i < c->count; i++) {
		while (atomic_load(&shared->given) <= i)
			usleep(20);
		obtain(c, i);
		CHECK(cuMemcpyHtoDAsync_v2(c->base + i * c->size, s->host + i * c->size, c->size, s->stream));
	}
	CHECK(cuStreamSynchronize(s->stream));
	return now_ns() - atomic_load(&shared->since);
}

/* Passes memory back and forth; the first time does not count. */
static void exchanges(int me, uint64_t size, double seconds)
{
	static struct chunks c;
	struct side s = begin(me, size);
	uint64_t began = 0, took[2] = { 0, 0 }, n[2] = { 0, 0 };

	c.size = size / 2 < CHUNK ? size / 2 / PIECE * PIECE : CHUNK;
	c.count = size / c.size < MAX_CHUNKS ? size / c.size : MAX_CHUNKS;
	CHECK(cuMemAddressReserve(&c.base, c.count * c.size, 0, 0, 0));
	for (uint64_t i = 0; i < c.count; i++) {
		CHECK(cuEventCreate(&c.copied[i], 2));
		if (me == 0)
			obtain(&c, i);
	}
	for (uint64_t k = 0;; k++) {
		int in = (int)(k & 1) != me;
		uint64_t ns;

		if (me == 0 && k == 1)
			began = now_ns();
		if (me == 0 && k > 2 && (double)(now_ns() - began) > seconds * 1e9)
			atomic_store(&shared->last, true);
		if (!in)
			atomic_store(&shared->given, 0);
		meet(4 * k + 2);
		if (atomic_load(&shared->last))
			break;
		ns = in ? move_in(&s, &c) : move_out(&s, &c);
		if (k) {
			took[in] += ns;
			n[in] += in ? c.count : c.count - 1;
		}
		meet(4 * k + 4);
	}
	/* Each process copied the same amount each way. */
	if (me == 0)
		for (int in = 0; in < 2; in++)
			shared->rate[in] = (double)(n[in] * c.size) / (double)took[in];
	_exit(0);
}

enum what { OUT = 1, IN = 2, BOTH = 3, EXCHANGE = 7 };

static void run(enum what which, uint64_t size, double seconds)
{
	pid_t pid[2] = { 0, 0 };
	int failed = 0;

	memset(shared, 0, sizeof *shared);
	for (int i = 0; i < 2; i++) {
		if (!((int)which & 1 << i))
			continue;
		pid[i] = fork();
		if (pid[i] < 0) {
			perror("link-limit: fork");
			exit(1);
		}
		if (pid[i] == 0 && which == EXCHANGE)
			exchanges(i, size, seconds);
		if (pid[i] == 0)
			copies(i, which == BOTH, size, seconds);
	}
	for (int i = 0; i < 2; i++) {
		int status = 0;

		if (pid[i] > 0)
			waitpid(pid[i], &status, 0);
		if (status && !failed) { /* the other process may wait for this one */
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
	run(OUT, size, seconds);
	out = shared->rate[0];
	touch = shared->touch_s[0];
	reg = shared->register_s[0];
	run(IN, size, seconds);
	in = shared->rate[1];
	run(BOTH, size, seconds);
	memcpy(both, shared->rate, sizeof both);
	run(EXCHANGE, size, seconds);
	printf("{\"mib\":%llu,\"out_alone\":%.2f,\"in_alone\":%.2f,\"out_both\":%.2f,\"in_both\":%.2f,"
	       "\"out_exchange\":%.2f,\"in_exchange\":%.2f,\"touch_s\":%.4f,\"register_s\":%.4f}\n",
	       (unsigned long long)(size >> 20), out, in, both[0], both[1], shared->rate[0], shared->rate[1],
	       touch, reg);
	return 0;
}
