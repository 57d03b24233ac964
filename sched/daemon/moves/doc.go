// SPDX-License-Identifier: Apache-2.0

// Package moves takes tenants from GPU to GPU, with their memory and contexts, and says to which GPU a
// tenant can go.
//
// What it guarantees:
//
//   - The ATTACH of a process decides to which GPU it belongs, whatever has failed before.
//   - A tenant moves as a whole, or goes on where it is: processes that have moved go back if another
//     cannot.
//   - Which processes are off their GPUs is recorded before they go (migrating.json): the next
//     scheduler has them run again.
package moves
