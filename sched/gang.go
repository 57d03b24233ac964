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
	gather  Time    // none is called before
	tickets uint64  // the latest
	moved   []*Core // to be stepped with GangMoved
	changes int     // ever, of phases and of what is kept
}

// pending is Node.Pending.
func (gs *gangs) pending() (gpu string, ok bool) {
	if len(gs.moved) == 0 {
		return "", false
	}
	gpu = gs.moved[0].gpu
	gs.moved = gs.moved[1:]
	return gpu, true
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
	seats  []*tenant // on each GPU with clients of it
	phase  phase
	ticket uint64 // since it was called

	stoppedAt  Time // while stopping
	releasedAt Time // the latest end of a drain since, or step
	round      uint64
}

// join makes a tenant, which has its first client, one of the gang's.
func (gs *gangs) join(t *tenant) {
	g := gs.byName[t.name]
	if g == nil {
		g = &gang{gangs: gs, name: t.name}
		gs.byName[t.name] = g
	}
	t.gang, t.hold, t.due, t.round = g, nothing, false, g.round
	g.seats = append(g.seats, t)
}

// leave is for a tenant without clients.
func (gs *gangs) leave(t *tenant) {
	g := t.gang
	g.seats = slices.Delete(g.seats, slices.Index(g.seats, t), slices.Index(g.seats, t)+1)
	t.gang, t.hold, t.due = nil, nothing, false
	if len(g.seats) == 0 {
		delete(gs.byName, g.name)
	}
	g.advance(t.core)
}

// advance has the gang go on as far as things are. cur is the core that steps.
func (g *gang) advance(cur *Core) {
	for {
		to := g.phase
		asks, live := g.any((*tenant).asks), g.any((*tenant).live)
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
			case g.all(func(t *tenant) bool { return t.hold == kept }):
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
		g.enter(to, cur)
	}
}

func (g *gang) enter(to phase, cur *Core) {
	g.phase = to
	g.gangs.changes++
	switch to {
	case called:
		g.gangs.tickets++
		g.ticket = g.gangs.tickets
	case stopping:
		g.stoppedAt, g.releasedAt = cur.now, cur.now
		g.idle()
	case resting:
		g.ticket = 0
		g.idle()
	}
	g.tell(cur)
}

// idle has it be due nowhere.
func (g *gang) idle() {
	for _, t := range g.seats {
		t.due = false
	}
}

// tell has all other cores look at the gang.
func (g *gang) tell(cur *Core) {
	for _, t := range g.seats {
		if t.core != cur && !slices.Contains(g.gangs.moved, t.core) {
			g.gangs.moved = append(g.gangs.moved, t.core)
		}
	}
}

// counts says whether turns on this GPU are those of its gang.
func (t *tenant) counts() bool { return t.core.effective == Exclusive }

func (t *tenant) asks() bool { return t.queue.n > 0 }
func (t *tenant) live() bool { return t.batch > 0 }

// isCalled says whether the tenant is next on its GPU, before all who are not
// called: so is one that comes to a gang that has its turn, or drains, already.
func (t *tenant) isCalled() bool {
	return t != nil && t.gang != nil && t.counts() && t.manned() &&
		(t.gang.phase == called || (t.gang.phase == running || t.gang.phase == stopping) && t.hold == nothing && t.asks())
}

// manned says whether anybody would be granted.
func (t *tenant) manned() bool {
	return slices.ContainsFunc(t.crew, func(cl *client) bool { return cl.connected && (cl.grant == nil || cl.grant.state != fenced) })
}

func (g *gang) any(is func(*tenant) bool) bool {
	return slices.ContainsFunc(g.seats, func(t *tenant) bool { return t.counts() && is(t) })
}

func (g *gang) all(are func(*tenant) bool) bool {
	return !slices.ContainsFunc(g.seats, func(t *tenant) bool { return t.counts() && t.manned() && !are(t) })
}

// isDue says whether its turn has come on all its GPUs.
func (g *gang) isDue() bool { return g.all(func(t *tenant) bool { return t.due }) }

// nextStep returns when those that have drained make one more call.
func (g *gang) nextStep() (Time, bool) {
	if g.phase != stopping {
		return 0, false
	}
	at, drains := g.releasedAt.Add(stepPause), false
	for _, t := range g.seats {
		for _, cl := range t.crew {
			if t.counts() && cl.grant.closes() {
				at, drains = max(at, g.stoppedAt.Add(stepAfter), cl.grant.revokedAt.Add(stepAfter)), true
			}
		}
	}
	return at, drains && g.any(func(t *tenant) bool { return t.stepsAt(max(at, g.gangs.clock.now)) })
}

// stepsAt says whether members here could make a call at that time.
func (t *tenant) stepsAt(at Time) bool {
	return t.hold == leaving && t.asks() && at < t.gang.stoppedAt.Add(t.core.grace) && t.core.alone(t)
}

// check is Node.Check.
func (gs *gangs) check() error {
	if len(gs.moved) > 0 {
		return fmt.Errorf("gangs: GPU %s is to be stepped", gs.moved[0].gpu)
	}
	for name, g := range gs.byName {
		if len(g.seats) == 0 || g.name != name {
			return fmt.Errorf("gang %q has %d GPUs, name %q", name, len(g.seats), g.name)
		}
		asks, live := g.any((*tenant).asks), g.any((*tenant).live)
		switch {
		case g.phase == resting && (asks || live), g.phase == wanted && (!asks || live), g.phase == called && !asks, g.phase == stopping && !live:
			return fmt.Errorf("gang %s: phase %d, asks: %t, has grants: %t", name, g.phase, asks, live)
		case g.phase == called && g.ticket == 0:
			return fmt.Errorf("gang %s is called without a ticket", name)
		}
		for _, t := range g.seats {
			c := t.core
			if c.tenants[name] != t || t.gang != g || (t.hold != nothing) != (c.kept == t) {
				return fmt.Errorf("gang %s: GPU %s does not know its seat, hold %d", name, c.gpu, t.hold)
			}
			ok := t.hold == nothing
			switch g.phase {
			case called:
				ok = ok || t.hold == kept
			case running:
				ok = ok || t.hold == playing || t.hold == kept // while latency tenants are there
			case stopping:
				ok = ok || t.hold == leaving
			}
			if !ok {
				return fmt.Errorf("gang %s: phase %d, hold %d on GPU %s", name, g.phase, t.hold, c.gpu)
			}
			if o := c.kept; g.phase == called && t.manned() && o != nil && o != t && o.gang.phase == called && o.gang.ticket > g.ticket && t.isCalled() {
				return fmt.Errorf("GPU %s is kept for ticket %d, and ticket %d is called", c.gpu, o.gang.ticket, g.ticket)
			}
			if t.counts() && t.open > 0 && t.hold != playing {
				return fmt.Errorf("gang %s: %d grants on GPU %s without a turn", name, t.open, c.gpu)
			}
		}
	}
	return nil
}
