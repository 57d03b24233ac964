// SPDX-License-Identifier: Apache-2.0
/*
 * spin.h: the kernel of the workloads, their clock, and how they end on an error. The
 * same source runs on the simulated and on a real driver.
 */
#ifndef NVSHARE_SPIN_H
#define NVSHARE_SPIN_H

#include "cudadrv.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/*
 * nvshare_spin(ns, record): runs for ns by the GPU's own clock. If record is not 0, the
 * kernel stores its begin and its end there.
 */
static const char ptx[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"
	".visible .entry nvshare_spin(.param .u64 p_ns, .param .u64 p_record)\n"
	"{\n"
	"	.reg .pred %p<4>;\n"
	"	.reg .b32 %r<4>;\n"
	"	.reg .b64 %rd<8>;\n"
	"	ld.param.u64 %rd1, [p_ns];\n"
	"	ld.param.u64 %rd2, [p_record];\n"
	"	mov.u64 %rd3, %globaltimer;\n"
	"SPIN:\n"
	"	mov.u64 %rd4, %globaltimer;\n"
	"	sub.u64 %rd5, %rd4, %rd3;\n"
	"	setp.lt.u64 %p1, %rd5, %rd1;\n"
	"	@%p1 bra SPIN;\n"
	"	setp.eq.u64 %p2, %rd2, 0;\n"
	"	@%p2 bra DONE;\n"
	"	mov.u32 %r1, %tid.x;\n"
	"	mov.u32 %r2, %ctaid.x;\n"
	"	or.b32 %r3, %r1, %r2;\n"
	"	setp.ne.u32 %p3, %r3, 0;\n"
	"	@%p3 bra DONE;\n"
	"	cvta.to.global.u64 %rd6, %rd2;\n"
	"	st.global.u64 [%rd6], %rd3;\n"
	"	st.global.u64 [%rd6+8], %rd4;\n"
	"DONE:\n"
	"	ret;\n"
	"}\n";

/* CLOCK_MONOTONIC, ns. */
static inline uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Says what failed, and ends the program. */
static inline void check(CUresult rc, const char *what)
{
	const char *name = NULL;

	if (!rc)
		return;
	cuGetErrorName(rc, &name);
	fprintf(stderr, "%s: %s: %s (%d)\n", program_invocation_short_name, what,
		name ? name : "unknown error", rc);
	exit(1);
}

#define CHECK(call) check(call, #call)

#endif
