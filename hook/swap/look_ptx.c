// SPDX-License-Identifier: Apache-2.0
/* look_ptx.c: the kernel of look_abi.h, for GPUs from Maxwell and drivers from CUDA 9 on. */
#include "look_ptx.h"

#include "look_abi.h"

/* Four sums of a pair of words; k0 to k7: the eight words of the key from the pair's on. */
#define SUM(s, a, b, k, l) \
	"add.u32 %x, %m" a ", %k" k "; add.u32 %y, %m" b ", %k" l "; mad.wide.u32 %v" s ", %x, %y, %v" s ";\n"
#define PAIR(a, b, k0, k1, k2, k3, k4, k5, k6, k7) \
	SUM("0", a, b, k0, k1) SUM("1", a, b, k2, k3) SUM("2", a, b, k4, k5) SUM("3", a, b, k6, k7) \
	"or.b32 %any, %any, %m" a "; or.b32 %any, %any, %m" b ";\n"

#define READ(a, b, c, d, at) "ld.global.cs.v4.u32 {%m" a ", %m" b ", %m" c ", %m" d "}, [%at+" at "];\n"
#define KEY(a, b, c, d, at)  "ld.shared.v4.u32 {%k" a ", %k" b ", %k" c ", %k" d "}, [%ks+" at "];\n"

/* Adds what the lane so far ahead has. */
#define FROM(s, lanes) \
	"mov.b64 {%x, %y}, %h" s ";\n" \
	"shfl.sync.down.b32 %x, %x, " lanes ", 31, 0xffffffff; shfl.sync.down.b32 %y, %y, " lanes ", 31, 0xffffffff;\n" \
	"mov.b64 %w, {%x, %y}; add.u64 %h" s ", %h" s ", %w;\n"
#define FOLD(lanes) FROM("0", lanes) FROM("1", lanes) FROM("2", lanes) FROM("3", lanes)

#define MIX(s, a, b) \
	"mov.b64 {%x, %y}, %v" s "; add.u32 %x, %x, %m" a "; add.u32 %y, %y, %m" b "; mul.wide.u32 %h" s ", %x, %y;\n"

const char nvs_look_ptx[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"
	".visible .entry " LOOK_NAME "(.param .u64 p_pieces, .param .u64 p_parts, .param .u64 p_keys)\n"
	".maxntid 256, 1, 1\n"
	"{\n"
	".reg .pred %p, %q, %own;\n"
	".reg .u32 %m<16>, %k<22>, %x, %y, %any, %t, %b, %i, %ks, %total;\n"
	".reg .u64 %v<4>, %h<4>, %w, %part, %keys, %at;\n"
	".shared .align 16 .b8 key[1056];\n"
	".shared .align 16 .b8 total[48];\n"
	"ld.param.u64 %at, [p_pieces]; cvta.to.global.u64 %at, %at;\n"
	"ld.param.u64 %part, [p_parts]; cvta.to.global.u64 %part, %part;\n"
	"ld.param.u64 %keys, [p_keys]; cvta.to.global.u64 %keys, %keys;\n"
	"mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mov.u32 %ks, key;\n"
	/* The key of all threads: 66 of them copy 16 bytes. */
	"setp.lt.u32 %p, %t, 66;\n"
	"mul.wide.u32 %w, %t, 16; add.u64 %w, %keys, %w; shl.b32 %x, %t, 4; add.u32 %x, %ks, %x;\n"
	"@%p ld.global.v4.u32 {%m0, %m1, %m2, %m3}, [%w];\n"
	"@%p st.shared.v4.u32 [%x], {%m0, %m1, %m2, %m3};\n"
	/* What the block adds up: five threads have one number each. */
	"setp.lt.u32 %own, %t, 5; shl.b32 %x, %t, 3; mov.u32 %total, total; add.u32 %x, %total, %x; mov.u64 %w, 0;\n"
	"@%own st.shared.u64 [%x], %w;\n"
	"bar.sync 0;\n"
	/* Where the thread begins to read. */
	"mul.wide.u32 %w, %b, 48; add.u64 %part, %part, %w;\n"
	"shr.u32 %x, %b, 3; mul.wide.u32 %w, %x, 8; add.u64 %at, %at, %w;\n"
	"ld.global.u64 %at, [%at]; cvta.to.global.u64 %at, %at;\n"
	"and.b32 %b, %b, 7; mul.wide.u32 %w, %b, 262144; add.u64 %at, %at, %w;\n"
	"mul.wide.u32 %w, %t, 16; add.u64 %at, %at, %w;\n"
	"mov.u64 %v0, 0; mov.u64 %v1, 0; mov.u64 %v2, 0; mov.u64 %v3, 0; mov.u32 %any, 0; mov.u32 %i, 0;\n"
	"MORE:\n"
	READ("0", "1", "2", "3", "0") READ("4", "5", "6", "7", "4096")
	READ("8", "9", "10", "11", "8192") READ("12", "13", "14", "15", "12288")
	KEY("0", "1", "2", "3", "0") KEY("4", "5", "6", "7", "16") KEY("8", "9", "10", "11", "32")
	KEY("12", "13", "14", "15", "48") KEY("16", "17", "18", "19", "64")
	"ld.shared.v2.u32 {%k20, %k21}, [%ks+80];\n"
	PAIR("0", "1", "0", "1", "2", "3", "4", "5", "6", "7")
	PAIR("2", "3", "2", "3", "4", "5", "6", "7", "8", "9")
	PAIR("4", "5", "4", "5", "6", "7", "8", "9", "10", "11")
	PAIR("6", "7", "6", "7", "8", "9", "10", "11", "12", "13")
	PAIR("8", "9", "8", "9", "10", "11", "12", "13", "14", "15")
	PAIR("10", "11", "10", "11", "12", "13", "14", "15", "16", "17")
	PAIR("12", "13", "12", "13", "14", "15", "16", "17", "18", "19")
	PAIR("14", "15", "14", "15", "16", "17", "18", "19", "20", "21")
	"add.u64 %at, %at, 16384; add.u32 %ks, %ks, 64; add.u32 %i, %i, 1;\n"
	"setp.lt.u32 %p, %i, 16;\n"
	"@%p bra MORE;\n"
	/* What tells the threads apart: mix, behind the key. */
	"shl.b32 %x, %b, 8; add.u32 %x, %x, %t; mul.wide.u32 %w, %x, 32; add.u64 %keys, %keys, %w;\n"
	"ld.global.v4.u32 {%m0, %m1, %m2, %m3}, [%keys+1056];\n"
	"ld.global.v4.u32 {%m4, %m5, %m6, %m7}, [%keys+1072];\n"
	MIX("0", "0", "1") MIX("1", "2", "3") MIX("2", "4", "5") MIX("3", "6", "7")
	FOLD("16") FOLD("8") FOLD("4") FOLD("2") FOLD("1")
	"setp.ne.u32 %q, %any, 0; vote.sync.any.pred %q, %q, 0xffffffff;\n"
	"and.b32 %x, %t, 31; setp.eq.u32 %p, %x, 0; and.pred %q, %q, %p; mov.u64 %w, 1;\n"
	"@%p red.shared.add.u64 [%total], %h0;\n"
	"@%p red.shared.add.u64 [%total+8], %h1;\n"
	"@%p red.shared.add.u64 [%total+16], %h2;\n"
	"@%p red.shared.add.u64 [%total+24], %h3;\n"
	"@%q st.shared.u64 [%total+32], %w;\n"
	"bar.sync 0;\n"
	"shl.b32 %x, %t, 3; add.u32 %x, %total, %x; mul.wide.u32 %w, %t, 8; add.u64 %part, %part, %w;\n"
	"@%own ld.shared.u64 %w, [%x];\n"
	"@%own st.global.u64 [%part], %w;\n"
	"ret;\n"
	"}\n";

_Static_assert(sizeof(struct look_part) == 48 && sizeof(struct look_keys) == 1056 + 32 * 2048, "as the text has them");
_Static_assert(LOOK_PIECE == LOOK_PARTS * LOOK_THREADS * LOOK_WORDS * 4, "all words of a piece");
