// SPDX-License-Identifier: Apache-2.0
/*
 * slice_test.c: SLICE reaches the GPU's own scheduler, and CONTROLS says whether it can.
 * The shim is inside the program, so that the test asks it what the driver's channel
 * groups have; the GPU is the simulated one, and the test is the scheduler daemon.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "cases.h"
#include "cudadrv.h"
#include "fake.h"
#include "inside.h"
#include "rm.h"
#include "rm_abi.h"
#include "rm_object.h"

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

static void begin(void)
{
	nvs_rm_set_next((nvs_rm_ioctl *)dlsym(RTLD_NEXT, "ioctl"));
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0 && cuDeviceGetUuid_v2(&gpu, 0) == 0);
	CHECK(fake_accept(&fake).code & NVS_REGISTER_SLICES);
	fake.page->features = NVS_FEATURE_CONTROLS;
}

static void a_slice_is_set_and_taken_back(void)
{
	CUcontext one, two;
	uint64_t own;

	begin();
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
}

/* Without a scheduler the process has what it would have without the shim. */
static void a_slice_ends_with_the_scheduler(void)
{
	CUcontext context, later;
	uint64_t own;

	begin();
	CHECK(cuCtxCreate_v2(&context, 0, 0) == 0);
	own = slice_us();
	fake_attach(&fake);
	send_slice(50000);
	await_slice(50);
	fake_die(&fake);
	await_slice(own);
	CHECK(cuCtxCreate_v2(&later, 0, 0) == 0 && cuCtxDestroy_v2(context) == 0);
	CHECK(slice_us() == own);
	/* The next scheduler may give it one again. */
	fake_listen(&fake);
	fake_accept(&fake);
	fake_attach(&fake);
	send_slice(50000);
	await_slice(50);
}

/* What a context has that is made after a slice was wanted is not the driver's own. */
static void a_slice_comes_before_the_context(void)
{
	CUcontext context;

	begin();
	CHECK(cuCtxCreate_v2(&context, 0, 0) == 0);
	fake_attach(&fake);
	CHECK(cuCtxDestroy_v2(context) == 0);
	send_slice(50000000);
	CHECK(cuCtxCreate_v2(&context, 0, 0) == 0);
	await_slice(50000);
	send_slice(200000);
	await_slice(200);
	send_slice(0);
	await_slice(2048);
}

/* Slices of which nothing is known are brought to the nearest that was measured. */
static void a_slice_is_clamped(void)
{
	CUcontext context;

	begin();
	CHECK(cuCtxCreate_v2(&context, 0, 0) == 0);
	fake_attach(&fake);
	send_slice(1);
	await_slice(50);
	send_slice(1000000000000000ull);
	await_slice(1000000);
	send_slice(UINT64_MAX);
	send_slice(200000);
	await_slice(200);
}

static void *launch(void *arg)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n";
	uint64_t ns = 1000000, record = 0;
	void *params[] = { &ns, &record };
	CUcontext context;
	CUmodule module;
	CUfunction spin;

	CHECK(cuCtxCreate_v2(&context, 0, 0) == 0 && cuModuleLoadData(&module, ptx) == 0);
	CHECK(cuModuleGetFunction(&spin, module, "nvshare_spin") == 0);
	CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL) == 0);
	CHECK(cuCtxSynchronize() == 0);
	return arg;
}

/* The next CONTROLS; a REQUEST may come before. */
static struct nvs_controls expect_controls(void)
{
	struct nvs_frame r;

	do
		CHECK(fake_receive(&fake, &r, PATIENCE_MS));
	while (r.type != NVS_CONTROLS);
	return r.u.controls;
}

/* Has a program launch a kernel, and returns what the shim says of a driver like this. */
static struct nvs_controls controls_of(const char *driver, bool knows)
{
	struct nvs_controls c = { 0 };
	struct nvs_frame r;
	pthread_t t;

	setenv("NVSHARE_SIMGPU_RM", driver, 1);
	begin();
	if (!knows)
		fake.page->features = 0;
	CHECK(pthread_create(&t, NULL, launch, NULL) == 0);
	fake_attach(&fake);
	fake_grant(&fake, 0, 3);
	if (knows)
		c = expect_controls();
	else
		while (fake_receive(&fake, &r, 1000))
			CHECK(r.type == NVS_REQUEST);
	CHECK(pthread_join(t, NULL) == 0);
	return c;
}

static void controls_work(void)
{
	struct nvs_controls c = controls_of("on", true), again;

	CHECK(c.slices == NVS_CONTROL_WORKS && c.channels == NVS_CONTROL_WORKS);
	CHECK(c.groups == 1 && c.bare == 0 && !strcmp(c.driver, "580.159.04"));
	CHECK(slice_us() != 1000); /* the slice that the proof tries is taken back */
	/* A scheduler that starts anew is told again. */
	fake_die(&fake);
	fake_listen(&fake);
	fake_accept(&fake);
	fake.page->features = NVS_FEATURE_CONTROLS;
	fake_attach(&fake);
	again = expect_controls();
	CHECK(memcmp(&c, &again, sizeof(c)) == 0);
}

/* More clients, each on a descriptor of its own, than the table has room for: some channels may be unseen. */
static void controls_of_a_part_do_not_work(void)
{
	struct nvs_controls c = controls_of("on", true);
	int fds[70];

	CHECK(c.slices == NVS_CONTROL_WORKS && c.channels == NVS_CONTROL_WORKS);
	for (int i = 0; i < 70; i++) {
		fds[i] = dup(fake.conn);
		rm_note_alloc(fds[i], 1000 + (uint32_t)i, 1000 + (uint32_t)i, 1, RM_CLASS_DEVICE, 0);
	}
	c = expect_controls();
	CHECK(c.slices == NVS_CONTROL_UNSEEN && c.channels == NVS_CONTROL_UNSEEN && c.groups == 1);
	for (int i = 0; i < 70; i++) {
		rm_note_free(1000 + (uint32_t)i, 1000 + (uint32_t)i, rm_serial());
		close(fds[i]);
	}
	c = expect_controls();
	CHECK(c.slices == NVS_CONTROL_WORKS && c.channels == NVS_CONTROL_WORKS && c.groups == 1);
}

static void controls_are_refused(void)
{
	struct nvs_controls c = controls_of("refused", true);

	CHECK(c.slices == NVS_CONTROL_REFUSED && c.channels == NVS_CONTROL_UNTRIED && c.groups == 1);
}

static void controls_are_faked(void)
{
	struct nvs_controls c = controls_of("faked", true);

	CHECK(c.slices == NVS_CONTROL_FAKED && c.channels == NVS_CONTROL_UNTRIED);
}

static void controls_are_absent(void)
{
	CHECK(controls_of("absent", true).slices == NVS_CONTROL_REFUSED);
}

static void channels_are_hidden(void)
{
	struct nvs_controls c = controls_of("hidden", true);

	CHECK(c.slices == NVS_CONTROL_UNSEEN && c.channels == NVS_CONTROL_UNSEEN && c.groups == 0);
}

/* What is said of a driver whose version nobody has seen, once its effect was looked at. */
static uint8_t effect_of(const char *driver)
{
	struct nvs_controls c;
	struct nvs_frame r;
	uint64_t start;

	setenv("NVSHARE_SIMGPU_VERSION", "999.1", 1);
	c = controls_of(driver, true);
	for (start = test_now(); c.channels == NVS_CONTROL_UNTRIED;) {
		/* The GPU was busy, or the look came late: on a slow machine many do. */
		CHECK(test_now() - start < PATIENCE_MS * 1000000ull);
		inside_look_again(0);
		fake_send(&fake, NVS_NOTICE, 0, 0, 0);
		if (fake_receive(&fake, &r, 100) && r.type == NVS_CONTROLS)
			c = r.u.controls;
	}
	CHECK(c.slices == NVS_CONTROL_WORKS && !strcmp(c.driver, "999.1"));
	return c.channels;
}

static void an_unknown_driver_works(void)
{
	struct nvs_rm_state s;

	CHECK(effect_of("on") == NVS_CONTROL_WORKS);
	CHECK(nvs_rm_state((const uint8_t *)&gpu, &s) && !s.off);
}

/* It says that the channels are off, and lets them go on. */
static void an_unknown_driver_ignores_off(void)
{
	CHECK(effect_of("ignored") == NVS_CONTROL_FAKED);
	CHECK(nvs_rm_channels((const uint8_t *)&gpu, false) == NVS_RM_FAKED);
}

static void an_older_scheduler_is_told_nothing(void)
{
	controls_of("on", false);
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(a_slice_is_set_and_taken_back),
	CASE(a_slice_ends_with_the_scheduler),
	CASE(a_slice_comes_before_the_context),
	CASE(a_slice_is_clamped),
	CASE(controls_work),
	CASE(controls_of_a_part_do_not_work),
	CASE(controls_are_refused),
	CASE(controls_are_faked),
	CASE(controls_are_absent),
	CASE(channels_are_hidden),
	CASE(an_unknown_driver_works),
	CASE(an_unknown_driver_ignores_off),
	CASE(an_older_scheduler_is_told_nothing),
#undef CASE
};

int main(int argc, char **argv)
{
	int result = run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);

	if (argc >= 2 && result == 0)
		fake_end(&fake);
	return result;
}
