// SPDX-License-Identifier: Apache-2.0
#include "graphs.h"

#include <errno.h>

#include "memory_driver.h"

atomic_bool nvs_memory_graphs, nvs_memory_graph_gpus, nvs_memory_graphs_ran;

static atomic_uint with_memory; /* GPUs that graphs have memory on, a bit each */

/* ---- what is known of executable graphs ---- */

/* The entry replaces an older one: the driver has given out the key again. The lock is held. */
static bool graph_enter(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, uint64_t owner)
{
	struct nvs_entry *e = nvs_account_find(kind, key);

	if (e)
		nvs_entry_remove(&nvs_account, e);
	return nvs_account_insert(kind, key, bytes, owner, NULL);
}

void nvs_memory_graph_works_on(uint64_t exec, unsigned gpus)
{
	nvs_account_lock();
	if (graph_enter(NVS_MEMORY_GRAPH, exec, 0, gpus))
		atomic_store(&nvs_memory_graph_gpus, true);
	nvs_account_unlock();
}

unsigned nvs_memory_graph_find(uint64_t exec)
{
	struct nvs_entry *e;
	unsigned gpus;

	if (!nvs_counting())
		return 0;
	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_GRAPH, exec);
	gpus = e ? (unsigned)e->owner : 0;
	nvs_account_unlock();
	return gpus;
}

/* Executable graphs are further apart than there are GPUs. */
static uint64_t key_of(uint64_t exec, const struct nvs_gpu *gpu)
{
	return exec + gpu->number;
}

void nvs_memory_graph_will_take(uint64_t exec, struct nvs_gpu *gpu, struct nvs_graph_bytes bytes)
{
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_LAUNCH, key_of(exec, gpu));
	if (bytes.most)
		graph_enter(NVS_MEMORY_LAUNCH, key_of(exec, gpu), bytes.most, bytes.left);
	else if (e)
		nvs_entry_remove(&nvs_account, e);
	nvs_account_unlock();
}

struct nvs_graph_bytes nvs_memory_graph_to_take(uint64_t exec, struct nvs_gpu *gpu)
{
	struct nvs_graph_bytes bytes = { 0, 0 };
	struct nvs_entry *e;

	nvs_account_lock();
	e = nvs_account_find(NVS_MEMORY_LAUNCH, key_of(exec, gpu));
	if (e)
		bytes = (struct nvs_graph_bytes){ e->bytes, e->owner };
	nvs_account_unlock();
	return bytes;
}

bool nvs_memory_graph_runs(uint64_t exec, bool *now)
{
	unsigned gpus = atomic_load_explicit(&with_memory, memory_order_relaxed);
	bool takes = false;

	*now = false;
	nvs_account_lock();
	for (; gpus; gpus &= gpus - 1) {
		const struct nvs_gpu *gpu = &nvs_gpus[__builtin_ctz(gpus)];

		takes = takes || nvs_account_find(NVS_MEMORY_LAUNCH, key_of(exec, gpu));
		*now = *now || nvs_budget_is_tight(gpu->budget);
	}
	nvs_account_unlock();
	if (!*now && !atomic_load_explicit(&nvs_memory_graphs_ran, memory_order_relaxed))
		atomic_store(&nvs_memory_graphs_ran, true);
	return takes;
}

static void remove_older(enum nvs_memory_kind kind, uint64_t key, uint64_t stamp)
{
	struct nvs_entry *e = nvs_account_find(kind, key);

	if (e && e->stamp <= stamp)
		nvs_entry_remove(&nvs_account, e);
}

void nvs_memory_graph_gone(uint64_t exec, uint64_t stamp)
{
	nvs_account_lock();
	remove_older(NVS_MEMORY_GRAPH, exec, stamp);
	NVS_FOR_EACH_GPU(gpu)
		remove_older(NVS_MEMORY_LAUNCH, key_of(exec, gpu), stamp);
	nvs_account_unlock();
}

/* ---- what graphs have ---- */

void nvs_memory_graph_used(struct nvs_gpu *gpu)
{
	atomic_fetch_or(&with_memory, gpu->bit);
	atomic_store(&nvs_memory_graphs, true);
}

/* False: the driver does not tell. */
static bool graph_ask(const struct nvs_gpu *gpu, int what, uint64_t *bytes)
{
	return nvs_memory_driver.graph_memory(gpu->device.dev, what, bytes) == CUDA_SUCCESS && *bytes <= NVS_MAX_BYTES;
}

/* Bytes of these claims on a GPU. */
static uint64_t claimed_on(const struct nvs_gpu *gpu, const struct nvs_claim *claims, unsigned count)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < count; i++)
		bytes += claims[i].gpu == gpu ? claims[i].bytes : 0;
	return bytes;
}

void nvs_memory_graph_settle(const struct nvs_claim *claims, unsigned count)
{
	unsigned gpus = atomic_load(&with_memory);
	int saved = errno;

	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_budget *b = gpu->budget;
		uint64_t claimed = claimed_on(gpu, claims, count), bytes = 0;
		bool told = gpus & gpu->bit && nvs_counting() && graph_ask(gpu, CU_GRAPH_MEM_RESERVED, &bytes);

		if (!told && !claimed)
			continue;
		nvs_account_lock();
		bytes = told ? bytes : b->graphs;
		nvs_account_uncount(gpu, claimed + b->graphs);
		nvs_account_count(gpu, bytes);
		nvs_account_exists(gpu);
		b->graphs = bytes;
		nvs_account_settle(gpu->bit);
	}
	errno = saved;
}

void nvs_memory_graphs_recount(void)
{
	atomic_store(&nvs_memory_graphs_ran, false);
	nvs_memory_graph_settle(NULL, 0);
}

/* All that graphs have may serve while the graph runs; what it leaves behind is in nobody else's use. */
uint64_t nvs_memory_graph_takes(struct nvs_gpu *gpu, struct nvs_graph_bytes bytes)
{
	uint64_t reserved = 0, used = 0, run, stay;

	if (!graph_ask(gpu, CU_GRAPH_MEM_RESERVED, &reserved) || !graph_ask(gpu, CU_GRAPH_MEM_USED, &used))
		reserved = used = 0;
	run = nvs_minus(bytes.most, reserved);
	stay = nvs_minus(bytes.left, nvs_minus(reserved, used));
	return run > stay ? run : stay;
}

void nvs_memory_graphs_fork_child(void)
{
	atomic_store(&nvs_memory_graph_gpus, false);
	atomic_store(&nvs_memory_graphs, false);
	atomic_store(&nvs_memory_graphs_ran, false);
	atomic_store(&with_memory, 0);
}
