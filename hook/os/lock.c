// SPDX-License-Identifier: Apache-2.0
#include "lock.h"

#ifdef NVS_LOCK_CHECKS
#include <stdio.h>
#include <stdlib.h>

/* A bit for each rank that this thread holds. */
static __thread unsigned held __attribute__((tls_model("initial-exec")));

static void broken(const char *what, unsigned rank)
{
	fprintf(stderr, "nvshare: %s: rank %u, held are %#x\n", what, rank, held);
	abort();
}

void nvs_lock_check(const struct nvs_lock *l)
{
	if (held >> l->rank)
		broken("lock taken out of order", l->rank);
}

void nvs_lock_taken(const struct nvs_lock *l)
{
	held |= 1u << l->rank;
}

void nvs_lock_given_up(const struct nvs_lock *l)
{
	if (!(held & 1u << l->rank))
		broken("lock given up that is not held", l->rank);
	held &= ~(1u << l->rank);
}

void nvs_lock_check_driver(void)
{
	if (held >> NVS_RANK_CLIENT)
		broken("driver called under a lock of the client thread", NVS_RANK_CLIENT);
}

void nvs_locks_fork_child(void)
{
	held = 0;
}
#endif
