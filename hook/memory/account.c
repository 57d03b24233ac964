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
	for (unsigned left = gpus; left; left &= left - 1) {
		struct nvs_gpu *gpu = &nvs_gpus[__builtin_ctz(left)];

		if (!nvs_reserve_due(gpu->budget))
			gpus &= ~gpu->bit;
	}
	nvs_account_unlock();
	for (; nvs_unlikely(gpus); gpus &= gpus - 1)
		nvs_reserve_settle(&nvs_gpus[__builtin_ctz(gpus)]);
}

struct nvs_entry *nvs_account_find(enum nvs_memory_kind kind, uint64_t key)
{
	return nvs_entry_find(&nvs_account, kind, key);
}

struct nvs_entry *nvs_account_insert(enum nvs_memory_kind kind, uint64_t key, uint64_t bytes, uint64_t owner, struct nvs_gpu *gpu)
{
	struct nvs_entry e = { .key = key, .bytes = bytes, .owner = owner, .kind = kind,
			       .gpu = gpu ? gpu->number : NVS_NO_GPU };

	e.stamp = atomic_load_explicit(&nvs_account_stamp, memory_order_relaxed) + 1;
	atomic_store_explicit(&nvs_account_stamp, e.stamp, memory_order_relaxed); /* the lock is held */
	return nvs_entry_add(&nvs_account, &e);
}

void nvs_account_count(struct nvs_gpu *gpu, uint64_t bytes)
{
	atomic_fetch_add_explicit(&gpu->budget->used, bytes, memory_order_relaxed);
}

void nvs_account_uncount(struct nvs_gpu *gpu, uint64_t bytes)
{
	atomic_fetch_sub_explicit(&gpu->budget->used, bytes, memory_order_relaxed);
}

void nvs_account_exists(struct nvs_gpu *gpu)
{
	struct nvs_budget *b = gpu->budget;
	uint64_t now = b->used - b->asking;

	if (now > b->peak)
		atomic_store_explicit(&b->peak, now, memory_order_relaxed);
}
