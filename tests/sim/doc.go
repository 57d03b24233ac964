// SPDX-License-Identifier: Apache-2.0

// Package sim runs the scheduler core in virtual time against models of its
// surroundings: clients that behave as the shim does, or worse; the frames and pages
// between; a daemon that crashes between any two actions; an operator who changes
// shares, modes and times, suspends tenants, and has them leave for another GPU; and a
// machine that is suspended. Some tenants are gangs, and
// in some worlds clients have more memory than the GPU and move it, or others than clients have some of it. One seed decides
// everything, so a failure is repeated by running its seed again.
//
// The core checks its own invariants again and again. A judge knows nothing of the
// core, only which process could really submit work to the GPU. It decides whether two
// exclusive holders ever overlapped, whether anybody waited for longer than the number
// of clients allows, and whether room was ever promised that the GPU did not have.
//
// A world has one GPU. gang_sim_test.go simulates jobs on several GPUs, whose ranks
// wait for each other in collectives.
//
// A real client must keep what the models keep:
//
//   - It opens its gate only under the word of its page, never again under an
//     epoch it has released, and between losing its connection and ATTACHED
//     under no epoch that it did not hold before.
//   - It sends RELEASE, or attaches with no epoch, only when it has drained.
//   - If its grant is revoked before the gate has opened, it releases, and asks again
//     if a thread still waits: the grant has used up the request.
package sim
