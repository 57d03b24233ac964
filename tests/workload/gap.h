// SPDX-License-Identifier: Apache-2.0
/*
 * gap.h: a kernel that sees when it was off the GPU. %globaltimer goes on while other
 * work has the GPU.
 */
#ifndef NVSHARE_GAP_H
#define NVSHARE_GAP_H

#include <stdint.h>

/* What a block stores, by the GPU's clock, ns: first and last look, the longest gap, when the gap began. */
struct looks {
	uint64_t first, last, gap, at;
};

/* nvshare_gap(ns, looks): by the first thread of each block, for ns of the GPU's clock. */
static const char gap_ptx[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"
	".visible .entry nvshare_gap(.param .u64 p_ns, .param .u64 p_looks)\n"
	"{\n"
	"	.reg .pred %p<4>;\n"
	"	.reg .b32 %r<4>;\n"
	"	.reg .b64 %rd<16>;\n"
	"	ld.param.u64 %rd1, [p_ns];\n"
	"	ld.param.u64 %rd2, [p_looks];\n"
	"	mov.u32 %r1, %tid.x;\n"
	"	setp.ne.u32 %p1, %r1, 0;\n"
	"	@%p1 bra DONE;\n"
	"	mov.u64 %rd3, %globaltimer;\n" /* first */
	"	mov.u64 %rd4, %rd3;\n"          /* the look before */
	"	mov.u64 %rd5, 0;\n"             /* longest gap */
	"	mov.u64 %rd6, %rd3;\n"          /* when it began */
	"LOOK:\n"
	"	mov.u64 %rd7, %globaltimer;\n"
	"	sub.u64 %rd8, %rd7, %rd4;\n"
	"	setp.gt.u64 %p2, %rd8, %rd5;\n"
	"	selp.u64 %rd5, %rd8, %rd5, %p2;\n"
	"	selp.u64 %rd6, %rd4, %rd6, %p2;\n"
	"	mov.u64 %rd4, %rd7;\n"
	"	sub.u64 %rd9, %rd7, %rd3;\n"
	"	setp.lt.u64 %p3, %rd9, %rd1;\n"
	"	@%p3 bra LOOK;\n"
	"	mov.u32 %r2, %ctaid.x;\n"
	"	mul.wide.u32 %rd10, %r2, 32;\n"
	"	cvta.to.global.u64 %rd11, %rd2;\n"
	"	add.u64 %rd11, %rd11, %rd10;\n"
	"	st.global.u64 [%rd11], %rd3;\n"
	"	st.global.u64 [%rd11+8], %rd7;\n"
	"	st.global.u64 [%rd11+16], %rd5;\n"
	"	st.global.u64 [%rd11+24], %rd6;\n"
	"DONE:\n"
	"	ret;\n"
	"}\n";

#endif
