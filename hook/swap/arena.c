// SPDX-License-Identifier: Apache-2.0
/*
 * arena.c: host memory for chunks that are away, in segments that the scheduler gives. A
 * thread maps the segments and registers them with the driver, slice by slice, before
 * they are needed. Copies to memory that is not registered go through the driver's
 * staging buffers, four times slower.
 */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "clock.h"
#include "descriptor.h"
#include "log.h"
#include "swap.h"
#include "swap_impl.h"
#include "thread.h"

#define MAX_SEGMENTS 254u
/*
 * Granules that are registered at a time, under the move lock: a drain waits for some
 * 4 ms at most, at the 18 GB/s of 4 KiB pages (H200, driver 580).
 */
#define SLICE 32u

struct segment {
	char *base;        /* NULL: not mapped */
	struct nvs_descriptor file; /* until the segment is mapped */
	uint32_t granules;
	uint32_t registered;  /* so many granules, from the first on, are */
	uint32_t free;     /* granules that are not used */
	uint32_t next;     /* where the next search begins */
	bool refused;
	uint8_t *used;     /* for each granule */
};

/* Of a GPU; guarded by its swap lock, but see register_slice(). */
struct arena {
	struct segment segment[MAX_SEGMENTS];
	uint32_t count;
	bool thread;
	struct place give; /* where the next search for a copy that gives way begins */
};

/* A place in the arena in one number: segment and granule. */
#define STORE(segment, granule) ((uint32_t)(segment) << 24 | (granule))
#define SEGMENT_OF(store) ((store) >> 24)
#define GRANULE_OF(store) ((store) & 0xffffff)

_Static_assert(STORE(MAX_SEGMENTS, 0) == NVS_STORE_NOWHERE, "eight bits of a store, and no segment with that number");

/* ---- places ---- */

void nvs_arena_begin(struct place p)
{
	struct chunk *c = chunk_of(p);

	for (uint32_t i = 0; c->copy == COPY_NONE && i < c->granules; i++)
		p.span->store[p.granule + i] = NVS_STORE_NOWHERE;
	if (c->copy == COPY_NONE)
		c->copy = COPY_UNKNOWN;
}

static bool take_place(struct arena *a, uint32_t *store)
{
	for (uint32_t i = 0; a && i < a->count; i++) {
		struct segment *g = &a->segment[i];

		if (!g->base || !g->free)
			continue;
		while (g->next >= g->granules || g->used[g->next])
			g->next = g->next >= g->granules ? 0 : g->next + 1;
		g->used[g->next] = 1;
		g->free--;
		*store = STORE(i, g->next++);
		return true;
	}
	return false;
}

/* A chunk that is on the GPU loses its copy. False: none has one. */
static bool give_way(struct nvs_gpu *gpu)
{
	struct arena *a = gpu->swap->arena;
	uint32_t looked = 0;

	while (a && nvs_chunk_next(gpu, 1u << CHUNK_HERE | 1u << CHUNK_PINNED, &a->give, &looked)) {
		struct place p = a->give;

		next_chunk(&a->give);
		if (chunk_of(p)->copy) {
			nvs_arena_free(gpu, p);
			return true;
		}
	}
	return false;
}

bool nvs_arena_alloc(struct nvs_gpu *gpu, struct place p)
{
	for (uint32_t i = 0; i < chunk_of(p)->granules; i++) {
		uint32_t *store = &p.span->store[p.granule + i];

		while (p.span->content[p.granule + i].moves && *store == NVS_STORE_NOWHERE &&
		       !take_place(gpu->swap->arena, store))
			if (!give_way(gpu))
				return false;
	}
	return true;
}

void nvs_arena_vacate(struct nvs_gpu *gpu, struct place p)
{
	uint32_t store = p.span->store[p.granule];

	p.span->store[p.granule] = NVS_STORE_NOWHERE;
	if (store != NVS_STORE_NOWHERE) {
		struct segment *g = &gpu->swap->arena->segment[SEGMENT_OF(store)];

		g->used[GRANULE_OF(store)] = 0;
		g->free++;
	}
}

void nvs_arena_free(struct nvs_gpu *gpu, struct place p)
{
	struct chunk *c = chunk_of(p);

	if (c->copy == COPY_NONE)
		return;
	c->copy = COPY_NONE;
	for (uint32_t i = 0; i < c->granules; i++)
		nvs_arena_vacate(gpu, (struct place){ p.span, p.granule + i });
}

void nvs_arena_follow(struct place from, struct place to)
{
	uint32_t n = chunk_of(from)->granules;

	memcpy(&to.span->store[to.granule], &from.span->store[from.granule], n * sizeof(*to.span->store));
	memcpy(&to.span->content[to.granule], &from.span->content[from.granule], n * sizeof(*to.span->content));
}

uint64_t nvs_arena_bytes(struct nvs_gpu *gpu)
{
	struct arena *a = gpu->swap->arena;
	uint64_t sum = 0;

	for (uint32_t i = 0; a && i < a->count; i++)
		if (a->segment[i].base)
			sum += bytes_of(a->segment[i].granules);
	return sum;
}

/* Whether a granule of a chunk that leaves, or comes, is to be copied. */
static bool is_copied(struct place p, uint32_t i, bool out)
{
	return p.span->store[p.granule + i] != NVS_STORE_NOWHERE && (!out || p.span->content[p.granule + i].moves);
}

/* Granules from i on that are copied, or are not, at once: side by side, and within one slice. */
static uint32_t run_of(struct place p, uint32_t i, bool out)
{
	const uint32_t *store = &p.span->store[p.granule];
	bool copied = is_copied(p, i, out);
	uint32_t n = 1;

	while (i + n < chunk_of(p)->granules && is_copied(p, i + n, out) == copied &&
	       (!copied || (store[i + n] == store[i] + n && GRANULE_OF(store[i + n]) % SLICE)))
		n++;
	return n;
}

int nvs_arena_copy(struct nvs_gpu *gpu, struct place p, bool out, uint64_t *bytes)
{
	const uint32_t *store = &p.span->store[p.granule];
	const struct nvs_swap *s = gpu->swap;
	int result = CUDA_SUCCESS;

	for (uint32_t i = 0, n; result == CUDA_SUCCESS && i < chunk_of(p)->granules; i += n) {
		CUdeviceptr device = address_of(p) + bytes_of(i);
		char *host;

		n = run_of(p, i, out);
		if (!is_copied(p, i, out)) {
			/* Nobody promises that new memory is zero: what a driver keeps for the process may not be. */
			if (!out)
				result = nvs_memory_driver.set_words(device, 0, bytes_of(n) / 4, s->stream);
			continue;
		}
		*bytes += bytes_of(n);
		host = s->arena->segment[SEGMENT_OF(store[i])].base + bytes_of(GRANULE_OF(store[i]));
		if (out)
			result = nvs_memory_driver.copy_to_host(host, device, bytes_of(n), s->stream);
		else
			result = nvs_memory_driver.copy_to_device(device, host, bytes_of(n), s->stream);
	}
	return result;
}

/* ---- the thread ---- */

/* Maps a segment. The scheduler has allocated its memory already. */
static void arena_map(struct nvs_swap *s, struct segment *g)
{
	uint64_t bytes = bytes_of(g->granules);
	void *p = MAP_FAILED, *used;

	/* A file that is too short would raise SIGBUS in the application. */
	if (nvs_descriptor_is(&g->file) && lseek(g->file.fd, 0, SEEK_END) >= (off_t)bytes)
		p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, g->file.fd, 0);
	used = mmap(NULL, g->granules, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	nvs_swap_lock(s);
	nvs_descriptor_close(&g->file);
	if (p != MAP_FAILED && used != MAP_FAILED) {
		g->used = used;
		g->free = g->granules;
		g->base = p;
	} else {
		g->refused = true;
	}
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
}

/* Registers the next slice. The move lock keeps the GPU's contexts alive. */
static void register_slice(struct nvs_gpu *gpu, struct segment *g)
{
	void *popped;
	uint32_t n;
	int result;

	nvs_lock(&gpu->move_lock);
	n = g->granules - g->registered < SLICE ? g->granules - g->registered : SLICE;
	if (!nvs_mover_context(gpu)) {
		nvs_unlock(&gpu->move_lock);
		nvs_swap_wait(gpu->swap, atomic_load(&gpu->swap->kick), 50 * NVS_MS);
		return;
	}
	result = nvs_memory_driver.host_register(g->base + bytes_of(g->registered), bytes_of(n),
					  CU_HOST_REGISTER_PORTABLE);
	nvs_driver.ctx_pop(&popped);
	nvs_driver_leave();
	if (result == CUDA_SUCCESS)
		g->registered += n;
	else
		g->refused = true;
	nvs_unlock(&gpu->move_lock);
	if (result != CUDA_SUCCESS)
		nvs_debugf("GPU %u: host memory cannot be pinned: error %d; copies go through the "
			   "driver's buffers", gpu->number, result);
}

static struct segment *next_job(struct nvs_swap *s)
{
	struct arena *a = s->arena;
	struct segment *found = NULL;

	nvs_swap_lock(s);
	/* All segments are mapped before the first is registered. */
	for (uint32_t i = 0; i < a->count && !found; i++)
		if (a->segment[i].file.fd >= 0)
			found = &a->segment[i];
	for (uint32_t i = 0; i < a->count && !found; i++)
		if (a->segment[i].base && !a->segment[i].refused &&
		    a->segment[i].registered < a->segment[i].granules)
			found = &a->segment[i];
	nvs_swap_unlock(s);
	return found;
}

static void *arena_main(void *arg)
{
	struct nvs_gpu *gpu = arg;
	struct nvs_swap *s = gpu->swap;

	nvs_thread_setup("nvshare-arena");
	while (!atomic_load(&nvs_exiting)) {
		unsigned seen = atomic_load(&s->kick);
		struct segment *g = next_job(s);

		if (!g)
			nvs_swap_wait(s, seen, 10 * NVS_S);
		else if (g->file.fd >= 0)
			arena_map(s, g);
		else
			register_slice(gpu, g);
	}
	return NULL;
}

void nvs_arena_tick(struct nvs_gpu *gpu)
{
	struct arena *a = gpu->swap->arena;

	if (a && a->count && !a->thread)
		a->thread = nvs_thread_start(arena_main, gpu);
}

void nvs_swap_arena(struct nvs_gpu *gpu, const struct nvs_arena *f, int fd)
{
	struct nvs_swap *s = gpu->swap;
	struct arena *a = gpu->swap->arena;
	uint64_t granules = f->size / GRANULE;

	if (fd < 0)
		return;
	if (!a) {
		void *p = mmap(NULL, sizeof(*a), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			       -1, 0);

		a = gpu->swap->arena = p == MAP_FAILED ? NULL : p;
	}
	if (!a || a->count == MAX_SEGMENTS || !granules || granules > 0xffffff) {
		close(fd);
		return;
	}
	nvs_swap_lock(s);
	a->segment[a->count++] = (struct segment){ .file = nvs_descriptor_of(fd),
						   .granules = (uint32_t)granules };
	nvs_swap_unlock(s);
	nvs_arena_tick(gpu);
	nvs_swap_kick(s);
}

void nvs_arena_unregistered(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	struct arena *a = s->arena;

	nvs_swap_lock(s); /* beside the move lock: the arena's thread looks for work under this one */
	for (uint32_t i = 0; a && i < a->count; i++)
		a->segment[i].registered = 0;
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
}

void nvs_arena_fork_child(void)
{
	NVS_FOR_EACH_GPU(gpu) {
		struct arena *a = gpu->swap ? gpu->swap->arena : NULL; /* in the middle of the start */

		for (uint32_t i = 0; a && i < a->count; i++)
			nvs_descriptor_close(&a->segment[i].file);
	}
}
