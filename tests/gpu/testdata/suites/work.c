// SPDX-License-Identifier: Apache-2.0
// A program of the suite that the test of suites.py makes up: with -DTELLS it says that it is preloaded.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *at, size_t size);
int cuMemsetD8_v2(unsigned long long at, unsigned char value, size_t size);
int cuMemcpyDtoH_v2(void *to, unsigned long long at, size_t size);

int main(void)
{
	unsigned char byte = 0;
	unsigned long long at;
	void *context;
	int device;

	if (cuInit(0) || cuDeviceGet(&device, 0) || cuCtxCreate_v2(&context, 0, device) || cuMemAlloc_v2(&at, 1 << 20) ||
	    cuMemsetD8_v2(at, 7, 1 << 20) || cuMemcpyDtoH_v2(&byte, at, 1))
		return 1;
	printf("process %d\nthe GPU says %d\n", (int)getpid(), byte); // the first line changes natively, too
#ifdef TELLS
	puts(getenv("LD_PRELOAD") ? "preloaded" : "alone");
#endif
	return 0;
}
