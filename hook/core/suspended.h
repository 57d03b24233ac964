// SPDX-License-Identifier: Apache-2.0
/*
 * suspended.h: the process is checkpointed, or about to be. Its driver calls would wait in the driver for
 * somebody to restore it, and nobody would know. So each call of an exported function, and of what
 * the shim calls for a thread of the application, looks at nvs_suspended first, waits here, and has the
 * process brought back. The shim's own threads stay out of the driver meanwhile. Functions of the
 * driver's hidden tables are not seen.
 *
 * After SUSPEND (PREPARE) new calls wait; once no thread can be on its way into the driver,
 * SUSPENDED (READY) is the answer, and the scheduler checkpoints the process. The first call sends
 * SUSPENDED (WAKE). SUSPEND (OVER) ends it all.
 *
 * Where the scheduler is lost for good and the policy is `open`, somebody may restore the process by
 * hand: a thread of the shim waits in the driver for that, and calls go on. The next scheduler is
 * told that the process is suspended and asked for the wake, which changes nothing for a process that
 * runs.
 */
#ifndef NVSHARE_SUSPENDED_H
#define NVSHARE_SUSPENDED_H

#include <stdbool.h>
#include <stdint.h>

struct nvs_frame;

/* ---- nvs_client_lock is held ---- */

/* SUSPEND came. False: it is none. */
bool nvs_suspended_receive(const struct nvs_frame *f);
/* Whether the process has left, or is about to, and no scheduler has said that it is back. */
bool nvs_suspended_said(void);
/* The connection is lost: an order that was not answered is void. */
void nvs_suspended_lost(void);
/* By the client thread, once a second at least. */
void nvs_suspended_tick(uint64_t now);

/* ---- the end of the process, and after fork ---- */

/* The driver is about to be taken down, which calls it. Waits for 30 s at most. */
void nvs_suspended_exit(void);
void nvs_suspended_fork_child(void);

#endif
