// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"github.com/nvshare/nvshare/sched/base"
)

// noticed is up to how many holders are told exactly how many others there are.
const noticed = 8

// notices are what decides whether more than a few holders are told.
type notices struct {
	told    announced
	tellAll bool // the mode or a share has changed, which every holder is to know
}

// announced is what each holder was told of, however many there are.
type announced struct {
	waiters  [besideGrant + 1]bool // somebody waits for grants of this kind to end
	together bool                  // all clients are of one overlap group
	pooled   bool                  // there are latency tenants, beside whom idle ranks leave
}

// neighbors is all that decides what a holder is told of the others.
type neighbors struct {
	mode     Mode      // in effect
	kind     grantKind // of its grant
	attached int       // other clients on the GPU
	waiting  int       // clients that may be granted and are not
	turns    int       // turn grants that are open or paused
	latency  int       // latency grants that are open
	limited  bool      // its tenant has a limit, which is charged while it is idle, too
	ganged   bool      // its tenant is a gang
	shared   bool      // its turn is that of its cohort, and what it has submitted can be cut
	patient  bool      // it is to keep the GPU over short pauses
	quiet    bool      // it has made no calls for long, see idle.go
	pooled   bool      // there are latency tenants
}

// notice returns what a holder is to be told.
func (s neighbors) notice(id base.ClientID) Notice {
	n := Notice{Client: id, Present: s.attached}
	switch {
	case s.mode != Exclusive, s.kind == besideGrant:
		// Nobody waits for longer than this Step, or for this grant.
	case s.kind == latencyGrant:
		n.Waiters = s.waiting + s.turns // it keeps their gates shut
	default:
		n.Waiters = s.waiting + s.latency // its submitted work slows them down
	}
	switch {
	case s.ganged && s.mode == Exclusive:
		// Ranks that are idle are part of the job, and go when it does. But latency tenants do not
		// wait for a turn to end, and have half of the time while a gang has one.
		n.Leave, n.Bound = s.pooled, true
	case s.limited:
		n.Leave, n.Bound = true, true // as if its limit were somebody who waits
	default:
		n.Leave, n.Bound = n.Waiters > 0 || s.quiet, n.Present > 0
	}
	if s.shared {
		n.Bound = false // it waits for others' slices, and the end of its turn cuts what it has submitted
	}
	n.Patient = n.Leave && (s.patient || s.ganged && s.mode == Exclusive || s.quiet && n.Waiters == 0)
	return n
}

// expected returns what a client with a grant is to be told.
func (c *GPU) expected(cl *client) Notice {
	t := cl.tenant
	return neighbors{
		mode:     c.effective,
		kind:     cl.grant.kind,
		attached: c.beyond(cl),
		waiting:  c.waiting,
		turns:    c.open.n,
		latency:  c.latency.n,
		limited:  t.limited() && !c.inCohort(t),
		ganged:   t.slot != nil && !t.overlaps(),
		shared:   cl.grant.shared && c.effective == Exclusive && !t.overlaps(),
		patient:  c.patient(cl),
		quiet:    cl.quiet,
		pooled:   c.pool.tenants > 0,
	}.notice(cl.id)
}

// beyond returns how many clients there are besides this one. Members of its overlap group do
// not count: they run at the same time, so its submitted work delays nobody.
func (c *GPU) beyond(cl *client) int {
	n := c.connected - 1
	if cl.tenant.overlaps() {
		for _, other := range cl.tenant.members {
			if other != cl && other.connected {
				n--
			}
		}
	}
	return n
}

// notice tells a client how many others there are, if that has changed.
func (c *GPU) notice(cl *client) {
	n := c.expected(cl)
	if n.Waiters > 0 != c.told.waiters[cl.grant.kind] { // in the middle of a Step: the others know something else
		c.tellAll = true
	}
	if n != cl.told {
		cl.told = n
		c.do(n)
	}
}

// noticeAll tells all holders. More than a few are told only when it changes whether
// there are others: Present is above zero for each of them, before this Step and
// after it, and nobody waits in concurrent mode. In turns many hold if they are a group.
func (c *GPU) noticeAll() {
	turns := c.effective == Exclusive
	first := c.open.head // of one group if all are
	now := announced{together: first != nil && first.tenant.overlaps() && c.beyond(first) == 0, pooled: c.pool.tenants > 0}
	now.waiters[latencyGrant] = turns && c.waiting+c.open.n > 0
	now.waiters[turnGrant] = turns && c.waiting+c.latency.n > 0
	if now != c.told {
		c.told, c.tellAll = now, true
	}
	for _, l := range []*list{&c.open, &c.latency, &c.beside} {
		if l.n > noticed && c.tellAll {
			c.looked += uint64(l.n)
		}
		for cl := l.head; cl != nil && (l.n <= noticed || c.tellAll); cl = cl.next {
			c.notice(cl)
		}
	}
	c.tellAll = false
}

// wasTold says whether a client was told what it is to be told, up to the numbers
// where there are many holders.
func (c *GPU) wasTold(cl *client) bool {
	want, got := c.expected(cl), cl.told
	if c.open.n > noticed || c.latency.n > noticed || c.beside.n > noticed {
		want.Waiters, want.Present, want.Patient = got.Waiters, got.Present, got.Patient
	}
	return got == want
}
