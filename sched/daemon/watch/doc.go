// SPDX-License-Identifier: Apache-2.0

// Package watch finds the processes that use GPUs past the scheduler: those that are no clients, and
// clients that have no grant.
//
// What it guarantees:
//
//   - The driver is asked beside the loop, with a limit of time, and only where somebody shares a GPU.
//   - Nobody is named for what may be chance: a process is seen twice before it is.
package watch
