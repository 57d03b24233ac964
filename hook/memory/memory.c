// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <stddef.h>

#include "compiler.h"
#include "ops.h"
#include "reserve.h"
#include "stream.h"

struct nvs_memory_driver_table nvs_memory_driver_functions = {
#define D(member, export, params) .member = (void *)nvs_driver_lacks,
	NVS_MEMORY_DRIVER_TABLE(D)
#undef D
};

/* Physical memory of the VMM, by its number, with the references to it as owner: mappings, and handles. */
static struct nvs_entries physical;
static uint32_t physical_last;
#define HANDLE_REF (1ull << 32)

static struct nvs_entry *physical_of(uint64_t n)
{
	return nvs_entry_find(&physical, NVS_MEMORY_HANDLE, n);
}

static unsigned mask_of(const struct nvs_entry *e)
{
	return e && e->gpu != NVS_NO_GPU ? 1u << e->gpu : 0;
}

/* References come to a memory, or go; it ends with the last. */
static void physical_refer(uint64_t n, uint64_t come, uint64_t go)
{
	struct nvs_entry *p = physical_of(n);

	if (!p)
		return;
	p->owner += come - go;
	if (p->owner)
		return;
	if (p->gpu != NVS_NO_GPU)
		nvs_account_uncount(&nvs_gpus[p->gpu], p->bytes);
	nvs_entry_remove(&physical, p);
}

/* Removes an entry, and its bytes from the account. */
static void strike(struct nvs_entry *e)
{
	uint64_t n = e->owner;
	unsigned kind = e->kind;
	const struct nvs_entry *p = kind == NVS_MEMORY_HANDLE ? physical_of(n) : NULL;

	if (kind == NVS_MEMORY_POOL)
		nvs_pool_ends(e);
	else if (e->pooled)
		nvs_pool_uncount(&nvs_gpus[e->gpu], e->owner, e->bytes);
	else if (e->gpu != NVS_NO_GPU)
		nvs_account_uncount(&nvs_gpus[e->gpu], e->bytes);
	nvs_entry_remove(&nvs_account, e);
	if (kind == NVS_MEMORY_HANDLE)
		physical_refer(n, 0, p ? p->owner / HANDLE_REF * HANDLE_REF : 0);
	else if (kind == NVS_MEMORY_MAPPING)
		physical_refer(n, 0, 1);
}

/* The driver has given out a key again: its free went past the shim. */
static void supersede(enum nvs_memory_kind kind, uint64_t key)
{
	struct nvs_entry *e = nvs_account_find(kind, key);

	if (e)
		strike(e);
}

/* ---- allocations ---- */

/* Cached memory is released before an allocation is refused. */
static bool reserve(struct nvs_gpu *gpu, uint64_t bytes)
{
	nvs_memory_pools_ask_for(gpu, NVS_POOLS_SHRANK);
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
	nvs_memory_pools_ask_for(gpu, NVS_POOLS_GREW);
	if (nvs_unlikely(!nvs_budget_take(gpu->budget, bytes)) && !reserve(gpu, bytes))
		return false;
	c->gpu = gpu;
	return true;
}

/*
 * Where there is room, all bytes are claimed, and those that the pool counts with already go back
 * later. Elsewhere the bytes that the pool will count with in addition are, until that is enough.
 */
bool nvs_claim_in_pool(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t pool, uint64_t bytes)
{
	uint64_t have = 0, grows = 0;
	struct nvs_claim more;
	bool known = gpu && pool && bytes <= NVS_MAX_BYTES;

	if (known)
		nvs_memory_pools_ask_for(gpu, NVS_POOLS_GREW);
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
	nvs_account_settle(c->gpu->bit);
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
	nvs_account_settle(c->gpu->bit);
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
		gpus = mask_of(e);
		strike(e);
	} else if (!e && kind == NVS_MEMORY_POINTER && atomic_load(&nvs_memory_pools_keep)) {
		nvs_memory_pools_changed(NVS_POOLS_SHRANK);
	}
	nvs_account_settle(gpus);
}

/* Whether the entry belongs to a context and is not newer than a stamp. */
static bool owned(const struct nvs_entry *e, uint64_t before)
{
	return (e->kind == NVS_MEMORY_POINTER || e->kind == NVS_MEMORY_ARRAY) &&
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

/* A handle value stands for a new memory. False: the system has no memory. Locked. */
static bool handle_new(uint64_t handle, uint64_t bytes, struct nvs_gpu *gpu)
{
	struct nvs_entry new = { .kind = NVS_MEMORY_HANDLE, .key = ++physical_last, .bytes = bytes, .owner = HANDLE_REF,
				 .gpu = gpu ? gpu->number : NVS_NO_GPU }, *p;

	supersede(NVS_MEMORY_HANDLE, handle);
	p = nvs_entry_add(&physical, &new);
	if (p && nvs_account_insert(NVS_MEMORY_HANDLE, handle, bytes, new.key, NULL))
		return true;
	if (p)
		nvs_entry_remove(&physical, p);
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
	nvs_account_settle(c->gpu ? c->gpu->bit : 0);
}

void nvs_memory_handle_imported(uint64_t handle)
{
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_HANDLE, handle);
	if (e) /* this process exported it: one more reference */
		physical_refer(e->owner, HANDLE_REF, 0);
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
	const struct nvs_entry *m;
	struct nvs_entry *e, *p;
	uint64_t n;

	nvs_account_lock();
	m = mapping_of(address);
	n = m ? m->owner : 0;
	e = nvs_account_find(NVS_MEMORY_HANDLE, handle);
	if (e && n && e->owner != n) {
		strike(e);
		e = NULL;
	}
	p = physical_of(n);
	if (p && (e || nvs_account_insert(NVS_MEMORY_HANDLE, handle, p->bytes, n, NULL)))
		p->owner += HANDLE_REF;
	nvs_account_unlock();
}

void nvs_memory_handle_released(uint64_t handle, uint64_t before)
{
	unsigned gpus = 0;
	struct nvs_entry *e, *p;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_HANDLE, handle);
	if (e && e->stamp <= before) {
		p = physical_of(e->owner);
		gpus = mask_of(p);
		if (p && p->owner >= 2 * HANDLE_REF)
			p->owner -= HANDLE_REF;
		else
			strike(e);
	}
	nvs_account_settle(gpus);
}

uint32_t nvs_memory_hold(uint64_t handle)
{
	struct nvs_entry *e;
	uint32_t n;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_HANDLE, handle);
	n = e ? (uint32_t)e->owner : 0;
	physical_refer(n, 1, 0);
	nvs_account_unlock();
	return n;
}

void nvs_memory_unhold(uint32_t n)
{
	unsigned gpus;

	nvs_account_lock();
	gpus = mask_of(physical_of(n));
	physical_refer(n, 0, 1);
	nvs_account_settle(gpus);
}

void nvs_memory_mapped(uint32_t n, uint64_t address, uint64_t bytes)
{
	nvs_account_lock();
	supersede(NVS_MEMORY_MAPPING, address);
	if (!nvs_account_insert(NVS_MEMORY_MAPPING, address, bytes, n, NULL))
		physical_refer(n, 0, 1);
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
		gpus |= mask_of(physical_of(e->owner));
		strike(e);
	}
	for (size_t i = 0; at < end && i < nvs_account.size; i++)
		while (nvs_account.at[i].kind == NVS_MEMORY_MAPPING && nvs_account.at[i].stamp <= before &&
		       nvs_account.at[i].key - address < bytes) {
			gpus |= mask_of(physical_of(nvs_account.at[i].owner));
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
	nvs_entries_reset(&physical);
	nvs_memory_pools_fork_child();
	nvs_memory_graphs_fork_child();
	nvs_reserve_fork_child();
}
