// SPDX-License-Identifier: Apache-2.0
/* look.c: the shim's kernel nvshare_look, on the CPU: the sums of hook/swap/look_abi.h. */
#include "driver.h"

#include <string.h>

#include "look_abi.h"

/* The sums of what a thread reads, as column `thread` of all its block's. */
static void column(const uint32_t *m, const struct look_keys *keys, unsigned thread, struct look_job *job)
{
	const uint32_t *mix = keys->mix[thread];

	for (unsigned s = 0; s < LOOK_SUMS; s++) {
		const uint32_t *key = keys->key + 2 * s;
		uint64_t v = 0;

		for (unsigned i = 0; i < LOOK_WORDS; i += 2)
			v += (uint64_t)(m[i] + key[i]) * (uint32_t)(m[i + 1] + key[i + 1]);
		job->sum[s] += (uint64_t)((uint32_t)v + mix[2 * s]) * (uint32_t)((uint32_t)(v >> 32) + mix[2 * s + 1]);
	}
}

static void look(struct look_job *job, const struct look_keys *keys)
{
	const char *piece = (const char *)(uintptr_t)job->address;
	uint32_t m[LOOK_WORDS];

	/* Whether all is zero: each byte is the one before it. */
	if (!*piece && !memcmp(piece, piece + 1, LOOK_PIECE - 1))
		return; /* nobody asks for the sums of such a piece */
	job->any = 1;
	for (unsigned t = 0; t < LOOK_PARTS * LOOK_THREADS; t++) {
		const char *from = piece + t / LOOK_THREADS * (LOOK_PIECE / LOOK_PARTS) + t % LOOK_THREADS * 16;

		for (unsigned i = 0; i < LOOK_WORDS; i += 4)
			memcpy(&m[i], from + i / 4 * 16 * LOOK_THREADS, 16);
		column(m, keys, t, job);
	}
}

void look_move(const struct op *op)
{
	for (size_t i = 0; i < op->height; i++) {
		struct look_job job;

		memcpy(&job, op->dst + i * sizeof job, sizeof job);
		look(&job, (const void *)op->src);
		memcpy(op->dst + i * sizeof job, &job, sizeof job);
	}
}
