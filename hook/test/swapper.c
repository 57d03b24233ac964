// SPDX-License-Identifier: Apache-2.0
#include "swapper.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "futex.h"
#include "packet.h"

#define CONNS 16

struct conn {
	int fd; /* 0: free */
	int pid;
	struct nvs_page *page;
	bool attached, wants, ready;
	bool cut; /* its latest grant ended with work left, whose memory stays until it is finished */
	uint64_t reserved, room, given, segments;
	struct nvs_moved m;
	uint64_t epoch;    /* granted and not released */
	uint64_t since_ns; /* of its turn; 0: still filling */
	uint64_t told_ns;  /* when it gets its GRANT; 0: it has */
	bool revoked;
	uint64_t last;     /* number of its last turn */
};

/* What tenants may look at: shared with all that the test starts. */
#define TOLD "NVSHARE_TEST_TOLD" /* names its descriptor */
static struct told {
	_Atomic int pid;
	_Atomic uint64_t away, fixed;
	atomic_bool holds; /* the GPU */
} *told;

static struct fake place;
static struct conn conns[CONNS];
static struct swapper_config config;
static struct swapper_seen seen;
static uint64_t fixed_room;   /* of every tenant; 0: what the others leave */
static bool withheld, standing, still;
static uint64_t epochs, turns;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t thread;
static int stop_pipe[2];

static void answer(struct conn *c, struct nvs_frame f, int fd)
{
	f.version = NVS_WIRE_VERSION;
	nvs_packet_send(c->fd, &f, sizeof(f), &fd, fd >= 0);
}

static int memory(uint64_t bytes)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
	CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
	return fd;
}

static void word(struct conn *c, uint32_t w)
{
	__atomic_store_n(&c->page->slot[0].word, w, __ATOMIC_SEQ_CST);
	nvs_futex_wake(&c->page->slot[0].word, false);
}

/* 0 would say that nothing is swapped. */
static void set_room(struct conn *c, uint64_t bytes)
{
	bytes = fixed_room ? fixed_room : bytes ? bytes : 1;
	if (c->room == bytes || config.off)
		return;
	c->room = bytes;
	__atomic_store_n(&c->page->slot[0].room, bytes, __ATOMIC_SEQ_CST);
	__atomic_store_n(&c->page->room_seq[0], c->page->room_seq[0] % NVS_ROOM_SEQ_MAX + 1, __ATOMIC_SEQ_CST);
	nvs_futex_wake(&c->page->slot[0].word, false);
	if (c->attached)
		answer(c, (struct nvs_frame){ .type = NVS_ROOM, .u.room.room = bytes }, -1);
}

/* 0: none */
static void set_epoch(struct conn *c, uint64_t epoch)
{
	c->epoch = epoch;
	atomic_store(&told[c - conns].holds, epoch != 0);
}

static void drop(struct conn *c)
{
	close(c->fd);
	set_epoch(c, 0);
	atomic_store(&told[c - conns].pid, 0);
	if (c->page)
		munmap(c->page, NVS_PAGE_SIZE);
	memset(c, 0, sizeof(*c));
}

static struct conn *holder(void)
{
	for (int i = 0; i < CONNS; i++)
		if (conns[i].fd && conns[i].epoch)
			return &conns[i];
	return NULL;
}

/* Whose work was cut, so that its memory can leave; else who waits longest. */
static struct conn *next(void)
{
	struct conn *n = NULL;

	for (int i = 0; i < CONNS; i++)
		if (conns[i].fd && conns[i].wants && !conns[i].epoch &&
		    (!n || conns[i].cut > n->cut || (conns[i].cut == n->cut && conns[i].last < n->last)))
			n = &conns[i];
	return n;
}

static void arrange(void)
{
	struct conn *h = holder(), *n = next();
	uint64_t others = 0, excess;

	if (!h && n && !withheld) {
		h = n;
		h->wants = h->revoked = false;
		set_epoch(h, ++epochs);
		h->last = ++turns;
		h->since_ns = config.off || !h->m.away ? test_now() : 0;
		h->told_ns = test_now() + config.late_ms * 1000000ull;
		seen.grants++;
		word(h, (uint32_t)h->epoch);
	}
	if (h && h->told_ns && test_now() >= h->told_ns) {
		h->told_ns = 0;
		answer(h, (struct nvs_frame){ .type = NVS_GRANT, .epoch = h->epoch }, -1);
	}
	n = next();
	if (h && !h->revoked &&
	    (withheld || (n && h->since_ns &&
			  test_now() - h->since_ns > config.quantum_ms * 1000000ull))) {
		h->revoked = true;
		word(h, 0);
		answer(h, (struct nvs_frame){ .type = NVS_REVOKE, .epoch = h->epoch,
					      .u.revoke.grace_ns = (config.grace_ms ? config.grace_ms : 10000) * 1000000 }, -1);
	}
	for (int i = 0; i < CONNS; i++)
		others += conns[i].fd && &conns[i] != h ? conns[i].m.resident : 0;
	excess = h && others + h->reserved > config.gpu ? others + h->reserved - config.gpu : 0;
	seen.mover = 0;
	for (int i = 0; i < CONNS; i++) {
		struct conn *c = &conns[i];
		uint64_t away = c->m.resident < excess ? c->m.resident : excess;

		if (c->attached)
			__atomic_store_n(&c->page->slot[0].flags,
					 (standing ? NVS_GRANT_STANDING : 0) | (still ? NVS_SLOT_STILL : 0), __ATOMIC_RELAXED);
		if (!c->attached || c == h)
			continue;
		set_room(c, still ? config.gpu : c->m.resident - away);
		excess -= away;
		if (away)
			seen.mover = c->pid;
	}
	if (h)
		set_room(h, config.gpu > others ? config.gpu - others : 1);
	seen.holder = h ? h->pid : 0;
	seen.filling = h && !h->since_ns;
	seen.revoked = h && h->revoked;
	for (int i = 0; i < CONNS; i++)
		while (config.arena && conns[i].attached && conns[i].given < conns[i].reserved &&
		       (!config.arena_most || conns[i].given < config.arena_most)) {
			int fd = memory(config.arena);

			answer(&conns[i], (struct nvs_frame){ .type = NVS_ARENA,
				.u.arena = { ++conns[i].segments, config.arena, 0, 0, { 0 } } }, fd);
			close(fd);
			conns[i].given += config.arena;
		}
}

static void on_moved(struct conn *c, const struct nvs_frame *f)
{
	c->m = f->u.moved;
	atomic_store(&told[c - conns].away, c->m.away);
	atomic_store(&told[c - conns].fixed, c->m.fixed);
	atomic_store(&told[c - conns].pid, c->pid);
	seen.moved++;
	if (f->code / NVS_MOVED_FIXED_BY % (NVS_FIXED_LAST + 1))
		seen.by = f->code / NVS_MOVED_FIXED_BY % (NVS_FIXED_LAST + 1);
	if (f->code & NVS_MOVED_READY) {
		CHECK(f->epoch == c->epoch || c->revoked);
		seen.ready++;
		c->since_ns = test_now();
	}
	seen.stuck_memory += (f->code & NVS_MOVED_NO_MEMORY) != 0;
	seen.stuck_arena += (f->code & NVS_MOVED_NO_ARENA) != 0;
	seen.stuck_error += (f->code & NVS_MOVED_ERROR) != 0;
	if (f->epoch && !c->m.away) {
		seen.early += !c->since_ns; /* its memory was away at the grant, and its gate is still closed */
		c->since_ns = c->since_ns ? c->since_ns : test_now();
	}
}

/* A GPU that nobody else uses, without swapping. */
static void other_gpu(struct conn *c, const struct nvs_frame *f)
{
	struct nvs_frame r = { .channel = f->channel };

	switch (f->type) {
	case NVS_ATTACH:
		r.type = NVS_ATTACHED;
		answer(c, r, -1);
		break;
	case NVS_REQUEST:
		r.type = NVS_GRANT;
		r.epoch = ++epochs;
		__atomic_store_n(&c->page->slot[f->channel].word, (uint32_t)r.epoch, __ATOMIC_SEQ_CST);
		nvs_futex_wake(&c->page->slot[f->channel].word, false);
		answer(c, r, -1);
		break;
	case NVS_RESERVE:
		r.type = NVS_RESERVED;
		r.u.memory.total = r.u.memory.used = f->u.reserve.total;
		r.u.memory.serial = f->u.reserve.serial;
		answer(c, r, -1);
		break;
	}
}

/* False: the connection is over. */
static bool serve(struct conn *c)
{
	struct nvs_frame f, r = { 0 };
	ssize_t n = recv(c->fd, &f, sizeof(f), MSG_DONTWAIT);
	int fd;

	if (n != sizeof(f))
		return false;
	if (f.channel) {
		other_gpu(c, &f);
		return true;
	}
	switch (f.type) {
	case NVS_REGISTER:
		fd = memory(NVS_PAGE_SIZE);
		c->page = mmap(NULL, NVS_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(c->page != MAP_FAILED);
		c->page->magic = NVS_PAGE_MAGIC;
		c->page->version = NVS_WIRE_VERSION;
		c->page->slots = NVS_MAX_CHANNELS;
		c->page->features = NVS_FEATURE_PREEMPT;
		for (int i = 0; i < NVS_MAX_CHANNELS; i++)
			c->page->slot[i].limit_seq = 2;
		c->page->slot[0].mem_limit = config.limit;
		r.type = NVS_WELCOME;
		r.u.welcome.page_size = NVS_PAGE_SIZE;
		r.u.welcome.slots = NVS_MAX_CHANNELS;
		answer(c, r, fd);
		close(fd);
		break;
	case NVS_ATTACH:
		c->wants = f.code & NVS_ATTACH_WANT;
		if (f.epoch && !holder()) { /* adopted */
			set_epoch(c, f.epoch);
			epochs = f.epoch > epochs ? f.epoch : epochs;
			c->since_ns = test_now();
			word(c, (uint32_t)f.epoch);
		}
		set_room(c, 1);
		c->attached = true;
		seen.attached++;
		answer(c, (struct nvs_frame){ .type = NVS_ATTACHED }, -1);
		break;
	case NVS_REQUEST:
		c->wants = true;
		break;
	case NVS_RELEASE:
		if (f.epoch == c->epoch)
			set_epoch(c, 0);
		c->cut = f.u.released.flags & NVS_RELEASED_PREEMPTED;
		c->wants = c->wants || c->cut;
		seen.cut += c->cut;
		break;
	case NVS_RESERVE:
		r.type = NVS_RESERVED;
		if (config.limit && f.u.reserve.least > config.limit && !(f.code & NVS_RESERVE_FORCE))
			r.code = NVS_ERR_MEMORY;
		else if (config.limit && f.u.reserve.total > config.limit)
			c->reserved = f.u.reserve.least;
		else
			c->reserved = f.u.reserve.total;
		r.u.memory.total = r.u.memory.used = c->reserved;
		r.u.memory.limit = config.limit;
		r.u.memory.serial = f.u.reserve.serial;
		answer(c, r, -1);
		break;
	case NVS_MOVED:
		on_moved(c, &f);
		break;
	}
	return true;
}

static void sum_up(void)
{
	seen.alive = 0;
	seen.wants = 0;
	seen.reserved = 0;
	seen.out = seen.in = seen.resident = seen.fixed = seen.away = 0;
	for (int i = 0; i < CONNS; i++) {
		seen.alive += conns[i].attached;
		seen.wants += conns[i].attached && conns[i].wants;
		seen.reserved += conns[i].reserved;
		seen.out += conns[i].m.out_bytes;
		seen.in += conns[i].m.in_bytes;
		seen.resident += conns[i].m.resident;
		seen.fixed += conns[i].m.fixed;
		seen.away += conns[i].m.away;
	}
	if (seen.resident > seen.resident_max)
		seen.resident_max = seen.resident;
}

static void accept_one(void)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);
	int fd = accept4(place.listener, NULL, NULL, SOCK_CLOEXEC);

	for (int i = 0; i < CONNS && fd >= 0; i++)
		if (!conns[i].fd) {
			conns[i].fd = fd;
			CHECK(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0);
			conns[i].pid = peer.pid;
			return;
		}
	CHECK(fd < 0);
}

static void *run(void *arg)
{
	(void)arg;
	for (;;) {
		struct pollfd p[CONNS + 2] = { { stop_pipe[0], POLLIN, 0 }, { place.listener, POLLIN, 0 } };

		for (int i = 0; i < CONNS; i++)
			p[2 + i] = (struct pollfd){ conns[i].fd ? conns[i].fd : -1, POLLIN, 0 };
		poll(p, CONNS + 2, 5);
		pthread_mutex_lock(&lock);
		if (p[0].revents) {
			pthread_mutex_unlock(&lock);
			return NULL;
		}
		if (p[1].revents)
			accept_one();
		for (int i = 0; i < CONNS; i++)
			if (p[2 + i].revents && conns[i].fd && !serve(&conns[i]))
				drop(&conns[i]);
		arrange();
		sum_up();
		pthread_mutex_unlock(&lock);
	}
}

static void told_map(int fd)
{
	told = mmap(NULL, CONNS * sizeof(*told), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(told != MAP_FAILED);
}

void swapper_init(void)
{
	int fd = memfd_create("told", 0);
	char number[16];

	CHECK(fd >= 0 && ftruncate(fd, CONNS * sizeof(*told)) == 0);
	snprintf(number, sizeof(number), "%d", fd);
	CHECK(setenv(TOLD, number, 1) == 0);
	told_map(fd);
	fake_init(&place);
}

static const struct told *own(void)
{
	static const struct told nothing;

	if (!told)
		told_map(atoi(getenv(TOLD)));
	for (int i = 0; i < CONNS; i++)
		if (atomic_load(&told[i].pid) == getpid())
			return &told[i];
	return &nothing;
}

uint64_t swapper_away(void)
{
	const struct told *t = own();

	/* What it told in its turn is known when that is seen to be over. */
	return atomic_load(&t->holds) ? 0 : atomic_load(&t->away);
}

uint64_t swapper_fixed(void)
{
	return atomic_load(&own()->fixed);
}

void swapper_start(const struct swapper_config *c)
{
	config = *c;
	CHECK(pipe2(stop_pipe, O_CLOEXEC) == 0);
	fake_listen(&place);
	CHECK(pthread_create(&thread, NULL, run, NULL) == 0);
}

void swapper_stop(void)
{
	CHECK(write(stop_pipe[1], "", 1) == 1);
	pthread_join(thread, NULL);
	close(stop_pipe[0]);
	close(stop_pipe[1]);
	for (int i = 0; i < CONNS; i++)
		if (conns[i].fd)
			drop(&conns[i]);
	fake_die(&place);
}

void swapper_end(void)
{
	swapper_stop();
	fake_end(&place);
}

struct swapper_seen swapper_seen(void)
{
	struct swapper_seen s;

	pthread_mutex_lock(&lock);
	s = seen;
	pthread_mutex_unlock(&lock);
	return s;
}

void swapper_arena(uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	config.arena = bytes;
	pthread_mutex_unlock(&lock);
}

void swapper_room(uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	fixed_room = bytes;
	pthread_mutex_unlock(&lock);
}

void swapper_withhold(bool yes)
{
	pthread_mutex_lock(&lock);
	withheld = yes;
	pthread_mutex_unlock(&lock);
}

void swapper_still(bool yes)
{
	pthread_mutex_lock(&lock);
	still = yes;
	arrange();
	pthread_mutex_unlock(&lock);
}

void swapper_standing(bool yes)
{
	pthread_mutex_lock(&lock);
	standing = yes;
	pthread_mutex_unlock(&lock);
}
