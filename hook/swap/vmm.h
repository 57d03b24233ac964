// SPDX-License-Identifier: Apache-2.0
/*
 * vmm.h: virtual memory management by the application, as memory that moves.
 *
 * Where the scheduler swaps, a handle of cuMemCreate is a number of the shim that stands
 * for a memory. A memory that the application maps whole, at one place of a range that it
 * has reserved (space.c), is one chunk there and moves like any other (swap.h). Physical
 * memory is created at once while the GPU is held, otherwise when the chunk comes in.
 *
 * A memory becomes the driver's for good when it is exported, mapped a second time or in
 * part, or accessible to another GPU or device. It is counted like the driver's other
 * memory then, and its handle only stands for the driver's.
 *
 * Each function is called first by its wrapper (vmm.c) and returns a CUresult, or
 * NVS_VMM_DRIVER: it is the driver's to do, with the handle that *handle is now.
 */
#ifndef NVSHARE_VMM_H
#define NVSHARE_VMM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "memory_abi.h"

struct nvs_swap_range;

#define NVS_VMM_DRIVER -1

/* Whether the process has ever used this. */
extern atomic_bool nvs_vmm_used;

/* No address has these upper bits; handles of drivers are addresses or small numbers. */
#define NVS_VMM_MARK 0x4e56ull

static inline bool nvs_vmm_is(unsigned long long handle)
{
	return __builtin_expect(handle >> 48 == NVS_VMM_MARK, 0) && atomic_load(&nvs_vmm_used);
}

int nvs_vmm_create(unsigned long long *handle, size_t n, const struct cu_alloc_prop *prop,
		   unsigned long long flags);

/* NVS_VMM_DRIVER: *handle is the driver's, or becomes the driver's with its last reference. */
int nvs_vmm_release(unsigned long long *handle);

int nvs_vmm_retain(unsigned long long *handle, CUdeviceptr address);
int nvs_vmm_properties(struct cu_alloc_full *prop, unsigned long long handle);

/* The memory becomes the driver's. type: of the export, or 0. */
int nvs_vmm_share(unsigned long long *handle, int type);

int nvs_vmm_reserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags);
int nvs_vmm_unreserve(CUdeviceptr p, size_t n);

int nvs_vmm_map(CUdeviceptr p, size_t n, size_t offset, unsigned long long *handle,
		unsigned long long flags);
/* The driver has mapped memory there. */
void nvs_vmm_mapped(CUdeviceptr p, size_t n);
int nvs_vmm_unmap(CUdeviceptr p, size_t n);
/* Unmaps memory of the driver, and counts that. */
int nvs_vmm_driver_unmap(CUdeviceptr p, size_t n);

int nvs_vmm_set_access(CUdeviceptr p, size_t n, const struct cu_access *a, size_t count);
int nvs_vmm_get_access(unsigned long long *flags, const struct cu_location *l, CUdeviceptr p);

/* All memory that is mapped in the range becomes the driver's. */
void nvs_vmm_pin(CUdeviceptr p, size_t n);

/* ---- for the rest of this folder ---- */

struct place;

/* Describes the memory that is mapped at a place. False: none of the shim. The lock is held. */
bool nvs_vmm_find(struct place p, struct nvs_swap_range *r);

/*
 * A chunk is about to be read and copied out, or was copied in. Does nothing for other chunks.
 * leaving: returns CUresult; a kernel that read memory without access would end the context.
 */
int nvs_vmm_leaving(struct place p);
void nvs_vmm_arrived(struct place p);

void nvs_vmm_fork_child(void);

#endif
