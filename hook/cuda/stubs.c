// SPDX-License-Identifier: Apache-2.0
/*
 * stubs.c: a stub for each function of ungated.h. It jumps to the driver with the caller's stack and
 * parameters. While the process is checkpointed, or the driver is not resolved, it comes here first.
 */
#include "hook.h"

/* The function to go on to. */
void *nvs_ungated_slow(unsigned i) __attribute__((visibility("hidden"), used));

void *nvs_ungated_slow(unsigned i)
{
	return nvs_real_pointer(NVS_WRAPPED_COUNT + i);
}

/* What the stubs jump to, i being the number in ungated.h. All registers that parameters are in are kept. */

#if defined(__x86_64__)

#define COMMON \
	"nvs_ungated_wait:\n" \
	".cfi_startproc\n" \
	"push %rdi\n.cfi_adjust_cfa_offset 8\n" \
	"push %rsi\n.cfi_adjust_cfa_offset 8\n" \
	"push %rdx\n.cfi_adjust_cfa_offset 8\n" \
	"push %rcx\n.cfi_adjust_cfa_offset 8\n" \
	"push %r8\n.cfi_adjust_cfa_offset 8\n" \
	"push %r9\n.cfi_adjust_cfa_offset 8\n" \
	"sub $136, %rsp\n.cfi_adjust_cfa_offset 136\n" \
	"movups %xmm0, (%rsp)\nmovups %xmm1, 16(%rsp)\nmovups %xmm2, 32(%rsp)\nmovups %xmm3, 48(%rsp)\n" \
	"movups %xmm4, 64(%rsp)\nmovups %xmm5, 80(%rsp)\nmovups %xmm6, 96(%rsp)\nmovups %xmm7, 112(%rsp)\n" \
	"mov %r11d, %edi\n" \
	"call nvs_ungated_slow\n" \
	"mov %rax, %r11\n" \
	"movups (%rsp), %xmm0\nmovups 16(%rsp), %xmm1\nmovups 32(%rsp), %xmm2\nmovups 48(%rsp), %xmm3\n" \
	"movups 64(%rsp), %xmm4\nmovups 80(%rsp), %xmm5\nmovups 96(%rsp), %xmm6\nmovups 112(%rsp), %xmm7\n" \
	"add $136, %rsp\n.cfi_adjust_cfa_offset -136\n" \
	"pop %r9\n.cfi_adjust_cfa_offset -8\n" \
	"pop %r8\n.cfi_adjust_cfa_offset -8\n" \
	"pop %rcx\n.cfi_adjust_cfa_offset -8\n" \
	"pop %rdx\n.cfi_adjust_cfa_offset -8\n" \
	"pop %rsi\n.cfi_adjust_cfa_offset -8\n" \
	"pop %rdi\n.cfi_adjust_cfa_offset -8\n" \
	"jmp *%r11\n" \
	".cfi_endproc\n"

#define STUB \
	"endbr64\n" \
	"cmpl $0, nvs_suspended(%rip)\n" \
	"jne 1f\n" \
	"mov nvs_ungated_table + 8 * nvs_ungated_i(%rip), %r11\n" \
	"test %r11, %r11\n" \
	"je 1f\n" \
	"jmp *%r11\n" \
	"1: mov $nvs_ungated_i, %r11d\n" \
	"jmp nvs_ungated_wait\n"

#elif defined(__aarch64__)

#define COMMON \
	"nvs_ungated_wait:\n" \
	".cfi_startproc\n" \
	"stp x29, x30, [sp, #-224]!\n.cfi_adjust_cfa_offset 224\n" \
	"stp x0, x1, [sp, #16]\nstp x2, x3, [sp, #32]\nstp x4, x5, [sp, #48]\nstp x6, x7, [sp, #64]\n" \
	"str x8, [sp, #80]\n" \
	"stp q0, q1, [sp, #96]\nstp q2, q3, [sp, #128]\nstp q4, q5, [sp, #160]\nstp q6, q7, [sp, #192]\n" \
	"mov w0, w17\n" \
	"bl nvs_ungated_slow\n" \
	"mov x16, x0\n" \
	"ldp q0, q1, [sp, #96]\nldp q2, q3, [sp, #128]\nldp q4, q5, [sp, #160]\nldp q6, q7, [sp, #192]\n" \
	"ldr x8, [sp, #80]\n" \
	"ldp x0, x1, [sp, #16]\nldp x2, x3, [sp, #32]\nldp x4, x5, [sp, #48]\nldp x6, x7, [sp, #64]\n" \
	"ldp x29, x30, [sp], #224\n.cfi_adjust_cfa_offset -224\n" \
	"br x16\n" \
	".cfi_endproc\n"

#define STUB \
	"hint #34\n" /* bti c */ \
	"adrp x16, nvs_suspended\n" \
	"ldr w16, [x16, #:lo12:nvs_suspended]\n" \
	"cbnz w16, 1f\n" \
	"adrp x16, nvs_ungated_table + 8 * nvs_ungated_i\n" \
	"ldr x16, [x16, #:lo12:nvs_ungated_table + 8 * nvs_ungated_i]\n" \
	"cbz x16, 1f\n" \
	"br x16\n" \
	"1: mov w17, #nvs_ungated_i\n" \
	"b nvs_ungated_wait\n"

#else
#error "no stubs for this machine"
#endif

#define H(name) \
	".globl " #name "\n" \
	".type " #name ", %function\n" \
	".balign 16\n" \
	#name ":\n" \
	".cfi_startproc\n" \
	STUB \
	".cfi_endproc\n" \
	".size " #name ", . - " #name "\n" \
	".set nvs_ungated_i, nvs_ungated_i + 1\n"

__asm__(".text\n"
	".hidden nvs_suspended\n.hidden nvs_ungated_table\n.hidden nvs_ungated_slow\n"
	COMMON
	".set nvs_ungated_i, 0\n"
	NVS_UNGATED_TABLE(H));
#undef H
