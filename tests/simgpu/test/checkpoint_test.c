// SPDX-License-Identifier: Apache-2.0
/* A process is locked, checkpointed, restored and unlocked by another one. */
#include "check.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#define PATIENCE_MS 60000
#define MIB         (1ull << 20)
#define LONG_MS     40000

/* A process that does what a letter says, and answers with that letter. */
struct tenant {
	pid_t pid;
	int to, from;
};

static void tenant_main(int in, int out)
{
	struct gpu g = { 0 };
	CUdeviceptr p = 0, q;
	CUmemGenericAllocationHandle h;
	CUmemAllocationProp prop = { .type = 1, .requestedHandleTypes = 1, .location = { 1, 0 } };
	CUmemAccessDesc open = { { 1, 0 }, 3 };
	CUuuid uuid;
	char id[16], c;
	int n;

	while (read(in, &c, 1) == 1) {
		switch (c) {
		case 'o': /* opens GPU 0, and has 8 MiB of sevens */
			g = gpu_open(0);
			CU(cuMemAlloc_v2(&p, 8 * MIB));
			CU(cuMemsetD8_v2(p, 7, 8 * MIB));
			break;
		case 'c': /* any call */
			CU(cuCtxSynchronize());
			break;
		case 'k': /* the memory is what it was */
			for (size_t at = 0; at < 8 * MIB; at += MIB) {
				CU(cuMemcpyDtoH_v2(id, p + at, 1));
				CHECK(id[0] == 7);
			}
			break;
		case '0':
		case '1': /* is on this GPU, and reads the bus id of GPU 0 */
			CU(cuDeviceGetUuid_v2(&uuid, 0));
			CHECK(uuid.bytes[15] == c - '0');
			CU(cuDeviceGetPCIBusId(id, sizeof id, 0));
			CHECK(!strcmp(id, "0000:01:00.0"));
			break;
		case 'm':
			CU(cuMemAllocManaged(&q, MIB, 1));
			break;
		case 'x':
			CU(cuMemCreate(&h, 2 * MIB, &prop, 0));
			CU(cuMemExportToShareableHandle(&n, h, 1, 0));
			break;
		case 'd': /* a descriptor alone keeps memory; who imports it cannot export it again */
			CU(cuMemAddressReserve(&q, 2 * MIB, 0, 0, 0));
			CU(cuMemCreate(&h, 2 * MIB, &prop, 0));
			CU(cuMemMap(q, 2 * MIB, 0, h, 0));
			CU(cuMemSetAccess(q, 2 * MIB, &open, 1));
			CU(cuMemsetD8_v2(q, 9, 2 * MIB));
			CU(cuCtxSynchronize());
			CU(cuMemExportToShareableHandle(&n, h, 1, 0));
			CU(cuMemUnmap(q, 2 * MIB));
			CU(cuMemRelease(h));
			break;
		case 'i':
			CU(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)n, 1));
			CHECK(!close(n));
			EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle(&n, h, 1, 0));
			CU(cuMemMap(q, 2 * MIB, 0, h, 0));
			CU(cuMemSetAccess(q, 2 * MIB, &open, 1));
			CU(cuMemcpyDtoH_v2(id, q + MIB, 1));
			CHECK(id[0] == 9);
			break;
		case 'w': /* has work */
			CU(spin(&g, NULL, LONG_MS * MS, 0));
			break;
		}
		CHECK(write(out, &c, 1) == 1);
	}
	_exit(0);
}

static struct tenant start(void)
{
	int up[2], down[2];
	struct tenant t;

	CHECK(!pipe(up) && !pipe(down));
	t.pid = fork();
	if (t.pid == 0) {
		close(up[0]);
		close(down[1]);
		tenant_main(down[0], up[1]);
	}
	close(up[1]);
	close(down[0]);
	t.to = down[1];
	t.from = up[0];
	return t;
}

static void ask(struct tenant *t, char c)
{
	CHECK(write(t->to, &c, 1) == 1);
}

static void await(struct tenant *t, char want)
{
	struct pollfd p = { .fd = t->from, .events = POLLIN };
	char c;

	CHECK(poll(&p, 1, PATIENCE_MS) == 1);
	CHECK(read(t->from, &c, 1) == 1 && c == want);
}

static void does(struct tenant *t, char c)
{
	ask(t, c);
	await(t, c);
}

static int answered(struct tenant *t)
{
	return poll(&(struct pollfd){ .fd = t->from, .events = POLLIN }, 1, 0);
}

static void stop(struct tenant *t)
{
	kill(t->pid, SIGKILL);
	waitpid(t->pid, NULL, 0);
	close(t->to);
	close(t->from);
}

static CUprocessState state(struct tenant *t)
{
	CUprocessState s = 99;

	CU(cuCheckpointProcessGetState(t->pid, &s));
	return s;
}

static void off(struct tenant *t)
{
	CU(cuCheckpointProcessLock(t->pid, NULL));
	CU(cuCheckpointProcessCheckpoint(t->pid, NULL));
}

static size_t used(CUcontext on)
{
	size_t free, total;

	CU(cuCtxSetCurrent(on));
	CU(cuMemGetInfo_v2(&free, &total));
	return total - free;
}

static void pairs_of(CUcheckpointGpuPair pairs[3], int a, int b, int c)
{
	int to[] = { a, b, c };

	for (int i = 0; i < 3; i++) {
		CU(cuDeviceGetUuid_v2(&pairs[i].oldUuid, i));
		CU(cuDeviceGetUuid_v2(&pairs[i].newUuid, to[i]));
	}
}

/* It leaves nothing on the GPU, its calls wait, and it comes back with its memory. */
static void there_and_back(struct tenant *t, CUcontext here)
{
	int tid = 0;

	does(t, 'o');
	CHECK(used(here) == 8 * MIB && state(t) == CU_PROCESS_STATE_RUNNING);
	EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint(t->pid, NULL));
	EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(t->pid, NULL));
	CU(cuCheckpointProcessLock(t->pid, NULL));
	CHECK(state(t) == CU_PROCESS_STATE_LOCKED && used(here) == 8 * MIB);
	ask(t, 'c');
	EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessLock(t->pid, NULL));
	EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessRestore(t->pid, NULL));
	CU(cuCheckpointProcessCheckpoint(t->pid, NULL));
	CHECK(state(t) == CU_PROCESS_STATE_CHECKPOINTED && used(here) == 0 && !answered(t));
	CU(cuCheckpointProcessGetRestoreThreadId(t->pid, &tid));
	CHECK(tid > 0);
	EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(t->pid, NULL));
	CU(cuCheckpointProcessRestore(t->pid, NULL));
	CHECK(state(t) == CU_PROCESS_STATE_LOCKED && used(here) == 8 * MIB && !answered(t));
	CU(cuCheckpointProcessUnlock(t->pid, NULL));
	await(t, 'c');
	does(t, 'k');
	stop(t);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessLock(t->pid, NULL));
}

/* On another GPU it has the same addresses; its bus id stays. And back. */
static void elsewhere(struct tenant *t, CUcontext here, CUcontext there)
{
	CUcheckpointGpuPair pairs[3];
	CUcheckpointRestoreArgs args = { .gpuPairs = pairs, .gpuPairsCount = 2 };

	does(t, 'o');
	does(t, '0');
	for (int on = 1; on >= 0; on--) {
		off(t);
		pairs_of(pairs, 1, 0, 2);
		args.gpuPairsCount = 2; /* the driver wants all */
		EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessRestore(t->pid, &args));
		args.gpuPairsCount = 3;
		CU(cuCheckpointProcessRestore(t->pid, &args));
		CU(cuCheckpointProcessUnlock(t->pid, NULL));
		CHECK(used(here) == (on ? 0 : 8 * MIB) && used(there) == (on ? 8 * MIB : 0));
		does(t, (char)('0' + on));
		does(t, 'k');
		does(t, 'c');
	}
	stop(t);
}

/* A full GPU: it stays checkpointed, and comes back when there is room. */
static void no_room(struct tenant *t, CUcontext here)
{
	CUdeviceptr p;

	does(t, 'o');
	off(t);
	CU(cuCtxSetCurrent(here));
	CU(cuMemAlloc_v2(&p, 60 * MIB));
	EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuCheckpointProcessRestore(t->pid, NULL));
	CHECK(state(t) == CU_PROCESS_STATE_CHECKPOINTED);
	CU(cuMemFree_v2(p));
	CU(cuCheckpointProcessRestore(t->pid, NULL));
	CU(cuCheckpointProcessUnlock(t->pid, NULL));
	does(t, 'k');
	stop(t);
}

/* A process that has exported memory and released it holds nothing against a checkpoint. */
static void descriptor(struct tenant *t)
{
	does(t, 'o');
	does(t, 'd');
	CU(cuCheckpointProcessLock(t->pid, NULL));
	CU(cuCheckpointProcessCheckpoint(t->pid, NULL));
	CU(cuCheckpointProcessRestore(t->pid, NULL));
	CU(cuCheckpointProcessUnlock(t->pid, NULL));
	does(t, 'i');
	stop(t);
}

static void refused(struct tenant *t, char has)
{
	does(t, 'o');
	does(t, has);
	CU(cuCheckpointProcessLock(t->pid, NULL));
	EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessCheckpoint(t->pid, NULL));
	CHECK(state(t) == CU_PROCESS_STATE_LOCKED);
	CU(cuCheckpointProcessUnlock(t->pid, NULL));
	does(t, 'k');
	stop(t);
}

/* The lock waits for work, as long as it is allowed to. */
static void busy(struct tenant *t)
{
	CUcheckpointLockArgs args = { .timeoutMs = 20 };

	does(t, 'o');
	does(t, 'w');
	EXPECT(CUDA_ERROR_NOT_READY, cuCheckpointProcessLock(t->pid, &args));
	CHECK(state(t) == CU_PROCESS_STATE_RUNNING);
	does(t, '0');
	stop(t);
}

/* Who is killed while checkpointed is gone. */
static void killed(struct tenant *t, CUcontext here)
{
	does(t, 'o');
	off(t);
	stop(t);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessRestore(t->pid, NULL));
	CHECK(used(here) == 0);
}

int main(void)
{
	struct tenant t[8];
	CUprocessState s;
	CUcontext here, there;

	EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCheckpointProcessGetState(getpid(), &s));
	for (int i = 0; i < 8; i++) /* before cuInit: a child of an initialised process has no CUDA */
		t[i] = start();
	CU(cuInit(0));
	CU(cuDevicePrimaryCtxRetain(&here, 0));
	CU(cuDevicePrimaryCtxRetain(&there, 1));
	there_and_back(&t[0], here);
	elsewhere(&t[1], here, there);
	no_room(&t[2], here);
	refused(&t[3], 'm');
	refused(&t[4], 'x');
	busy(&t[5]);
	killed(&t[6], here);
	descriptor(&t[7]);
	return 0;
}
