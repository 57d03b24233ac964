// SPDX-License-Identifier: Apache-2.0
/*
 * golden.c: one frame of each type and a page, with distinctive values, as hex.
 *
 *   golden DIR          writes DIR/<name>.hex
 *   golden --check DIR  fails if a file there differs
 *
 * The files are the protocol as the other side's codec sees it. Those of a
 * released version never change: running containers keep an old shim.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

#define FILLED(name, ...) { name, { .version = NVS_WIRE_VERSION, __VA_ARGS__ } }

static const struct {
	const char *name;
	struct nvs_frame frame;
} frames[] = {
	FILLED("register", .type = NVS_REGISTER, .code = NVS_REGISTER_RECONNECT,
	       .u.reg = { .min_version = 1, .channels = 8, .shim_version = 0x00010203,
			  .interposed = 0x11121314, .bypassed = 0x21222324 }),
	FILLED("attach", .type = NVS_ATTACH, .channel = 3, .code = NVS_ATTACH_WANT,
	       .epoch = 0x0102030405060708ull,
	       .u.attach = { .uuid = { 0x51, 0x60, 0x00, 0x01, 0x02, 0x03, 0x40, 0x04, 0x80, 0x05,
				       0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b },
			     .ordinal = 5, .total_mem = 0x2233445566778899ull }),
	FILLED("request", .type = NVS_REQUEST, .channel = 31),
	FILLED("release", .type = NVS_RELEASE, .channel = 2, .code = NVS_RELEASE_IDLE,
	       .epoch = 0x1112131415161718ull,
	       .u.released = { .drain_ns = 0x3132333435363738ull, .calls = 0x4142434445464748ull }),
	FILLED("release_preempted", .type = NVS_RELEASE, .channel = 2, .code = NVS_RELEASE_REVOKED,
	       .epoch = 0x1112131415161718ull,
	       .u.released = { .drain_ns = 0x3132333435363738ull, .calls = 0x4142434445464748ull,
			       .flags = NVS_RELEASED_PREEMPTED }),
	FILLED("stats", .type = NVS_STATS, .channel = 1,
	       .u.stats = { .calls = 0x5152535455565758ull, .waits = 0x6162636465666768ull,
			    .wait_ns = 0x7172737475767778ull, .mem_bytes = 0x8182838485868788ull,
			    .mem_peak = 0x9192939495969798ull,
			    .wait_max_ns = 0xa1a2a3a4a5a6a7a8ull }),
	FILLED("reserve", .type = NVS_RESERVE, .channel = 9, .code = NVS_RESERVE_FORCE,
	       .u.reserve = { .total = 0x0212223242526272ull, .least = 0x0111213141516171ull,
			      .serial = 0x0313233343536373ull }),
	FILLED("reserved", .type = NVS_RESERVED, .channel = 10, .code = NVS_ERR_MEMORY,
	       .u.memory = { .total = 0x0414243444546474ull, .used = 0x0515253545556575ull,
			     .limit = 0x0616263646566676ull, .serial = 0x0717273747576777ull }),
	FILLED("moved", .type = NVS_MOVED, .channel = 11, .code = NVS_MOVED_READY,
	       .epoch = 0x2122232425262728ull,
	       .u.moved = { .resident = 0x0818283848586878ull, .fixed = 0x0919293949596979ull,
			    .away = 0x0a1a2a3a4a5a6a7aull, .out_bytes = 0x0b1b2b3b4b5b6b7bull,
			    .in_bytes = 0x0c1c2c3c4c5c6c7cull, .arena = 0x0d1d2d3d4d5d6d7dull }),
	FILLED("moved_fixed", .type = NVS_MOVED, .channel = 11, .code = NVS_FIXED_RDMA * NVS_MOVED_FIXED_BY,
	       .u.moved = { .resident = 0x0818283848586878ull, .fixed = 0x0818283848586878ull }),
	FILLED("util", .type = NVS_UTIL, .channel = 14,
	       .u.util = { .samples = 0x000a1b2c, .busy = 0x00091a2b }),
	FILLED("util_calls", .type = NVS_UTIL, .channel = 14,
	       .u.util = { .samples = 0x000a1b2c, .busy = 0x00091a2b, .calls = 0x8090a0b0 }),
	FILLED("controls", .type = NVS_CONTROLS, .channel = 16,
	       .u.controls = { .slices = NVS_CONTROL_WORKS, .channels = NVS_CONTROL_REFUSED, .groups = 0x0304,
			       .bare = 0x05060708, .driver = "580.159.04" }),
	FILLED("room", .type = NVS_ROOM, .channel = 12,
	       .u.room = { .room = 0x0e1e2e3e4e5e6e7eull }),
	FILLED("arena", .type = NVS_ARENA, .channel = 13,
	       .u.arena = { .segment = 0x0f1f2f3f4f5f6f7full, .size = 0x0020304050607080ull,
			    .flags = NVS_ARENA_HUGE }),
	FILLED("suspend", .type = NVS_SUSPEND, .code = NVS_SUSPEND_PREPARE),
	FILLED("suspended", .type = NVS_SUSPENDED, .code = NVS_SUSPENDED_READY),
	FILLED("slice", .type = NVS_SLICE, .channel = 15,
	       .u.slice = { .slice_ns = 0x0102030405060708ull }),
	FILLED("welcome", .type = NVS_WELCOME,
	       .u.welcome = { .client_id = 0xb1b2b3b4b5b6b7b8ull, .page_size = NVS_PAGE_SIZE,
			      .slots = NVS_MAX_CHANNELS }),
	FILLED("attached", .type = NVS_ATTACHED, .channel = 7, .code = NVS_ERR_UNKNOWN_GPU),
	FILLED("attached_place", .type = NVS_ATTACHED, .channel = 7,
	       .u.attached = { .uuid = { 0x51, 0x60, 0x00, 0x01, 0x02, 0x03, 0x40, 0x04, 0x80, 0x05,
					 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b } }),
	FILLED("grant", .type = NVS_GRANT, .channel = 6, .code = NVS_GRANT_CONCURRENT,
	       .epoch = 0xc1c2c3c4c5c6c7c8ull, .u.grant = { .quantum_ns = 0xd1d2d3d4d5d6d7d8ull }),
	FILLED("revoke", .type = NVS_REVOKE, .channel = 4, .epoch = 0xe1e2e3e4e5e6e7e8ull,
	       .u.revoke = { .grace_ns = 0xf1f2f3f4f5f6f7f8ull, .waiters = 0x0a0b0c0d }),
	FILLED("notice", .type = NVS_NOTICE, .channel = 5,
	       .u.notice = { .waiters = 0x1a1b1c1d, .present = 0x2a2b2c2d }),
	FILLED("refused", .type = NVS_REFUSED, .code = NVS_ERR_VERSION,
	       .u.refused = { .text = "protocol version 9 is not spoken here" }),
};

/* A grant page with every field of the header and of slot 1 set. */
static const union {
	struct nvs_page page;
	unsigned char bytes[NVS_PAGE_SIZE];
} page = { .page = {
	.magic = NVS_PAGE_MAGIC, .version = NVS_WIRE_VERSION, .slots = NVS_MAX_CHANNELS,
	.client_id = 0x0102030405060708ull,
	.slot[1] = { .word = 0x11121314, .flags = NVS_GRANT_CONCURRENT, .waiters = 0x21222324,
		     .present = 0x31323334, .quantum_ns = 0x4142434445464748ull,
		     .granted_ns = 0x5152535455565758ull, .limit_seq = 0x61626364,
		     .core_limit = 0x71727374, .mem_limit = 0x8182838485868788ull,
		     .mem_used = 0x9192939495969798ull },
} };

static void hex(char *out, const void *what, size_t size)
{
	const unsigned char *b = what;

	for (size_t i = 0; i < size; i++)
		out += sprintf(out, "%02x%s", b[i], i % 16 == 15 ? "\n" : " ");
}

/* Writes the file, or compares it. Returns whether all is well. */
static int one(const char *dir, const char *name, const void *what, size_t size, int check)
{
	static char text[NVS_PAGE_SIZE * 3 + 1], there[sizeof(text) + 1];
	char path[4096];
	FILE *f;
	int ok = 1;

	snprintf(path, sizeof(path), "%s/%s.hex", dir, name);
	hex(text, what, size);
	f = fopen(path, check ? "r" : "w");
	if (!f) {
		perror(path);
		return 0;
	}
	if (check) {
		there[fread(there, 1, sizeof(there) - 1, f)] = '\0';
		ok = strcmp(text, there) == 0;
		if (!ok)
			fprintf(stderr, "%s: differs from wire.h; now:\n%s", path, text);
	} else if (fputs(text, f) < 0) {
		perror(path);
		ok = 0;
	}
	fclose(f);
	return ok;
}

int main(int argc, char **argv)
{
	int check = argc == 3 && strcmp(argv[1], "--check") == 0;
	const char *dir = argv[argc - 1];
	int bad = 0;

	if (argc < 2 || (argc == 3 && !check) || argc > 3) {
		fprintf(stderr, "usage: golden [--check] DIRECTORY\n");
		return 2;
	}
	for (size_t i = 0; i < sizeof(frames) / sizeof(frames[0]); i++)
		bad |= !one(dir, frames[i].name, &frames[i].frame, sizeof(frames[i].frame), check);
	bad |= !one(dir, "page", &page, sizeof(page), check);
	if (check && !bad)
		printf("golden: %zu frames and the page unchanged\n",
		       sizeof(frames) / sizeof(frames[0]));
	return bad;
}
