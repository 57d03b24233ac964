// SPDX-License-Identifier: Apache-2.0
/* stub.h: a libcuda.so.1 that does nothing but watch who calls when. */
#ifndef NVSHARE_TEST_STUB_H
#define NVSHARE_TEST_STUB_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define STUB_GPUS 2
#define STUB_PAGE 4096 /* struct stub has one of its own */

/* At least so many of the functions below submit work. */
#define STUB_SUBMITS 8

struct stub {
	int gpus;                              /* set before cuInit */
	int init_result;                       /* what cuInit returns */
	int memory_result;                     /* and cuMemAlloc */
	uint64_t work_ns;                      /* length of a launch on the "GPU" */
	_Atomic uint64_t destroy_ns;           /* cuCtxDestroy returns so long after it is done */
	int queued;                            /* launches run one after the other, not all at once */
	atomic_ulong stuck_until;              /* nothing ends before so many launches on GPU 0 */
	atomic_int allowed[STUB_GPUS];         /* whether a launch is legal now */
	_Atomic uint64_t busy_until[STUB_GPUS]; /* end of the work submitted */
	atomic_ulong launches[STUB_GPUS];
	atomic_ulong violations;               /* launches while not allowed */
	atomic_ulong syncs;                    /* context synchronisations */
	atomic_ulong broken_captures;          /* context synchronised, or stream asked, during a capture */
	uint64_t capturing_ns;                 /* cuStreamIsCapturing's answer is so old */
	atomic_ulong recorded;                 /* launches into a capture */
	atomic_ulong asked;                    /* streams, whether they have work */
	atomic_ulong events;                   /* event records */
	atomic_long live_events;               /* made, and not destroyed */
	atomic_ulong per_thread;               /* launches by way of cuLaunchKernel_ptsz */
	atomic_int blocked[STUB_GPUS];         /* event and stream calls do not return: the driver is busy */
	atomic_int checkpointed;               /* event calls and launches do not return until it is restored */
	atomic_int waiting;                    /* so many do */
	atomic_ulong destroyed;                /* contexts, and primary ones let go of */
	int refuses_destroy;                   /* cuCtxDestroy and cuStreamDestroy fail, with this error */
};

/* Exported by the stub. */
struct stub *stub_state(void);

/* The part of the driver API that tests call; see cuda.h for the meaning. */
int cuInit(unsigned flags);
int cuDeviceGet(int *dev, int ordinal);
int cuDriverGetVersion(int *version);
int cuDevicePrimaryCtxReset_v2(int dev);
int cuDevicePrimaryCtxRetain(void **ctx, int dev);
int cuDevicePrimaryCtxRelease_v2(int dev);
int cuCtxCreate_v2(void **ctx, unsigned flags, int dev);
int cuCtxDestroy_v2(void *ctx);
int cuCtxAttach(void **ctx, unsigned flags);
int cuCtxDetach(void *ctx);
int cuCtxGetCurrent(void **ctx);
int cuCtxSetCurrent(void *ctx);
int cuCtxSynchronize(void);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamDestroy_v2(void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		   unsigned bz, unsigned shared, void *stream, void **params, void **extra);
int cuLaunchKernel_ptsz(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
			unsigned bz, unsigned shared, void *stream, void **params, void **extra);
int cuLaunch(void *f);
int cuLaunchGrid(void *f, int width, int height);
int cuLaunchGridAsync(void *f, int width, int height, void *stream);
int cuMemcpyBatchAsync(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
		       size_t num, size_t *fail, void *stream);
int cuMemcpyBatchAsync_ptsz(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
			    size_t num, size_t *fail, void *stream);
int cuMemcpyBatchAsync_v2(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
			  size_t num, void *stream);
int cuMemcpyBatchAsync_v2_ptsz(void *d, void *s, size_t *n, size_t count, void *attrs, size_t *idx,
			       size_t num, void *stream);
int cuGraphInstantiateWithParams(void **exec, void *graph, void *params);
int cuGreenCtxCreate(void **green, void *desc, int dev, unsigned flags);
int cuGreenCtxDestroy(void *green);
int cuCtxFromGreenCtx(void **ctx, void *green);
int cuGreenCtxStreamCreate(void **stream, void *green, unsigned flags, int priority);
int cuGetExportTable(const void **table, const void *id);
/* CUDA_LAUNCH_PARAMS */
struct stub_launch {
	void *function;
	unsigned grid[3], block[3], shared;
	void *stream;
	void **params;
};
int cuLaunchCooperativeKernelMultiDevice(struct stub_launch *list, unsigned count, unsigned flags);
int cuMemAlloc_v2(unsigned long long *p, size_t bytes);
int cuMemFree_v2(unsigned long long p);
int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, void *status);

/* Exists in no driver: what the stub says about an unknown export. */
int cuNotInTheTable(void);
/* Not a driver function, whatever it begins with. */
int cudnnCreate(void **handle);

#endif
