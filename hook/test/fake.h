// SPDX-License-Identifier: Apache-2.0
/* fake.h: the scheduler's side of the protocol, driven by a test step by step. */
#ifndef NVSHARE_TEST_FAKE_H
#define NVSHARE_TEST_FAKE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "wire.h"

/* The flags of a code that a peer may not ignore: wire.h. */
#define MUST_KNOW(code) ((code) & 0xffffu)

struct fake {
	char dir[64];
	int listener;
	int conn;
	struct nvs_page *page; /* writable */
	int page_fd;
	bool unsealed; /* the page that a client may not take */
	bool memory;   /* a RESERVE is granted at once, and not shown to the test */
	bool old;      /* knows nothing of memory: its page has no limits */
};

uint64_t test_now(void);

/* Makes a run directory, names it in the environment; does not listen yet. */
void fake_init(struct fake *f);
void fake_listen(struct fake *f);
/* Accepts, reads REGISTER (returned), sends WELCOME with a fresh page. */
struct nvs_frame fake_accept(struct fake *f);
/* The next frame; false after ms. STATS frames are skipped if type is not STATS. */
bool fake_receive(struct fake *f, struct nvs_frame *frame, int ms);
/* The next frame, which must be of this type. */
struct nvs_frame fake_expect(struct fake *f, uint8_t type);
void fake_send(struct fake *f, uint8_t type, unsigned channel, uint32_t code, uint64_t epoch);
/* A frame that carries the page's descriptor so many times, up to 8. False: the client has gone. */
bool fake_send_fds(struct fake *f, struct nvs_frame w, unsigned count);
/* Expects ATTACH of a channel and accepts it. Returns it. */
struct nvs_frame fake_attach(struct fake *f);
void fake_word(struct fake *f, unsigned channel, uint32_t word);
void fake_grant(struct fake *f, unsigned channel, uint64_t epoch);
void fake_revoke(struct fake *f, unsigned channel, uint64_t epoch);
/* Closes the connection, and the listener too. */
void fake_die(struct fake *f);
void fake_end(struct fake *f);

#endif
