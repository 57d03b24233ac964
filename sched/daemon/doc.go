// SPDX-License-Identifier: Apache-2.0

// Package daemon runs the scheduler: it owns the sockets, the grant pages, the
// clock and the state file, and carries out what the pure core (package sched)
// decides, one core per GPU.
//
// What it guarantees:
//
//   - One goroutine, the loop, owns every core and all tables and is the only
//     one to read the clock for them. It never waits for a client: frames are
//     sent without blocking, and a client that does not read is disconnected.
//   - A grant is recorded in the state file before the client's gate opens, the
//     gate opens before GRANT is sent, and a gate is shut before REVOKE is sent.
//     So a restart never makes two holders.
//   - Who a client is comes from the kernel: SO_PEERCRED, a pidfd, the cgroup.
//     Only the pidfd proves that a process is dead.
//   - Whatever a tenant sends, the worst that happens is that its own
//     connection is closed. What it can make the scheduler hold is limited, see
//     limits.go.
//   - What is seen of it (events.go, metrics*.go) is taken down as actions are
//     carried out, without a search, a format or an allocation: a turn of a GPU
//     pays 0.3 µs for it.
//   - With Options.SwapMemory clients can be promised more memory than a GPU has.
//     A reservation is refused when it is made if it could never be placed
//     (swap.go), never later; host memory for what is away is made beside the
//     loop, before it is needed (package arena) and in part before anybody
//     reserves, and no page of it ever has two tenants.
//   - The scheduler's end changes nothing for running holders: their gates
//     stay open, and the next scheduler finds them in the state file.
//
// The run directory:
//
//	tenant/scheduler.sock  clients, mode 0666; the directory containers get
//	scheduler.sock         symbolic link to it, for programs on the host
//	control.sock           package api, mode 0600
//	state.json             epoch and holders of each GPU
//	settings.json          time quanta and modes that were set
//	shares.json            shares and memory limits of tenants
//	members.json           who has memory on GPUs where it is swapped
//	lock                   held by the running scheduler
package daemon
