// SPDX-License-Identifier: Apache-2.0
/*
 * init.c: wrappers of what a program calls first: cuInit, and the ways to find the driver's
 * other functions.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "log.h"
#include "start.h"
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

/* ---- what each library asks the driver for, in a debug build ---- */

#ifdef NVS_DEBUG_BUILD
WRAPPER(cuGetExportTable, (const void **table, const void *id))
{
	static struct {
		unsigned char id[16];
		unsigned count;
	} asked[64];
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	int result = CALL(cuGetExportTable, table, id);
	const unsigned char *u = id;
	unsigned i = 0, count = 0;
	int saved = errno;

	nvs_log_init(); /* a runtime asks before cuInit */
	if (u) {
		pthread_mutex_lock(&lock);
		while (i < 63 && asked[i].count && memcmp(asked[i].id, u, 16) != 0)
			i++;
		memcpy(asked[i].id, u, 16);
		count = ++asked[i].count;
		pthread_mutex_unlock(&lock);
		nvs_debugf("export table %02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-"
			   "%02x%02x%02x%02x%02x%02x: asked for %u times, result %d",
			   u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10],
			   u[11], u[12], u[13], u[14], u[15], count, result);
	}
	errno = saved;
	return result;
}
#endif
