// SPDX-License-Identifier: Apache-2.0
/*
 * tail.S: the exported dlsym and dlvsym.
 *
 * glibc reads RTLD_NEXT's meaning from the return address, so a look-up that
 * is not answered here must reach the next dlsym by a jump, with the caller's
 * own return address.
 */
#ifdef __CET__
#include <cet.h> /* marks the object: it keeps to indirect branch tracking and shadow stacks */
#endif

/* The third parameter is dlvsym's version. */
#if defined(__x86_64__)

.macro LOOKUP name
	.text
	.globl	\name
	.type	\name, @function
\name:
	.cfi_startproc
	endbr64
	pushq	%rdi
	.cfi_adjust_cfa_offset 8
	pushq	%rsi
	.cfi_adjust_cfa_offset 8
	pushq	%rdx
	.cfi_adjust_cfa_offset 8
	movq	24(%rsp), %rcx
	call	nvs_\name\()_route
	movq	%rdx, %rcx
	popq	%rdx
	.cfi_adjust_cfa_offset -8
	popq	%rsi
	.cfi_adjust_cfa_offset -8
	popq	%rdi
	.cfi_adjust_cfa_offset -8
	testq	%rcx, %rcx
	jne	1f
	jmpq	*nvs_next_\name\()_pointer(%rip)
1:	ret
	.cfi_endproc
	.size	\name, . - \name
.endm

#elif defined(__aarch64__)

.macro LOOKUP name
	.text
	.globl	\name
	.type	\name, %function
\name:
	.cfi_startproc
	hint	#34 /* bti c */
	stp	x29, x30, [sp, #-48]!
	.cfi_adjust_cfa_offset 48
	stp	x0, x1, [sp, #16]
	str	x2, [sp, #32]
	mov	x3, x30
	bl	nvs_\name\()_route
	mov	x17, x1
	mov	x16, x0
	ldr	x2, [sp, #32]
	ldp	x0, x1, [sp, #16]
	ldp	x29, x30, [sp], #48
	.cfi_adjust_cfa_offset -48
	cbnz	x17, 1f
	adrp	x16, nvs_next_\name\()_pointer
	ldr	x16, [x16, #:lo12:nvs_next_\name\()_pointer]
	br	x16
1:	mov	x0, x16
	ret
	.cfi_endproc
	.size	\name, . - \name
.endm

#endif

LOOKUP dlsym
LOOKUP dlvsym

	.section .note.GNU-stack, "", %progbits
