// SPDX-License-Identifier: Apache-2.0
/* rm_call.h: a request to whoever comes after us with an ioctl. */
#ifndef NVSHARE_RM_CALL_H
#define NVSHARE_RM_CALL_H

#include "rm.h"
#include "rm_object.h"

/* As ioctl(2). */
int rm_next(int fd, unsigned long request, void *arg);

/* Sends a control to an object. NVS_RM_REFUSED: *status is the driver's answer. */
enum nvs_rm_result rm_control(const struct rm_target *t, uint32_t object, uint32_t command, void *params,
			      uint32_t size, uint32_t *status);

#endif
