// SPDX-License-Identifier: Apache-2.0
/* libc.h: the dlsym and the dlvsym that come after ours. */
#ifndef NVSHARE_LIBC_H
#define NVSHARE_LIBC_H

#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef void *dlsym_fn(void *, const char *);
typedef void *dlvsym_fn(void *, const char *, const char *);

/* Read by the trampolines. */
extern __attribute__((visibility("hidden"))) _Atomic(dlsym_fn *) nvs_next_dlsym_pointer;
extern __attribute__((visibility("hidden"))) _Atomic(dlvsym_fn *) nvs_next_dlvsym_pointer;

/* Finds both. False: on a libc that is neither glibc nor musl. */
bool nvs_find_next(void);

/*
 * The linker's list of what is loaded, by the pointer that it leaves to debuggers. The C library is
 * in it from the start, so no lock is needed. NULL: the program has no such pointer.
 */
const struct link_map *nvs_loaded(void);

/*
 * A sanitizer asks dlsym for the string functions that it interposes before its own can be called:
 * they are not to be used on the way to the first answer.
 */
static inline bool nvs_begins(const char *s, const char *with)
{
	while (*with && *s == *with)
		s++, with++;
	return !*with;
}

static inline bool nvs_same_name(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

#endif
