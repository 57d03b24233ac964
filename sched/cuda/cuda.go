//go:build cgo

// SPDX-License-Identifier: Apache-2.0

// Package cuda is as much of the CUDA driver as the program of nvsharectl doctor test needs.
// It is a package of its own because go vet of what uses cgo reads the sources at the path
// at which they were compiled first, unless that is without -trimpath.
package cuda

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned long long dptr;

struct cuda {
	int (*init)(unsigned);
	int (*device)(int *, int);
	int (*retain)(void **, int);
	int (*current)(void *);
	int (*load)(void **, const void *);
	int (*function)(void **, void *, const char *);
	int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
	int (*synchronize)(void);
	int (*info)(size_t *, size_t *);
	int (*alloc)(dptr *, size_t);
	int (*set)(dptr, unsigned, size_t);
	int (*get)(void *, dptr, size_t);
};

// nvs_open returns the function that is missing, or NULL. A missing library is a missing
// function.
static const char *nvs_open(struct cuda *c)
{
	static const char *const names[] = {
		"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData",
		"cuModuleGetFunction", "cuLaunchKernel", "cuCtxSynchronize", "cuMemGetInfo_v2", "cuMemAlloc_v2",
		"cuMemsetD32_v2", "cuMemcpyDtoH_v2",
	};
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	void **at = (void **)c;

	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		at[i] = lib ? dlsym(lib, names[i]) : NULL;
		if (!at[i])
			return lib ? names[i] : "libcuda.so.1";
	}
	return NULL;
}

static int nvs_start(struct cuda *c, int device, const char *ptx, void **kernel)
{
	void *ctx, *module;
	int dev, rc;

	(rc = c->init(0)) || (rc = c->device(&dev, device)) || (rc = c->retain(&ctx, dev)) ||
		(rc = c->current(ctx)) || (rc = c->load(&module, ptx)) || (rc = c->function(kernel, module, "nvshare_spin"));
	return rc;
}

// nvs_spin has the GPU work n times for ns.
static int nvs_spin(struct cuda *c, void *kernel, unsigned n, uint64_t ns)
{
	uint64_t none = 0;
	void *args[] = { &ns, &none };
	int rc = 0;

	while (n-- && !rc)
		rc = c->launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL);
	return rc ? rc : c->synchronize();
}

static int nvs_info(struct cuda *c, size_t *free, size_t *total) { return c->info(free, total); }
static int nvs_alloc(struct cuda *c, dptr *p, size_t n) { return c->alloc(p, n); }
static int nvs_set(struct cuda *c, dptr p, unsigned v, size_t words) { return c->set(p, v, words); }
static int nvs_get(struct cuda *c, void *to, dptr p, size_t n) { return c->get(to, p, n); }
*/
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"
)

// spinPTX is nvshare_spin(ns, 0), which runs for ns by the GPU's own clock.
const spinPTX = `.version 6.0
.target sm_50
.address_size 64
.visible .entry nvshare_spin(.param .u64 p_ns, .param .u64 p_record)
{
	.reg .pred %p<2>;
	.reg .b64 %rd<5>;
	ld.param.u64 %rd1, [p_ns];
	mov.u64 %rd3, %globaltimer;
SPIN:
	mov.u64 %rd4, %globaltimer;
	sub.u64 %rd2, %rd4, %rd3;
	setp.lt.u64 %p1, %rd2, %rd1;
	@%p1 bra SPIN;
	ret;
}
`

// outOfMemory is CUDA_ERROR_OUT_OF_MEMORY.
const outOfMemory = 2

// Driver is CUDA, opened as programs open it.
type Driver struct {
	c      C.struct_cuda
	kernel unsafe.Pointer
}

// Open makes a context on the first GPU that the process sees. All calls come from
// the thread that made it.
func Open() (*Driver, error) {
	runtime.LockOSThread()
	d := &Driver{}
	if missing := C.nvs_open(&d.c); missing != nil {
		return nil, fmt.Errorf("the CUDA driver has no %s", C.GoString(missing))
	}
	ptx := C.CString(spinPTX)
	return d, cudaError("start CUDA", C.nvs_start(&d.c, 0, ptx, &d.kernel))
}

func cudaError(what string, rc C.int) error {
	if rc == 0 {
		return nil
	}
	return fmt.Errorf("%s: CUDA error %d", what, rc)
}

// Spin has the GPU work n times for so many ns.
func (d *Driver) Spin(n int, ns uint64) error {
	return cudaError("run a kernel", C.nvs_spin(&d.c, d.kernel, C.unsigned(n), C.uint64_t(ns)))
}

// Total is the size of the GPU's memory, as programs see it.
func (d *Driver) Total() (uint64, error) {
	var free, total C.size_t
	err := cudaError("ask for the memory", C.nvs_info(&d.c, &free, &total))
	return uint64(total), err
}

// Alloc makes a piece of memory and fills it with a word; full: there is no more.
func (d *Driver) Alloc(bytes uint64, word uint32) (at uint64, full bool, err error) {
	var p C.dptr
	if rc := C.nvs_alloc(&d.c, &p, C.size_t(bytes)); rc != 0 {
		return 0, rc == outOfMemory, cudaError("allocate memory", rc)
	}
	return uint64(p), false, cudaError("write memory", C.nvs_set(&d.c, p, C.unsigned(word), C.size_t(bytes/4)))
}

// Read copies memory to the host.
func (d *Driver) Read(to []byte, at uint64) error {
	return cudaError("read memory", C.nvs_get(&d.c, unsafe.Pointer(&to[0]), C.dptr(at), C.size_t(len(to))))
}
