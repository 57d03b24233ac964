// SPDX-License-Identifier: Apache-2.0
/*
 * driver.h: the driver functions that the shim calls for itself.
 *
 * cuda/ finds them in the driver and fills the table, past the shim's own
 * wrappers. The layers below call the table and need no CUDA header: handles
 * are void *, results are int, and structures are named only.
 */
#ifndef NVSHARE_DRIVER_H
#define NVSHARE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "away_flag.h"
#include "lock.h"

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

struct cu_access;
struct cu_alloc_node;
struct cu_alloc_prop;
struct cu_array_requirements;
struct cu_kernel_node;
struct cu_memcpy3d;
struct cu_memset_node;
struct cu_mem_op_node;

/* D(member, parameters). cuda/exports.h says which export of the driver it is. */
#define NVS_DRIVER_TABLE(D) \
	D(ctx_from_green, (void **ctx, void *green)) \
	D(ctx_get_current, (void **ctx)) \
	D(ctx_get_device, (int *dev)) \
	D(ctx_push, (void *ctx)) \
	D(ctx_pop, (void **ctx)) \
	D(ctx_synchronize, (void)) \
	D(device_count, (int *count)) \
	D(device_get, (int *dev, int ordinal)) \
	D(device_uuid, (void *uuid, int dev)) \
	D(device_uuid_v2, (void *uuid, int dev)) \
	D(device_total_mem, (size_t *bytes, int dev)) \
	D(primary_state, (int dev, uint *flags, int *active)) \
	D(array_requirements, (struct cu_array_requirements *r, void *array, int dev)) \
	D(mipmap_requirements, (struct cu_array_requirements *r, void *array, int dev)) \
	D(graph_memory, (int dev, int what, void *value)) \
	D(driver_version, (int *version)) \
	D(event_create, (void **event, uint flags)) \
	D(event_destroy, (void *event)) \
	D(event_record, (void *event, void *stream)) \
	D(event_query, (void *event)) \
	D(stream_get_ctx, (void *stream, void **ctx)) \
	D(stream_get_device, (void *stream, int *dev)) \
	D(stream_capturing, (void *stream, int *status)) \
	D(stream_query, (void *stream)) \
	D(device_attribute, (int *value, int what, int dev)) \
	D(address_reserve, \
		(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags)) \
	D(set_access, (CUdeviceptr p, size_t n, const struct cu_access *a, size_t count)) \
	D(can_access_peer, (int *can, int dev, int peer)) \
	D(device_mem_pool, (void **pool, int dev)) \
	D(address_free, (CUdeviceptr p, size_t n)) \
	D(mem_export, (void *out, unsigned long long handle, int type, unsigned long long flags)) \
	D(host_register, (void *p, size_t n, uint flags)) \
	D(host_unregister, (void *p)) \
	D(event_synchronize, (void *event)) \
	D(stream_synchronize, (void *stream)) \
	D(exchange_capture_mode, (int *mode)) \
	D(mem_create, \
		(unsigned long long *handle, size_t n, const struct cu_alloc_prop *p, unsigned long long flags)) \
	D(mem_release, (unsigned long long handle)) \
	D(mem_map, \
		(CUdeviceptr p, size_t n, size_t offset, unsigned long long handle, unsigned long long flags)) \
	D(mem_unmap, (CUdeviceptr p, size_t n)) \
	D(mem_import, (unsigned long long *handle, void *os, int type)) \
	D(pool_get_attribute, (void *pool, int attribute, void *value)) \
	D(pool_trim, (void *pool, size_t keep)) \
	D(stream_create, (void **stream, uint flags)) \
	D(stream_destroy, (void *stream)) \
	D(pointer_attribute, (void *data, int what, CUdeviceptr p)) \
	D(graph_nodes, (void *graph, void **nodes, size_t *n)) \
	D(graph_node_type, (void *node, int *type)) \
	D(graph_kernel, (void *node, struct cu_kernel_node *p)) \
	D(graph_copy, (void *node, struct cu_memcpy3d *p)) \
	D(graph_set, (void *node, struct cu_memset_node *p)) \
	D(graph_mem_ops, (void *node, struct cu_mem_op_node *p)) \
	D(graph_child, (void *node, void **graph)) \
	D(graph_alloc, (void *node, struct cu_alloc_node *p)) \
	D(graph_free, (void *node, CUdeviceptr *p)) \
	D(copy_on_device, (CUdeviceptr d, CUdeviceptr s, size_t n, void *stream)) \
	D(copy_to_device, (CUdeviceptr d, const void *h, size_t n, void *stream)) \
	D(copy_to_host, (void *h, CUdeviceptr d, size_t n, void *stream))

/* Members are NULL where the driver does not have the function. */
struct nvs_driver_table {
#define D(member, params) int (*member) params;
	NVS_DRIVER_TABLE(D)
#undef D
};

/* Whether this thread is the shim's own, not the application's. */
extern __thread bool nvs_of_shim __attribute__((tls_model("initial-exec")));

/* Valid once nvs_resolve() returned true. The code calls it nvs_driver. */
extern struct nvs_driver_table nvs_driver_functions;

/* Whether the driver has a function; allowed under any lock. */
#define nvs_driver_has(member) (nvs_driver_functions.member != NULL)

/* Who calls for a thread of the application brings the process back first; see away.h. */
static inline struct nvs_driver_table *nvs_driver_now(void)
{
	nvs_lock_check_driver();
	if (nvs_is_away() && !nvs_of_shim)
		nvs_away_wait();
	return &nvs_driver_functions;
}
#define nvs_driver (*nvs_driver_now())

/* No driver calls of our own from now on; waits up to a second for the last. */
void nvs_driver_stop(void);
bool nvs_driver_stopped(void);

/* Waits until no thread is in such a bracket, or until then. False: one is. */
bool nvs_driver_wait_idle(uint64_t end_ns);

/*
 * Brackets driver calls that the shim makes for itself. False: the process ends, or is
 * checkpointed (away.h), and the shim's own threads call the driver no more. An application's thread still may:
 * the application calls the driver with it.
 */
bool nvs_driver_enter(void);
void nvs_driver_leave(void);

void nvs_driver_fork_child(void);

#endif
