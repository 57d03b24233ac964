// SPDX-License-Identifier: Apache-2.0
/*
 * slice_test.c: SLICE reaches the GPU's own scheduler, and CONTROLS says whether it can.
 * The shim is inside the program, so that the test asks it what the driver's channel
 * groups have; the GPU is the simulated one, and the test is the scheduler daemon.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "cases.h"
#include "cudadrv.h"
#include "fake.h"
#include "inside.h"
#include "log.h"
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

/* ---- a driver whose controls take long ---- */

enum { NOTHING, SLICES, HELPER }; /* controls that do not return: SET_SLICE, or those of effect.c's helper */
static atomic_int slow;
static atomic_uint slowed; /* so many have come to that */
static nvs_rm_ioctl *driver_ioctl;

static bool is_slow(const struct rm_control *c)
{
	char name[16] = "";

	switch (atomic_load(&slow)) {
	case SLICES:
		return c->command == RM_SET_SLICE;
	case HELPER:
		CHECK(prctl(PR_GET_NAME, name) == 0);
		return !strcmp(name, "nvshare-effect");
	default:
		return false;
	}
}

static int slow_ioctl(int fd, unsigned long request, ...)
{
	static const struct timespec nap = { 0, 1000000 };
	const struct rm_control *c;
	va_list list;

	va_start(list, request);
	c = va_arg(list, const struct rm_control *);
	va_end(list);
	if ((uint32_t)request == RM_CONTROL && is_slow(c)) {
		atomic_fetch_add(&slowed, 1);
		while (atomic_load(&slow) != NOTHING)
			nanosleep(&nap, NULL);
	}
	return driver_ioctl(fd, request, c);
}

static void begin(void)
{
	driver_ioctl = (nvs_rm_ioctl *)dlsym(RTLD_NEXT, "ioctl");
	nvs_rm_set_next(driver_ioctl);
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(cuInit(0) == 0 && cuDeviceGetUuid_v2(&gpu, 0) == 0);
	nvs_rm_set_next(slow_ioctl); /* the driver has set its own */
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

/* ---- a driver whose controls take long ---- */

/* A program that has launched a kernel under the grant 3. From now on SET_SLICE does not return. */
static void begin_slow(void)
{
	pthread_t t;

	begin();
	fake.page->features = 0; /* so that no look at the controls sends any */
	CHECK(pthread_create(&t, NULL, launch, NULL) == 0);
	fake_attach(&fake);
	fake_expect(&fake, NVS_REQUEST);
	fake_grant(&fake, 0, 3);
	CHECK(pthread_join(t, NULL) == 0);
	atomic_store(&slow, SLICES);
}

static void a_revoke_is_heard_while_a_slice_is_set(void)
{
	struct nvs_frame r;

	begin_slow();
	send_slice(50000);
	EVENTUALLY(atomic_load(&slowed));
	fake_revoke(&fake, 0, 3);
	r = fake_expect(&fake, NVS_RELEASE);
	CHECK(r.epoch == 3);
	atomic_store(&slow, NOTHING);
	await_slice(50);
}

static void *set_by_another(void *arg)
{
	CHECK(nvs_rm_slice((const uint8_t *)&gpu, 100) == NVS_RM_OK);
	return arg;
}

/* Another thread's control takes longer than the slice's waits for it. */
static void a_slice_that_finds_the_driver_busy_is_set_later(void)
{
	char text[4096];
	size_t n = 0;
	int log[2], standard = dup(STDERR_FILENO);
	pthread_t t;

	begin_slow();
	CHECK(pipe(log) == 0 && dup2(log[1], STDERR_FILENO) >= 0);
	nvs_debug = true;
	CHECK(pthread_create(&t, NULL, set_by_another, NULL) == 0);
	EVENTUALLY(atomic_load(&slowed));
	send_slice(50000);
	do { /* until it was tried in vain */
		ssize_t got = read(log[0], text + n, sizeof(text) - 1 - n);

		CHECK(got > 0);
		n += (size_t)got;
		text[n] = '\0';
	} while (!strstr(text, "its time slice stays as it is"));
	nvs_debug = false;
	CHECK(dup2(standard, STDERR_FILENO) >= 0);
	atomic_store(&slow, NOTHING);
	CHECK(pthread_join(t, NULL) == 0);
	await_slice(50);
}

/* ---- controls ---- */

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
static uint8_t effect_seen(struct nvs_controls c, const char *version)
{
	struct nvs_frame r;
	uint64_t start;

	for (start = test_now(); c.channels == NVS_CONTROL_UNTRIED;) {
		/* The GPU was busy, or the look came late: on a slow machine many do. */
		CHECK(test_now() - start < PATIENCE_MS * 1000000ull);
		inside_look_again(0);
		fake_send(&fake, NVS_NOTICE, 0, 0, 0);
		if (fake_receive(&fake, &r, 100) && r.type == NVS_CONTROLS)
			c = r.u.controls;
	}
	CHECK(c.slices == NVS_CONTROL_WORKS && !strcmp(c.driver, version));
	return c.channels;
}

static uint8_t effect_of(const char *driver)
{
	setenv("NVSHARE_SIMGPU_VERSION", "999.1", 1);
	return effect_seen(controls_of(driver, true), "999.1");
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

/* As with libcuda where nothing says the version. */
static void a_driver_without_a_version_ignores_off(void)
{
	setenv("NVSHARE_SIMGPU_VERSION", "none", 1);
	CHECK(effect_seen(controls_of("ignored", true), "") == NVS_CONTROL_FAKED);
}

/* The look gives up after 10 s. What the helper had is free again when it ends. */
static void a_slow_helper_ends(void)
{
	struct nvs_controls c;
	uint64_t start = test_now();

	setenv("NVSHARE_SIMGPU_VERSION", "999.1", 1);
	atomic_store(&slow, HELPER);
	c = controls_of("on", true);
	CHECK(c.channels == NVS_CONTROL_UNTRIED);
	while (!atomic_load(&slowed)) {
		CHECK(test_now() - start < PATIENCE_MS * 1000000ull);
		inside_look_again(0);
		fake_send(&fake, NVS_NOTICE, 0, 0, 0);
		nap_ms(10);
	}
	EVENTUALLY(!inside_looks(0));
	atomic_store(&slow, NOTHING);
	CHECK(effect_seen(c, "999.1") == NVS_CONTROL_WORKS);
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
	CASE(a_revoke_is_heard_while_a_slice_is_set),
	CASE(a_slice_that_finds_the_driver_busy_is_set_later),
	CASE(controls_work),
	CASE(controls_of_a_part_do_not_work),
	CASE(controls_are_refused),
	CASE(controls_are_faked),
	CASE(controls_are_absent),
	CASE(channels_are_hidden),
	CASE(an_unknown_driver_works),
	CASE(an_unknown_driver_ignores_off),
	CASE(a_driver_without_a_version_ignores_off),
	CASE(a_slow_helper_ends),
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
