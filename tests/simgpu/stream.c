// SPDX-License-Identifier: Apache-2.0
/*
 * stream.c: streams, events, and how work gets its place in time: a pair of
 * times, fixed when it is submitted. What names memory, and what the host does,
 * work.c does at these times.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* ---- submission ---- */

static struct sim_stream *per_thread_stream(struct sim_ctx *c)
{
	static _Thread_local struct sim_stream *last; /* of a process with many threads the list is long */
	static _Thread_local unsigned long long last_ctx;
	uint64_t me = thread_id();
	struct sim_stream *s;

	if (last_ctx == c->id)
		return last;
	for (s = c->per_thread; s && s->thread != me; s = s->next)
		;
	last = s;
	last_ctx = s ? c->id : 0;
	if (s)
		return s;
	s = obj_new(M_STREAM, sizeof *s);
	if (s) {
		s->ctx = c;
		s->id = 2;
		s->thread = me;
		s->next = c->per_thread;
		c->per_thread = s;
	}
	return s;
}

CUresult stream_find(CUstream h, struct sim_stream **s)
{
	struct sim_ctx *c;
	CUresult rc;

	if (!h || h == CU_STREAM_LEGACY || h == CU_STREAM_PER_THREAD) {
		rc = ctx_need(&c);
		if (rc)
			return rc;
		*s = h == CU_STREAM_PER_THREAD ? per_thread_stream(c) : c->legacy;
		return *s ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	}
	*s = h;
	return obj_is(h, M_STREAM) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

struct point stream_deps(struct sim_stream *s)
{
	if (s->is_legacy)
		return point_max(s->tail, s->ctx->blocking);
	if (s->flags & CU_STREAM_NON_BLOCKING)
		return s->tail;
	return point_max(s->tail, s->ctx->legacy->tail);
}

void stream_done(struct sim_stream *s, struct point end)
{
	s->tail = end;
	ctx_done(s->ctx, end);
	if (!s->is_legacy && !(s->flags & CU_STREAM_NON_BLOCKING))
		s->ctx->blocking = point_max(s->ctx->blocking, end);
}

struct point op_queue(struct sim_ctx *ctx, const struct op *op, CUstream h, struct point after)
{
	struct point end = after;
	uint64_t start;

	switch (op->what) {
	case OP_NOTHING:
	case OP_TAKE:
	case OP_GIVE:
		break;
	case OP_HOST:
	case OP_CALLBACK:
	case OP_WAIT:
	case OP_WRITE:
	case OP_FREE:
		if (!end.time.clock && end.time.ns < sim_now())
			end.time = point_now().time;
		end.ticket = work_push(op, ctx, h, end, end.time.ns, 0);
		break;
	default:
		end.time = sim_submit(ctx->gpu, op->engine, op->kind, after.time, op->ns, &start);
		if (op_names_memory(op))
			end.ticket = work_push(op, ctx, h, end, start, 0);
	}
	return end;
}

/* What nvshare_fill writes. */
static uint64_t word_of(uint64_t seed, size_t i)
{
	uint64_t x = (seed + i) * 0x9e3779b97f4a7c15ull;

	return x ^ x >> 29;
}

static void on_words(const struct op *op)
{
	uint64_t *word = (void *)op->dst, wrong = 0;
	size_t n = op->width / 8;

	for (size_t i = 0; i < n; i++) {
		if (op->what == OP_FILL)
			word[i] = word_of(op->seed, i);
		else if (op->what == OP_ADD)
			word[i]++;
		else
			wrong += word[i] != word_of(op->seed, i);
	}
	if (op->what == OP_CHECK)
		memcpy((void *)(uintptr_t)op->record, &wrong, sizeof wrong);
}

/* What a texture's kernel reads: all bytes of its rows. */
static void sum(const struct op *op)
{
	uint64_t bytes = 0;

	for (size_t y = 0; y < op->height; y++)
		for (size_t x = 0; x < op->width; x++)
			bytes += (unsigned char)op->src[y * op->spitch + x];
	memcpy((void *)(uintptr_t)op->record, &bytes, sizeof bytes);
}

void op_move(const struct op *op)
{
	if (op->what == OP_FILL || op->what == OP_CHECK || op->what == OP_ADD)
		on_words(op);
	else if (op->what == OP_SUM)
		sum(op);
	else if (op->what == OP_LOOK)
		look_move(op);
	else if (op->what == OP_WRITE)
		memcpy(op->dst, &op->seed, (size_t)op->element);
	else if (op->what == OP_COPY) {
		if (op->height == 1 || (op->dpitch == op->width && op->spitch == op->width)) {
			memmove(op->dst, op->src, op->width * op->height);
			return;
		}
		for (size_t y = 0; y < op->height; y++)
			memmove(op->dst + y * op->dpitch, op->src + y * op->spitch, op->width);
	} else if (op->what == OP_SET) {
		for (size_t y = 0; y < op->height; y++) {
			char *row = op->dst + y * op->dpitch;

			if (op->element == 1)
				memset(row, (int)op->value, op->width);
			else
				for (size_t x = 0; x < op->width; x += (size_t)op->element)
					memcpy(row + x, &op->value, (size_t)op->element);
		}
	}
}

/* A pageable source may change when the call is over: its bytes are taken now. */
static CUresult stage(struct op *op)
{
	char *to = malloc(op->width * op->height);

	if (!to)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t y = 0; y < op->height; y++)
		memcpy(to + y * op->width, op->src + y * op->spitch, op->width);
	op->staged = to;
	op->src = to;
	op->spitch = op->width;
	return CUDA_SUCCESS;
}

CUresult submit(CUstream h, const struct op *given, int wait)
{
	struct op op = *given;
	struct sim_stream *s;
	struct point end = { { 0, 0 }, 0 };
	struct sim_ctx *ctx = NULL;
	int captured = 0;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = stream_find(h, &s);
	if (!rc)
		rc = ctx_failed(ctx = s->ctx);
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (!rc && s->capture) {
		rc = wait ? capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) : capture_add(s, &op);
		captured = 1;
	}
	pthread_mutex_unlock(&drv_mu);
	if (rc || captured)
		return rc;
	if (op.what == OP_COPY && op.src_side == PAGEABLE && !wait && (rc = stage(&op)))
		return rc;
	if (op.what == OP_COPY && op.dst_side == PAGEABLE)
		wait = 1; /* as the driver does */
	pthread_mutex_lock(&drv_mu);
	end = op_queue(ctx, &op, h, stream_deps(s));
	stream_done(s, end);
	pthread_mutex_unlock(&drv_mu);
	if (!wait)
		return CUDA_SUCCESS;
	point_wait(end);
	return ctx_failed(ctx);
}

/* ---- streams ---- */

#define LOCKED(h, s)                              \
	struct sim_stream *s = NULL;              \
	CUresult rc = drv_enter();                \
	if (rc)                                   \
		return rc;                        \
	pthread_mutex_lock(&drv_mu);              \
	rc = stream_find(h, &s)

#define UNLOCK_RETURN()                     \
	do {                                \
		pthread_mutex_unlock(&drv_mu); \
		return rc;                  \
	} while (0)

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
	static unsigned long long next_id = 3;
	struct sim_ctx *c;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!out || flags > CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	rc = ctx_need(&c);
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	*out = obj_new(M_STREAM, sizeof **out);
	if (*out) {
		(*out)->ctx = c;
		(*out)->flags = flags;
		(*out)->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
		(*out)->id = next_id++;
	} else {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	UNLOCK_RETURN();
}

CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
	return cuStreamCreateWithPriority(out, flags, 0);
}

CUresult cuStreamDestroy_v2(CUstream h)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if ((uintptr_t)h <= 2 || !obj_is(h, M_STREAM)) {
		rc = CUDA_ERROR_INVALID_HANDLE;
	} else {
		if (h->capture)
			capture_refuse(h, 0);
		deps_set(&h->deps, NULL, 0);
		obj_free(h);
	}
	UNLOCK_RETURN();
}

/* What a query or synchronise on a stream has to respect. */
static CUresult stream_watch(struct sim_stream *s)
{
	CUresult rc;

	if (s->capture)
		return capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (s->is_legacy && (rc = capture_guard_legacy(s->ctx)))
		return rc;
	return capture_guard_unsafe();
}

CUresult cuStreamQuery(CUstream h)
{
	LOCKED(h, s);
	if (!rc)
		rc = stream_watch(s);
	if (!rc)
		rc = ctx_failed(s->ctx);
	if (!rc)
		rc = point_reached(s->is_legacy ? stream_deps(s) : s->tail) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
	UNLOCK_RETURN();
}
PTSZ(cuStreamQuery, (CUstream s), (PT(s)))

CUresult cuStreamSynchronize(CUstream h)
{
	struct point at = { { 0, 0 }, 0 };
	LOCKED(h, s);
	if (!rc)
		rc = stream_watch(s);
	if (!rc)
		at = s->is_legacy ? stream_deps(s) : s->tail;
	pthread_mutex_unlock(&drv_mu);
	rc = rc ? rc : ctx_failed(s->ctx);
	if (!rc)
		point_wait(at);
	return rc ? rc : ctx_failed(s->ctx);
}
PTSZ(cuStreamSynchronize, (CUstream s), (PT(s)))

CUresult cuStreamWaitEvent(CUstream h, CUevent e, unsigned flags)
{
	LOCKED(h, s);
	(void)flags;
	if (!rc && !obj_is(e, M_EVENT))
		rc = CUDA_ERROR_INVALID_HANDLE;
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (!rc && (s->capture || e->capture))
		rc = capture_wait(s, e);
	else if (!rc && e->recorded)
		s->tail = point_max(s->tail, e->at);
	UNLOCK_RETURN();
}
PTSZ(cuStreamWaitEvent, (CUstream s, CUevent e, unsigned f), (PT(s), e, f))

#define GETTER(name, type, expr)                        \
	CUresult name(CUstream h, type *out)            \
	{                                               \
		LOCKED(h, s);                           \
		if (!rc && !out)                        \
			rc = CUDA_ERROR_INVALID_VALUE;  \
		if (!rc)                                \
			*out = (expr);                  \
		UNLOCK_RETURN();                        \
	}                                               \
	PTSZ(name, (CUstream s, type *out), (PT(s), out))

GETTER(cuStreamGetPriority, int, s->priority)
GETTER(cuStreamGetFlags, unsigned, s->flags)
GETTER(cuStreamGetId, unsigned long long, s->id)
GETTER(cuStreamGetCtx, CUcontext, s->ctx)
GETTER(cuStreamGetDevice, CUdevice, s->ctx->dev)

CUresult cuStreamGetCtx_v2(CUstream s, CUcontext *ctx, void **green)
{
	if (green)
		*green = NULL;
	return cuStreamGetCtx(s, ctx);
}
PTSZ(cuStreamGetCtx_v2, (CUstream s, CUcontext *c, void **g), (PT(s), c, g))

CUresult cuLaunchHostFunc(CUstream h, CUhostFn fn, void *data)
{
	struct op op = { .what = OP_HOST, .fn = fn, .data = data };

	return fn ? submit(h, &op, 0) : CUDA_ERROR_INVALID_VALUE;
}
PTSZ(cuLaunchHostFunc, (CUstream s, CUhostFn fn, void *data), (PT(s), fn, data))

CUresult cuStreamAddCallback(CUstream h, CUstreamCallback fn, void *data, unsigned flags)
{
	struct op op = { .what = OP_CALLBACK, .callback = fn, .data = data };

	if (!fn || flags)
		return CUDA_ERROR_INVALID_VALUE;
	{
		LOCKED(h, s);
		if (!rc && s->capture)
			rc = capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
		pthread_mutex_unlock(&drv_mu);
		if (rc)
			return rc;
	}
	return submit(h, &op, 0);
}
PTSZ(cuStreamAddCallback, (CUstream s, CUstreamCallback fn, void *d, unsigned f), (PT(s), fn, d, f))

/* ---- events ---- */

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
	struct sim_ctx *c;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	rc = ctx_need(&c);
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	*out = obj_new(M_EVENT, sizeof **out);
	if (*out) {
		(*out)->ctx = c;
		(*out)->flags = flags;
	} else {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	UNLOCK_RETURN();
}

CUresult cuEventDestroy_v2(CUevent e)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (obj_is(e, M_EVENT)) {
		deps_set(&e->deps, NULL, 0);
		obj_free(e);
	} else {
		rc = CUDA_ERROR_INVALID_HANDLE;
	}
	UNLOCK_RETURN();
}

CUresult cuEventRecordWithFlags(CUevent e, CUstream h, unsigned flags)
{
	LOCKED(h, s);
	(void)flags;
	if (!rc && (!obj_is(e, M_EVENT) || e->ctx != s->ctx)) /* the driver refuses it, as documented */
		rc = CUDA_ERROR_INVALID_HANDLE;
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (!rc && s->capture) {
		capture_record(s, e);
	} else if (!rc) {
		e->capture = 0;
		e->recorded = 1;
		e->at = s->is_legacy ? stream_deps(s) : s->tail;
		if (sim_clock(e->at.time.clock) >= e->at.time.ns) {
			uint32_t times_on;
			uint64_t start;

			/* It is the channels that tell of an event. */
			e->at.time = sim_is_off(s->ctx->gpu, &times_on)
				? sim_submit(s->ctx->gpu, SIM_COMPUTE, SIM_MARK, e->at.time, 1, &start)
				: point_now().time;
		}
	}
	UNLOCK_RETURN();
}
PTSZ(cuEventRecordWithFlags, (CUevent e, CUstream s, unsigned f), (e, PT(s), f))

CUresult cuEventRecord(CUevent e, CUstream h)
{
	return cuEventRecordWithFlags(e, h, 0);
}
PTSZ(cuEventRecord, (CUevent e, CUstream s), (e, PT(s)))

/* Guards and the moment of an event, for query, synchronise and elapsed. */
static CUresult event_watch(CUevent e, struct point *at)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!obj_is(e, M_EVENT))
		rc = CUDA_ERROR_INVALID_HANDLE;
	if (!rc && e->capture)
		rc = capture_event_refuse(e);
	if (!rc)
		rc = capture_guard_unsafe();
	if (!rc)
		*at = e->at; /* never recorded: time 0, reached */
	UNLOCK_RETURN();
}

CUresult cuEventQuery(CUevent e)
{
	struct point at;
	CUresult rc = event_watch(e, &at);

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = ctx_failed(e->ctx);
	if (!rc)
		rc = point_reached(at) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
	UNLOCK_RETURN();
}

CUresult cuEventSynchronize(CUevent e)
{
	struct point at;
	CUresult rc = event_watch(e, &at);

	rc = rc ? rc : ctx_failed(e->ctx);
	if (!rc)
		point_wait(at);
	return rc ? rc : ctx_failed(e->ctx);
}

CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!ms)
		rc = CUDA_ERROR_INVALID_VALUE;
	else if (!obj_is(start, M_EVENT) || !obj_is(end, M_EVENT) || !start->recorded || !end->recorded ||
		 ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
		rc = CUDA_ERROR_INVALID_HANDLE;
	else if (!point_reached(start->at) || !point_reached(end->at))
		rc = CUDA_ERROR_NOT_READY;
	else
		*ms = (float)((double)(int64_t)(sim_day(end->at.time, 1) - sim_day(start->at.time, 1)) / 1e6);
	UNLOCK_RETURN();
}

CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
	return cuEventElapsedTime_v2(ms, start, end);
}
