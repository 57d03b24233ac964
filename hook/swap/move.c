// SPDX-License-Identifier: Apache-2.0
/*
 * move.c: the mover, a thread for each GPU that moves memory out and in.
 *
 * The mover works in runs of chunks side by side. While one run is copied, the physical
 * memory of an earlier run is released, or that of a later run is created.
 */
#include <string.h>

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "grant.h"
#include "log.h"
#include "signals.h"
#include "swap.h"
#include "swap_impl.h"
#include "thread.h"
#include "vmm.h"

#define TELL_BYTES (64ull << 20) /* between two MOVED messages of a pass */
#define RUN        32u           /* granules of a run, and one chunk more at most */
#define IDLE_NS    (1 * NVS_S)
#define LOOK_NS    (10 * NVS_S) /* between two looks for other users of the memory */
#define RETRY_NS   (20 * NVS_MS) /* until a refused driver call is repeated */

/* Chunks side by side. All are CHUNK_BUSY: no other thread changes them. */
struct run {
	struct place first;
	uint32_t chunks;
	uint32_t looked; /* as the pass's, when it came to the first */
	uint64_t bytes;
	uint64_t copied; /* bytes that the link gets */
};

struct flight {
	struct run run;
	bool copied;   /* the event of its slot tells when the copy has ended */
};

/* One pass in one direction. */
struct pass {
	struct nvs_gpu *gpu;
	bool out;
	bool at_exit;          /* nvs_swap_fill_at_exit() makes it */
	struct flight flight[FLIGHTS];
	unsigned first, count; /* slots in flight, oldest first */
	struct place at;       /* of nvs_chunk_next() */
	uint32_t looked;
	uint64_t untold;       /* bytes moved since the last MOVED message */
	bool moved;
	bool no_arena;         /* something found no place in the arena */
	uint32_t stuck;        /* why the pass cannot go on: enum nvs_moved_flags */
};

void *nvs_mover_context(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	void *ctx = NULL;

	nvs_lock(&nvs_table_lock);
	for (unsigned i = 0; i < nvs_contexts_used; i++) {
		struct nvs_context *c = &nvs_contexts[i];

		if (c->ctx && c->gpu == gpu && !c->green && (!ctx || c->ctx == s->ctx))
			ctx = c->ctx;
	}
	nvs_unlock(&nvs_table_lock);
	if (!ctx || !nvs_driver_enter())
		return NULL;
	if (nvs_driver.ctx_push(ctx) != CUDA_SUCCESS) {
		nvs_driver_leave();
		return NULL;
	}
	if (ctx != s->ctx) { /* stream and events are gone with their context */
		s->ctx = ctx;
		s->stream = NULL;
		nvs_look_forget(gpu);
		memset(s->event, 0, sizeof(s->event));
	}
	return ctx;
}

static void move_leave(void)
{
	void *popped;

	nvs_driver.ctx_pop(&popped);
	nvs_driver_leave();
}

/* Creates the stream and the events of a pass. The context is current. */
static bool prepare(struct nvs_swap *s)
{
	if (!s->stream && nvs_driver.stream_create(&s->stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
		s->stream = NULL;
	for (unsigned i = 0; i < FLIGHTS; i++)
		if (!s->event[i] &&
		    nvs_driver.event_create(&s->event[i], CU_EVENT_DISABLE_TIMING |
							  CU_EVENT_BLOCKING_SYNC) != CUDA_SUCCESS) {
			s->event[i] = NULL;
			return false;
		}
	return s->stream;
}

/* ---- one run ---- */

/* Whether more is to be moved. The lock is held. */
static bool move_goes_on(const struct pass *p, const struct nvs_swap *s)
{
	if (s->broken || (atomic_load(&nvs_exiting) && !p->at_exit))
		return false;
	if (p->out && (immovable(s) || s->leaving))
		return false;
	return p->out ? !s->want && s->resident - s->going > nvs_swap_capacity(p->gpu) : s->want;
}

/* Makes the next run busy. False: there is none, or nothing to do. */
static bool pick(struct pass *p, struct run *r)
{
	struct nvs_swap *s = p->gpu->swap;

	*r = (struct run){ .chunks = 0 };
	nvs_swap_lock(s);
	while (r->bytes < bytes_of(RUN) && move_goes_on(p, s)) {
		struct chunk *c;
		uint64_t bytes;

		if (!nvs_chunk_next(p->gpu, p->out ? 1u << CHUNK_HERE
						       : 1u << CHUNK_AWAY | 1u << CHUNK_EMPTY,
				    &p->at, &p->looked))
			break;
		if (r->chunks && (p->at.span != r->first.span ||
				  address_of(p->at) != address_of(r->first) + r->bytes))
			break;
		c = chunk_of(p->at);
		bytes = bytes_of(c->granules);
		if (p->out) {
			if (c->opens != s->opens) { /* else no work can have used it since it got its memory */
				c->opens = TOUCHED;
				nvs_arena_begin(p->at);
			}
			s->going += bytes;
		} else {
			if (s->resident + bytes > nvs_swap_capacity(p->gpu))
				break;
			s->resident += bytes;
			s->away -= bytes;
			s->coming += bytes;
			c->opens = c->state == CHUNK_AWAY ? TOUCHED : s->opens;
		}
		c->state = CHUNK_BUSY;
		if (!r->chunks++) {
			r->first = p->at;
			r->looked = p->looked;
		}
		r->bytes += bytes;
		next_chunk(&p->at);
	}
	nvs_swap_unlock(s);
	return r->chunks;
}

/* The run is where the pass moves it, or (moved false) where it was. */
static void move_settle(struct pass *p, struct run r, bool moved)
{
	struct nvs_swap *s = p->gpu->swap;
	bool here = moved != p->out;
	struct place at = r.first;

	nvs_swap_lock(s);
	if (moved)
		*(p->out ? &s->out_bytes : &s->in_bytes) += r.copied;
	for (; r.chunks; r.chunks--) {
		struct chunk *c = chunk_of(at);
		uint64_t bytes = bytes_of(c->granules);
		bool content = c->opens == TOUCHED;

		if (p->out)
			s->going -= bytes;
		else
			s->coming -= bytes;
		if (!here) {
			s->resident -= bytes;
			s->away += bytes;
		} else if (p->out || c->copy != COPY_KNOWN) { /* what came in is kept: it may leave as it is */
			nvs_arena_free(p->gpu, at);
		}
		c->state = here ? CHUNK_HERE : content ? CHUNK_AWAY : CHUNK_EMPTY;
		next_chunk(&at);
	}
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
}

/*
 * A driver call failed. If the context is dead, nothing moves any more and the gate opens all the
 * same: each call of the application will return the error. Otherwise the pass is repeated later.
 */
static void give_up(struct pass *p, int result)
{
	struct nvs_swap *s = p->gpu->swap;
	/* Not of the context: that would end a capture whose thread waits at the gate. */
	bool dead = nvs_driver.stream_synchronize(s->stream) != CUDA_SUCCESS;

	nvs_debugf("GPU %u: moving memory failed: error %d%s", p->gpu->number, result,
		   dead ? ", and the context with it" : "");
	nvs_swap_lock(s);
	s->broken = s->broken || dead;
	nvs_swap_unlock(s);
	p->stuck = result == CUDA_ERROR_OUT_OF_MEMORY ? NVS_MOVED_NO_MEMORY : NVS_MOVED_ERROR;
}

/* The run is on the GPU: with the access that the application gave, for the mover had some more. */
static void arrived(struct run r)
{
	for (; r.chunks; r.chunks--, next_chunk(&r.first))
		nvs_vmm_arrived(r.first);
}

/* Waits for the oldest run in flight and settles it. */
static void complete(struct pass *p)
{
	struct nvs_swap *s = p->gpu->swap;
	struct flight *f = &p->flight[p->first];
	int result = f->copied ? nvs_memory_driver.event_synchronize(s->event[p->first]) : CUDA_SUCCESS;
	bool moved = result == CUDA_SUCCESS;

	if (!moved)
		give_up(p, result);
	if (moved == p->out)
		nvs_chunk_unmap(f->run.first, f->run.chunks);
	else
		arrived(f->run);
	move_settle(p, f->run, moved);
	p->untold += f->run.bytes;
	p->moved = true;
	p->first = (p->first + 1) % FLIGHTS;
	p->count--;
	if (p->untold >= TELL_BYTES) {
		p->untold = 0;
		nvs_swap_tell(p->gpu, 0);
	}
}

/* Only so many chunks of a run are moved; the others stay where they are. */
static void shorten(struct pass *p, struct run *r, uint32_t chunks)
{
	struct run rest = *r;

	rest.chunks -= chunks;
	for (r->chunks = 0; r->chunks < chunks; r->chunks++) {
		rest.bytes -= bytes_of(chunk_of(rest.first)->granules);
		next_chunk(&rest.first);
	}
	r->bytes -= rest.bytes;
	if (!rest.chunks)
		return;
	if (p->out)
		arrived(rest);
	move_settle(p, rest, false);
}

/* Creates memory for a run that comes in. Chunks that get none stay away. */
static bool move_map(struct pass *p, struct run *r)
{
	uint32_t chunks = r->chunks;
	int result = nvs_chunk_map(p->gpu, r->first, &chunks);

	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		p->stuck = NVS_MOVED_NO_MEMORY;
	else if (result != CUDA_SUCCESS)
		give_up(p, result);
	shorten(p, r, chunks);
	return r->chunks;
}

/*
 * Finds out what of a run that leaves is to be copied, and where to. A chunk that finds no
 * place stays; the pass goes on behind it, for others may need none.
 */
static bool move_place(struct pass *p, struct run *r)
{
	struct nvs_swap *s = p->gpu->swap;
	struct place at = r->first;
	int result = CUDA_SUCCESS;
	uint32_t n;

	for (n = 0; n < r->chunks; n++, next_chunk(&at)) {
		result = chunk_of(at)->opens == TOUCHED ? nvs_vmm_leaving(at) : CUDA_SUCCESS;
		if (result != CUDA_SUCCESS)
			break;
	}
	if (result != CUDA_SUCCESS)
		give_up(p, result);
	shorten(p, r, n);
	if (!n)
		return false;
	nvs_look(p->gpu, r->first, r->chunks);
	at = r->first;
	nvs_swap_lock(s);
	for (n = 0; n < r->chunks; n++, next_chunk(&at))
		if (chunk_of(at)->opens == TOUCHED && !nvs_arena_alloc(p->gpu, at))
			break;
	nvs_swap_unlock(s);
	if (n < r->chunks) {
		p->no_arena = true;
		p->at = at;
		p->looked = r->looked;
		next_chunk(&p->at);
	}
	shorten(p, r, n);
	return n;
}

/* Begins to copy a run. */
static void move_begin(struct pass *p, struct run r)
{
	struct nvs_swap *s = p->gpu->swap;
	unsigned slot = (p->first + p->count) % FLIGHTS;
	struct place at = r.first;
	int result = CUDA_SUCCESS;
	bool copied = false;

	if (!(p->out ? move_place(p, &r) : move_map(p, &r)))
		return;
	for (uint32_t i = 0; i < r.chunks && result == CUDA_SUCCESS; i++, next_chunk(&at)) {
		if (chunk_of(at)->opens != TOUCHED)
			continue;
		copied = true;
		result = nvs_arena_copy(p->gpu, at, p->out, &r.copied);
	}
	if (result == CUDA_SUCCESS && copied)
		result = nvs_driver.event_record(s->event[slot], s->stream);
	if (result != CUDA_SUCCESS) {
		give_up(p, result); /* waits until copies that were begun have ended */
		if (p->out)
			arrived(r);
		else
			nvs_chunk_unmap(r.first, r.chunks);
		move_settle(p, r, false);
		return;
	}
	p->flight[slot] = (struct flight){ r, copied };
	p->count++;
}

/* ---- passes ---- */

static void say_what_left(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t copied, zero, clean;

	nvs_swap_lock(s);
	copied = s->out_bytes;
	zero = s->zero_bytes;
	clean = s->clean_bytes;
	nvs_swap_unlock(s);
	nvs_debugf("GPU %u: so far %llu MiB were copied off it, %llu MiB were zero, %llu MiB were unchanged", gpu->number,
		   (unsigned long long)copied >> 20, (unsigned long long)zero >> 20, (unsigned long long)clean >> 20);
}

/* Moves memory as far as possible now. */
static struct pass move(struct pass p)
{
	struct nvs_gpu *gpu = p.gpu;
	struct run r;
	bool more;

	nvs_lock(&gpu->move_lock);
	atomic_store(&gpu->moving, true);
	if (!nvs_mover_context(gpu)) {
		/* A process that ends enters the driver no more: nothing that anybody has to mend. */
		p.stuck = atomic_load(&nvs_exiting) ? 0 : NVS_MOVED_ERROR;
	} else {
		if (!prepare(gpu->swap))
			p.stuck = NVS_MOVED_ERROR;
		/* There may be more room when a run in flight has completed. */
		for (more = true; more || p.count;) {
			more = !p.stuck && pick(&p, &r);
			if (p.count && (!more || p.count == FLIGHTS))
				complete(&p);
			if (more)
				move_begin(&p, r);
		}
		if (p.no_arena && !p.stuck)
			p.stuck = NVS_MOVED_NO_ARENA;
		move_leave();
	}
	atomic_store(&gpu->moving, false);
	nvs_unlock(&gpu->move_lock);
	if (p.out && p.moved)
		say_what_left(gpu);
	return p;
}

enum plan { PLAN_NOTHING, PLAN_ANSWER, PLAN_OUT, PLAN_IN };

/* Opens the gate if all memory is there; else says what is to be done. */
static enum plan move_decide(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	enum plan plan;
	bool open;

	nvs_lock(&nvs_client_lock);
	nvs_swap_lock(s);
	plan = s->asked ? PLAN_ANSWER : PLAN_NOTHING;
	s->evicting = s->asked = false;
	open = s->want && (s->broken || all_here(s));
	if (s->want && !open) {
		plan = PLAN_IN;
	} else if (!atomic_load(&nvs_exiting) && !s->want && !s->hold && !s->broken && !immovable(s) && !s->leaving &&
		   gpu->lease.gate == LEASE_CLOSED && !gpu->lease.unfinished && !gpu->preempt.off && /* work waits there */
		   gpu->lease.link == LEASE_ATTACHED && s->resident > nvs_swap_capacity(gpu)) {
		s->evicting = true;
		plan = PLAN_OUT;
	}
	nvs_swap_unlock(s);
	if (open)
		nvs_gpu_filled(gpu);
	nvs_unlock(&nvs_client_lock);
	return plan;
}

/*
 * Before memory leaves: waits for calls that passed without a grant, and for their work.
 * False: a capture hides whether work is left; it is looked again when the capture ends.
 */
static bool drained(struct nvs_gpu *gpu)
{
	nvs_gate_quiesce(gpu);
	if (nvs_drain(gpu, 0) != NVS_DRAINED)
		return false;
	nvs_drain_forget(gpu, 0);
	return true;
}

/* Releases cached memory. Returns whether the rest fits into the room. */
static bool flushed(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t room, over;

	nvs_swap_lock(s);
	room = nvs_swap_capacity(gpu);
	over = s->resident > room ? s->resident - room : 0;
	nvs_swap_unlock(s);
	if (over && nvs_driver_enter()) {
		nvs_swap_flush(gpu, over);
		nvs_driver_leave();
	}
	nvs_swap_lock(s);
	over = s->resident > room ? s->resident - room : 0;
	nvs_swap_unlock(s);
	return !over;
}

/*
 * Asked before memory leaves, because what else uses it may have been loaded at any time, and
 * now and then: the scheduler is not to promise others the room that nobody can make.
 */
static bool may_leave(struct nvs_gpu *gpu)
{
	enum nvs_fixed outside = nvs_used_outside();
	bool news;

	nvs_swap_lock(gpu->swap);
	news = atomic_exchange(&gpu->swap->used_outside, outside) != outside;
	gpu->swap->looked_ns = nvs_now();
	nvs_swap_unlock(gpu->swap);
	if (news && outside)
		nvs_debugf("memory stays on the GPU: other libraries of the process use it (%u)", outside);
	return !outside;
}

static void *mover_main(void *arg)
{
	struct nvs_gpu *gpu = arg;
	struct nvs_swap *s = gpu->swap;
	uint32_t told = 0; /* the last reason for being stuck that was told */

	nvs_thread_setup("nvshare-swap");
	while (!atomic_load(&nvs_exiting)) {
		unsigned seen = atomic_load(&s->kick);
		enum plan plan;
		struct pass p = { 0 };
		bool again = false;

		nvs_pools_trim(gpu);
		nvs_cache_trim(gpu);
		if (nvs_swap_is_on(gpu) && nvs_elapsed(nvs_now(), s->looked_ns) >= LOOK_NS)
			may_leave(gpu);
		plan = move_decide(gpu);
		if (plan == PLAN_OUT && !flushed(gpu)) {
			again = !may_leave(gpu) || !drained(gpu);
			if (!again) {
				nvs_pools_drained(gpu);
				flushed(gpu);
				nvs_look_load(gpu);
				p = move((struct pass){ .gpu = gpu, .out = true });
			}
		} else if (plan == PLAN_IN) {
			nvs_look_loaded(gpu); /* a load may wait for kernels, and these for later ones */
			p = move((struct pass){ .gpu = gpu });
		}
		if (p.stuck ? p.stuck != told : p.moved || plan == PLAN_ANSWER || plan == PLAN_OUT)
			nvs_swap_tell(gpu, p.stuck ? NVS_MOVED_STUCK | p.stuck : 0);
		told = p.stuck;
		/*
		 * Moving has changed the kick, so that the loop looks once more. A pass that could not
		 * move anything has changed it, too: what else has is looked at after RETRY_NS.
		 */
		if (p.stuck && !p.moved)
			seen = atomic_load(&s->kick);
		/* More of the arena kicks. To look at memory again for which there is none costs the GPU time. */
		nvs_swap_wait(s, seen, (p.stuck && p.stuck != NVS_MOVED_NO_ARENA) || again ? RETRY_NS : IDLE_NS);
	}
	return NULL;
}

bool nvs_swap_fill_at_exit(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_signals q;
	bool away = false;

	if (!s->mover || nvs_memory_locked)
		return false;
	nvs_signals_block(&q);
	for (bool moved = true; moved && move_decide(gpu) == PLAN_IN;) {
		struct pass p = move((struct pass){ .gpu = gpu, .at_exit = true });

		moved = p.moved;
		away = true;
		nvs_swap_tell(gpu, p.stuck ? NVS_MOVED_STUCK | p.stuck : 0);
		if (!moved) /* other clients have to make room first */
			nvs_swap_wait(s, atomic_load(&s->kick), RETRY_NS);
	}
	nvs_signals_restore(&q);
	return away;
}

bool nvs_mover_start(struct nvs_gpu *gpu)
{
	return nvs_thread_start(mover_main, gpu);
}
