// SPDX-License-Identifier: Apache-2.0
/*
 * graphmem.c: the memory of graphs. An allocation node has an address from the
 * start and memory once its graph is first launched or uploaded. All executable
 * graphs draw on one pool per GPU, which keeps what they gave back until it is
 * trimmed.
 */
#include "memory.h"

#include <sys/mman.h>

static struct {
	uint64_t used, reserved, used_high, reserved_high;
} pools[SIM_MAX_GPUS];

CUresult graph_memory_add(struct graph_memory *m, int gpu, size_t bytes, CUdeviceptr *p)
{
	struct area a = { .size = bytes, .kind = GRAPH, .gpu = gpu };
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	a.base = (uintptr_t)at;
	if (at == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (area_add(&live, a)) {
		munmap(at, bytes);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	m->bytes[gpu] += bytes;
	*p = a.base;
	return CUDA_SUCCESS;
}

int graph_memory_is(CUdeviceptr p)
{
	const struct area *a = area_find(&live, (uintptr_t)p);

	return a && a->kind == GRAPH && a->base == (uintptr_t)p;
}

CUresult graph_memory_use(const struct graph_memory *m)
{
	for (int i = 0; i < SIM_MAX_GPUS; i++) {
		uint64_t used = pools[i].used + m->bytes[i];

		if (used > pools[i].reserved) {
			if (sim_charge(i, used - pools[i].reserved))
				return CUDA_ERROR_OUT_OF_MEMORY; /* of several GPUs the first keep theirs */
			pools[i].reserved = used;
		}
	}
	for (int i = 0; i < SIM_MAX_GPUS; i++) {
		pools[i].used += m->bytes[i];
		if (pools[i].used > pools[i].used_high)
			pools[i].used_high = pools[i].used;
		if (pools[i].reserved > pools[i].reserved_high)
			pools[i].reserved_high = pools[i].reserved;
	}
	return CUDA_SUCCESS;
}

void graph_memory_drop(const struct graph_memory *m)
{
	for (int i = 0; i < SIM_MAX_GPUS; i++)
		pools[i].used -= m->bytes[i];
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice dev, int attribute, void *value)
{
	int gpu;

	ENTER();
	NEED(value && attribute >= 0 && attribute <= CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
	DEVICE(dev);
	gpu = dev_gpu(dev);
	pthread_mutex_lock(&drv_mu);
	*(uint64_t *)value = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT	  ? pools[gpu].used
			     : attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH	  ? pools[gpu].used_high
			     : attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT ? pools[gpu].reserved
										  : pools[gpu].reserved_high;
	pthread_mutex_unlock(&drv_mu);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice dev)
{
	int gpu;

	ENTER();
	DEVICE(dev);
	gpu = dev_gpu(dev);
	pthread_mutex_lock(&drv_mu);
	if (pools[gpu].reserved > pools[gpu].used) {
		sim_uncharge(gpu, pools[gpu].reserved - pools[gpu].used);
		pools[gpu].reserved = pools[gpu].used;
	}
	pthread_mutex_unlock(&drv_mu);
	return CUDA_SUCCESS;
}
