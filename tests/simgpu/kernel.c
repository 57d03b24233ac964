// SPDX-License-Identifier: Apache-2.0
/*
 * kernel.c: modules, libraries, kernels, launches. Code is not executed: a
 * kernel takes 10 us, except these, which the driver knows by name. All
 * parameters are u64, words have 8 bytes.
 *
 *   nvshare_spin(ns, record)             takes ns, stores its start and end at record, as its PTX does
 *   nvshare_fill(to, bytes, seed)        writes a pattern that depends on seed and each word's number
 *   nvshare_check(from, bytes, seed, to) stores at `to` how many words differ from that pattern
 *   nvshare_add(at, bytes, ns)           takes ns, adds 1 to each word when it starts and 1 when it ends
 *   nvshare_gap(ns, to)                  takes ns; each block stores at to + 32 times its number when it first
 *                                        and last looked at the clock, the longest gap between, when that began
 *   nvshare_texture(object, to)          stores at `to` the sum of the bytes that a texture object reads
 *   nvshare_texref(to)                   the same of the module's texture reference
 *   nvshare_look(pieces, parts, keys)    reads pieces of memory, as hook/swap/look_abi.h says
 *
 * fill, check and look take the time of the device's memory. An address that is not
 * mapped, or not accessible, while a kernel runs kills its context: error 700.
 */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "look_abi.h"

#define KERNEL_NS 10000
#define KERNEL_BYTES_PER_NS 1000

static const struct {
	const char *name;
	enum op_what what;
	int params;
} known[] = {
	{ "nvshare_spin", OP_SPIN, 2 },
	{ "nvshare_gap", OP_GAP, 2 },
	{ "nvshare_fill", OP_FILL, 3 },
	{ "nvshare_check", OP_CHECK, 4 },
	{ "nvshare_add", OP_ADD, 3 },
	{ "nvshare_texture", OP_SUM, 2 },
	{ "nvshare_texref", OP_SUM, 1 },
	{ LOOK_NAME, OP_LOOK, 3 },
};

/* PTX is text; a cubin starts with ELF's 0x7f, a fat binary with 0x50 0xed. */
static int is_ptx(const void *image)
{
	const unsigned char *b = image;

	return *b != 0x7f && *b != 0x50;
}

/* As the driver opens its compiler: whoever loads or unloads a library meanwhile is waited for. */
static void open_compiler(void)
{
	void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);

	if (self)
		dlclose(self);
}

static CUresult module_new(struct sim_module **out, const void *image)
{
	struct sim_module *m;
	struct sim_ctx *c;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!out || !image)
		return CUDA_ERROR_INVALID_VALUE;
	rc = ctx_need(&c);
	if (rc)
		return rc;
	if (is_ptx(image))
		open_compiler();
	pthread_mutex_lock(&drv_mu);
	m = obj_new(M_MODULE, sizeof *m);
	if (m) {
		if (is_ptx(image))
			m->ptx = strdup(image);
		*out = m;
	} else {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

static CUresult module_free(struct sim_module *m)
{
	struct sim_func *f, *next;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (obj_is(m, M_MODULE)) {
		for (f = m->funcs; f; f = next) {
			next = f->next;
			obj_free(f);
		}
		texture_ref_free(m);
		free(m->ptx);
		obj_free(m);
	} else {
		rc = CUDA_ERROR_INVALID_HANDLE;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

/* Whether PTX text declares an entry of that name. */
static int ptx_has(const char *ptx, const char *name)
{
	size_t n = strlen(name);

	while ((ptx = strstr(ptx, ".entry"))) {
		ptx += strlen(".entry");
		ptx += strspn(ptx, " \t\r\n");
		if (!strncmp(ptx, name, n) && strchr(" \t\r\n(){", ptx[n]))
			return 1;
	}
	return 0;
}

static CUresult func_get(struct sim_func **out, struct sim_module *m, const char *name)
{
	struct sim_func *f;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!out || !name)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	if (!obj_is(m, M_MODULE)) {
		rc = CUDA_ERROR_INVALID_HANDLE;
	} else if (m->ptx && !ptx_has(m->ptx, name)) {
		rc = CUDA_ERROR_NOT_FOUND;
	} else {
		for (f = m->funcs; f && strcmp(f->name, name); f = f->next)
			;
		if (!f && (f = obj_new(M_FUNC, sizeof *f))) {
			snprintf(f->name, sizeof f->name, "%s", name);
			f->what = OP_SPIN;
			for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
				if (!strcmp(name, known[i].name)) {
					f->what = known[i].what;
					f->params = known[i].params;
				}
			f->module = m;
			f->next = m->funcs;
			m->funcs = f;
		}
		*out = f;
		if (!f)
			rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuModuleLoadData(CUmodule *m, const void *image)
{
	return module_new(m, image);
}

CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, int *options, void **values)
{
	(void)n;
	(void)options;
	(void)values;
	return module_new(m, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *m, const void *image)
{
	return module_new(m, image);
}

CUresult cuModuleLoad(CUmodule *m, const char *file)
{
	char *text;
	CUresult rc;
	FILE *f;
	long n;

	if (!file || !(f = fopen(file, "rb")))
		return CUDA_ERROR_NOT_FOUND;
	fseek(f, 0, SEEK_END);
	n = ftell(f);
	rewind(f);
	text = calloc(1, (size_t)(n > 0 ? n : 0) + 1);
	if (!text || fread(text, 1, (size_t)n, f) != (size_t)n)
		rc = CUDA_ERROR_INVALID_IMAGE;
	else
		rc = module_new(m, text);
	free(text);
	fclose(f);
	return rc;
}

CUresult cuModuleUnload(CUmodule m)
{
	return module_free(m);
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name)
{
	return func_get(f, m, name);
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *bytes, CUmodule m, const char *name)
{
	(void)p;
	(void)bytes;
	(void)m;
	(void)name;
	return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleGetLoadingMode(int *mode)
{
	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	*mode = 2; /* lazy */
	return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *l, const void *code, int *jo, void **jv, unsigned nj, int *lo, void **lv,
			   unsigned nl)
{
	(void)jo, (void)jv, (void)nj, (void)lo, (void)lv, (void)nl;
	return module_new(l, code);
}

CUresult cuLibraryUnload(CUlibrary l)
{
	return module_free(l);
}

CUresult cuLibraryGetKernel(CUkernel *k, CUlibrary l, const char *name)
{
	return func_get(k, l, name);
}

CUresult cuLibraryGetModule(CUmodule *m, CUlibrary l)
{
	if (!m || !obj_is(l, M_MODULE))
		return CUDA_ERROR_INVALID_VALUE;
	*m = l;
	return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr *p, size_t *bytes, CUlibrary l, const char *name)
{
	return cuModuleGetGlobal_v2(p, bytes, l, name);
}

CUresult cuKernelGetFunction(CUfunction *f, CUkernel k)
{
	if (!f || !obj_is(k, M_FUNC))
		return CUDA_ERROR_INVALID_HANDLE;
	*f = k;
	return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *v, int attribute, CUfunction f)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!v || !obj_is(f, M_FUNC))
		return CUDA_ERROR_INVALID_VALUE;
	*v = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == 4 ? 16 /* registers */ : 0;
	return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction f, int attribute, int v)
{
	(void)attribute;
	(void)v;
	return obj_is(f, M_FUNC) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuKernelGetAttribute(int *v, int attribute, CUkernel k, CUdevice dev)
{
	(void)dev;
	return cuFuncGetAttribute(v, attribute, k);
}

CUresult cuKernelSetAttribute(int attribute, int v, CUkernel k, CUdevice dev)
{
	(void)dev;
	return cuFuncSetAttribute(k, attribute, v);
}

CUresult cuFuncSetCacheConfig(CUfunction f, int config)
{
	return cuFuncSetAttribute(f, config, 0);
}

CUresult cuFuncGetModule(CUmodule *m, CUfunction f)
{
	if (!m || !obj_is(f, M_FUNC))
		return CUDA_ERROR_INVALID_VALUE;
	*m = f->module;
	return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction f)
{
	if (!name || !obj_is(f, M_FUNC))
		return CUDA_ERROR_INVALID_VALUE;
	*name = f->name;
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int blockSize, size_t smem)
{
	(void)smem;
	if (!n || blockSize < 1 || blockSize > 1024 || !obj_is(f, M_FUNC))
		return CUDA_ERROR_INVALID_VALUE;
	*n = 2048 / blockSize > 32 ? 32 : 2048 / blockSize;
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, CUfunction f, int blockSize, size_t smem,
							      unsigned flags)
{
	(void)flags;
	return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, blockSize, smem);
}

CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction f, CUoccupancyB2DSize fn, size_t smem,
					  int limit)
{
	(void)fn;
	(void)smem;
	if (!grid || !block || !obj_is(f, M_FUNC))
		return CUDA_ERROR_INVALID_VALUE;
	*block = limit > 0 && limit < 1024 ? limit : 1024;
	*grid = 32;
	return CUDA_SUCCESS;
}

/* ---- launches ---- */

/* The parameters of a kernel that is known, from either way of passing them. */
static CUresult read_params(uint64_t *to, int n, void **params, void **extra)
{
	const char *buffer = NULL;

	if (params) {
		for (int i = 0; i < n; i++)
			memcpy(&to[i], params[i], 8);
		return CUDA_SUCCESS;
	}
	for (; extra && *extra; extra += 2)
		if (*extra == (void *)0x1) /* CU_LAUNCH_PARAM_BUFFER_POINTER */
			buffer = extra[1];
	if (!buffer)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(to, buffer, 8 * (size_t)n);
	return CUDA_SUCCESS;
}

/* What a kernel does. */
static CUresult prepare(struct op *op, const struct sim_func *f, void **params, void **extra)
{
	uint64_t v[4] = { 0 };
	CUresult rc = f->params ? read_params(v, f->params, params, extra) : CUDA_SUCCESS;

	if (rc)
		return rc;
	op->what = f->what;
	switch (f->what) {
	case OP_SPIN:
		if (f->params) {
			op->ns = v[0];
			op->record = v[1];
		}
		return CUDA_SUCCESS;
	case OP_GAP: /* height: blocks */
		op->ns = v[0];
		op->record = v[1];
		return CUDA_SUCCESS;
	case OP_SUM:
		op->record = v[f->params - 1];
		if (!texture_memory(f->params == 2 ? v[0] : 0, f->module, op))
			return CUDA_ERROR_INVALID_VALUE;
		op->ns += op->width * op->height / KERNEL_BYTES_PER_NS;
		return CUDA_SUCCESS;
	case OP_LOOK: /* is of the move, as its copies are: in the log it is none of the program's kernels */
		op->kind = SIM_DTOD;
		op->height /= LOOK_PARTS;
		op->dst = (char *)(uintptr_t)v[0];
		op->record = v[1];
		op->src = (const char *)(uintptr_t)v[2];
		op->ns += op->height * LOOK_PIECE / KERNEL_BYTES_PER_NS;
		return CUDA_SUCCESS;
	default:
		op->dst = (char *)(uintptr_t)v[0];
		op->width = v[1];
		op->seed = v[2];
		op->record = v[3];
		op->ns = f->what == OP_ADD ? v[2] : op->ns + v[1] / KERNEL_BYTES_PER_NS;
		return CUDA_SUCCESS;
	}
}

struct dims {
	unsigned x, y, z;
};

static CUresult launch_op(struct op *op, CUfunction f, struct dims grid, struct dims block, void **params, void **extra)
{
	CUresult rc = drv_enter();

	*op = (struct op){ .what = OP_SPIN, .engine = SIM_COMPUTE, .kind = SIM_KERNEL, .ns = KERNEL_NS };
	if (rc)
		return rc;
	if (!obj_is(f, M_FUNC))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z ||
	    (uint64_t)block.x * block.y * block.z > 1024)
		return CUDA_ERROR_INVALID_VALUE;
	op->height = grid.x;
	return prepare(op, f, params, extra);
}

CUresult kernel_op(struct op *op, CUfunction f, const CUDA_KERNEL_NODE_PARAMS *p)
{
	return launch_op(op, f, (struct dims){ p->gridDimX, p->gridDimY, p->gridDimZ },
			 (struct dims){ p->blockDimX, p->blockDimY, p->blockDimZ }, p->kernelParams, p->extra);
}

static CUresult launch(CUfunction f, struct dims grid, struct dims block, CUstream s, void **params, void **extra)
{
	struct op op;
	CUresult rc = launch_op(&op, f, grid, block, params, extra);

	if (rc == SIMGPU_LOST)
		return CUDA_SUCCESS;
	return rc ? rc : submit(s, &op, 0);
}

#define GRID  ((struct dims){ gx, gy, gz })
#define BLOCK ((struct dims){ bx, by, bz })

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			unsigned smem, CUstream s, void **params, void **extra)
{
	(void)smem;
	return launch(f, GRID, BLOCK, s, params, extra);
}
PTSZ(cuLaunchKernel,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
      CUstream s, void **params, void **extra),
     (f, gx, gy, gz, bx, by, bz, smem, PT(s), params, extra))

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
				   unsigned bz, unsigned smem, CUstream s, void **params)
{
	(void)smem;
	return launch(f, GRID, BLOCK, s, params, NULL);
}
PTSZ(cuLaunchCooperativeKernel,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
      CUstream s, void **params),
     (f, gx, gy, gz, bx, by, bz, smem, PT(s), params))

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
	if (!c || (c->numAttrs && !c->attrs))
		return CUDA_ERROR_INVALID_VALUE;
	return launch(f, (struct dims){ c->gridDimX, c->gridDimY, c->gridDimZ },
		      (struct dims){ c->blockDimX, c->blockDimY, c->blockDimZ }, c->hStream, params, extra);
}

SIM_EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
	CUlaunchConfig copy;

	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	copy = *c;
	copy.hStream = PT(c->hStream);
	return cuLaunchKernelEx(&copy, f, params, extra);
}
