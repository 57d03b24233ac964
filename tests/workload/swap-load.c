// SPDX-License-Identifier: Apache-2.0
/*
 * swap-load: a tenant with much memory that works in bursts, pauses between them, and
 * checks at the end whether its memory kept its contents. The same binary runs on the
 * simulated and on a real driver.
 *
 * usage: swap-load --mib N [options], see usage().
 *
 * Prints JSON lines:
 *   ready    all memory is allocated and filled. alloc_s, fill_s; clock: the GPU's clock
 *            and the time of day at the same moment, ns
 *   done     the bursts are done: their number, began_ns and ended_ns (CLOCK_MONOTONIC)
 *   checked  wrong: words of 8 bytes with a wrong value; wrong_on_the_way: the same
 *            between bursts, and wrong counts
 * After "ready" it waits for a line on standard input. The end of standard input ends the
 * program early.
 */
#include "spin.h"

#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#define MAX_PIECES 4096
#define MAX_KERNELS 2048
#define BLOCKS 528 /* of fill and check */
#define THREADS 256

/* The pattern: word i is x ^ x >> 32 with x = (i + seed) * -7046029254386353131. */
static const char pattern_ptx[] =
	".version 6.0\n"
	".target sm_60\n"
	".address_size 64\n"
	".visible .entry nvshare_fill(\n"
	" .param .u64 p0,\n"
	" .param .u64 p1,\n"
	" .param .u64 p2\n"
	")\n"
	"{\n"
	" .reg .pred %p<2>;\n"
	" .reg .b32 %r<7>;\n"
	" .reg .b64 %rd<24>;\n"
	" ld.param.u64 %rd14, [p0];\n"
	" ld.param.u64 %rd15, [p1];\n"
	" shr.u64 %rd1, %rd15, 3;\n"
	" ld.param.u64 %rd16, [p2];\n"
	" mov.u32 %r1, %tid.x;\n"
	" mov.u32 %r2, %ctaid.x;\n"
	" mov.u32 %r3, %ntid.x;\n"
	" mov.u32 %r4, %nctaid.x;\n"
	" mad.lo.s32 %r5, %r2, %r3, %r1;\n"
	" cvt.u64.u32 %rd23, %r5;\n"
	" mul.lo.s32 %r6, %r3, %r4;\n"
	" cvt.u64.u32 %rd3, %r6;\n"
	" mul.wide.u32 %rd17, %r5, 8;\n"
	" add.s64 %rd22, %rd14, %rd17;\n"
	" mul.wide.u32 %rd5, %r6, 8;\n"
	" add.s64 %rd18, %rd16, %rd23;\n"
	" mul.lo.s64 %rd21, %rd18, -7046029254386353131;\n"
	" mul.lo.s64 %rd7, %rd3, 7046029254386353131;\n"
	"LBB0_1:\n"
	" setp.ge.u64 %p1, %rd23, %rd1;\n"
	" @%p1 bra LBB0_3;\n"
	" shr.u64 %rd19, %rd21, 32;\n"
	" xor.b64 %rd20, %rd21, %rd19;\n"
	" st.global.u64 [%rd22], %rd20;\n"
	" add.s64 %rd23, %rd23, %rd3;\n"
	" add.s64 %rd22, %rd22, %rd5;\n"
	" sub.s64 %rd21, %rd21, %rd7;\n"
	" bra.uni LBB0_1;\n"
	"LBB0_3:\n"
	" ret;\n"
	"}\n"
	".visible .entry nvshare_check(\n"
	" .param .u64 p0,\n"
	" .param .u64 p1,\n"
	" .param .u64 p2,\n"
	" .param .u64 p3\n"
	")\n"
	"{\n"
	" .reg .pred %p<3>;\n"
	" .reg .b32 %r<7>;\n"
	" .reg .b64 %rd<27>;\n"
	" ld.param.u64 %rd14, [p3];\n"
	" ld.param.u64 %rd15, [p0];\n"
	" ld.param.u64 %rd16, [p1];\n"
	" shr.u64 %rd1, %rd16, 3;\n"
	" ld.param.u64 %rd17, [p2];\n"
	" mov.u32 %r1, %tid.x;\n"
	" mov.u32 %r2, %ctaid.x;\n"
	" mov.u32 %r3, %ntid.x;\n"
	" mov.u32 %r4, %nctaid.x;\n"
	" mad.lo.s32 %r5, %r2, %r3, %r1;\n"
	" cvt.u64.u32 %rd26, %r5;\n"
	" mul.lo.s32 %r6, %r3, %r4;\n"
	" cvt.u64.u32 %rd3, %r6;\n"
	" mul.wide.u32 %rd18, %r5, 8;\n"
	" add.s64 %rd25, %rd15, %rd18;\n"
	" mul.wide.u32 %rd5, %r6, 8;\n"
	" add.s64 %rd19, %rd17, %rd26;\n"
	" mul.lo.s64 %rd24, %rd19, -7046029254386353131;\n"
	" mul.lo.s64 %rd7, %rd3, 7046029254386353131;\n"
	" bra.uni LBB1_1;\n"
	"LBB1_4:\n"
	" add.s64 %rd26, %rd26, %rd3;\n"
	" add.s64 %rd25, %rd25, %rd5;\n"
	" sub.s64 %rd24, %rd24, %rd7;\n"
	"LBB1_1:\n"
	" setp.ge.u64 %p1, %rd26, %rd1;\n"
	" @%p1 bra LBB1_5;\n"
	" shr.u64 %rd20, %rd24, 32;\n"
	" xor.b64 %rd21, %rd24, %rd20;\n"
	" ld.global.u64 %rd22, [%rd25];\n"
	" setp.eq.s64 %p2, %rd22, %rd21;\n"
	" @%p2 bra LBB1_4;\n"
	" atom.global.add.u64 %rd23, [%rd14], 1;\n"
	" bra.uni LBB1_4;\n"
	"LBB1_5:\n"
	" ret;\n"
	"}\n";

static struct {
	uint64_t mib, piece_mib, seed, bursts, vmm_mib;
	double burst_ms, pause_ms, kernel_us;
	unsigned limit_s;
	const char *record, *tenant;
	int copy;  /* check by copies to the host */
	int memop; /* count bursts by stream memory operations */
} opt = { .piece_mib = 256, .burst_ms = 20, .kernel_us = 1000, .limit_s = 300, .tenant = "?" };

static int pieces;
static CUdeviceptr piece[MAX_PIECES], wrong_at, stamps, counter;
static uint64_t miscounted;
static uint64_t bytes[MAX_PIECES], pairs[2 * MAX_KERNELS];
static uint64_t *host; /* a piece, with opt.copy */
static CUstream stream;
static CUfunction spin, fill, look;
static FILE *record;
static char uuid[48];

static uint64_t word(uint64_t i, uint64_t seed)
{
	uint64_t x = (i + seed) * (uint64_t)-7046029254386353131;

	return x ^ x >> 32;
}

static uint64_t seed_of(int i)
{
	return (opt.seed << 40) + ((uint64_t)i << 32);
}

static void fill_piece(int i)
{
	uint64_t s = seed_of(i);
	void *params[] = { &piece[i], &bytes[i], &s };

	if (!opt.copy) {
		CHECK(cuLaunchKernel(fill, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, params, NULL));
		return;
	}
	for (uint64_t k = 0; k < bytes[i] / 8; k++)
		host[k] = word(k, s);
	CHECK(cuMemcpyHtoD_v2(piece[i], host, bytes[i]));
}

static uint64_t check_piece(int i)
{
	uint64_t s = seed_of(i), bad = 0;
	void *params[] = { &piece[i], &bytes[i], &s, &wrong_at };

	if (!opt.copy) {
		CHECK(cuMemcpyHtoD_v2(wrong_at, &bad, 8));
		CHECK(cuLaunchKernel(look, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, params, NULL));
		CHECK(cuStreamSynchronize(stream));
		CHECK(cuMemcpyDtoH_v2(&bad, wrong_at, 8));
		return bad;
	}
	CHECK(cuMemcpyDtoH_v2(host, piece[i], bytes[i]));
	for (uint64_t k = 0; k < bytes[i] / 8; k++)
		bad += host[k] != word(k, s);
	return bad;
}

/* Runs kernels one after the other; the record gets each one's begin and end. */
static void burst(int kernels, double us)
{
	uint64_t ns = (uint64_t)(us * 1000);
	static uint32_t count;
	uint32_t counted = ++count;

	if (opt.memop) {
		counted = 0;
		CHECK(cuStreamWriteValue32_v2(stream, counter, count, 0));
		CHECK(cuStreamWaitValue32_v2(stream, counter, count, CU_STREAM_WAIT_VALUE_EQ));
		CHECK(cuMemcpyDtoHAsync_v2(&counted, counter, sizeof counted, stream));
	}
	for (int i = 0; i < kernels; i++) {
		uint64_t at = stamps + 16 * (uint64_t)i;
		void *params[] = { &ns, &at };

		CHECK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
	}
	CHECK(cuMemcpyDtoHAsync_v2(pairs, stamps, 16 * (size_t)kernels, stream));
	CHECK(cuStreamSynchronize(stream));
	miscounted += counted != count;
	for (int i = 0; record && i < kernels; i++)
		fprintf(record, "{\"uuid\":\"%s\",\"tenant\":\"%s\",\"pid\":%ld,\"start_ns\":%" PRIu64 ",\"end_ns\":%" PRIu64 "}\n",
			uuid, opt.tenant, (long)getpid(), pairs[2 * i], pairs[2 * i + 1]);
}

static void load_pattern(void)
{
	CUmodule m;

	if (!opt.copy && (cuModuleLoadData(&m, pattern_ptx) || cuModuleGetFunction(&fill, m, "nvshare_fill") ||
			  cuModuleGetFunction(&look, m, "nvshare_check"))) {
		fputs("swap-load: the driver does not take the pattern's code: checks by copies to the host\n", stderr);
		opt.copy = 1;
	}
	if (opt.copy && !(host = malloc(opt.piece_mib << 20))) {
		perror("swap-load");
		exit(1);
	}
}

static void setup(void)
{
	CUcontext ctx;
	CUmodule m;
	CUdevice dev;
	CUuuid id;

	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuDeviceGetUuid(&id, dev));
	strcpy(uuid, "GPU-");
	for (int i = 0; i < 16; i++)
		sprintf(uuid + strlen(uuid), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
			((unsigned char *)&id)[i]);
	CHECK(cuModuleLoadData(&m, ptx));
	CHECK(cuModuleGetFunction(&spin, m, "nvshare_spin"));
	CHECK(cuStreamCreate(&stream, 0));
	CHECK(cuMemAlloc_v2(&stamps, sizeof pairs));
	CHECK(cuMemAlloc_v2(&wrong_at, 8));
	CHECK(cuMemAlloc_v2(&counter, 2 << 20)); /* separate: memory that such an operation names stays on the GPU */
	load_pattern();
}

/*
 * Maps memory for a piece as PyTorch's expandable segments do: in handles of a fixed
 * size, in an address range that was reserved for all pieces.
 */
static CUdeviceptr map_piece(uint64_t size)
{
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = access.location,
				     .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FD };
	static CUdeviceptr next;
	CUdeviceptr base;

	if (!next)
		CHECK(cuMemAddressReserve(&next, (opt.mib + opt.vmm_mib) << 20, 0, 0, 0));
	base = next;
	for (uint64_t part; size; size -= part) {
		CUmemGenericAllocationHandle handle;

		part = size < opt.vmm_mib << 20 ? size : opt.vmm_mib << 20;
		CHECK(cuMemCreate(&handle, part, &prop, 0));
		CHECK(cuMemMap(next, part, 0, handle, 0));
		CHECK(cuMemRelease(handle)); /* the mapping keeps the memory */
		next += part;
	}
	CHECK(cuMemSetAccess(base, next - base, &access, 1));
	return base;
}

static uint64_t time_of_day(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_REALTIME, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Allocates and fills all memory, and prints "ready". */
static void take(void)
{
	uint64_t began = now_ns(), allocated, filled, left = opt.mib << 20, day;

	while (left) {
		uint64_t size = left < opt.piece_mib << 20 ? left : opt.piece_mib << 20;

		if (pieces == MAX_PIECES) {
			fputs("swap-load: too many pieces\n", stderr);
			exit(2);
		}
		bytes[pieces] = size;
		if (opt.vmm_mib)
			piece[pieces++] = map_piece(size);
		else
			CHECK(cuMemAlloc_v2(&piece[pieces++], size));
		left -= size;
	}
	allocated = now_ns();
	for (int i = 0; i < pieces; i++)
		fill_piece(i);
	CHECK(cuStreamSynchronize(stream));
	filled = now_ns();
	burst(1, 1);
	day = time_of_day();
	printf("{\"event\":\"ready\",\"pid\":%ld,\"mib\":%" PRIu64 ",\"pieces\":%d,\"checks\":\"%s\",\"alloc_s\":%.6f,\"fill_s\":%.6f,"
	       "\"gpu_clock_ns\":%" PRIu64 ",\"time_of_day_ns\":%" PRIu64 "}\n", (long)getpid(), opt.mib, pieces,
	       opt.copy ? "by copies" : "on the GPU", (double)(allocated - began) / 1e9, (double)(filled - allocated) / 1e9,
	       pairs[1], day);
}

/* Whether standard input has ended or, with wait, a line came. */
static int ended(int wait)
{
	struct pollfd p = { .fd = 0, .events = POLLIN };
	char c;

	if (poll(&p, 1, wait ? -1 : 0) < 1)
		return 0;
	return read(0, &c, 1) != 1;
}

static void usage(void)
{
	fputs("usage: swap-load --mib N [options]\n"
	      "  --mib N         memory, MiB\n"
	      "  --piece-mib N   in allocations of N MiB (256)\n"
	      "  --seed N        tells one tenant's contents from another's\n"
	      "  --burst-ms X    work between two synchronisations (20)\n"
	      "  --pause-ms X    sleep after that (0)\n"
	      "  --bursts N      how many (0: until standard input ends)\n"
	      "  --kernel-us X   length of a kernel (1000)\n"
	      "  --record FILE   when each kernel ran, as JSON lines\n"
	      "  --tenant NAME   in that file\n"
	      "  --vmm N         memory by the VMM, in handles of N MiB: even, like the other sizes\n"
	      "  --memop         count the bursts by stream memory operations, and check that\n"
	      "  --copy          fill and check by copies, not on the GPU\n"
	      "  --limit S       end with a signal after S seconds (300)\n", stderr);
	exit(2);
}

static void parse(int argc, char **argv)
{
	static const struct option options[] = {
		{ "mib", 1, 0, 'm' }, { "piece-mib", 1, 0, 'p' }, { "seed", 1, 0, 's' }, { "burst-ms", 1, 0, 'b' },
		{ "pause-ms", 1, 0, 'i' }, { "bursts", 1, 0, 'n' }, { "kernel-us", 1, 0, 'k' }, { "record", 1, 0, 'r' },
		{ "tenant", 1, 0, 't' }, { "copy", 0, 0, 'c' }, { "limit", 1, 0, 'l' }, { "vmm", 1, 0, 'v' },
		{ "memop", 0, 0, 'o' }, { 0, 0, 0, 0 },
	};
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'm': opt.mib = strtoull(optarg, NULL, 10); break;
		case 'p': opt.piece_mib = strtoull(optarg, NULL, 10); break;
		case 's': opt.seed = strtoull(optarg, NULL, 10); break;
		case 'b': opt.burst_ms = atof(optarg); break;
		case 'i': opt.pause_ms = atof(optarg); break;
		case 'n': opt.bursts = strtoull(optarg, NULL, 10); break;
		case 'k': opt.kernel_us = atof(optarg); break;
		case 'r': opt.record = optarg; break;
		case 't': opt.tenant = optarg; break;
		case 'v': opt.vmm_mib = strtoull(optarg, NULL, 10); break;
		case 'c': opt.copy = 1; break;
		case 'o': opt.memop = 1; break;
		case 'l': opt.limit_s = (unsigned)atoi(optarg); break;
		default: usage();
		}
	}
	if (optind < argc || !opt.mib || !opt.piece_mib || opt.kernel_us <= 0 || opt.burst_ms <= 0 ||
	    (opt.vmm_mib && (opt.mib | opt.piece_mib | opt.vmm_mib) % 2))
		usage();
}

int main(int argc, char **argv)
{
	uint64_t began, wrong = 0, on_the_way = 0, n = 0, words = 0;
	int kernels;

	parse(argc, argv);
	alarm(opt.limit_s);
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (opt.record && !(record = fopen(opt.record, "w"))) {
		perror(opt.record);
		return 1;
	}
	kernels = (int)(opt.burst_ms * 1000 / opt.kernel_us + 0.5);
	kernels = kernels < 1 ? 1 : kernels > MAX_KERNELS ? MAX_KERNELS : kernels;
	setup();
	take();
	if (ended(1))
		return 0;
	began = now_ns();
	for (; (!opt.bursts || n < opt.bursts) && !ended(0); n++) {
		burst(kernels, opt.kernel_us);
		if (!opt.bursts && n % 4 == 0) /* only where time is not measured */
			on_the_way += check_piece((int)(n / 4) % pieces);
		if (opt.pause_ms > 0)
			nanosleep(&(struct timespec){ (time_t)(opt.pause_ms / 1000), (long)(opt.pause_ms * 1e6) % 1000000000L }, NULL);
	}
	printf("{\"event\":\"done\",\"bursts\":%" PRIu64 ",\"kernels\":%" PRIu64 ",\"began_ns\":%" PRIu64 ",\"ended_ns\":%" PRIu64 "}\n",
	       n, n * (uint64_t)kernels, began, now_ns());
	for (int i = 0; i < pieces; i++) {
		wrong += check_piece(i);
		words += bytes[i] / 8;
	}
	if (record && fclose(record)) {
		perror(opt.record);
		return 1;
	}
	printf("{\"event\":\"checked\",\"wrong\":%" PRIu64 ",\"wrong_on_the_way\":%" PRIu64 ",\"words\":%" PRIu64 "}\n", wrong, on_the_way + miscounted, words);
	return 0;
}
