// SPDX-License-Identifier: Apache-2.0
/* mps.h: this process as a member of an MPS server's group; see mps/control.c. */
#ifndef SIMGPU_MPS_H
#define SIMGPU_MPS_H

#include <stdint.h>

/*
 * Joins the group of the daemon in $CUDA_MPS_PIPE_DIRECTORY. Returns the group's number, or
 * 0 where there is no daemon: then the process has the GPU for itself, as with the driver.
 */
uint32_t mps_join(void);
/* Whether the server has ended: its members have lost the GPU. */
int mps_lost(void);
/* This process has used an illegal address. */
void mps_fault(void);

#endif
