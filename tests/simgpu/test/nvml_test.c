// SPDX-License-Identifier: Apache-2.0
/* libnvidia-ml.so.1 and libcuda.so.1 in one process, over the same state. */
#include "check.h"

#include <dlfcn.h>

static void *lib;

static void *sym(const char *name)
{
	void *p = dlsym(lib, name);

	if (!p)
		fprintf(stderr, "%s: missing\n", name);
	CHECK(p);
	return p;
}

#define FN(name, ...) ((int (*)(__VA_ARGS__))sym(#name))

struct info { unsigned pid; unsigned long long memory; unsigned gi, ci; };
struct memory { unsigned long long total, free, used; };

int main(void)
{
	struct gpu g;
	struct info users[8];
	struct memory m;
	CUdeviceptr d;
	char text[96];
	unsigned n = 0, util[2];
	void *dev, *same;

	lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	CHECK(lib);
	EXPECT(1, FN(nvmlDeviceGetCount_v2, unsigned *)(&n));
	EXPECT(0, FN(nvmlInit_v2, void)());
	EXPECT(0, FN(nvmlDeviceGetCount_v2, unsigned *)(&n));
	CHECK(n == 3);
	EXPECT(0, FN(nvmlDeviceGetHandleByIndex_v2, unsigned, void **)(1, &dev));
	EXPECT(2, FN(nvmlDeviceGetHandleByIndex_v2, unsigned, void **)(3, &same));
	EXPECT(0, FN(nvmlDeviceGetUUID, void *, char *, unsigned)(dev, text, sizeof text));
	CHECK(!strcmp(text, "GPU-51600000-0000-4000-8000-000000000001"));
	EXPECT(0, FN(nvmlDeviceGetHandleByUUID, const char *, void **)(text, &same));
	CHECK(same == dev);
	EXPECT(6, FN(nvmlDeviceGetHandleByUUID, const char *, void **)("GPU-0", &same));
	EXPECT(3, FN(nvmlDeviceGetMigMode, void *, unsigned *, unsigned *)(dev, &n, &n));
	n = 8;
	EXPECT(0, FN(nvmlDeviceGetComputeRunningProcesses_v3, void *, unsigned *, struct info *)(dev, &n, users));
	CHECK(n == 0);
	/* now this process uses GPU 1 */
	g = gpu_open(1);
	CU(cuMemAlloc_v2(&d, 3u << 20));
	CU(spin(&g, NULL, 3600000 * MS, 0));
	n = 8;
	EXPECT(0, FN(nvmlDeviceGetComputeRunningProcesses_v3, void *, unsigned *, struct info *)(dev, &n, users));
	CHECK(n == 1 && users[0].pid == (unsigned)getpid() && users[0].memory == 3u << 20);
	n = 0;
	EXPECT(7, FN(nvmlDeviceGetComputeRunningProcesses_v3, void *, unsigned *, struct info *)(dev, &n, users));
	EXPECT(0, FN(nvmlDeviceGetMemoryInfo, void *, struct memory *)(dev, &m));
	CHECK(m.total == 64u << 20 && m.used == 3u << 20 && m.free == m.total - m.used);
	EXPECT(0, FN(nvmlDeviceGetUtilizationRates, void *, unsigned *)(dev, util));
	CHECK(util[0] == 100);
	EXPECT(0, FN(nvmlDeviceGetPowerUsage, void *, unsigned *)(dev, &n));
	CHECK(n == 350000);
	EXPECT(0, FN(nvmlDeviceGetTemperature, void *, unsigned, unsigned *)(dev, 0, &n));
	CHECK(n == 65);
	EXPECT(0, FN(nvmlShutdown, void)());
	EXPECT(1, FN(nvmlShutdown, void)());
	dlclose(lib); /* must not cost this process its slot */
	CU(cuMemAlloc_v2(&d, 1));
	return 0;
}
