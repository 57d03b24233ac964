// SPDX-License-Identifier: Apache-2.0
/* wire_io.h: frames on the scheduler's socket. */
#ifndef NVSHARE_WIRE_IO_H
#define NVSHARE_WIRE_IO_H

#include <stdbool.h>

#include "wire.h"

/* Reads the run directory from the environment, on a thread of the application, which may change it later. */
void nvs_connect_init(void);

/* Connects to the run directory's socket. Returns -1 with *error set. */
int nvs_connect(int *error);

/*
 * Sends one frame. Without must, a full socket is a failure. With it, waits up to a second, and then
 * shuts the connection down, so that both sides settle what they believe by attaching again.
 */
bool nvs_send_frame(int fd, const struct nvs_frame *f, bool must);

/*
 * Receives without waiting. Returns 1 and the frame, with *passed a descriptor or -1; 0 if there is
 * nothing; -1 at the end of the connection or after a packet that is no frame.
 */
int nvs_receive_frame(int fd, struct nvs_frame *f, int *passed);

/*
 * Maps a grant page read-only; NULL if it is not one, or may shrink. It takes the address of an
 * earlier page that is not in use: mappings are bounded, and addresses stay valid.
 */
const struct nvs_page *nvs_map_page(int fd, bool (*in_use)(const struct nvs_page *));

void nvs_pages_fork_child(void);

#endif
