// SPDX-License-Identifier: Apache-2.0
/*
 * Several processes on one GPU: one engine, finite memory, and nothing left
 * of a process that was killed. Also what fork does, and who sees which GPU.
 */
#include "check.h"
#include "shared.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

static struct { /* shared with the children */
	volatile int go;
	uint64_t stamp[2][20][2];
} *sh;

static const struct sim_log *map_log(void)
{
	char path[4096];
	struct stat sb;
	void *p;
	int f;

	snprintf(path, sizeof path, "%s/log", getenv(SIM_DIR_ENV));
	f = open(path, O_RDONLY);
	CHECK(f >= 0 && !fstat(f, &sb));
	p = mmap(NULL, (size_t)sb.st_size, PROT_READ, MAP_SHARED, f, 0);
	CHECK(p != MAP_FAILED);
	close(f);
	return p;
}

/* Runs fn in a child before this process has called cuInit. */
static pid_t child(void (*fn)(int), int arg)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid) {
		fn(arg);
		exit(0); /* with destructors: a clean leave */
	}
	return pid;
}

static void reap(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void twenty_kernels(int who)
{
	struct gpu g = gpu_open(0);
	CUdeviceptr d;
	CUstream s;

	CU(cuMemAlloc_v2(&d, 20 * 16));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	__atomic_add_fetch(&sh->go, 1, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&sh->go, __ATOMIC_SEQ_CST) < 2)
		usleep(100);
	for (int i = 0; i < 20; i++)
		CU(spin(&g, s, 2 * MS, d + 16 * (unsigned)i));
	CU(cuStreamSynchronize(s));
	CU(cuMemcpyDtoH_v2(sh->stamp[who], d, 20 * 16));
}

static void processes_share_one_engine(void)
{
	const struct sim_log *log;
	pid_t a, b;
	int starts = 0, exits = 0, kernels = 0;

	sh->go = 0;
	a = child(twenty_kernels, 0);
	b = child(twenty_kernels, 1);
	reap(a);
	reap(b);
	for (int who = 0; who < 2; who++)
		for (int i = 0; i < 20; i++)
			CHECK(sh->stamp[who][i][1] - sh->stamp[who][i][0] >= 2 * MS &&
			      (!i || sh->stamp[who][i][0] >= sh->stamp[who][i - 1][1]));
	/* neither had the engine while the other had it */
	CHECK((sh->stamp[0][19][1] > sh->stamp[1][19][1] ? sh->stamp[0][19][1] : sh->stamp[1][19][1]) -
		      (sh->stamp[0][0][0] < sh->stamp[1][0][0] ? sh->stamp[0][0][0] : sh->stamp[1][0][0]) >= 80 * MS);
	log = map_log();
	CHECK(log->magic == SIM_LOG_MAGIC && log->capacity == 4096);
	for (uint64_t i = 0; i < log->next; i++) {
		const struct sim_record *r = &log->record[i];

		CHECK(r->submit_ns <= r->start_ns && r->start_ns <= r->end_ns);
		starts += r->kind == SIM_START;
		exits += r->kind == SIM_EXIT;
		if (r->kind == SIM_KERNEL) {
			kernels += (int)r->count;
			CHECK((r->busy_ns ? r->busy_ns : r->end_ns - r->start_ns) == r->count * 2 * MS);
			CHECK(r->pid == (uint32_t)a || r->pid == (uint32_t)b);
		}
	}
	CHECK(starts == 2 && exits == 2 && kernels == 40);
	munmap((void *)log, sizeof *log);
}

static void hog(int unused)
{
	struct gpu g = gpu_open(0);
	CUdeviceptr d;

	(void)unused;
	CU(cuMemAlloc_v2(&d, 60ull << 20));
	CU(spin(&g, NULL, 3600000 * MS, 0));
	__atomic_store_n(&sh->go, 1, __ATOMIC_SEQ_CST);
	for (;;)
		pause();
}

/* Ends with this process initialised: later tests may not fork and use CUDA. */
static void a_killed_process_leaves_nothing(void)
{
	struct gpu g;
	CUdeviceptr d;
	size_t f, t;
	pid_t pid;

	sh->go = 0;
	pid = child(hog, 0);
	while (!__atomic_load_n(&sh->go, __ATOMIC_SEQ_CST))
		usleep(100);
	g = gpu_open(0);
	EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&d, 8ull << 20));
	CU(cuMemGetInfo_v2(&f, &t));
	CHECK(f == 4ull << 20);
	CHECK(!kill(pid, SIGKILL));
	CHECK(waitpid(pid, NULL, 0) == pid);
	CU(cuMemAlloc_v2(&d, 60ull << 20));
	CU(spin(&g, NULL, 3 * MS, d));
	CU(cuCtxSynchronize()); /* would take an hour behind the dead one's kernel */
	CU(cuMemFree_v2(d));
	{
		const struct sim_log *log = map_log();
		uint64_t died = 0;

		for (uint64_t i = 0; i < log->next; i++) {
			const struct sim_record *r = &log->record[i];

			if (r->kind == SIM_EXIT && r->pid == (uint32_t)pid)
				died = r->end_ns;
			if (r->kind == SIM_KERNEL && r->pid == (uint32_t)getpid())
				CHECK(died && r->submit_ns >= died);
		}
		CHECK(died);
	}
}

static void a_forked_child_has_no_cuda(void)
{
	pid_t pid = fork();
	int n;

	if (!pid) {
		EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuInit(0));
		EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCtxSynchronize());
		exit(0);
	}
	reap(pid);
	CU(cuDeviceGetCount(&n)); /* and the parent is none the worse */
	CU(cuCtxSynchronize());
}

static void see(int which)
{
	CUuuid id;
	int n;

	if (which == 0) {
		setenv("NVSHARE_SIMGPU_GPU_0", "", 1);
		setenv("NVSHARE_SIMGPU_GPU_2", "", 1);
		setenv("CUDA_VISIBLE_DEVICES", "1", 1);
	} else {
		setenv("CUDA_VISIBLE_DEVICES", "GPU-51600000-0000-4000-8000-000000000001,7,0", 1);
	}
	CU(cuInit(0));
	CU(cuDeviceGetCount(&n));
	CHECK(n == 1);
	CU(cuDeviceGetUuid_v2(&id, 0));
	CHECK(id.bytes[0] == 0x51 && id.bytes[15] == (which == 0 ? 2 : 1));
	EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetUuid_v2(&id, 1));
}

static void see_none(int unused)
{
	(void)unused;
	setenv("CUDA_VISIBLE_DEVICES", "", 1);
	EXPECT(CUDA_ERROR_NO_DEVICE, cuInit(0));
}

/* The resource manager is a socket here. */
static int has_rm(void)
{
	struct stat st;

	for (int fd = 3; fd < 64; fd++)
		if (!fstat(fd, &st) && S_ISSOCK(st.st_mode))
			return 1;
	return 0;
}

/* The first programs on a machine may start at the same time, as different users. */
static void users_come_together(void)
{
	for (int round = 0; round < 40; round++) {
		char base[64], dir[80], clean[80];
		int go[2];
		pid_t pid[6];

		test_dir(base);
		CHECK(!chmod(base, 0777) && !pipe(go));
		snprintf(dir, sizeof dir, "%s/sim", base);
		for (unsigned i = 0; i < 6; i++) {
			pid[i] = fork();
			if (pid[i])
				continue;
			close(go[1]);
			setenv("NVSHARE_SIMGPU_DIR", dir, 1);
			CHECK(getuid() || !setuid(62000 + i));
			CHECK(read(go[0], clean, 1) == 0); /* its other end is closed */
			CU(cuInit(0));
			CHECK(has_rm());
			_exit(0);
		}
		close(go[0]);
		close(go[1]);
		for (unsigned i = 0; i < 6; i++)
			reap(pid[i]);
		snprintf(clean, sizeof clean, "rm -rf %s", base);
		CHECK(!system(clean));
	}
}

int main(void)
{
	sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(sh != MAP_FAILED);
	users_come_together();
	processes_share_one_engine();
	reap(child(see, 0));
	reap(child(see, 1));
	reap(child(see_none, 0));
	a_killed_process_leaves_nothing();
	a_forked_child_has_no_cuda();
	return 0;
}
