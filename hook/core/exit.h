// SPDX-License-Identifier: Apache-2.0
/*
 * exit.h: the end of the process. The shim's threads call the driver no more then, and what
 * they did is done by the threads of the application that wait for it.
 */
#ifndef NVSHARE_EXIT_H
#define NVSHARE_EXIT_H

#include "connection.h"

/* Runs before the driver's end: gives grants back. */
void nvs_exit(void);

/*
 * For a thread at the gate of a GPU; nvs_client_lock is held, and given up meanwhile. False:
 * there is nothing to do now, or the process does not end.
 */
bool nvs_exit_work(struct nvs_gpu *gpu, struct nvs_signals *q);

#endif
