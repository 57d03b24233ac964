// SPDX-License-Identifier: Apache-2.0
/*
 * glibc.h: bind to the oldest version of functions that glibc 2.32 and 2.34
 * moved between its libraries, so that the shim loads on glibc 2.17.
 * `make test` reads the versions of the built file.
 */
#ifndef NVSHARE_GLIBC_H
#define NVSHARE_GLIBC_H

#if defined(__x86_64__)
#define NVS_GLIBC_BASE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define NVS_GLIBC_BASE "GLIBC_2.17"
#else
#error "x86-64 and aarch64 only"
#endif

#ifndef NVS_NO_SYMVER
#define NVS_OLD(name) __asm__(".symver " #name "," #name "@" NVS_GLIBC_BASE);
NVS_OLD(dladdr)
NVS_OLD(dlclose)
NVS_OLD(dlerror)
NVS_OLD(dlopen)
NVS_OLD(pthread_create)
NVS_OLD(pthread_detach)
NVS_OLD(pthread_key_create)
NVS_OLD(pthread_mutex_trylock)
NVS_OLD(pthread_setspecific)
NVS_OLD(pthread_sigmask)
#undef NVS_OLD
#endif

#endif
