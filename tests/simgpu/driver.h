// SPDX-License-Identifier: Apache-2.0
/*
 * driver.h: objects of the simulated driver inside one process. All of them
 * are guarded by drv_mu; nothing sleeps while holding it. A destroyed object
 * keeps its memory for the next of its type, so a stale handle is recognised
 * by its magic.
 */
#ifndef SIMGPU_DRIVER_H
#define SIMGPU_DRIVER_H

#include "cudadrv.h"
#include "shared.h"

#include <pthread.h>

#define SIM_EXPORT __attribute__((visibility("default")))
/* The per-thread-default-stream variant of a function: stream 0 means 2. */
#define PTSZ(name, params, args) SIM_EXPORT CUresult name##_ptsz params { return name args; }
#define PT(s) ((s) ? (s) : CU_STREAM_PER_THREAD)

extern pthread_mutex_t drv_mu;

enum { /* magics */
	M_CTX = 0x43545831, M_STREAM, M_EVENT, M_MODULE, M_FUNC, M_GRAPH, M_EXEC, M_POOL, M_PHYS,
	M_HANDLE, M_ARRAY, M_MIPMAP, M_TEXTURE, M_TEXREF, M_MAGICS
};

struct obj {
	uint32_t magic;
	struct obj *next_free;
};

/* Zeroed object of a type; never fails the caller softly: NULL is out of memory. */
void *obj_new(uint32_t magic, size_t size);
void obj_free(void *o); /* o may still be looked at, never used */
int obj_is(const void *o, uint32_t magic);

/*
 * A moment in a stream: reached when its clock is past `time` and what has the
 * ticket (0: nothing) in work.c's list is done.
 */
struct point {
	struct sim_time time;
	uint64_t ticket;
};
struct point point_max(struct point a, struct point b);
int point_reached(struct point p);
struct point point_now(void);
void point_wait(struct point p); /* without drv_mu */

/* One thing a stream can be asked to do. */
enum op_what {
	OP_NOTHING, OP_SPIN, OP_GAP, OP_COPY, OP_SET, OP_FILL, OP_CHECK, OP_ADD, OP_SUM, OP_LOOK,
	OP_HOST, OP_CALLBACK, OP_WRITE, OP_WAIT, OP_FREE,
	OP_TAKE, OP_GIVE, OP_CHILD /* nodes of graphs: memory at dst, width bytes on GPU `element`; a graph, data */
};
/* Where one side of a copy is: host memory that the driver knows, device memory, or other host memory. */
enum side { PINNED_SIDE, ON_GPU, PAGEABLE };
struct op {
	enum op_what what;
	int engine, kind;
	uint64_t ns;
	uint64_t record; /* device address. OP_SPIN: of two u64 stamps, or 0; OP_CHECK, OP_SUM: of one u64 */
	uint64_t seed;   /* OP_FILL, OP_CHECK: of the words from dst on; OP_WRITE, OP_WAIT: the value */
	char *dst;
	const char *src;
	enum side dst_side, src_side; /* OP_COPY */
	void *staged; /* OP_COPY: what is copied instead of src; freed with the work */
	size_t dpitch, spitch, width, height; /* bytes; rows */
	uint32_t value; /* OP_WAIT: enum, how it is compared */
	int element; /* OP_SET: 1, 2 or 4 bytes; OP_WRITE, OP_WAIT: 4 or 8 */
	CUhostFn fn;
	CUstreamCallback callback;
	void *data;
	struct sim_ctx *ctx; /* of a node of a graph: where it runs */
};

struct sim_ctx {
	struct obj o;
	CUdevice dev; /* ordinal of this process */
	int gpu;      /* index of the node */
	unsigned flags;
	int primary, refs;
	struct sim_ctx *of;    /* a green one: the primary one, which has its memory */
	unsigned long long id;
	uint32_t rm;           /* its groups and channels */
	CUresult fault;        /* not 0: it is dead, every call that submits work or asks for it says so */
	struct point all;      /* everything submitted */
	struct point blocking; /* everything in blocking streams */
	struct sim_stream *legacy;
	struct sim_stream *per_thread; /* list */
};

struct deps {
	int *node;
	int n;
};

struct sim_stream {
	struct obj o;
	struct sim_ctx *ctx;
	unsigned flags;
	int priority;
	unsigned long long id;
	int is_legacy;
	uint64_t thread; /* per-thread stream: its thread */
	struct sim_stream *next;
	struct point tail;
	struct capture *capture;
	struct deps deps; /* last nodes, while capturing */
};

struct sim_event {
	struct obj o;
	struct sim_ctx *ctx;
	unsigned flags;
	int recorded;
	struct point at;
	unsigned long long capture; /* id, 0: not recorded in a capture */
	struct deps deps;
};

struct sim_func {
	struct obj o;
	struct sim_module *module;
	enum op_what what; /* OP_SPIN: also any kernel that does nothing */
	int params;        /* u64 that it takes; 0: not looked at */
	char name[128];
	struct sim_func *next;
};

struct sim_module {
	struct obj o;
	char *ptx; /* copy of the source, NULL for a binary image */
	struct sim_texref *ref; /* one a module, whatever its name */
	struct sim_func *funcs;
};

#define ENTER()                             \
	do {                                \
		CUresult rc_ = drv_enter(); \
		if (rc_)                    \
			return rc_;         \
	} while (0)
#define NEED(cond)                                         \
	do {                                               \
		if (!(cond))                               \
			return CUDA_ERROR_INVALID_VALUE;   \
	} while (0)
#define DEVICE(d)                                          \
	do {                                               \
		if (dev_gpu(d) < 0)            \
			return CUDA_ERROR_INVALID_DEVICE;  \
	} while (0)

/* context.c */
CUresult drv_entered(const char *call);
#define drv_enter() drv_entered(__func__) /* first line of every call */
int drv_closed(void); /* the process ends */
CUresult ctx_failed(const struct sim_ctx *c); /* its fault, or that of simgpu_fail() */
struct sim_ctx *ctx_current(void);
void ctx_done(struct sim_ctx *c, struct point end); /* drv_mu held: its work ends then */
CUresult ctx_need(struct sim_ctx **ctx);
uint64_t thread_id(void);
extern struct simgpu_calls drv_calls;
int dev_count(void);
int dev_gpu(CUdevice dev); /* node index, -1 */
int dev_of_gpu(int gpu);   /* the device; a GPU that is none of this process: as it is */

/* work.c; drv_mu held */
int op_names_memory(const struct op *op);
/* Queues what happens from start to end, after end's ticket and another one; 0: no memory. */
uint64_t work_push(const struct op *op, struct sim_ctx *ctx, CUstream stream, struct point end, uint64_t start,
		   uint64_t also);
/* Before a range is mapped or unmapped: work that runs now and misses it kills its context. */
void work_before_mapping(void);
/* Without drv_mu: does what is over by a GPU's clock, so that its channels can go off. */
void work_settle(int gpu);
void work_before_unmapping(uintptr_t at, size_t size); /* may let go of drv_mu */

/* stream.c; drv_mu held unless said otherwise */
CUresult stream_find(CUstream h, struct sim_stream **s);
struct point stream_deps(struct sim_stream *s); /* what new work waits for */
void stream_done(struct sim_stream *s, struct point end);
struct point op_queue(struct sim_ctx *ctx, const struct op *op, CUstream h, struct point after);
void op_move(const struct op *op); /* the bytes; without drv_mu */
void look_move(const struct op *op); /* look.c: of OP_LOOK: height addresses at dst, parts go to record, keys at src */
/* The whole of a submission, without drv_mu; wait: and of the work. */
CUresult submit(CUstream h, const struct op *op, int wait);

/* capture.c; drv_mu held */
CUresult capture_guard_unsafe(void);
CUresult capture_guard_legacy(struct sim_ctx *ctx);
CUresult capture_guard_context(struct sim_ctx *ctx);
CUresult capture_add(struct sim_stream *s, const struct op *op);
CUresult capture_refuse(struct sim_stream *s, CUresult why);
CUresult capture_event_refuse(const struct sim_event *e);
void capture_record(struct sim_stream *s, struct sim_event *e);
CUresult capture_wait(struct sim_stream *s, struct sim_event *e);
void deps_set(struct deps *d, const int *node, int n);

/* The same without drv_mu: adds a node, or changes one of an executable graph. */
CUresult graph_node_add(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, const struct op *op);
CUresult graph_node_set(CUgraphNode node, const struct op *op);
CUresult graph_node_get(CUgraphNode node, struct op *op);
CUresult graph_child_add(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, CUgraph child);
CUresult graph_exec_set(CUgraphExec exec, CUgraphNode node, const struct op *op);

/* kernel.c, transfer.c: what a node does, from its parameters; without drv_mu */
CUresult kernel_op(struct op *op, CUfunction f, const CUDA_KERNEL_NODE_PARAMS *p);
CUresult copy_op(struct op *op, const CUDA_MEMCPY3D *p);
CUresult set_op(struct op *op, const CUDA_MEMSET_NODE_PARAMS *p);

/* texture.c; takes drv_mu. The memory that a texture object, or a module's reference, reads. */
int texture_memory(uint64_t object, const struct sim_module *m, struct op *op);
void texture_ref_free(struct sim_module *m); /* drv_mu held */

/* graphmem.c; drv_mu held unless said otherwise */
struct graph_memory { /* allocations of a graph: bytes on each GPU */
	uint64_t bytes[SIM_MAX_GPUS];
};
/* An address for a node; nothing is charged until the graph is launched. */
CUresult graph_memory_add(struct graph_memory *m, int gpu, size_t bytes, CUdeviceptr *p);
int graph_memory_is(CUdeviceptr p); /* the address of a node */
/* Before an executable graph's first launch: charges what the pool lacks. */
CUresult graph_memory_use(const struct graph_memory *m);
void graph_memory_drop(const struct graph_memory *m); /* it is destroyed */
CUresult capture_alloc(struct sim_stream *s, size_t bytes, CUdeviceptr *p);

/* array.c; drv_mu held */
void array_release_all(struct sim_ctx *ctx);

/* memory.c; takes drv_mu itself */
int mem_valid(CUdeviceptr p, size_t n);       /* device-accessible range */
int mem_valid_locked(CUdeviceptr p, size_t n); /* the same, drv_mu held */
int mem_device(CUdeviceptr p, int *gpu);      /* 1: device memory */
int mem_pageable(CUdeviceptr p);              /* 1: the driver knows nothing of it */
void mem_end(uintptr_t p);                    /* drv_mu held: what cuMemFreeAsync left goes now */
int vmm_reserved(CUdeviceptr p);              /* 1: in a reserved range, mapped or not */
void mem_release_all(struct sim_ctx *ctx);    /* drv_mu held */

#endif
