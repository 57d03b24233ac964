// SPDX-License-Identifier: Apache-2.0
/* interposer.c: another preloaded library that wraps launches and ioctl; libinterposer.so. */
#include <dlfcn.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stub.h"

unsigned interposer_calls(void);
void *interposer_next(void);
void *interposer_next_versioned(void);

unsigned interposer_ioctls(void);

static unsigned calls, ioctls;

unsigned interposer_calls(void) { return calls; }
unsigned interposer_ioctls(void) { return ioctls; }

int ioctl(int fd, unsigned long request, ...)
{
	va_list list;
	void *arg;

	va_start(list, request);
	arg = va_arg(list, void *);
	va_end(list);
	ioctls++;
	return (int)syscall(SYS_ioctl, fd, request, arg);
}

__attribute__((constructor)) static void begin(void)
{
	int n;

	ioctl(-1, FIONREAD, &n);
}

void *interposer_next(void)
{
	void *p = dlsym(RTLD_NEXT, "cuLaunchKernel");

	__asm__ volatile("" ::: "memory");
	return p;
}

void *interposer_next_versioned(void)
{
	void *p = dlvsym(RTLD_NEXT, "cuLaunchKernel", "NO_SUCH_VERSION");

	__asm__ volatile("" ::: "memory");
	return p;
}

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		   unsigned bz, unsigned shared, void *stream, void **params, void **extra)
{
	int (*next)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		    void *, void **, void **);

	*(void **)&next = interposer_next();
	calls++;
	return next(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}
