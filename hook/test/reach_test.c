// SPDX-License-Identifier: Apache-2.0
/*
 * reach_test.c: who gets a wrapper, and who gets past the shim. The bypasses
 * are stated as they are; the README names them. One case per process:
 *
 *   reach_test CASE [interposer-first | interposer-last]
 *
 * The program is linked to the driver if LINKED, else it opens it.
 */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/ioctl.h>

#include "fake.h"
#include "stub.h"

#define SHIM       "libnvshare.so"
#define STUB       "libcuda.so.1"
#define INTERPOSER "libinterposer.so"

typedef void *find_fn(void *, const char *);
typedef void *get_fn(void);
typedef unsigned count_fn(void);

static const char *object_of(void *p)
{
	Dl_info info;

	if (!p || !dladdr(p, &info))
		return "nothing";
	return strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : info.dli_fname;
}

#define IN(p, object) CHECK(strcmp(object_of(p), object) == 0)

static void *function(void *handle, const char *name)
{
	void *p = dlsym(handle, name);

	CHECK(p);
	return p;
}

#ifndef LINKED

static void library(int flags, const char *bound, const char *found)
{
	void *deep = dlopen("libdeep.so", RTLD_NOW | RTLD_LOCAL | flags);
	void *driver = dlopen(STUB, RTLD_NOW);
	get_fn *deep_bound;
	find_fn *deep_dlsym;

	CHECK(deep && driver);
	*(void **)&deep_bound = function(deep, "deep_bound");
	*(void **)&deep_dlsym = function(deep, "deep_dlsym");
	IN(deep_bound(), bound);
	IN(deep_dlsym(driver, "cuLaunchKernel"), found);
	IN(deep_dlsym(driver, "cuGetProcAddress_v2"), found);
	/* The others are as safe as ever. */
	IN(dlsym(driver, "cuLaunchKernel"), SHIM);
}

static void linked_library(void)
{
	CHECK(dlsym(RTLD_DEFAULT, "cuLaunchKernel") == NULL); /* there is no driver */
	library(0, SHIM, SHIM);
}

/* As of Python's extensions: only the library that asks, and what it needs, is in its scope. */
static void linked_library_looks_around(void)
{
	void *deep = dlopen("libdeep.so", RTLD_NOW | RTLD_LOCAL);
	find_fn *deep_dlsym;

	CHECK(deep);
	*(void **)&deep_dlsym = function(deep, "deep_dlsym");
	IN(deep_dlsym(RTLD_DEFAULT, "cuLaunchKernel"), SHIM);
	IN(deep_dlsym(RTLD_NEXT, "cuLaunchKernel"), SHIM);
	IN(deep_dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2"), SHIM);
	IN(deep_dlsym(RTLD_DEFAULT, "cuNotInTheTable"), STUB);
	CHECK(deep_dlsym(RTLD_DEFAULT, "cuGLCtxCreate") == NULL); /* of the table, and not of this driver */
	CHECK(deep_dlsym(RTLD_NEXT, "cuGLCtxCreate") == NULL);
}

/* BYPASS: its own dependencies come first, so it has the driver's and libc's. */
static void linked_library_opened_deep(void)
{
	library(RTLD_DEEPBIND, STUB, STUB);
}

/* The flag is about what the driver itself is bound to. */
static void driver_opened_deep(void)
{
	void *driver = dlopen(STUB, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);

	CHECK(driver);
	IN(dlsym(driver, "cuLaunchKernel"), SHIM);
	IN(dlsym(driver, "cuLaunchKernel_ptsz"), SHIM);
	IN(dlsym(driver, "cuGetProcAddress_v2"), SHIM);
	IN(dlsym(driver, "cuNotInTheTable"), STUB);
}

/* BYPASS: a namespace of its own has a driver of its own, and no shim. */
static void namespace(void)
{
	void *inside = dlmopen(LM_ID_NEWLM, STUB, RTLD_NOW | RTLD_LOCAL);
	void *outside, *deep;
	Lmid_t id;
	get_fn *deep_bound;
	find_fn *deep_dlsym;

	CHECK(inside);
	IN(dlsym(inside, "cuLaunchKernel"), STUB);
	CHECK(dlinfo(inside, RTLD_DI_LMID, &id) == 0);
	deep = dlmopen(id, "libdeep.so", RTLD_NOW | RTLD_LOCAL);
	CHECK(deep);
	*(void **)&deep_bound = function(deep, "deep_bound");
	*(void **)&deep_dlsym = function(deep, "deep_dlsym");
	IN(deep_bound(), STUB);
	CHECK(deep_bound() == dlsym(inside, "cuLaunchKernel"));
	CHECK(deep_dlsym(inside, "cuLaunchKernel") == deep_bound());
	/* Nor does the one driver stand for the other. */
	outside = dlopen(STUB, RTLD_NOW | RTLD_LOCAL);
	CHECK(outside);
	IN(dlsym(outside, "cuLaunchKernel"), SHIM);
	IN(dlsym(inside, "cuLaunchKernel"), STUB);
}

/* No look-up of a name that only resembles the driver's is answered by the shim. */
static void other_libraries(void)
{
	static const char *const names[] = {
		"cudnnCreate", "cublasCreate_v2", "cublasLtMatmul", "cusparseCreate", "cufftExecC2C",
		"curandGenerate", "cusolverDnCreate", "cutensorCreate", "cutensornetCreate", "cupti",
		"cudaLaunchKernel", "cuLaunchKernelOfMine", "cuMemcpyOfMine", "cuda", "cu",
	};
	void *third = dlopen("libthird.so", RTLD_NOW | RTLD_GLOBAL);
	void *driver = dlopen(STUB, RTLD_NOW);

	CHECK(third && driver);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		IN(dlsym(third, names[i]), "libthird.so");
		IN(dlsym(RTLD_DEFAULT, names[i]), "libthird.so");
		IN(dlsym(RTLD_NEXT, names[i]), "libthird.so");
	}
	IN(dlsym(driver, "cudnnCreate"), STUB);
}

/* Tables go out as the driver made them. */
static void export_tables(void)
{
	static const unsigned char id[2][16] = { { 0x6b, 0xd5 }, { 0xa0, 0x94 } };
	void *driver = dlopen(STUB, RTLD_NOW), *through = NULL;
	int (*direct)(const void **, const void *);
	int (*resolve)(const char *, void **, int, uint64_t, void *);
	const void *table;

	CHECK(driver);
	*(void **)&direct = dlsym(driver, "cuGetExportTable");
	for (int i = 0; i < 3; i++) {
		table = NULL;
		CHECK(direct(&table, id[i / 2]) == 0 && table);
	}
	*(void **)&resolve = function(driver, "cuGetProcAddress_v2");
	CHECK(resolve("cuGetExportTable", &through, 13000, 0, NULL) == 0);
	CHECK(through == (void *)direct);
	puts(object_of(through));
}

#else

static void launch(void)
{
	void *ctx;

	CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&ctx, 0, 0) == 0);
	stub_state()->work_ns = 1;
	CHECK(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0);
	CHECK(atomic_load(&stub_state()->launches[0]) == 1);
}

static count_fn *calls, *ioctls;
static get_fn *next, *next_versioned;

static void find_interposer(void)
{
	*(void **)&calls = function(RTLD_DEFAULT, "interposer_calls");
	*(void **)&ioctls = function(RTLD_DEFAULT, "interposer_ioctls");
	*(void **)&next = function(RTLD_DEFAULT, "interposer_next");
	*(void **)&next_versioned = function(RTLD_DEFAULT, "interposer_next_versioned");
}

/* It is asked first and hands on to the shim. */
static void interposer_before_us(void)
{
	find_interposer();
	CHECK(ioctls() == 1);
	IN((void *)cuLaunchKernel, INTERPOSER);
	IN(dlsym(RTLD_DEFAULT, "cuLaunchKernel"), INTERPOSER);
	IN(next(), SHIM);
	/* What comes next is always what comes after the shim. */
	IN(dlsym(RTLD_NEXT, "cuLaunchKernel"), SHIM);
	CHECK(next_versioned() == NULL || strcmp(object_of(next_versioned()), SHIM) == 0);
	launch();
	CHECK(calls() == 1);
}

/*
 * The shim calls the driver itself, so one that comes later is not asked by a
 * linked program. Who looks the name up gets it, and through it the shim.
 */
static void interposer_after_us(void)
{
	__typeof__(&cuLaunchKernel) p;
	int n;

	find_interposer();
	/* Every ioctl goes on to it, from the first: its own constructor's, and before any driver is known. */
	CHECK(ioctls() == 1);
	CHECK(ioctl(-1, FIONREAD, &n) == -1 && errno == EBADF);
	CHECK(ioctls() == 2);
	IN((void *)cuLaunchKernel, SHIM);
	IN(dlsym(RTLD_DEFAULT, "cuLaunchKernel"), INTERPOSER);
	IN(dlsym(RTLD_NEXT, "cuLaunchKernel"), INTERPOSER);
	IN(next(), SHIM);
	CHECK(next_versioned() == NULL || strcmp(object_of(next_versioned()), SHIM) == 0);
	launch();
	CHECK(calls() == 0);
	*(void **)&p = dlsym(RTLD_DEFAULT, "cuLaunchKernel");
	CHECK(p(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0);
	CHECK(calls() == 1 && atomic_load(&stub_state()->launches[0]) == 2);
}

#endif

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
#define CASE(name) { #name, name }
#ifndef LINKED
	CASE(linked_library),
	CASE(linked_library_looks_around),
	CASE(linked_library_opened_deep),
	CASE(driver_opened_deep),
	CASE(namespace),
	CASE(other_libraries),
	CASE(export_tables),
#else
	CASE(interposer_before_us),
	CASE(interposer_after_us),
#endif
};

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		if (argc < 2)
			puts(cases[i].name);
		else if (strcmp(argv[1], cases[i].name) == 0)
			return cases[i].run(), 0;
	}
	return argc >= 2;
}
