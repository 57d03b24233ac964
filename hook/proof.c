// SPDX-License-Identifier: Apache-2.0
#include "proof.h"

#include <dlfcn.h>
#include <string.h>

#include "glibc.h"
#include "hook.h"
#include "log.h"

typedef void *dlsym_fn(void *, const char *);
typedef int resolver_fn(const char *, void **, int, uint64_t, void *);

struct view {
	dlsym_fn *dlsym;       /* the one the application calls */
	void *driver;          /* handle of libcuda */
	resolver_fn *resolver; /* cuGetProcAddress_v2 as the application gets it */
	int version;
};

/* "cuMemcpyHtoD_v2_ptds" is "cuMemcpyHtoD" to cuGetProcAddress. */
static void base_name(char *out, size_t size, const char *name)
{
	static const char *const suffix[] = { "_ptsz", "_ptds", "_v2" };
	size_t n = strlen(name);

	if (n >= size)
		n = size - 1;
	for (unsigned i = 0; i < sizeof(suffix) / sizeof(suffix[0]); i++) {
		size_t m = strlen(suffix[i]);

		if (n > m && memcmp(name + n - m, suffix[i], m) == 0)
			n -= m;
	}
	memcpy(out, name, n);
	out[n] = '\0';
}

/* Returns the way that leads past the shim, NULL if there is none. */
static const char *way_past(const struct view *v, unsigned f)
{
	static const uint64_t flags[] = { CU_GPA_DEFAULT, CU_GPA_LEGACY_STREAM, CU_GPA_PER_THREAD };
	const char *name = nvs_names[f];
	char base[96];

	/* What a directly linked program, or one later in line, is bound to. */
	if (nvs_next_dlsym(RTLD_DEFAULT, name) != nvs_wrappers[f])
		return "symbol";
	if (!nvs_is_wrapper(v->dlsym(v->driver, name)))
		return "dlsym";
	base_name(base, sizeof(base), name);
	for (unsigned i = 0; v->resolver && i < sizeof(flags) / sizeof(flags[0]); i++) {
		int status[4] = { 0 };
		void *p = NULL;

		if (v->resolver(base, &p, v->version, flags[i], status) == CUDA_SUCCESS && p &&
		    !nvs_is_wrapper(p))
			return "cuGetProcAddress";
	}
	return NULL;
}

struct nvs_proof nvs_prove(void)
{
	struct nvs_proof proof = { 0 };
	struct view v = { .version = 12000 };
	Dl_info info;

	*(void **)&v.dlsym = nvs_next_dlsym(RTLD_DEFAULT, "dlsym");
	if (dladdr(nvs_real_pointer(NVS_F_cuInit), &info) && info.dli_fname)
		v.driver = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
	if (!v.dlsym || !v.driver)
		return proof;
	*(void **)&v.resolver = v.dlsym(v.driver, "cuGetProcAddress_v2");
	if (nvs_driver.driver_version)
		nvs_driver.driver_version(&v.version);
	for (unsigned f = 0; f < NVS_GATED_COUNT; f++) {
		const char *past;

		if (!nvs_real_pointer((enum nvs_function)f))
			continue;
		past = way_past(&v, f);
		if (past) {
			proof.bypassed++;
			nvs_debugf("not interposed: %s by %s", nvs_names[f], past);
		} else {
			proof.interposed++;
		}
	}
	nvs_debugf("interposed %u entry points, %u lead past the shim", proof.interposed,
		   proof.bypassed);
	dlerror();
	return proof;
}
