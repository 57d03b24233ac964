// SPDX-License-Identifier: Apache-2.0

#include <dlfcn.h>
#include <string.h>

#include "glibc.h"
#include "hook.h"
#include "log.h"

typedef void *dlsym_fn(void *, const char *);
typedef int resolver_fn(const char *, void **, int, uint64_t, void *);

#define BASE_NAME_SIZE 64
#define OLDEST_CUDA    11040

struct view {
	dlsym_fn *dlsym;       /* the one the application calls */
	void *driver;          /* handle of libcuda */
	resolver_fn *resolver; /* cuGetProcAddress_v2 as the application gets it */
	int version;
	char asked[BASE_NAME_SIZE]; /* what the resolver was asked for last */
	bool past;                  /* and whether that leads past the shim */
};

/* "cuMemcpyHtoD_v2_ptds" is "cuMemcpyHtoD" to cuGetProcAddress. */
static void symbol_base(char *out, size_t size, const char *name)
{
	size_t n = strlen(name);

	if (n >= size)
		n = size - 1;
	if (n > 5 && (memcmp(name + n - 5, "_ptsz", 5) == 0 || memcmp(name + n - 5, "_ptds", 5) == 0))
		n -= 5;
	if (n > 3 && memcmp(name + n - 3, "_v", 2) == 0 && name[n - 1] >= '2' && name[n - 1] <= '9')
		n -= 3;
	memcpy(out, name, n);
	out[n] = '\0';
}

/* Whether the resolver hands out anything but wrappers, as the newest and the oldest program may ask. */
static bool resolver_leads_past(const struct view *v, const char *base)
{
	static const uint64_t flags[] = { CU_GPA_DEFAULT, CU_GPA_LEGACY_STREAM, CU_GPA_PER_THREAD };
	const int versions[] = { v->version, OLDEST_CUDA };

	for (unsigned i = 0; v->resolver && i < 6; i++) {
		int status[4] = { 0 };
		void *p = NULL;

		if (v->resolver(base, &p, versions[i / 3], flags[i % 3], status) == CUDA_SUCCESS &&
		    p && !nvs_is_wrapper(p))
			return true;
	}
	return false;
}

/* Returns the way that leads past the shim, NULL if there is none. */
static const char *way_past(struct view *v, unsigned f)
{
	const char *name = nvs_names[f];
	char base[BASE_NAME_SIZE];
	void *p;

	/* What a directly linked program, or one later in line, is bound to. */
	if (nvs_next_dlsym(RTLD_DEFAULT, name) != nvs_wrappers[f])
		return "symbol";
	/* Two names of one function have the same wrapper. */
	p = v->dlsym(v->driver, name);
	if (p != nvs_wrappers[f] && !nvs_is_wrapper(p))
		return "dlsym";
	/* The variants of a name follow each other: it is asked for once. */
	symbol_base(base, sizeof(base), name);
	if (strcmp(base, v->asked) != 0) {
		memcpy(v->asked, base, sizeof(base));
		v->past = resolver_leads_past(v, base);
	}
	return v->past ? "cuGetProcAddress" : NULL;
}

struct nvs_coverage nvs_coverage_check(void)
{
	struct nvs_coverage coverage = { 0 };
	struct view v = { .version = 12000 };
	Dl_info info;

	*(void **)&v.dlsym = nvs_next_dlsym(RTLD_DEFAULT, "dlsym");
	if (dladdr(nvs_real_pointer(NVS_F_cuInit), &info) && info.dli_fname)
		v.driver = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
	if (!v.dlsym || !v.driver)
		return coverage;
	*(void **)&v.resolver = v.dlsym(v.driver, "cuGetProcAddress_v2");
	nvs_memory_driver.driver_version(&v.version);
	for (unsigned f = 0; f < NVS_SUBMIT_COUNT; f++) {
		const char *past;

		if (!atomic_load(&nvs_real_table[f]))
			continue;
		past = way_past(&v, f);
		if (past) {
			coverage.bypassed++;
			nvs_debugf("not interposed: %s by %s", nvs_names[f], past);
		} else {
			coverage.interposed++;
		}
	}
	nvs_debugf("interposed %u entry points, %u bypass the shim", coverage.interposed,
		   coverage.bypassed);
	dlerror();
	return coverage;
}
