// SPDX-License-Identifier: Apache-2.0
/*
 * probe: finds the driver API in one of many ways, does some work, prints its process ID
 * and its number of submissions, and stays until its standard input ends:
 *
 *   worked PID SUBMISSIONS
 *
 * Built with LINKED, it is linked against the driver, and its ways are linked, default
 * (dlsym of RTLD_DEFAULT) and next; otherwise the table `ways` below has them. With "fork"
 * before the way, a child does the work; with "threads", four threads do it at once, from
 * cuInit on. It needs only a libc.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LAUNCHES = 20, BYTES = 4096, THREADS = 4 };

/* X(name for cuGetProcAddress, exported name, parameters) */
#define FUNCTIONS(X) \
	X(cuInit, cuInit, (unsigned)) \
	X(cuDeviceGet, cuDeviceGet, (int *, int)) \
	X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (void **, int)) \
	X(cuCtxSetCurrent, cuCtxSetCurrent, (void *)) \
	X(cuModuleLoadData, cuModuleLoadData, (void **, const void *)) \
	X(cuModuleGetFunction, cuModuleGetFunction, (void **, void *, const char *)) \
	X(cuMemAlloc, cuMemAlloc_v2, (unsigned long long *, size_t)) \
	X(cuMemcpyHtoD, cuMemcpyHtoD_v2, (unsigned long long, const void *, size_t)) \
	X(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *, unsigned long long, size_t)) \
	X(cuLaunchKernel, cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, \
					   unsigned, unsigned, void *, void **, void **)) \
	X(cuStreamSynchronize, cuStreamSynchronize, (void *)) \
	X(cuCtxSynchronize, cuCtxSynchronize, (void))

#define X(base, symbol, params) int symbol params;
#ifdef LINKED
FUNCTIONS(X)
#endif
#undef X

static struct {
#define X(base, symbol, params) int (*base) params;
	FUNCTIONS(X)
#undef X
} cu;

static void fail(const char *what, int code)
{
	fprintf(stderr, "probe: %s: %d\n", what, code);
	exit(1);
}

typedef void *lookup_fn(const char *base, const char *symbol);

static void *driver;

static void *by_dlsym(const char *base, const char *symbol)
{
	(void)base;
	return dlsym(driver, symbol);
}

/* The two resolvers, as runtimes find and call them. */
typedef int resolve_fn(const char *, void **, int, uint64_t);
typedef int resolve_v2_fn(const char *, void **, int, uint64_t, int *);

static void *by_resolver(const char *base, const char *symbol)
{
	static resolve_fn *resolve;
	void *p = NULL;

	(void)symbol;
	if (!resolve)
		*(void **)&resolve = dlsym(driver, "cuGetProcAddress");
	return resolve && resolve(base, &p, 11030, 0) == 0 ? p : NULL;
}

static void *by_resolver_v2(const char *base, uint64_t flags)
{
	static resolve_v2_fn *resolve;
	void *p = NULL;
	int status = -1;

	if (!resolve) {
		*(void **)&resolve = dlsym(driver, "cuGetProcAddress_v2");
		/* Like a runtime: asks the resolver for the resolver, and uses the answer. */
		if (resolve && resolve("cuGetProcAddress", &p, 12000, flags, &status) == 0)
			*(void **)&resolve = p;
	}
	p = NULL;
	return resolve && resolve(base, &p, 12000, flags, &status) == 0 && status == 0 ? p : NULL;
}

static void *by_legacy(const char *base, const char *symbol)
{
	(void)symbol;
	return by_resolver_v2(base, 1);
}
static void *by_thread(const char *base, const char *symbol)
{
	(void)symbol;
	return by_resolver_v2(base, 2);
}

static const struct {
	const char *name;
	lookup_fn *find;
} ways[] = {
	{ "dlsym", by_dlsym }, { "resolver", by_resolver }, { "legacy", by_legacy }, { "thread", by_thread },
};

static void find_all(const char *way)
{
#ifdef LINKED
	if (strcmp(way, "linked") == 0) {
#define X(base, symbol, params) cu.base = symbol;
		FUNCTIONS(X)
#undef X
		return;
	}
	driver = strcmp(way, "next") == 0 ? RTLD_NEXT : RTLD_DEFAULT;
	way = "dlsym";
#else
	driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!driver)
		fail(dlerror(), 0);
#endif
	for (unsigned i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		if (strcmp(ways[i].name, way))
			continue;
#define X(base, symbol, params) \
	*(void **)&cu.base = ways[i].find(#base, #symbol); \
	if (!cu.base) \
		fail(#symbol " is not found", 0);
		FUNCTIONS(X)
#undef X
		return;
	}
	fail("there is no such way", 0);
}

#define DO(call) \
	do { \
		int rc_ = cu.call; \
		if (rc_) \
			fail(#call, rc_); \
	} while (0)

static void work(void)
{
	/* The simulated driver knows the kernel by its name. */
	static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
				  ".visible .entry nvshare_spin(.param .u64 ns, .param .u64 record) { ret; }\n";
	static char there[BYTES], back[BYTES];
	uint64_t ns = 200000, record = 0;
	void *params[] = { &ns, &record }, *ctx, *module, *kernel;
	unsigned long long buffer;
	int device;

	DO(cuInit(0));
	DO(cuDeviceGet(&device, 0));
	DO(cuDevicePrimaryCtxRetain(&ctx, device));
	DO(cuCtxSetCurrent(ctx));
	DO(cuModuleLoadData(&module, ptx));
	DO(cuModuleGetFunction(&kernel, module, "nvshare_spin"));
	DO(cuMemAlloc(&buffer, BYTES));
	for (unsigned i = 0; i < BYTES; i++)
		there[i] = (char)(i * 7);
	DO(cuMemcpyHtoD(buffer, there, BYTES));
	for (int i = 0; i < LAUNCHES; i++)
		DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	DO(cuStreamSynchronize(NULL));
	DO(cuMemcpyDtoH(back, buffer, BYTES));
	DO(cuCtxSynchronize());
	if (memcmp(there, back, BYTES))
		fail("what came back is not what was sent", 0);
}

static pthread_barrier_t together;

static void *thread(void *arg)
{
	pthread_barrier_wait(&together);
	work();
	return arg;
}

static void work_together(void)
{
	pthread_t threads[THREADS];
	int rc = pthread_barrier_init(&together, NULL, THREADS);

	for (int i = 0; i < THREADS && !rc; i++)
		rc = pthread_create(&threads[i], NULL, thread, NULL);
	for (int i = 0; i < THREADS && !rc; i++)
		rc = pthread_join(threads[i], NULL);
	if (rc)
		fail("threads", rc);
}

int main(int argc, char **argv)
{
	int forks = argc > 1 && strcmp(argv[1], "fork") == 0, status;
	int threads = argc > 1 && strcmp(argv[1], "threads") == 0 ? THREADS : 1;
	const char *way = argv[argc - 1];
	char byte;
	pid_t pid;

	if (argc < 2)
		fail("usage: probe [fork|threads] WAY", 0);
	if (forks && (pid = fork()) != 0) {
		if (pid < 0 || waitpid(pid, &status, 0) < 0 || status)
			fail("fork", status);
		return 0;
	}
	find_all(way);
	if (threads > 1)
		work_together();
	else
		work();
	printf("worked %ld %d\n", (long)getpid(), threads * (LAUNCHES + 2));
	fflush(stdout);
	while (read(0, &byte, 1) > 0)
		;
	return 0;
}
