// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "futex.h"

#define CONNS 64

struct conn {
	int fd; /* 0: free */
	int page_fd;
	struct nvs_page *page;
	int gpu[NVS_MAX_CHANNELS]; /* 1 + index, 0: not attached */
	uint64_t reserved[LEDGER_GPUS];
};

static struct fake place;
static struct conn conns[CONNS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t thread;
static int stop_pipe[2];
static bool muted, slow, running;
static uint64_t limits[LEDGER_GPUS], others[LEDGER_GPUS];
static struct ledger_counts counts;

static uint64_t sum(int gpu, const struct conn *but)
{
	uint64_t s = others[gpu];

	for (int i = 0; i < CONNS; i++)
		if (conns[i].fd && &conns[i] != but)
			s += conns[i].reserved[gpu];
	return s;
}

static void write_slot(struct conn *c, unsigned channel, int gpu)
{
	struct nvs_slot *s = &c->page->slot[channel];

	__atomic_add_fetch(&s->limit_seq, 1, __ATOMIC_SEQ_CST);
	__atomic_store_n(&s->mem_limit, limits[gpu], __ATOMIC_SEQ_CST);
	__atomic_store_n(&s->mem_used, sum(gpu, NULL), __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&s->limit_seq, 1, __ATOMIC_SEQ_CST);
}

static void tell(int gpu)
{
	for (int i = 0; i < CONNS; i++)
		for (unsigned ch = 0; conns[i].fd && conns[i].page && ch < NVS_MAX_CHANNELS; ch++)
			if (conns[i].gpu[ch] == gpu + 1)
				write_slot(&conns[i], ch, gpu);
}

static void drop(struct conn *c)
{
	close(c->fd);
	if (c->page) {
		munmap(c->page, NVS_PAGE_SIZE);
		close(c->page_fd);
	}
	memset(c, 0, sizeof(*c));
	for (int g = 0; g < LEDGER_GPUS; g++)
		tell(g);
}

static void answer(struct conn *c, struct nvs_frame f)
{
	f.version = NVS_WIRE_VERSION;
	(void)!send(c->fd, &f, sizeof(f), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void welcome(struct conn *c)
{
	struct nvs_frame w = { .version = NVS_WIRE_VERSION, .type = NVS_WELCOME };
	struct fake f = { .conn = c->fd };
	static const struct timespec late = { 0, 300000000 };

	if (slow)
		nanosleep(&late, NULL);
	c->page_fd = memfd_create("grant-page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK(c->page_fd >= 0 && ftruncate(c->page_fd, NVS_PAGE_SIZE) == 0);
	CHECK(fcntl(c->page_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
	c->page = mmap(NULL, NVS_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, c->page_fd, 0);
	CHECK(c->page != MAP_FAILED);
	c->page->magic = NVS_PAGE_MAGIC;
	c->page->version = NVS_WIRE_VERSION;
	c->page->slots = NVS_MAX_CHANNELS;
	w.u.welcome.client_id = 1;
	w.u.welcome.page_size = NVS_PAGE_SIZE;
	w.u.welcome.slots = NVS_MAX_CHANNELS;
	f.page_fd = c->page_fd;
	if (!fake_send_fds(&f, w, 1)) {
		drop(c); /* on a slow machine it has given up, and tries again */
		return;
	}
	counts.registered++;
}

static void attach(struct conn *c, const struct nvs_frame *f)
{
	int gpu = f->u.attach.uuid[NVS_UUID_SIZE - 1];
	struct nvs_frame a = { .type = NVS_ATTACHED, .channel = f->channel };

	if (gpu >= LEDGER_GPUS) {
		a.code = NVS_ERR_UNKNOWN_GPU;
	} else if (f->code & NVS_ATTACH_OBSERVE) {
		counts.observed++;
		write_slot(c, f->channel, gpu);
	} else {
		counts.attached++;
		c->gpu[f->channel] = gpu + 1;
		write_slot(c, f->channel, gpu);
	}
	answer(c, a);
	if (f->code & NVS_ATTACH_WANT) {
		__atomic_store_n(&c->page->slot[f->channel].word, 7, __ATOMIC_SEQ_CST);
		answer(c, (struct nvs_frame){ .type = NVS_GRANT, .channel = f->channel, .epoch = 7 });
	}
}

static void reserve(struct conn *c, const struct nvs_frame *f)
{
	int gpu = c->gpu[f->channel] - 1;
	struct nvs_frame a = { .type = NVS_RESERVED, .channel = f->channel };
	const struct nvs_reserve *r = &f->u.reserve;
	uint64_t rest;

	if (gpu < 0)
		return;
	CHECK(r->least <= r->total);
	rest = sum(gpu, c);
	rest = limits[gpu] > rest ? limits[gpu] - rest : 0;
	counts.asked++;
	if ((f->code & NVS_RESERVE_FORCE) || !limits[gpu] || r->total <= c->reserved[gpu] ||
	    r->total <= rest) {
		counts.forced += (f->code & NVS_RESERVE_FORCE) != 0;
		c->reserved[gpu] = r->total;
	} else if (r->least <= rest) {
		c->reserved[gpu] = rest;
	} else {
		a.code = NVS_ERR_MEMORY;
		counts.refused++;
	}
	tell(gpu);
	a.u.memory = (struct nvs_reserved){ c->reserved[gpu], sum(gpu, NULL), limits[gpu], r->serial,
					    { 0 } };
	if (!muted)
		answer(c, a);
}

static void serve(struct conn *c)
{
	struct nvs_frame f;
	ssize_t n = recv(c->fd, &f, sizeof(f), MSG_DONTWAIT);

	if (n < 0)
		return;
	if (n != sizeof(f)) {
		drop(c);
		return;
	}
	switch (f.type) {
	case NVS_REGISTER:
		welcome(c);
		break;
	case NVS_ATTACH:
		attach(c, &f);
		break;
	case NVS_REQUEST:
		__atomic_store_n(&c->page->slot[f.channel].word, 7, __ATOMIC_SEQ_CST);
		nvs_futex_wake(&c->page->slot[f.channel].word, false);
		answer(c, (struct nvs_frame){ .type = NVS_GRANT, .channel = f.channel, .epoch = 7 });
		break;
	case NVS_RESERVE:
		reserve(c, &f);
		break;
	}
}

static void *serve_all(void *arg)
{
	(void)arg;
	for (;;) {
		struct pollfd p[CONNS + 2] = { { place.listener, POLLIN, 0 }, { stop_pipe[0], POLLIN, 0 } };

		pthread_mutex_lock(&lock);
		for (int i = 0; i < CONNS; i++)
			p[i + 2] = (struct pollfd){ conns[i].fd ? conns[i].fd : -1, POLLIN, 0 };
		pthread_mutex_unlock(&lock);
		poll(p, CONNS + 2, -1);
		if (p[1].revents)
			return NULL;
		pthread_mutex_lock(&lock);
		for (int i = 0; i < CONNS; i++)
			if (p[i + 2].revents && conns[i].fd)
				serve(&conns[i]);
		if (p[0].revents) {
			int i = 0;

			while (i < CONNS && conns[i].fd)
				i++;
			CHECK(i < CONNS);
			conns[i].fd = accept4(place.listener, NULL, NULL, SOCK_CLOEXEC);
			CHECK(conns[i].fd > 0);
		}
		pthread_mutex_unlock(&lock);
	}
}

void ledger_init(void)
{
	fake_init(&place);
}

void ledger_start(void)
{
	fake_listen(&place);
	CHECK(pipe2(stop_pipe, O_CLOEXEC) == 0);
	CHECK(pthread_create(&thread, NULL, serve_all, NULL) == 0);
	running = true;
}

void ledger_stop(void)
{
	CHECK(write(stop_pipe[1], "", 1) == 1);
	CHECK(pthread_join(thread, NULL) == 0);
	close(stop_pipe[0]);
	close(stop_pipe[1]);
	for (int i = 0; i < CONNS; i++)
		if (conns[i].fd)
			drop(&conns[i]);
	fake_die(&place);
	running = false;
}

void ledger_end(void)
{
	if (running)
		ledger_stop();
	fake_end(&place);
}

void ledger_limit(int gpu, uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	limits[gpu] = bytes;
	tell(gpu);
	pthread_mutex_unlock(&lock);
}

void ledger_others(int gpu, uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	others[gpu] = bytes;
	tell(gpu);
	pthread_mutex_unlock(&lock);
}

void ledger_mute(bool mute)
{
	pthread_mutex_lock(&lock);
	muted = mute;
	pthread_mutex_unlock(&lock);
}

void ledger_slow(void)
{
	pthread_mutex_lock(&lock);
	slow = true;
	pthread_mutex_unlock(&lock);
}

uint64_t ledger_reserved(int gpu)
{
	uint64_t bytes;

	pthread_mutex_lock(&lock);
	bytes = sum(gpu, NULL);
	pthread_mutex_unlock(&lock);
	return bytes;
}

struct ledger_counts ledger_counts(void)
{
	struct ledger_counts c;

	pthread_mutex_lock(&lock);
	c = counts;
	pthread_mutex_unlock(&lock);
	return c;
}

unsigned ledger_connections(void)
{
	unsigned n = 0;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < CONNS; i++)
		n += conns[i].fd != 0;
	pthread_mutex_unlock(&lock);
	return n;
}
