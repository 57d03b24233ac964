// SPDX-License-Identifier: Apache-2.0
/*
 * look.c: what memory that leaves the GPU contains. A kernel (look_abi.h) reads it first, some 50
 * times as fast as the link copies: granules that are zero need no copy and no host memory, and
 * those that are as they were when they left last are still in the arena.
 *
 * The kernel is loaded at a context's first move out, never where all memory fits. That is
 * after a drain, so a load that waits for the context waits for nothing of the application's. It
 * runs in a stream of its own: copies of earlier runs go on.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "log.h"
#include "look_ptx.h"
#include "swap_impl.h"

#define JOBS  1024u /* granules that a launch reads, at most */
#define TRIES 3u    /* memory is short when memory moves */

/* Of a GPU; the mover's. The keys stay as long as the process: sums are compared over contexts. */
struct looker {
	struct look_keys keys;
	struct look_job jobs[JOBS];
	void *module, *function, *stream;
	CUdeviceptr memory; /* of the context: keys, then jobs */
	unsigned tries;
	bool loaded;
};

static bool wanted;

void nvs_look_init(void)
{
	const char *all = secure_getenv("NVSHARE_MOVE_ALL");

	wanted = !all || strcmp(all, "1") != 0;
}

void nvs_look_forget(struct nvs_gpu *gpu)
{
	struct looker *l = gpu->swap->look;

	if (l) {
		l->module = l->function = l->stream = NULL;
		l->memory = 0;
		l->tries = 0;
		l->loaded = false;
	}
}

static bool random_bytes(void *to, size_t n)
{
	for (char *p = to; n;) {
		long got = syscall(SYS_getrandom, p, n, 0);

		if (got <= 0)
			return false;
		p += got;
		n -= (size_t)got;
	}
	return true;
}

static struct looker *look_new(void)
{
	struct looker *l = mmap(NULL, sizeof(*l), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (l == MAP_FAILED)
		return NULL;
	if (random_bytes(&l->keys, sizeof(l->keys)))
		return l;
	munmap(l, sizeof(*l));
	return NULL;
}

/* Each step that succeeded is not repeated. Returns CUresult. */
static int load(struct looker *l)
{
	int result = CUDA_SUCCESS;

	if (!l->module)
		result = nvs_memory_driver.module_load(&l->module, nvs_look_ptx);
	if (result == CUDA_SUCCESS && !l->function)
		result = nvs_memory_driver.module_function(&l->function, l->module, LOOK_NAME);
	if (result == CUDA_SUCCESS && !l->stream)
		result = nvs_driver.stream_create(&l->stream, CU_STREAM_NON_BLOCKING);
	if (result == CUDA_SUCCESS && !l->memory)
		result = nvs_memory_driver.mem_alloc(&l->memory, sizeof(l->keys) + sizeof(l->jobs));
	if (result == CUDA_SUCCESS)
		result = nvs_memory_driver.copy_to_device(l->memory, &l->keys, sizeof(l->keys), l->stream);
	return result;
}

/* Whether the kernel can run in the current context. */
static bool look_ready(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	int result;

	if (!wanted)
		return false;
	if (!s->look)
		s->look = look_new();
	if (!s->look || s->look->loaded || s->look->tries == TRIES)
		return s->look && s->look->loaded;
	result = load(s->look);
	s->look->loaded = result == CUDA_SUCCESS;
	if (s->look->loaded)
		return true;
	if (++s->look->tries < TRIES && result == CUDA_ERROR_OUT_OF_MEMORY)
		return false;
	s->look->tries = TRIES;
	nvs_debugf("GPU %u: what memory contains cannot be looked at: error %d; all of it is copied", gpu->number, result);
	return false;
}

/* Has the kernel do n jobs. */
static bool look_run(struct looker *l, uint32_t n)
{
	CUdeviceptr keys = l->memory, jobs = l->memory + sizeof(l->keys);
	void *params[] = { &jobs, &keys };
	uint64_t bytes = n * sizeof(l->jobs[0]);

	return nvs_memory_driver.copy_to_device(jobs, l->jobs, bytes, l->stream) == CUDA_SUCCESS &&
	       nvs_memory_driver.launch(l->function, LOOK_PARTS * n, 1, 1, LOOK_THREADS, 1, 1, 0, l->stream, params,
					NULL) == CUDA_SUCCESS &&
	       nvs_memory_driver.copy_to_host(l->jobs, jobs, bytes, l->stream) == CUDA_SUCCESS &&
	       nvs_driver.stream_synchronize(l->stream) == CUDA_SUCCESS;
}

/* A run's granules, in the order of their addresses. */
struct walk {
	struct place at; /* a chunk */
	uint32_t chunks; /* from there on */
	uint32_t i;      /* the granule in it */
};

/* The next granule that leaves for the arena. False: there is none. */
static bool next_granule(struct walk *w, struct place *p)
{
	while (w->chunks) {
		const struct chunk *c = chunk_of(w->at);

		if (w->i < c->granules && leaves_for_arena(w->at)) {
			*p = (struct place){ w->at.span, w->at.granule + w->i++ };
			return true;
		}
		next_chunk(&w->at);
		w->chunks--;
		w->i = 0;
	}
	return false;
}

/* What the kernel has found in a granule. The lock is held. */
static void decide(struct nvs_gpu *gpu, struct place p, bool known, const struct look_job *job)
{
	struct content *c = &p.span->content[p.granule];
	struct nvs_swap *s = gpu->swap;

	c->moves = false;
	if (!job->any) {
		nvs_arena_vacate(gpu, p);
		s->zero_bytes += GRANULE;
	} else if (known && p.span->store[p.granule] != NVS_STORE_NOWHERE &&
		   memcmp(c->sum, job->sum, sizeof(c->sum)) == 0) {
		s->clean_bytes += GRANULE;
	} else {
		c->moves = true;
	}
	memcpy(c->sum, job->sum, sizeof(c->sum));
}

void nvs_look(struct nvs_gpu *gpu, struct place first, uint32_t chunks)
{
	struct walk ask = { first, chunks, 0 }, told = ask;
	struct looker *l = look_ready(gpu) ? gpu->swap->look : NULL;
	struct place p;
	bool seen = l;
	uint32_t n;

	do {
		struct walk batch = ask;

		for (n = 0; n < JOBS && next_granule(&ask, &p); n++) {
			p.span->content[p.granule].moves = true;
			if (l)
				l->jobs[n] = (struct look_job){ .address = address_of(p) };
		}
		seen = seen && (!n || look_run(l, n));
		nvs_swap_lock(gpu->swap);
		for (uint32_t i = 0; seen && i < n; i++) {
			next_granule(&batch, &p);
			decide(gpu, p, chunk_of(batch.at)->copy == COPY_KNOWN, &l->jobs[i]);
		}
		nvs_swap_unlock(gpu->swap);
	} while (n == JOBS);
	nvs_swap_lock(gpu->swap);
	for (; told.chunks; told.chunks--, next_chunk(&told.at))
		if (leaves_for_arena(told.at))
			chunk_of(told.at)->copy = seen ? COPY_KNOWN : COPY_UNKNOWN;
	nvs_swap_unlock(gpu->swap);
	if (!seen) /* half of a memory that the kernel could not read is no better than none */
		for (told = (struct walk){ first, chunks, 0 }; next_granule(&told, &p);)
			p.span->content[p.granule].moves = true;
}
