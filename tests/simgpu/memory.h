// SPDX-License-Identifier: Apache-2.0
/* memory.h: the address ranges that memory.c, pool.c and vmm.c share. */
#ifndef SIMGPU_MEMORY_H
#define SIMGPU_MEMORY_H

#include "driver.h"

#include <sys/types.h>

enum area_kind { DEVICE, MANAGED, PINNED, REGISTERED, MAPPED, GRAPH };

struct phys { /* cuMemCreate */
	struct obj o;
	int gpu; /* -1: host memory */
	size_t size;
	int fd;       /* memfd that it is in; another process's, if imported */
	off_t offset; /* in it */
	int maps;
	int rdma;
	int imported, exchanged; /* exchanged: others have a descriptor of it, or had one */
	struct handle *handle; /* NULL: all references were released */
};

/* What a handle's value points to; may be used again while the memory is mapped. */
struct handle {
	struct obj o;
	struct phys *phys;
	int refs;
};

struct area {
	uintptr_t base;
	size_t size;
	uint64_t id; /* no other area ever has it */
	enum area_kind kind;
	struct sim_ctx *ctx; /* NULL: outlives contexts (VMM, pools, graphs) */
	int gpu;
	int access; /* MAPPED: cuMemSetAccess was called */
	uint64_t opened; /* for these devices, a bit each; work on others is not held to it */
	int ending; /* freed in a stream that has not come to it */
	struct phys *phys;
	struct sim_pool *pool; /* NULL: none, or one of host memory */
};

/* sorted by base */
struct areas {
	struct area *a;
	int n, room;
};

extern struct areas live; /* everything a copy may touch; guarded by drv_mu */

int area_at(const struct areas *v, uintptr_t p); /* index of the first with base > p */
struct area *area_find(struct areas *v, uintptr_t p); /* the one p is in, or NULL */
int area_add(struct areas *v, struct area a); /* -1: out of memory */
void area_del(struct areas *v, struct area *a);

/* vmm.c; drv_mu is held: the reserved range of an address, the kinds of handles that memory may be exported as. */
const struct area *vmm_range(uintptr_t p);
int vmm_exportable(const struct phys *ph);

/* Memory that belongs to no context; takes drv_mu. pool NULL: host memory. */
CUresult mem_alloc_pooled(CUdeviceptr *out, size_t bytes, struct sim_pool *pool);
/* pool.c; drv_mu is held. Bytes come out of a pool, or of its GPU (-1: that has no room), ... */
int pool_take(struct sim_pool *pool, uint64_t bytes);
/* ... are freed in a stream, and the stream has come to that. */
void pool_free(struct sim_pool *pool, uint64_t bytes);
void pool_ended(struct sim_pool *pool, uint64_t bytes);
int pool_gpu(const struct sim_pool *pool);
int pool_exportable(const struct sim_pool *pool); /* as what kinds of handles */
uint64_t pool_blocks(uint64_t bytes);
/* Takes drv_mu. unsafe: not allowed during a capture (capture_guard_unsafe). */
CUresult mem_alloc(void **out, size_t bytes, enum area_kind kind, int unsafe);
/*
 * Frees an allocation of one of two kinds by its base address; takes drv_mu.
 * wait: for all work of the context first, and unsafe during a capture.
 */
CUresult mem_release(uintptr_t p, enum area_kind k1, enum area_kind k2, int wait);
/* Frees an allocation when a stream comes to it; takes drv_mu. */
CUresult mem_release_behind(CUstream s, uintptr_t p);

#endif
