// SPDX-License-Identifier: Apache-2.0
/*
 * memop.c: wrappers of stream memory operations, which write a word in the order of
 * a stream, or hold the stream up until a word is as it shall be.
 *
 * They are not gated, and are no GPU work of ours: what a stream waits for may be
 * written by the host, by another process in its turn, or by a stream whose write
 * ends the wait that our own drain waits for. A gate before either would keep that
 * from happening. What is behind them in a stream is gated, so that a drain waits
 * for it, and with it for them, as it does for a kernel that waits for a flag
 * (may_pass() in channel.c, and the grace). It waits for all of a context in which
 * anything ran; but a wait alone, where nothing ran since the last drain, is in
 * nobody's way: it takes nothing of the GPU.
 *
 * So such an operation may touch its word at any time, in others' turns too. Where
 * memory is swapped, what it names in device memory becomes fixed when it is first
 * named, before the driver hears of it: if it is away, the call waits until it comes
 * in with all the rest, at this process's next turn. Nodes of graphs run in launches,
 * which are gated; but the driver may look up the memory when it gets the address,
 * and what is captured is not told apart from what runs at once: fixed as well.
 *
 * Afterwards the way from the address to this knowledge is a subtraction under a
 * lock of our own. Host memory, where such words mostly are, is not in our addresses.
 */
#include "swap_impl.h"
#include "vmm.h"
#include "wrap.h"

/* One load where nothing is swapped. */
static inline bool used(void)
{
	return nvs_unlikely(atomic_load_explicit(&nvs_spans_used, memory_order_acquire) != 0);
}

static void fix(CUdeviceptr p)
{
	struct nvs_swap_range r;

	if (!nvs_swap_find(p, &r) || !r.base)
		return;
	if (r.mapping)
		nvs_vmm_fix(p, 1);
	else if (!r.fixed)
		nvs_swap_fix(p, &r);
}

/* A batch that the driver refuses is not read: it may not be there at all. */
static void fix_batch(const struct cu_mem_op *op, uint count)
{
	if (!op || count > CU_MEM_OPS_MAX)
		return;
	for (const struct cu_mem_op *end = op + count; op < end; op++)
		switch (op->type) {
		case CU_MEM_OP_FLUSH:
		case CU_MEM_OP_BARRIER:
			break;
		case CU_MEM_OP_WAIT_32:
		case CU_MEM_OP_WAIT_64:
		case CU_MEM_OP_WRITE_32:
		case CU_MEM_OP_WRITE_64:
			fix(op->word[0]);
			break;
		default: /* later ones, of which only the size is known */
			for (unsigned i = 0; i < 5; i++)
				fix(op->word[i]);
		}
}

#define MEM_OP(name, type) \
	WATCH(name, (void *s, CUdeviceptr p, type value, uint flags)) \
	{ \
		if (used()) \
			fix(p); \
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
	WATCH(name, (void *s, uint count, const struct cu_mem_op *ops, uint flags)) \
	{ \
		if (used()) \
			fix_batch(ops, count); \
		return CALL(name, s, count, ops, flags); \
	}
BATCH(cuStreamBatchMemOp)
BATCH(cuStreamBatchMemOp_ptsz)
BATCH(cuStreamBatchMemOp_v2)
BATCH(cuStreamBatchMemOp_v2_ptsz)

/* ---- nodes ---- */

static inline void fix_ops(const struct cu_mem_op_node *p)
{
	if (used() && p)
		fix_batch(p->ops, p->count);
}

void nvs_swap_fix_node(const struct cu_node_params *p)
{
	if (used() && p && p->type == CU_GRAPH_NODE_TYPE_MEM_OPS)
		fix_ops(&p->u.mem_ops);
}

WATCH(cuGraphAddBatchMemOpNode, (void **node, void *graph, const void *deps, size_t count,
				 const struct cu_mem_op_node *params))
{
	fix_ops(params);
	return CALL(cuGraphAddBatchMemOpNode, node, graph, deps, count, params);
}

WATCH(cuGraphBatchMemOpNodeSetParams, (void *node, const struct cu_mem_op_node *params))
{
	fix_ops(params);
	return CALL(cuGraphBatchMemOpNodeSetParams, node, params);
}

WATCH(cuGraphExecBatchMemOpNodeSetParams, (void *exec, void *node,
					   const struct cu_mem_op_node *params))
{
	fix_ops(params);
	return CALL(cuGraphExecBatchMemOpNodeSetParams, exec, node, params);
}

WATCH(cuGraphNodeSetParams, (void *node, struct cu_node_params *params))
{
	nvs_swap_fix_node(params);
	return CALL(cuGraphNodeSetParams, node, params);
}

WATCH(cuGraphNodeSetParams_v2, (void *node, struct cu_node_params *params))
{
	nvs_swap_fix_node(params);
	return CALL(cuGraphNodeSetParams_v2, node, params);
}

WATCH(cuGraphExecNodeSetParams, (void *exec, void *node, struct cu_node_params *params))
{
	nvs_swap_fix_node(params);
	return CALL(cuGraphExecNodeSetParams, exec, node, params);
}
