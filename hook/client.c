// SPDX-License-Identifier: Apache-2.0
/*
 * client.c: the client thread, the connection, and the slow way through the
 * gate.
 *
 * One lock guards the leases, the connection and their statistics. It is never
 * held over a driver call, a drain or a wait. Lease events of an application's
 * thread never ask for a drain; those are the client thread's.
 */
#include "client.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "futex.h"
#include "gate.h"
#include "glibc.h"
#include "lease.h"
#include "log.h"
#include "memory.h"
#include "wire_io.h"

#define MS 1000000ull
#define S  1000000000ull

#define START_WAIT_NS   (2 * S)   /* gated calls wait this long for the first answer */
#define LOSS_WAIT_NS    (5 * S)   /* and this long for a lost scheduler */
#define ATTACH_WAIT_NS  (5 * S)
#define NUDGE_NS        (1 * S)   /* waiting threads repeat their request */
#define WAIT_PIECE_NS   (200 * MS) /* a wait looks at the connection this often */
#define EXIT_WAIT_NS    (1 * S)   /* at the end of the process calls wait no longer */
#define RETRY_MIN_NS    (50 * MS)
#define RETRY_MAX_NS    (1 * S)
#define STATS_NS        (1 * S)
#define IDLE_NS         (1 * MS)  /* no call for so long: release early */
#define DRAIN_PATIENCE_NS (1 * S) /* with a capture open, unless REVOKE says more */
#define SHIM_VERSION    (0u << 16 | 1u << 8 | 0u)

enum link {
	LINK_STARTING, /* no answer yet */
	LINK_UP,       /* registered */
	LINK_LOST,     /* was up; waiting for it to come back */
	LINK_ABSENT,   /* no scheduler: run open */
};

struct channel {
	struct lease lease;
	struct nvs_device device;
	atomic_uint changed;     /* futex: the lease or the connection changed */
	atomic_bool used;
	bool drain;              /* LEASE_ACT_DRAIN is to be done */
	bool drainer;            /* a thread of its own does the drains */
	atomic_flag spinning;    /* a thread spins for a grant */
	atomic_uint drain_wanted; /* futex of that thread */
	uint64_t attach_ns;      /* when ATTACH was sent */
	uint64_t request_ns;     /* when REQUEST was sent */
	uint64_t closed_ns;      /* when the gate was closed */
	uint64_t drain_ns;       /* length of the last drain */
	uint64_t grace_ns;       /* of the last REVOKE */
	uint64_t grant_calls;    /* gated calls before the grant */
	uint64_t idle_calls;     /* early release: calls at the last look */
	uint64_t idle_ns;        /* and since when that number holds */
	struct nvs_stats stats;
	struct nvs_stats sent;
	uint64_t sent_ns;
};

static const struct nvs_slot free_slot = { .word = 1 };
static const struct nvs_slot closed_slot = { .word = NVS_WORD_CLOSED };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct channel channels[NVS_MAX_CHANNELS];
static unsigned channel_count;

static struct {
	enum link link;
	int fd;                /* -1: none */
	bool registered;       /* ever */
	uint64_t since_ns;     /* in this link state */
	uint64_t retry_ns;     /* next attempt to connect */
	uint64_t backoff_ns;
	uint64_t hello_ns;     /* when REGISTER was sent */
	bool closed_policy;    /* NVSHARE_SCHEDULER_LOSS=closed */
	uint32_t interposed, bypassed;
	const struct nvs_page *page;
} client = { .fd = -1 };

static atomic_bool exiting;
static uint64_t exiting_ns;

uint64_t nvs_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * S + (uint64_t)t.tv_nsec;
}

/* Nanoseconds from then to now; 0 if then was set after now was read. */
static uint64_t elapsed(uint64_t now, uint64_t then)
{
	return now > then ? now - then : 0;
}

int nvs_client_channel(int dev)
{
	for (unsigned i = 0; i < channel_count; i++)
		if (channels[i].device.dev == dev)
			return (int)i;
	return -1;
}

/* ---- lease actions; the lock is held ---- */

static void wake(unsigned i)
{
	const struct nvs_slot *slot = atomic_load(&nvs_channels[i].slot);

	atomic_fetch_add(&channels[i].changed, 1);
	nvs_futex_wake((uint32_t *)&channels[i].changed, true);
	if (slot != &free_slot && slot != &closed_slot)
		nvs_futex_wake(&slot->word, false);
}

static void set_epoch(unsigned i, uint32_t word)
{
	atomic_store(&nvs_channels[i].epoch, word);
}

static void set_slot(unsigned i, const struct nvs_slot *slot)
{
	const struct nvs_slot *old = atomic_load(&nvs_channels[i].slot);

	atomic_store(&nvs_channels[i].slot, slot);
	if (old != slot && old != &free_slot && old != &closed_slot)
		nvs_futex_wake(&old->word, false);
}

/* STATS and REQUEST are tried again anyway; the rest must arrive. */
static bool send_frame(const struct nvs_frame *f)
{
	bool must = f->type != NVS_STATS && f->type != NVS_REQUEST;

	return client.fd >= 0 && nvs_send_frame(client.fd, f, must);
}

static void send_attach(unsigned i, const struct lease_out *out)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_ATTACH,
			       .channel = (uint16_t)i, .epoch = out->epoch,
			       .code = out->want ? NVS_ATTACH_WANT : 0 };

	memcpy(f.u.attach.uuid, channels[i].device.uuid, NVS_UUID_SIZE);
	f.u.attach.ordinal = i;
	f.u.attach.total_mem = channels[i].device.total_mem;
	channels[i].attach_ns = channels[i].request_ns = nvs_now();
	send_frame(&f);
}

static void send_release(unsigned i, const struct lease_out *out)
{
	struct channel *c = &channels[i];
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_RELEASE,
			       .channel = (uint16_t)i, .epoch = out->epoch,
			       .code = out->reason };

	f.u.released.drain_ns = c->drain_ns;
	f.u.released.calls = nvs_gate_calls(i) - c->grant_calls;
	send_frame(&f);
	c->drain_ns = 0;
	c->grant_calls = nvs_gate_calls(i);
}

static void send_request(unsigned i)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_REQUEST,
			       .channel = (uint16_t)i };

	channels[i].request_ns = nvs_now();
	send_frame(&f); /* if the socket is full the next nudge tries again */
}

static void step(unsigned i, struct lease_event ev)
{
	struct channel *c = &channels[i];
	struct lease_out out = lease_step(&c->lease, ev);

	if (!out.actions)
		return;
	if (out.actions & LEASE_ACT_CLOSE) {
		set_epoch(i, NVS_WORD_NONE);
		c->closed_ns = nvs_now();
	}
	if (out.actions & LEASE_ACT_PAGE)
		set_slot(i, &client.page->slot[i]);
	if (out.actions & LEASE_ACT_OPEN) {
		set_epoch(i, (uint32_t)out.epoch);
		c->idle_ns = 0;
	}
	if (out.actions & LEASE_ACT_FREE) {
		set_epoch(i, NVS_WORD_NONE);
		set_slot(i, &free_slot);
		set_epoch(i, free_slot.word);
		nvs_debugf("GPU %u: running without a scheduler", i);
	}
	if (out.actions & LEASE_ACT_ATTACH)
		send_attach(i, &out);
	if (out.actions & LEASE_ACT_RELEASE)
		send_release(i, &out);
	if (out.actions & LEASE_ACT_REQUEST)
		send_request(i);
	if (out.actions & LEASE_ACT_DRAIN)
		c->drain = true;
	if (out.actions & ~(unsigned)LEASE_ACT_REQUEST)
		wake(i);
}

static void step_all(enum lease_event_type type)
{
	for (unsigned i = 0; i < channel_count; i++)
		step(i, (struct lease_event){ .type = type });
}

static uint32_t word_of(unsigned i)
{
	return __atomic_load_n(&atomic_load(&nvs_channels[i].slot)->word, __ATOMIC_SEQ_CST);
}

/* ---- application threads ---- */

/* Whether a thread that has waited since t0 should run without a scheduler. */
static bool out_of_patience(unsigned i, uint64_t now)
{
	struct channel *c = &channels[i];

	/* At the end of the process a drain does not finish, see nvs_driver_stop. */
	if (atomic_load(&exiting) && c->lease.gate == LEASE_DRAINING)
		return elapsed(now, exiting_ns) > EXIT_WAIT_NS;
	if (c->lease.link == LEASE_ATTACHED)
		return false;
	switch (client.link) {
	case LINK_ABSENT:
		return true;
	case LINK_STARTING:
		return elapsed(now, client.since_ns) > START_WAIT_NS;
	case LINK_LOST:
		return !client.closed_policy && elapsed(now, client.since_ns) > LOSS_WAIT_NS;
	case LINK_UP:
		return !client.closed_policy && c->lease.link == LEASE_ATTACHING &&
		       elapsed(now, c->attach_ns) > ATTACH_WAIT_NS;
	}
	return false;
}

/*
 * The scheduler says that this channel is next: looks out for the grant
 * without sleeping, one thread of the process, once in its wait.
 */
static void spin_for_grant(struct channel *c, const struct nvs_slot *slot, uint32_t seen)
{
	uint64_t end = nvs_now() + NVS_SPIN_NS;

	if (atomic_flag_test_and_set(&c->spinning))
		return;
	while (__atomic_load_n(&slot->word, __ATOMIC_RELAXED) == seen && nvs_now() < end)
		for (int i = 0; i < 16; i++)
			nvs_cpu_relax();
	atomic_flag_clear(&c->spinning);
}

/* The lock is held; it is given up while waiting. */
static void wait_piece(unsigned i, bool *spun)
{
	struct channel *c = &channels[i];
	const struct nvs_slot *slot = atomic_load(&nvs_channels[i].slot);
	bool on_page = c->lease.link == LEASE_ATTACHED && c->lease.gate == LEASE_CLOSED;
	uint32_t seen = on_page ? word_of(i) : atomic_load(&c->changed);

	pthread_mutex_unlock(&lock);
	if (on_page && !*spun &&
	    __atomic_load_n(&slot->flags, __ATOMIC_RELAXED) & NVS_GRANT_NEXT) {
		*spun = true;
		spin_for_grant(c, slot, seen);
	}
	if (on_page)
		nvs_futex_wait(&slot->word, seen, WAIT_PIECE_NS, false);
	else
		nvs_futex_wait((uint32_t *)&c->changed, seen, WAIT_PIECE_NS, true);
	pthread_mutex_lock(&lock);
}

void nvs_gate_wait(unsigned i)
{
	struct channel *c = &channels[i];
	uint64_t start = nvs_now(), now = start, waited;
	bool spun = false;
	int saved = errno;

	atomic_store(&c->used, true);
	pthread_mutex_lock(&lock);
	step(i, (struct lease_event){ .type = LEASE_EV_USE });
	step(i, (struct lease_event){ .type = LEASE_EV_WANT });
	for (;;) {
		uint32_t word = word_of(i);

		step(i, (struct lease_event){ .type = LEASE_EV_WORD, .word = word });
		if (word == atomic_load(&nvs_channels[i].epoch) ||
		    !atomic_load(&nvs_gate.active))
			break;
		if (out_of_patience(i, now)) {
			if (c->lease.gate == LEASE_DRAINING)
				atomic_store(&nvs_gate.active, false);
			step(i, (struct lease_event){ .type = LEASE_EV_GIVE_UP });
			if (c->lease.gate == LEASE_FREE)
				break;
		} else if (elapsed(now, c->request_ns) > NUDGE_NS) {
			step(i, (struct lease_event){ .type = LEASE_EV_NUDGE });
		}
		wait_piece(i, &spun);
		now = nvs_now();
	}
	step(i, (struct lease_event){ .type = LEASE_EV_LEAVE });
	c->idle_ns = 0; /* its call comes now */
	waited = nvs_now() - start;
	c->stats.waits++;
	c->stats.wait_ns += waited;
	if (waited > c->stats.wait_max_ns)
		c->stats.wait_max_ns = waited;
	pthread_mutex_unlock(&lock);
	errno = saved;
}

void nvs_client_use(unsigned i)
{
	int saved = errno;

	if (i >= channel_count || atomic_exchange(&channels[i].used, true))
		return;
	pthread_mutex_lock(&lock);
	step(i, (struct lease_event){ .type = LEASE_EV_USE });
	pthread_mutex_unlock(&lock);
	errno = saved;
}

/* ---- drains ---- */

/* Not under the lock. The channel's gate is closed. */
static void do_drain(unsigned i)
{
	struct channel *c = &channels[i];
	uint64_t patience = c->grace_ns ? c->grace_ns / 4 * 3 : DRAIN_PATIENCE_NS;
	enum nvs_drained result;

	nvs_gate_quiesce(i);
	result = nvs_drain(i, patience);
	if (result == NVS_DRAIN_STOPPED)
		return; /* the end of the process releases the GPU */
	if (result == NVS_DRAIN_UNPROVEN)
		nvs_debugf("GPU %u: released with a capture open, work may still run", i);
	pthread_mutex_lock(&lock);
	c->drain_ns = nvs_now() - c->closed_ns;
	step(i, (struct lease_event){ .type = LEASE_EV_DRAINED });
	pthread_mutex_unlock(&lock);
}

static void thread_setup(const char *name)
{
	int mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	prctl(PR_SET_NAME, name);
	if (nvs_driver.exchange_capture_mode && !atomic_load(&exiting))
		nvs_driver.exchange_capture_mode(&mode);
}

static void *drainer_main(void *arg)
{
	unsigned i = (unsigned)(uintptr_t)arg;
	struct channel *c = &channels[i];
	unsigned done = 0;

	thread_setup("nvshare-drain");
	for (;;) {
		unsigned wanted = atomic_load(&c->drain_wanted);

		if (wanted == done) {
			nvs_futex_wait((uint32_t *)&c->drain_wanted, done, 60 * S, true);
			continue;
		}
		done = wanted;
		do_drain(i);
	}
	return NULL;
}

static bool start_thread(void *(*entry)(void *), void *arg)
{
	sigset_t all, old;
	pthread_t thread;
	bool ok;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	ok = pthread_create(&thread, NULL, entry, arg) == 0;
	if (ok)
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return ok;
}

/*
 * With one GPU in use the client thread drains by itself; with several each
 * has a thread, so that a drain of one never delays a revoke of another.
 */
static void run_drains(void)
{
	unsigned used = 0;

	for (unsigned i = 0; i < channel_count; i++)
		used += atomic_load(&channels[i].used);
	for (unsigned i = 0; i < channel_count; i++) {
		struct channel *c = &channels[i];

		if (!c->drain)
			continue;
		c->drain = false;
		if (used > 1 && !c->drainer)
			c->drainer = start_thread(drainer_main, (void *)(uintptr_t)i);
		if (c->drainer) {
			atomic_fetch_add(&c->drain_wanted, 1);
			nvs_futex_wake((uint32_t *)&c->drain_wanted, true);
		} else {
			do_drain(i);
		}
	}
}

/* ---- the connection; client thread only, under the lock ---- */

static void set_link(enum link link)
{
	if (client.link == link)
		return;
	client.link = link;
	client.since_ns = nvs_now();
	for (unsigned i = 0; i < channel_count; i++)
		wake(i);
}

static uint64_t next_backoff(void)
{
	return client.backoff_ns * 2 < RETRY_MAX_NS ? client.backoff_ns * 2 : RETRY_MAX_NS;
}

static void disconnect(const char *why)
{
	nvs_debugf("connection closed: %s", why);
	close(client.fd);
	client.fd = -1;
	client.retry_ns = nvs_now() + client.backoff_ns;
	if (client.link == LINK_UP) {
		step_all(LEASE_EV_DOWN);
		set_link(LINK_LOST);
	} else {
		client.backoff_ns = next_backoff();
		if (client.link == LINK_STARTING)
			set_link(LINK_ABSENT);
	}
}

static void try_connect(void)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_REGISTER };
	int error = 0;

	client.fd = nvs_connect(&error);
	if (client.fd < 0) {
		client.backoff_ns = next_backoff();
		client.retry_ns = nvs_now() + client.backoff_ns;
		/* EAGAIN: there is a scheduler, its queue is full. */
		if (client.link == LINK_STARTING && error != EAGAIN) {
			nvs_debugf("no scheduler: %s", strerror(error));
			set_link(LINK_ABSENT);
		}
		return;
	}
	f.code = client.registered ? NVS_REGISTER_RECONNECT : 0;
	f.u.reg.min_version = NVS_WIRE_VERSION;
	f.u.reg.channels = (uint16_t)channel_count;
	f.u.reg.shim_version = SHIM_VERSION;
	f.u.reg.interposed = client.interposed;
	f.u.reg.bypassed = client.bypassed;
	client.hello_ns = nvs_now();
	if (!send_frame(&f))
		disconnect("cannot register");
}

static bool welcome(const struct nvs_frame *f, int fd)
{
	const struct nvs_page *page = nvs_map_page(fd);

	if (!page || f->u.welcome.page_size != NVS_PAGE_SIZE)
		return false;
	/* Pages of earlier connections stay mapped: a thread may look at one. */
	client.page = page;
	client.registered = true;
	client.backoff_ns = RETRY_MIN_NS;
	nvs_debugf("registered as client %llu", (unsigned long long)f->u.welcome.client_id);
	set_link(LINK_UP);
	step_all(LEASE_EV_UP);
	return true;
}

/* Returns false if the frame is not one to be had here. */
static bool handle(const struct nvs_frame *f, int fd)
{
	unsigned i = f->channel;
	struct lease_event ev = { .code = f->code, .epoch = f->epoch };

	if (f->version != NVS_WIRE_VERSION || i >= NVS_MAX_CHANNELS)
		return false;
	if (client.link != LINK_UP || f->type == NVS_WELCOME) {
		if (f->type == NVS_REFUSED) {
			nvs_debugf("refused: error %u: %.48s", f->code, f->u.refused.text);
			client.backoff_ns = RETRY_MAX_NS;
			return false;
		}
		return f->type == NVS_WELCOME && client.link != LINK_UP && welcome(f, fd);
	}
	if (i >= channel_count)
		return false;
	switch (f->type) {
	case NVS_ATTACHED:
		ev.type = LEASE_EV_ATTACHED;
		ev.word = __atomic_load_n(&client.page->slot[i].word, __ATOMIC_SEQ_CST);
		if (f->code)
			nvs_debugf("GPU %u is not arbitrated: error %u", i, f->code);
		break;
	case NVS_GRANT:
		ev.type = LEASE_EV_GRANT;
		ev.word = word_of(i);
		break;
	case NVS_REVOKE:
		ev.type = LEASE_EV_REVOKE;
		channels[i].grace_ns = f->u.revoke.grace_ns;
		break;
	case NVS_NOTICE:
	case NVS_REFUSED:
		return f->type == NVS_NOTICE;
	default:
		return false;
	}
	step(i, ev);
	return true;
}

static void receive(void)
{
	while (client.fd >= 0) {
		struct nvs_frame f;
		int fd = -1;
		int n = nvs_receive_frame(client.fd, &f, &fd);

		if (n == 0)
			return;
		if (n < 0)
			disconnect("end of file");
		else if (!handle(&f, fd))
			disconnect("unexpected frame");
		if (fd >= 0)
			close(fd);
	}
}

/* ---- what the client thread does by the clock; under the lock ---- */

static void send_stats(uint64_t now)
{
	for (unsigned i = 0; i < channel_count; i++) {
		struct channel *c = &channels[i];
		struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_STATS,
				       .channel = (uint16_t)i };

		if (c->lease.link != LEASE_ATTACHED || elapsed(now, c->sent_ns) < STATS_NS)
			continue;
		c->stats.calls = nvs_gate_calls(i);
		nvs_memory_read(i, &c->stats.mem_bytes, &c->stats.mem_peak);
		if (memcmp(&c->stats, &c->sent, sizeof(c->sent)) == 0)
			continue;
		f.u.stats = c->stats;
		if (send_frame(&f)) {
			c->sent = c->stats;
			c->sent_ns = now;
		}
	}
}

/* The gate is open and somebody waits: whether there was no call for IDLE_NS. */
static bool idle_long(unsigned i, uint64_t now)
{
	struct channel *c = &channels[i];
	uint64_t calls = nvs_gate_calls(i);

	if (!c->idle_ns || calls != c->idle_calls || nvs_gate_busy(i)) {
		c->idle_calls = calls;
		c->idle_ns = now;
		return false;
	}
	return elapsed(now, c->idle_ns) >= IDLE_NS;
}

/* Returns the nanoseconds until it wants to be called again. */
static uint64_t early_release(uint64_t now)
{
	uint64_t next = STATS_NS;

	for (unsigned i = 0; i < channel_count; i++) {
		struct channel *c = &channels[i];
		bool idle;

		/* A thread that waited has not had its turn yet. */
		if (c->lease.link != LEASE_ATTACHED || c->lease.gate != LEASE_OPEN ||
		    c->lease.waiting ||
		    !__atomic_load_n(&client.page->slot[i].waiters, __ATOMIC_RELAXED)) {
			c->idle_ns = 0;
			continue;
		}
		next = IDLE_NS / 2;
		if (!idle_long(i, now))
			continue;
		/* The driver is asked without the lock; the lease is checked again. */
		pthread_mutex_unlock(&lock);
		idle = nvs_streams_idle(i);
		pthread_mutex_lock(&lock);
		if (idle && nvs_gate_calls(i) == c->idle_calls)
			step(i, (struct lease_event){ .type = LEASE_EV_IDLE });
	}
	return next;
}

static void *client_main(void *arg)
{
	(void)arg;
	thread_setup("nvshare");
	for (;;) {
		struct pollfd p = { .fd = -1, .events = POLLIN };
		uint64_t now = nvs_now(), wait;
		struct timespec t;

		pthread_mutex_lock(&lock);
		if (client.fd < 0 && now >= client.retry_ns)
			try_connect();
		if (client.fd >= 0 && client.link != LINK_UP && elapsed(now, client.hello_ns) > START_WAIT_NS * 5)
			disconnect("no answer to REGISTER");
		if (client.link == LINK_LOST && !client.closed_policy &&
		    elapsed(now, client.since_ns) > LOSS_WAIT_NS)
			set_link(LINK_ABSENT);
		send_stats(now);
		wait = early_release(now);
		if (client.fd < 0 && client.retry_ns < now + wait)
			wait = client.retry_ns > now ? client.retry_ns - now : 0;
		p.fd = client.fd;
		pthread_mutex_unlock(&lock);
		run_drains();

		t.tv_sec = (time_t)(wait / S);
		t.tv_nsec = (long)(wait % S);
		if (ppoll(&p, 1, &t, NULL) > 0) {
			pthread_mutex_lock(&lock);
			receive();
			pthread_mutex_unlock(&lock);
			run_drains();
		}
	}
	return NULL;
}

/* ---- life ---- */

void nvs_client_start(const struct nvs_device *devices, unsigned count, uint32_t interposed,
		      uint32_t bypassed)
{
	const char *loss = getenv("NVSHARE_SCHEDULER_LOSS");

	if (count == 0)
		return;
	pthread_mutex_lock(&lock);
	channel_count = count;
	for (unsigned i = 0; i < count; i++) {
		channels[i].device = devices[i];
		set_slot(i, &closed_slot);
		set_epoch(i, NVS_WORD_NONE);
	}
	client.link = LINK_STARTING;
	client.since_ns = nvs_now();
	client.retry_ns = 0;
	client.backoff_ns = RETRY_MIN_NS / 2;
	client.closed_policy = loss && strcmp(loss, "closed") == 0;
	client.interposed = interposed;
	client.bypassed = bypassed;
	pthread_mutex_unlock(&lock);
	nvs_gate_init();
	atomic_store(&nvs_gate.single, count == 1);
	if (start_thread(client_main, NULL))
		atomic_store(&nvs_gate.active, true);
	else
		nvs_debugf("no thread for the client: running without a scheduler");
}

void nvs_client_exit(void)
{
	if (!atomic_load(&nvs_gate.active) || atomic_load(&exiting))
		return;
	pthread_mutex_lock(&lock);
	exiting_ns = nvs_now();
	for (unsigned i = 0; i < channel_count; i++)
		channels[i].sent_ns = 0;
	send_stats(exiting_ns);
	atomic_store(&exiting, true);
	pthread_mutex_unlock(&lock);
	nvs_driver_stop();
}

void nvs_client_fork_child(void)
{
	static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

	if (client.fd >= 0)
		close(client.fd);
	memset(&client, 0, sizeof(client));
	client.fd = -1;
	memset(channels, 0, sizeof(channels));
	channel_count = 0;
	atomic_store(&exiting, false);
	lock = fresh;
	for (unsigned i = 0; i < NVS_MAX_CHANNELS; i++) {
		atomic_store(&nvs_channels[i].slot, NULL);
		set_epoch(i, NVS_WORD_NONE);
	}
}
