// SPDX-License-Identifier: Apache-2.0
/* packet.h: packets of a SOCK_SEQPACKET socket, with descriptors. Never waits; no cancellation point. */
#ifndef NVSHARE_PACKET_H
#define NVSHARE_PACKET_H

#include <stdbool.h>
#include <stddef.h>

#define NVS_PACKET_FDS 64u /* the most descriptors of a packet */

bool nvs_packet_send(int fd, const void *data, size_t size, const int *fds, unsigned count);

/*
 * Receives a packet of exactly this size. Returns 1 with its descriptors, *count of them, no more
 * than *count was; 0 if there is none; -1 at the end of the connection, and for another size, whose
 * descriptors are closed.
 */
int nvs_packet_receive(int fd, void *data, size_t size, int *fds, unsigned *count);

#endif
