// SPDX-License-Identifier: Apache-2.0
#include "connection.h"

#include <string.h>
#include <unistd.h>

#include "wire_io.h"

struct nvs_lock nvs_client_lock = NVS_LOCK(NVS_RANK_CLIENT);
struct nvs_client nvs_client = { .fd = -1 };

/* STATS and REQUEST are tried again anyway; the rest must arrive. */
bool nvs_client_send(const struct nvs_frame *f)
{
	bool must = f->type != NVS_STATS && f->type != NVS_REQUEST;

	return nvs_client.fd >= 0 && nvs_send_frame(nvs_client.fd, f, must);
}

void nvs_connection_fork_child(void)
{
	static const struct nvs_lock unlocked = NVS_LOCK(NVS_RANK_CLIENT);

	if (nvs_client.fd >= 0)
		close(nvs_client.fd);
	memset(&nvs_client, 0, sizeof(nvs_client));
	nvs_client.fd = -1;
	nvs_client_lock = unlocked;
}
