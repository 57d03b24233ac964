// SPDX-License-Identifier: Apache-2.0
/* ops.c: the table that core asks about memory, filled. */
#include "ops.h"

#include <fcntl.h>

#include "memory.h"
#include "reserve.h"
#include "swap.h"

static void attached(unsigned channel)
{
	nvs_swap_attached(channel);
	nvs_reserve_attached(channel);
}

static void receive(unsigned channel, const struct nvs_frame *f, int fd)
{
	switch (f->type) {
	case NVS_RESERVED:
		nvs_reserve_answered(channel, f);
		break;
	case NVS_ROOM:
		nvs_swap_room_changed(channel);
		break;
	case NVS_ARENA:
		nvs_swap_arena(channel, &f->u.arena,
			       fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3));
		break;
	}
}

static uint64_t tick(uint64_t now)
{
	nvs_swap_tick(now);
	return nvs_reserve_tick();
}

static void gate_opened(unsigned channel)
{
	nvs_swap_tell_locked(channel, NVS_MOVED_READY);
}

const struct nvs_memory_ops nvs_memory_ops = {
	.start = nvs_swap_init,
	.capable = nvs_swap_capable,
	.usage = nvs_memory_read,
	.attached = attached,
	.lost = nvs_reserve_lost,
	.receive = receive,
	.tick = tick,
	.lease_changed = nvs_swap_lease,
	.gate_opened = gate_opened,
	.before_release = nvs_swap_tell_news,
	.leave = nvs_swap_leave,
	.all_there = nvs_swap_may_pass,
	.moves = nvs_swap_is_on,
	.answers_awaited = nvs_reserve_limited,
	.context_made = nvs_swap_context_made,
	.make_room = nvs_swap_make_way,
	.fill_at_exit = nvs_swap_fill_at_exit,
};
