// SPDX-License-Identifier: Apache-2.0
/*
 * descriptor.h: descriptors that the application may close, or use again, at any time. A descriptor
 * is known by the file behind it: one that has another file now is the application's, and is never
 * read, written or closed.
 */
#ifndef NVSHARE_DESCRIPTOR_H
#define NVSHARE_DESCRIPTOR_H

#include <stdbool.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct nvs_descriptor {
	int fd; /* -1: none */
	dev_t dev;
	ino_t ino;
};

#define NVS_NO_DESCRIPTOR { .fd = -1 }

/* By the system call: glibc before 2.33 has no function of this name. */
static inline bool nvs_descriptor_stat(int fd, struct stat *s)
{
	return fd >= 0 && syscall(SYS_fstat, fd, s) == 0;
}

static inline struct nvs_descriptor nvs_descriptor_of(int fd)
{
	struct nvs_descriptor d = NVS_NO_DESCRIPTOR;
	struct stat s;

	if (nvs_descriptor_stat(fd, &s))
		d = (struct nvs_descriptor){ fd, s.st_dev, s.st_ino };
	return d;
}

/* Whether the descriptor still is ours. */
static inline bool nvs_descriptor_is(const struct nvs_descriptor *d)
{
	struct stat s;

	return nvs_descriptor_stat(d->fd, &s) && s.st_dev == d->dev && s.st_ino == d->ino;
}

static inline void nvs_descriptor_close(struct nvs_descriptor *d)
{
	if (nvs_descriptor_is(d))
		close(d->fd);
	d->fd = -1;
}

#endif
