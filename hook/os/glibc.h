// SPDX-License-Identifier: Apache-2.0
/*
 * glibc.h: bind to the oldest version of functions that glibc 2.32 and 2.34 moved between its
 * libraries, so that the shim loads on glibc 2.17 (test/symbols.sh). The references are weak: before
 * 2.34 they are in libpthread and libdl, which a program without a GPU may lack. A driver brings
 * both. Where libpthread comes with a driver that was opened, they are empty for good, and
 * nvs_late_find() looks the functions up.
 */
#ifndef NVSHARE_GLIBC_H
#define NVSHARE_GLIBC_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

#if defined(__x86_64__)
#define NVS_GLIBC_BASE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define NVS_GLIBC_BASE "GLIBC_2.17"
#else
#error "x86-64 and aarch64 only"
#endif

#define NVS_OLD(name) \
	extern __typeof__(name) name __attribute__((weak)); \
	__asm__(".symver " #name "," #name "@" NVS_GLIBC_BASE);
NVS_OLD(dladdr)
NVS_OLD(dlclose)
NVS_OLD(dlerror)
NVS_OLD(dlopen)
NVS_OLD(pthread_create)
NVS_OLD(pthread_detach)
NVS_OLD(pthread_key_create)
NVS_OLD(pthread_mutex_trylock)
NVS_OLD(pthread_setspecific)
#undef NVS_OLD

/* What the shim uses of libpthread, by the names without pthread_. */
#define NVS_LATE(F) F(create) F(detach) F(key_create) F(setspecific) F(mutex_trylock)

struct nvs_late {
#define F(name) __typeof__(&pthread_##name) name;
	NVS_LATE(F)
#undef F
};

extern struct nvs_late nvs_late;

/* Once the driver is there. False: the functions are not. */
bool nvs_late_find(void);

#endif
