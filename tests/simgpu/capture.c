// SPDX-License-Identifier: Apache-2.0
/*
 * capture.c: stream capture and graphs. Which call fails during a capture,
 * with what error, and that the capture is lost, was read off driver
 * 580.159.04 call by call (test/capture.c holds the table).
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct sim_node {
	struct op op;
	struct deps deps; /* indices of earlier nodes */
};

struct sim_graph {
	struct obj o;
	uint32_t serial; /* names it in the handles of its nodes */
	struct sim_graph *next;
	struct graph_memory memory;
	struct sim_node *node;
	int n, room;
};

struct sim_graphexec {
	struct obj o;
	struct sim_graph *graph; /* own copy */
	int uploaded; /* its memory is charged */
};

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
static struct sim_graph *graphs;
static unsigned long long next_capture = 1;
static _Thread_local int thread_mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */

/* ---- small vectors ---- */

void deps_set(struct deps *d, const int *node, int n)
{
	int *copy = NULL;

	if (n > 0) {
		copy = malloc(sizeof *copy * (size_t)n);
		if (!copy)
			abort();
		memcpy(copy, node, sizeof *copy * (size_t)n);
	}
	free(d->node);
	d->node = copy;
	d->n = n;
}

static void deps_merge(struct deps *d, const struct deps *from)
{
	int *all = malloc(sizeof *all * (size_t)(d->n + from->n + 1)), n = d->n;

	if (!all)
		abort();
	if (n)
		memcpy(all, d->node, sizeof *all * (size_t)n);
	for (int i = 0; i < from->n; i++) {
		int known = 0;

		for (int j = 0; j < n; j++)
			known |= all[j] == from->node[i];
		if (!known)
			all[n++] = from->node[i];
	}
	deps_set(d, all, n);
	free(all);
}

static struct sim_graph *graph_new(void)
{
	static uint32_t serial;
	struct sim_graph *g = obj_new(M_GRAPH, sizeof *g);

	if (!g)
		return NULL;
	g->serial = ++serial;
	g->next = graphs;
	graphs = g;
	return g;
}

/* The handle of a node holds its graph's serial and its number, from 1. */
static CUgraphNode node_handle(const struct sim_graph *g, int i)
{
	return (CUgraphNode)(uintptr_t)((uint64_t)g->serial << 32 | (uint32_t)(i + 1));
}

static int node_index(const struct sim_graph *g, CUgraphNode node)
{
	uint32_t i = (uint32_t)(uintptr_t)node;

	return i && i <= (uint32_t)g->n ? (int)i - 1 : -1;
}

static int graph_add(struct sim_graph *g, const struct op *op, const struct deps *deps)
{
	if (g->n == g->room) {
		g->room = g->room ? 2 * g->room : 16;
		g->node = realloc(g->node, sizeof *g->node * (size_t)g->room);
		if (!g->node)
			abort();
	}
	memset(&g->node[g->n], 0, sizeof g->node[g->n]);
	g->node[g->n].op = *op;
	deps_set(&g->node[g->n].deps, deps->node, deps->n);
	return g->n++;
}

static void graph_free(struct sim_graph *g)
{
	struct sim_graph **at;

	for (at = &graphs; *at != g; at = &(*at)->next)
		;
	*at = g->next;
	for (int i = 0; i < g->n; i++)
		deps_set(&g->node[i].deps, NULL, 0);
	free(g->node);
	g->node = NULL;
	g->n = g->room = 0;
	obj_free(g);
}

/* ---- memory nodes ---- */

CUresult capture_alloc(struct sim_stream *s, size_t bytes, CUdeviceptr *p)
{
	CUresult rc = capture_add(s, &(struct op){ .what = OP_NOTHING });

	return rc ? rc : graph_memory_add(&s->capture->graph->memory, s->ctx->gpu, bytes, p);
}

static CUresult node_add(CUgraphNode *node, CUgraph graph, CUDA_MEM_ALLOC_NODE_PARAMS *alloc)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!node || !obj_is(graph, M_GRAPH) ||
	    (alloc && (alloc->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
		       dev_gpu(alloc->poolProps.location.id) < 0 || !alloc->bytesize)))
		rc = CUDA_ERROR_INVALID_VALUE;
	if (!rc && alloc)
		rc = graph_memory_add(&graph->memory, dev_gpu(alloc->poolProps.location.id), alloc->bytesize,
				      &alloc->dptr);
	if (!rc)
		*node = node_handle(graph, graph_add(graph, &(struct op){ .what = OP_NOTHING },
						     &(struct deps){ NULL, 0 }));
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult graph_node_add(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, const struct op *op)
{
	struct deps d = { NULL, 0 };
	CUresult rc = CUDA_SUCCESS;

	pthread_mutex_lock(&drv_mu);
	if (!obj_is(graph, M_GRAPH))
		rc = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; !rc && i < n; i++) {
		int at = node_index(graph, deps[i]);

		if (at < 0)
			rc = CUDA_ERROR_INVALID_VALUE;
		else
			deps_merge(&d, &(struct deps){ &at, 1 });
	}
	if (!rc)
		*node = node_handle(graph, graph_add(graph, op, &d));
	deps_set(&d, NULL, 0);
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult graph_exec_set(CUgraphExec exec, CUgraphNode node, const struct op *op)
{
	CUresult rc = CUDA_SUCCESS;
	int at;

	pthread_mutex_lock(&drv_mu);
	at = obj_is(exec, M_EXEC) ? node_index(exec->graph, node) : -1;
	if (at >= 0)
		exec->graph->node[at].op = *op;
	else
		rc = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult graph_node_set(CUgraphNode node, const struct op *op)
{
	CUresult rc = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&drv_mu);
	for (struct sim_graph *g = graphs; g; g = g->next)
		if (g->serial == (uint64_t)(uintptr_t)node >> 32 && node_index(g, node) >= 0) {
			g->node[node_index(g, node)].op = *op;
			rc = CUDA_SUCCESS;
		}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

/* Dependencies do not matter to what takes no time. */
CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
				CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	(void)deps;
	(void)n;
	return params ? node_add(node, graph, params) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, CUdeviceptr p)
{
	(void)deps;
	(void)n;
	return p ? node_add(node, graph, NULL) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, const void *edges, size_t n,
			   CUgraphNodeParams *params)
{
	(void)edges;
	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	switch (params->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL: return cuGraphAddKernelNode_v2(node, graph, deps, n, &params->u.kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return cuGraphAddMemcpyNode(node, graph, deps, n, &params->u.copy.params, params->u.copy.ctx);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return cuGraphAddMemsetNode(node, graph, deps, n, &params->u.set.params, params->u.set.ctx);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return cuGraphAddMemAllocNode(node, graph, deps, n, &params->u.alloc);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return cuGraphAddBatchMemOpNode(node, graph, deps, n, &params->u.memOp);
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
	case CU_GRAPH_NODE_TYPE_EMPTY: return node_add(node, graph, NULL);
	}
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
			CUgraphNodeParams *params)
{
	return cuGraphAddNode_v2(node, graph, deps, NULL, n, params);
}

static CUresult exec_upload(struct sim_graphexec *x)
{
	CUresult rc = x->uploaded ? CUDA_SUCCESS : graph_memory_use(&x->graph->memory);

	x->uploaded |= !rc;
	return rc;
}

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

CUresult capture_add(struct sim_stream *s, const struct op *op)
{
	int node;

	if (s->capture->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	node = graph_add(s->capture->graph, op, &s->deps);
	deps_set(&s->deps, &node, 1);
	return CUDA_SUCCESS;
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

/* ---- graphs ---- */

CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!graph || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	*graph = graph_new();
	pthread_mutex_unlock(&drv_mu);
	return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* *n nodes at most. */
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *n)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	if (!n || !obj_is(graph, M_GRAPH))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	for (size_t i = 0; nodes && i < *n && i < (size_t)graph->n; i++)
		nodes[i] = node_handle(graph, (int)i);
	*n = (size_t)graph->n;
	pthread_mutex_unlock(&drv_mu);
	return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (obj_is(graph, M_GRAPH))
		graph_free(graph);
	else
		rc = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	struct sim_graphexec *x;
	CUresult rc = drv_enter();

	(void)flags;
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!exec || !obj_is(graph, M_GRAPH)) {
		rc = CUDA_ERROR_INVALID_VALUE;
	} else {
		x = obj_new(M_EXEC, sizeof *x);
		if (!x || !(x->graph = graph_new()))
			abort();
		for (int i = 0; i < graph->n; i++)
			graph_add(x->graph, &graph->node[i].op, &graph->node[i].deps);
		x->graph->memory = graph->memory;
		*exec = x;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

SIM_EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *bad, char *log, size_t n)
{
	if (bad)
		*bad = NULL;
	if (log && n)
		*log = 0;
	return cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	params->hErrNode_out = NULL;
	params->result_out = 0;
	return cuGraphInstantiateWithFlags(exec, graph, params->flags);
}
SIM_EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
						      CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	return cuGraphInstantiateWithParams(exec, graph, params);
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (obj_is(exec, M_EXEC)) {
		if (exec->uploaded)
			graph_memory_drop(&exec->graph->memory);
		graph_free(exec->graph);
		obj_free(exec);
	} else {
		rc = CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream h)
{
	struct op op = { .what = OP_NOTHING };

	CUresult rc = CUDA_SUCCESS;

	if (drv_enter() == CUDA_SUCCESS) {
		pthread_mutex_lock(&drv_mu);
		rc = obj_is(exec, M_EXEC) ? exec_upload(exec) : CUDA_ERROR_INVALID_VALUE;
		pthread_mutex_unlock(&drv_mu);
	}
	return rc ? rc : submit(h, &op, 0);
}
PTSZ(cuGraphUpload, (CUgraphExec x, CUstream s), (x, PT(s)))

/* A graph launched into a capturing stream becomes part of the new graph. */
static CUresult launch_into_capture(const struct sim_graph *g, struct sim_stream *s)
{
	struct sim_graph *to = s->capture->graph;
	struct deps ends = { NULL, 0 };
	int base = to->n;

	if (s->capture->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	for (int i = 0; i < g->n; i++) {
		struct deps d = { NULL, 0 };
		struct deps me = { &(int){ base + i }, 1 };

		if (g->node[i].deps.n)
			deps_set(&d, g->node[i].deps.node, g->node[i].deps.n);
		for (int j = 0; j < d.n; j++)
			d.node[j] += base;
		graph_add(to, &g->node[i].op, g->node[i].deps.n ? &d : &s->deps);
		deps_set(&d, NULL, 0);
		deps_merge(&ends, &me);
	}
	for (int i = 0; i < SIM_MAX_GPUS; i++)
		to->memory.bytes[i] += g->memory.bytes[i];
	if (g->n)
		deps_set(&s->deps, ends.node, ends.n);
	deps_set(&ends, NULL, 0);
	return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream h)
{
	struct sim_stream *s;
	const struct sim_graph *g;
	struct point *ends, base, last;
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = obj_is(exec, M_EXEC) ? stream_find(h, &s) : CUDA_ERROR_INVALID_VALUE;
	if (!rc)
		rc = ctx_failed(s->ctx);
	if (!rc && s->is_legacy)
		rc = capture_guard_legacy(s->ctx);
	if (rc || s->capture) {
		if (!rc)
			rc = launch_into_capture(exec->graph, s);
		goto out;
	}
	rc = exec_upload(exec);
	if (rc)
		goto out;
	g = exec->graph;
	ends = calloc((size_t)g->n + 1, sizeof *ends);
	if (!ends) {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
		goto out;
	}
	base = last = stream_deps(s);
	for (int i = 0; i < g->n; i++) {
		struct point after = base;

		for (int j = 0; j < g->node[i].deps.n; j++)
			after = point_max(after, ends[g->node[i].deps.node[j]]);
		ends[i] = op_queue(s->ctx, &g->node[i].op, h, after);
		last = point_max(last, ends[i]);
	}
	stream_done(s, last);
	free(ends);
out:
	pthread_mutex_unlock(&drv_mu);
	return rc;
}
PTSZ(cuGraphLaunch, (CUgraphExec x, CUstream s), (x, PT(s)))
