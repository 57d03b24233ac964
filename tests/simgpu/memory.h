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
	enum area_kind kind;
	struct sim_ctx *ctx; /* NULL: outlives contexts (VMM, pools, graphs) */
	int gpu;
	int access; /* MAPPED: cuMemSetAccess was called */
	int ending; /* freed in a stream that has not come to it */
	struct phys *phys;
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

/* Device memory that belongs to no context; takes drv_mu. */
CUresult mem_alloc_pooled(CUdeviceptr *out, size_t bytes, int gpu);
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
