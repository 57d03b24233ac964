// SPDX-License-Identifier: Apache-2.0
/*
 * rm_control.c: turns, time slices, and what is known. Targets are copied from the table, whose lock is
 * free while the driver works: its serial number tells changes.
 */
#include <fcntl.h>
#include <stdatomic.h>
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
#include "rm_turn.h"

/* A control takes less than 1 ms; the driver itself gives up on one after some seconds. */
#define TURN_WAIT_NS (5 * NVS_S)

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

struct rm_target rm_turn_targets[NVS_RM_MAX_TARGETS];

bool rm_begin_turn(struct nvs_signals *q)
{
	pid_t me = getpid();

	nvs_signals_block(q);
	if (turn_owner != me) { /* a child of fork: the thread that had the turn is not here */
		if (turn_owner)
			turn.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
		turn_owner = me;
	}
	nvs_lock_check(&turn);
	if (NVS_NAP_UNTIL(nvs_trylock(&turn), nvs_now() + TURN_WAIT_NS, 20 * NVS_US))
		return true;
	nvs_signals_restore(q);
	return false;
}

void rm_end_turn(const struct nvs_signals *q)
{
	nvs_unlock(&turn);
	nvs_signals_restore(q);
}

void rm_name_subdevices(void)
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

static void keep_slice_result(struct rm_gpu *g, void *arg)
{
	const struct rm_result *r = arg;

	g->slice = r->r;
	if (r->r == NVS_RM_OK)
		g->slice_us = r->us;
	if (r->r == NVS_RM_REFUSED)
		g->status = r->status;
}

void rm_copy_gpu(struct rm_gpu *g, void *arg)
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

bool rm_gone(const struct rm_result *r)
{
	return r->r == NVS_RM_REFUSED && (r->status == RM_NO_OBJECT || r->status == RM_BAD_OBJECT || r->status == RM_BAD_HANDLE);
}

/* With the turn. A group that ended meanwhile is no failure. */
static struct rm_result slice_all(const uint8_t *uuid, uint64_t us)
{
	struct rm_result all = { NVS_RM_UNSEEN, 0, us };
	uint64_t seen;

	for (int tries = 0; tries < RM_TRIES; tries++) {
		unsigned n;

		seen = rm_serial();
		n = rm_targets(uuid, RM_KIND_GROUPS, rm_turn_targets);
		all = (struct rm_result){ n ? NVS_RM_OK : NVS_RM_UNSEEN, 0, us };
		for (unsigned i = 0; i < n; i++) {
			struct rm_result one = { NVS_RM_OK, 0, us };

			one.r = group_set_slice(&rm_turn_targets[i], us, &one.status);
			if (one.r != NVS_RM_OK && !(rm_gone(&one) && seen != rm_serial()))
				all = one;
		}
		if (seen == rm_serial())
			break;
	}
	return all;
}

enum nvs_rm_result nvs_rm_slice(const uint8_t uuid[NVS_RM_UUID], uint64_t us)
{
	struct rm_result r = { NVS_RM_OK, 0, us };
	struct nvs_signals q;

	if (!rm_begin_turn(&q))
		return NVS_RM_BUSY;
	rm_name_subdevices();
	if (!rm_with_gpu(uuid, want_slice, &us))
		r.r = NVS_RM_UNSEEN;
	else if (us) {
		r = slice_all(uuid, us);
		rm_with_gpu(uuid, keep_slice_result, &r);
	}
	rm_end_turn(&q);
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
	struct rm_result r = { NVS_RM_UNSEEN, 0, 0 };
	struct nvs_signals q;

	*us = 0;
	if (!rm_begin_turn(&q))
		return NVS_RM_BUSY;
	rm_name_subdevices();
	if (rm_targets(uuid, RM_KIND_GROUPS, rm_turn_targets)) {
		r.r = group_get_slice(&rm_turn_targets[0], &r.us, &r.status);
		rm_with_gpu(uuid, keep_slice_result, &r);
		*us = r.us;
	}
	rm_end_turn(&q);
	return r.r;
}

enum nvs_rm_result nvs_rm_prove(const uint8_t uuid[NVS_RM_UUID])
{
	struct rm_result r = { NVS_RM_UNSEEN, 0, 0 };
	uint64_t before = 0;
	struct nvs_signals q;

	if (!rm_begin_turn(&q))
		return NVS_RM_BUSY;
	rm_name_subdevices();
	if (rm_targets(uuid, RM_KIND_GROUPS, rm_turn_targets)) {
		struct rm_target t = rm_turn_targets[0];

		r.r = group_get_slice(&t, &before, &r.status);
		r.us = before;
		if (r.r == NVS_RM_OK)
			r.r = group_set_slice(&t, before != 1000 ? 1000 : 2000, &r.status);
		if (r.r == NVS_RM_OK)
			r.r = group_set_slice(&t, before, &r.status);
		rm_with_gpu(uuid, keep_slice_result, &r);
	}
	rm_end_turn(&q);
	return r.r;
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
	if (rm_begin_turn(&q)) {
		rm_name_subdevices();
		if (rm_with_gpu(uuid, rm_copy_gpu, &g) && g.stuck && (!g.wanted_off || g.keepers))
			rm_put_on(uuid);
		rm_end_turn(&q);
	}
	rm_count(uuid, s);
	if (!s->driver[0])
		read_version(s->driver, sizeof(s->driver));
	s->slice = s->off_on = NVS_RM_UNTRIED;
	if (!s->compute_groups && !s->other_groups)
		return false;
	if (rm_with_gpu(uuid, rm_copy_gpu, &g)) {
		s->off = g.off;
		s->keepers = g.keepers;
		s->slice_us = g.slice_us;
		s->slice = g.slice;
		s->off_on = g.off_on;
		s->status = g.status;
	}
	return true;
}
