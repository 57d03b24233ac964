// SPDX-License-Identifier: Apache-2.0

// Package gang says when the gangs of a node have their turns. A gang is processes that work as
// one, such as the ranks of a job, on one GPU or several. Ranks wait for each other on the GPU, in
// collectives, so a gang has all its GPUs at the same time or none. On each GPU its clients are one
// tenant. A gang is
//
//	resting    no client of it waits
//	wanted     a client waits. Where its turn has come on a GPU the gang is due; others go on
//	called     it is due on all its GPUs, and has a ticket: it is next on each of them, before
//	           gangs with a higher ticket. Holders are revoked; a free GPU is kept for it
//	running    all GPUs are kept, and all clients are granted at once. A turn that is over on one
//	           GPU is over on all. It begins when all clients have their memory on their GPUs, and lasts
//	           until what that took is paid for on each of them (Binds). Where a client comes on another GPU, the gang is called there
//	           and makes way at once for a lower ticket
//	stopping   all clients are revoked; the GPUs stay kept until nobody drains
//
// There is no deadlock: tickets rise, so the called gang with the lowest one is before all others on
// each of its GPUs, and waits only for gangs that run or stop, and for drains. Both end: a gang that
// runs is stopped after an eighth of a quantum, and a drain by a fence. Nobody starves: others pass a
// waiting gang only while they are behind it in virtual time, and a gang stays due.
//
// Drains may depend on each other: one rank has half of a collective in its queue, and the other half
// is a call that waits at another rank's gate. So ranks that have drained may make one call each while
// others drain (StepOne), in one order, and none once all others have drained: all stop at the same
// call. A rank whose drain was cut makes none.
//
// A GPU is idle from its own drain to the last drain on the gang's GPUs (TestGangsShare prints what
// that costs). After a restart a gang that had its turn still has it, and no other gang is called for
// a moment (gather), until it is known which GPUs each needs.
package gang

import (
	"fmt"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Gangs is all gangs of a node.
type Gangs struct {
	now     func() base.Time
	byKey   map[key]*gang
	gather  base.Time       // no gang is called before
	tickets uint64          // the latest ticket
	changes int             // ever, of phases and of what is kept
	moved   []string        // GPUs that a gang has changed for in this Step
	toStep  map[string]bool // GPUs that the caller was told to step and has not stepped
}

// Phase is where a gang is.
type Phase uint8

// The phases, as the package says.
const (
	Resting Phase = iota
	Wanted
	Called
	Running
	Stopping
)

// Hold is what a gang has of one GPU.
type Hold uint8

// What a gang may have.
const (
	Nothing Hold = iota
	Kept         // the GPU is kept for the gang, which runs nowhere yet
	Playing      // its members are granted
	Leaving      // its members drain
)

// key names a gang. The clients of an overlap group on another GPU are another group.
type key struct {
	name string
	free bool   // its clients do not depend on each other: it is an overlap group
	gpu  string // of an overlap group
}

// New returns the gangs of a node whose clock now reads.
func New(now func() base.Time) *Gangs {
	return &Gangs{now: now, byKey: map[key]*gang{}, toStep: map[string]bool{}}
}

const (
	// stepAfter is how long drains may take before the other ranks make a call for them: less than
	// the 10 ms after which the shim cuts a drain. One that begins stepsSoon after the end of the turn
	// or later may take stepLate, or ranks with long calls would make them for each other for ever.
	// stepPause is the pause after the end of a drain: others often end together with it.
	stepAfter = 5 * time.Millisecond
	stepsSoon = 20 * time.Millisecond
	stepLate  = 10 * time.Millisecond
	stepPause = 500 * time.Microsecond

	// gatherTime is how long the clients need to come back after a restart: they
	// look for the caller once a second at least.
	gatherTime = 1100 * time.Millisecond
)

type gang struct {
	gangs  *Gangs
	key    key
	slots  []*Slot // one on each GPU with clients of it
	phase  Phase
	ticket uint64 // since it was called
	lacks  bool   // while running: a client waits on a GPU that the gang does not have

	settledAt  base.Time // the latest end of moving in, since the turn began
	stoppedAt  base.Time // while stopping
	releasedAt base.Time // the latest end of a drain since, or step
	round      uint64
}

// Slot is what a gang has of one GPU.
type Slot struct {
	m     Members
	gang  *gang
	hold  Hold
	due   bool   // the gang's turn has come on this GPU
	round uint64 // of steps, see Step

	playedAt base.Time // the latest turn began
	settled  bool      // the members here had their memory, since then
	dueAt    base.Time // since when the turn has come here, while due
}

// Members is all that a gang sees of a GPU: its own clients on that GPU.
type Members interface {
	GPU() string                        // its name
	Counts() bool                       // turns on this GPU are those of the gang
	Asks() bool                         // a member waits for a grant
	Calls() bool                        // and could make a call before
	Live() bool                         // a member has a grant that keeps others out
	Manned() bool                       // there is a member that would be granted
	Broke() bool                        // its limit allows no grant now
	Drains() (since base.Time, ok bool) // a member drains or is lost; since is the latest revoke
	Alone() bool                        // nobody else is on the GPU
	Moves() bool                        // there is not room for all memory
	Binds() base.Time                   // the turn does not end before, because of moving memory on this GPU; 0: it may
	Grace() time.Duration
}

// Join makes a slot for the first members of a gang on their GPU. Free: they are an overlap group.
func (gs *Gangs) Join(name string, free bool, m Members) *Slot {
	k := key{name: name, free: free}
	if free {
		k.gpu = m.GPU()
	}
	g := gs.byKey[k]
	if g == nil {
		g = &gang{gangs: gs, key: k}
		gs.byKey[k] = g
	}
	s := &Slot{m: m, gang: g, round: g.round}
	g.slots = append(g.slots, s)
	return s
}

// Leave takes away a slot whose last client has left.
func (s *Slot) Leave() {
	g := s.gang
	i := slices.Index(g.slots, s)
	g.slots = slices.Delete(g.slots, i, i+1)
	if len(g.slots) == 0 {
		delete(g.gangs.byKey, g.key)
	}
	g.advance()
}

// Hold returns what the gang has of the GPU, and Phase where it is.
func (s *Slot) Hold() Hold { return s.hold }

// Phase is of the gang.
func (s *Slot) Phase() Phase { return s.gang.phase }

// take changes what the gang has of the GPU.
func (s *Slot) take(h Hold) {
	s.hold = h
	s.gang.gangs.changes++
}

// SetDue notes that the gang's turn has come on this GPU.
func (s *Slot) SetDue() {
	s.due, s.dueAt = true, s.gang.gangs.now()
	s.gang.advance()
}

// Keep notes that the GPU is kept for the gang, which is called, or runs elsewhere.
func (s *Slot) Keep() {
	s.take(Kept)
	s.gang.advance()
}

// Play notes that the gang has its turn on this GPU.
func (s *Slot) Play() {
	s.take(Playing)
	s.playedAt, s.settled = s.gang.gangs.now(), false
}

// Free notes that the gang has nothing of the GPU any more.
func (s *Slot) Free() { s.take(Nothing) }

// Drain notes that the members drain on this GPU.
func (s *Slot) Drain() { s.hold, s.round = Leaving, s.gang.round }

// Stop ends the turn of the gang on all its GPUs. On this one Drain is called.
func (s *Slot) Stop() {
	if p := s.gang.phase; p == Running || p == Called {
		s.gang.enter(Stopping)
	}
}

// Ignore notes that gangs mean nothing on this GPU any more.
func (s *Slot) Ignore() { s.hold, s.due = Nothing, false }

// Quit ends what a gang has of its only GPU.
func (s *Slot) Quit() {
	s.take(Nothing)
	s.gang.enter(Resting)
}

// Resume notes that the gang had its turn on this GPU before a restart, and has it still.
func (s *Slot) Resume() {
	s.hold = Playing
	if s.gang.phase == Resting {
		s.gang.enter(Running)
	}
}

// Follow brings the gang to the phase that its members are ready for.
func (s *Slot) Follow() { s.gang.advance() }

// Tell has all GPUs of the gang look at it.
func (s *Slot) Tell() { s.gang.tell() }

// Released notes that a grant of the gang has ended.
func (s *Slot) Released() {
	s.gang.releasedAt = s.gang.gangs.now()
	if s.gang.phase == Running && !s.Works() {
		s.gang.tell() // they may wait on other GPUs for an end of its turn
	}
}

// IsDue says whether the gang waits although its turn has come on this GPU, and DueSince since when.
func (s *Slot) IsDue() bool { return s.due && s.gang.phase == Wanted }

// DueSince is of a gang that is due.
func (s *Slot) DueSince() base.Time { return s.dueAt }

// StoppedAt returns when the gang began to stop.
func (s *Slot) StoppedAt() base.Time { return s.gang.stoppedAt }

// Before says whether a gang was called before another one.
func (s *Slot) Before(o *Slot) bool { return s.gang.ticket < o.gang.ticket }

// Parked says whether the members wait for the gang, and not for their turn on this GPU.
func (s *Slot) Parked() bool {
	p := s.gang.phase
	return s.hold != Nothing || s.due || p == Called || p == Stopping || s.IsCalled()
}

// Wants says whether the gang waits for its turn, so that it is one on this GPU too.
func (s *Slot) Wants() bool {
	return s.m.Counts() && (s.gang.phase == Wanted || s.gang.phase == Called) && s.m.Manned()
}

// IsIdle says whether the gang has nothing and wants nothing.
func (s *Slot) IsIdle() bool { return s.hold == Nothing && !s.due && s.gang.phase == Resting }

// Due returns when the gang is to be looked at, on this GPU; false: never.
func (s *Slot) Due() (base.Time, bool) {
	if s.hold == Leaving {
		return s.gang.nextStep()
	}
	return s.gang.gangs.gather, s.gang.phase == Wanted && s.gang.isDue()
}

// Step says whether the members that have drained, and wait, make one more call each now.
func (s *Slot) Step() bool {
	g, now := s.gang, s.gang.gangs.now()
	if s.hold != Leaving {
		return false
	}
	if at, has := g.nextStep(); has && now >= at {
		g.round++
		g.releasedAt = now
		g.tell()
	}
	if s.round == g.round {
		return false
	}
	s.round = g.round
	return s.stepsAt(now)
}

// Stepped notes that a GPU is stepped.
func (gs *Gangs) Stepped(gpu string) { delete(gs.toStep, gpu) }

// Changes counts the changes of phases and of what is kept, ever.
func (gs *Gangs) Changes() int { return gs.changes }

// Await puts off all calls until clients can be back after a restart.
func (gs *Gangs) Await() { gs.gather = max(gs.gather, gs.now().Add(gatherTime)) }

// advance brings the gang to the phase that its members are ready for.
func (g *gang) advance() {
	for {
		to := g.phase
		asks, live := g.any(Members.Asks), g.any(Members.Live)
		switch g.phase {
		case Resting, Wanted:
			switch {
			case live: // granted before they were in the gang
				to = Stopping
			case !asks:
				to = Resting
			case g.isDue() && g.gangs.now() >= g.gangs.gather:
				to = Called
			default:
				to = Wanted
			}
		case Called:
			switch {
			case !asks, !g.all(func(s *Slot) bool { return !s.m.Broke() }):
				to = Stopping
			case g.all(func(s *Slot) bool { return s.hold == Kept }):
				to = Running
			}
		case Running:
			if len(g.slots) == 0 {
				to = Stopping
			}
			if lacks := slices.ContainsFunc(g.slots, (*Slot).IsCalled); lacks != g.lacks {
				g.lacks = lacks
				g.gangs.changes++
				g.tell()
			}
		case Stopping:
			if !live {
				to = Resting
			}
		}
		if to == g.phase {
			return
		}
		g.enter(to)
	}
}

func (g *gang) enter(to Phase) {
	g.phase, g.lacks, g.settledAt = to, false, 0
	g.gangs.changes++
	switch to {
	case Called:
		g.gangs.tickets++
		g.ticket = g.gangs.tickets
	case Stopping:
		g.stoppedAt, g.releasedAt = g.gangs.now(), g.gangs.now()
		g.idle()
	case Resting:
		g.ticket = 0
		g.idle()
	}
	g.tell()
}

// idle ends that the gang is due.
func (g *gang) idle() {
	for _, s := range g.slots {
		s.due = false
	}
}

// tell notes that all GPUs of the gang must look at it.
func (g *gang) tell() {
	for _, s := range g.slots {
		g.gangs.moved = append(g.gangs.moved, s.m.GPU())
	}
}

// Others returns the GPUs, beside the one that is stepped now, that the caller is
// to step because gangs have changed. It names each once until that is stepped.
func (gs *Gangs) Others(stepped string) (gpus []string) {
	for _, gpu := range gs.moved {
		if gpu != stepped && !gs.toStep[gpu] {
			gs.toStep[gpu] = true
			gpus = append(gpus, gpu)
		}
	}
	gs.moved = gs.moved[:0]
	return gpus
}

// MakesWay says whether a gang that runs is to end its turn at once for another one. Two
// jobs may start on the same GPUs in turns: each has one GPU, and its other rank waits for
// the other job's. Soon the ranks that run call collectives that wait for the others.
func (s *Slot) MakesWay(o *Slot) bool { return s.gang.lacks && !s.Before(o) }

// IsCalled says whether the gang is next on the GPU, before all that are not called.
// A gang that has its turn, or drains, on other GPUs is called on a new one.
func (s *Slot) IsCalled() bool {
	return s != nil && s.m.Counts() && s.m.Manned() &&
		(s.gang.phase == Called || (s.gang.phase == Running || s.gang.phase == Stopping) && s.hold == Nothing && s.m.Asks() && !s.m.Broke())
}

func (g *gang) any(is func(Members) bool) bool {
	return slices.ContainsFunc(g.slots, func(s *Slot) bool { return s.m.Counts() && is(s.m) })
}

func (g *gang) all(are func(*Slot) bool) bool {
	return !slices.ContainsFunc(g.slots, func(s *Slot) bool { return s.m.Counts() && s.m.Manned() && !are(s) })
}

// isDue says whether the gang's turn has come on all its GPUs.
func (g *gang) isDue() bool { return g.all(func(s *Slot) bool { return s.due }) }

// nextStep returns when the members that have drained make one more call.
func (g *gang) nextStep() (base.Time, bool) {
	if g.phase != Stopping || g.key.free {
		return 0, false
	}
	at, drains := max(g.releasedAt.Add(stepPause), g.stoppedAt.Add(stepAfter)), false
	for _, s := range g.slots {
		since, ok := s.m.Drains()
		if !ok || !s.m.Counts() {
			continue
		}
		wait := stepAfter
		if since >= g.stoppedAt.Add(stepsSoon) {
			wait = stepLate
		}
		at, drains = max(at, since.Add(wait)), true
	}
	soonest := max(at, g.gangs.now())
	return at, drains && slices.ContainsFunc(g.slots, func(s *Slot) bool { return s.stepsAt(soonest) })
}

// stepsAt says whether members on this GPU could make a call at that time.
func (s *Slot) stepsAt(at base.Time) bool {
	return s.m.Counts() && s.hold == Leaving && s.m.Calls() && at < s.gang.stoppedAt.Add(s.m.Grace()) && s.m.Alone()
}

// Check returns an error that names a broken invariant, or nil. Each GPU that Others named was stepped.
func (gs *Gangs) Check() error {
	for gpu := range gs.toStep {
		return fmt.Errorf("gangs: GPU %s is to be stepped", gpu)
	}
	for k, g := range gs.byKey {
		name := k.name
		if len(g.slots) == 0 || g.key != k {
			return fmt.Errorf("gang %q has %d GPUs, name %q", name, len(g.slots), g.key.name)
		}
		asks, live := g.any(Members.Asks), g.any(Members.Live)
		switch {
		case g.phase == Resting && (asks || live), g.phase == Wanted && (!asks || live), g.phase == Called && !asks, g.phase == Stopping && !live:
			return fmt.Errorf("gang %s: phase %d, asks: %t, has grants: %t", name, g.phase, asks, live)
		case g.phase == Called && g.ticket == 0:
			return fmt.Errorf("gang %s is called without a ticket", name)
		}
		for _, s := range g.slots {
			ok := s.hold == Nothing
			switch g.phase {
			case Called:
				ok = ok || s.hold == Kept
			case Running:
				ok = ok || s.hold == Playing || s.hold == Kept // while latency grants are there
			case Stopping:
				ok = ok || s.hold == Leaving
			}
			if !ok || s.gang != g {
				return fmt.Errorf("gang %s: phase %d, hold %d on GPU %s", name, g.phase, s.hold, s.m.GPU())
			}
		}
	}
	return nil
}
