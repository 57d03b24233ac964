// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "client.h"
#include "memory_abi.h"
#include "ops.h"
#include "reserve.h"
#include "stream.h"

/* No allocation is larger; keeps sums from overflowing. */
#define MAX_BYTES (1ull << 60)

/* Open addressing; grows by mmap so that the application's allocator is left alone. */
struct entry {
	uint64_t key;
	uint64_t bytes;
	uint64_t owner;      /* POINTER, ARRAY: context; HANDLE, MAPPING: number of the memory */
	uint64_t kind : 8;   /* 0: the place is free */
	uint64_t channel : 8; /* NO_CHANNEL: not counted */
	uint64_t stamp : 48;
};

#define NO_CHANNEL 0xff

/* Physical memory of the VMM. */
struct physical {
	uint64_t bytes;
	uint32_t handles, mappings; /* references; both 0: free */
	uint32_t next;              /* in the list of free ones */
	int channel;
};

atomic_bool nvs_memory_graphs;

static struct entry *table;
static size_t size, filled;
static _Atomic uint64_t stamp;
static struct physical *physical; /* number 0 is none */
static uint32_t physical_room, physical_used, physical_free;
static atomic_uint graph_channels; /* bit mask */

static void lock(void)
{
	nvs_in_book = true;
	atomic_signal_fence(memory_order_seq_cst);
	pthread_mutex_lock(&nvs_memory_lock);
}

static void unlock(void)
{
	pthread_mutex_unlock(&nvs_memory_lock);
	atomic_signal_fence(memory_order_seq_cst);
	nvs_in_book = false;
}

/* ---- the table; the lock is held ---- */

static size_t home_of(unsigned kind, uint64_t key)
{
	return (size_t)(((key ^ ((uint64_t)kind << 60)) * 0x9e3779b97f4a7c15ull) >> 20) & (size - 1);
}

static struct entry *find(enum nvs_memory_kind kind, uint64_t key)
{
	if (!size)
		return NULL;
	for (size_t i = home_of(kind, key); table[i].kind; i = (i + 1) & (size - 1))
		if (table[i].kind == kind && table[i].key == key)
			return &table[i];
	return NULL;
}

static void place(const struct entry *e)
{
	size_t i = home_of(e->kind, e->key);

	while (table[i].kind)
		i = (i + 1) & (size - 1);
	table[i] = *e;
	filled++;
}

static bool grow(void)
{
	struct entry *old = table;
	size_t old_size = size, new_size = size ? size * 2 : 1024;
	void *p;

	if (filled * 4 < size * 3)
		return true;
	p = mmap(NULL, new_size * sizeof(*table), PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return size && filled + 1 < size;
	table = p;
	size = new_size;
	filled = 0;
	for (size_t i = 0; i < old_size; i++)
		if (old[i].kind)
			place(&old[i]);
	if (old)
		munmap(old, old_size * sizeof(*old));
	return true;
}

static bool insert(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, uint64_t owner,
		   int channel)
{
	struct entry e = { .key = key, .bytes = bytes, .owner = owner, .kind = kind,
			   .channel = channel < 0 ? NO_CHANNEL : (unsigned)channel };

	if (!grow())
		return false;
	e.stamp = atomic_fetch_add_explicit(&stamp, 1, memory_order_relaxed) + 1;
	place(&e);
	return true;
}

/* Takes an entry out and closes the gap: no tombstones gather. */
static void take_out(struct entry *e)
{
	size_t hole = (size_t)(e - table), i = hole;

	for (;;) {
		size_t home;

		i = (i + 1) & (size - 1);
		if (!table[i].kind)
			break;
		home = home_of(table[i].kind, table[i].key);
		/* Stays if its home lies behind the hole, going round. */
		if (((i - home) & (size - 1)) < ((i - hole) & (size - 1)))
			continue;
		table[hole] = table[i];
		hole = i;
	}
	table[hole].kind = 0;
	filled--;
}

/* ---- sums; the lock is held ---- */

static void count(unsigned channel, uint64_t bytes)
{
	struct nvs_budget *b = &nvs_budgets[channel];

	atomic_store_explicit(&b->used, b->used + bytes, memory_order_relaxed);
}

static void uncount(unsigned channel, uint64_t bytes)
{
	struct nvs_budget *b = &nvs_budgets[channel];

	atomic_store_explicit(&b->used, b->used - bytes, memory_order_relaxed);
}

/* What was claimed exists: only now it is part of the most there ever was. */
static void exists(unsigned channel)
{
	struct nvs_budget *b = &nvs_budgets[channel];
	uint64_t now = b->used - b->asking;

	if (now > b->peak)
		atomic_store_explicit(&b->peak, now, memory_order_relaxed);
}

static void physical_drop(uint32_t n)
{
	struct physical *p = &physical[n];

	if (p->handles || p->mappings)
		return;
	if (p->channel >= 0)
		uncount((unsigned)p->channel, p->bytes);
	p->next = physical_free;
	physical_free = n;
}

/* Strikes an entry out, with what it stands for. */
static void strike(struct entry *e)
{
	uint32_t n = (uint32_t)e->owner;
	unsigned kind = e->kind;

	if (kind != NVS_MEMORY_HANDLE && kind != NVS_MEMORY_MAPPING && e->channel != NO_CHANNEL)
		uncount(e->channel, e->bytes);
	take_out(e);
	if (kind == NVS_MEMORY_HANDLE)
		physical[n].handles = 0;
	else if (kind == NVS_MEMORY_MAPPING && n)
		physical[n].mappings--;
	if ((kind == NVS_MEMORY_HANDLE || kind == NVS_MEMORY_MAPPING) && n)
		physical_drop(n);
}

/* Makes way for a key that the driver just gave out: its free went past us. */
static void supersede(enum nvs_memory_kind kind, uint64_t key)
{
	struct entry *e = find(kind, key);

	if (e)
		strike(e);
}

/* Unlocks, and tells the scheduler what it has to know of these channels. */
static void unlock_and_settle(unsigned channels)
{
	for (unsigned i = 0; channels >> i; i++)
		if ((channels & (1u << i)) && !nvs_reserve_due(&nvs_budgets[i]))
			channels &= ~(1u << i);
	unlock();
	for (unsigned i = 0; nvs_unlikely(channels >> i); i++)
		if (channels & (1u << i))
			nvs_reserve_settle(i);
}

static unsigned mask_of(int channel)
{
	return channel >= 0 && channel < NVS_MAX_CHANNELS ? 1u << channel : 0;
}

/* ---- allocations ---- */

/* What is kept for the next allocations goes before one is refused. */
static bool reserve(unsigned channel, uint64_t bytes)
{
	return nvs_reserve(channel, bytes) ||
	       (nvs_memory_ops.make_room(channel, bytes) && nvs_reserve(channel, bytes)) ||
	       (nvs_memory_ops.make_room(channel, UINT64_MAX) && nvs_reserve(channel, bytes));
}

bool nvs_claim(struct nvs_claim *c, int channel, uint64_t bytes)
{
	struct nvs_budget *b;
	bool fits;

	c->channel = -1;
	c->bytes = bytes;
	if (channel < 0 || channel >= NVS_MAX_CHANNELS)
		return true;
	b = &nvs_budgets[channel];
	if (nvs_unlikely(bytes > MAX_BYTES))
		return !b->limit; /* the driver will know how to refuse it */
	lock();
	fits = b->used <= b->reserved && bytes <= b->reserved - b->used;
	if (fits)
		count((unsigned)channel, bytes);
	unlock();
	if (nvs_unlikely(!fits) && !reserve((unsigned)channel, bytes))
		return false;
	c->channel = channel;
	return true;
}

bool nvs_claim_more(struct nvs_claim *c, uint64_t bytes)
{
	struct nvs_claim more;

	if (c->channel < 0)
		return true;
	if (!nvs_claim(&more, c->channel, bytes - c->bytes))
		return false;
	if (more.channel >= 0)
		c->bytes = bytes;
	return true;
}

void nvs_claim_exists(const struct nvs_claim *c)
{
	lock();
	exists((unsigned)c->channel);
	unlock();
}

void nvs_claim_drop(const struct nvs_claim *c)
{
	if (c->channel < 0)
		return;
	lock();
	uncount((unsigned)c->channel, c->bytes);
	unlock_and_settle(mask_of(c->channel));
}

/* The claim turns out to be for so many bytes. The lock is held. */
static void correct(const struct nvs_claim *c, uint64_t bytes)
{
	if (bytes > c->bytes)
		count((unsigned)c->channel, bytes - c->bytes);
	else
		uncount((unsigned)c->channel, c->bytes - bytes);
}

void nvs_claim_keep(const struct nvs_claim *c, enum nvs_memory_kind kind, uint64_t key,
		    uint64_t bytes, const void *owner)
{
	if (c->channel < 0)
		return;
	lock();
	correct(c, bytes);
	supersede(kind, key);
	if (key && insert(kind, key, bytes, (uintptr_t)owner, c->channel))
		exists((unsigned)c->channel);
	else
		uncount((unsigned)c->channel, bytes); /* could not be struck out later */
	unlock_and_settle(mask_of(c->channel));
}

uint64_t nvs_memory_stamp(void)
{
	return atomic_load_explicit(&stamp, memory_order_acquire);
}

void nvs_memory_remove(enum nvs_memory_kind kind, uint64_t key, uint64_t before)
{
	unsigned channels = 0;
	struct entry *e;

	lock();
	e = find(kind, key);
	if (e && e->stamp <= before) {
		if (e->channel != NO_CHANNEL)
			channels = 1u << e->channel;
		strike(e);
	}
	unlock_and_settle(channels);
}

/* Whether the entry belongs to a context and was there at a stamp. */
static bool owned(const struct entry *e, uint64_t before)
{
	return (e->kind == NVS_MEMORY_POINTER || e->kind == NVS_MEMORY_ARRAY) && e->owner &&
	       e->stamp <= before;
}

void nvs_memory_context_gone(const void *ctx, uint64_t before)
{
	unsigned channels = 0;

	lock();
	/* What closes a gap comes from behind it, or was looked at before. */
	for (size_t i = 0; i < size; i++)
		while (owned(&table[i], before) && table[i].owner == (uintptr_t)ctx) {
			channels |= 1u << table[i].channel;
			strike(&table[i]);
		}
	unlock_and_settle(channels);
}

void nvs_memory_primary_gone(unsigned channel, uint64_t before)
{
	uint64_t asked = 0;
	bool own = false; /* whether that context is not part of the primary one */

	lock();
	for (size_t i = 0; i < size; i++)
		while (owned(&table[i], before) && table[i].channel == channel) {
			if (table[i].owner != asked) {
				asked = table[i].owner;
				own = nvs_context_own((void *)(uintptr_t)asked);
			}
			if (own)
				break;
			strike(&table[i]);
		}
	unlock_and_settle(1u << channel);
}

/* ---- pools ---- */

void nvs_memory_pool(uint64_t pool, int channel)
{
	struct entry *e;

	lock();
	e = find(NVS_MEMORY_POOL, pool);
	if (!e || e->channel != (channel < 0 ? NO_CHANNEL : (unsigned)channel)) {
		supersede(NVS_MEMORY_POOL, pool);
		if (pool)
			insert(NVS_MEMORY_POOL, pool, 0, 0, channel);
	}
	unlock();
}

void nvs_memory_pool_share(uint64_t pool)
{
	lock();
	if (pool && !find(NVS_MEMORY_SHARED, pool))
		insert(NVS_MEMORY_SHARED, pool, 0, 0, -1);
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

bool nvs_memory_pool_find(uint64_t pool, int *channel)
{
	struct entry *e;

	lock();
	e = find(NVS_MEMORY_POOL, pool);
	if (e)
		*channel = e->channel == NO_CHANNEL ? -1 : (int)e->channel;
	unlock();
	return e != NULL;
}

/* ---- VMM ---- */

/* Number of a fresh one with one handle, 0 if there is no memory. Locked. */
static uint32_t physical_new(uint64_t bytes, int channel)
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
	physical[n] = (struct physical){ .bytes = bytes, .handles = 1, .channel = channel };
	return n;
}

/* Gives a handle value a fresh memory. False: neither is known. Locked. */
static bool handle_new(uint64_t handle, uint64_t bytes, int channel)
{
	uint32_t n;

	supersede(NVS_MEMORY_HANDLE, handle);
	n = physical_new(bytes, channel);
	if (!n)
		return false;
	if (insert(NVS_MEMORY_HANDLE, handle, bytes, n, channel))
		return true;
	physical[n].channel = -1;
	physical[n].handles = 0;
	physical_drop(n);
	return false;
}

void nvs_claim_keep_handle(const struct nvs_claim *c, uint64_t handle)
{
	bool known;

	lock();
	known = handle_new(handle, c->bytes, c->channel);
	if (c->channel >= 0 && known)
		exists((unsigned)c->channel);
	else if (c->channel >= 0)
		uncount((unsigned)c->channel, c->bytes);
	unlock_and_settle(mask_of(c->channel));
}

void nvs_memory_handle_imported(uint64_t handle)
{
	struct entry *e;

	lock();
	e = find(NVS_MEMORY_HANDLE, handle);
	if (e) /* our own export came back: one more reference */
		physical[e->owner].handles++;
	else
		handle_new(handle, 0, -1);
	unlock();
}

/* The mapping that an address lies in. Locked. */
static struct entry *mapping_of(uint64_t address)
{
	struct entry *e = find(NVS_MEMORY_MAPPING, address);

	for (size_t i = 0; !e && i < size; i++)
		if (table[i].kind == NVS_MEMORY_MAPPING && address - table[i].key < table[i].bytes)
			e = &table[i];
	return e;
}

void nvs_memory_handle_retained(uint64_t handle, uint64_t address)
{
	struct entry *m;
	uint32_t n;

	lock();
	m = mapping_of(address);
	n = m ? (uint32_t)m->owner : 0;
	if (n) {
		struct entry *e = find(NVS_MEMORY_HANDLE, handle);

		if (e && e->owner != n) {
			strike(e);
			e = NULL;
		}
		if (e || insert(NVS_MEMORY_HANDLE, handle, physical[n].bytes, n, physical[n].channel))
			physical[n].handles++;
	}
	unlock();
}

void nvs_memory_handle_released(uint64_t handle, uint64_t before)
{
	unsigned channels = 0;
	struct entry *e;

	lock();
	e = find(NVS_MEMORY_HANDLE, handle);
	if (e && e->stamp <= before) {
		struct physical *p = &physical[e->owner];

		channels = mask_of(p->channel);
		if (p->handles > 1)
			p->handles--;
		else
			strike(e);
	}
	unlock_and_settle(channels);
}

uint32_t nvs_memory_hold(uint64_t handle)
{
	struct entry *e;
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
	unsigned channels;

	if (!n)
		return;
	lock();
	channels = mask_of(physical[n].channel);
	physical[n].mappings--;
	physical_drop(n);
	unlock_and_settle(channels);
}

void nvs_memory_mapped(uint32_t n, uint64_t address, uint64_t bytes)
{
	lock();
	supersede(NVS_MEMORY_MAPPING, address);
	if (!insert(NVS_MEMORY_MAPPING, address, bytes, n, -1) && n) {
		physical[n].mappings--;
		physical_drop(n);
	}
	unlock();
}

void nvs_memory_unmapped(uint64_t address, uint64_t bytes, uint64_t before)
{
	uint64_t at = address, end = address + bytes;
	unsigned channels = 0;

	lock();
	/* One mapping after the other, as a range is laid out as a rule. */
	while (at < end) {
		struct entry *e = find(NVS_MEMORY_MAPPING, at);

		if (!e || !e->bytes)
			break;
		at += e->bytes;
		if (e->stamp > before)
			continue;
		if (e->owner)
			channels |= mask_of(physical[e->owner].channel);
		strike(e);
	}
	for (size_t i = 0; at < end && i < size; i++)
		while (table[i].kind == NVS_MEMORY_MAPPING && table[i].stamp <= before &&
		       table[i].key - address < bytes) {
			if (table[i].owner)
				channels |= mask_of(physical[table[i].owner].channel);
			strike(&table[i]);
		}
	unlock_and_settle(channels);
}

/* ---- graphs ---- */

void nvs_memory_graph_used(int channel)
{
	atomic_fetch_or(&graph_channels, mask_of(channel));
	atomic_store(&nvs_memory_graphs, true);
}

void nvs_memory_graph_look(void)
{
	unsigned channels = atomic_load(&graph_channels);
	int saved = errno;

	if (!nvs_counting())
		return;
	for (unsigned i = 0; channels >> i; i++) {
		struct nvs_budget *b = &nvs_budgets[i];
		uint64_t bytes = 0;

		if (!(channels & (1u << i)) || !nvs_driver.graph_memory ||
		    nvs_driver.graph_memory(nvs_client_device(i), CU_GRAPH_MEM_RESERVED, &bytes) !=
			    CUDA_SUCCESS || bytes > MAX_BYTES)
			continue;
		lock();
		if (bytes > b->graphs)
			count(i, bytes - b->graphs);
		else
			uncount(i, b->graphs - bytes);
		exists(i);
		b->graphs = bytes;
		unlock_and_settle(1u << i);
	}
	errno = saved;
}

/* ---- */

void nvs_memory_read(unsigned channel, uint64_t *now, uint64_t *peak)
{
	*now = atomic_load_explicit(&nvs_budgets[channel].used, memory_order_relaxed);
	*peak = atomic_load_explicit(&nvs_budgets[channel].peak, memory_order_relaxed);
}

void nvs_memory_fork_child(void)
{
	static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

	nvs_memory_lock = fresh;
	nvs_in_book = false; /* if a signal handler forked there */
	if (table) /* may have been caught half changed */
		munmap(table, size * sizeof(*table));
	if (physical)
		munmap(physical, physical_room * sizeof(*physical));
	table = NULL;
	physical = NULL;
	size = filled = 0;
	physical_room = physical_used = physical_free = 0;
	atomic_store(&nvs_memory_graphs, false);
	atomic_store(&graph_channels, 0);
	nvs_reserve_fork_child();
}
