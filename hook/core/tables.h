// SPDX-License-Identifier: Apache-2.0
/*
 * tables.h: the contexts and streams that are known; for stream.c, which keeps
 * them, and drain.c, which looks for work in them.
 *
 * nvs_table_lock guards the tables. nvs_drain_lock of a channel is held while
 * its contexts are synchronised or destroyed. Taken in that order: drain, table.
 */
#ifndef NVSHARE_TABLES_H
#define NVSHARE_TABLES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "driver.h"
#include "stream.h"
#include "wire.h"

struct nvs_context {
	_Atomic(void *) ctx; /* NULL: the record is free */
	void *green;
	unsigned channel;
	bool own;          /* of cuCtxCreate: outlives the primary context */
	atomic_bool dirty; /* work since the last drain */
};

#define NVS_MAX_CONTEXTS 256
#define NVS_MAX_STREAMS  4096 /* further ones share the record of their channel */

extern pthread_mutex_t nvs_table_lock;
extern pthread_mutex_t nvs_drain_lock[NVS_MAX_CHANNELS];
extern struct nvs_context nvs_contexts[NVS_MAX_CONTEXTS];
extern unsigned nvs_contexts_used;
extern struct nvs_stream nvs_streams[NVS_MAX_STREAMS];
extern unsigned nvs_streams_used;
extern struct nvs_stream nvs_overflow[NVS_MAX_CHANNELS];
extern atomic_int nvs_captures_on[NVS_MAX_CHANNELS]; /* goes up under nvs_drain_lock */

static inline bool nvs_key_is_default(void *key)
{
	return key <= CU_STREAM_PER_THREAD;
}

void nvs_drain_fork_child(void);

#endif
