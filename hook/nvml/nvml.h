// SPDX-License-Identifier: Apache-2.0
/*
 * nvml.h: the little of NVML's ABI that the shim needs. Handles are void *,
 * results are int. Also for processes that never initialise CUDA.
 */
#ifndef NVSHARE_NVML_H
#define NVSHARE_NVML_H

#include <stddef.h>

enum {
	NVML_SUCCESS                  = 0,
	NVML_ERROR_NOT_FOUND          = 6,
	NVML_ERROR_INSUFFICIENT_SIZE  = 7,
	NVML_ERROR_FUNCTION_NOT_FOUND = 13,
};

struct nvml_memory {
	unsigned long long total, free, used;
};

struct nvml_memory_v2 {
	unsigned version;
	unsigned long long total, reserved, free, used;
};

/* Each kind of list has entries of another type; a process id is in all. */
struct nvml_process_v1 {
	unsigned pid;
	unsigned long long used;
};

struct nvml_process { /* v2 and v3 */
	unsigned pid;
	unsigned long long used;
	unsigned gpu_instance, compute_instance;
};

struct nvml_process_detail {
	unsigned pid;
	unsigned long long used;
	unsigned gpu_instance, compute_instance;
	unsigned long long protected_used;
};

struct nvml_process_details {
	unsigned version, mode;
	unsigned count;
	struct nvml_process_detail *list;
};

struct nvml_sample {
	unsigned pid;
	unsigned long long time;
	unsigned sm, memory, encoder, decoder;
};

struct nvml_utilization {
	unsigned long long time;
	unsigned pid;
	unsigned sm, memory, encoder, decoder, jpeg, ofa;
};

struct nvml_utilizations {
	unsigned version;
	unsigned count;
	unsigned long long last_seen;
	struct nvml_utilization *list;
};

_Static_assert(sizeof(struct nvml_memory_v2) == 40, "nvmlMemory_v2_t");
_Static_assert(sizeof(struct nvml_process_v1) == 16, "nvmlProcessInfo_v1_t");
_Static_assert(sizeof(struct nvml_process) == 24, "nvmlProcessInfo_t");
_Static_assert(sizeof(struct nvml_process_detail) == 32, "nvmlProcessDetail_v1_t");
_Static_assert(sizeof(struct nvml_sample) == 32, "nvmlProcessUtilizationSample_t");
_Static_assert(sizeof(struct nvml_utilization) == 40, "nvmlProcessUtilizationInfo_v1_t");

#endif
