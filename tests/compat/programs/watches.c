// SPDX-License-Identifier: Apache-2.0
/*
 * watches.c: preloaded before the shim. It records the CUDA runtime's look-ups and their
 * results in the file WATCH_TO, one line each:
 *
 *   dlsym NAME OBJECT SYMBOL
 *   resolver[_v2] NAME VERSION FLAGS RESULT OBJECT SYMBOL
 *
 * OBJECT is the file that contains the resulting pointer, SYMBOL the pointer's name.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
#else
#define BASE "GLIBC_2.17"
#endif

typedef void *dlsym_fn(void *, const char *);
typedef int resolve_fn(const char *, void **, int, uint64_t);
typedef int resolve_v2_fn(const char *, void **, int, uint64_t, int *);

static resolve_fn *next_resolve;
static resolve_v2_fn *next_resolve_v2;

static void say(const char *asked, void *given)
{
	static int fd = -2;
	char line[512];
	Dl_info info;
	const char *object = "-", *symbol = "-";
	int n;

	if (fd == -2)
		fd = getenv("WATCH_TO") ? open(getenv("WATCH_TO"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
	if (given && dladdr(given, &info)) {
		object = strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : info.dli_fname;
		symbol = info.dli_sname ? info.dli_sname : "?";
	}
	n = snprintf(line, sizeof(line), "%s %s %s\n", asked, object, symbol);
	if (fd >= 0 && write(fd, line, (size_t)n) != n)
		abort();
}

static int resolve(const char *name, void **p, int version, uint64_t flags)
{
	int rc = next_resolve(name, p, version, flags);
	char asked[256];

	snprintf(asked, sizeof(asked), "resolver %s %d %llu %d", name, version, (unsigned long long)flags, rc);
	say(asked, rc == 0 && p ? *p : NULL);
	if (rc == 0 && strcmp(name, "cuGetProcAddress") == 0) {
		*(void **)&next_resolve = *p;
		*p = (void *)resolve;
	}
	return rc;
}

static int resolve_v2(const char *name, void **p, int version, uint64_t flags, int *status)
{
	int rc = next_resolve_v2(name, p, version, flags, status);
	char asked[256];

	if (!*name)
		name = "''";
	snprintf(asked, sizeof(asked), "resolver_v2 %s %d %llu %d", name, version, (unsigned long long)flags, rc);
	say(asked, rc == 0 && p ? *p : NULL);
	/* A runtime asks the resolver for the resolver, and uses the answer. */
	if (rc == 0 && strcmp(name, "cuGetProcAddress") == 0 && version >= 12000) {
		*(void **)&next_resolve_v2 = *p;
		*p = (void *)resolve_v2;
	} else if (rc == 0 && strcmp(name, "cuGetProcAddress") == 0) {
		*(void **)&next_resolve = *p;
		*p = (void *)resolve;
	}
	return rc;
}

/* RTLD_NEXT would mean: after this library. The runtime does not use it. */
void *dlsym(void *handle, const char *name)
{
	static dlsym_fn *real;
	char asked[256];
	Dl_info caller;
	void *p;

	if (!real)
		*(void **)&real = dlvsym(RTLD_NEXT, "dlsym", BASE);
	p = real ? real(handle, name) : NULL;
	/* The shim's own look-ups do not count. */
	if (dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "libnvshare.so"))
		return p;
	if (name[0] != 'c' || name[1] != 'u' || name[2] < 'A' || name[2] > 'Z')
		return p;
	snprintf(asked, sizeof(asked), "dlsym %s", name);
	say(asked, p);
	if (p && strcmp(name, "cuGetProcAddress") == 0) {
		*(void **)&next_resolve = p;
		return (void *)resolve;
	}
	if (p && strcmp(name, "cuGetProcAddress_v2") == 0) {
		*(void **)&next_resolve_v2 = p;
		return (void *)resolve_v2;
	}
	return p;
}
