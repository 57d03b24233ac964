// SPDX-License-Identifier: Apache-2.0
/*
 * array.c: arrays take memory and have no contents. As with the driver only
 * those of deferred mapping say how much it would be, and have none of their own.
 */
#include "memory.h"

#define ALIGNMENT 65536ull

struct sim_array {
	struct obj o;
	struct sim_ctx *ctx;
	int gpu, deferred;
	uint64_t bytes; /* that it takes, or would */
	struct sim_array *next; /* all live ones */
};

struct sim_mipmap {
	struct sim_array base;
};

static struct sim_array *arrays;

static uint64_t element_bytes(int format)
{
	switch (format) {
	case 0x01: case 0x08: return 1;
	case 0x02: case 0x09: case 0x10: return 2;
	case 0x03: case 0x0a: case 0x20: return 4;
	}
	return 0;
}

static CUresult create(struct sim_array **out, uint32_t magic, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
	size_t w, h, z;
	uint64_t bytes = 0;
	struct sim_array *a;
	struct sim_ctx *ctx;
	CUresult rc;

	ENTER();
	NEED(out && d && d->Width && levels && element_bytes(d->Format) &&
	     (d->NumChannels == 1 || d->NumChannels == 2 || d->NumChannels == 4));
	rc = ctx_need(&ctx);
	if (rc)
		return rc;
	w = d->Width, h = d->Height ? d->Height : 1, z = d->Depth ? d->Depth : 1;
	for (unsigned l = 0; l < levels; l++) {
		bytes += w * h * z * element_bytes(d->Format) * d->NumChannels;
		w = w > 1 ? w / 2 : 1;
		h = h > 1 ? h / 2 : 1;
		if (!(d->Flags & CUDA_ARRAY3D_LAYERED))
			z = z > 1 ? z / 2 : 1;
	}
	pthread_mutex_lock(&drv_mu);
	rc = capture_guard_unsafe();
	a = rc ? NULL : obj_new(magic, sizeof *a);
	if (a) {
		a->ctx = ctx;
		a->gpu = ctx->gpu;
		a->deferred = (d->Flags & (CUDA_ARRAY3D_DEFERRED_MAPPING | CUDA_ARRAY3D_SPARSE)) != 0;
		a->bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
		if (!a->deferred && sim_charge(a->gpu, a->bytes)) {
			obj_free(a);
			a = NULL;
		}
	}
	if (!rc && !a)
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	if (!rc) {
		a->next = arrays;
		arrays = a;
		*out = a;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

/* drv_mu held */
static void release(struct sim_array *a)
{
	struct sim_array **at;

	for (at = &arrays; *at != a; at = &(*at)->next)
		;
	*at = a->next;
	if (!a->deferred)
		sim_uncharge(a->gpu, a->bytes);
	obj_free(a);
}

static CUresult destroy(struct sim_array *a, uint32_t magic)
{
	CUresult rc = CUDA_SUCCESS;

	ENTER();
	pthread_mutex_lock(&drv_mu);
	if (obj_is(a, magic))
		release(a);
	else
		rc = CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

void array_release_all(struct sim_ctx *ctx)
{
	struct sim_array *a, *next;

	for (a = arrays; a; a = next) {
		next = a->next;
		if (a->ctx == ctx)
			release(a);
	}
}

static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *r, struct sim_array *a, uint32_t magic, CUdevice dev)
{
	ENTER();
	DEVICE(dev);
	NEED(r && obj_is(a, magic) && a->deferred);
	*r = (CUDA_ARRAY_MEMORY_REQUIREMENTS){ .size = a->bytes, .alignment = ALIGNMENT };
	return CUDA_SUCCESS;
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *desc)
{
	CUDA_ARRAY3D_DESCRIPTOR d = { 0 };

	if (!desc)
		return CUDA_ERROR_INVALID_VALUE;
	d.Width = desc->Width;
	d.Height = desc->Height;
	d.Format = desc->Format;
	d.NumChannels = desc->NumChannels;
	return create(array, M_ARRAY, &d, 1);
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
	return create(array, M_ARRAY, desc, 1);
}

CUresult cuArrayDestroy(CUarray array)
{
	return destroy(array, M_ARRAY);
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *r, CUarray array, CUdevice dev)
{
	return requirements(r, array, M_ARRAY, dev);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned levels)
{
	return create((struct sim_array **)array, M_MIPMAP, desc, levels);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
	return destroy(&array->base, M_MIPMAP);
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *r, CUmipmappedArray array,
					       CUdevice dev)
{
	return requirements(r, &array->base, M_MIPMAP, dev);
}
