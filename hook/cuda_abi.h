// SPDX-License-Identifier: Apache-2.0
/*
 * cuda_abi.h: the little of the CUDA driver's ABI that the shim needs.
 *
 * No CUDA header is needed to build. Handles are void *, results are int.
 * A driver function of the pre-3.2 API (no suffix, 32-bit device pointers) is
 * declared like its 64-bit successor: both pass one register, and what we do
 * not look at goes through unchanged.
 */
#ifndef NVSHARE_CUDA_ABI_H
#define NVSHARE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned long long CUdeviceptr;
typedef unsigned int uint;

enum {
	CUDA_SUCCESS         = 0,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
};

/* Stream handles with a meaning of their own. */
#define CU_STREAM_LEGACY     ((void *)0x1)
#define CU_STREAM_PER_THREAD ((void *)0x2)

#define CU_EVENT_DISABLE_TIMING 2u

#define CU_STREAM_CAPTURE_MODE_RELAXED 2

#define CU_MEM_LOCATION_TYPE_DEVICE 1

/* Flags of cuGetProcAddress. */
#define CU_GPA_DEFAULT        0ull
#define CU_GPA_LEGACY_STREAM  1ull
#define CU_GPA_PER_THREAD     2ull

struct cu_location {
	int type;
	int id;
};

/* The head of CUmemAllocationProp. */
struct cu_alloc_prop {
	int type;
	int handle_types;
	struct cu_location location;
};

/* CUlaunchConfig. */
struct cu_launch_config {
	uint grid[3];
	uint block[3];
	uint shared_bytes;
	void *stream;
	void *attrs;
	uint num_attrs;
};

/* CUDA_LAUNCH_PARAMS of cuLaunchCooperativeKernelMultiDevice. */
struct cu_launch_params {
	void *function;
	uint grid[3];
	uint block[3];
	uint shared_bytes;
	void *stream;
	void **params;
};

_Static_assert(offsetof(struct cu_launch_config, stream) == 32, "CUlaunchConfig");
_Static_assert(offsetof(struct cu_launch_params, stream) == 40, "CUDA_LAUNCH_PARAMS");
_Static_assert(sizeof(struct cu_launch_params) == 56, "CUDA_LAUNCH_PARAMS");

/*
 * Driver functions that the shim calls for itself and does not interpose.
 * D(member, "export", parameters)
 */
#define NVS_DRIVER_TABLE(D) \
	D(ctx_get_current,   "cuCtxGetCurrent",        (void **ctx)) \
	D(ctx_get_device,    "cuCtxGetDevice",         (int *dev)) \
	D(ctx_push,          "cuCtxPushCurrent_v2",    (void *ctx)) \
	D(ctx_pop,           "cuCtxPopCurrent_v2",     (void **ctx)) \
	D(ctx_synchronize,   "cuCtxSynchronize",       (void)) \
	D(device_count,      "cuDeviceGetCount",       (int *count)) \
	D(device_get,        "cuDeviceGet",            (int *dev, int ordinal)) \
	D(device_uuid,       "cuDeviceGetUuid",        (void *uuid, int dev)) \
	D(device_uuid_v2,    "cuDeviceGetUuid_v2",     (void *uuid, int dev)) \
	D(device_total_mem,  "cuDeviceTotalMem_v2",    (size_t *bytes, int dev)) \
	D(primary_state,     "cuDevicePrimaryCtxGetState", (int dev, uint *flags, int *active)) \
	D(driver_version,    "cuDriverGetVersion",     (int *version)) \
	D(event_create,      "cuEventCreate",          (void **event, uint flags)) \
	D(event_destroy,     "cuEventDestroy_v2",      (void *event)) \
	D(event_record,      "cuEventRecord",          (void *event, void *stream)) \
	D(event_query,       "cuEventQuery",           (void *event)) \
	D(stream_get_ctx,    "cuStreamGetCtx",         (void *stream, void **ctx)) \
	D(stream_get_device, "cuStreamGetDevice",      (void *stream, int *dev)) \
	D(stream_capturing,  "cuStreamIsCapturing",    (void *stream, int *status)) \
	D(stream_query,      "cuStreamQuery",          (void *stream)) \
	D(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))

/* Members are NULL where the driver does not have the function. */
struct nvs_driver {
#define D(member, name, params) int (*member) params;
	NVS_DRIVER_TABLE(D)
#undef D
};

#endif
