// SPDX-License-Identifier: Apache-2.0
/*
 * utilization.h: how often the GPU has work of this process.
 *
 * While the gate is open and others want the GPU too, the client thread looks
 * every few milliseconds whether a stream has work, and tells the scheduler
 * four times a second (UTIL). Turns of a program that leaves the GPU idle
 * between its kernels waste that time; the scheduler cannot see it otherwise.
 * Nothing is added to a launch.
 */
#ifndef NVSHARE_UTILIZATION_H
#define NVSHARE_UTILIZATION_H

#include <stdint.h>

/*
 * Looks where a look is due, and tells the scheduler. Called by the client
 * thread with nvs_client_lock held, which is released while the driver is
 * asked. Returns the nanoseconds until it wants to be called again, at most
 * `most`.
 */
uint64_t nvs_utilization_look(uint64_t now, uint64_t most);

#endif
