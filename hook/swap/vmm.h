// SPDX-License-Identifier: Apache-2.0
/*
 * vmm.h: the application's own use of the VMM, as memory that moves.
 *
 * Where the scheduler swaps, a handle that cuMemCreate gives is a number of ours
 * and stands for a memory. What the application maps whole, at one place of a
 * range that it has reserved (in our addresses, space.c), is one chunk there
 * and goes away and comes back like any other (swap.h). Physical memory is
 * obtained at once while the GPU is held, and otherwise when it comes in.
 *
 * A memory becomes the driver's for good, and is counted as the driver's are,
 * when it is exported, mapped a second time or in part, opened to another GPU or
 * told to another device. From then on its handle only stands for the driver's.
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

/* Whether there is, or was, anything of this in the process. */
extern atomic_bool nvs_vmm_used;

/* No address has these upper bits, and handles of drivers are addresses or small. */
#define NVS_VMM_MARK 0x4e56ull

static inline bool nvs_vmm_is(unsigned long long handle)
{
	return __builtin_expect(handle >> 48 == NVS_VMM_MARK, 0) && atomic_load(&nvs_vmm_used);
}

int nvs_vmm_create(unsigned long long *handle, size_t n, const struct cu_alloc_prop *prop,
		   unsigned long long flags);

/* DRIVER: the last reference to what *handle stands for, or that itself. */
int nvs_vmm_release(unsigned long long *handle);

int nvs_vmm_retain(unsigned long long *handle, CUdeviceptr address);
int nvs_vmm_properties(struct cu_alloc_full *prop, unsigned long long handle);

/* It becomes the driver's; type: what it is to be exported as, 0 if it is not. */
int nvs_vmm_share(unsigned long long *handle, int type);

int nvs_vmm_reserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags);
int nvs_vmm_unreserve(CUdeviceptr p, size_t n);

int nvs_vmm_map(CUdeviceptr p, size_t n, size_t offset, unsigned long long *handle,
		unsigned long long flags);
/* The driver has. */
void nvs_vmm_mapped(CUdeviceptr p, size_t n);
int nvs_vmm_unmap(CUdeviceptr p, size_t n);
/* The driver's unmapping, and the book's. */
int nvs_vmm_driver_unmap(CUdeviceptr p, size_t n);

int nvs_vmm_set_access(CUdeviceptr p, size_t n, const struct cu_access *a, size_t count);
int nvs_vmm_get_access(unsigned long long *flags, const struct cu_location *l, CUdeviceptr p);

/* What is mapped in the range becomes the driver's. */
void nvs_vmm_pin(CUdeviceptr p, size_t n);

/* ---- for swap_*.c ---- */

struct place;

/* What is mapped at a place; false: nothing of ours. The lock is held. */
bool nvs_vmm_find(struct place p, struct nvs_swap_range *r);

/* A chunk is about to be copied out, or was copied in. Nothing, if it is not of this. */
void nvs_vmm_leaving(struct place p);
void nvs_vmm_arrived(struct place p);

void nvs_vmm_fork_child(void);

#endif
