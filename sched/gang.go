// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"time"
)

// A gang is processes that work as one, such as the ranks of a job, on one GPU or
// several. Ranks wait for each other on the GPU, in collectives, so a rank that has
// its GPU without the other ranks only blocks that GPU. A gang has all its GPUs at the
// same time or none. On each GPU the clients of a gang are one tenant.
//
//	resting    no client of the gang waits.
//	wanted     a client waits. The gang takes its place in the order of each of its
//	           GPUs. Where its turn has come the gang is due, and others go on.
//	called     the gang is due on all its GPUs, and gets a ticket. It is next on each
//	           of them, before gangs with a higher ticket and all that are not called.
//	           Holders are revoked. A GPU that becomes free is kept for the gang. If its
//	           limit allows it no grant any more, it has to become due anew.
//	running    all GPUs are kept. All clients are granted at once, also those that ask
//	           later. When the turn is over on one GPU it is over on all. If a client
//	           comes on another GPU meanwhile, the gang is called there, and lacks that
//	           GPU. While it does, it makes way at once for a gang with a lower ticket.
//	stopping   all clients are revoked. The GPUs stay kept until nobody drains.
//
// There is no deadlock. A GPU is kept only for a gang that is called, runs or stops.
// A gang is called on all its GPUs at the same moment, and tickets rise. So, among the
// gangs that are called, the one with the lowest ticket is before all others on each
// of its GPUs, also on a GPU where it is new and that is kept for a higher ticket. It
// waits only for gangs that run or stop, and for drains. Both end. A gang that runs is
// stopped where another one is called, after an eighth of a quantum at the latest. A
// gang that stops waits for its drains only, and a drain ends by a fence if not
// otherwise. (A drain that waits for a rank that came late, on a GPU that another gang
// keeps for the same reason, ends by a fence only.) So the gang with the lowest ticket
// gets its GPUs, and then the next one.
//
// Nobody starves. Others pass a gang that waits only while they are behind it in
// virtual time, and a gang stays due. Others are not pushed aside for ever either: a
// call takes a turn of the gang on each of its GPUs, also where none of its clients
// asked.
//
// Ranks that are idle keep their grants. Beside latency tenants they give them back, because these
// do not wait for the turn to end, and have half of the time while it lasts.
//
// Drains may depend on each other: one rank has half of a collective in its queue, and
// the other half is a call that waits at the gate of another rank. So the ranks that
// have drained, and wait at the gate, may make one call each while others drain
// (StepOne). The calls of all ranks have one order, and no rank makes a call once all
// others have drained, so all ranks stop at the same call. A rank whose drain was cut makes
// none: its channels are off.
//
// The costs: a GPU is idle from its own drain to the last drain on the gang's GPUs,
// twice a turn. Jobs of two GPUs keep them busy for 84 % alone (TestGangsShare prints
// the figures). Two such jobs that take turns keep them busy for 82 % with turns of 20
// ms, and for 84 % with 100 ms. One beside a tenant on each GPU: 90 and 92 % together,
// where 92 % would be without a loss. Jobs that overlap on a part of their GPUs cost
// more: while one has its turn, the other GPUs of the others are idle. Three jobs on
// three GPUs, each on two, keep them busy for 56 %.
//
// After a restart of the caller, a gang that had its turn still has it, as Restore
// says. With MaxRecorded holders of a GPU the gang drains first, as everybody does. No
// other gang is called for a moment (gather): where the ranks of two gangs come back
// in turns, each gang would get a GPU before it is known to need the other's GPU, and
// would drain there for a rank that waits.

// gangs is all gangs of a node.
type gangs struct {
	clock   *clock
	byName  map[string]*gang
	gather  Time            // no gang is called before
	tickets uint64          // the latest ticket
	changes int             // ever, of phases and of what is kept
	moved   []string        // GPUs that a gang has changed for in this Step
	toStep  map[string]bool // GPUs that the caller was told to step and has not stepped
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
	kept         // the GPU is kept for the gang, which runs nowhere yet
	playing      // its members are granted
	leaving      // its members drain
)

const (
	// stepAfter is how long drains may take before the other ranks make a call
	// for them. It is shorter than the 10 ms after which the shim cuts a drain. A drain
	// that begins stepsSoon after the end of the turn or later may take stepLate. Else
	// ranks with calls of 5 to 10 ms would make them for each other until the grace period
	// ends, and the shim would cut none of their drains.
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
	gangs  *gangs
	name   string
	free   bool    // its clients do not depend on each other: it is an overlap group
	seats  []*seat // one on each GPU with clients of it
	phase  phase
	ticket uint64 // since it was called
	lacks  bool   // while running: a client waits on a GPU that the gang does not have

	stoppedAt  Time // while stopping
	releasedAt Time // the latest end of a drain since, or step
	round      uint64
}

// seat is what a gang has of one GPU.
type seat struct {
	members
	gang  *gang
	hold  hold
	due   bool   // the gang's turn has come on this GPU
	round uint64 // of steps, see gang.nextStep
}

// members is all that a gang sees of a GPU: its own clients on that GPU.
type members interface {
	gpu() string                   // its name
	counts() bool                  // turns on this GPU are those of the gang
	asks() bool                    // a member waits for a grant
	calls() bool                   // and could make a call before
	live() bool                    // a member has a grant that keeps others out
	manned() bool                  // there is a member that would be granted
	broke() bool                   // its limit allows no grant now
	drains() (since Time, ok bool) // a member drains or is lost; since is the latest revoke
	alone() bool                   // nobody else is on the GPU
	grace() time.Duration
}

// sit makes a seat for the first members of a gang on their GPU.
func (gs *gangs) sit(name string, free bool, m members) *seat {
	g := gs.byName[name]
	if g == nil {
		g = &gang{gangs: gs, name: name, free: free}
		gs.byName[name] = g
	}
	s := &seat{members: m, gang: g, round: g.round}
	g.seats = append(g.seats, s)
	return s
}

// leave takes away a seat whose last client has left.
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

// await puts off all calls until clients can be back after a restart.
func (gs *gangs) await() { gs.gather = max(gs.gather, gs.clock.now.Add(gatherTime)) }

// advance brings the gang to the phase that its members are ready for.
func (g *gang) advance() {
	for {
		to := g.phase
		asks, live := g.any(members.asks), g.any(members.live)
		switch g.phase {
		case resting, wanted:
			switch {
			case live: // granted before they were in the gang
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
			case !asks, !g.all(func(s *seat) bool { return !s.broke() }):
				to = stopping
			case g.all(func(s *seat) bool { return s.hold == kept }):
				to = running
			}
		case running:
			if len(g.seats) == 0 {
				to = stopping
			}
			if lacks := slices.ContainsFunc(g.seats, (*seat).isCalled); lacks != g.lacks {
				g.lacks = lacks
				g.gangs.changes++
				g.tell()
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
	g.phase, g.lacks = to, false
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

// idle ends that the gang is due.
func (g *gang) idle() {
	for _, s := range g.seats {
		s.due = false
	}
}

// tell notes that all GPUs of the gang must look at it.
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

// makesWay says whether a gang that runs is to end its turn at once for another one. Two
// jobs may start on the same GPUs in turns: each has one GPU, and its other rank waits for
// the other job's. Soon the ranks that run call collectives that wait for the others.
func (g *gang) makesWay(o *gang) bool { return g.lacks && o.ticket <= g.ticket }

// isCalled says whether the gang is next on the GPU, before all that are not called.
// A gang that has its turn, or drains, on other GPUs is called on a new one.
func (s *seat) isCalled() bool {
	return s != nil && s.counts() && s.manned() &&
		(s.gang.phase == called || (s.gang.phase == running || s.gang.phase == stopping) && s.hold == nothing && s.asks() && !s.broke())
}

func (g *gang) any(is func(members) bool) bool {
	return slices.ContainsFunc(g.seats, func(s *seat) bool { return s.counts() && is(s) })
}

func (g *gang) all(are func(*seat) bool) bool {
	return !slices.ContainsFunc(g.seats, func(s *seat) bool { return s.counts() && s.manned() && !are(s) })
}

// isDue says whether the gang's turn has come on all its GPUs.
func (g *gang) isDue() bool { return g.all(func(s *seat) bool { return s.due }) }

// nextStep returns when the members that have drained make one more call.
func (g *gang) nextStep() (Time, bool) {
	if g.phase != stopping || g.free {
		return 0, false
	}
	at, drains := max(g.releasedAt.Add(stepPause), g.stoppedAt.Add(stepAfter)), false
	for _, s := range g.seats {
		since, ok := s.drains()
		if !ok || !s.counts() {
			continue
		}
		wait := stepAfter
		if since >= g.stoppedAt.Add(stepsSoon) {
			wait = stepLate
		}
		at, drains = max(at, since.Add(wait)), true
	}
	soonest := max(at, g.gangs.clock.now)
	return at, drains && slices.ContainsFunc(g.seats, func(s *seat) bool { return s.stepsAt(soonest) })
}

// stepsAt says whether members on this GPU could make a call at that time.
func (s *seat) stepsAt(at Time) bool {
	return s.counts() && s.hold == leaving && s.calls() && at < s.gang.stoppedAt.Add(s.grace()) && s.alone()
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
				ok = ok || s.hold == playing || s.hold == kept // while latency grants are there
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
