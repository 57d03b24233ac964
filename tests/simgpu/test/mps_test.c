// SPDX-License-Identifier: Apache-2.0
/* Processes of one MPS server run at the same time, and share their faults. */
#include "check.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

/* No wait reaches it, and no kernel ends by itself while the test runs. */
#define PATIENCE_MS 300000
#define LONG_MS     3600000

/* What serves ends with the test, by tests/suites/alone.sh. */
static void start_daemon(void)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	const char *lib = getenv("LD_LIBRARY_PATH");
	char path[4096], dir[64];
	pid_t pid;
	int s;

	CHECK(lib);
	test_dir(dir);
	snprintf(path, sizeof path, "%s/bin/nvidia-cuda-mps-control", lib);
	snprintf(a.sun_path, sizeof a.sun_path, "%s/control", dir);
	setenv("CUDA_MPS_PIPE_DIRECTORY", dir, 1);
	pid = fork();
	if (pid == 0) {
		execl(path, path, "-f", (char *)NULL);
		_exit(1);
	}
	/* Once it listens: its socket is there before that. */
	CHECK((s = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0);
	for (uint64_t end = mono() + PATIENCE_MS * MS; connect(s, (struct sockaddr *)&a, sizeof a); poll(NULL, 0, 1))
		CHECK(mono() < end && waitpid(pid, NULL, WNOHANG) == 0);
	close(s);
}

/* A child that says a byte when it has reached a point, and goes on for a byte. */
struct child {
	pid_t pid;
	int said, told;
};

static struct child run(void (*what)(int say, int hear))
{
	int up[2], down[2];
	struct child c;

	CHECK(!pipe(up) && !pipe(down));
	c.pid = fork();
	if (c.pid == 0) {
		close(up[0]);
		close(down[1]);
		what(up[1], down[0]);
		_exit(0);
	}
	close(up[1]);
	close(down[0]);
	c.said = up[0];
	c.told = down[1];
	return c;
}

static void await(struct child *c)
{
	struct pollfd p = { .fd = c->said, .events = POLLIN };
	char b;

	CHECK(poll(&p, 1, PATIENCE_MS) == 1);
	CHECK(read(c->said, &b, 1) == 1);
}

static void tell(int fd)
{
	CHECK(write(fd, "x", 1) == 1);
}

static void hear(int fd)
{
	char b;

	CHECK(read(fd, &b, 1) == 1);
}

static int ends(struct child *c)
{
	int status;

	CHECK(waitpid(c->pid, &status, 0) == c->pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* Has a kernel on the GPU for long. Then its calls fail, as those of all members. */
static void victim(int say, int heard)
{
	struct gpu g = gpu_open(0);

	CU(spin(&g, NULL, LONG_MS * MS, 0));
	CHECK(cuStreamQuery(NULL) != CUDA_SUCCESS); /* it runs */
	tell(say);
	hear(heard);
	for (uint64_t end = mono() + PATIENCE_MS * MS; cuStreamQuery(NULL) != CUDA_ERROR_MPS_RPC_FAILURE; poll(NULL, 0, 1))
		CHECK(mono() < end);
	EXPECT(CUDA_ERROR_MPS_RPC_FAILURE, spin(&g, NULL, MS, 0));
}

enum { AT_THE_SAME_TIME = 10, IN_SLICES };

/* How the GPU ran a kernel of 10 ms beside the long one, by when the kernel began and ended. */
static void beside(int say, int heard)
{
	struct gpu g = gpu_open(0);
	CUdeviceptr record;
	uint64_t at[2];

	(void)heard;
	CU(cuMemAlloc_v2(&record, sizeof at));
	CU(spin(&g, NULL, 10 * MS, record));
	CU(cuStreamSynchronize(NULL));
	CU(cuMemcpyDtoH_v2(at, record, sizeof at));
	tell(say);
	_exit(at[1] - at[0] == 10 * MS ? AT_THE_SAME_TIME : IN_SLICES);
}

static void culprit(int say, int heard)
{
	struct gpu g = gpu_open(0);

	(void)heard;
	CU(spin(&g, NULL, MS, 0x123456789000));
	EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(NULL));
	tell(say);
}

int main(void)
{
	struct child a, b;

	/* without a daemon: time slices */
	setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent", 1);
	a = run(victim);
	await(&a);
	b = run(beside);
	EXPECT(IN_SLICES, ends(&b));
	kill(a.pid, SIGKILL);
	ends(&a);

	start_daemon();
	a = run(victim);
	await(&a);
	b = run(beside);
	EXPECT(AT_THE_SAME_TIME, ends(&b)); /* the end of a member ends nobody else */
	b = run(culprit);
	await(&b);
	EXPECT(0, ends(&b));
	tell(a.told);
	EXPECT(0, ends(&a));

	b = run(culprit); /* the daemon has another server by then */
	await(&b);
	EXPECT(0, ends(&b));
	return 0;
}
