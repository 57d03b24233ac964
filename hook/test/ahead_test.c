// SPDX-License-Identifier: Apache-2.0
/*
 * ahead_test.c: work that is far ahead of the GPU, because it waits for the thread that
 * launches it. The shim preloaded, on the simulated GPU, while another client waits for it.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "cases.h"
#include "cudadrv.h"
#include "fake.h"

#define LAUNCHES 300
/* Less than the shortest wait that a thread which is mistaken makes for its work, on a slow machine too. */
#define AT_ONCE_NS 1500000000ull

static struct fake fake;
static CUcontext context;
static CUstream stream, other;
static CUfunction spin;

static void launch_on(CUstream s, uint64_t ns)
{
	uint64_t record = 0;
	void *params[] = { &ns, &record };

	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
}

/* Grants whenever it is asked: between two launches the shim may give an idle GPU back. */
static void *grants(void *unused)
{
	struct nvs_frame f;

	for (uint64_t epoch = 5;;)
		if (fake_receive(&fake, &f, PATIENCE_MS) && f.type == NVS_REQUEST)
			fake_grant(&fake, 0, epoch++);
	return unused;
}

static void begin(void)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n";
	CUmodule module;
	pthread_t t;

	fake_init(&fake);
	fake_listen(&fake);
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&context, 0, 0));
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
	CU(cuModuleLoadData(&module, ptx));
	CU(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	fake_accept(&fake);
	fake_attach(&fake);
	fake.page->slot[0].present = fake.page->slot[0].waiters = 1;
	CHECK(pthread_create(&t, NULL, grants, NULL) == 0);
}

static void end(void)
{
	char path[128];

	snprintf(path, sizeof(path), "%s/%s", fake.dir, NVS_SOCKET_NAME);
	unlink(path);
	rmdir(fake.dir);
	_exit(0); /* the kernel is not waited for */
}

static uint64_t launch_many(void)
{
	uint64_t start = test_now();

	for (int i = 0; i < LAUNCHES; i++)
		launch_on(stream, 1000);
	return test_now() - start;
}

static atomic_int launched;

static void *launch_long(void *unused)
{
	CU(cuCtxSetCurrent(context));
	for (int i = 0; i < LAUNCHES; i++) {
		launch_on(stream, 20000000);
		atomic_fetch_add(&launched, 1);
	}
	return unused;
}

/* The work ahead of the GPU is short again. */
static void is_bounded(void)
{
	pthread_t t;

	CU(cuStreamSynchronize(stream));
	CHECK(pthread_create(&t, NULL, launch_long, NULL) == 0);
	nap_ms(300);
	CHECK(atomic_load(&launched) < LAUNCHES / 2);
}

static volatile uint32_t *word_of_the_host(void)
{
	void *p;

	CU(cuMemHostAlloc(&p, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
	*(volatile uint32_t *)p = 0;
	return p;
}

static void behind_a_wait_for_a_word(void)
{
	volatile uint32_t *flag;

	begin();
	flag = word_of_the_host();
	for (uint32_t i = 1; i < 4; i++) {
		CU(cuStreamWaitValue32_v2(stream, (uintptr_t)flag, i, CU_STREAM_WAIT_VALUE_EQ));
		CHECK(launch_many() < AT_ONCE_NS);
		CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
		*flag = i;
		CU(cuStreamSynchronize(stream));
	}
	is_bounded();
	end();
}

static void behind_a_batch_with_a_wait(void)
{
	CUstreamBatchMemOpParams op = { .operation = CU_STREAM_MEM_OP_WAIT_VALUE_32 };
	volatile uint32_t *flag;

	begin();
	flag = word_of_the_host();
	op.value.address = (uintptr_t)flag;
	op.value.value = 1;
	CU(cuStreamBatchMemOp_v2(stream, 1, &op, 0));
	CHECK(launch_many() < AT_ONCE_NS);
	*flag = 1;
	is_bounded();
	end();
}

/* As of a frame that is drawn, which is submitted after the work that waits for it. */
static void behind_a_semaphore(void)
{
	CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS wait = { .value = 1 };
	CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS signal = { .value = 1 };
	CUexternalSemaphore drawn;

	begin();
	CU(cuImportExternalSemaphore(&drawn, ""));
	CU(cuWaitExternalSemaphoresAsync(&drawn, &wait, 1, stream));
	CHECK(launch_many() < AT_ONCE_NS);
	CU(cuSignalExternalSemaphoresAsync(&drawn, &signal, 1, other));
	is_bounded();
	end();
}

static void take(void *lock)
{
	pthread_mutex_lock(lock);
	pthread_mutex_unlock(lock);
}

/* The function wants a lock that the launching thread has. */
static void behind_a_host_function(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

	begin();
	for (int i = 0; i < 3; i++) {
		pthread_mutex_lock(&lock);
		CU(cuLaunchHostFunc(stream, take, &lock));
		CHECK(launch_many() < AT_ONCE_NS);
		pthread_mutex_unlock(&lock);
	}
	is_bounded();
	end();
}

/* Nobody sees what it waits for: it may be this thread, so that it waits for it once only. */
static void behind_a_kernel_that_does_not_end(void)
{
	begin();
	launch_on(stream, 60000000000);
	CHECK(launch_many() < 3 * AT_ONCE_NS);
	CHECK(launch_many() < AT_ONCE_NS);
	end();
}

/* What passes in time is bounded all the while. */
static void a_host_function_that_ends_changes_nothing(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

	begin();
	CU(cuLaunchHostFunc(stream, take, &lock));
	is_bounded();
	end();
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(behind_a_wait_for_a_word),
	CASE(behind_a_batch_with_a_wait),
	CASE(behind_a_semaphore),
	CASE(behind_a_host_function),
	CASE(behind_a_kernel_that_does_not_end),
	CASE(a_host_function_that_ends_changes_nothing),
#undef CASE
};

int main(int argc, char **argv)
{
	alarm(2 * PATIENCE_MS / 1000);
	return run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
