// SPDX-License-Identifier: Apache-2.0
/* pools.c: the driver's stream-ordered pools in the account. */
#include <errno.h>
#include <string.h>

#include "clock.h"
#include "drain.h"
#include "drainer.h"
#include "futex.h"
#include "gate.h"
#include "memory_driver.h"
#include "pools.h"

#define TRIM_WAIT_NS (2 * NVS_S) /* for what streams still use */
#define ASK_NS       (1 * NVS_S) /* between looks at pools whose allocations are not entered */

/* Pools that keep freed memory, or whose allocations are not entered. Further ones count by what is in use. */
#define KEEPERS 64
static struct keeper {
	uint64_t pool; /* 0: unused */
	uint64_t threshold;
	struct nvs_gpu *gpu;
	bool going; /* the program destroys it: the driver is not asked about it any more */
	bool unlisted;  /* it has, or has had, allocations that are not entered */
	uint64_t bytes; /* of them, part of the bytes in use */
} keepers[KEEPERS];
static atomic_uint asking[KEEPERS]; /* threads that ask the driver about the pool at that place */

atomic_bool nvs_memory_pools_keep, nvs_memory_pools_shrink;
atomic_uint nvs_memory_pools_change;
static uint64_t asked_ns; /* under nvs_client_lock */

/* ---- what a pool counts with; the lock is held ---- */

/* The record of a pool, or an unused one for pool 0. */
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
static struct nvs_entry *pool_entry(uint64_t pool, struct nvs_gpu *gpu)
{
	struct nvs_entry *e = nvs_account_find(NVS_MEMORY_POOL, pool);

	return e ? e : nvs_account_insert(NVS_MEMORY_POOL, pool, 0, 0, gpu);
}

/* The record of a pool, made if need be. NULL: there is no room, or the pool is not of this GPU. */
static struct keeper *keeper_made(uint64_t pool, struct nvs_gpu *gpu)
{
	const struct nvs_entry *e = pool_entry(pool, gpu);
	struct keeper *k = keeper_of(pool);

	if (!e || e->gpu != gpu->number || (!k && !(k = keeper_of(0))))
		return NULL;
	if (!k->pool)
		*k = (struct keeper){ .pool = pool, .gpu = gpu };
	atomic_store(&nvs_memory_pools_keep, true);
	return k;
}

bool nvs_pool_grows(uint64_t pool, struct nvs_gpu *gpu, uint64_t bytes, uint64_t *grows)
{
	struct nvs_entry *e = pool_entry(pool, gpu);

	if (!e || e->gpu != gpu->number)
		return false;
	*grows = e->owner + bytes > e->bytes ? e->owner + bytes - held(e) : 0;
	return true;
}

/* So much more is in use. A pool that keeps memory will keep that, too. */
static void pool_enter(struct nvs_entry *pool, uint64_t bytes)
{
	pool->owner += bytes;
	if (atomic_load_explicit(&nvs_memory_pools_keep, memory_order_relaxed) && pool->owner > pool->bytes &&
	    keeper_of(pool->key))
		pool->bytes = pool->owner;
}

void nvs_pool_enter(uint64_t pool, uint64_t bytes)
{
	pool_enter(nvs_account_find(NVS_MEMORY_POOL, pool), bytes);
}

bool nvs_pool_takes_in(uint64_t pool, struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_entry *e = pool_entry(pool, gpu);
	uint64_t before;

	if (!e || e->gpu != gpu->number)
		return false;
	before = held(e);
	pool_enter(e, bytes);
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
	nvs_account_uncount(&nvs_gpus[pool->gpu], held(pool) - pool->owner + (k ? k->bytes : 0));
	if (atomic_load(&nvs_gpus[pool->gpu].unlisted) == pool->key)
		atomic_store(&nvs_gpus[pool->gpu].unlisted, 0);
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

/* The driver may be asked about a pool until pool_release(). -1: it may not. *unlisted: as in its record. */
static int pool_hold(uint64_t pool, bool *unlisted)
{
	const struct keeper *k;
	int place;

	nvs_account_lock();
	k = pool ? keeper_of(pool) : NULL;
	place = k && !k->going ? (int)(k - keepers) : -1;
	if (place >= 0)
		atomic_fetch_add(&asking[place], 1);
	*unlisted = place >= 0 && k->unlisted;
	nvs_account_unlock();
	return place;
}

static void pool_release(int place)
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
	/* A second at most: a thread that asks may be below a signal handler that destroys the pool. */
	if (k && going)
		NVS_NAP_UNTIL(!atomic_load(&asking[k - keepers]), nvs_now() + NVS_S, NVS_MS);
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
	if (!threshold) /* the record goes, on which the end of the pool waits for threads that ask */
		nvs_memory_pool_going(pool, true);
	nvs_account_lock();
	k = threshold ? keeper_made(pool, gpu) : keeper_of(pool);
	e = nvs_account_find(NVS_MEMORY_POOL, pool);
	if (k && !threshold)
		k->going = false;
	if (k && (threshold || k->unlisted)) {
		k->threshold = threshold;
	} else if (k && e) { /* what it has kept goes when the host waits next */
		before = held(e);
		e->bytes = 0;
		recount(e, before);
		*k = (struct keeper){ 0 };
		gpus = gpu->bit;
	}
	nvs_account_settle(gpus);
	nvs_memory_pool_recount(pool);
}

static bool pool_ask(uint64_t pool, int what, uint64_t *bytes)
{
	*bytes = 0;
	return nvs_memory_driver.pool_get_attribute((void *)(uintptr_t)pool, what, bytes) == CUDA_SUCCESS &&
	       *bytes <= NVS_MAX_BYTES;
}

/* So much of the pool is in use. A call may be under way that only the driver knows, or only we. */
static void count_unlisted(struct keeper *k, struct nvs_entry *e, uint64_t used, bool grew)
{
	uint64_t listed = e->owner - k->bytes, now = nvs_minus(used, listed);

	if (grew || now < k->bytes)
		k->bytes = now;
	e->owner = listed + k->bytes;
}

/* What the driver says that the pool has. Its place is held. grew: by allocations that are not entered, too. */
static void pool_recount(uint64_t pool, bool unlisted, bool grew)
{
	struct keeper *k;
	struct nvs_entry *e;
	uint64_t bytes, used = 0, before;
	unsigned gpus = 0;

	if ((unlisted && !pool_ask(pool, CU_POOL_USED_CURRENT, &used)) ||
	    !pool_ask(pool, CU_POOL_RESERVED_CURRENT, &bytes)) {
		nvs_memory_pools_changed(grew ? NVS_POOLS_GREW : 0); /* another thread may be told */
		return;
	}
	nvs_account_lock();
	k = keeper_of(pool);
	e = nvs_account_find(NVS_MEMORY_POOL, pool);
	if (k && e && e->gpu == k->gpu->number) {
		before = held(e);
		e->bytes = bytes;
		if (unlisted)
			count_unlisted(k, e, used, grew);
		recount(e, before);
		nvs_account_exists(k->gpu);
		gpus = k->gpu->bit;
		if (bytes > k->threshold && bytes > e->owner && !nvs_unlimited(k->gpu))
			atomic_store(&nvs_memory_pools_shrink, true);
	}
	nvs_account_settle(gpus);
}

static void look_at(uint64_t pool, bool grew)
{
	int saved = errno, place;
	bool unlisted;

	/* A call that the driver does not allow in a capture would end it: later, when the host waits. */
	if (atomic_load_explicit(&nvs_gate.captures, memory_order_acquire)) {
		atomic_store(&nvs_memory_pools_shrink, true);
		nvs_memory_pools_changed(grew ? NVS_POOLS_GREW : 0);
		return;
	}
	place = pool_hold(pool, &unlisted);
	if (place < 0)
		return;
	pool_recount(pool, unlisted, grew);
	pool_release(place);
	errno = saved;
}

void nvs_memory_pool_recount(uint64_t pool)
{
	look_at(pool, false);
}

/* The pool may have grown although it kept enough. That is of no interest before the limit is near. */
void nvs_memory_pool_grew(struct nvs_gpu *gpu, uint64_t pool, bool now)
{
	if (!now) {
		if (!atomic_load_explicit(&nvs_memory_pools_shrink, memory_order_relaxed))
			atomic_store(&nvs_memory_pools_shrink, true);
		return;
	}
	nvs_memory_pool_recount(pool);
	nvs_memory_pools_trim(gpu, 0, false);
}

static void look_at_all(bool grew)
{
	uint64_t pools[KEEPERS];
	unsigned n = 0;

	nvs_account_lock();
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool)
			pools[n++] = keepers[i].pool;
	atomic_store(&nvs_memory_pools_shrink, false);
	nvs_account_unlock();
	while (n--)
		look_at(pools[n], grew);
}

void nvs_memory_pools_recount(void)
{
	if (nvs_counting())
		look_at_all(false);
}

/* ---- pools whose allocations are not entered ---- */

bool nvs_pool_unlist(struct nvs_gpu *gpu, uint64_t pool)
{
	struct keeper *k;

	nvs_account_lock();
	k = pool ? keeper_made(pool, gpu) : NULL;
	if (k) {
		k->unlisted = true;
		atomic_store(&gpu->unlisted, pool);
	}
	nvs_account_unlock();
	return k != NULL;
}

void nvs_memory_pools_tick(uint64_t now)
{
	if (!atomic_load(&nvs_memory_pools_change) || nvs_elapsed(now, asked_ns) < ASK_NS)
		return;
	asked_ns = now;
	nvs_drainer_look(nvs_gpus, NVS_LOOK_POOLS);
}

void nvs_memory_pools_ask(void)
{
	unsigned how;

	if (atomic_load(&nvs_gate.captures) || !nvs_counting() || !nvs_driver_enter())
		return;
	how = atomic_exchange(&nvs_memory_pools_change, 0);
	if (how)
		look_at_all(how == NVS_POOLS_GREW);
	nvs_driver_leave();
}

/*
 * The pools of a GPU that keep more than is in use; none, if so many bytes more do not exceed the
 * limit, or exceed it by more than is kept. Returns how many.
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
	uint64_t pools[KEEPERS], before, after;
	unsigned n = pools_with_more(gpu, bytes, pools);
	int saved = errno;

	if (!n)
		return false;
	if (wait)
		NVS_NAP_UNTIL(atomic_load_explicit(&nvs_gate.captures, memory_order_acquire) || nvs_streams_settle(gpu) ||
			      atomic_load(&nvs_exiting), nvs_now() + TRIM_WAIT_NS, NVS_MS);
	if (atomic_load_explicit(&nvs_gate.captures, memory_order_acquire))
		return false;
	before = gpu->budget->used;
	while (n--) {
		bool unlisted;
		int place = pool_hold(pools[n], &unlisted);

		if (place < 0)
			continue;
		nvs_memory_driver.pool_trim((void *)(uintptr_t)pools[n], 0);
		pool_recount(pools[n], unlisted, false);
		pool_release(place);
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
	atomic_store(&nvs_memory_pools_change, 0);
}
