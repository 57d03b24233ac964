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

/* make: the function that makes an operation of the parameters. */
#define ADD(make)                                                        \
	struct op op;                                                    \
	CUresult rc = node && (deps || !n) ? make : CUDA_ERROR_INVALID_VALUE; \
	return rc ? rc : graph_node_add(node, graph, deps, n, &op)
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
	ADD(op_of_kernel(&op, p, 1));
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
				 const CUDA_KERNEL_NODE_PARAMS *p)
{
	ADD(op_of_kernel(&op, p, 0));
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
			      const CUDA_MEMCPY3D *p, CUcontext ctx)
{
	(void)ctx;
	ADD(op_of_copy(&op, p));
}

CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
			      const CUDA_MEMSET_NODE_PARAMS *p, CUcontext ctx)
{
	(void)ctx;
	ADD(op_of_set(&op, p));
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
