// SPDX-License-Identifier: Apache-2.0
/* graph.c: graphs, their nodes, and how they are launched. graphnode.c adds nodes explicitly. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct sim_graphexec {
	struct obj o;
	struct sim_graph *graph; /* own copy */
	int uploaded; /* its memory is charged */
};

static struct sim_graph *graphs;

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

void deps_merge(struct deps *d, const struct deps *from)
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

struct sim_graph *graph_new(void)
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

int graph_add(struct sim_graph *g, const struct op *op, const struct deps *deps)
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

/* Adds all nodes of a graph to another one, behind these; those of its children in their place. */
static void graph_inline(struct sim_graph *to, const struct sim_graph *from, const struct deps *before, struct deps *ends)
{
	struct deps *behind = calloc((size_t)from->n + 1, sizeof *behind); /* each node of `from` */

	if (!behind)
		abort();
	for (int i = 0; i < from->n; i++) {
		const struct sim_node *node = &from->node[i];
		struct deps d = { NULL, 0 };

		for (int j = 0; j < node->deps.n; j++)
			deps_merge(&d, &behind[node->deps.node[j]]);
		if (!node->deps.n)
			deps_merge(&d, before);
		if (node->op.what == OP_CHILD) {
			graph_inline(to, node->op.data, &d, &behind[i]);
			if (!behind[i].n)
				deps_merge(&behind[i], &d);
		} else {
			deps_merge(&behind[i], &(struct deps){ &(int){ graph_add(to, &node->op, &d) }, 1 });
		}
		deps_set(&d, NULL, 0);
		deps_merge(ends, &behind[i]);
	}
	for (int i = 0; i < from->n; i++)
		deps_set(&behind[i], NULL, 0);
	free(behind);
	for (int i = 0; i < SIM_MAX_GPUS; i++)
		to->memory.bytes[i] += from->memory.bytes[i];
}

/* NULL: no memory. */
static struct sim_graph *graph_copy(const struct sim_graph *from)
{
	struct sim_graph *g = graph_new();
	struct deps none = { NULL, 0 }, ends = { NULL, 0 };

	if (g)
		graph_inline(g, from, &none, &ends);
	deps_set(&ends, NULL, 0);
	return g;
}

void graph_free(struct sim_graph *g)
{
	struct sim_graph **at;

	for (at = &graphs; *at != g; at = &(*at)->next)
		;
	*at = g->next;
	for (int i = 0; i < g->n; i++) {
		deps_set(&g->node[i].deps, NULL, 0);
		if (g->node[i].op.what == OP_CHILD)
			graph_free(g->node[i].op.data);
	}
	free(g->node);
	g->node = NULL;
	g->n = g->room = 0;
	obj_free(g);
}

/* ---- memory nodes ---- */

/* alloc NULL: a node that frees p, or does nothing. */
static CUresult node_add(CUgraphNode *node, CUgraph graph, CUDA_MEM_ALLOC_NODE_PARAMS *alloc, CUdeviceptr p)
{
	struct op op = { .what = alloc ? OP_TAKE : p ? OP_GIVE : OP_NOTHING };
	CUresult rc = drv_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!node || !obj_is(graph, M_GRAPH) ||
	    (alloc && (alloc->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
		       dev_gpu(alloc->poolProps.location.id) < 0 || !alloc->bytesize)))
		rc = CUDA_ERROR_INVALID_VALUE;
	if (!rc && alloc) {
		op.element = dev_gpu(alloc->poolProps.location.id);
		op.width = alloc->bytesize;
		rc = graph_memory_add(&graph->memory, op.element, op.width, &alloc->dptr);
	}
	op.dst = (char *)(uintptr_t)(alloc ? alloc->dptr : p);
	if (!rc)
		*node = node_handle(graph, graph_add(graph, &op, &(struct deps){ NULL, 0 }));
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

/* A node stays on its GPU. */
static void change(struct sim_node *node, const struct op *op)
{
	struct sim_ctx *ctx = node->op.ctx;

	node->op = *op;
	node->op.ctx = ctx;
}

CUresult graph_exec_set(CUgraphExec exec, CUgraphNode node, const struct op *op)
{
	CUresult rc = CUDA_SUCCESS;
	int at;

	pthread_mutex_lock(&drv_mu);
	at = obj_is(exec, M_EXEC) ? node_index(exec->graph, node) : -1;
	if (at >= 0)
		change(&exec->graph->node[at], op);
	else
		rc = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult graph_child_add(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, CUgraph child)
{
	struct op op = { .what = OP_CHILD };
	CUresult rc;

	pthread_mutex_lock(&drv_mu);
	if (obj_is(child, M_GRAPH))
		op.data = graph_copy(child);
	pthread_mutex_unlock(&drv_mu);
	rc = op.data ? graph_node_add(node, graph, deps, n, &op) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	for (int i = 0; !rc && i < SIM_MAX_GPUS; i++)
		graph->memory.bytes[i] += ((struct sim_graph *)op.data)->memory.bytes[i];
	if (rc && op.data)
		graph_free(op.data);
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

static struct sim_node *node_find(CUgraphNode node)
{
	for (struct sim_graph *g = graphs; g; g = g->next)
		if (g->serial == (uint64_t)(uintptr_t)node >> 32 && node_index(g, node) >= 0)
			return &g->node[node_index(g, node)];
	return NULL;
}

CUresult graph_node_set(CUgraphNode node, const struct op *op)
{
	struct sim_node *found;

	pthread_mutex_lock(&drv_mu);
	found = node_find(node);
	if (found)
		change(found, op);
	pthread_mutex_unlock(&drv_mu);
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult graph_node_get(CUgraphNode node, struct op *op)
{
	struct sim_node *found;

	pthread_mutex_lock(&drv_mu);
	found = node_find(node);
	if (found)
		*op = found->op;
	pthread_mutex_unlock(&drv_mu);
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Dependencies do not matter to what takes no time. */
CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n,
				CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	(void)deps;
	(void)n;
	return params ? node_add(node, graph, params, 0) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t n, CUdeviceptr p)
{
	int ok;

	(void)deps;
	(void)n;
	pthread_mutex_lock(&drv_mu);
	ok = graph_memory_is(p);
	pthread_mutex_unlock(&drv_mu);
	return ok ? node_add(node, graph, NULL, p) : CUDA_ERROR_INVALID_VALUE; /* as an H200 */
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
	case CU_GRAPH_NODE_TYPE_GRAPH: return graph_child_add(node, graph, deps, n, params->u.child.graph);
	case CU_GRAPH_NODE_TYPE_MEM_FREE: return cuGraphAddMemFreeNode(node, graph, deps, n, params->u.freed.dptr);
	case CU_GRAPH_NODE_TYPE_EMPTY: return node_add(node, graph, NULL, 0);
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

/* ---- calls ---- */

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

/* What memsets write has to be mapped when their graph is instantiated; nobody looks at what copies name. */
static int sets_are_mapped(const struct sim_graph *g)
{
	for (int i = 0; i < g->n; i++) {
		const struct op *op = &g->node[i].op;

		if (op->what == OP_SET && op->height &&
		    !mem_valid_locked((uintptr_t)op->dst, (op->height - 1) * op->dpitch + op->width))
			return 0;
	}
	return 1;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	struct sim_graphexec *x;
	CUresult rc = drv_enter();

	(void)flags;
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!exec || !obj_is(graph, M_GRAPH) || !sets_are_mapped(graph)) {
		rc = CUDA_ERROR_INVALID_VALUE;
	} else {
		x = obj_new(M_EXEC, sizeof *x);
		if (!x || !(x->graph = graph_copy(graph)))
			abort();
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

SIM_EXPORT CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *bad, char *log, size_t n)
{
	return cuGraphInstantiate_v2(exec, graph, bad, log, n);
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
	struct sim_graph *to = capture_graph(s);
	struct deps ends = { NULL, 0 };

	if (!to)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	graph_inline(to, g, &s->deps, &ends);
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
		struct sim_ctx *ctx;

		for (int j = 0; j < g->node[i].deps.n; j++)
			after = point_max(after, ends[g->node[i].deps.node[j]]);
		ctx = obj_is(g->node[i].op.ctx, M_CTX) ? g->node[i].op.ctx : s->ctx;
		ends[i] = op_queue(ctx, &g->node[i].op, h, after);
		ctx_done(ctx, ends[i]);
		last = point_max(last, ends[i]);
	}
	stream_done(s, last);
	free(ends);
out:
	pthread_mutex_unlock(&drv_mu);
	return rc;
}
PTSZ(cuGraphLaunch, (CUgraphExec x, CUstream s), (x, PT(s)))
