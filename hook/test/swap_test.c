// SPDX-License-Identifier: Apache-2.0
/*
 * swap_test.c: memory that leaves the simulated GPU and comes back. Run with the
 * shim preloaded; one case per process, "" lists them. The process itself is
 * the scheduler and the judge; tenants are processes of their own.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "packet.h"
#include "tenant.h"

#define GPU (96 * MIB)

static const char *self;

/* ---- a tenant ---- */

static void get(struct buffer *b, uint64_t bytes)
{
	CUdeviceptr base;
	size_t size;

	b->bytes = bytes;
	CU(cuMemAlloc_v2(&b->p, bytes));
	CHECK(b->p % 512 == 0);
	CU(cuMemGetAddressRange_v2(&base, &size, b->p + bytes / 2));
	CHECK(base == b->p && size == bytes);
}

static void put(struct buffer *b)
{
	CU(cuMemFree_v2(b->p));
	CHECK(cuMemFree_v2(b->p) == CUDA_ERROR_INVALID_VALUE);
}

static uint64_t some_size(uint64_t most)
{
	switch (rnd(4)) {
	case 0:
		return 8 + rnd(4096);
	case 1:
		return 8 + rnd(MIB);
	default:
		return 2 * MIB + rnd(most);
	}
}

enum { BUFFERS = 8 }; /* each is rounded up to 2 MiB on the GPU */

/* Fills `mib` with buffers, and works and reallocates for so many rounds. */
static volatile sig_atomic_t told_to_end;

static void on_term(int sig)
{
	(void)sig;
	told_to_end = 1;
}

static int tenant(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer b[BUFFERS];
	uint64_t sum = 0;
	unsigned n = 0;

	random_state = seed * 0x9e3779b97f4a7c15ull + 1;
	signal(SIGTERM, on_term);
	tenant_open();
	while (n < BUFFERS && sum < mib * MIB) {
		uint64_t size = some_size(mib * MIB / 8);

		if (sum + size > mib * MIB || n == BUFFERS - 1)
			size = mib * MIB - sum;
		get(&b[n], size < 8 ? 8 : size);
		run_fill(&b[n], seed + n, NULL);
		sum += b[n++].bytes;
	}
	for (unsigned i = 0; i < rounds && !told_to_end; i++) {
		unsigned k = (unsigned)rnd(n);

		work(10);
		verify(&b[k]);
		run_fill(&b[k], rnd(1ull << 60), NULL);
		if (rnd(4) == 0) {
			uint64_t size = b[k].bytes;

			put(&b[k]);
			get(&b[k], size);
			run_fill(&b[k], rnd(1ull << 60), NULL);
		}
		verify(&b[rnd(n)]);
	}
	for (unsigned i = 0; i < n; i++)
		verify(&b[i]);
	for (unsigned i = 0; i < n; i++)
		put(&b[i]);
	return 0;
}

/* Its kernels are longer than a turn. */
static int tenant_long(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer b = { 0, mib * MIB, 0 };

	tenant_open();
	CU(cuMemAlloc_v2(&b.p, b.bytes));
	for (unsigned i = 0; i < rounds; i++) {
		run_fill(&b, seed + i, NULL);
		work(200);
		verify(&b);
	}
	return 0;
}

/* A graph that was made before its memory left replays when it is back, and one
 * may be made at any time. */
static int tenant_graph(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer a, b;
	CUgraphExec exec = NULL;
	CUstream s;

	random_state = seed;
	tenant_open();
	get(&a, mib * MIB / 2);
	get(&b, mib * MIB / 2);
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	for (unsigned i = 0; i < rounds; i++) {
		CUgraph g;

		if (i % 4 == 0) {
			uint64_t n = a.bytes;
			void *params[] = { &a.p, &n, &seed };

			if (exec)
				CU(cuGraphExecDestroy(exec));
			a.seed = ++seed;
			CU(cuStreamBeginCapture_v2(s, 0));
			CU(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
			nap_ms(60); /* a revoke in the middle */
			CU(cuMemcpyDtoDAsync_v2(b.p, a.p, a.bytes, s));
			CU(cuStreamEndCapture(s, &g));
			CU(cuGraphInstantiateWithFlags(&exec, g, 0));
			CU(cuGraphDestroy(g));
		}
		run_fill(&a, 1, NULL);
		run_fill(&b, 2, NULL);
		CU(cuCtxSynchronize());
		work(20);
		CU(cuGraphLaunch(exec, s));
		CU(cuStreamSynchronize(s));
		a.seed = b.seed = seed;
		verify(&a);
		work(20);
		verify(&b);
	}
	put(&a);
	put(&b);
	return 0;
}

/* What a context had is gone with it, wherever it was. */
static int tenant_contexts(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer a, b;
	CUcontext other;
	size_t left, total;

	random_state = seed;
	tenant_open();
	get(&a, mib * MIB / 2);
	run_fill(&a, seed, NULL);
	for (unsigned i = 0; i < rounds; i++) {
		CU(cuCtxCreate_v2(&other, 0, 0));
		get(&b, mib * MIB / 2);
		CU(cuMemsetD8_v2(b.p, 7, b.bytes));
		CU(cuCtxSynchronize());
		CU(cuMemAlloc_v2(&b.p, 100));
		nap_ms(50);
		CU(cuCtxDestroy_v2(other));
		CHECK(cuMemFree_v2(b.p) == CUDA_ERROR_INVALID_VALUE);
		CU(cuDevicePrimaryCtxRetain(&other, 0));
		CU(cuCtxPushCurrent_v2(other));
		get(&b, mib * MIB / 2);
		CU(cuMemsetD8_v2(b.p, 8, b.bytes));
		nap_ms(50);
		CU(cuDevicePrimaryCtxReset_v2(0));
		CU(cuCtxSetCurrent(ctx));
		CHECK(cuMemFree_v2(b.p) == CUDA_ERROR_INVALID_VALUE);
		CU(cuMemGetInfo_v2(&left, &total));
		CHECK(total - left <= a.bytes + 16 * MIB);
		work(20);
		verify(&a);
	}
	put(&a);
	return 0;
}

/* Memory that two processes of a tenant share stays where both see it. */
static int tenant_ipc(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer small, large, own, *b[] = { &small, &large };
	CUipcMemHandle handle;
	int to[2], from[2];
	pid_t child;
	char c;

	random_state = seed;
	CHECK(pipe(to) == 0 && pipe(from) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) { /* checks what it gets, and answers with something else */
		close(to[1]);
		tenant_open();
		for (struct buffer x; read(to[0], &x, sizeof(x)) == sizeof(x);) {
			CUdeviceptr again;
			CUcontext ctx, owner;

			CHECK(read(to[0], &handle, sizeof(handle)) == sizeof(handle));
			CU(cuIpcOpenMemHandle_v2(&x.p, handle, 1));
			CU(cuIpcOpenMemHandle_v2(&again, handle, 1));
			CHECK(again == x.p);
			CU(cuIpcCloseMemHandle(again));
			CU(cuCtxGetCurrent(&ctx));
			CU(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, x.p));
			CHECK(ctx && owner == ctx);
			owner = NULL;
			CU(cuPointerGetAttributes(1, &(int){ CU_POINTER_ATTRIBUTE_CONTEXT }, &(void *){ &owner }, x.p));
			CHECK(owner == ctx);
			verify(&x);
			run_fill(&x, x.seed + 1, NULL);
			CU(cuCtxSynchronize());
			CU(cuIpcCloseMemHandle(x.p));
			CHECK(cuMemcpyDtoH_v2(&c, x.p, 1) != CUDA_SUCCESS);
			CHECK(write(from[1], "", 1) == 1);
		}
		_exit(0);
	}
	close(to[0]);
	tenant_open();
	get(&small, 5000);
	get(&large, mib * MIB / 8);
	get(&own, mib * MIB / 2);
	run_fill(&own, 5, NULL);
	for (unsigned i = 0; i < 2 * rounds; i++) {
		struct buffer *x = b[i % 2];

		run_fill(x, 100 * i, NULL);
		CU(cuCtxSynchronize());
		nap_ms(30);
		CU(cuIpcGetMemHandle(&handle, x->p));
		CHECK(write(to[1], x, sizeof(*x)) == sizeof(*x));
		CHECK(write(to[1], &handle, sizeof(handle)) == sizeof(handle));
		CHECK(read(from[0], &c, 1) == 1);
		x->seed++;
		verify(x);
		verify(&own);
	}
	close(to[1]);
	CHECK(waitpid(child, NULL, 0) == child);
	return 0;
}

/* The descriptor of the socket that serves handles. */
static int ipc_socket(void)
{
	for (int fd = 3; fd < 1024; fd++) {
		struct sockaddr_un a;
		socklen_t n = sizeof(a);

		if (getsockname(fd, (struct sockaddr *)&a, &n) == 0 && a.sun_family == AF_UNIX &&
		    n > 12 && memcmp(a.sun_path + 1, "nvshare-ipc-", 12) == 0)
			return fd;
	}
	CHECK(!"no socket");
	return -1;
}

/* Whether the thread that serves handles waits for somebody to serve. */
static bool serves(void)
{
	DIR *d = opendir("/proc/self/task");
	struct dirent *e;
	bool waits = false;

	CHECK(d);
	while ((e = readdir(d))) {
		char path[320], line[64] = "";
		FILE *f;

		snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
		f = fopen(path, "r");
		if (f && fgets(line, sizeof(line), f) && strcmp(line, "nvshare-ipc\n") == 0) {
			fclose(f);
			snprintf(path, sizeof(path), "/proc/self/task/%s/syscall", e->d_name);
			f = fopen(path, "r");
			waits = f && fgets(line, sizeof(line), f) && atoi(line) == SYS_accept4;
		}
		if (f)
			fclose(f);
	}
	closedir(d);
	return waits;
}

/* The process that has forked becomes a tenant with memory of its own. reads, writes: the child's ends of pipes. */
static void own_filled(struct buffer *b, uint64_t mib, uint64_t seed, int reads, int writes)
{
	close(reads);
	close(writes);
	tenant_open();
	get(b, mib * MIB);
	run_fill(b, seed, NULL);
}

/* Memory that is open is opened once more, where another GPU is current. */
static int tenant_ipc_both(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUipcMemHandle handle;
	struct buffer b = { 0 };
	int to[2], from[2];
	pid_t child;
	char c;

	(void)rounds;
	CHECK(pipe(to) == 0 && pipe(from) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CUdeviceptr again;
		CUcontext other;

		close(to[1]);
		tenant_open();
		CHECK(read(to[0], &handle, sizeof(handle)) == sizeof(handle));
		CU(cuIpcOpenMemHandle_v2(&b.p, handle, 1));
		CU(cuCtxCreate_v2(&other, 0, 1));
		CHECK(setenv("NVSHARE_SIMGPU_PEERS", "refused", 1) == 0);
		CHECK(cuIpcOpenMemHandle_v2(&again, handle, 1) != CUDA_SUCCESS); /* it would not reach it */
		CHECK(unsetenv("NVSHARE_SIMGPU_PEERS") == 0);
		CU(cuIpcOpenMemHandle_v2(&again, handle, 1));
		CHECK(again == b.p);
		CU(cuIpcCloseMemHandle(again));
		CU(cuMemcpyDtoH_v2(&c, b.p, 1));
		CU(cuIpcCloseMemHandle(b.p)); /* as often as it was opened */
		CHECK(cuMemcpyDtoH_v2(&c, b.p, 1) != CUDA_SUCCESS);
		CHECK(write(from[1], "", 1) == 1);
		_exit(0);
	}
	own_filled(&b, mib, seed, to[0], from[1]);
	CU(cuCtxSynchronize());
	CU(cuIpcGetMemHandle(&handle, b.p));
	CHECK(write(to[1], &handle, sizeof(handle)) == sizeof(handle));
	CHECK(read(from[0], &c, 1) == 1);
	CHECK(went_well(child));
	put(&b);
	return 0;
}

/* As after closefrom(3): the number is soon that of a socket of the application, and later of nothing. */
static int tenant_ipc_taken(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	CUipcMemHandle handle;
	struct buffer b = { 0 };
	int to[2], from[2], mine, peer, fd = -1;
	pid_t child;
	char c;

	CHECK(pipe(to) == 0 && pipe(from) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(to[1]);
		tenant_open();
		while (read(to[0], &handle, sizeof(handle)) == sizeof(handle)) {
			CU(cuIpcOpenMemHandle_v2(&b.p, handle, 1));
			CU(cuIpcCloseMemHandle(b.p));
			CHECK(write(from[1], "", 1) == 1);
		}
		_exit(0);
	}
	own_filled(&b, mib, seed, to[0], from[1]);
	CU(cuIpcGetMemHandle(&handle, b.p));
	mine = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
	peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
	/* An abstract name that the kernel chooses. */
	CHECK(bind(mine, (struct sockaddr *)&a, sizeof(sa_family_t)) == 0 && listen(mine, 4) == 0);
	CHECK(getsockname(mine, (struct sockaddr *)&a, &(socklen_t){ sizeof(a) }) == 0);
	CHECK(connect(peer, (struct sockaddr *)&a, sizeof(sa_family_t) + 6) == 0);
	for (unsigned i = 0; i < rounds; i++) {
		EVENTUALLY(serves());
		if (i == 0) {
			fd = ipc_socket();
			CHECK(dup2(mine, fd) == fd);
		} else if (i == 2) {
			CHECK(accept(fd, NULL, NULL) >= 0); /* nobody else took it */
			close(ipc_socket());
		}
		CHECK(write(to[1], &handle, sizeof(handle)) == sizeof(handle));
		CHECK(read(from[0], &c, 1) == 1);
	}
	close(to[1]);
	CHECK(waitpid(child, NULL, 0) == child);
	return 0;
}

/* Memory is freed while another process has it open, and other memory is shared in its place. */
static int tenant_ipc_replaced(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer b = { 0 };
	CUipcMemHandle handle;
	int to[2], from[2];
	pid_t child;
	char c;

	CHECK(pipe(to) == 0 && pipe(from) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CUdeviceptr first, again, next;

		close(to[1]);
		tenant_open();
		CHECK(read(to[0], &handle, sizeof(handle)) == sizeof(handle));
		CU(cuIpcOpenMemHandle_v2(&first, handle, 1));
		CHECK(write(from[1], "", 1) == 1);
		CHECK(read(to[0], &b, sizeof(b)) == sizeof(b));
		CHECK(cuIpcOpenMemHandle_v2(&again, handle, 1) != CUDA_SUCCESS || again == first);
		CHECK(read(to[0], &handle, sizeof(handle)) == sizeof(handle));
		CU(cuIpcOpenMemHandle_v2(&next, handle, 1));
		b.p = next;
		verify(&b);
		CU(cuIpcCloseMemHandle(next));
		CHECK(write(from[1], "", 1) == 1);
		_exit(0);
	}
	own_filled(&b, mib, seed, to[0], from[1]);
	CU(cuCtxSynchronize());
	for (unsigned i = 0; i < rounds; i++) {
		CUdeviceptr was = b.p;

		CU(cuIpcGetMemHandle(&handle, b.p));
		CHECK(!i || write(to[1], &b, sizeof(b)) == sizeof(b));
		CHECK(write(to[1], &handle, sizeof(handle)) == sizeof(handle));
		CHECK(read(from[0], &c, 1) == 1);
		if (i + 1 == rounds)
			break;
		put(&b);
		get(&b, mib * MIB);
		CHECK(b.p == was);
		run_fill(&b, seed + 1 + i, NULL);
		CU(cuCtxSynchronize());
	}
	CHECK(went_well(child));
	return 0;
}

/* Serves a handle at a socket of the test, which takes so many that wait. Returns the socket. */
static int serve_handle(CUipcMemHandle *handle, struct sockaddr_un *a, socklen_t *n, uint64_t mib, int backlog,
			uint64_t name)
{
	uint64_t ticket[8] = { 0x3143504948534e56ull /* of ipc.c */, name, 0, 1ull << 40, mib * MIB, 0, mib * MIB, 1 };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	*a = (struct sockaddr_un){ .sun_family = AF_UNIX };
	*n = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
			 (size_t)sprintf(a->sun_path + 1, "nvshare-ipc-%016llx", (unsigned long long)name));
	CHECK(bind(fd, (struct sockaddr *)a, *n) == 0 && listen(fd, backlog) == 0);
	memcpy(handle, ticket, sizeof(*handle));
	return fd;
}

/* The process of the handle is stopped, and its socket takes nobody any more. */
static int tenant_ipc_stopped(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct sockaddr_un a;
	CUipcMemHandle handle;
	CUdeviceptr p;
	socklen_t n;
	int fd;

	serve_handle(&handle, &a, &n, mib, (int)rounds, seed);
	do
		fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
	while (connect(fd, (struct sockaddr *)&a, n) == 0);
	CHECK(errno == EAGAIN);
	tenant_open();
	CHECK(cuIpcOpenMemHandle_v2(&p, handle, 1) != CUDA_SUCCESS);
	return 0;
}

/* Answers each question with descriptors in a packet of the wrong size. */
static void *answer_wrong(void *listener)
{
	for (int fd; (fd = accept(*(int *)listener, NULL, NULL)) >= 0; close(fd)) {
		char ticket[64];

		CHECK(recv(fd, ticket, sizeof(ticket), 0) == sizeof(ticket));
		CHECK(nvs_packet_send(fd, "x", 1, (int[]){ fd, fd }, 2));
	}
	return NULL;
}

/* The process of the handle answers with nonsense. */
static int tenant_ipc_wrong(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct sockaddr_un a;
	CUipcMemHandle handle;
	unsigned before;
	CUdeviceptr p;
	socklen_t n;
	pthread_t t;
	int fd;

	tenant_open();
	fd = serve_handle(&handle, &a, &n, mib, 4, seed);
	CHECK(pthread_create(&t, NULL, answer_wrong, &fd) == 0);
	before = entries("/proc/self/fd");
	for (unsigned i = 0; i < rounds; i++)
		CHECK(cuIpcOpenMemHandle_v2(&p, handle, 1) != CUDA_SUCCESS);
	CHECK(entries("/proc/self/fd") <= before + 1); /* the server's own last one may be open */
	return 0;
}

/* Stream-ordered memory: reused in its stream at once, by others when it is done. */
static int tenant_async(uint64_t mib, unsigned rounds, uint64_t seed)
{
	uint64_t ns = 200000000, zero = 0, size = mib * MIB / 4;
	void *params[] = { &ns, &zero };
	struct buffer keep, a, b;
	CUmemoryPool pool;
	CUdeviceptr p;
	size_t left, total;
	CUstream s[2];

	random_state = seed;
	tenant_open();
	CU(cuDeviceGetDefaultMemPool(&pool, 0));
	CU(cuStreamCreate(&s[0], CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&s[1], CU_STREAM_NON_BLOCKING));
	keep.bytes = mib * MIB / 2;
	CU(cuMemAllocFromPoolAsync(&keep.p, keep.bytes, pool, s[0]));
	CU(cuStreamSynchronize(s[0]));
	run_fill(&keep, seed, NULL);
	for (unsigned i = 0; i < rounds; i++) {
		a.bytes = b.bytes = i % 2 ? size : 3000;
		CU(cuMemAllocAsync(&a.p, a.bytes, s[0]));
		run_fill(&a, i, NULL);
		CU(cuCtxSynchronize());
		CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s[0], params, NULL));
		CU(cuMemFreeAsync(a.p, s[0]));
		CHECK(cuMemFreeAsync(a.p, s[0]) == CUDA_ERROR_INVALID_VALUE);
		CU(cuMemAllocAsync(&p, a.bytes - 8, s[0]));
		CHECK(p == a.p);
		CU(cuMemFreeAsync(p, s[0]));
		CU(cuMemAllocAsync(&b.p, b.bytes, s[1]));
		CHECK(b.p != a.p || cuStreamQuery(s[0]) == CUDA_SUCCESS);
		CU(cuStreamSynchronize(s[1]));
		run_fill(&b, i + 1, NULL);
		work(20);
		verify(&b);
		verify(&keep);
		if (i % 3)
			CU(cuMemFreeAsync(b.p, s[1]));
		else
			CU(cuMemFree_v2(b.p)); /* may be mixed */
	}
	CU(cuMemFreeAsync(keep.p, s[0]));
	CU(cuCtxSynchronize());
	for (int ms = 0; ms < PATIENCE_MS; ms++) {
		CU(cuMemGetInfo_v2(&left, &total));
		if (total - left <= 8 * MIB)
			return 0;
		nap_ms(1);
	}
	CHECK(!"what was freed comes back");
	return 1;
}

/* Whether the second GPU has access to memory of the first. */
static bool open_to_other(CUdeviceptr p)
{
	CUmemLocation other = { CU_MEM_LOCATION_TYPE_DEVICE, 1 };
	unsigned long long flags = 0;

	CU(cuMemGetAccess(&flags, &other, p));
	return flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

/* With a second GPU the memory stays, and copies between the two find it. */
static int spread(uint64_t mib, unsigned rounds, uint64_t seed, bool green)
{
	struct buffer a, shared;
	CUipcMemHandle handle;
	CUdeviceptr there;
	CUcontext other;
	CUgreenCtx part;
	char one = 0;

	random_state = seed;
	tenant_open();
	get(&a, mib * MIB / 2);
	run_fill(&a, seed, NULL);
	get(&shared, 4 * MIB);
	CU(cuIpcGetMemHandle(&handle, shared.p));
	CU(cuMemsetD8_v2(a.p, 7, 4096));
	CU(cuCtxSynchronize());
	nap_ms(200);
	if (green) {
		CU(cuGreenCtxCreate(&part, NULL, 1, 1));
		CU(cuCtxFromGreenCtx(&other, part));
		CU(cuCtxSetCurrent(other));
	} else {
		CU(cuCtxCreate_v2(&other, 0, 1));
	}
	CHECK(open_to_other(a.p));
	CHECK(open_to_other(shared.p));
	CU(cuMemAlloc_v2(&there, 4096));
	for (unsigned i = 0; i < rounds; i++) {
		CU(cuMemcpyPeer(there, other, a.p, ctx, 4096));
		CU(cuMemcpyDtoH_v2(&one, there + 100, 1));
		CHECK(one == 7);
		CU(cuMemsetD8_v2(there, 0, 4096));
		CU(cuCtxSetCurrent(ctx));
		work(20);
		CU(cuCtxSetCurrent(other));
	}
	CU(cuMemFree_v2(there));
	put(&a);
	return 0;
}

static int tenant_spread(uint64_t mib, unsigned rounds, uint64_t seed)
{
	return spread(mib, rounds, seed, false);
}

/* The second GPU by a green context. */
static int tenant_spread_green(uint64_t mib, unsigned rounds, uint64_t seed)
{
	return spread(mib, rounds, seed, true);
}

/* Has mapped a file of this name, as if it used the library, from now on. */
static void maps(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC);

	CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
	CHECK(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) != MAP_FAILED);
	close(fd);
}

/* Works with memory that OptiX uses too, first or later. */
static int traces_rays(uint64_t mib, unsigned rounds, uint64_t seed, bool first)
{
	struct buffer a;

	if (first)
		maps("nvidia/libnvoptix.so.1");
	random_state = seed;
	tenant_open();
	get(&a, mib * MIB / 2);
	run_fill(&a, seed, NULL);
	if (!first)
		maps("nvidia/libnvoptix.so.1");
	for (unsigned i = 0; i < rounds; i++) {
		work(20);
		CU(cuMemsetD8_v2(a.p, 7, 4096));
		CU(cuCtxSynchronize());
	}
	put(&a);
	return 0;
}

static int tenant_traces_rays(uint64_t mib, unsigned rounds, uint64_t seed)
{
	return traces_rays(mib, rounds, seed, true);
}

static int tenant_traces_rays_later(uint64_t mib, unsigned rounds, uint64_t seed)
{
	return traces_rays(mib, rounds, seed, false);
}

/* What an application is told of its memory, there or not. */
static int tenant_queries(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer a;
	size_t left, total, pitch;
	CUdeviceptr p;

	(void)seed;
	tenant_open();
	get(&a, mib * MIB - 4096);
	run_fill(&a, 3, NULL);
	CU(cuMemAllocPitch_v2(&p, &pitch, 1000, 50, 4));
	CHECK(pitch == 1024);
	for (unsigned i = 0; i < rounds; i++) {
		int what[] = { CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
			       CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_HOST_POINTER };
		void *c = NULL, *host = &c;
		CUdeviceptr base;
		unsigned type = 0;
		size_t size = 0;
		void *to[] = { &c, &type, &size, &host };

		work(20);
		nap_ms(40);
		CU(cuMemGetAddressRange_v2(&base, &size, a.p + a.bytes - 1));
		CHECK(base == a.p && size == a.bytes);
		CHECK(cuMemGetAddressRange_v2(&base, &size, a.p + a.bytes) != CUDA_SUCCESS);
		CU(cuPointerGetAttributes(4, what, to, a.p + 12345));
		CHECK(c == ctx && type == CU_MEMORYTYPE_DEVICE && size == a.bytes && !host);
		CU(cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, a.p + 5));
		CHECK(base == a.p);
		CHECK(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, a.p) != CUDA_SUCCESS);
		CHECK(cuMemFree_v2(a.p + 512) == CUDA_ERROR_INVALID_VALUE);
		CU(cuMemGetInfo_v2(&left, &total));
		CHECK(total == 97 * MIB);
		CHECK(total - left >= a.bytes && total - left <= a.bytes + 8 * MIB);
	}
	verify(&a);
	put(&a);
	CU(cuMemFree_v2(p));
	return 0;
}

/* A process that nobody arbitrates, and takes what memory it can get. */
static int hog(uint64_t mib, unsigned rounds, uint64_t seed)
{
	(void)rounds;
	(void)seed;
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	return take_for_good(mib);
}

/* Its context dies while its memory is away: each call says so from then on, and none blocks. */
static int tenant_faulting(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer b;

	random_state = seed;
	tenant_open();
	get(&b, mib * MIB);
	run_fill(&b, seed, NULL);
	for (unsigned i = 0; i < rounds; i++) {
		work(10);
		verify(&b);
	}
	EVENTUALLY(swapper_away() >= mib * MIB / 4); /* the neighbour works */
	simgpu_fail();
	for (unsigned i = 0; i < 20; i++) {
		void *params[] = { &b.p, &b.bytes, &seed };

		CHECK(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL) == CUDA_ERROR_ILLEGAL_ADDRESS);
		CHECK(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
		nap_ms(10);
	}
	return 0;
}

static int told_fd = -1, go_fd = -1; /* of a tenant that ends */
static struct buffer left_behind;

/* Runs after the shim's part of exit(). */
static void end_slowly(void)
{
	char c = 0;

	if (write(told_fd, &c, 1) != 1 || read(go_fd, &c, 1) != 0)
		_exit(3);
	verify(&left_behind);
}

/* Ends, which takes long, and uses its memory once more then. */
static int tenant_ending(uint64_t mib, unsigned go, uint64_t told)
{
	go_fd = (int)go;
	told_fd = (int)told;
	if (atexit(end_slowly))
		return 2;
	tenant_open();
	get(&left_behind, mib * MIB);
	run_fill(&left_behind, 7, NULL);
	verify(&left_behind);
	return 0;
}

/* ---- tenants as processes ---- */

static pid_t start(const char *kind, uint64_t mib, unsigned rounds, unsigned seed)
{
	return start_tenant(self, kind, mib, rounds, seed);
}

static const struct swapper_config usual = { .gpu = GPU, .arena = 16 * MIB, .quantum_ms = 30 };

/* ---- cases ---- */

static void alone_nothing_moves(void)
{
	schedule(usual);
	CHECK(went_well(start("tenant", 70, 20, 1)));
	CHECK(swapper_seen().out == 0 && swapper_seen().stuck_memory == 0);
	swapper_end();
}

/* Whoever ends does not keep others from working until it has. */
static void gives_the_gpu_back(struct swapper_config config)
{
	int go[2], told[2];
	pid_t a, b;
	char c;

	schedule(config);
	CHECK(pipe2(go, O_CLOEXEC) == 0 && pipe2(told, O_CLOEXEC) == 0);
	CHECK(fcntl(go[0], F_SETFD, 0) == 0 && fcntl(told[1], F_SETFD, 0) == 0);
	a = start("ending", 4, (unsigned)go[0], (unsigned)told[1]);
	CHECK(read(told[0], &c, 1) == 1);
	b = start("tenant", 40, 5, 1);
	CHECK(went_well(b));
	close(go[1]);
	CHECK(went_well(a));
	swapper_end();
}

static void the_end_gives_the_gpu_back(void) { gives_the_gpu_back(usual); }

/* It has worked, and ends, before the frame that says which grant that was. */
static void the_end_awaits_the_grant(void)
{
	struct swapper_config c = usual;

	c.late_ms = 300;
	gives_the_gpu_back(c);
}

static void off_is_as_ever(void) { check_off(usual, self, "tenant", 50, 20, 1); }

/* More than the GPU has, by the driver's page faults. */
static void one_may_have_more_than_the_gpu(void)
{
	struct swapper_config c = usual;

	c.off = true;
	schedule(c);
	CHECK(setenv("NVSHARE_ENABLE_SINGLE_OVERSUB", "1", 1) == 0);
	CHECK(went_well(start("tenant", 150, 5, 1)));
	swapper_end();
}

static bool one_has_ended(void)
{
	siginfo_t info = { 0 };

	return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid;
}

/*
 * Rounds of a tenant that works until it is told to end. A test that awaits something of two
 * tenants must not count their rounds: where one process is slow, the other is through with its own.
 */
#define UNTIL_TOLD 1000000000u

/* Only a slow machine decides how long that takes. */
static void turns_pass(unsigned n)
{
	for (unsigned before = swapper_seen().ready; swapper_seen().ready < before + n; nap_ms(1))
		CHECK(!one_has_ended());
}

static void both_end(pid_t a, pid_t b)
{
	CHECK(kill(a, SIGTERM) == 0 && kill(b, SIGTERM) == 0);
	CHECK(went_well(a));
	CHECK(went_well(b));
}

static void two_that_do_not_fit_take_turns(void)
{
	pid_t a, b;

	schedule(usual);
	a = start("tenant", 60, UNTIL_TOLD, 1);
	b = start("tenant", 65, UNTIL_TOLD, 2);
	turns_pass(4);
	/* Later one is told that there is room while the other, which leaves, still has memory. */
	CHECK(swapper_seen().stuck_memory == 0 && swapper_seen().stuck_error == 0);
	both_end(a, b);
	CHECK(swapper_seen().stuck_error == 0);
	CHECK(swapper_seen().early == 0);
	CHECK(swapper_seen().resident_max <= GPU);
	swapper_end();
}

/* Memory of work that was cut stays until that is finished, and who needs the memory waits for that. */
static void what_was_cut_is_finished_first(void)
{
	struct swapper_config c = usual;
	pid_t a, b;

	c.grace_ms = 40; /* half of it is less than a kernel takes */
	schedule(c);
	a = start("long", 60, 2, 1);
	b = start("long", 65, 2, 2);
	CHECK(went_well(a) && went_well(b));
	CHECK(swapper_seen().cut > 0 && swapper_seen().stuck_error == 0);
	swapper_end();
}

static void four_of_three_times_the_gpu(void)
{
	pid_t t[4];

	schedule(usual);
	for (unsigned i = 0; i < 4; i++)
		t[i] = start("tenant", 70, 4, 10 + i);
	for (unsigned i = 0; i < 4; i++)
		CHECK(went_well(t[i]));
	CHECK(swapper_seen().resident_max <= GPU);
	swapper_end();
}

/* Kills one of two tenants while memory moves. */
static void killed_while(bool in)
{
	pid_t a, b;
	bool done = false;

	schedule(usual);
	a = start("tenant", 60, UNTIL_TOLD, 1);
	b = start("tenant", 65, UNTIL_TOLD, 2);
	turns_pass(3);
	for (int ms = 0; !done && ms < 20 * PATIENCE_MS; ms++) {
		struct swapper_seen s = swapper_seen();

		done = in ? s.holder == a && s.filling : s.mover == a;
		if (!done)
			nap_ms(1);
	}
	CHECK(done);
	kill(a, SIGKILL);
	CHECK(waitpid(a, NULL, 0) == a);
	nap_ms(100); /* it works alone */
	CHECK(kill(b, SIGTERM) == 0 && went_well(b));
	swapper_end();
}

static void killed_while_moving_out(void) { killed_while(false); }
static void killed_while_moving_in(void) { killed_while(true); }

static void the_scheduler_may_die_in_the_middle(void)
{
	pid_t a, b;

	schedule(usual);
	a = start("tenant", 60, UNTIL_TOLD, 1);
	b = start("tenant", 65, UNTIL_TOLD, 2);
	for (unsigned i = 0; i < 3; i++) {
		turns_pass(3);
		swapper_stop();
		swapper_start(&usual);
	}
	turns_pass(3);
	both_end(a, b);
	swapper_end();
}

static void the_arena_may_come_late(void)
{
	struct swapper_config c = usual;
	pid_t a, b;

	c.arena = 0;
	schedule(c);
	a = start("tenant", 60, UNTIL_TOLD, 1);
	b = start("tenant", 65, UNTIL_TOLD, 2);
	EVENTUALLY(swapper_seen().stuck_arena > 0);
	swapper_arena(8 * MIB);
	turns_pass(4);
	both_end(a, b);
	swapper_end();
}

static void memory_that_others_took_is_waited_for(void)
{
	pid_t a, b, c;

	schedule(usual);
	a = start("tenant", 60, UNTIL_TOLD, 1);
	b = start("tenant", 65, UNTIL_TOLD, 2);
	turns_pass(3);
	c = start("hog", 40, 0, 0);
	EVENTUALLY(swapper_seen().stuck_memory > 0);
	kill(c, SIGKILL);
	CHECK(waitpid(c, NULL, 0) == c);
	turns_pass(4);
	both_end(a, b);
	swapper_end();
}

/* A context that dies harms nobody else, and its process hears of it. */
static void a_dead_context_stays_alone(void)
{
	pid_t a, b;

	schedule(usual);
	a = start("faulting", 60, 10, 1);
	b = start("tenant", 65, UNTIL_TOLD, 2);
	CHECK(went_well(a));
	CHECK(kill(b, SIGTERM) == 0 && went_well(b));
	swapper_end();
}

/* Beside a tenant that takes its memory away, again and again. */
static void beside_another(const char *kind, uint64_t mib, unsigned rounds)
{
	pid_t a, b;

	schedule(usual);
	b = start("tenant", 60, 1000000, 2);
	EVENTUALLY(swapper_seen().resident >= 60 * MIB);
	a = start(kind, mib, rounds, 1);
	CHECK(went_well(a));
	CHECK(swapper_seen().ready > 0 && swapper_seen().out > 0);
	kill(b, SIGKILL);
	CHECK(waitpid(b, NULL, 0) == b);
	swapper_end();
}

static void graphs_replay(void) { beside_another("graph", 45, 5); }
static void contexts_come_and_go(void) { beside_another("contexts", 55, 3); }
static void processes_may_share_memory(void) { beside_another("ipc", 80, 2); }

static void an_application_takes_the_socket_of_handles(void)
{
	schedule(usual);
	CHECK(went_well(start("ipc-taken", 8, 5, 1)));
	swapper_end();
}

static void what_is_shared_anew_is_opened_anew(void)
{
	schedule(usual);
	CHECK(went_well(start("ipc-replaced", 8, 2, 1)));
	swapper_end();
}

static void a_stopped_process_stops_no_other(void)
{
	schedule(usual);
	CHECK(went_well(start("ipc-stopped", 2, 1, (unsigned)getpid())));
	swapper_end();
}

static void a_wrong_answer_leaves_no_descriptor(void)
{
	schedule(usual);
	CHECK(went_well(start("ipc-wrong", 2, 5, (unsigned)getpid())));
	swapper_end();
}

static void shared_memory_is_opened_on_both_gpus(void)
{
	schedule(usual);
	CHECK(went_well(start("ipc-both", 8, 1, 1)));
	swapper_end();
}

static void stream_ordered_memory_moves(void) { beside_another("async", 55, 6); }
static void stays(const char *kind, enum nvs_fixed by)
{
	pid_t a, b;

	schedule(usual);
	b = start("tenant", 60, 1000000, 2);
	EVENTUALLY(swapper_seen().grants > 0);
	a = start(kind, 100, 8, 1);
	/* What is fixed now leaves no room for the other. */
	EVENTUALLY(swapper_seen().fixed >= 50 * MIB);
	CHECK(swapper_seen().by == by);
	kill(b, SIGKILL);
	CHECK(waitpid(b, NULL, 0) == b);
	CHECK(went_well(a));
	swapper_end();
}

static void memory_of_several_gpus_stays(void) { stays("spread", NVS_FIXED_SEVERAL_GPUS); }
static void green_contexts_are_of_a_gpu_too(void) { stays("spread-green", NVS_FIXED_SEVERAL_GPUS); }
static void memory_that_optix_uses_stays(void) { stays("rays-later", NVS_FIXED_OPTIX); }

/* The scheduler learns it before it asks: it has promised nobody the room until then. */
static void memory_that_cannot_move_is_told_unasked(void)
{
	pid_t a;

	schedule(usual);
	a = start("rays", 100, 1000000, 1);
	EVENTUALLY(swapper_seen().fixed >= 50 * MIB);
	CHECK(swapper_seen().by == NVS_FIXED_OPTIX);
	kill(a, SIGKILL);
	CHECK(waitpid(a, NULL, 0) == a);
	swapper_end();
}

/* ---- graphs of memory that is away; the test is the tenant ---- */

typedef CUresult (*instantiate_fn)(CUgraphExec *, CUgraph);

CUresult cuGraphInstantiate(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CUresult cuGraphInstantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);

static CUresult plainly(CUgraphExec *e, CUgraph g) { return cuGraphInstantiate(e, g, NULL, NULL, 0); }
static CUresult with_log(CUgraphExec *e, CUgraph g) { return cuGraphInstantiate_v2(e, g, NULL, NULL, 0); }
static CUresult with_flags(CUgraphExec *e, CUgraph g) { return cuGraphInstantiateWithFlags(e, g, 0); }

static CUresult with_params(CUgraphExec *e, CUgraph g)
{
	CUDA_GRAPH_INSTANTIATE_PARAMS p = { 0 };

	return cuGraphInstantiateWithParams(e, g, &p);
}

static CUresult with_params_ptsz(CUgraphExec *e, CUgraph g)
{
	CUDA_GRAPH_INSTANTIATE_PARAMS p = { 0 };

	return cuGraphInstantiateWithParams_ptsz(e, g, &p);
}

static const instantiate_fn instantiate_fns[] = { plainly, with_log, with_flags, with_params, with_params_ptsz };

/* The driver looks up what memsets write: each call waits until that is there. */
static void graphs_are_made_of_memory_that_is_away(void)
{
	struct buffer b = { .bytes = 32 * MIB };
	CUgraphExec exec;
	CUgraph graph;
	CUstream s;

	schedule(usual);
	tenant_open();
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuMemAlloc_v2(&b.p, b.bytes));
	for (unsigned i = 0; i < sizeof(instantiate_fns) / sizeof(*instantiate_fns); i++) {
		char c = 0;

		run_fill(&b, 1, NULL);
		CU(cuCtxSynchronize());
		CU(cuStreamBeginCapture_v2(s, 0));
		CU(cuMemsetD8Async(b.p, 2, 4096, s));
		CU(cuStreamEndCapture(s, &graph));
		swapper_withhold(true);
		swapper_room(1);
		EVENTUALLY(swapper_away() >= b.bytes / 2);
		swapper_room(0);
		swapper_withhold(false); /* nobody asks for the memory yet */
		CU(instantiate_fns[i](&exec, graph));
		CU(cuGraphLaunch(exec, s));
		CU(cuStreamSynchronize(s));
		CU(cuMemcpyDtoH_v2(&c, b.p, 1));
		CHECK(c == 2);
	}
	swapper_end();
}

/* ---- pointers ---- */

/* What the program `pointers` says, natively or as a tenant whose memory was moved out before it asks. */
static void pointers(bool native, char *text, size_t size)
{
	int in[2], out[2];
	char path[4096];
	size_t n = 0;
	ssize_t got;
	pid_t pid;

	snprintf(path, sizeof(path), "%.*spointers", (int)(strrchr(self, '/') + 1 - self), self);
	CHECK(pipe(in) == 0 && pipe(out) == 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		dup2(in[0], 0);
		dup2(out[1], 1);
		close(in[1]);
		close(out[0]);
		if (native)
			unsetenv("LD_PRELOAD");
		setenv("NVSHARE_SIMGPU_POOL_MIB", "32", 1);
		execl(path, path, "--pause", "plain", "pitch", "managed", "pool", "shared-pool", "mapped", "mapped-rdma",
		      "mapped-closed", "green", "host", "registered", "pageable", "freed", (char *)NULL);
		_exit(127);
	}
	close(in[0]);
	close(out[1]);
	if (!native) {
		EVENTUALLY(swapper_seen().away >= 7 * 4 * MIB);
		swapper_room(0);
	}
	CHECK(write(in[1], "\n", 1) == 1);
	while ((got = read(out[0], text + n, size - 1 - n)) > 0)
		n += (size_t)got;
	text[n] = 0;
	close(in[1]);
	close(out[0]);
	CHECK(went_well(pid));
}

/* Line by line, but for the line of the pool's memory that begins so; NULL: for none. */
static bool tell_the_same(const char *who, char *is, const char *than, char *was, const char *but)
{
	bool same = true;
	char *a, *b;

	while ((a = strsep(&was, "\n")) && (b = strsep(&is, "\n")))
		if (strcmp(a, b) != 0 && !(but && strncmp(a, but, strlen(but)) == 0)) {
			fprintf(stderr, "%s: %s\n%s: %s\n", than, a, who, b);
			same = false;
		}
	return same && !was && !strsep(&is, "\n");
}

/* What an H100 with driver 580.159.04 says, to `pointers` without the kind ipc. */
static void table(char *text, size_t size)
{
	FILE *f = fopen("pointers.txt", "r");

	CHECK(f);
	text[fread(text, 1, size - 1, f)] = 0;
	fclose(f);
}

/* The values, and the bytes that are written of each. */
static void pointers_tell_what_the_driver_tells(void)
{
	static char real[65536], native[65536], ours[65536];
	struct swapper_config c = usual;

	swapper_init();
	table(real, sizeof(real));
	pointers(true, native, sizeof(native));
	swapper_start(&c);
	swapper_room(1);
	pointers(false, ours, sizeof(ours));
	CHECK(tell_the_same("simulated", strdup(native), "H100", real, NULL));
	/* Ours is mapped by itself, and not in a block of 32 MiB. */
	CHECK(tell_the_same("ours", ours, "simulated", native, "pool MAPPING_SIZE "));
	swapper_end();
}

static void answers_are_the_applications(void) { beside_another("queries", 50, 4); }

/* Where all fits, memory is had as from the driver: at once, without a grant, or not at all. */
static void memory_that_fits_is_had_at_once(void)
{
	CUdeviceptr p, refused = 0;
	pid_t other;

	schedule((struct swapper_config){ .gpu = 97 * MIB, .quantum_ms = 30 });
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	CU(cuMemAlloc_v2(&p, 2 * MIB)); /* attached */
	CU(cuMemFree_v2(p));
	swapper_withhold(true);
	EVENTUALLY(swapper_seen().holder == 0);
	swapper_still(true);
	CU(cuMemAlloc_v2(&p, 20 * MIB));
	EVENTUALLY(swapper_seen().resident >= 20 * MIB && swapper_seen().away == 0);
	other = start("hog", 60, 0, 0); /* the GPU has less than the scheduler knows */
	EVENTUALLY(access(taken_path(), F_OK) == 0);
	CHECK(cuMemAlloc_v2(&refused, 40 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(swapper_seen().stuck_memory == 0);
	kill(other, SIGKILL);
	CHECK(waitpid(other, NULL, 0) == other);
	CU(cuMemAlloc_v2(&refused, 40 * MIB));
	swapper_end();
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(alone_nothing_moves),
	CASE(the_end_gives_the_gpu_back),
	CASE(the_end_awaits_the_grant),
	CASE(off_is_as_ever),
	CASE(one_may_have_more_than_the_gpu),
	CASE(two_that_do_not_fit_take_turns),
	CASE(what_was_cut_is_finished_first),
	CASE(four_of_three_times_the_gpu),
	CASE(killed_while_moving_out),
	CASE(killed_while_moving_in),
	CASE(the_scheduler_may_die_in_the_middle),
	CASE(the_arena_may_come_late),
	CASE(memory_that_others_took_is_waited_for),
	CASE(a_dead_context_stays_alone),
	CASE(graphs_replay),
	CASE(graphs_are_made_of_memory_that_is_away),
	CASE(contexts_come_and_go),
	CASE(answers_are_the_applications),
	CASE(pointers_tell_what_the_driver_tells),
	CASE(memory_of_several_gpus_stays),
	CASE(green_contexts_are_of_a_gpu_too),
	CASE(memory_that_optix_uses_stays),
	CASE(memory_that_cannot_move_is_told_unasked),
	CASE(stream_ordered_memory_moves),
	CASE(processes_may_share_memory),
	CASE(shared_memory_is_opened_on_both_gpus),
	CASE(an_application_takes_the_socket_of_handles),
	CASE(what_is_shared_anew_is_opened_anew),
	CASE(a_stopped_process_stops_no_other),
	CASE(a_wrong_answer_leaves_no_descriptor),
	CASE(memory_that_fits_is_had_at_once),
};

static const struct tenant_kind kinds[] = {
	{ "tenant", tenant },
	{ "long", tenant_long },
	{ "ending", tenant_ending },
	{ "faulting", tenant_faulting },
	{ "graph", tenant_graph },
	{ "contexts", tenant_contexts },
	{ "queries", tenant_queries },
	{ "hog", hog },
	{ "spread", tenant_spread },
	{ "spread-green", tenant_spread_green },
	{ "rays", tenant_traces_rays },
	{ "rays-later", tenant_traces_rays_later },
	{ "async", tenant_async },
	{ "ipc", tenant_ipc },
	{ "ipc-both", tenant_ipc_both },
	{ "ipc-taken", tenant_ipc_taken },
	{ "ipc-replaced", tenant_ipc_replaced },
	{ "ipc-stopped", tenant_ipc_stopped },
	{ "ipc-wrong", tenant_ipc_wrong },
};

int main(int argc, char **argv)
{
	self = argv[0];
	return run_tenant_or_case(kinds, sizeof(kinds) / sizeof(kinds[0]), NULL,
				  cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
