// SPDX-License-Identifier: Apache-2.0
/* graph.h: what capture.c and graph.c have in common; drv_mu held. */
#ifndef SIMGPU_GRAPH_H
#define SIMGPU_GRAPH_H

#include "driver.h"

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

struct sim_graph *graph_new(void); /* NULL: no memory */
void graph_free(struct sim_graph *g);
/* Adds a node, returns its index. */
int graph_add(struct sim_graph *g, const struct op *op, const struct deps *deps);
void deps_merge(struct deps *d, const struct deps *from);

/* The graph of a capturing stream; NULL: its capture is lost. */
struct sim_graph *capture_graph(struct sim_stream *s);

#endif
