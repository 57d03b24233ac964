// SPDX-License-Identifier: Apache-2.0
/*
 * capture.c: stream capture. Which call fails during a capture,
 * with what error, and that the capture is lost, was read off driver
 * 580.159.04 call by call (test/capture.c holds the table).
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct capture {
	unsigned long long id;
	struct sim_ctx *ctx;
	struct sim_stream *origin;
	struct sim_graph *graph;
	int mode, invalid;
	uint64_t thread;
	struct sim_stream **joined; /* origin first */
	int njoined;
	struct capture *next;
};

static struct capture *captures;
static unsigned long long next_capture = 1;
static _Thread_local int thread_mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */

/* ---- rules ---- */

static struct capture *capture_by_id(unsigned long long id)
{
	struct capture *c;

	for (c = captures; c; c = c->next)
		if (c->id == id)
			return c;
	return NULL;
}

CUresult capture_guard_unsafe(void)
{
	CUresult rc = CUDA_SUCCESS;

	if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return rc;
	for (struct capture *c = captures; c; c = c->next) {
		int own = c->thread == thread_id();

		if (c->invalid)
			continue;
		if ((own && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED) ||
		    (!own && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
			c->invalid = 1;
			rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	}
	return rc;
}

CUresult capture_guard_legacy(struct sim_ctx *ctx)
{
	CUresult rc = CUDA_SUCCESS;

	for (struct capture *c = captures; c; c = c->next)
		for (int i = 0; c->ctx == ctx && i < c->njoined; i++)
			if (!(c->joined[i]->flags & CU_STREAM_NON_BLOCKING)) {
				c->invalid = 1;
				rc = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
			}
	return rc;
}

CUresult capture_guard_context(struct sim_ctx *ctx)
{
	CUresult rc = CUDA_SUCCESS;

	for (struct capture *c = captures; c; c = c->next)
		if (c->ctx == ctx) {
			c->invalid = 1;
			rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	return rc;
}

CUresult capture_refuse(struct sim_stream *s, CUresult why)
{
	s->capture->invalid = 1;
	return why;
}

CUresult capture_event_refuse(const struct sim_event *e)
{
	struct capture *c = capture_by_id(e->capture);

	if (c)
		c->invalid = 1;
	return CUDA_ERROR_CAPTURED_EVENT;
}

/* ---- recording ---- */

CUresult capture_add(struct sim_stream *s, const struct op *given)
{
	struct op op = *given;
	int node;

	if (s->capture->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	op.ctx = s->ctx;
	node = graph_add(s->capture->graph, &op, &s->deps);
	deps_set(&s->deps, &node, 1);
	return CUDA_SUCCESS;
}

CUresult capture_alloc(struct sim_stream *s, size_t bytes, CUdeviceptr *p)
{
	struct op op = { .what = OP_TAKE, .element = s->ctx->gpu, .width = bytes };
	CUresult rc = capture_graph(s) ? graph_memory_add(&s->capture->graph->memory, s->ctx->gpu, bytes, p) : CUDA_SUCCESS;

	op.dst = (char *)(uintptr_t)*p;
	return rc ? rc : capture_add(s, &op);
}

struct sim_graph *capture_graph(struct sim_stream *s)
{
	return s->capture->invalid ? NULL : s->capture->graph;
}

void capture_record(struct sim_stream *s, struct sim_event *e)
{
	e->capture = s->capture->id;
	deps_set(&e->deps, s->deps.node, s->deps.n);
}

static void capture_join(struct capture *c, struct sim_stream *s)
{
	c->joined = realloc(c->joined, sizeof *c->joined * (size_t)(c->njoined + 1));
	if (!c->joined)
		abort();
	c->joined[c->njoined++] = s;
	s->capture = c;
	deps_set(&s->deps, NULL, 0);
}

CUresult capture_wait(struct sim_stream *s, struct sim_event *e)
{
	struct capture *c = e->capture ? capture_by_id(e->capture) : NULL;

	if (e->capture && !c)
		return CUDA_ERROR_INVALID_VALUE; /* its capture has ended */
	if (!c)
		return capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	if (c->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (s->is_legacy || (s->capture && s->capture != c)) {
		c->invalid = 1;
		if (s->capture)
			s->capture->invalid = 1;
		return s->is_legacy ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_STREAM_CAPTURE_MERGE;
	}
	if (!s->capture)
		capture_join(c, s);
	deps_merge(&s->deps, &e->deps);
	return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream h, int mode)
{
	struct capture *c;
	struct sim_stream *s;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	rc = stream_find(h, &s);
	if (!rc && s->is_legacy)
		rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (!rc && s->capture)
		rc = CUDA_ERROR_ILLEGAL_STATE;
	if (!rc) {
		c = calloc(1, sizeof *c);
		if (!c || !(c->graph = graph_new()))
			abort();
		c->id = next_capture++;
		c->ctx = s->ctx;
		c->origin = s;
		c->mode = mode;
		c->thread = thread_id();
		capture_join(c, s);
		c->next = captures;
		captures = c;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}
PTSZ(cuStreamBeginCapture_v2, (CUstream s, int mode), (PT(s), mode))

/* Whether every joined stream's last nodes come before the origin's. */
static int all_joined(const struct capture *c)
{
	char *seen = calloc((size_t)c->graph->n + 1, 1);
	int ok = 1;

	if (!seen)
		abort();
	for (int i = 0; i < c->origin->deps.n; i++)
		seen[c->origin->deps.node[i]] = 1;
	for (int i = c->graph->n - 1; i >= 0; i--)
		for (int j = 0; seen[i] && j < c->graph->node[i].deps.n; j++)
			seen[c->graph->node[i].deps.node[j]] = 1;
	for (int i = 1; i < c->njoined; i++)
		for (int j = 0; j < c->joined[i]->deps.n; j++)
			ok &= seen[c->joined[i]->deps.node[j]];
	free(seen);
	return ok;
}

CUresult cuStreamEndCapture(CUstream h, CUgraph *graph)
{
	struct capture *c, **at;
	struct sim_stream *s;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = stream_find(h, &s);
	if (rc)
		goto out;
	c = s->capture;
	if (!c) {
		rc = CUDA_ERROR_ILLEGAL_STATE;
		goto out;
	}
	if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != thread_id()) {
		rc = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
		goto out;
	}
	if (c->origin != s) {
		c->invalid = 1;
		rc = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
		goto out;
	}
	if (c->invalid)
		rc = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if (!all_joined(c))
		rc = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	for (int i = 0; i < c->njoined; i++) {
		c->joined[i]->capture = NULL;
		deps_set(&c->joined[i]->deps, NULL, 0);
	}
	for (at = &captures; *at != c; at = &(*at)->next)
		;
	*at = c->next;
	if (rc || !graph)
		graph_free(c->graph);
	if (graph)
		*graph = rc ? NULL : c->graph;
	free(c->joined);
	free(c);
out:
	pthread_mutex_unlock(&drv_mu);
	return rc;
}
PTSZ(cuStreamEndCapture, (CUstream s, CUgraph *g), (PT(s), g))

static CUresult capture_info(CUstream h, int *status, cuuint64_t *id, CUgraph *graph, size_t *n)
{
	struct sim_stream *s;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!status)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	rc = stream_find(h, &s);
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (!rc) {
		*status = !s->capture	       ? CU_STREAM_CAPTURE_STATUS_NONE
			  : s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
						: CU_STREAM_CAPTURE_STATUS_ACTIVE;
		if (id)
			*id = s->capture ? s->capture->id : 0;
		if (graph)
			*graph = s->capture ? s->capture->graph : NULL;
		if (n)
			*n = s->capture ? (size_t)s->deps.n : 0;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuStreamIsCapturing(CUstream s, int *status)
{
	return capture_info(s, status, NULL, NULL, NULL);
}
PTSZ(cuStreamIsCapturing, (CUstream s, int *status), (PT(s), status))

CUresult cuStreamGetCaptureInfo_v2(CUstream s, int *status, cuuint64_t *id, CUgraph *graph,
				   const CUgraphNode **deps, size_t *n)
{
	if (deps)
		*deps = NULL; /* nodes are not handles here */
	return capture_info(s, status, id, graph, n);
}
PTSZ(cuStreamGetCaptureInfo_v2,
     (CUstream s, int *status, cuuint64_t *id, CUgraph *g, const CUgraphNode **d, size_t *n),
     (PT(s), status, id, g, d, n))

CUresult cuStreamGetCaptureInfo_v3(CUstream s, int *status, cuuint64_t *id, CUgraph *graph,
				   const CUgraphNode **deps, const void **edges, size_t *n)
{
	if (edges)
		*edges = NULL;
	return cuStreamGetCaptureInfo_v2(s, status, id, graph, deps, n);
}
PTSZ(cuStreamGetCaptureInfo_v3,
     (CUstream s, int *status, cuuint64_t *id, CUgraph *g, const CUgraphNode **d, const void **e, size_t *n),
     (PT(s), status, id, g, d, e, n))

CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
	CUresult rc = drv_enter();
	int old = thread_mode;

	if (rc)
		return rc;
	if (!mode || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	thread_mode = *mode;
	*mode = old;
	return CUDA_SUCCESS;
}
