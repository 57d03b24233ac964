// SPDX-License-Identifier: Apache-2.0
/* start.h: the beginning of the shim's work in a process. */
#ifndef NVSHARE_START_H
#define NVSHARE_START_H

/* Children of a fork start afresh from now on. */
void nvs_at_fork(void);

/* What cuInit's wrapper does before the driver's, until that has succeeded once. */
void nvs_before_start(void);

/* What cuInit's wrapper does after the driver's first success. */
void nvs_start(void);

#endif
