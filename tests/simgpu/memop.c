// SPDX-License-Identifier: Apache-2.0
/*
 * memop.c: stream memory operations: a stream writes a word, or waits until one
 * is as it shall be. An address that is not mapped, or not accessible, is error 1
 * at the call; if it goes later, the context dies. Barriers and
 * flushes do nothing. Both versions of each call are the same here, though a
 * driver may have the first switched off. Semaphores of other interfaces are words too, which
 * may be waited for before somebody signals them.
 */
#include "driver.h"

#include <stdlib.h>

#define BATCH_MAX 256u /* as the driver's documentation says */

static CUresult memop(struct op *op, enum op_what what, CUdeviceptr p, cuuint64_t value, int bytes, unsigned flags)
{
	unsigned known = what == OP_WRITE ? CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
					  : CU_STREAM_WAIT_VALUE_NOR | CU_STREAM_WAIT_VALUE_FLUSH;

	*op = (struct op){ .what = what, .dst = (char *)(uintptr_t)p, .seed = value, .element = bytes,
			   .value = flags & CU_STREAM_WAIT_VALUE_NOR };
	return (flags & ~known) || p % (unsigned)bytes || !mem_valid(p, (size_t)bytes) ? CUDA_ERROR_INVALID_VALUE
										       : CUDA_SUCCESS;
}

static CUresult single(CUstream s, enum op_what what, CUdeviceptr p, cuuint64_t value, int bytes, unsigned flags)
{
	struct op op;
	CUresult rc = drv_enter();

	if (!rc)
		rc = memop(&op, what, p, value, bytes, flags);
	return rc ? rc : submit(s, &op, 0);
}

#define ARGS(type) (CUstream s, CUdeviceptr p, type value, unsigned flags)
#define MEMOP(name, type, what, bytes)                                \
	SIM_EXPORT CUresult name##_v2 ARGS(type)                      \
	{                                                             \
		return single(s, what, p, value, bytes, flags);       \
	}                                                             \
	PTSZ(name##_v2, ARGS(type), (PT(s), p, value, flags))         \
	CUresult name ARGS(type) { return name##_v2(s, p, value, flags); } \
	PTSZ(name, ARGS(type), (PT(s), p, value, flags))
MEMOP(cuStreamWriteValue32, uint32_t, OP_WRITE, 4)
MEMOP(cuStreamWriteValue64, cuuint64_t, OP_WRITE, 8)
MEMOP(cuStreamWaitValue32, uint32_t, OP_WAIT, 4)
MEMOP(cuStreamWaitValue64, cuuint64_t, OP_WAIT, 8)

/* All of a batch, or none; *n becomes how many of op[] it is. */
static CUresult batch(struct op *op, unsigned *n, unsigned count, const CUstreamBatchMemOpParams *b, unsigned flags)
{
	CUresult rc = drv_enter();

	*n = 0;
	if (!rc && (!b || !count || count > BATCH_MAX || flags))
		rc = CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; !rc && i < count; i++) {
		unsigned type = (unsigned)b[i].operation;

		switch (type) {
		case CU_STREAM_MEM_OP_WAIT_VALUE_32:
		case CU_STREAM_MEM_OP_WAIT_VALUE_64:
		case CU_STREAM_MEM_OP_WRITE_VALUE_32:
		case CU_STREAM_MEM_OP_WRITE_VALUE_64:
			rc = memop(&op[(*n)++],
				   type == CU_STREAM_MEM_OP_WAIT_VALUE_32 || type == CU_STREAM_MEM_OP_WAIT_VALUE_64
					   ? OP_WAIT
					   : OP_WRITE,
				   b[i].value.address, b[i].value.value, type < CU_STREAM_MEM_OP_WAIT_VALUE_64 ? 4 : 8,
				   b[i].value.flags);
			break;
		case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
		case CU_STREAM_MEM_OP_BARRIER:
			break;
		default:
			rc = CUDA_ERROR_INVALID_VALUE;
		}
	}
	return rc;
}

SIM_EXPORT CUresult cuStreamBatchMemOp_v2(CUstream s, unsigned count, CUstreamBatchMemOpParams *b, unsigned flags)
{
	struct op op[BATCH_MAX];
	unsigned n;
	CUresult rc = batch(op, &n, count, b, flags);

	for (unsigned i = 0; !rc && i < n; i++)
		rc = submit(s, &op[i], 0);
	return rc;
}
PTSZ(cuStreamBatchMemOp_v2, (CUstream s, unsigned n, CUstreamBatchMemOpParams *b, unsigned f), (PT(s), n, b, f))

CUresult cuStreamBatchMemOp(CUstream s, unsigned count, CUstreamBatchMemOpParams *b, unsigned flags)
{
	return cuStreamBatchMemOp_v2(s, count, b, flags);
}
PTSZ(cuStreamBatchMemOp, (CUstream s, unsigned n, CUstreamBatchMemOpParams *b, unsigned f), (PT(s), n, b, f))

/* ---- external semaphores ---- */

CUresult cuImportExternalSemaphore(CUexternalSemaphore *sem, const void *handle)
{
	void *word;
	CUresult rc = sem && handle ? cuMemHostAlloc(&word, sizeof(**sem), CU_MEMHOSTALLOC_DEVICEMAP)
				    : CUDA_ERROR_INVALID_VALUE;

	if (!rc) {
		*sem = word;
		**sem = 0;
	}
	return rc;
}

CUresult cuDestroyExternalSemaphore(CUexternalSemaphore sem)
{
	return cuMemFreeHost(sem);
}

#define SEMAPHORES(name, params_type, op)                                                                        \
	CUresult name(const CUexternalSemaphore *sems, const params_type *params, unsigned count, CUstream s)    \
	{                                                                                                        \
		CUresult rc = sems && params && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;                 \
                                                                                                                 \
		for (unsigned i = 0; !rc && i < count; i++)                                                      \
			rc = single(s, op, (uintptr_t)sems[i], params[i].value, sizeof(*sems[i]), 0);            \
		return rc;                                                                                       \
	}                                                                                                        \
	PTSZ(name, (const CUexternalSemaphore *m, const params_type *p, unsigned n, CUstream s), (m, p, n, PT(s)))
SEMAPHORES(cuWaitExternalSemaphoresAsync, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, OP_WAIT)
SEMAPHORES(cuSignalExternalSemaphoresAsync, CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, OP_WRITE)

/* ---- graphs: a node of ours for each operation, one after the other; the last is the handle ---- */

CUresult cuGraphAddBatchMemOpNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
				  const CUDA_BATCH_MEM_OP_NODE_PARAMS *params)
{
	struct op op[BATCH_MAX];
	unsigned ops;
	CUresult rc;

	if (!params || !node || (n && !deps))
		return CUDA_ERROR_INVALID_VALUE;
	rc = batch(op, &ops, params->count, params->paramArray, params->flags);
	if (!rc && !ops)
		op[ops++] = (struct op){ .what = OP_NOTHING };
	for (unsigned i = 0; !rc && i < ops; i++) {
		rc = i ? graph_node_add(node, graph, &(CUgraphNode){ *node }, 1, &op[i])
		       : graph_node_add(node, graph, deps, n, &op[i]);
	}
	return rc;
}

/* Of nodes with one operation. */
CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec exec, CUgraphNode node,
					    const CUDA_BATCH_MEM_OP_NODE_PARAMS *params)
{
	struct op op[BATCH_MAX];
	unsigned ops;
	CUresult rc = params ? batch(op, &ops, params->count, params->paramArray, params->flags)
			     : CUDA_ERROR_INVALID_VALUE;

	if (rc)
		return rc;
	return ops == 1 ? graph_exec_set(exec, node, &op[0]) : CUDA_ERROR_NOT_SUPPORTED;
}
