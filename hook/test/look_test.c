// SPDX-License-Identifier: Apache-2.0
/*
 * look_test.c: only content moves. Run with the shim preloaded; one case per process, ""
 * lists them. The process is tenant and scheduler, so that it knows what is copied.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "look_abi.h"
#include "tenant.h"

#define GPU    (96 * MIB)
#define PIECES 24u /* of a buffer of 48 MiB */

static CUdeviceptr buffer;
static char *model; /* what is to be in it */

/* Memory that has just been made is not zero: nobody promises that. */
static void open_unseen(uint64_t arena, uint64_t most)
{
	struct swapper_config c = { .gpu = GPU, .arena = arena, .arena_most = most, .quantum_ms = 30 };

	CHECK(setenv("NVSHARE_SIMGPU_GARBAGE", "1", 1) == 0);
	schedule(c);
	CU(cuInit(0));
	CU(cuCtxCreate_v2(&ctx, 0, 0));
	model = calloc(PIECES, LOOK_PIECE);
	CHECK(model);
	CU(cuMemAlloc_v2(&buffer, PIECES * LOOK_PIECE));
	CU(cuMemsetD8_v2(buffer, 0, PIECES * LOOK_PIECE));
	CU(cuCtxSynchronize());
}

static void leave(void)
{
	swapper_room(1);
	swapper_withhold(true);
	EVENTUALLY(!swapper_seen().holder && swapper_seen().resident == swapper_seen().fixed);
}

static void come_back(void)
{
	swapper_room(0);
	swapper_withhold(false);
}

/* Pieces that are not as they should be. */
static unsigned differ(void)
{
	static char now[PIECES * LOOK_PIECE];
	unsigned n = 0;

	CU(cuMemcpyDtoH_v2(now, buffer, sizeof(now)));
	for (size_t i = 0; i < sizeof(now); i += LOOK_PIECE)
		n += memcmp(now + i, model + i, LOOK_PIECE) != 0;
	return n;
}

/* Out and in: so many pieces are copied each way, and no word is wrong. */
static void goes_and_comes(unsigned out, unsigned in)
{
	struct swapper_seen before, after;

	CU(cuCtxSynchronize());
	before = swapper_seen();
	leave();
	come_back();
	CHECK(differ() == 0);
	leave(); /* what came in is told with that */
	after = swapper_seen();
	come_back();
	CHECK(differ() == 0);
	if (after.out - before.out != (uint64_t)out * LOOK_PIECE || after.in - before.in != (uint64_t)in * LOOK_PIECE)
		fprintf(stderr, "copied %llu pieces out and %llu in, not %u and %u\n",
			(unsigned long long)(after.out - before.out) / LOOK_PIECE,
			(unsigned long long)(after.in - before.in) / LOOK_PIECE, out, in);
	CHECK(after.out - before.out == (uint64_t)out * LOOK_PIECE);
	CHECK(after.in - before.in == (uint64_t)in * LOOK_PIECE);
}

/* What leaves is looked at: the kernel is loaded, while memory may leave as it is. */
static void await_kernel(void)
{
	struct swapper_seen before, after;

	do {
		before = swapper_seen();
		leave();
		after = swapper_seen();
		come_back();
		CHECK(differ() == 0); /* it is used, so that it leaves again */
	} while (after.out != before.out);
}

static void open_with(uint64_t arena, uint64_t most)
{
	open_unseen(arena, most);
	await_kernel();
}

/* Writes to model and buffer. */
static void put_bytes(size_t at, const void *bytes, size_t n)
{
	memcpy(model + at, bytes, n);
	CU(cuMemcpyHtoD_v2(buffer + at, model + at, n));
}

static void put_random(unsigned piece)
{
	uint64_t *word = (uint64_t *)(void *)(model + (size_t)piece * LOOK_PIECE);

	for (size_t i = 0; i < LOOK_PIECE / 8; i++)
		word[i] = rnd(UINT64_MAX) * 0x9e3779b97f4a7c15ull;
	CU(cuMemcpyHtoD_v2(buffer + (size_t)piece * LOOK_PIECE, word, LOOK_PIECE));
}

/* Exchanges n bytes at two places. */
static void exchange(size_t a, size_t b, size_t n)
{
	char *was = malloc(n);

	CHECK(was);
	memcpy(was, model + a, n);
	put_bytes(a, model + b, n);
	put_bytes(b, was, n);
	free(was);
}

static void only_what_was_written_is_copied(void)
{
	const size_t piece = LOOK_PIECE;
	char one;

	open_with(16 * MIB, 0);
	goes_and_comes(0, 0);
	for (unsigned i = 0; i < 8; i++)
		put_random(3 * i);
	goes_and_comes(8, 8);
	goes_and_comes(0, 8);
	one = model[3 * piece + 12345] ^ 4; /* one bit */
	put_bytes(3 * piece + 12345, &one, 1);
	goes_and_comes(1, 8);
	one = 1; /* the last byte of a piece that was zero */
	put_bytes(2 * piece - 1, &one, 1);
	goes_and_comes(1, 9);
	one = 0;
	put_bytes(2 * piece - 1, &one, 1);
	goes_and_comes(0, 8);
	exchange(6 * piece, 6 * piece + 4, 4); /* words side by side */
	goes_and_comes(1, 8);
	exchange(6 * piece + 32, 6 * piece + 4096 + 32, 16); /* of one thread of the kernel */
	goes_and_comes(1, 8);
	exchange(6 * piece + 16, 6 * piece + 64, 16); /* of two threads */
	goes_and_comes(1, 8);
	exchange(6 * piece, 6 * piece + piece / 8, piece / 8); /* of two blocks */
	goes_and_comes(1, 8);
	put_bytes(9 * piece, model + 9 * piece + piece / 2, piece / 2); /* equal halves */
	goes_and_comes(1, 8);
	exchange(9 * piece, 9 * piece + piece / 2, piece / 2);
	goes_and_comes(0, 8);
	exchange(12 * piece, 15 * piece, piece); /* whole pieces */
	goes_and_comes(2, 8);
	put_bytes(0, model + 3 * piece, piece); /* what another piece has, too */
	goes_and_comes(1, 8);
	CU(cuMemsetD8_v2(buffer, 0, PIECES * piece));
	memset(model, 0, PIECES * piece);
	goes_and_comes(0, 0);
	swapper_end();
}

/* Any change, in any order of leaving and coming back. */
static void no_word_is_wrong(void)
{
	open_with(4 * MIB, 0);
	random_state = 4711;
	for (unsigned round = 0; round < 12; round++) {
		for (unsigned k = (unsigned)rnd(4); k; k--) {
			size_t a = rnd(PIECES), b = rnd(PIECES), at = rnd(LOOK_PIECE / 4) * 4, n = LOOK_PIECE - at;
			uint32_t word = (uint32_t)rnd(2);

			switch (rnd(6)) {
			case 0:
				put_random((unsigned)a);
				break;
			case 1:
				put_bytes(a * LOOK_PIECE + at, &word, 4);
				break;
			case 2:
				memset(model + a * LOOK_PIECE, 0, LOOK_PIECE);
				CU(cuMemsetD8_v2(buffer + a * LOOK_PIECE, 0, LOOK_PIECE));
				break;
			case 3:
				exchange(a * LOOK_PIECE, b * LOOK_PIECE, LOOK_PIECE);
				break;
			case 4:
				put_bytes(a * LOOK_PIECE + at, model + b * LOOK_PIECE + at, n);
				break;
			default: { /* memory that is freed and had again */
				CUdeviceptr p;

				CU(cuMemAlloc_v2(&p, 2 * MIB + rnd(6 * MIB)));
				CU(cuMemsetD8_v2(p, 7, MIB));
				CU(cuMemFree_v2(p));
			}
			}
		}
		if (rnd(2)) {
			CU(cuCtxSynchronize());
			leave();
			come_back();
			CHECK(differ() == 0);
		}
	}
	CHECK(differ() == 0);
	swapper_end();
}

/* Copies of memory that is on the GPU give way to what leaves. */
static void copies_give_way(void)
{
	struct swapper_seen before;
	CUdeviceptr other;
	CUipcMemHandle h;

	open_with(16 * MIB, 16 * MIB); /* room for 8 pieces */
	for (unsigned i = 0; i < 8; i++)
		put_random(i);
	goes_and_comes(8, 8);
	CU(cuIpcGetMemHandle(&h, buffer)); /* it never leaves again, and its copy is useless */
	CU(cuMemAlloc_v2(&other, 16 * MIB));
	CU(cuMemsetD8_v2(other, 1, 16 * MIB));
	CU(cuCtxSynchronize());
	before = swapper_seen();
	leave();
	CHECK(swapper_seen().out - before.out == 16 * MIB);
	come_back();
	CHECK(differ() == 0);
	CU(cuMemFree_v2(other));
	swapper_end();
}

/* What finds no place stays, and keeps nothing from leaving that needs none. */
static void a_full_arena_keeps_no_zeros(void)
{
	struct swapper_seen s;

	open_with(4 * MIB, 4 * MIB);
	for (unsigned i = 0; i < 4; i++)
		put_random(i);
	CU(cuCtxSynchronize());
	swapper_room(1);
	swapper_withhold(true);
	EVENTUALLY((s = swapper_seen()).stuck_arena && s.away >= 16 * MIB); /* the chunks that are all zero */
	come_back();
	CHECK(differ() == 0);
	swapper_end();
}

/* The same where the pass has looked for more to move, up to the end, before it finds no place. */
static void zeros_leave_from_behind_what_stays(void)
{
	struct swapper_seen s;
	CUdeviceptr pinned;
	CUipcMemHandle h;

	open_with(4 * MIB, 4 * MIB);
	CU(cuMemAlloc_v2(&pinned, 4 * MIB));
	CU(cuIpcGetMemHandle(&h, pinned)); /* so that something always is left to move */
	for (unsigned i = 0; i < 4; i++)
		put_random(i);
	CU(cuCtxSynchronize());
	swapper_room(1);
	swapper_withhold(true);
	EVENTUALLY((s = swapper_seen()).stuck_arena && s.away >= 16 * MIB);
	come_back();
	CHECK(differ() == 0);
	swapper_end();
}

static void all_is_copied_if_asked(void)
{
	CHECK(setenv("NVSHARE_MOVE_ALL", "1", 1) == 0);
	open_unseen(16 * MIB, 0);
	goes_and_comes(2 * PIECES, PIECES); /* it leaves twice */
	swapper_end();
}

/* ---- a stream that waits may keep the kernel waiting: all is copied ---- */

static CUdeviceptr word(void)
{
	void *p;

	CU(cuMemHostAlloc(&p, 8, CU_MEMHOSTALLOC_DEVICEMAP));
	memset(p, 0, 8);
	return (uintptr_t)p;
}

static void all_is_copied(void)
{
	put_random(5);
	goes_and_comes(2 * PIECES, PIECES);
	swapper_end();
}

static void all_is_copied_after_a_wait(void)
{
	open_with(16 * MIB, 0);
	goes_and_comes(0, 0);
	CU(cuStreamWaitValue32(CU_STREAM_PER_THREAD, word(), 0, CU_STREAM_WAIT_VALUE_EQ));
	all_is_copied();
}

static void all_is_copied_after_a_batch_with_a_wait(void)
{
	CUstreamBatchMemOpParams op[2] = { 0 };

	open_with(16 * MIB, 0);
	op[0].value.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
	op[0].value.address = word();
	op[0].value.value = 1;
	CU(cuStreamBatchMemOp_v2(CU_STREAM_PER_THREAD, 1, op, 0));
	goes_and_comes(0, 0);
	op[1] = op[0];
	op[1].value.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
	CU(cuStreamBatchMemOp_v2(CU_STREAM_PER_THREAD, 2, op, 0));
	all_is_copied();
}

static void all_is_copied_after_a_semaphore(void)
{
	CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS wait = { .value = 0 };
	CUexternalSemaphore s;

	open_with(16 * MIB, 0);
	CU(cuImportExternalSemaphore(&s, ""));
	goes_and_comes(0, 0);
	CU(cuWaitExternalSemaphoresAsync(&s, &wait, 1, CU_STREAM_PER_THREAD));
	all_is_copied();
}

static atomic_uint loads;

static CUresult refuse_modules(const char *call)
{
	if (strcmp(call, "module_new") != 0)
		return CUDA_SUCCESS;
	atomic_fetch_add(&loads, 1);
	return CUDA_ERROR_UNKNOWN;
}

/* The driver cannot make the kernel: all is copied, and nobody asks again in this context. */
static void a_driver_may_refuse_the_kernel(void)
{
	open_unseen(16 * MIB, 0);
	put_random(5);
	simgpu_intercept(refuse_modules);
	goes_and_comes(2 * PIECES, PIECES);
	simgpu_intercept(NULL);
	CHECK(atomic_load(&loads) == 1);
	swapper_end();
}

static atomic_uint wishes; /* for memory */

/* There is host memory, and none of the GPU. */
static CUresult refuse_memory(const char *call)
{
	return strcmp(call, "mem_alloc") == 0 && atomic_fetch_add(&wishes, 1) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* Memory is short, and what the driver has stored for the kernel's is rubbish: the kernel is loaded later. */
static void the_kernel_may_find_no_memory(void)
{
	struct swapper_seen before, after;

	open_unseen(16 * MIB, 0);
	put_random(5);
	simgpu_intercept(refuse_memory);
	goes_and_comes(2 * PIECES, PIECES);
	simgpu_intercept(NULL);
	do {
		put_random(5);
		CU(cuCtxSynchronize());
		before = swapper_seen();
		leave();
		after = swapper_seen();
		come_back();
		CHECK(differ() == 0);
	} while (after.out - before.out != LOOK_PIECE);
	swapper_end();
}

static CUresult lose_launches(const char *call)
{
	return strcmp(call, "launch_op") == 0 ? SIMGPU_LOST : CUDA_SUCCESS;
}

/* What no kernel has read is not taken for zero, nor for what was there before. */
static void a_kernel_may_not_run(void)
{
	open_with(16 * MIB, 0);
	put_random(5);
	simgpu_intercept(lose_launches);
	goes_and_comes(2 * PIECES, PIECES);
	simgpu_intercept(NULL);
	goes_and_comes(1, 1);
	put_random(6);
	simgpu_intercept(lose_launches);
	goes_and_comes(2 * PIECES, PIECES);
	simgpu_intercept(NULL);
	swapper_end();
}

static atomic_uint refusals;

static CUresult refuse_access(const char *call)
{
	unsigned left = atomic_load(&refusals);

	if (strcmp(call, "cuMemSetAccess") != 0 || !left)
		return CUDA_SUCCESS;
	atomic_store(&refusals, left - 1);
	return CUDA_ERROR_UNKNOWN;
}

/* The kernel reads no memory without access: that would end the context. It leaves later. */
static void access_may_be_refused(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc all = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE }, none = { prop.location, 0 };
	CUmemGenericAllocationHandle h;
	CUdeviceptr p;
	uint64_t word = 4711;

	open_with(16 * MIB, 0);
	put_random(5);
	CU(cuMemAddressReserve(&p, 4 * MIB, 0, 0, 0));
	CU(cuMemCreate(&h, 4 * MIB, &prop, 0));
	CU(cuMemMap(p, 4 * MIB, 0, h, 0));
	CU(cuMemSetAccess(p, 4 * MIB, &all, 1));
	CU(cuMemcpyHtoD_v2(p + 2 * MIB, &word, 8));
	CU(cuMemSetAccess(p, 4 * MIB, &none, 1));
	CU(cuCtxSynchronize());
	atomic_store(&refusals, 3);
	simgpu_intercept(refuse_access);
	leave();
	simgpu_intercept(NULL);
	CHECK(atomic_load(&refusals) == 0 && swapper_seen().stuck_error);
	come_back();
	CHECK(differ() == 0);
	CU(cuMemSetAccess(p, 4 * MIB, &all, 1));
	word = 0;
	CU(cuMemcpyDtoH_v2(&word, p + 2 * MIB, 8));
	CHECK(word == 4711);
	swapper_end();
}

static atomic_uint made; /* modules, or about to be */

static CUresult count_modules(const char *call)
{
	atomic_fetch_add(&made, strcmp(call, "module_new") == 0);
	return CUDA_SUCCESS;
}

static void the_kernel_is_loaded_once_and_when_it_is_needed(void)
{
	open_unseen(16 * MIB, 0);
	simgpu_intercept(count_modules);
	CU(cuCtxSynchronize());
	CHECK(atomic_load(&made) == 0);
	await_kernel();
	put_random(1);
	goes_and_comes(1, 1);
	goes_and_comes(0, 1);
	CHECK(atomic_load(&made) == 1);
	simgpu_intercept(NULL);
	swapper_end();
}

/* The thread has the lock of whoever loads a library, and frees memory that moves. */
void opening(void);
void opening(void)
{
	EVENTUALLY(atomic_load(&made));
	CU(cuMemFree_v2(buffer));
}

static void *open_library(void *path)
{
	CU(cuCtxSetCurrent(ctx));
	CHECK(dlopen(path, RTLD_NOW));
	return NULL;
}

/* To load the kernel opens a library: no thread that the program's own wait for does that. */
static void a_library_may_be_loaded_meanwhile(void)
{
	char path[4096], *slash;
	pthread_t thread;
	ssize_t n;

	open_unseen(16 * MIB, 0);
	n = readlink("/proc/self/exe", path, sizeof(path) - 1);
	CHECK(n > 0);
	path[n] = 0;
	CHECK((slash = strrchr(path, '/')) && slash + sizeof("/libopening.so") < path + sizeof(path));
	strcpy(slash, "/libopening.so");
	put_random(5);
	CU(cuCtxSynchronize());
	simgpu_intercept(count_modules);
	CHECK(pthread_create(&thread, NULL, open_library, path) == 0);
	leave();
	come_back();
	CHECK(pthread_join(thread, NULL) == 0);
	simgpu_intercept(NULL);
	swapper_end();
}

static atomic_bool stuck;

static CUresult load_for_ever(const char *call)
{
	if (strcmp(call, "module_new") == 0)
		while (atomic_load(&stuck))
			nap_ms(1);
	return CUDA_SUCCESS;
}

/* What comes too late is not used: the context may have gone. Nobody waits for ever for it, a fork neither. */
static void a_load_may_not_end(void)
{
	pid_t child;

	open_unseen(16 * MIB, 0);
	put_random(5);
	atomic_store(&stuck, true);
	simgpu_intercept(load_for_ever);
	goes_and_comes(2 * PIECES, PIECES);
	child = fork();
	if (child == 0)
		_exit(0);
	CHECK(went_well(child));
	CU(cuStreamWaitValue32(CU_STREAM_PER_THREAD, word(), 0, CU_STREAM_WAIT_VALUE_EQ));
	atomic_store(&stuck, false);
	goes_and_comes(2 * PIECES, PIECES);
	CU(cuCtxDestroy_v2(ctx));
	swapper_end();
}

static void a_context_may_end_meanwhile(void)
{
	CUcontext other;

	open_unseen(16 * MIB, 0);
	CU(cuCtxCreate_v2(&other, 0, 0));
	CU(cuCtxSetCurrent(ctx));
	atomic_store(&stuck, true);
	simgpu_intercept(load_for_ever);
	goes_and_comes(2 * PIECES, PIECES);
	CU(cuCtxDestroy_v2(ctx)); /* it waits, and goes on */
	atomic_store(&stuck, false);
	CU(cuCtxSetCurrent(other));
	ctx = other;
	memset(model, 0, PIECES * LOOK_PIECE);
	CU(cuMemAlloc_v2(&buffer, PIECES * LOOK_PIECE));
	CU(cuMemsetD8_v2(buffer, 0, PIECES * LOOK_PIECE));
	CU(cuCtxSynchronize());
	await_kernel(); /* of the context that is left */
	swapper_end();
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(only_what_was_written_is_copied),
	CASE(no_word_is_wrong),
	CASE(copies_give_way),
	CASE(a_full_arena_keeps_no_zeros),
	CASE(zeros_leave_from_behind_what_stays),
	CASE(all_is_copied_if_asked),
	CASE(all_is_copied_after_a_wait),
	CASE(all_is_copied_after_a_batch_with_a_wait),
	CASE(all_is_copied_after_a_semaphore),
	CASE(a_driver_may_refuse_the_kernel),
	CASE(the_kernel_may_find_no_memory),
	CASE(a_kernel_may_not_run),
	CASE(access_may_be_refused),
	CASE(the_kernel_is_loaded_once_and_when_it_is_needed),
	CASE(a_library_may_be_loaded_meanwhile),
	CASE(a_load_may_not_end),
	CASE(a_context_may_end_meanwhile),
};

int main(int argc, char **argv)
{
	return run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
