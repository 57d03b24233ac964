// SPDX-License-Identifier: Apache-2.0
/*
 * launch-cost: measures how long submitting an empty kernel, or another call, takes in
 * the calling thread.
 *
 * usage: launch-cost [options] [batches] [calls-per-batch]
 *   --only LIST     calls to time, comma separated (launch,launch_ex); see below
 *   --threads N     threads that call at the same time (1)
 *   --streams N     streams that each thread uses in turn (1); 0: the default stream
 *   --runtime FILE  a libcudart.so, for rt_...
 *   --wait          print "ready" after the first launch, and go on after a line from
 *                   standard input
 *
 *   launch       cuLaunchKernel, an empty kernel
 *   launch_ex    cuLaunchKernelEx, the same
 *   copy         cuMemcpyHtoDAsync, 4 bytes of pinned memory
 *   copy_uva     cuMemcpyAsync, the same
 *   event        cuEventRecord, without timing
 *   event_query  cuEventQuery, of an event that has passed
 *   alloc        cuMemAlloc of 1 MiB, and cuMemFree
 *   async        cuMemAllocAsync of 1 MiB, and cuMemFreeAsync
 *   async_kept   the same, from a pool that keeps what is freed
 *   rt_launch, rt_launch_ex, rt_copy, rt_event
 *                cudaLaunchKernel, cudaLaunchKernelExC, cudaMemcpyAsync and
 *                cudaEventRecord; needs CUDA 12.8's runtime or later
 *
 * Each batch is timed as a whole. A synchronisation that is not timed follows, so that
 * the queue never fills. Prints one JSON line with, for each call, NAME_ns (wall time)
 * and NAME_cpu_ns (the thread's CPU time): ns per call, median over batches, mean over
 * threads. Calls that the runtime lacks are left out; "runtime" then says why. Run it in
 * turn with and without LD_PRELOAD, and compare medians of the same run only.
 */
#include <dlfcn.h>
#include <getopt.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The parts of the CUDA driver API in use, as cuda.h declares them. */
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream, *CUevent;
struct launch_config {
	unsigned grid[3], block[3], shared;
	CUstream stream;
	void *attrs;
	unsigned num_attrs;
};
CUresult cuInit(unsigned);
CUresult cuDeviceGet(int *, int);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, int);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuEventCreate(CUevent *, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventQuery(CUevent);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemAllocHost_v2(void **, size_t);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuDeviceGetMemPool(void **, int);
CUresult cuMemPoolSetAttribute(void *, int, void *);
#define RELEASE_THRESHOLD 4
CUresult cuMemcpyAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned,
	unsigned, unsigned, unsigned, CUstream, void **, void **);
CUresult cuLaunchKernelEx(const struct launch_config *, CUfunction, void **, void **);

/* The parts of the runtime API in use; its streams, events and contexts are the driver's. */
struct dim3 {
	unsigned x, y, z;
};
struct rt_config {
	struct dim3 grid, block;
	size_t shared;
	CUstream stream;
	void *attrs;
	unsigned num_attrs;
};
#define RT_TABLE(R) \
	R(set_device, "cudaSetDevice", (int)) \
	R(free, "cudaFree", (void *)) \
	R(version, "cudaRuntimeGetVersion", (int *)) \
	R(load, "cudaLibraryLoadData", \
		(void **, const void *, void *, void **, unsigned, void *, void **, unsigned)) \
	R(kernel, "cudaLibraryGetKernel", (void **, void *, const char *)) \
	R(launch, "cudaLaunchKernel", \
		(const void *, struct dim3, struct dim3, void **, size_t, CUstream)) \
	R(launch_ex, "cudaLaunchKernelExC", (const struct rt_config *, const void *, void **)) \
	R(copy, "cudaMemcpyAsync", (void *, const void *, size_t, int, CUstream)) \
	R(record, "cudaEventRecord", (CUevent, CUstream))
#define RT_HOST_TO_DEVICE 1
static struct {
#define R(member, name, params) int (*member) params;
	RT_TABLE(R)
#undef R
} rt;
static void *rt_kernel;
static char rt_said[200]; /* the runtime's version, or its error */

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry empty() { ret; }\n";

#define MAX_STREAMS 64
#define WARM_UP 20 /* batches */
#define ALLOC_BYTES (1 << 20)

static int batches = 400, calls = 500, threads = 1, streams = 1;
static CUcontext context;
static CUfunction kernel;

static void die(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fprintf(stderr, "launch-cost: ");
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
	exit(1);
}

#define CHECK(call) do { CUresult r_ = (call); if (r_) \
	die("%s failed: CUDA error %d", #call, r_); } while (0)

struct worker {
	pthread_t thread;
	CUstream stream[MAX_STREAMS];
	CUevent event;
	CUdeviceptr device;
	void *host;
	double *wall, *cpu; /* of each batch, per call */
};

/*
 * The timed loops: one function each, so that a profiler can tell them apart. A loop's
 * own cost is the same with and without a library in between.
 */
#define LOOP(name, call) \
	static __attribute__((noinline)) void run_##name(struct worker *w) \
	{ \
		int k = 0; \
		for (int i = 0; i < calls; i++) { \
			CUstream s = w->stream[k]; \
			(void)s; \
			CHECK(call); \
			if (++k >= streams) \
				k = 0; \
		} \
	}

LOOP(launch, cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, s, NULL, NULL))
LOOP(launch_ex, cuLaunchKernelEx(&((struct launch_config){{1, 1, 1}, {1, 1, 1}, 0, s, NULL, 0}),
	kernel, NULL, NULL))
LOOP(copy, cuMemcpyHtoDAsync_v2(w->device, w->host, 4, s))
LOOP(copy_uva, cuMemcpyAsync(w->device, (CUdeviceptr)w->host, 4, s))
LOOP(event, cuEventRecord(w->event, s))
LOOP(event_query, cuEventQuery(w->event))
LOOP(rt_launch, rt.launch(rt_kernel, (struct dim3){1, 1, 1}, (struct dim3){1, 1, 1}, NULL, 0, s))
LOOP(rt_launch_ex, rt.launch_ex(
	&((struct rt_config){{1, 1, 1}, {1, 1, 1}, 0, s, NULL, 0}), rt_kernel, NULL))
LOOP(rt_copy, rt.copy((void *)w->device, w->host, 4, RT_HOST_TO_DEVICE, s))
LOOP(rt_event, rt.record(w->event, s))

static __attribute__((noinline)) void run_alloc(struct worker *w)
{
	(void)w;
	for (int i = 0; i < calls; i++) {
		CUdeviceptr p;
		CHECK(cuMemAlloc_v2(&p, ALLOC_BYTES));
		CHECK(cuMemFree_v2(p));
	}
}

static __attribute__((noinline)) void run_async(struct worker *w)
{
	for (int i = 0; i < calls; i++) {
		CUdeviceptr p;
		CHECK(cuMemAllocAsync(&p, ALLOC_BYTES, w->stream[0]));
		CHECK(cuMemFreeAsync(p, w->stream[0]));
	}
}

static __attribute__((noinline)) void run_async_kept(struct worker *w)
{
	unsigned long long all = -1ull;
	void *pool;

	CHECK(cuDeviceGetMemPool(&pool, 0));
	CHECK(cuMemPoolSetAttribute(pool, RELEASE_THRESHOLD, &all));
	for (int i = 0; i < calls; i++) {
		CUdeviceptr p;
		CHECK(cuMemAllocAsync(&p, ALLOC_BYTES, w->stream[0]));
		CHECK(cuMemFreeAsync(p, w->stream[0]));
	}
}

static struct kind {
	const char *name;
	void (*run)(struct worker *);
	int wanted;
	double wall, cpu; /* result */
} kinds[] = {
#define K(name) { #name, run_##name, 0, 0, 0 }
	K(launch), K(launch_ex), K(copy), K(copy_uva), K(event), K(event_query), K(alloc), K(async), K(async_kept),
	K(rt_launch), K(rt_launch_ex), K(rt_copy), K(rt_event),
#undef K
};
#define KINDS (sizeof kinds / sizeof kinds[0])

static int of_runtime(const struct kind *k)
{
	return strncmp(k->name, "rt_", 3) == 0;
}

static void want(char *list)
{
	for (char *name = strtok(list, ","); name; name = strtok(NULL, ",")) {
		struct kind *k = kinds;
		while (k < kinds + KINDS && strcmp(k->name, name) != 0)
			k++;
		if (k == kinds + KINDS)
			die("--only: no \"%s\"", name);
		k->wanted = 1;
	}
}

/* False if the runtime cannot be used; rt_said says why. */
static int load_runtime(const char *file)
{
	void *handle = file ? dlopen(file, RTLD_NOW | RTLD_LOCAL) : NULL, *library;
	int version = 0, r;

	if (!handle) {
		snprintf(rt_said, sizeof rt_said, "%s", file ? dlerror() : "no --runtime given");
		return 0;
	}
#define R(member, name, params) \
	*(void **)&rt.member = dlsym(handle, name); \
	if (!rt.member) { \
		snprintf(rt_said, sizeof rt_said, "%s is not in it", name); \
		return 0; \
	}
	RT_TABLE(R)
#undef R
#define TRY(call) \
	if ((r = (call)) != 0) { \
		snprintf(rt_said, sizeof rt_said, "%s: error %d", #call, r); \
		return 0; \
	}
	TRY(rt.set_device(0))
	TRY(rt.free(NULL)) /* makes the primary context the runtime's */
	TRY(rt.load(&library, ptx, NULL, NULL, 0, NULL, NULL, 0))
	TRY(rt.kernel(&rt_kernel, library, "empty"))
	TRY(rt.launch(rt_kernel, (struct dim3){1, 1, 1}, (struct dim3){1, 1, 1}, NULL, 0, NULL))
	TRY(rt.version(&version))
#undef TRY
	snprintf(rt_said, sizeof rt_said, "%d.%d", version / 1000, version % 1000 / 10);
	return 1;
}

static double clock_ns(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double median(double *v)
{
	qsort(v, batches, sizeof *v, by_value);
	return v[batches / 2];
}

static void synchronise(struct worker *w)
{
	for (int i = 0; i < (streams ? streams : 1); i++)
		CHECK(cuStreamSynchronize(w->stream[i]));
}

static pthread_barrier_t together;
static pthread_mutex_t result_lock = PTHREAD_MUTEX_INITIALIZER;

static void prepare(struct worker *w)
{
	w->wall = malloc(batches * sizeof *w->wall);
	w->cpu = malloc(batches * sizeof *w->cpu);
	if (!w->wall || !w->cpu)
		die("out of memory");
	CHECK(cuCtxSetCurrent(context));
	for (int i = 0; i < streams; i++)
		CHECK(cuStreamCreate(&w->stream[i], 1 /* non-blocking */));
	CHECK(cuEventCreate(&w->event, 2 /* no timing */));
	CHECK(cuMemAlloc_v2(&w->device, 4));
	CHECK(cuMemAllocHost_v2(&w->host, 4));
	CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, w->stream[0], NULL, NULL));
	CHECK(cuEventRecord(w->event, w->stream[0]));
	synchronise(w);
}

static void measure(struct worker *w, struct kind *k)
{
	for (int b = -WARM_UP; b < batches; b++) {
		double c0 = clock_ns(CLOCK_THREAD_CPUTIME_ID), t0 = clock_ns(CLOCK_MONOTONIC);
		k->run(w);
		double t1 = clock_ns(CLOCK_MONOTONIC), c1 = clock_ns(CLOCK_THREAD_CPUTIME_ID);
		synchronise(w);
		if (b >= 0) {
			w->wall[b] = (t1 - t0) / calls;
			w->cpu[b] = (c1 - c0) / calls;
		}
	}
	pthread_mutex_lock(&result_lock);
	k->wall += median(w->wall) / threads;
	k->cpu += median(w->cpu) / threads;
	pthread_mutex_unlock(&result_lock);
}

static void *work(void *arg)
{
	struct worker *w = arg;

	prepare(w);
	for (struct kind *k = kinds; k < kinds + KINDS; k++)
		if (k->wanted) {
			pthread_barrier_wait(&together);
			measure(w, k);
		}
	return NULL;
}

static void print_results(void)
{
	printf("{\"batches\":%d,\"launches\":%d,\"threads\":%d,\"streams\":%d",
		batches, calls, threads, streams);
	for (struct kind *k = kinds; k < kinds + KINDS; k++)
		if (k->wanted)
			printf(",\"%s_ns\":%.2f,\"%s_cpu_ns\":%.2f", k->name, k->wall, k->name, k->cpu);
	if (rt_said[0]) {
		printf(",\"runtime\":\"");
		for (const char *c = rt_said; *c; c++)
			putchar(*c == '"' || *c == '\\' || (unsigned char)*c < ' ' ? '\'' : *c);
		putchar('"');
	}
	printf("}\n");
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"only", required_argument, NULL, 'o'}, {"threads", required_argument, NULL, 't'},
		{"streams", required_argument, NULL, 's'}, {"runtime", required_argument, NULL, 'r'},
		{"wait", no_argument, NULL, 'w'}, {NULL, 0, NULL, 0},
	};
	char standard[] = "launch,launch_ex", *only = standard;
	const char *runtime = NULL;
	int wait = 0, wrong = 0, dev, runtime_wanted = 0;
	CUmodule module;

	for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;)
		switch (c) {
		case 'o': only = optarg; break;
		case 't': threads = atoi(optarg); break;
		case 's': streams = atoi(optarg); break;
		case 'r': runtime = optarg; break;
		case 'w': wait = 1; break;
		default: wrong = 1;
		}
	if (optind < argc)
		batches = atoi(argv[optind++]);
	if (optind < argc)
		calls = atoi(argv[optind++]);
	if (wrong || optind < argc || batches < 1 || calls < 1 || threads < 1 || streams < 0 ||
	    streams > MAX_STREAMS) {
		fprintf(stderr, "usage: launch-cost [--only LIST] [--threads N] [--streams N] "
			"[--runtime FILE] [--wait] [batches] [calls-per-batch]\n");
		return 2;
	}
	want(only);
	for (struct kind *k = kinds; k < kinds + KINDS; k++)
		runtime_wanted |= k->wanted && of_runtime(k);

	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&context, dev));
	CHECK(cuCtxSetCurrent(context));
	CHECK(cuModuleLoadData(&module, ptx));
	CHECK(cuModuleGetFunction(&kernel, module, "empty"));
	if (runtime_wanted && !load_runtime(runtime))
		for (struct kind *k = kinds; k < kinds + KINDS; k++)
			k->wanted = k->wanted && !of_runtime(k);
	if (wait) {
		CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
		CHECK(cuStreamSynchronize(NULL));
		printf("ready\n");
		fflush(stdout);
		while (getchar() != '\n' && !feof(stdin))
			;
	}

	struct worker *w = calloc(threads, sizeof *w);
	if (!w || pthread_barrier_init(&together, NULL, threads) != 0)
		die("out of memory");
	for (int i = 1; i < threads; i++)
		if (pthread_create(&w[i].thread, NULL, work, &w[i]) != 0)
			die("cannot start %d threads", threads);
	work(&w[0]);
	for (int i = 1; i < threads; i++)
		pthread_join(w[i].thread, NULL);
	print_results();
	return 0;
}
