// SPDX-License-Identifier: Apache-2.0
/*
 * control.c: stands for the driver's nvidia-cuda-mps-control and nvidia-cuda-mps-server: it
 * is the server if it has that name. Differences: the protocol between the programs is made
 * up; a server serves until it is killed, a member faults, or it is told to quit.
 *
 *   nvidia-cuda-mps-control -f    the daemon, in the foreground
 *   nvidia-cuda-mps-control       sends commands of the standard input to the daemon
 *
 * CUDA_MPS_PIPE_DIRECTORY has the daemon's socket "control", and the server's, "server".
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_MEMBERS 512

static pid_t server;
static char self[4096];

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(errno));
	exit(1);
}

static struct sockaddr_un address(const char *name)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");

	if (snprintf(a.sun_path, sizeof a.sun_path, "%s/%s", dir ? dir : "/tmp/nvidia-mps", name) >= (int)sizeof a.sun_path) {
		errno = ENAMETOOLONG;
		fail("pipe directory");
	}
	return a;
}

static int listens(const char *name)
{
	struct sockaddr_un a = address(name);
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	unlink(a.sun_path);
	if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 128))
		fail(a.sun_path);
	return s;
}

/* ---- the server: who is connected is a member; a word from one is its fault ---- */

static int serve(void)
{
	struct pollfd fds[1 + MAX_MEMBERS] = { { .fd = listens("server"), .events = POLLIN } };
	int n = 1;
	char word[64];

	if (write(1, "ready\n", 6) != 6)
		return 1;
	for (;;) {
		if (poll(fds, (nfds_t)n, -1) < 0 && errno != EINTR)
			fail("poll");
		for (int i = n - 1; i > 0; i--) {
			ssize_t got;

			if (!fds[i].revents)
				continue;
			got = read(fds[i].fd, word, sizeof word);
			if (got > 0) /* a fault: all members lose the GPU */
				return 0;
			close(fds[i].fd);
			fds[i] = fds[--n];
		}
		if (fds[0].revents && n <= MAX_MEMBERS) {
			int s = accept4(fds[0].fd, NULL, NULL, SOCK_CLOEXEC);

			if (s >= 0)
				fds[n++] = (struct pollfd){ .fd = s, .events = POLLIN };
		}
	}
}

/* ---- the daemon ---- */

static void look_at_server(void)
{
	if (server && waitpid(server, NULL, WNOHANG) == server)
		server = 0;
}

static void start_server(void)
{
	char path[4200], word[16];
	int p[2];

	look_at_server();
	if (server)
		return;
	snprintf(path, sizeof path, "%.*s/nvidia-cuda-mps-server", (int)(strrchr(self, '/') - self), self);
	if (pipe(p))
		fail("pipe");
	server = fork();
	if (server == 0) {
		dup2(p[1], 1);
		close(p[0]);
		close(p[1]);
		execl(path, "nvidia-cuda-mps-server", (char *)NULL);
		fail(path);
	}
	close(p[1]);
	if (server < 0 || read(p[0], word, sizeof word) <= 0)
		server = 0;
	close(p[0]);
}

static int answer(int s, const char *command)
{
	char text[64] = "";

	look_at_server();
	if (strncmp(command, "get_server_list", 15) == 0) {
		if (server)
			snprintf(text, sizeof text, "%d\n", server);
	} else if (strncmp(command, "start_server", 12) == 0) {
		start_server();
	} else if (strncmp(command, "member", 6) == 0) { /* from a member's driver */
		start_server();
		snprintf(text, sizeof text, "%d\n", server);
	} else if (strncmp(command, "quit", 4) == 0) {
		if (server)
			kill(server, SIGKILL);
		return 1;
	} else {
		snprintf(text, sizeof text, "Unknown command\n");
	}
	return write(s, text, strlen(text)) < 0;
}

static int control(void)
{
	struct sockaddr_un lock = address("control_lock");
	FILE *f = fopen(lock.sun_path, "a");
	int l;

	signal(SIGPIPE, SIG_IGN);
	if (!f || flock(fileno(f), LOCK_EX | LOCK_NB)) {
		fprintf(stderr, "An instance of this daemon is already running\n");
		return 1;
	}
	if (fcntl(fileno(f), F_SETFD, FD_CLOEXEC))
		fail("lock");
	l = listens("control");
	for (;;) {
		struct timeval patience = { .tv_sec = 5 };
		char command[256];
		int s = accept4(l, NULL, NULL, SOCK_CLOEXEC), quit = 0;
		ssize_t n;

		if (s < 0)
			continue;
		setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
		n = read(s, command, sizeof command - 1);
		if (n > 0) {
			command[n] = 0;
			quit = answer(s, command) && strncmp(command, "quit", 4) == 0;
		}
		close(s);
		if (quit) {
			unlink(address("control").sun_path);
			return 0;
		}
	}
}

static int ask(void)
{
	struct sockaddr_un a = address("control");
	char line[256], text[4096];
	ssize_t n;

	while (fgets(line, sizeof line, stdin)) {
		int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

		if (s < 0 || connect(s, (struct sockaddr *)&a, sizeof a)) {
			printf("Cannot find MPS control daemon process\n");
			return 1;
		}
		if (write(s, line, strlen(line)) < 0)
			fail("write");
		while ((n = read(s, text, sizeof text)) > 0)
			fwrite(text, 1, (size_t)n, stdout);
		close(s);
	}
	return 0;
}

int main(int argc, char **argv)
{
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

	if (n <= 0)
		fail("/proc/self/exe");
	if (strcmp(program_invocation_short_name, "nvidia-cuda-mps-server") == 0)
		return serve();
	return argc > 1 && strcmp(argv[1], "-f") == 0 ? control() : ask();
}
