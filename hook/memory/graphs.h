// SPDX-License-Identifier: Apache-2.0
/* graphs.h: executable graphs in the account: the GPUs that each works on, and the memory that graphs own. */
#ifndef NVSHARE_GRAPHS_H
#define NVSHARE_GRAPHS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "account.h"

/* An executable graph works on these GPUs, a bit each. */
void nvs_memory_graph_works_on(uint64_t exec, unsigned gpus);

extern atomic_bool nvs_memory_graph_gpus; /* known of any graph */
unsigned nvs_memory_graph_find(uint64_t exec);

/* 0: not known, or the process uses one GPU. */
static inline unsigned nvs_memory_gpus_of_graph(uint64_t exec)
{
	return __builtin_expect(atomic_load_explicit(&nvs_memory_graph_gpus, memory_order_relaxed), 0)
		? nvs_memory_graph_find(exec) : 0;
}

/* The driver has destroyed it. stamp: from before, see memory.h. */
void nvs_memory_graph_gone(uint64_t exec, uint64_t stamp);

/* The process has put an allocation into a graph on this GPU. */
void nvs_memory_graph_used(struct nvs_gpu *gpu);

extern atomic_bool nvs_memory_graphs; /* it has, on any GPU */
void nvs_memory_graphs_recount(void);

/* Called after calls that may change the memory of graphs. */
static inline void nvs_memory_graph_ran(void)
{
	if (__builtin_expect(atomic_load_explicit(&nvs_memory_graphs, memory_order_relaxed), 0))
		nvs_memory_graphs_recount();
}

/*
 * A graph is about to be launched. Returns whether it takes memory by that
 * (nvs_memory_graph_to_take). *now: a limit is near: the driver is to be asked right after, not when
 * the host waits.
 */
bool nvs_memory_graph_runs(uint64_t exec, bool *now);
extern atomic_bool nvs_memory_graphs_ran; /* the host has not waited since */

/* The same, in place of what was claimed for such a call, which is over. */
void nvs_memory_graph_settle(const struct nvs_claim *claims, unsigned count);

/*
 * What the nodes of a graph allocate on a GPU: at most at a time in their order, and what is left
 * when all have run. The graph takes that at its first launch, or more if they can't share memory so
 * well.
 */
struct nvs_graph_bytes {
	uint64_t most, left;
};

/* Bytes that a graph would take of a GPU, which graphs do not have there already. */
uint64_t nvs_memory_graph_takes(struct nvs_gpu *gpu, struct nvs_graph_bytes bytes);

/* An executable graph will take them at its first launch. Zero: it has been launched. */
void nvs_memory_graph_will_take(uint64_t exec, struct nvs_gpu *gpu, struct nvs_graph_bytes bytes);
struct nvs_graph_bytes nvs_memory_graph_to_take(uint64_t exec, struct nvs_gpu *gpu);

void nvs_memory_graphs_fork_child(void);

#endif
