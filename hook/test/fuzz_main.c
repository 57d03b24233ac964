// SPDX-License-Identifier: Apache-2.0
/*
 * fuzz_main.c: drives a fuzz target without libFuzzer: random inputs, and what
 * is made of the golden frames by random changes. The same runs every time.
 *
 *   TARGET RUNS SEED GOLDEN.hex...        runs it
 *   TARGET --seeds DIRECTORY GOLDEN.hex... writes inputs for libFuzzer to begin with
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SEEDS 64
#define MAX_INPUT 2048

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t seeds[MAX_SEEDS][64], input[MAX_INPUT];
static unsigned seed_count;
static uint64_t state;

static uint32_t rnd(uint32_t below)
{
	state = state * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(state >> 33) % below;
}

static void read_seed(const char *path)
{
	FILE *f = fopen(path, "r");
	unsigned byte;
	size_t n = 0;

	if (!f || seed_count == MAX_SEEDS) {
		perror(path);
		exit(2);
	}
	while (n < sizeof(seeds[0]) && fscanf(f, "%2x", &byte) == 1)
		seeds[seed_count][n++] = (uint8_t)byte;
	fclose(f);
	seed_count++;
}

static size_t add(size_t at, const void *what, size_t n)
{
	n = n < MAX_INPUT - at ? n : MAX_INPUT - at;
	memcpy(input + at, what, n);
	return at + n;
}

/* A packet with a frame that the client can make something of, most of the time. */
static size_t add_frame(size_t at)
{
	uint8_t f[65] = { (uint8_t)(rnd(8) << 5 | 5) };

	memcpy(f + 1, seeds[rnd(seed_count)], 64);
	if (rnd(8))
		memcpy(f + 3, (uint8_t[]){ (uint8_t)rnd(2), 0 }, 2); /* channel */
	if (rnd(4))
		memset(f + 5, 0, 4); /* code */
	if (rnd(4)) { /* a small epoch */
		memset(f + 9, 0, 8);
		f[9] = (uint8_t)rnd(6);
	}
	return add(at, f, sizeof(f));
}

static size_t make(void)
{
	size_t n = 0;

	/* A good beginning for some: page, use, attached. */
	if (seed_count && rnd(4)) {
		static const uint8_t use[] = { 0x00 };

		for (unsigned i = 0; i < seed_count; i++)
			if (seeds[i][1] == 65 || seeds[i][1] == 66) {
				uint8_t f[65] = { 0x25 };

				memcpy(f + 1, seeds[i], 64);
				if (seeds[i][1] == 66) {
					memset(f + 3, 0, 6);
					n = add(n, use, 1);
					n = add(n, f, sizeof(f));
				} else {
					size_t tail = n;

					memmove(input + 65, input, tail);
					memcpy(input, f, 65);
					n = tail + 65;
				}
			}
	}
	for (uint32_t steps = rnd(20); steps; steps--) {
		if (seed_count && rnd(2)) {
			n = add_frame(n);
		} else if (rnd(4) == 0) {
			uint8_t word[6] = { (uint8_t)(rnd(2) << 4 | 3), 0, (uint8_t)rnd(6) };

			n = add(n, word, sizeof(word));
		} else {
			uint8_t ops[3];

			for (int i = 0; i < 3; i++)
				ops[i] = (uint8_t)rnd(256);
			n = add(n, ops, seed_count ? 1 : 3);
		}
	}
	for (uint32_t flips = rnd(4) ? 0 : rnd(6); n && flips; flips--)
		input[rnd((uint32_t)n)] = (uint8_t)rnd(256);
	return rnd(16) ? n : rnd((uint32_t)n + 1);
}

int main(int argc, char **argv)
{
	unsigned long runs;

	if (argc < 3) {
		fprintf(stderr, "usage: %s RUNS SEED|--seeds DIRECTORY [GOLDEN.hex...]\n", argv[0]);
		return 2;
	}
	for (int i = 3; i < argc; i++)
		read_seed(argv[i]);
	if (strcmp(argv[1], "--seeds") == 0) {
		for (int i = 0; i < 100; i++) {
			char path[4096];
			FILE *f;
			size_t n = make();

			snprintf(path, sizeof(path), "%s/%d", argv[2], i);
			f = fopen(path, "w");
			if (!f || fwrite(input, 1, n, f) != n || fclose(f) != 0) {
				perror(path);
				return 1;
			}
		}
		return 0;
	}
	runs = strtoul(argv[1], NULL, 10);
	state = strtoull(argv[2], NULL, 10);
	for (unsigned long i = 0; i < runs; i++)
		LLVMFuzzerTestOneInput(input, make());
	printf("%s: %lu runs\n", strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0], runs);
	return 0;
}
