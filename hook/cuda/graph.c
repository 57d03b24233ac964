// SPDX-License-Identifier: Apache-2.0
/*
 * graph.c: wrappers of graphs: the memory that they own, the GPUs that they work on, and
 * their launch. names.c has the nodes that name memory.
 */
#include <sys/mman.h>

#include "pointer_abi.h"
#include "swap.h"
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

/* A call that adds a node; the memory that the node names is on the GPU meanwhile. */
#define adding(params, call) \
	__extension__({ \
		struct nvs_thread *t_ = nvs_names_enter_node(params); \
		int result_ = call; \
		nvs_names_leave(t_); \
		result_; \
	})

WRAPPER(cuGraphAddNode, (void **node, void *graph, const void *deps, size_t count,
		       struct cu_node_params *params))
{
	if (!params_may_have(params))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return adding(params, CALL(cuGraphAddNode, node, graph, deps, count, params));
}

#define ADD_NODE(name) \
	WRAPPER(name, (void **node, void *graph, const void *deps, const void *edges, size_t count, \
		     struct cu_node_params *params)) \
	{ \
		if (!params_may_have(params)) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		return adding(params, CALL(name, node, graph, deps, edges, count, params)); \
	}
ADD_NODE(cuGraphAddNode_v2)
ADD_NODE(cuGraphAddNode_v3)

/* ---- the GPUs of a graph ---- */

#define MAX_DEPTH 8 /* of graphs inside graphs */

static unsigned gpu_of_context(void *ctx)
{
	struct nvs_gpu *gpu = ctx ? nvs_gpu_of_context(ctx) : NULL;

	return gpu ? gpu->bit : 0;
}

/* Host memory is on no GPU. */
static unsigned gpu_of_address(CUdeviceptr p)
{
	struct nvs_gpu *gpu = NULL;
	uint type = 0;
	int dev;

	if (p && nvs_driver.pointer_attribute &&
	    nvs_driver.pointer_attribute(&type, NVS_POINTER_MEMORY_TYPE, p) == CUDA_SUCCESS &&
	    type == CU_MEMORY_TYPE_DEVICE &&
	    nvs_driver.pointer_attribute(&dev, NVS_POINTER_DEVICE_ORDINAL, p) == CUDA_SUCCESS)
		gpu = nvs_gpu_of_device(dev);
	return gpu ? gpu->bit : 0;
}

static unsigned gpus_of_graph(void *graph, unsigned depth);

/* A bit for each GPU that a node works on, as far as the driver tells. */
static unsigned gpus_of_node(void *node, unsigned depth)
{
	const struct nvs_driver_table *v = &nvs_driver;
	union {
		struct cu_kernel_node kernel;
		struct cu_memcpy3d copy;
		struct cu_memset_node set;
		struct cu_mem_op_node mem_ops;
		void *child;
	} u = { .kernel = { 0 } };
	int type = -1;

	if (v->graph_node_type(node, &type) != CUDA_SUCCESS)
		return 0;
	switch (type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		if (v->graph_kernel && v->graph_kernel(node, &u.kernel) == CUDA_SUCCESS)
			return gpu_of_context(u.kernel.ctx);
		break;
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		if (v->graph_copy && v->graph_copy(node, &u.copy) == CUDA_SUCCESS)
			return gpu_of_address(u.copy.src) | gpu_of_address(u.copy.dst);
		break;
	case CU_GRAPH_NODE_TYPE_MEMSET:
		if (v->graph_set && v->graph_set(node, &u.set) == CUDA_SUCCESS)
			return gpu_of_address(u.set.dst);
		break;
	case CU_GRAPH_NODE_TYPE_MEM_OPS:
		if (v->graph_mem_ops && v->graph_mem_ops(node, &u.mem_ops) == CUDA_SUCCESS)
			return gpu_of_context(u.mem_ops.ctx);
		break;
	case CU_GRAPH_NODE_TYPE_GRAPH:
		if (v->graph_child && v->graph_child(node, &u.child) == CUDA_SUCCESS)
			return gpus_of_graph(u.child, depth + 1);
		break;
	}
	return 0;
}

static unsigned gpus_of_graph(void *graph, unsigned depth)
{
	unsigned gpus = 0;
	size_t n = 0, bytes;
	void **nodes;

	if (depth > MAX_DEPTH || nvs_driver.graph_nodes(graph, NULL, &n) != CUDA_SUCCESS || !n)
		return 0;
	bytes = n * sizeof(*nodes);
	nodes = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (nodes == MAP_FAILED)
		return 0;
	if (nvs_driver.graph_nodes(graph, nodes, &n) == CUDA_SUCCESS)
		for (size_t i = 0; i < n && i < bytes / sizeof(*nodes); i++)
			gpus |= gpus_of_node(nodes[i], depth);
	munmap(nodes, bytes);
	return gpus;
}

/*
 * After an instantiation: nodes never change their GPU, so this holds as long as the
 * executable graph. A process that uses one GPU asks the driver nothing.
 */
static int instantiated(int result, void **exec, void *graph)
{
	unsigned used = 0;

	NVS_FOR_EACH_GPU(gpu)
		used += atomic_load(&gpu->used);
	if (result == CUDA_SUCCESS && used > 1 && nvs_counting() && nvs_driver.graph_nodes &&
	    nvs_driver.graph_node_type)
		nvs_memory_graph_works_on((uintptr_t)*exec, gpus_of_graph(graph, 0));
	nvs_memory_graph_ran();
	return result;
}

/* The driver looks up what memset nodes write. */
#define INSTANTIATE(name, P, A) \
	WRAPPER(name, P) \
	{ \
		struct nvs_thread *t = nvs_names_enter_graph(); \
		int result = CALL(name, NVS_SPREAD A); \
		nvs_names_leave(t); \
		return instantiated(result, exec, graph); \
	}
INSTANTIATE(cuGraphInstantiate, (void **exec, void *graph, void **bad, char *log, size_t n),
	    (exec, graph, bad, log, n))
INSTANTIATE(cuGraphInstantiate_v2, (void **exec, void *graph, void **bad, char *log, size_t n),
	    (exec, graph, bad, log, n))
INSTANTIATE(cuGraphInstantiateWithFlags, (void **exec, void *graph, unsigned long long flags),
	    (exec, graph, flags))

/* Builds a graph, which is not work, and may upload it, which is. */
#define INSTANTIATE_WITH(name, KEY) \
	WRAPPER(name, (void **exec, void *graph, struct cu_instantiate_params *p)) \
	{ \
		struct nvs_thread *t = p && (p->flags & CU_GRAPH_INSTANTIATE_UPLOAD) \
			? nvs_gate_enter(KEY(p->upload_stream)) : nvs_names_enter_graph(); \
		int result = CALL(name, exec, graph, p); \
		nvs_names_leave(t); \
		return instantiated(result, exec, graph); \
	}
INSTANTIATE_WITH(cuGraphInstantiateWithParams, NVS_KEY_LEGACY)
INSTANTIATE_WITH(cuGraphInstantiateWithParams_ptsz, NVS_KEY_THREAD)

/* ---- launch and end ---- */

#define RUN(name, KEY) \
	WRAPPER(name, (void *exec, void *s)) \
	{ \
		__typeof__(&name) real = NVS_REAL(name); \
		struct nvs_thread *t; \
		int result; \
		if (nvs_unlikely(!real)) \
			return CUDA_ERROR_NOT_FOUND; \
		t = nvs_gate_enter_gpus(KEY(s), nvs_memory_gpus_of_graph((uintptr_t)exec)); \
		result = real(exec, s); \
		if (nvs_likely(t != NULL)) \
			nvs_gate_leave(t); \
		nvs_memory_graph_ran(); \
		return result; \
	}
RUN(cuGraphLaunch, NVS_KEY_LEGACY)
RUN(cuGraphLaunch_ptsz, NVS_KEY_THREAD)
RUN(cuGraphUpload, NVS_KEY_LEGACY)
RUN(cuGraphUpload_ptsz, NVS_KEY_THREAD)

WRAPPER(cuGraphExecDestroy, (void *exec))
{
	uint64_t stamp = nvs_memory_stamp();
	int result = CALL(cuGraphExecDestroy, exec);

	if (result == CUDA_SUCCESS && nvs_counting())
		nvs_memory_remove(NVS_MEMORY_GRAPH, (uintptr_t)exec, stamp);
	nvs_memory_graph_ran();
	return result;
}

WRAPPER(cuDeviceGraphMemTrim, (int dev))
{
	int result = CALL(cuDeviceGraphMemTrim, dev);

	nvs_memory_graph_ran();
	return result;
}
