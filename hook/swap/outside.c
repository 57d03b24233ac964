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

#include "log.h"
#include "swap_impl.h"

static const char *const paths[] = {
	"/libnvoptix.so", "/libnvidia-encode.so", "/libnvcuvid.so", "/libnvidia-opticalflow.so",
	"/dev/nvidia-fs", /* cuFile (GPUDirect Storage) */
	"/dev/infiniband/uverbs", /* RDMA */
};
#define LONGEST 32u /* no path is longer */

bool nvs_used_outside(void)
{
	char text[8192];
	const char *found = NULL;
	size_t kept = 0;
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC);
	long n;

	while (!found && (n = syscall(SYS_read, fd, text + kept, sizeof(text) - kept)) > 0) {
		size_t end = kept + (size_t)n;

		for (unsigned i = 0; !found && i < sizeof(paths) / sizeof(paths[0]); i++)
			if (memmem(text, end, paths[i], strlen(paths[i])))
				found = paths[i];
		/* A path may go on in the next piece. */
		kept = end < LONGEST ? end : LONGEST;
		memmove(text, text + end - kept, kept);
	}
	if (fd >= 0)
		close(fd);
	if (found)
		nvs_debugf("memory stays on the GPU: the process has mapped %s", found + 1);
	return found;
}
