// SPDX-License-Identifier: Apache-2.0
#include "account.h"

#include "compiler.h"

struct nvs_entries nvs_account;
_Atomic uint64_t nvs_account_stamp;

void nvs_account_lock(void)
{
	nvs_memory_locked = true;
	atomic_signal_fence(memory_order_seq_cst);
	nvs_lock(&nvs_memory_lock);
}

void nvs_account_unlock(void)
{
	nvs_unlock(&nvs_memory_lock);
	atomic_signal_fence(memory_order_seq_cst);
	nvs_memory_locked = false;
}

void nvs_account_settle(unsigned gpus)
{
	NVS_FOR_EACH_GPU(gpu)
		if ((gpus & gpu->bit) && !nvs_reserve_due(gpu->budget))
			gpus &= ~gpu->bit;
	nvs_account_unlock();
	if (nvs_likely(!gpus))
		return;
	NVS_FOR_EACH_GPU(gpu)
		if (gpus & gpu->bit)
			nvs_reserve_settle(gpu);
}

struct nvs_entry *nvs_account_find(enum nvs_memory_kind kind, uint64_t key)
{
	return nvs_entry_find(&nvs_account, kind, key);
}

bool nvs_account_insert(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, uint64_t owner, struct nvs_gpu *gpu)
{
	struct nvs_entry e = { .key = key, .bytes = bytes, .owner = owner, .kind = kind,
			       .gpu = gpu ? gpu->number : NVS_NO_GPU };

	e.stamp = atomic_fetch_add_explicit(&nvs_account_stamp, 1, memory_order_relaxed) + 1;
	return nvs_entry_add(&nvs_account, &e);
}

void nvs_account_count(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b = gpu->budget;

	atomic_store_explicit(&b->used, b->used + bytes, memory_order_relaxed);
}

void nvs_account_uncount(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b = gpu->budget;

	atomic_store_explicit(&b->used, b->used - bytes, memory_order_relaxed);
}

void nvs_account_exists(struct nvs_gpu *gpu)
{
	struct nvs_budget *b = gpu->budget;
	uint64_t now = b->used - b->asking;

	if (now > b->peak)
		atomic_store_explicit(&b->peak, now, memory_order_relaxed);
}
