// SPDX-License-Identifier: Apache-2.0
/*
 * runtime: makes NVIDIA's CUDA runtime look up the driver, and prints the runtime's
 * answer. Usage: runtime LIBRARY. With STATIC the runtime is linked in.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int cudaGetDeviceCount(int *count);

int main(int argc, char **argv)
{
	int (*get)(int *), count = -1;
#ifdef STATIC
	(void)argc;
	(void)argv;
	get = cudaGetDeviceCount;
#else
	void *lib = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;

	if (!lib) {
		fprintf(stderr, "runtime: %s\n", argc == 2 ? dlerror() : "usage: runtime LIBRARY");
		return 1;
	}
	*(void **)&get = dlsym(lib, "cudaGetDeviceCount");
#endif
	printf("cudaGetDeviceCount %d\n", get(&count));
	return 0;
}
