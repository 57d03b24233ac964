// SPDX-License-Identifier: Apache-2.0
#include "entries.h"

#include <stdbool.h>
#include <sys/mman.h>

#define FIRST_SIZE 1024u

static size_t home_of(const struct nvs_entries *t, unsigned kind, uint64_t key)
{
	return (size_t)(((key ^ ((uint64_t)kind << 60)) * 0x9e3779b97f4a7c15ull) >> 20) & (t->size - 1);
}

struct nvs_entry *nvs_entry_find(const struct nvs_entries *t, unsigned kind, uint64_t key)
{
	if (!t->size)
		return NULL;
	for (size_t i = home_of(t, kind, key); t->at[i].kind; i = (i + 1) & (t->size - 1))
		if (t->at[i].kind == kind && t->at[i].key == key)
			return &t->at[i];
	return NULL;
}

static struct nvs_entry *entry_place(struct nvs_entries *t, const struct nvs_entry *e)
{
	size_t i = home_of(t, e->kind, e->key);

	while (t->at[i].kind)
		i = (i + 1) & (t->size - 1);
	t->at[i] = *e;
	t->used++;
	return &t->at[i];
}

static bool grow(struct nvs_entries *t)
{
	struct nvs_entries larger = { .size = t->size ? t->size * 2 : FIRST_SIZE };
	void *p;

	if (t->used * 4 < t->size * 3)
		return true;
	p = mmap(NULL, larger.size * sizeof(*t->at), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return t->size && t->used + 1 < t->size;
	larger.at = p;
	for (size_t i = 0; i < t->size; i++)
		if (t->at[i].kind)
			entry_place(&larger, &t->at[i]);
	nvs_entries_reset(t);
	*t = larger;
	return true;
}

struct nvs_entry *nvs_entry_add(struct nvs_entries *t, const struct nvs_entry *e)
{
	return grow(t) ? entry_place(t, e) : NULL;
}

void nvs_entry_remove(struct nvs_entries *t, struct nvs_entry *e)
{
	size_t hole = (size_t)(e - t->at), i = hole, mask = t->size - 1;

	/* The gap is closed: an entry moves into it unless its home lies behind it, going round. */
	while (t->at[i = (i + 1) & mask].kind) {
		size_t home = home_of(t, t->at[i].kind, t->at[i].key);

		if (((i - home) & mask) < ((i - hole) & mask))
			continue;
		t->at[hole] = t->at[i];
		hole = i;
	}
	t->at[hole].kind = 0;
	t->used--;
}

void nvs_entries_reset(struct nvs_entries *t)
{
	if (t->at)
		munmap(t->at, t->size * sizeof(*t->at));
	*t = (struct nvs_entries){ NULL, 0, 0 };
}
