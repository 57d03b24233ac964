// SPDX-License-Identifier: Apache-2.0
#include "query.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client.h"
#include "clock.h"
#include "futex.h"
#include "signals.h"
#include "wire_io.h"

/*
 * A process that is told of no limit takes more than it may have, and one that begins on another GPU
 * has its container on two: a scheduler that lives is waited for. Once it did not answer, for less.
 */
#define WAIT_NS  (5 * NVS_S)
#define DEAF_NS  (200 * NVS_MS)
#define FRESH_NS (100 * NVS_MS)

static struct {
	uint8_t uuid[NVS_UUID_SIZE];
	uint64_t at_ns; /* 0: none */
	bool known;
	bool deaf; /* the scheduler lives, and did not answer in time */
	struct nvs_limits limits;
} answer; /* the latest */

static struct nvs_lock answer_lock = NVS_LOCK(NVS_RANK_QUERY_LIMITS);

static bool wait_readable(int fd, uint64_t until)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	for (;;) {
		uint64_t left = nvs_elapsed(until, nvs_now());
		struct timespec t = { (time_t)(left / NVS_S), (long)(left % NVS_S) };
		int n = ppoll(&p, 1, &t, NULL);

		if (n > 0)
			return true;
		if (n == 0 || errno != EINTR)
			return false;
	}
}

/* Receives a frame, which must be of this type, within the time. *passed: as in nvs_receive_frame. */
static bool query_expect(int fd, uint8_t type, uint64_t until, struct nvs_frame *f, int *passed)
{
	int n;

	while ((n = nvs_receive_frame(fd, f, passed)) == 0)
		if (!wait_readable(fd, until))
			return false;
	return n > 0 && f->version == NVS_WIRE_VERSION && f->type == type;
}

/* Reads a page without a mapping: it is looked at once, and may be truncated. */
static bool read_page(int page, struct nvs_slot *slot)
{
	for (int i = 0; i < 1000; i++) {
		uint32_t after;

		if (syscall(SYS_pread64, page, slot, sizeof(*slot),
			    offsetof(struct nvs_page, slot)) != sizeof(*slot) ||
		    syscall(SYS_pread64, page, &after, sizeof(after),
			    offsetof(struct nvs_page, slot) + offsetof(struct nvs_slot, limit_seq)) !=
			    sizeof(after))
			return false;
		if (!(after & 1) && after == slot->limit_seq)
			return true;
	}
	return false;
}

/* Asks about a GPU over a connection of its own. False: nobody answers in time, or not as is expected. */
static bool query_ask(const uint8_t *uuid, uint32_t flags, uint64_t wait_ns, struct nvs_frame *attached, struct nvs_slot *slot)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_REGISTER };
	uint64_t until = nvs_now() + wait_ns;
	int page = -1, error, none = -1, fd;
	bool ok;

	if (!nvs_active())
		nvs_connect_init();
	/* EAGAIN: the scheduler's queue is full. */
	while ((fd = nvs_connect(&error)) < 0 && error == EAGAIN && nvs_now() < until)
		nvs_nap(NVS_MS);
	if (fd < 0)
		return false;
	f.u.reg.min_version = NVS_WIRE_VERSION;
	f.u.reg.channels = 1;
	f.u.reg.shim_version = NVS_SHIM_VERSION;
	ok = nvs_send_frame(fd, &f, false) && query_expect(fd, NVS_WELCOME, until, &f, &page) && page >= 0;
	if (ok) {
		f = (struct nvs_frame){ .version = NVS_WIRE_VERSION, .type = NVS_ATTACH,
					.code = NVS_ATTACH_OBSERVE | flags };
		memcpy(f.u.attach.uuid, uuid, NVS_UUID_SIZE);
		ok = nvs_send_frame(fd, &f, false) &&
		     query_expect(fd, NVS_ATTACHED, until, attached, &none) && attached->code == NVS_OK &&
		     read_page(page, slot);
	}
	if (none >= 0)
		close(none);
	if (page >= 0)
		close(page);
	close(fd);
	return ok;
}

/* The lock is held. */
static void query(const uint8_t *uuid)
{
	uint64_t start = nvs_now();
	struct nvs_frame attached;
	struct nvs_slot slot;

	memcpy(answer.uuid, uuid, NVS_UUID_SIZE);
	answer.known = query_ask(uuid, 0, answer.deaf ? DEAF_NS : WAIT_NS, &attached, &slot);
	answer.limits = answer.known ? (struct nvs_limits){ slot.mem_limit, slot.mem_used } : (struct nvs_limits){ 0 };
	answer.at_ns = nvs_now();
	answer.deaf = !answer.known && answer.at_ns - start >= DEAF_NS;
}

bool nvs_query_place(const uint8_t *uuid, uint8_t *place)
{
	static const uint8_t unknown[NVS_UUID_SIZE];
	struct nvs_frame attached;
	struct nvs_signals q;
	struct nvs_slot slot;
	bool known;

	nvs_signals_block(&q);
	known = query_ask(uuid, NVS_ATTACH_PLACE, WAIT_NS, &attached, &slot) &&
		memcmp(attached.u.attached.uuid, unknown, sizeof(unknown)) != 0;
	nvs_signals_restore(&q);
	if (known)
		memcpy(place, attached.u.attached.uuid, NVS_UUID_SIZE);
	return known;
}

bool nvs_query_limits(const uint8_t *uuid, struct nvs_limits *out)
{
	struct nvs_signals q;
	bool known;

	/* One thread asks, and the others wait for its answer, as long as the query may take. */
	nvs_signals_block(&q);
	nvs_lock(&answer_lock);
	if (!answer.at_ns || memcmp(answer.uuid, uuid, NVS_UUID_SIZE) != 0 || nvs_now() - answer.at_ns >= FRESH_NS)
		query(uuid);
	known = answer.known;
	*out = answer.limits;
	nvs_unlock(&answer_lock);
	nvs_signals_restore(&q);
	return known;
}

void nvs_query_fork_child(void)
{
	answer_lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_QUERY_LIMITS);
	answer.at_ns = 0;
}
