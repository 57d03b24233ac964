// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_hand_over.c: memories that become the driver's for good.
 */
#include "gate.h"
#include "reserve.h"
#include "signals.h"
#include "vmm_impl.h"

void nvs_vmm_unhide(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk *c = nvs_vmm_chunk(m->at);

	nvs_arena_free(gpu, m->at);
	c->state = CHUNK_BUSY;
	nvs_swap_unlock(s);
	nvs_memory_driver.mem_unmap(address_of(m->at), bytes_of(m->granules));
	nvs_swap_lock(s);
	m->real = c->handle;
	s->resident -= bytes_of(m->granules);
	s->claimed -= bytes_of(m->granules);
	nvs_vmm_vacate(m->at);
	nvs_region_drop(m->at);
	m->at.span = NULL;
}

/* Creates memory for an empty chunk, held or not; may wait 10 s. */
static int fill(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct chunk *c = nvs_vmm_chunk(m->at);
	uint64_t bytes = bytes_of(m->granules);
	unsigned tries = 0;
	uint32_t one;
	int result;

	c->state = CHUNK_BUSY;
	c->opens = TOUCHED;
	s->away -= bytes;
	s->resident += bytes;
	nvs_swap_unlock(s);
	do {
		one = 1;
		result = nvs_chunk_map(gpu, m->at, &one);
	} while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_retry(gpu, &tries));
	if (result == CUDA_SUCCESS)
		nvs_vmm_arrived(m->at);
	nvs_swap_lock(s);
	c->state = result == CUDA_SUCCESS ? CHUNK_HERE : CHUNK_EMPTY;
	if (result != CUDA_SUCCESS) {
		s->away += bytes;
		s->resident -= bytes;
	}
	return result;
}

/* Creates physical memory, and so a handle of the driver. */
static int materialise(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	uint64_t bytes = bytes_of(m->granules);
	unsigned tries = 0;
	int result;

	nvs_swap_unlock(s);
	do
		result = nvs_chunk_create(gpu, bytes, &m->real);
	while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_retry(gpu, &tries));
	nvs_swap_lock(s);
	if (result == CUDA_SUCCESS)
		s->claiming -= bytes;
	else
		m->real = 0;
	return result;
}

/* The memory is the driver's from now on; it is counted already. */
static void count_as_driver(struct nvs_gpu *gpu, const struct memory *m, CUdeviceptr mapped)
{
	struct nvs_claim c = { .gpu = gpu, .bytes = bytes_of(m->granules) };

	nvs_claim_keep_handle(&c, m->real);
	if (mapped)
		nvs_memory_mapped(nvs_memory_hold(m->real), mapped, c.bytes);
	if (!m->handles) {
		uint64_t stamp = nvs_memory_stamp();

		nvs_memory_driver.mem_release(m->real);
		nvs_memory_handle_released(m->real, stamp);
	}
}

/* A chunk becomes a mapping of the driver's. Returns its address. The lock is held. */
static CUdeviceptr leave_mapped(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	CUdeviceptr address = address_of(m->at);
	struct chunk c;

	nvs_arena_free(gpu, m->at);
	c = *nvs_vmm_chunk(m->at);
	m->real = c.handle;
	s->resident -= bytes_of(m->granules);
	s->claimed -= bytes_of(m->granules);
	c.state = CHUNK_PINNED;
	nvs_vmm_occupy(m->at, OF_DRIVER, c);
	m->at.span = NULL;
	m->shown = false;
	return address;
}

int nvs_vmm_hand_over(struct nvs_gpu *gpu, struct memory *m)
{
	struct nvs_swap *s = gpu->swap;
	struct nvs_thread *t = NULL;
	int result = CUDA_SUCCESS;
	CUdeviceptr mapped = 0;
	struct nvs_signals q;

	/* This wait leaves no mark on the memory: a signal handler may jump out of it. */
	if (m->at.span && nvs_vmm_chunk(m->at)->state != CHUNK_EMPTY) {
		uint64_t serial = m->serial;

		nvs_swap_unlock(s);
		t = nvs_gate_enter_memory(gpu); /* all memory is on the GPU until nvs_gate_leave() */
		nvs_swap_lock(s);
		while (m->serial == serial && m->granules && !nvs_vmm_idle(m))
			nvs_vmm_pause(s, atomic_load(&s->kick));
		if (m->serial != serial || !m->granules || m->pinned) { /* another thread was faster */
			if (t)
				nvs_gate_leave(t);
			return m->serial == serial && m->granules ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
		}
	}
	nvs_signals_block(&q);
	m->worker = &t;
	if (m->at.span && nvs_vmm_chunk(m->at)->state == CHUNK_EMPTY)
		result = fill(gpu, m);
	else if (m->at.span && nvs_vmm_chunk(m->at)->state != CHUNK_HERE)
		result = CUDA_ERROR_NOT_READY; /* the process ends */
	else if (!m->at.span && !m->real)
		result = materialise(gpu, m);
	if (result == CUDA_SUCCESS && m->at.span && !m->shown)
		nvs_vmm_unhide(gpu, m);
	else if (result == CUDA_SUCCESS && m->at.span)
		mapped = leave_mapped(gpu, m);
	if (result == CUDA_SUCCESS) {
		m->pinned = true;
		nvs_swap_unlock(s);
		count_as_driver(gpu, m, mapped);
		nvs_swap_lock(s);
	}
	if (t)
		nvs_gate_leave(t);
	nvs_vmm_done(s, m);
	if (m->pinned && !m->handles)
		nvs_vmm_forget(gpu, m);
	nvs_swap_unlock(s);
	nvs_signals_restore(&q);
	nvs_swap_lock(s);
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
	else if (!m->pinned)
		result = nvs_vmm_hand_over(gpu, m);
	if (result == CUDA_SUCCESS) {
		*handle = m->real;
		result = NVS_VMM_DRIVER;
	}
	nvs_swap_unlock(s);
	return result;
}
