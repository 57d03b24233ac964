// SPDX-License-Identifier: Apache-2.0

// Package memory has the memory of clients: what they have reserved, what of it is on GPUs, and the
// host memory for the rest. Package sched decides all of that; this one tells it what clients say,
// and brings its decisions to pages, frames and arenas.
//
// What it guarantees:
//
//   - A reservation that could never be placed is refused when it is made, and each is answered, also
//     while nothing can be recorded.
//   - Who has memory on GPUs where it is swapped is recorded (members.json): after a restart nobody is
//     given room that those have who are not back yet.
//   - Host memory that is made for a client is charged to its account.
package memory
