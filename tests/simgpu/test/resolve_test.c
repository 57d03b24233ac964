// SPDX-License-Identifier: Apache-2.0
/* cuGetProcAddress gives the pointers that dlsym gives, _ptsz when asked. */
#include "check.h"

#include <dlfcn.h>

static void *lib;

static void *resolve(const char *base, int version, cuuint64_t flags, int want_status)
{
	void *p = (void *)1;
	int status = -1;

	CU(cuGetProcAddress_v2(base, &p, version, flags, &status));
	if (status != want_status) {
		fprintf(stderr, "%s at %d, flags %d: status %d, want %d\n", base, version, (int)flags, status, want_status);
		_exit(1);
	}
	return p;
}

static void row(const char *base, int since, const char *symbol, const char *per_thread)
{
	void *legacy = dlsym(lib, symbol), *own = per_thread ? dlsym(lib, per_thread) : legacy;

	CHECK(legacy && own);
	CHECK(!per_thread || own != legacy);
	CHECK(resolve(base, since, CU_GET_PROC_ADDRESS_DEFAULT, 0) == legacy);
	CHECK(resolve(base, since, CU_GET_PROC_ADDRESS_LEGACY_STREAM, 0) == legacy);
	if (since >= 7000 || !per_thread)
		CHECK(resolve(base, since, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, 0) == own);
	else
		CHECK(!resolve(base, since, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, 2));
}

int main(void)
{
	void *p = (void *)1;

	lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	if (!lib)
		lib = dlopen("libcuda.so.1", RTLD_NOW);
	CHECK(lib);
	/* all of this works before cuInit */
#define E(base, since, symbol)	       row(#base, since, #symbol, NULL);
#define P(base, since, symbol, suffix) row(#base, since, #symbol, #symbol #suffix);
#include "entries.h"
	CHECK(resolve("cuCtxCreate", 11000, 0, 0) == dlsym(lib, "cuCtxCreate_v2"));
	CHECK(resolve("cuCtxCreate", 13000, 0, 0) == dlsym(lib, "cuCtxCreate_v4"));
	CHECK(resolve("cuGetProcAddress", 13000, 0, 0) == dlsym(lib, "cuGetProcAddress_v2"));
	CHECK(resolve("cuMemAlloc", 13000, 2, 0) == dlsym(lib, "cuMemAlloc_v2"));
	/* versioned and unknown names, too old a version, bad flags */
	CHECK(!resolve("cuMemAlloc_v2", 13000, 0, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND));
	CHECK(!resolve("cuNoSuch", 13000, 0, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND));
	CHECK(!resolve("cuLaunchKernelEx", 9000, 0, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT));
	EXPECT(CUDA_ERROR_NOT_FOUND, cuGetProcAddress("cuNoSuch", &p, 13000, 0));
	CHECK(p == (void *)1);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress_v2("cuInit", &p, 13000, 7, NULL));
	return 0;
}
