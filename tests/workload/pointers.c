// SPDX-License-Identifier: Apache-2.0
/*
 * pointers: what the driver tells of a pointer, and how many bytes it writes.
 *
 * usage: pointers [--pause] [KIND...]   (default: all)
 *
 * For each kind of memory and each attribute of CUpointer_attribute, prints one line:
 *
 *   KIND ATTRIBUTE single=RESULT/BYTES/VALUE list=RESULT/BYTES/VALUE
 *
 * single: cuPointerGetAttribute; list: cuPointerGetAttributes of this one attribute. RESULT is
 * the CUresult, BYTES what the call has written of a buffer that was filled with two patterns
 * before. VALUE: "p" is the address that is asked for, 1 MiB behind the start of the memory;
 * "primary" the context, "pool" a pool, "id" a number of the driver's; else a number.
 * The last line of a kind tells whether a list of all attributes says the same.
 *
 * Lines are the same on every run, so that runs without and with the shim can be compared:
 * run it natively and, beside a scheduler that swaps, with the shim preloaded. With --pause it
 * waits for a line on standard input when all memory exists, which may be moved out meanwhile.
 * Needs libcuda.so.1 and no header of CUDA.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pointer_abi.h"

#define BYTES  (4ull << 20)
#define OFFSET (1ull << 20) /* of the address that is asked for */
#define WIDEST 32

typedef unsigned long long ptr;

struct location { int type, id; };
struct alloc_prop {
	int type, handle_types;
	struct location at;
	void *win32;
	unsigned char compression, rdma, rest[6];
};
struct access { struct location at; int flags; };
struct pool_props {
	int type, handle_types;
	struct location at;
	void *security;
	size_t max;
	unsigned char rest[56];
};
struct ipc_handle { char bytes[64]; };

enum { PINNED = 1, DEVICE = 1, READWRITE = 3, POSIX_FD = 1, GLOBAL = 1, NON_BLOCKING = 1, LAZY_PEER = 1 };

static void *lib, *primary, *pool, *stream;

/* Calls a function of the driver; -1 if there is none. */
#define CU(name, types, ...) \
	__extension__({ \
		int (*f_) types; \
		*(void **)&f_ = dlsym(lib, name); \
		f_ ? f_(__VA_ARGS__) : -1; \
	})

static void must(int result, const char *what)
{
	if (result == 0)
		return;
	fprintf(stderr, "pointers: %s: result %d\n", what, result);
	exit(1);
}

static void open_driver(void)
{
	lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "pointers: libcuda.so.1 cannot be loaded: %s\n", dlerror());
		exit(1);
	}
	must(CU("cuInit", (unsigned), 0), "cuInit");
	must(CU("cuDevicePrimaryCtxRetain", (void **, int), &primary, 0), "cuDevicePrimaryCtxRetain");
	must(CU("cuCtxSetCurrent", (void *), primary), "cuCtxSetCurrent");
	must(CU("cuStreamCreate", (void **, unsigned), &stream, NON_BLOCKING), "cuStreamCreate");
}

/* ---- kinds of memory; each returns the result of the call that makes it ---- */

static int plain(ptr *p) { return CU("cuMemAlloc_v2", (ptr *, size_t), p, BYTES); }

static int pitched(ptr *p)
{
	size_t pitch;

	return CU("cuMemAllocPitch_v2", (ptr *, size_t *, size_t, size_t, unsigned), p, &pitch, 4096, BYTES / 4096, 4);
}

static int managed(ptr *p)
{
	return CU("cuMemAllocManaged", (ptr *, size_t, unsigned), p, BYTES, GLOBAL);
}

static int pooled(ptr *p)
{
	must(CU("cuDeviceGetDefaultMemPool", (void **, int), &pool, 0), "cuDeviceGetDefaultMemPool");
	return CU("cuMemAllocAsync", (ptr *, size_t, void *), p, BYTES, stream);
}

/* Of a pool whose memory other processes may import. */
static int pooled_shared(ptr *p)
{
	struct pool_props props = { .type = PINNED, .handle_types = POSIX_FD, .at = { DEVICE, 0 } };
	int result = CU("cuMemPoolCreate", (void **, const void *), &pool, &props);

	return result ? result : CU("cuMemAllocFromPoolAsync", (ptr *, size_t, void *, void *), p, BYTES, pool, stream);
}

/* Mapped at the second half of a range that is reserved. */
static int map(ptr *p, unsigned char rdma, int flags)
{
	struct alloc_prop prop = { .type = PINNED, .handle_types = POSIX_FD, .at = { DEVICE, 0 }, .rdma = rdma };
	struct access access = { { DEVICE, 0 }, flags };
	unsigned long long handle;
	ptr range;
	int result;

	result = CU("cuMemCreate", (unsigned long long *, size_t, const void *, unsigned long long), &handle, BYTES,
		    &prop, 0);
	if (result)
		return result;
	must(CU("cuMemAddressReserve", (ptr *, size_t, size_t, ptr, unsigned long long), &range, 2 * BYTES, 0, 0, 0),
	     "cuMemAddressReserve");
	*p = range + BYTES;
	result = CU("cuMemMap", (ptr, size_t, size_t, unsigned long long, unsigned long long), *p, BYTES, 0, handle, 0);
	return result || !flags ? result
				: CU("cuMemSetAccess", (ptr, size_t, const void *, size_t), *p, BYTES, &access, 1);
}

static int mapped(ptr *p) { return map(p, 0, READWRITE); }
static int mapped_rdma(ptr *p) { return map(p, 1, READWRITE); }
static int mapped_closed(ptr *p) { return map(p, 0, 0); }

static int host(ptr *p) { return CU("cuMemHostAlloc", (ptr *, size_t, unsigned), p, BYTES, 0); }

static int registered(ptr *p)
{
	void *at = NULL;

	if (posix_memalign(&at, 4096, BYTES))
		return -1;
	*p = (uintptr_t)at;
	return CU("cuMemHostRegister_v2", (void *, size_t, unsigned), at, BYTES, 0);
}

static int pageable(ptr *p)
{
	*p = (uintptr_t)malloc(BYTES);
	return 0;
}

/* While a green context of all multiprocessors is current. */
static int green(ptr *p)
{
	unsigned char resource[512];
	void *desc = NULL, *part, *ctx;
	int result;

	if (CU("cuDeviceGetDevResource", (int, void *, int), 0, resource, 1) == 0)
		CU("cuDevResourceGenerateDesc", (void **, void *, unsigned), &desc, resource, 1);
	result = CU("cuGreenCtxCreate", (void **, void *, int, unsigned), &part, desc, 0, 1);
	if (result)
		return result;
	must(CU("cuCtxFromGreenCtx", (void **, void *), &ctx, part), "cuCtxFromGreenCtx");
	must(CU("cuCtxSetCurrent", (void *), ctx), "cuCtxSetCurrent");
	result = plain(p);
	must(CU("cuCtxSetCurrent", (void *), primary), "cuCtxSetCurrent");
	return result;
}

static int freed(ptr *p)
{
	int result = plain(p);

	return result ? result : CU("cuMemFree_v2", (ptr), *p);
}

static struct ipc_handle imported; /* of another process; see main() */

static int ipc(ptr *p)
{
	return CU("cuIpcOpenMemHandle_v2", (ptr *, struct ipc_handle, unsigned), p, imported, LAZY_PEER);
}

static const struct kind {
	const char *name;
	int (*make)(ptr *p);
} kinds[] = {
	{ "plain", plain }, { "pitch", pitched }, { "managed", managed }, { "pool", pooled },
	{ "shared-pool", pooled_shared }, { "mapped", mapped }, { "mapped-rdma", mapped_rdma },
	{ "mapped-closed", mapped_closed }, { "host", host }, { "registered", registered },
	{ "green", green }, { "pageable", pageable }, { "freed", freed }, { "ipc", ipc },
};
enum { KINDS = sizeof(kinds) / sizeof(*kinds) };

/* ---- what is told ---- */

static const struct {
	const char *name;
	int number;
} attributes[] = {
#define A(name, number, bytes) { #name, number },
	NVS_POINTER_ATTRIBUTES(A)
#undef A
	{ "22", 22 }, { "23", 23 }, { "24", 24 }, /* of drivers to come */
};
enum { ATTRIBUTES = sizeof(attributes) / sizeof(*attributes) };

struct answer {
	int result;
	unsigned bytes; /* that were written */
	unsigned char value[WIDEST];
};

static int call(bool list, int attribute, void *data, ptr p)
{
	return list ? CU("cuPointerGetAttributes", (unsigned, int *, void **, ptr), 1, &attribute, &data, p)
		    : CU("cuPointerGetAttribute", (void *, int, ptr), data, attribute, p);
}

static struct answer ask(bool list, int attribute, ptr p)
{
	unsigned char other[WIDEST];
	struct answer a = { 0 };

	memset(a.value, 0xff, WIDEST);
	memset(other, 0x5a, WIDEST);
	a.result = call(list, attribute, a.value, p);
	call(list, attribute, other, p);
	for (unsigned i = 0; i < WIDEST; i++)
		if (a.value[i] != 0xff || other[i] != 0x5a)
			a.bytes = i + 1;
	memset(a.value + a.bytes, 0, WIDEST - a.bytes);
	return a;
}

static void say(const char *how, int attribute, const struct answer *a, ptr p)
{
	uint64_t v;

	memcpy(&v, a->value, sizeof(v));
	printf(" %s=%d/%u/", how, a->result, a->bytes);
	if (!a->bytes)
		printf("-");
	else if (v && v == (uintptr_t)primary)
		printf("primary");
	else if (v && v == (uintptr_t)pool)
		printf("pool");
	else if (v && (attribute == NVS_POINTER_BUFFER_ID || attribute == NVS_POINTER_MEMORY_BLOCK_ID))
		printf("id");
	else if (a->bytes == 8 && v - (p - 2 * BYTES) < 4 * BYTES)
		v == p ? printf("p") : printf("p%+lld", (long long)(v - p));
	else
		printf("%lld", (long long)v);
}

static void tell(const char *name, ptr base)
{
	unsigned char all[ATTRIBUTES][WIDEST];
	void *data[ATTRIBUTES];
	int numbers[ATTRIBUTES], n = 0, result;
	bool same = true;
	ptr p = base + OFFSET;

	memset(all, 0xff, sizeof(all));
	for (int i = 0; i < ATTRIBUTES; i++) {
		struct answer one = ask(false, attributes[i].number, p), list = ask(true, attributes[i].number, p);

		printf("%s %s", name, attributes[i].name);
		say("single", attributes[i].number, &one, p);
		say("list", attributes[i].number, &list, p);
		printf("\n");
		if (list.result)
			continue;
		numbers[n] = attributes[i].number;
		data[n++] = all[i];
	}
	result = CU("cuPointerGetAttributes", (unsigned, int *, void **, ptr), (unsigned)n, numbers, data, p);
	for (int i = 0; i < ATTRIBUTES; i++) {
		struct answer list = ask(true, attributes[i].number, p);

		same = same && (list.result || memcmp(all[i], list.value, list.bytes) == 0);
	}
	printf("%s all=%d same=%s\n", name, result, same ? "yes" : "no");
}

/* ---- memory of another process ---- */

/* Writes a handle of its memory, and lives until the pipe closes. */
static void share(int in, int out)
{
	struct ipc_handle handle = { { 0 } };
	int result;
	ptr p;

	open_driver();
	must(plain(&p), "cuMemAlloc");
	result = CU("cuIpcGetMemHandle", (struct ipc_handle *, ptr), &handle, p);
	if (write(out, &result, sizeof(result)) != sizeof(result) || write(out, &handle, sizeof(handle)) < 0)
		_exit(1);
	while (read(in, &result, 1) > 0)
		;
	_exit(0);
}

/* In a process that has not used the driver: it forks. False: the driver shares no such memory. */
static bool import(int *keep)
{
	int to[2], from[2], result = -1;

	if (pipe(to) || pipe(from))
		return false;
	if (fork() == 0) {
		close(to[1]);
		close(from[0]);
		share(to[0], from[1]);
	}
	close(to[0]);
	close(from[1]);
	*keep = to[1];
	return read(from[0], &result, sizeof(result)) == sizeof(result) && !result &&
	       read(from[0], &imported, sizeof(imported)) == sizeof(imported);
}

static bool wanted(const char *name, int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], name) == 0)
			return true;
	return argc <= 1;
}

int main(int argc, char **argv)
{
	bool pause = argc > 1 && strcmp(argv[1], "--pause") == 0, shared;
	int made[KINDS], keep = -1;
	ptr p[KINDS] = { 0 };
	void *pools[KINDS] = { 0 };

	argc -= pause;
	argv += pause;
	setvbuf(stdout, NULL, _IOLBF, 0);
	shared = wanted("ipc", argc, argv) && import(&keep);
	open_driver();
	for (int i = 0; i < KINDS; i++) {
		pool = NULL;
		made[i] = wanted(kinds[i].name, argc, argv) && (kinds[i].make != ipc || shared) ? kinds[i].make(&p[i]) : -1;
		pools[i] = pool;
	}
	if (pause)
		(void)getchar();
	for (int i = 0; i < KINDS; i++) {
		if (!wanted(kinds[i].name, argc, argv))
			continue;
		pool = pools[i];
		if (made[i] == 0)
			tell(kinds[i].name, p[i]);
		else
			printf("%s none: result %d\n", kinds[i].name, made[i]);
	}
	if (keep >= 0)
		close(keep);
	return 0;
}
