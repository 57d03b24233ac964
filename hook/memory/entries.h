// SPDX-License-Identifier: Apache-2.0
/*
 * entries.h: the table of what is counted, by kind and key. It grows with mmap: the application's
 * allocator is left alone. The caller has a lock.
 */
#ifndef NVSHARE_ENTRIES_H
#define NVSHARE_ENTRIES_H

#include <stddef.h>
#include <stdint.h>

struct nvs_entry {
	uint64_t key;
	uint64_t bytes;      /* POOL: of the GPU, as last seen; 0 unless it keeps freed memory */
	uint64_t owner;      /* POINTER, ARRAY: context; HANDLE, MAPPING: number of the memory; POOL: bytes in use; LAUNCH: see graphs.c */
	uint64_t kind : 8;   /* enum nvs_memory_kind; 0: unused */
	uint64_t gpu : 8;    /* number; NVS_NO_GPU: not counted */
	uint64_t pooled : 1; /* POINTER: the owner is a pool */
	uint64_t stamp : 47;
};

#define NVS_NO_GPU 0xff

/* A zeroed table is empty. `at` has `size` entries; any of them may be unused. */
struct nvs_entries {
	struct nvs_entry *at;
	size_t size, used;
};

/* NULL: there is none. */
struct nvs_entry *nvs_entry_find(const struct nvs_entries *t, unsigned kind, uint64_t key);

/* NULL: the system has no memory. The key may not be there already. Other pointers become invalid. */
struct nvs_entry *nvs_entry_add(struct nvs_entries *t, const struct nvs_entry *e);

/* Another entry may move to its place from behind it: a loop over the table looks at the place again. */
void nvs_entry_remove(struct nvs_entries *t, struct nvs_entry *e);

void nvs_entries_reset(struct nvs_entries *t);

#endif
