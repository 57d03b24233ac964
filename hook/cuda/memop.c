// SPDX-License-Identifier: Apache-2.0
/*
 * memop.c: wrappers of stream memory operations, and of the graph nodes that hold
 * them. They are not gated; swap/memop.c says why, and what happens to the memory
 * that they name.
 */
#include "swap.h"
#include "wrap.h"

#define MEM_OP(name, type) \
	WRAPPER(name, (void *s, CUdeviceptr p, type value, uint flags)) \
	{ \
		nvs_swap_pin_word(p); \
		return CALL(name, s, p, value, flags); \
	}
#define MEM_OP_SZ(name, type) MEM_OP(name, type) MEM_OP(name##_ptsz, type)
MEM_OP_SZ(cuStreamWriteValue32, uint)
MEM_OP_SZ(cuStreamWriteValue32_v2, uint)
MEM_OP_SZ(cuStreamWriteValue64, uint64_t)
MEM_OP_SZ(cuStreamWriteValue64_v2, uint64_t)
MEM_OP_SZ(cuStreamWaitValue32, uint)
MEM_OP_SZ(cuStreamWaitValue32_v2, uint)
MEM_OP_SZ(cuStreamWaitValue64, uint64_t)
MEM_OP_SZ(cuStreamWaitValue64_v2, uint64_t)

#define BATCH(name) \
	WRAPPER(name, (void *s, uint count, const struct cu_mem_op *ops, uint flags)) \
	{ \
		nvs_swap_pin_ops(ops, count); \
		return CALL(name, s, count, ops, flags); \
	}
BATCH(cuStreamBatchMemOp)
BATCH(cuStreamBatchMemOp_ptsz)
BATCH(cuStreamBatchMemOp_v2)
BATCH(cuStreamBatchMemOp_v2_ptsz)

WRAPPER(cuGraphAddBatchMemOpNode, (void **node, void *graph, const void *deps, size_t count,
				 const struct cu_mem_op_node *params))
{
	if (params)
		nvs_swap_pin_ops(params->ops, params->count);
	return CALL(cuGraphAddBatchMemOpNode, node, graph, deps, count, params);
}

WRAPPER(cuGraphBatchMemOpNodeSetParams, (void *node, const struct cu_mem_op_node *params))
{
	if (params)
		nvs_swap_pin_ops(params->ops, params->count);
	return CALL(cuGraphBatchMemOpNodeSetParams, node, params);
}

WRAPPER(cuGraphExecBatchMemOpNodeSetParams, (void *exec, void *node,
					   const struct cu_mem_op_node *params))
{
	if (params)
		nvs_swap_pin_ops(params->ops, params->count);
	return CALL(cuGraphExecBatchMemOpNodeSetParams, exec, node, params);
}
