// SPDX-License-Identifier: Apache-2.0
/*
 * slice_test.c: SLICE reaches the GPU's own scheduler. The shim is inside the program,
 * so that the test asks it what the driver's channel groups have; the GPU is the
 * simulated one, and the test is the scheduler daemon.
 */
#include <dlfcn.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "cudadrv.h"
#include "fake.h"
#include "rm.h"

static struct fake fake;
static CUuuid gpu;

static uint64_t slice_us(void)
{
	uint64_t us = 0;

	CHECK(nvs_rm_get_slice((const uint8_t *)&gpu, &us) == NVS_RM_OK);
	return us;
}

static void await_slice(uint64_t us)
{
	static const struct timespec nap = { 0, 1000000 };

	for (int i = 0; i < PATIENCE_MS && slice_us() != us; i++)
		nanosleep(&nap, NULL);
	CHECK(slice_us() == us);
}

static void send_slice(uint64_t ns)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_SLICE, .u.slice.slice_ns = ns };

	CHECK(send(fake.conn, &f, sizeof(f), MSG_NOSIGNAL) == sizeof(f));
}

/* The one case of simulated.sh. */
int main(int argc, char **argv)
{
	CUcontext one, two;
	uint64_t own;

	(void)argv;
	if (argc < 2) {
		puts("a_slice_is_set_and_taken_back");
		return 0;
	}
	nvs_rm_set_next((nvs_rm_ioctl *)dlsym(RTLD_NEXT, "ioctl"));
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0 && cuDeviceGetUuid_v2(&gpu, 0) == 0);
	CHECK(fake_accept(&fake).code & NVS_REGISTER_SLICES);
	CHECK(cuCtxCreate_v2(&one, 0, 0) == 0);
	own = slice_us();
	CHECK(own != 50 && own != 200);
	fake_attach(&fake);
	send_slice(50000);
	await_slice(50);
	/* A context that is made later has it too: it is the only one now. */
	CHECK(cuCtxCreate_v2(&two, 0, 0) == 0 && cuCtxDestroy_v2(one) == 0);
	CHECK(slice_us() == 50);
	send_slice(200000);
	await_slice(200);
	send_slice(0);
	await_slice(own);
	/* A scheduler that starts anew knows nothing of the slice that the old one gave. */
	send_slice(50000);
	await_slice(50);
	fake_die(&fake);
	fake_listen(&fake);
	fake_accept(&fake);
	fake_attach(&fake);
	await_slice(own);
	fake_end(&fake);
	return 0;
}
