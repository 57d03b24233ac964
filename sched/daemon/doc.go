// SPDX-License-Identifier: Apache-2.0

// Package daemon runs the scheduler: it owns the sockets and the clock, and
// carries out what pure packages decide: a core per GPU (package sched), and package
// placement, which says who goes to which GPU.
//
// What it guarantees:
//
//   - One goroutine, the loop, owns every core and all tables, and is the only
//     one to read the clock for them. The loop never waits for a client: frames
//     are sent without blocking, and a client that does not read is disconnected.
//   - A grant is recorded in the state file before the client's gate opens, the
//     gate opens before GRANT is sent, and a gate is shut before REVOKE is sent.
//     So a restart never makes two holders.
//   - Whatever a tenant sends, the worst that happens is that its own
//     connection is closed. What a tenant can make the scheduler hold is limited,
//     see limits.go.
//   - Events and metrics are noted as actions are carried out, without a search,
//     a format or an allocation: a turn of a GPU pays 0.3 µs for them.
//   - With Options.SwapMemory clients can be promised more memory than a GPU has.
//     A reservation is refused when it is made if it could never be placed, never
//     later.
//   - The scheduler's end changes nothing for running holders: their gates stay
//     open, and the next scheduler finds them in the state file.
//   - A scheduler that could not record grants, or be reached, does not start, or
//     ends with an error.
//
// It owns the sockets and the tables of grants. Its parts have state of their own; each knows those
// above it, and none the daemon:
//
//	loop     the goroutine, and its timers
//	node     the tables of GPUs, connections and clients
//	settings how GPUs are shared
//	tenants  what containers and users may have
//	memory   what clients have reserved, and where it is
//	away     suspended processes
//	moves    tenants on their way from GPU to GPU
//	watch    who uses GPUs past the scheduler
//
// Below these are packages that know nothing of clients:
//
//	admission who may connect, and how much of the loop's time an account may take
//	peer     who is at the other end of a connection, and whether it is dead
//	page     grant pages
//	rundir   the run directory, its lock and its sockets
//	state    files that outlive the scheduler: state.json and records
//	history  the latest events
//	metrics  /metrics and /healthz
//	arena    host memory for what is away from GPUs
//	store    the same in files, of suspended processes
//	overlap  the MPS daemons of overlap groups
//	timer    what the loop does at a time
//
// In the run directory, beside what package rundir has there, is state.json: epoch and holders of
// each GPU, and how they share it. The parts have theirs.
package daemon
