// SPDX-License-Identifier: Apache-2.0
/*
 * The simulated GPU's own scheduler, used as the shim uses the real one: through
 * hook/rm, which is inside this program and finds the driver's channels by
 * watching its requests. Time slices, channels off and on in the middle of a
 * kernel, what may not happen meanwhile, and drivers that lack or fake it.
 */
#include "check.h"
#include "rm.h"
#include "shared.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define SIZE  (2ull << 20)
#define WORDS (SIZE / 8)

static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n"
			  ".visible .entry nvshare_add() { ret; }\n.visible .entry nvshare_gap() { ret; }\n";

static uint8_t gpu0[NVS_RM_UUID];
static CUcontext ctx;
static CUstream s, t;
static CUmodule module;

static struct { /* shared with other processes */
	volatile int ready;
	uint64_t stamp[2][2];
} *sh;

static CUresult launch(const char *name, CUstream stream, uint64_t a, uint64_t b, uint64_t c)
{
	void *params[] = { &a, &b, &c };
	CUfunction f;

	CU(cuModuleGetFunction(&f, module, name));
	return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static void begin(void)
{
	CUuuid id;

	/* the library is linked, so its ioctl is the next one of the program's */
	nvs_rm_set_next((nvs_rm_ioctl *)dlsym(RTLD_NEXT, "ioctl"));
	CU(cuInit(0));
	CU(cuDeviceGetUuid_v2(&id, 0));
	memcpy(gpu0, &id, sizeof gpu0);
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
	CU(cuModuleLoadData(&module, ptx));
}

static enum nvs_rm_result off(void)
{
	return nvs_rm_channels(gpu0, false);
}

static enum nvs_rm_result on(void)
{
	return nvs_rm_channels(gpu0, true);
}

static struct nvs_rm_state state(void)
{
	struct nvs_rm_state st;

	nvs_rm_state(gpu0, &st);
	return st;
}

static void what_a_context_has(void)
{
	CUcontext second;
	uint64_t us;

	begin();
	CHECK(state().compute_groups == 1 && state().channels == 8 && state().other_groups == 3);
	CHECK(!strcmp(state().driver, "580.159.04") && state().bare_channels == 0);
	CU(cuCtxCreate_v2(&second, 0, 0));
	CHECK(state().compute_groups == 2 && state().channels == 16);
	CU(cuCtxDestroy_v2(second));
	CHECK(state().compute_groups == 1);
	CHECK(nvs_rm_prove(gpu0) == NVS_RM_OK && nvs_rm_get_slice(gpu0, &us) == NVS_RM_OK && us == 2048);
	CHECK(nvs_rm_slice(gpu0, 300) == NVS_RM_OK && nvs_rm_get_slice(gpu0, &us) == NVS_RM_OK && us == 300);
}

static const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					  .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };

static CUmemGenericAllocationHandle map(CUdeviceptr va)
{
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle h;

	CU(cuMemCreate(&h, SIZE, &prop, 0));
	CU(cuMemMap(va, SIZE, 0, h, 0));
	CU(cuMemSetAccess(va, SIZE, &access, 1));
	return h;
}

/* A kernel in its middle, its channels off: it stands still, however long. */
static CUdeviceptr half_a_kernel(CUmemGenericAllocationHandle *h)
{
	uint64_t begun = 0;
	CUdeviceptr va;

	CU(cuMemAddressReserve(&va, SIZE, 0, 0, 0));
	*h = map(va);
	CU(cuMemsetD8Async(va, 0, SIZE, s));
	CU(cuStreamSynchronize(s));
	CU(launch("nvshare_add", s, va, SIZE, 40 * MS));
	while (!begun) { /* it adds 1 when it starts, and 1 when it ends */
		CU(cuMemcpyDtoHAsync_v2(&begun, va, sizeof begun, t));
		CU(cuStreamSynchronize(t));
	}
	CHECK(off() == NVS_RM_OK && state().off);
	if (cuStreamQuery(s) == CUDA_SUCCESS) { /* a slow machine: it was over before */
		CHECK(on() == NVS_RM_OK);
		return 0;
	}
	usleep(60000);
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	return va;
}

static void memory_moves_under_a_kernel_that_is_off(void)
{
	CUmemGenericAllocationHandle h;
	CUdeviceptr va;
	uint64_t *away;
	size_t free0, free1, total;

	begin();
	while (!(va = half_a_kernel(&h)))
		;
	CU(cuMemHostAlloc((void **)&away, SIZE, 0));
	CU(cuMemGetInfo_v2(&free0, &total));
	CU(cuMemcpyDtoHAsync_v2(away, va, SIZE, t)); /* copies go on */
	CU(cuStreamSynchronize(t));
	CHECK(away[0] == 1 && away[WORDS - 1] == 1);
	CU(cuMemUnmap(va, SIZE));
	CU(cuMemRelease(h));
	CU(cuMemGetInfo_v2(&free1, &total));
	CHECK(free1 == free0 + SIZE);
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	map(va);
	CU(cuMemcpyHtoDAsync_v2(va, away, SIZE, t));
	CU(cuStreamSynchronize(t));
	CHECK(on() == NVS_RM_OK);
	CU(cuStreamSynchronize(s));
	CU(cuMemcpyDtoH_v2(away, va, SIZE));
	for (size_t i = 0; i < WORDS; i++)
		CHECK(away[i] == 2);
}

static void memory_that_is_not_back_kills(void)
{
	CUmemGenericAllocationHandle h;
	CUdeviceptr va;

	begin();
	while (!(va = half_a_kernel(&h)))
		;
	CU(cuMemUnmap(va, SIZE));
	CHECK(on() == NVS_RM_OK);
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(s));
}

static void a_kernel_sees_the_gap(void)
{
	uint64_t looks[4], t0, asked;
	CUdeviceptr d;

	begin();
	CU(cuMemAlloc_v2(&d, sizeof looks));
	do { /* again where a slow machine took it off too late */
		CU(launch("nvshare_gap", s, 50 * MS, d, 0));
		CHECK(off() == NVS_RM_OK);
		t0 = mono();
		usleep(80000);
		asked = mono() - t0;
		CHECK(on() == NVS_RM_OK);
		CU(cuStreamSynchronize(s));
		CU(cuMemcpyDtoH_v2(looks, d, sizeof looks));
	} while (looks[1] <= t0);
	CHECK(looks[2] >= asked && looks[1] - looks[0] >= 50 * MS + asked);
	CHECK(looks[3] >= looks[0] && looks[3] + looks[2] <= looks[1]);
}

/* ---- what may not happen while channels are off ---- */

static void who_waits_puts_them_on(void)
{
	begin();
	CU(launch("nvshare_spin", s, 10 * MS, 0, 0));
	CHECK(off() == NVS_RM_OK);
	nvs_rm_keep_on(gpu0); /* what a wrapper of a call that waits does */
	CHECK(off() == NVS_RM_BUSY);
	CU(cuCtxDestroy_v2(ctx));
	nvs_rm_let_go(gpu0);
	CHECK(off() == NVS_RM_UNSEEN && !state().off);
}

static void a_context_made_meanwhile_is_on(void)
{
	CUcontext second;

	begin();
	CHECK(off() == NVS_RM_OK);
	CU(cuCtxCreate_v2(&second, 0, 0));
	CU(launch("nvshare_spin", NULL, 1 * MS, 0, 0));
	CU(cuCtxSynchronize()); /* ends */
	CHECK(off() == NVS_RM_OK); /* takes both */
	CU(launch("nvshare_spin", NULL, 1 * MS, 0, 0));
	usleep(20000);
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
	CHECK(on() == NVS_RM_OK);
}

static void ends_with_a_kernel_off(void)
{
	begin();
	CU(launch("nvshare_spin", s, 5 * MS, 0, 0));
	CHECK(off() == NVS_RM_OK);
	exit(0);
}

static void forks_while_off(void)
{
	int status;
	pid_t pid;

	begin();
	CU(launch("nvshare_spin", s, 5 * MS, 0, 0));
	CHECK(off() == NVS_RM_OK);
	pid = fork();
	if (!pid) {
		CHECK(!state().compute_groups && on() == NVS_RM_UNSEEN);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && !status);
	CHECK(state().off && on() == NVS_RM_OK);
	CU(cuStreamSynchronize(s));
}

static pid_t spawn(void (*fn)(void))
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid) {
		fn();
		_exit(0);
	}
	return pid;
}

static void off_until_killed(void)
{
	begin();
	CU(launch("nvshare_spin", s, 3600000 * MS, 0, 0));
	CHECK(off() == NVS_RM_OK);
	sh->ready = 1;
	for (;;)
		pause();
}

static void others_work_while_it_is_off_and_when_it_was_killed(void)
{
	pid_t pid;

	sh->ready = 0;
	pid = spawn(off_until_killed);
	while (!sh->ready)
		usleep(1000);
	begin();
	CU(launch("nvshare_spin", s, 5 * MS, 0, 0));
	CU(cuStreamSynchronize(s)); /* would take an hour beside one that is on */
	CHECK(!kill(pid, SIGKILL) && waitpid(pid, NULL, 0) == pid);
	CU(launch("nvshare_spin", s, 5 * MS, 0, 0));
	CU(cuStreamSynchronize(s));
	CHECK(!state().off);
}

/* ---- slices ---- */

static uint64_t slice_us[2], work_ns[2];
static int who;

static void works(void)
{
	CUdeviceptr d;

	begin();
	if (slice_us[who])
		CHECK(nvs_rm_slice(gpu0, slice_us[who]) == NVS_RM_OK);
	CU(cuMemAlloc_v2(&d, 16));
	__atomic_add_fetch(&sh->ready, 1, __ATOMIC_SEQ_CST);
	while (sh->ready < 2)
		;
	CU(launch("nvshare_spin", s, work_ns[who], d, 0));
	CU(cuStreamSynchronize(s));
	CU(cuMemcpyDtoH_v2((void *)sh->stamp[who], d, 16));
}

static double least(double a, double b)
{
	return a < b ? a : b;
}

/* What the first of two gets while both work, and both together, of the GPU. */
static void share(uint64_t us0, uint64_t us1, double *first, double *both)
{
	double overlap, from, to, done[2];

	slice_us[0] = us0, slice_us[1] = us1;
	work_ns[0] = work_ns[1] = 600 * MS;
	do {
		pid_t pid[2];
		int status;

		sh->ready = 0;
		for (who = 0; who < 2; who++)
			pid[who] = spawn(works);
		for (int i = 0; i < 2; i++)
			CHECK(waitpid(pid[i], &status, 0) == pid[i] && !status);
		from = (double)(sh->stamp[0][0] > sh->stamp[1][0] ? sh->stamp[0][0] : sh->stamp[1][0]);
		to = least((double)sh->stamp[0][1], (double)sh->stamp[1][1]);
		overlap = to - from;
	} while (overlap < 300e6); /* a slow machine: they did not meet */
	/* who began before, or ended later, was alone then */
	for (int i = 0; i < 2; i++)
		done[i] = 600e6 - (from - (double)sh->stamp[i][0]) - ((double)sh->stamp[i][1] - to);
	*first = done[0] / (done[0] + done[1]);
	*both = (done[0] + done[1]) / overlap;
}

static void slices_share_in_proportion(void)
{
	double first, both;

	share(0, 0, &first, &both); /* 2048 us each, 140 us between */
	fprintf(stderr, "default slices: %.3f, together %.3f\n", first, both);
	CHECK(first > 0.48 && first < 0.52 && both > 0.92 && both < 0.95);
	share(30000, 10000, &first, &both);
	fprintf(stderr, "30 and 10 ms: %.3f, together %.3f\n", first, both);
	CHECK(first > 0.71 && first < 0.79 && both > 0.985);
	share(200, 200, &first, &both);
	fprintf(stderr, "0.2 ms: %.3f, together %.3f\n", first, both);
	CHECK(first > 0.48 && first < 0.52 && both < 0.62);
}

/* ---- what the log has ---- */

static const struct sim_log *map_log(void)
{
	char path[512];
	const struct sim_log *log;
	int f;

	snprintf(path, sizeof path, "%s/log", getenv(SIM_DIR_ENV));
	CHECK((f = open(path, O_RDONLY)) >= 0);
	log = mmap(NULL, (size_t)lseek(f, 0, SEEK_END), PROT_READ, MAP_SHARED, f, 0);
	CHECK(log != MAP_FAILED && log->next <= log->capacity);
	close(f);
	return log;
}

/* How many pieces of compute work were ever logged. */
static uint64_t logged(void)
{
	const struct sim_log *log = map_log();
	uint64_t n = 0;

	for (uint64_t i = 0; i < log->next; i++)
		n += log->record[i].kind == SIM_KERNEL || log->record[i].kind == SIM_DTOD;
	return n;
}

/* An event waits for the channels. It is no work: beside another process it harms nobody. */
static void an_event_is_no_work(void)
{
	uint64_t before;
	CUevent e;

	begin();
	CU(cuEventCreate(&e, 0));
	CU(launch("nvshare_spin", s, 1 * MS, 0, 0));
	CU(cuStreamSynchronize(s));
	before = logged();
	CHECK(before > 0 && off() == NVS_RM_OK);
	CU(cuEventRecord(e, s));
	EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	CHECK(on() == NVS_RM_OK);
	CU(cuEventSynchronize(e));
	CHECK(logged() == before);
	CHECK(off() == NVS_RM_OK);
	CU(cuEventRecord(e, s));
	CU(launch("nvshare_spin", s, 1 * MS, 0, 0));
	CHECK(on() == NVS_RM_OK);
	CU(cuStreamSynchronize(s));
	CHECK(logged() == before + 1);
}

static void works_until_killed(void)
{
	begin();
	CU(launch("nvshare_spin", s, 3600000 * MS, 0, 0));
	sh->ready = 1;
	for (;;)
		pause();
}

/* Who was killed works no more when another one's channels come on: the log has its end before. */
static void what_comes_on_is_after_a_death(void)
{
	const struct sim_record *death = NULL, *rest = NULL;
	const struct sim_log *log;
	pid_t pid;

	sh->ready = 0;
	pid = spawn(works_until_killed);
	while (!sh->ready)
		usleep(1000);
	begin();
	CU(launch("nvshare_spin", s, 3600000 * MS, 0, 0));
	CHECK(off() == NVS_RM_OK);
	CHECK(!kill(pid, SIGKILL) && waitpid(pid, NULL, 0) == pid);
	CHECK(on() == NVS_RM_OK);
	log = map_log();
	for (uint64_t i = 0; i < log->next; i++) {
		const struct sim_record *r = &log->record[i];

		if (r->kind == SIM_EXIT && r->pid == (uint32_t)pid)
			death = r;
		if (r->kind == SIM_KERNEL && r->pid == (uint32_t)getpid())
			rest = r;
	}
	CHECK(death && rest && death < rest && death->end_ns <= rest->submit_ns);
}

/* ---- other drivers ---- */

static void drivers_that_lack_or_fake_it(void)
{
	static const struct {
		const char *mode;
		enum nvs_rm_result slice, channels;
	} want[] = {
		{ "absent", NVS_RM_REFUSED, NVS_RM_REFUSED }, { "refused", NVS_RM_REFUSED, NVS_RM_REFUSED },
		{ "faked", NVS_RM_FAKED, NVS_RM_OK },	      { "ignored", NVS_RM_OK, NVS_RM_OK },
		{ "hidden", NVS_RM_UNSEEN, NVS_RM_UNSEEN },
	};

	for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
		int status;
		pid_t pid = fork();

		if (!pid) {
			setenv("NVSHARE_SIMGPU_RM", want[i].mode, 1);
			begin();
			EXPECT(want[i].slice, nvs_rm_prove(gpu0));
			EXPECT(want[i].channels, off());
			CU(launch("nvshare_spin", s, 1 * MS, 0, 0));
			CU(cuStreamSynchronize(s)); /* nothing was taken off */
			_exit(0);
		}
		CHECK(waitpid(pid, &status, 0) == pid && !status);
	}
}

int main(void)
{
	static void (*const cases[])(void) = {
		what_a_context_has,
		memory_moves_under_a_kernel_that_is_off,
		memory_that_is_not_back_kills,
		a_kernel_sees_the_gap,
		who_waits_puts_them_on,
		a_context_made_meanwhile_is_on,
		ends_with_a_kernel_off,
		forks_while_off,
		others_work_while_it_is_off_and_when_it_was_killed,
		slices_share_in_proportion,
		an_event_is_no_work,
		what_comes_on_is_after_a_death,
		drivers_that_lack_or_fake_it,
	};

	sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(sh != MAP_FAILED);
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		int status;
		pid_t pid = spawn(cases[i]);

		if (waitpid(pid, &status, 0) != pid || status) {
			fprintf(stderr, "case %zu: status 0x%x\n", i, status);
			return 1;
		}
	}
	return 0;
}
