// SPDX-License-Identifier: Apache-2.0

// Package state keeps what must outlive the scheduler in files of its run
// directory.
//
// Two kinds of files:
//
//   - The state file (File) says which epoch each GPU had last and who held the
//     GPU. It is small, and written before each grant. It has to survive the
//     end of the scheduler, not that of the kernel: no holder lives on after a
//     reboot, and the boot id tells the next scheduler so.
//   - Records (ReadRecord, WriteRecord) hold what people set. They are written
//     when that changes.
//
// What it guarantees:
//
//   - A file is replaced as a whole: whoever reads it finds the content before
//     a write, or the content after the write.
//   - Only regular files are read and written. A link is not followed, and a
//     pipe is not waited for.
//   - Whatever a file holds, reading it ends, and what is returned can start a
//     scheduler. The error says what is wrong with the file.
package state
