// SPDX-License-Identifier: Apache-2.0
/*
 * symbols.h: every driver function that the shim has a wrapper for. With ungated.h and
 * ungated.txt, which name all the others, it classifies each export of every CUDA version
 * that test/names/ lists; test/classify.sh sees to it that none is left out.
 *
 * NVS_GATED_TABLE(G): functions that submit work to a GPU.
 *   G(name, parameters, arguments, key)
 *   key: the stream the work goes to, with the meaning of handle 0 resolved:
 *   legacy default stream, or the thread's own in a _ptds/_ptsz variant.
 *   Classes, by section: submit (LAUNCH), copy (COPY), set (SET), move (MOVE:
 *   says where memory is, brings it there, or drops or unpacks it there).
 * NVS_OTHER_TABLE(H): functions with a wrapper written by hand.
 *   H(name)
 *   Classes, by section: submit (BY_HAND, gated as well), info (RESOLVERS),
 *   context (CONTEXTS), stream (STREAMS), never (MEM_OPS), graph (MEM_OP_NODES),
 *   names (NAMES: the driver may look up memory that the call only names),
 *   memory (MEMORY: what takes, gives back or tells of device memory).
 *
 * Never gated: frees, destroys, synchronisation, queries, event operations and
 * stream memory operations. They may be what running work waits for.
 */
#ifndef NVSHARE_SYMBOLS_H
#define NVSHARE_SYMBOLS_H

#include "cuda_abi.h"
#include "ungated.h"

/* On a stream: the export and its per-thread-default-stream variant. */
#define NVS_SZ(G, name, P, A, s) \
	G(name, P, A, NVS_KEY_LEGACY(s)) \
	G(name##_ptsz, P, A, NVS_KEY_THREAD(s))

/* Without a stream parameter: the default stream. */
#define NVS_DS(G, name, P, A) \
	G(name, P, A, CU_STREAM_LEGACY) \
	G(name##_ptds, P, A, CU_STREAM_PER_THREAD)

#define NVS_GATED_LAUNCH(G) \
	NVS_SZ(G, cuLaunchKernel, (void *f, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, \
		void *s, void **params, void **extra), (f, gx, gy, gz, bx, by, bz, shared, s, params, extra), s) \
	NVS_SZ(G, cuLaunchKernelEx, (const struct cu_launch_config *c, void *f, void **params, void **extra), \
		(c, f, params, extra), (c ? c->stream : NULL)) \
	NVS_SZ(G, cuLaunchCooperativeKernel, (void *f, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, \
		uint shared, void *s, void **params), (f, gx, gy, gz, bx, by, bz, shared, s, params), s) \
	/* From before CUDA 4; drivers still export them, and no _v2 took their place. */ \
	G(cuLaunch, (void *f), (f), CU_STREAM_LEGACY) \
	G(cuLaunchGrid, (void *f, int w, int h), (f, w, h), CU_STREAM_LEGACY) \
	G(cuLaunchGridAsync, (void *f, int w, int h, void *s), (f, w, h, s), NVS_KEY_LEGACY(s))

#define NVS_GATED_COPY(G) \
	NVS_DS(G, cuMemcpy, (CUdeviceptr d, CUdeviceptr h, size_t n), (d, h, n)) \
	NVS_DS(G, cuMemcpyHtoD_v2, (CUdeviceptr d, const void *h, size_t n), (d, h, n)) \
	NVS_DS(G, cuMemcpyDtoH_v2, (void *d, CUdeviceptr h, size_t n), (d, h, n)) \
	NVS_DS(G, cuMemcpyDtoD_v2, (CUdeviceptr d, CUdeviceptr h, size_t n), (d, h, n)) \
	NVS_DS(G, cuMemcpyDtoA_v2, (void *a, size_t o, CUdeviceptr d, size_t n), (a, o, d, n)) \
	NVS_DS(G, cuMemcpyAtoD_v2, (CUdeviceptr d, void *a, size_t o, size_t n), (d, a, o, n)) \
	NVS_DS(G, cuMemcpyHtoA_v2, (void *a, size_t o, const void *h, size_t n), (a, o, h, n)) \
	NVS_DS(G, cuMemcpyAtoH_v2, (void *h, void *a, size_t o, size_t n), (h, a, o, n)) \
	NVS_DS(G, cuMemcpyAtoA_v2, (void *a, size_t o, void *b, size_t p, size_t n), (a, o, b, p, n)) \
	NVS_DS(G, cuMemcpy2D_v2, (const void *c), (c)) \
	NVS_DS(G, cuMemcpy2DUnaligned_v2, (const void *c), (c)) \
	NVS_DS(G, cuMemcpy3D_v2, (const void *c), (c)) \
	NVS_SZ(G, cuMemcpyAsync, (CUdeviceptr d, CUdeviceptr h, size_t n, void *s), (d, h, n, s), s) \
	NVS_SZ(G, cuMemcpyHtoDAsync_v2, (CUdeviceptr d, const void *h, size_t n, void *s), (d, h, n, s), s) \
	NVS_SZ(G, cuMemcpyDtoHAsync_v2, (void *d, CUdeviceptr h, size_t n, void *s), (d, h, n, s), s) \
	NVS_SZ(G, cuMemcpyDtoDAsync_v2, (CUdeviceptr d, CUdeviceptr h, size_t n, void *s), (d, h, n, s), s) \
	NVS_SZ(G, cuMemcpyHtoAAsync_v2, (void *a, size_t o, const void *h, size_t n, void *s), (a, o, h, n, s), s) \
	NVS_SZ(G, cuMemcpyAtoHAsync_v2, (void *h, void *a, size_t o, size_t n, void *s), (h, a, o, n, s), s) \
	NVS_SZ(G, cuMemcpy2DAsync_v2, (const void *c, void *s), (c, s), s) \
	NVS_SZ(G, cuMemcpy3DAsync_v2, (const void *c, void *s), (c, s), s) \
	NVS_SZ(G, cuMemcpyBatchAsync, (void *d, void *h, size_t *n, size_t count, void *attrs, size_t *idx, \
		size_t num, size_t *fail, void *s), (d, h, n, count, attrs, idx, num, fail, s), s) \
	NVS_SZ(G, cuMemcpyBatchAsync_v2, \
		(void *d, void *h, size_t *n, size_t count, void *attrs, size_t *idx, size_t num, void *s), \
		(d, h, n, count, attrs, idx, num, s), s) \
	NVS_SZ(G, cuMemcpy3DBatchAsync, (size_t num, void *ops, size_t *fail, unsigned long long flags, void *s), \
		(num, ops, fail, flags, s), s) \
	NVS_SZ(G, cuMemcpy3DBatchAsync_v2, (size_t num, void *ops, unsigned long long flags, void *s), \
		(num, ops, flags, s), s) \
	NVS_SZ(G, cuMemcpyWithAttributesAsync, (CUdeviceptr d, CUdeviceptr h, size_t n, void *attr, void *s), \
		(d, h, n, attr, s), s) \
	NVS_SZ(G, cuMemcpy3DWithAttributesAsync, (void *op, unsigned long long flags, void *s), (op, flags, s), s)

#define NVS_GATED_SET(G) \
	NVS_DS(G, cuMemsetD8_v2, (CUdeviceptr d, unsigned char v, size_t n), (d, v, n)) \
	NVS_DS(G, cuMemsetD16_v2, (CUdeviceptr d, unsigned short v, size_t n), (d, v, n)) \
	NVS_DS(G, cuMemsetD32_v2, (CUdeviceptr d, uint v, size_t n), (d, v, n)) \
	NVS_DS(G, cuMemsetD2D8_v2, (CUdeviceptr d, size_t p, unsigned char v, size_t w, size_t h), \
		(d, p, v, w, h)) \
	NVS_DS(G, cuMemsetD2D16_v2, (CUdeviceptr d, size_t p, unsigned short v, size_t w, size_t h), \
		(d, p, v, w, h)) \
	NVS_DS(G, cuMemsetD2D32_v2, (CUdeviceptr d, size_t p, uint v, size_t w, size_t h), (d, p, v, w, h)) \
	NVS_SZ(G, cuMemsetD8Async, (CUdeviceptr d, unsigned char v, size_t n, void *s), (d, v, n, s), s) \
	NVS_SZ(G, cuMemsetD16Async, (CUdeviceptr d, unsigned short v, size_t n, void *s), (d, v, n, s), s) \
	NVS_SZ(G, cuMemsetD32Async, (CUdeviceptr d, uint v, size_t n, void *s), (d, v, n, s), s) \
	NVS_SZ(G, cuMemsetD2D8Async, (CUdeviceptr d, size_t p, unsigned char v, size_t w, size_t h, void *s), \
		(d, p, v, w, h, s), s) \
	NVS_SZ(G, cuMemsetD2D16Async, (CUdeviceptr d, size_t p, unsigned short v, size_t w, size_t h, void *s), \
		(d, p, v, w, h, s), s) \
	NVS_SZ(G, cuMemsetD2D32Async, (CUdeviceptr d, size_t p, uint v, size_t w, size_t h, void *s), \
		(d, p, v, w, h, s), s)

#define NVS_GATED_MOVE(G) \
	NVS_SZ(G, cuMemPrefetchAsync, (CUdeviceptr d, size_t n, int dev, void *s), (d, n, dev, s), s) \
	NVS_SZ(G, cuMemPrefetchAsync_v2, (CUdeviceptr d, size_t n, struct cu_location to, uint flags, void *s), \
		(d, n, to, flags, s), s) \
	NVS_SZ(G, cuMemPrefetchBatchAsync, (void *d, size_t *n, size_t count, void *to, size_t *idx, size_t num, \
		unsigned long long flags, void *s), (d, n, count, to, idx, num, flags, s), s) \
	NVS_SZ(G, cuMemDiscardBatchAsync, (void *d, size_t *n, size_t count, unsigned long long flags, void *s), \
		(d, n, count, flags, s), s) \
	NVS_SZ(G, cuMemDiscardAndPrefetchBatchAsync, (void *d, size_t *n, size_t count, void *to, size_t *idx, \
		size_t num, unsigned long long flags, void *s), (d, n, count, to, idx, num, flags, s), s) \
	NVS_SZ(G, cuMemBatchDecompressAsync, (void *ops, size_t count, uint flags, size_t *fail, void *s), \
		(ops, count, flags, fail, s), s) \
	NVS_SZ(G, cuMemMapArrayAsync, (void *list, uint count, void *s), (list, count, s), s) \
	NVS_SZ(G, cuStreamAttachMemAsync, (void *s, CUdeviceptr p, size_t n, uint flags), (s, p, n, flags), s)

#define NVS_GATED_TABLE(G) \
	NVS_GATED_LAUNCH(G) \
	NVS_GATED_COPY(G) \
	NVS_GATED_SET(G) \
	NVS_GATED_MOVE(G)

/*
 * Gated by hand: several GPUs in one call, or a stream in a structure. A host function takes
 * its place in the stream like a kernel. What runs in it is not gated: it may not call the driver.
 */
#define NVS_BY_HAND(H) \
	NVS_Z(H, cuLaunchHostFunc) NVS_Z(H, cuLaunchHostFunc_v2) NVS_Z(H, cuStreamAddCallback) \
	H(cuLaunchCooperativeKernelMultiDevice) H(cuMemcpyPeer) H(cuMemcpyPeer_ptds) NVS_Z(H, cuMemcpyPeerAsync) \
	H(cuMemcpy3DPeer) H(cuMemcpy3DPeer_ptds) NVS_Z(H, cuMemcpy3DPeerAsync) NVS_Z(H, cuGraphLaunch) \
	NVS_Z(H, cuGraphUpload) NVS_Z(H, cuGraphInstantiateWithParams)

#define NVS_RESOLVERS(H) \
	H(cuInit) NVS_Z(H, cuGetProcAddress) NVS_Z(H, cuGetProcAddress_v2)

#define NVS_CONTEXTS(H) \
	H(cuCtxCreate) H(cuCtxCreate_v2) H(cuCtxCreate_v3) H(cuCtxCreate_v4) H(cuGLCtxCreate) H(cuGLCtxCreate_v2) \
	H(cuVDPAUCtxCreate) H(cuVDPAUCtxCreate_v2) H(cuCtxAttach) H(cuCtxDestroy) H(cuCtxDestroy_v2) H(cuCtxDetach) \
	H(cuCtxSetCurrent) H(cuCtxPushCurrent) H(cuCtxPushCurrent_v2) H(cuCtxPopCurrent) H(cuCtxPopCurrent_v2) \
	H(cuDevicePrimaryCtxRetain) H(cuDevicePrimaryCtxRelease) H(cuDevicePrimaryCtxRelease_v2) \
	H(cuDevicePrimaryCtxReset) H(cuDevicePrimaryCtxReset_v2) H(cuGreenCtxCreate) H(cuCtxFromGreenCtx) \
	H(cuGreenCtxDestroy)

/* Streams and captures. */
#define NVS_STREAMS(H) \
	H(cuStreamCreate) H(cuStreamCreateWithPriority) H(cuGreenCtxStreamCreate) H(cuStreamDestroy) \
	H(cuStreamDestroy_v2) NVS_Z(H, cuStreamBeginCapture) NVS_Z(H, cuStreamBeginCapture_v2) \
	NVS_Z(H, cuStreamBeginCaptureToGraph) NVS_Z(H, cuStreamBeginRecaptureToGraph) \
	NVS_Z(H, cuStreamBeginCaptureToCig) NVS_Z(H, cuStreamEndCapture) NVS_Z(H, cuStreamEndCaptureToCig) \
	/* After them a pool may give memory back. */ \
	H(cuCtxSynchronize) H(cuCtxSynchronize_v2) H(cuEventSynchronize) NVS_Z(H, cuStreamSynchronize)

/* memop.c: what may name memory that moves, which then stays, or what waits in a stream. Not gated. */
#define NVS_MEM_OPS(H) \
	NVS_Z(H, cuStreamWriteValue32) NVS_Z(H, cuStreamWriteValue32_v2) NVS_Z(H, cuStreamWriteValue64) \
	NVS_Z(H, cuStreamWriteValue64_v2) NVS_Z(H, cuStreamWaitValue32) NVS_Z(H, cuStreamWaitValue32_v2) \
	NVS_Z(H, cuStreamWaitValue64) NVS_Z(H, cuStreamWaitValue64_v2) NVS_Z(H, cuStreamBatchMemOp) \
	NVS_Z(H, cuStreamBatchMemOp_v2) NVS_Z(H, cuWaitExternalSemaphoresAsync)

/* Nodes of graphs that hold memory operations (memop.c). */
#define NVS_MEM_OP_NODES(H) \
	H(cuGraphAddBatchMemOpNode) H(cuGraphBatchMemOpNodeSetParams) H(cuGraphExecBatchMemOpNodeSetParams)

/* Calls that name memory (names.c), and wait until it is on the GPU; NVS_MEMORY has others. */
#define NVS_NAMES(H) \
	H(cuGraphAddMemcpyNode) H(cuGraphMemcpyNodeSetParams) H(cuGraphExecMemcpyNodeSetParams) \
	H(cuGraphAddMemsetNode) H(cuGraphMemsetNodeSetParams) H(cuGraphExecMemsetNodeSetParams) \
	H(cuGraphNodeSetParams) H(cuGraphNodeSetParams_v2) H(cuGraphExecNodeSetParams) H(cuTexObjectCreate) \
	H(cuTexRefSetAddress_v2) H(cuTexRefSetAddress2D_v2) H(cuTexRefSetAddress2D_v3)

/* alloc.c, array.c, vmm.c, info.c, pointer.c: counted, limited, clamped, shared */
#define NVS_MEMORY(H) \
	H(cuMemAlloc_v2) H(cuMemAllocPitch_v2) H(cuMemAllocManaged) NVS_Z(H, cuMemAllocAsync) \
	NVS_Z(H, cuMemAllocFromPoolAsync) H(cuMemFree_v2) NVS_Z(H, cuMemFreeAsync) H(cuMemPoolSetAccess) \
	H(cuMemPoolCreate) H(cuMemPoolImportFromShareableHandle) H(cuMemPoolDestroy) H(cuDeviceGetDefaultMemPool) \
	H(cuMemGetDefaultMemPool) H(cuDeviceGetMemPool) H(cuMemGetMemPool) H(cuDeviceSetMemPool) H(cuMemSetMemPool) \
	H(cuMemPoolTrimTo) H(cuMemPoolSetAttribute) H(cuMemPoolGetAttribute) H(cuArrayCreate_v2) \
	H(cuArray3DCreate_v2) H(cuArrayDestroy) H(cuMipmappedArrayCreate) H(cuMipmappedArrayDestroy) \
	H(cuMemCreate) H(cuMemImportFromShareableHandle) \
	H(cuMemRetainAllocationHandle) H(cuMemRelease) H(cuMemMap) H(cuMemUnmap) H(cuMemAddressReserve) \
	H(cuMemAddressFree) H(cuMemSetAccess) H(cuMemGetAccess) H(cuMemExportToShareableHandle) \
	H(cuMemGetAllocationPropertiesFromHandle) H(cuMulticastBindMem) H(cuMulticastBindMem_v2) \
	H(cuMulticastBindAddr) H(cuMulticastBindAddr_v2) H(cuLogicalEndpointBindMem) H(cuLogicalEndpointBindAddr) \
	/* memory of graphs */ \
	H(cuGraphAddMemAllocNode) H(cuGraphAddNode) H(cuGraphAddNode_v2) H(cuGraphAddNode_v3) H(cuGraphInstantiate) \
	H(cuGraphInstantiate_v2) H(cuGraphInstantiateWithFlags) H(cuGraphExecDestroy) H(cuDeviceGraphMemTrim) \
	/* what is told of it */ \
	H(cuMemGetInfo_v2) H(cuDeviceTotalMem_v2) H(cuMemGetAddressRange_v2) H(cuIpcGetMemHandle) \
	H(cuIpcOpenMemHandle) H(cuIpcOpenMemHandle_v2) H(cuIpcCloseMemHandle) H(cuMemGetHandleForAddressRange) \
	H(cuPointerSetAttribute) H(cuPointerGetAttribute) H(cuPointerGetAttributes)

/* nvml.c: of libnvidia-ml, what tells of memory. */
#define NVS_NVML(H) H(nvmlDeviceGetMemoryInfo) H(nvmlDeviceGetMemoryInfo_v2)

#define NVS_PASSING(H) \
	NVS_RESOLVERS(H) \
	NVS_CONTEXTS(H) \
	NVS_STREAMS(H) \
	NVS_MEM_OPS(H) \
	NVS_MEM_OP_NODES(H) \
	NVS_NAMES(H) \
	NVS_MEMORY(H)

#define NVS_OTHER_TABLE(H) \
	NVS_BY_HAND(H) \
	NVS_PASSING(H) \
	NVS_NVML(H)

enum nvs_function {
#define G(name, P, A, key) NVS_F_##name,
	NVS_GATED_TABLE(G)
#undef G
#define H(name) NVS_F_##name,
	NVS_BY_HAND(H)
	NVS_SUBMIT_COUNT, /* these and those before are proved, see coverage.c */
	NVS_SUBMIT_LAST = NVS_SUBMIT_COUNT - 1,
	NVS_PASSING(H)
	NVS_WRAPPED_COUNT, /* from here on stubs, see ungated.h */
	NVS_WRAPPED_LAST = NVS_WRAPPED_COUNT - 1,
	NVS_UNGATED_TABLE(H)
	NVS_CUDA_COUNT, /* from here on another library's */
	NVS_CUDA_LAST = NVS_CUDA_COUNT - 1,
	NVS_NVML(H)
#undef H
	NVS_F_COUNT
};

#endif
