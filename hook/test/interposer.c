// SPDX-License-Identifier: Apache-2.0
/* interposer.c: another preloaded library that wraps launches; libinterposer.so. */
#include <dlfcn.h>

#include "stub.h"

unsigned interposer_calls(void);
void *interposer_next(void);
void *interposer_next_versioned(void);

static unsigned calls;

unsigned interposer_calls(void) { return calls; }

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
