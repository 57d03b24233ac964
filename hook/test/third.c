// SPDX-License-Identifier: Apache-2.0
/* third.c: another library that interposes and looks up; built as libthird.so. */
#include <dlfcn.h>

#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
#else
#define BASE "GLIBC_2.17"
#endif

/* The look-up must come from this library, not be a tail call of its own. */
#define KEEP_FRAME __asm__ volatile("" ::: "memory")

char *strfry(char *s);
char *strfry(char *s) { return s; }

/* With a dlsym that does not forward by a jump these find our own strfry. */
void *third_next_strfry(void);
void *third_next_strfry(void)
{
	void *p = dlsym(RTLD_NEXT, "strfry");

	KEEP_FRAME;
	return p;
}
void *third_next_strfry_versioned(void);
void *third_next_strfry_versioned(void)
{
	void *p = dlvsym(RTLD_NEXT, "strfry", BASE);

	KEEP_FRAME;
	return p;
}
void *third_own_strfry(void);
void *third_own_strfry(void) { return (void *)strfry; }

void *third_next(const char *name);
void *third_next(const char *name)
{
	void *p = dlsym(RTLD_NEXT, name);

	KEEP_FRAME;
	return p;
}

/* Names that begin like the driver's, of this and of other libraries. */
#define OTHER(name) \
	int name(void); \
	int name(void) { return 43; }
OTHER(cudnnCreate)
OTHER(cublasCreate_v2)
OTHER(cublasLtMatmul)
OTHER(cusparseCreate)
OTHER(cufftExecC2C)
OTHER(curandGenerate)
OTHER(cusolverDnCreate)
OTHER(cutensorCreate)
OTHER(cutensornetCreate)
OTHER(cupti)
OTHER(cudaLaunchKernel)
OTHER(cuLaunchKernelOfMine)
OTHER(cuMemcpyOfMine)
OTHER(cuda)
OTHER(cu)
