// SPDX-License-Identifier: Apache-2.0
/*
 * pools.c: the driver's stream-ordered pools in the account. A pool keeps what is freed, up
 * to its release threshold, for allocations to come.
 */
#include <errno.h>
#include <string.h>

#include "clock.h"
#include "drain.h"
#include "futex.h"
#include "gate.h"
#include "memory_driver.h"
#include "pools.h"

#define TRIM_WAIT_NS (2 * NVS_S) /* for what streams still use */

/* Pools that keep freed memory. Of a program with more of them, the others count by what is in use. */
#define KEEPERS 64
static struct keeper {
	uint64_t pool; /* 0: unused */
	uint64_t threshold;
	struct nvs_gpu *gpu;
	bool going; /* the program destroys it: the driver is not asked about it any more */
} keepers[KEEPERS];
static atomic_uint asking[KEEPERS]; /* threads that ask the driver about the pool at that place */

atomic_bool nvs_memory_pools_keep, nvs_memory_pools_shrink;

/* ---- what a pool counts with; the lock is held ---- */

/* The record of a pool that keeps memory, or an unused one for pool 0. */
static struct keeper *keeper_of(uint64_t pool)
{
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool == pool)
			return &keepers[i];
	return NULL;
}

/* The bytes that a pool counts with. */
static uint64_t held(const struct nvs_entry *pool)
{
	return pool->bytes > pool->owner ? pool->bytes : pool->owner;
}

/* The pool has changed; it counted with so many bytes before. */
static void recount(const struct nvs_entry *pool, uint64_t before)
{
	struct nvs_gpu *gpu = &nvs_gpus[pool->gpu];
	uint64_t now = held(pool);

	if (now > before)
		nvs_account_count(gpu, now - before);
	else
		nvs_account_uncount(gpu, before - now);
}

/* The entry of a pool. NULL: the system has no memory. */
static struct nvs_entry *entry_of(uint64_t pool, struct nvs_gpu *gpu)
{
	struct nvs_entry *e = nvs_account_find(NVS_MEMORY_POOL, pool);

	return e ? e : nvs_account_insert(NVS_MEMORY_POOL, pool, 0, 0, gpu);
}

bool nvs_pool_grows(uint64_t pool, struct nvs_gpu *gpu, uint64_t bytes, uint64_t *grows)
{
	struct nvs_entry *e = entry_of(pool, gpu);

	if (!e || e->gpu != gpu->number)
		return false;
	*grows = e->owner + bytes > e->bytes ? e->owner + bytes - held(e) : 0;
	return true;
}

/* So much more is in use. A pool that keeps memory will keep that, too. */
static void enter(struct nvs_entry *pool, uint64_t bytes)
{
	pool->owner += bytes;
	if (atomic_load_explicit(&nvs_memory_pools_keep, memory_order_relaxed) && pool->owner > pool->bytes &&
	    keeper_of(pool->key))
		pool->bytes = pool->owner;
}

void nvs_pool_enter(uint64_t pool, uint64_t bytes)
{
	enter(nvs_account_find(NVS_MEMORY_POOL, pool), bytes);
}

bool nvs_pool_takes_in(uint64_t pool, struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_entry *e = entry_of(pool, gpu);
	uint64_t before;

	if (!e || e->gpu != gpu->number)
		return false;
	before = held(e);
	enter(e, bytes);
	if (held(e) - before != bytes)
		nvs_account_uncount(gpu, bytes - (held(e) - before));
	return true;
}

void nvs_pool_uncount(struct nvs_gpu *gpu, uint64_t pool, uint64_t bytes)
{
	struct nvs_entry *e = nvs_account_find(NVS_MEMORY_POOL, pool);
	uint64_t before;

	if (!e || e->owner < bytes) {
		nvs_account_uncount(gpu, bytes);
		return;
	}
	before = held(e);
	e->owner -= bytes;
	recount(e, before);
	if (e->bytes) {
		const struct keeper *k = keeper_of(pool);

		if (k && e->bytes > k->threshold)
			atomic_store(&nvs_memory_pools_shrink, true);
	}
}

void nvs_pool_ends(const struct nvs_entry *pool)
{
	struct keeper *k = keeper_of(pool->key);

	if (pool->gpu == NVS_NO_GPU)
		return;
	nvs_account_uncount(&nvs_gpus[pool->gpu], held(pool) - pool->owner);
	for (size_t i = 0; i < nvs_account.size && pool->owner; i++)
		if (nvs_account.at[i].pooled && nvs_account.at[i].owner == pool->key)
			nvs_account.at[i].pooled = nvs_account.at[i].owner = 0;
	if (k)
		*k = (struct keeper){ 0 };
}

/* ---- where pools lie ---- */

void nvs_memory_pool(uint64_t pool, struct nvs_gpu *gpu)
{
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_POOL, pool);
	if (!e || e->gpu != (gpu ? gpu->number : NVS_NO_GPU)) {
		if (e) { /* the driver has given out the handle again: its end went past the shim */
			nvs_pool_ends(e);
			nvs_entry_remove(&nvs_account, e);
		}
		if (pool)
			nvs_account_insert(NVS_MEMORY_POOL, pool, 0, 0, gpu);
	}
	nvs_account_unlock();
}

void nvs_memory_pool_share(uint64_t pool)
{
	nvs_account_lock();
	if (pool && !nvs_account_find(NVS_MEMORY_SHARED, pool))
		nvs_account_insert(NVS_MEMORY_SHARED, pool, 0, 0, NULL);
	nvs_account_unlock();
}

bool nvs_memory_pool_shared(uint64_t pool)
{
	bool yes;

	nvs_account_lock();
	yes = nvs_account_find(NVS_MEMORY_SHARED, pool) != NULL;
	nvs_account_unlock();
	return yes;
}

bool nvs_memory_pool_find(uint64_t pool, struct nvs_gpu **gpu)
{
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_POOL, pool);
	if (e)
		*gpu = e->gpu == NVS_NO_GPU ? NULL : &nvs_gpus[e->gpu];
	nvs_account_unlock();
	return e != NULL;
}

/* ---- what pools keep ---- */

/* The driver may be asked about a pool until release(). -1: it may not. */
static int hold(uint64_t pool)
{
	const struct keeper *k;
	int place;

	nvs_account_lock();
	k = pool ? keeper_of(pool) : NULL;
	place = k && !k->going ? (int)(k - keepers) : -1;
	if (place >= 0)
		atomic_fetch_add(&asking[place], 1);
	nvs_account_unlock();
	return place;
}

static void release(int place)
{
	atomic_fetch_sub(&asking[place], 1);
}

void nvs_memory_pool_going(uint64_t pool, bool going)
{
	struct keeper *k;
	int saved = errno;

	nvs_account_lock();
	k = pool ? keeper_of(pool) : NULL;
	if (k)
		k->going = going;
	nvs_account_unlock();
	/* A second at most: who asks may be below a signal handler that destroys the pool. */
	for (int i = 0; k && going && i < 1000 && atomic_load(&asking[k - keepers]); i++)
		nvs_nap(NVS_MS);
	errno = saved;
}

void nvs_memory_pool_keeps(uint64_t pool, struct nvs_gpu *gpu, uint64_t threshold)
{
	struct nvs_entry *e;
	struct keeper *k;
	uint64_t before;
	unsigned gpus = 0;

	if (!gpu || !pool)
		return;
	if (!threshold) /* the record goes, by which who destroys the pool waits for who asks */
		nvs_memory_pool_going(pool, true);
	nvs_account_lock();
	k = keeper_of(pool);
	e = entry_of(pool, gpu);
	if (!k && threshold && e && e->gpu == gpu->number && (k = keeper_of(0)) != NULL)
		*k = (struct keeper){ .pool = pool, .gpu = gpu };
	if (k && threshold) {
		k->threshold = threshold;
		atomic_store(&nvs_memory_pools_keep, true);
	} else if (k && e) { /* what it has kept goes when the host waits next */
		before = held(e);
		e->bytes = 0;
		recount(e, before);
		*k = (struct keeper){ 0 };
		gpus = gpu->bit;
	} else if (k) {
		k->going = false;
	}
	nvs_account_settle(gpus);
	nvs_memory_pool_look(pool);
}

/* What the driver says that the pool has. Its place is held. */
static void look(uint64_t pool)
{
	struct nvs_entry *e;
	struct keeper *k;
	uint64_t bytes = 0, before;
	unsigned gpus = 0;

	if (nvs_memory_driver.pool_get_attribute((void *)(uintptr_t)pool, CU_POOL_RESERVED_CURRENT, &bytes) !=
		    CUDA_SUCCESS || bytes > NVS_MAX_BYTES)
		return;
	nvs_account_lock();
	k = keeper_of(pool);
	e = nvs_account_find(NVS_MEMORY_POOL, pool);
	if (k && e && e->gpu == k->gpu->number) {
		before = held(e);
		e->bytes = bytes;
		recount(e, before);
		nvs_account_exists(k->gpu);
		gpus = k->gpu->bit;
		if (bytes > k->threshold && bytes > e->owner)
			atomic_store(&nvs_memory_pools_shrink, true);
	}
	nvs_account_settle(gpus);
}

void nvs_memory_pool_look(uint64_t pool)
{
	int saved = errno, place;

	/* A call that the driver does not allow in a capture would end it: later, when the host waits. */
	if (atomic_load_explicit(&nvs_gate.captures, memory_order_acquire)) {
		atomic_store(&nvs_memory_pools_shrink, true);
		return;
	}
	place = hold(pool);
	if (place < 0)
		return;
	look(pool);
	release(place);
	errno = saved;
}

/*
 * Blocks that are kept may be of use to nobody: then the pool has grown although it kept
 * enough. That is of no interest before the limit is near.
 */
void nvs_memory_pool_grew(struct nvs_gpu *gpu, uint64_t pool, bool now)
{
	if (!now) {
		if (!atomic_load_explicit(&nvs_memory_pools_shrink, memory_order_relaxed))
			atomic_store(&nvs_memory_pools_shrink, true);
		return;
	}
	nvs_memory_pool_look(pool);
	nvs_memory_pools_trim(gpu, 0, false);
}

void nvs_memory_pools_look(void)
{
	uint64_t pools[KEEPERS];
	unsigned n = 0;

	if (!nvs_counting())
		return;
	nvs_account_lock();
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool)
			pools[n++] = keepers[i].pool;
	atomic_store(&nvs_memory_pools_shrink, false);
	nvs_account_unlock();
	while (n--)
		nvs_memory_pool_look(pools[n]);
}

/*
 * The pools of a GPU that keep more than is in use. None, if so many bytes more do not exceed
 * the limit, or exceed it by more than is kept. Returns how many.
 */
static unsigned pools_with_more(const struct nvs_gpu *gpu, uint64_t bytes, uint64_t pools[KEEPERS])
{
	const struct nvs_budget *b = gpu->budget;
	const struct nvs_entry *e;
	uint64_t spare = 0, used;
	unsigned n = 0;

	nvs_account_lock();
	used = b->used + b->others + bytes;
	for (unsigned i = 0; i < KEEPERS && b->limit && used > b->limit; i++)
		if (keepers[i].pool && keepers[i].gpu == gpu) {
			e = nvs_account_find(NVS_MEMORY_POOL, keepers[i].pool);
			if (e && e->bytes > e->owner) {
				spare += e->bytes - e->owner;
				pools[n++] = keepers[i].pool;
			}
		}
	if (n && used - b->limit > spare)
		n = 0;
	nvs_account_unlock();
	return n;
}

bool nvs_memory_pools_trim(struct nvs_gpu *gpu, uint64_t bytes, bool wait)
{
	uint64_t pools[KEEPERS], before, after, end = nvs_now() + TRIM_WAIT_NS;
	unsigned n = pools_with_more(gpu, bytes, pools);
	int saved = errno;

	if (!n)
		return false;
	while (!atomic_load_explicit(&nvs_gate.captures, memory_order_acquire) && wait &&
	       !nvs_streams_settle(gpu) && nvs_now() < end && !atomic_load(&nvs_exiting))
		nvs_nap(NVS_MS);
	if (atomic_load_explicit(&nvs_gate.captures, memory_order_acquire))
		return false;
	before = gpu->budget->used;
	while (n--) {
		int place = hold(pools[n]);

		if (place < 0)
			continue;
		nvs_memory_driver.pool_trim((void *)(uintptr_t)pools[n], 0);
		look(pools[n]);
		release(place);
	}
	after = gpu->budget->used;
	errno = saved;
	return after < before;
}

void nvs_memory_pools_fork_child(void)
{
	memset(keepers, 0, sizeof(keepers));
	memset(asking, 0, sizeof(asking));
	atomic_store(&nvs_memory_pools_keep, false);
	atomic_store(&nvs_memory_pools_shrink, false);
}
