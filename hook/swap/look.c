// SPDX-License-Identifier: Apache-2.0
/*
 * look.c: what memory that leaves the GPU contains. A kernel (look_abi.h) reads it first, some 50
 * times as fast as the link copies: granules that are zero need no copy and no host memory, and
 * those that are as they were when they left last are still in the arena.
 *
 * The kernel is loaded at a context's first move out, never where all memory fits, by a thread that
 * holds no lock: the driver compiles the kernel in a library that it opens, and so may wait for a
 * thread of the program that opens or closes one and frees memory meanwhile. What leaves before that is
 * done is copied.
 *
 * The kernel runs in a stream of its own: copies of earlier runs go on. But the driver may have a load, or a kernel, wait for
 * the context's other streams. A drain comes first, and leaves out streams that only wait for a
 * word (memop.c): somebody may write it as late as in a later turn. So a process that has ever put
 * such a wait into a stream is not looked at: all is copied.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "futex.h"
#include "log.h"
#include "look_ptx.h"
#include "stream.h"
#include "swap.h"
#include "swap_impl.h"
#include "thread.h"

#define BATCH    1024u /* granules that a launch reads, at most */
#define RETRY_NS (50 * NVS_MS) /* memory is short when memory moves, and a pass is soon over */

/*
 * What a launch is asked and answers: host memory that the kernel uses. A copy of it would wait
 * behind the copies of what leaves.
 */
struct talk {
	uint64_t piece[BATCH];
	struct look_part part[BATCH][LOOK_PARTS];
};

enum load {
	LOAD_NOT,
	LOAD_RUNS,  /* a thread loads the kernel, and has module, function and result */
	LOAD_ENDED, /* the move lock guards them again */
};

/* Of a GPU; the move lock guards it. The keys stay as long as the process: sums are compared over contexts. */
struct looker {
	struct look_keys keys;
	atomic_int load; /* enum load */
	int result;      /* of the load; CUDA_ERROR_NOT_READY: it did not begin */
	void *into;      /* the context */
	bool stale;      /* the mover has another one meanwhile */
	void *module, *function, *stream; /* of the context, as the next two */
	struct talk *talk;
	CUdeviceptr keys_there;
	uint64_t failed_ns; /* there was no memory to load it; 0: there was */
	bool loaded, refused;
};

static bool wanted;
static atomic_bool streams_wait; /* or have waited */

void nvs_look_init(void)
{
	const char *all = secure_getenv("NVSHARE_MOVE_ALL");

	wanted = !all || strcmp(all, "1") != 0;
}

void nvs_look_forget(struct nvs_gpu *gpu)
{
	struct looker *l = gpu->swap->look;

	if (l) {
		l->stale = atomic_load(&l->load) != LOAD_NOT;
		if (!l->stale)
			l->module = l->function = NULL;
		l->stream = NULL;
		l->talk = NULL;
		l->keys_there = l->failed_ns = 0;
		l->loaded = l->refused = false;
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

/* Each step that succeeded is not repeated. What a call that failed has stored means nothing. */
#define STEP(member, call) \
	if (result == CUDA_SUCCESS && !l->member && (result = (call)) != CUDA_SUCCESS) \
		l->member = 0

/*
 * Nobody destroys the context as long as nvs_gpu_loads(); so a load does not begin late, and what comes
 * later than that is not used.
 */
static void *load_main(void *arg)
{
	struct nvs_gpu *gpu = arg;
	struct looker *l = gpu->swap->look;
	int result = CUDA_ERROR_NOT_READY;
	void *popped;

	nvs_thread_setup("nvshare-look");
	if (nvs_elapsed(nvs_now(), atomic_load(&gpu->load_ns)) < NVS_LOAD_NS / 2 && nvs_driver_enter()) {
		result = nvs_driver.ctx_push(l->into);
		if (result == CUDA_SUCCESS) {
			STEP(module, nvs_memory_driver.module_load(&l->module, nvs_look_ptx));
			STEP(function, nvs_memory_driver.module_function(&l->function, l->module, LOOK_NAME));
			nvs_driver.ctx_pop(&popped);
		}
		nvs_driver_leave();
		if (!nvs_gpu_loads(gpu))
			result = CUDA_ERROR_INVALID_CONTEXT;
	}
	l->result = result;
	atomic_store(&gpu->load_ns, 0); /* first: once it has ended, another one may begin */
	atomic_store(&l->load, LOAD_ENDED);
	return NULL;
}

/* Memory may have been short: whether so long ago that the driver is to be asked again. */
static bool due(const struct looker *l)
{
	return !l->loaded && !l->refused && (!l->failed_ns || nvs_elapsed(nvs_now(), l->failed_ns) >= RETRY_NS);
}

static void tried(struct nvs_gpu *gpu, int result)
{
	struct looker *l = gpu->swap->look;

	l->refused = result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && result != CUDA_ERROR_NOT_READY;
	l->failed_ns = result == CUDA_SUCCESS ? 0 : nvs_now();
	if (l->refused)
		nvs_debugf("GPU %u: what memory contains cannot be looked at: error %d; all of it is copied", gpu->number, result);
}

/* What the thread has loaded, if it has ended. */
static void take(struct nvs_gpu *gpu)
{
	struct looker *l = gpu->swap->look;

	if (atomic_load(&l->load) != LOAD_ENDED)
		return;
	atomic_store(&l->load, LOAD_NOT);
	if (l->stale)
		l->module = l->function = NULL;
	else
		tried(gpu, l->result);
	l->stale = false;
}

/* Returns whether a thread is to load the kernel. The move lock is held. */
static bool load_begin(struct nvs_gpu *gpu)
{
	struct looker *l = gpu->swap->look;
	void *ctx = nvs_mover_context(gpu), *popped;

	if (!ctx)
		return false;
	nvs_driver.ctx_pop(&popped);
	nvs_driver_leave();
	take(gpu);
	if (atomic_load(&l->load) != LOAD_NOT || l->function || !due(l))
		return false;
	l->into = ctx;
	atomic_store(&gpu->load_ns, nvs_now());
	if (atomic_load(&streams_wait)) { /* who says so has not seen the load, and does not wait for it */
		atomic_store(&gpu->load_ns, 0);
		return false;
	}
	atomic_store(&l->load, LOAD_RUNS);
	return true;
}

void nvs_look_load(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	bool begun;

	if (!wanted || atomic_load(&streams_wait))
		return;
	nvs_lock(&gpu->move_lock);
	if (!s->look)
		s->look = look_new();
	begun = s->look && load_begin(gpu);
	nvs_unlock(&gpu->move_lock);
	if (begun && !nvs_thread_start(load_main, gpu)) {
		s->look->result = CUDA_ERROR_NOT_READY;
		atomic_store(&gpu->load_ns, 0);
		atomic_store(&s->look->load, LOAD_ENDED);
	}
}

void nvs_look_loaded(struct nvs_gpu *gpu)
{
	while (nvs_gpu_loads(gpu))
		nvs_nap(NVS_MS);
}

void nvs_swap_stream_waits(void)
{
	if (!atomic_load_explicit(&streams_wait, memory_order_relaxed))
		atomic_store(&streams_wait, true);
	NVS_FOR_EACH_GPU(gpu)
		nvs_look_loaded(gpu); /* also the second thread that comes here meanwhile */
}

/* What the kernel needs in the context. Returns CUresult. */
static int prepare(struct looker *l)
{
	int result = CUDA_SUCCESS;

	STEP(stream, nvs_driver.stream_create(&l->stream, CU_STREAM_NON_BLOCKING));
	STEP(talk, nvs_memory_driver.host_alloc((void **)&l->talk, sizeof(*l->talk), CU_HOST_ALLOC_MAPPED));
	STEP(keys_there, nvs_memory_driver.mem_alloc(&l->keys_there, sizeof(l->keys)));
#undef STEP
	if (result == CUDA_SUCCESS)
		result = nvs_memory_driver.copy_to_device(l->keys_there, &l->keys, sizeof(l->keys), l->stream);
	return result;
}

/* Whether the kernel can run in the current context. */
static bool look_ready(struct nvs_gpu *gpu)
{
	struct looker *l = gpu->swap->look;
	int result;

	if (!l || atomic_load(&streams_wait))
		return false;
	take(gpu);
	if (atomic_load(&l->load) == LOAD_NOT && l->function && due(l)) {
		result = prepare(l);
		l->loaded = result == CUDA_SUCCESS;
		tried(gpu, result);
	}
	return l->loaded;
}

/* Has the kernel read n pieces. False also if it has not answered: memory that it has not read is not zero. */
static bool look_run(struct looker *l, uint32_t n)
{
	uint64_t *pieces = l->talk->piece;
	struct look_part *parts = l->talk->part[0];
	void *params[] = { &pieces, &parts, &l->keys_there };

	for (uint32_t i = 0; i < LOOK_PARTS * n; i++)
		parts[i].any = UINT64_MAX;
	if (nvs_memory_driver.launch(l->function, LOOK_PARTS * n, 1, 1, LOOK_THREADS, 1, 1, 0, l->stream, params,
				     NULL) != CUDA_SUCCESS ||
	    nvs_driver.stream_synchronize(l->stream) != CUDA_SUCCESS)
		return false;
	for (uint32_t i = 0; i < LOOK_PARTS * n; i++)
		if (parts[i].any > 1)
			return false;
	return true;
}

/* A run's granules, in the order of their addresses. */
struct walk {
	struct place at; /* a chunk */
	uint32_t chunks; /* from there on */
	uint32_t i;      /* the granule in it */
};

/* The next granule of a chunk that has content. False: there is none. */
static bool next_granule(struct walk *w, struct place *p)
{
	while (w->chunks) {
		const struct chunk *c = chunk_of(w->at);

		if (w->i < c->granules && c->opens == TOUCHED) {
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
static void decide(struct nvs_gpu *gpu, struct place p, bool known, const struct look_part *part)
{
	struct content *c = &p.span->content[p.granule];
	struct nvs_swap *s = gpu->swap;
	uint64_t sum[LOOK_SUMS] = { 0 }, any = 0;

	for (uint32_t i = 0; i < LOOK_PARTS; i++) {
		for (uint32_t k = 0; k < LOOK_SUMS; k++)
			sum[k] += part[i].sum[k];
		any |= part[i].any;
	}
	c->moves = false;
	if (!any) {
		nvs_arena_vacate(gpu, p);
		s->zero_bytes += GRANULE;
	} else if (known && p.span->store[p.granule] != NVS_STORE_NOWHERE &&
		   memcmp(c->sum, sum, sizeof(sum)) == 0) {
		s->clean_bytes += GRANULE;
	} else {
		c->moves = true;
	}
	memcpy(c->sum, sum, sizeof(sum));
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

		for (n = 0; n < BATCH && next_granule(&ask, &p); n++) {
			p.span->content[p.granule].moves = true;
			if (l)
				l->talk->piece[n] = address_of(p);
		}
		seen = seen && (!n || look_run(l, n));
		nvs_swap_lock(gpu->swap);
		for (uint32_t i = 0; seen && i < n; i++) {
			next_granule(&batch, &p);
			decide(gpu, p, chunk_of(batch.at)->copy == COPY_KNOWN, l->talk->part[i]);
		}
		nvs_swap_unlock(gpu->swap);
	} while (n == BATCH);
	nvs_swap_lock(gpu->swap);
	for (; told.chunks; told.chunks--, next_chunk(&told.at))
		if (chunk_of(told.at)->opens == TOUCHED)
			chunk_of(told.at)->copy = seen ? COPY_KNOWN : COPY_UNKNOWN;
	nvs_swap_unlock(gpu->swap);
	if (!seen) /* half of a memory that the kernel could not read is no better than none */
		for (told = (struct walk){ first, chunks, 0 }; next_granule(&told, &p);)
			p.span->content[p.granule].moves = true;
}
