// SPDX-License-Identifier: Apache-2.0

// Package moves takes tenants from GPU to GPU, with their memory and contexts, and says to which GPU a
// tenant can go.
//
// What it guarantees:
//
//   - The ATTACH of a process decides to which GPU it belongs, whatever has failed before.
//   - A tenant moves as a whole, or goes on where it is: processes that have moved go back if another
//     cannot.
//   - Who moves is recorded before the first process goes (migrating.json): the next scheduler has each
//     process run again, and the tenant whole on one GPU.
package moves
