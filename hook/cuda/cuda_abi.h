// SPDX-License-Identifier: Apache-2.0
/* cuda_abi.h: the rest of the CUDA driver's ABI that the wrappers need. */
#ifndef NVSHARE_CUDA_ABI_H
#define NVSHARE_CUDA_ABI_H

#include "memory_abi.h"

#define CU_GRAPH_INSTANTIATE_UPLOAD 2ull

/* Flags of cuGetProcAddress. */
#define CU_GPA_DEFAULT        0ull
#define CU_GPA_LEGACY_STREAM  1ull
#define CU_GPA_PER_THREAD     2ull

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

/* The head of CUDA_GRAPH_INSTANTIATE_PARAMS. */
struct cu_instantiate_params {
	uint64_t flags;
	void *upload_stream; /* used with CU_GRAPH_INSTANTIATE_UPLOAD alone */
};

_Static_assert(offsetof(struct cu_launch_config, stream) == 32, "CUlaunchConfig");
_Static_assert(offsetof(struct cu_launch_params, stream) == 40, "CUDA_LAUNCH_PARAMS");
_Static_assert(sizeof(struct cu_launch_params) == 56, "CUDA_LAUNCH_PARAMS");

#endif
