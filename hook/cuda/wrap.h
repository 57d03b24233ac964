// SPDX-License-Identifier: Apache-2.0
/* wrap.h: what the files with hand-written wrappers share. */
#ifndef NVSHARE_WRAP_H
#define NVSHARE_WRAP_H

#include "client.h"
#include "gate.h"
#include "hook.h"
#include "memory.h"
#include "stream.h"

/* Declares and defines an exported function; the body follows. */
#define WRAPPER(name, P) \
	NVS_EXPORT int name P; \
	NVS_EXPORT int name P

/* Calls the real function of this name. */
#define CALL(name, ...) \
	__extension__({ \
		__typeof__(&name) real_ = NVS_REAL(name); \
		real_ ? real_(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
	})

/* a * b, or as good as infinite. */
static inline uint64_t nvs_times(uint64_t a, uint64_t b)
{
	uint64_t product;

	return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* The arguments of a call, out of their parentheses. */
#define NVS_SPREAD(...) __VA_ARGS__

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

/* Whether a graph may have so much more memory; it is charged once it exists. */
bool nvs_graph_may_have(struct nvs_gpu *gpu, uint64_t bytes);

/*
 * A node of a graph is about to be made or changed: waits until the memory that the node
 * names is on the GPU, see names.c. Left with nvs_gate_leave(); NULL: nothing to leave.
 */
struct nvs_thread *nvs_node_enter(const struct cu_node_params *p);

#endif
