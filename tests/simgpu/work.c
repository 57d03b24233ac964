// SPDX-License-Identifier: Apache-2.0
/*
 * work.c: what happens at its moment and not when it is submitted: everything
 * that names memory, host functions, and waits. An item has a start and an end;
 * its memory must be mapped and accessible from one to the other, or its context
 * dies. Its bytes move at its end.
 *
 * Items of one clock are done in order of their ends. Not in this order are host functions,
 * waits for a word, and what comes behind them ("loose"). Two threads, started
 * lazily, do the items: one moves bytes, one calls host functions. Who waits for
 * an item helps.
 */
#include "memory.h"
#include "mps.h"

#include "look_abi.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_NS 100000 /* between two looks at a word that is waited for */
#define IDLE_NS 1000000000ull
#define BUCKETS 4096

struct item {
	uint64_t start, end;
	int clock;         /* of both: 0 the day's, 1 + GPU that of this process there */
	uint32_t times_on; /* how often channels had been put on when its memory was last looked at */
	uint64_t ticket;
	uint64_t after, also; /* tickets before it; 0: none */
	struct op op;
	void *staged; /* copy of a pageable source */
	struct sim_ctx *ctx;
	CUstream stream;
	int running;
	int begun; /* its start has come, its memory was there */
	int held;  /* something loose kept it beyond its start */
	uint64_t began;          /* the time of day at its start, of what tells that */
	uint64_t still, still_at; /* OP_GAP: longest gap so far, and when it began */
	struct item *prev, *next, *chain;
};

static struct item *first, *last; /* those of one clock are sorted by end, then ticket */
static struct item *bucket[BUCKETS];
static int loose;  /* items that may be done out of order */
static int moving; /* a thread moves bytes: the others wait for their turn */
static uint64_t last_ticket;
static int words;  /* OP_WAIT among them */
static pthread_cond_t changed; /* for the threads: something to do */
static pthread_cond_t done;    /* for who waits */
static pthread_t mover, caller;
static int mover_started, caller_started;

__attribute__((constructor)) static void start(void)
{
	pthread_condattr_t a;

	pthread_condattr_init(&a);
	pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
	pthread_cond_init(&changed, &a);
	pthread_cond_init(&done, &a);
}

static struct item *find(uint64_t ticket)
{
	struct item *w;

	for (w = ticket ? bucket[ticket % BUCKETS] : NULL; w; w = w->chain)
		if (w->ticket == ticket)
			return w;
	return NULL;
}

static int is_call(const struct item *w)
{
	return w->op.what == OP_HOST || w->op.what == OP_CALLBACK;
}

static int is_loose(const struct item *w)
{
	return is_call(w) || w->op.what == OP_WAIT || w->held;
}

/* ---- the list ---- */

static void insert(struct item *w)
{
	struct item *at = last;

	while (at && (at->clock != w->clock || at->end > w->end))
		at = at->prev;
	w->prev = at;
	w->next = at ? at->next : first;
	*(w->prev ? &w->prev->next : &first) = w;
	*(w->next ? &w->next->prev : &last) = w;
}

static void take_out(struct item *w)
{
	*(w->prev ? &w->prev->next : &first) = w->next;
	*(w->next ? &w->next->prev : &last) = w->prev;
}

static void drop(struct item *w)
{
	struct item **at;

	take_out(w);
	for (at = &bucket[w->ticket % BUCKETS]; *at != w; at = &(*at)->chain)
		;
	*at = w->chain;
	loose -= is_loose(w);
	words -= w->op.what == OP_WAIT;
	free(w->staged);
	free(w);
}

/* ---- memory that an item names ---- */

struct range {
	uintptr_t at;
	size_t size;
};

static int ranges(const struct op *op, struct range r[3])
{
	size_t rows = op->height ? op->height - 1 : 0;
	int n = 0;

	switch (op->what) {
	case OP_SPIN:
		if (op->record)
			r[n++] = (struct range){ op->record, 16 };
		break;
	case OP_GAP:
		r[n++] = (struct range){ op->record, op->height * 32 };
		break;
	case OP_FILL:
	case OP_ADD:
		r[n++] = (struct range){ (uintptr_t)op->dst, op->width };
		break;
	case OP_CHECK:
		r[n++] = (struct range){ (uintptr_t)op->dst, op->width };
		r[n++] = (struct range){ op->record, 8 };
		break;
	case OP_SUM:
		r[n++] = (struct range){ (uintptr_t)op->src, rows * op->spitch + op->width };
		r[n++] = (struct range){ op->record, 8 };
		break;
	case OP_LOOK:
		r[n++] = (struct range){ (uintptr_t)op->dst, op->height * sizeof(uint64_t) };
		r[n++] = (struct range){ op->record, op->height * LOOK_PARTS * sizeof(struct look_part) };
		r[n++] = (struct range){ (uintptr_t)op->src, sizeof(struct look_keys) };
		break;
	case OP_COPY:
		if (op->dst_side == ON_GPU)
			r[n++] = (struct range){ (uintptr_t)op->dst, rows * op->dpitch + op->width };
		if (op->src_side == ON_GPU)
			r[n++] = (struct range){ (uintptr_t)op->src, rows * op->spitch + op->width };
		break;
	case OP_SET:
		r[n++] = (struct range){ (uintptr_t)op->dst, rows * op->dpitch + op->width };
		break;
	case OP_WRITE:
	case OP_WAIT:
		r[n++] = (struct range){ (uintptr_t)op->dst, (size_t)op->element };
		break;
	default:
		break;
	}
	return n;
}

int op_names_memory(const struct op *op)
{
	struct range r[3];

	return ranges(op, r) > 0 || op->what == OP_COPY;
}

/* A piece. What is asked has begun, or begins: its addresses are there. */
static uintptr_t looks_at(const struct op *op, size_t i)
{
	uint64_t at;

	memcpy(&at, op->dst + i * sizeof at, sizeof at);
	return at;
}

static int memory_there(const struct op *op)
{
	struct range r[3];
	int n = ranges(op, r);

	for (int i = 0; i < n; i++)
		if (!mem_valid_locked(r[i].at, r[i].size))
			return 0;
	for (size_t i = 0; op->what == OP_LOOK && i < op->height; i++)
		if (!mem_valid_locked(looks_at(op, i), LOOK_PIECE))
			return 0;
	return 1;
}

static int touches(const struct op *op, uintptr_t at, size_t size)
{
	struct range r[3];
	int n = ranges(op, r);

	for (int i = 0; i < n; i++)
		if (r[i].at < at + size && at < r[i].at + r[i].size)
			return 1;
	for (size_t i = 0; op->what == OP_LOOK && i < op->height; i++)
		if (looks_at(op, i) < at + size && at < looks_at(op, i) + LOOK_PIECE)
			return 1;
	return 0;
}

/* The context dies. Nothing of it runs any more; callbacks are told. */
static void fault(struct sim_ctx *ctx)
{
	struct item *w, *next;

	ctx->fault = CUDA_ERROR_ILLEGAL_ADDRESS;
	mps_fault();
	for (w = first; w; w = next) {
		next = w->next;
		if (w->ctx != ctx || w->running)
			continue;
		if (w->op.what == OP_CALLBACK) {
			take_out(w);
			w->start = w->end = w->after = w->also = 0;
			insert(w);
		} else {
			drop(w);
		}
	}
	pthread_cond_broadcast(&changed);
	pthread_cond_broadcast(&done);
}

/* What all clocks show, each read when it is first asked for. */
struct clocks {
	uint64_t shows[1 + SIM_MAX_GPUS];
};

static uint64_t shown(struct clocks *c, int clock)
{
	if (!c->shows[clock])
		c->shows[clock] = sim_clock(clock);
	return c->shows[clock];
}

/* Whether all is done that comes before an item; what it waited for too long moves it. */
static int ready(struct item *w, uint64_t now)
{
	struct item *a = find(w->after), *b = find(w->also);

	if (a || b) {
		if (now > w->start && !w->held && ((a && is_loose(a)) || (b && is_loose(b)))) {
			loose += !is_loose(w);
			w->held = 1;
		}
		return 0;
	}
	if (w->held && !w->begun && now > w->start) {
		uint64_t ns = w->end - w->start;

		w->start = now;
		w->end = now + ns;
		take_out(w);
		insert(w);
	}
	return 1;
}

/* Kernels that tell when they ran: that is known for a while only. */
static int tells(const struct item *w)
{
	return w->op.what == OP_SPIN || w->op.what == OP_GAP;
}

static void look_for_gap(struct item *w, uint64_t now)
{
	uint64_t at, still = sim_still((struct sim_time){ w->start, w->clock }, now < w->end ? now : w->end, &at);

	if (still > w->still) {
		w->still = still;
		w->still_at = at;
	}
}

/* Begins what has to; memory that is not there kills its context. */
static void begin_due(struct clocks *c)
{
	struct item *w, *next;

	for (w = first; w; w = next) {
		uint64_t now = shown(c, w->clock);
		uint32_t times_on = 0;
		int off = w->clock && sim_is_off(w->clock - 1, &times_on);

		next = w->next;
		if (w->begun && !w->running && w->op.what == OP_GAP)
			look_for_gap(w, now);
		if (w->running || off || (w->begun && w->times_on == times_on))
			continue; /* what is off does not look at memory; what comes on looks again */
		if (!w->begun && (w->start > now || !ready(w, now) || w->start > now))
			continue;
		w->times_on = times_on;
		if (!memory_there(&w->op)) {
			fault(w->ctx);
			next = first; /* the list changed under us */
			continue;
		}
		if (w->op.what == OP_ADD && !w->begun)
			op_move(&w->op); /* its first half */
		if (!w->begun && tells(w))
			w->began = sim_day((struct sim_time){ w->start, w->clock }, 0);
		w->begun = 1;
	}
}

void work_before_mapping(void)
{
	begin_due(&(struct clocks){ { 0 } });
}

void work_before_unmapping(uintptr_t at, size_t size)
{
	uint32_t unused;
	struct item *w;

	begin_due(&(struct clocks){ { 0 } });
	for (w = first; w;) {
		if (w->begun && !w->running && touches(&w->op, at, size) && !(w->clock && sim_is_off(w->clock - 1, &unused))) {
			fault(w->ctx);
			w = first;
		} else {
			w = w->next;
		}
	}
	/* Bytes that move just now: let them, the memory goes afterwards. */
	for (w = first; w;) {
		if (w->running && touches(&w->op, at, size)) {
			pthread_cond_wait(&done, &drv_mu);
			w = first;
		} else {
			w = w->next;
		}
	}
}

/* ---- doing it ---- */

/* Whether the word that is waited for is as it shall be. */
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

/* The first item whose end has come, of those that call or of the others; or NULL. */
static struct item *due(int calls)
{
	struct clocks c = { { 0 } };
	struct item *w;

	begin_due(&c);
	for (w = first; w; w = w->next)
		if (w->begun && !w->running && is_call(w) == calls && w->end <= shown(&c, w->clock) &&
		    (w->op.what != OP_WAIT || met(&w->op)))
			return w;
	return NULL;
}

/* What the kernel's blocks saw: first and last look at the clock, the longest gap, when it began. */
static void store_gap(struct item *w, uint64_t end)
{
	uint64_t looks[4] = { w->began, end, 1000, w->began };

	look_for_gap(w, w->end);
	if (w->still > looks[2]) {
		looks[2] = w->still;
		looks[3] = w->still_at;
	}
	for (size_t i = 0; i < w->op.height; i++)
		memcpy((char *)(uintptr_t)w->op.record + 32 * i, looks, sizeof looks);
}

static void run(struct item *w)
{
	struct op op = w->op;
	CUresult status = w->ctx ? w->ctx->fault : CUDA_SUCCESS;
	CUstream stream = w->stream;
	uint64_t stamps[2] = { w->began, tells(w) ? sim_day((struct sim_time){ w->end, w->clock }, 1) : 0 };

	w->running = 1; /* keeps its place */
	pthread_mutex_unlock(&drv_mu);
	switch (op.what) {
	case OP_HOST:
		op.fn(op.data);
		break;
	case OP_CALLBACK:
		op.callback(stream, status, op.data);
		break;
	case OP_SPIN:
		memcpy((void *)(uintptr_t)op.record, stamps, sizeof stamps);
		break;
	case OP_GAP:
		store_gap(w, stamps[1]);
		break;
	default:
		op_move(&op);
	}
	pthread_mutex_lock(&drv_mu);
	if (op.what == OP_FREE)
		mem_end((uintptr_t)op.dst);
	drop(w);
	pthread_cond_broadcast(&done);
	pthread_cond_broadcast(&changed);
}

/* Moves the bytes of what is due, if nobody does. */
static int move_due(void)
{
	struct item *w = moving ? NULL : due(0);

	if (!w)
		return 0;
	moving = 1;
	run(w);
	moving = 0;
	return 1;
}

/* Until something changes, the next item's end comes, or it is time to look at a word. */
static void wait_until_due(pthread_cond_t *cond, uint64_t no_longer)
{
	uint64_t now = sim_now(), until = no_longer;
	struct timespec ts;

	for (struct item *w = first; w; w = w->next) {
		uint64_t next = tells(w) && !w->begun ? w->start : w->end;
		uint64_t soonest = w->running ? until : sim_soonest((struct sim_time){ next, w->clock });

		if (w->running || soonest >= until)
			continue;
		if (soonest > now)
			until = soonest;
		else if (words && now + LOOK_NS < until)
			until = now + LOOK_NS;
	}
	if (until <= now)
		until = now + LOOK_NS;
	ts = (struct timespec){ (time_t)(until / 1000000000ull), (long)(until % 1000000000ull) };
	pthread_cond_timedwait(cond, &drv_mu, &ts);
}

static void *move_main(void *unused)
{
	pthread_mutex_lock(&drv_mu);
	while (!drv_closed())
		if (!move_due())
			wait_until_due(&changed, sim_now() + IDLE_NS);
	pthread_mutex_unlock(&drv_mu);
	return unused;
}

static void *call_main(void *unused)
{
	struct item *w;

	pthread_mutex_lock(&drv_mu);
	while (!drv_closed())
		if ((w = due(1)))
			run(w);
		else
			wait_until_due(&changed, sim_now() + IDLE_NS);
	pthread_mutex_unlock(&drv_mu);
	return unused;
}

static void start_thread(pthread_t *t, int *started, void *(*fn)(void *))
{
	sigset_t all, old;

	if (*started)
		return;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	if (pthread_create(t, NULL, fn, NULL) == 0) {
		pthread_detach(*t);
		*started = 1;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

uint64_t work_push(const struct op *op, struct sim_ctx *ctx, CUstream stream, struct point end, uint64_t start,
		   uint64_t also)
{
	struct item *w = calloc(1, sizeof *w);

	if (!w)
		return 0;
	w->start = start;
	w->end = end.time.ns;
	w->clock = end.time.clock;
	w->after = end.ticket;
	w->also = also;
	w->ticket = ++last_ticket;
	w->op = *op;
	w->ctx = ctx;
	w->stream = stream;
	if (op->staged) {
		w->staged = op->staged;
		w->op.src = op->staged;
	}
	w->chain = bucket[w->ticket % BUCKETS];
	bucket[w->ticket % BUCKETS] = w;
	loose += is_loose(w);
	words += op->what == OP_WAIT;
	insert(w);
	if (is_call(w))
		start_thread(&caller, &caller_started, call_main);
	start_thread(&mover, &mover_started, move_main);
	if (w == first || loose)
		pthread_cond_broadcast(&changed);
	return w->ticket;
}

void work_settle(int gpu)
{
	struct item *w;

	pthread_mutex_lock(&drv_mu);
	for (;;) {
		uint64_t now = sim_clock(1 + gpu);

		for (w = first; w; w = w->next)
			if (w->clock == 1 + gpu && w->begun && w->end <= now && !is_call(w))
				break;
		if (!w)
			break;
		if (!move_due())
			wait_until_due(&done, sim_now() + LOOK_NS);
	}
	pthread_mutex_unlock(&drv_mu);
}

/* ---- points ---- */

/* Something that comes after both. */
static uint64_t join(struct point a, uint64_t b)
{
	return work_push(&(struct op){ .what = OP_NOTHING }, NULL, NULL, a, a.time.ns, b);
}

struct point point_max(struct point a, struct point b)
{
	struct item *wa = find(a.ticket), *wb = find(b.ticket);
	struct point p = { { 0, 0 }, 0 };

	if (a.time.clock && b.time.clock && a.time.clock != b.time.clock && a.time.ns && b.time.ns) {
		if (sim_clock(b.time.clock) >= b.time.ns) {
			b.time = (struct sim_time){ 0, 0 };
		} else { /* of another GPU: it is waited for, not computed */
			b.ticket = join(b, 0);
			b.time = (struct sim_time){ 0, 0 };
			wb = find(b.ticket);
		}
	}
	p.time = sim_later(a.time, b.time);
	if (!wa || !wb || wa == wb) {
		p.ticket = wa ? a.ticket : wb ? b.ticket : 0;
	} else if (wa->after == b.ticket || wb->after == a.ticket) {
		p.ticket = wa->after == b.ticket ? a.ticket : b.ticket;
	} else if (loose || wa->clock != wb->clock) {
		/* which of the two is later nobody knows */
		p.ticket = join((struct point){ { wa->end, wa->clock }, a.ticket }, b.ticket);
	} else {
		/* they are done in order of their ends: the later one stands for both */
		p.ticket = wa->end > wb->end || (wa->end == wb->end && wa->ticket > wb->ticket) ? a.ticket : b.ticket;
	}
	return p;
}

struct point point_now(void)
{
	return (struct point){ { sim_now(), 0 }, 0 };
}

int point_reached(struct point p)
{
	return !find(p.ticket) && sim_clock(p.time.clock) >= p.time.ns;
}

void point_wait(struct point p)
{
	if (p.ticket) {
		pthread_mutex_lock(&drv_mu);
		while (find(p.ticket)) /* a fault that move_due() finds drops it */
			if (!move_due() && find(p.ticket))
				wait_until_due(&done, sim_now() + IDLE_NS);
		pthread_mutex_unlock(&drv_mu);
	}
	while (sim_clock(p.time.clock) < p.time.ns) {
		uint64_t until = sim_soonest(p.time);
		struct timespec ts = { (time_t)(until / 1000000000ull), (long)(until % 1000000000ull) };

		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL);
	}
}
