// SPDX-License-Identifier: Apache-2.0
/*
 * cuda-busy: keeps a GPU busy through the driver API, and prints how much work it did.
 * The same binary runs on the simulated and on a real driver. It needs only libc and
 * libcuda.so.1. SIGTERM ends it after the running batch, SIGUSR2 has it exec() itself.
 */
#include "gap.h"
#include "spin.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A gap that no kernel sees while it runs. A change of context alone takes longer: 0.14 ms (H200). */
#define OFF_NS 100000u

enum mode { KERNEL, EX, GRAPH, COPY, MIX };
static const char *const mode_names[] = { "kernel", "ex", "graph", "copy", "mix" };

static struct {
	int device;
	double kernel_us, seconds;
	int depth, idle_ms, report_ms, blocks, threads;
	long copy_kib, mem_mib;
	unsigned long long launches;
	const char *record, *tenant;
	enum mode mode;
} opt = { .kernel_us = 500, .depth = 64, .report_ms = 1000, .blocks = 1, .threads = 32, .copy_kib = 4096 };

static volatile sig_atomic_t stop;

static CUstream stream;
static CUfunction spin;
static CUgraphExec graph;
static CUdeviceptr looks, device_buf; /* looks: of each block of depth kernels */
static void *host_buf;
static struct looks *seen; /* their copy */
static FILE *record;
static char uuid[48];
static unsigned long long launches;
static uint64_t wait_max_ns; /* longest submitting call since the last report */

static void on_signal(int sig)
{
	(void)sig;
	stop = 1;
}

static char **arguments;

/* As a program that starts another one in its place, at any moment. */
static void on_exec(int sig)
{
	(void)sig;
	execv("/proc/self/exe", arguments);
	_exit(1);
}

static void timed(CUresult (*fn)(int), int i)
{
	uint64_t t = now_ns(), d;

	check(fn(i), "submit");
	d = now_ns() - t;
	if (d > wait_max_ns)
		wait_max_ns = d;
}

static size_t looks_bytes(int kernels)
{
	return sizeof *seen * (size_t)opt.blocks * (size_t)kernels;
}

static CUresult launch_kernel(int i)
{
	uint64_t ns = (uint64_t)(opt.kernel_us * 1000), at = record ? looks + looks_bytes(i) : 0;
	void *params[] = { &ns, &at };

	return cuLaunchKernel(spin, (unsigned)opt.blocks, 1, 1, (unsigned)opt.threads, 1, 1, 0, stream, params, NULL);
}

static CUresult launch_ex(int i)
{
	uint64_t ns = (uint64_t)(opt.kernel_us * 1000), at = record ? looks + looks_bytes(i) : 0;
	void *params[] = { &ns, &at };
	CUlaunchConfig config = {
		.gridDimX = (unsigned)opt.blocks, .gridDimY = 1, .gridDimZ = 1,
		.blockDimX = (unsigned)opt.threads, .blockDimY = 1, .blockDimZ = 1,
		.hStream = stream,
	};

	return cuLaunchKernelEx(&config, spin, params, NULL);
}

static CUresult launch_graph(int i)
{
	(void)i;
	return cuGraphLaunch(graph, stream);
}

static CUresult launch_copy(int i)
{
	size_t n = (size_t)opt.copy_kib << 10;

	return i % 2 ? cuMemcpyDtoHAsync_v2(host_buf, device_buf, n, stream)
		     : cuMemcpyHtoDAsync_v2(device_buf, host_buf, n, stream);
}

static void capture_graph(void)
{
	CUgraph g;

	CHECK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	for (int i = 0; i < opt.depth; i++)
		CHECK(launch_kernel(i));
	CHECK(cuStreamEndCapture(stream, &g));
	CHECK(cuGraphInstantiateWithFlags(&graph, g, 0));
	CHECK(cuGraphDestroy(g));
}

static void write_record(uint64_t start, uint64_t end)
{
	fprintf(record, "{\"uuid\":\"%s\",\"tenant\":\"%s\",\"pid\":%ld,\"start_ns\":%llu,\"end_ns\":%llu}\n",
		uuid, opt.tenant, (long)getpid(), (unsigned long long)start, (unsigned long long)end);
}

/* A kernel that was off the GPU once has two records: before and after. */
static void write_records(void)
{
	CHECK(cuMemcpyDtoHAsync_v2(seen, looks, looks_bytes(opt.depth), stream));
	CHECK(cuStreamSynchronize(stream));
	for (int i = 0; i < opt.depth; i++) {
		const struct looks *k = &seen[i * opt.blocks];
		bool was_off = k->gap > OFF_NS;

		if (was_off)
			write_record(k->first, k->at);
		write_record(was_off ? k->at + k->gap : k->first, k->last);
	}
	if (fflush(record)) {
		fprintf(stderr, "cuda-busy: write %s: %s\n", opt.record, strerror(errno));
		exit(1);
	}
}

/* One batch: depth pieces of work and a synchronisation. */
static void batch(enum mode mode)
{
	switch (mode) {
	case KERNEL:
	case EX:
		for (int i = 0; i < opt.depth; i++)
			timed(mode == EX ? launch_ex : launch_kernel, i);
		break;
	case GRAPH:
		timed(launch_graph, 0);
		break;
	default:
		for (int i = 0; i < opt.depth; i++)
			timed(launch_copy, i);
	}
	CHECK(cuStreamSynchronize(stream));
	launches += (unsigned)opt.depth;
	if (record && mode != COPY)
		write_records();
}

static void setup(void)
{
	CUcontext ctx;
	CUdevice dev;
	CUmodule module;
	CUuuid id;
	char name[128] = "";
	CUdeviceptr extra;

	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, opt.device));
	CHECK(cuDeviceGetName(name, sizeof name, dev));
	CHECK(cuDeviceGetUuid_v2(&id, dev));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CHECK(cuModuleLoadData(&module, record ? gap_ptx : ptx));
	CHECK(cuModuleGetFunction(&spin, module, record ? "nvshare_gap" : "nvshare_spin"));
	if (opt.mem_mib)
		CHECK(cuMemAlloc_v2(&extra, (size_t)opt.mem_mib << 20));
	if (record) {
		CHECK(cuMemAlloc_v2(&looks, looks_bytes(opt.depth)));
		seen = calloc(1, looks_bytes(opt.depth));
		if (!seen)
			check(CUDA_ERROR_OUT_OF_MEMORY, "calloc");
	}
	if (opt.mode == COPY || opt.mode == MIX) {
		CHECK(cuMemAlloc_v2(&device_buf, (size_t)opt.copy_kib << 10));
		CHECK(cuMemHostAlloc(&host_buf, (size_t)opt.copy_kib << 10, 0));
	}
	if (opt.mode == GRAPH || opt.mode == MIX)
		capture_graph();
	snprintf(uuid, sizeof uuid, "GPU-");
	for (int i = 0; i < 16; i++)
		sprintf(uuid + strlen(uuid), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
			(unsigned char)id.bytes[i]);
	printf("{\"event\":\"ready\",\"pid\":%ld,\"tenant\":\"%s\",\"device\":\"%s\",\"uuid\":\"%s\",\"mode\":\"%s\","
	       "\"kernel_us\":%g,\"depth\":%d}\n",
	       (long)getpid(), opt.tenant, name, uuid, mode_names[opt.mode], opt.kernel_us, opt.depth);
}

static void report(const char *event, uint64_t begin)
{
	double s = (double)(now_ns() - begin) / 1e9;

	printf("{\"event\":\"%s\",\"launches\":%llu,\"elapsed_s\":%.3f,\"per_s\":%.1f,\"wait_max_ms\":%.3f}\n", event,
	       launches, s, s > 0 ? (double)launches / s : 0, (double)wait_max_ns / 1e6);
	wait_max_ns = 0;
}

static void usage(FILE *to)
{
	fputs("usage: cuda-busy [options]\n"
	      "  --device N       device ordinal (0)\n"
	      "  --mode M         kernel | ex | graph | copy | mix (kernel)\n"
	      "  --kernel-us U    time of one kernel in microseconds (500)\n"
	      "  --depth K        pieces of work between synchronises (64)\n"
	      "  --seconds S      run time, 0: until SIGTERM (0)\n"
	      "  --launches N     stop after N pieces of work, 0: no limit (0)\n"
	      "  --idle-ms I      pause after each synchronise (0)\n"
	      "  --report-ms R    time between progress lines, 0: none (1000)\n"
	      "  --record FILE    write when each kernel was on the GPU, as JSON lines\n"
	      "  --tenant NAME    name in records ($NVSHARE_SIMGPU_TENANT, host name)\n"
	      "  --blocks N       thread blocks of a kernel (1)\n"
	      "  --threads N      threads of a block (32)\n"
	      "  --copy-kib N     size of one copy (4096)\n"
	      "  --mem-mib N      device memory to hold besides (0)\n",
	      to);
}

static void parse(int argc, char **argv)
{
	enum { DEVICE = 1, MODE, US, DEPTH, SECONDS, LAUNCHES, IDLE, REPORT, RECORD, TENANT, BLOCKS, THREADS, COPYK, MEM };
	static const struct option options[] = {
		{ "device", 1, 0, DEVICE }, { "mode", 1, 0, MODE }, { "kernel-us", 1, 0, US },
		{ "depth", 1, 0, DEPTH }, { "seconds", 1, 0, SECONDS }, { "launches", 1, 0, LAUNCHES },
		{ "idle-ms", 1, 0, IDLE }, { "report-ms", 1, 0, REPORT }, { "record", 1, 0, RECORD },
		{ "tenant", 1, 0, TENANT }, { "blocks", 1, 0, BLOCKS }, { "threads", 1, 0, THREADS },
		{ "copy-kib", 1, 0, COPYK }, { "mem-mib", 1, 0, MEM }, { "help", 0, 0, 'h' }, { 0, 0, 0, 0 },
	};
	static char host[256];
	int c;

	while ((c = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (c) {
		case DEVICE: opt.device = atoi(optarg); break;
		case US: opt.kernel_us = atof(optarg); break;
		case DEPTH: opt.depth = atoi(optarg); break;
		case SECONDS: opt.seconds = atof(optarg); break;
		case LAUNCHES: opt.launches = strtoull(optarg, NULL, 10); break;
		case IDLE: opt.idle_ms = atoi(optarg); break;
		case REPORT: opt.report_ms = atoi(optarg); break;
		case RECORD: opt.record = optarg; break;
		case TENANT: opt.tenant = optarg; break;
		case BLOCKS: opt.blocks = atoi(optarg); break;
		case THREADS: opt.threads = atoi(optarg); break;
		case COPYK: opt.copy_kib = atol(optarg); break;
		case MEM: opt.mem_mib = atol(optarg); break;
		case MODE:
			for (c = 0; c <= MIX && strcmp(optarg, mode_names[c]); c++)
				;
			opt.mode = (enum mode)c;
			break;
		case 'h':
			usage(stdout);
			exit(0);
		default:
			usage(stderr);
			exit(2);
		}
	}
	if (optind < argc || opt.mode > MIX || opt.depth < 1 || opt.kernel_us < 0 || opt.blocks < 1 ||
	    opt.threads < 1 || opt.copy_kib < 1 || opt.mem_mib < 0) {
		usage(stderr);
		exit(2);
	}
	if (!opt.tenant)
		opt.tenant = getenv("NVSHARE_SIMGPU_TENANT");
	if (!opt.tenant || !*opt.tenant) {
		gethostname(host, sizeof host - 1);
		opt.tenant = host;
	}
	for (const char *p = opt.tenant; *p; p++)
		if (*p == '"' || *p == '\\' || (unsigned char)*p < ' ') {
			fprintf(stderr, "cuda-busy: --tenant: no quotes, backslashes or control characters\n");
			exit(2);
		}
}

int main(int argc, char **argv)
{
	struct sigaction sa = { .sa_handler = on_signal }, exec = { .sa_handler = on_exec, .sa_flags = SA_NODEFER };
	uint64_t begin, reported;

	parse(argc, argv);
	setenv("NVSHARE_SIMGPU_TENANT", opt.tenant, 1); /* the simulated GPU's log uses it */
	setvbuf(stdout, NULL, _IOLBF, 0);
	sigaction(SIGTERM, &sa, NULL);
	sigaction(SIGINT, &sa, NULL);
	arguments = argv;
	sigaction(SIGUSR2, &exec, NULL);
	if (opt.record && !(record = fopen(opt.record, "a"))) {
		fprintf(stderr, "cuda-busy: open %s: %s\n", opt.record, strerror(errno));
		return 1;
	}
	setup();
	begin = reported = now_ns();
	for (unsigned n = 0; !stop; n++) {
		batch(opt.mode == MIX ? (enum mode)(n % MIX) : opt.mode);
		if (opt.idle_ms && !stop)
			nanosleep(&(struct timespec){ opt.idle_ms / 1000, opt.idle_ms % 1000 * 1000000L }, NULL);
		if (opt.report_ms && now_ns() - reported >= (uint64_t)opt.report_ms * 1000000u) {
			report("progress", begin);
			reported = now_ns();
		}
		if ((opt.seconds > 0 && now_ns() - begin >= (uint64_t)(opt.seconds * 1e9)) ||
		    (opt.launches && launches >= opt.launches))
			break;
	}
	report("done", begin);
	return 0;
}
