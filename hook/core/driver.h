// SPDX-License-Identifier: Apache-2.0
/*
 * driver.h: the driver functions that the shim calls for itself, past its own wrappers; cuda/ finds
 * them. No CUDA header is needed: handles are void *, results are int.
 */
#ifndef NVSHARE_DRIVER_H
#define NVSHARE_DRIVER_H

#include <stdbool.h>
#include <stdint.h>

#include "lock.h"
#include "suspended_flag.h"

typedef unsigned long long CUdeviceptr;
typedef unsigned int uint;

enum {
	CUDA_SUCCESS         = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
};

/* Stream handles with a meaning of their own. */
#define CU_STREAM_LEGACY     ((void *)0x1)
#define CU_STREAM_PER_THREAD ((void *)0x2)

/* The stream that a handle means: 0 is the legacy default stream, or the thread's own. */
#define NVS_KEY_LEGACY(s) ((s) ? (void *)(s) : CU_STREAM_LEGACY)
#define NVS_KEY_THREAD(s) ((s) ? (void *)(s) : CU_STREAM_PER_THREAD)

#define CU_STREAM_NON_BLOCKING          1u
#define CU_STREAM_CAPTURE_MODE_RELAXED  2
#define CU_EVENT_BLOCKING_SYNC          1u
#define CU_EVENT_DISABLE_TIMING         2u

/* D(member, export without its cu, parameters): what core calls; memory_driver.h has the rest. */
#define NVS_DRIVER_TABLE(D) \
	D(ctx_get_current, CtxGetCurrent, (void **ctx)) \
	D(ctx_get_device, CtxGetDevice, (int *dev)) \
	D(ctx_push, CtxPushCurrent_v2, (void *ctx)) \
	D(ctx_pop, CtxPopCurrent_v2, (void **ctx)) \
	D(ctx_synchronize, CtxSynchronize, (void)) \
	D(device_uuid, DeviceGetUuid, (void *uuid, int dev)) \
	D(device_uuid_v2, DeviceGetUuid_v2, (void *uuid, int dev)) \
	D(event_create, EventCreate, (void **event, uint flags)) \
	D(event_destroy, EventDestroy_v2, (void *event)) \
	D(event_record, EventRecord, (void *event, void *stream)) \
	D(event_query, EventQuery, (void *event)) \
	D(stream_create, StreamCreate, (void **stream, uint flags)) \
	D(stream_destroy, StreamDestroy_v2, (void *stream)) \
	D(stream_get_ctx, StreamGetCtx, (void *stream, void **ctx)) \
	D(stream_get_device, StreamGetDevice, (void *stream, int *dev)) \
	D(stream_capturing, StreamIsCapturing, (void *stream, int *status)) \
	D(stream_query, StreamQuery, (void *stream)) \
	D(stream_synchronize, StreamSynchronize, (void *stream)) \
	D(exchange_capture_mode, ThreadExchangeStreamCaptureMode, (int *mode))

struct nvs_driver_table {
#define D(member, export, params) int (*member) params;
	NVS_DRIVER_TABLE(D)
#undef D
};

/* What a member is while the driver is not found, and where it lacks the function: CUDA_ERROR_NOT_FOUND. */
int nvs_driver_lacks(void);

/* Whether this thread is the shim's own, not the application's. */
extern __thread bool nvs_of_shim __attribute__((tls_model("initial-exec")));

/* The code calls it nvs_driver. */
extern struct nvs_driver_table nvs_driver_functions;

/* A call for a thread of the application brings the process back first; see suspended.h. */
static inline void nvs_driver_called(void)
{
	nvs_lock_check_driver();
	if (nvs_is_suspended() && !nvs_of_shim)
		nvs_suspended_wait();
}
#define nvs_driver (*(nvs_driver_called(), &nvs_driver_functions))

/* What the driver says is the UUID of a device; false: it does not say. No lock is held. */
bool nvs_device_uuid(int dev, uint8_t *uuid);

/* No driver calls of our own from now on; waits up to a second for the last. */
void nvs_driver_stop(void);
bool nvs_driver_stopped(void);

/* Waits until no thread is in such a bracket, or until then. False: one is. */
bool nvs_driver_wait_idle(uint64_t end_ns);

/*
 * Brackets driver calls that the shim makes for itself. False: the process ends, or is checkpointed,
 * and the shim's own threads call the driver no more. Application threads are still let through.
 */
bool nvs_driver_enter(void);
void nvs_driver_leave(void);

void nvs_driver_fork_child(void);

#endif
