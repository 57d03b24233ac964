// SPDX-License-Identifier: Apache-2.0
/*
 * gated.c: the gated wrappers, made from the table, and the table of all wrappers.
 */
#include "wrap.h"

#define G(name, P, A, key) GATED(name, P, A, nvs_gate_enter(key))
NVS_GATED_TABLE(G)
#undef G

/* Defined in the other files; only their addresses are needed here. */
#define H(name) extern int name();
NVS_OTHER_TABLE(H)
NVS_UNGATED_TABLE(H)
#undef H

void *const nvs_wrappers[NVS_F_COUNT] = {
#define G(name, P, A, key) [NVS_F_##name] = (void *)name,
	NVS_GATED_TABLE(G)
#undef G
#define H(name) [NVS_F_##name] = (void *)name,
	NVS_OTHER_TABLE(H)
	NVS_UNGATED_TABLE(H)
#undef H
};
