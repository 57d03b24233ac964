// SPDX-License-Identifier: Apache-2.0
/* rm_channels.c: channels off and on. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "clock.h"
#include "futex.h"
#include "log.h"
#include "rm.h"
#include "rm_abi.h"
#include "rm_object.h"
#include "rm_turn.h"

/* Threads that need the channels on try again for so long, if the driver refuses that. */
#define ON_WAIT_NS  (5 * NVS_S)
#define ON_AGAIN_NS (10 * NVS_MS)

static atomic_bool ended; /* the process ends: channels stay on */

static void keep_off_on_result(struct rm_gpu *g, void *arg)
{
	const struct rm_result *r = arg;

	g->off_on = g->no_effect ? NVS_RM_FAKED : r->r;
	if (r->r == NVS_RM_REFUSED)
		g->status = r->status;
}

/* That channels went on says nothing of taking them off. */
static void keep_on_result(struct rm_gpu *g, void *arg)
{
	const struct rm_result *r = arg;

	if (r->r != NVS_RM_OK || g->off_on == NVS_RM_UNTRIED)
		keep_off_on_result(g, arg);
}

/*
 * The driver counts how often a channel was taken off, and it is on when it was put on as often
 * (H200). So only channels that are on are taken off, and only those that are off are put on.
 */
static struct rm_result send_channels(const struct rm_target *t, unsigned n, bool on)
{
	struct rm_channels c = { .disable = !on, .count = n };
	struct rm_result r = { NVS_RM_OK, 0, 0 };

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
static struct rm_result put_on_one_by_one(const struct rm_target *t, unsigned n)
{
	struct rm_result all = { NVS_RM_OK, 0, 0 };

	for (unsigned i = 0; i < n; i++) {
		struct rm_result one = send_channels(&t[i], 1, true);

		bool done = one.r == NVS_RM_OK || rm_gone(&one);

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
static struct rm_result switch_all(const uint8_t *uuid, bool on, bool *changed)
{
	uint64_t seen = rm_serial();
	unsigned n = rm_targets(uuid, on ? RM_KIND_CHANNELS_OFF : RM_KIND_CHANNELS_ON, rm_turn_targets);
	struct rm_result all = { NVS_RM_OK, 0, 0 };

	for (unsigned i = 0, m; i < n; i += m) {
		const struct rm_target *t = &rm_turn_targets[i];
		struct rm_result one;

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
static struct rm_result switch_until_steady(const uint8_t *uuid, bool on)
{
	struct rm_result r;
	bool changed = true;

	for (int tries = 0; changed && tries < RM_TRIES; tries++)
		r = switch_all(uuid, on, &changed);
	if (r.r == NVS_RM_OK && !rm_targets(uuid, RM_KIND_CHANNELS_ON, rm_turn_targets) &&
	    !rm_targets(uuid, RM_KIND_CHANNELS_OFF, rm_turn_targets))
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
static struct rm_result switch_on(const uint8_t *uuid)
{
	struct rm_result r = switch_until_steady(uuid, true);
	bool stuck = rm_targets(uuid, RM_KIND_CHANNELS_OFF, rm_turn_targets) != 0;

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
	struct rm_result r;
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

enum nvs_rm_result rm_put_on(const uint8_t *uuid)
{
	struct rm_result r = switch_on(uuid);

	rm_with_gpu(uuid, keep_on_result, &r);
	return r.r;
}

/* for_good: not for a keeper's time. */
static enum nvs_rm_result switch_channels(const uint8_t *uuid, bool on, bool for_good)
{
	enum nvs_rm_result r;
	struct nvs_signals q;
	bool off;

	if (!rm_begin_turn(&q))
		return NVS_RM_BUSY;
	rm_name_subdevices();
	r = on ? rm_put_on(uuid) : take_off(uuid);
	off = !on && r == NVS_RM_OK;
	if (for_good && (on || off))
		rm_with_gpu(uuid, mark_wanted, &off);
	rm_end_turn(&q);
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

	if (!rm_begin_turn(&q))
		return NVS_RM_BUSY;
	rm_name_subdevices();
	if (rm_with_gpu(uuid, rm_copy_gpu, &g) && !g.off)
		r = take_off(uuid);
	if (r == NVS_RM_OK)
		r = rm_put_on(uuid);
	rm_end_turn(&q);
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

		if (r != NVS_RM_BUSY && rm_with_gpu(uuid, rm_copy_gpu, &g) && !g.off)
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
