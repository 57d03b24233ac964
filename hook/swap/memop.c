// SPDX-License-Identifier: Apache-2.0
/*
 * memop.c: memory that stream memory operations name. They write a word in the order of
 * a stream, or hold the stream up until a word is as it shall be.
 *
 * They are not gated, and are no GPU work of ours: what a stream waits for may be
 * written by the host, by another process in its turn, or by a stream whose write
 * ends the wait that our own drain waits for. A gate before either would keep that
 * from happening. What is behind them in a stream is gated, so that a drain waits
 * for it, and with it for them, as it does for a kernel that waits for a flag
 * (may_pass() in gpu.c, and the grace). It waits for all of a context in which
 * anything ran; but a wait alone, where nothing ran since the last drain, is in
 * nobody's way: it takes nothing of the GPU.
 *
 * So such an operation may touch its word at any time, in others' turns too. Where
 * memory is swapped, what it names in device memory becomes fixed when it is first
 * named, before the driver hears of it: if it is away, the call waits until it comes
 * in with all the rest, at this process's next turn. Nodes of graphs run in launches,
 * which are gated; but the driver may look up the memory when it gets the address,
 * and what is captured is not told apart from what runs at once: fixed as well.
 *
 * Afterwards the way from the address to this knowledge is a subtraction under a
 * lock of our own. Host memory, where such words mostly are, is not in our addresses.
 */
#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

/* One load where nothing is swapped. */
static inline bool used(void)
{
	return nvs_unlikely(atomic_load_explicit(&nvs_spans_used, memory_order_acquire) != 0);
}

void nvs_swap_pin_word(CUdeviceptr p)
{
	struct nvs_swap_range r;

	if (!used() || !nvs_swap_find(p, &r) || !r.base)
		return;
	if (r.mapping)
		nvs_vmm_pin(p, 1);
	else if (!r.pinned)
		nvs_swap_pin(p, &r);
}

/* A batch that the driver refuses is not read: it may not be there at all. */
void nvs_swap_pin_ops(const struct cu_mem_op *op, uint count)
{
	if (!used() || !op || count > CU_MEM_OPS_MAX)
		return;
	for (const struct cu_mem_op *end = op + count; op < end; op++)
		switch (op->type) {
		case CU_MEM_OP_FLUSH:
		case CU_MEM_OP_BARRIER:
			break;
		case CU_MEM_OP_WAIT_32:
		case CU_MEM_OP_WAIT_64:
		case CU_MEM_OP_WRITE_32:
		case CU_MEM_OP_WRITE_64:
			nvs_swap_pin_word(op->word[0]);
			break;
		default: /* later ones, of which only the size is known */
			for (unsigned i = 0; i < 5; i++)
				nvs_swap_pin_word(op->word[i]);
		}
}
