// SPDX-License-Identifier: Apache-2.0

// Package checkpoint takes a process off its GPUs and puts it back, by the checkpoint calls of the
// driver (CUDA 12.8 and later). They run in a program of their own, nvshare-checkpoint, which loads the
// driver: the scheduler may be a static program, and a call that hangs is ended with its process.
//
//	r := &checkpoint.Runner{Program: checkpoint.Find()}
//	r.Expect(1)                          // a program is made ready
//	times, err := r.Off(ctx, pid)        // locked, then checkpointed: nothing of it is on any GPU
//	times, err = r.On(ctx, pid, nil)     // restored on the same GPUs, and unlocked
//	times, err = r.On(ctx, pid, pairs)   // or on others
//
// What it promises:
//
//   - A program that is ready has no context and no memory on a GPU. It ends a minute after it was last
//     expected, with the process that started it, or with an operation that failed.
//   - Off and On end at Limit at the latest, and may be repeated: they go on from where the process is.
//   - What is under way when the Runner's process ends goes on until Limit; nothing else begins. Where there
//     is a Lock, the next Runner waits for it.
//   - If Off fails, the process runs again, and if On fails it stays checkpointed, unless the error's
//     State says otherwise.
//
// A checkpointed process runs, but each of its CUDA calls waits. The program needs the rights to trace
// the process: the same user, or CAP_SYS_PTRACE.
package checkpoint
