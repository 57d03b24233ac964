// SPDX-License-Identifier: Apache-2.0
/*
 * init.c: wrappers of what a program calls first: cuInit, and the ways to find the driver's
 * other functions.
 */
#include <errno.h>

#include "wrap.h"

WRAPPER(cuInit, (uint flags))
{
	int result, saved;

	nvs_before_start();
	result = CALL(cuInit, flags);
	saved = errno;

	if (result == CUDA_SUCCESS)
		nvs_start();
	errno = saved;
	return result;
}

/* ---- the resolver: real one first, then the pointer it returned ---- */

static int substitute(int result, void **pfn)
{
	if (result == CUDA_SUCCESS && pfn)
		*pfn = nvs_substitute(*pfn);
	return result;
}

#define RESOLVER(name) \
	WRAPPER(name, (const char *symbol, void **pfn, int version, uint64_t flags)) \
	{ \
		return substitute(CALL(name, symbol, pfn, version, flags), pfn); \
	}
#define RESOLVER_V2(name) \
	WRAPPER(name, (const char *symbol, void **pfn, int version, uint64_t flags, void *status)) \
	{ \
		return substitute(CALL(name, symbol, pfn, version, flags, status), pfn); \
	}
RESOLVER(cuGetProcAddress)
RESOLVER(cuGetProcAddress_ptsz)
RESOLVER_V2(cuGetProcAddress_v2)
RESOLVER_V2(cuGetProcAddress_v2_ptsz)
