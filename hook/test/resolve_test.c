// SPDX-License-Identifier: Apache-2.0
/*
 * resolve_test.c: which pointers an application gets, whichever way it asks.
 * Run with the shim preloaded. With LINKED the program is linked against the
 * driver, else it opens it.
 */
#include <dlfcn.h>
#include <string.h>

#include "fake.h"
#include "stub.h"

static const char *object_of(void *p)
{
	Dl_info info;

	if (!p || !dladdr(p, &info))
		return "nothing";
	return strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : info.dli_fname;
}

#define IN(p, object) CHECK(strcmp(object_of(p), object) == 0)
#define SHIM "libnvshare.so"
#define STUB "libcuda.so.1"

typedef void *find_fn(const char *);
typedef void *get_fn(void);
typedef int gpa_fn(const char *, void **, int, uint64_t);
typedef int gpa2_fn(const char *, void **, int, uint64_t, void *);

/* Statuses are the driver's, and so is the choice of the variant. */
static void check_versions(void *h, gpa_fn *gpa, gpa2_fn *gpa2)
{
	static const struct {
		int version;
		uint64_t flags;
		const char *export;
		int result, status;
	} batch[] = {
		{ 11040, 0, NULL, 0, 2 },
		{ 12000, 2, NULL, 0, 2 },
		{ 12080, 0, "cuMemcpyBatchAsync", 0, 0 },
		{ 12080, 1, "cuMemcpyBatchAsync", 0, 0 },
		{ 12080, 2, "cuMemcpyBatchAsync_ptsz", 0, 0 },
		{ 12090, 0, "cuMemcpyBatchAsync", 0, 0 },
		{ 13000, 0, "cuMemcpyBatchAsync_v2", 0, 0 },
		{ 13000, 1, "cuMemcpyBatchAsync_v2", 0, 0 },
		{ 13000, 2, "cuMemcpyBatchAsync_v2_ptsz", 0, 0 },
		{ 13000, 3, NULL, 1, 77 }, /* there is no such flag */
		{ 13020, 0, NULL, 1, 77 }, /* nor such a version yet */
	};
	void *p, *nowhere = &p;
	int status;

	for (size_t i = 0; i < sizeof(batch) / sizeof(batch[0]); i++) {
		status = 77;
		p = nowhere;
		CHECK(gpa2("cuMemcpyBatchAsync", &p, batch[i].version, batch[i].flags, &status) ==
		      batch[i].result);
		CHECK(status == batch[i].status);
		if (batch[i].export) {
			IN(p, SHIM);
			CHECK(p == dlsym(h, batch[i].export));
		} else {
			CHECK(p == (batch[i].result ? nowhere : NULL));
		}
	}
	CHECK(gpa2("cuLaunchKernelEx", &p, 12000, 0, &status) == 0 && !p && status == 1);
	CHECK(gpa("cuLaunchKernelEx", &p, 12000, 0) == 500 && !p);
	CHECK(gpa("cuMemcpyBatchAsync", &p, 12080, 2) == 0);
	CHECK(p == dlsym(h, "cuMemcpyBatchAsync_ptsz"));
	/* The resolver of the program's version, and through it the same. */
	CHECK(gpa("cuGetProcAddress", &p, 11040, 0) == 0 && p == (void *)gpa);
	CHECK(gpa2("cuGetProcAddress", &p, 11040, 0, NULL) == 0 && p == (void *)gpa);
}

static void check_driver(void *h)
{
	void *p, *thread;
	int status;
	gpa_fn *gpa;
	gpa2_fn *gpa2;

	dlerror();
	IN(dlsym(h, "cuLaunchKernel"), SHIM);
	CHECK(dlerror() == NULL); /* the shim's own look-ups leave no trace */
	IN(dlsym(h, "cuLaunchKernel_ptsz"), SHIM);
	CHECK(dlsym(h, "cuLaunchKernel") != dlsym(h, "cuLaunchKernel_ptsz"));
	/* Not interposed, not the driver's, not there at all. */
	IN(dlsym(h, "cuNotInTheTable"), STUB);
	IN(dlsym(h, "cudnnCreate"), STUB);
	CHECK(dlsym(h, "cuLaunchKernelEx") == NULL);
	CHECK(dlerror() != NULL);
	CHECK(dlsym(h, "cuGraphLaunch_ptsz") == NULL);
	/* The stub has no versions: whatever the linker says, never the stub. */
	p = dlvsym(h, "cuLaunchKernel", "GLIBC_2.17");
	CHECK(p == NULL || strcmp(object_of(p), SHIM) == 0);

	*(void **)&gpa = dlsym(h, "cuGetProcAddress");
	*(void **)&gpa2 = dlsym(h, "cuGetProcAddress_v2");
	IN((void *)gpa, SHIM);
	IN((void *)gpa2, SHIM);
	CHECK(gpa("cuLaunchKernel", &p, 12000, 0) == 0);
	CHECK(p == dlsym(h, "cuLaunchKernel"));
	CHECK(gpa2("cuLaunchKernel", &p, 12000, 1, &status) == 0 && status == 0);
	CHECK(p == dlsym(h, "cuLaunchKernel"));
	CHECK(gpa2("cuLaunchKernel", &thread, 12000, 2, NULL) == 0);
	CHECK(thread == dlsym(h, "cuLaunchKernel_ptsz"));
	CHECK(gpa2("cuMemAlloc", &p, 12000, 0, NULL) == 0);
	CHECK(p == dlsym(h, "cuMemAlloc_v2"));
	CHECK(gpa2("cuGetProcAddress", &p, 12000, 0, NULL) == 0 && p == (void *)gpa2);
	CHECK(gpa2("cuNotInTheTable", &p, 12000, 0, NULL) == 0);
	IN(p, STUB);
	check_versions(h, gpa, gpa2);
}

int main(void)
{
	void *third = dlopen("libthird.so", RTLD_NOW | RTLD_GLOBAL), *h;
	get_fn *next, *versioned, *own;
	find_fn *third_next;

	CHECK(third);
	*(void **)&next = dlsym(third, "third_next_strfry");
	*(void **)&versioned = dlsym(third, "third_next_strfry_versioned");
	*(void **)&own = dlsym(third, "third_own_strfry");
	*(void **)&third_next = dlsym(third, "third_next");
	/* RTLD_NEXT means after the caller, also through the shim. */
	CHECK(next() != own());
	CHECK(versioned() != own());
	/* Ordinary look-ups are not touched. */
	CHECK(dlsym(RTLD_DEFAULT, "strlen") != NULL);
	CHECK(dlsym(RTLD_DEFAULT, "no_such_symbol") == NULL && dlerror() != NULL);
#ifdef LINKED
	IN(dlsym(RTLD_DEFAULT, "cuLaunchKernel"), SHIM);
	IN(dlsym(RTLD_NEXT, "cuLaunchKernel"), SHIM);
	IN(third_next("cuLaunchKernel"), SHIM);
	CHECK(dlsym(RTLD_DEFAULT, "cuLaunchKernelEx") == NULL);
	IN((void *)cuLaunchKernel, SHIM);
	h = dlopen(NULL, RTLD_NOW);
	IN(dlsym(h, "cuLaunchKernel"), SHIM);
	CHECK(dlsym(h, "cuLaunchKernelEx") == NULL);
#else
	/* No driver, no driver functions: the shim invents nothing. */
	CHECK(dlsym(RTLD_DEFAULT, "cuInit") == NULL && dlerror() != NULL);
	CHECK(dlsym(RTLD_NEXT, "cuInit") == NULL);
	h = dlopen(STUB, RTLD_NOW | RTLD_LOCAL);
	CHECK(h);
	IN(dlsym(h, "cuInit"), SHIM);
	CHECK(dlsym(RTLD_DEFAULT, "cuInit") == NULL && dlerror() != NULL); /* it was opened RTLD_LOCAL */
#endif
	h = dlopen(STUB, RTLD_NOW);
	CHECK(h);
	check_driver(h);
	puts("resolve: every way leads to the shim");
	return 0;
}
