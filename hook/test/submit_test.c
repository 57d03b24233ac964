// SPDX-License-Identifier: Apache-2.0
/*
 * submit_test.c: calls that put work on a GPU by other ways than a launch wait
 * at the gate of the right GPU. As client_test.c: one case per process, the
 * shim preloaded.
 */
#include <string.h>

#include "life.h"

#define FLAG_UPLOAD 2

/* A thread with GPU 0 current that makes one call. */
struct call {
	pthread_t thread;
	int (*make)(void *);
	void *arg;
	atomic_int done;
};

static void *call_main(void *arg)
{
	struct call *c = arg;

	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(c->make(c->arg) == 0);
	atomic_store(&c->done, 1);
	return NULL;
}

static void begin_call(struct call *c, int (*make)(void *), void *arg)
{
	memset(c, 0, sizeof(*c));
	c->make = make;
	c->arg = arg;
	CHECK(pthread_create(&c->thread, NULL, call_main, c) == 0);
}

static void end_call(struct call *c)
{
	CHECK(pthread_join(c->thread, NULL) == 0);
}

/* Waits for a request for this GPU, then lets it in; the call came no further. */
static void expect_wait(struct call *c, int gpu)
{
	CHECK(fake_expect(&fake, NVS_REQUEST).channel == gpu);
	CHECK(!atomic_load(&c->done) && launches(gpu) == 0);
	allow(gpu, 1);
	fake_grant(&fake, (unsigned)gpu, 3);
	end_call(c);
	CHECK(launches(gpu) == 1 && atomic_load(&stub_state()->violations) == 0);
}

/* ---- streams ---- */

/* Neither the current context nor cuStreamGetCtx tells whose stream it is. */
static void stream_of_a_green_context_is_of_its_gpu(void)
{
	struct call c;
	void *green, *stream;

	begin(2);
	CHECK(cuGreenCtxCreate(&green, NULL, 1, 1) == 0);
	CHECK(cuCtxSetCurrent(contexts[0]) == 0);
	CHECK(cuGreenCtxStreamCreate(&stream, green, 1, 0) == 0);
	begin_call(&c, launch, stream);
	expect_wait(&c, 1);
	CHECK(launches(0) == 0);
	CHECK(cuGreenCtxDestroy(green) == 0);
}

/* ---- launches from before CUDA 4 ---- */

static int launch_once(void *f) { return cuLaunch(f); }
static int launch_grid(void *f) { return cuLaunchGrid(f, 1, 1); }
static int launch_grid_on(void *stream) { return cuLaunchGridAsync(NULL, 1, 1, stream); }

static void old_launch(int (*make)(void *))
{
	struct call c;

	begin(1);
	begin_call(&c, make, NULL);
	expect_wait(&c, 0);
}

static void old_launch_waits(void) { old_launch(launch_once); }
static void old_launch_of_a_grid_waits(void) { old_launch(launch_grid); }

static void old_launch_waits_for_its_stream(void)
{
	struct call c;
	void *stream;

	begin(2);
	CHECK(cuCtxSetCurrent(contexts[1]) == 0 && cuStreamCreate(&stream, 1) == 0);
	begin_call(&c, launch_grid_on, stream);
	expect_wait(&c, 1);
}

/* ---- graphs ---- */

static void *upload_stream;

static int instantiate(void *arg)
{
	struct { uint64_t flags; void *stream, *node; int result; } p = {
		*(uint64_t *)arg, upload_stream, NULL, 0
	};
	void *exec;

	return cuGraphInstantiateWithParams(&exec, &p, &p);
}

static void graph_waits_only_to_be_uploaded(void)
{
	static uint64_t none = 0, upload = FLAG_UPLOAD;
	struct call c;

	begin(1);
	begin_call(&c, instantiate, &none);
	end_call(&c);
	CHECK(launches(0) == 0);
	begin_call(&c, instantiate, &upload);
	expect_wait(&c, 0);
}

static void upload_waits_for_its_stream(void)
{
	static uint64_t upload = FLAG_UPLOAD;
	struct call c;

	begin(2);
	CHECK(cuCtxSetCurrent(contexts[1]) == 0);
	CHECK(cuStreamCreate(&upload_stream, 1) == 0);
	begin_call(&c, instantiate, &upload);
	expect_wait(&c, 1);
}

/* ---- batches, whose parameters changed ---- */

typedef int batch_12080(void *, void *, size_t *, size_t, void *, size_t *, size_t, size_t *, void *);
typedef int batch_13000(void *, void *, size_t *, size_t, void *, size_t *, size_t, void *);

static int old_batch(void *stream)
{
	batch_12080 *f;
	size_t fail = 0;
	int result;

	CHECK(cuGetProcAddress_v2("cuMemcpyBatchAsync", (void **)&f, 12080, 0, NULL) == 0);
	result = f(NULL, NULL, NULL, 0, NULL, NULL, 0, &fail, stream);
	CHECK(fail == (size_t)-1); /* it is the eighth that the driver wrote to */
	return result;
}

static int new_batch(void *stream)
{
	batch_13000 *f;

	CHECK(cuGetProcAddress_v2("cuMemcpyBatchAsync", (void **)&f, 13000, 0, NULL) == 0);
	return f(NULL, NULL, NULL, 0, NULL, NULL, 0, stream);
}

static void batch(int (*make)(void *))
{
	struct call c;
	void *stream;

	begin(2);
	CHECK(cuCtxSetCurrent(contexts[1]) == 0);
	CHECK(cuStreamCreate(&stream, 1) == 0);
	begin_call(&c, make, stream);
	expect_wait(&c, 1);
}

static void batch_of_cuda_12_waits_for_its_stream(void) { batch(old_batch); }
static void batch_of_cuda_13_waits_for_its_stream(void) { batch(new_batch); }

static const struct life_case cases[] = {
#define CASE(name) { #name, name }
	CASE(stream_of_a_green_context_is_of_its_gpu),
	CASE(old_launch_waits),
	CASE(old_launch_of_a_grid_waits),
	CASE(old_launch_waits_for_its_stream),
	CASE(graph_waits_only_to_be_uploaded),
	CASE(upload_waits_for_its_stream),
	CASE(batch_of_cuda_12_waits_for_its_stream),
	CASE(batch_of_cuda_13_waits_for_its_stream),
};

int main(int argc, char **argv)
{
	return life_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
