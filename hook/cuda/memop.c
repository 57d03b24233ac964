// SPDX-License-Identifier: Apache-2.0
/*
 * memop.c: wrappers of stream memory operations, of the graph nodes that hold them, and
 * of others that may wait in a stream for somebody outside the GPU. Memory operations are not
 * gated; swap/memop.c says why, and what happens to the memory that they name.
 */
#include "clock.h"
#include "swap.h"
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

#define WRITE(name, type) \
	WRAPPER(name, (void *s, CUdeviceptr p, type value, uint flags)) \
	{ \
		nvs_swap_pin_word(p); \
		return CALL(name, s, p, value, flags); \
	}
#define WRITE_SZ(name, type) WRITE(name, type) WRITE(name##_ptsz, type)
WRITE_SZ(cuStreamWriteValue32, uint)
WRITE_SZ(cuStreamWriteValue32_v2, uint)
WRITE_SZ(cuStreamWriteValue64, uint64_t)
WRITE_SZ(cuStreamWriteValue64_v2, uint64_t)

#define WAIT(name, type, key) \
	WRAPPER(name, (void *s, CUdeviceptr p, type value, uint flags)) \
	{ \
		nvs_swap_pin_word(p); \
		return waits(CALL(name, s, p, value, flags), key, 0); \
	}
#define WAIT_SZ(name, type) WAIT(name, type, NVS_KEY_LEGACY(s)) WAIT(name##_ptsz, type, NVS_KEY_THREAD(s))
WAIT_SZ(cuStreamWaitValue32, uint)
WAIT_SZ(cuStreamWaitValue32_v2, uint)
WAIT_SZ(cuStreamWaitValue64, uint64_t)
WAIT_SZ(cuStreamWaitValue64_v2, uint64_t)

static bool has_wait(const struct cu_mem_op *ops, uint count)
{
	for (uint i = 0; ops && i < count && i < CU_MEM_OPS_MAX; i++)
		if (ops[i].type == CU_MEM_OP_WAIT_32 || ops[i].type == CU_MEM_OP_WAIT_64)
			return true;
	return false;
}

#define BATCH(name, key) \
	WRAPPER(name, (void *s, uint count, const struct cu_mem_op *ops, uint flags)) \
	{ \
		int result; \
		nvs_swap_pin_ops(ops, count); \
		result = CALL(name, s, count, ops, flags); \
		return result == CUDA_SUCCESS && has_wait(ops, count) ? waits(result, key, 0) : result; \
	}
#define BATCH_SZ(name) BATCH(name, NVS_KEY_LEGACY(s)) BATCH(name##_ptsz, NVS_KEY_THREAD(s))
BATCH_SZ(cuStreamBatchMemOp)
BATCH_SZ(cuStreamBatchMemOp_v2)

#define SEMAPHORES(name, key) \
	WRAPPER(name, (const void *sems, const void *params, uint count, void *s)) \
	{ \
		return waits(CALL(name, sems, params, count, s), key, 0); \
	}
SEMAPHORES(cuWaitExternalSemaphoresAsync, NVS_KEY_LEGACY(s))
SEMAPHORES(cuWaitExternalSemaphoresAsync_ptsz, NVS_KEY_THREAD(s))

/* Gated, as a kernel is. */
#define FUNCTION(name, P, A, key) \
	WRAPPER(name, P) \
	{ \
		__typeof__(&name) real = NVS_REAL(name); /* before the gate: it may wait */ \
		return waits(NVS_NAMING(nvs_gate_enter(key), real A), key, FUNCTION_NS); \
	}
#define FUNCTION_SZ(name, P, A) \
	FUNCTION(name, P, A, NVS_KEY_LEGACY(s)) \
	FUNCTION(name##_ptsz, P, A, NVS_KEY_THREAD(s))
FUNCTION_SZ(cuLaunchHostFunc, (void *s, void *fn, void *data), (s, fn, data))
FUNCTION_SZ(cuLaunchHostFunc_v2, (void *s, void *fn, void *data, uint mode), (s, fn, data, mode))
FUNCTION_SZ(cuStreamAddCallback, (void *s, void *fn, void *data, uint flags), (s, fn, data, flags))

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
