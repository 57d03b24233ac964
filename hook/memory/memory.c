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

	if (kind != NVS_MEMORY_HANDLE && kind != NVS_MEMORY_MAPPING && e->gpu != NVS_NO_GPU)
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

/* Cached memory is released before an allocation is refused. */
static bool reserve(struct nvs_gpu *gpu, uint64_t bytes)
{
	return nvs_reserve(gpu, bytes) ||
	       (nvs_memory_ops.make_room(gpu, bytes) && nvs_reserve(gpu, bytes)) ||
	       (nvs_memory_ops.make_room(gpu, UINT64_MAX) && nvs_reserve(gpu, bytes));
}

bool nvs_claim(struct nvs_claim *c, struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b;
	bool fits;

	c->gpu = NULL;
	c->bytes = bytes;
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
	if (!c->gpu)
		return;
	lock();
	correct(c, bytes);
	supersede(kind, key);
	if (key && insert(kind, key, bytes, (uintptr_t)owner, c->gpu))
		exists(c->gpu);
	else
		uncount(c->gpu, bytes); /* could not be removed later */
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
	       e->stamp <= before;
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
	atomic_store(&nvs_memory_graphs, false);
	atomic_store(&graph_gpus, 0);
	nvs_reserve_fork_child();
}
