// SPDX-License-Identifier: Apache-2.0
/*
 * pool.c: stream-ordered allocation. Pools are bookkeeping only: memory comes
 * at once and is free at once, whatever the stream still has to do; its address
 * stays until the stream comes to the free.
 */
#include "memory.h"

#include <string.h>

struct sim_pool {
	struct obj o;
	CUdevice dev; /* -1: host memory */
	int is_default;
	uint64_t attribute[16];
};
static struct sim_pool *default_pool[SIM_MAX_GPUS], *current_pool[SIM_MAX_GPUS];

/* pool NULL: the current one of the stream's device. */
static CUresult alloc_async(CUdeviceptr *p, size_t bytes, struct sim_pool *pool, CUstream h)
{
	struct sim_stream *s;
	CUresult rc = drv_enter();
	int gpu = -1, capturing = 0;

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = p && bytes ? stream_find(h, &s) : CUDA_ERROR_INVALID_VALUE;
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (!rc) {
		gpu = !pool ? s->ctx->gpu : pool->dev < 0 ? -1 : dev_gpu(pool->dev);
		capturing = s->capture != NULL;
		if (capturing)
			rc = capture_alloc(s, bytes, p);
	}
	pthread_mutex_unlock(&drv_mu);
	return rc || capturing ? rc : mem_alloc_pooled(p, bytes, gpu);
}

CUresult cuMemAllocAsync(CUdeviceptr *p, size_t bytes, CUstream h)
{
	return alloc_async(p, bytes, NULL, h);
}
PTSZ(cuMemAllocAsync, (CUdeviceptr *p, size_t n, CUstream s), (p, n, PT(s)))

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream s)
{
	return obj_is(pool, M_POOL) ? alloc_async(p, bytes, pool, s) : CUDA_ERROR_INVALID_VALUE;
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
		rc = capture_add(s, &(struct op){ .what = OP_NOTHING });
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
	if (!default_pool[dev] && (default_pool[dev] = obj_new(M_POOL, sizeof *default_pool[dev]))) {
		default_pool[dev]->dev = dev;
		default_pool[dev]->is_default = 1;
	}
	*pool = default_pool[dev];
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
	if (dev_gpu(dev) < 0 || !obj_is(pool, M_POOL) || pool->dev != dev)
		return CUDA_ERROR_INVALID_VALUE;
	current_pool[dev] = pool;
	return CUDA_SUCCESS;
}

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
	pthread_mutex_unlock(&drv_mu);
	return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	if (!obj_is(pool, M_POOL) || pool->is_default)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	if (pool->dev >= 0 && current_pool[pool->dev] == pool)
		current_pool[pool->dev] = NULL;
	obj_free(pool);
	pthread_mutex_unlock(&drv_mu);
	return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
	(void)keep;
	return obj_is(pool, M_POOL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* attributes 1..3 are ints, the others 64 bits */
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
	if (!obj_is(pool, M_POOL) || !value || attribute < 1 || attribute >= 16)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&pool->attribute[attribute], value, attribute <= 3 ? 4 : 8);
	return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
	if (!obj_is(pool, M_POOL) || !value || attribute < 1 || attribute >= 16)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(value, &pool->attribute[attribute], attribute <= 3 ? 4 : 8);
	return CUDA_SUCCESS;
}
