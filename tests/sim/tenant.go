// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// How often the operator and the judge's checks over time have their turn, and
// how far back a limit is looked at.
const (
	often       = 50 * time.Millisecond
	limitWindow = 5 * time.Second
	samples     = int(limitWindow/often) + 1
)

// gatherTime is for how long no gang has a turn after a restart, and a little more.
const gatherTime = 1200 * time.Millisecond

// reportEvery is how often a client says how it gets on.
const reportEvery = 250 * time.Millisecond

// statsEvery is how often it says that it has made calls.
const statsEvery = time.Second

// maxRequests is what the simulated tenants are promised in sum, percent.
const maxRequests = 80

// tenant is what the operator asked for in the name of one, and what the judge
// counts for it.
type tenant struct {
	name    string
	share   sched.Share
	memory  residency.SetTenantMemory // no Tenant: nothing was set
	kept    base.Time                 // since when its memory is kept as that says
	clients int                       // slots
	stable  base.Time                 // since then nothing has changed that bounds it

	holding int // clients with a live grant that is not paused
	counted base.Time
	held    time.Duration
	ring    [samples]time.Duration // of held
	sampled int
}

// newTenants chooses some, and shares for them.
func (w *world) newTenants() {
	if !w.onlyLimits && !w.chance(0.6) {
		return // everybody on his own
	}
	for i := range 1 + w.rng.IntN(6) {
		t := &tenant{name: fmt.Sprintf("t%d", i)}
		w.tenants = append(w.tenants, t)
		t.share = w.newShare(t)
	}
}

// newShare chooses a share within what the others leave.
func (w *world) newShare(t *tenant) sched.Share {
	var s sched.Share
	if w.onlyLimits {
		if w.chance(0.3) {
			s.Limit = 1 + w.rng.IntN(60)
		}
		if !w.even {
			s.Weight = 50 << w.rng.IntN(4)
		} else if w.chance(0.15) {
			s.Priority = sched.Latency
		} else if w.chance(0.2) {
			s.Overlap = "o"
		}
		return s
	}
	if w.chance(0.15) {
		s.Gang = []string{"g", "h"}[w.rng.IntN(2)]
		return s
	}
	if w.chance(0.1) {
		s.Overlap = "o"
		return s
	}
	left := maxRequests
	for _, other := range w.tenants {
		if other != t {
			left -= other.share.Request
		}
	}
	if w.chance(0.4) && left > 0 {
		s.Request = min(1+w.rng.IntN(40), left)
	}
	if w.chance(0.4) {
		s.Limit = min(max(s.Request, 1)+w.rng.IntN(60), 100)
	}
	if w.chance(0.4) {
		s.Weight = 50 << w.rng.IntN(4)
	}
	if w.chance(0.2) {
		s.Priority = sched.Latency
	}
	return s
}

// part returns the least that a tenant gets of the GPU if all want it.
func (w *world) part(t *tenant) float64 {
	requests, weights, own := 0, 100*len(w.client), 100
	share := sched.Share{}
	for _, other := range w.tenants {
		requests += other.share.Request
		weights += max(other.share.Weight, 100)
	}
	if t != nil {
		share = t.share
	}
	if share.Weight != 0 {
		own = share.Weight
	}
	return float64(share.Request)/100 + (1-float64(requests)/100)*float64(own)/float64(weights)
}

// count keeps the sum of the time that the tenant's clients hold.
func (t *tenant) count(now base.Time, n int) {
	t.held += time.Duration(t.holding) * now.Sub(t.counted)
	t.counted = now
	t.holding += n
}

// changed begins the tenant's accounts anew.
func (t *tenant) changed(now base.Time) {
	t.stable = now
	t.sampled = 0
}

// checkLimits holds the core to its word on limits: over any five seconds, a
// tenant has at most its limit, what it may catch up on, and the drains of the
// grants that were revoked when it had used that up.
func (j *judge) checkLimits() {
	w := j.w
	if w.daemon.core == nil { // holders go on, and the next one begins anew
		return
	}
	if j.beside() { // then a holder is billed for what latency tenants leave of the GPU; see sched/latency.go
		w.changed()
	}
	for id, g := range j.grants {
		if c := w.byID[id]; c != nil && c.tenant != nil && g.shared && g.running { // a limited tenant in it is charged what it uses of it; see sched/cohort.go
			c.tenant.changed(w.now)
		}
	}
	for _, t := range w.tenants {
		t.count(w.now, 0)
		before := t.ring[t.sampled%samples]
		t.ring[t.sampled%samples] = t.held
		t.sampled++
		if t.sampled <= samples || w.mem.capacity != 0 || t.share.Group() != "" || t.share.Limit == 0 || t.share.Limit == 100 || w.daemon.tuning != (account.Tuning{}) {
			continue
		}
		// The oldest sample is older than the window by one piece.
		limit := (limitWindow + often) * time.Duration(t.share.Limit) / 100
		credit := max(100*time.Millisecond*time.Duration(t.share.Limit)/100, 5*time.Millisecond,
			account.DefaultWindow*time.Duration(t.share.Limit)/100)
		drains := time.Duration(t.clients+1) * (maxGrace + 20*time.Millisecond)
		if got := t.held - before; got > limit+credit+drains {
			w.fail("tenant %s with %v held for %v of %v, more than %v and %v to catch up on and %v of drains",
				t.name, t.share, got, limitWindow+often, limit, credit, drains)
		}
		w.report.Limits++
	}
}

// patience returns how long a client may wait at most: each of the others can
// be before it, with a turn and a grace period, and again for what it owes; a
// restart, or claims after it, cost one more of each; the rest is latency.
func (j *judge) patience(c *client) time.Duration {
	if j.w.mem.others.on {
		return j.patienceForTurns(c) + oneWord
	}
	return j.patienceForTurns(c)
}

func (j *judge) patienceForTurns(c *client) time.Duration {
	w := j.w
	n := time.Duration(len(w.client))
	turn := 2*maxQuantum + maxGrace + 20*time.Millisecond
	if w.mem.capacity != 0 {
		// Who moves and does not get on has the GPU for a grace period after each piece,
		// and keeps away from it for as long. Then nobody moves for nine times as long.
		turn += 4*(maxGrace+3*maxGrace) + 9*4*maxGrace
	}
	bound := 2*(n+2)*turn + maxGrace
	if slices.ContainsFunc(w.tenants, func(t *tenant) bool { return t.share.Group() != "" }) {
		bound += 2*bound + gatherTime // a gang waits for all its clients, and all wait for it
	}
	if len(w.tenants) == 0 {
		return bound
	}
	clients := time.Duration(1)
	if c.tenant != nil {
		clients = time.Duration(c.tenant.clients)
	}
	bound += time.Duration(float64(2*n*maxQuantum+2*clients*maxGrace) / w.part(c.tenant))
	if c.tenant != nil && c.tenant.share.Limit != 0 {
		// What is fenced goes on to count, for as long as it is on the GPU.
		bound += (clients + 1) * (turn + 3*maxGrace) * 100 / time.Duration(c.tenant.share.Limit)
	}
	bound = min(bound, 24*time.Hour) // with thousands of clients the product is too large
	return bound * clients * 3       // of which latency tenants may take half, or what they are promised
}
