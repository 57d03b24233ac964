// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"time"
)

// A gang is processes that work as one, such as the ranks of a job, on one GPU
// or several. Ranks wait for each other on the GPU, in collectives, so a rank
// that has its GPU without the others only blocks it. A gang has its GPUs all at
// the same time or not at all. On each GPU its clients are one tenant.
//
//	resting    nobody of it waits
//	wanted     somebody does: the gang takes its place in the order of each of
//	           its GPUs. Where its turn has come it is due; others go on there.
//	called     it is due on all of them, and gets a ticket. It is next on each,
//	           before who is not called and who has a higher ticket; holders are
//	           revoked. A GPU that is free is kept for it.
//	running    all GPUs are kept: all members are granted at once, who asks later
//	           too. Over on one GPU, the turn is over on all. A member that comes
//	           on another GPU meanwhile is called there.
//	stopping   all are revoked. The GPUs stay kept until nobody drains any more.
//
// There is no deadlock. A GPU is kept only for a gang that is called, runs or
// stops. Gangs are called on all their GPUs at the same moment, and with rising
// tickets: who has the lowest ticket of those that are called is before all
// others on each of its GPUs, also on one where it is new and that is kept for a
// higher ticket. So it waits for nobody but gangs that run or stop, and for
// drains. Those end: a gang that runs is stopped where somebody is called, after
// an eighth of a quantum at the latest; who stops waits for nothing but its
// drains, which end by a fence if not otherwise. (Drains that wait for a rank
// that came late, on a GPU that another gang keeps for the same reason, do end by
// a fence only.) So the lowest ticket gets its GPUs, and then the next.
//
// Nobody starves. Who waits is passed by others only while they are behind it,
// and due once, a gang stays due. Being called does not push others aside for
// ever: it takes a turn of the gang on each of its GPUs, by the order there, also
// where nobody of it asked.
//
// Drains may depend on each other: a rank has half of a collective in its queue,
// and the other half is a call that waits at the gate of another rank. So those
// that have drained, and wait at the gate, are let make one call each while
// others drain (StepOne). The ranks' calls have one order, and nobody makes one
// while all others have drained, so they meet at the same point of it.
//
// What it costs: a GPU is idle from its drain to the last drain of the gang's GPUs,
// twice a turn. Of jobs of two GPUs that alone keep them busy for 84 % (TestGangsShare
// prints it), two that take turns keep them busy for 82 % with turns of 20 ms, and for
// 84 % with 100 ms; one beside a tenant on each GPU, for 90 and 92 % together, where 92
// would be without a loss. Jobs that overlap on a part of their GPUs cost more: where
// one has its turn, the others' other GPUs are idle. Three on three GPUs, each on two,
// keep them busy for 56 %.
//
// After a restart of the caller, gangs that had their turn have it still, as
// Restore says; with MaxRecorded clients on a GPU they drain first, as everybody
// does. No other is called for a moment (gather): where the ranks of two gangs come
// back in turns, each would get a GPU before it is known that it needs the other's,
// and drain for a rank that waits there.

// gangs are those of a node.
type gangs struct {
	clock   *clock
	byName  map[string]*gang
	gather  Time            // none is called before
	tickets uint64          // the latest
	changes int             // ever, of phases and of what is kept
	moved   []string        // GPUs that a gang has changed for in this Step
	toStep  map[string]bool // GPUs that the caller was told to step, and has not
}

type phase uint8

const (
	resting phase = iota
	wanted
	called
	running
	stopping
)

// hold is what a gang has of one GPU.
type hold uint8

const (
	nothing hold = iota
	kept         // the GPU is kept for it, it runs nowhere yet
	playing      // its members are granted
	leaving      // no more: they drain
)

const (
	// stepAfter is how long drains may take before others are let make a call
	// for them, and stepPause the pause after a drain that has ended: others
	// often end with it.
	stepAfter = 10 * time.Millisecond
	stepPause = 500 * time.Microsecond

	// gatherTime is in what time the clients of before a restart are back: they
	// look for the caller each second at least.
	gatherTime = 1100 * time.Millisecond
)

type gang struct {
	gangs  *gangs
	name   string
	seats  []*seat // one on each GPU with clients of it
	phase  phase
	ticket uint64 // since it was called

	stoppedAt  Time // while stopping
	releasedAt Time // the latest end of a drain since, or step
	round      uint64
}

// seat is what a gang has of one GPU.
type seat struct {
	members
	gang  *gang
	hold  hold
	due   bool   // its turn has come here
	round uint64 // of steps, see gang.nextStep
}

// members is all that a gang sees of a GPU: its own clients there.
type members interface {
	gpu() string                   // its name
	counts() bool                  // turns on this GPU are those of the gang
	asks() bool                    // somebody waits for a grant
	live() bool                    // somebody has one that keeps others out
	manned() bool                  // somebody would be granted
	drains() (since Time, ok bool) // somebody drains or is lost; since the latest revoke
	alone() bool                   // nobody else is on the GPU
	grace() time.Duration
}

// sit makes a seat for members, who are the first of the gang on their GPU.
func (gs *gangs) sit(name string, m members) *seat {
	g := gs.byName[name]
	if g == nil {
		g = &gang{gangs: gs, name: name}
		gs.byName[name] = g
	}
	s := &seat{members: m, gang: g, round: g.round}
	g.seats = append(g.seats, s)
	return s
}

// leave is for a seat without clients.
func (s *seat) leave() {
	g := s.gang
	i := slices.Index(g.seats, s)
	g.seats = slices.Delete(g.seats, i, i+1)
	if len(g.seats) == 0 {
		delete(g.gangs.byName, g.name)
	}
	g.advance()
}

// take changes what the gang has of the GPU.
func (s *seat) take(h hold) {
	s.hold = h
	s.gang.gangs.changes++
}

// await has no gang be called until the clients of before a restart can be back.
func (gs *gangs) await() { gs.gather = max(gs.gather, gs.clock.now.Add(gatherTime)) }

// advance has the gang go on as far as things are.
func (g *gang) advance() {
	for {
		to := g.phase
		asks, live := g.any(members.asks), g.any(members.live)
		switch g.phase {
		case resting, wanted:
			switch {
			case live: // of before they were in it
				to = stopping
			case !asks:
				to = resting
			case g.isDue() && g.gangs.clock.now >= g.gangs.gather:
				to = called
			default:
				to = wanted
			}
		case called:
			switch {
			case !asks:
				to = stopping
			case g.all(func(s *seat) bool { return s.hold == kept }):
				to = running
			}
		case running:
			if len(g.seats) == 0 {
				to = stopping
			}
		case stopping:
			if !live {
				to = resting
			}
		}
		if to == g.phase {
			return
		}
		g.enter(to)
	}
}

func (g *gang) enter(to phase) {
	g.phase = to
	g.gangs.changes++
	switch to {
	case called:
		g.gangs.tickets++
		g.ticket = g.gangs.tickets
	case stopping:
		g.stoppedAt, g.releasedAt = g.gangs.clock.now, g.gangs.clock.now
		g.idle()
	case resting:
		g.ticket = 0
		g.idle()
	}
	g.tell()
}

// idle has the gang be due nowhere.
func (g *gang) idle() {
	for _, s := range g.seats {
		s.due = false
	}
}

// tell has all GPUs of the gang look at it.
func (g *gang) tell() {
	for _, s := range g.seats {
		g.gangs.moved = append(g.gangs.moved, s.gpu())
	}
}

// others returns the GPUs, beside the one that is stepped now, that the caller is
// to step because gangs have changed. It names each once until that is stepped.
func (gs *gangs) others(stepped string) (gpus []string) {
	for _, gpu := range gs.moved {
		if gpu != stepped && !gs.toStep[gpu] {
			gs.toStep[gpu] = true
			gpus = append(gpus, gpu)
		}
	}
	gs.moved = gs.moved[:0]
	return gpus
}

// isCalled says whether the gang is next on the GPU, before all who are not
// called: so is one that comes to a gang that has its turn, or drains, already.
func (s *seat) isCalled() bool {
	return s != nil && s.counts() && s.manned() &&
		(s.gang.phase == called || (s.gang.phase == running || s.gang.phase == stopping) && s.hold == nothing && s.asks())
}

func (g *gang) any(is func(members) bool) bool {
	return slices.ContainsFunc(g.seats, func(s *seat) bool { return s.counts() && is(s) })
}

func (g *gang) all(are func(*seat) bool) bool {
	return !slices.ContainsFunc(g.seats, func(s *seat) bool { return s.counts() && s.manned() && !are(s) })
}

// isDue says whether its turn has come on all its GPUs.
func (g *gang) isDue() bool { return g.all(func(s *seat) bool { return s.due }) }

// nextStep returns when those that have drained make one more call.
func (g *gang) nextStep() (Time, bool) {
	if g.phase != stopping {
		return 0, false
	}
	at, drains := g.releasedAt.Add(stepPause), false
	for _, s := range g.seats {
		if since, ok := s.drains(); ok && s.counts() {
			at, drains = max(at, g.stoppedAt.Add(stepAfter), since.Add(stepAfter)), true
		}
	}
	soonest := max(at, g.gangs.clock.now)
	return at, drains && slices.ContainsFunc(g.seats, func(s *seat) bool { return s.stepsAt(soonest) })
}

// stepsAt says whether members here could make a call at that time.
func (s *seat) stepsAt(at Time) bool {
	return s.counts() && s.hold == leaving && s.asks() && at < s.gang.stoppedAt.Add(s.grace()) && s.alone()
}

// check is Node.Check.
func (gs *gangs) check() error {
	for gpu := range gs.toStep {
		return fmt.Errorf("gangs: GPU %s is to be stepped", gpu)
	}
	for name, g := range gs.byName {
		if len(g.seats) == 0 || g.name != name {
			return fmt.Errorf("gang %q has %d GPUs, name %q", name, len(g.seats), g.name)
		}
		asks, live := g.any(members.asks), g.any(members.live)
		switch {
		case g.phase == resting && (asks || live), g.phase == wanted && (!asks || live), g.phase == called && !asks, g.phase == stopping && !live:
			return fmt.Errorf("gang %s: phase %d, asks: %t, has grants: %t", name, g.phase, asks, live)
		case g.phase == called && g.ticket == 0:
			return fmt.Errorf("gang %s is called without a ticket", name)
		}
		for _, s := range g.seats {
			ok := s.hold == nothing
			switch g.phase {
			case called:
				ok = ok || s.hold == kept
			case running:
				ok = ok || s.hold == playing || s.hold == kept // while latency tenants are there
			case stopping:
				ok = ok || s.hold == leaving
			}
			if !ok || s.gang != g {
				return fmt.Errorf("gang %s: phase %d, hold %d on GPU %s", name, g.phase, s.hold, s.gpu())
			}
		}
	}
	return nil
}
