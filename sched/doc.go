// SPDX-License-Identifier: Apache-2.0

// Package sched decides which client may use a GPU. It is a pure state machine, the
// core of the scheduler, with one value of type GPU for each UUID: no I/O, no
// goroutines, no clock. The caller tells the core what happened (Step), carries out the
// actions that Step returns, in order, and calls again when Deadline says so. The same
// events always give the same actions. The daemon and the simulator (tests/sim) drive
// the same core.
//
// # Packages
//
// This package is the machine: Step, Deadline and Check. It knows clients, their tenants and their grants,
// and in which way they share the GPU (ways.go). What it puts together does not know it:
//
//	residency   who may have how much memory on the GPU, and who makes room
//	account     what tenants are billed, are due, and owe
//	timeslice   how long time slices are, and how fast clients get on
//	gang        when gangs have their turns, on all GPUs of a node
//	base        times, clients, epochs, events and actions
//
// Each says what it guarantees.
//
// # Words
//
// A grant is the permission to submit work. Its epoch is its number, and rises with
// each grant of the GPU. A holder is a client with a grant. When the turn of a
// holder is over and somebody waits, its grant is revoked: the client closes its
// gate, drains the work that it submitted, and releases the grant. The grace period
// is the time for that; after it, the grant is fenced. The grant of a dead client is
// reclaimed. A drain may be cut: the grant was preempted if it is released with work
// left, which is off the GPU and wants the next grant, so that the client waits again at
// once. A tenant is the clients whose time is counted together, mostly a
// container.
//
// # States
//
// A client without a grant is idle, or it waits. A grant has one state, and one
// function changes it (grant.change):
//
//	granted   the gate is open, or opens when the client's memory is on the GPU
//	paused    the gate is shut while latency grants are there; the work goes on
//	lost      the connection is lost, or the caller has restarted; the client may
//	          go on when it is back
//	draining  the grant was asked back, or it is one that the client claims and
//	          that is not the current one
//	fenced    the grant was not released in time; others are granted
//
//	          Request           grant                 Revoke            grace over
//	  idle ───────────► waiting ─────► granted, paused ─────► draining ──────────► fenced
//	   ▲                   ▲              │       ▲              │  ▲                 │
//	   │                   │         Lost ▼       │ Adopt        │  │ cannot          │
//	   │                   │              lost ───┴──────────────┼──┘ go on           │
//	   │                   │ it asked again                      │                    │
//	   └───────────────────┴────────────────────────── Release ◄─┴────────────────────┘
//
// The grace period of a lost grant ends with a fence too.
//
// # Policies
//
// Who is granted, and when a grant is asked back, is decided by policies, one file
// each: grace.go, auto.go, limits.go, gangs.go (gangs), beside.go, latency.go,
// slices.go, moving.go, turns.go, cohort.go, together.go. policy.go says what a policy is
// and lists them.
//
// # Time slices
//
// In mode Auto, clients share the GPU by its own time slices where all of them have
// proved that their slices can be set (controls.go), all memory fits, nobody has a core
// limit, no gang works, and not several want turns beside a latency tenant. Then all gates are
// open as in concurrent mode, and no message goes with a slice. sliceway.go begins and ends that, and judges it every few seconds
// by how fast clients get on: the longest slice grows as long as clients
// gain by that and none is harmed, tenants with unequal parts have
// slices in that proportion (package timeslice), and where turns gave more, clients take turns
// again, for a time that doubles. Beside tenants that need turns of their own the others are a
// cohort, which has its turns together and shares these by slices (cohort.go); a latency tenant runs
// beside it as beside any holder, and an overlap group is one of it. ways.go has the ways as candidates,
// and why each is refused (why.go). What a tenant gets
// is billed as the time in turns that the same calls would have taken.
//
// An overlap group (Share.Overlap), whose processes run at the same time by MPS, is a tenant
// whose clients are granted together, as those of a gang on one GPU are. They do not depend
// on each other: a client without work gives the GPU back alone, and nobody makes calls for
// the others' drains. They are billed once for the time in which any of them has the GPU.
// Their time slice is the MPS server's, which nobody sets: those of others are in
// proportion to it.
//
// # Who is next
//
// A tenant has virtual time: its time on the GPU, from the grant to the end of the
// drain, divided by the part of the GPU that is its own. The tenant that is behind
// the others is next. Within a tenant, the client that asked first is next. The part
// of a tenant is what it was promised (Share.Request), and, of what nobody was
// promised, as much as its weight says among the tenants that want it. If all parts
// are even, a turn lasts a time quantum. If not, turns are longer and shorter, so
// that each tenant has one turn in each round. A tenant that is ahead of those that
// wait has a shorter turn, but an eighth of the quantum at least. Where tenants have
// limits or requests, a round takes a quarter of a second at most, if the quantum
// allows that, so that shares are exact over seconds. A tenant that wants nothing
// for a while earns one turn at most.
//
// When a tenant with a limit (Share.Limit) has used up its credit, its grants are revoked, also if nobody
// else waits, until there is enough for a slice. What a drain uses beyond that is a debt, and is paid back
// in full.
//
// A latency tenant (Share.Priority) is granted at once. Where the time slices of all others
// can be set, in mode Auto, these are short, its gate stays open, and nothing changes for the
// holder (beside.go). Else the holder's gate is shut meanwhile, without a revoke (Pause,
// Resume); the work that it submitted goes on.
// That is for tenants that want the GPU briefly: while others want it, all latency tenants of a
// GPU together have half of the time that is promised to none of these, or what they are promised
// themselves, and each an equal part of that. One that has used that up waits until it has some
// again, or nobody else wants the GPU.
//
// # Gangs
//
// Processes that work as one (Share.Gang), on one GPU or several, are granted and
// revoked together. Their shares count as the share of one tenant: that which was told
// last, as long as a client of it is there. Their turn comes when it has come on all
// their GPUs. Ranks that are idle keep their grants, as
// parts of the job, but not beside latency tenants. A gang has no priority, and in concurrent mode gangs mean
// nothing. The cores of a node share the gangs (Node). Package gang has the rules, says
// why they cannot end in a deadlock, and how gangs outlive a restart.
//
// # Time
//
// The cores of a node share one clock (Node). It follows the times that Step is
// given, but stands still while nobody is there to do what is due, because the
// machine is suspended or the scheduler is stopped: nobody is billed or fenced for
// that time. Where a Step is only late, by less than a second, the time up to a moment
// before the deadline counts.
//
// # Guarantees
//
// In exclusive mode no grant is given to a batch tenant or a gang while another
// client holds, drains or is lost; only a fence ends that without the client. Only
// grants of latency tenants are given beside it, and grants of one cohort beside each other. Every client that waits gets its grant within
// the turns and grace periods of those ahead of it, and twice the time for which they
// move memory, with a minute at most after each in which nobody else moves; unless
// the limit of its own tenant keeps it waiting, or it is a latency tenant's. A holder without a limit is not
// disturbed while nobody waits, nor before an eighth of the quantum is over, except
// for a gang whose turn has come on all its GPUs. In concurrent mode every request is
// granted at once, within the tenant's limit. The epochs of a client rise strictly,
// and what a restart must know is handed out as a Persist before the Grant that
// depends on it, and so is how clients share the GPU: in mode Auto a restart goes on with
// that, and takes the GPU from none of up to MaxRecorded holders (restart.go). Who is next
// after a revoke is chosen, and persisted, while the holder drains. Check tests all this,
// except what is about time, in O(clients).
//
// # Memory
//
// A client that has memory away moves it onto the GPU at the begin of its grant, before
// its turn. Then those whose memory is there have the GPU for as long as what moving
// costs demands (Config.SwapShare), except for pauses in which moving pays (moving.go,
// pause.go). If what is promised does not fit, clients take turns in every mode. A client for which
// there is no place any more is stranded and granted nothing.
//
// Step costs O(log n) in the number of clients. Changes of mode and tuning cost O(n), and so
// do, in concurrent mode, grants with limits in the number of those. In mode Auto a change of
// who can be sliced costs O(n), and so does what is judged once in some seconds; what each
// Step asks of all clients is kept in sums (tally.go). Where memory is swapped, and more is
// promised than the GPU has or somebody lacks room, a Step costs O(n). Work counts the passes.
// A GPU is not safe for use by several goroutines at once.
package sched
