// SPDX-License-Identifier: Apache-2.0

// Package checkpoint takes a process off its GPUs and puts it back, by the checkpoint
// calls of the driver (CUDA 12.8 and later).
//
// The calls run in a program of their own, nvshare-checkpoint, that loads the driver: the
// scheduler may be a static program, and a call that hangs is ended with its process. A
// Runner starts that program, which does one operation at a time:
//
//	r := &checkpoint.Runner{Program: checkpoint.Find()}
//	r.Expect(1)                          // a program is made ready
//	times, err := r.Off(ctx, pid)        // locked, then checkpointed: nothing of it is on any GPU
//	times, err = r.On(ctx, pid, nil)     // restored on the same GPUs, and unlocked
//	times, err = r.On(ctx, pid, pairs)   // or on others
//
// What it promises:
//
//   - A program that is ready has the driver loaded and no context: it has no memory on a GPU,
//     and NVML does not list it. It ends a minute after it was last expected, with the
//     process that started it, or with an operation that failed.
//   - Off and On end at Limit at the latest, whatever the driver does.
//   - Both may be repeated, also after the program was killed in their middle: they go on
//     from the state that the process is in. Nothing is done to a process that is where it
//     is to be.
//   - If Off fails, the process runs again, or the error's State says what it is.
//   - If On fails, the process stays checkpointed, unless the error's State says otherwise.
//
// A checkpointed process runs, but each of its CUDA calls waits in the driver until it is
// restored and unlocked. Off waits for work that the process has submitted.
//
// The program needs the driver's library (found by the dynamic linker, or in the places
// where NVIDIA puts it) and its device nodes; the PIDs are those of its own PID namespace.
// It needs the rights to trace the process: the same user, or CAP_SYS_PTRACE.
package checkpoint
