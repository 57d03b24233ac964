// SPDX-License-Identifier: Apache-2.0
/*
 * carry.c: memory that goes to another GPU with its process, without a way through host
 * memory. A copier, a program that the scheduler runs, creates memory on the other GPU for
 * a run of the mover, and answers with a descriptor. The process maps that memory, copies
 * the run and unmaps it. It keeps nothing but these descriptors while the driver
 * checkpoints and restores it there, and then copies from them into memory of its own.
 *
 * Where the process cannot map the memory, the copier copies: it gets descriptors of the
 * chunks. That takes twice as long, as each chunk is exported, imported and mapped again.
 *
 * That an exported descriptor alone keeps memory, that a process that holds some, or has
 * had memory of the other GPU mapped, can be checkpointed, and that imported memory cannot
 * be exported again (error 1: so it is copied) was seen on two H100, driver 580.159.04.
 *
 * The first failure on the way out ends that way: the run is still where it was, and
 * what is left goes to the arena. A process that is not restored on the other GPU has its
 * memory brought back by a copier to this one.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "descriptor.h"
#include "log.h"
#include "packet.h"
#include "swap.h"
#include "swap_impl.h"

#define MAX_CARRIED 4096u
/* A copier that says nothing for so long is given up. A run takes milliseconds. */
#define ANSWER_NS (10 * NVS_S)
/* So long after the first failure to bring memory back, it is lost. */
#define LOST_NS (60 * NVS_S)

struct copier {
	struct nvs_descriptor socket; /* -1: there is none */
	bool back;                    /* it copies to this GPU, not from it */
	bool creates;                 /* it creates memory, which this process can map */
	uint8_t gpu[NVS_UUID_SIZE];   /* it copies to this one */
};

/*
 * The copy of a run. A chunk's store has the number of the entry, and where in the copy
 * the chunk begins: within the first CARRY_RUN granules.
 */
struct carried {
	struct nvs_descriptor file;  /* of the copy; -1: there is none yet, or no more */
	unsigned long long handle;   /* while it goes out or comes in: the copy, imported ... */
	CUdeviceptr at;              /* ... and mapped here, until the last chunk is in; 0: not */
	uint32_t granules;
	uint32_t chunks;             /* that are not in yet */
	bool used;
	uint8_t gpu[NVS_UUID_SIZE];  /* the copy is on this one */
};

#define OFFSET_BITS 12u
_Static_assert(NVS_COPIED_AT_ONCE <= NVS_PACKET_FDS, "descriptors of a request");
_Static_assert(CARRY_RUN < 1u << OFFSET_BITS, "the beginning of a chunk");
_Static_assert(MAX_CARRIED << OFFSET_BITS <= 1u << 24, "the number of an entry");

/*
 * Of a GPU. Guarded by its swap lock, except for the entries of chunks that are CHUNK_BUSY:
 * the mover alone has their file and copy. An entry whose last chunk is freed is left to the
 * mover, too. The mover alone uses the copier, and changes it between
 * two passes only: so each answer is read by the pass that has asked for it.
 */
struct nvs_carry {
	struct copier now, next;
	bool ends;          /* the next pass begins with `next`, and asks this one for no more */
	bool take;          /* the process has arrived: its memory is to come in at once */
	bool astray;        /* a copy is not on the GPU of the process */
	int out[NVS_COPIED_AT_ONCE]; /* descriptors of a request ... */
	atomic_uint outs;            /* ... so many: a child closes them, or it keeps their memory */
	uint64_t failed_ns; /* since when bringing memory back fails; 0: it does not */
	uint32_t count, place, most; /* place: where the next search for an entry begins */
	uint32_t mapped;             /* entries whose copy is mapped */
	uint32_t ended;              /* entries without chunks, whose copy is to be closed */
	struct carried *run;         /* of the run that is picked; NULL: none of it is carried yet */
	struct carried carried[MAX_CARRIED];
};

bool nvs_carry_capable(void)
{
	bool any = false;

	NVS_FOR_EACH_GPU(gpu)
		any = any || (gpu->swap->capable && gpu->swap->posix_fd);
	return any && nvs_memory_driver_has(mem_export) && nvs_memory_driver_has(mem_import) && nvs_memory_driver_has(copy_on_device) &&
	       nvs_memory_driver_has(address_free);
}

static struct carried *carry_entry(struct nvs_gpu *gpu, struct place p)
{
	uint32_t store = p.span->store[p.granule];

	return &gpu->swap->carry->carried[(store & ~NVS_STORE_CARRIED) >> OFFSET_BITS];
}

bool nvs_carried(struct place p)
{
	return (p.span->store[p.granule] & NVS_STORE_CARRIED) == NVS_STORE_CARRIED;
}

/* ---- the copier ---- */

/* Whether a copy is on another GPU than the process. */
static bool carry_elsewhere(const struct nvs_gpu *gpu, const struct carried *e)
{
	return memcmp(e->gpu, gpu->device.uuid, NVS_UUID_SIZE) != 0;
}

/*
 * Whether any copy is. A process may have copies on several GPUs, if it moves on before all
 * have come in. The lock is held.
 */
static bool any_elsewhere(const struct nvs_gpu *gpu)
{
	const struct nvs_carry *c = gpu->swap->carry;
	bool any = false;

	for (uint32_t i = 0; c->count && !any && i < MAX_CARRIED; i++)
		any = c->carried[i].used && c->carried[i].chunks && carry_elsewhere(gpu, &c->carried[i]);
	return any;
}

void nvs_carry_pass(struct nvs_gpu *gpu, bool out)
{
	struct nvs_carry *c = gpu->swap->carry;

	nvs_swap_lock(gpu->swap);
	if (c && !out) /* also of a process that never went, because the rest of its tenant did not */
		c->astray = any_elsewhere(gpu);
	if (c && c->ends) {
		nvs_descriptor_close(&c->now.socket);
		c->now = c->next;
		c->next.socket.fd = -1;
		c->ends = false;
	}
	nvs_swap_unlock(gpu->swap);
}

/* What comes with the next pass. The lock is held. */
static void replace(struct nvs_carry *c, struct copier next)
{
	nvs_descriptor_close(&c->next.socket);
	c->next = next;
	c->ends = true;
}

/* The copier is asked for no more: a request's answer may be left unread. What is left goes to the arena. */
static void end_copier(struct nvs_gpu *gpu)
{
	nvs_swap_lock(gpu->swap);
	nvs_descriptor_close(&gpu->swap->carry->now.socket);
	nvs_swap_unlock(gpu->swap);
}

/* So many descriptors leave the application half of what it may have. */
static uint32_t most_descriptors(void)
{
	struct rlimit r;

	/* By the system call, as symbols.sh wants no name that it does not know. */
	if (syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &r) != 0)
		return 0;
	return r.rlim_cur / 2 < MAX_CARRIED ? (uint32_t)(r.rlim_cur / 2) : MAX_CARRIED;
}

void nvs_swap_copier(struct nvs_gpu *gpu, const struct nvs_copier *f, int fd)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_carry *c = s->carry;
	struct copier next;

	if (fd < 0)
		return;
	if (!c && s->mover && nvs_carry_capable()) {
		void *p = mmap(NULL, sizeof(*c), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		c = p == MAP_FAILED ? NULL : p;
		if (c)
			c->now.socket.fd = c->next.socket.fd = -1;
	}
	if (!c) {
		close(fd);
		return;
	}
	nvs_swap_lock(s);
	next.socket = nvs_descriptor_of(fd);
	next.back = memcmp(f->gpu, gpu->device.uuid, NVS_UUID_SIZE) == 0;
	next.creates = f->flags & NVS_COPIER_CREATES;
	memcpy(next.gpu, f->gpu, NVS_UUID_SIZE);
	replace(c, next);
	c->take = next.back && c->astray;
	c->most = most_descriptors();
	s->carry = c;
	nvs_swap_unlock(s);
	nvs_swap_kick(s);
}

/*
 * Away from the numbers that an application uses: all copies are files of one device, so
 * nvs_descriptor_is() cannot tell them apart where the application closes a number twice, or
 * has closed 0 to 2.
 */
static int out_of_the_way(const struct nvs_carry *c, int fd)
{
	int high = fcntl(fd, F_DUPFD_CLOEXEC, c->most > 3 ? (int)c->most : 3);

	if (high < 0)
		return fd;
	close(fd);
	return high;
}

static bool carry_ready(const struct nvs_carry *c, short events)
{
	struct pollfd p = { .fd = c->now.socket.fd, .events = events };
	struct timespec t = { ANSWER_NS / NVS_S, 0 };

	return nvs_descriptor_is(&c->now.socket) && syscall(SYS_ppoll, &p, 1, &t, NULL, 8) == 1;
}

static bool send_request(const struct nvs_carry *c, const struct nvs_copy *q, const int *fd)
{
	return carry_ready(c, POLLOUT) &&
	       nvs_packet_send(c->now.socket.fd, q, offsetof(struct nvs_copy, granules) + q->pieces * sizeof(q->granules[0]),
			       fd, q->pieces);
}

/* Returns the copy's descriptor, or -1. *result: CUresult; below 0 where there is no answer. */
static int receive_answer(const struct nvs_carry *c, int *result)
{
	struct nvs_copy a;
	unsigned count = 1;
	int fd = -1;

	*result = -1;
	if (!carry_ready(c, POLLIN) ||
	    nvs_packet_receive(c->now.socket.fd, &a, offsetof(struct nvs_copy, granules), &fd, &count) != 1)
		return -1;
	if (a.result != CUDA_SUCCESS && count) {
		close(fd);
		fd = -1;
	}
	*result = a.result;
	if (fd >= 0)
		fd = out_of_the_way(c, fd);
	else
		nvs_debugf("the copier cannot copy: error %d", a.result);
	return fd;
}

/* ---- copies ---- */

/* Maps memory at a reserved address. */
static int map_at(struct nvs_gpu *gpu, CUdeviceptr at, uint64_t bytes, unsigned long long handle)
{
	struct cu_access access = { { CU_MEM_LOCATION_TYPE_DEVICE, gpu->device.dev }, CU_MEM_ACCESS_READWRITE };
	int result = nvs_memory_driver.mem_map(at, bytes, 0, handle, 0);

	if (result != CUDA_SUCCESS)
		return result;
	result = nvs_memory_driver.set_access(at, bytes, &access, 1);
	if (result != CUDA_SUCCESS)
		nvs_memory_driver.mem_unmap(at, bytes);
	return result;
}

/* Maps a copy. */
static int import(struct nvs_gpu *gpu, struct carried *e)
{
	uint64_t bytes = bytes_of(e->granules);
	unsigned long long handle;
	CUdeviceptr at;
	int result;

	if (!nvs_descriptor_is(&e->file))
		return CUDA_ERROR_NOT_FOUND;
	result = nvs_memory_driver.mem_import(&handle, (void *)(intptr_t)e->file.fd, CU_MEM_HANDLE_POSIX_FD);
	if (result != CUDA_SUCCESS)
		return result;
	result = nvs_memory_driver.address_reserve(&at, bytes, GRANULE, 0, 0);
	if (result == CUDA_SUCCESS) {
		result = map_at(gpu, at, bytes, handle);
		if (result != CUDA_SUCCESS)
			nvs_memory_driver.address_free(at, bytes);
	}
	if (result != CUDA_SUCCESS) {
		nvs_memory_driver.mem_release(handle);
		return result;
	}
	nvs_swap_lock(gpu->swap);
	e->handle = handle;
	e->at = at;
	gpu->swap->carry->mapped++;
	nvs_swap_unlock(gpu->swap);
	return result;
}

/* Unmaps a copy. */
static void carry_unmap(struct nvs_gpu *gpu, struct carried *e)
{
	nvs_memory_driver.mem_unmap(e->at, bytes_of(e->granules));
	nvs_memory_driver.address_free(e->at, bytes_of(e->granules));
	nvs_memory_driver.mem_release(e->handle);
	nvs_swap_lock(gpu->swap);
	e->at = 0;
	gpu->swap->carry->mapped--;
	nvs_swap_unlock(gpu->swap);
}

/* Begins to copy between a chunk and its place in the copy, which is mapped. */
static int copy_chunk(struct nvs_gpu *gpu, struct carried *e, struct place p, bool out)
{
	CUdeviceptr here = address_of(p), there = e->at + bytes_of(p.span->store[p.granule] & ((1u << OFFSET_BITS) - 1));

	return nvs_memory_driver.copy_on_device(out ? there : here, out ? here : there, bytes_of(chunk_of(p)->granules),
					 gpu->swap->stream);
}

/* ---- out ---- */

/* Whether there is a copier to another GPU. The lock is held. */
static bool leads_out(const struct nvs_carry *c)
{
	return c && !c->ends && c->now.socket.fd >= 0 && !c->now.back;
}

bool nvs_carry_out(struct nvs_gpu *gpu)
{
	struct nvs_carry *c = gpu->swap->carry;

	if (c)
		c->run = NULL;
	return leads_out(c);
}

/* An entry for the run. The lock is held. */
static struct carried *carry_add(struct nvs_gpu *gpu)
{
	struct nvs_carry *c = gpu->swap->carry;

	while (c->carried[c->place].used)
		c->place = (c->place + 1) % MAX_CARRIED;
	c->count++;
	c->carried[c->place] = (struct carried){ .used = true, .file = NVS_NO_DESCRIPTOR };
	memcpy(c->carried[c->place].gpu, c->now.gpu, NVS_UUID_SIZE);
	return &c->carried[c->place];
}

bool nvs_carry_alloc(struct nvs_gpu *gpu, struct place p)
{
	struct nvs_carry *c = gpu->swap->carry;
	struct carried *e;

	if (!leads_out(c) || (!c->run && c->count >= c->most))
		return false;
	if (!c->run)
		c->run = carry_add(gpu);
	e = c->run;
	p.span->store[p.granule] = NVS_STORE_CARRIED | (uint32_t)(e - c->carried) << OFFSET_BITS | e->granules;
	chunk_of(p)->copy = COPY_UNKNOWN;
	e->granules += chunk_of(p)->granules;
	e->chunks++;
	return true;
}

void nvs_carry_free(struct nvs_gpu *gpu, struct place p)
{
	struct carried *e = carry_entry(gpu, p);

	p.span->store[p.granule] = 0;
	gpu->swap->carry->ended += --e->chunks == 0;
}

/* Whether a chunk of a run that leaves is to leave by the copier. */
static bool to_carry(struct place p)
{
	return chunk_of(p)->opens == TOUCHED && nvs_carried(p);
}

bool nvs_carry_copy(struct nvs_gpu *gpu, struct place first, uint32_t chunks)
{
	struct nvs_carry *c = gpu->swap->carry;
	struct carried *e = c->run;
	struct nvs_copy q = { .bytes = bytes_of(e->granules) };
	int fd, result;

	if (!c->now.creates)
		return false;
	if (!send_request(c, &q, NULL) || (fd = receive_answer(c, &result)) < 0) {
		end_copier(gpu); /* the other GPU is full, say */
		return false;
	}
	e->file = nvs_descriptor_of(fd);
	result = import(gpu, e);
	for (; chunks && result == CUDA_SUCCESS; chunks--, next_chunk(&first))
		if (to_carry(first))
			result = copy_chunk(gpu, e, first, true);
	if (result == CUDA_SUCCESS)
		return true;
	nvs_debugf("GPU %u: cannot copy to the other GPU: error %d; the copier is asked to", gpu->number, result);
	c->now.creates = false;
	if (e->at) {
		nvs_driver.stream_synchronize(gpu->swap->stream);
		carry_unmap(gpu, e);
	}
	nvs_descriptor_close(&e->file);
	return false;
}

void nvs_carry_send(struct nvs_gpu *gpu, struct place first, uint32_t chunks)
{
	struct nvs_carry *c = gpu->swap->carry;
	struct nvs_copy q = { .pieces = 0 };
	int result = CUDA_SUCCESS;

	if (c->now.socket.fd < 0)
		return;
	for (; chunks; chunks--, next_chunk(&first)) {
		const struct chunk *chunk = chunk_of(first);

		if (!to_carry(first))
			continue;
		result = nvs_memory_driver.mem_export(&c->out[q.pieces], chunk->handle, CU_MEM_HANDLE_POSIX_FD, 0);
		if (result != CUDA_SUCCESS)
			break;
		q.granules[q.pieces++] = chunk->granules;
		atomic_store(&c->outs, q.pieces);
		q.bytes += bytes_of(chunk->granules);
	}
	if (result != CUDA_SUCCESS || !send_request(c, &q, c->out))
		end_copier(gpu); /* nvs_carry_receive() says so */
	while (q.pieces) {
		atomic_store(&c->outs, --q.pieces);
		close(c->out[q.pieces]);
	}
}

bool nvs_carry_receive(struct nvs_gpu *gpu, struct place carried)
{
	struct carried *e = carry_entry(gpu, carried);
	int result, fd;

	if (e->at) { /* the process has copied */
		carry_unmap(gpu, e);
		return true;
	}
	fd = receive_answer(gpu->swap->carry, &result);
	if (fd < 0) {
		end_copier(gpu); /* the order of answers is lost, or the other GPU is full */
		return false;
	}
	e->file = nvs_descriptor_of(fd);
	return true;
}

/* ---- in ---- */

void nvs_carry_attached(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_carry *c = s->carry;

	if (!c)
		return;
	nvs_swap_lock(s);
	replace(c, (struct copier){ .socket = NVS_NO_DESCRIPTOR });
	c->astray = any_elsewhere(gpu);
	c->take = c->count && !c->astray;
	nvs_swap_unlock(s);
}

bool nvs_carry_takes(const struct nvs_swap *s)
{
	return s->carry && s->carry->take;
}

void nvs_carry_taken(struct nvs_swap *s)
{
	struct nvs_carry *c = s->carry;

	if (!c)
		return;
	nvs_swap_lock(s);
	c->take = false;
	if (!c->count)
		nvs_descriptor_close(&c->now.socket);
	nvs_swap_unlock(s);
}

bool nvs_carry_astray(const struct nvs_swap *s)
{
	const struct nvs_carry *c = s->carry;
	const struct copier *copier = c ? c->ends ? &c->next : &c->now : NULL;

	return c && c->astray && c->count && !(copier->back && copier->socket.fd >= 0);
}

/* Bringing memory back has failed, or cannot begin. The lock is held. */
static void failed(struct nvs_gpu *gpu)
{
	struct nvs_carry *c = gpu->swap->carry;
	uint64_t now = nvs_now();

	if (!c->failed_ns)
		c->failed_ns = now;
	if (nvs_elapsed(now, c->failed_ns) < LOST_NS)
		return;
	nvs_debugf("GPU %u: memory that was copied to another GPU is lost", gpu->number);
	gpu->swap->broken = true; /* the gate opens, and calls return the driver's error */
}

bool nvs_carry_can_fetch(struct nvs_gpu *gpu, struct place p)
{
	if (!nvs_carried(p) || !carry_elsewhere(gpu, carry_entry(gpu, p)) || !nvs_carry_astray(gpu->swap))
		return true;
	failed(gpu);
	return false;
}

/* Has a copy copied back to this GPU. Returns CUresult. */
static int bring_back(struct nvs_gpu *gpu, struct carried *e)
{
	struct nvs_carry *c = gpu->swap->carry;
	struct nvs_copy q = { .bytes = bytes_of(e->granules), .pieces = 1, .granules = { e->granules } };
	int fd = -1, result = -1;

	if (nvs_descriptor_is(&e->file) && c->now.back && send_request(c, &q, &e->file.fd))
		fd = receive_answer(c, &result);
	if (fd < 0 && result == CUDA_ERROR_OUT_OF_MEMORY)
		return result; /* others have to make room; the copier is as good as before */
	if (fd < 0) {
		end_copier(gpu);
		return CUDA_ERROR_NOT_FOUND;
	}
	nvs_descriptor_close(&e->file);
	e->file = nvs_descriptor_of(fd);
	memcpy(e->gpu, gpu->device.uuid, NVS_UUID_SIZE);
	return CUDA_SUCCESS;
}

int nvs_carry_fetch(struct nvs_gpu *gpu, struct place p)
{
	struct nvs_swap *s = gpu->swap;
	struct carried *e = carry_entry(gpu, p);
	int result = CUDA_SUCCESS;

	if (!e->at && carry_elsewhere(gpu, e))
		result = bring_back(gpu, e);
	if (!e->at && result == CUDA_SUCCESS) {
		result = import(gpu, e);
		if (result == CUDA_SUCCESS)
			nvs_carry_works(gpu);
	}
	if (result == CUDA_SUCCESS)
		return copy_chunk(gpu, e, p, false);
	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		return result;
	nvs_swap_lock(s);
	failed(gpu);
	nvs_swap_unlock(s);
	return result;
}

/* A copy that is to be unmapped or closed. NULL: there is none. */
static struct carried *fetched(struct nvs_gpu *gpu, bool all)
{
	struct nvs_carry *c = gpu->swap->carry;
	struct carried *e = NULL;

	nvs_swap_lock(gpu->swap);
	for (uint32_t i = 0; c && (c->mapped || c->ended) && !e && i < MAX_CARRIED; i++)
		if (c->carried[i].used && (!c->carried[i].chunks || (all && c->carried[i].at)))
			e = &c->carried[i];
	nvs_swap_unlock(gpu->swap);
	return e;
}

/* The kernel frees the copy, which takes long: the lock is not held. */
static void close_copy(struct nvs_gpu *gpu, struct carried *e)
{
	struct nvs_carry *c = gpu->swap->carry;

	nvs_lock_check_driver();
	nvs_descriptor_close(&e->file);
	nvs_swap_lock(gpu->swap);
	e->used = false;
	c->ended--;
	if (--c->count == 0) {
		c->failed_ns = 0;
		c->astray = false;
	}
	nvs_swap_unlock(gpu->swap);
}

void nvs_carry_fetched(struct nvs_gpu *gpu, bool all)
{
	struct nvs_carry *c = gpu->swap->carry;
	struct carried *e;

	while ((e = fetched(gpu, all))) {
		if (e->at)
			carry_unmap(gpu, e);
		else
			close_copy(gpu, e);
	}
	if (!all || !c)
		return;
	nvs_swap_lock(gpu->swap);
	if (!c->count && c->now.back) /* it has contexts on both GPUs */
		nvs_descriptor_close(&c->now.socket);
	nvs_swap_unlock(gpu->swap);
}

void nvs_carry_trim(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	bool due;

	nvs_swap_lock(s);
	due = s->carry && s->carry->ended;
	nvs_swap_unlock(s);
	if (!due)
		return;
	nvs_lock(&gpu->drain_lock);
	nvs_carry_fetched(gpu, false);
	nvs_unlock(&gpu->drain_lock);
}

void nvs_carry_works(struct nvs_gpu *gpu)
{
	nvs_swap_lock(gpu->swap);
	if (gpu->swap->carry)
		gpu->swap->carry->failed_ns = 0;
	nvs_swap_unlock(gpu->swap);
}

void nvs_carry_fork_child(void)
{
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_carry *c = gpu->swap ? gpu->swap->carry : NULL; /* in the middle of the start */

		if (!c)
			continue;
		nvs_descriptor_close(&c->now.socket);
		nvs_descriptor_close(&c->next.socket);
		for (unsigned i = atomic_exchange(&c->outs, 0); i;)
			close(c->out[--i]);
		for (uint32_t i = 0; i < MAX_CARRIED && c->count; i++) {
			if (!c->carried[i].used)
				continue;
			nvs_descriptor_close(&c->carried[i].file);
			c->count--;
		}
	}
}
