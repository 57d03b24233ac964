// SPDX-License-Identifier: Apache-2.0
/*
 * submit.c: wrappers of submissions that work on several GPUs. All gates are passed
 * together. graph.c has those of graphs.
 */
#include "wrap.h"

GATED(cuLaunchCooperativeKernelMultiDevice, (struct cu_launch_params *list, uint count, uint flags),
      (list, count, flags), list && count ? nvs_gate_enter_all(&list[0].stream, count, sizeof(*list)) : NULL)

/* ---- copies between the memory of two contexts ---- */

static struct nvs_thread *submit_enter(void *key, void *dst, void *src)
{
	return nvs_gate_enter_gpus(key, atomic_load_explicit(&nvs_gate.single, memory_order_relaxed)
						? 0 : nvs_gpu_bit_of_context(dst) | nvs_gpu_bit_of_context(src));
}

#define PEER(name, P, A, key, dst, src) GATED(name, P, A, submit_enter(key, dst, src))
#define PEER_DS(name, P, A, dst, src) \
	PEER(name, P, A, CU_STREAM_LEGACY, dst, src) \
	PEER(name##_ptds, P, A, CU_STREAM_PER_THREAD, dst, src)
#define PEER_SZ(name, P, A, dst, src) \
	PEER(name, P, A, NVS_KEY_LEGACY(s), dst, src) \
	PEER(name##_ptsz, P, A, NVS_KEY_THREAD(s), dst, src)

#define COPY_DST (c ? c->dst_context : NULL)
#define COPY_SRC (c ? c->src_context : NULL)

PEER_DS(cuMemcpyPeer, (CUdeviceptr d, void *dc, CUdeviceptr h, void *hc, size_t n), (d, dc, h, hc, n), dc, hc)
PEER_SZ(cuMemcpyPeerAsync, (CUdeviceptr d, void *dc, CUdeviceptr h, void *hc, size_t n, void *s),
	(d, dc, h, hc, n, s), dc, hc)
PEER_DS(cuMemcpy3DPeer, (const struct cu_memcpy3d *c), (c), COPY_DST, COPY_SRC)
PEER_SZ(cuMemcpy3DPeerAsync, (const struct cu_memcpy3d *c, void *s), (c, s), COPY_DST, COPY_SRC)
