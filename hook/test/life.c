// SPDX-License-Identifier: Apache-2.0
#include "life.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct fake fake;
void *contexts[STUB_GPUS];

unsigned threads(void) { return entries("/proc/self/task"); }
unsigned descriptors(void) { return entries("/proc/self/fd"); }

int launch(void *stream)
{
	return cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

void allow(int gpu, int on)
{
	atomic_store(&stub_state()->allowed[gpu], on);
}

unsigned long launches(int gpu)
{
	return atomic_load(&stub_state()->launches[gpu]);
}

static void *launcher_main(void *arg)
{
	struct launcher *l = arg;

	CHECK(cuCtxSetCurrent(contexts[l->gpu]) == 0);
	for (int i = 0; l->count ? i < l->count : !atomic_load(&l->stop); i++) {
		errno = l->error;
		CHECK(launch(NULL) == 0);
		CHECK(errno == l->error);
		atomic_fetch_add(&l->done, 1);
	}
	return NULL;
}

void start(struct launcher *l, int gpu, int count)
{
	memset(l, 0, sizeof(*l));
	l->gpu = gpu;
	l->count = count;
	l->error = 77;
	CHECK(pthread_create(&l->thread, NULL, launcher_main, l) == 0);
}

void finish(struct launcher *l)
{
	atomic_store(&l->stop, 1);
	CHECK(pthread_join(l->thread, NULL) == 0);
}

void begin(int gpus)
{
	stub_state()->gpus = gpus;
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0);
	fake_accept(&fake);
	for (int i = 0; i < gpus; i++) {
		CHECK(cuCtxCreate_v2(&contexts[i], 0, i) == 0);
		CHECK(fake_attach(&fake).channel == i);
	}
}

void hold(uint64_t epoch)
{
	struct launcher l;

	allow(0, 1);
	start(&l, 0, 1);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, epoch);
	finish(&l);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
}

int life_main(int argc, char **argv, const struct life_case *cases, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		if (argc < 2)
			puts(cases[i].name);
		else if (strcmp(argv[1], cases[i].name) == 0) {
			alarm(600);
			cases[i].run();
			fake_end(&fake);
			return 0;
		}
	}
	return argc >= 2;
}
