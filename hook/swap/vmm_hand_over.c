// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_hand_over.c: memories that become the driver's for good.
 */
#include "gate.h"
#include "reserve.h"
#include "signals.h"
#include "vmm_impl.h"

/* The chunk is busy: it gets its memory if it has none, and is mapped where the application has mapped it, or nowhere. */
static int make_ready(struct nvs_gpu *gpu, struct place home, bool empty, bool shown)
{
	struct chunk *c = chunk_of(home);
	int result = CUDA_SUCCESS;
	unsigned tries = 0;
	uint32_t one;

	if (empty) {
		c->opens = TOUCHED;
		do {
			one = 1;
			result = nvs_chunk_fill(gpu, home, &one);
		} while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_retry(gpu, &tries));
	} else if (!shown && !c->bare) {
		result = nvs_memory_driver.mem_unmap(c->address, bytes_of(c->granules));
		c->bare = result == CUDA_SUCCESS;
	}
	return result;
}

/* The memory is the driver's from now on; it is counted already. mapped: 0: nowhere. */
static void count_as_driver(struct nvs_gpu *gpu, const struct memory *m, CUdeviceptr mapped)
{
	struct nvs_claim c = { .gpu = gpu, .bytes = bytes_of(m->granules) };
	uint64_t real = chunk_of(m->home)->handle;

	nvs_claim_keep_handle(&c, real);
	if (mapped)
		nvs_memory_mapped(nvs_memory_hold(real), mapped, c.bytes);
	if (!m->handles) {
		uint64_t stamp = nvs_memory_stamp();

		nvs_memory_driver.mem_release(real);
		nvs_memory_handle_released(real, stamp);
	}
}

/* The chunk's memory is nothing that moves any more. The lock is held. */
static void leave_chunk(struct nvs_gpu *gpu, struct memory *m, CUdeviceptr mapped)
{
	struct nvs_swap *s = gpu->swap;

	if (mapped)
		nvs_vmm_occupy(nvs_place_of(mapped), OF_DRIVER, m->granules);
	s->resident -= bytes_of(m->granules);
	s->claimed -= bytes_of(m->granules);
	nvs_arena_free(gpu, m->home);
	chunk_of(m->home)->state = CHUNK_NONE;
	m->drivers = true;
	if (!m->handles)
		nvs_vmm_forget(m);
}

/* The chunk becomes the driver's. The lock is held, and given up meanwhile, with signals blocked. */
static int leave(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk *c = chunk_of(m->home);
	CUdeviceptr mapped = nvs_vmm_shown(m) ? c->address : 0;
	bool empty = c->state == CHUNK_EMPTY;
	uint64_t bytes = empty ? bytes_of(m->granules) : 0;
	struct nvs_signals q;
	int result;

	c->state = CHUNK_BUSY;
	s->away -= bytes;
	s->resident += bytes;
	nvs_swap_unlock(s);
	nvs_signals_block(&q);
	result = make_ready(gpu, m->home, empty, mapped);
	if (result == CUDA_SUCCESS)
		count_as_driver(gpu, m, mapped);
	nvs_swap_lock(s);
	if (result == CUDA_SUCCESS) {
		leave_chunk(gpu, m, mapped);
	} else {
		c->state = empty ? CHUNK_EMPTY : CHUNK_HERE;
		s->away += bytes;
		s->resident -= bytes;
	}
	nvs_swap_unlock(s);
	nvs_signals_restore(&q);
	nvs_swap_kick(s);
	nvs_swap_lock(s);
	return result;
}

int nvs_vmm_hand_over(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_thread *t = NULL;
	uint64_t serial = m->serial;
	int result;

	/* This wait leaves no mark on the memory: a signal handler may jump out of it. */
	if (chunk_of(m->home)->state == CHUNK_AWAY) {
		nvs_swap_unlock(s);
		t = nvs_gate_enter_memory(gpu); /* all memory is on the GPU until nvs_gate_leave() */
		nvs_swap_lock(s);
		while (m->serial == serial && !nvs_vmm_idle(m))
			nvs_swap_pause(s, atomic_load(&s->kick));
	}
	if (m->serial != serial) /* another thread was faster */
		result = CUDA_ERROR_INVALID_VALUE;
	else if (m->drivers)
		result = CUDA_SUCCESS;
	else if (chunk_of(m->home)->state == CHUNK_AWAY)
		result = CUDA_ERROR_NOT_READY; /* the process ends */
	else
		result = leave(gpu, m);
	if (t)
		nvs_gate_leave(t);
	return result;
}

int nvs_vmm_share(unsigned long long *handle, int type)
{
	struct nvs_gpu *gpu = nvs_vmm_gpu(*handle);
	struct nvs_swap *s = gpu->swap;
	int result = CUDA_SUCCESS;
	struct memory *m;

	if (nvs_memory_locked)
		return CUDA_ERROR_INVALID_VALUE;
	nvs_swap_lock(s);
	m = nvs_vmm_of(s, *handle);
	if (!m || (type && !(m->handle_types & type)))
		result = CUDA_ERROR_INVALID_VALUE;
	else if (!m->drivers)
		result = nvs_vmm_hand_over(gpu, m);
	if (result == CUDA_SUCCESS) {
		*handle = chunk_of(m->home)->handle;
		result = NVS_VMM_DRIVER;
	}
	nvs_swap_unlock(s);
	return result;
}
