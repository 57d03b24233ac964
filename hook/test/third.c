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
