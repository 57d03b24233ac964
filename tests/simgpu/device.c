// SPDX-License-Identifier: Apache-2.0
/* device.c: what the driver says about a GPU. */
#include "driver.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

CUresult cuDeviceGet(CUdevice *dev, int ordinal)
{
	ENTER();
	NEED(dev);
	DEVICE(ordinal);
	*dev = ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
	ENTER();
	NEED(count);
	*count = dev_count();
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice dev)
{
	ENTER();
	NEED(name && len > 0);
	DEVICE(dev);
	snprintf(name, (size_t)len, "NVIDIA SimGPU");
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	ENTER();
	NEED(uuid);
	DEVICE(dev);
	sim_uuid_raw(sim_at(dev_gpu(dev)), (unsigned char *)uuid->bytes);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	return cuDeviceGetUuid_v2(uuid, dev);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	ENTER();
	NEED(bytes);
	DEVICE(dev);
	*bytes = sim_memory();
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice dev)
{
	ENTER();
	NEED(id && len > 0);
	DEVICE(dev);
	snprintf(id, (size_t)len, "0000:%02X:00.0", dev_gpu(dev) + 1);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *id)
{
	ENTER();
	NEED(dev && id);
	for (int i = 0; i < dev_count(); i++) {
		char text[32];

		snprintf(text, sizeof text, "0000:%02X:00.0", dev_gpu(i) + 1);
		if (!strcasecmp(text, id)) {
			*dev = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
	ENTER();
	NEED(major && minor);
	DEVICE(dev);
	*major = 9;
	*minor = 0;
	return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer)
{
	ENTER();
	NEED(can);
	DEVICE(dev);
	DEVICE(peer);
	*can = dev != peer;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *v, int attribute, CUdevice dev)
{
	/* by the driver's numbers; an attribute not listed reads 0: not supported */
	static const struct { int attribute, value; } known[] = {
		{ 1, 1024 }, { 2, 1024 }, { 3, 1024 }, { 4, 64 }, /* block */
		{ 5, 2147483647 }, { 6, 65535 }, { 7, 65535 }, /* grid */
		{ 8, 49152 }, { 9, 65536 }, { 10, 32 }, { 11, 2147483647 }, { 12, 65536 },
		{ 13, 1500000 }, { 14, 512 }, { 15, 1 }, { 16, 16 }, { 19, 1 },
		{ 31, 1 }, { 36, 2600000 }, { 37, 5120 }, { 38, 50 << 20 }, { 39, 2048 },
		{ 40, 2 }, { 41, 1 }, { 75, 9 }, { 76, 0 }, { 78, 1 }, { 79, 1 }, { 80, 1 },
		{ 81, 233472 }, { 82, 65536 }, { 83, 1 }, { 89, 1 }, { 90, 1 }, { 91, 1 },
		{ 95, 1 }, { 97, 232448 }, { 99, 1 }, { 102, 1 }, { 103, 1 }, { 106, 32 }, { 110, 1 }, { 115, 1 },
	};

	ENTER();
	NEED(v);
	DEVICE(dev);
	*v = 0;
	if (attribute == 33)
		*v = dev_gpu(dev) + 1; /* PCI bus */
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (known[i].attribute == attribute)
			*v = known[i].value;
	return CUDA_SUCCESS;
}
