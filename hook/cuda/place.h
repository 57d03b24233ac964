// SPDX-License-Identifier: Apache-2.0
/* place.h: the GPU on which a container is that may move among several. */
#ifndef NVSHARE_PLACE_H
#define NVSHARE_PLACE_H

/*
 * Before the driver's cuInit, which reads CUDA_VISIBLE_DEVICES: that names the GPU on which
 * the container was to begin. If it has begun on another one, or has moved since, the variable
 * is changed, in the memory where it is. Waits up to 5 s for a scheduler that lives.
 */
void nvs_place_follow(void);

#endif
