// SPDX-License-Identifier: Apache-2.0
/*
 * pointer_abi.h: the attributes of a pointer (CUpointer_attribute), and how many bytes the driver
 * writes of each: four of a boolean, eight of the mask ALLOWED_HANDLE_TYPES (H100, driver
 * 580.159.04). tests/workload/pointers.c sees what a driver writes. The simulated GPU has this table
 * too.
 */
#ifndef NVSHARE_POINTER_ABI_H
#define NVSHARE_POINTER_ABI_H

/* A(name, number, bytes) */
#define NVS_POINTER_ATTRIBUTES(A) \
	A(CONTEXT, 1, 8) \
	A(MEMORY_TYPE, 2, 4) \
	A(DEVICE_POINTER, 3, 8) \
	A(HOST_POINTER, 4, 8) \
	A(P2P_TOKENS, 5, 12) \
	A(SYNC_MEMOPS, 6, 4) \
	A(BUFFER_ID, 7, 8) \
	A(IS_MANAGED, 8, 4) \
	A(DEVICE_ORDINAL, 9, 4) \
	A(IS_LEGACY_CUDA_IPC_CAPABLE, 10, 4) \
	A(RANGE_START_ADDR, 11, 8) \
	A(RANGE_SIZE, 12, 8) \
	A(MAPPED, 13, 4) \
	A(ALLOWED_HANDLE_TYPES, 14, 8) \
	A(IS_GPU_DIRECT_RDMA_CAPABLE, 15, 4) \
	A(ACCESS_FLAGS, 16, 4) \
	A(MEMPOOL_HANDLE, 17, 8) \
	A(MAPPING_SIZE, 18, 8) \
	A(MAPPING_BASE_ADDR, 19, 8) \
	A(MEMORY_BLOCK_ID, 20, 8) \
	A(IS_HW_DECOMPRESS_CAPABLE, 21, 4)

enum {
#define A(name, number, bytes) NVS_POINTER_##name = number,
	NVS_POINTER_ATTRIBUTES(A)
#undef A
};

/* The bytes that the driver writes. 0: the attribute is not known here. */
static inline unsigned nvs_pointer_bytes(int attribute)
{
	switch (attribute) {
#define A(name, number, bytes) \
	case number: \
		return bytes;
	NVS_POINTER_ATTRIBUTES(A)
#undef A
	}
	return 0;
}

#endif
