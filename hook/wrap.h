// SPDX-License-Identifier: Apache-2.0
/* wrap.h: what the files with hand-written wrappers share. */
#ifndef NVSHARE_WRAP_H
#define NVSHARE_WRAP_H

#include "gate.h"
#include "hook.h"

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

static inline bool nvs_active(void)
{
	return atomic_load_explicit(&nvs_gate.active, memory_order_acquire);
}

#endif
