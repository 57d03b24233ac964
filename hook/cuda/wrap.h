// SPDX-License-Identifier: Apache-2.0
/* wrap.h: what the files with hand-written wrappers share. */
#ifndef NVSHARE_WRAP_H
#define NVSHARE_WRAP_H

#include "client.h"
#include "gate.h"
#include "hook.h"
#include "memory.h"
#include "stream.h"
#include "swap.h"

/* Declares and defines an exported function; the body follows. */
#define WRAPPER(name, P) \
	NVS_EXPORT int name P; \
	NVS_EXPORT int name P

/* Calls the real function of this name. */
#define CALL(name, ...) NVS_REAL(name)(__VA_ARGS__)

/* a * b, or as good as infinite. */
static inline uint64_t nvs_times(uint64_t a, uint64_t b)
{
	uint64_t product;

	return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* The arguments of a call, out of their parentheses. */
#define NVS_SPREAD(...) __VA_ARGS__

/* A call that passes the gate: `enter` returns what nvs_gate_leave() takes, or NULL. */
#define GATED(name, P, A, enter) \
	WRAPPER(name, P) \
	{ \
		__typeof__(&name) real = NVS_REAL(name); \
		struct nvs_thread *t = enter; \
		int result = real A; \
		if (nvs_likely(t != NULL)) \
			nvs_gate_leave(t); \
		return result; \
	}

#define BY_THE_DRIVER -1

NVS_EXPORT int cuMemFree_v2(CUdeviceptr p); /* only its type is needed here */

/*
 * An allocator of the current context: `estimate` bytes at least, `size` once the driver
 * has returned. What turns out to be too large with its padding is given back. `other` is
 * the result if the memory is not counted here; BY_THE_DRIVER: it is.
 */
#define ALLOCATOR(name, kind, P, A, estimate, key, size, other) \
	WRAPPER(name, P) \
	{ \
		struct nvs_claim claim; \
		unsigned tries = 0; \
		void *ctx; \
		int result; \
		if (!nvs_counting()) \
			return CALL(name, NVS_SPREAD A); \
		ctx = nvs_current_context(); \
		result = other; \
		if (result >= 0) \
			return result; \
		if (!nvs_claim(&claim, nvs_gpu_here(ctx), estimate)) \
			return CUDA_ERROR_OUT_OF_MEMORY; \
		do \
			result = CALL(name, NVS_SPREAD A); \
		while (nvs_unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && \
		       nvs_swap_retry(claim.gpu, &tries)); \
		if (result == CUDA_SUCCESS && (size) > claim.bytes && \
		    !nvs_claim_more(&claim, size) && CALL(cuMemFree_v2, key) == CUDA_SUCCESS) \
			result = CUDA_ERROR_OUT_OF_MEMORY; \
		if (result == CUDA_SUCCESS) \
			nvs_claim_keep(&claim, kind, key, size, ctx); \
		else \
			nvs_claim_drop(&claim); \
		return result; \
	}

/* A free that fails changes nothing. */
#define FREE(name, kind, P, A, key) \
	WRAPPER(name, P) \
	{ \
		uint64_t stamp = nvs_memory_stamp(); \
		int result = CALL(name, NVS_SPREAD A); \
		if (result == CUDA_SUCCESS && nvs_counting()) \
			nvs_memory_remove(kind, (uintptr_t)(key), stamp); \
		return result; \
	}

/*
 * The memory of a GPU, which has a UUID where this process does not use it, as its container
 * is told. False: as the driver has it.
 */
struct nvs_told {
	uint64_t total, available, used; /* bytes; before the call as the driver has it */
};
bool nvs_tell(struct nvs_gpu *gpu, const uint8_t *uuid, struct nvs_told *t);

/* Whether a graph may have so much more memory; it is charged once it exists. */
bool nvs_graph_may_have(struct nvs_gpu *gpu, uint64_t bytes);

/*
 * names.c: waits until the memory is on the GPU that a call names, and keeps the memory there
 * until nvs_gate_leave(): addresses, a node that is made or changed, a whole graph.
 */
struct nvs_thread *nvs_names_enter(CUdeviceptr a, CUdeviceptr b);
struct nvs_thread *nvs_names_enter_node(const struct cu_node_params *p);
struct nvs_thread *nvs_names_enter_graph(void);

/* A call between. */
#define NVS_NAMING(enter, call) \
	__extension__({ \
		struct nvs_thread *t_ = enter; \
		int result_ = call; \
		if (nvs_unlikely(t_ != NULL)) \
			nvs_gate_leave(t_); \
		result_; \
	})

#endif
