// SPDX-License-Identifier: Apache-2.0
/* graph.c: wrappers of graphs: the memory that they own, the GPUs that they work on, and their launch. */
#include <sys/mman.h>

#include "pointer_abi.h"
#include "wrap.h"

/* ---- memory of graphs ---- */

bool nvs_graph_may_have(struct nvs_gpu *gpu, uint64_t bytes)
{
	struct nvs_claim claim;

	if (!gpu)
		return true;
	if (!nvs_claim(&claim, gpu, bytes))
		return false;
	nvs_claim_drop(&claim);
	nvs_memory_graph_used(gpu);
	return true;
}

static bool node_may_have(const struct cu_alloc_node *n)
{
	return nvs_graph_may_have(nvs_gpu_of_location(&n->props.location), n->bytes);
}

WRAPPER(cuGraphAddMemAllocNode, (void **node, void *graph, const void *deps, size_t count,
			       struct cu_alloc_node *params))
{
	if (nvs_counting() && params && !node_may_have(params))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return CALL(cuGraphAddMemAllocNode, node, graph, deps, count, params);
}

static bool params_may_have(const struct cu_node_params *p)
{
	return !nvs_counting() || !p || p->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
	       node_may_have(&p->u.alloc);
}

/* The memory that the node names is on the GPU meanwhile. */
#define ADD_NODE(name, P, A) \
	WRAPPER(name, P) \
	{ \
		if (!params_may_have(params)) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		return NVS_NAMING(nvs_names_enter_node(params), CALL(name, NVS_SPREAD A)); \
	}
ADD_NODE(cuGraphAddNode, (void **node, void *graph, const void *deps, size_t count, struct cu_node_params *params),
	 (node, graph, deps, count, params))
ADD_NODE(cuGraphAddNode_v2, (void **node, void *graph, const void *deps, const void *edges, size_t count,
			     struct cu_node_params *params), (node, graph, deps, edges, count, params))
ADD_NODE(cuGraphAddNode_v3, (void **node, void *graph, const void *deps, const void *edges, size_t count,
			     struct cu_node_params *params), (node, graph, deps, edges, count, params))

/* ---- the nodes of a graph ---- */

#define MAX_DEPTH 8 /* of graphs inside graphs */

/* Calls fn for each node of a graph and of the graphs inside, as far as the driver tells them. */
static void each_node(void *graph, unsigned depth, void (*fn)(void *node, int type, void *arg), void *arg)
{
	const struct nvs_memory_driver_table *v = &nvs_memory_driver;
	size_t n = 0, bytes;
	void **nodes, *child;

	if (depth > MAX_DEPTH || v->graph_nodes(graph, NULL, &n) != CUDA_SUCCESS || !n)
		return;
	bytes = n * sizeof(*nodes);
	nodes = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (nodes == MAP_FAILED)
		return;
	if (v->graph_nodes(graph, nodes, &n) == CUDA_SUCCESS)
		for (size_t i = 0; i < n && i < bytes / sizeof(*nodes); i++) {
			int type = -1;

			if (v->graph_node_type(nodes[i], &type) != CUDA_SUCCESS)
				continue;
			if (type != CU_GRAPH_NODE_TYPE_GRAPH)
				fn(nodes[i], type, arg);
			else if (v->graph_child(nodes[i], &child) == CUDA_SUCCESS)
				each_node(child, depth + 1, fn, arg);
		}
	munmap(nodes, bytes);
}

/* ---- the GPUs of a graph ---- */

/* Host memory is on no GPU. */
static unsigned gpu_of_address(CUdeviceptr p)
{
	struct nvs_gpu *gpu = NULL;
	uint type = 0;
	int dev;

	if (p && nvs_memory_driver.pointer_attribute(&type, NVS_POINTER_MEMORY_TYPE, p) == CUDA_SUCCESS &&
	    type == CU_MEMORY_TYPE_DEVICE &&
	    nvs_memory_driver.pointer_attribute(&dev, NVS_POINTER_DEVICE_ORDINAL, p) == CUDA_SUCCESS)
		gpu = nvs_gpu_of_device(dev);
	return gpu ? gpu->bit : 0;
}

/* Adds a bit for the GPU that a node works on, as far as the driver tells. */
static void add_gpu_of_node(void *node, int type, void *gpus)
{
	const struct nvs_memory_driver_table *v = &nvs_memory_driver;
	union {
		struct cu_kernel_node kernel;
		struct cu_memcpy3d copy;
		struct cu_memset_node set;
		struct cu_mem_op_node mem_ops;
	} u = { .kernel = { 0 } };
	unsigned *all = gpus;

	switch (type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		if (v->graph_kernel(node, &u.kernel) == CUDA_SUCCESS)
			*all |= nvs_gpu_bit_of_context(u.kernel.ctx);
		break;
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		if (v->graph_copy(node, &u.copy) == CUDA_SUCCESS)
			*all |= gpu_of_address(u.copy.src) | gpu_of_address(u.copy.dst);
		break;
	case CU_GRAPH_NODE_TYPE_MEMSET:
		if (v->graph_set(node, &u.set) == CUDA_SUCCESS)
			*all |= gpu_of_address(u.set.dst);
		break;
	case CU_GRAPH_NODE_TYPE_MEM_OPS:
		if (v->graph_mem_ops(node, &u.mem_ops) == CUDA_SUCCESS)
			*all |= nvs_gpu_bit_of_context(u.mem_ops.ctx);
		break;
	}
}

/* ---- what a graph allocates ---- */

/* Of a graph that is instantiated, or launched for the first time. */
struct taking {
	struct nvs_graph_bytes bytes[NVS_MAX_GPUS];
	struct nvs_entries live; /* allocations that no node has freed yet */
	struct nvs_claim claims[NVS_MAX_GPUS];
	unsigned claimed;
};

/* Claims what is missing on each GPU until the driver's call is over. False: the limit refuses it. */
static bool claim_all(struct taking *t)
{
	NVS_FOR_EACH_GPU(gpu) {
		struct nvs_graph_bytes bytes = t->bytes[gpu->number];

		if (!bytes.most)
			continue;
		if (!nvs_claim(&t->claims[t->claimed], gpu, nvs_memory_graph_takes(gpu, bytes))) {
			nvs_memory_graph_settle(t->claims, t->claimed);
			return false;
		}
		t->claimed++;
	}
	return true;
}

/* Nodes that allocate exist before those that free the same. */
static void add_bytes_of_node(void *node, int type, void *taking)
{
	struct taking *t = taking;
	struct cu_alloc_node alloc = { .bytes = 0 };
	struct nvs_entry *e;
	CUdeviceptr p;

	if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && nvs_memory_driver.graph_alloc(node, &alloc) == CUDA_SUCCESS) {
		struct nvs_gpu *gpu = nvs_gpu_of_location(&alloc.props.location);
		struct nvs_graph_bytes *b = gpu ? &t->bytes[gpu->number] : NULL;

		if (!b || alloc.bytes > NVS_MAX_BYTES || nvs_entry_find(&t->live, NVS_MEMORY_POINTER, alloc.p) ||
		    !nvs_entry_add(&t->live, &(struct nvs_entry){ .kind = NVS_MEMORY_POINTER, .key = alloc.p,
								  .bytes = alloc.bytes, .gpu = gpu->number }))
			return;
		b->left += alloc.bytes;
		b->most = b->left > b->most ? b->left : b->most;
	} else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE && nvs_memory_driver.graph_free(node, &p) == CUDA_SUCCESS) {
		e = nvs_entry_find(&t->live, NVS_MEMORY_POINTER, p);
		if (!e)
			return;
		t->bytes[e->gpu].left -= e->bytes;
		nvs_entry_remove(&t->live, e);
	}
}

/* Before an instantiation. False: the graph can't have the memory that it allocates. */
static bool may_be_made(struct taking *t, void *graph)
{
	*t = (struct taking){ .claimed = 0 };
	if (nvs_likely(!atomic_load_explicit(&nvs_memory_graphs, memory_order_relaxed)) || !nvs_counting())
		return true;
	each_node(graph, 0, add_bytes_of_node, t);
	nvs_entries_reset(&t->live);
	return claim_all(t);
}

/* ---- instantiation ---- */

/*
 * After an instantiation: nodes never change their GPU. A process that uses one GPU asks the driver
 * nothing. uploaded: the graph has its memory.
 */
static int instantiated(struct taking *t, int result, void **exec, void *graph, bool uploaded)
{
	unsigned used = 0, gpus = 0;

	NVS_FOR_EACH_GPU(gpu) {
		used += atomic_load(&gpu->used);
		if (result == CUDA_SUCCESS && t->bytes[gpu->number].most && !uploaded)
			nvs_memory_graph_will_take((uintptr_t)*exec, gpu, t->bytes[gpu->number]);
	}
	if (result == CUDA_SUCCESS && used > 1 && nvs_counting()) {
		each_node(graph, 0, add_gpu_of_node, &gpus);
		nvs_memory_graph_works_on((uintptr_t)*exec, gpus);
	}
	if (nvs_unlikely(atomic_load_explicit(&nvs_memory_graphs, memory_order_relaxed)))
		nvs_memory_graph_settle(t->claims, t->claimed);
	return result;
}

/* The driver looks up what memset nodes write. An upload is work, to build a graph is none. */
#define INSTANTIATE_BEHIND(name, P, A, enter, uploaded) \
	WRAPPER(name, P) \
	{ \
		struct taking taking; \
		int result; \
		if (!may_be_made(&taking, graph)) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		result = NVS_NAMING(enter, CALL(name, NVS_SPREAD A)); \
		return instantiated(&taking, result, exec, graph, uploaded); \
	}
#define INSTANTIATE(name, P, A) INSTANTIATE_BEHIND(name, P, A, nvs_names_enter_graph(), false)
INSTANTIATE(cuGraphInstantiate, (void **exec, void *graph, void **bad, char *log, size_t n),
	    (exec, graph, bad, log, n))
INSTANTIATE(cuGraphInstantiate_v2, (void **exec, void *graph, void **bad, char *log, size_t n),
	    (exec, graph, bad, log, n))
INSTANTIATE(cuGraphInstantiateWithFlags, (void **exec, void *graph, unsigned long long flags),
	    (exec, graph, flags))

static bool uploads(const struct cu_instantiate_params *p)
{
	return p && p->flags & CU_GRAPH_INSTANTIATE_UPLOAD;
}

#define INSTANTIATE_WITH(name, P, A, key) \
	INSTANTIATE_BEHIND(name, P, A, uploads(p) ? nvs_gate_enter(key) : nvs_names_enter_graph(), uploads(p))
NVS_SZ(INSTANTIATE_WITH, cuGraphInstantiateWithParams, (void **exec, void *graph, struct cu_instantiate_params *p),
       (exec, graph, p), p->upload_stream)

/* ---- launch and end ---- */

typedef int run_fn(void *exec, void *stream);

static inline int graph_run(run_fn *real, void *exec, void *s, void *key)
{
	struct nvs_thread *t = nvs_gate_enter_gpus(key, nvs_memory_gpus_of_graph((uintptr_t)exec));
	int result = real(exec, s);

	if (nvs_likely(t != NULL))
		nvs_gate_leave(t);
	return result;
}

/* The first time: the graph takes what it allocates. */
static __attribute__((noinline)) int graph_run_first(run_fn *real, void *exec, void *s, void *key)
{
	struct taking t = { .claimed = 0 };
	int result;

	NVS_FOR_EACH_GPU(gpu)
		t.bytes[gpu->number] = nvs_memory_graph_to_take((uintptr_t)exec, gpu);
	if (!claim_all(&t))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = graph_run(real, exec, s, key);
	nvs_memory_graph_settle(t.claims, t.claimed);
	NVS_FOR_EACH_GPU(gpu)
		if (result == CUDA_SUCCESS && t.bytes[gpu->number].most)
			nvs_memory_graph_will_take((uintptr_t)exec, gpu, (struct nvs_graph_bytes){ 0, 0 });
	return result;
}

/* Of a process whose graphs allocate. */
static __attribute__((noinline)) int graph_run_with_memory(run_fn *real, void *exec, void *s, void *key)
{
	bool now = false;
	int result;

	if (nvs_counting() && !(atomic_load(&nvs_gate.captures) && nvs_capturing(key)) &&
	    nvs_memory_graph_runs((uintptr_t)exec, &now))
		return graph_run_first(real, exec, s, key);
	result = graph_run(real, exec, s, key);
	if (now)
		nvs_memory_graphs_recount();
	return result;
}

#define RUN(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		__typeof__(&name) real = NVS_REAL(name); \
		if (nvs_unlikely(atomic_load_explicit(&nvs_memory_graphs, memory_order_relaxed))) \
			return graph_run_with_memory(real, exec, s, key); \
		return graph_run(real, exec, s, key); \
	}
NVS_SZ(RUN, cuGraphLaunch, (void *exec, void *s), (exec, s), s)
NVS_SZ(RUN, cuGraphUpload, (void *exec, void *s), (exec, s), s)

WRAPPER(cuGraphExecDestroy, (void *exec))
{
	uint64_t stamp = nvs_memory_stamp();
	int result = CALL(cuGraphExecDestroy, exec);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_graph_gone((uintptr_t)exec, stamp);
	nvs_memory_graph_ran();
	return result;
}

WRAPPER(cuDeviceGraphMemTrim, (int dev))
{
	int result = CALL(cuDeviceGraphMemTrim, dev);

	nvs_memory_graph_ran();
	return result;
}
