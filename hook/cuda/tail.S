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

#if defined(__x86_64__)

	.text
	.globl	dlsym
	.type	dlsym, @function
dlsym:
	.cfi_startproc
	endbr64
	pushq	%rdi
	.cfi_adjust_cfa_offset 8
	pushq	%rsi
	.cfi_adjust_cfa_offset 8
	subq	$8, %rsp
	.cfi_adjust_cfa_offset 8
	movq	24(%rsp), %rdx
	call	nvs_dlsym_route
	addq	$8, %rsp
	.cfi_adjust_cfa_offset -8
	popq	%rsi
	.cfi_adjust_cfa_offset -8
	popq	%rdi
	.cfi_adjust_cfa_offset -8
	testq	%rdx, %rdx
	jne	1f
	jmpq	*nvs_next_dlsym_pointer(%rip)
1:	ret
	.cfi_endproc
	.size	dlsym, . - dlsym

	.globl	dlvsym
	.type	dlvsym, @function
dlvsym:
	.cfi_startproc
	endbr64
	pushq	%rdi
	.cfi_adjust_cfa_offset 8
	pushq	%rsi
	.cfi_adjust_cfa_offset 8
	pushq	%rdx
	.cfi_adjust_cfa_offset 8
	movq	24(%rsp), %rcx
	call	nvs_dlvsym_route
	movq	%rdx, %rcx
	popq	%rdx
	.cfi_adjust_cfa_offset -8
	popq	%rsi
	.cfi_adjust_cfa_offset -8
	popq	%rdi
	.cfi_adjust_cfa_offset -8
	testq	%rcx, %rcx
	jne	1f
	jmpq	*nvs_next_dlvsym_pointer(%rip)
1:	ret
	.cfi_endproc
	.size	dlvsym, . - dlvsym

#elif defined(__aarch64__)

	.text
	.globl	dlsym
	.type	dlsym, %function
dlsym:
	.cfi_startproc
	hint	#34 /* bti c */
	stp	x29, x30, [sp, #-32]!
	.cfi_adjust_cfa_offset 32
	stp	x0, x1, [sp, #16]
	mov	x2, x30
	bl	nvs_dlsym_route
	mov	x17, x1
	mov	x16, x0
	ldp	x0, x1, [sp, #16]
	ldp	x29, x30, [sp], #32
	.cfi_adjust_cfa_offset -32
	cbnz	x17, 1f
	adrp	x16, nvs_next_dlsym_pointer
	ldr	x16, [x16, #:lo12:nvs_next_dlsym_pointer]
	br	x16
1:	mov	x0, x16
	ret
	.cfi_endproc
	.size	dlsym, . - dlsym

	.globl	dlvsym
	.type	dlvsym, %function
dlvsym:
	.cfi_startproc
	hint	#34 /* bti c */
	stp	x29, x30, [sp, #-48]!
	.cfi_adjust_cfa_offset 48
	stp	x0, x1, [sp, #16]
	str	x2, [sp, #32]
	mov	x3, x30
	bl	nvs_dlvsym_route
	mov	x17, x1
	mov	x16, x0
	ldr	x2, [sp, #32]
	ldp	x0, x1, [sp, #16]
	ldp	x29, x30, [sp], #48
	.cfi_adjust_cfa_offset -48
	cbnz	x17, 1f
	adrp	x16, nvs_next_dlvsym_pointer
	ldr	x16, [x16, #:lo12:nvs_next_dlvsym_pointer]
	br	x16
1:	mov	x0, x16
	ret
	.cfi_endproc
	.size	dlvsym, . - dlvsym

#endif

	.section .note.GNU-stack, "", %progbits
