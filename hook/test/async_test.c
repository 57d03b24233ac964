// SPDX-License-Identifier: Apache-2.0
/*
 * async_test.c: stream-ordered allocation of memory that moves, over the simulated
 * GPU. Run with the shim preloaded; one case per process, "" lists them. The
 * process is the tenant, and a thread of it the scheduler. CASE SEED: other random
 * numbers.
 */
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EVENTUALLY_MS PATIENCE_MS
#include "tenant.h"

#define KIB (1ull << 10)
#define GPU (4096 * MIB)
#define CACHE (128 * MIB) /* is kept in any case */

static const char *self;

/* ---- a tenant ---- */

static CUmemoryPool pool;
static CUstream streams[2];

/* Holds the GPU afterwards. */
static void pools_open(void)
{
	tenant_open();
	CU(cuDeviceGetDefaultMemPool(&pool, 0));
	for (int i = 0; i < 2; i++)
		CU(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
	CU(cuMemsetD8_v2(wrong, 0, 8));
	CU(cuCtxSynchronize());
}

static void open_on(uint64_t gpu)
{
	struct swapper_config c = { .gpu = gpu, .arena = 64 * MIB, .quantum_ms = 30 };

	schedule(c);
	pools_open();
}

static void threshold(uint64_t bytes)
{
	CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes));
}

static uint64_t attribute(int what)
{
	uint64_t value = 0;

	CU(cuMemPoolGetAttribute(pool, what, &value));
	return value;
}

static void run(uint64_t ns, CUstream s)
{
	uint64_t zero = 0;
	void *params[] = { &ns, &zero };

	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
}

/* The beginning of it: the bytes are moved by this machine's memory. */
static uint64_t part(uint64_t bytes)
{
	return (bytes < 256 * KIB ? bytes : 256 * KIB) / 8 * 8;
}

static void fill_part(CUdeviceptr p, uint64_t bytes, uint64_t seed, CUstream s)
{
	uint64_t n = part(bytes);
	void *params[] = { &p, &n, &seed };

	CU(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
}

/* Counted in the stream; see faultless(). */
static void check_part(CUdeviceptr p, uint64_t bytes, uint64_t seed, CUstream s)
{
	uint64_t n = part(bytes);
	void *params[] = { &p, &n, &seed, &wrong };

	CU(cuLaunchKernel(check, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
}

static void faultless(void)
{
	uint64_t bad = 1;

	CU(cuCtxSynchronize());
	CU(cuMemcpyDtoH_v2(&bad, wrong, 8));
	CHECK(bad == 0);
}

static CUdeviceptr get(uint64_t bytes, CUstream s)
{
	CUdeviceptr p;

	CU(cuMemAllocAsync(&p, bytes, s));
	return p;
}

/* ---- a training step ---- */

enum { TENSORS = 200, ROUNDS = 12, LOOPS = 500 };

static uint64_t sizes[TENSORS];

/* From 512 bytes to 300 MiB, 2 GiB in all; what a round needs at a time is half of it. */
static void make_sizes(void)
{
	static const uint64_t large[] = { 300, 160, 120, 75, 64, 48, 33, 24, 18, 9 };

	for (int i = 0; i < TENSORS; i++)
		sizes[i] = i % 10 == 3 && i < 100 ? large[i / 10] * MIB
			: i % 3 ? 512 + rnd(8 * KIB) : 512 + rnd(3 * MIB);
}

/* Forward: all are allocated, each other one freed soon. Backward: the others. */
static void step(void)
{
	CUdeviceptr p[TENSORS], t;

	for (int i = 0; i < TENSORS; i++) {
		CUstream s = streams[i % 7 == 0];

		p[i] = get(sizes[i], s);
		run(1000, s);
		if (i % 2) {
			CU(cuMemFreeAsync(p[i], s));
			p[i] = 0;
		}
	}
	for (int i = TENSORS; i-- > 0;) {
		CUstream s = streams[i % 7 == 0];

		if (!p[i])
			continue;
		t = get(sizes[i], s);
		run(1000, s);
		CU(cuMemFreeAsync(t, s));
		CU(cuMemFreeAsync(p[i], s));
	}
}

static struct simgpu_calls calls_of(int rounds, bool synchronised)
{
	struct simgpu_calls before = simgpu_calls(), after;

	for (int i = 0; i < rounds; i++) {
		step();
		if (synchronised)
			CU(cuCtxSynchronize());
	}
	after = simgpu_calls();
	return (struct simgpu_calls){ after.all - before.all, after.vmm - before.vmm };
}

/* What it costs the GPU's driver, once it has found its rhythm. */
static void steady(bool synchronised)
{
	struct simgpu_calls c;
	unsigned long long launches = ROUNDS * (TENSORS + TENSORS / 2);

	make_sizes();
	/* Which stream gets what the other has freed depends on who is faster. */
	for (int i = 0; (c = calls_of(ROUNDS, synchronised)).vmm && i < 50; i++)
		;
	CHECK(c.vmm == 0);
	/* An event for each free, and a look at it. */
	CHECK(c.all <= launches + 2 * launches + 2 * ROUNDS);
}

static void steps_reach_a_steady_state(void)
{
	open_on(GPU);
	threshold(UINT64_MAX);
	steady(true);
	steady(false);
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) > 300 * MIB);
	swapper_end();
}

/* What one stream frees and takes again costs an event, and no look at it. */
static void a_loop_looks_at_nothing(void)
{
	struct simgpu_calls before = { 0 };

	open_on(GPU);
	threshold(UINT64_MAX);
	for (int i = 0; i < 2 * LOOPS; i++) {
		if (i == LOOPS)
			before = simgpu_calls();
		CU(cuMemFreeAsync(get(32 * MIB, streams[0]), streams[0]));
	}
	CHECK(simgpu_calls().all - before.all <= 2 * LOOPS); /* which context is current, too */
	swapper_end();
}

static void nothing_is_released_between_synchronisations(void)
{
	open_on(GPU);
	steady(false);
	/* Then it is, except the usual. */
	CU(cuCtxSynchronize());
	EVENTUALLY(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) <= CACHE);
	EVENTUALLY(swapper_seen().resident <= CACHE + 64 * MIB);
	swapper_end();
}

/* ---- what a pool keeps ---- */

static void fill_pool(uint64_t bytes)
{
	CUdeviceptr p[4];

	for (int i = 0; i < 4; i++)
		p[i] = get(bytes / 4, streams[0]);
	for (int i = 0; i < 4; i++)
		CU(cuMemFreeAsync(p[i], streams[0]));
}

static void pools_tell_what_they_have(void)
{
	uint64_t zero = 0, high;
	CUdeviceptr p;

	open_on(GPU);
	threshold(UINT64_MAX);
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0);
	p = get(100 * MIB, streams[0]);
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 100 * MIB);
	CU(cuMemFreeAsync(p, streams[0]));
	fill_pool(1024 * MIB);
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_HIGH) == 1024 * MIB);
	high = attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
	CHECK(high == attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH));
	CHECK(high >= 1024 * MIB && high <= 1152 * MIB);
	CU(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &zero));
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_HIGH) == 0);
	CU(cuCtxSynchronize());
	CU(cuMemPoolTrimTo(pool, 512 * MIB));
	high = attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
	CHECK(high <= 768 * MIB && high >= 512 * MIB);
	CU(cuMemPoolTrimTo(pool, 0));
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0);
	CHECK(used() <= 64 * MIB);
	swapper_end();
}

/* Says what the default pool has, after each step. */
static int reserves(void)
{
	CUdeviceptr p[32];
	int n = 0;

	pools_open();
	threshold(UINT64_MAX);
#define SAY(step) printf("%-20s %llu %llu\n", step, (unsigned long long)attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), \
			 (unsigned long long)attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH))
	SAY("nothing");
	p[n++] = get(1000, streams[0]);
	SAY("a small allocation");
	while (n < 20)
		p[n++] = get(64 * KIB, streams[0]);
	SAY("small ones");
	p[n++] = get(20 * MIB, streams[0]);
	SAY("a large one");
	p[n++] = get(16 * MIB, streams[0]);
	SAY("another");
	while (n)
		CU(cuMemFreeAsync(p[--n], streams[0]));
	CU(cuCtxSynchronize());
	SAY("all is free");
	CU(cuMemPoolTrimTo(pool, 0));
	SAY("trimmed");
#undef SAY
	return 0;
}

static void output_of_reserves(bool native, char *text, size_t size)
{
	int to[2];
	size_t n = 0;
	ssize_t got;
	pid_t pid;

	CHECK(pipe(to) == 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		dup2(to[1], 1);
		if (native)
			unsetenv("LD_PRELOAD");
		setenv("NVSHARE_SIMGPU_POOL_MIB", "32", 1);
		execl(self, self, "reserves", (char *)NULL);
		_exit(127);
	}
	close(to[1]);
	while ((got = read(to[0], text + n, size - 1 - n)) > 0)
		n += (size_t)got;
	text[n] = 0;
	close(to[0]);
	CHECK(went_well(pid));
}

/* Small allocations share what the driver reserves at a time. */
static void pools_reserve_as_the_driver_does(void)
{
	struct swapper_config c = { .gpu = GPU, .arena = 64 * MIB, .quantum_ms = 30 };
	static char native[4096], ours[4096];

	swapper_init();
	output_of_reserves(true, native, sizeof(native));
	swapper_start(&c);
	output_of_reserves(false, ours, sizeof(ours));
	if (strcmp(native, ours) != 0)
		fprintf(stderr, "native:\n%sours:\n%s", native, ours);
	CHECK(strstr(native, "trimmed") && strcmp(native, ours) == 0);
	swapper_end();
}

/* What work may still use is not given up. */
static void trimming_spares_what_is_in_use(void)
{
	CUdeviceptr p;

	open_on(GPU);
	threshold(UINT64_MAX);
	p = get(256 * MIB, streams[0]);
	run(300 * 1000000ull, streams[0]);
	fill_part(p, 256 * MIB, 1, streams[0]);
	CU(cuMemFreeAsync(p, streams[0]));
	CU(cuMemPoolTrimTo(pool, 0));
	CHECK(cuStreamQuery(streams[0]) == CUDA_SUCCESS ||
	      attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 256 * MIB);
	CU(cuCtxSynchronize());
	CU(cuMemPoolTrimTo(pool, 0));
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0);
	swapper_end();
}

/* For memory that is not of the pool, and for what does not fit into what it has. */
static void what_is_kept_makes_way(void)
{
	CUdeviceptr p;

	open_on(1024 * MIB);
	threshold(UINT64_MAX);
	fill_pool(900 * MIB);
	run(50 * 1000000ull, streams[0]); /* not done with it yet */
	CU(cuMemAlloc_v2(&p, 700 * MIB));
	CU(cuMemsetD8_v2(p, 1, MIB));
	CU(cuMemFree_v2(p));
	fill_pool(900 * MIB);
	p = get(901 * MIB, streams[1]);
	CU(cuMemFreeAsync(p, streams[1]));
	CHECK(swapper_seen().stuck_memory == 0);
	swapper_end();
}

static atomic_bool enough;

/* Keeps the GPU busy. */
static void *busy(void *arg)
{
	(void)arg;
	CU(cuCtxSetCurrent(ctx));
	while (!enough) {
		run(20 * 1000000ull, streams[0]);
		nap_ms(cuStreamQuery(streams[0]) == CUDA_SUCCESS ? 0 : 10);
	}
	return NULL;
}

/* What a stream has passed is had, although it is never done. */
static void a_busy_stream_gives_back(void)
{
	pthread_t t;
	CUdeviceptr p;

	open_on(96 * MIB);
	threshold(UINT64_MAX);
	CHECK(pthread_create(&t, NULL, busy, NULL) == 0);
	for (int i = 0; i < 2; i++) {
		fill_pool(48 * MIB);
		p = get(80 * MIB, streams[1]);
		CU(cuMemFreeAsync(p, streams[1]));
	}
	enough = true;
	pthread_join(t, NULL);
	swapper_end();
}

/* Two streams in turn, on a GPU without room for both. */
static void each_gets_what_the_other_freed(void)
{
	CUdeviceptr p;

	for (int i = 0; i < 2; i++) {
		p = get(12 * MIB, streams[0]);
		run(50 * 1000000ull, streams[0]);
		CU(cuMemFreeAsync(p, streams[0]));
		p = get(86 * MIB, streams[1]);
		CU(cuMemFreeAsync(p, streams[1]));
	}
}

/* Also what is too little for an event of its own. */
static void a_single_free_gives_back(void)
{
	open_on(96 * MIB);
	alarm(PATIENCE_MS / 1000);
	threshold(UINT64_MAX);
	each_gets_what_the_other_freed();
	swapper_end();
}

/*
 * The mover, which has no context, asks for what is kept, before the stream that freed is in
 * use again: that is no reason never to record events on the stream.
 */
static void an_eviction_spoils_no_stream(void)
{
	CUdeviceptr large, p;

	open_on(96 * MIB);
	alarm(PATIENCE_MS / 1000);
	threshold(UINT64_MAX);
	CU(cuMemAlloc_v2(&large, 40 * MIB));
	fill_part(large, 40 * MIB, 3, NULL);
	p = get(12 * MIB, streams[0]);
	run(50 * 1000000ull, streams[0]);
	CU(cuMemFreeAsync(p, streams[0]));
	swapper_withhold(true);
	swapper_room(1);
	EVENTUALLY(swapper_seen().out > 0);
	swapper_room(0);
	swapper_withhold(false);
	check_part(large, 40 * MIB, 3, NULL);
	CU(cuMemFree_v2(large));
	each_gets_what_the_other_freed();
	swapper_end();
}

/* The stream waits for what this thread does after the allocation: that fails then, and the thread goes on. */
static void a_stream_that_waits_for_the_allocation(void)
{
	volatile uint32_t *word;
	CUdeviceptr p, more = 0;
	void *host;
	struct swapper_config c = { .gpu = 4096 * MIB, .arena = 64 * MIB, .limit = 96 * MIB, .quantum_ms = 30 };

	schedule(c);
	pools_open();
	alarm(PATIENCE_MS / 1000);
	threshold(UINT64_MAX);
	CU(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
	word = host;
	*word = 0;
	p = get(60 * MIB, streams[0]);
	CU(cuStreamWaitValue32(streams[0], (uintptr_t)host, 1, CU_STREAM_WAIT_VALUE_EQ));
	CU(cuMemFreeAsync(p, streams[0]));
	CHECK(cuMemAlloc_v2(&more, 80 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(cuStreamQuery(streams[0]) == CUDA_ERROR_NOT_READY);
	*word = 1;
	CU(cuMemAlloc_v2(&more, 80 * MIB));
	CU(cuMemFree_v2(more));
	swapper_end();
}

/* ---- another tenant ---- */

static int other(uint64_t mib, int rounds)
{
	CUdeviceptr p;

	pools_open();
	CU(cuMemAlloc_v2(&p, mib * MIB));
	for (int i = 0; i < rounds; i++) {
		fill_part(p, mib * MIB, 1, NULL);
		run(30 * 1000000ull, NULL);
		check_part(p, mib * MIB, 1, NULL);
		faultless();
	}
	return 0;
}

static pid_t start_other(const char *mib, const char *rounds)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid == 0) {
		execl(self, self, "other", mib, rounds, (char *)NULL);
		_exit(127);
	}
	return pid;
}

static void another_tenant_gets_what_is_kept(void)
{
	int status;
	CUdeviceptr p;
	pid_t pid;

	open_on(1024 * MIB);
	threshold(UINT64_MAX);
	p = get(64 * MIB, streams[0]);
	fill_part(p, 64 * MIB, 7, streams[0]);
	fill_pool(800 * MIB);
	CU(cuCtxSynchronize());
	pid = start_other("600", "5");
	while (waitpid(pid, &status, WNOHANG) == 0) { /* both work meanwhile */
		check_part(p, 64 * MIB, 7, streams[0]);
		CU(cuStreamSynchronize(streams[0]));
		fill_pool(rnd(2) ? 300 * MIB : 100 * KIB);
		nap_ms(1);
	}
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	/* Nothing of what was kept was worth copying. */
	CHECK(swapper_seen().ready > 0 && swapper_seen().out <= 10 * 100 * MIB);
	faultless();
	swapper_end();
}

/*
 * What is freed while the GPU is held is had again at once, up to a 16th of the GPU; but
 * nothing else is obtained beside it, and it does not linger.
 */
static void what_is_freed_is_had_again(void)
{
	const uint64_t bytes = 240 * MIB;
	unsigned again = 0, kept = 0;
	uint64_t before;

	open_on(GPU);
	before = swapper_seen().resident;
	for (unsigned i = 0; i < 8; i++) {
		CUdeviceptr p, q;

		CU(cuMemAlloc_v2(&p, bytes));
		fill_part(p, bytes, i, NULL); /* in its turn */
		CU(cuMemFree_v2(p));
		CHECK(used() < bytes);
		/* The scheduler is told each second; LINGER_NS is more than this waits. */
		for (int ms = 0; ms < 400 && swapper_seen().resident < before + bytes; ms++)
			nap_ms(1);
		kept += swapper_seen().resident >= before + bytes;
		CU(cuMemAlloc_v2(&q, bytes));
		again += q == p;
		CU(cuMemFree_v2(q));
		CU(cuMemAlloc_v2(&p, CACHE + MIB));
		fill_part(p, CACHE + MIB, i, NULL);
		check_part(p, CACHE + MIB, i, NULL);
		CU(cuMemFree_v2(p));
	}
	CHECK(kept > 0 && again > 0); /* not each time, where the machine stands still */
	CHECK(swapper_seen().resident_max <= before + bytes + 64 * MIB);
	EVENTUALLY(swapper_seen().resident <= before + CACHE);
	faultless();
	swapper_end();
}

/* ---- order, against a model ---- */

enum { LIVE = 48, PAST = 4096 };

static struct { CUdeviceptr p; uint64_t bytes, seed; CUstream s; } live[LIVE];
/* Freed places: nobody else's before `done`. */
static struct { CUdeviceptr p; uint64_t bytes; CUstream s; CUevent done; } past[PAST];
static unsigned past_next;

static uint64_t largest = 40 * MIB;

static uint64_t some_size(void)
{
	switch (rnd(4)) {
	case 0:
		return 8 + rnd(4 * KIB);
	case 1:
		return 8 + rnd(MIB);
	case 2:
		return MIB + 1 + rnd(3 * MIB);
	default:
		return MIB + 1 + rnd(largest);
	}
}

static bool overlap(CUdeviceptr a, uint64_t n, CUdeviceptr b, uint64_t m)
{
	return a < b + m && b < a + n;
}

static void model_alloc(int i, CUstream s)
{
	uint64_t bytes = some_size();
	CUdeviceptr p = get(bytes, s);

	CHECK(p % 512 == 0);
	for (int k = 0; k < LIVE; k++)
		CHECK(!live[k].p || !overlap(p, bytes, live[k].p, live[k].bytes));
	for (int k = 0; k < PAST; k++)
		CHECK(!past[k].done || past[k].s == s || !overlap(p, bytes, past[k].p, past[k].bytes) ||
		      cuEventQuery(past[k].done) == CUDA_SUCCESS);
	live[i].p = p;
	live[i].bytes = bytes;
	live[i].seed = rnd(1ull << 60);
	live[i].s = s;
	fill_part(p, bytes, live[i].seed, s);
}

static void model_free(int i)
{
	unsigned k = past_next++ % PAST;

	check_part(live[i].p, live[i].bytes, live[i].seed, live[i].s);
	past[k].p = live[i].p;
	past[k].bytes = live[i].bytes;
	past[k].s = live[i].s;
	if (!past[k].done)
		CU(cuEventCreate(&past[k].done, CU_EVENT_DISABLE_TIMING));
	CU(cuMemFreeAsync(live[i].p, live[i].s));
	CU(cuEventRecord(past[k].done, live[i].s));
	CHECK(cuMemFreeAsync(live[i].p, live[i].s) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemFree_v2(live[i].p) == CUDA_ERROR_INVALID_VALUE);
	live[i].p = 0;
}

static void sequence(int count)
{
	CUstream s[] = { streams[0], streams[1], NULL };

	for (int n = 0; n < count; n++) {
		int i = (int)rnd(LIVE);

		if (n % 1000 == 0)
			threshold(rnd(2) ? UINT64_MAX : rnd(2) * 200 * MIB);
		switch (rnd(40)) {
		case 0:
			CU(cuStreamSynchronize(s[rnd(3)]));
			break;
		case 1:
			CU(cuMemPoolTrimTo(pool, rnd(100) * MIB));
			break;
		case 2:
			run(rnd(10) * 1000000, s[rnd(3)]);
			break;
		case 3:
			used();
			break;
		default:
			if (live[i].p)
				model_free(i);
			else
				model_alloc(i, s[rnd(3)]);
		}
	}
	for (int i = 0; i < LIVE; i++)
		if (live[i].p)
			model_free(i);
	faultless();
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
}

static void any_sequence_keeps_the_order_of_streams(void)
{
	open_on(1024 * MIB);
	sequence(4000);
	swapper_end();
}

/* Its memory leaves and comes back, whatever state it is in. */
static void any_sequence_beside_another_tenant(void)
{
	pid_t pid;

	largest = 10 * MIB; /* all is copied, again and again */
	open_on(160 * MIB);
	pid = start_other("120", "1000000");
	EVENTUALLY(swapper_seen().alive == 2);
	sequence(500);
	CHECK(swapper_seen().ready > 0 && swapper_seen().out > 0);
	CHECK(swapper_seen().stuck_memory == 0 && swapper_seen().stuck_error == 0);
	kill(pid, SIGKILL);
	CHECK(waitpid(pid, NULL, 0) == pid);
	swapper_end();
}

/* ---- streams that go, and threads ---- */

/* A stream may end before what it had freed has passed; handles come again. */
static void streams_come_and_go(void)
{
	CUdeviceptr p, q;
	CUstream s;

	open_on(GPU);
	threshold(UINT64_MAX);
	for (int i = 0; i < 50; i++) {
		CUevent done;

		CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
		CU(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
		p = get(32 * MIB, s);
		run(5 * 1000000ull, s);
		CU(cuMemFreeAsync(p, s));
		CU(cuEventRecord(done, s));
		CU(cuStreamDestroy_v2(s));
		CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
		q = get(32 * MIB, s);
		CHECK(q != p || cuEventQuery(done) == CUDA_SUCCESS);
		CU(cuMemFreeAsync(q, s));
		CU(cuStreamSynchronize(s));
		CU(cuStreamDestroy_v2(s));
		CU(cuEventSynchronize(done));
		CU(cuEventDestroy_v2(done));
	}
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) <= 96 * MIB);
	swapper_end();
}

static CUstream doomed;
static bool interrupted;

static void destroy_doomed(int sig)
{
	(void)sig;
	interrupted = true;
	CU(cuStreamDestroy_v2(doomed));
}

static CUresult interrupt_record(const char *call)
{
	if (!interrupted && strcmp(call, "cuEventRecordWithFlags") == 0)
		raise(SIGUSR1);
	return CUDA_SUCCESS;
}

/* A signal handler destroys the stream whose free it interrupts. */
static void a_stream_ends_in_its_own_free(void)
{
	CUdeviceptr p[2];

	open_on(GPU);
	CHECK(signal(SIGUSR1, destroy_doomed) != SIG_ERR);
	CU(cuStreamCreate(&doomed, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < 2; i++)
		p[i] = get(32 * MIB, doomed);
	CU(cuMemFreeAsync(p[0], doomed));
	simgpu_intercept(interrupt_record);
	CU(cuMemFreeAsync(p[1], doomed));
	simgpu_intercept(NULL);
	CHECK(interrupted);
	CU(cuCtxSynchronize()); /* the host has waited for what the stream did */
	CHECK(get(32 * MIB, streams[0]) != get(32 * MIB, streams[1]));
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 64 * MIB);
	swapper_end();
}

#define OWN ((CUstream)2) /* a thread's own default stream */

static CUdeviceptr left;  /* freed behind what still runs */
static CUevent left_done;

/* Each thread's stream is another, also if it has the record of one that ended. */
static void *one_of_many(void *arg)
{
	CUdeviceptr p;

	(void)arg;
	CU(cuCtxSetCurrent(ctx));
	p = get(32 * MIB, OWN);
	CHECK(p != left || cuEventQuery(left_done) == CUDA_SUCCESS);
	run(2 * 1000000ull, OWN);
	CU(cuMemFreeAsync(p, OWN));
	CU(cuEventRecord(left_done, OWN));
	left = p;
	return NULL;
}

static void threads_come_and_go(void)
{
	open_on(GPU);
	threshold(UINT64_MAX);
	CU(cuEventCreate(&left_done, CU_EVENT_DISABLE_TIMING));
	for (int i = 0; i < 600; i++) {
		pthread_t t;

		CHECK(pthread_create(&t, NULL, one_of_many, NULL) == 0);
		pthread_join(t, NULL);
		if (i % 50 == 0)
			CU(cuEventSynchronize(left_done));
	}
	CU(cuEventSynchronize(left_done));
	CU(cuMemPoolTrimTo(pool, 0)); /* what they have left is asked for all the same */
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0);
	swapper_end();
}

static void *worker(void *arg)
{
	CUstream s;

	(void)arg;
	CU(cuCtxSetCurrent(ctx));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < 300; i++) {
		uint64_t bytes = i % 3 ? 3000 : 6 * MIB, seed = (uint64_t)(uintptr_t)s + (uint64_t)i;
		CUdeviceptr p = get(bytes, s), q = get(5000, s);

		fill_part(p, bytes, seed, s);
		check_part(p, bytes, seed, s);
		CU(cuMemFreeAsync(p, s));
		if (i % 16 == 0)
			CU(cuStreamSynchronize(s));
		if (i % 50 == 0)
			CU(cuMemPoolTrimTo(pool, 8 * MIB));
		CU(cuMemFreeAsync(q, i % 5 ? s : NULL));
	}
	CU(cuStreamSynchronize(s));
	CU(cuStreamDestroy_v2(s));
	return NULL;
}

static void threads_share_a_pool(void)
{
	pthread_t t[6];

	open_on(GPU);
	for (int i = 0; i < 6; i++)
		CHECK(pthread_create(&t[i], NULL, worker, NULL) == 0);
	for (int i = 0; i < 6; i++)
		pthread_join(t[i], NULL);
	faultless();
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
	CU(cuMemPoolTrimTo(pool, 0));
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0);
	swapper_end();
}

/* ---- pools and contexts that go ---- */

static void pools_and_contexts_end(void)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				 .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	uint64_t all = UINT64_MAX;
	CUcontext second;
	CUmemoryPool own;
	CUdeviceptr p, q;
	CUstream s;

	open_on(GPU);
	threshold(UINT64_MAX);
	for (int i = 0; i < 20; i++) {
		CU(cuMemPoolCreate(&own, &props));
		CU(cuMemPoolSetAttribute(own, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
		CU(cuMemAllocFromPoolAsync(&p, 200 * MIB, own, streams[0]));
		CU(cuMemAllocFromPoolAsync(&q, 3000, own, streams[0]));
		fill_part(p, 200 * MIB, 1, streams[0]);
		CU(cuMemPoolDestroy(own));
		check_part(p, 200 * MIB, 1, streams[0]); /* lives on */
		CU(cuMemFreeAsync(p, streams[0]));
		CU(cuMemFreeAsync(q, streams[0]));
		CU(cuCtxSynchronize());
		EVENTUALLY(used() <= 64 * MIB);
	}
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0);
	for (int i = 0; i < 20; i++) {
		CU(cuCtxCreate_v2(&second, 0, 0));
		CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
		p = get(40 * MIB, s);
		fill_part(p, 40 * MIB, 5, s);
		q = get(40 * MIB, s);
		CU(cuMemFreeAsync(q, s));
		CU(cuCtxDestroy_v2(second));
		CU(cuCtxSetCurrent(ctx));
		check_part(p, 40 * MIB, 5, streams[0]); /* of no context */
		CU(cuMemFreeAsync(p, streams[0]));
		CU(cuCtxSynchronize());
	}
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) <= 160 * MIB);
	faultless();
	swapper_end();
}

/* ---- the gate, while memory comes in ---- */

static _Atomic unsigned filled_before; /* fills so far plus one: hold waits up */
static _Atomic unsigned late_sleeps;

/*
 * The shim's. The process's first thread begins to wait for what it saw when the
 * gate was open already only after the fill: it must not sleep then.
 */
__attribute__((no_sanitize("address"))) /* it takes arguments that were not given */
long syscall(long number, ...)
{
	static long (*_Atomic found)(long, ...);
	long (*real)(long, ...) = found;
	long a[6], result;
	va_list args;

	va_start(args, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(args, long);
	va_end(args);
	if (!real)
		found = real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	if (number == SYS_futex && (a[1] & ~FUTEX_PRIVATE_FLAG) == FUTEX_WAIT && a[2] &&
	    filled_before && real(SYS_gettid) == getpid()) {
		EVENTUALLY(swapper_seen().ready >= filled_before);
		EVENTUALLY(*(_Atomic uint32_t *)a[0] != (uint32_t)a[2]); /* changed by the wake that follows READY */
		result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
		late_sleeps += result != 0 && errno == ETIMEDOUT;
		return result;
	}
	return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static void who_waits_for_a_fill_is_woken(void)
{
	struct swapper_config c = { .gpu = GPU, .arena = 64 * MIB, .quantum_ms = 30 };
	CUdeviceptr p;

	schedule(c);
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	CU(cuMemAlloc_v2(&p, 2048 * MIB)); /* nowhere, as the GPU is not held */
	filled_before = 1;
	CU(cuMemsetD8_v2(p, 0, 8));
	filled_before = 0;
	EVENTUALLY(swapper_seen().ready == 1);
	CHECK(late_sleeps == 0);
	swapper_end();
}

/* ---- by hand: what a pair costs ---- */

static void cost(void)
{
	static const uint64_t what[] = { 512, 100 * KIB, 2 * MIB, 300 * MIB };
	enum { PAIRS = 200000 };

	open_on(GPU);
	threshold(UINT64_MAX);
	for (int i = 0; i < 4; i++) {
		struct simgpu_calls before = simgpu_calls();
		uint64_t t = test_now();

		for (int n = 0; n < PAIRS; n++)
			CU(cuMemFreeAsync(get(what[i], streams[0]), streams[0]));
		t = test_now() - t;
		printf("%llu bytes: %.0f ns a pair, %llu driver calls of %d\n",
		       (unsigned long long)what[i], (double)t / PAIRS, simgpu_calls().all - before.all,
		       PAIRS);
	}
	swapper_end();
}

/* ---- a driver that fails ---- */

static CUresult fail_create(const char *call)
{
	return strcmp(call, "cuMemCreate") == 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

/* What is not a lack of memory gets no better by waiting, and is not told as one. */
static void an_error_is_not_waited_for(void)
{
	uint64_t start;
	CUdeviceptr p;

	open_on(GPU);
	simgpu_intercept(fail_create);
	start = test_now();
	CHECK(cuMemAlloc_v2(&p, 64 * MIB) != CUDA_SUCCESS);
	CHECK(cuMemAllocAsync(&p, 64 * MIB, streams[0]) != CUDA_SUCCESS);
	CHECK(test_now() - start < 20 * 1000000000ull);
	simgpu_intercept(NULL);
	CHECK(swapper_seen().stuck_memory == 0);
	CU(cuMemAlloc_v2(&p, 64 * MIB));
	EVENTUALLY(swapper_seen().resident >= 64 * MIB && swapper_seen().resident < 128 * MIB);
	swapper_end();
}

static const char *failing; /* the call, when it is made for the time that countdown says */
static atomic_int countdown;

static CUresult fail_one(const char *call)
{
	return strcmp(call, failing) == 0 && atomic_fetch_sub(&countdown, 1) == 1 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static void allocate_and_free(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc rw = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle h = 0;
	CUdeviceptr p;

	if (cuMemAlloc_v2(&p, 200 * MIB) == CUDA_SUCCESS)
		CU(cuMemFree_v2(p));
	for (int i = 0; i < 2; i++)
		if (cuMemAllocAsync(&p, 72 * MIB, streams[0]) == CUDA_SUCCESS)
			CU(cuMemFreeAsync(p, streams[0]));
	if (cuMemAddressReserve(&p, 64 * MIB, 0, 0, 0) != CUDA_SUCCESS)
		return;
	if (cuMemCreate(&h, 64 * MIB, &prop, 0) == CUDA_SUCCESS) {
		if (cuMemMap(p, 64 * MIB, 0, h, 0) == CUDA_SUCCESS) {
			(void)cuMemSetAccess(p, 64 * MIB, &rw, 1);
			if (cuMemUnmap(p, 64 * MIB) != CUDA_SUCCESS)
				CU(cuMemUnmap(p, 64 * MIB));
		}
		CU(cuMemRelease(h));
	}
	CU(cuMemAddressFree(p, 64 * MIB));
}

/* Whichever call of the driver fails, nothing is lost by it. */
static void no_failure_leaks(void)
{
	static const char *const calls[] = { "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease",
					     "cuEventRecordWithFlags" };
	CUdeviceptr p;
	uint64_t before;

	open_on(GPU);
	allocate_and_free();
	CU(cuMemPoolTrimTo(pool, 0));
	CU(cuCtxSynchronize());
	before = used();
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		for (int n = 1; n <= 8; n++) {
			failing = calls[i];
			atomic_store(&countdown, n);
			simgpu_intercept(fail_one);
			allocate_and_free();
			simgpu_intercept(NULL);
			CU(cuCtxSynchronize());
			CU(cuMemPoolTrimTo(pool, 0));
			CHECK(n > 1 || atomic_load(&countdown) <= 0); /* it was made */
			CHECK(used() == before);
		}
	CU(cuMemAlloc_v2(&p, GPU - 32 * MIB));
	swapper_end();
}

/* Memory that moves arrives as it was, whichever call fails on the way, and the GPU is had again. */
static void no_failure_spoils_what_moves(void)
{
	static const char *const calls[] = { "copy", "cuMemCreate", "cuMemMap", "cuMemSetAccess",
					     "cuMemUnmap", "cuMemRelease", "cuEventRecordWithFlags", "event_watch" };
	enum { PIECES = 2 };
	CUdeviceptr p[PIECES];

	open_on(GPU);
	for (int i = 0; i < PIECES; i++) {
		CU(cuMemAlloc_v2(&p[i], 48 * MIB));
		fill_part(p[i], 48 * MIB, (uint64_t)i, NULL);
	}
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		for (int n = 1; n <= 5; n += 2) { /* out, and in */
			failing = calls[i];
			atomic_store(&countdown, n);
			CU(cuCtxSynchronize());
			simgpu_intercept(fail_one);
			swapper_room(1);
			swapper_withhold(true);
			EVENTUALLY(!swapper_seen().holder && swapper_seen().resident == swapper_seen().fixed);
			swapper_room(0);
			swapper_withhold(false);
			for (int k = 0; k < PIECES; k++)
				check_part(p[k], 48 * MIB, (uint64_t)k, NULL);
			simgpu_intercept(NULL);
			CHECK(n > 1 || atomic_load(&countdown) <= 0); /* it was made */
			faultless();
		}
	swapper_end();
}

static atomic_uint copies;

static CUresult fail_copies(const char *call)
{
	if (strcmp(call, "copy") != 0)
		return CUDA_SUCCESS;
	return atomic_fetch_add(&copies, 1) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS; /* the first is that of `wrong` */
}

/* The mover may read it, for a time. */
static void closed_memory_that_stays_is_closed(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc a = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle h;
	CUdeviceptr p;

	open_on(GPU);
	CU(cuMemAddressReserve(&p, 64 * MIB, 0, 0, 0));
	CU(cuMemCreate(&h, 64 * MIB, &prop, 0));
	CU(cuMemMap(p, 64 * MIB, 0, h, 0));
	CU(cuMemSetAccess(p, 64 * MIB, &a, 1));
	CU(cuMemsetD8_v2(p, 1, 8));
	CU(cuCtxSynchronize());
	a.flags = 0; /* nobody has access */
	CU(cuMemSetAccess(p, 64 * MIB, &a, 1));
	CHECK(cuMemsetD8_v2(p, 2, 8) != CUDA_SUCCESS);
	simgpu_intercept(fail_copies);
	swapper_room(1);
	swapper_withhold(true);
	EVENTUALLY(atomic_load(&copies) > 2);
	swapper_room(0);
	simgpu_intercept(NULL);
	swapper_withhold(false);
	CU(cuMemsetD8_v2(wrong, 0, 8)); /* the gate is open again */
	CHECK(cuMemsetD8_v2(p, 3, 8) != CUDA_SUCCESS);
	swapper_end();
}

/* A pool that the driver does not know gives no memory. */
static void a_pool_that_is_gone_is_empty(void)
{
	CUmemPoolProps props = { .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemoryPool own;
	CUdeviceptr p;

	open_on(GPU);
	CU(cuMemPoolCreate(&own, &props));
	CU(cuMemAllocFromPoolAsync(&p, 32 * MIB, own, streams[0]));
	CU(cuMemFreeAsync(p, streams[0]));
	CU(cuMemPoolDestroy(own));
	CHECK(cuMemAllocFromPoolAsync(&p, 32 * MIB, own, streams[0]) != CUDA_SUCCESS);
	swapper_end();
}

struct mapping {
	CUdeviceptr p;
	CUmemGenericAllocationHandle h;
};

static void *map_it(void *arg)
{
	const struct mapping *m = arg;

	CU(cuMemMap(m->p, 64 * MIB, 0, m->h, 0));
	return NULL;
}

/* Memory is unmapped while the thread that maps it waits for room. */
static void what_is_unmapped_meanwhile_is_freed(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	struct mapping m;
	pthread_t thread;
	uint64_t before;

	open_on(48 * MIB);
	CU(cuMemAddressReserve(&m.p, 64 * MIB, 0, 0, 0));
	before = used();
	swapper_withhold(true);
	EVENTUALLY(!swapper_seen().holder);
	CU(cuMemCreate(&m.h, 64 * MIB, &prop, 0)); /* nowhere, as the GPU is not held */
	swapper_withhold(false);
	CU(cuMemsetD8_v2(wrong, 0, 8));
	CHECK(pthread_create(&thread, NULL, map_it, &m) == 0);
	while (cuMemUnmap(m.p, 64 * MIB) != CUDA_SUCCESS)
		nap_ms(1);
	CHECK(pthread_join(thread, NULL) == 0);
	CU(cuMemRelease(m.h));
	CHECK(used() == before);
	swapper_end();
}

/* ---- what is told of it ---- */

/* The shim's: a sanitized program has the shim inside, and no dlsym that leads to it. */
int nvmlDeviceGetMemoryInfo(void *device, void *memory) __attribute__((weak));

static uint64_t nvml_used(void)
{
	struct { unsigned long long total, free, used; } m = { 0 };
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *dev;

	CHECK(nvml);
	CHECK(((int (*)(void))dlsym(nvml, "nvmlInit_v2"))() == 0);
	CHECK(((int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &dev) == 0);
	CHECK(nvmlDeviceGetMemoryInfo && nvmlDeviceGetMemoryInfo(dev, &m) == 0);
	return m.used;
}

/* What is kept for reuse is not in use. */
static void nvml_agrees_on_what_is_kept(void)
{
	size_t left, total;
	CUdeviceptr p;

	open_on(GPU);
	threshold(UINT64_MAX);
	p = get(300 * MIB, streams[0]);
	CHECK(nvml_used() >= 300 * MIB);
	CU(cuMemFreeAsync(p, streams[0]));
	CU(cuCtxSynchronize());
	CHECK(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) >= 300 * MIB);
	CU(cuMemGetInfo_v2(&left, &total));
	CHECK(total - left < 300 * MIB);
	EVENTUALLY(nvml_used() == total - left);
	swapper_end();
}

/* ---- contexts ---- */

/* A library takes and gives back the primary context, beside a context of the program's own. */
static void the_primary_context_takes_no_pool_along(void)
{
	CUcontext primary;
	CUdeviceptr p, q, used;

	open_on(GPU);
	p = get(40 * MIB, streams[0]);
	fill_part(p, 40 * MIB, 5, streams[0]);
	used = get(60 * MIB, streams[0]);
	CU(cuCtxSynchronize());
	run(300 * 1000000ull, streams[0]);
	CU(cuMemFreeAsync(used, streams[0]));
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	CU(cuDevicePrimaryCtxRelease_v2(0));
	q = get(60 * MIB, streams[1]);
	CHECK(q != used || cuStreamQuery(streams[0]) == CUDA_SUCCESS); /* not while the kernel runs */
	check_part(p, 40 * MIB, 5, streams[0]);
	CU(cuMemFreeAsync(p, streams[0]));
	faultless();
	swapper_end();
}

/* Also the last one of the process: the driver keeps what pools have, bytes and all. */
static void pools_outlive_the_primary_context(void)
{
	struct swapper_config c = { .gpu = 96 * MIB, .arena = 64 * MIB, .quantum_ms = 30 };
	CUresult (*const ends[])(CUdevice) = { cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxRelease_v2 };
	unsigned char byte = 0;
	CUcontext primary;
	CUdeviceptr p, small;

	schedule(c);
	CU(cuInit(0));
	CU(cuDevicePrimaryCtxRetain(&primary, 0));
	CU(cuCtxSetCurrent(primary));
	CU(cuMemAllocAsync(&p, 4 * MIB, NULL));
	CU(cuMemAllocAsync(&small, 1000, NULL));
	CU(cuMemsetD8_v2(p, 0x5a, 4 * MIB));
	CU(cuMemsetD8_v2(small, 0x5a, 1000));
	CU(cuDeviceGetDefaultMemPool(&pool, 0));
	for (int i = 0; i < 4; i++) {
		CU(cuCtxSynchronize());
		if (i >= 2) { /* while it is in the arena */
			swapper_withhold(true);
			swapper_room(1);
			EVENTUALLY(swapper_away() >= 4 * MIB);
			swapper_room(0);
			swapper_withhold(false);
		}
		CU(ends[i % 2](0));
		CU(cuDevicePrimaryCtxRetain(&primary, 0));
		CU(cuCtxSetCurrent(primary));
		CU(cuMemcpyDtoH_v2(&byte, p + 4 * MIB - 1, 1));
		CHECK(byte == 0x5a);
		CU(cuMemcpyDtoH_v2(&byte, small + 999, 1));
		CHECK(byte == 0x5a);
		CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) >= 4 * MIB);
	}
	CU(cuMemFreeAsync(p, NULL));
	CU(cuMemFreeAsync(small, NULL));
	CU(cuCtxSynchronize());
	CHECK(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
	swapper_end();
}

/* Frees in a stream, on a thread without a current context: legal, the stream says it. */
static void frees_without_a_context(void)
{
	CUdeviceptr p[32];
	CUevent done;

	open_on(GPU);
	CU(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
	for (int i = 0; i < 32; i++)
		p[i] = get(100 * MIB, streams[0]);
	CU(cuCtxSetCurrent(NULL));
	CHECK(cuMemFreeAsync(p[0], NULL) == CUDA_ERROR_INVALID_CONTEXT);
	for (int i = 0; i < 32; i++)
		CU(cuMemFreeAsync(p[i], streams[0]));
	CU(cuCtxSetCurrent(ctx));
	CU(cuEventRecord(done, streams[0]));
	CU(cuEventSynchronize(done));
	for (int i = 0; i < 32; i++)
		p[i] = get(100 * MIB + 4 * MIB, streams[1]);
	swapper_end();
}

/* Frees in the stream of one context, while another one is current. */
static void frees_from_another_context(void)
{
	CUdeviceptr p[32];
	CUcontext second;
	CUevent done;

	open_on(GPU);
	CU(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
	for (int i = 0; i < 32; i++)
		p[i] = get(100 * MIB, streams[0]);
	CU(cuEventRecord(done, streams[0]));
	CU(cuCtxCreate_v2(&second, 0, 0));
	for (int i = 0; i < 32; i++)
		CU(cuMemFreeAsync(p[i], streams[0]));
	CU(cuCtxDestroy_v2(second));
	CU(cuCtxSetCurrent(ctx));
	CU(cuEventRecord(done, streams[0]));
	CU(cuEventSynchronize(done));
	for (int i = 0; i < 32; i++) /* from another stream: the first has passed its frees */
		p[i] = get(100 * MIB + 4 * MIB, streams[1]);
	swapper_end();
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(steps_reach_a_steady_state),
	CASE(a_loop_looks_at_nothing),
	CASE(nothing_is_released_between_synchronisations),
	CASE(pools_tell_what_they_have),
	CASE(pools_reserve_as_the_driver_does),
	CASE(trimming_spares_what_is_in_use),
	CASE(what_is_kept_makes_way),
	CASE(a_busy_stream_gives_back),
	CASE(a_single_free_gives_back),
	CASE(an_eviction_spoils_no_stream),
	CASE(a_stream_that_waits_for_the_allocation),
	CASE(another_tenant_gets_what_is_kept),
	CASE(what_is_freed_is_had_again),
	CASE(any_sequence_keeps_the_order_of_streams),
	CASE(any_sequence_beside_another_tenant),
	CASE(streams_come_and_go),
	CASE(a_stream_ends_in_its_own_free),
	CASE(threads_come_and_go),
	CASE(threads_share_a_pool),
	CASE(pools_and_contexts_end),
	CASE(an_error_is_not_waited_for),
	CASE(no_failure_leaks),
	CASE(no_failure_spoils_what_moves),
	CASE(closed_memory_that_stays_is_closed),
	CASE(what_is_unmapped_meanwhile_is_freed),
	CASE(a_pool_that_is_gone_is_empty),
	CASE(nvml_agrees_on_what_is_kept),
	CASE(the_primary_context_takes_no_pool_along),
	CASE(pools_outlive_the_primary_context),
	CASE(frees_without_a_context),
	CASE(frees_from_another_context),
	CASE(who_waits_for_a_fill_is_woken),
};

int main(int argc, char **argv)
{
	self = argv[0];
	if (argc == 4 && strcmp(argv[1], "other") == 0)
		return other((uint64_t)atoll(argv[2]), atoi(argv[3]));
	if (argc == 2 && strcmp(argv[1], "reserves") == 0)
		return reserves();
	if (argc == 2 && strcmp(argv[1], "cost") == 0)
		return cost(), 0;
	if (argc == 3)
		random_state += (uint64_t)atoll(argv[2]);
	return run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
