// SPDX-License-Identifier: Apache-2.0
/*
 * nvml.h: the little of NVML's ABI that the shim needs. Handles are void *,
 * results are int. Also for processes that never initialise CUDA.
 */
#ifndef NVSHARE_NVML_H
#define NVSHARE_NVML_H

enum {
	NVML_SUCCESS                  = 0,
	NVML_ERROR_FUNCTION_NOT_FOUND = 13,
};

struct nvml_memory {
	unsigned long long total, free, used;
};

struct nvml_memory_v2 {
	unsigned version;
	unsigned long long total, reserved, free, used;
};

_Static_assert(sizeof(struct nvml_memory_v2) == 40, "nvmlMemory_v2_t");

#endif
