// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "compiler.h"
#include "ops.h"
#include "reserve.h"
#include "stream.h"

struct nvs_memory_driver_table nvs_memory_driver_functions = {
#define D(member, export, params) .member = (void *)nvs_driver_lacks,
	NVS_MEMORY_DRIVER_TABLE(D)
#undef D
};

/* Physical memory of the VMM. */
struct physical {
	uint64_t bytes;
	uint32_t handles, mappings; /* references; both 0: unused */
	uint32_t next;              /* in the list of unused ones */
	struct nvs_gpu *gpu;
};

static struct physical *physical; /* number 0 is none */
static uint32_t physical_capacity, physical_used, physical_free;

static void physical_drop(uint32_t n)
{
	struct physical *p = &physical[n];

	if (p->handles || p->mappings)
		return;
	if (p->gpu)
		nvs_account_uncount(p->gpu, p->bytes);
	p->next = physical_free;
	physical_free = n;
}

/* Removes an entry, and its bytes from the account. */
static void strike(struct nvs_entry *e)
{
	uint32_t n = (uint32_t)e->owner;
	unsigned kind = e->kind;

	if (kind == NVS_MEMORY_POOL)
		nvs_pool_ends(e);
	else if (e->pooled)
		nvs_pool_uncount(&nvs_gpus[e->gpu], e->owner, e->bytes);
	else if (kind != NVS_MEMORY_HANDLE && kind != NVS_MEMORY_MAPPING && e->gpu != NVS_NO_GPU)
		nvs_account_uncount(&nvs_gpus[e->gpu], e->bytes);
	nvs_entry_remove(&nvs_account, e);
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
	struct nvs_entry *e = nvs_account_find(kind, key);

	if (e)
		strike(e);
}

static unsigned mask_of(struct nvs_gpu *gpu)
{
	return gpu ? gpu->bit : 0;
}

/* ---- allocations ---- */

/* Cached memory is released before an allocation is refused. */
static bool reserve(struct nvs_gpu *gpu, uint64_t bytes)
{
	if (nvs_unlikely(nvs_memory_pools_asks(gpu))) {
		nvs_memory_pools_ask();
		if (nvs_budget_take(gpu->budget, bytes))
			return true;
	}
	return nvs_reserve(gpu, bytes) ||
	       (nvs_memory_ops.make_room(gpu, bytes) && nvs_reserve(gpu, bytes)) ||
	       (nvs_memory_ops.make_room(gpu, UINT64_MAX) && nvs_reserve(gpu, bytes)) ||
	       (nvs_memory_pools_trim(gpu, bytes, false) && nvs_reserve(gpu, bytes)) ||
	       (nvs_memory_pools_trim(gpu, bytes, true) && nvs_reserve(gpu, bytes));
}

bool nvs_claim(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t bytes)
{
	*c = (struct nvs_claim){ .bytes = bytes };
	if (!gpu || !bytes)
		return true;
	if (nvs_unlikely(bytes > NVS_MAX_BYTES))
		return !gpu->budget->limit; /* the driver refuses it */
	if (nvs_unlikely(!nvs_budget_take(gpu->budget, bytes)) && !reserve(gpu, bytes))
		return false;
	c->gpu = gpu;
	return true;
}

/*
 * Where there is room, all bytes are claimed, and what the pool counts with already is given back
 * later. Elsewhere only what the pool will count with in addition is claimed, until that is enough:
 * `bytes` at most.
 */
bool nvs_claim_in_pool(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t pool, uint64_t bytes)
{
	uint64_t have = 0, grows = 0;
	struct nvs_claim more;
	bool known = gpu && pool && bytes <= NVS_MAX_BYTES;

	if (nvs_likely(known && nvs_budget_take(gpu->budget, bytes))) {
		*c = (struct nvs_claim){ gpu, bytes, pool, true };
		return true;
	}
	while (known) {
		nvs_account_lock();
		known = nvs_pool_grows(pool, gpu, bytes, &grows);
		if (known && grows <= have) {
			nvs_pool_enter(pool, bytes);
			nvs_account_uncount(gpu, have - grows);
			nvs_account_settle(gpu->bit);
			*c = (struct nvs_claim){ gpu, bytes, pool, false };
			return true;
		}
		nvs_account_unlock();
		if (known && !nvs_claim(&more, gpu, grows - have))
			break;
		have = known ? grows : have;
	}
	if (have) {
		nvs_account_lock();
		nvs_account_uncount(gpu, have);
		nvs_account_settle(gpu->bit);
	}
	return !known && nvs_claim(c, gpu, bytes);
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
	nvs_account_lock();
	nvs_account_exists(c->gpu);
	nvs_account_unlock();
}

void nvs_claim_drop(const struct nvs_claim *c)
{
	if (!c->gpu)
		return;
	nvs_account_lock();
	if (c->pool && !c->loose)
		nvs_pool_uncount(c->gpu, c->pool, c->bytes);
	else
		nvs_account_uncount(c->gpu, c->bytes);
	nvs_account_settle(mask_of(c->gpu));
}

/* The allocation has so many bytes. The lock is held. */
static void correct(const struct nvs_claim *c, uint64_t bytes)
{
	if (bytes > c->bytes)
		nvs_account_count(c->gpu, bytes - c->bytes);
	else if (bytes < c->bytes)
		nvs_account_uncount(c->gpu, c->bytes - bytes);
}

bool nvs_claim_keep(const struct nvs_claim *c, enum nvs_memory_kind kind, uint64_t key,
		    uint64_t bytes, const void *owner)
{
	struct nvs_entry *e;
	bool pooled, tight;

	if (!c->gpu)
		return false;
	nvs_account_lock();
	correct(c, bytes);
	supersede(kind, key);
	if (c->loose)
		pooled = nvs_pool_takes_in(c->pool, c->gpu, bytes);
	else
		pooled = c->pool && nvs_account_find(NVS_MEMORY_POOL, c->pool); /* not destroyed meanwhile */
	e = key ? nvs_account_insert(kind, key, bytes, pooled ? c->pool : (uintptr_t)owner, c->gpu) : NULL;
	if (e) {
		e->pooled = pooled;
		nvs_account_exists(c->gpu);
	} else if (pooled) {
		nvs_pool_uncount(c->gpu, c->pool, bytes);
	} else {
		nvs_account_uncount(c->gpu, bytes); /* could not be removed later */
	}
	tight = nvs_budget_is_tight(c->gpu->budget);
	nvs_account_settle(mask_of(c->gpu));
	return tight;
}

uint64_t nvs_memory_stamp(void)
{
	return atomic_load_explicit(&nvs_account_stamp, memory_order_acquire);
}

void nvs_memory_remove(enum nvs_memory_kind kind, uint64_t key, uint64_t before)
{
	unsigned gpus = 0;
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(kind, key);
	if (e && e->stamp <= before) {
		if (e->gpu != NVS_NO_GPU)
			gpus = 1u << e->gpu;
		strike(e);
	} else if (!e && kind == NVS_MEMORY_POINTER) {
		nvs_memory_pools_changed(NVS_POOLS_SHRANK);
	}
	nvs_account_settle(gpus);
}

/* Whether the entry belongs to a context and is not newer than a stamp. */
static bool owned(const struct nvs_entry *e, uint64_t before)
{
	return (e->kind == NVS_MEMORY_POINTER || e->kind == NVS_MEMORY_ARRAY || e->kind == NVS_MEMORY_CODE) &&
	       e->owner && !e->pooled && e->stamp <= before;
}

void nvs_memory_context_gone(const void *ctx, uint64_t before)
{
	unsigned gpus = 0;

	nvs_account_lock();
	for (size_t i = 0; i < nvs_account.size; i++)
		while (owned(&nvs_account.at[i], before) && nvs_account.at[i].owner == (uintptr_t)ctx) {
			gpus |= 1u << nvs_account.at[i].gpu;
			strike(&nvs_account.at[i]);
		}
	nvs_account_settle(gpus);
}

void nvs_memory_primary_gone(struct nvs_gpu *gpu, uint64_t before)
{
	uint64_t asked = 0;
	bool own = false; /* `asked` is no part of the primary context */

	nvs_account_lock();
	for (size_t i = 0; i < nvs_account.size; i++)
		while (owned(&nvs_account.at[i], before) && nvs_account.at[i].gpu == gpu->number) {
			if (nvs_account.at[i].owner != asked) {
				asked = nvs_account.at[i].owner;
				own = nvs_context_look((void *)(uintptr_t)asked).own;
			}
			if (own)
				break;
			strike(&nvs_account.at[i]);
		}
	nvs_account_settle(gpu->bit);
}

/* ---- VMM ---- */

/* The number of a new memory with one handle; 0: the system has no memory. Locked. */
static uint32_t physical_new(uint64_t bytes, struct nvs_gpu *gpu)
{
	uint32_t n = physical_free;

	if (n) {
		physical_free = physical[n].next;
	} else {
		if (physical_used + 1 >= physical_capacity) {
			uint32_t capacity = physical_capacity ? physical_capacity * 2 : 128;
			void *p = mmap(NULL, capacity * sizeof(*physical), PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			if (p == MAP_FAILED)
				return 0;
			if (physical) {
				memcpy(p, physical, physical_capacity * sizeof(*physical));
				munmap(physical, physical_capacity * sizeof(*physical));
			}
			physical = p;
			physical_capacity = capacity;
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
	if (nvs_account_insert(NVS_MEMORY_HANDLE, handle, bytes, n, gpu))
		return true;
	physical[n].gpu = NULL;
	physical[n].handles = 0;
	physical_drop(n);
	return false;
}

void nvs_claim_keep_handle(const struct nvs_claim *c, uint64_t handle)
{
	bool known;

	nvs_account_lock();
	known = handle_new(handle, c->bytes, c->gpu);
	if (c->gpu && known)
		nvs_account_exists(c->gpu);
	else if (c->gpu)
		nvs_account_uncount(c->gpu, c->bytes);
	nvs_account_settle(mask_of(c->gpu));
}

void nvs_memory_handle_imported(uint64_t handle)
{
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_HANDLE, handle);
	if (e) /* this process exported it: one more reference */
		physical[e->owner].handles++;
	else
		handle_new(handle, 0, NULL);
	nvs_account_unlock();
}

/* The mapping that an address lies in. Locked. */
static struct nvs_entry *mapping_of(uint64_t address)
{
	struct nvs_entry *e = nvs_account_find(NVS_MEMORY_MAPPING, address);

	for (size_t i = 0; !e && i < nvs_account.size; i++)
		if (nvs_account.at[i].kind == NVS_MEMORY_MAPPING && address - nvs_account.at[i].key < nvs_account.at[i].bytes)
			e = &nvs_account.at[i];
	return e;
}

void nvs_memory_handle_retained(uint64_t handle, uint64_t address)
{
	struct nvs_entry *m;
	uint32_t n;

	nvs_account_lock();
	m = mapping_of(address);
	n = m ? (uint32_t)m->owner : 0;
	if (n) {
		struct nvs_entry *e = nvs_account_find(NVS_MEMORY_HANDLE, handle);

		if (e && e->owner != n) {
			strike(e);
			e = NULL;
		}
		if (e || nvs_account_insert(NVS_MEMORY_HANDLE, handle, physical[n].bytes, n, physical[n].gpu))
			physical[n].handles++;
	}
	nvs_account_unlock();
}

void nvs_memory_handle_released(uint64_t handle, uint64_t before)
{
	unsigned gpus = 0;
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_HANDLE, handle);
	if (e && e->stamp <= before) {
		struct physical *p = &physical[e->owner];

		gpus = mask_of(p->gpu);
		if (p->handles > 1)
			p->handles--;
		else
			strike(e);
	}
	nvs_account_settle(gpus);
}

uint32_t nvs_memory_hold(uint64_t handle)
{
	struct nvs_entry *e;
	uint32_t n = 0;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_HANDLE, handle);
	if (e) {
		n = (uint32_t)e->owner;
		physical[n].mappings++;
	}
	nvs_account_unlock();
	return n;
}

void nvs_memory_unhold(uint32_t n)
{
	unsigned gpus;

	if (!n)
		return;
	nvs_account_lock();
	gpus = mask_of(physical[n].gpu);
	physical[n].mappings--;
	physical_drop(n);
	nvs_account_settle(gpus);
}

void nvs_memory_mapped(uint32_t n, uint64_t address, uint64_t bytes)
{
	nvs_account_lock();
	supersede(NVS_MEMORY_MAPPING, address);
	if (!nvs_account_insert(NVS_MEMORY_MAPPING, address, bytes, n, NULL) && n) {
		physical[n].mappings--;
		physical_drop(n);
	}
	nvs_account_unlock();
}

void nvs_memory_unmapped(uint64_t address, uint64_t bytes, uint64_t before)
{
	uint64_t at = address, end = address + bytes;
	unsigned gpus = 0;

	nvs_account_lock();
	/* Mostly, a range consists of mappings side by side. */
	while (at < end) {
		struct nvs_entry *e = nvs_account_find(NVS_MEMORY_MAPPING, at);

		if (!e || !e->bytes)
			break;
		at += e->bytes;
		if (e->stamp > before)
			continue;
		if (e->owner)
			gpus |= mask_of(physical[e->owner].gpu);
		strike(e);
	}
	for (size_t i = 0; at < end && i < nvs_account.size; i++)
		while (nvs_account.at[i].kind == NVS_MEMORY_MAPPING && nvs_account.at[i].stamp <= before &&
		       nvs_account.at[i].key - address < bytes) {
			if (nvs_account.at[i].owner)
				gpus |= mask_of(physical[nvs_account.at[i].owner].gpu);
			strike(&nvs_account.at[i]);
		}
	nvs_account_settle(gpus);
}

/* ---- */

void nvs_memory_read(struct nvs_gpu *gpu, uint64_t *now, uint64_t *peak)
{
	*now = atomic_load_explicit(&gpu->budget->used, memory_order_relaxed);
	*peak = atomic_load_explicit(&gpu->budget->peak, memory_order_relaxed);
}

void nvs_memory_fork_child(void)
{
	nvs_memory_locked = false; /* a signal handler may have forked */
	nvs_entries_reset(&nvs_account); /* fork() may have caught it half changed */
	if (physical)
		munmap(physical, physical_capacity * sizeof(*physical));
	physical = NULL;
	physical_capacity = physical_used = physical_free = 0;
	nvs_memory_pools_fork_child();
	nvs_memory_graphs_fork_child();
	nvs_reserve_fork_child();
}
