// SPDX-License-Identifier: Apache-2.0

// Package settings has how GPUs are shared: time quanta, modes, swap shares, which GPUs are drained,
// and their faults, in settings.json.
//
// What it guarantees:
//
//   - The latest word holds: what was set by hand outlives the scheduler, until the scheduler is
//     started with another value of the same flag.
//   - Change puts in force what is recorded, or nothing. Keep is for what nobody would say again: it
//     is tried until it is recorded.
//   - What nobody could have set is not read.
package settings
