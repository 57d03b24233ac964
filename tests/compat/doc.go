// SPDX-License-Identifier: Apache-2.0

// Package compat tests the shim in other people's programs: with every way to reach the
// driver, in several images, and next to other preloaded libraries. The tests run with
// the build tag compat, on the simulated GPU and a real nvshare-scheduler, beside a rival
// that always has work.
//
//	make test-compat   what a build machine can do at once, in half a minute
//	make compat        also images of other releases and NVIDIA's own runtime,
//	                   downloaded from Debian into .build/compat/images
//
// A managed program must be a client of the scheduler. The gate must count each of its
// submissions, no entry point may bypass the shim, and the program must print only its
// own output. At the end, the simulated GPU's record says whether two programs ever
// worked at once. A program that the shim cannot hold must run as without the shim. A
// case that lacks its programs or packages is skipped, and says so.
//
// # Covered
//
//   - Ways in: linked; dlopen and dlsym; dlsym of the default and of the next;
//     cuGetProcAddress of 11.3 and of 12.0 with legacy and per-thread streams;
//     four threads from cuInit on; a forked child; ctypes twice in one
//     process; cgo, linked and opened; Go without cgo; at the end of chains of
//     shells and interpreters.
//   - Beside the shim, before and after it: jemalloc, tcmalloc, libeatmydata,
//     libfaketime, the address and thread sanitizers, a library that
//     interposes dlsym, an allocator that asks dlsym for the real one. Also
//     programs built with sanitizers.
//   - /etc/ld.so.preload, also together with LD_PRELOAD, and with setuid programs.
//     A root file system with only a C library and a program.
//   - Programs that are not held, and not harmed: env -i, setuid programs under LD_PRELOAD,
//     static programs, musl, 32-bit programs (the loader prints a line), a
//     machine without a scheduler. A dozen common programs make the same
//     sockets, processes and threads with the shim as without.
//   - glibc 2.31, 2.36, 2.41 and 2.43 by images of Debian releases, x86-64 and
//     (the oldest and the newest) arm64.
//   - arm64: the shim, the simulated driver and the shim's own tests, emulated,
//     under this machine's scheduler.
//   - NVIDIA's CUDA runtime 11.2, 11.8 and 12.4: each of its look-ups gets the same
//     answer as without the shim, or the shim's function of the same name.
//     STATIC_CUDART=libcudart_static.a adds a linked runtime.
//
// # Not covered
//
//   - glibc 2.17 to 2.30, for which there is no image. A test in hook/test checks
//     that the shim needs nothing newer than 2.17.
//   - The CUDA runtime after its look-ups: it needs private tables that only the
//     real driver has. tests/gpu runs it, and PyTorch and CuPy.
//   - dlmopen, and a dlsym that was looked up in a handle of the C library: these
//     bypass the shim.
package compat
