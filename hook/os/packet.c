// SPDX-License-Identifier: Apache-2.0
#include "packet.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

union control {
	struct cmsghdr head;
	char buf[CMSG_SPACE(NVS_PACKET_FDS * sizeof(int))];
};

bool nvs_packet_send(int fd, const void *data, size_t size, const int *fds, unsigned count)
{
	union control control = { .buf = { 0 } };
	struct iovec iov = { (void *)data, size };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (count) {
		m.msg_control = &control;
		m.msg_controllen = CMSG_SPACE(count * sizeof(int));
		control.head.cmsg_len = CMSG_LEN(count * sizeof(int));
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		memcpy(CMSG_DATA(&control.head), fds, count * sizeof(int));
	}
	return syscall(SYS_sendmsg, fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == (long)size;
}

int nvs_packet_receive(int fd, void *data, size_t size, int *fds, unsigned *count)
{
	union control control;
	struct iovec iov = { data, size };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
			    /* CMSG_SPACE may have room for one more, which would be lost open. */
			    .msg_controllen = CMSG_LEN(*count * sizeof(int)) };
	/* With MSG_TRUNC the size is the packet's own. */
	long n = syscall(SYS_recvmsg, fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC | MSG_TRUNC);
	const struct cmsghdr *c;

	*count = 0;
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	c = CMSG_FIRSTHDR(&m);
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
		*count = (unsigned)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(fds, CMSG_DATA(c), *count * sizeof(int));
	}
	if (n == (long)size)
		return 1;
	while (*count)
		close(fds[--*count]);
	return -1;
}
