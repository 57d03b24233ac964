// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "compiler.h"
#include "entries.h"
#include "memory_abi.h"
#include "ops.h"
#include "reserve.h"
#include "stream.h"

/* No allocation is larger, so that sums do not overflow. */
#define MAX_BYTES (1ull << 60)

/* Physical memory of the VMM. */
struct physical {
	uint64_t bytes;
	uint32_t handles, mappings; /* references; both 0: unused */
	uint32_t next;              /* in the list of unused ones */
	struct nvs_gpu *gpu;
};

atomic_bool nvs_memory_graphs;

static struct nvs_entries entries;
static _Atomic uint64_t stamp;
static struct physical *physical; /* number 0 is none */
static uint32_t physical_room, physical_used, physical_free;
static atomic_uint graph_gpus; /* bit mask */

/* Pools that keep freed memory. Of a program with more of them, the others count by what is in use. */
#define KEEPERS 64
static struct keeper {
	uint64_t pool; /* 0: unused */
	uint64_t threshold;
	struct nvs_gpu *gpu;
} keepers[KEEPERS];

static void lock(void)
{
	nvs_memory_locked = true;
	atomic_signal_fence(memory_order_seq_cst);
	nvs_lock(&nvs_memory_lock);
}

static void unlock(void)
{
	nvs_unlock(&nvs_memory_lock);
	atomic_signal_fence(memory_order_seq_cst);
	nvs_memory_locked = false;
}

/* ---- entries; the lock is held ---- */

static struct nvs_entry *find(enum nvs_memory_kind kind, uint64_t key)
{
	return nvs_entry_find(&entries, kind, key);
}

static bool insert(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, uint64_t owner, struct nvs_gpu *gpu)
{
	struct nvs_entry e = { .key = key, .bytes = bytes, .owner = owner, .kind = kind,
			       .gpu = gpu ? gpu->number : NVS_NO_GPU };

	e.stamp = atomic_fetch_add_explicit(&stamp, 1, memory_order_relaxed) + 1;
	return nvs_entry_add(&entries, &e);
}

/* ---- account; the lock is held ---- */

static void count(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b = gpu->budget;

	atomic_store_explicit(&b->used, b->used + bytes, memory_order_relaxed);
}

static void uncount(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b = gpu->budget;

	atomic_store_explicit(&b->used, b->used - bytes, memory_order_relaxed);
}

/* Claimed memory exists: only now it may make a new peak. */
static void exists(struct nvs_gpu *gpu)
{
	struct nvs_budget *b = gpu->budget;
	uint64_t now = b->used - b->asking;

	if (now > b->peak)
		atomic_store_explicit(&b->peak, now, memory_order_relaxed);
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
		count(gpu, now - before);
	else
		uncount(gpu, before - now);
}

/* An allocation in a pool ends. */
static void uncount_pooled(struct nvs_gpu *gpu, uint64_t pool, uint64_t bytes)
{
	struct nvs_entry *e = find(NVS_MEMORY_POOL, pool);
	uint64_t before;

	if (!e || e->owner < bytes) {
		uncount(gpu, bytes);
		return;
	}
	before = held(e);
	e->owner -= bytes;
	recount(e, before);
}

/* A pool ends: it keeps nothing. Its allocations live on, and count by themselves. */
static void pool_drop(const struct nvs_entry *pool)
{
	uint64_t key = pool->key;

	uncount(&nvs_gpus[pool->gpu], held(pool) - pool->owner);
	for (size_t i = 0; i < entries.size && pool->owner; i++)
		if (entries.at[i].pooled && entries.at[i].owner == key)
			entries.at[i].pooled = entries.at[i].owner = 0;
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool == key)
			keepers[i] = (struct keeper){ 0 };
}

static void physical_drop(uint32_t n)
{
	struct physical *p = &physical[n];

	if (p->handles || p->mappings)
		return;
	if (p->gpu)
		uncount(p->gpu, p->bytes);
	p->next = physical_free;
	physical_free = n;
}

/* Removes an entry, and its bytes from the account. */
static void strike(struct nvs_entry *e)
{
	uint32_t n = (uint32_t)e->owner;
	unsigned kind = e->kind;

	if (kind == NVS_MEMORY_POOL && e->gpu != NVS_NO_GPU)
		pool_drop(e);
	else if (e->pooled)
		uncount_pooled(&nvs_gpus[e->gpu], e->owner, e->bytes);
	else if (kind != NVS_MEMORY_HANDLE && kind != NVS_MEMORY_MAPPING && e->gpu != NVS_NO_GPU)
		uncount(&nvs_gpus[e->gpu], e->bytes);
	nvs_entry_remove(&entries, e);
	if (kind == NVS_MEMORY_HANDLE)
		physical[n].handles = 0;
	else if (kind == NVS_MEMORY_MAPPING && n)
		physical[n].mappings--;
	if ((kind == NVS_MEMORY_HANDLE || kind == NVS_MEMORY_MAPPING) && n)
		physical_drop(n);
}

/* The driver has given out a key again: its free went past the shim. */
static void supersede(enum nvs_memory_kind kind, uint64_t key)
{
	struct nvs_entry *e = find(kind, key);

	if (e)
		strike(e);
}

/* Unlocks, and tells the scheduler about these GPUs if it has to know. gpus: a bit each. */
static void unlock_and_settle(unsigned gpus)
{
	NVS_FOR_EACH_GPU(gpu)
		if ((gpus & gpu->bit) && !nvs_reserve_due(gpu->budget))
			gpus &= ~gpu->bit;
	unlock();
	if (nvs_likely(!gpus))
		return;
	NVS_FOR_EACH_GPU(gpu)
		if (gpus & gpu->bit)
			nvs_reserve_settle(gpu);
}

static unsigned mask_of(struct nvs_gpu *gpu)
{
	return gpu ? gpu->bit : 0;
}

/* ---- allocations ---- */

/* The pools of a GPU that keep more than is in use. Returns how many. */
static unsigned pools_with_more(const struct nvs_gpu *gpu, uint64_t pools[KEEPERS])
{
	const struct nvs_entry *e;
	unsigned n = 0;

	lock();
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool && keepers[i].gpu == gpu) {
			e = find(NVS_MEMORY_POOL, keepers[i].pool);
			if (e && e->bytes > e->owner)
				pools[n++] = keepers[i].pool;
		}
	unlock();
	return n;
}

/*
 * Takes from the pools of a GPU what they keep, as the driver does when the GPU is full.
 * What streams may still be using stays, unless they are waited for: as long as for a
 * free of the driver, and not while a stream captures. False: there was nothing to take.
 */
static bool trim_pools(struct nvs_gpu *gpu, bool wait)
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

/* Cached memory is released before an allocation is refused. */
static bool reserve(struct nvs_gpu *gpu, uint64_t bytes)
{
	return nvs_reserve(gpu, bytes) ||
	       (nvs_memory_ops.make_room(gpu, bytes) && nvs_reserve(gpu, bytes)) ||
	       (nvs_memory_ops.make_room(gpu, UINT64_MAX) && nvs_reserve(gpu, bytes)) ||
	       (trim_pools(gpu, false) && nvs_reserve(gpu, bytes)) ||
	       (trim_pools(gpu, true) && nvs_reserve(gpu, bytes));
}

bool nvs_claim(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b;
	bool fits;

	*c = (struct nvs_claim){ .bytes = bytes };
	if (!gpu)
		return true;
	b = gpu->budget;
	if (nvs_unlikely(bytes > MAX_BYTES))
		return !b->limit; /* the driver refuses it */
	lock();
	fits = b->used <= b->reserved && bytes <= b->reserved - b->used;
	if (fits)
		count(gpu, bytes);
	unlock();
	if (nvs_unlikely(!fits) && !reserve(gpu, bytes))
		return false;
	c->gpu = gpu;
	return true;
}

/* The entry of a pool. NULL: the system has no memory. The lock is held. */
static struct nvs_entry *pool_entry(uint64_t pool, struct nvs_gpu *gpu)
{
	struct nvs_entry *e = find(NVS_MEMORY_POOL, pool);

	if (!e && insert(NVS_MEMORY_POOL, pool, 0, 0, gpu))
		e = find(NVS_MEMORY_POOL, pool);
	return e;
}

/*
 * A pool counts with what is in use or what it has of the GPU, whichever is more; what a
 * claim adds to that is claimed of the GPU.
 */
bool nvs_claim_in_pool(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t pool, uint64_t bytes)
{
	struct nvs_entry *e = NULL;
	struct nvs_claim more;
	uint64_t before = 0, now = 0;

	if (gpu && pool && bytes <= MAX_BYTES) {
		lock();
		e = pool_entry(pool, gpu);
		if (e && e->gpu == gpu->number) {
			before = held(e);
			e->owner += bytes;
			now = held(e);
		} else {
			e = NULL;
		}
		unlock();
	}
	if (!e)
		return nvs_claim(c, gpu, bytes);
	*c = (struct nvs_claim){ gpu, bytes, pool };
	if (now == before || nvs_claim(&more, gpu, now - before))
		return true;
	lock();
	count(gpu, now - before); /* so that all the bytes are counted */
	uncount_pooled(gpu, pool, bytes);
	unlock_and_settle(gpu->bit);
	return false;
}

bool nvs_claim_more(struct nvs_claim *c, uint64_t bytes)
{
	struct nvs_claim more;

	if (!c->gpu)
		return true;
	if (!nvs_claim(&more, c->gpu, bytes - c->bytes))
		return false;
	if (more.gpu)
		c->bytes = bytes;
	return true;
}

void nvs_claim_exists(const struct nvs_claim *c)
{
	lock();
	exists(c->gpu);
	unlock();
}

void nvs_claim_drop(const struct nvs_claim *c)
{
	if (!c->gpu)
		return;
	lock();
	if (c->pool)
		uncount_pooled(c->gpu, c->pool, c->bytes);
	else
		uncount(c->gpu, c->bytes);
	unlock_and_settle(mask_of(c->gpu));
}

/* The allocation has so many bytes. The lock is held. */
static void correct(const struct nvs_claim *c, uint64_t bytes)
{
	if (bytes > c->bytes)
		count(c->gpu, bytes - c->bytes);
	else
		uncount(c->gpu, c->bytes - bytes);
}

void nvs_claim_keep(const struct nvs_claim *c, enum nvs_memory_kind kind, uint64_t key,
		    uint64_t bytes, const void *owner)
{
	bool pooled;

	if (!c->gpu)
		return;
	lock();
	correct(c, bytes);
	supersede(kind, key);
	pooled = c->pool && find(NVS_MEMORY_POOL, c->pool); /* not destroyed meanwhile */
	if (key && insert(kind, key, bytes, pooled ? c->pool : (uintptr_t)owner, c->gpu)) {
		find(kind, key)->pooled = pooled;
		exists(c->gpu);
	} else if (c->pool) {
		uncount_pooled(c->gpu, c->pool, bytes);
	} else {
		uncount(c->gpu, bytes); /* could not be removed later */
	}
	unlock_and_settle(mask_of(c->gpu));
}

uint64_t nvs_memory_stamp(void)
{
	return atomic_load_explicit(&stamp, memory_order_acquire);
}

void nvs_memory_remove(enum nvs_memory_kind kind, uint64_t key, uint64_t before)
{
	unsigned gpus = 0;
	struct nvs_entry *e;

	lock();
	e = find(kind, key);
	if (e && e->stamp <= before) {
		if (e->gpu != NVS_NO_GPU)
			gpus = 1u << e->gpu;
		strike(e);
	}
	unlock_and_settle(gpus);
}

/* Whether the entry belongs to a context and is not newer than a stamp. */
static bool owned(const struct nvs_entry *e, uint64_t before)
{
	return (e->kind == NVS_MEMORY_POINTER || e->kind == NVS_MEMORY_ARRAY) && e->owner &&
	       !e->pooled && e->stamp <= before;
}

void nvs_memory_context_gone(const void *ctx, uint64_t before)
{
	unsigned gpus = 0;

	lock();
	for (size_t i = 0; i < entries.size; i++)
		while (owned(&entries.at[i], before) && entries.at[i].owner == (uintptr_t)ctx) {
			gpus |= 1u << entries.at[i].gpu;
			strike(&entries.at[i]);
		}
	unlock_and_settle(gpus);
}

void nvs_memory_primary_gone(struct nvs_gpu *gpu, uint64_t before)
{
	uint64_t asked = 0;
	bool own = false; /* `asked` is no part of the primary context */

	lock();
	for (size_t i = 0; i < entries.size; i++)
		while (owned(&entries.at[i], before) && entries.at[i].gpu == gpu->number) {
			if (entries.at[i].owner != asked) {
				asked = entries.at[i].owner;
				own = nvs_context_own((void *)(uintptr_t)asked);
			}
			if (own)
				break;
			strike(&entries.at[i]);
		}
	unlock_and_settle(gpu->bit);
}

/* ---- pools ---- */

void nvs_memory_pool(uint64_t pool, struct nvs_gpu *gpu)
{
	struct nvs_entry *e;

	lock();
	e = find(NVS_MEMORY_POOL, pool);
	if (!e || e->gpu != (gpu ? gpu->number : NVS_NO_GPU)) {
		supersede(NVS_MEMORY_POOL, pool);
		if (pool)
			insert(NVS_MEMORY_POOL, pool, 0, 0, gpu);
	}
	unlock();
}

void nvs_memory_pool_share(uint64_t pool)
{
	lock();
	if (pool && !find(NVS_MEMORY_SHARED, pool))
		insert(NVS_MEMORY_SHARED, pool, 0, 0, NULL);
	unlock();
}

bool nvs_memory_pool_shared(uint64_t pool)
{
	bool yes;

	lock();
	yes = find(NVS_MEMORY_SHARED, pool) != NULL;
	unlock();
	return yes;
}

bool nvs_memory_pool_find(uint64_t pool, struct nvs_gpu **gpu)
{
	struct nvs_entry *e;

	lock();
	e = find(NVS_MEMORY_POOL, pool);
	if (e)
		*gpu = e->gpu == NVS_NO_GPU ? NULL : &nvs_gpus[e->gpu];
	unlock();
	return e != NULL;
}

atomic_bool nvs_memory_pools_keep, nvs_memory_pools_shrink;

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
	lock();
	k = keeper_of(pool);
	if (!k && threshold && pool_entry(pool, gpu) && (k = keeper_of(0)) != NULL)
		*k = (struct keeper){ .pool = pool, .gpu = gpu };
	if (k) {
		k->threshold = threshold;
		atomic_store(&nvs_memory_pools_keep, true);
	}
	unlock();
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

	lock();
	keeps = keeper_of(pool) != NULL;
	unlock();
	if (!keeps || !nvs_driver.pool_get_attribute ||
	    nvs_driver.pool_get_attribute((void *)(uintptr_t)pool, CU_POOL_RESERVED_CURRENT, &bytes) !=
		    CUDA_SUCCESS || bytes > MAX_BYTES)
		return;
	lock();
	k = keeper_of(pool);
	e = find(NVS_MEMORY_POOL, pool);
	if (k && e && e->gpu == k->gpu->number) {
		before = held(e);
		e->bytes = bytes;
		recount(e, before);
		exists(k->gpu);
		gpus = k->gpu->bit;
		if (bytes > k->threshold)
			atomic_store(&nvs_memory_pools_shrink, true);
	}
	unlock_and_settle(gpus);
	errno = saved;
}

/* Blocks that are kept may be of use to nobody: then the pool has grown although it kept enough. */
void nvs_memory_pool_grew(struct nvs_gpu *gpu, uint64_t pool)
{
	const struct nvs_budget *b = gpu->budget;
	bool over;

	nvs_memory_pool_look(pool);
	lock();
	over = b->limit && b->used + b->others > b->limit;
	unlock();
	if (over)
		trim_pools(gpu, false);
}

void nvs_memory_pools_look(void)
{
	int saved = errno;
	uint64_t pools[KEEPERS];
	unsigned n = 0;

	if (!nvs_counting())
		return;
	lock();
	for (unsigned i = 0; i < KEEPERS; i++)
		if (keepers[i].pool)
			pools[n++] = keepers[i].pool;
	atomic_store(&nvs_memory_pools_shrink, false);
	unlock();
	while (n--)
		nvs_memory_pool_look(pools[n]);
	errno = saved;
}

/* ---- graphs ---- */

atomic_bool nvs_memory_graph_gpus;

void nvs_memory_graph_works_on(uint64_t exec, unsigned gpus)
{
	lock();
	supersede(NVS_MEMORY_GRAPH, exec);
	if (insert(NVS_MEMORY_GRAPH, exec, 0, gpus, NULL))
		atomic_store(&nvs_memory_graph_gpus, true);
	unlock();
}

unsigned nvs_memory_graph_find(uint64_t exec)
{
	struct nvs_entry *e;
	unsigned gpus;

	if (!nvs_counting())
		return 0;
	lock();
	e = find(NVS_MEMORY_GRAPH, exec);
	gpus = e ? (unsigned)e->owner : 0;
	unlock();
	return gpus;
}

/* ---- VMM ---- */

/* The number of a new memory with one handle; 0: the system has no memory. Locked. */
static uint32_t physical_new(uint64_t bytes, struct nvs_gpu *gpu)
{
	uint32_t n = physical_free;

	if (n) {
		physical_free = physical[n].next;
	} else {
		if (physical_used + 1 >= physical_room) {
			uint32_t room = physical_room ? physical_room * 2 : 128;
			void *p = mmap(NULL, room * sizeof(*physical), PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			if (p == MAP_FAILED)
				return 0;
			if (physical) {
				memcpy(p, physical, physical_room * sizeof(*physical));
				munmap(physical, physical_room * sizeof(*physical));
			}
			physical = p;
			physical_room = room;
		}
		n = ++physical_used;
	}
	physical[n] = (struct physical){ .bytes = bytes, .handles = 1, .gpu = gpu };
	return n;
}

/* A handle value stands for a new memory. False: the system has no memory. Locked. */
static bool handle_new(uint64_t handle, uint64_t bytes, struct nvs_gpu *gpu)
{
	uint32_t n;

	supersede(NVS_MEMORY_HANDLE, handle);
	n = physical_new(bytes, gpu);
	if (!n)
		return false;
	if (insert(NVS_MEMORY_HANDLE, handle, bytes, n, gpu))
		return true;
	physical[n].gpu = NULL;
	physical[n].handles = 0;
	physical_drop(n);
	return false;
}

void nvs_claim_keep_handle(const struct nvs_claim *c, uint64_t handle)
{
	bool known;

	lock();
	known = handle_new(handle, c->bytes, c->gpu);
	if (c->gpu && known)
		exists(c->gpu);
	else if (c->gpu)
		uncount(c->gpu, c->bytes);
	unlock_and_settle(mask_of(c->gpu));
}

void nvs_memory_handle_imported(uint64_t handle)
{
	struct nvs_entry *e;

	lock();
	e = find(NVS_MEMORY_HANDLE, handle);
	if (e) /* this process exported it: one more reference */
		physical[e->owner].handles++;
	else
		handle_new(handle, 0, NULL);
	unlock();
}

/* The mapping that an address lies in. Locked. */
static struct nvs_entry *mapping_of(uint64_t address)
{
	struct nvs_entry *e = find(NVS_MEMORY_MAPPING, address);

	for (size_t i = 0; !e && i < entries.size; i++)
		if (entries.at[i].kind == NVS_MEMORY_MAPPING && address - entries.at[i].key < entries.at[i].bytes)
			e = &entries.at[i];
	return e;
}

void nvs_memory_handle_retained(uint64_t handle, uint64_t address)
{
	struct nvs_entry *m;
	uint32_t n;

	lock();
	m = mapping_of(address);
	n = m ? (uint32_t)m->owner : 0;
	if (n) {
		struct nvs_entry *e = find(NVS_MEMORY_HANDLE, handle);

		if (e && e->owner != n) {
			strike(e);
			e = NULL;
		}
		if (e || insert(NVS_MEMORY_HANDLE, handle, physical[n].bytes, n, physical[n].gpu))
			physical[n].handles++;
	}
	unlock();
}

void nvs_memory_handle_released(uint64_t handle, uint64_t before)
{
	unsigned gpus = 0;
	struct nvs_entry *e;

	lock();
	e = find(NVS_MEMORY_HANDLE, handle);
	if (e && e->stamp <= before) {
		struct physical *p = &physical[e->owner];

		gpus = mask_of(p->gpu);
		if (p->handles > 1)
			p->handles--;
		else
			strike(e);
	}
	unlock_and_settle(gpus);
}

uint32_t nvs_memory_hold(uint64_t handle)
{
	struct nvs_entry *e;
	uint32_t n = 0;

	lock();
	e = find(NVS_MEMORY_HANDLE, handle);
	if (e) {
		n = (uint32_t)e->owner;
		physical[n].mappings++;
	}
	unlock();
	return n;
}

void nvs_memory_unhold(uint32_t n)
{
	unsigned gpus;

	if (!n)
		return;
	lock();
	gpus = mask_of(physical[n].gpu);
	physical[n].mappings--;
	physical_drop(n);
	unlock_and_settle(gpus);
}

void nvs_memory_mapped(uint32_t n, uint64_t address, uint64_t bytes)
{
	lock();
	supersede(NVS_MEMORY_MAPPING, address);
	if (!insert(NVS_MEMORY_MAPPING, address, bytes, n, NULL) && n) {
		physical[n].mappings--;
		physical_drop(n);
	}
	unlock();
}

void nvs_memory_unmapped(uint64_t address, uint64_t bytes, uint64_t before)
{
	uint64_t at = address, end = address + bytes;
	unsigned gpus = 0;

	lock();
	/* Mostly, a range consists of mappings side by side. */
	while (at < end) {
		struct nvs_entry *e = find(NVS_MEMORY_MAPPING, at);

		if (!e || !e->bytes)
			break;
		at += e->bytes;
		if (e->stamp > before)
			continue;
		if (e->owner)
			gpus |= mask_of(physical[e->owner].gpu);
		strike(e);
	}
	for (size_t i = 0; at < end && i < entries.size; i++)
		while (entries.at[i].kind == NVS_MEMORY_MAPPING && entries.at[i].stamp <= before &&
		       entries.at[i].key - address < bytes) {
			if (entries.at[i].owner)
				gpus |= mask_of(physical[entries.at[i].owner].gpu);
			strike(&entries.at[i]);
		}
	unlock_and_settle(gpus);
}

/* ---- graphs ---- */

void nvs_memory_graph_used(struct nvs_gpu *gpu)
{
	atomic_fetch_or(&graph_gpus, mask_of(gpu));
	atomic_store(&nvs_memory_graphs, true);
}

void nvs_memory_graph_look(void)
{
	unsigned gpus = atomic_load(&graph_gpus);
	int saved = errno;

	if (!nvs_counting())
		return;
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_budget *b = gpu->budget;
		uint64_t bytes = 0;

		if (!(gpus & gpu->bit) || !nvs_driver.graph_memory ||
		    nvs_driver.graph_memory(gpu->device.dev, CU_GRAPH_MEM_RESERVED, &bytes) !=
			    CUDA_SUCCESS || bytes > MAX_BYTES)
			continue;
		lock();
		if (bytes > b->graphs)
			count(gpu, bytes - b->graphs);
		else
			uncount(gpu, b->graphs - bytes);
		exists(gpu);
		b->graphs = bytes;
		unlock_and_settle(gpu->bit);
	}
	errno = saved;
}

/* ---- */

void nvs_memory_read(struct nvs_gpu *gpu, uint64_t *now, uint64_t *peak)
{
	*now = atomic_load_explicit(&gpu->budget->used, memory_order_relaxed);
	*peak = atomic_load_explicit(&gpu->budget->peak, memory_order_relaxed);
}

void nvs_memory_fork_child(void)
{
	atomic_store(&nvs_memory_graph_gpus, false);
	nvs_memory_locked = false; /* a signal handler may have forked */
	nvs_entries_reset(&entries); /* fork() may have caught it half changed */
	if (physical)
		munmap(physical, physical_room * sizeof(*physical));
	physical = NULL;
	physical_room = physical_used = physical_free = 0;
	memset(keepers, 0, sizeof(keepers));
	atomic_store(&nvs_memory_pools_keep, false);
	atomic_store(&nvs_memory_pools_shrink, false);
	atomic_store(&nvs_memory_graphs, false);
	atomic_store(&graph_gpus, 0);
	nvs_reserve_fork_child();
}
