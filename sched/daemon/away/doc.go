// SPDX-License-Identifier: Apache-2.0

// Package away takes suspended processes off their GPUs with their contexts, and brings them back.
// Where host memory is short, their memory goes on to files (files.json).
//
// What it guarantees:
//
//   - The driver is asked to checkpoint a process only after its shim has said that no thread of it is
//     in the driver. One that cannot leave keeps its context, and the status says why.
//   - A process that cannot come back is tried again for as long as it lives.
//   - No page is given back before the file that has it is recorded, and no file is removed before its
//     pages are there again. Until then the process is not restored.
//   - A process that leaves waits for others that leave or come back, for 10 s at most: nobody waits
//     for it.
package away
