// SPDX-License-Identifier: Apache-2.0
#include "slice.h"

#include "connection.h"
#include "log.h"

void nvs_slice_want(struct nvs_gpu *gpu, uint64_t slice_ns)
{
	if (gpu->slice_ns == slice_ns)
		return;
	gpu->slice_ns = slice_ns;
	gpu->slice_due = true;
}

void nvs_slices_apply(void)
{
	NVS_FOR_EACH_GPU(gpu) {
		uint64_t slice_ns;
		bool due;

		nvs_lock(&nvs_client_lock);
		due = gpu->slice_due;
		slice_ns = gpu->slice_ns;
		gpu->slice_due = false;
		nvs_unlock(&nvs_client_lock);
		if (due && !nvs_slice_ops.set(gpu, slice_ns))
			nvs_debugf("GPU %u: its time slice stays as it is", gpu->number);
	}
}
