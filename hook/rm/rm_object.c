// SPDX-License-Identifier: Apache-2.0
/*
 * rm_object.c: a table of objects, in the order in which they were made. It is searched from end to
 * end: objects come and go with contexts, which takes milliseconds.
 */
#include "rm_object.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "lock.h"
#include "signals.h"
#include "rm_abi.h"

#define MAX_OBJECTS     8192
#define MAX_DESCRIPTORS 64
#define MAX_MISSED      64
#define MAX_DEPTH       8  /* of objects below each other: client, device, group, channel */

struct object {
	uint64_t serial;
	uint32_t client, handle, parent, class;
	uint32_t engine;  /* of a group */
	uint16_t via;     /* descriptor */
	uint8_t gpu;      /* of a subdevice: 1 + its number */
	bool unnamed;     /* a subdevice that nobody asked for its GPU */
	bool off;         /* a channel that was taken off */
};

static struct nvs_lock lock = NVS_LOCK(NVS_RANK_CHANNELS);
static _Atomic(pid_t) owner; /* a child of fork has none of this */

static struct object objects[MAX_OBJECTS];
static unsigned used;
static uint64_t serial;
static struct nvs_descriptor descriptors[MAX_DESCRIPTORS];
static unsigned descriptors_used;
static struct rm_gpu gpus[NVS_RM_MAX_GPUS];
/* Clients with objects for which there was no room. Nobody hears their end before the client's. */
static struct {
	uint64_t serial; /* of the latest */
	uint32_t client;
} missed[MAX_MISSED];
static unsigned missed_used;
static bool missed_more; /* of further clients, whose end is not known either */
static char driver[64];
static atomic_uint gpus_off;

/* In a child of fork the lock may be taken for ever, and the objects are the parent's: all begins anew. */
static void table_begin(struct nvs_signals *q)
{
	pid_t me = getpid();

	nvs_signals_block(q);
	if (atomic_load(&owner) != me) {
		if (atomic_load(&owner)) {
			lock.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
			used = descriptors_used = missed_used = 0;
			missed_more = false;
			atomic_store(&gpus_off, 0);
			memset(gpus, 0, sizeof(gpus));
		}
		atomic_store(&owner, me);
	}
	nvs_lock(&lock);
}

static void table_end(const struct nvs_signals *q)
{
	nvs_unlock(&lock);
	nvs_signals_restore(q);
}

static struct object *object_find(uint32_t client, uint32_t handle)
{
	for (unsigned i = 0; i < used; i++)
		if (objects[i].client == client && objects[i].handle == handle)
			return &objects[i];
	return NULL;
}

/* ---- what comes and goes ---- */

/* A number for another descriptor: that of one whose objects are all gone, if there is no new one. */
static unsigned free_descriptor(void)
{
	bool taken[MAX_DESCRIPTORS] = { false };
	unsigned n = 0;

	if (descriptors_used < MAX_DESCRIPTORS)
		return descriptors_used++;
	for (unsigned i = 0; i < used; i++)
		taken[objects[i].via] = true;
	while (n < MAX_DESCRIPTORS && taken[n])
		n++;
	return n;
}

/* The number of a descriptor as it is now; MAX_DESCRIPTORS: no room. */
static unsigned descriptor(int fd)
{
	struct nvs_descriptor d = nvs_descriptor_of(fd);
	unsigned n;

	if (d.fd < 0)
		return MAX_DESCRIPTORS;
	for (unsigned i = 0; i < descriptors_used; i++)
		if (descriptors[i].fd == fd && descriptors[i].dev == d.dev && descriptors[i].ino == d.ino)
			return i;
	n = free_descriptor();
	if (n < MAX_DESCRIPTORS)
		descriptors[n] = d;
	return n;
}

static void miss(uint32_t client, uint64_t at)
{
	unsigned i = 0;

	while (i < missed_used && missed[i].client != client)
		i++;
	if (i == MAX_MISSED) {
		missed_more = true;
		return;
	}
	missed_used += i == missed_used;
	missed[i].client = client;
	missed[i].serial = at;
}

/* A client that was there at `before` has ended. */
static void forget_missed(uint32_t client, uint64_t before)
{
	for (unsigned i = 0; i < missed_used; i++)
		if (missed[i].client == client && missed[i].serial <= before)
			missed[i--] = missed[--missed_used];
}

/* Objects that were there at `before`: this one, or all of a client, and what sits below. */
static void object_forget(uint32_t client, uint32_t handle, uint64_t before)
{
	static uint16_t gone[MAX_OBJECTS];
	unsigned n = 0, kept = 0;

	for (unsigned i = 0; i < used; i++)
		if (objects[i].client == client && objects[i].serial <= before &&
		    (objects[i].handle == handle || client == handle)) {
			objects[i].serial = 0;
			gone[n++] = (uint16_t)i;
		}
	if (!n)
		return; /* most of what the driver frees was never noted */
	for (unsigned k = 0; k < n && client != handle; k++) /* what sits below goes with it */
		for (unsigned i = 0; i < used; i++) {
			struct object *o = &objects[i];

			if (o->serial && o->serial <= before && o->client == client &&
			    o->parent == objects[gone[k]].handle) {
				o->serial = 0;
				gone[n++] = (uint16_t)i;
			}
		}
	for (unsigned i = 0; i < used; i++)
		if (objects[i].serial)
			objects[kept++] = objects[i];
	used = kept;
}

uint64_t rm_serial(void)
{
	return __atomic_load_n(&serial, __ATOMIC_ACQUIRE);
}

bool rm_note_alloc(int fd, uint32_t client, uint32_t parent, uint32_t handle, uint32_t class, uint32_t engine)
{
	struct nvs_signals q;
	unsigned via;

	if (class != RM_CLASS_DEVICE && class != RM_CLASS_SUBDEVICE && class != RM_CLASS_GROUP &&
	    !RM_IS_CHANNEL(class))
		return false;
	table_begin(&q);
	/* A handle that is given out again: the end of the object, with the driver's descriptor, went past us. */
	if (object_find(client, handle))
		object_forget(client, handle, serial);
	via = descriptor(fd);
	if (used == MAX_OBJECTS || via == MAX_DESCRIPTORS)
		miss(client, serial + 1);
	else
		objects[used++] = (struct object){ .serial = serial + 1, .client = client, .handle = handle,
						   .parent = parent, .class = class, .engine = engine,
						   .via = (uint16_t)via, .unnamed = class == RM_CLASS_SUBDEVICE };
	__atomic_store_n(&serial, serial + 1, __ATOMIC_RELEASE);
	table_end(&q);
	return class == RM_CLASS_GROUP && RM_IS_COMPUTE(engine);
}

void rm_note_free(uint32_t client, uint32_t handle, uint64_t before)
{
	struct nvs_signals q;

	table_begin(&q);
	object_forget(client, handle, before);
	if (client == handle)
		forget_missed(client, before);
	__atomic_store_n(&serial, serial + 1, __ATOMIC_RELEASE);
	table_end(&q);
}

void rm_note_version(const char text[64])
{
	struct nvs_signals q;

	table_begin(&q);
	memcpy(driver, text, sizeof(driver) - 1);
	table_end(&q);
}

/* ---- GPUs ---- */

static int gpu_of_uuid(const uint8_t uuid[NVS_RM_UUID])
{
	for (int i = 0; i < NVS_RM_MAX_GPUS; i++)
		if (gpus[i].used && memcmp(gpus[i].uuid, uuid, NVS_RM_UUID) == 0)
			return i;
	return -1;
}

static int gpu_make(const uint8_t uuid[NVS_RM_UUID])
{
	int i = gpu_of_uuid(uuid);

	for (int j = 0; i < 0 && j < NVS_RM_MAX_GPUS; j++)
		if (!gpus[j].used) {
			gpus[j] = (struct rm_gpu){ .used = true, .slice = NVS_RM_UNTRIED, .off_on = NVS_RM_UNTRIED };
			memcpy(gpus[j].uuid, uuid, NVS_RM_UUID);
			i = j;
		}
	return i;
}

bool rm_unnamed_subdevice(struct rm_target *t)
{
	struct nvs_signals q;
	bool found = false;

	table_begin(&q);
	for (unsigned i = 0; i < used && !found; i++)
		if (objects[i].unnamed) {
			*t = (struct rm_target){ descriptors[objects[i].via], objects[i].client, objects[i].handle,
						 objects[i].handle };
			found = true;
		}
	table_end(&q);
	return found;
}

void rm_name_subdevice(const struct rm_target *t, const uint8_t *uuid)
{
	struct nvs_signals q;
	struct object *o;

	table_begin(&q);
	o = object_find(t->client, t->subdevice);
	if (o) {
		o->unnamed = false;
		o->gpu = uuid ? (uint8_t)(1 + gpu_make(uuid)) : 0;
	}
	table_end(&q);
}

void nvs_rm_moved(void)
{
	struct nvs_signals q;

	table_begin(&q);
	for (unsigned i = 0; i < used; i++)
		objects[i].unnamed = objects[i].class == RM_CLASS_SUBDEVICE;
	table_end(&q);
}

/* The subdevice of the device on which a group sits, if it is of that GPU. */
static const struct object *subdevice_of(const struct object *group, int gpu)
{
	for (unsigned i = 0; i < used; i++)
		if (objects[i].class == RM_CLASS_SUBDEVICE && objects[i].client == group->client &&
		    objects[i].parent == group->parent && objects[i].gpu == gpu + 1)
			return &objects[i];
	return NULL;
}

static const struct object *group_of(const struct object *channel)
{
	const struct object *g = object_find(channel->client, channel->parent);

	return g && g->class == RM_CLASS_GROUP ? g : NULL;
}

unsigned rm_targets(const uint8_t uuid[NVS_RM_UUID], enum rm_kind kind, struct rm_target *t)
{
	struct nvs_signals q;
	unsigned n = 0;
	int gpu;

	table_begin(&q);
	gpu = gpu_of_uuid(uuid);
	for (unsigned i = 0; gpu >= 0 && i < used && n < NVS_RM_MAX_TARGETS; i++) {
		const struct object *o = &objects[i], *group, *sub;

		if (kind == RM_KIND_GROUPS)
			group = o->class == RM_CLASS_GROUP ? o : NULL;
		else
			group = RM_IS_CHANNEL(o->class) && o->off == (kind == RM_KIND_CHANNELS_OFF) ? group_of(o) : NULL;
		if (!group || !RM_IS_COMPUTE(group->engine))
			continue;
		sub = subdevice_of(group, gpu);
		if (sub)
			t[n++] = (struct rm_target){ descriptors[o->via], o->client, sub->handle, o->handle };
	}
	table_end(&q);
	return n;
}

void rm_note_off(const struct rm_target *channels, unsigned n, bool off)
{
	struct nvs_signals q;

	table_begin(&q);
	for (unsigned i = 0; i < n; i++) {
		struct object *o = object_find(channels[i].client, channels[i].object);

		if (o)
			o->off = off;
	}
	table_end(&q);
}

bool rm_with_gpu(const uint8_t uuid[NVS_RM_UUID], void (*fn)(struct rm_gpu *, void *), void *arg)
{
	struct nvs_signals q;
	unsigned off = 0;
	int i;

	table_begin(&q);
	i = gpu_make(uuid);
	if (i >= 0)
		fn(&gpus[i], arg);
	for (int j = 0; j < NVS_RM_MAX_GPUS; j++)
		off += gpus[j].used && gpus[j].off;
	atomic_store(&gpus_off, off);
	table_end(&q);
	return i >= 0;
}

bool rm_any_off(void)
{
	return atomic_load_explicit(&gpus_off, memory_order_relaxed) != 0;
}

bool rm_gpu_at(unsigned i, struct rm_gpu *g)
{
	struct nvs_signals q;

	table_begin(&q);
	*g = gpus[i];
	table_end(&q);
	return g->used;
}

/* Whether an object is this one, or below it. */
static bool is_below(const struct object *o, uint32_t client, uint32_t handle)
{
	if (o->client != client)
		return false;
	for (unsigned depth = 0; o && depth < MAX_DEPTH; depth++) {
		if (o->handle == handle || o->parent == handle)
			return true;
		o = object_find(client, o->parent);
	}
	return client == handle;
}

bool rm_off_below(uint32_t client, uint32_t handle, uint8_t uuid[NVS_RM_UUID])
{
	struct nvs_signals q;
	bool found = false;

	table_begin(&q);
	for (unsigned i = 0; i < used && !found; i++) {
		const struct object *o = &objects[i], *group = o->off ? group_of(o) : NULL;

		if (!group || !is_below(o, client, handle))
			continue;
		for (int gpu = 0; gpu < NVS_RM_MAX_GPUS && !found; gpu++)
			if (gpus[gpu].used && subdevice_of(group, gpu)) {
				memcpy(uuid, gpus[gpu].uuid, NVS_RM_UUID);
				found = true;
			}
	}
	table_end(&q);
	return found;
}

void rm_count(const uint8_t uuid[NVS_RM_UUID], struct nvs_rm_state *s)
{
	struct nvs_signals q;
	int gpu;

	table_begin(&q);
	gpu = gpu_of_uuid(uuid);
	s->overflow = missed_used || missed_more;
	memcpy(s->driver, driver, sizeof(s->driver));
	for (unsigned i = 0; i < used; i++) {
		const struct object *o = &objects[i], *group = o;

		if (RM_IS_CHANNEL(o->class)) {
			group = group_of(o);
			s->bare_channels += !group;
		} else if (o->class != RM_CLASS_GROUP) {
			group = NULL;
		}
		if (!group || gpu < 0 || !subdevice_of(group, gpu))
			continue;
		if (group != o && RM_IS_COMPUTE(group->engine))
			s->channels++;
		else if (group != o)
			s->other_channels++;
		else if (RM_IS_COMPUTE(o->engine))
			s->compute_groups++;
		else
			s->other_groups++;
	}
	table_end(&q);
}
