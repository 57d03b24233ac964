// SPDX-License-Identifier: Apache-2.0
/* ops.c: what core asks about memory. */
#include "ops.h"

#include <fcntl.h>

#include "memory.h"
#include "pool.h"
#include "reserve.h"
#include "swap.h"
#include "swap_impl.h"

/* What memory/ and swap/ know of each GPU. */
static struct {
	struct nvs_budget budget;
	struct nvs_swap swap;
	struct nvs_pools pools;
} parts[NVS_MAX_GPUS];

static void ops_start(void)
{
	NVS_FOR_EACH_GPU(gpu) {
		gpu->budget = &parts[gpu->number].budget;
		gpu->swap = &parts[gpu->number].swap;
		gpu->swap->pools = &parts[gpu->number].pools;
		nvs_budget_init(gpu->budget);
		nvs_swap_reset(gpu);
	}
	nvs_swap_init();
}

static void ops_attached(struct nvs_gpu *gpu)
{
	nvs_swap_attached(gpu);
	nvs_reserve_attached(gpu);
}

static void ops_receive(struct nvs_gpu *gpu, const struct nvs_frame *f, int fd)
{
	switch (f->type) {
	case NVS_RESERVED:
		nvs_reserve_answered(gpu, f);
		break;
	case NVS_ROOM:
		nvs_swap_room_changed(gpu);
		break;
	case NVS_ARENA:
		nvs_swap_arena(gpu, &f->u.arena,
			       fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3));
		break;
	}
}

static uint64_t ops_tick(uint64_t now)
{
	nvs_swap_tick(now);
	nvs_memory_pools_tick(now);
	return nvs_reserve_tick();
}

static void gate_opened(struct nvs_gpu *gpu)
{
	nvs_swap_tell_locked(gpu, NVS_MOVED_READY);
}

const struct nvs_memory_ops nvs_memory_ops = {
	.start = ops_start,
	.capable = nvs_swap_capable,
	.usage = nvs_memory_read,
	.attached = ops_attached,
	.lost = nvs_reserve_lost,
	.receive = ops_receive,
	.tick = ops_tick,
	.lease_changed = nvs_swap_lease,
	.gate_opened = gate_opened,
	.before_release = nvs_swap_tell_news,
	.leave = nvs_swap_leave,
	.all_there = nvs_swap_all_here,
	.moves = nvs_swap_is_on,
	.may_leave = nvs_swap_may_leave,
	.look = nvs_memory_pools_ask,
	.make_room = nvs_swap_release_cached,
	.fill_at_exit = nvs_swap_fill_at_exit,
};
