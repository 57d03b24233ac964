// SPDX-License-Identifier: Apache-2.0
/* memory.h: device memory that the process allocated, per channel. Counting only. */
#ifndef NVSHARE_MEMORY_H
#define NVSHARE_MEMORY_H

#include <stdint.h>

/* Address spaces of keys. */
enum nvs_memory_kind { NVS_MEMORY_POINTER = 1, NVS_MEMORY_HANDLE = 2 };

/* An allocation succeeded. channel < 0: not counted. */
void nvs_memory_add(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, int channel);

/* It was freed. Unknown keys are ignored. */
void nvs_memory_remove(enum nvs_memory_kind kind, uint64_t key);

/* Everything on a channel went with its contexts. */
void nvs_memory_reset(unsigned channel);

/* Bytes allocated now, and the most there ever were. */
void nvs_memory_read(unsigned channel, uint64_t *now, uint64_t *peak);

void nvs_memory_fork_child(void);

#endif
