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
#include "uuid.h"

/* What the CDI spec, or the plugin, sets where a container may move: package cdi, AnyMark. */
#define MARK_ENV "NVSHARE_GPU"
#define MARK     "any"
#define GPU_ENV  "CUDA_VISIBLE_DEVICES"

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
	done = syscall(SYS_write, ends[1], text, (size_t)NVS_UUID_TEXT) == NVS_UUID_TEXT &&
	       syscall(SYS_read, ends[0], at, (size_t)NVS_UUID_TEXT) == NVS_UUID_TEXT;
	(void)syscall(SYS_close, ends[0]);
	(void)syscall(SYS_close, ends[1]);
	return done;
}

/* Whether text names one GPU, and nothing else. */
static bool names_one(const char *text, uint8_t *uuid)
{
	char again[NVS_UUID_TEXT + 1];

	if (!nvs_uuid_parse(text, uuid))
		return false;
	nvs_uuid_format(again, uuid);
	return strcmp(text, again) == 0;
}

void nvs_place_follow(void)
{
	const char *mark = secure_getenv(MARK_ENV);
	char *seen = secure_getenv(GPU_ENV), text[NVS_UUID_TEXT + 1];
	uint8_t uuid[NVS_UUID_SIZE], place[NVS_UUID_SIZE];
	int saved = errno;

	if (mark && strcmp(mark, MARK) == 0 && seen && names_one(seen, uuid) &&
	    nvs_query_place(uuid, place) && memcmp(uuid, place, sizeof(place)) != 0) {
		nvs_uuid_format(text, place);
		if (overwrite(seen, text))
			nvs_debugf("the container is on %s", text);
	}
	errno = saved;
}
