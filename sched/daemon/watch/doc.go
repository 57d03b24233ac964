// SPDX-License-Identifier: Apache-2.0

// Package watch finds the processes that use GPUs past the scheduler: those that are no clients, and
// clients that have no grant. Those that are no clients it has nvshare-warden hold to the core limit of
// their tenant.
//
// What it guarantees:
//
//   - The driver is asked beside the loop, with a limit of time, and only where somebody shares a GPU or,
//     with --warden, has a core limit.
//   - Nobody is named for what may be chance: a process is seen twice before it is.
package watch
