// SPDX-License-Identifier: Apache-2.0
/*
 * memory.c: device, managed and pinned memory. Device memory is
 * host memory at the same address, touched only when the program touches it;
 * what is charged to the simulated GPU is the size asked for.
 */
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALLOC_ROUND 512ull
#define CHARGE(bytes) (((bytes) + ALLOC_ROUND - 1) / ALLOC_ROUND * ALLOC_ROUND)

struct areas live;

int area_at(const struct areas *v, uintptr_t p)
{
	int lo = 0, hi = v->n;

	while (lo < hi) {
		int mid = (lo + hi) / 2;

		if (v->a[mid].base <= p)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

struct area *area_find(struct areas *v, uintptr_t p)
{
	int i = area_at(v, p) - 1;

	return i >= 0 && p - v->a[i].base < v->a[i].size ? &v->a[i] : NULL;
}

int area_add(struct areas *v, struct area a)
{
	static uint64_t id;
	int i = area_at(v, a.base);

	if (v->n == v->room) {
		int room = v->room ? 2 * v->room : 64;
		struct area *more = realloc(v->a, sizeof *more * (size_t)room);

		if (!more)
			return -1;
		v->a = more;
		v->room = room;
	}
	a.id = ++id;
	memmove(&v->a[i + 1], &v->a[i], sizeof a * (size_t)(v->n - i));
	v->a[i] = a;
	v->n++;
	return 0;
}

void area_del(struct areas *v, struct area *a)
{
	size_t i = (size_t)(a - v->a);

	memmove(a, a + 1, sizeof *a * ((size_t)v->n - i - 1));
	v->n--;
}

int mem_valid_locked(CUdeviceptr p, size_t n)
{
	uintptr_t at = (uintptr_t)p, end = at + n;

	if (end < at)
		return 0;
	while (at < end) { /* VMM ranges may span several mappings */
		struct area *a = area_find(&live, at);

		if (!a || (a->kind == MAPPED && !a->access))
			return 0;
		at = a->base + a->size;
	}
	return 1;
}

int mem_valid(CUdeviceptr p, size_t n)
{
	int ok;

	pthread_mutex_lock(&drv_mu);
	ok = mem_valid_locked(p, n);
	pthread_mutex_unlock(&drv_mu);
	return ok;
}

int mem_pageable(CUdeviceptr p)
{
	int yes;

	pthread_mutex_lock(&drv_mu);
	yes = !area_find(&live, (uintptr_t)p);
	pthread_mutex_unlock(&drv_mu);
	return yes;
}

int mem_device(CUdeviceptr p, int *gpu)
{
	struct area *a;
	int yes;

	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, (uintptr_t)p);
	yes = a && (a->kind == DEVICE || a->kind == MAPPED || a->kind == MANAGED || a->kind == GRAPH);
	if (yes)
		*gpu = a->gpu;
	pthread_mutex_unlock(&drv_mu);
	return yes;
}

static void *host_pages(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

CUresult mem_alloc(void **out, size_t bytes, enum area_kind kind, int unsafe)
{
	uint64_t charge = CHARGE(bytes);
	struct sim_ctx *c;
	struct area a;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (charge < bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	rc = ctx_need(&c);
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = unsafe ? capture_guard_unsafe() : CUDA_SUCCESS;
	if (!rc && kind == DEVICE && sim_charge(c->gpu, charge))
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	if (!rc) {
		a = (struct area){ .size = bytes, .kind = kind, .ctx = c->of ? c->of : c, .gpu = c->gpu };
		a.base = (uintptr_t)host_pages(bytes);
		if (!a.base || area_add(&live, a)) {
			if (a.base)
				munmap((void *)a.base, bytes);
			if (kind == DEVICE)
				sim_uncharge(c->gpu, charge);
			rc = CUDA_ERROR_OUT_OF_MEMORY;
		} else {
			*out = (void *)a.base;
			if (kind == MANAGED)
				sim_count_managed(1);
		}
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult mem_alloc_pooled(CUdeviceptr *out, size_t bytes, struct sim_pool *pool)
{
	uint64_t charge = CHARGE(bytes);
	struct area a = { .size = bytes, .kind = pool ? DEVICE : PINNED, .pool = pool };
	CUresult rc = CUDA_SUCCESS;

	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (charge < bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&drv_mu);
	a.gpu = pool ? pool_gpu(pool) : -1;
	if (pool && pool_take(pool, charge)) {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		a.base = (uintptr_t)host_pages(bytes);
		if (!a.base || area_add(&live, a)) {
			if (a.base)
				munmap((void *)a.base, bytes);
			if (pool) {
				pool_free(pool, charge);
				pool_ended(pool, charge);
			}
			rc = CUDA_ERROR_OUT_OF_MEMORY;
		} else {
			*out = a.base;
		}
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

static void area_release(struct area *a)
{
	uint64_t charge = CHARGE(a->size);

	if (a->pool) {
		if (!a->ending)
			pool_free(a->pool, charge);
		pool_ended(a->pool, charge);
	} else if (a->kind == DEVICE) {
		sim_uncharge(a->gpu, charge);
	}
	if (a->kind == MANAGED)
		sim_count_managed(-1);
	if (a->kind != REGISTERED)
		munmap((void *)a->base, a->size);
	area_del(&live, a);
}

void mem_release_all(struct sim_ctx *c)
{
	for (int i = live.n - 1; i >= 0; i--)
		if (live.a[i].ctx == c)
			area_release(&live.a[i]);
}

CUresult mem_release(uintptr_t p, enum area_kind k1, enum area_kind k2, int wait)
{
	struct point all = { { 0, 0 }, 0 };
	struct area *a;
	CUresult rc = drv_enter();

	if (rc || !p)
		return rc;
	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, p);
	if (!a || a->base != p || a->ending || (a->kind != k1 && a->kind != k2))
		rc = CUDA_ERROR_INVALID_VALUE;
	else if (wait && !(rc = capture_guard_unsafe()) && a->ctx)
		all = a->ctx->all;
	pthread_mutex_unlock(&drv_mu);
	if (rc)
		return rc;
	if (wait)
		point_wait(all); /* cuMemFree waits for the context's work */
	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, p);
	if (a && a->kind != REGISTERED) {
		work_before_unmapping(a->base, a->size);
		a = area_find(&live, p);
	}
	if (a && a->base == p)
		area_release(a);
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

/* What it takes is free at once; its address stays until the stream comes to it. */
CUresult mem_release_behind(CUstream h, uintptr_t p)
{
	struct sim_stream *s;
	struct area *a;
	CUresult rc;

	pthread_mutex_lock(&drv_mu);
	rc = stream_find(h, &s);
	a = area_find(&live, p);
	if (!rc && p && (!a || a->base != p || a->ending || (a->kind != DEVICE && a->kind != PINNED)))
		rc = CUDA_ERROR_INVALID_VALUE;
	if (!rc && p) {
		if (a->pool)
			pool_free(a->pool, CHARGE(a->size));
		a->ending = 1;
		stream_done(s, op_queue(s->ctx, &(struct op){ .what = OP_FREE, .dst = (char *)p }, h, stream_deps(s)));
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

void mem_end(uintptr_t p)
{
	struct area *a = area_find(&live, p);

	if (a && a->base == p && a->ending)
		area_release(a);
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
	struct sim_ctx *c;
	CUresult rc = drv_enter();

	if (!rc)
		rc = ctx_need(&c);
	if (rc)
		return rc;
	if (total)
		*total = sim_memory();
	if (free)
		*free = sim_memory() - sim_used(c->gpu);
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t bytes)
{
	void *host = NULL;
	CUresult rc = p ? mem_alloc(&host, bytes, DEVICE, 1) : CUDA_ERROR_INVALID_VALUE;

	if (p)
		*p = rc ? ~(CUdeviceptr)0 : (uintptr_t)host; /* what a call that fails stores is nobody's promise */
	return rc;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *p, size_t *pitch, size_t width, size_t height, unsigned element)
{
	if (!pitch || (element != 4 && element != 8 && element != 16))
		return CUDA_ERROR_INVALID_VALUE;
	*pitch = (width + ALLOC_ROUND - 1) / ALLOC_ROUND * ALLOC_ROUND;
	return cuMemAlloc_v2(p, *pitch * height);
}

CUresult cuMemAllocManaged(CUdeviceptr *p, size_t bytes, unsigned flags)
{
	void *host = NULL;
	CUresult rc = p && (flags == 1 || flags == 2) ? mem_alloc(&host, bytes, MANAGED, 1) : CUDA_ERROR_INVALID_VALUE;

	if (!rc)
		*p = (uintptr_t)host;
	return rc;
}

CUresult cuMemFree_v2(CUdeviceptr p)
{
	return mem_release((uintptr_t)p, DEVICE, MANAGED, 1);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p)
{
	struct area *a;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, (uintptr_t)p);
	if (!a)
		rc = CUDA_ERROR_NOT_FOUND;
	if (a && base)
		*base = a->base;
	if (a && size)
		*size = a->size;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuMemHostAlloc(void **p, size_t bytes, unsigned flags)
{
	return flags > 7 ? CUDA_ERROR_INVALID_VALUE : mem_alloc(p, bytes, PINNED, 1);
}

CUresult cuMemAllocHost_v2(void **p, size_t bytes)
{
	return mem_alloc(p, bytes, PINNED, 1);
}

CUresult cuMemFreeHost(void *p)
{
	return mem_release((uintptr_t)p, PINNED, PINNED, 1);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *dp, void *p, unsigned flags)
{
	if (!dp || flags || !mem_valid((uintptr_t)p, 1))
		return CUDA_ERROR_INVALID_VALUE;
	*dp = (uintptr_t)p;
	return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned *flags, void *p)
{
	if (!flags || !mem_valid((uintptr_t)p, 1))
		return CUDA_ERROR_INVALID_VALUE;
	*flags = CU_MEMHOSTALLOC_DEVICEMAP;
	return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
	struct sim_ctx *c;
	CUresult rc = drv_enter();

	(void)flags;
	if (!rc)
		rc = ctx_need(&c);
	if (rc)
		return rc;
	if (!p || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	if (area_find(&live, (uintptr_t)p))
		rc = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	else if (area_add(&live, (struct area){ .base = (uintptr_t)p, .size = bytes, .kind = REGISTERED, .ctx = c }))
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuMemHostUnregister(void *p)
{
	CUresult rc = mem_release((uintptr_t)p, REGISTERED, REGISTERED, 0);

	return rc == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : rc;
}

CUresult cuMemAdvise(CUdeviceptr p, size_t bytes, int advice, CUdevice dev)
{
	(void)advice;
	(void)dev;
	return mem_valid(p, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuMemAdvise_v2(CUdeviceptr p, size_t bytes, int advice, CUmemLocation where)
{
	return cuMemAdvise(p, bytes, advice, where.id);
}

CUresult cuMemPrefetchAsync(CUdeviceptr p, size_t bytes, CUdevice dev, CUstream s)
{
	struct op op = { .what = OP_SPIN, .engine = dev < 0 ? SIM_COPY_OUT : SIM_COPY_IN,
			 .kind = dev < 0 ? SIM_DTOH : SIM_HTOD, .ns = 2000 + bytes / 25 };

	if (!mem_valid(p, bytes))
		return CUDA_ERROR_INVALID_VALUE;
	return submit(s, &op, 0);
}
PTSZ(cuMemPrefetchAsync, (CUdeviceptr p, size_t n, CUdevice d, CUstream s), (p, n, d, PT(s)))

CUresult cuMemPrefetchAsync_v2(CUdeviceptr p, size_t bytes, CUmemLocation loc, unsigned flags, CUstream s)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	return cuMemPrefetchAsync(p, bytes, loc.type == CU_MEM_LOCATION_TYPE_DEVICE ? loc.id : -1, s);
}
PTSZ(cuMemPrefetchAsync_v2, (CUdeviceptr p, size_t n, CUmemLocation l, unsigned f, CUstream s), (p, n, l, f, PT(s)))

/*
 * The driver has no such handle for memory of VMM. For other memory there is
 * none here yet: a test that needs one will want it shared.
 */
CUresult cuIpcGetMemHandle(CUipcMemHandle *h, CUdeviceptr p)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	(void)h;
	(void)p;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle h, unsigned flags)
{
	(void)p;
	(void)h;
	(void)flags;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
	(void)p;
	return CUDA_ERROR_INVALID_VALUE;
}
