// SPDX-License-Identifier: Apache-2.0
/* query.h: what a process may ask that does not use a GPU, or not yet. */
#ifndef NVSHARE_QUERY_H
#define NVSHARE_QUERY_H

#include <stdbool.h>
#include <stdint.h>

/* What a container's processes have of a GPU. */
struct nvs_limits {
	uint64_t limit; /* bytes, 0: none */
	uint64_t used;  /* by all its processes, this one's unused reservation left out */
};

/*
 * Asks the scheduler about a GPU over a connection of its own; the answer holds for 100 ms. Waits 5 s
 * at most for a scheduler that lives, and 200 ms once it has not answered. No thread, descriptor or
 * mapping is left. False: no scheduler knows the GPU.
 */
bool nvs_query_limits(const uint8_t *uuid, struct nvs_limits *out);

/*
 * Asks on which GPU this process's container is; uuid: one that the scheduler knows. Waits 5 s at
 * most. False: not known, or the container has several.
 */
bool nvs_query_place(const uint8_t *uuid, uint8_t *place);

void nvs_query_fork_child(void);

#endif
