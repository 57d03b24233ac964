// SPDX-License-Identifier: Apache-2.0
/*
 * rm-probe: what the driver of this machine lets an ordinary process do with its
 * own channels: which are seen, time slices, off and on in the middle of a
 * kernel, and how long that takes. It needs libc and libcuda.so.1; the layer
 * hook/rm is inside. With the shim preloaded it goes through that as well, and
 * NVSHARE_DEBUG=1 shows the groups that the shim notes.
 *
 * usage: rm-probe [-device N] [-json] [-exit-off]
 *   -exit-off  also ends with channels off and a kernel in its middle, which
 *              must not hang
 *
 * Each block of the kernel looks at the GPU's clock (%globaltimer) all the time
 * and keeps the longest time between two looks. Exit status: 0 all that was
 * tried works; 1 something does not, the output says what; 2 the probe could
 * not be made (no driver, no GPU); 3 it hung.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gap.h"
#include "rm.h"
#include "rm_raw.h"

#define ROUNDS     50
#define MAX_BLOCKS 1024
#define HANG_S     120
#define SUBMISSIONS 30
#define MOST_ONS   5
#define NO_TIMING  2u /* of an event */
#define COPY_BYTES (64u << 20)
#define WAITING    64 /* copies at most that wait for the kernel */
#define WAITS      4

/* ---- the driver ---- */

typedef int CUresult;
typedef unsigned long long CUdeviceptr;

#define DRIVER(X)                                                                                       \
	X(cuInit, unsigned)                                                                             \
	X(cuDeviceGetCount, int *)                                                                      \
	X(cuDeviceGet, int *, int)                                                                      \
	X(cuDeviceGetName, char *, int, int)                                                            \
	X(cuDeviceGetAttribute, int *, int, int)                                                        \
	X(cuDevicePrimaryCtxRetain, void **, int)                                                       \
	X(cuCtxSetCurrent, void *)                                                                      \
	X(cuCtxCreate_v2, void **, unsigned, int)                                                       \
	X(cuCtxDestroy_v2, void *)                                                                      \
	X(cuCtxSynchronize, void)                                                                       \
	X(cuStreamCreate, void **, unsigned)                                                            \
	X(cuStreamSynchronize, void *)                                                                  \
	X(cuEventCreate, void **, unsigned)                                                             \
	X(cuEventRecord, void *, void *)                                                                \
	X(cuEventQuery, void *)                                                                         \
	X(cuModuleLoadData, void **, const void *)                                                      \
	X(cuModuleGetFunction, void **, void *, const char *)                                           \
	X(cuMemAlloc_v2, CUdeviceptr *, size_t)                                                         \
	X(cuMemHostAlloc, void **, size_t, unsigned)                                                    \
	X(cuMemcpyDtoH_v2, void *, CUdeviceptr, size_t)                                                 \
	X(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, size_t, void *)                                    \
	X(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, size_t, void *)                              \
	X(cuStreamWaitEvent, void *, void *, unsigned)                                                  \
	X(cuLaunchKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
	  void *, void **, void **)
#define X(name, ...) static CUresult (*name)(__VA_ARGS__);
DRIVER(X)
#undef X
static CUresult (*device_uuid)(uint8_t *, int);

static void fail(int status, const char *format, ...)
{
	va_list list;

	fputs("rm-probe: ", stderr);
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
	fputc('\n', stderr);
	_exit(status);
}

#define CU(call)                                                                        \
	do {                                                                            \
		CUresult rc_ = (call);                                                  \
		if (rc_)                                                                \
			fail(2, "%s: CUDA error %d", #call, rc_);                       \
	} while (0)

static void open_driver(void)
{
	void *h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *own;
	Dl_info it, driver;

	if (!h)
		fail(2, "%s (is the directory of libcuda.so.1 in LD_LIBRARY_PATH?)", dlerror());
#define X(name, ...)                                             \
	*(void **)&name = dlsym(h, #name);                       \
	if (!name)                                               \
		fail(2, "libcuda.so.1 has no %s", #name);
	DRIVER(X)
#undef X
	*(void **)&device_uuid = dlsym(h, "cuDeviceGetUuid_v2");
	if (!device_uuid)
		*(void **)&device_uuid = dlsym(h, "cuDeviceGetUuid");
	if (!device_uuid)
		fail(2, "libcuda.so.1 has no cuDeviceGetUuid");
	/* A simulated driver brings an ioctl of its own; else it is who comes after us. */
	own = dlsym(h, "ioctl");
	if (!own || !dladdr(own, &it) || !dladdr(dlsym(h, "cuDriverGetVersion"), &driver) ||
	    it.dli_fbase != driver.dli_fbase)
		own = dlsym(RTLD_NEXT, "ioctl");
	nvs_rm_set_next((nvs_rm_ioctl *)own);
}

/* ---- what is found ---- */

struct times {
	double p50_ms, p99_ms, max_ms;
	unsigned failed;
};

struct gap {
	double asked_ms, off_ms; /* off_ms: from when it was off until it was to be on, by the host's clock */
	double least_ms, most_ms; /* seen by the blocks */
	enum nvs_rm_result r;
};

#define SLICES 8

static struct {
	char name[128];
	uint8_t uuid[NVS_RM_UUID];
	int blocks;
	struct nvs_rm_state none, one, two, again; /* no context, one, another one, that destroyed */
	enum nvs_rm_result proof;
	uint64_t slice_before, slice_after;
	struct {
		uint64_t us, read;
		enum nvs_rm_result r;
		double ms;
	} slice[SLICES];
	struct gap gap[3];
	struct times off_idle, on_idle, off_busy, on_busy;
	bool copy_while_off;
	int submitted, came_off, came_on; /* while channels are off: came all the same, came when they were on */
	int after_two, after_spare_on;    /* ons that end an off of two offs, and of one after an on too many; 0 is one */
	double copy_gb_s;
	struct behind {
		int waiting;   /* copies that wait for the kernel, each in a stream of its own */
		bool out, in;  /* a copy of another stream came meanwhile, from and to the GPU */
		double out_ms, in_ms;
	} behind[WAITS];
	bool kernel_went_on;
} found;

static const char *doing = "starting";

static void *watch(void *unused)
{
	sleep(HANG_S);
	fprintf(stderr, "rm-probe: hung for %d s while %s\n", HANG_S, doing);
	nvs_rm_channels(found.uuid, true);
	_exit(3);
	return unused;
}

static double ms_since(const struct timespec *t)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)(now.tv_sec - t->tv_sec) * 1e3 + (double)(now.tv_nsec - t->tv_nsec) / 1e6;
}

static struct timespec now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t;
}

static void sleep_ms(double ms)
{
	struct timespec t = { (time_t)(ms / 1e3), (long)(ms * 1e6) % 1000000000L };

	nanosleep(&t, NULL);
}

static void *context, *stream, *copies, *kernel, *pinned;
static CUdeviceptr looks, buffer;

static void launch(double ms)
{
	uint64_t ns = (uint64_t)(ms * 1e6), at = looks;
	void *params[] = { &ns, &at };

	CU(cuLaunchKernel(kernel, (unsigned)found.blocks, 1, 1, 32, 1, 1, 0, stream, params, NULL));
}

static void set_up(int device)
{
	int count, dev, blocks = 0;
	void *second, *module;

	CU(cuInit(0));
	CU(cuDeviceGetCount(&count));
	if (device >= count)
		fail(2, "no device %d, there are %d", device, count);
	CU(cuDeviceGet(&dev, device));
	CU(cuDeviceGetName(found.name, sizeof(found.name), dev));
	CU(device_uuid(found.uuid, dev));
	CU(cuDeviceGetAttribute(&blocks, 16, dev)); /* multiprocessors */
	found.blocks = blocks < 1 ? 1 : blocks > MAX_BLOCKS ? MAX_BLOCKS : blocks;
	nvs_rm_state(found.uuid, &found.none);
	doing = "making contexts";
	CU(cuDevicePrimaryCtxRetain(&context, dev));
	CU(cuCtxSetCurrent(context));
	nvs_rm_state(found.uuid, &found.one);
	CU(cuCtxCreate_v2(&second, 0, dev));
	nvs_rm_state(found.uuid, &found.two);
	CU(cuCtxDestroy_v2(second));
	nvs_rm_state(found.uuid, &found.again);
	CU(cuCtxSetCurrent(context));
	CU(cuStreamCreate(&stream, 1));
	CU(cuStreamCreate(&copies, 1));
	CU(cuModuleLoadData(&module, gap_ptx));
	CU(cuModuleGetFunction(&kernel, module, "nvshare_gap"));
	CU(cuMemAlloc_v2(&looks, MAX_BLOCKS * sizeof(struct looks)));
	CU(cuMemAlloc_v2(&buffer, COPY_BYTES));
	CU(cuMemHostAlloc(&pinned, COPY_BYTES, 0));
	CU(cuMemcpyDtoH_v2(pinned, buffer, COPY_BYTES)); /* warm */
	launch(1);
	CU(cuStreamSynchronize(stream));
}

static void probe_slices(void)
{
	static const uint64_t us[SLICES] = { 1, 50, 200, 2000, 10000, 100000, 1000000, 1000000000 };

	doing = "setting time slices";
	nvs_rm_get_slice(found.uuid, &found.slice_before);
	found.proof = nvs_rm_prove(found.uuid);
	for (unsigned i = 0; i < SLICES; i++) {
		struct timespec t = now();

		found.slice[i].us = us[i];
		found.slice[i].r = nvs_rm_slice(found.uuid, us[i]);
		found.slice[i].ms = ms_since(&t);
		nvs_rm_get_slice(found.uuid, &found.slice[i].read);
	}
	if (found.slice_before)
		nvs_rm_slice(found.uuid, found.slice_before);
	nvs_rm_slice(found.uuid, 0);
	nvs_rm_get_slice(found.uuid, &found.slice_after);
}

static struct gap read_gap(struct gap g)
{
	static struct looks all[MAX_BLOCKS];

	CU(cuStreamSynchronize(stream));
	CU(cuMemcpyDtoH_v2(all, looks, sizeof(all[0]) * (size_t)found.blocks));
	g.least_ms = 1e18;
	for (int i = 0; i < found.blocks; i++) {
		double ms = (double)all[i].gap / 1e6;

		g.least_ms = ms < g.least_ms ? ms : g.least_ms;
		g.most_ms = ms > g.most_ms ? ms : g.most_ms;
	}
	return g;
}

/* A kernel on all multiprocessors; its channels off for so long in its middle. */
static struct gap probe_gap(double ms)
{
	struct gap g = { .asked_ms = ms };
	struct timespec t;

	doing = "waiting for a kernel whose channels were off";
	launch(ms + 200);
	sleep_ms(50);
	if (ms > 0) {
		g.r = nvs_rm_channels(found.uuid, false);
		t = now();
		sleep_ms(ms);
		g.off_ms = g.r == NVS_RM_OK ? ms_since(&t) : 0;
		nvs_rm_channels(found.uuid, true);
	}
	return read_gap(g);
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static struct times times_of(double *ms, unsigned failed)
{
	qsort(ms, ROUNDS, sizeof(*ms), by_size);
	return (struct times){ ms[ROUNDS / 2], ms[ROUNDS * 99 / 100], ms[ROUNDS - 1], failed };
}

static void probe_times(bool busy, struct times *off, struct times *on)
{
	double off_ms[ROUNDS], on_ms[ROUNDS];
	unsigned off_failed = 0, on_failed = 0;

	doing = busy ? "switching beside a kernel" : "switching an idle GPU";
	if (busy)
		launch(ROUNDS * 8);
	sleep_ms(20);
	for (int i = 0; i < ROUNDS; i++) {
		struct timespec t = now();

		off_failed += nvs_rm_channels(found.uuid, false) != NVS_RM_OK;
		off_ms[i] = ms_since(&t);
		sleep_ms(2);
		t = now();
		on_failed += nvs_rm_channels(found.uuid, true) != NVS_RM_OK;
		on_ms[i] = ms_since(&t);
		sleep_ms(2);
	}
	*off = times_of(off_ms, off_failed);
	*on = times_of(on_ms, on_failed);
	CU(cuStreamSynchronize(stream));
}

/* Whether the event comes within a time. */
static bool comes(void *event, double ms)
{
	struct timespec t = now();

	while (ms_since(&t) < ms)
		if (cuEventQuery(event) == 0)
			return true;
	return false;
}

/* Work that is submitted while channels are off waits, and comes when they are on. */
static void probe_submission(void)
{
	void *event;

	doing = "waiting for work that was submitted while channels were off";
	CU(cuEventCreate(&event, NO_TIMING));
	CU(cuStreamSynchronize(stream));
	for (int i = 0; i < SUBMISSIONS && nvs_rm_channels(found.uuid, false) == NVS_RM_OK; i++) {
		launch(0.05);
		CU(cuEventRecord(event, stream));
		found.submitted++;
		found.came_off += comes(event, 2);
		nvs_rm_channels(found.uuid, true);
		found.came_on += comes(event, 1000);
		CU(cuStreamSynchronize(stream));
		sleep_ms(2);
	}
}

/* A kernel whose channels are switched so often, and ons that it then takes until the kernel ends; -1: it ends anyway. */
static int ons_until_it_ends(int ons, int offs)
{
	void *event;
	int more = -1;

	CU(cuEventCreate(&event, NO_TIMING));
	CU(cuStreamSynchronize(stream));
	while (ons-- > 0)
		send_to_all(found.uuid, true);
	launch(50);
	CU(cuEventRecord(event, stream));
	sleep_ms(10);
	while (offs-- > 0)
		send_to_all(found.uuid, false);
	while (!comes(event, 150) && more++ < MOST_ONS)
		send_to_all(found.uuid, true);
	return more;
}

/* The driver counts how often a channel was taken off. */
static void probe_counting(void)
{
	doing = "waiting for a kernel whose channels were taken off several times";
	found.after_two = ons_until_it_ends(0, 2);
	found.after_spare_on = ons_until_it_ends(1, 1);
}

/* Copy engines stay on: memory can be copied while the kernel stands still. */
static void probe_copy(void)
{
	struct timespec t;

	doing = "copying while channels are off";
	launch(400);
	sleep_ms(50);
	if (nvs_rm_channels(found.uuid, false) == NVS_RM_OK) {
		t = now();
		CU(cuMemcpyDtoHAsync_v2(pinned, buffer, COPY_BYTES, copies));
		CU(cuStreamSynchronize(copies));
		found.copy_gb_s = COPY_BYTES / 1e6 / ms_since(&t);
		found.copy_while_off = true;
	}
	nvs_rm_channels(found.uuid, true);
	doing = "waiting for the kernel after the copy";
	CU(cuStreamSynchronize(stream));
	found.kernel_went_on = true;
}

/*
 * Copies that wait for the kernel may stand before others in the queue of a copy engine:
 * then no memory can leave while the kernel stands still.
 */
static struct behind probe_behind(int waiting)
{
	static void *streams[WAITING], *kernel_done, *copied;
	struct behind b = { .waiting = waiting };
	struct timespec t;

	doing = "copying behind copies that wait for a kernel";
	for (int i = 0; i < WAITING && !streams[i]; i++)
		CU(cuStreamCreate(&streams[i], 1));
	if (!kernel_done) {
		CU(cuEventCreate(&kernel_done, NO_TIMING));
		CU(cuEventCreate(&copied, NO_TIMING));
	}
	launch(100);
	CU(cuEventRecord(kernel_done, stream));
	for (int i = 0; i < waiting; i++) {
		CU(cuStreamWaitEvent(streams[i], kernel_done, 0));
		if (i % 2)
			CU(cuMemcpyHtoDAsync_v2(buffer, pinned, 1 << 20, streams[i]));
		else
			CU(cuMemcpyDtoHAsync_v2(pinned, buffer, 1 << 20, streams[i]));
	}
	sleep_ms(20);
	if (nvs_rm_channels(found.uuid, false) == NVS_RM_OK) {
		t = now();
		CU(cuMemcpyDtoHAsync_v2(pinned, buffer, COPY_BYTES, copies));
		CU(cuEventRecord(copied, copies));
		b.out = comes(copied, 200);
		b.out_ms = ms_since(&t);
		t = now();
		CU(cuMemcpyHtoDAsync_v2(buffer, pinned, COPY_BYTES, copies));
		CU(cuEventRecord(copied, copies));
		b.in = b.out && comes(copied, 200);
		b.in_ms = ms_since(&t);
	}
	nvs_rm_channels(found.uuid, true);
	CU(cuCtxSynchronize());
	return b;
}

/* ---- the report ---- */

static bool gap_right(const struct gap *g)
{
	return g->r == NVS_RM_OK && g->least_ms >= g->off_ms * 0.98;
}

static bool all_right(void)
{
	bool ok = found.proof == NVS_RM_OK && found.kernel_went_on && found.copy_while_off &&
		  found.submitted == SUBMISSIONS && found.came_on == SUBMISSIONS && !found.came_off &&
		  found.after_spare_on == 0;

	for (unsigned i = 1; i < 3; i++)
		ok &= gap_right(&found.gap[i]);
	ok &= !found.off_idle.failed && !found.on_idle.failed && !found.off_busy.failed && !found.on_busy.failed;
	ok &= found.two.compute_groups == found.one.compute_groups + 1 &&
	      found.again.compute_groups == found.one.compute_groups;
	return ok;
}

static void print_state(const char *what, const struct nvs_rm_state *s)
{
	printf("  %-24s %u compute groups with %u channels, %u other groups with %u, %u channels without a group%s\n",
	       what, s->compute_groups, s->channels, s->other_groups, s->other_channels, s->bare_channels,
	       s->overflow ? " (more than the table holds)" : "");
}

static void print_times(const char *what, const struct times *t)
{
	printf("  %-24s p50 %.3f, p99 %.3f, max %.3f ms%s\n", what, t->p50_ms, t->p99_ms, t->max_ms,
	       t->failed ? " (FAILED)" : "");
}

static void print_text(void)
{
	printf("%s, driver %s\nseen through ioctl:\n", found.name,
	       found.one.driver[0] ? found.one.driver : "(its version was not seen)");
	print_state("before a context", &found.none);
	print_state("with one", &found.one);
	print_state("with another", &found.two);
	print_state("that destroyed", &found.again);
	printf("time slice: %llu us before, %llu after; set, read back, restored: %s\n",
	       (unsigned long long)found.slice_before, (unsigned long long)found.slice_after,
	       nvs_rm_text(found.proof));
	for (unsigned i = 0; i < SLICES; i++)
		printf("  %10llu us: reads %llu, %s, %.3f ms\n", (unsigned long long)found.slice[i].us,
		       (unsigned long long)found.slice[i].read, nvs_rm_text(found.slice[i].r), found.slice[i].ms);
	printf("longest gap in the clock of a kernel of %d blocks:\n", found.blocks);
	for (unsigned i = 0; i < 3; i++)
		printf("  off for %6.1f ms (%6.1f): %.3f to %.3f ms in all blocks, %s\n", found.gap[i].asked_ms,
		       found.gap[i].off_ms, found.gap[i].least_ms, found.gap[i].most_ms,
		       i == 0 ? "never off" : gap_right(&found.gap[i]) ? "stood still and went on"
			      : found.gap[i].r == NVS_RM_OK ? "NOT OFF: the driver fakes it" : nvs_rm_text(found.gap[i].r));
	printf("how long it takes, of %d:\n", ROUNDS);
	print_times("off, nothing runs", &found.off_idle);
	print_times("on, nothing runs", &found.on_idle);
	print_times("off, a kernel runs", &found.off_busy);
	print_times("on, a kernel runs", &found.on_busy);
	printf("submitted while channels are off: %d; came all the same: %d, when they were on: %d\n", found.submitted,
	       found.came_off, found.came_on);
	printf("channels are on again after two offs and %d ons, and after one on too many, one off and %d ons\n",
	       found.after_two + 1, found.after_spare_on + 1);
	printf("a copy while channels are off: %s, %.1f GB/s; the kernel %s\n", found.copy_while_off ? "done" : "NOT TRIED",
	       found.copy_gb_s, found.kernel_went_on ? "went on" : "DID NOT GO ON");
	for (int i = 0; i < WAITS; i++)
		printf("behind %d copies that wait for the kernel: a copy from the GPU %s after %.1f ms, to the GPU %s after %.1f ms\n",
		       found.behind[i].waiting, found.behind[i].out ? "done" : "NOT DONE", found.behind[i].out_ms,
		       found.behind[i].in ? "done" : "NOT DONE", found.behind[i].in_ms);
	if (found.one.bare_channels || !found.one.compute_groups)
		puts("channels without a group, or no group: under MPS, or a driver that this layer does not know");
	puts(all_right() ? "all of it works" : "NOT all of it works");
}

static void json_state(const char *name, const struct nvs_rm_state *s)
{
	printf("\"%s\":{\"compute_groups\":%u,\"channels\":%u,\"other_groups\":%u,\"other_channels\":%u,"
	       "\"bare_channels\":%u,\"overflow\":%s},",
	       name, s->compute_groups, s->channels, s->other_groups, s->other_channels, s->bare_channels,
	       s->overflow ? "true" : "false");
}

static void json_times(const char *name, const struct times *t)
{
	printf("\"%s\":{\"p50_ms\":%.4f,\"p99_ms\":%.4f,\"max_ms\":%.4f,\"failed\":%u},", name, t->p50_ms, t->p99_ms,
	       t->max_ms, t->failed);
}

static void print_json(void)
{
	printf("{\"device\":\"%s\",\"driver\":\"%s\",", found.name, found.one.driver);
	json_state("no_context", &found.none);
	json_state("one_context", &found.one);
	json_state("two_contexts", &found.two);
	json_state("one_destroyed", &found.again);
	printf("\"slice\":{\"before_us\":%llu,\"after_us\":%llu,\"proof\":\"%s\",\"tried\":[",
	       (unsigned long long)found.slice_before, (unsigned long long)found.slice_after, nvs_rm_text(found.proof));
	for (unsigned i = 0; i < SLICES; i++)
		printf("%s{\"set_us\":%llu,\"read_us\":%llu,\"result\":\"%s\",\"ms\":%.4f}", i ? "," : "",
		       (unsigned long long)found.slice[i].us, (unsigned long long)found.slice[i].read,
		       nvs_rm_text(found.slice[i].r), found.slice[i].ms);
	printf("]},\"gaps\":[");
	for (unsigned i = 0; i < 3; i++)
		printf("%s{\"asked_ms\":%.1f,\"off_ms\":%.3f,\"least_ms\":%.3f,\"most_ms\":%.3f,\"result\":\"%s\"}",
		       i ? "," : "", found.gap[i].asked_ms, found.gap[i].off_ms, found.gap[i].least_ms,
		       found.gap[i].most_ms, nvs_rm_text(found.gap[i].r));
	printf("],");
	json_times("off_idle", &found.off_idle);
	json_times("on_idle", &found.on_idle);
	json_times("off_busy", &found.off_busy);
	json_times("on_busy", &found.on_busy);
	printf("\"submitted\":%d,\"came_off\":%d,\"came_on\":%d,\"ons_after_two_offs\":%d,\"ons_after_a_spare_on\":%d,",
	       found.submitted, found.came_off, found.came_on, found.after_two + 1, found.after_spare_on + 1);
	printf("\"behind\":[");
	for (int i = 0; i < WAITS; i++)
		printf("%s{\"waiting\":%d,\"out\":%s,\"out_ms\":%.3f,\"in\":%s,\"in_ms\":%.3f}", i ? "," : "",
		       found.behind[i].waiting, found.behind[i].out ? "true" : "false", found.behind[i].out_ms,
		       found.behind[i].in ? "true" : "false", found.behind[i].in_ms);
	printf("],\"copy_while_off_gb_s\":%.2f,\"kernel_went_on\":%s,\"all_right\":%s}\n", found.copy_gb_s,
	       found.kernel_went_on ? "true" : "false", all_right() ? "true" : "false");
}

int main(int argc, char **argv)
{
	bool json = false, exit_off = false;
	int device = 0, status;
	pthread_t t;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "-json"))
			json = true;
		else if (!strcmp(argv[i], "-exit-off"))
			exit_off = true;
		else if (!strcmp(argv[i], "-device") && i + 1 < argc)
			device = atoi(argv[++i]);
		else
			fail(2, "usage: rm-probe [-device N] [-json] [-exit-off]");
	}
	pthread_create(&t, NULL, watch, NULL);
	open_driver();
	set_up(device);
	probe_slices();
	found.gap[0] = probe_gap(0);
	found.gap[1] = probe_gap(50);
	found.gap[2] = probe_gap(300);
	probe_times(false, &found.off_idle, &found.on_idle);
	probe_times(true, &found.off_busy, &found.on_busy);
	probe_copy();
	for (int i = 0; i < WAITS; i++)
		found.behind[i] = probe_behind((const int[WAITS]){ 0, 1, 8, WAITING }[i]);
	probe_submission();
	probe_counting();
	if (json)
		print_json();
	else
		print_text();
	fflush(stdout);
	status = !all_right();
	if (exit_off) {
		doing = "ending with channels off";
		launch(500);
		sleep_ms(50);
		nvs_rm_channels(found.uuid, false);
	}
	return status;
}
