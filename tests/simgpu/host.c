// SPDX-License-Identifier: Apache-2.0
/*
 * host.c: what happens at its moment in a stream and not when it is submitted:
 * host functions, and writes and waits of stream memory operations. One lazily
 * started thread does them, in order of time but for what a wait holds up.
 */
#include "driver.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_NS 100000   /* between two looks at what is waited for */
#define STEP_NS 1000000  /* something earlier may be queued meanwhile */

struct host_fn {
	uint64_t time, ticket;
	uint64_t after, also; /* tickets before it; 0: none */
	struct op op;
	CUstream stream;
	int running;
	struct host_fn *next;
};

static struct host_fn *host_queue; /* sorted by time, then ticket */
static int host_waits;		   /* OP_WAIT in it */
static uint64_t last_ticket;
static pthread_cond_t host_cond = PTHREAD_COND_INITIALIZER; /* queue changed */
static int host_started;

static struct host_fn *host_find(uint64_t ticket)
{
	struct host_fn *h;

	for (h = ticket ? host_queue : NULL; h; h = h->next)
		if (h->ticket == ticket)
			return h;
	return NULL;
}

static void sleep_until(uint64_t t)
{
	struct timespec ts = { (time_t)(t / 1000000000ull), (long)(t % 1000000000ull) };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR)
		;
}

/* Whether the word that is waited for is as it shall be; if it is gone, that is a fault. */
static int met(const struct op *op)
{
	uint64_t want = op->seed, all = op->element == 4 ? UINT32_MAX : UINT64_MAX;
	uint64_t now = op->element == 4 ? __atomic_load_n((uint32_t *)(void *)op->dst, __ATOMIC_ACQUIRE)
					: __atomic_load_n((uint64_t *)(void *)op->dst, __ATOMIC_ACQUIRE);

	switch (op->value) {
	case CU_STREAM_WAIT_VALUE_GEQ: /* by the sign of the difference */
		return op->element == 4 ? (int32_t)(uint32_t)(now - want) >= 0 : (int64_t)(now - want) >= 0;
	case CU_STREAM_WAIT_VALUE_EQ:
		return now == want;
	case CU_STREAM_WAIT_VALUE_AND:
		return (now & want) != 0;
	default: /* NOR */
		return (~(now | want) & all) != 0;
	}
}

/* The first whose moment has come. */
static struct host_fn *host_next(uint64_t now)
{
	struct host_fn *h;

	for (h = host_queue; h && h->time <= now; h = h->next)
		if (!host_find(h->after) && !host_find(h->also) && (h->op.what != OP_WAIT || met(&h->op)))
			return h;
	return NULL;
}

static void host_run(const struct host_fn *h)
{
	if (h->op.what == OP_HOST)
		h->op.fn(h->op.data);
	else if (h->op.what == OP_CALLBACK)
		h->op.callback(h->stream, CUDA_SUCCESS, h->op.data);
	else if (h->op.what == OP_WRITE)
		memcpy(h->op.dst, &h->op.seed, (size_t)h->op.element);
}

static void *host_main(void *unused)
{
	pthread_mutex_lock(&drv_mu);
	for (;;) {
		uint64_t now = sim_now();
		struct host_fn *h = host_next(now), **at;

		if (!host_queue) {
			pthread_cond_wait(&host_cond, &drv_mu);
			continue;
		}
		if (!h) {
			uint64_t until = now + (host_waits ? LOOK_NS : STEP_NS);

			if (host_queue->time > now && host_queue->time < until)
				until = host_queue->time;
			pthread_mutex_unlock(&drv_mu);
			sleep_until(until);
			pthread_mutex_lock(&drv_mu);
			continue;
		}
		h->running = 1; /* keeps its place */
		pthread_mutex_unlock(&drv_mu);
		host_run(h);
		pthread_mutex_lock(&drv_mu);
		for (at = &host_queue; *at != h; at = &(*at)->next)
			;
		*at = h->next;
		host_waits -= h->op.what == OP_WAIT;
		free(h);
		pthread_cond_broadcast(&host_cond);
	}
	return unused;
}

uint64_t host_push(const struct op *op, CUstream stream, struct point at, uint64_t also)
{
	struct host_fn *h = calloc(1, sizeof *h), **to = &host_queue;
	pthread_t t;

	if (!h)
		return 0;
	h->time = at.time;
	h->after = at.ticket;
	h->also = also;
	h->ticket = ++last_ticket;
	h->op = *op;
	h->stream = stream;
	while (*to && ((*to)->running || (*to)->time <= at.time))
		to = &(*to)->next;
	h->next = *to;
	*to = h;
	host_waits += op->what == OP_WAIT;
	if (!host_started) {
		sigset_t all, old;

		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &old);
		if (pthread_create(&t, NULL, host_main, NULL) == 0) {
			pthread_detach(t);
			host_started = 1;
		}
		pthread_sigmask(SIG_SETMASK, &old, NULL);
	}
	pthread_cond_broadcast(&host_cond);
	return h->ticket;
}

/* ---- points ---- */

struct point point_max(struct point a, struct point b)
{
	struct host_fn *ha = host_find(a.ticket), *hb = host_find(b.ticket);
	struct point p = { a.time > b.time ? a.time : b.time, 0 };

	if (!ha || !hb || ha == hb) {
		p.ticket = ha ? a.ticket : hb ? b.ticket : 0;
	} else if (host_waits && ha->after != b.ticket && hb->after != a.ticket) {
		/* which of the two is later nobody knows: something that comes after both */
		struct point both = { ha->time > hb->time ? ha->time : hb->time, a.ticket };

		p.ticket = host_push(&(struct op){ .what = OP_NOTHING }, NULL, both, b.ticket);
	} else {
		/* they run in order of time: the later one stands for both */
		p.ticket = ha->time > hb->time || (ha->time == hb->time && ha->ticket > hb->ticket) ? a.ticket : b.ticket;
	}
	return p;
}

int point_reached(struct point p)
{
	return sim_now() >= p.time && !host_find(p.ticket);
}

void point_wait(struct point p)
{
	if (sim_now() < p.time)
		sleep_until(p.time);
	if (!p.ticket)
		return;
	pthread_mutex_lock(&drv_mu);
	while (host_find(p.ticket))
		pthread_cond_wait(&host_cond, &drv_mu);
	pthread_mutex_unlock(&drv_mu);
}
