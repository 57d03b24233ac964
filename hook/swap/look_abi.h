/* SPDX-License-Identifier: Apache-2.0 */
/*
 * look_abi.h: what the kernel that reads memory is given, and what it answers. The simulated
 * GPU does the same on the CPU.
 *
 * nvshare_look(pieces, parts, keys) reads pieces of 2 MiB, whose addresses are at `pieces`, and
 * adds up a keyed hash of each. A block of 256 threads reads a part of 256 KiB, eight blocks a
 * piece, and stores what it has added up at parts[its number]; the sums of a piece are those of its
 * eight parts. Thread t reads the 16 bytes at 16 t and then each 4096 bytes on, 256 words m of 4
 * bytes. With all sums modulo 2^64, and the sums inside brackets modulo 2^32, for s = 0 to 3:
 *
 *   v[s]  = sum of (m[i] + key[i + 2 s]) (m[i + 1] + key[i + 1 + 2 s]) over even i
 *   sum[s] = sum of (low half of v[s] + mix[t][2 s]) (high half of v[s] + mix[t][2 s + 1])
 *            over the threads of all eight blocks, each with its own t in mix
 *
 * That is NH twice (UMAC, RFC 4418, section 5.2): with random keys two pieces that differ,
 * whatever is in them, have one of the sums in common with a probability of 2^-32 in each of
 * the two steps, and all four with (2^-31)^4 = 2^-124.
 */
#ifndef NVSHARE_LOOK_ABI_H
#define NVSHARE_LOOK_ABI_H

#include <stdint.h>

#define LOOK_NAME    "nvshare_look"
#define LOOK_PIECE   (2u << 20)
#define LOOK_PARTS   8u
#define LOOK_THREADS 256u
#define LOOK_WORDS   256u /* that a thread reads */
#define LOOK_SUMS    4u

struct look_part {
	uint64_t sum[LOOK_SUMS];
	uint64_t any; /* 0: all is zero; 1: it is not */
	uint64_t unused;
};

struct look_keys {
	uint32_t key[LOOK_WORDS + 2 * LOOK_SUMS];
	uint32_t mix[LOOK_PARTS * LOOK_THREADS][2 * LOOK_SUMS];
};

#endif
