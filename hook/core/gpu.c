// SPDX-License-Identifier: Apache-2.0
#include "gpu.h"

#include <string.h>

struct nvs_gpu nvs_gpus[NVS_MAX_GPUS];
unsigned nvs_gpu_count;
struct nvs_gate nvs_gate;
atomic_bool nvs_exiting;
uint64_t nvs_exiting_ns;

const struct nvs_slot nvs_free_slot = { .word = 1 };
const struct nvs_slot nvs_closed_slot = { .word = NVS_WORD_CLOSED };

void nvs_gate_stop(void)
{
	atomic_store(&nvs_gate.active, false);
	atomic_fetch_add(&nvs_gate.generation, 1);
}

/* An empty record, with a gate of its own, that no thread looks at. */
static void reset(struct nvs_gpu *gpu, unsigned number, const struct nvs_slot *slot, uint32_t epoch)
{
	memset(gpu, 0, sizeof(*gpu));
	gpu->number = number;
	gpu->bit = 1u << number;
	gpu->drain_lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_DRAIN);
	gpu->move_lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_MOVE);
	gpu->query_lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_QUERY);
	atomic_store(&gpu->epoch, epoch);
	atomic_store(&gpu->slot, slot);
}

void nvs_gpus_start(const struct nvs_device *devices, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		reset(&nvs_gpus[i], i, &nvs_closed_slot, NVS_WORD_NONE);
		nvs_gpus[i].device = devices[i];
	}
	nvs_gpu_count = count;
}

void nvs_gpus_fork_child(void)
{
	/* The one thread may have been caught at a gate, and comes back to it. */
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_budget *budget = gpu->budget;
		struct nvs_swap *swap = gpu->swap;

		reset(gpu, gpu->number, &nvs_free_slot, nvs_free_slot.word);
		gpu->budget = budget;
		gpu->swap = swap;
	}
	nvs_gpu_count = 0;
	atomic_store(&nvs_exiting, false);
}

struct nvs_gpu *nvs_gpu_of_device(int dev)
{
	NVS_FOR_EACH_GPU(gpu)
		if (gpu->device.dev == dev)
			return gpu;
	return NULL;
}

struct nvs_gpu *nvs_gpu_of_uuid(const uint8_t *uuid)
{
	NVS_FOR_EACH_GPU(gpu)
		if (memcmp(gpu->device.uuid, uuid, NVS_UUID_SIZE) == 0)
			return gpu;
	return NULL;
}
