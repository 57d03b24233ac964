// SPDX-License-Identifier: Apache-2.0
/*
 * pools.c: the driver's stream-ordered pools in the account. A pool keeps what is freed, up
 * to its release threshold, for allocations to come.
 */
#include <errno.h>
#include <string.h>

#include "gate.h"
#include "memory_abi.h"
#include "pools.h"

/* Pools that keep freed memory. Of a program with more of them, the others count by what is in use. */
#define KEEPERS 64
static struct keeper {
	uint64_t pool; /* 0: unused */
	uint64_t threshold;
	struct nvs_gpu *gpu;
} keepers[KEEPERS];

atomic_bool nvs_memory_pools_keep, nvs_memory_pools_shrink;

/* ---- what a pool counts with; the lock is held ---- */

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

	if (!e && nvs_account_insert(NVS_MEMORY_POOL, pool, 0, 0, gpu))
		e = nvs_account_find(NVS_MEMORY_POOL, pool);
	return e;
}

bool nvs_pool_add(uint64_t pool, struct nvs_gpu *gpu, uint64_t bytes, uint64_t *grows)
{
	struct nvs_entry *e = entry_of(pool, gpu);
	uint64_t before;

	if (!e || e->gpu != gpu->number)
		return false;
	before = held(e);
	e->owner += bytes;
	*grows = held(e) - before;
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
}

void nvs_pool_ends(const struct nvs_entry *pool)
{
	uint64_t key = pool->key;

	if (pool->gpu == NVS_NO_GPU)
		return;
	nvs_account_uncount(&nvs_gpus[pool->gpu], held(pool) - pool->owner);
	for (size_t i = 0; i < nvs_account.size && pool->owner; i++)
		if (nvs_account.at[i].pooled && nvs_account.at[i].owner == key)
			nvs_account.at[i].pooled = nvs_account.at[i].owner = 0;
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool == key)
			keepers[i] = (struct keeper){ 0 };
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

/* The record of a pool that keeps memory, or an unused one for pool 0. The lock is held. */
static struct keeper *keeper_of(uint64_t pool)
{
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool == pool)
			return &keepers[i];
	return NULL;
}

void nvs_memory_pool_keeps(uint64_t pool, struct nvs_gpu *gpu, uint64_t threshold)
{
	struct keeper *k;

	if (!gpu || !pool)
		return;
	nvs_account_lock();
	k = keeper_of(pool);
	if (!k && threshold && entry_of(pool, gpu) && (k = keeper_of(0)) != NULL)
		*k = (struct keeper){ .pool = pool, .gpu = gpu };
	if (k) {
		k->threshold = threshold;
		atomic_store(&nvs_memory_pools_keep, true);
	}
	nvs_account_unlock();
	nvs_memory_pool_look(pool);
}

void nvs_memory_pool_look(uint64_t pool)
{
	int saved = errno;
	struct nvs_entry *e;
	struct keeper *k;
	uint64_t bytes = 0, before;
	unsigned gpus = 0;
	bool keeps;

	nvs_account_lock();
	keeps = pool && keeper_of(pool);
	nvs_account_unlock();
	if (!keeps || !nvs_driver.pool_get_attribute ||
	    nvs_driver.pool_get_attribute((void *)(uintptr_t)pool, CU_POOL_RESERVED_CURRENT, &bytes) !=
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
		if (bytes > k->threshold)
			atomic_store(&nvs_memory_pools_shrink, true);
	}
	nvs_account_settle(gpus);
	errno = saved;
}

/* Blocks that are kept may be of use to nobody: then the pool has grown although it kept enough. */
void nvs_memory_pool_grew(struct nvs_gpu *gpu, uint64_t pool)
{
	const struct nvs_budget *b = gpu->budget;
	bool over;

	nvs_memory_pool_look(pool);
	nvs_account_lock();
	over = b->limit && b->used + b->others > b->limit;
	nvs_account_unlock();
	if (over)
		nvs_memory_pools_trim(gpu, false);
}

void nvs_memory_pools_look(void)
{
	int saved = errno;
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
	errno = saved;
}

/* The pools of a GPU that keep more than is in use. Returns how many. */
static unsigned pools_with_more(const struct nvs_gpu *gpu, uint64_t pools[KEEPERS])
{
	const struct nvs_entry *e;
	unsigned n = 0;

	nvs_account_lock();
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool && keepers[i].gpu == gpu) {
			e = nvs_account_find(NVS_MEMORY_POOL, keepers[i].pool);
			if (e && e->bytes > e->owner)
				pools[n++] = keepers[i].pool;
		}
	nvs_account_unlock();
	return n;
}

bool nvs_memory_pools_trim(struct nvs_gpu *gpu, bool wait)
{
	int saved = errno;
	uint64_t pools[KEEPERS];
	unsigned n = pools_with_more(gpu, pools);

	if (!n || !nvs_driver.pool_trim)
		return false;
	if (wait && nvs_driver.ctx_synchronize &&
	    !atomic_load_explicit(&nvs_gate.captures, memory_order_acquire))
		nvs_driver.ctx_synchronize();
	while (n--) {
		nvs_driver.pool_trim((void *)(uintptr_t)pools[n], 0);
		nvs_memory_pool_look(pools[n]);
	}
	errno = saved;
	return true;
}

void nvs_memory_pools_fork_child(void)
{
	memset(keepers, 0, sizeof(keepers));
	atomic_store(&nvs_memory_pools_keep, false);
	atomic_store(&nvs_memory_pools_shrink, false);
}
