// SPDX-License-Identifier: Apache-2.0
/*
 * gpu-sizes: stands for nvidia-smi in images of tests. Prints a line for each GPU, of its memory
 * as NVML tells it: "INDEX: USEDMiB / TOTALMiB". Needs libnvidia-ml.so.1, and makes no
 * call of CUDA.
 */
#include <dlfcn.h>
#include <stdio.h>

struct memory {
	unsigned long long total, free, used;
};

int main(void)
{
	void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	int (*init)(void), (*count)(unsigned *), (*device)(unsigned, void **), (*size)(void *, struct memory *);
	unsigned n;

	if (!lib) {
		fprintf(stderr, "gpu-sizes: %s\n", dlerror());
		return 1;
	}
	*(void **)&init = dlsym(lib, "nvmlInit_v2");
	*(void **)&count = dlsym(lib, "nvmlDeviceGetCount_v2");
	*(void **)&device = dlsym(lib, "nvmlDeviceGetHandleByIndex_v2");
	*(void **)&size = dlsym(lib, "nvmlDeviceGetMemoryInfo");
	if (!init || !count || !device || !size || init() || count(&n)) {
		fprintf(stderr, "gpu-sizes: NVML does not answer\n");
		return 1;
	}
	for (unsigned i = 0; i < n; i++) {
		struct memory m;
		void *d;

		if (device(i, &d) || size(d, &m)) {
			fprintf(stderr, "gpu-sizes: NVML does not tell of GPU %u\n", i);
			return 1;
		}
		printf("%u: %lluMiB / %lluMiB\n", i, m.used >> 20, m.total >> 20);
	}
	return 0;
}
