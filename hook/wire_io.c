// SPDX-License-Identifier: Apache-2.0
#include "wire_io.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

int nvs_connect(int *error)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	const char *dir = getenv(NVS_RUN_DIR_ENV);
	int fd, n;

	n = snprintf(a.sun_path, sizeof(a.sun_path), "%s/%s",
		     dir && *dir ? dir : NVS_RUN_DIR_DEFAULT, NVS_SOCKET_NAME);
	if (n < 0 || (size_t)n >= sizeof(a.sun_path)) {
		*error = ENAMETOOLONG;
		return -1;
	}
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0)
		return fd;
	*error = errno;
	if (fd >= 0)
		close(fd);
	return -1;
}

/* Not send(): that is a cancellation point, and locks are held. */
static ssize_t send_once(int fd, const struct nvs_frame *f)
{
	return syscall(SYS_sendto, fd, f, sizeof(*f), MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
}

bool nvs_send_frame(int fd, const struct nvs_frame *f, bool must)
{
	ssize_t n;

	while ((n = send_once(fd, f)) < 0 && errno == EINTR)
		;
	if (n < 0 && errno == EAGAIN && must) {
		struct timespec t = { 1, 0 };
		struct pollfd p = { .fd = fd, .events = POLLOUT };

		syscall(SYS_ppoll, &p, 1, &t, NULL, 8);
		n = send_once(fd, f);
	}
	if (n == (ssize_t)sizeof(*f))
		return true;
	if (must)
		shutdown(fd, SHUT_RDWR);
	return false;
}

int nvs_receive_frame(int fd, struct nvs_frame *f, int *passed)
{
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(sizeof(int))];
	} control;
	/* One byte more than a frame tells a longer packet. */
	struct {
		struct nvs_frame frame;
		char more;
	} in;
	struct iovec iov = { &in, sizeof(in.frame) + 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
			    .msg_controllen = sizeof(control) };
	ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	*passed = -1;
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
		    c->cmsg_len == CMSG_LEN(sizeof(int)))
			memcpy(passed, CMSG_DATA(c), sizeof(int));
	if (n != sizeof(*f)) {
		if (*passed >= 0)
			close(*passed);
		*passed = -1;
		return -1;
	}
	*f = in.frame;
	return 1;
}

const struct nvs_page *nvs_map_page(int fd)
{
	const struct nvs_page *page;

	/* A shorter file would mean SIGBUS in the application. */
	if (fd < 0 || lseek(fd, 0, SEEK_END) < NVS_PAGE_SIZE)
		return NULL;
	page = mmap(NULL, NVS_PAGE_SIZE, PROT_READ, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		return NULL;
	if (page->magic == NVS_PAGE_MAGIC && page->version == NVS_WIRE_VERSION &&
	    page->slots == NVS_MAX_CHANNELS)
		return page;
	munmap((void *)page, NVS_PAGE_SIZE);
	return NULL;
}
