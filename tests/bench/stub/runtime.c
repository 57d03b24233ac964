// SPDX-License-Identifier: Apache-2.0
/*
 * runtime.c: the functions of a CUDA runtime that launch-cost uses, so that calls through
 * a runtime library can be tested without CUDA. It finds the driver as the real runtime
 * does: dlopen, then dlsym.
 */
#include <dlfcn.h>
#include <stddef.h>

struct dim3 { unsigned x, y, z; };
struct config {
	struct dim3 grid, block;
	size_t shared;
	void *stream, *attrs;
	unsigned num_attrs;
};
/* CUlaunchConfig has the same layout, except for a shorter `shared`. */
_Static_assert(offsetof(struct config, stream) == 32, "cudaLaunchConfig_t");

static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		     void *, void **, void **);
static int (*launch_ex)(const struct config *, void *, void **, void **);
static int (*copy)(unsigned long long, unsigned long long, size_t, void *);
static int (*record)(void *, void *);

int cudaFree(void *p);
int cudaFree(void *p)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);

	(void)p;
	if (!driver)
		return 35;
	*(void **)&launch = dlsym(driver, "cuLaunchKernel");
	*(void **)&launch_ex = dlsym(driver, "cuLaunchKernelEx");
	*(void **)&copy = dlsym(driver, "cuMemcpyAsync");
	*(void **)&record = dlsym(driver, "cuEventRecord");
	return launch && launch_ex && copy && record ? 0 : 36;
}
int cudaSetDevice(int dev);
int cudaSetDevice(int dev) { return dev ? 101 : 0; }
int cudaRuntimeGetVersion(int *v);
int cudaRuntimeGetVersion(int *v) { *v = 12080; return 0; }
int cudaLibraryLoadData(void **library, const void *code, void *options, void **values,
			unsigned num, void *options2, void **values2, unsigned num2);
int cudaLibraryLoadData(void **library, const void *code, void *options, void **values,
			unsigned num, void *options2, void **values2, unsigned num2)
{
	int (*load)(void **, const void *);

	*(void **)&load = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuModuleLoadData");
	return options || values || num || options2 || values2 || num2 ? 1 : load(library, code);
}
int cudaLibraryGetKernel(void **kernel, void *library, const char *name);
int cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
	int (*find)(void **, void *, const char *);

	*(void **)&find = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuModuleGetFunction");
	return find(kernel, library, name);
}
int cudaLaunchKernel(const void *f, struct dim3 g, struct dim3 b, void **args, size_t shared, void *s);
int cudaLaunchKernel(const void *f, struct dim3 g, struct dim3 b, void **args, size_t shared, void *s)
{
	return launch((void *)f, g.x, g.y, g.z, b.x, b.y, b.z, (unsigned)shared, s, args, NULL);
}
int cudaLaunchKernelExC(const struct config *c, const void *f, void **args);
int cudaLaunchKernelExC(const struct config *c, const void *f, void **args)
{
	return launch_ex(c, (void *)f, args, NULL);
}
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream);
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream)
{
	return kind != 1 ? 1 : copy((unsigned long long)to, (unsigned long long)from, n, stream);
}
int cudaEventRecord(void *event, void *stream);
int cudaEventRecord(void *event, void *stream) { return record(event, stream); }
