// SPDX-License-Identifier: Apache-2.0

// Package daemon runs the scheduler: it owns the sockets and the clock, and carries out what pure
// packages decide: a core per GPU (package sched), and package placement.
//
// What it guarantees:
//
//   - One goroutine, the loop, owns every core and all tables. It never waits for a client: frames
//     are sent without blocking, and a client that does not read is disconnected.
//   - A grant is recorded in the state file before the client's gate opens, the gate opens before
//     GRANT is sent, and is shut before REVOKE is sent. So a restart never makes two holders.
//   - Whatever a tenant sends, the worst that happens is that its own connection is closed. What a
//     tenant can make the scheduler hold is limited, see limits.go.
//   - A reservation is refused when it is made, never later.
//   - The scheduler's end changes nothing for running holders. A scheduler that could not record
//     grants, or be reached, does not start, or ends with an error.
//
// Its parts have state of their own; each knows those above it, and none the daemon: loop (the
// goroutine and its timers), node (tables of GPUs, connections and clients), settings (how GPUs are
// shared), tenants (what containers and users may have), memory (what clients have reserved, and
// where it is), away (suspended processes), moves (from GPU to GPU), watch (who uses GPUs past the
// scheduler). Below these are packages that know nothing of clients.
package daemon
