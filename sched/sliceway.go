// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// Sharing by time slices, as mode Auto begins, watches and ends it. The gates of all
// clients are open; search.go says how long slices are, and slices.go sets them.

const (
	// minTurns is how long turns last at least after slices, so that the way does not swing.
	minTurns = 5 * time.Second
	// Where turns were better, slices are tried again after a time that doubles.
	minBackoff, maxBackoff = time.Minute, 16 * time.Minute
	promisedBackoff        = 5 * time.Minute // more than that where tenants are promised parts, or one starved

	// turnsGive is what tenants get in turns, together, of what they get alone; less than
	// that by slices, in two windows, and turns are better.
	turnsGive  = 0.97
	worseTwice = 2
)

// sharers counts the slices that those have who would share by slices, in a cohort or all of them,
// and says whether turns have shown what each gets alone.
func (c *GPU) sharers(cohort bool) (known bool, n int) {
	all := c.tally.sum(cohort)
	return all.unknown == 0, c.groups(cohort) + all.clients
}

// beginSlices has clients share the GPU by time slices, all of it or the turns of a cohort.
func (c *GPU) beginSlices(w Way) {
	a, cohort := &c.auto, w == WayCohort
	c.endCohort()
	a.worse, a.underfed, a.gaveUp = 0, 0, nil
	for _, t := range c.tenants {
		c.bill(t) // as a turn
		if !cohort || !t.apart {
			t.gets, t.sliceFactor = 0, 0
		}
	}
	a.way = w
	if cohort {
		c.startCohort()
	}
	c.slices.search, c.slices.stale = timeslice.NewSearch(cohort), true
	c.addUpAll() // nothing is given up any more
	sliceOf := c.sliceOf()
	for _, cl := range c.inOrder() {
		if c.slicing(cl) {
			cl.tenant.gets += int(1000 * sliceOf(cl))
		}
		if !cohort || c.inCohort(cl.tenant) {
			cl.progress.EndTurns(a.turnEnded) // what the present turn will show is not known
		}
	}
	a.startWindow(c.now)
	if cohort {
		c.setEffective(Exclusive, because(reasonCohort))
		return
	}
	c.setEffective(Concurrent, because(reasonSlices))
}

// endSlices has clients take turns, for a while at least if they shared by slices.
func (c *GPU) endSlices(cause Cause, atLeast time.Duration) {
	a := &c.auto
	if c.anySliced() {
		for _, t := range c.tenants {
			c.bill(t) // as a slice
		}
		for _, cl := range c.inOrder() {
			if c.sliced() || c.inCohort(cl.tenant) {
				cl.progress.StartTurns(c.now)
			}
		}
		c.endCohort()
		c.slices.stale = true
		a.notBefore, a.left = c.now.Add(max(atLeast, minTurns)), cause
	}
	a.way, a.wastes = WayTurns, false
	a.startWindow(c.now)
	c.setEffective(Exclusive, cause)
}

// giveUpSlices is endSlices where slices were tried and were worse than turns.
func (c *GPU) giveUpSlices(why Why) {
	a := &c.auto
	if c.uneven() || why == reasonParts {
		a.backoff = max(a.backoff, promisedBackoff)
	}
	a.backoff = min(max(2*a.backoff, minBackoff), maxBackoff)
	c.endSlices(because(why), a.backoff)
	a.gaveUp = map[base.ClientID]float64{}
	for _, cl := range c.inOrder() {
		if rate, _, known := cl.progress.Alone(); cl.shares() && known {
			a.gaveUp[cl.id] = rate
		}
	}
	c.addUpAll()
}

// othersNow says whether other programs run now than when slices were given up, so that
// this says nothing about them: a client came, or one makes calls at another speed.
func (c *GPU) othersNow() bool {
	a := &c.auto
	return a.gaveUp != nil && c.now >= a.notBefore.Add(minTurns-a.backoff) && c.tally.others > 0
}

// lookAtSlices judges a window of slices, and chooses those of the next one.
func (c *GPU) lookAtSlices(window time.Duration) {
	a, s := &c.auto, &c.slices
	m := c.measure(window)
	wasted, known := a.wouldWaste()
	a.startWindow(c.now)
	switch {
	case c.servesLatency():
		worse := m.known && m.sum < c.turnsWouldGive() || !m.known && known && wasted < idleTogether
		if a.worse = more(a.worse, worse && s.crowded); a.worse >= worseTwice {
			a.gaps = false
			c.giveUpSlices(reasonLatency)
		}
		return
	case m.slices < oneSlice:
		return // there is nothing to choose
	}
	group := s.fixed // longer slices of the others would take from those that cannot be set
	uneven, settled := c.uneven(), group || s.search.Settled()
	// By long slices clients that keep the GPU busy get what turns give, within 1 %. By short
	// ones they get less, but a program that waits for a slice of the others looks as busy:
	// what each gets alone tells.
	short := settled && s.search.Longest() < timeslice.MaxSlice/4
	since := c.now.Sub(a.measuredAt)
	if uneven && !m.promised && since > worthMeasure || !m.known && short && m.idle < idleTogether && since > worthDoubt {
		a.measuredAt = c.now
		c.endSlices(because(reasonMeasure), 0)
		return
	}
	worse := short && m.known && m.sum < turnsGive
	underfed := uneven && m.promised && c.correct() || !uneven && m.known && c.starves(m.sum)
	if c.cohort.on && settled && !uneven && m.known && m.idle < idleTogether {
		c.correct() // turns end in the middle of a round of slices, with the same client ahead
	}
	a.worse, a.underfed = more(a.worse, worse), more(a.underfed, underfed)
	switch {
	case a.worse >= worseTwice:
		c.giveUpSlices(reasonMore)
		return
	case a.underfed > maxUnderfed:
		c.giveUpSlices(reasonParts)
		return
	}
	longest := s.search.Longest()
	if group {
		s.search = timeslice.NewSearch(false)
	} else {
		s.search.Window(window, m.rates)
	}
	s.stale = s.stale || s.search.Longest() != longest
	if settled && !worse && !underfed {
		a.backoff = 0
	}
}

func more(n int, yes bool) int {
	if yes {
		return n + 1
	}
	return 0
}

// A window is how long it takes to see what slices do: so many rounds of slices, and so
// many reports.
const (
	sliceWindow, maxSliceWindow = 2 * time.Second, 10 * time.Second
	sliceRounds                 = 16
)

func (c *GPU) sliceWindow() time.Duration {
	return base.Clamp(sliceRounds*c.tally.sum(c.cohort.on).round, sliceWindow, maxSliceWindow)
}

// oneSlice is more than one of the GPU's slices, and less than two: members of an overlap
// group have parts of one.
const oneSlice = 1.5

// measured is what a window has shown.
type measured struct {
	rates    timeslice.Speeds // of active clients
	slices   float64          // how many of the GPU's slices these have
	known    bool             // the speed alone of all active clients
	promised bool             // and of those at least that are promised a part
	sum      float64          // of what they get, as parts of what they get alone
	idle     float64          // the sum of the parts of the window in which they had no work
}

// measure looks at the window that ends, and begins the next one.
func (c *GPU) measure(window time.Duration) measured {
	m := measured{known: true, promised: true}
	latency, shared, sliceOf := c.servesLatency(), c.sharedIn(window), c.sliceOf()
	c.cohort.had, c.cohort.since = shared.Seconds()/window.Seconds(), c.cohort.ran
	if c.cohort.on {
		c.cohort.parts = c.cohortParts(false)
	}
	members := c.activeMembers(shared)
	slicers := c.slicers()
	for _, t := range c.byKey {
		t.gained = 0
	}
	for _, cl := range c.inOrder() {
		p, t := &cl.progress, cl.tenant
		alone, _, known := p.Alone()
		served := latency && t.share.Priority == Latency // and not judged
		part := ofSlice(cl, members)
		if rate, active := p.Rate(shared); active && !served {
			p.Gets(rate)
			m.rates = append(m.rates, timeslice.Speed{Client: cl.id, Calls: rate})
			m.slices += part
			m.idle += part * p.Idle()
			m.known = m.known && known
			m.promised = m.promised && (known || t.share.Request == 0 && c.exact > 0)
			if known {
				m.sum += part * rate / alone
			}
		}
		if got, known := p.Got(shared); known {
			t.gained += part * got
		} else {
			t.gained += sliceOf(cl) * p.Over(shared)
		}
		p.StartWindow()
	}
	c.cohort.idle = m.idle
	all := 0.0
	for _, t := range slicers {
		all += t.gained
	}
	for _, t := range slicers {
		c.bill(t) // by what it got so far
		t.gets = int(1000 * t.gained / max(all, 1))
	}
	return m
}

// sliceOf returns a function that returns a client's part of the GPU by the slices alone.
func (c *GPU) sliceOf() func(*client) float64 {
	members := c.members((*client).shares)
	of := func(o *client) time.Duration { // whole numbers: their sum does not depend on the order
		return cmp.Or(o.slice, timeslice.DriverSlice) / time.Duration(max(members[o.tenant], 1))
	}
	var sum time.Duration
	for _, o := range c.inOrder() {
		if c.slicing(o) {
			sum += of(o)
		}
	}
	return func(cl *client) float64 { return float64(of(cl)) / float64(max(sum, 1)) }
}

// Where shares are uneven, slices are corrected by what tenants get: a program that waits
// for its kernels does not use a long slice to its end. Only slices of those are shortened
// that say themselves that they get more than their part: so a tenant that says that it
// gets little takes nothing from others' parts.
const (
	shareError   = 0.02 // of the GPU
	starvedBy    = 0.10 // the same, where nothing is promised
	starvedFor   = 0.05 // of what all get alone: less gain is no reason for that
	damping      = 0.8
	leastFactor  = 0.02
	maxUnderfed  = 5 // windows in which a tenant does not get its part: then turns are better
	worthMeasure = 30 * time.Second
	worthDoubt   = 5 * time.Minute // where nothing is promised: five seconds of turns cost language models half
)

// uneven says whether tenants that share by slices are promised something, or their weights
// differ.
func (c *GPU) uneven() bool {
	cohort := c.auto.against[WayCohort].Why == reasonNone
	if c.exact > 0 && !cohort {
		return true
	}
	weight := 0
	for _, t := range c.tenantsInOrder() {
		if cohort && t.apart {
			continue
		}
		if t.share.Priority != Latency {
			if t.share.Request > 0 {
				return true
			}
			if weight != 0 && t.share.Weight != weight {
				return true
			}
			weight = t.share.Weight
		}
	}
	return false
}

// fed is how a tenant fares.
type fed struct {
	got, part, needs float64 // of the GPU
	byTurns          float64 // what it got in turns
	sum              float64 // the same, as a part of what it gets alone
	had              float64 // for which part of the time it shared the GPU by slices
}

// feds finds out how the tenants that share by slices fare, and returns these.
func (c *GPU) feds() []*tenant {
	slicers := c.slicers()
	for _, t := range slicers {
		f := fed{got: float64(t.gets) / 1000, part: float64(c.part(t)) / account.One, had: c.cohort.had}
		if c.inCohort(t) {
			part, awake := c.cohort.parts[t]
			if f.part = part; !awake {
				f.got = 0 // before it slept it was nobody's rival for these parts
			}
		}
		t.fed = f
	}
	counts := func(cl *client) bool {
		_, _, known := cl.progress.Alone()
		return cl.connected && known
	}
	members := c.members(counts)
	for _, cl := range c.inOrder() {
		if counts(cl) {
			rate, busy, _ := cl.progress.Alone()
			f, part := &cl.tenant.fed, ofSlice(cl, members)
			f.needs += part * busy
			f.byTurns += part * busy * cl.progress.ByTurns() / rate
			f.sum += part * cl.progress.ByTurns() / rate
		}
	}
	return slicers
}

// short says whether the tenant gets less than its part, and than it needs, by more than an
// error; and whether it got more in turns.
func (f fed) short(by float64) (short, turnsBetter bool) {
	short = f.got > 0 && f.got < min(f.part, f.needs)-by
	return short, short && f.got*f.had < f.byTurns-by
}

// inTurns returns what those that share by slices got together in turns, waiting included, of
// what each gets alone; false: of some that is not known.
func (c *GPU) inTurns() (sum float64, known bool) {
	known = true
	for _, t := range c.feds() {
		sum += t.fed.sum
		known = known && t.fed.sum > 0
	}
	return sum, known
}

// turnsWouldGive says what clients beside a latency tenant would get in turns together, of what
// each gets alone, as far as is known: what they got, which is more than one has alone if they
// seldom want the GPU at once. In a cohort's time that is by the part of it; or at most what the
// latency tenant leaves.
func (c *GPU) turnsWouldGive() float64 {
	switch got, known := c.inTurns(); {
	case known && c.cohort.on:
		return got / max(c.cohort.had, account.MinPart/float64(account.One))
	case known:
		return max(got, turnsGive)
	case c.cohort.on:
		return turnsGive * float64(1000-c.besides.use) / 1000
	}
	return turnsGive
}

// starves says whether a tenant gets far less than in turns, and the others do not get more
// for that: a program may set its own time slices, or work in a way that slices serve badly.
func (c *GPU) starves(sum float64) bool {
	inTurns, _ := c.inTurns()
	starved := slices.ContainsFunc(c.feds(), func(t *tenant) bool {
		_, worse := t.fed.short(starvedBy)
		return worse
	})
	return starved && sum*c.cohort.had < inTurns+starvedFor
}

// correct changes slices by what tenants got. It returns whether one that did not get its
// part got more in turns.
func (c *GPU) correct() bool {
	underfed, turnsBetter := false, false
	slicers := c.feds()
	for _, t := range slicers {
		short, worse := t.fed.short(shareError)
		underfed, turnsBetter = underfed || short, turnsBetter || worse
	}
	if !underfed {
		return false
	}
	for _, t := range slicers {
		if f := t.fed; f.got > f.part+shareError {
			t.sliceFactor = max(cmp.Or(t.sliceFactor, 1)*(1-damping*(f.got-f.part)/f.got), leastFactor)
			c.slices.stale = true
		}
	}
	return turnsBetter
}

// slicers returns the tenants that share by slices, in order.
func (c *GPU) slicers() []*tenant {
	return slices.DeleteFunc(c.tenantsInOrder(), func(t *tenant) bool { return c.cohort.on && !c.inCohort(t) })
}

// tenantsInOrder returns those with clients, by name.
func (c *GPU) tenantsInOrder() []*tenant {
	c.looked += uint64(len(c.byKey))
	return slices.DeleteFunc(slices.Clone(c.byKey), func(t *tenant) bool { return t.clients == 0 })
}

// wayNow returns the way that a restart is to go on with.
func (c *GPU) wayNow() Way {
	if c.mode != Auto {
		return WayTurns // the mode says all
	}
	return c.auto.way
}

// resumeWay goes on with the way from before a restart, once it is known that somebody held the GPU
// then. Nobody is connected.
func (c *GPU) resumeWay() {
	way := c.earlier
	if c.earlier = WayTurns; way == WayTurns {
		return
	}
	a := &c.auto
	a.keepUntil, a.measuredAt, a.gaps, a.wastes = c.now.Add(proofPatience), c.now, true, true
	switch way {
	case WaySlices, WayCohort:
		c.beginSlices(way)
	default:
		a.way = WayDriver
		c.setEffective(Concurrent, because(reasonGaps))
	}
}

// keepsWay says whether the way from before a restart goes on without being looked at: until all who
// held have had time to come back, it says nothing that some are not there. What those who are there
// have against it does not wait, nor does memory that does not fit.
func (c *GPU) keepsWay() bool {
	a, s := &c.auto, &c.slices
	if a.keepUntil == 0 {
		return false
	}
	if s.stale {
		a.against[WaySlices] = c.againstSlices()
	}
	why := a.against[WaySlices].Why
	apart := why == reasonLimit || why == reasonUnsliceable || why == reasonBare
	if c.now < a.keepUntil && !c.mem.Overfull() && (why == reasonNone || apart && c.cohort.on) {
		return true
	}
	a.keepUntil, s.stale = 0, true
	return false
}
