// SPDX-License-Identifier: Apache-2.0
/*
 * swap_chunk.c: physical memory of chunks, by the driver.
 */
#include "client.h"
#include "swap_impl.h"
#include "wrap.h"

/* Wrappers; only their types are needed here. */
NVS_EXPORT int cuMemCreate(unsigned long long *handle, size_t n, const struct cu_alloc_prop *prop,
			   unsigned long long flags);
NVS_EXPORT int cuMemRelease(unsigned long long handle);
NVS_EXPORT int cuMemMap(CUdeviceptr p, size_t n, size_t offset, unsigned long long handle,
			unsigned long long flags);
NVS_EXPORT int cuMemUnmap(CUdeviceptr p, size_t n);

/* Other GPUs of the process that can reach the channel's memory may. */
static void let_in(unsigned channel, struct place p)
{
	int dev = nvs_client_device(channel), can = 0;

	for (unsigned i = 0; i < NVS_MAX_CHANNELS && nvs_client_memory(i); i++) {
		struct cu_access a = { { CU_MEM_LOCATION_TYPE_DEVICE, nvs_client_device(i) },
				       CU_MEM_ACCESS_READWRITE };

		if (i != channel && nvs_driver.can_access_peer &&
		    nvs_driver.can_access_peer(&can, a.location.id, dev) == CUDA_SUCCESS && can)
			nvs_driver.set_access(address_of(p), bytes_of(p.span->chunk[p.granule].granules),
					      &a, 1);
	}
}

int nvs_chunk_map(unsigned channel, struct place p)
{
	const struct nvs_swap *s = &nvs_swaps[channel];
	struct chunk *c = &p.span->chunk[p.granule];
	struct cu_location at = { CU_MEM_LOCATION_TYPE_DEVICE, nvs_client_device(channel) };
	/* Such memory can be exported later, and registered with a network card. */
	struct cu_alloc_full prop = { .head = { CU_MEM_ALLOCATION_PINNED,
						s->posix_fd ? CU_MEM_HANDLE_POSIX_FD : 0, at },
				      .rdma = s->rdma };
	struct cu_access access = { at, CU_MEM_ACCESS_READWRITE };
	uint64_t bytes = bytes_of(c->granules);
	unsigned long long handle = 0;
	int result = CALL(cuMemCreate, &handle, bytes, &prop.head, 0);

	if (result != CUDA_SUCCESS)
		return result;
	result = CALL(cuMemMap, address_of(p), bytes, 0, handle, 0);
	if (result == CUDA_SUCCESS) {
		result = nvs_driver.set_access(address_of(p), bytes, &access, 1);
		if (result != CUDA_SUCCESS)
			CALL(cuMemUnmap, address_of(p), bytes);
	}
	if (result != CUDA_SUCCESS)
		CALL(cuMemRelease, handle);
	c->handle = handle;
	return result;
}

void nvs_chunk_unmap(struct place p)
{
	struct chunk *c = &p.span->chunk[p.granule];

	CALL(cuMemUnmap, address_of(p), bytes_of(c->granules));
	CALL(cuMemRelease, c->handle);
}

void nvs_swap_open_to_peers(unsigned channel)
{
	struct nvs_swap *s = &nvs_swaps[channel];
	struct place at = { NULL, 0 };
	uint32_t looked = 0;

	for (;;) {
		bool found;

		nvs_swap_lock(s);
		found = nvs_chunk_next(channel, 1u << CHUNK_HERE, &at, &looked);
		nvs_swap_unlock(s);
		if (!found)
			return;
		let_in(channel, at);
		at.granule += at.span->chunk[at.granule].granules;
	}
}
