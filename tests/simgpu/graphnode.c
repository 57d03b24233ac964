// SPDX-License-Identifier: Apache-2.0
/*
 * graphnode.c: explicit nodes of graphs: kernels, copies, memsets, and other
 * parameters for them. A copy's and a memset's address must be mapped at the
 * call, as in a stream; what a kernel's parameters name is looked at when the
 * kernel runs.
 */
#include "driver.h"

static CUresult op_of_kernel(struct op *op, const CUDA_KERNEL_NODE_PARAMS *p, int first_version)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	return kernel_op(op, p->func || first_version ? p->func : p->kern, p);
}

static CUresult op_of_copy(struct op *op, const CUDA_MEMCPY3D *p)
{
	return p ? copy_op(op, p) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult op_of_set(struct op *op, const CUDA_MEMSET_NODE_PARAMS *p)
{
	return p ? set_op(op, p) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult op_of_node(struct op *op, const CUgraphNodeParams *p)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL: return op_of_kernel(op, &p->u.kernel, 0);
	case CU_GRAPH_NODE_TYPE_MEMCPY: return op_of_copy(op, &p->u.copy.params);
	case CU_GRAPH_NODE_TYPE_MEMSET: return op_of_set(op, &p->u.set.params);
	}
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* A node without a context gets the current one. */
static CUresult add(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, struct op *op, CUcontext ctx)
{
	pthread_mutex_lock(&drv_mu);
	op->ctx = ctx ? ctx : ctx_current();
	pthread_mutex_unlock(&drv_mu);
	return graph_node_add(node, graph, deps, n, op);
}

/* make: the function that makes an operation of the parameters. */
#define ADD(make, ctx)                                                   \
	struct op op;                                                    \
	CUresult rc = node && (deps || !n) ? make : CUDA_ERROR_INVALID_VALUE; \
	return rc ? rc : add(node, graph, deps, n, &op, ctx)
#define SET(make)           \
	struct op op;       \
	CUresult rc = make; \
	return rc ? rc : graph_node_set(node, &op)
#define EXEC_SET(make)      \
	struct op op;       \
	CUresult rc = make; \
	return rc ? rc : graph_exec_set(exec, node, &op)

CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
			      const CUDA_KERNEL_NODE_PARAMS *p)
{
	ADD(op_of_kernel(&op, p, 1), NULL);
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
				 const CUDA_KERNEL_NODE_PARAMS *p)
{
	ADD(op_of_kernel(&op, p, 0), p->ctx);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
			      const CUDA_MEMCPY3D *p, CUcontext ctx)
{
	ADD(op_of_copy(&op, p), ctx);
}

CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
			      const CUDA_MEMSET_NODE_PARAMS *p, CUcontext ctx)
{
	ADD(op_of_set(&op, p), ctx);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, CUgraph child)
{
	return node ? graph_child_add(node, graph, deps, n, child) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	SET(op_of_kernel(&op, p, 1));
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	SET(op_of_kernel(&op, p, 0));
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *p)
{
	SET(op_of_copy(&op, p));
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *p)
{
	SET(op_of_set(&op, p));
}

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *params)
{
	SET(op_of_node(&op, params));
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	EXEC_SET(op_of_kernel(&op, p, 1));
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	EXEC_SET(op_of_kernel(&op, p, 0));
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *p, CUcontext ctx)
{
	(void)ctx;
	EXEC_SET(op_of_copy(&op, p));
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *p,
					CUcontext ctx)
{
	(void)ctx;
	EXEC_SET(op_of_set(&op, p));
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params)
{
	EXEC_SET(op_of_node(&op, params));
}

/* ---- what a node is ---- */

CUresult cuGraphNodeGetType(CUgraphNode node, int *type)
{
	struct op op;
	CUresult rc = type ? graph_node_get(node, &op) : CUDA_ERROR_INVALID_VALUE;

	if (rc)
		return rc;
	switch (op.what) {
	case OP_COPY: *type = CU_GRAPH_NODE_TYPE_MEMCPY; break;
	case OP_SET: *type = CU_GRAPH_NODE_TYPE_MEMSET; break;
	case OP_HOST: *type = CU_GRAPH_NODE_TYPE_HOST; break;
	case OP_WRITE:
	case OP_WAIT: *type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; break;
	case OP_TAKE: *type = CU_GRAPH_NODE_TYPE_MEM_ALLOC; break;
	case OP_GIVE: *type = CU_GRAPH_NODE_TYPE_MEM_FREE; break;
	case OP_CHILD: *type = CU_GRAPH_NODE_TYPE_GRAPH; break;
	case OP_NOTHING: *type = CU_GRAPH_NODE_TYPE_EMPTY; break;
	default: *type = CU_GRAPH_NODE_TYPE_KERNEL;
	}
	return CUDA_SUCCESS;
}

/* Of the parameters, only what tells where the node runs. */
#define GET(type, ...)                                                              \
	struct op op;                                                               \
	CUresult rc = p ? graph_node_get(node, &op) : CUDA_ERROR_INVALID_VALUE;     \
	if (!rc)                                                                    \
		*p = (type){ __VA_ARGS__ };                                         \
	return rc

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p)
{
	GET(CUDA_KERNEL_NODE_PARAMS, .ctx = op.ctx);
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *p)
{
	GET(CUDA_MEMCPY3D, .srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcDevice = (uintptr_t)op.src,
	    .dstMemoryType = CU_MEMORYTYPE_UNIFIED, .dstDevice = (uintptr_t)op.dst, .WidthInBytes = op.width,
	    .Height = op.height, .Depth = 1);
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *p)
{
	GET(CUDA_MEMSET_NODE_PARAMS, .dst = (uintptr_t)op.dst, .width = op.width, .height = op.height);
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
	GET(CUDA_MEM_ALLOC_NODE_PARAMS, .poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
	    .location = { CU_MEM_LOCATION_TYPE_DEVICE, dev_of_gpu(op.element) } }, .bytesize = op.width,
	    .dptr = (uintptr_t)op.dst);
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *p)
{
	GET(CUdeviceptr, (uintptr_t)op.dst);
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *p)
{
	GET(CUgraph, op.data);
}
