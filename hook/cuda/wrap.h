// SPDX-License-Identifier: Apache-2.0
/* wrap.h: what the files with hand-written wrappers share. */
#ifndef NVSHARE_WRAP_H
#define NVSHARE_WRAP_H

#include "client.h"
#include "gate.h"
#include "hook.h"
#include "stream.h"

/* Declares and defines an exported function; the body follows. */
#define WATCH(name, P) \
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

static inline bool nvs_active(void)
{
	return atomic_load_explicit(&nvs_gate.active, memory_order_acquire);
}

/* This thread has the lock of the book, or waits for it: a signal handler runs. */
extern __thread bool nvs_in_book __attribute__((tls_model("initial-exec")));

/*
 * Whether memory is counted: not in a signal handler that interrupted whoever
 * has the book's lock, and not any more while the process ends.
 */
static inline bool nvs_counting(void)
{
	return nvs_active() && !nvs_in_book &&
	       !atomic_load_explicit(&nvs_exiting, memory_order_relaxed);
}

/* ---- where an allocation goes ---- */

static inline void *nvs_current_context(void)
{
	void *ctx = NULL;

	if (nvs_driver.ctx_get_current)
		nvs_driver.ctx_get_current(&ctx);
	return ctx;
}

/* Channel of the current context. Without one the driver refuses anyway. */
static inline int nvs_channel_here(const void *ctx)
{
	if (!ctx)
		return -1;
	return atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)
		? 0 : nvs_channel_of_current();
}

static inline int nvs_channel_of_location(const struct cu_location *l)
{
	return l->type == CU_MEM_LOCATION_TYPE_DEVICE ? nvs_client_channel(l->id) : -1;
}

/* The arguments of a call, out of their parentheses. */
#define NVS_SPREAD(...) __VA_ARGS__

/* For who has memory.h too. A free that fails changes nothing. */
#define FREE(name, kind, P, A, key) \
	WATCH(name, P) \
	{ \
		uint64_t stamp = nvs_memory_stamp(); \
		int result = CALL(name, NVS_SPREAD A); \
		if (result == CUDA_SUCCESS && nvs_counting()) \
			nvs_memory_remove(kind, (uintptr_t)(key), stamp); \
		return result; \
	}

#endif
