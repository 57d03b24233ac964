// SPDX-License-Identifier: Apache-2.0
#include "inside.h"

#include "gpu.h"
#include "lock.h"
#include "connection.h"
#include "stream.h"

bool inside_cut_failed(int dev)
{
	bool failed;

	nvs_lock(&nvs_client_lock);
	failed = nvs_gpu_of_device(dev)->uncut_ns != 0;
	nvs_unlock(&nvs_client_lock);
	return failed;
}

/* The drainer reads it between two looks, 100 ms at least apart. */
void inside_look_again(int dev)
{
	*(volatile unsigned *)&nvs_gpu_of_device(dev)->effect_looks = 0;
}
