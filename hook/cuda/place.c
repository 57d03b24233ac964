// SPDX-License-Identifier: Apache-2.0
#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "log.h"
#include "query.h"
#include "wire.h"

/* What the CDI spec, or the plugin, sets where a container may move: package cdi, AnyMark. */
#define MARK_ENV "NVSHARE_GPU"
#define MARK     "any"
#define GPU_ENV  "CUDA_VISIBLE_DEVICES"

#define TEXT_SIZE 40 /* "GPU-51600000-0000-4000-8000-000000000001" */

static bool is_dash(unsigned i)
{
	return i == 12 || i == 17 || i == 22 || i == 27;
}

static int digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool parse(const char *text, uint8_t *uuid)
{
	unsigned n = 0;

	if (strlen(text) != TEXT_SIZE || memcmp(text, "GPU-", 4) != 0)
		return false;
	for (unsigned i = 4; i < TEXT_SIZE; i++) {
		int d = digit(text[i]);

		if (is_dash(i) ? text[i] != '-' : d < 0)
			return false;
		if (is_dash(i))
			continue;
		uuid[n / 2] = (uint8_t)(n % 2 ? uuid[n / 2] | d : d << 4);
		n++;
	}
	return true;
}

/* text is as parse() likes it: what is no digit stays. */
static void change(char *text, const uint8_t *uuid)
{
	unsigned n = 0;

	for (unsigned i = 4; i < TEXT_SIZE; i++) {
		if (is_dash(i))
			continue;
		text[i] = "0123456789abcdef"[n % 2 ? uuid[n / 2] & 15 : uuid[n / 2] >> 4];
		n++;
	}
}

/*
 * Other threads may read the environment now, so it keeps its form. The kernel writes: a
 * program may have put a constant there, and the kernel refuses where a store would end it.
 */
static bool overwrite(char *at, const char *text)
{
	int ends[2];
	bool done;

	if (syscall(SYS_pipe2, ends, O_CLOEXEC) != 0)
		return false;
	done = syscall(SYS_write, ends[1], text, (size_t)TEXT_SIZE) == TEXT_SIZE &&
	       syscall(SYS_read, ends[0], at, (size_t)TEXT_SIZE) == TEXT_SIZE;
	(void)syscall(SYS_close, ends[0]);
	(void)syscall(SYS_close, ends[1]);
	return done;
}

void nvs_place_follow(void)
{
	const char *mark = getenv(MARK_ENV);
	char *seen = getenv(GPU_ENV), text[TEXT_SIZE];
	uint8_t uuid[NVS_UUID_SIZE], place[NVS_UUID_SIZE];
	int saved = errno;

	if (mark && strcmp(mark, MARK) == 0 && seen && parse(seen, uuid) &&
	    nvs_query_place(uuid, place) && memcmp(uuid, place, sizeof(place)) != 0) {
		memcpy(text, seen, sizeof(text));
		change(text, place);
		if (overwrite(seen, text))
			nvs_debugf("the container is on %.40s", text);
	}
	errno = saved;
}
