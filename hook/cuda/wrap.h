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

/* An allocation in the current context, counted and limited. */
struct nvs_allocation {
	struct nvs_claim claim;
	void *ctx;
	unsigned tries;
};
/* So many bytes at least. False: the limit does not allow them. */
bool nvs_allocation_begin(struct nvs_allocation *a, uint64_t bytes);
/* The driver has answered: whether it is asked again. */
bool nvs_allocation_again(struct nvs_allocation *a, int result);
/*
 * Enters what the driver has put at *key, of so many bytes (0: as begun), and returns the result.
 * What is too large with its padding is given back.
 */
int nvs_allocation_end(struct nvs_allocation *a, int result, enum nvs_memory_kind kind, const void *key, uint64_t bytes);

/* All of that around a call of the driver. bytes: once the call has succeeded. */
#define ALLOCATING(least, kind, key, bytes, call) \
	__extension__({ \
		struct nvs_allocation a_; \
		int result_ = CUDA_ERROR_OUT_OF_MEMORY; \
		if (nvs_allocation_begin(&a_, least)) { \
			do \
				result_ = call; \
			while (nvs_allocation_again(&a_, result_)); \
			result_ = nvs_allocation_end(&a_, result_, kind, key, result_ == CUDA_SUCCESS ? bytes : 0); \
		} \
		result_; \
	})

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
 * The memory of a GPU, by its UUID where it is not used, as the container is told. False: as the
 * driver has it.
 */
struct nvs_told {
	uint64_t total, available, used; /* bytes; before the call as the driver has it */
};
bool nvs_tell(struct nvs_gpu *gpu, const uint8_t *uuid, struct nvs_told *t);

/* Whether a graph may have so much more memory; it is charged once it exists. */
bool nvs_graph_may_have(struct nvs_gpu *gpu, uint64_t bytes);

/*
 * names.c: waits until the memory that a call names is on the GPU (addresses, a node, a whole
 * graph), and keeps it there until nvs_names_leave().
 */
struct nvs_thread *nvs_names_enter(CUdeviceptr a, CUdeviceptr b);
struct nvs_thread *nvs_names_enter_node(const struct cu_node_params *p);
struct nvs_thread *nvs_names_enter_graph(void);

static inline void nvs_names_leave(struct nvs_thread *t)
{
	if (nvs_unlikely(t != NULL))
		nvs_gate_leave(t);
}

/* A call between. */
#define NVS_NAMING(enter, call) \
	__extension__({ \
		struct nvs_thread *t_ = enter; \
		int result_ = call; \
		nvs_names_leave(t_); \
		result_; \
	})

#endif
