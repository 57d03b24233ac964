// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
)

// Tenants of this file want the GPU always, drain for up to 7 ms and hand it
// over in 250 µs, as real ones do that keep two batches of kernels ahead.
const (
	accuracyDrain    = 7 * time.Millisecond
	accuracyHandOver = 250 * time.Microsecond
	accuracyRun      = 30 * time.Second
	accuracyFirst    = time.Second // what happens before does not count
	accuracyWindow   = 5 * time.Second
	accuracyError    = 2.0 // percentage points
	accuracyAlone    = 0.7 // of a tenant that nobody keeps waiting
)

type backlogged struct {
	name    string
	share   sched.Share
	clients int
	expect  float64 // percent of the time held
}

// span is a time in which a tenant held the GPU, drain included.
type span struct{ from, to base.Time }

// spans runs a core with backlogged tenants and returns when each held.
func spans(t *testing.T, seed uint64, cfg sched.Config, run time.Duration, tenants []backlogged) [][]span {
	rng := rand.New(rand.NewPCG(seed, 7))
	core := sched.New(cfg)
	held := make([][]span, len(tenants))
	tenantOf := map[base.ClientID]int{}
	var now base.Time
	var seq uint64
	var events events
	at := func(d time.Duration, do func()) {
		seq++
		events.push(event{now.Add(d), seq, do})
	}
	var step func(ev base.Event)
	step = func(ev base.Event) {
		for _, a := range core.Step(now, ev) {
			switch a := a.(type) {
			case sched.Grant:
				i := tenantOf[a.Client]
				held[i] = append(held[i], span{from: now})
			case sched.Revoke:
				drain := time.Duration(rng.Int64N(int64(accuracyDrain)))
				at(accuracyHandOver+drain, func() {
					i := tenantOf[a.Client]
					held[i][len(held[i])-1].to = now
					step(sched.Request{Client: a.Client})
					step(sched.Release{Client: a.Client, Epoch: a.Epoch, Reason: sched.Revoked})
				})
			}
		}
		if err := core.Check(); err != nil {
			t.Fatalf("seed %d at %v: %v", seed, time.Duration(now), err)
		}
	}
	id := base.ClientID(0)
	for i, tenant := range tenants {
		for range max(tenant.clients, 1) {
			id++
			tenantOf[id] = i
			step(sched.Attach{Client: id, Tenant: tenant.name, Share: tenant.share, Want: true})
		}
	}
	for now < base.Time(run) {
		due, ok := core.Deadline()
		if len(events) > 0 && (!ok || events[0].at <= due) {
			ev := events.pop()
			now = ev.at
			ev.do()
			continue
		}
		if !ok {
			t.Fatalf("seed %d at %v: nothing happens any more", seed, time.Duration(now))
		}
		now = max(now, due)
		step(sched.Tick{})
	}
	for i := range held {
		if n := len(held[i]); n > 0 && held[i][n-1].to == 0 {
			held[i][n-1].to = now
		}
	}
	return held
}

// heldIn returns the percentage of a window that is covered by spans, which are
// in order and do not overlap.
func heldIn(spans []span, from, to base.Time) float64 {
	var sum time.Duration
	for _, s := range spans {
		if lo, hi := max(s.from, from), min(s.to, to); lo < hi {
			sum += hi.Sub(lo)
		}
	}
	return 100 * float64(sum) / float64(to.Sub(from))
}

// TestSharesAreExact holds limits and requests to 2 percentage points over any
// five seconds, and the limit of a tenant alone to 0.7.
func TestSharesAreExact(t *testing.T) {
	limit := func(p int) sched.Share { return sched.Share{Limit: p} }
	request := func(p int) sched.Share { return sched.Share{Request: p} }
	tests := []struct {
		name    string
		tenants []backlogged
	}{
		{"limit 25 alone", []backlogged{{"a", limit(25), 1, 25}}},
		{"limit 1 alone", []backlogged{{"a", limit(1), 1, 1}}},
		{"limit 90 alone, three processes", []backlogged{{"a", limit(90), 3, 90}}},
		{"limit 50 alone", []backlogged{{"a", limit(50), 1, 50}}},
		{"limit 75 alone", []backlogged{{"a", limit(75), 1, 75}}},
		{"limit 90 alone", []backlogged{{"a", limit(90), 1, 90}}},
		{"limit 98 alone", []backlogged{{"a", limit(98), 1, 98}}},
		{"limits 25 and 75", []backlogged{{"a", limit(25), 1, 25}, {"b", limit(75), 1, 75}}},
		{"limits 30 and 60", []backlogged{{"a", limit(30), 1, 30}, {"b", limit(60), 1, 60}}},
		{"limits 10 and 90", []backlogged{{"a", limit(10), 1, 10}, {"b", limit(90), 1, 90}}},
		{"five limits of 20", []backlogged{{"a", limit(20), 1, 20}, {"b", limit(20), 1, 20}, {"c", limit(20), 2, 20}, {"d", limit(20), 1, 20}, {"e", limit(20), 1, 20}}},
		{"limit 25 beside one without", []backlogged{{"a", limit(25), 1, 25}, {"b", sched.Share{}, 1, 75}}},
		{"limits 10 and 20 beside two without", []backlogged{{"a", limit(10), 1, 10}, {"b", limit(20), 1, 20}, {"c", sched.Share{}, 1, 35}, {"d", sched.Share{}, 4, 35}}},
		{"requests 25 and 75", []backlogged{{"a", request(25), 1, 25}, {"b", request(75), 1, 75}}},
		{"requests 30 and 60", []backlogged{{"a", request(30), 1, 35}, {"b", request(60), 1, 65}}},
		{"requests 10 and 90", []backlogged{{"a", request(10), 1, 10}, {"b", request(90), 1, 90}}},
		{"five requests of 20", []backlogged{{"a", request(20), 1, 20}, {"b", request(20), 1, 20}, {"c", request(20), 2, 20}, {"d", request(20), 1, 20}, {"e", request(20), 1, 20}}},
		{"request 40 beside three without", []backlogged{{"a", request(40), 1, 55}, {"b", sched.Share{}, 1, 15}, {"c", sched.Share{}, 1, 15}, {"d", sched.Share{}, 3, 15}}},
		{"weights 1, 2 and 7", []backlogged{{"a", sched.Share{Weight: 10}, 1, 10}, {"b", sched.Share{Weight: 20}, 1, 20}, {"c", sched.Share{Weight: 70}, 1, 70}}},
	}
	for _, quantum := range []time.Duration{100 * time.Millisecond, 30 * time.Millisecond} {
		for _, test := range tests {
			t.Run(fmt.Sprintf("%s, quantum %v", test.name, quantum), func(t *testing.T) {
				worst, most := 0.0, accuracyError
				if len(test.tenants) == 1 {
					most = accuracyAlone
				}
				for seed := uint64(1); seed <= 3; seed++ {
					held := spans(t, seed, sched.Config{Quantum: quantum}, accuracyRun, test.tenants)
					for from := base.Time(accuracyFirst); from.Add(accuracyWindow) <= base.Time(accuracyRun); from = from.Add(50 * time.Millisecond) {
						for i, tenant := range test.tenants {
							got := heldIn(held[i], from, from.Add(accuracyWindow))
							worst = max(worst, math.Abs(got-tenant.expect))
							if math.Abs(got-tenant.expect) > most && !t.Failed() {
								t.Errorf("seed %d: tenant %s held %.2f %% of the five seconds from %v on, want %.1f %%",
									seed, tenant.name, got, time.Duration(from), tenant.expect)
							}
						}
					}
				}
				t.Logf("error at most %.2f percentage points", worst)
			})
		}
	}
}

// due returns what each tenant is to have of the GPU, percent: what it was promised and by weight
// a part of the rest, up to its limit; what limits leave is part of the rest.
func due(tenants []backlogged) []float64 {
	due, capped := make([]float64, len(tenants)), make([]bool, len(tenants))
	for more := true; more; {
		more = false
		rest, weights := 100.0, 0.0
		for i, t := range tenants {
			if capped[i] {
				rest -= due[i]
			} else {
				rest -= float64(t.share.Request)
				weights += float64(t.share.Weight)
			}
		}
		for i, t := range tenants {
			if capped[i] {
				continue
			}
			due[i] = float64(t.share.Request) + rest*float64(t.share.Weight)/weights
			if most := float64(t.share.Limit); most > 0 && due[i] > most {
				due[i], capped[i], more = most, true, true
			}
		}
	}
	return due
}

// TestAnySharesHold has tenants with limits, requests and weights drawn at random, which all want
// the GPU always. In the long run each has its due, to 2 percentage points.
func TestAnySharesHold(t *testing.T) {
	const first, run = 5 * time.Second, 40 * time.Second
	for seed := uint64(1); seed <= 100; seed++ {
		rng := rand.New(rand.NewPCG(seed, 8))
		var tenants []backlogged
		left := 90 // percent that are promised to nobody
		for i := range 2 + rng.IntN(4) {
			s := sched.Share{Weight: []int{10, 50, 100, 200, 400}[rng.IntN(5)]}
			if rng.IntN(2) == 0 {
				s.Limit = 1 + rng.IntN(99)
			}
			if rng.IntN(2) == 0 {
				s.Request = rng.IntN(left + 1)
				if s.Limit > 0 {
					s.Request = min(s.Request, s.Limit)
				}
				left -= s.Request
			}
			tenants = append(tenants, backlogged{name: fmt.Sprint("t", i), share: s, clients: 1 + rng.IntN(3)})
		}
		held := spans(t, seed, sched.Config{}, run, tenants)
		for i, want := range due(tenants) {
			if got := heldIn(held[i], base.Time(first), base.Time(run)); math.Abs(got-want) > accuracyError {
				t.Errorf("seed %d: tenant %d of %+v held %.1f %%, want %.1f %%", seed, i, tenants, got, want)
			}
		}
	}
}
