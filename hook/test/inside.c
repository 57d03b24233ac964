// SPDX-License-Identifier: Apache-2.0
#include "inside.h"

#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "gpu.h"
#include "lock.h"
#include "connection.h"
#include "controls.h"
#include "stream.h"

void inside_move(int dev, const void *uuid)
{
	nvs_lock(&nvs_client_lock);
	memcpy(nvs_gpu_of_device(dev)->device.uuid, uuid, NVS_UUID_SIZE);
	nvs_unlock(&nvs_client_lock);
}

bool inside_cut_failed(int dev)
{
	bool failed;

	nvs_lock(&nvs_client_lock);
	failed = nvs_gpu_of_device(dev)->preempt.uncut_ns != 0;
	nvs_unlock(&nvs_client_lock);
	return failed;
}

bool inside_unbound(int dev)
{
	return atomic_load(&nvs_gpu_of_device(dev)->unbound);
}

bool inside_cuts_soon(int dev)
{
	bool soon;

	nvs_lock(&nvs_client_lock);
	soon = nvs_gpu_of_device(dev)->preempt.long_drains > 1;
	nvs_unlock(&nvs_client_lock);
	return soon;
}

bool inside_synchronises(int dev)
{
	return atomic_load(&nvs_gpu_of_device(dev)->synchronised) != NULL;
}

void inside_look_again(int dev)
{
	struct nvs_gpu *gpu = nvs_gpu_of_device(dev);

	/* The drainer's own. Where it counts one just now, another call makes up for this one. */
	*(volatile unsigned *)&gpu->effect.looks = 0;
	nvs_lock(&nvs_client_lock);
	gpu->slice.look_ns = 0;
	nvs_unlock(&nvs_client_lock);
}

bool inside_looks(int dev)
{
	struct nvs_lock *l = &nvs_gpu_of_device(dev)->drain_lock;

	if (!nvs_trylock(l))
		return true;
	nvs_unlock(l);
	return false;
}

static struct nvs_gpu *held; /* until an event has waited */
static __typeof__(nvs_driver.event_record) record;

static int record_when_on(void *event, void *stream)
{
	if (held && nvs_channels_are(held, false)) {
		while (nvs_channels_are(held, false))
			usleep(1000);
		usleep(20000); /* and who has put them on has said so */
		held = NULL;
	}
	return record(event, stream);
}

void inside_hold_record(int dev)
{
	held = nvs_gpu_of_device(dev);
	record = nvs_driver.event_record;
	nvs_driver.event_record = record_when_on;
}

bool inside_held_record(void) { return !held; }
