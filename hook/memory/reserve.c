// SPDX-License-Identifier: Apache-2.0
/* reserve.c: reservations of device memory with the scheduler, and the limits that a container is told. */
#include "reserve.h"

#include <errno.h>

#include "clock.h"
#include "connection.h"
#include "futex.h"
#include "log.h"
#include "query.h"
#include "wait.h"

#define STEP          (64ull << 20)
#define ANSWER_NS     (10 * NVS_S)    /* longest wait for a scheduler that is stopped or starved, in all */
#define PIECE_NS      (20 * NVS_MS)
/* After a refusal, the time for the container's other processes to return what they do not use. */
#define YIELD_NS      (500 * NVS_MS)
#define TRIM_NS       (100 * NVS_MS)
#define SETTLED_NS    (100 * NVS_MS)  /* wait for an answer before sizes are told */
#define SEQLOCK_TRIES 1000
#define UNANSWERED    16 /* frames; a full socket would be closed */

struct nvs_lock nvs_memory_lock = NVS_LOCK(NVS_RANK_MEMORY);
__thread bool nvs_memory_locked __attribute__((tls_model("initial-exec")));

/* ---- the page ---- */

/* False: the scheduler died while it was writing. */
static bool read_slot(const struct nvs_slot *s, uint64_t *limit, uint64_t *used)
{
	for (int i = 0; i < SEQLOCK_TRIES; i++) {
		uint32_t seq = __atomic_load_n(&s->limit_seq, __ATOMIC_ACQUIRE);

		*limit = __atomic_load_n(&s->mem_limit, __ATOMIC_ACQUIRE);
		*used = __atomic_load_n(&s->mem_used, __ATOMIC_ACQUIRE);
		if (!(seq & 1) && __atomic_load_n(&s->limit_seq, __ATOMIC_RELAXED) == seq)
			return true;
		nvs_cpu_relax();
	}
	return false;
}

/* Whether the GPU is attached to a scheduler that keeps account of memory. The client's lock is held. */
static bool reserve_attached(struct nvs_gpu *gpu)
{
	return nvs_client.link == LINK_UP && gpu->lease.link == LEASE_ATTACHED &&
	       gpu->budget->account;
}

static void set_limit(struct nvs_budget *b, uint64_t limit)
{
	b->limit = limit;
	atomic_store(&b->unlimited, !limit && !b->swap);
}

/* Both locks are held. */
static void refresh(struct nvs_gpu *gpu)
{
	struct nvs_budget *b = gpu->budget;
	uint64_t limit, used;

	if (!reserve_attached(gpu) || !read_slot(&nvs_client.page->slot[gpu->number], &limit, &used))
		return;
	b->known = true;
	set_limit(b, limit);
	if (b->answered >= b->sent)
		b->others = nvs_minus(used, b->acked);
}

/* The container has little left: no process reserves more than it uses. */
static bool is_short(const struct nvs_budget *b)
{
	return b->limit && nvs_minus(b->limit, b->others + b->reserved) < STEP;
}

static uint64_t round_up(uint64_t bytes)
{
	return (bytes + STEP - 1) / STEP * STEP;
}

/* The bytes to ask for if `least` are needed. */
static uint64_t wanted(const struct nvs_budget *b, uint64_t least)
{
	uint64_t total = round_up(least), left;

	if (!b->limit)
		return total;
	left = nvs_minus(b->limit, b->others + least);
	if (left < STEP)
		return least;
	if (b->others && total - least > left / 16)
		total = least + left / 16;
	return total < b->limit ? total : b->limit;
}

/* ---- sending; both locks are held ---- */

static struct nvs_frame frame_of(struct nvs_gpu *gpu, uint64_t total, uint64_t least, uint32_t flags)
{
	struct nvs_frame f = nvs_frame_of(gpu, NVS_RESERVE);

	f.code = flags;
	f.u.reserve.total = total;
	f.u.reserve.least = least;
	f.u.reserve.serial = ++gpu->budget->sent;
	return f;
}

/* With a limit, no more than this stays reserved without use. */
static bool has_plenty(const struct nvs_budget *b)
{
	return nvs_minus(b->reserved, b->used) > 2 * STEP;
}

bool nvs_reserve_due(const struct nvs_budget *b)
{
	return b->used > b->reserved ||
	       (b->limit && b->reserved > b->used && (has_plenty(b) || is_short(b)));
}

/* What nobody waits for is always granted, so that it is counted at once. */
static bool budget_settle(struct nvs_gpu *gpu, bool tick, struct nvs_frame *f)
{
	struct nvs_budget *b = gpu->budget;
	uint64_t before = b->reserved, total = before;
	uint32_t flags = 0;

	if (b->busy)
		return false; /* the thread that waits does it */
	if (b->sent - b->answered >= UNANSWERED && !tick)
		return false; /* done at the last answer, or by the clock */
	if (b->used > b->reserved) {
		total = b->limit ? b->used : round_up(b->used);
		flags = NVS_RESERVE_FORCE;
	} else if (is_short(b)) {
		total = b->used;
	} else if (has_plenty(b) && (b->limit || tick)) {
		total = round_up(b->used);
	}
	if (total == before)
		return false;
	b->reserved = total;
	/* A thread that has taken of it since keeps it; one that comes now sees that it is gone. */
	if (total < before && b->used > total)
		b->reserved = total = b->used < before ? b->used : before;
	if (total == before || !reserve_attached(gpu))
		return false;
	*f = frame_of(gpu, total, total, flags);
	return true;
}

static void settle_and_send(struct nvs_gpu *gpu, bool tick)
{
	struct nvs_frame f;
	bool send;

	nvs_lock(&nvs_memory_lock);
	refresh(gpu);
	send = budget_settle(gpu, tick, &f);
	nvs_unlock(&nvs_memory_lock);
	if (send)
		nvs_client_send(&f);
}

void nvs_reserve_settle(struct nvs_gpu *gpu)
{
	struct nvs_signals q;

	nvs_client_enter(&q);
	settle_and_send(gpu, false);
	nvs_client_leave(&q);
}

/* ---- asking ---- */

/* Waits until it is known whether there is a scheduler. The client's lock is held, and given up meanwhile. */
static void wait_attached(struct nvs_gpu *gpu)
{
	uint64_t start = nvs_now();

	for (;;) {
		uint32_t seen = atomic_load(&gpu->changed);
		bool pending = nvs_client.link == LINK_STARTING ||
			       (nvs_client.link == LINK_UP && gpu->lease.link == LEASE_ATTACHING);

		nvs_lock(&nvs_memory_lock);
		pending = pending || (nvs_client.link == LINK_LOST && !gpu->budget->known);
		if (pending && nvs_elapsed(nvs_now(), start) > ANSWER_NS)
			gpu->budget->deaf = true;
		pending = pending && !gpu->budget->deaf;
		nvs_unlock(&nvs_memory_lock);
		if (!pending || atomic_load(&nvs_exiting))
			return;
		nvs_unlock(&nvs_client_lock);
		nvs_futex_wait((uint32_t *)&gpu->changed, seen, PIECE_NS, true);
		nvs_lock(&nvs_client_lock);
	}
}

/* Waits for the answer to a serial. False: none came. No lock is held. */
static bool wait_answer(struct nvs_budget *b, uint64_t serial, uint64_t until)
{
	for (;;) {
		uint32_t seen = atomic_load(&b->event);
		bool done;

		nvs_lock(&nvs_memory_lock);
		done = b->answered >= serial;
		nvs_unlock(&nvs_memory_lock);
		if (done || nvs_futex_await((uint32_t *)&b->event, seen, until) == seen)
			return done;
	}
}

/* Whether other processes have returned enough. No lock is held. */
static bool wait_yield(struct nvs_gpu *gpu, uint64_t bytes, uint64_t until)
{
	struct nvs_budget *b = gpu->budget;

	for (;;) {
		bool hope, fits;

		nvs_lock(&nvs_client_lock);
		nvs_lock(&nvs_memory_lock);
		refresh(gpu);
		hope = b->others != b->tight && nvs_minus(b->limit, b->used) >= bytes && reserve_attached(gpu);
		fits = nvs_minus(b->limit, b->others + b->used) >= bytes;
		if (!fits && nvs_now() >= until)
			b->tight = b->others; /* no second wait for the same value */
		nvs_unlock(&nvs_memory_lock);
		nvs_unlock(&nvs_client_lock);
		if (fits || !hope || nvs_now() >= until)
			return fits;
		nvs_nap(2 * NVS_MS);
	}
}

enum verdict { GRANTED, REFUSED, ASKED };

/* Decides as far as this process can; counts what is granted. All locks are held. */
static enum verdict reserve_decide(struct nvs_gpu *gpu, uint64_t bytes, bool alone)
{
	struct nvs_budget *b = gpu->budget;

	refresh(gpu);
	set_limit(b, b->limit); /* of a process without a scheduler */
	if (nvs_budget_take(b, bytes))
		return GRANTED;
	if (b->limit || b->swap) {
		if (reserve_attached(gpu) && !b->deaf && !alone)
			return ASKED;
		/* A scheduler that does not answer has its last figure for the other processes count. */
		if (b->limit && nvs_minus(b->limit, b->used + (reserve_attached(gpu) ? b->others : 0)) < bytes)
			return REFUSED;
	}
	atomic_fetch_add(&b->used, bytes);
	return GRANTED;
}

/* The budget's ask is held. */
static bool reserve_ask(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b = gpu->budget;
	uint64_t start = nvs_now(), until = start + ANSWER_NS, serial = 0;
	bool alone = false, yielded = false;

	nvs_lock(&nvs_client_lock);
	wait_attached(gpu);
	for (;;) {
		struct nvs_frame f = { 0 };
		enum verdict v;
		bool answered;
		uint32_t code;

		nvs_lock(&nvs_memory_lock);
		v = reserve_decide(gpu, bytes, alone || atomic_load(&nvs_exiting));
		if (v == ASKED) {
			/* Counted already: no other thread takes it once it is granted. */
			atomic_fetch_add(&b->used, bytes);
			b->asking = bytes;
			b->busy = true;
			f = frame_of(gpu, wanted(b, b->used), b->used, 0);
			serial = b->sent;
		}
		nvs_unlock(&nvs_memory_lock);
		if (v == ASKED)
			nvs_client_send(&f);
		nvs_unlock(&nvs_client_lock);
		if (v != ASKED)
			return v == GRANTED;

		answered = wait_answer(b, serial, until);
		nvs_lock(&nvs_memory_lock);
		code = answered && b->coded == serial ? b->code : NVS_ERR_INTERNAL;
		b->asking = 0;
		b->busy = false;
		if (code != NVS_OK)
			atomic_fetch_sub(&b->used, bytes);
		if (!answered)
			b->deaf = true;
		nvs_unlock(&nvs_memory_lock);
		if (!answered)
			nvs_debugf("GPU %u: no answer from the scheduler about memory", gpu->number);
		nvs_reserve_settle(gpu); /* which was put off meanwhile */
		if (code == NVS_OK)
			return true;
		if (code == NVS_ERR_ARENA)
			return false;
		if (code == NVS_ERR_MEMORY) {
			if (yielded || !wait_yield(gpu, bytes, start + YIELD_NS))
				return false;
			yielded = true;
		}
		nvs_lock(&nvs_client_lock);
		/* The connection was lost: ask over a new one, or decide alone. */
		alone = nvs_now() >= until;
	}
}

void nvs_reserve_attach(struct nvs_gpu *gpu)
{
	struct nvs_signals q;

	nvs_gpu_use(gpu);
	nvs_client_enter(&q);
	wait_attached(gpu);
	nvs_client_leave(&q);
}

bool nvs_reserve(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_budget *b = gpu->budget;
	struct nvs_signals q;
	bool ok;

	nvs_gpu_use(gpu);
	nvs_signals_block(&q);
	nvs_lock(&b->ask);
	ok = reserve_ask(gpu, bytes);
	nvs_unlock(&b->ask);
	nvs_signals_restore(&q);
	return ok;
}

/* ---- answers ---- */

void nvs_reserve_answered(struct nvs_gpu *gpu, const struct nvs_frame *f)
{
	struct nvs_budget *b = gpu->budget;
	bool last;

	nvs_lock(&nvs_memory_lock);
	b->deaf = false;
	last = f->u.memory.serial == b->sent;
	if (last) {
		b->reserved = b->acked = f->u.memory.total;
		b->others = nvs_minus(f->u.memory.used, f->u.memory.total);
		set_limit(b, f->u.memory.limit);
		b->known = true;
		b->code = f->code;
		b->answered = b->coded = b->sent;
	}
	nvs_unlock(&nvs_memory_lock);
	atomic_fetch_add(&b->event, 1);
	nvs_futex_wake((uint32_t *)&b->event, true);
	if (last)
		settle_and_send(gpu, false);
}

void nvs_reserve_attached(struct nvs_gpu *gpu)
{
	struct nvs_budget *b = gpu->budget;
	struct nvs_frame f;
	uint64_t have;

	/* A scheduler that keeps none would close the connection after each RESERVE. */
	b->account = gpu->lease.link == LEASE_ATTACHED &&
		     __atomic_load_n(&nvs_client.page->slot[gpu->number].limit_seq, __ATOMIC_ACQUIRE);
	b->swap = nvs_client.page &&
		  __atomic_load_n(&nvs_client.page->slot[gpu->number].room, __ATOMIC_ACQUIRE) != 0;
	if (!reserve_attached(gpu))
		return;
	nvs_lock(&nvs_memory_lock);
	b->deaf = false;
	b->reserved = b->acked = 0;
	b->answered = b->sent;
	refresh(gpu);
	have = b->used - b->asking;
	if (have) { /* new to this scheduler, or to this connection */
		b->reserved = b->limit ? have : round_up(have);
		f = frame_of(gpu, b->reserved, b->reserved, NVS_RESERVE_FORCE);
	}
	nvs_unlock(&nvs_memory_lock);
	if (have)
		nvs_client_send(&f);
}

void nvs_reserve_lost(void)
{
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_budget *b = gpu->budget;

		nvs_lock(&nvs_memory_lock);
		b->answered = b->sent;
		nvs_unlock(&nvs_memory_lock);
		atomic_fetch_add(&b->event, 1);
		nvs_futex_wake((uint32_t *)&b->event, true);
	}
}

uint64_t nvs_reserve_tick(void)
{
	uint64_t next = 1 * NVS_S;

	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_budget *b = gpu->budget;

		if (!reserve_attached(gpu))
			continue;
		settle_and_send(gpu, true);
		nvs_lock(&nvs_memory_lock);
		if (b->limit && b->reserved > b->used)
			next = TRIM_NS;
		nvs_unlock(&nvs_memory_lock);
	}
	return next;
}

/* ---- what the container is told ---- */

/* False: the process has never used the GPU, or the scheduler does not answer. */
static bool limits_of_own(struct nvs_gpu *gpu, struct nvs_limits *out, bool *deaf)
{
	struct nvs_budget *b = gpu->budget;
	struct nvs_signals q;
	uint64_t sent;
	bool known;

	nvs_signals_block(&q);
	nvs_lock(&nvs_memory_lock);
	sent = b->deaf || !b->known || !b->limit ? 0 : b->sent;
	nvs_unlock(&nvs_memory_lock);
	wait_answer(b, sent, nvs_now() + SETTLED_NS);
	nvs_lock(&nvs_client_lock);
	nvs_lock(&nvs_memory_lock);
	known = b->known;
	nvs_unlock(&nvs_memory_lock);
	if (!known && atomic_load(&gpu->used)) /* programs take as much as they are told at first */
		wait_attached(gpu);
	nvs_lock(&nvs_memory_lock);
	refresh(gpu);
	known = b->known;
	out->limit = b->limit;
	out->used = b->others + b->used;
	*deaf = b->deaf;
	nvs_unlock(&nvs_memory_lock);
	nvs_unlock(&nvs_client_lock);
	nvs_signals_restore(&q);
	return known;
}

bool nvs_limits_of(struct nvs_gpu *gpu, const uint8_t *uuid, struct nvs_limits *out)
{
	int saved = errno;
	bool known, deaf = false;

	if (nvs_memory_locked)
		return false;
	if (!gpu && nvs_active())
		gpu = nvs_gpu_of_uuid(uuid);
	if (gpu && !uuid)
		uuid = gpu->device.uuid;
	known = gpu && limits_of_own(gpu, out, &deaf);
	if (!known && uuid && !deaf) /* it was waited for already */
		known = nvs_query_limits(uuid, out);
	errno = saved;
	return known;
}

void nvs_reserve_fork_child(void)
{
	nvs_memory_lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_MEMORY);
	NVS_FOR_EACH_GPU(gpu)
		if (gpu->budget) /* not in the middle of the start */
			nvs_budget_init(gpu->budget);
	nvs_query_fork_child();
}

void nvs_budget_init(struct nvs_budget *b)
{
	*b = (struct nvs_budget){ .ask = NVS_LOCK(NVS_RANK_ASK) };
}
