// SPDX-License-Identifier: Apache-2.0
/*
 * rm_test.c: the layer `rm` before an RM of our own: what it notes, what it
 * sends, and what it does when the RM refuses, fakes, or is gone.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rm.h"
#include "rm_abi.h"

#define CHECK(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
			_exit(1); \
		} \
	} while (0)

#define FIRST_SLICE 2048

/* ---- an RM ---- */

enum { MAX = 12000 };

static struct fake {
	uint32_t client, handle, parent, class, engine;
	uint64_t slice;
	unsigned off; /* how often it was taken off, less how often put on: the driver counts */
	bool live;
} objects[MAX];
static unsigned used;
static pthread_mutex_t rm_mutex = PTHREAD_MUTEX_INITIALIZER;

static bool refuses_slices, fakes_slices, has_no_uuid;
static unsigned moved_by; /* the device n is GPU n + moved_by */
static int refuses_channels_after = -1; /* so many calls succeed */
static unsigned refuses_on;             /* so many calls that put channels on */
static unsigned channel_calls, largest_call, copy_channels_named;
static atomic_uint live_off;   /* channels that are off now */
static unsigned off_at_free;   /* how many were, when an object was freed */
static unsigned unknown_named; /* a control named what is not there */
static atomic_uint *shared_off; /* the same as live_off, seen by the parent process */

static struct fake *find(uint32_t client, uint32_t handle)
{
	for (unsigned i = 0; i < used; i++)
		if (objects[i].live && objects[i].client == client && objects[i].handle == handle)
			return &objects[i];
	return NULL;
}

static void set_off(struct fake *c, bool off)
{
	unsigned before = c->off;

	if (!off && !before)
		return;
	c->off = off ? before + 1 : before - 1;
	if (c->off && before)
		return;
	atomic_fetch_add(&live_off, off ? 1u : -1u);
	if (shared_off)
		atomic_store(shared_off, atomic_load(&live_off));
}

static void fake_free(struct fake *o)
{
	o->live = false;
	while (o->off)
		set_off(o, false);
	for (unsigned i = 0; i < used; i++)
		if (objects[i].live && objects[i].client == o->client && objects[i].parent == o->handle)
			fake_free(&objects[i]);
}

/* Subdevice 0x..5 of device n is GPU n, until the process is moved. */
static uint8_t *uuid_of(unsigned gpu)
{
	static uint8_t u[4][NVS_RM_UUID];

	memset(u[gpu], (int)(0xa0 + gpu), NVS_RM_UUID);
	return u[gpu];
}

static uint32_t channels(const struct rm_channels *c)
{
	channel_calls++;
	if (c->count > largest_call)
		largest_call = c->count;
	if (refuses_channels_after >= 0 && c->disable && refuses_channels_after-- == 0)
		return RM_NOT_PERMITTED;
	if (!c->disable && refuses_on && refuses_on--)
		return RM_NOT_PERMITTED;
	for (unsigned i = 0; i < c->count; i++) {
		struct fake *o = find(c->client[i], c->channel[i]), *group = o ? find(o->client, o->parent) : NULL;

		if (!o || !group) {
			unknown_named++;
			return RM_NO_OBJECT;
		}
		copy_channels_named += group->engine != 1;
		set_off(o, c->disable);
	}
	return c->only_scheduling || c->event || c->rewind ? RM_NOT_SUPPORTED : 0;
}

static uint32_t control(struct rm_control *c)
{
	struct fake *o = find(c->client, c->object);
	void *params = (void *)(uintptr_t)c->params;

	if (!o)
		return RM_NO_OBJECT;
	switch (c->command) {
	case RM_GET_UUID:
		if (has_no_uuid || o->class != RM_CLASS_SUBDEVICE || c->params_size != sizeof(struct rm_uuid))
			return RM_NOT_SUPPORTED;
		((struct rm_uuid *)params)->length = NVS_RM_UUID;
		memcpy(((struct rm_uuid *)params)->data, uuid_of(((o->parent >> 8) + moved_by) & 3), NVS_RM_UUID);
		return 0;
	case RM_GET_SLICE:
		((struct rm_slice *)params)->us = o->slice;
		return o->class == RM_CLASS_GROUP && c->params_size == 8 ? 0 : RM_NOT_SUPPORTED;
	case RM_SET_SLICE:
		if (refuses_slices)
			return RM_NOT_PERMITTED;
		if (!fakes_slices)
			o->slice = ((struct rm_slice *)params)->us;
		return 0;
	case RM_CHANNELS:
		return o->class == RM_CLASS_SUBDEVICE && c->params_size == 536 ? channels(params) : RM_NOT_SUPPORTED;
	}
	return RM_NOT_SUPPORTED;
}

static uint32_t alloc(const struct rm_alloc *a)
{
	struct fake *o = objects;

	while (o < objects + used && o->live)
		o++;
	if (find(a->client, a->object) || o == objects + MAX)
		return 0x34;
	used += o == objects + used;
	*o = (struct fake){ a->client, a->object, a->parent, a->class, 0, FIRST_SLICE, 0, true };
	if (a->class == RM_CLASS_GROUP)
		o->engine = ((struct rm_group_params *)(uintptr_t)a->params)->engine;
	return 0;
}

static void (*during_channels)(void); /* called once, while the control is under way */

/* What comes after the shim. */
static int fake_ioctl(int fd, unsigned long request, ...)
{
	struct fake *o;
	va_list list;
	void *arg;

	(void)fd;
	va_start(list, request);
	arg = va_arg(list, void *);
	va_end(list);
	if ((uintptr_t)arg < 4096) {
		errno = EFAULT;
		return -1;
	}
	if (request == RM_CONTROL && ((struct rm_control *)arg)->command == RM_CHANNELS && during_channels) {
		void (*fn)(void) = during_channels;

		during_channels = NULL;
		fn();
	}
	pthread_mutex_lock(&rm_mutex);
	switch (request) {
	case RM_ALLOC:
		((struct rm_alloc *)arg)->status = alloc(arg);
		break;
	case RM_ALLOC_RIGHTS:
		((struct rm_alloc_rights *)arg)->status = alloc(arg);
		break;
	case RM_FREE: {
		struct rm_free *f = arg;

		off_at_free += atomic_load(&live_off);
		f->status = 0;
		if (f->client == f->object) {
			for (unsigned i = 0; i < used; i++)
				if (objects[i].live && objects[i].client == f->client)
					fake_free(&objects[i]);
		} else if ((o = find(f->client, f->object))) {
			fake_free(o);
		} else {
			f->status = 0; /* lose_one */
		}
		break;
	}
	case RM_CONTROL:
		((struct rm_control *)arg)->status = control(arg);
		break;
	case RM_VERSION:
		strcpy(((struct rm_version *)arg)->text, "580.159.04");
		break;
	default:
		pthread_mutex_unlock(&rm_mutex);
		errno = ENOTTY;
		return -1;
	}
	pthread_mutex_unlock(&rm_mutex);
	return 0;
}

/* ---- a driver that uses it ---- */

static int fd;

static void make(uint32_t client, uint32_t parent, uint32_t handle, uint32_t class, uint32_t engine)
{
	struct rm_group_params p = { .engine = engine };
	struct rm_alloc a = { client, parent, handle, class, (uintptr_t)&p, sizeof(p), 0 };

	CHECK(ioctl(fd, RM_ALLOC, &a) == 0 && a.status == 0);
}

static void make_rights(uint32_t client, uint32_t parent, uint32_t handle, uint32_t class, uint32_t engine)
{
	struct rm_group_params p = { .engine = engine };
	struct rm_alloc_rights a = { client, parent, handle, class, (uintptr_t)&p, 0, sizeof(p), 0, 0 };

	CHECK(ioctl(fd, RM_ALLOC_RIGHTS, &a) == 0 && a.status == 0);
}

static void release(uint32_t client, uint32_t handle)
{
	struct rm_free f = { client, 0, handle, 0 };

	CHECK(ioctl(fd, RM_FREE, &f) == 0 && f.status == 0);
}

#define DEVICE(gpu)   (0x1000u + ((gpu) << 8))
#define SUB(gpu)      (DEVICE(gpu) + 5)
#define GROUP(gpu, i) (0x20000u + ((gpu) << 12) + ((uint32_t)(i) << 8))

static void make_device(uint32_t client, uint32_t gpu)
{
	make(client, client, DEVICE(gpu), RM_CLASS_DEVICE, 0);
	make_rights(client, DEVICE(gpu), SUB(gpu), RM_CLASS_SUBDEVICE, 0);
}

/* A compute group, if i is even, with n channels. */
static void make_group(uint32_t client, uint32_t gpu, uint32_t i, unsigned n)
{
	uint32_t group = GROUP(gpu, i);

	if (i % 4)
		make(client, DEVICE(gpu), group, RM_CLASS_GROUP, i % 2 ? 9 : 1);
	else
		make_rights(client, DEVICE(gpu), group, RM_CLASS_GROUP, 1);
	for (unsigned c = 1; c <= n; c++)
		make(client, group, group + c, i % 2 ? 0xc96f : 0xc86f, 0);
}

/* Each case is a process of its own. */
static void start(void)
{
	fd = memfd_create("nvidiactl", 0);
	CHECK(fd >= 0);
	nvs_rm_set_next(fake_ioctl);
}

static struct nvs_rm_state state(unsigned gpu)
{
	struct nvs_rm_state s;

	nvs_rm_state(uuid_of(gpu), &s);
	return s;
}

#define ON(gpu)  nvs_rm_channels(uuid_of(gpu), true)
#define OFF(gpu) nvs_rm_channels(uuid_of(gpu), false)

/* ---- cases ---- */

static void foreign_requests_pass(void)
{
	int pipes[2], n = 0;

	CHECK(pipe(pipes) == 0 && write(pipes[1], "abc", 3) == 3);
	CHECK(ioctl(pipes[0], FIONREAD, &n) == 0 && n == 3); /* nobody comes after us: the kernel */
	CHECK(ioctl(-1, FIONREAD, &n) == -1 && errno == EBADF);
	start();
	CHECK(ioctl(pipes[0], FIONREAD, &n) == -1 && errno == ENOTTY); /* who comes after us was asked */
	CHECK(ioctl(fd, _IOWR('F', 0x46, int), &n) == -1 && errno == ENOTTY);
	CHECK(ioctl(fd, RM_ALLOC, (void *)8) == -1 && errno == EFAULT);
	CHECK(ioctl(fd, RM_FREE, NULL) == -1 && errno == EFAULT);
	CHECK(!state(0).compute_groups);
}

static void objects_are_counted(void)
{
	struct rm_version v = { 0 };
	struct rm_group_params compute = { .engine = 1 };
	struct rm_alloc twice = { 1, DEVICE(0), GROUP(0, 0), RM_CLASS_GROUP, (uintptr_t)&compute, sizeof(compute), 0 };
	struct nvs_rm_state s;

	start();
	CHECK(!nvs_rm_state(uuid_of(0), &s) && !s.driver[0]);
	CHECK(ioctl(fd, RM_VERSION, &v) == 0);
	make_device(1, 0);
	make_device(1, 1);
	make_group(1, 0, 0, 8);
	CHECK(ioctl(fd, RM_ALLOC, &twice) == 0 && twice.status); /* refused: not noted */
	make_group(1, 0, 1, 2);
	make_group(1, 0, 2, 8); /* a second context */
	make_group(1, 1, 0, 3);
	make(1, DEVICE(0), 77, 0xc86f, 0); /* without a group */
	make(1, DEVICE(0), 78, 0x9067, 0); /* something else */
	CHECK(nvs_rm_state(uuid_of(0), &s));
	CHECK(s.compute_groups == 2 && s.other_groups == 1 && s.channels == 16 && s.other_channels == 2);
	CHECK(s.bare_channels == 1 && !s.overflow && !s.off && !strcmp(s.driver, "580.159.04"));
	CHECK(s.slice == NVS_RM_UNTRIED && s.off_on == NVS_RM_UNTRIED);
	CHECK(nvs_rm_state(uuid_of(1), &s) && s.compute_groups == 1 && s.channels == 3);
	CHECK(!nvs_rm_state(uuid_of(2), &s));
	/* nothing was sent but what the names of the GPUs took */
	CHECK(channel_calls == 0 && find(1, GROUP(0, 0))->slice == FIRST_SLICE);
}

static void slices_are_set_and_read_back(void)
{
	uint64_t us;

	start();
	CHECK(nvs_rm_slice(uuid_of(0), 500) == NVS_RM_UNSEEN);
	make_device(1, 0);
	make_device(1, 1);
	make_group(1, 0, 0, 1);
	make_group(1, 0, 1, 1);
	make_group(1, 1, 0, 1);
	CHECK(nvs_rm_get_slice(uuid_of(0), &us) == NVS_RM_OK && us == 500); /* it was wanted before */
	CHECK(nvs_rm_slice(uuid_of(0), 50) == NVS_RM_OK);
	CHECK(find(1, GROUP(0, 0))->slice == 50 && find(1, GROUP(0, 1))->slice == FIRST_SLICE);
	CHECK(find(1, GROUP(1, 0))->slice == FIRST_SLICE);
	make_group(1, 0, 2, 1); /* a new context gets it too */
	CHECK(find(1, GROUP(0, 2))->slice == 50);
	CHECK(nvs_rm_slice(uuid_of(0), 0) == NVS_RM_OK);
	make_group(1, 0, 4, 1);
	CHECK(find(1, GROUP(0, 4))->slice == FIRST_SLICE && find(1, GROUP(0, 2))->slice == 50);
	CHECK(state(0).slice == NVS_RM_OK && state(0).slice_us == 50);
	CHECK(nvs_rm_prove(uuid_of(0)) == NVS_RM_OK && find(1, GROUP(0, 0))->slice == 50);
}

static void a_driver_that_refuses_or_fakes_is_found_out(void)
{
	start();
	CHECK(nvs_rm_prove(uuid_of(0)) == NVS_RM_UNSEEN);
	make_device(1, 0);
	make_group(1, 0, 0, 100);
	fakes_slices = true;
	CHECK(nvs_rm_slice(uuid_of(0), 50) == NVS_RM_FAKED);
	CHECK(nvs_rm_prove(uuid_of(0)) == NVS_RM_FAKED && state(0).slice == NVS_RM_FAKED);
	refuses_slices = true;
	CHECK(nvs_rm_slice(uuid_of(0), 50) == NVS_RM_REFUSED);
	CHECK(state(0).slice == NVS_RM_REFUSED && state(0).status == RM_NOT_PERMITTED);
	refuses_channels_after = 1; /* the second 64 */
	CHECK(OFF(0) == NVS_RM_REFUSED);
	CHECK(atomic_load(&live_off) == 0 && !state(0).off && state(0).off_on == NVS_RM_REFUSED);
	CHECK(nvs_rm_text(state(0).off_on)[0] && nvs_rm_text(99)[0]);
}

static void channels_go_off_and_on(void)
{
	start();
	CHECK(OFF(0) == NVS_RM_UNSEEN && !state(0).off);
	make_device(1, 0);
	make_device(1, 1);
	for (unsigned i = 0; i < 12; i++)
		make_group(1, 0, i, 30);
	make_group(1, 1, 0, 8);
	CHECK(OFF(0) == NVS_RM_OK);
	CHECK(atomic_load(&live_off) == 180 && channel_calls == 3 && largest_call == 64 && copy_channels_named == 0);
	CHECK(state(0).off && !state(1).off);
	CHECK(OFF(1) == NVS_RM_OK && atomic_load(&live_off) == 188);
	CHECK(ON(0) == NVS_RM_OK && atomic_load(&live_off) == 8 && !state(0).off);
	CHECK(ON(0) == NVS_RM_OK && ON(1) == NVS_RM_OK && atomic_load(&live_off) == 0);
}

/* More than one look at the table has room for. */
static void many_channels_go_off_and_on(void)
{
	start();
	make_device(1, 0);
	for (unsigned i = 0; i < 300; i++)
		make_group(1, 0, 2 * i, 8);
	CHECK(state(0).channels == 2400 && !state(0).overflow);
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 2400);
	CHECK(ON(0) == NVS_RM_OK && atomic_load(&live_off) == 0);
}

static void make_another(void)
{
	make_group(1, 0, 2, 8);
}

static void make_third(void)
{
	make_group(1, 0, 4, 8);
}

/* It is gone, and the shim is not told yet. */
static void lose_one(void)
{
	fake_free(find(1, GROUP(0, 2) + 1));
}

/* Objects that come or go while a control is under way: it is done again. */
static void objects_change_meanwhile(void)
{
	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	during_channels = make_another;
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 16);
	CHECK(ON(0) == NVS_RM_OK && atomic_load(&live_off) == 0);
	/* The driver counts how often a channel was taken off, so nothing is sent twice. */
	CHECK(OFF(0) == NVS_RM_OK && OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 16);
	during_channels = make_third;
	CHECK(ON(0) == NVS_RM_OK && ON(0) == NVS_RM_OK && atomic_load(&live_off) == 0);
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 24);
	during_channels = lose_one; /* the control that names it fails */
	CHECK(ON(0) == NVS_RM_OK && atomic_load(&live_off) == 0);
	CHECK(OFF(0) == NVS_RM_REFUSED && atomic_load(&live_off) == 0); /* the table still names it */
	release(1, GROUP(0, 2) + 1);
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 23);
}

static void a_driver_opened_twice(void)
{
	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	make_device(2, 0); /* the same handles, another client, another descriptor */
	fd = memfd_create("second", 0);
	make_group(2, 0, 0, 8);
	CHECK(state(0).compute_groups == 2);
	CHECK(nvs_rm_slice(uuid_of(0), 70) == NVS_RM_OK);
	CHECK(find(1, GROUP(0, 0))->slice == 70 && find(2, GROUP(0, 0))->slice == 70);
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 16 && ON(0) == NVS_RM_OK);
	release(2, 2);
	CHECK(state(0).compute_groups == 1 && state(0).channels == 8);
}

static void what_is_freed_is_forgotten_with_all_below(void)
{
	start();
	make_device(1, 0);
	for (unsigned i = 0; i < 4; i++)
		make_group(1, 0, i, 8);
	release(1, GROUP(0, 0) + 3);
	CHECK(state(0).channels == 15);
	release(1, GROUP(0, 0));
	CHECK(state(0).channels == 8 && state(0).compute_groups == 1);
	make_group(1, 0, 0, 8); /* the handles again */
	CHECK(state(0).channels == 16);
	release(1, DEVICE(0));
	CHECK(!state(0).compute_groups && !state(0).bare_channels);
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	release(1, 1);
	CHECK(!state(0).compute_groups);
	CHECK(OFF(0) == NVS_RM_UNSEEN && unknown_named == 0);
}

/* Contexts end only with their channels on: the driver waits for the GPU then. */
static void channels_are_on_when_objects_are_freed(void)
{
	int other;

	start();
	make_device(1, 0);
	make_device(1, 1);
	make_group(1, 0, 0, 8);
	make_group(1, 1, 0, 8);
	make_group(1, 0, 2, 8);
	CHECK(OFF(0) == NVS_RM_OK && OFF(1) == NVS_RM_OK);
	release(1, 0x999); /* memory, say: no channel is below it */
	CHECK(state(0).off && state(1).off && off_at_free == 24);
	off_at_free = 0;
	release(1, GROUP(0, 2) + 1);
	CHECK(off_at_free == 8 && atomic_load(&live_off) == 8 && !state(0).off && state(1).off);
	CHECK(OFF(0) == NVS_RM_OK);
	off_at_free = 0;
	release(1, GROUP(0, 2));
	CHECK(off_at_free == 8 && !state(0).off && state(1).off);
	CHECK(OFF(0) == NVS_RM_OK);
	CHECK(ioctl(fd, RM_FREE, (void *)8) == -1 && errno == EFAULT); /* of what, is not known */
	CHECK(!state(0).off && !state(1).off);
	CHECK(OFF(0) == NVS_RM_OK && OFF(1) == NVS_RM_OK);
	off_at_free = 0;
	release(1, DEVICE(1));
	CHECK(off_at_free == 8 && state(0).off);
	off_at_free = 0;
	release(1, 1);
	CHECK(off_at_free == 0 && !state(0).compute_groups);
	make_device(2, 0);
	make_group(2, 0, 0, 8);
	CHECK(OFF(0) == NVS_RM_OK);
	other = memfd_create("other", 0); /* not the driver's */
	CHECK(ioctl(other, RM_FREE, &(struct rm_free){ 9, 9, 9, 0 }) == 0 && state(0).off);
}

static void who_waits_for_the_gpu_keeps_channels_on(void)
{
	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(OFF(0) == NVS_RM_OK);
	nvs_rm_keep_on(uuid_of(0));
	CHECK(atomic_load(&live_off) == 0 && state(0).keepers == 1);
	nvs_rm_keep_on(uuid_of(0));
	CHECK(OFF(0) == NVS_RM_BUSY);
	nvs_rm_let_go(uuid_of(0));
	CHECK(OFF(0) == NVS_RM_BUSY && atomic_load(&live_off) == 0);
	nvs_rm_let_go(uuid_of(0));
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 8);
	nvs_rm_let_go(uuid_of(0)); /* one too many */
	CHECK(state(0).keepers == 0);
}

/* The driver refuses to put channels on: who looks, or needs them on, tries again. */
static void what_stays_off_is_put_on_again(void)
{
	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(OFF(0) == NVS_RM_OK);
	refuses_on = 9 + 9; /* all at once, and each: twice */
	CHECK(ON(0) == NVS_RM_REFUSED && atomic_load(&live_off) == 8);
	CHECK(state(0).off && state(0).off_on == NVS_RM_REFUSED);
	CHECK(!state(0).off && atomic_load(&live_off) == 0);
	CHECK(OFF(0) == NVS_RM_OK && state(0).off); /* what is wanted off stays off */
	refuses_on = 9 + 9;
	nvs_rm_keep_on(uuid_of(0));
	CHECK(!state(0).off && atomic_load(&live_off) == 0);
	nvs_rm_let_go(uuid_of(0));
	refuses_on = 9 + 3; /* the second time some go on */
	CHECK(nvs_rm_prove_channels(uuid_of(0)) == NVS_RM_REFUSED && atomic_load(&live_off) == 8);
	CHECK(state(0).off && atomic_load(&live_off) == 2);
	CHECK(!state(0).off && atomic_load(&live_off) == 0);
	make_group(1, 0, 2, 100);
	refuses_channels_after = 1; /* off fails at the second 64, and so does what mends that */
	refuses_on = 1 + 64 + 1 + 64;
	CHECK(OFF(0) == NVS_RM_REFUSED && atomic_load(&live_off) == 64);
	CHECK(!state(0).off && atomic_load(&live_off) == 0);
	CHECK(state(0).off_on == NVS_RM_REFUSED); /* that they went on says nothing of off */
}

static void what_never_goes_on_ends_the_wait(void)
{
	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(OFF(0) == NVS_RM_OK);
	refuses_on = 1000000;
	nvs_rm_keep_on(uuid_of(0));
	CHECK(state(0).off && atomic_load(&live_off) == 8);
	refuses_on = 0;
	CHECK(!state(0).off && atomic_load(&live_off) == 0);
	nvs_rm_let_go(uuid_of(0));
	/* Nobody needs them on any more: they stay off, as they were before. */
	CHECK(OFF(0) == NVS_RM_OK);
	refuses_on = 1000000;
	nvs_rm_keep_on(uuid_of(0));
	nvs_rm_let_go(uuid_of(0));
	refuses_on = 0;
	CHECK(state(0).off && atomic_load(&live_off) == 8);
	CHECK(ON(0) == NVS_RM_OK && atomic_load(&live_off) == 0);
	/* Nobody can reach them any more: nobody tries. */
	CHECK(OFF(0) == NVS_RM_OK);
	close(fd);
	CHECK(ON(0) == NVS_RM_LOST && !state(0).off);
}

static void a_closed_descriptor_is_not_used(void)
{
	uint64_t us;
	int was;

	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(nvs_rm_get_slice(uuid_of(0), &us) == NVS_RM_OK);
	was = fd;
	close(fd);
	CHECK(nvs_rm_slice(uuid_of(0), 50) == NVS_RM_LOST && OFF(0) == NVS_RM_LOST && !state(0).off);
	CHECK(memfd_create("reused", 0) == was);
	CHECK(OFF(0) == NVS_RM_LOST && channel_calls == 0);
}

static void a_gpu_without_a_name_is_not_asked_again(void)
{
	start();
	has_no_uuid = true;
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(OFF(0) == NVS_RM_UNSEEN && nvs_rm_slice(uuid_of(0), 50) == NVS_RM_UNSEEN);
	has_no_uuid = false;
	CHECK(OFF(0) == NVS_RM_UNSEEN);
}

static void after_a_move_the_gpus_are_asked_anew(void)
{
	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(nvs_rm_prove(uuid_of(0)) == NVS_RM_OK);
	moved_by = 2;
	nvs_rm_moved();
	CHECK(nvs_rm_prove(uuid_of(2)) == NVS_RM_OK && nvs_rm_prove_channels(uuid_of(2)) == NVS_RM_OK);
	CHECK(nvs_rm_prove(uuid_of(0)) == NVS_RM_UNSEEN && state(2).channels == 8);
}

/* From here on 20 s of processor time are the most: some tenth of a second where it is quick, minutes where it is not. */
static void quick(void)
{
	struct rlimit most = { 20, 20 };

	CHECK(setrlimit(RLIMIT_CPU, &most) == 0);
}

/*
 * The application has closed the driver's descriptor, by which the kernel frees all that was made
 * through it, and the driver begins anew with the same handles.
 */
static void handles_are_used_again(void)
{
	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(OFF(0) == NVS_RM_OK && ON(0) == NVS_RM_OK);
	for (unsigned i = 0; i < used; i++)
		objects[i].live = false;
	quick();
	make_device(1, 0);
	make_group(1, 0, 0, 6);
	CHECK(state(0).compute_groups == 1 && state(0).channels == 6);
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 6 && ON(0) == NVS_RM_OK);
	CHECK(unknown_named == 0);
}

static int succeeds(int on, unsigned long request, ...)
{
	(void)on;
	(void)request;
	return 0;
}

static void a_full_table_says_so(void)
{
	start();
	make_device(1, 0);
	for (unsigned i = 0; i < 9000; i++)
		make(1, GROUP(0, 0), 0x100000 + i, 0xc86f, 0);
	CHECK(state(0).overflow);
	release(1, 1);
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(state(0).channels == 8 && !state(0).overflow && OFF(0) == NVS_RM_OK);
}

/* Each cudaFree of a block frees an object of another class: that looks through the table once. */
static void what_was_never_noted_is_freed_at_once(void)
{
	start();
	make_device(1, 0);
	for (unsigned i = 0; i < 8000; i++)
		make(1, GROUP(0, 0), 0x100000 + i, 0xc86f, 0);
	nvs_rm_set_next(succeeds);
	quick();
	for (unsigned i = 0; i < 1000; i++)
		release(1, 0x900000 + i);
	CHECK(state(0).bare_channels == 8000);
}

/* NVML is opened and closed many times, each time with another descriptor. */
static void descriptors_come_and_go(void)
{
	int home;

	start();
	home = fd;
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	for (int i = 0; i < 70; i++) {
		fd = dup2(home, 200 + i);
		make_device(100 + (uint32_t)i, 0);
		release(100 + (uint32_t)i, 100 + (uint32_t)i);
		close(fd);
	}
	fd = home;
	make_group(1, 0, 2, 8); /* a second context */
	fd = dup2(home, 500);   /* and one of a second copy of the driver */
	make_device(7, 0);
	make_group(7, 0, 0, 8);
	CHECK(state(0).compute_groups == 3 && state(0).bare_channels == 0 && !state(0).overflow);
	CHECK(nvs_rm_slice(uuid_of(0), 50) == NVS_RM_OK && find(7, GROUP(0, 0))->slice == 50);
	CHECK(OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 24 && ON(0) == NVS_RM_OK);
}

/* More descriptors at a time than there is room for: that is said until the objects are gone. */
static void too_many_descriptors_say_so(void)
{
	int home;

	start();
	home = fd;
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	for (int i = 0; i < 70; i++) {
		CHECK((fd = dup2(home, 200 + i)) >= 0);
		make_device(100 + (uint32_t)i, 0);
	}
	CHECK(state(0).overflow);
	for (int i = 0; i < 70; i++) {
		CHECK(state(0).overflow);
		release(100 + (uint32_t)i, DEVICE(0)); /* the client may have more */
		release(100 + (uint32_t)i, 100 + (uint32_t)i);
	}
	CHECK(!state(0).overflow);
	make_device(7, 0);
	make_group(7, 0, 0, 8);
	CHECK(state(0).compute_groups == 2 && OFF(0) == NVS_RM_OK && atomic_load(&live_off) == 16);
}

static void a_child_of_fork_has_nothing(void)
{
	int status;
	pid_t pid;

	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(OFF(0) == NVS_RM_OK);
	pid = fork();
	if (pid == 0) {
		unsigned calls = channel_calls;

		CHECK(!state(0).compute_groups && !state(0).off);
		CHECK(ON(0) == NVS_RM_UNSEEN && channel_calls == calls); /* the parent's are the parent's */
		make_device(3, 0);
		make_group(3, 0, 0, 8);
		CHECK(state(0).channels == 8 && OFF(0) == NVS_RM_OK);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(state(0).off && atomic_load(&live_off) == 8 && ON(0) == NVS_RM_OK);
}

static atomic_bool stop;

static void *switches(void *arg)
{
	(void)arg;
	for (unsigned i = 0; !atomic_load(&stop); i++) {
		nvs_rm_channels(uuid_of(0), i % 2);
		nvs_rm_slice(uuid_of(0), 50 + i % 100);
	}
	ON(0);
	return NULL;
}

static void forks_while_a_thread_is_at_it(void)
{
	pthread_t t;

	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(pthread_create(&t, NULL, switches, NULL) == 0);
	for (int i = 0; i < 200; i++) {
		int status;
		pid_t pid = fork();

		if (pid == 0) {
			pthread_mutex_init(&rm_mutex, NULL);
			CHECK(!state(0).compute_groups);
			make_device(3, 0);
			make_group(3, 0, 0, 8);
			CHECK(state(0).channels == 8);
			_exit(0);
		}
		CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	}
	atomic_store(&stop, true);
	pthread_join(t, NULL);
	CHECK(atomic_load(&live_off) == 0);
}

static void *contexts(void *arg)
{
	uint32_t client = 10 + (uint32_t)(uintptr_t)arg;

	for (int i = 0; i < 200; i++) {
		make_device(client, 0);
		make_group(client, 0, 0, 8);
		make_group(client, 0, 1, 8);
		release(client, i % 3 == 0 ? client : i % 3 == 1 ? DEVICE(0) : GROUP(0, 0));
		if (i % 3 == 2)
			release(client, client);
	}
	return NULL;
}

/* Contexts come and go on threads while others switch: nothing stays off. */
static void threads(void)
{
	pthread_t t[4], s;

	start();
	make_device(1, 0);
	make_group(1, 0, 0, 8);
	CHECK(pthread_create(&s, NULL, switches, NULL) == 0);
	for (uintptr_t i = 0; i < 4; i++)
		CHECK(pthread_create(&t[i], NULL, contexts, (void *)i) == 0);
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	atomic_store(&stop, true);
	pthread_join(s, NULL);
	CHECK(state(0).channels == 8 && atomic_load(&live_off) == 0);
	CHECK(copy_channels_named == 0);
}

static void driver_end(void)
{
	/* the driver's own handler: registered before channels were first taken off, so it runs later */
	if (atomic_load(&live_off) || OFF(0) != NVS_RM_BUSY)
		_exit(1);
}

static void channels_are_on_when_the_process_ends(void)
{
	int status;
	pid_t pid;

	shared_off = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid = fork();
	if (pid == 0) {
		start();
		make_device(1, 0);
		make_group(1, 0, 0, 8);
		atexit(driver_end);
		CHECK(OFF(0) == NVS_RM_OK && atomic_load(shared_off) == 8);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(atomic_load(shared_off) == 0);
}

/* A handler may do anything: signals are blocked while a lock is held. */
static atomic_uint handled;

static void on_signal(int sig)
{
	(void)sig;
	make(50, 50, 50, RM_CLASS_DEVICE, 0);
	release(50, 50);
	atomic_fetch_add(&handled, 1);
}

/* One after the other, so that the thread gets on between them. */
static void *send_signals(void *to)
{
	static const struct timespec nap = { 0, 20000 };

	for (unsigned i = 0; i < 2000; i++) {
		pthread_kill(*(pthread_t *)to, SIGUSR1);
		while (atomic_load(&handled) <= i)
			sched_yield();
		nanosleep(&nap, NULL);
	}
	atomic_store(&stop, true);
	return NULL;
}

static void signal_handlers_may_use_the_driver(void)
{
	pthread_t self = pthread_self(), t;

	start();
	make_device(1, 0);
	for (unsigned i = 0; i < 16; i += 2) /* so that to count takes long */
		make_group(1, 0, i, 100);
	pthread_mutexattr_t a;
	pthread_mutexattr_init(&a); /* ours, not the shim's, must bear it */
	pthread_mutexattr_settype(&a, PTHREAD_MUTEX_RECURSIVE);
	pthread_mutex_init(&rm_mutex, &a);
	signal(SIGUSR1, on_signal);
	CHECK(pthread_create(&t, NULL, send_signals, &self) == 0);
	while (!atomic_load(&stop))
		CHECK(state(0).channels == 800);
	pthread_join(t, NULL);
}

static void (*const cases[])(void) = {
	/* These two have more than one thread: ThreadSanitizer runs no others. */
	forks_while_a_thread_is_at_it,
	threads,
	channels_are_on_when_the_process_ends,
	foreign_requests_pass,
	objects_are_counted,
	slices_are_set_and_read_back,
	a_driver_that_refuses_or_fakes_is_found_out,
	channels_go_off_and_on,
	many_channels_go_off_and_on,
	objects_change_meanwhile,
	a_driver_opened_twice,
	what_is_freed_is_forgotten_with_all_below,
	channels_are_on_when_objects_are_freed,
	who_waits_for_the_gpu_keeps_channels_on,
	what_stays_off_is_put_on_again,
	what_never_goes_on_ends_the_wait,
	a_closed_descriptor_is_not_used,
	a_gpu_without_a_name_is_not_asked_again,
	after_a_move_the_gpus_are_asked_anew,
	handles_are_used_again,
	a_full_table_says_so,
	what_was_never_noted_is_freed_at_once,
	descriptors_come_and_go,
	too_many_descriptors_say_so,
	a_child_of_fork_has_nothing,
	signal_handlers_may_use_the_driver,
};
#ifdef __SANITIZE_THREAD__
#define CASES 2u
#else
#define CASES (sizeof(cases) / sizeof(cases[0]))
#endif

int main(void)
{
	unsigned failed = 0;

	for (unsigned i = 0; i < CASES; i++) {
		int status;
		pid_t pid = fork();

		if (pid == 0) {
			alarm(600); /* the end of a deadlock */
			cases[i]();
			_exit(0);
		}
		if (waitpid(pid, &status, 0) != pid || status != 0) {
			fprintf(stderr, "rm: case %u failed: status 0x%x\n", i, status);
			failed++;
		}
	}
	printf("rm: %u cases\n", (unsigned)CASES);
	return failed != 0;
}
