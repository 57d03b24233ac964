// SPDX-License-Identifier: Apache-2.0
/*
 * connection.h: the connection to the scheduler. nvs_client_lock guards it, the leases and their
 * statistics. It is never held over a driver call or a drain, nor over a wait but one: of a second at most,
 * for a scheduler that has not read what its socket holds (nvs_send_frame).
 */
#ifndef NVSHARE_CONNECTION_H
#define NVSHARE_CONNECTION_H

#include <stdbool.h>
#include <stdint.h>

#include "descriptor.h"
#include "gpu.h"
#include "lock.h"
#include "signals.h"
#include "wire.h"

enum link {
	LINK_STARTING, /* no answer yet */
	LINK_UP,       /* registered */
	LINK_LOST,     /* was up; waiting for it to come back */
	LINK_ABSENT,   /* no scheduler: run open */
};

struct nvs_client {
	enum link link;
	struct nvs_descriptor socket;
	bool registered;       /* ever */
	uint64_t since_ns;     /* in this link state */
	uint64_t retry_ns;     /* next attempt to connect */
	uint64_t backoff_ns;
	bool alive;            /* the scheduler's process lives, by the latest attempt to connect */
	bool crowded;          /* and has refused us because it has too many clients */
	bool closed_policy;    /* NVSHARE_SCHEDULER_LOSS=closed */
	uint32_t interposed, bypassed;
	const struct nvs_page *page;
};

extern struct nvs_lock nvs_client_lock;
extern struct nvs_client nvs_client;

/* Takes the lock on a thread of the application. */
static inline void nvs_client_enter(struct nvs_signals *q)
{
	nvs_signals_block(q);
	nvs_lock(&nvs_client_lock);
}

static inline void nvs_client_leave(const struct nvs_signals *q)
{
	nvs_unlock(&nvs_client_lock);
	nvs_signals_restore(q);
}

/* A frame of this type, of a GPU's channel. */
static inline struct nvs_frame nvs_frame_of(const struct nvs_gpu *gpu, enum nvs_type type)
{
	return (struct nvs_frame){ .version = NVS_WIRE_VERSION, .type = (uint8_t)type,
				   .channel = (uint16_t)gpu->number };
}

/* Sends a frame, if there is a connection. The lock is held. */
bool nvs_client_send(const struct nvs_frame *f);

/* Whether the scheduler knows of a GPU of the process. The lock is held. */
bool nvs_client_attached(void);

/* After fork: no connection. The descriptor is closed. */
void nvs_connection_fork_child(void);

#endif
