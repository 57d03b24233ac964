// SPDX-License-Identifier: Apache-2.0
/*
 * names.c: wrappers of calls that name memory without using it: nodes of graphs, textures. The
 * driver may look the memory up: the call waits until it is on the GPU, and keeps it there, as a
 * captured call does. They need no grant.
 */
#include "wrap.h"

struct nvs_thread *nvs_names_enter(CUdeviceptr a, CUdeviceptr b)
{
	struct nvs_gpu *gpu = nvs_swap_gpu_of(a);

	if (!gpu)
		gpu = nvs_swap_gpu_of(b);
	return nvs_unlikely(gpu != NULL) ? nvs_gate_enter_memory(gpu) : NULL;
}

/* A process that uses several GPUs has all its memory on them: one of them will do. */
struct nvs_thread *nvs_names_enter_graph(void)
{
	NVS_FOR_EACH_GPU(gpu)
		if (nvs_unlikely(nvs_swap_is_on(gpu)))
			return nvs_gate_enter_memory(gpu);
	return NULL;
}

#define NAMES(name, P, A, a, b) \
	WRAPPER(name, P) { return NVS_NAMING(nvs_names_enter(a, b), CALL(name, NVS_SPREAD A)); }

/* ---- nodes of graphs ---- */

#define COPIES(name, P, A) NAMES(name, P, A, p ? p->src : 0, p ? p->dst : 0)
#define SETS(name, P, A)   NAMES(name, P, A, p ? p->dst : 0, 0)

COPIES(cuGraphAddMemcpyNode, (void **node, void *graph, const void *deps, size_t count,
			      const struct cu_memcpy3d *p, void *ctx), (node, graph, deps, count, p, ctx))
COPIES(cuGraphMemcpyNodeSetParams, (void *node, const struct cu_memcpy3d *p), (node, p))
COPIES(cuGraphExecMemcpyNodeSetParams, (void *exec, void *node, const struct cu_memcpy3d *p, void *ctx),
       (exec, node, p, ctx))
SETS(cuGraphAddMemsetNode, (void **node, void *graph, const void *deps, size_t count,
			    const struct cu_memset_node *p, void *ctx), (node, graph, deps, count, p, ctx))
SETS(cuGraphMemsetNodeSetParams, (void *node, const struct cu_memset_node *p), (node, p))
SETS(cuGraphExecMemsetNodeSetParams, (void *exec, void *node, const struct cu_memset_node *p, void *ctx),
     (exec, node, p, ctx))

/* A node of any kind. What a memory operation names stays on the GPU for good. */
struct nvs_thread *nvs_names_enter_node(const struct cu_node_params *p)
{
	if (!p)
		return NULL;
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return nvs_names_enter(p->u.copy.params.src, p->u.copy.params.dst);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return nvs_names_enter(p->u.set.dst, 0);
	case CU_GRAPH_NODE_TYPE_MEM_OPS:
		nvs_swap_pin_ops(p->u.mem_ops.ops, p->u.mem_ops.count);
	}
	return NULL;
}

#define SETS_NODE(name, P, A) \
	WRAPPER(name, P) { return NVS_NAMING(nvs_names_enter_node(p), CALL(name, NVS_SPREAD A)); }
SETS_NODE(cuGraphNodeSetParams, (void *node, struct cu_node_params *p), (node, p))
SETS_NODE(cuGraphNodeSetParams_v2, (void *node, struct cu_node_params *p), (node, p))
SETS_NODE(cuGraphExecNodeSetParams, (void *exec, void *node, struct cu_node_params *p), (exec, node, p))

/* ---- textures ---- */

/* Of linear memory. Arrays are the driver's own memory, which never moves. */
static CUdeviceptr of_resource(const struct cu_resource *r)
{
	return r && (r->type == CU_RESOURCE_TYPE_LINEAR || r->type == CU_RESOURCE_TYPE_PITCH2D)
		? r->address : 0;
}

NAMES(cuTexObjectCreate, (void *texture, const struct cu_resource *r, const void *desc, const void *view),
      (texture, r, desc, view), of_resource(r), 0)
NAMES(cuTexRefSetAddress_v2, (size_t *offset, void *texture, CUdeviceptr p, size_t n), (offset, texture, p, n),
      p, 0)
NAMES(cuTexRefSetAddress2D_v2, (void *texture, const void *desc, CUdeviceptr p, size_t pitch),
      (texture, desc, p, pitch), p, 0)
NAMES(cuTexRefSetAddress2D_v3, (void *texture, const void *desc, CUdeviceptr p, size_t pitch),
      (texture, desc, p, pitch), p, 0)
