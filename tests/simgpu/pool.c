// SPDX-License-Identifier: Apache-2.0
/*
 * pool.c: stream-ordered allocation. A pool keeps what was freed up to its release
 * threshold, and gives the rest back at once, whatever the stream still has to do.
 * Addresses are not used again before the stream has come to the free.
 */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

struct sim_pool {
	struct obj o;
	CUdevice dev; /* -1: host memory */
	int is_default;
	int exportable; /* the kinds of handles */
	int gone;       /* destroyed; lives on until its last allocation has ended */
	unsigned areas; /* that are part of it */
	uint64_t used, ending, reserved; /* bytes: allocated; freed, the stream not there yet; of the GPU */
	uint64_t used_high, reserved_high;
	uint64_t attribute[16];
};
static struct sim_pool *default_pool[SIM_MAX_GPUS], *current_pool[SIM_MAX_GPUS];

/* ---- bytes; drv_mu is held ---- */

/* What a pool has if it needs so many bytes: whole blocks, as if what is in use were always side by side. */
uint64_t pool_blocks(uint64_t bytes)
{
	const char *mib = getenv("NVSHARE_SIMGPU_POOL_MIB");
	uint64_t block = mib && atoi(mib) > 0 ? (uint64_t)atoi(mib) << 20 : 1;

	return (bytes + block - 1) / block * block;
}

/* What is left of a pool that may keep so many bytes. */
static void shrink(struct sim_pool *p, uint64_t keep)
{
	if (keep < p->used)
		keep = p->used;
	keep = keep < p->reserved ? pool_blocks(keep) : keep;
	if (keep < p->reserved) {
		sim_uncharge(dev_gpu(p->dev), p->reserved - keep);
		p->reserved = keep;
	}
}

int pool_gpu(const struct sim_pool *p)
{
	return dev_gpu(p->dev);
}

int pool_take(struct sim_pool *p, uint64_t bytes)
{
	if (p->used + bytes > p->reserved) {
		uint64_t reserved = pool_blocks(p->used + bytes);

		if (sim_charge(dev_gpu(p->dev), reserved - p->reserved))
			return -1;
		p->reserved = reserved;
	}
	p->used += bytes;
	p->areas++;
	if (p->used > p->used_high)
		p->used_high = p->used;
	if (p->reserved > p->reserved_high)
		p->reserved_high = p->reserved;
	return 0;
}

void pool_free(struct sim_pool *p, uint64_t bytes)
{
	p->used -= bytes;
	p->ending += bytes;
	shrink(p, p->gone ? 0 : p->attribute[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD]);
}

void pool_ended(struct sim_pool *p, uint64_t bytes)
{
	p->ending -= bytes;
	if (--p->areas == 0 && p->gone)
		obj_free(p);
}

static int is_pool(const struct sim_pool *p)
{
	return obj_is(p, M_POOL) && !p->gone;
}

/* NULL: no memory. */
static struct sim_pool *default_of(CUdevice dev)
{
	struct sim_pool *p = default_pool[dev];

	if (!p && (p = obj_new(M_POOL, sizeof *p))) {
		p->dev = dev;
		p->is_default = 1;
		default_pool[dev] = p;
	}
	return p;
}

/* ---- the driver's functions ---- */

/* pool NULL: the current one of the stream's device. */
static CUresult alloc_async(CUdeviceptr *p, size_t bytes, struct sim_pool *pool, CUstream h)
{
	struct sim_stream *s;
	CUresult rc = drv_enter();
	int capturing = 0;

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = p && bytes ? stream_find(h, &s) : CUDA_ERROR_INVALID_VALUE;
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (!rc) {
		if (!pool)
			pool = current_pool[s->ctx->dev] ? current_pool[s->ctx->dev] : default_of(s->ctx->dev);
		if (!pool)
			rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (!rc) {
		capturing = s->capture != NULL;
		if (capturing)
			rc = capture_alloc(s, bytes, p);
	}
	pthread_mutex_unlock(&drv_mu);
	return rc || capturing ? rc : mem_alloc_pooled(p, bytes, pool->dev < 0 ? NULL : pool);
}

CUresult cuMemAllocAsync(CUdeviceptr *p, size_t bytes, CUstream h)
{
	return alloc_async(p, bytes, NULL, h);
}
PTSZ(cuMemAllocAsync, (CUdeviceptr *p, size_t n, CUstream s), (p, n, PT(s)))

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream s)
{
	return is_pool(pool) ? alloc_async(p, bytes, pool, s) : CUDA_ERROR_INVALID_VALUE;
}
PTSZ(cuMemAllocFromPoolAsync, (CUdeviceptr *p, size_t n, CUmemoryPool pool, CUstream s), (p, n, pool, PT(s)))

CUresult cuMemFreeAsync(CUdeviceptr p, CUstream h)
{
	struct sim_stream *s;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = stream_find(h, &s);
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (!rc && s->capture) { /* a node that frees; a graph's addresses are kept */
		rc = graph_memory_is(p) ? capture_add(s, &(struct op){ .what = OP_GIVE, .dst = (char *)(uintptr_t)p }) : CUDA_ERROR_INVALID_VALUE;
		pthread_mutex_unlock(&drv_mu);
		return rc;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc ? rc : mem_release_behind(h, (uintptr_t)p);
}
PTSZ(cuMemFreeAsync, (CUdeviceptr p, CUstream s), (p, PT(s)))

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice dev)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!pool || dev_gpu(dev) < 0)
		return pool ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	*pool = default_of(dev);
	pthread_mutex_unlock(&drv_mu);
	return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
	CUresult rc = cuDeviceGetDefaultMemPool(pool, dev);

	if (!rc && current_pool[dev])
		*pool = current_pool[dev];
	return rc;
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
	if (dev_gpu(dev) < 0 || !is_pool(pool) || pool->dev != dev)
		return CUDA_ERROR_INVALID_VALUE;
	current_pool[dev] = pool;
	return CUDA_SUCCESS;
}

int pool_exportable(const struct sim_pool *pool) { return pool->exportable; }

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!pool || !props || (props->location.type == CU_MEM_LOCATION_TYPE_DEVICE && dev_gpu(props->location.id) < 0))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	*pool = obj_new(M_POOL, sizeof **pool);
	if (*pool)
		(*pool)->dev = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? props->location.id : -1;
	if (*pool)
		(*pool)->exportable = props->handleTypes;
	pthread_mutex_unlock(&drv_mu);
	return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	if (!is_pool(pool) || pool->is_default)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	if (pool->dev >= 0 && current_pool[pool->dev] == pool)
		current_pool[pool->dev] = NULL;
	pool->gone = 1;
	if (pool->dev >= 0)
		shrink(pool, 0);
	if (!pool->areas)
		obj_free(pool);
	pthread_mutex_unlock(&drv_mu);
	return CUDA_SUCCESS;
}

/* What the streams have not come to is outstanding. */
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
	if (!is_pool(pool))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	if (pool->dev >= 0)
		shrink(pool, keep > pool->used + pool->ending ? keep : pool->used + pool->ending);
	pthread_mutex_unlock(&drv_mu);
	return CUDA_SUCCESS;
}

/* attributes 1..3 are ints, the others 64 bits */
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
	CUresult rc = CUDA_SUCCESS;

	if (!is_pool(pool) || !value || attribute < 1 || attribute >= 16)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	switch (attribute) {
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
		rc = CUDA_ERROR_INVALID_VALUE;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: /* can only be set to 0: from now on */
		pool->reserved_high = pool->reserved;
		break;
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		pool->used_high = pool->used;
		break;
	default:
		memcpy(&pool->attribute[attribute], value, attribute <= 3 ? 4 : 8);
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
	uint64_t all[16];

	if (!is_pool(pool) || !value || attribute < 1 || attribute >= 16)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	memcpy(all, pool->attribute, sizeof all);
	all[CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT] = pool->reserved;
	all[CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] = pool->reserved_high;
	all[CU_MEMPOOL_ATTR_USED_MEM_CURRENT] = pool->used;
	all[CU_MEMPOOL_ATTR_USED_MEM_HIGH] = pool->used_high;
	pthread_mutex_unlock(&drv_mu);
	memcpy(value, &all[attribute], attribute <= 3 ? 4 : 8);
	return CUDA_SUCCESS;
}
