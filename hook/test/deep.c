// SPDX-License-Identifier: Apache-2.0
/* deep.c: a library that is linked to the driver; built as libdeep.so. */
#include <dlfcn.h>

#include "stub.h"

void *deep_bound(void);
void *deep_bound(void)
{
	return (void *)cuLaunchKernel;
}

void *deep_dlsym(void *handle, const char *name);
void *deep_dlsym(void *handle, const char *name)
{
	void *p = dlsym(handle, name);

	__asm__ volatile("" ::: "memory");
	return p;
}
