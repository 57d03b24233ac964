// SPDX-License-Identifier: Apache-2.0
/* client.c: the client thread and its connection to the scheduler. */
#include "client.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "connection.h"
#include "drain.h"
#include "drainer.h"
#include "grant.h"
#include "log.h"
#include "ops.h"
#include "preempt.h"
#include "rm.h"
#include "stream.h"
#include "slice.h"
#include "suspended.h"
#include "thread.h"
#include "throttle.h"
#include "utilization.h"
#include "wait.h"
#include "wire_io.h"

#define CROWDED_NS    (1 * NVS_MS)  /* the scheduler's queue is full: so long, and up to twice, to the next attempt */
#define RETRY_MIN_NS  (50 * NVS_MS)
#define RETRY_MAX_NS  (1 * NVS_S)
#define STEADY_NS     (1 * NVS_S)    /* a connection that lasted so long is made anew at once when it ends */
#define ABSENT_NS     (5 * NVS_S)  /* a scheduler that is lost, or refuses, for so long is absent */
#define TICK_NS       (1 * NVS_S)   /* the client thread looks at all at least this often */
#define IDLE_NS       (1 * NVS_MS)  /* no call for so long: release early */
#define GRACE_MAX_NS  (3600 * NVS_S) /* more is not believed */

/* Whether work may run on the GPU, whatever its lease says. */
static bool has_work(struct nvs_gpu *gpu)
{
	return nvs_gate_busy(gpu) || nvs_gpu_has_work(gpu);
}

static void step_all(enum lease_event_type type)
{
	NVS_FOR_EACH_GPU(gpu)
		nvs_gpu_step(gpu, (struct lease_event){ .type = type, .work = has_work(gpu) });
}

/* ---- the connection; client thread only, under the lock ---- */

static void set_link(enum link link)
{
	if (nvs_client.link == link)
		return;
	nvs_client.link = link;
	nvs_client.since_ns = nvs_now();
	NVS_FOR_EACH_GPU(gpu)
		nvs_gpu_wake(gpu);
}

static uint64_t next_backoff(void)
{
	return nvs_client.backoff_ns * 2 < RETRY_MAX_NS ? nvs_client.backoff_ns * 2 : RETRY_MAX_NS;
}

static void disconnect(const char *why)
{
	uint64_t now = nvs_now();

	nvs_debugf("connection closed: %s", why);
	nvs_descriptor_close(&nvs_client.socket);
	nvs_client.retry_ns = now + nvs_client.backoff_ns;
	/* A scheduler that answered no ATTACH leaves the threads at the gate a gap; see out_of_patience. */
	if (nvs_client.link == LINK_UP && nvs_elapsed(now, nvs_client.since_ns) >= STEADY_NS && nvs_client_attached()) {
		nvs_client.retry_ns = now; /* a tenant that has moved pauses until then */
		nvs_client.backoff_ns = RETRY_MIN_NS / 2;
	}
	nvs_client.alive = false;
	if (nvs_client.link == LINK_UP) {
		step_all(LEASE_EV_DOWN);
		set_link(LINK_LOST);
		nvs_suspended_lost();
		nvs_memory_ops.lost();
	} else {
		nvs_client.backoff_ns = next_backoff();
	}
}

/*
 * Whether to run without the scheduler: at once if there is none at the start, and after ABSENT_NS
 * if it has too many clients. Nothing but an answer ends the wait for a scheduler that lives.
 */
static bool absent(uint64_t now)
{
	if (nvs_client.closed_policy || nvs_client.alive)
		return false;
	if (nvs_client.link == LINK_STARTING && !nvs_client.crowded)
		return true;
	return (nvs_client.link == LINK_STARTING || nvs_client.link == LINK_LOST) &&
	       nvs_elapsed(now, nvs_client.since_ns) > ABSENT_NS;
}

/* Nobody weighs this process's time slice against those of others any more. */
static void run_alone(void)
{
	set_link(LINK_ABSENT);
	NVS_FOR_EACH_GPU(gpu) {
		nvs_slice_want(gpu, 0);
		gpu->slice.due = gpu->slice.due || gpu->slice.ever_set; /* it may not have been taken back */
	}
}

static void refused(const struct nvs_frame *f)
{
	nvs_debugf("refused: error %u: %.48s", f->code, f->u.refused.text);
	nvs_client.backoff_ns = RETRY_MAX_NS;
	if (nvs_client.link == LINK_STARTING && !nvs_client.crowded)
		nvs_client.since_ns = nvs_now();
	nvs_client.crowded = f->code == NVS_ERR_TOO_MANY;
}

static void try_connect(void)
{
	struct nvs_frame f = { .version = NVS_WIRE_VERSION, .type = NVS_REGISTER };
	int error = 0;

	nvs_client.socket = nvs_descriptor_of(nvs_connect(&error));
	/* EAGAIN: the queue of a scheduler that lives is full. */
	nvs_client.alive = nvs_client.socket.fd >= 0 || error == EAGAIN;
	if (nvs_client.socket.fd < 0) {
		uint64_t now = nvs_now();

		if (!nvs_client.alive) {
			nvs_debugf("no scheduler: %s", strerror(error));
			nvs_client.backoff_ns = next_backoff();
			nvs_client.crowded = false;
		}
		nvs_client.retry_ns = now + (nvs_client.alive ? CROWDED_NS + now % CROWDED_NS
							      : nvs_client.backoff_ns);
		return;
	}
	f.code = (nvs_client.registered ? NVS_REGISTER_RECONNECT : 0) |
		 (nvs_memory_ops.capable() ? NVS_REGISTER_SWAP : 0) | NVS_REGISTER_SLICES |
		 (nvs_client.bypassed ? 0 : NVS_REGISTER_SUSPEND) | (nvs_suspended_said() ? NVS_REGISTER_AWAY : 0);
	f.u.reg.min_version = NVS_WIRE_VERSION;
	f.u.reg.channels = (uint16_t)nvs_gpu_count;
	f.u.reg.shim_version = NVS_SHIM_VERSION;
	f.u.reg.interposed = nvs_client.interposed;
	f.u.reg.bypassed = nvs_client.bypassed;
	if (!nvs_client_send(&f))
		disconnect("cannot register");
}

static bool page_in_use(const struct nvs_page *page)
{
	const char *begin = (const char *)page, *end = begin + NVS_PAGE_SIZE;

	NVS_FOR_EACH_GPU(gpu) {
		const char *slot = (const char *)atomic_load(&gpu->slot);

		if (slot >= begin && slot < end)
			return true;
	}
	return false;
}

static bool welcome(const struct nvs_frame *f, int fd)
{
	const struct nvs_page *page;

	if (f->u.welcome.page_size != NVS_PAGE_SIZE)
		return false;
	page = nvs_map_page(fd, page_in_use);
	if (!page)
		return false;
	nvs_client.page = page;
	nvs_client.registered = true;
	nvs_client.crowded = false;
	nvs_client.backoff_ns = RETRY_MIN_NS;
	nvs_debugf("registered as client %llu", (unsigned long long)f->u.welcome.client_id);
	set_link(LINK_UP);
	step_all(LEASE_EV_UP);
	return true;
}

/* A page's word names no other epoch; see wire.h. */
static bool valid_epoch(uint64_t epoch)
{
	return (uint32_t)epoch != NVS_WORD_CLOSED && (uint32_t)epoch != NVS_WORD_NONE;
}

/* Before WELCOME. False: the scheduler may not send this frame now, or has refused us. */
static bool handle_first(const struct nvs_frame *f, int fd)
{
	if (f->type == NVS_REFUSED)
		refused(f);
	return f->type == NVS_WELCOME && nvs_client.link != LINK_UP && welcome(f, fd);
}

/* Returns false if the scheduler may not send this frame now. */
static bool handle(const struct nvs_frame *f, int fd)
{
	struct nvs_gpu *gpu;
	struct lease_event ev = { .code = f->code, .epoch = f->epoch };

	if (f->version != NVS_WIRE_VERSION || f->channel >= NVS_MAX_CHANNELS)
		return false;
	if (nvs_client.link != LINK_UP || f->type == NVS_WELCOME)
		return handle_first(f, fd);
	if (f->type == NVS_SUSPEND)
		return nvs_suspended_receive(f);
	if (f->channel >= nvs_gpu_count)
		return false;
	gpu = &nvs_gpus[f->channel];
	switch (f->type) {
	case NVS_ATTACHED:
		ev.type = LEASE_EV_ATTACHED;
		ev.word = __atomic_load_n(&nvs_client.page->slot[gpu->number].word, __ATOMIC_SEQ_CST);
		if (f->code)
			nvs_debugf("GPU %u is not scheduled: error %u", gpu->number, f->code);
		break;
	case NVS_GRANT:
		if (!valid_epoch(f->epoch))
			return false;
		ev.type = LEASE_EV_GRANT;
		ev.word = nvs_gpu_word(gpu);
		break;
	case NVS_REVOKE:
		if (!valid_epoch(f->epoch))
			return false;
		ev.type = LEASE_EV_REVOKE;
		ev.work = has_work(gpu);
		gpu->grace_ns = f->u.revoke.grace_ns < GRACE_MAX_NS
			? f->u.revoke.grace_ns : GRACE_MAX_NS;
		break;
	case NVS_SLICE:
		nvs_slice_want(gpu, f->u.slice.slice_ns);
		return true;
	case NVS_NOTICE:
		return true;
	case NVS_RESERVED:
	case NVS_ROOM:
	case NVS_ARENA:
		nvs_memory_ops.receive(gpu, f, fd);
		return true;
	default:
		return false;
	}
	nvs_gpu_step(gpu, ev);
	if (f->type == NVS_ATTACHED) {
		nvs_memory_ops.attached(gpu);
		nvs_slice_want(gpu, 0);
		gpu->slice.told = false;
		gpu->slice.look_ns = 0;
	}
	return true;
}

static void client_receive(void)
{
	while (nvs_descriptor_is(&nvs_client.socket)) {
		struct nvs_frame f;
		int fd = -1;
		int n = nvs_receive_frame(nvs_client.socket.fd, &f, &fd);

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

/* How long there must be no call before the GPU is given back to a tenant that waits. */
static uint64_t idle_time(struct nvs_gpu *gpu)
{
	uint32_t flags = __atomic_load_n(&nvs_client.page->slot[gpu->number].flags, __ATOMIC_RELAXED);

	if (flags & NVS_GRANT_LATENCY)
		return NVS_LATENCY_IDLE_NS;
	return flags & NVS_SLOT_PATIENT ? NVS_PATIENT_IDLE_NS : IDLE_NS;
}

/* The gate is open and somebody waits: whether there was no call for that time. */
static bool idle_long(struct nvs_gpu *gpu, uint64_t now)
{
	uint64_t calls = nvs_gate_calls(gpu);

	if (!gpu->drains.idle_ns || calls != gpu->drains.idle_calls || nvs_gate_busy(gpu)) {
		gpu->drains.idle_calls = calls;
		gpu->drains.idle_ns = now;
		return false;
	}
	return nvs_elapsed(now, gpu->drains.idle_ns) >= idle_time(gpu);
}

/* Returns the nanoseconds until it wants to be called again. */
static uint64_t early_release(uint64_t now)
{
	uint64_t next = TICK_NS;

	NVS_FOR_EACH_GPU(gpu) {
		/* Shut for a moment, it may well have run dry. */
		if (gpu->lease.link != LEASE_ATTACHED || gpu->lease.gate != LEASE_OPEN ||
		    nvs_gpu_word(gpu) != atomic_load(&gpu->epoch) ||
		    !__atomic_load_n(&nvs_client.page->slot[gpu->number].waiters, __ATOMIC_RELAXED)) {
			gpu->drains.idle_ns = 0;
			continue;
		}
		if (idle_time(gpu) / 2 < next)
			next = idle_time(gpu) / 2;
		/* A thread that waited has not had its turn yet, or waits for another GPU as well. */
		if (gpu->lease.waiting || nvs_gate_keeps(gpu)) {
			gpu->drains.idle_ns = 0;
			continue;
		}
		if (!idle_long(gpu, now))
			continue;
		nvs_drainer_look(gpu, NVS_LOOK_IDLE);
	}
	return next;
}

/*
 * The process may have been moved to another GPU while it was checkpointed: its devices then have
 * other UUIDs. Without the lock, before it attaches again. A process that is checkpointed attaches by
 * the UUID it had. False: the process ends, and the driver cannot be asked.
 */
static bool gpus_identify(void)
{
	uint8_t uuid[NVS_UUID_SIZE];

	NVS_FOR_EACH_GPU(gpu) {
		bool known;

		if (!nvs_driver_enter())
			return !nvs_driver_stopped();
		known = nvs_device_uuid(gpu->device.dev, uuid);
		nvs_driver_leave();
		if (!known || memcmp(uuid, gpu->device.uuid, sizeof(uuid)) == 0)
			continue;
		nvs_debugf("GPU %u: the process is on another GPU now", gpu->number);
		nvs_rm_moved();
		nvs_lock(&nvs_client_lock);
		memcpy(gpu->device.uuid, uuid, sizeof(uuid));
		nvs_unlock(&nvs_client_lock);
	}
	return true;
}

static void *client_main(void *arg)
{
	(void)arg;
	nvs_thread_setup("nvshare");
	for (;;) {
		struct pollfd p = { .fd = -1, .events = POLLIN };
		uint64_t now = nvs_now(), wait, trim;
		struct timespec t;

		/* These are written by this thread alone. */
		if (nvs_client.registered && nvs_client.socket.fd < 0 && now >= nvs_client.retry_ns &&
		    !gpus_identify()) {
			/* On a GPU that it only believes to be on, it would run under the grant of another. */
			nvs_client.alive = false;
			nvs_client.retry_ns = UINT64_MAX;
		}
		nvs_lock(&nvs_client_lock);
		if (nvs_client.socket.fd >= 0 && !nvs_descriptor_is(&nvs_client.socket))
			disconnect("the application has closed the descriptor");
		if (nvs_client.socket.fd < 0 && now >= nvs_client.retry_ns)
			try_connect();
		if (absent(now))
			run_alone();
		nvs_suspended_tick(now);
		nvs_stats_send(now);
		nvs_gate_forget_waiters(now);
		wait = early_release(now);
		NVS_FOR_EACH_GPU(gpu) {
			nvs_preempt_tick(gpu, now, &wait);
			nvs_throttle_tick(gpu, now);
			if (nvs_utilization_due(gpu, now, &wait))
				nvs_drainer_look(gpu, NVS_LOOK_SAMPLE);
			if (nvs_controls_due(gpu, now, &wait))
				nvs_drainer_look(gpu, NVS_LOOK_CONTROLS);
		}
		trim = nvs_memory_ops.tick(now);
		wait = trim < wait ? trim : wait;
		if (nvs_client.socket.fd < 0 && nvs_client.retry_ns < now + wait)
			wait = nvs_elapsed(nvs_client.retry_ns, now);
		p.fd = nvs_client.socket.fd;
		nvs_unlock(&nvs_client_lock);
		nvs_drains_start();

		t.tv_sec = (time_t)(wait / NVS_S);
		t.tv_nsec = (long)(wait % NVS_S);
		if (ppoll(&p, 1, &t, NULL) > 0) {
			nvs_lock(&nvs_client_lock);
			client_receive();
			nvs_unlock(&nvs_client_lock);
			nvs_drains_start();
		}
	}
	return NULL;
}

/* ---- life ---- */

void nvs_client_start(const struct nvs_device *devices, unsigned count, uint32_t interposed,
		      uint32_t bypassed)
{
	const char *loss = secure_getenv("NVSHARE_SCHEDULER_LOSS");

	if (count == 0)
		return;
	nvs_connect_init();
	nvs_lock(&nvs_client_lock);
	nvs_gpus_start(devices, count);
	nvs_client.link = LINK_STARTING;
	nvs_client.since_ns = nvs_now();
	nvs_client.retry_ns = 0;
	nvs_client.backoff_ns = RETRY_MIN_NS / 2;
	nvs_client.closed_policy = loss && strcmp(loss, "closed") == 0;
	nvs_client.interposed = interposed;
	nvs_client.bypassed = bypassed;
	nvs_unlock(&nvs_client_lock);
	nvs_memory_ops.start();
	nvs_threads_init(nvs_stream_thread_ended);
	atomic_store(&nvs_gate.single, count == 1);
	if (nvs_thread_start(client_main, NULL))
		atomic_store(&nvs_gate.active, true);
	else
		nvs_debugf("no thread for the client: running without a scheduler");
}

void nvs_client_fork_child(void)
{
	nvs_suspended_fork_child();
	nvs_connection_fork_child();
	nvs_pages_fork_child();
	nvs_gpus_fork_child();
}
