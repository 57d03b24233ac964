// SPDX-License-Identifier: Apache-2.0
/*
 * pass.c: one pass of the mover, which moves memory out or in.
 *
 * A pass works in runs of chunks side by side. While one run is copied, the physical
 * memory of an earlier run is released, or that of a later run is created.
 */
#include <string.h>

#include "log.h"
#include "pass.h"
#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

#define TELL_BYTES (64ull << 20) /* between two MOVED messages of a pass */
#define RUN        32u           /* granules of a run, and one chunk more at most */

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
	uint32_t stuck;        /* see nvs_pass_result */
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

/* ---- the pass ---- */

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

struct nvs_pass_result nvs_pass(struct nvs_gpu *gpu, enum nvs_direction d)
{
	struct pass p = { .gpu = gpu, .out = d == NVS_PASS_OUT, .at_exit = d == NVS_PASS_IN_AT_EXIT };
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
	return (struct nvs_pass_result){ p.moved, p.stuck };
}
