// SPDX-License-Identifier: Apache-2.0
/* look.c: the shim's kernel nvshare_look, on the CPU: the sums of hook/swap/look_abi.h. */
#include "driver.h"

#include <string.h>

#include "look_abi.h"

/* The sums of a block. Its threads are served word by word, so that memory is read in its order. */
static void block(const char *at, const struct look_keys *keys, const uint32_t (*mix)[2 * LOOK_SUMS], struct look_part *part)
{
	uint64_t v[LOOK_THREADS][LOOK_SUMS] = { 0 };
	uint32_t m[4], any = 0;

	for (unsigned i = 0; i < LOOK_WORDS; i += 4)
		for (unsigned t = 0; t < LOOK_THREADS; t++, at += sizeof(m)) {
			memcpy(m, at, sizeof(m));
			any |= m[0] | m[1] | m[2] | m[3];
			for (unsigned s = 0; s < LOOK_SUMS; s++) {
				const uint32_t *key = keys->key + 2 * s + i;

				v[t][s] += (uint64_t)(m[0] + key[0]) * (uint32_t)(m[1] + key[1]) +
					   (uint64_t)(m[2] + key[2]) * (uint32_t)(m[3] + key[3]);
			}
		}
	for (unsigned t = 0; t < LOOK_THREADS; t++)
		for (unsigned s = 0; s < LOOK_SUMS; s++)
			part->sum[s] += (uint64_t)((uint32_t)v[t][s] + mix[t][2 * s]) *
					(uint32_t)((uint32_t)(v[t][s] >> 32) + mix[t][2 * s + 1]);
	part->any = any != 0;
}

static void look(const char *piece, const struct look_keys *keys, struct look_part *parts)
{
	memset(parts, 0, LOOK_PARTS * sizeof *parts);
	/* Whether all is zero: each byte is the one before it. */
	if (!*piece && !memcmp(piece, piece + 1, LOOK_PIECE - 1))
		return; /* nobody asks for the sums of such a piece */
	for (unsigned b = 0; b < LOOK_PARTS; b++)
		block(piece + b * (LOOK_PIECE / LOOK_PARTS), keys, keys->mix + b * LOOK_THREADS, &parts[b]);
}

void look_move(const struct op *op)
{
	const uint64_t *piece = (const void *)op->dst;
	struct look_part *parts = (void *)(uintptr_t)op->record;

	for (size_t i = 0; i < op->height; i++)
		look((const char *)(uintptr_t)piece[i], (const void *)op->src, parts + i * LOOK_PARTS);
}
