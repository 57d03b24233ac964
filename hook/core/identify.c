// SPDX-License-Identifier: Apache-2.0
#include "identify.h"

#include <string.h>

#include "connection.h"
#include "driver.h"
#include "gpu.h"
#include "log.h"
#include "rm.h"

bool nvs_device_uuid(int dev, uint8_t *uuid)
{
	/* v2 tells the instance of a partitioned GPU. */
	return nvs_driver.device_uuid_v2(uuid, dev) == CUDA_SUCCESS ||
	       nvs_driver.device_uuid(uuid, dev) == CUDA_SUCCESS;
}

bool nvs_gpus_identify(void)
{
	uint8_t uuid[NVS_UUID_SIZE];

	NVS_FOR_EACH_GPU(gpu) {
		bool known;

		if (!nvs_driver_enter())
			return !nvs_driver_stopped();
		known = nvs_device_uuid(gpu->device.dev, uuid);
		nvs_driver_leave();
		if (!known || memcmp(uuid, gpu->device.uuid, sizeof(uuid)) == 0)
			continue;
		nvs_debugf("GPU %u: the process is on another GPU now", gpu->number);
		nvs_rm_moved();
		nvs_lock(&nvs_client_lock);
		memcpy(gpu->device.uuid, uuid, sizeof(uuid));
		nvs_unlock(&nvs_client_lock);
	}
	return true;
}
