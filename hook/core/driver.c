// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <stdatomic.h>

#include "clock.h"
#include "futex.h"

int nvs_driver_lacks(void)
{
	return CUDA_ERROR_NOT_FOUND;
}

struct nvs_driver_table nvs_driver_functions = {
#define D(member, export, params) .member = (void *)nvs_driver_lacks,
	NVS_DRIVER_TABLE(D)
#undef D
};

__thread bool nvs_of_shim __attribute__((tls_model("initial-exec")));

static atomic_bool stopped;
static atomic_int in_driver;

bool nvs_driver_enter(void)
{
	atomic_fetch_add(&in_driver, 1);
	if (!nvs_of_shim || !(atomic_load(&stopped) || atomic_load(&nvs_suspended)))
		return true;
	atomic_fetch_sub(&in_driver, 1);
	return false;
}

void nvs_driver_leave(void)
{
	atomic_fetch_sub(&in_driver, 1);
}

bool nvs_driver_wait_idle(uint64_t end_ns)
{
	return NVS_NAP_UNTIL(!atomic_load(&in_driver), end_ns, NVS_MS);
}

bool nvs_driver_stopped(void) { return atomic_load(&stopped); }

void nvs_driver_stop(void)
{
	atomic_store(&stopped, true);
	nvs_driver_wait_idle(nvs_now() + NVS_S);
}

void nvs_driver_fork_child(void)
{
	atomic_store(&in_driver, 0);
	atomic_store(&stopped, false);
}

bool nvs_device_uuid(int dev, uint8_t *uuid)
{
	/* v2 tells the instance of a partitioned GPU. */
	return nvs_driver.device_uuid_v2(uuid, dev) == CUDA_SUCCESS ||
	       nvs_driver.device_uuid(uuid, dev) == CUDA_SUCCESS;
}
