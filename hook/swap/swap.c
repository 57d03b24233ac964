// SPDX-License-Identifier: Apache-2.0
/*
 * swap.c: whether memory of a GPU is swapped, when its gate may open, and
 * what the scheduler is told.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "connection.h"
#include "futex.h"
#include "gate.h"
#include "grant.h"
#include "reserve.h"
#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

#define TELL_NS (100 * NVS_MS) /* between two MOVED messages while nothing moves */
/* How often an allocation that the driver refuses is repeated, and after what time. */
#define RETRY_NS    (10 * NVS_MS)
#define RETRY_TIMES 1000

static bool capable, managed;
static atomic_uint visited; /* a bit for each GPU that the process has had a context on */

void nvs_swap_reset(struct nvs_gpu *gpu)
{
	struct nvs_pools *pools = gpu->swap->pools;

	memset(gpu->swap, 0, sizeof(*gpu->swap));
	gpu->swap->lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_SWAP);
	gpu->swap->pools = pools;
	nvs_pools_reset(pools, gpu);
}

/* ---- locking and waiting ---- */

void nvs_swap_lock(struct nvs_swap *s)
{
	nvs_memory_locked = true;
	atomic_signal_fence(memory_order_seq_cst);
	nvs_lock(&s->lock);
}

void nvs_swap_unlock(struct nvs_swap *s)
{
	nvs_unlock(&s->lock);
	atomic_signal_fence(memory_order_seq_cst);
	nvs_memory_locked = false;
}

void nvs_swap_kick(struct nvs_swap *s)
{
	atomic_fetch_add(&s->kick, 1);
	nvs_futex_wake((uint32_t *)&s->kick, true);
}

void nvs_swap_wait(struct nvs_swap *s, unsigned seen, uint64_t ns)
{
	int saved = errno;

	nvs_futex_wait((uint32_t *)&s->kick, seen, ns, true);
	errno = saved;
}

/* ---- whether memory is swapped ---- */

void nvs_swap_init(void)
{
	const struct nvs_memory_driver_table *v = &nvs_memory_driver;
	const char *oversub = secure_getenv("NVSHARE_ENABLE_SINGLE_OVERSUB");

	managed = oversub && strcmp(oversub, "1") == 0;
	capable = false;
	nvs_look_init();
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_swap *s = gpu->swap;
		int dev = gpu->device.dev, yes = 0;

		s->capable = v->device_attribute(&yes, CU_ATTRIBUTE_VMM, dev) == CUDA_SUCCESS && yes;
		s->posix_fd = v->device_attribute(&yes, CU_ATTRIBUTE_VMM_POSIX_FD, dev) ==
			      CUDA_SUCCESS && yes;
		s->rdma = v->device_attribute(&yes, CU_ATTRIBUTE_VMM_RDMA, dev) == CUDA_SUCCESS && yes;
		capable = capable || s->capable;
	}
}

bool nvs_swap_capable(void)
{
	return capable;
}

bool nvs_swap_on(struct nvs_gpu *gpu)
{
	struct nvs_swap *s;

	if (!capable || !gpu)
		return false;
	s = gpu->swap;
	if (!s->capable)
		return false;
	/* The first allocation waits for the scheduler's answer, as it does under a limit. */
	if (nvs_unlikely(atomic_load_explicit(&s->mode, memory_order_acquire) == SWAP_UNKNOWN)) {
		int unknown = SWAP_UNKNOWN;

		nvs_reserve_attach(gpu);
		atomic_compare_exchange_strong(&s->mode, &unknown, SWAP_OFF);
	}
	return atomic_load_explicit(&s->mode, memory_order_acquire) == SWAP_ON && !immovable(s);
}

bool nvs_swap_is_on(struct nvs_gpu *gpu)
{
	return atomic_load_explicit(&gpu->swap->mode, memory_order_acquire) == SWAP_ON;
}

bool nvs_swap_still(struct nvs_gpu *gpu)
{
	const struct nvs_slot *slot = atomic_load(&gpu->slot);

	return nvs_swap_is_on(gpu) && __atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & NVS_SLOT_STILL;
}

bool nvs_swap_may_leave(struct nvs_gpu *gpu)
{
	return nvs_swap_is_on(gpu) && !nvs_swap_still(gpu);
}

bool nvs_swap_apart(struct nvs_gpu *gpu)
{
	return nvs_swap_on(gpu) && !gpu->budget->limit;
}

bool nvs_swap_managed(struct nvs_gpu *gpu)
{
	const struct nvs_slot *slot;

	if (!gpu)
		return false;
	slot = atomic_load(&gpu->slot);
	return managed || (slot && __atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & NVS_SLOT_MANAGED);
}

void nvs_swap_context_made(struct nvs_gpu *here)
{
	unsigned mask = atomic_fetch_or(&visited, here->bit) | here->bit;

	if (!capable || !(mask & (mask - 1)))
		return;
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_swap *s = gpu->swap;
		struct nvs_thread *t;

		if (s->several_gpus)
			continue;
		t = s->mover ? nvs_gate_enter_memory(gpu) : NULL;
		nvs_swap_lock(s);
		s->several_gpus = true;
		nvs_swap_unlock(s);
		if (s->mover)
			nvs_swap_open_to_peers(gpu);
		if (t)
			nvs_gate_leave(t);
	}
}

/* ---- room ---- */

/* Bytes that are counted and in no chunk. The lock is held. */
static uint64_t driver_bytes(struct nvs_gpu *gpu)
{
	const struct nvs_swap *s = gpu->swap;
	uint64_t used, peak, ours = s->claimed + s->claiming;

	nvs_memory_read(gpu, &used, &peak);
	return used > ours ? used - ours : 0;
}

uint64_t nvs_swap_capacity(struct nvs_gpu *gpu)
{
	uint64_t room = gpu->swap->last_room, not_ours; /* without a page the last value holds */

	nvs_gpu_room(gpu, &room);
	/* Nothing is swapped any more: all memory comes back, as far as the driver has room. */
	if (atomic_load(&gpu->swap->mode) != SWAP_ON || room == UINT64_MAX)
		return UINT64_MAX;
	gpu->swap->last_room = room;
	not_ours = driver_bytes(gpu);
	return room > not_ours ? room - not_ours : 0;
}

bool nvs_swap_retry(struct nvs_gpu *gpu, unsigned *tries)
{
	struct nvs_swap *s;
	bool alone;

	if (!nvs_swap_on(gpu) || ++*tries > RETRY_TIMES)
		return false;
	s = gpu->swap;
	nvs_swap_flush(gpu, UINT64_MAX);
	nvs_swap_lock(s);
	alone = nvs_swap_capacity(gpu) == UINT64_MAX || nvs_swap_still(gpu);
	nvs_swap_unlock(s);
	if (alone)
		return *tries == 1;
	nvs_swap_wait(s, atomic_load(&s->kick), RETRY_NS);
	return true;
}

/* ---- what the scheduler is told ---- */

void nvs_swap_tell(struct nvs_gpu *gpu, uint32_t code)
{
	nvs_lock(&nvs_client_lock);
	nvs_swap_tell_locked(gpu, code);
	nvs_unlock(&nvs_client_lock);
}

/* What a MOVED message says now. The client's lock is held. */
static struct nvs_moved state_of(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t not_ours;
	struct nvs_moved m;

	nvs_swap_lock(s);
	not_ours = driver_bytes(gpu);
	m.resident = s->resident + not_ours;
	m.fixed = not_ours + (s->broken || immovable(s) ? s->resident : s->pinned);
	m.away = s->away;
	m.out_bytes = s->out_bytes;
	m.in_bytes = s->in_bytes;
	m.arena = nvs_arena_bytes(gpu);
	nvs_swap_unlock(s);
	return m;
}

void nvs_swap_tell_locked(struct nvs_gpu *gpu, uint32_t code)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_MOVED,
			       .channel = (uint16_t)gpu->number, .code = code };
	uint32_t seen;
	enum nvs_fixed by;
	bool ending;

	if (gpu->lease.link != LEASE_ATTACHED || atomic_load(&s->mode) != SWAP_ON)
		return;
	if (gpu->lease.gate == LEASE_OPEN)
		f.epoch = gpu->lease.epoch;
	seen = __atomic_load_n(&nvs_client.page->room_seq[gpu->number], __ATOMIC_ACQUIRE); /* before it is counted */
	nvs_swap_lock(s);
	ending = f.epoch && s->want && !s->away;
	by = fixed_by(s);
	f.code |= by * NVS_MOVED_FIXED_BY;
	nvs_swap_unlock(s);
	/*
	 * While the gate waits for the last copies, nothing is away, and to say so would begin the time
	 * quantum: READY follows.
	 */
	if (ending && !code)
		return;
	f.code |= seen * NVS_MOVED_SEEN;
	f.u.moved = s->told = state_of(gpu);
	s->told_by = by;
	s->told_ns = nvs_now();
	nvs_client_send(&f);
}

void nvs_swap_tell_news(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_moved m;

	if (atomic_load(&s->mode) != SWAP_ON)
		return;
	m = state_of(gpu);
	if (fixed_by(s) != s->told_by || memcmp(&m, &s->told, sizeof(m)) != 0)
		nvs_swap_tell_locked(gpu, 0);
}

void nvs_swap_tick(uint64_t now)
{
	NVS_FOR_EACH_GPU(gpu) {
		nvs_arena_tick(gpu);
		if (nvs_elapsed(now, gpu->swap->told_ns) >= TELL_NS)
			nvs_swap_tell_news(gpu);
	}
}

/* ---- the lease; the client's lock is held ---- */

bool nvs_swap_lease(struct nvs_gpu *gpu, enum lease_gate gate, bool opens)
{
	struct nvs_swap *s = gpu->swap;
	bool hold, want;

	if (!s->mover)
		return true;
	nvs_swap_lock(s);
	hold = s->hold;
	want = s->want;
	if (opens) {
		s->hold = s->hold || s->broken || all_here(s);
		s->want = !s->hold;
		s->opens += s->hold && !hold;
	} else if (gate != LEASE_OPEN && gate != LEASE_FREE) {
		s->want = false;
		if (gate != LEASE_DRAINING)
			s->hold = false;
	}
	hold = hold != s->hold;
	want = want != s->want;
	opens = s->hold;
	nvs_swap_unlock(s);
	if (hold || want)
		nvs_swap_kick(s);
	return opens;
}

bool nvs_swap_all_here(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	bool ready;

	if (!s->mover)
		return true;
	nvs_swap_lock(s);
	ready = all_here(s);
	s->opens += ready;
	nvs_swap_unlock(s);
	return ready;
}

bool nvs_swap_leave(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;

	if (!s->mover)
		return true;
	if (nvs_memory_locked) /* in a signal handler */
		return false;
	nvs_swap_lock(s);
	s->leaving = s->hold && all_here(s);
	nvs_swap_unlock(s);
	return s->leaving;
}

void nvs_swap_attached(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	const struct nvs_slot *slot = &nvs_client.page->slot[gpu->number];
	uint64_t room = __atomic_load_n(&slot->room, __ATOMIC_ACQUIRE);
	bool on = s->capable && gpu->lease.link == LEASE_ATTACHED && room &&
		  !(__atomic_load_n(&slot->flags, __ATOMIC_RELAXED) &
		    (NVS_SLOT_RESIDENT | NVS_SLOT_MANAGED));

	if (on) {
		s->last_room = room;
		if (!s->mover) {
			/* If the gate is open now, later allocations get their memory at once. */
			s->mover = nvs_mover_start(gpu);
			s->hold = gpu->lease.gate == LEASE_OPEN ||
				  gpu->lease.gate == LEASE_DRAINING;
		}
		on = s->mover;
	}
	/* Regions that exist stay movable. */
	atomic_store_explicit(&s->mode, on ? SWAP_ON : SWAP_OFF, memory_order_release);
	if (on)
		nvs_swap_tell_locked(gpu, 0);
	nvs_swap_kick(s);
}

void nvs_swap_room_changed(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;

	if (!s->mover)
		return;
	nvs_swap_lock(s);
	s->asked = true;
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
}

void nvs_swap_fork_child(void)
{
	nvs_arena_fork_child();
	NVS_FOR_EACH_GPU(gpu)
		if (gpu->swap) /* not in the middle of the start */
			nvs_swap_reset(gpu);
	/* The parent's addresses mean nothing here. The arrays stay allocated. */
	atomic_store(&nvs_spans_used, 0);
	capable = managed = false;
	atomic_store(&visited, 0);
	nvs_ipc_fork_child();
	nvs_async_fork_child();
	nvs_vmm_fork_child();
}
