// SPDX-License-Identifier: Apache-2.0
/*
 * preloads.c: two libraries that stand for other people's, preloaded with the shim. With
 * FINDS it interposes dlsym, as tracers do, and counts calls. Otherwise it interposes
 * malloc, and looks up the real malloc at the first call.
 */
#include <dlfcn.h>
#include <stddef.h>

#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
#else
#define BASE "GLIBC_2.17"
#endif

#ifdef FINDS
typedef void *dlsym_fn(void *, const char *);

unsigned long finds_count;

/* RTLD_NEXT of callers means: after this library. */
void *dlsym(void *handle, const char *name)
{
	static dlsym_fn *real;
	void *p;

	if (!real)
		*(void **)&real = dlvsym(RTLD_NEXT, "dlsym", BASE);
	p = real ? real(handle, name) : NULL;
	finds_count++;
	return p;
}
#else
typedef void *malloc_fn(size_t);
typedef void free_fn(void *);

static _Alignas(16) char early[4096];
static size_t used;

static malloc_fn *real_malloc;
static free_fn *real_free;

void *malloc(size_t size)
{
	static int inside;
	void *p;

	if (!real_malloc && !inside) {
		inside = 1;
		*(void **)&real_free = dlsym(RTLD_NEXT, "free");
		*(void **)&real_malloc = dlsym(RTLD_NEXT, "malloc");
		inside = 0;
	}
	if (real_malloc)
		return real_malloc(size);
	/* The look-up itself allocates. */
	size = (size + 15) & ~(size_t)15;
	p = used + size <= sizeof(early) ? early + used : NULL;
	used += size;
	return p;
}

void free(void *p)
{
	if (real_free && !((char *)p >= early && (char *)p < early + sizeof(early)))
		real_free(p);
}
#endif
