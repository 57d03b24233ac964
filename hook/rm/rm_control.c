// SPDX-License-Identifier: Apache-2.0
/*
 * rm_control.c: time slices, and channels off and on, by one thread at a time. Targets are copied
 * from the table, whose lock is free while the driver works: its serial number tells changes.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "futex.h"
#include "lock.h"
#include "log.h"
#include "signals.h"
#include "rm.h"
#include "rm_abi.h"
#include "rm_object.h"

/* A control takes less than 1 ms; the driver itself gives up on one after some seconds. */
#define TURN_WAIT_NS (5 * NVS_S)
#define TRIES        8 /* looks at a table that changes all the time */
/* Threads that need the channels on try again for so long, if the driver refuses that. */
#define ON_WAIT_NS  (5 * NVS_S)
#define ON_AGAIN_NS (10 * NVS_MS)

const char *nvs_rm_text(enum nvs_rm_result r)
{
	static const char *const text[] = {
		[NVS_RM_OK] = "works",
		[NVS_RM_UNTRIED] = "not tried",
		[NVS_RM_UNSEEN] = "no compute channels of this GPU were seen",
		[NVS_RM_REFUSED] = "the driver refuses",
		[NVS_RM_FAKED] = "the driver answers success and changes nothing",
		[NVS_RM_LOST] = "the driver's descriptor is gone",
		[NVS_RM_BUSY] = "busy",
	};

	return (unsigned)r < sizeof(text) / sizeof(text[0]) ? text[r] : "unknown";
}

/* ---- turns ---- */

static struct nvs_lock turn = NVS_LOCK(NVS_RANK_CONTROL);
static _Atomic(pid_t) turn_owner;
static atomic_bool ended; /* the process ends: channels stay on */

/* Room for the targets of the thread whose turn it is. */
static struct rm_target targets[NVS_RM_MAX_TARGETS];

static bool begin_turn(struct nvs_signals *q)
{
	pid_t me = getpid();

	nvs_signals_block(q);
	if (turn_owner != me) { /* a child of fork: the thread that had the turn is not here */
		if (turn_owner)
			turn.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
		turn_owner = me;
	}
	nvs_lock_check(&turn);
	for (uint64_t end = nvs_now() + TURN_WAIT_NS; nvs_now() < end; nvs_nap(20 * NVS_US))
		if (nvs_trylock(&turn))
			return true;
	nvs_signals_restore(q);
	return false;
}

static void end_turn(const struct nvs_signals *q)
{
	nvs_unlock(&turn);
	nvs_signals_restore(q);
}

/* Asks the RM which GPUs the subdevices are that came since the last time. */
static void name_subdevices(void)
{
	struct rm_target t;

	while (rm_unnamed_subdevice(&t)) {
		struct rm_uuid u = { .flags = RM_UUID_BINARY };
		uint32_t status;
		bool told = rm_control(&t, t.subdevice, RM_GET_UUID, &u, sizeof(u), &status) == NVS_RM_OK &&
			    u.length == NVS_RM_UUID;

		rm_name_subdevice(&t, told ? u.data : NULL);
	}
}

/* ---- results ---- */

struct result {
	enum nvs_rm_result r;
	uint32_t status;
	uint64_t us;
};

static void keep_slice_result(struct rm_gpu *g, void *arg)
{
	const struct result *r = arg;

	g->slice = r->r;
	if (r->r == NVS_RM_OK)
		g->slice_us = r->us;
	if (r->r == NVS_RM_REFUSED)
		g->status = r->status;
}

static void keep_off_on_result(struct rm_gpu *g, void *arg)
{
	const struct result *r = arg;

	g->off_on = g->no_effect ? NVS_RM_FAKED : r->r;
	if (r->r == NVS_RM_REFUSED)
		g->status = r->status;
}

/* That channels went on says nothing of taking them off. */
static void keep_on_result(struct rm_gpu *g, void *arg)
{
	const struct result *r = arg;

	if (r->r != NVS_RM_OK || g->off_on == NVS_RM_UNTRIED)
		keep_off_on_result(g, arg);
}

static void copy_gpu(struct rm_gpu *g, void *arg)
{
	*(struct rm_gpu *)arg = *g;
}

static void want_slice(struct rm_gpu *g, void *us)
{
	g->wanted_us = *(uint64_t *)us;
}

/* ---- slices ---- */

static enum nvs_rm_result group_get_slice(const struct rm_target *t, uint64_t *us, uint32_t *status)
{
	struct rm_slice s = { 0 };
	enum nvs_rm_result r = rm_control(t, t->object, RM_GET_SLICE, &s, sizeof(s), status);

	*us = s.us;
	return r;
}

static enum nvs_rm_result group_set_slice(const struct rm_target *t, uint64_t us, uint32_t *status)
{
	struct rm_slice s = { us };
	uint64_t now;
	enum nvs_rm_result r = rm_control(t, t->object, RM_SET_SLICE, &s, sizeof(s), status);

	if (r == NVS_RM_OK)
		r = group_get_slice(t, &now, status);
	return r == NVS_RM_OK && now != us ? NVS_RM_FAKED : r;
}

static bool gone(const struct result *r)
{
	return r->r == NVS_RM_REFUSED && (r->status == RM_NO_OBJECT || r->status == RM_BAD_OBJECT || r->status == RM_BAD_HANDLE);
}

/* With the turn. A group that ended meanwhile is no failure. */
static struct result slice_all(const uint8_t *uuid, uint64_t us)
{
	struct result all = { NVS_RM_UNSEEN, 0, us };
	uint64_t seen;

	for (int tries = 0; tries < TRIES; tries++) {
		unsigned n;

		seen = rm_serial();
		n = rm_targets(uuid, RM_KIND_GROUPS, targets);
		all = (struct result){ n ? NVS_RM_OK : NVS_RM_UNSEEN, 0, us };
		for (unsigned i = 0; i < n; i++) {
			struct result one = { NVS_RM_OK, 0, us };

			one.r = group_set_slice(&targets[i], us, &one.status);
			if (one.r != NVS_RM_OK && !(gone(&one) && seen != rm_serial()))
				all = one;
		}
		if (seen == rm_serial())
			break;
	}
	return all;
}

enum nvs_rm_result nvs_rm_slice(const uint8_t uuid[NVS_RM_UUID], uint64_t us)
{
	struct result r = { NVS_RM_OK, 0, us };
	struct nvs_signals q;

	if (!begin_turn(&q))
		return NVS_RM_BUSY;
	name_subdevices();
	if (!rm_with_gpu(uuid, want_slice, &us))
		r.r = NVS_RM_UNSEEN;
	else if (us) {
		r = slice_all(uuid, us);
		rm_with_gpu(uuid, keep_slice_result, &r);
	}
	end_turn(&q);
	return r.r;
}

void rm_slice_new_group(void)
{
	struct rm_gpu g;

	for (unsigned i = 0; i < NVS_RM_MAX_GPUS; i++)
		if (rm_gpu_at(i, &g) && g.wanted_us)
			nvs_rm_slice(g.uuid, g.wanted_us);
}

enum nvs_rm_result nvs_rm_get_slice(const uint8_t uuid[NVS_RM_UUID], uint64_t *us)
{
	struct result r = { NVS_RM_UNSEEN, 0, 0 };
	struct nvs_signals q;

	*us = 0;
	if (!begin_turn(&q))
		return NVS_RM_BUSY;
	name_subdevices();
	if (rm_targets(uuid, RM_KIND_GROUPS, targets)) {
		r.r = group_get_slice(&targets[0], &r.us, &r.status);
		rm_with_gpu(uuid, keep_slice_result, &r);
		*us = r.us;
	}
	end_turn(&q);
	return r.r;
}

enum nvs_rm_result nvs_rm_prove(const uint8_t uuid[NVS_RM_UUID])
{
	struct result r = { NVS_RM_UNSEEN, 0, 0 };
	uint64_t before = 0;
	struct nvs_signals q;

	if (!begin_turn(&q))
		return NVS_RM_BUSY;
	name_subdevices();
	if (rm_targets(uuid, RM_KIND_GROUPS, targets)) {
		struct rm_target t = targets[0];

		r.r = group_get_slice(&t, &before, &r.status);
		r.us = before;
		if (r.r == NVS_RM_OK)
			r.r = group_set_slice(&t, before != 1000 ? 1000 : 2000, &r.status);
		if (r.r == NVS_RM_OK)
			r.r = group_set_slice(&t, before, &r.status);
		rm_with_gpu(uuid, keep_slice_result, &r);
	}
	end_turn(&q);
	return r.r;
}

/* ---- channels ---- */

/*
 * The driver counts how often a channel was taken off, and it is on when it was put on as often
 * (H200). So only channels that are on are taken off, and only those that are off are put on.
 */
static struct result send_channels(const struct rm_target *t, unsigned n, bool on)
{
	struct rm_channels c = { .disable = !on, .count = n };
	struct result r = { NVS_RM_OK, 0, 0 };

	for (unsigned i = 0; i < n; i++) {
		c.client[i] = t[i].client;
		c.channel[i] = t[i].object;
	}
	r.r = rm_control(t, t->subdevice, RM_CHANNELS, &c, sizeof(c), &r.status);
	return r;
}

/*
 * After a control of several failed, which may have changed some: all on. A channel that is gone is
 * forgotten soon, and one whose descriptor is lost can't be reached any more.
 */
static struct result put_on_one_by_one(const struct rm_target *t, unsigned n)
{
	struct result all = { NVS_RM_OK, 0, 0 };

	for (unsigned i = 0; i < n; i++) {
		struct result one = send_channels(&t[i], 1, true);

		bool done = one.r == NVS_RM_OK || gone(&one);

		rm_note_off(&t[i], 1, !done && one.r != NVS_RM_LOST);
		if (!done)
			all = one;
	}
	return all;
}

static bool together(const struct rm_target *a, const struct rm_target *b)
{
	return a->client == b->client && a->subdevice == b->subdevice && a->via.fd == b->via.fd;
}

/*
 * One control for each subdevice and each 64 channels. *changed: objects came or went, or there may
 * be more than one look has room for.
 */
static struct result switch_all(const uint8_t *uuid, bool on, bool *changed)
{
	uint64_t seen = rm_serial();
	unsigned n = rm_targets(uuid, on ? RM_KIND_CHANNELS_OFF : RM_KIND_CHANNELS_ON, targets);
	struct result all = { NVS_RM_OK, 0, 0 };

	for (unsigned i = 0, m; i < n; i += m) {
		const struct rm_target *t = &targets[i];
		struct result one;

		for (m = 1; i + m < n && m < RM_CHANNELS_MAX && together(t, &t[m]);)
			m++;
		one = send_channels(t, m, on);
		if (one.r == NVS_RM_OK)
			rm_note_off(t, m, !on);
		else if (on)
			one = put_on_one_by_one(t, m);
		else
			put_on_one_by_one(t, m);
		if (one.r != NVS_RM_OK)
			all = one;
	}
	*changed = seen != rm_serial() || n == NVS_RM_MAX_TARGETS;
	return all;
}

/* With the turn. Objects that come or go meanwhile make one call fail, or miss a channel: again. */
static struct result switch_until_steady(const uint8_t *uuid, bool on)
{
	struct result r;
	bool changed = true;

	for (int tries = 0; changed && tries < TRIES; tries++)
		r = switch_all(uuid, on, &changed);
	if (r.r == NVS_RM_OK && !rm_targets(uuid, RM_KIND_CHANNELS_ON, targets) &&
	    !rm_targets(uuid, RM_KIND_CHANNELS_OFF, targets))
		r.r = NVS_RM_UNSEEN;
	return r;
}

static void mark_off(struct rm_gpu *g, void *may)
{
	enum nvs_rm_result *r = may;

	*r = g->no_effect ? NVS_RM_FAKED : g->keepers || ended ? NVS_RM_BUSY : NVS_RM_OK;
	if (*r == NVS_RM_OK) {
		g->off = true;
		g->stuck = g->wanted_off = false;
	}
}

static void mark_wanted(struct rm_gpu *g, void *off)
{
	g->wanted_off = *(bool *)off;
}

static void mark_stuck(struct rm_gpu *g, void *stuck)
{
	g->off = g->stuck = *(bool *)stuck;
}

/* With the turn. Some stay off if the driver refuses: they are stuck, and tried again. */
static struct result switch_on(const uint8_t *uuid)
{
	struct result r = switch_until_steady(uuid, true);
	bool stuck = rm_targets(uuid, RM_KIND_CHANNELS_OFF, targets) != 0;

	rm_with_gpu(uuid, mark_stuck, &stuck);
	if (stuck)
		nvs_debugf("rm: channels stay off, the driver refuses to put them on: status %#x", r.status);
	return r;
}

/*
 * A process that ends must not wait for channels that are off. Registered when they first go off, so
 * this runs before what was registered earlier: the driver's own end.
 */
static void put_on_at_exit(void)
{
	ended = true;
	rm_put_all_on();
}

static enum nvs_rm_result take_off(const uint8_t *uuid)
{
	static bool registered;
	struct result r;
	enum nvs_rm_result may;

	if (!registered) {
		registered = true;
		(void)atexit(put_on_at_exit);
	}
	/* Marked first: a thread that begins to keep them on now sees that, and puts them on after us. */
	if (!rm_with_gpu(uuid, mark_off, &may))
		return NVS_RM_UNSEEN;
	if (may != NVS_RM_OK)
		return may;
	r = switch_until_steady(uuid, false);
	if (r.r != NVS_RM_OK) /* some may be off */
		switch_on(uuid);
	rm_with_gpu(uuid, keep_off_on_result, &r);
	return r.r;
}

static enum nvs_rm_result put_on(const uint8_t *uuid)
{
	struct result r = switch_on(uuid);

	rm_with_gpu(uuid, keep_on_result, &r);
	return r.r;
}

/* for_good: not for a keeper's time. */
static enum nvs_rm_result switch_channels(const uint8_t *uuid, bool on, bool for_good)
{
	enum nvs_rm_result r;
	struct nvs_signals q;
	bool off;

	if (!begin_turn(&q))
		return NVS_RM_BUSY;
	name_subdevices();
	r = on ? put_on(uuid) : take_off(uuid);
	off = !on && r == NVS_RM_OK;
	if (for_good && (on || off))
		rm_with_gpu(uuid, mark_wanted, &off);
	end_turn(&q);
	nvs_debugf("rm: channels %s: %s", on ? "on" : "off", nvs_rm_text(r));
	return r;
}

enum nvs_rm_result nvs_rm_channels(const uint8_t uuid[NVS_RM_UUID], bool on)
{
	return switch_channels(uuid, on, true);
}

enum nvs_rm_result nvs_rm_prove_channels(const uint8_t uuid[NVS_RM_UUID])
{
	struct rm_gpu g = { 0 };
	enum nvs_rm_result r = NVS_RM_BUSY;
	struct nvs_signals q;

	if (!begin_turn(&q))
		return NVS_RM_BUSY;
	name_subdevices();
	if (rm_with_gpu(uuid, copy_gpu, &g) && !g.off)
		r = take_off(uuid);
	if (r == NVS_RM_OK)
		r = put_on(uuid);
	end_turn(&q);
	return r;
}

static void mark_no_effect(struct rm_gpu *g, void *arg)
{
	(void)arg;
	g->no_effect = true;
	g->off_on = NVS_RM_FAKED;
}

void nvs_rm_has_no_effect(const uint8_t uuid[NVS_RM_UUID])
{
	rm_with_gpu(uuid, mark_no_effect, NULL);
}

/* For a thread that can't go on before. False: they are off still, after some seconds. */
static bool put_on_for_sure(const uint8_t *uuid)
{
	uint64_t end = nvs_now() + ON_WAIT_NS;
	struct rm_gpu g;

	for (;; nvs_nap(ON_AGAIN_NS)) {
		enum nvs_rm_result r = switch_channels(uuid, true, false);

		if (r != NVS_RM_BUSY && rm_with_gpu(uuid, copy_gpu, &g) && !g.off)
			return true;
		if (r == NVS_RM_BUSY || nvs_now() >= end)
			return false;
	}
}

struct keep {
	int by;
	bool off;
};

static void count_keepers(struct rm_gpu *g, void *arg)
{
	struct keep *k = arg;

	if (k->by > 0 || g->keepers)
		g->keepers += (unsigned)k->by;
	k->off = g->off;
}

void nvs_rm_keep_on(const uint8_t uuid[NVS_RM_UUID])
{
	struct keep k = { 1, false };
	int saved = errno;

	if (rm_with_gpu(uuid, count_keepers, &k) && k.off)
		put_on_for_sure(uuid);
	errno = saved;
}

void nvs_rm_let_go(const uint8_t uuid[NVS_RM_UUID])
{
	struct keep k = { -1, false };

	rm_with_gpu(uuid, count_keepers, &k);
}

void rm_put_on_below(uint32_t client, uint32_t object)
{
	uint8_t uuid[NVS_RM_UUID];

	while (rm_off_below(client, object, uuid) && put_on_for_sure(uuid))
		;
}

void rm_put_all_on(void)
{
	struct rm_gpu g;

	for (unsigned i = 0; i < NVS_RM_MAX_GPUS; i++)
		if (rm_gpu_at(i, &g) && g.off)
			put_on_for_sure(g.uuid);
}

/* ---- state ---- */

/* Without NVML nobody asks for the version (libcuda 580 on an H200); the kernel's module tells it. */
static void read_version(char *to, size_t size)
{
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/sys/module/nvidia/version", O_RDONLY | O_CLOEXEC);
	long n = fd >= 0 ? syscall(SYS_read, fd, to, size - 1) : 0;

	if (fd >= 0)
		syscall(SYS_close, fd);
	while (n > 0 && to[n - 1] == '\n')
		n--;
	to[n > 0 ? n : 0] = '\0';
}

bool nvs_rm_state(const uint8_t uuid[NVS_RM_UUID], struct nvs_rm_state *s)
{
	struct rm_gpu g;
	struct nvs_signals q;

	memset(s, 0, sizeof(*s));
	if (begin_turn(&q)) {
		name_subdevices();
		if (rm_with_gpu(uuid, copy_gpu, &g) && g.stuck && (!g.wanted_off || g.keepers))
			put_on(uuid);
		end_turn(&q);
	}
	rm_count(uuid, s);
	if (!s->driver[0])
		read_version(s->driver, sizeof(s->driver));
	s->slice = s->off_on = NVS_RM_UNTRIED;
	if (!s->compute_groups && !s->other_groups)
		return false;
	if (rm_with_gpu(uuid, copy_gpu, &g)) {
		s->off = g.off;
		s->keepers = g.keepers;
		s->slice_us = g.slice_us;
		s->slice = g.slice;
		s->off_on = g.off_on;
		s->status = g.status;
	}
	return true;
}
