// SPDX-License-Identifier: Apache-2.0
/*
 * ungated.h: every driver function that the shim does not interpose, in a
 * section for each class. symbols.h has the others. P(name)
 *
 * A name is here in each form that a CUDA version ever had, also where it is
 * not exported today. Only test/classify.sh reads this file.
 */
#ifndef NVSHARE_UNGATED_H
#define NVSHARE_UNGATED_H

/* An export and its per-thread-default-stream variant. */
#define NVS_PASS_SZ(P, name) P(name) P(name##_ptsz)
#define NVS_PASS_DS(P, name) P(name) P(name##_ptds)

/*
 * Class allocate. Takes or shares memory that is not counted: host memory,
 * address space, what is charged where it came from.
 */
#define NVS_PASS_ALLOCATE(P) \
	P(cuExternalMemoryGetMappedBuffer) \
	P(cuExternalMemoryGetMappedMipmappedArray) P(cuImportExternalMemory) \
	P(cuLogicalEndpointAddDevice) \
	P(cuLogicalEndpointCreate) P(cuLogicalEndpointExport) P(cuLogicalEndpointIdReserve) \
	P(cuLogicalEndpointImport) P(cuMemAllocHost) P(cuMemAllocHost_v2) P(cuMemHostAlloc) P(cuMemHostRegister) \
	P(cuMemHostRegister_v2) \
	P(cuMemPoolExportPointer) P(cuMemPoolExportToShareableHandle) \
	P(cuMemPoolImportPointer) \
	P(cuMulticastAddDevice) P(cuMulticastCreate)

/*
 * Class free. Gives back. Never gated: whoever runs out of memory, or ends,
 * must not wait.
 */
#define NVS_PASS_FREE(P) \
	P(cuDestroyExternalMemory) P(cuDeviceUnregisterAsyncNotification) \
	P(cuLogicalEndpointDestroy) P(cuLogicalEndpointIdRelease) \
	P(cuLogicalEndpointUnbind) P(cuMemFreeHost) P(cuMemHostUnregister) \
	P(cuMulticastUnbind)

/*
 * Class info. Tells of devices, pointers and versions. Two names are exported
 * that no header has.
 */
#define NVS_PASS_INFO(P) \
	P(cuMemGetAttribute) P(cuMemGetAttribute_v2) \
	P(cuArray3DGetDescriptor) P(cuArray3DGetDescriptor_v2) P(cuArrayGetDescriptor) \
	P(cuArrayGetDescriptor_v2) P(cuArrayGetMemoryRequirements) P(cuArrayGetPlane) \
	P(cuArrayGetSparseProperties) P(cuDeviceCanAccessPeer) P(cuDeviceComputeCapability) \
	P(cuDeviceGet) P(cuDeviceGetAttribute) P(cuDeviceGetByPCIBusId) \
	P(cuDeviceGetCliqueCount) P(cuDeviceGetCliqueInfo) P(cuDeviceGetCount) \
	P(cuDeviceGetDevResource) P(cuDeviceGetExecAffinitySupport) \
	P(cuDeviceGetFabricClusterUuid) P(cuDeviceGetHostAtomicCapabilities) P(cuDeviceGetLuid) \
	P(cuDeviceGetMemPool) P(cuDeviceGetName) P(cuDeviceGetNvSciSyncAttributes) \
	P(cuDeviceGetP2PAtomicCapabilities) P(cuDeviceGetP2PAttribute) P(cuDeviceGetPCIBusId) \
	P(cuDeviceGetProperties) P(cuDeviceGetTexture1DLinearMaxWidth) P(cuDeviceGetUuid) \
	P(cuDeviceGetUuid_v2) P(cuDriverGetVersion) \
	P(cuGetErrorName) P(cuGetErrorString) P(cuLogicalEndpointGetLimits) \
	P(cuLogicalEndpointQuery) P(cuMemGetAllocationGranularity) \
	P(cuMemGetLocationInfo) P(cuMemGetMemPool) P(cuMemHostGetDevicePointer) \
	P(cuMemHostGetDevicePointer_v2) P(cuMemHostGetFlags) P(cuMemPoolGetAccess) \
	P(cuMemRangeGetAttribute) P(cuMemRangeGetAttributes) \
	P(cuMipmappedArrayGetLevel) P(cuMipmappedArrayGetMemoryRequirements) \
	P(cuMipmappedArrayGetSparseProperties) P(cuMulticastGetGranularity)

/* Class context. State of a context that leaves its streams where they are. */
#define NVS_PASS_CONTEXT(P) \
	P(cuCtxAttach) P(cuCtxDisablePeerAccess) P(cuCtxEnablePeerAccess) P(cuCtxGetApiVersion) \
	P(cuCtxGetCacheConfig) P(cuCtxGetCurrent) P(cuCtxGetDevResource) P(cuCtxGetDevice) \
	P(cuCtxGetDevice_v2) P(cuCtxGetExecAffinity) P(cuCtxGetFlags) P(cuCtxGetId) \
	P(cuCtxGetLimit) P(cuCtxGetSharedMemConfig) P(cuCtxGetStreamPriorityRange) \
	P(cuCtxResetPersistingL2Cache) P(cuCtxSetCacheConfig) P(cuCtxSetFlags) P(cuCtxSetLimit) \
	P(cuCtxSetSharedMemConfig) P(cuDevResourceGenerateDesc) P(cuDevSmResourceSplit) \
	P(cuDevSmResourceSplitByCount) P(cuDevicePrimaryCtxGetState) \
	P(cuDevicePrimaryCtxSetFlags) P(cuDevicePrimaryCtxSetFlags_v2) \
	P(cuGreenCtxGetDevResource) P(cuGreenCtxGetId)

/* Class stream. Attributes of a stream. */
#define NVS_PASS_STREAM(P) \
	NVS_PASS_SZ(P, cuStreamCopyAttributes) NVS_PASS_SZ(P, cuStreamGetAttribute) \
	NVS_PASS_SZ(P, cuStreamGetCtx) NVS_PASS_SZ(P, cuStreamGetCtx_v2) \
	NVS_PASS_SZ(P, cuStreamGetDevResource) NVS_PASS_SZ(P, cuStreamGetDevice) \
	NVS_PASS_SZ(P, cuStreamGetFlags) NVS_PASS_SZ(P, cuStreamGetGreenCtx) \
	NVS_PASS_SZ(P, cuStreamGetId) NVS_PASS_SZ(P, cuStreamGetPriority) \
	NVS_PASS_SZ(P, cuStreamSetAttribute)

/*
 * Class event. Events and semaphores, of other processes and interfaces too:
 * order between streams. Never gated: work that runs may be waiting for it.
 */
#define NVS_PASS_EVENT(P) \
	P(cuCtxRecordEvent) P(cuCtxWaitEvent) P(cuDestroyExternalSemaphore) P(cuEventCreate) \
	P(cuEventCreateFromEGLSync) P(cuEventDestroy) P(cuEventDestroy_v2) P(cuEventElapsedTime) \
	P(cuEventElapsedTime_v2) NVS_PASS_SZ(P, cuEventRecord) \
	NVS_PASS_SZ(P, cuEventRecordWithFlags) P(cuGreenCtxRecordEvent) P(cuGreenCtxWaitEvent) \
	P(cuImportExternalSemaphore) P(cuIpcGetEventHandle) P(cuIpcOpenEventHandle) \
	NVS_PASS_SZ(P, cuSignalExternalSemaphoresAsync) NVS_PASS_SZ(P, cuStreamWaitEvent) \
	NVS_PASS_SZ(P, cuWaitExternalSemaphoresAsync)

/* Class never. Waits, or asks whether work is done. Never gated, as above. */
#define NVS_PASS_NEVER(P) \
	P(cuEventQuery) P(cuFlushGPUDirectRDMAWrites) NVS_PASS_SZ(P, cuStreamQuery)

/*
 * Class graph. Builds, changes and describes graphs and captures. Nothing
 * runs before the launch, which is gated. Instantiation with an upload is
 * gated by hand.
 */
#define NVS_PASS_GRAPH(P) \
	P(cuDeviceGetGraphMemAttribute) P(cuDeviceSetGraphMemAttribute) \
	P(cuGraphAddChildGraphNode) P(cuGraphAddDependencies) \
	P(cuGraphAddDependencies_v2) P(cuGraphAddEmptyNode) P(cuGraphAddEventRecordNode) \
	P(cuGraphAddEventWaitNode) P(cuGraphAddExternalSemaphoresSignalNode) \
	P(cuGraphAddExternalSemaphoresWaitNode) P(cuGraphAddHostNode) P(cuGraphAddKernelNode) \
	P(cuGraphAddKernelNode_v2) P(cuGraphAddMemFreeNode) \
	P(cuGraphBatchMemOpNodeGetParams) \
	P(cuGraphChildGraphNodeGetGraph) P(cuGraphClone) P(cuGraphConditionalHandleCreate) \
	P(cuGraphCreate) P(cuGraphDebugDotPrint) P(cuGraphDestroy) P(cuGraphDestroyNode) \
	P(cuGraphEventRecordNodeGetEvent) P(cuGraphEventRecordNodeSetEvent) \
	P(cuGraphEventWaitNodeGetEvent) P(cuGraphEventWaitNodeSetEvent) \
	P(cuGraphExecChildGraphNodeSetParams) \
	P(cuGraphExecEventRecordNodeSetEvent) \
	P(cuGraphExecEventWaitNodeSetEvent) P(cuGraphExecExternalSemaphoresSignalNodeSetParams) \
	P(cuGraphExecExternalSemaphoresWaitNodeSetParams) P(cuGraphExecGetFlags) \
	P(cuGraphExecGetId) P(cuGraphExecHostNodeSetParams) P(cuGraphExecKernelNodeSetParams) \
	P(cuGraphExecKernelNodeSetParams_v2) \
	P(cuGraphExecUpdate) \
	P(cuGraphExecUpdate_v2) P(cuGraphExternalSemaphoresSignalNodeGetParams) \
	P(cuGraphExternalSemaphoresSignalNodeSetParams) \
	P(cuGraphExternalSemaphoresWaitNodeGetParams) \
	P(cuGraphExternalSemaphoresWaitNodeSetParams) P(cuGraphGetEdges) P(cuGraphGetEdges_v2) \
	P(cuGraphGetId) P(cuGraphGetNodes) P(cuGraphGetRootNodes) P(cuGraphHostNodeGetParams) \
	P(cuGraphHostNodeSetParams) \
	P(cuGraphKernelNodeCopyAttributes) \
	P(cuGraphKernelNodeGetAttribute) P(cuGraphKernelNodeGetParams) \
	P(cuGraphKernelNodeGetParams_v2) P(cuGraphKernelNodeSetAttribute) \
	P(cuGraphKernelNodeSetParams) P(cuGraphKernelNodeSetParams_v2) \
	P(cuGraphMemAllocNodeGetParams) P(cuGraphMemFreeNodeGetParams) \
	P(cuGraphMemcpyNodeGetParams) \
	P(cuGraphMemsetNodeGetParams) P(cuGraphNodeFindInClone) \
	P(cuGraphNodeGetContainingGraph) P(cuGraphNodeGetDependencies) \
	P(cuGraphNodeGetDependencies_v2) P(cuGraphNodeGetDependentNodes) \
	P(cuGraphNodeGetDependentNodes_v2) P(cuGraphNodeGetEnabled) P(cuGraphNodeGetLocalId) \
	P(cuGraphNodeGetParams) P(cuGraphNodeGetToolsId) P(cuGraphNodeGetType) \
	P(cuGraphNodeSetEnabled) \
	P(cuGraphReleaseUserObject) P(cuGraphRemoveDependencies) P(cuGraphRemoveDependencies_v2) \
	P(cuGraphRetainUserObject) NVS_PASS_SZ(P, cuStreamGetCaptureInfo) \
	NVS_PASS_SZ(P, cuStreamGetCaptureInfo_v2) NVS_PASS_SZ(P, cuStreamGetCaptureInfo_v3) \
	NVS_PASS_SZ(P, cuStreamIsCapturing) NVS_PASS_SZ(P, cuStreamUpdateCaptureDependencies) \
	NVS_PASS_SZ(P, cuStreamUpdateCaptureDependencies_v2) \
	P(cuThreadExchangeStreamCaptureMode) P(cuUserObjectCreate) P(cuUserObjectRelease) \
	P(cuUserObjectRetain)

/*
 * Class event. Graphics. What maps and unmaps, acquires and returns hands
 * memory over in the order of a stream, like a semaphore: never gated.
 */
#define NVS_PASS_INTEROP(P) \
	P(cuEGLApiInit) P(cuEGLStreamConsumerAcquireFrame) P(cuEGLStreamConsumerConnect) \
	P(cuEGLStreamConsumerConnectWithFlags) P(cuEGLStreamConsumerDisconnect) \
	P(cuEGLStreamConsumerReleaseFrame) P(cuEGLStreamProducerConnect) \
	P(cuEGLStreamProducerDisconnect) P(cuEGLStreamProducerPresentFrame) \
	P(cuEGLStreamProducerReturnFrame) P(cuGLGetDevices) P(cuGLGetDevices_v2) P(cuGLInit) \
	NVS_PASS_DS(P, cuGLMapBufferObject) NVS_PASS_SZ(P, cuGLMapBufferObjectAsync) \
	NVS_PASS_SZ(P, cuGLMapBufferObjectAsync_v2) NVS_PASS_DS(P, cuGLMapBufferObject_v2) \
	P(cuGLRegisterBufferObject) P(cuGLSetBufferObjectMapFlags) P(cuGLUnmapBufferObject) \
	P(cuGLUnmapBufferObjectAsync) P(cuGLUnregisterBufferObject) \
	P(cuGraphicsEGLRegisterImage) P(cuGraphicsGLRegisterBuffer) P(cuGraphicsGLRegisterImage) \
	NVS_PASS_SZ(P, cuGraphicsMapResources) P(cuGraphicsResourceGetMappedEglFrame) \
	P(cuGraphicsResourceGetMappedMipmappedArray) P(cuGraphicsResourceGetMappedPointer) \
	P(cuGraphicsResourceGetMappedPointer_v2) P(cuGraphicsResourceSetMapFlags) \
	P(cuGraphicsResourceSetMapFlags_v2) P(cuGraphicsSubResourceGetMappedArray) \
	NVS_PASS_SZ(P, cuGraphicsUnmapResources) P(cuGraphicsUnregisterResource) \
	P(cuGraphicsVDPAURegisterOutputSurface) P(cuGraphicsVDPAURegisterVideoSurface) \
	P(cuVDPAUGetDevice)

/*
 * Class pass. Loads and links code, and tells of functions, textures and
 * surfaces. Loading copies code to the GPU but compiles first, for seconds
 * at times: a thread in such a call would hold up the release of the GPU for
 * as long.
 */
#define NVS_PASS_CODE(P) \
	P(cuFuncGetAttribute) P(cuFuncGetModule) P(cuFuncGetName) P(cuFuncGetParamCount) \
	P(cuFuncGetParamInfo) P(cuFuncIsLoaded) P(cuFuncLoad) P(cuFuncSetAttribute) \
	P(cuFuncSetBlockShape) P(cuFuncSetCacheConfig) P(cuFuncSetSharedMemConfig) \
	P(cuFuncSetSharedSize) P(cuKernelGetAttribute) P(cuKernelGetFunction) \
	P(cuKernelGetLibrary) P(cuKernelGetName) P(cuKernelGetParamCount) \
	P(cuKernelGetParamInfo) P(cuKernelSetAttribute) P(cuKernelSetCacheConfig) \
	P(cuLibraryEnumerateKernels) P(cuLibraryGetGlobal) P(cuLibraryGetKernel) \
	P(cuLibraryGetKernelCount) P(cuLibraryGetManaged) P(cuLibraryGetModule) \
	P(cuLibraryGetUnifiedFunction) P(cuLibraryLoadData) P(cuLibraryLoadFromFile) \
	P(cuLibraryUnload) P(cuLinkAddData) P(cuLinkAddData_v2) P(cuLinkAddFile) \
	P(cuLinkAddFile_v2) P(cuLinkComplete) P(cuLinkCreate) P(cuLinkCreate_v2) \
	P(cuLinkDestroy) P(cuModuleEnumerateFunctions) P(cuModuleGetFunction) \
	P(cuModuleGetFunctionCount) P(cuModuleGetGlobal) P(cuModuleGetGlobal_v2) \
	P(cuModuleGetLoadingMode) P(cuModuleGetSurfRef) P(cuModuleGetTexRef) P(cuModuleLoad) \
	P(cuModuleLoadData) P(cuModuleLoadDataEx) P(cuModuleLoadFatBinary) P(cuModuleUnload) \
	P(cuOccupancyAvailableDynamicSMemPerBlock) \
	P(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
	P(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) P(cuOccupancyMaxActiveClusters) \
	P(cuOccupancyMaxPotentialBlockSize) P(cuOccupancyMaxPotentialBlockSizeWithFlags) \
	P(cuOccupancyMaxPotentialClusterSize) P(cuParamSetSize) P(cuParamSetTexRef) \
	P(cuParamSetf) P(cuParamSeti) P(cuParamSetv) P(cuSurfObjectCreate) \
	P(cuSurfObjectDestroy) P(cuSurfObjectGetResourceDesc) P(cuSurfRefGetArray) \
	P(cuSurfRefSetArray) P(cuTensorMapEncodeIm2col) P(cuTensorMapEncodeIm2colWide) \
	P(cuTensorMapEncodeTiled) P(cuTensorMapReplaceAddress) \
	P(cuTexObjectDestroy) P(cuTexObjectGetResourceDesc) P(cuTexObjectGetResourceViewDesc) \
	P(cuTexObjectGetTextureDesc) P(cuTexRefCreate) P(cuTexRefDestroy) P(cuTexRefGetAddress) \
	P(cuTexRefGetAddressMode) P(cuTexRefGetAddress_v2) P(cuTexRefGetArray) \
	P(cuTexRefGetBorderColor) P(cuTexRefGetFilterMode) P(cuTexRefGetFlags) \
	P(cuTexRefGetFormat) P(cuTexRefGetMaxAnisotropy) P(cuTexRefGetMipmapFilterMode) \
	P(cuTexRefGetMipmapLevelBias) P(cuTexRefGetMipmapLevelClamp) \
	P(cuTexRefGetMipmappedArray) P(cuTexRefSetAddress) P(cuTexRefSetAddress2D) \
	P(cuTexRefSetAddressMode) \
	P(cuTexRefSetArray) P(cuTexRefSetBorderColor) \
	P(cuTexRefSetFilterMode) P(cuTexRefSetFlags) P(cuTexRefSetFormat) \
	P(cuTexRefSetMaxAnisotropy) P(cuTexRefSetMipmapFilterMode) P(cuTexRefSetMipmapLevelBias) \
	P(cuTexRefSetMipmapLevelClamp) P(cuTexRefSetMipmappedArray)

/*
 * Class pass. The rest. Advice on managed memory moves nothing. A
 * checkpoint, which may be of another process, is done under a lock of the
 * driver's own.
 */
#define NVS_PASS_OTHER(P) \
	P(cuCheckpointOperationComplete) P(cuCheckpointProcessCheckpoint) \
	P(cuCheckpointProcessGetRestoreThreadId) P(cuCheckpointProcessGetState) \
	P(cuCheckpointProcessLock) P(cuCheckpointProcessRestore) P(cuCheckpointProcessUnlock) \
	P(cuCoredumpDeregisterCompleteCallback) P(cuCoredumpDeregisterStartCallback) \
	P(cuCoredumpGetAttribute) P(cuCoredumpGetAttributeGlobal) \
	P(cuCoredumpRegisterCompleteCallback) P(cuCoredumpRegisterStartCallback) \
	P(cuCoredumpSetAttribute) P(cuCoredumpSetAttributeGlobal) \
	P(cuDeviceRegisterAsyncNotification) P(cuGetExportTable) P(cuLogsCurrent) \
	P(cuLogsDumpToFile) P(cuLogsDumpToMemory) P(cuLogsRegisterCallback) \
	P(cuLogsUnregisterCallback) P(cuMemAdvise) P(cuMemAdvise_v2) \
	P(cuProfilerInitialize) P(cuProfilerStart) P(cuProfilerStop)

#endif
