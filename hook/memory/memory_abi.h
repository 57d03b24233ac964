// SPDX-License-Identifier: Apache-2.0
/* memory_abi.h: structures of the driver's ABI about memory. Handles are void *, results are int. */
#ifndef NVSHARE_MEMORY_ABI_H
#define NVSHARE_MEMORY_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "driver.h"

#define CU_MEM_LOCATION_TYPE_DEVICE 1

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

/* CUmemAllocationProp. */
struct cu_alloc_full {
	struct cu_alloc_prop head;
	void *win32;
	unsigned char compression, rdma;
	unsigned short usage;
	unsigned char reserved[4];
};

/* CUmemAccessDesc. */
struct cu_access {
	struct cu_location location;
	int flags;
};

#define CU_MEM_ALLOCATION_PINNED   1
#define CU_MEM_HANDLE_POSIX_FD     1
#define CU_MEM_ACCESS_NONE         0
#define CU_MEM_ACCESS_READ         1
#define CU_MEM_ACCESS_READWRITE    3
#define CU_ATTRIBUTE_VMM           102 /* CU_DEVICE_ATTRIBUTE_... */
#define CU_ATTRIBUTE_VMM_POSIX_FD  103
#define CU_ATTRIBUTE_VMM_RDMA      110
#define CU_HOST_REGISTER_PORTABLE  1u
#define CU_HOST_ALLOC_MAPPED       2u
#define CU_MEM_ATTACH_GLOBAL       1u

/* CUmemPoolProps. */
struct cu_pool_props {
	int type;
	int handle_types;
	struct cu_location location;
	void *security;
	size_t max_size;
	unsigned short usage;
	unsigned char reserved[54];
};

/* CUmemPool_attribute; the first three are int, those that follow 64 bits or int again. */
enum {
	CU_POOL_RELEASE_THRESHOLD = 4,
	CU_POOL_RESERVED_CURRENT, CU_POOL_RESERVED_HIGH, CU_POOL_USED_CURRENT, CU_POOL_USED_HIGH,
};

/* CUDA_MEM_ALLOC_NODE_PARAMS. */
struct cu_alloc_node {
	struct cu_pool_props props;
	const void *access;
	size_t access_count;
	size_t bytes;
	CUdeviceptr p;
};

/* CUstreamBatchMemOpParams, a union. The address is the first word, of an atomic (13.1) the second. */
struct cu_mem_op {
	uint type;
	uint flags; /* or nothing */
	uint64_t word[5];
};

enum { /* CU_STREAM_MEM_OP_... */
	CU_MEM_OP_WAIT_32 = 1, CU_MEM_OP_WRITE_32, CU_MEM_OP_FLUSH, CU_MEM_OP_WAIT_64,
	CU_MEM_OP_WRITE_64, CU_MEM_OP_BARRIER,
};

/* The driver takes no more in a batch. */
#define CU_MEM_OPS_MAX 256u

/* CUDA_BATCH_MEM_OP_NODE_PARAMS. */
struct cu_mem_op_node {
	void *ctx;
	uint count;
	const struct cu_mem_op *ops;
	uint flags;
};

/* CUDA_MEMCPY3D. */
struct cu_memcpy3d {
	size_t src_at[4];   /* byte, row, slice, level */
	uint src_type;
	const void *src_host;
	CUdeviceptr src;
	void *src_array, *src_context;
	size_t src_pitch, src_height;
	size_t dst_at[4];
	uint dst_type;
	void *dst_host;
	CUdeviceptr dst;
	void *dst_array, *dst_context;
	size_t dst_pitch, dst_height;
	size_t width, height, depth;
};

/* CUDA_MEMSET_NODE_PARAMS. */
struct cu_memset_node {
	CUdeviceptr dst;
	size_t pitch;
	uint value, element;
	size_t width, height;
	void *ctx; /* in the second version */
};

/* CUDA_KERNEL_NODE_PARAMS_v2. */
struct cu_kernel_node {
	void *function;
	uint grid[3], block[3], shared_bytes;
	void **params, **extra;
	void *kernel, *ctx;
};

/* CUDA_MEMCPY_NODE_PARAMS. */
struct cu_memcpy_node {
	int flags, reserved;
	void *ctx;
	struct cu_memcpy3d params;
};

#define CU_MEMORY_TYPE_DEVICE 2u

/* The head of CUDA_RESOURCE_DESC, as far as memory that moves may be named there. */
struct cu_resource {
	int type;
	CUdeviceptr address;
};

#define CU_RESOURCE_TYPE_LINEAR  2
#define CU_RESOURCE_TYPE_PITCH2D 3

#define CU_GRAPH_NODE_TYPE_KERNEL    0
#define CU_GRAPH_NODE_TYPE_MEMCPY    1
#define CU_GRAPH_NODE_TYPE_MEMSET    2
#define CU_GRAPH_NODE_TYPE_GRAPH     4
#define CU_GRAPH_NODE_TYPE_MEM_ALLOC 10
#define CU_GRAPH_NODE_TYPE_MEM_FREE  11
#define CU_GRAPH_NODE_TYPE_MEM_OPS   12

/* The head of CUgraphNodeParams. */
struct cu_node_params {
	int type;
	int reserved[3];
	union {
		struct cu_alloc_node alloc;
		struct cu_mem_op_node mem_ops;
		struct cu_memcpy_node copy;
		struct cu_memset_node set;
		long long size[29];
	} u;
};

/* CUipcMemHandle. */
struct cu_ipc_handle {
	char reserved[64];
};

/* CU_GRAPH_MEM_ATTR_..._MEM_CURRENT */
#define CU_GRAPH_MEM_USED     0
#define CU_GRAPH_MEM_RESERVED 2

/* CUDA_ARRAY_DESCRIPTOR and CUDA_ARRAY3D_DESCRIPTOR. */
struct cu_array {
	size_t width, height;
	uint format, channels;
};
struct cu_array3d {
	size_t width, height, depth;
	uint format, channels, flags;
};

#define CU_ARRAY3D_SPARSE           0x40u
#define CU_ARRAY3D_DEFERRED_MAPPING 0x80u

/* CUDA_ARRAY_MEMORY_REQUIREMENTS. */
struct cu_array_requirements {
	size_t size;
	size_t alignment;
	uint reserved[4];
};

_Static_assert(sizeof(struct cu_alloc_full) == 32, "CUmemAllocationProp");
_Static_assert(sizeof(struct cu_access) == 12, "CUmemAccessDesc");
_Static_assert(sizeof(struct cu_pool_props) == 88, "CUmemPoolProps");
_Static_assert(offsetof(struct cu_alloc_node, bytes) == 104, "CUDA_MEM_ALLOC_NODE_PARAMS");
_Static_assert(sizeof(struct cu_mem_op) == 48, "CUstreamBatchMemOpParams");
_Static_assert(sizeof(struct cu_mem_op_node) == 32, "CUDA_BATCH_MEM_OP_NODE_PARAMS");
_Static_assert(offsetof(struct cu_node_params, u) == 16, "CUgraphNodeParams");
_Static_assert(sizeof(struct cu_memcpy3d) == 200, "CUDA_MEMCPY3D");
_Static_assert(offsetof(struct cu_memcpy3d, src) == 48, "CUDA_MEMCPY3D");
_Static_assert(offsetof(struct cu_memcpy3d, dst) == 136, "CUDA_MEMCPY3D");
_Static_assert(sizeof(struct cu_kernel_node) == 72, "CUDA_KERNEL_NODE_PARAMS_v2");
_Static_assert(sizeof(struct cu_memset_node) == 48, "CUDA_MEMSET_NODE_PARAMS_v2");
_Static_assert(offsetof(struct cu_resource, address) == 8, "CUDA_RESOURCE_DESC");
_Static_assert(sizeof(struct cu_array3d) == 40, "CUDA_ARRAY3D_DESCRIPTOR");

#endif
