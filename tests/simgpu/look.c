// SPDX-License-Identifier: Apache-2.0
/* look.c: the shim's kernel nvshare_look, on the CPU: the sums of hook/swap/look_abi.h. */
#include "driver.h"

#include <string.h>

#include "look_abi.h"

/* The sums of what a thread reads, added to those of its block. */
static void column(const uint32_t *m, const struct look_keys *keys, unsigned thread, struct look_part *part)
{
	const uint32_t *mix = keys->mix[thread];

	for (unsigned s = 0; s < LOOK_SUMS; s++) {
		const uint32_t *key = keys->key + 2 * s;
		uint64_t v = 0;

		for (unsigned i = 0; i < LOOK_WORDS; i += 2)
			v += (uint64_t)(m[i] + key[i]) * (uint32_t)(m[i + 1] + key[i + 1]);
		part->sum[s] += (uint64_t)((uint32_t)v + mix[2 * s]) * (uint32_t)((uint32_t)(v >> 32) + mix[2 * s + 1]);
	}
}

static void look(const char *piece, const struct look_keys *keys, struct look_part *parts)
{
	uint32_t m[LOOK_WORDS];

	memset(parts, 0, LOOK_PARTS * sizeof *parts);
	/* Whether all is zero: each byte is the one before it. */
	if (!*piece && !memcmp(piece, piece + 1, LOOK_PIECE - 1))
		return; /* nobody asks for the sums of such a piece */
	for (unsigned t = 0; t < LOOK_PARTS * LOOK_THREADS; t++) {
		struct look_part *part = &parts[t / LOOK_THREADS];
		const char *from = piece + t / LOOK_THREADS * (LOOK_PIECE / LOOK_PARTS) + t % LOOK_THREADS * 16;

		for (unsigned i = 0; i < LOOK_WORDS; i += 4) {
			memcpy(&m[i], from + i / 4 * 16 * LOOK_THREADS, 16);
			part->any |= m[i] | m[i + 1] | m[i + 2] | m[i + 3];
		}
		part->any = part->any != 0;
		column(m, keys, t, part);
	}
}

void look_move(const struct op *op)
{
	const uint64_t *piece = (const void *)op->dst;
	struct look_part *parts = (void *)(uintptr_t)op->record;

	for (size_t i = 0; i < op->height; i++)
		look((const char *)(uintptr_t)piece[i], (const void *)op->src, parts + i * LOOK_PARTS);
}
