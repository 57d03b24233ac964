// SPDX-License-Identifier: Apache-2.0
/*
 * away.h: the process is checkpointed, or about to be. Its driver calls would wait in the
 * driver for whoever restores it, and nobody would know. So each call looks at nvs_away
 * first, waits here, and the scheduler is asked to bring the process back.
 *
 * Which calls: every exported function of the driver, by its wrapper or its stub (cuda/),
 * before it reaches the driver; and what the shim itself calls for a thread of the
 * application (nvs_driver). The shim's own threads stay out of the driver meanwhile:
 * nvs_driver_enter() refuses them. A function of the driver's hidden tables is not seen.
 *
 * The scheduler sends SUSPEND (PREPARE). From then on new calls wait; once no thread can
 * be on its way into the driver any more, SUSPENDED (READY) is the answer, and the
 * scheduler checkpoints the process. The first call sends SUSPENDED (WAKE). SUSPEND (OVER)
 * ends it all.
 *
 * Where the scheduler is lost for good and the policy is `open`, somebody may restore the
 * process by hand. A thread of the shim then waits in the driver for that, and calls go on.
 * The next scheduler is told all the same that the process is away, and is asked for the wake,
 * which changes nothing for a process that runs: what it knows of the process begins anew
 * with SUSPEND (OVER).
 */
#ifndef NVSHARE_AWAY_H
#define NVSHARE_AWAY_H

#include <stdbool.h>
#include <stdint.h>

struct nvs_frame;

/* ---- nvs_client_lock is held ---- */

/* SUSPEND came. False: it is none. */
bool nvs_away_receive(const struct nvs_frame *f);
/* Whether the process has left, or is about to, and no scheduler has said that it is back. */
bool nvs_away_said(void);
/* The connection is lost: an order that was not answered is void. */
void nvs_away_lost(void);
/* By the client thread, once a second at least. */
void nvs_away_tick(uint64_t now);

/* ---- the end of the process, and after fork ---- */

/* The driver is about to be taken down, which calls it. Waits for 30 s at most. */
void nvs_away_exit(void);
void nvs_away_fork_child(void);

#endif
