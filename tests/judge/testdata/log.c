// SPDX-License-Identifier: Apache-2.0
/* Writes a small log with the C side's own structures, for trace_test.go. */
#include "shared.h"

#include <stdio.h>

static void put(struct sim_record r)
{
	fwrite(&r, sizeof r, 1, stdout);
}

int main(void)
{
	/* a ring of 4 that has seen 5: the oldest is overwritten */
	struct sim_log head = { .magic = SIM_LOG_MAGIC, .capacity = 4, .next = 5 };
	struct sim_record last = { .submit_ns = 900, .start_ns = 900, .end_ns = 900, .pid = 7, .generation = 3,
				   .slot = 2, .kind = SIM_EXIT, .tenant = "ml-a" };
	struct sim_record first = { .submit_ns = 100, .start_ns = 100, .end_ns = 100, .pid = 7, .generation = 3,
				    .slot = 2, .kind = SIM_START, .tenant = "ml-a" };
	struct sim_record one = { .submit_ns = 200, .start_ns = 210, .end_ns = 260, .pid = 7, .generation = 3,
				  .count = 1, .slot = 2, .gpu = 1, .kind = SIM_KERNEL, .tenant = "ml-a" };
	struct sim_record many = { .submit_ns = 300, .start_ns = 310, .end_ns = 390, .pid = 7, .generation = 3,
				   .busy_ns = 60, .count = 3, .slot = 2, .gpu = 1, .kind = SIM_HTOD,
				   .tenant = "ml-a" };

	fwrite(&head, sizeof head, 1, stdout);
	put(last); /* position 4, over position 0 */
	put(first);
	put(one);
	put(many);
	return 0;
}
