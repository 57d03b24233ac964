// SPDX-License-Identifier: Apache-2.0
/*
 * space.c: allocation of addresses. Next fit over the runs of free granules. A search
 * steps from region to region, not from granule to granule.
 */
#include <sys/mman.h>

#include "swap.h"
#include "swap_impl.h"

struct span nvs_spans[MAX_SPANS];
atomic_uint nvs_spans_used;

static struct nvs_lock spans_lock = NVS_LOCK(NVS_RANK_SPANS);

/* Zeroed. Only pages that are touched take memory. */
static void *array(uint32_t count, size_t size)
{
	void *p = mmap(NULL, count * size, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static bool arrays(struct span *s)
{
	uint32_t n = s->granules;

	s->head = array(n, sizeof(*s->head));
	s->run = array(n, sizeof(*s->run));
	s->store = array(n, sizeof(*s->store));
	s->content = array(n, sizeof(*s->content));
	s->chunk = array(n, sizeof(*s->chunk));
	s->region = array(n, sizeof(*s->region));
	s->slab = array(n, sizeof(*s->slab));
	s->memory = array(n, sizeof(*s->memory));
	if (!s->head || !s->run || !s->store || !s->content || !s->chunk || !s->region || !s->slab || !s->memory)
		return false; /* the other arrays are lost; this does not happen twice */
	s->run[0] = s->run[n - 1] = n;
	return true;
}

bool nvs_span_add(struct nvs_gpu *gpu, uint32_t least)
{
	uint64_t want = gpu->device.total_mem / GRANULE * SPAN_TIMES;
	struct span s = { .gpu = gpu };
	CUdeviceptr base = 0;
	bool added = false;
	unsigned n;

	if (want < least)
		want = least;
	nvs_lock(&spans_lock);
	n = atomic_load(&nvs_spans_used);
	/* The process may be limited in addresses: then a smaller span. */
	while (n < MAX_SPANS && want < UINT32_MAX && want >= least && !base) {
		if (nvs_memory_driver.address_reserve(&base, want * GRANULE, GRANULE, 0, 0) != CUDA_SUCCESS)
			base = 0;
		else
			s.granules = (uint32_t)want;
		want = want / 2 < least && want > least ? least : want / 2;
	}
	s.base = base;
	if (base && arrays(&s)) {
		nvs_spans[n] = s;
		atomic_store_explicit(&nvs_spans_used, n + 1, memory_order_release);
		added = true;
	}
	nvs_unlock(&spans_lock);
	return added;
}

/* A free run of so many granules; s->granules: there is none. */
static uint32_t find_run(struct span *s, uint32_t granules)
{
	uint32_t i = s->next_fit;
	bool wrapped = false;

	for (;;) {
		if (i >= s->granules) {
			if (wrapped)
				return s->granules;
			wrapped = true;
			i = 0;
		}
		if (wrapped && i >= s->next_fit)
			return s->granules;
		if (s->head[i]) {
			i += s->region[i].granules;
		} else {
			if (s->run[i] >= granules)
				return i;
			i += s->run[i];
		}
	}
}

static void set_run(struct span *s, uint32_t first, uint32_t granules)
{
	if (granules)
		s->run[first] = s->run[first + granules - 1] = granules;
}

static void take_run(struct span *s, uint32_t first, uint32_t granules)
{
	set_run(s, first + granules, s->run[first] - granules);
	for (uint32_t i = first; i < first + granules; i++)
		__atomic_store_n(&s->head[i], first + 1, __ATOMIC_RELEASE);
	s->next_fit = first + granules;
}

static uint32_t piece_of(struct nvs_gpu *gpu)
{
	uint64_t piece = gpu->device.total_mem / GRANULE / PIECES;

	return piece < PIECE ? PIECE : piece > PIECE_LARGE ? PIECE_LARGE : (uint32_t)piece;
}

struct place nvs_region_new(struct nvs_gpu *gpu, uint32_t granules)
{
	unsigned used = atomic_load_explicit(&nvs_spans_used, memory_order_acquire);
	struct place p = { NULL, 0 };
	struct region *r;

	for (unsigned i = 0; i < used && !p.span; i++) {
		p.granule = nvs_spans[i].gpu == gpu ? find_run(&nvs_spans[i], granules)
							    : nvs_spans[i].granules;
		if (p.granule < nvs_spans[i].granules)
			p.span = &nvs_spans[i];
	}
	if (!p.span)
		return p;
	r = region_of(p);
	*r = (struct region){ .granules = granules,
			      .piece = piece_of(gpu) };
	take_run(p.span, p.granule, granules);
	for (uint32_t i = 0; i < granules; i += r->piece)
		p.span->chunk[p.granule + i] = (struct chunk){
			.granules = granules - i < r->piece ? granules - i : r->piece,
		};
	return p;
}

void nvs_region_drop(struct place p)
{
	struct span *s = p.span;
	uint32_t first = p.granule, n = region_of(p)->granules;

	for (uint32_t i = first; i < first + n; i++) {
		s->chunk[i].state = CHUNK_NONE;
		__atomic_store_n(&s->head[i], 0, __ATOMIC_RELEASE);
	}
	if (first + n < s->granules && !s->head[first + n])
		n += s->run[first + n];
	if (first > 0 && !s->head[first - 1]) {
		n += s->run[first - 1];
		first -= s->run[first - 1];
	}
	set_run(s, first, n);
	if (s->next_fit > first && s->next_fit <= first + n)
		s->next_fit = first; /* never inside a run */
}

struct place nvs_place_of(uint64_t address)
{
	unsigned used = atomic_load_explicit(&nvs_spans_used, memory_order_acquire);

	for (unsigned i = 0; i < used; i++) {
		struct span *s = &nvs_spans[i];

		if (address - s->base < bytes_of(s->granules))
			return (struct place){ s, (uint32_t)((address - s->base) / GRANULE) };
	}
	return (struct place){ NULL, 0 };
}

struct nvs_gpu *nvs_swap_gpu_of(CUdeviceptr address)
{
	struct place p = nvs_place_of(address);

	return p.span ? p.span->gpu : NULL;
}

/* Steps over a region or a run of free granules. */
static uint32_t step(const struct span *s, uint32_t i)
{
	return i + (s->head[i] ? s->region[i].granules : s->run[i]);
}

/* Finds a chunk in one of these states in the region at i, from granule `from` on. */
static bool in_region(struct span *s, uint32_t i, uint32_t from, unsigned states,
		      uint32_t *found)
{
	const struct region *r = &s->region[i];
	uint32_t j = i, end = i + (r->kind < REGION_APP ? r->granules : r->end);

	if (!s->head[i] || r->dying || r->cached ||
	    (r->pinned && states & 1u << CHUNK_HERE && !(states & 1u << CHUNK_PINNED)))
		return false;
	if (from > i)
		j += (from - i + r->piece - 1) / r->piece * r->piece;
	for (; j < end; j += r->piece)
		if (states & 1u << s->chunk[j].state) {
			*found = j;
			return true;
		}
	return false;
}

bool nvs_chunk_next(struct nvs_gpu *gpu, unsigned states, struct place *at, uint32_t *looked)
{
	unsigned used = atomic_load_explicit(&nvs_spans_used, memory_order_acquire);

	/* Once round at most: the spans after the place, then from the first on. */
	while (*looked <= used) {
		struct span *s = at->span;

		if (s && s->gpu == gpu && at->granule < s->granules) {
			uint32_t head = s->head[at->granule], i, found;

			/* The beginning of the region or run that the place is in now. */
			i = head ? head - 1 : 0;
			while (!head && step(s, i) <= at->granule)
				i = step(s, i);
			for (; i < s->granules; i = step(s, i))
				if (in_region(s, i, at->granule, states, &found)) {
					at->granule = found;
					return true;
				}
		}
		if (!used)
			return false;
		at->span = s && s + 1 < nvs_spans + used ? s + 1 : nvs_spans;
		at->granule = 0;
		++*looked;
	}
	return false;
}
