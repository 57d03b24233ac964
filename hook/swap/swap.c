// SPDX-License-Identifier: Apache-2.0
/*
 * swap.c: whether memory of a channel is swapped, when its gate may open, and
 * what the scheduler is told.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel.h"
#include "futex.h"
#include "gate.h"
#include "log.h"
#include "reserve.h"
#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

#define TELL_NS (100 * NVS_MS) /* between two MOVED that nothing moves for */
/* How often, and how long, a refused allocation of the driver's is tried again. */
#define RETRY_NS    (10 * NVS_MS)
#define RETRY_TIMES 1000

struct nvs_swap nvs_swaps[NVS_MAX_CHANNELS] = {
	[0 ... NVS_MAX_CHANNELS - 1] = { .lock = PTHREAD_MUTEX_INITIALIZER },
};
static bool capable, managed;

/* ---- locking and waiting ---- */

void nvs_swap_lock(struct nvs_swap *s)
{
	nvs_in_book = true;
	atomic_signal_fence(memory_order_seq_cst);
	pthread_mutex_lock(&s->lock);
}

void nvs_swap_unlock(struct nvs_swap *s)
{
	pthread_mutex_unlock(&s->lock);
	atomic_signal_fence(memory_order_seq_cst);
	nvs_in_book = false;
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

/* ---- whether ---- */

void nvs_swap_init(unsigned channels)
{
	const struct nvs_driver *v = &nvs_driver;
	const char *oversub = getenv("NVSHARE_ENABLE_SINGLE_OVERSUB");

	managed = oversub && strcmp(oversub, "1") == 0;
	capable = false;
	if (!v->mem_create || !v->mem_release || !v->mem_map || !v->mem_unmap ||
	    !v->stream_create || !v->copy_to_device || !v->copy_to_host ||
	    !v->device_attribute || !v->address_reserve || !v->set_access || !v->host_register ||
	    !v->event_create || !v->event_record || !v->event_synchronize || !v->ctx_push ||
	    !v->ctx_pop || !v->ctx_synchronize || !v->ctx_get_current)
		return;
	for (unsigned i = 0; i < channels; i++) {
		struct nvs_swap *s = &nvs_swaps[i];
		int dev = nvs_client_device(i), yes = 0;

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

bool nvs_swap_on(int channel)
{
	struct nvs_swap *s;

	if (!capable || channel < 0 || channel >= NVS_MAX_CHANNELS)
		return false;
	s = &nvs_swaps[channel];
	if (!s->capable)
		return false;
	/* The first allocation waits for the scheduler's word, as it does for a limit. */
	if (nvs_unlikely(atomic_load_explicit(&s->mode, memory_order_acquire) == SWAP_UNKNOWN)) {
		int unknown = SWAP_UNKNOWN;

		nvs_reserve_attach((unsigned)channel);
		atomic_compare_exchange_strong(&s->mode, &unknown, SWAP_OFF);
	}
	return atomic_load_explicit(&s->mode, memory_order_acquire) == SWAP_ON && !s->spread;
}

bool nvs_swap_is_on(unsigned channel)
{
	return atomic_load_explicit(&nvs_swaps[channel].mode, memory_order_acquire) == SWAP_ON;
}

bool nvs_swap_managed(int channel)
{
	const struct nvs_slot *slot;

	if (channel < 0 || channel >= NVS_MAX_CHANNELS)
		return false;
	slot = atomic_load(&nvs_channels[channel].slot);
	return managed || (slot && __atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & NVS_SLOT_MANAGED);
}

void nvs_swap_context_made(unsigned channel)
{
	static atomic_uint seen;
	unsigned mask = atomic_fetch_or(&seen, 1u << channel) | 1u << channel;

	if (!capable || !(mask & (mask - 1)))
		return;
	for (unsigned i = 0; i < nvs_client_count; i++) {
		struct nvs_swap *s = &nvs_swaps[i];
		struct nvs_thread *t;

		if (s->spread)
			continue;
		t = s->mover ? nvs_gate_enter_memory(i) : NULL;
		nvs_swap_lock(s);
		s->spread = true;
		nvs_swap_unlock(s);
		if (s->mover)
			nvs_swap_open_to_peers(i);
		if (t)
			nvs_gate_leave(t);
	}
}

/* ---- room ---- */

/* Bytes of the driver's own that the book knows of. The lock is held. */
static uint64_t fixed(unsigned channel)
{
	const struct nvs_swap *s = &nvs_swaps[channel];
	uint64_t used, peak, ours = s->claimed + s->claiming;

	nvs_memory_read(channel, &used, &peak);
	return used > ours ? used - ours : 0;
}

uint64_t nvs_swap_capacity(unsigned channel)
{
	uint64_t room = nvs_swaps[channel].last_room, not_ours; /* without a page: as before */

	nvs_channel_room(channel, &room);
	/* Nothing is swapped here any more: all comes back, if the driver has room. */
	if (atomic_load(&nvs_swaps[channel].mode) != SWAP_ON || room == UINT64_MAX)
		return UINT64_MAX;
	nvs_swaps[channel].last_room = room;
	not_ours = fixed(channel);
	return room > not_ours ? room - not_ours : 0;
}

bool nvs_swap_retry(int channel, unsigned *tries)
{
	struct nvs_swap *s;
	bool alone;

	if (!nvs_swap_on(channel) || ++*tries > RETRY_TIMES)
		return false;
	s = &nvs_swaps[channel];
	nvs_swap_flush((unsigned)channel, UINT64_MAX);
	nvs_swap_lock(s);
	alone = nvs_swap_capacity((unsigned)channel) == UINT64_MAX;
	nvs_swap_unlock(s);
	if (alone)
		return *tries == 1;
	nvs_swap_wait(s, atomic_load(&s->kick), RETRY_NS);
	return true;
}

/* ---- what the scheduler is told ---- */

void nvs_swap_tell(unsigned channel, uint32_t code)
{
	pthread_mutex_lock(&nvs_client_lock);
	nvs_swap_tell_locked(channel, code);
	pthread_mutex_unlock(&nvs_client_lock);
}

/* The frame of now. The client's lock is held. */
static struct nvs_moved state_of(unsigned channel)
{
	struct nvs_swap *s = &nvs_swaps[channel];
	uint64_t not_ours, unused;
	struct nvs_moved m;

	nvs_swap_lock(s);
	not_ours = fixed(channel);
	m.resident = s->resident + not_ours;
	m.fixed = not_ours + (s->broken || s->spread ? s->resident : s->fixed);
	m.away = s->away;
	m.out_bytes = s->out_bytes;
	m.in_bytes = s->in_bytes;
	m.arena = nvs_arena_bytes(channel, &unused);
	nvs_swap_unlock(s);
	return m;
}

void nvs_swap_tell_locked(unsigned channel, uint32_t code)
{
	struct nvs_swap *s = &nvs_swaps[channel];
	const struct channel *c = &nvs_client_channels[channel];
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_MOVED,
			       .channel = (uint16_t)channel, .code = code };

	if (c->lease.link != LEASE_ATTACHED || atomic_load(&s->mode) != SWAP_ON)
		return;
	if (c->lease.gate == LEASE_OPEN)
		f.epoch = c->lease.epoch;
	f.u.moved = s->told = state_of(channel);
	s->told_ns = nvs_now();
	nvs_channel_send(&f);
}

void nvs_swap_tell_news(unsigned channel)
{
	struct nvs_swap *s = &nvs_swaps[channel];
	struct nvs_moved m;

	if (atomic_load(&s->mode) != SWAP_ON)
		return;
	m = state_of(channel);
	if (memcmp(&m, &s->told, sizeof(m)) != 0)
		nvs_swap_tell_locked(channel, 0);
}

void nvs_swap_tick(uint64_t now)
{
	for (unsigned i = 0; i < nvs_client_count; i++)
		if (nvs_elapsed(now, nvs_swaps[i].told_ns) >= TELL_NS)
			nvs_swap_tell_news(i);
}

/* ---- the lease; the client's lock is held ---- */

bool nvs_swap_lease(unsigned channel, enum lease_gate gate, bool opens)
{
	struct nvs_swap *s = &nvs_swaps[channel];
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

bool nvs_swap_may_pass(unsigned channel)
{
	struct nvs_swap *s = &nvs_swaps[channel];
	bool ready;

	if (!s->mover)
		return true;
	nvs_swap_lock(s);
	ready = all_here(s);
	s->opens += ready;
	nvs_swap_unlock(s);
	return ready;
}

bool nvs_swap_leave(unsigned channel)
{
	struct nvs_swap *s = &nvs_swaps[channel];

	if (!s->mover || nvs_in_book) /* in a signal handler */
		return false;
	nvs_swap_lock(s);
	s->leaving = s->hold && all_here(s);
	nvs_swap_unlock(s);
	return s->leaving;
}

void nvs_swap_attached(unsigned channel)
{
	struct nvs_swap *s = &nvs_swaps[channel];
	const struct nvs_slot *slot = &nvs_client.page->slot[channel];
	uint64_t room = __atomic_load_n(&slot->room, __ATOMIC_ACQUIRE);
	bool on = s->capable && nvs_client_channels[channel].lease.link == LEASE_ATTACHED && room &&
		  !(__atomic_load_n(&slot->flags, __ATOMIC_RELAXED) &
		    (NVS_SLOT_RESIDENT | NVS_SLOT_MANAGED));

	if (on) {
		s->last_room = room;
		if (!s->mover) {
			/* What is allocated later is held, if the gate is open now. */
			s->mover = nvs_mover_start(channel);
			s->hold = nvs_client_channels[channel].lease.gate == LEASE_OPEN ||
				  nvs_client_channels[channel].lease.gate == LEASE_DRAINING;
		}
		on = s->mover;
	}
	/* Where it was on, a region stays what it is. */
	atomic_store_explicit(&s->mode, on ? SWAP_ON : SWAP_OFF, memory_order_release);
	if (on)
		nvs_swap_tell_locked(channel, 0);
	nvs_swap_kick(s);
}

void nvs_swap_room_changed(unsigned channel)
{
	struct nvs_swap *s = &nvs_swaps[channel];

	if (!s->mover)
		return;
	nvs_swap_lock(s);
	s->asked = true;
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
}

void nvs_swap_fork_child(void)
{
	static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

	/* The parent's addresses mean nothing here; the arrays are left behind. */
	atomic_store(&nvs_spans_used, 0);
	memset(nvs_swaps, 0, sizeof(nvs_swaps));
	for (unsigned i = 0; i < NVS_MAX_CHANNELS; i++)
		nvs_swaps[i].lock = fresh;
	capable = managed = false;
	nvs_arena_fork_child();
	nvs_ipc_fork_child();
	nvs_async_fork_child();
	nvs_vmm_fork_child();
}
