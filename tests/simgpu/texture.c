// SPDX-License-Identifier: Apache-2.0
/*
 * texture.c: texture objects and references to linear and pitched memory. To
 * the simulated GPU a texture is the rows of memory that it reads. The memory
 * must be mapped when a texture is made or bound, and while a kernel reads it.
 */
#include "memory.h"

struct sim_texture {
	struct obj o;
	CUDA_RESOURCE_DESC resource;
};

struct sim_texref {
	struct obj o;
	CUDA_RESOURCE_DESC resource;
};

static size_t element_bytes(int format, unsigned channels)
{
	size_t one = format == 0x02 || format == 0x09 || format == 0x10 ? 2
		     : format == 0x03 || format == 0x0a || format == 0x20 ? 4
									  : 1;
	return one * channels;
}

/* The rows that a resource has. */
static void rows(const CUDA_RESOURCE_DESC *r, struct op *op)
{
	if (r->resType == CU_RESOURCE_TYPE_LINEAR) {
		op->src = (const char *)(uintptr_t)r->res.linear.devPtr;
		op->width = op->spitch = r->res.linear.sizeInBytes;
		op->height = 1;
	} else {
		op->src = (const char *)(uintptr_t)r->res.pitch2D.devPtr;
		op->width = r->res.pitch2D.width * element_bytes(r->res.pitch2D.format, r->res.pitch2D.numChannels);
		op->spitch = r->res.pitch2D.pitchInBytes;
		op->height = r->res.pitch2D.height;
	}
}

static CUresult check(const CUDA_RESOURCE_DESC *r)
{
	struct op op = { .what = OP_SUM };

	if (r->resType != CU_RESOURCE_TYPE_LINEAR && r->resType != CU_RESOURCE_TYPE_PITCH2D)
		return CUDA_ERROR_NOT_SUPPORTED; /* arrays have no contents here */
	rows(r, &op);
	NEED(op.width && op.height && op.spitch >= op.width &&
	     mem_valid((uintptr_t)op.src, (op.height - 1) * op.spitch + op.width));
	return CUDA_SUCCESS;
}

int texture_memory(uint64_t object, const struct sim_module *m, struct op *op)
{
	const struct sim_texture *t = (const struct sim_texture *)(uintptr_t)object;
	int known = 1;

	pthread_mutex_lock(&drv_mu);
	if (obj_is(t, M_TEXTURE))
		rows(&t->resource, op);
	else if (!object && m->ref && m->ref->resource.res.linear.devPtr)
		rows(&m->ref->resource, op);
	else
		known = 0;
	pthread_mutex_unlock(&drv_mu);
	return known;
}

CUresult cuTexObjectCreate(CUtexObject *object, const CUDA_RESOURCE_DESC *resource, const void *texture, const void *view)
{
	struct sim_ctx *ctx;
	struct sim_texture *t;
	CUresult rc;

	(void)view;
	ENTER();
	NEED(object && resource && texture);
	rc = ctx_need(&ctx);
	if (!rc)
		rc = check(resource);
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	t = obj_new(M_TEXTURE, sizeof *t);
	if (t) {
		t->resource = *resource;
		*object = (uintptr_t)t;
	}
	pthread_mutex_unlock(&drv_mu);
	return t ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuTexObjectDestroy(CUtexObject object)
{
	struct sim_texture *t = (struct sim_texture *)(uintptr_t)object;
	CUresult rc = CUDA_SUCCESS;

	ENTER();
	pthread_mutex_lock(&drv_mu);
	if (obj_is(t, M_TEXTURE))
		obj_free(t);
	else
		rc = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *resource, CUtexObject object)
{
	const struct sim_texture *t = (const struct sim_texture *)(uintptr_t)object;

	ENTER();
	NEED(resource && obj_is(t, M_TEXTURE));
	*resource = t->resource;
	return CUDA_SUCCESS;
}

/* ---- references ---- */

CUresult cuModuleGetTexRef(CUtexref *ref, CUmodule m, const char *name)
{
	struct sim_texref *r;

	ENTER();
	NEED(ref && name && obj_is(m, M_MODULE));
	pthread_mutex_lock(&drv_mu);
	r = m->ref ? m->ref : obj_new(M_TEXREF, sizeof *r);
	m->ref = r;
	pthread_mutex_unlock(&drv_mu);
	*ref = r;
	return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void texture_ref_free(struct sim_module *m)
{
	if (m->ref)
		obj_free(m->ref);
	m->ref = NULL;
}

static CUresult bind(CUtexref ref, const CUDA_RESOURCE_DESC *resource)
{
	CUresult rc;

	ENTER();
	NEED(obj_is(ref, M_TEXREF));
	rc = check(resource);
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	ref->resource = *resource;
	pthread_mutex_unlock(&drv_mu);
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetAddress_v2(size_t *offset, CUtexref ref, CUdeviceptr p, size_t bytes)
{
	CUDA_RESOURCE_DESC r = { .resType = CU_RESOURCE_TYPE_LINEAR };

	r.res.linear.devPtr = p;
	r.res.linear.sizeInBytes = bytes;
	if (offset)
		*offset = 0;
	return bind(ref, &r);
}

CUresult cuTexRefSetAddress2D_v3(CUtexref ref, const CUDA_ARRAY_DESCRIPTOR *desc, CUdeviceptr p, size_t pitch)
{
	CUDA_RESOURCE_DESC r = { .resType = CU_RESOURCE_TYPE_PITCH2D };

	NEED(desc);
	r.res.pitch2D.devPtr = p;
	r.res.pitch2D.format = desc->Format;
	r.res.pitch2D.numChannels = desc->NumChannels;
	r.res.pitch2D.width = desc->Width;
	r.res.pitch2D.height = desc->Height;
	r.res.pitch2D.pitchInBytes = pitch;
	return bind(ref, &r);
}

CUresult cuTexRefGetAddress_v2(CUdeviceptr *p, CUtexref ref)
{
	ENTER();
	NEED(p && obj_is(ref, M_TEXREF) && ref->resource.res.linear.devPtr);
	*p = ref->resource.res.linear.devPtr;
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetFormat(CUtexref ref, int format, int channels)
{
	(void)format;
	(void)channels;
	ENTER();
	NEED(obj_is(ref, M_TEXREF));
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetFlags(CUtexref ref, unsigned flags)
{
	return cuTexRefSetFormat(ref, (int)flags, 0);
}
