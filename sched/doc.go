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
// carries, rising with each grant of the GPU. A holder has a grant. When its turn
// is over the grant is revoked if somebody waits: the client closes its gate,
// drains what it submitted, and releases. Grace is the time it has for that;
// then it is fenced. A dead client's grant is reclaimed. A tenant is those
// clients whose time is counted together, a container mostly.
//
// # States of a client
//
//	idle      attached, wants nothing
//	waiting   asked for a grant
//	holding   has a grant, its gate is open, or paused by a latency tenant
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
// # Who is next
//
// Tenants have virtual time: their time on the GPU, from the grant to the end
// of the drain, divided by the part of the GPU that is theirs. Who is behind is
// next; within a tenant, who asked first. A tenant's part is what it was
// promised (Share.Request), and of what nobody was promised as much as its weight
// says among those that want it. The time quantum is a turn where all parts are
// even; uneven parts make longer and shorter turns, so that each has one in each
// round. A tenant that is ahead of those that wait has a shorter turn, an
// eighth of the quantum at least. Where tenants have limits or requests, a round
// takes a quarter of a second at most, if the quantum allows it, so that shares
// are exact over seconds. Wanting nothing for a while earns one turn at
// most.
//
// A limit (Share.Limit) is an account: it fills with the limit's part of the
// time and is emptied by use, drains included; empty, the tenant's grants are
// revoked, also if nobody else waits, until it has enough for a slice: its part
// of 100 ms. What a drain uses beyond it is a debt, and is paid back in full.
//
// A latency tenant (Share.Priority) is granted at once. The holder's gate is
// shut meanwhile, without a revoke (Pause, Resume); what it has submitted goes on
// beside. This is for those who want the GPU briefly: who keeps others out for
// more than half of the time takes turns like everybody until it has been away
// for as long.
//
// # Gangs
//
// Processes that work as one (Share.Gang), on one GPU or several, are granted
// and revoked together: their shares count as those of one tenant, and their
// turn comes when it has come on all their GPUs. Ranks that are idle keep their
// grant, as parts of the job. Priorities mean nothing for a gang; and gangs mean
// nothing in concurrent mode. The cores of a node share Gangs; gang.go has the
// rules, why they do not end in a deadlock, and how gangs outlive a restart.
//
// # Guarantees
//
// In exclusive mode no grant is given to a batch tenant or gang while another client
// holds, drains or is lost; only a fence ends that without the client. Beside it
// there are latency grants only. Every client that waits gets its grant within
// the turns and grace periods of those ahead of it, and twice their moving of memory
// with a minute at most after each in which nobody else moves, unless its tenant's
// own limit keeps it waiting. A holder without a limit is not disturbed before an
// eighth of the quantum is over, but for a gang whose turn has come on all its
// GPUs, nor while nobody waits. In concurrent mode every
// request is granted at once, within the tenant's limit. Epochs of a client rise strictly,
// and what a restart must know is handed out as a Persist before the Grant that
// depends on it. Who is next after a revoke is chosen, and persisted, while the
// holder drains. Check tests these, except the ones about time, in O(clients).
//
// # Memory
//
// A Ledger, beside each Core, keeps what clients have reserved of the GPU's
// memory, so that a container's limit holds for all its processes together.
// Where more can be promised than the GPU has, a Residency decides how much of it
// each client may have there at a time. The three know nothing of each other.
//
// The core is told who has memory away (SetAway): that client moves it onto the
// GPU at the begin of its grant, before its turn, which begins with Ready. Then those
// whose memory is there have the GPU for as long as what moving costs demands
// (Config.SwapShare), but for pauses in which it pays to move (moving.go, pause.go).
// If what is promised does not fit, clients take turns in every mode.
//
// Step costs O(log n) in the number of clients; changes of mode and tuning cost
// O(n), and so do, in concurrent mode, grants with limits in the number of
// those. A Core is not safe for use by several goroutines at once.
package sched
