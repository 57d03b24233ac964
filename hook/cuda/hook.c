// SPDX-License-Identifier: Apache-2.0
/*
 * hook.c: the gated wrappers, made from the table, and the table of all wrappers.
 */
#include "hook.h"

#include "gate.h"

#define G(name, P, A, key) \
	NVS_EXPORT int name P; \
	NVS_EXPORT int name P \
	{ \
		__typeof__(&name) real = NVS_REAL(name); \
		struct nvs_thread *t; \
		int result; \
		if (nvs_unlikely(!real)) \
			return CUDA_ERROR_NOT_FOUND; \
		t = nvs_gate_enter(key); \
		result = real A; \
		if (nvs_likely(t != NULL)) \
			nvs_gate_leave(t); \
		return result; \
	}
NVS_GATED_TABLE(G)
#undef G

/* Defined in the other files; only their addresses are needed here. */
#define H(name) extern int name();
NVS_OTHER_TABLE(H)
#undef H

void *const nvs_wrappers[NVS_F_COUNT] = {
#define G(name, P, A, key) [NVS_F_##name] = (void *)name,
	NVS_GATED_TABLE(G)
#undef G
#define H(name) [NVS_F_##name] = (void *)name,
	NVS_OTHER_TABLE(H)
#undef H
};
