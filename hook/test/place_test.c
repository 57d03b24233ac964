// SPDX-License-Identifier: Apache-2.0
/*
 * place_test.c: a container that may move. What a program sees by CUDA_VISIBLE_DEVICES when
 * the driver's cuInit reads it.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "life.h"

#define FIRST  "GPU-51600000-0000-4000-8000-000000000000"
#define SECOND "GPU-51600000-0000-4000-8000-00000000ab01"
#define GPU    "CUDA_VISIBLE_DEVICES"

static const uint8_t first[NVS_UUID_SIZE] = { 0x51, 0x60, 0, 0, 0, 0, 0x40, 0, 0x80 };
static const uint8_t second[NVS_UUID_SIZE] = { 0x51, 0x60, 0, 0, 0, 0, 0x40, 0, 0x80, [14] = 0xab, [15] = 0x01 };

static void *init_main(void *arg)
{
	(void)arg;
	errno = 77;
	CHECK(cuInit(0) == 0 && errno == 77);
	return NULL;
}

/* The scheduler says where the container is that asks about a GPU, and hears of the process as usual. */
static void answers_of(const uint8_t *asked, const uint8_t *place)
{
	struct nvs_frame f, said = { .version = NVS_WIRE_VERSION, .type = NVS_ATTACHED };
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, init_main, NULL) == 0);
	fake_accept(&fake);
	f = fake_expect(&fake, NVS_ATTACH);
	CHECK(f.code == (NVS_ATTACH_OBSERVE | NVS_ATTACH_PLACE));
	CHECK(memcmp(f.u.attach.uuid, asked, NVS_UUID_SIZE) == 0);
	memcpy(said.u.attached.uuid, place, NVS_UUID_SIZE);
	CHECK(fake_send_fds(&fake, said, 0));
	fake_accept(&fake);
	CHECK(pthread_join(thread, NULL) == 0);
}

static void answers(const uint8_t *place)
{
	answers_of(first, place);
}

static void container(const char *sees)
{
	fake_init(&fake);
	fake_listen(&fake);
	CHECK(setenv("NVSHARE_GPU", "any", 1) == 0 && setenv(GPU, sees, 1) == 0);
}

static void has_moved(void)
{
	container(FIRST);
	answers(second);
	CHECK(strcmp(getenv(GPU), SECOND) == 0);
	init_main(NULL); /* once more: nobody is asked */
}

static void is_where_it_began(void)
{
	container(FIRST);
	answers(first);
	CHECK(strcmp(getenv(GPU), FIRST) == 0);
}

/* An older scheduler says nothing of it, nor does one that does not know the container. */
static void scheduler_does_not_know(void)
{
	static const uint8_t unknown[NVS_UUID_SIZE];

	container(FIRST);
	answers(unknown);
	CHECK(strcmp(getenv(GPU), FIRST) == 0);
}

static void constant_environment(void)
{
	static const char constant[] = GPU "=" FIRST;

	container(FIRST);
	CHECK(putenv((char *)(uintptr_t)constant) == 0);
	answers(second);
	CHECK(strcmp(getenv(GPU), FIRST) == 0); /* it cannot be changed, and the program goes on */
}

/* What the program has chosen itself is left as it is. */
static void another_choice(void)
{
	static const char *const choices[] = { "0", FIRST ",1", "GPU-51600000", "", SECOND "0" };

	container(FIRST);
	for (unsigned i = 0; i < sizeof(choices) / sizeof(choices[0]); i++) {
		int status, ends[2];
		char done;
		pid_t pid;

		CHECK(setenv(GPU, choices[i], 1) == 0 && pipe(ends) == 0);
		pid = fork();
		if (pid == 0) {
			CHECK(cuInit(0) == 0 && strcmp(getenv(GPU), choices[i]) == 0);
			CHECK(write(ends[1], "x", 1) == 1);
			pause();
		}
		CHECK(fake_accept(&fake).u.reg.interposed > 0); /* nobody asked before */
		CHECK(read(ends[0], &done, 1) == 1);
		CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
	}
}

/* podman exec, ssh and env -i start programs without the container's environment. */
static void without_environment(const uint8_t *place)
{
	static const uint8_t none[NVS_UUID_SIZE];

	container(FIRST);
	CHECK(unsetenv("NVSHARE_GPU") == 0 && unsetenv(GPU) == 0 && unsetenv("LD_PRELOAD") == 0);
	answers_of(none, place);
}

static void started_without_environment(void)
{
	without_environment(second);
	CHECK(strcmp(getenv(GPU), SECOND) == 0 && strcmp(getenv("NVSHARE_GPU"), "any") == 0);
	CHECK(setenv("OTHER", "1", 1) == 0 && strcmp(getenv(GPU), SECOND) == 0 && getenv("PATH"));
}

static void without_environment_and_does_not_move(void)
{
	static const uint8_t unknown[NVS_UUID_SIZE];

	without_environment(unknown);
	CHECK(!getenv(GPU) && !getenv("NVSHARE_GPU"));
}

static void no_scheduler(void)
{
	container(FIRST);
	fake_end(&fake);
	init_main(NULL);
	CHECK(strcmp(getenv(GPU), FIRST) == 0);
}

static const struct life_case cases[] = {
#define CASE(name) { #name, name }
	CASE(has_moved),
	CASE(is_where_it_began),
	CASE(scheduler_does_not_know),
	CASE(constant_environment),
	CASE(another_choice),
	CASE(started_without_environment),
	CASE(without_environment_and_does_not_move),
	CASE(no_scheduler),
};

int main(int argc, char **argv)
{
	return life_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
