// SPDX-License-Identifier: Apache-2.0
/* exit.h: the end of the process: threads of the application do what the shim's threads did. */
#ifndef NVSHARE_EXIT_H
#define NVSHARE_EXIT_H

#include "connection.h"

/* Runs before the driver's end: gives grants back. */
void nvs_exit(void);

/* For a thread at the gate. The lock is held, and given up meanwhile. False: there is nothing to do now. */
bool nvs_exit_work(struct nvs_gpu *gpu, struct nvs_signals *q);

#endif
