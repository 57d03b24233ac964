// SPDX-License-Identifier: Apache-2.0
/*
 * cases.h: a test program of named cases. simulated.sh asks for their names, and runs each
 * in a process of its own.
 */
#ifndef NVS_TEST_CASES_H
#define NVS_TEST_CASES_H

#include <stdio.h>
#include <string.h>

struct test_case {
	const char *name;
	void (*run)(void);
};

/* The case that is asked for; without any it says which there are. Returns an exit status. */
static inline int run_case(const struct test_case *c, size_t n, int argc, char **argv)
{
	for (size_t i = 0; i < n; i++) {
		if (argc < 2)
			puts(c[i].name);
		else if (strcmp(argv[1], c[i].name) == 0)
			return c[i].run(), 0;
	}
	return argc < 2 ? 0 : 2;
}

#endif
