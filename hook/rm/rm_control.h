// SPDX-License-Identifier: Apache-2.0
/* rm_control.h: what the exported ioctl asks of control.c. */
#ifndef NVSHARE_RM_CONTROL_H
#define NVSHARE_RM_CONTROL_H

/* A compute group was made: where a time slice is wanted it gets that. Waits 5 s at most. */
void rm_slice_new_group(void);

/* Objects are about to be freed, which may wait for the GPU: all channels on first. Waits 5 s at most. */
void rm_put_all_on(void);

#endif
