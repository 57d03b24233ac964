// SPDX-License-Identifier: Apache-2.0
#include "connection.h"

#include <string.h>

#include "wire_io.h"

struct nvs_lock nvs_client_lock = NVS_LOCK(NVS_RANK_CLIENT);
struct nvs_client nvs_client = { .socket = NVS_NO_DESCRIPTOR };

/* STATS and REQUEST are tried again anyway; the rest must arrive. */
bool nvs_client_send(const struct nvs_frame *f)
{
	bool must = f->type != NVS_STATS && f->type != NVS_REQUEST;

	return nvs_descriptor_is(&nvs_client.socket) && nvs_send_frame(nvs_client.socket.fd, f, must);
}

bool nvs_client_attached(void)
{
	NVS_FOR_EACH_GPU(gpu)
		if (gpu->lease.link == LEASE_ATTACHED)
			return true;
	return false;
}

void nvs_connection_fork_child(void)
{
	nvs_descriptor_close(&nvs_client.socket);
	memset(&nvs_client, 0, sizeof(nvs_client));
	nvs_client.socket.fd = -1;
	nvs_client_lock = (struct nvs_lock)NVS_LOCK(NVS_RANK_CLIENT);
}
