// SPDX-License-Identifier: Apache-2.0
/*
 * swapper.h: a scheduler of one GPU that makes tenants take turns and moves
 * their memory out of each other's way; a thread of the test.
 */
#ifndef NVSHARE_TEST_SWAPPER_H
#define NVSHARE_TEST_SWAPPER_H

#include "fake.h"

struct swapper_config {
	uint64_t gpu;         /* bytes that all tenants together may have resident */
	uint64_t arena;       /* bytes of each segment; 0: none is given */
	uint64_t arena_most;  /* bytes of segments that each tenant is given; 0: as many as it reserves */
	uint64_t limit;       /* bytes that each tenant may reserve; 0: any number */
	unsigned quantum_ms;  /* of a turn that others wait for */
	bool off;             /* nothing is swapped */
	uint64_t grace_ms;    /* of a REVOKE; 0: 10 s */
	unsigned late_ms;     /* a GRANT comes so long after the page has said it */
};

/* What tenants have said, the dead ones too. */
struct swapper_seen {
	unsigned attached, alive, grants, ready, moved, cut;
	unsigned early;       /* MOVED that says that nothing is away, before READY */
	unsigned stuck_memory, stuck_arena, stuck_error;
	uint64_t out, in;     /* bytes, of the living */
	uint64_t resident, resident_max; /* sum over tenants, now and at most */
	uint64_t fixed, away, reserved;
	enum nvs_fixed by;    /* the latest reason why nothing of a tenant moves; 0: none */
	unsigned wants;       /* tenants that have asked for the GPU and do not have it */
	bool filling;         /* the holder is on its way in */
	bool revoked;         /* the holder has to leave */
	int holder, mover;    /* pids: has the GPU; has to move out. 0: nobody */
};

void swapper_init(void);  /* makes and names a run directory */
void swapper_start(const struct swapper_config *c);
void swapper_stop(void);  /* dies; may be started again */
void swapper_end(void);
struct swapper_seen swapper_seen(void);
/* From now on segments are given, of this size. */
void swapper_arena(uint64_t bytes);
/* Every tenant's room on the GPU, from now on; 0: what the others leave. */
void swapper_room(uint64_t bytes);
/* Revokes the grant there is, and grants nothing while this is true. */
void swapper_withhold(bool yes);
/* Whether tenants may go ahead of their grant, as latency tenants do. */
void swapper_standing(bool yes);
/* Whether all fits that is promised: pages say so, and everybody has room for all that there is. */
void swapper_still(bool yes);

/* In a tenant: bytes of its that are away, as it told last; 0 in its turn. */
uint64_t swapper_away(void);
uint64_t swapper_fixed(void); /* that never leave the GPU */

#endif
