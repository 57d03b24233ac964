// SPDX-License-Identifier: Apache-2.0
/*
 * memop.c: memory that stream memory operations name. Such an operation writes a word in
 * the order of a stream, or holds the stream up until a word has a value.
 *
 * They are not gated, because a gate could keep a wait from ending: the word may be
 * written by the host, by another process in its turn, or by a stream that the drain
 * waits for. Work behind them in a stream is gated, so that a drain waits for that work
 * and for them, as it does for a kernel that waits for a flag (may_pass() in wait.c, and
 * the grace). A wait alone uses nothing of the GPU, and no drain waits for it.
 *
 * So an operation may touch its word at any time, also in the turns of others. Where
 * memory is swapped, device memory is pinned when an operation first names it, before the
 * driver is called: if the memory is away, the call waits for the process's next turn.
 * The same holds for nodes of graphs and for captured operations, because the driver may
 * look up the memory when it gets the address.
 *
 * To find out that memory is pinned already takes a subtraction and a lock of the shim.
 * Host memory, where such words are mostly, is in no span.
 */
#include "swap.h"
#include "swap_impl.h"
#include "vmm.h"

/* One load where nothing is swapped. */
static inline bool memop_used(void)
{
	return nvs_unlikely(atomic_load_explicit(&nvs_spans_used, memory_order_acquire) != 0);
}

void nvs_swap_pin_word(CUdeviceptr p)
{
	struct nvs_swap_range r;

	if (!memop_used() || !nvs_swap_find(p, &r) || !r.base)
		return;
	if (r.mapping)
		nvs_vmm_pin(p, 1);
	else if (!r.pinned)
		nvs_swap_pin(p, &r);
}

/* A batch that the driver will refuse is not read: there may be no memory behind it. */
void nvs_swap_pin_ops(const struct cu_mem_op *op, uint count)
{
	if (!memop_used() || !op || count > CU_MEM_OPS_MAX)
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
		default: /* of later drivers: only the size is known */
			for (unsigned i = 0; i < 5; i++)
				nvs_swap_pin_word(op->word[i]);
		}
}
