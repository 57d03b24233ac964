// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "wire.h"

/* Open addressing; grows by mmap so that the application's allocator is left alone. */
struct entry {
	uint64_t key;
	uint64_t bytes; /* 0: the entry is free, or a tombstone if key is set */
	uint32_t kind;
	uint32_t channel;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *table;
static size_t size, used; /* used counts tombstones */
static uint64_t total[NVS_MAX_CHANNELS], peak_of[NVS_MAX_CHANNELS];

static size_t slot_of(enum nvs_memory_kind kind, uint64_t key)
{
	return (size_t)(((key ^ ((uint64_t)kind << 60)) * 0x9e3779b97f4a7c15ull) >> 20) & (size - 1);
}

static struct entry *find(enum nvs_memory_kind kind, uint64_t key)
{
	for (size_t i = slot_of(kind, key); size && table[i].kind; i = (i + 1) & (size - 1))
		if (table[i].kind == (uint32_t)kind && table[i].key == key && table[i].bytes)
			return &table[i];
	return NULL;
}

static void put(struct entry e)
{
	size_t i = slot_of((enum nvs_memory_kind)e.kind, e.key);

	while (table[i].kind && table[i].bytes)
		i = (i + 1) & (size - 1);
	if (!table[i].kind)
		used++;
	table[i] = e;
}

/* Makes room for one more. Returns 0 if there is no memory for the table. */
static int reserve(void)
{
	struct entry *old = table;
	size_t old_size = size, live = 0, bytes;
	void *p;

	if (size && used * 4 < size * 3)
		return 1;
	for (size_t i = 0; i < old_size; i++)
		live += old[i].bytes != 0;
	bytes = old_size ? old_size : 1024;
	while (live * 2 >= bytes)
		bytes *= 2;
	p = mmap(NULL, bytes * sizeof(*table), PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return size && used + 1 < size;
	table = p;
	size = bytes;
	used = 0;
	for (size_t i = 0; i < old_size; i++)
		if (old[i].bytes)
			put(old[i]);
	if (old)
		munmap(old, old_size * sizeof(*old));
	return 1;
}

void nvs_memory_add(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, int channel)
{
	struct entry *e;

	if (channel < 0 || channel >= NVS_MAX_CHANNELS || !key || !bytes)
		return;
	pthread_mutex_lock(&lock);
	e = find(kind, key);
	if (e) { /* its free went past us */
		total[e->channel] -= e->bytes;
		e->bytes = 0;
	}
	if (reserve()) {
		put((struct entry){ key, bytes, (uint32_t)kind, (uint32_t)channel });
		total[channel] += bytes;
		if (total[channel] > peak_of[channel])
			peak_of[channel] = total[channel];
	}
	pthread_mutex_unlock(&lock);
}

void nvs_memory_remove(enum nvs_memory_kind kind, uint64_t key)
{
	struct entry *e;

	pthread_mutex_lock(&lock);
	e = find(kind, key);
	if (e) {
		total[e->channel] -= e->bytes;
		e->bytes = 0;
	}
	pthread_mutex_unlock(&lock);
}

void nvs_memory_reset(unsigned channel)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < size; i++)
		if (table[i].channel == channel)
			table[i].bytes = 0;
	total[channel] = 0;
	pthread_mutex_unlock(&lock);
}

void nvs_memory_read(unsigned channel, uint64_t *now, uint64_t *peak)
{
	pthread_mutex_lock(&lock);
	*now = total[channel];
	*peak = peak_of[channel];
	pthread_mutex_unlock(&lock);
}

void nvs_memory_fork_child(void)
{
	static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

	lock = fresh;
	if (table) /* may have been caught half changed */
		munmap(table, size * sizeof(*table));
	table = NULL;
	size = used = 0;
	memset(total, 0, sizeof(total));
	memset(peak_of, 0, sizeof(peak_of));
}
