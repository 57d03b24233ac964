// SPDX-License-Identifier: Apache-2.0

// Package sched decides which client may use a GPU. It is a pure state
// machine, one Core for each GPU UUID: no I/O, no goroutines, no clock. The
// caller tells it what happened (Step), carries out the actions it answers
// with, in order, and calls again when Deadline says so. The same events give
// the same actions, always.
//
// # Words
//
// A grant is the permission to submit work; its epoch is the number it
// carries, rising with each grant of the GPU. A holder has a grant. After its
// time quantum (TQ) the grant is revoked if somebody waits: the client closes
// its gate, drains what it submitted, and releases. Grace is the time it has
// for that; then it is fenced. A dead client's grant is reclaimed.
//
// # States of a client
//
//	idle      attached, wants nothing
//	waiting   queued for a grant, first in, first out
//	holding   has a grant, its gate is open
//	draining  has a grant that was asked back, or that it claims to have
//	          from before and that is not the current one
//	lost      has a grant, but no connection; or restored and not back yet
//	fenced    did not release in time; counts as not holding
//
//	          Request             grant               Revoke
//	  idle ───────────► waiting ─────────► holding ─────────► draining
//	   ▲                   ▲                │  ▲ Adopt           │
//	   │                   │ if it wants    │  └───────┐         │ grace over
//	   │                   │         Lost   └────────► lost ─┐   ▼
//	   └───────────────────┴──────────────── Release ◄──────fenced
//
// # Guarantees
//
// In exclusive mode no grant is given while another client holds, drains or is
// lost; only a fence ends that without the client. Every client that waits
// gets its grant within n time quanta and grace periods, n being the clients
// ahead of it and the holder. A holder is not disturbed before its quantum is
// over, nor while nobody waits. In concurrent mode every request is granted at
// once. Epochs rise strictly, and what a restart must know is handed out as a
// Persist before the Grant that depends on it. Check tests these, except the
// ones about time, in O(clients).
//
// # Memory
//
// A Ledger, beside each Core, keeps what clients have reserved of the GPU's
// memory, so that a container's limit holds for all its processes together.
// The two know nothing of each other.
//
// Step costs O(log n) in the number of clients; changes of mode and grace cost
// O(n). A Core is not safe for use by several goroutines at once.
package sched
