// SPDX-License-Identifier: Apache-2.0
/*
 * ungated.h: the driver functions that pass without a gate. Each is a stub that jumps to
 * the driver (stubs.c): the shim only has to know of a call while the process is
 * checkpointed, when the call would wait in the driver for somebody to restore it.
 *
 * NVS_UNGATED_TABLE(H): H(name). Classes, by section: allocate, free, info, context,
 * stream, event, never, graph, event (GRAPHICS), pass (CODE, REST, OLD). A name is here in
 * each form that a CUDA version ever had, also where it is not exported today.
 * ungated.txt has the few that have no stub.
 */
#ifndef NVSHARE_UNGATED_H
#define NVSHARE_UNGATED_H

/* An export and its per-thread-default-stream variant. */
#define NVS_Z(H, name) H(name) H(name##_ptsz)

/* Takes or shares memory that is not counted: host memory, address space, what is charged where it came from. */
#define NVS_UNGATED_ALLOCATE(H) \
	H(cuExternalMemoryGetMappedBuffer) H(cuExternalMemoryGetMappedMipmappedArray) H(cuImportExternalMemory) \
	H(cuLogicalEndpointAddDevice) H(cuLogicalEndpointCreate) H(cuLogicalEndpointExport) \
	H(cuLogicalEndpointIdReserve) H(cuLogicalEndpointImport) H(cuMemAllocHost) H(cuMemAllocHost_v2) \
	H(cuMemHostAlloc) H(cuMemHostRegister) H(cuMemHostRegister_v2) H(cuMemPoolExportPointer) \
	H(cuMemPoolExportToShareableHandle) H(cuMemPoolImportPointer) H(cuMulticastAddDevice) H(cuMulticastCreate)

/* Gives back. Never gated: a program that runs out of memory, or ends, must not wait. */
#define NVS_UNGATED_FREE(H) \
	H(cuDestroyExternalMemory) H(cuDeviceUnregisterAsyncNotification) H(cuLogicalEndpointDestroy) \
	H(cuLogicalEndpointIdRelease) H(cuLogicalEndpointUnbind) H(cuMemFreeHost) H(cuMemHostUnregister) \
	H(cuMulticastUnbind)

/* Tells of devices, pointers and versions. Two names are exported that no header has. */
#define NVS_UNGATED_INFO(H) \
	H(cuMemGetAttribute) H(cuMemGetAttribute_v2) H(cuArray3DGetDescriptor) H(cuArray3DGetDescriptor_v2) \
	H(cuArrayGetDescriptor) H(cuArrayGetDescriptor_v2) H(cuArrayGetMemoryRequirements) H(cuArrayGetPlane) \
	H(cuArrayGetSparseProperties) H(cuDeviceCanAccessPeer) H(cuDeviceComputeCapability) H(cuDeviceGet) \
	H(cuDeviceGetAttribute) H(cuDeviceGetByPCIBusId) H(cuDeviceGetCliqueCount) H(cuDeviceGetCliqueInfo) \
	H(cuDeviceGetCount) H(cuDeviceGetDevResource) H(cuDeviceGetExecAffinitySupport) \
	H(cuDeviceGetFabricClusterUuid) H(cuDeviceGetHostAtomicCapabilities) H(cuDeviceGetLuid) H(cuDeviceGetName) \
	H(cuDeviceGetNvSciSyncAttributes) H(cuDeviceGetP2PAtomicCapabilities) H(cuDeviceGetP2PAttribute) \
	H(cuDeviceGetPCIBusId) H(cuDeviceGetProperties) H(cuDeviceGetTexture1DLinearMaxWidth) H(cuDeviceGetUuid) \
	H(cuDeviceGetUuid_v2) H(cuLogicalEndpointGetLimits) H(cuLogicalEndpointQuery) \
	H(cuMemGetAllocationGranularity) H(cuMemGetLocationInfo) H(cuMemHostGetDevicePointer) \
	H(cuMemHostGetDevicePointer_v2) H(cuMemHostGetFlags) H(cuMemPoolGetAccess) H(cuMemRangeGetAttribute) \
	H(cuMemRangeGetAttributes) H(cuMipmappedArrayGetLevel) H(cuMipmappedArrayGetMemoryRequirements) \
	H(cuMipmappedArrayGetSparseProperties) H(cuMulticastGetGranularity)

/* State of a context that leaves its streams where they are. */
#define NVS_UNGATED_CONTEXT(H) \
	H(cuCtxDisablePeerAccess) H(cuCtxEnablePeerAccess) H(cuCtxGetApiVersion) H(cuCtxGetCacheConfig) \
	H(cuCtxGetCurrent) H(cuCtxGetDevResource) H(cuCtxGetDevice) H(cuCtxGetDevice_v2) H(cuCtxGetExecAffinity) \
	H(cuCtxGetFlags) H(cuCtxGetId) H(cuCtxGetLimit) H(cuCtxGetSharedMemConfig) H(cuCtxGetStreamPriorityRange) \
	H(cuCtxResetPersistingL2Cache) H(cuCtxSetCacheConfig) H(cuCtxSetFlags) H(cuCtxSetLimit) \
	H(cuCtxSetSharedMemConfig) H(cuDevResourceGenerateDesc) H(cuDevSmResourceSplit) \
	H(cuDevSmResourceSplitByCount) H(cuDevicePrimaryCtxGetState) H(cuDevicePrimaryCtxSetFlags) \
	H(cuDevicePrimaryCtxSetFlags_v2) H(cuGreenCtxGetDevResource) H(cuGreenCtxGetId)

/* Attributes of a stream. */
#define NVS_UNGATED_STREAM(H) \
	NVS_Z(H, cuStreamCopyAttributes) NVS_Z(H, cuStreamGetAttribute) NVS_Z(H, cuStreamGetCtx) \
	NVS_Z(H, cuStreamGetCtx_v2) NVS_Z(H, cuStreamGetDevResource) NVS_Z(H, cuStreamGetDevice) \
	NVS_Z(H, cuStreamGetFlags) NVS_Z(H, cuStreamGetGreenCtx) NVS_Z(H, cuStreamGetId) \
	NVS_Z(H, cuStreamGetPriority) NVS_Z(H, cuStreamSetAttribute)

/* Order between streams, of other processes too. Never gated: work that runs may be waiting for it. */
#define NVS_UNGATED_EVENT(H) \
	H(cuCtxRecordEvent) H(cuCtxWaitEvent) H(cuDestroyExternalSemaphore) H(cuEventCreate) \
	H(cuEventCreateFromEGLSync) H(cuEventDestroy) H(cuEventDestroy_v2) H(cuEventElapsedTime) \
	H(cuEventElapsedTime_v2) NVS_Z(H, cuEventRecord) NVS_Z(H, cuEventRecordWithFlags) H(cuGreenCtxRecordEvent) \
	H(cuGreenCtxWaitEvent) H(cuImportExternalSemaphore) H(cuIpcGetEventHandle) H(cuIpcOpenEventHandle) \
	NVS_Z(H, cuSignalExternalSemaphoresAsync) NVS_Z(H, cuStreamWaitEvent)

/* Waits, or asks whether work is done. Never gated, as above. */
#define NVS_UNGATED_NEVER(H) \
	H(cuEventQuery) H(cuFlushGPUDirectRDMAWrites) NVS_Z(H, cuStreamQuery)

/* Builds, changes and describes graphs and captures. Nothing runs before the launch, which is gated. */
#define NVS_UNGATED_GRAPH(H) \
	H(cuDeviceGetGraphMemAttribute) H(cuDeviceSetGraphMemAttribute) H(cuGraphAddChildGraphNode) \
	H(cuGraphAddDependencies) H(cuGraphAddDependencies_v2) H(cuGraphAddEmptyNode) H(cuGraphAddEventRecordNode) \
	H(cuGraphAddEventWaitNode) H(cuGraphAddExternalSemaphoresSignalNode) H(cuGraphAddExternalSemaphoresWaitNode) \
	H(cuGraphAddHostNode) H(cuGraphAddKernelNode) H(cuGraphAddKernelNode_v2) H(cuGraphAddMemFreeNode) \
	H(cuGraphBatchMemOpNodeGetParams) H(cuGraphChildGraphNodeGetGraph) H(cuGraphClone) \
	H(cuGraphConditionalHandleCreate) H(cuGraphCreate) H(cuGraphDebugDotPrint) H(cuGraphDestroy) \
	H(cuGraphDestroyNode) H(cuGraphEventRecordNodeGetEvent) H(cuGraphEventRecordNodeSetEvent) \
	H(cuGraphEventWaitNodeGetEvent) H(cuGraphEventWaitNodeSetEvent) H(cuGraphExecChildGraphNodeSetParams) \
	H(cuGraphExecEventRecordNodeSetEvent) H(cuGraphExecEventWaitNodeSetEvent) \
	H(cuGraphExecExternalSemaphoresSignalNodeSetParams) H(cuGraphExecExternalSemaphoresWaitNodeSetParams) \
	H(cuGraphExecGetFlags) H(cuGraphExecGetId) H(cuGraphExecHostNodeSetParams) H(cuGraphExecKernelNodeSetParams) \
	H(cuGraphExecKernelNodeSetParams_v2) H(cuGraphExecUpdate) H(cuGraphExecUpdate_v2) \
	H(cuGraphExternalSemaphoresSignalNodeGetParams) H(cuGraphExternalSemaphoresSignalNodeSetParams) \
	H(cuGraphExternalSemaphoresWaitNodeGetParams) H(cuGraphExternalSemaphoresWaitNodeSetParams) \
	H(cuGraphGetEdges) H(cuGraphGetEdges_v2) H(cuGraphGetId) H(cuGraphGetNodes) H(cuGraphGetRootNodes) \
	H(cuGraphHostNodeGetParams) H(cuGraphHostNodeSetParams) H(cuGraphKernelNodeCopyAttributes) \
	H(cuGraphKernelNodeGetAttribute) H(cuGraphKernelNodeGetParams) H(cuGraphKernelNodeGetParams_v2) \
	H(cuGraphKernelNodeSetAttribute) H(cuGraphKernelNodeSetParams) H(cuGraphKernelNodeSetParams_v2) \
	H(cuGraphMemAllocNodeGetParams) H(cuGraphMemFreeNodeGetParams) H(cuGraphMemcpyNodeGetParams) \
	H(cuGraphMemsetNodeGetParams) H(cuGraphNodeFindInClone) H(cuGraphNodeGetContainingGraph) \
	H(cuGraphNodeGetDependencies) H(cuGraphNodeGetDependencies_v2) H(cuGraphNodeGetDependentNodes) \
	H(cuGraphNodeGetDependentNodes_v2) H(cuGraphNodeGetEnabled) H(cuGraphNodeGetLocalId) H(cuGraphNodeGetParams) \
	H(cuGraphNodeGetToolsId) H(cuGraphNodeGetType) H(cuGraphNodeSetEnabled) H(cuGraphReleaseUserObject) \
	H(cuGraphRemoveDependencies) H(cuGraphRemoveDependencies_v2) H(cuGraphRetainUserObject) \
	NVS_Z(H, cuStreamGetCaptureInfo) NVS_Z(H, cuStreamGetCaptureInfo_v2) NVS_Z(H, cuStreamGetCaptureInfo_v3) \
	NVS_Z(H, cuStreamIsCapturing) NVS_Z(H, cuStreamUpdateCaptureDependencies) \
	NVS_Z(H, cuStreamUpdateCaptureDependencies_v2) H(cuThreadExchangeStreamCaptureMode) H(cuUserObjectCreate) \
	H(cuUserObjectRelease) H(cuUserObjectRetain)

/* Graphics. Memory is handed over in the order of a stream, as by a semaphore: never gated. */
#define NVS_UNGATED_GRAPHICS(H) \
	H(cuEGLApiInit) H(cuEGLStreamConsumerAcquireFrame) H(cuEGLStreamConsumerConnect) \
	H(cuEGLStreamConsumerConnectWithFlags) H(cuEGLStreamConsumerDisconnect) H(cuEGLStreamConsumerReleaseFrame) \
	H(cuEGLStreamProducerConnect) H(cuEGLStreamProducerDisconnect) H(cuEGLStreamProducerPresentFrame) \
	H(cuEGLStreamProducerReturnFrame) H(cuGLGetDevices) H(cuGLGetDevices_v2) H(cuGLInit) H(cuGLMapBufferObject) \
	H(cuGLMapBufferObject_ptds) NVS_Z(H, cuGLMapBufferObjectAsync) NVS_Z(H, cuGLMapBufferObjectAsync_v2) \
	H(cuGLMapBufferObject_v2) H(cuGLMapBufferObject_v2_ptds) H(cuGLRegisterBufferObject) \
	H(cuGLSetBufferObjectMapFlags) H(cuGLUnmapBufferObject) H(cuGLUnmapBufferObjectAsync) \
	H(cuGLUnregisterBufferObject) H(cuGraphicsEGLRegisterImage) H(cuGraphicsGLRegisterBuffer) \
	H(cuGraphicsGLRegisterImage) NVS_Z(H, cuGraphicsMapResources) H(cuGraphicsResourceGetMappedEglFrame) \
	H(cuGraphicsResourceGetMappedMipmappedArray) H(cuGraphicsResourceGetMappedPointer) \
	H(cuGraphicsResourceGetMappedPointer_v2) H(cuGraphicsResourceSetMapFlags) \
	H(cuGraphicsResourceSetMapFlags_v2) H(cuGraphicsSubResourceGetMappedArray) \
	NVS_Z(H, cuGraphicsUnmapResources) H(cuGraphicsUnregisterResource) H(cuGraphicsVDPAURegisterOutputSurface) \
	H(cuGraphicsVDPAURegisterVideoSurface) H(cuVDPAUGetDevice)

/* Code, textures and surfaces. Loading compiles first, for seconds, and would hold up a release as long. */
#define NVS_UNGATED_CODE(H) \
	H(cuFuncGetAttribute) H(cuFuncGetModule) H(cuFuncGetName) H(cuFuncGetParamCount) H(cuFuncGetParamInfo) \
	H(cuFuncIsLoaded) H(cuFuncLoad) H(cuFuncSetAttribute) H(cuFuncSetBlockShape) H(cuFuncSetCacheConfig) \
	H(cuFuncSetSharedMemConfig) H(cuFuncSetSharedSize) H(cuKernelGetAttribute) H(cuKernelGetFunction) \
	H(cuKernelGetLibrary) H(cuKernelGetName) H(cuKernelGetParamCount) H(cuKernelGetParamInfo) \
	H(cuKernelSetAttribute) H(cuKernelSetCacheConfig) H(cuLibraryEnumerateKernels) H(cuLibraryGetGlobal) \
	H(cuLibraryGetKernel) H(cuLibraryGetKernelCount) H(cuLibraryGetManaged) H(cuLibraryGetModule) \
	H(cuLibraryGetUnifiedFunction) H(cuLibraryLoadData) H(cuLibraryLoadFromFile) H(cuLibraryUnload) H(cuLinkAddData) H(cuLinkAddData_v2) H(cuLinkAddFile) H(cuLinkAddFile_v2) \
	H(cuLinkComplete) H(cuLinkCreate) H(cuLinkCreate_v2) H(cuLinkDestroy) H(cuModuleEnumerateFunctions) \
	H(cuModuleGetFunction) H(cuModuleGetFunctionCount) H(cuModuleGetGlobal) H(cuModuleGetGlobal_v2) \
	H(cuModuleGetLoadingMode) H(cuModuleGetSurfRef) H(cuModuleGetTexRef) H(cuModuleLoad) H(cuModuleLoadData) \
	H(cuModuleLoadDataEx) H(cuModuleLoadFatBinary) H(cuModuleUnload) \
	H(cuOccupancyAvailableDynamicSMemPerBlock) H(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
	H(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) H(cuOccupancyMaxActiveClusters) \
	H(cuOccupancyMaxPotentialBlockSize) H(cuOccupancyMaxPotentialBlockSizeWithFlags) \
	H(cuOccupancyMaxPotentialClusterSize) H(cuParamSetSize) H(cuParamSetTexRef) H(cuParamSetf) H(cuParamSeti) \
	H(cuParamSetv) H(cuSurfObjectCreate) H(cuSurfObjectDestroy) H(cuSurfObjectGetResourceDesc) \
	H(cuSurfRefGetArray) H(cuSurfRefSetArray) H(cuTensorMapEncodeIm2col) H(cuTensorMapEncodeIm2colWide) \
	H(cuTensorMapEncodeTiled) H(cuTensorMapReplaceAddress) H(cuTexObjectDestroy) H(cuTexObjectGetResourceDesc) \
	H(cuTexObjectGetResourceViewDesc) H(cuTexObjectGetTextureDesc) H(cuTexRefCreate) H(cuTexRefDestroy) \
	H(cuTexRefGetAddress) H(cuTexRefGetAddressMode) H(cuTexRefGetAddress_v2) H(cuTexRefGetArray) \
	H(cuTexRefGetBorderColor) H(cuTexRefGetFilterMode) H(cuTexRefGetFlags) H(cuTexRefGetFormat) \
	H(cuTexRefGetMaxAnisotropy) H(cuTexRefGetMipmapFilterMode) H(cuTexRefGetMipmapLevelBias) \
	H(cuTexRefGetMipmapLevelClamp) H(cuTexRefGetMipmappedArray) H(cuTexRefSetAddress) H(cuTexRefSetAddress2D) \
	H(cuTexRefSetAddressMode) H(cuTexRefSetArray) H(cuTexRefSetBorderColor) H(cuTexRefSetFilterMode) \
	H(cuTexRefSetFlags) H(cuTexRefSetFormat) H(cuTexRefSetMaxAnisotropy) H(cuTexRefSetMipmapFilterMode) \
	H(cuTexRefSetMipmapLevelBias) H(cuTexRefSetMipmapLevelClamp) H(cuTexRefSetMipmappedArray)

/* The rest. Advice on managed memory moves nothing. A checkpoint is done under a lock of the driver's own. */
#define NVS_UNGATED_REST(H) \
	H(cuCoredumpDeregisterCompleteCallback) H(cuCoredumpDeregisterStartCallback) H(cuCoredumpGetAttribute) \
	H(cuCoredumpGetAttributeGlobal) H(cuCoredumpRegisterCompleteCallback) H(cuCoredumpRegisterStartCallback) \
	H(cuCoredumpSetAttribute) H(cuCoredumpSetAttributeGlobal) H(cuDeviceRegisterAsyncNotification) \
	H(cuLogsCurrent) H(cuLogsDumpToFile) H(cuLogsDumpToMemory) H(cuLogsRegisterCallback) \
	H(cuLogsUnregisterCallback) H(cuMemAdvise) H(cuMemAdvise_v2) H(cuProfilerInitialize) H(cuProfilerStart) \
	H(cuProfilerStop)

/* Sizes of 32 bits, from before CUDA 3.2; each has a _v2 in symbols.h. */
#define NVS_UNGATED_OLD(H) \
	H(cuMemAlloc) H(cuMemAllocPitch) H(cuMemFree) H(cuArrayCreate) H(cuArray3DCreate) H(cuMemGetInfo) \
	H(cuDeviceTotalMem) H(cuMemGetAddressRange) H(cuMemcpyHtoD) H(cuMemcpyDtoH) H(cuMemcpyDtoD) \
	H(cuMemcpyDtoA) H(cuMemcpyAtoD) H(cuMemcpyHtoA) H(cuMemcpyAtoH) H(cuMemcpyAtoA) H(cuMemcpy2D) \
	H(cuMemcpy2DUnaligned) H(cuMemcpy3D) H(cuMemcpyHtoDAsync) H(cuMemcpyDtoHAsync) H(cuMemcpyDtoDAsync) \
	H(cuMemcpyHtoAAsync) H(cuMemcpyAtoHAsync) H(cuMemcpy2DAsync) H(cuMemcpy3DAsync) \
	H(cuMemsetD8) H(cuMemsetD16) H(cuMemsetD32) H(cuMemsetD2D8) H(cuMemsetD2D16) H(cuMemsetD2D32)

#define NVS_UNGATED_TABLE(H) \
	NVS_UNGATED_ALLOCATE(H) \
	NVS_UNGATED_FREE(H) \
	NVS_UNGATED_INFO(H) \
	NVS_UNGATED_CONTEXT(H) \
	NVS_UNGATED_STREAM(H) \
	NVS_UNGATED_EVENT(H) \
	NVS_UNGATED_NEVER(H) \
	NVS_UNGATED_GRAPH(H) \
	NVS_UNGATED_GRAPHICS(H) \
	NVS_UNGATED_CODE(H) \
	NVS_UNGATED_REST(H) \
	NVS_UNGATED_OLD(H)

#endif
