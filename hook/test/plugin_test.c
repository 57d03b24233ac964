// SPDX-License-Identifier: Apache-2.0
/*
 * plugin_test.c: a program that knows nothing of CUDA and loads a library that
 * does; it is linked with no driver. The shim preloaded.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fake.h"

typedef int call(void);

static bool mapped(const char *name)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[512];
	bool found = false;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		found |= strstr(line, name) != NULL;
	fclose(f);
	return found;
}

static int invoke(void *library, const char *name)
{
	call *f;

	*(void **)&f = dlsym(library, name);
	CHECK(f);
	return f();
}

static void *launch(void *library)
{
	CHECK(invoke(library, "plugin_begin") == 0); /* a context of its own */
	CHECK(invoke(library, "plugin_launch") == 0);
	return NULL;
}

static struct nvs_frame next(struct fake *f, uint8_t type)
{
	struct nvs_frame r;

	do
		CHECK(fake_receive(f, &r, PATIENCE_MS));
	while (r.type == NVS_REQUEST && type != NVS_REQUEST);
	CHECK(r.type == type);
	return r;
}

int main(void)
{
	unsigned threads = entries("/proc/self/task"), files;
	struct nvs_frame r;
	struct fake f;
	void *library, *driver;
	pthread_t t;

	alarm(600);
	fake_init(&f);
	fake_listen(&f);
	f.memory = true;
	files = entries("/proc/self/fd");
	/* Loaded, looked at, let go of: nothing happens, and nothing stays behind. */
	library = dlopen("libplugin.so", RTLD_NOW);
	CHECK(library && dlclose(library) == 0);
	driver = dlopen("libcuda.so.1", RTLD_NOW);
	CHECK(driver && dlsym(driver, "cuLaunchKernel") && dlclose(driver) == 0);
	CHECK(entries("/proc/self/task") == threads && entries("/proc/self/fd") == files);

	for (uint64_t round = 1; round <= 3; round++) {
		library = dlopen("libplugin.so", RTLD_NOW);
		CHECK(library);
		CHECK(pthread_create(&t, NULL, launch, library) == 0);
		if (round == 1) {
			fake_accept(&f);
			r = next(&f, NVS_ATTACH);
			fake_send(&f, NVS_ATTACHED, 0, 0, 0);
			if (!(r.code & NVS_ATTACH_WANT))
				next(&f, NVS_REQUEST);
		} else {
			next(&f, NVS_REQUEST);
		}
		fake_grant(&f, 0, 2 * round);
		CHECK(pthread_join(t, NULL) == 0);
		CHECK(dlclose(library) == 0);
		CHECK(!mapped("libplugin.so") && mapped("libcuda.so.1"));
		/* The drain asks the driver, which is still there. */
		fake_revoke(&f, 0, 2 * round);
		CHECK(next(&f, NVS_RELEASE).epoch == 2 * round);
	}
	/*
	 * The client thread and the GPU's drainer, whatever the number of rounds, and its preempter where the machine
	 * was so busy that a drain took long. One that was joined is seen for a moment still.
	 */
	for (int ms = 0; entries("/proc/self/task") - threads - 2 > 1; ms++) {
		CHECK(ms < PATIENCE_MS);
		usleep(1000);
	}
	puts("plugin: loaded, used and unloaded three times");
	fake_end(&f);
	return 0;
}
