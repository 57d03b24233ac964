// SPDX-License-Identifier: Apache-2.0
/*
 * chunk.c: physical memory of chunks.
 */
#include "swap_impl.h"

/* Gives other GPUs of the process access, where they can have it. */
static void chunk_let_in(struct nvs_gpu *gpu, struct place p)
{
	int dev = gpu->device.dev, can = 0;

	NVS_FOR_EACH_GPU(other) {
		struct cu_access a = { { CU_MEM_LOCATION_TYPE_DEVICE, other->device.dev },
				       CU_MEM_ACCESS_READWRITE };

		if (other != gpu && nvs_memory_driver.can_access_peer &&
		    nvs_memory_driver.can_access_peer(&can, a.location.id, dev) == CUDA_SUCCESS && can)
			nvs_memory_driver.set_access(address_of(p), bytes_of(p.span->chunk[p.granule].granules),
					      &a, 1);
	}
}

int nvs_chunk_create(struct nvs_gpu *gpu, uint64_t bytes, unsigned long long *handle)
{
	const struct nvs_swap *s = gpu->swap;
	struct cu_alloc_full prop = {
		.head = { CU_MEM_ALLOCATION_PINNED, s->posix_fd ? CU_MEM_HANDLE_POSIX_FD : 0,
			  { CU_MEM_LOCATION_TYPE_DEVICE, gpu->device.dev } },
		.rdma = s->rdma,
	};

	return nvs_memory_driver.mem_create(handle, bytes, &prop.head, 0);
}

/* Creates memory for one chunk and maps it; nobody has access yet. */
static int map_one(struct nvs_gpu *gpu, struct place p)
{
	struct chunk *c = chunk_of(p);
	uint64_t bytes = bytes_of(c->granules);
	unsigned long long handle = 0;
	int result = nvs_chunk_create(gpu, bytes, &handle);

	if (result != CUDA_SUCCESS)
		return result;
	result = nvs_memory_driver.mem_map(address_of(p), bytes, 0, handle, 0);
	if (result != CUDA_SUCCESS)
		nvs_memory_driver.mem_release(handle);
	c->handle = handle;
	return result;
}

int nvs_chunk_map(struct nvs_gpu *gpu, struct place first, uint32_t *chunks)
{
	struct cu_access access = { { CU_MEM_LOCATION_TYPE_DEVICE, gpu->device.dev },
				    CU_MEM_ACCESS_READWRITE };
	struct place at = first;
	int result = CUDA_SUCCESS, opened;
	uint32_t n = 0;

	while (n < *chunks && result == CUDA_SUCCESS) {
		result = map_one(gpu, at);
		if (result == CUDA_SUCCESS) {
			next_chunk(&at);
			n++;
		}
	}
	*chunks = n;
	if (!n)
		return result;
	opened = nvs_memory_driver.set_access(address_of(first), address_of(at) - address_of(first), &access, 1);
	if (opened == CUDA_SUCCESS)
		return result;
	nvs_chunk_unmap(first, n);
	*chunks = 0;
	return opened;
}

void nvs_chunk_unmap(struct place first, uint32_t chunks)
{
	struct place at = first, end = first;
	bool at_once;

	for (uint32_t i = 0; i < chunks; i++)
		next_chunk(&end);
	at_once = nvs_memory_driver.mem_unmap(address_of(first), address_of(end) - address_of(first)) == CUDA_SUCCESS;
	for (; at.granule < end.granule; next_chunk(&at)) {
		const struct chunk *c = chunk_of(at);

		/* Only the unmapping of one mapping is documented. */
		if (!at_once)
			nvs_memory_driver.mem_unmap(address_of(at), bytes_of(c->granules));
		nvs_memory_driver.mem_release(c->handle);
	}
}

void nvs_swap_open_to_peers(struct nvs_gpu *gpu)
{
	struct nvs_swap *s = gpu->swap;
	struct place at = { NULL, 0 };
	uint32_t looked = 0;

	for (;;) {
		bool found, ours;

		nvs_swap_lock(s);
		found = nvs_chunk_next(gpu, 1u << CHUNK_HERE | 1u << CHUNK_PINNED, &at, &looked);
		/* Under the lock: another thread may free it. To its own range the application gives access itself. */
		ours = found && at.span->region[at.span->head[at.granule] - 1].kind < REGION_APP;
		nvs_swap_unlock(s);
		if (!found)
			return;
		if (ours)
			chunk_let_in(gpu, at);
		next_chunk(&at);
	}
}
