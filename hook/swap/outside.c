// SPDX-License-Identifier: Apache-2.0
/*
 * outside.c: whether other parts of the process use device memory without the driver
 * functions that the shim sees: OptiX, the video engines, storage and network cards that
 * read and write it. They learn addresses and use them at any time, so nothing may move.
 *
 * What they map tells: a library that is loaded only to be used, or the device file of a
 * registration. That libcufile or libibverbs is loaded tells nothing: PyTorch and NCCL
 * load them always. cuFile without its device file copies through the driver.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "swap_impl.h"

static const struct {
	const char *path;
	enum nvs_fixed by;
} marks[] = {
	{ "/libnvoptix.so", NVS_FIXED_OPTIX },
	{ "/libnvidia-encode.so", NVS_FIXED_ENCODER },
	{ "/libnvcuvid.so", NVS_FIXED_DECODER },
	{ "/libnvidia-opticalflow.so", NVS_FIXED_OPTICAL_FLOW },
	{ "/dev/nvidia-fs", NVS_FIXED_STORAGE },
	{ "/dev/infiniband/uverbs", NVS_FIXED_RDMA },
};
#define LONGEST 32u /* no path is longer */

enum nvs_fixed nvs_used_outside(void)
{
	char text[8192];
	enum nvs_fixed found = NVS_FIXED_NOT;
	size_t kept = 0;
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC);
	long n;

	while (!found && (n = syscall(SYS_read, fd, text + kept, sizeof(text) - kept)) > 0) {
		size_t end = kept + (size_t)n;

		for (unsigned i = 0; !found && i < sizeof(marks) / sizeof(marks[0]); i++)
			if (memmem(text, end, marks[i].path, strlen(marks[i].path)))
				found = marks[i].by;
		/* A path may go on in the next piece. */
		kept = end < LONGEST ? end : LONGEST;
		memmove(text, text + end - kept, kept);
	}
	if (fd >= 0)
		close(fd);
	return found;
}
