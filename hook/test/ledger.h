// SPDX-License-Identifier: Apache-2.0
/*
 * ledger.h: a scheduler of one container that grants the GPU to whoever asks
 * and keeps account of memory; a thread of the test.
 */
#ifndef NVSHARE_TEST_LEDGER_H
#define NVSHARE_TEST_LEDGER_H

#include "fake.h"

#define LEDGER_GPUS 3

void ledger_init(void);   /* makes and names a run directory */
void ledger_start(void);  /* listens, and serves from now on */
void ledger_stop(void);   /* dies; may be started again */
void ledger_end(void);

/* Changes a limit, in the pages too. bytes 0: none. */
void ledger_limit(int gpu, uint64_t bytes);
/* RESERVE is not answered from now on, or is again. */
void ledger_mute(bool mute);
/* A connection is answered 0.3 s late from now on, as on a machine that does much else. */
void ledger_slow(void);
/* Bytes that all processes have reserved. */
uint64_t ledger_reserved(int gpu);
/* Memory that others of the container have: of a process that is not there. */
void ledger_others(int gpu, uint64_t bytes);

struct ledger_counts {
	unsigned registered, attached, observed, asked, forced, refused;
};
struct ledger_counts ledger_counts(void);
/* Connections open now. */
unsigned ledger_connections(void);

#endif
