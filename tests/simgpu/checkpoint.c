// SPDX-License-Identifier: Apache-2.0
/*
 * checkpoint.c: a process is locked, checkpointed, restored and unlocked by another one,
 * that has called cuInit.
 *
 * A call of a process that is not RUNNING waits until it is. A checkpointed process has
 * no context and no memory on any GPU; what the memory holds is the process's own all
 * along. gpuPairs name every GPU of the node, each once, as the driver on an H200 wants
 * them. The bus id that a process reads stays that of the old GPU.
 *
 * Refused with error 801: a process with managed memory, one that shares memory with
 * others, and one of an MPS server. That it is error 801, and that the process is left
 * LOCKED then, is an assumption. So is error 2 if the GPU has no room at a restore: the
 * process stays CHECKPOINTED.
 *
 * The file `checkpoint` in the state directory has calls fail: each line is
 * "lock|checkpoint|restore|unlock ERROR", "... hang" (the call does not return, and the file
 * `hangs` has the caller's pid from then on), "... wait" (the same, but the call goes on when the
 * line is gone) or "... fail" (error 999, and the process is FAILED for good: so its calls end,
 * too). A number behind it is the process whose calls are meant.
 */
#include "driver.h"
#include "shared_state.h"

#include <errno.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* As on an H200 with all memory given up before: 0.37 s off, 0.20 s on, and 2.3 and 5.9 bytes a ns. */
#define CHECKPOINT_NS 370000000ull
#define RESTORE_NS    200000000ull
#define OUT_RATE(n)   ((n) * 10 / 23)
#define IN_RATE(n)    ((n) * 10 / 59)
#define LOOK_NS       1000000ull

static void sleep_for(uint64_t ns)
{
	struct timespec t = { (time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull) };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

static void set_state(struct sim_slot *s, CUprocessState state)
{
	__atomic_store_n(&s->process, state, __ATOMIC_RELEASE);
	syscall(SYS_futex, &s->process, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* As the kernel has it for ptrace(2). */
static int may_trace(uint32_t uid)
{
	struct __user_cap_header_struct who = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct has[2] = { { 0, 0, 0 }, { 0, 0, 0 } };

	if (!geteuid() || uid == (uint32_t)geteuid())
		return 1;
	return !syscall(SYS_capget, &who, has) && (has[0].effective & 1u << CAP_SYS_PTRACE);
}

/* The process's slot, with the lock held; or an error, without the lock. */
static CUresult begin(int pid, struct sim_slot **out)
{
	CUresult rc = drv_enter();
	int i;

	if (rc)
		return rc;
	sim_lock();
	i = pid > 0 ? sim_slot_of((uint32_t)pid) : -1;
	if (i < 0) {
		rc = CUDA_ERROR_INVALID_VALUE;
	} else if (!may_trace(sim_st->slot[i].uid)) {
		rc = CUDA_ERROR_NOT_PERMITTED;
	} else {
		*out = &sim_st->slot[i];
		return CUDA_SUCCESS;
	}
	sim_unlock();
	return rc;
}

/* The test can know that the call does not return. */
static void tell_hangs(void)
{
	char path[4096];
	FILE *f;

	snprintf(path, sizeof path, "%s/hangs", sim_state_dir());
	f = fopen(path, "we");
	if (f) {
		fprintf(f, "%d\n", getpid());
		fclose(f);
	}
}

/* What the test wants of a call for a process; "": nothing. */
static void wanted(const char *call, int pid, char what[32])
{
	char path[4096], line[128], name[32];
	int of, n = 0;
	FILE *f;

	snprintf(path, sizeof path, "%s/checkpoint", sim_state_dir());
	f = fopen(path, "re");
	while (f && fgets(line, sizeof line, f)) {
		n = sscanf(line, "%31s %31s %d", name, what, &of);
		if (n >= 2 && !strcmp(name, call) && (n == 2 || of == pid))
			break;
		n = 0;
	}
	if (f)
		fclose(f);
	if (n < 2)
		what[0] = '\0';
}

/* The same of a process in a state. What the test wants comes first. */
static CUresult begin_in(const char *call, int pid, CUprocessState state, struct sim_slot **out)
{
	char what[32];
	CUresult rc;

	wanted(call, pid, what);
	if (!strcmp(what, "hang") || !strcmp(what, "wait"))
		tell_hangs();
	while (!strcmp(what, "hang"))
		pause();
	while (!strcmp(what, "wait")) {
		sleep_for(LOOK_NS);
		wanted(call, pid, what);
	}
	rc = begin(pid, out);
	if (rc)
		return rc;
	if (!strcmp(what, "fail"))
		set_state(*out, CU_PROCESS_STATE_FAILED);
	if (what[0])
		rc = strcmp(what, "fail") ? (CUresult)atoi(what) : CUDA_ERROR_UNKNOWN;
	if (!rc && (*out)->process != (uint32_t)state)
		rc = CUDA_ERROR_ILLEGAL_STATE;
	if (rc)
		sim_unlock();
	return rc;
}

CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
	struct sim_slot *s;
	CUresult rc = state ? begin(pid, &s) : CUDA_ERROR_INVALID_VALUE;

	if (rc)
		return rc;
	*state = (CUprocessState)s->process;
	sim_unlock();
	return CUDA_SUCCESS;
}

/* Here the caller restores the process. The driver has a thread of the process do it. */
CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	struct sim_slot *s;
	CUresult rc = tid ? begin(pid, &s) : CUDA_ERROR_INVALID_VALUE;

	if (rc)
		return rc;
	*tid = pid;
	sim_unlock();
	return CUDA_SUCCESS;
}

/* Locked: whether the process has work on a GPU. */
static int works(const struct sim_slot *s)
{
	uint64_t now = sim_now();

	for (uint32_t g = 0; g < sim_st->gpus; g++) {
		sim_advance((int)g, now);
		if (sim_has_work(&s->gpu[g]))
			return 1;
		for (int e = SIM_COMPUTE + 1; e < SIM_ENGINES; e++)
			if (s->gpu[g].tail[e] > now)
				return 1;
	}
	return 0;
}

/* New calls wait from the start. Work that was submitted is waited for, as long as the caller allows. */
CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
	uint64_t until = args && args->timeoutMs ? sim_now() + args->timeoutMs * 1000000ull : 0;
	struct sim_slot *s;
	CUresult rc = begin_in("lock", pid, CU_PROCESS_STATE_RUNNING, &s);

	if (rc)
		return rc;
	set_state(s, CU_PROCESS_STATE_LOCKED);
	while (works(s)) {
		struct sim_slot *same;

		if (until && sim_now() >= until) {
			set_state(s, CU_PROCESS_STATE_RUNNING);
			sim_unlock();
			return CUDA_ERROR_NOT_READY;
		}
		sim_unlock();
		sleep_for(LOOK_NS);
		rc = begin(pid, &same); /* it may have died */
		if (rc)
			return rc;
	}
	sim_unlock();
	return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
	uint64_t bytes = 0;
	struct sim_slot *s;
	CUresult rc = begin_in("checkpoint", pid, CU_PROCESS_STATE_LOCKED, &s);

	(void)args;
	if (rc)
		return rc;
	for (uint32_t g = 0; g < sim_st->gpus; g++)
		bytes += s->gpu[g].memory;
	rc = s->managed || s->exchanged || s->group ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
	sim_unlock();
	if (rc)
		return rc;
	sleep_for(CHECKPOINT_NS + OUT_RATE(bytes));
	rc = begin(pid, &s);
	if (rc)
		return rc;
	for (uint32_t g = 0; g < sim_st->gpus; g++) {
		s->kept[g] = (struct sim_kept){ s->gpu[g].memory, s->gpu[g].contexts };
		s->gpu[g].memory = s->gpu[g].contexts = 0;
	}
	set_state(s, CU_PROCESS_STATE_CHECKPOINTED);
	sim_unlock();
	return CUDA_SUCCESS;
}

static int gpu_of(const CUuuid *uuid)
{
	unsigned char raw[16];

	for (int g = 0; g < sim_gpus(); g++) {
		sim_uuid_raw(g, raw);
		if (!memcmp(raw, uuid->bytes, sizeof raw))
			return g;
	}
	return -1;
}

/* Where each GPU of the node goes. */
static CUresult targets(const CUcheckpointRestoreArgs *args, int to[SIM_MAX_GPUS])
{
	uint64_t from = 0, onto = 0;

	for (int g = 0; g < SIM_MAX_GPUS; g++)
		to[g] = g;
	if (!args || !args->gpuPairsCount)
		return CUDA_SUCCESS;
	if (!args->gpuPairs || args->gpuPairsCount != (unsigned)sim_gpus())
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < args->gpuPairsCount; i++) {
		int a = gpu_of(&args->gpuPairs[i].oldUuid), b = gpu_of(&args->gpuPairs[i].newUuid);

		if (a < 0 || b < 0)
			return CUDA_ERROR_INVALID_DEVICE;
		from |= 1ull << a;
		onto |= 1ull << b;
		to[a] = b;
	}
	return from == onto && from == (1ull << sim_gpus()) - 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
	struct sim_slot_gpu *clocks;
	uint64_t bytes = 0;
	int to[SIM_MAX_GPUS];
	struct sim_slot *s;
	CUresult rc = targets(args, to);

	if (!rc)
		rc = begin_in("restore", pid, CU_PROCESS_STATE_CHECKPOINTED, &s);
	if (rc)
		return rc;
	for (uint32_t g = 0; g < sim_st->gpus; g++)
		bytes += s->kept[g].memory;
	sim_unlock();
	sleep_for(RESTORE_NS + IN_RATE(bytes));
	clocks = malloc(sizeof s->gpu);
	rc = clocks ? begin(pid, &s) : CUDA_ERROR_OUT_OF_MEMORY;
	if (rc) {
		free(clocks);
		return rc;
	}
	for (uint32_t g = 0; g < sim_st->gpus && !rc; g++)
		if (s->kept[g].memory && sim_used_locked(to[g]) + s->kept[g].memory > sim_st->memory)
			rc = CUDA_ERROR_OUT_OF_MEMORY;
	if (!rc) {
		memcpy(clocks, s->gpu, sizeof s->gpu);
		for (uint32_t g = 0; g < sim_st->gpus; g++) {
			struct sim_slot_gpu *there = &s->gpu[to[g]];

			sim_advance((int)g, sim_now());
			if (to[g] != (int)g)
				*there = clocks[g];
			there->memory = s->kept[g].memory;
			there->contexts = s->kept[g].contexts;
		}
		for (int g = 0; g < SIM_MAX_GPUS; g++)
			if (s->at[g] < sim_st->gpus)
				__atomic_store_n(&s->at[g], (uint32_t)to[s->at[g]], __ATOMIC_RELEASE);
		memset(s->kept, 0, sizeof s->kept);
		set_state(s, CU_PROCESS_STATE_LOCKED);
	}
	sim_unlock();
	free(clocks);
	return rc;
}

CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
	struct sim_slot *s;
	CUresult rc = begin_in("unlock", pid, CU_PROCESS_STATE_LOCKED, &s);

	(void)args;
	if (rc)
		return rc;
	set_state(s, CU_PROCESS_STATE_RUNNING);
	sim_unlock();
	return CUDA_SUCCESS;
}
