// SPDX-License-Identifier: Apache-2.0
/* mps.c: the member's end of the connection to an MPS server. */
#include "mps.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int server = -1;

static int connected(const char *name)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
	int s;

	if (snprintf(a.sun_path, sizeof a.sun_path, "%s/%s", dir && *dir ? dir : "/tmp/nvidia-mps", name) >= (int)sizeof a.sun_path)
		return -1;
	s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (s >= 0 && connect(s, (struct sockaddr *)&a, sizeof a)) {
		close(s);
		s = -1;
	}
	return s;
}

uint32_t mps_join(void)
{
	char text[64] = "";
	int s = connected("control");
	uint32_t group = 0;

	if (s < 0)
		return 0;
	if (write(s, "member\n", 7) == 7 && read(s, text, sizeof text - 1) > 0)
		group = (uint32_t)strtoul(text, NULL, 10);
	close(s);
	if (group && (server = connected("server")) < 0)
		group = 0;
	return group;
}

int mps_lost(void)
{
	char c;

	return server >= 0 && recv(server, &c, 1, MSG_DONTWAIT | MSG_PEEK) == 0;
}

void mps_fault(void)
{
	if (server >= 0)
		(void)!send(server, "fault", 5, MSG_NOSIGNAL | MSG_DONTWAIT);
}
