// SPDX-License-Identifier: Apache-2.0

// Package compat has the tests of the shim in other people's programs: however
// a program comes to the driver, in whatever image, beside whatever else is
// preloaded. They run with the build tag compat against the simulated GPU and
// a real nvshare-scheduler, beside a rival that always has work.
//
//	make test-compat   what a build machine can do at once, in half a minute
//	make compat        also images of other releases and NVIDIA's own runtime,
//	                   fetched from Debian into .build/compat/images
//
// A managed program must be a client of the scheduler, have each of its
// submissions counted at the gate and no entry point that leads past the shim,
// and print nothing but its own. At the end the simulated GPU is asked whether
// two ever worked at once. What cannot be held must run as if there were no
// shim. A case without its programs or packages is skipped, and says so.
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
//   - /etc/ld.so.preload, also named a second time by LD_PRELOAD, and there
//     setuid programs too. A root file system of a C library and a program.
//   - Not held, and not harmed: env -i, setuid programs under LD_PRELOAD,
//     static programs, musl, 32-bit programs (the loader prints a line), a
//     machine without a scheduler. A dozen common programs make the same
//     sockets, processes and threads with the shim as without.
//   - glibc 2.31, 2.36, 2.41 and 2.43 by images of Debian releases, x86-64 and
//     (the oldest and the newest) arm64.
//   - arm64: the shim, the simulated driver and the shim's own tests, emulated,
//     under this machine's scheduler.
//   - NVIDIA's CUDA runtime 11.2, 11.8 and 12.4: each look-up that it makes is
//     answered as without the shim, by the shim's function of the same name
//     where there is one. STATIC_CUDART=libcudart_static.a adds a linked one.
//
// # Not covered
//
//   - glibc 2.17 to 2.30: no image to be had. hook/test/symbols.sh sees to it
//     that the shim needs nothing newer than 2.17.
//   - The CUDA runtime after its look-ups: it wants private tables that only
//     the real driver has; see tests/gpu. The same holds for PyTorch and CuPy.
//   - dlmopen, and a dlsym that was itself got from a handle of the C library:
//     these lead past the shim.
package compat
