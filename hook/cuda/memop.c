// SPDX-License-Identifier: Apache-2.0
/*
 * memop.c: wrappers of stream memory operations, which are not gated (swap/memop.c says why), of
 * graph nodes that hold them, and of other calls that may wait in a stream for somebody outside the
 * GPU.
 */
#include "clock.h"
#include "wrap.h"

/* A host function may want what the launching thread has; most run at once. */
#define FUNCTION_NS (20 * NVS_MS)

/* The call has put something into the stream that waits. */
static int waits(int result, void *key, uint64_t patience_ns)
{
	if (result == CUDA_SUCCESS && nvs_active())
		nvs_throttle_behind(key, patience_ns);
	return result;
}

#define WRITE(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		nvs_swap_pin_word(p); \
		return CALL(name, NVS_SPREAD A); \
	}
#define WAIT(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		nvs_swap_pin_word(p); \
		nvs_swap_stream_waits(); \
		return waits(CALL(name, NVS_SPREAD A), key, 0); \
	}
#define VALUE(W, name, type) NVS_SZ(W, name, (void *s, CUdeviceptr p, type value, uint flags), (s, p, value, flags), s)
VALUE(WRITE, cuStreamWriteValue32, uint)
VALUE(WRITE, cuStreamWriteValue32_v2, uint)
VALUE(WRITE, cuStreamWriteValue64, uint64_t)
VALUE(WRITE, cuStreamWriteValue64_v2, uint64_t)
VALUE(WAIT, cuStreamWaitValue32, uint)
VALUE(WAIT, cuStreamWaitValue32_v2, uint)
VALUE(WAIT, cuStreamWaitValue64, uint64_t)
VALUE(WAIT, cuStreamWaitValue64_v2, uint64_t)

/* A batch that the driver will refuse is not read: there may be no memory behind it. */
static bool has_wait(const struct cu_mem_op *ops, uint count)
{
	for (uint i = 0; ops && count <= CU_MEM_OPS_MAX && i < count; i++)
		if (ops[i].type == CU_MEM_OP_WAIT_32 || ops[i].type == CU_MEM_OP_WAIT_64)
			return true;
	return false;
}

#define BATCH(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		bool wait = has_wait(ops, count); \
		int result; \
		nvs_swap_pin_ops(ops, count); \
		if (wait) \
			nvs_swap_stream_waits(); \
		result = CALL(name, NVS_SPREAD A); \
		return wait ? waits(result, key, 0) : result; \
	}
NVS_SZ(BATCH, cuStreamBatchMemOp, (void *s, uint count, const struct cu_mem_op *ops, uint flags),
       (s, count, ops, flags), s)
NVS_SZ(BATCH, cuStreamBatchMemOp_v2, (void *s, uint count, const struct cu_mem_op *ops, uint flags),
       (s, count, ops, flags), s)

#define SEMAPHORES(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		nvs_swap_stream_waits(); \
		return waits(CALL(name, NVS_SPREAD A), key, 0); \
	}
NVS_SZ(SEMAPHORES, cuWaitExternalSemaphoresAsync, (const void *sems, const void *params, uint count, void *s),
       (sems, params, count, s), s)

/* Gated, as a kernel is. */
#define FUNCTION(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		__typeof__(&name) real = NVS_REAL(name); /* before the gate: it may wait */ \
		return waits(NVS_NAMING(nvs_gate_enter(key), real A), key, FUNCTION_NS); \
	}
NVS_SZ(FUNCTION, cuLaunchHostFunc, (void *s, void *fn, void *data), (s, fn, data), s)
NVS_SZ(FUNCTION, cuLaunchHostFunc_v2, (void *s, void *fn, void *data, uint mode), (s, fn, data, mode), s)
NVS_SZ(FUNCTION, cuStreamAddCallback, (void *s, void *fn, void *data, uint flags), (s, fn, data, flags), s)

#define NODE(name, P, A) \
	WRAPPER(name, P) \
	{ \
		if (params) \
			nvs_swap_pin_ops(params->ops, params->count); \
		return CALL(name, NVS_SPREAD A); \
	}
NODE(cuGraphAddBatchMemOpNode, (void **node, void *graph, const void *deps, size_t count,
				const struct cu_mem_op_node *params), (node, graph, deps, count, params))
NODE(cuGraphBatchMemOpNodeSetParams, (void *node, const struct cu_mem_op_node *params), (node, params))
NODE(cuGraphExecBatchMemOpNodeSetParams, (void *exec, void *node, const struct cu_mem_op_node *params),
     (exec, node, params))
