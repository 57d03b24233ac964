// SPDX-License-Identifier: Apache-2.0
/* suspended_flag.h: whether driver calls have to wait, which every call looks at (suspended.h). */
#ifndef NVSHARE_SUSPENDED_FLAG_H
#define NVSHARE_SUSPENDED_FLAG_H

#include <stdatomic.h>
#include <stdbool.h>

#include "compiler.h"

/* Not 0: driver calls wait. A futex. */
extern atomic_uint nvs_suspended;

static inline bool nvs_is_suspended(void)
{
	return nvs_unlikely(atomic_load_explicit(&nvs_suspended, memory_order_relaxed) != 0);
}

/*
 * Waits until the process may call the driver, and has it brought back for a thread of the
 * application. Keeps errno. No lock is held that the client thread takes. Ends with SUSPEND (OVER),
 * or as suspended.h says without a scheduler.
 */
void nvs_suspended_wait(void);

#endif
