// SPDX-License-Identifier: Apache-2.0
/*
 * life.h: what the tests of the shim's life share: a process with contexts, a
 * scheduler that the test plays, threads that launch. One case per process.
 */
#ifndef NVSHARE_TEST_LIFE_H
#define NVSHARE_TEST_LIFE_H

#include <pthread.h>

#include "fake.h"
#include "stub.h"

extern struct fake fake;
extern void *contexts[STUB_GPUS];

unsigned threads(void);
unsigned descriptors(void);
int launch(void *stream);
void allow(int gpu, int on);
unsigned long launches(int gpu);

/* A thread that makes one launch, or many, and says how many are done. */
struct launcher {
	pthread_t thread;
	int gpu, count; /* 0: until stop */
	int error;      /* errno before and after */
	atomic_int stop;
	atomic_ulong done;
};

void start(struct launcher *l, int gpu, int count);
void finish(struct launcher *l);

/* A process with contexts on this many GPUs, attached to a scheduler. */
void begin(int gpus);

/* One launch on GPU 0 under a grant of this epoch. */
void hold(uint64_t epoch);

struct life_case {
	const char *name;
	void (*run)(void);
};

/* Without an argument lists the cases; else runs the one it names. */
int life_main(int argc, char **argv, const struct life_case *cases, size_t count);

#endif
