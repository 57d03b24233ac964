// SPDX-License-Identifier: Apache-2.0
/*
 * gated.c: the gated wrappers: those of the table, and those that work on several GPUs, whose gates
 * are passed together (graph.c has those of graphs). And the table of all wrappers.
 */
#include "wrap.h"

#define G(name, P, A, key) GATED(name, P, A, nvs_gate_enter(key))
NVS_GATED_TABLE(G)
#undef G

GATED(cuLaunchCooperativeKernelMultiDevice, (struct cu_launch_params *list, uint count, uint flags),
      (list, count, flags), list && count ? nvs_gate_enter_all(&list[0].stream, count, sizeof(*list)) : NULL)

/* ---- copies between the memory of two contexts ---- */

static struct nvs_thread *submit_enter(void *key, void *dst, void *src)
{
	return nvs_gate_enter_gpus(key, atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)
						? 0 : nvs_gpu_bit_of_context(dst) | nvs_gpu_bit_of_context(src));
}

#define PEER(name, P, A, key) GATED(name, P, A, submit_enter(key, dst, src))
#define PEER_3D(name, P, A, key) \
	GATED(name, P, A, submit_enter(key, c ? c->dst_context : NULL, c ? c->src_context : NULL))

NVS_DS(PEER, cuMemcpyPeer, (CUdeviceptr d, void *dst, CUdeviceptr h, void *src, size_t n), (d, dst, h, src, n))
NVS_SZ(PEER, cuMemcpyPeerAsync, (CUdeviceptr d, void *dst, CUdeviceptr h, void *src, size_t n, void *s),
       (d, dst, h, src, n, s), s)
NVS_DS(PEER_3D, cuMemcpy3DPeer, (const struct cu_memcpy3d *c), (c))
NVS_SZ(PEER_3D, cuMemcpy3DPeerAsync, (const struct cu_memcpy3d *c, void *s), (c, s), s)

/* ---- all wrappers ---- */

/* Defined in the other files, too; only their addresses are needed here. */
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
