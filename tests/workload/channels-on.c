// SPDX-License-Identifier: Apache-2.0
/*
 * channels-on: a hostile tenant. It runs one long kernel after the other, and puts the
 * channels on again that the shim takes off, all the time. The layer hook/rm is inside: it
 * sees the channels before the shim does, and sends its controls past the shim's state.
 *
 * usage: channels-on KERNEL_MS
 */
#include "spin.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "rm_raw.h"

static CUuuid gpu;

static void *put_on(void *unused)
{
	struct nvs_rm_state state;

	nvs_rm_state((const uint8_t *)&gpu, &state); /* finds out which GPU the channels are of */
	for (;;) {
		send_to_all((const uint8_t *)&gpu, true);
		usleep(500);
	}
	return unused;
}

int main(int argc, char **argv)
{
	uint64_t ns = argc == 2 ? strtoull(argv[1], NULL, 10) * 1000000 : 0, record = 0;
	void *params[] = { &ns, &record };
	CUfunction spin;
	CUmodule module;
	CUcontext ctx;
	CUdevice dev;
	pthread_t t;

	if (!ns) {
		fprintf(stderr, "usage: channels-on KERNEL_MS\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	nvs_rm_set_next((nvs_rm_ioctl *)dlsym(RTLD_NEXT, "ioctl"));
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDeviceGetUuid_v2(&gpu, dev));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuModuleLoadData(&module, ptx));
	CHECK(cuModuleGetFunction(&spin, module, "nvshare_spin"));
	errno = pthread_create(&t, NULL, put_on, NULL);
	if (errno) {
		perror("channels-on: pthread_create");
		return 1;
	}
	printf("ready\n");
	for (;;) {
		CHECK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL));
		CHECK(cuStreamSynchronize(NULL));
	}
}
