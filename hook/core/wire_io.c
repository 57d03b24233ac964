// SPDX-License-Identifier: Apache-2.0
#include "wire_io.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "packet.h"

static struct sockaddr_un address;

void nvs_connect_init(void)
{
	const char *dir = secure_getenv(NVS_RUN_DIR_ENV);
	int n = snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s",
			 dir && *dir ? dir : NVS_RUN_DIR_DEFAULT, NVS_SOCKET_NAME);

	address.sun_family = AF_UNIX;
	if (n < 0 || (size_t)n >= sizeof(address.sun_path))
		address.sun_path[0] = '\0';
}

/* A program that has closed its standard streams may go on to use them: it would write to the scheduler. */
static int off_standard_streams(int fd)
{
	int high, saved;

	if (fd < 0 || fd > STDERR_FILENO)
		return fd;
	high = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	saved = errno;
	close(fd);
	errno = saved;
	return high;
}

int nvs_connect(int *error)
{
	int fd;

	if (!address.sun_path[0]) {
		*error = ENAMETOOLONG;
		return -1;
	}
	fd = off_standard_streams(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	if (fd >= 0 && connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0)
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
	unsigned count = 1;
	int got = nvs_packet_receive(fd, f, sizeof(*f), passed, &count);

	if (!count)
		*passed = -1;
	return got;
}

/* One more than channels that may each look at a page of their own. */
static const struct nvs_page *pages[NVS_MAX_CHANNELS + 1];

const struct nvs_page *nvs_map_page(int fd, bool (*in_use)(const struct nvs_page *))
{
	const struct nvs_page *page;
	int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
	unsigned i = 0;

	/* A file that can shrink, or is too short, means SIGBUS in the application. */
	if (seals < 0 || !(seals & F_SEAL_SHRINK) || lseek(fd, 0, SEEK_END) < NVS_PAGE_SIZE)
		return NULL;
	while (i < NVS_MAX_CHANNELS && pages[i] && in_use(pages[i]))
		i++;
	page = mmap(NULL, NVS_PAGE_SIZE, PROT_READ, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		return NULL;
	if (page->magic != NVS_PAGE_MAGIC || page->version != NVS_WIRE_VERSION ||
	    page->slots != NVS_MAX_CHANNELS) {
		munmap((void *)page, NVS_PAGE_SIZE);
		return NULL;
	}
	/* A thread may still look at an earlier page: the new one takes its place, at once. */
	if (pages[i]) {
		if (mremap((void *)page, NVS_PAGE_SIZE, NVS_PAGE_SIZE, MREMAP_MAYMOVE | MREMAP_FIXED,
			   (void *)pages[i]) == MAP_FAILED) {
			munmap((void *)page, NVS_PAGE_SIZE);
			return NULL;
		}
	} else {
		pages[i] = page;
	}
	return pages[i];
}

void nvs_pages_fork_child(void)
{
	/* The address stays valid, see wire_io.h; the parent's page is let go of. */
	for (unsigned i = 0; i <= NVS_MAX_CHANNELS; i++)
		if (pages[i])
			(void)mmap((void *)pages[i], NVS_PAGE_SIZE, PROT_READ,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}
