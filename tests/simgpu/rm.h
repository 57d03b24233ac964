// SPDX-License-Identifier: Apache-2.0
/*
 * rm.h: the resource manager (RM) of the simulated driver. The driver makes and
 * frees its objects by ioctl on a descriptor of its own, through the ioctl that
 * the process's programs see first, as the real driver does: a shim that exports
 * one sees them. The library exports an ioctl that is the kernel's side.
 *
 * NVSHARE_SIMGPU_RM says what this driver's controls of slices and channels are:
 *
 *   on       they work (the default)
 *   absent   status NOT_SUPPORTED
 *   refused  status INSUFFICIENT_PERMISSIONS
 *   faked    status 0, nothing changes
 *   ignored  status 0; a slice is read back as it was set; nothing else changes
 *   hidden   they work, but the driver's requests reach the kernel past any shim
 *
 * NVSHARE_SIMGPU_VERSION is the version of the driver, if not 580.159.04.
 */
#ifndef SIMGPU_RM_H
#define SIMGPU_RM_H

#include "shared.h"

/* The driver's side. What fails is left out: work runs all the same, with channels that nobody can name. */
void rm_open(void);                     /* at cuInit */
void rm_close(void);                    /* at its end */
void rm_fork_child(void);               /* everything is the parent's */
uint32_t rm_make_context(int gpu);      /* its groups and channels; a number for the next */
void rm_free_context(uint32_t context);

#endif
