// SPDX-License-Identifier: Apache-2.0

// Package sim runs the scheduler core in virtual time against models of what
// surrounds it: clients that behave as the shim does, or worse, the frames and
// pages between, a daemon that crashes between any two actions, and an
// operator who changes his mind. One seed decides everything, so a failure is
// repeated by running its seed again.
//
// After each step the core checks its own invariants. A judge that knows
// nothing of the core, only which process could really submit work to the GPU,
// decides whether two exclusive holders ever overlapped and whether anybody
// waited for longer than the number of clients allows. In some worlds clients have
// more memory than the GPU and move it: then it also decides whether room was ever
// promised that there was not.
//
// What the models promise is what a real client must keep for that to hold:
//
//   - It opens its gate only under the word of its page, never again under an
//     epoch it has released, and between losing its connection and ATTACHED
//     under no epoch that it did not hold before.
//   - It sends RELEASE, or attaches with no epoch, only when it has drained.
//   - If it is revoked before it opened, it releases, and asks again if a
//     thread still waits: the grant has used up the request.
package sim
