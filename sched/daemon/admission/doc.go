// SPDX-License-Identifier: Apache-2.0

// Package admission says who may connect to the scheduler, and how much of the
// scheduler's time each account may take. It does no I/O and reads no clock.
//
// What it guarantees, whatever accounts do:
//
//   - An account that has no connection gets one, as long as fewer accounts than there
//     are connections want any: the more an account has, the more must be left free for
//     it to get another.
//   - An account connects at a bounded rate, and so does a process, about which nothing
//     needs to be known but its number.
//   - What accounts ask of the scheduler's loop is counted by its cost. Together they may
//     cost a fixed amount in a second, of which each has an equal part, and some at once.
//   - An account whose processes have host memory made, and end, again and again, starts
//     processes at a rate that bounds what is made.
//   - At most TurnsAtOnce requests of an account are before the loop at a time: accounts
//     are served in turn.
package admission
