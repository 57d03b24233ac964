// SPDX-License-Identifier: Apache-2.0
/* check.h: what tests expect, and how they wait for it. */
#ifndef NVSHARE_TEST_CHECK_H
#define NVSHARE_TEST_CHECK_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
			exit(1); \
		} \
	} while (0)

/* A call of the driver that succeeds. */
#define CU(call) \
	do { \
		int rc_ = (call); \
		if (rc_) { \
			fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #call, rc_); \
			exit(1); \
		} \
	} while (0)

/* A directory of the test's own, in $TMPDIR, which tests/suites/alone.sh removes. */
static inline void test_dir(char dir[64])
{
	const char *tmp = getenv("TMPDIR");

	CHECK(snprintf(dir, 64, "%s/test.XXXXXX", tmp && *tmp ? tmp : "/tmp") < 64);
	CHECK(mkdtemp(dir));
}

/* Long enough for any machine; a wait that reaches it is a failure. */
#define PATIENCE_MS 100000
#ifndef EVENTUALLY_MS
#define EVENTUALLY_MS PATIENCE_MS
#endif

static inline void nap_ms(int ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000L };

	nanosleep(&t, NULL);
}

/* How much is in a directory, "." and ".." included: of threads or descriptors, to see what is left. */
static inline unsigned entries(const char *dir)
{
	DIR *d = opendir(dir);
	unsigned n = 0;

	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* Waits for a condition that must come true. */
#define EVENTUALLY(cond) \
	do { \
		for (int ms_ = 0; !(cond) && ms_ < EVENTUALLY_MS; ms_++) \
			nap_ms(1); \
		CHECK(cond); \
	} while (0)

#endif
