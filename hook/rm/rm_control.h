// SPDX-License-Identifier: Apache-2.0
/* rm_control.h: what the exported ioctl asks of control.c. */
#ifndef NVSHARE_RM_CONTROL_H
#define NVSHARE_RM_CONTROL_H

#include <stdint.h>

/* A compute group was made: where a time slice is wanted it gets that. Waits 5 s at most. */
void rm_slice_new_group(void);

/*
 * An object is about to be freed with all below it, which may wait for the GPU: the channels of
 * GPUs that have some there go on first. Waits 5 s at most for each.
 */
void rm_put_on_below(uint32_t client, uint32_t object);

/* The same of all channels. */
void rm_put_all_on(void);

#endif
