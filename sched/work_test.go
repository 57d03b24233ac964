// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// crowd is a GPU of 512 MiB with n clients of 50 tenants, each with so much reserved.
func crowd(n int, bytes uint64) *GPU {
	c := New(Config{Memory: residency.Config{Swap: true, Capacity: 1 << 29, ArenaUnit: 64 << 20}})
	for i := range n {
		id := base.ClientID(i + 1)
		c.Step(0, Attach{Client: id, Tenant: fmt.Sprint(i % 50), CanMove: true})
		c.Step(0, residency.Reserve{Client: id, Total: bytes, Least: 1})
	}
	c.Step(0, Request{1})
	return c
}

// hostile is what one client can send, again and again.
var hostile = map[string]func(i int) base.Event{
	"reserve": func(i int) base.Event { return residency.Reserve{Client: 7, Total: 1<<24 + uint64(i%2), Least: 1} },
	"force":   func(i int) base.Event { return residency.Reserve{Client: 7, Total: 1<<24 + uint64(i%2), Force: true} },
	"moved": func(i int) base.Event {
		return residency.Moved{Client: 7, Report: residency.Report{Resident: uint64(i % 2)}}
	},
	"stuck": func(i int) base.Event {
		return residency.Moved{Client: 7, Stuck: i%2 == 0, NoMemory: true, NoArena: true, Report: residency.Report{Away: uint64(i % 2)}}
	},
	"attach": func(i int) base.Event {
		if i%2 == 0 {
			return Lost{7}
		}
		return Attach{Client: 7, Tenant: "6", CanMove: true, Again: true}
	},
	"request": func(i int) base.Event {
		if i%2 == 0 {
			return Request{7}
		}
		return Withdraw{Client: 7}
	},
}

// While all that is promised fits the GPU, no event is dearer because of who else is
// there. Where it does not fit, the cost is linear, and Work says so.
func TestWorkBesideACrowd(t *testing.T) {
	const events = 100
	for _, n := range []int{100, 1000} {
		for name, event := range hostile {
			for _, over := range []bool{false, true} {
				c := crowd(n, 1<<29/8000)
				if over {
					c = crowd(n, 1<<29/50)
				}
				before := c.Work()
				for i := range events {
					c.Step(base.Time(i), event(i))
				}
				passes := float64(c.Work()-before) * lookedPerWork / float64(events*n)
				if most := map[bool]float64{false: 0.1, true: 16}[over]; passes > most {
					t.Errorf("%s beside %d clients, beyond the GPU: %t: looks at each client %.1f times, want at most %v", name, n, over, passes, most)
				}
			}
		}
	}
}

// benchClients are the numbers of clients that a benchmark measures; with -short, the first.
func benchClients(all ...int) []int {
	if testing.Short() {
		return all[:1]
	}
	return all
}

// BenchmarkStepBesideACrowd: what an event costs beside idle clients, beside clients
// whose memory fits, and beside some whose memory does not.
func BenchmarkStepBesideACrowd(b *testing.B) {
	for _, n := range benchClients(64, 800, 4000) {
		for what, bytes := range map[string]uint64{"idle": 0, "fits": 1 << 16, "over": 16 << 20} {
			for name, event := range hostile {
				b.Run(fmt.Sprintf("%s/%s/clients=%d", what, name, n), func(b *testing.B) {
					c := crowd(n, bytes)
					for i := 0; b.Loop(); i++ {
						c.Step(0, event(i))
					}
				})
			}
		}
	}
}

// sliced is a GPU in mode auto whose clients, of so many tenants, share it by time slices.
type sliced struct {
	c     *GPU
	n     int
	now   base.Time
	asked []Revoke
	saw   func(ev base.Event, took time.Duration, looked uint64) // nil: nobody looks
}

func newSliced(tb testing.TB, n, tenants int) *sliced {
	s := &sliced{c: New(Config{Mode: Auto}), n: n, now: base.Time(time.Hour)}
	for id := range base.ClientID(n) {
		s.step(Attach{Client: id + 1, Tenant: fmt.Sprint("t", int(id)%tenants), Want: true})
		s.step(Controls{Client: id + 1, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	}
	for range 60 {
		if way, _, _ := s.c.way(); way == "slices" {
			return s
		}
		s.run(250 * time.Millisecond)
	}
	way, why, _ := s.c.way()
	tb.Fatalf("%d clients share by %s (%s)", n, way, why)
	return nil
}

// step gives an event, and releases what is asked back.
func (s *sliced) step(ev base.Event) {
	looked, from := s.c.looked, time.Now()
	acts := s.c.Step(s.now, ev)
	if s.saw != nil {
		s.saw(ev, time.Since(from), s.c.looked-looked)
	}
	for _, a := range acts {
		if r, ok := a.(Revoke); ok {
			s.asked = append(s.asked, r)
		}
	}
	for len(s.asked) > 0 {
		r := s.asked[0]
		s.asked = s.asked[1:]
		s.step(Release{Client: r.Client, Epoch: r.Epoch, Reason: Revoked, Calls: 10})
		s.step(Request{Client: r.Client})
	}
}

// run lets time pass, in which all clients keep the GPU busy and say so.
func (s *sliced) run(d time.Duration) {
	for i := range int(d / (5 * time.Millisecond)) {
		s.now = s.now.Add(5 * time.Millisecond)
		s.step(Tick{})
		if i%50 == 49 {
			for id := range base.ClientID(s.n) {
				s.step(timeslice.Utilization{Client: id + 1, Samples: 5, Busy: 5, Calls: 5})
			}
		}
	}
}

// hostileBySlices is what one client can send while all share by slices.
var hostileBySlices = map[string]struct {
	event  func(i int) base.Event
	passes float64 // over all clients, at most
}{
	"utilization": {func(i int) base.Event { return timeslice.Utilization{Client: 7, Samples: 1, Busy: i % 2, Calls: i} }, 0.1},
	"request":     {hostile["request"], 0.1},
	"reserve":     {func(i int) base.Event { return residency.Reserve{Client: 7, Total: uint64(i % 2)} }, 0.1},
	"called":      {func(int) base.Event { return Called{7} }, 0.1},
	"controls": {func(i int) base.Event {
		return Controls{Client: 7, Slices: ControlWorks, Channels: ControlWorks, Groups: 1 + i%2}
	}, 8},
	"attach": {func(i int) base.Event {
		if i%2 == 0 {
			return Lost{7}
		}
		return Attach{Client: 7, Tenant: "t6", Want: true}
	}, 12},
}

// By slices no event passes over all clients, but those that change who can be sliced. These pass
// over them a few times, and Work says so.
func TestWorkBySlices(t *testing.T) {
	const events = 100
	for _, n := range []int{100, 1000} {
		for name, hostile := range hostileBySlices {
			s := newSliced(t, n, 50)
			s.run(500 * time.Millisecond) // into a window
			before := s.c.Work()
			for i := range events {
				s.now = s.now.Add(time.Microsecond)
				s.step(hostile.event(i))
			}
			passes := float64(s.c.Work()-before) * lookedPerWork / float64(events*n)
			if passes > hostile.passes {
				t.Errorf("%s beside %d clients by slices: looks at each client %.1f times, want at most %v", name, n, passes, hostile.passes)
			}
			if hostile.passes > 1 && passes < 1 {
				t.Errorf("%s beside %d clients by slices: looks at each client %.1f times, which is not counted", name, n, passes)
			}
			if way, why, _ := s.c.way(); way != "slices" && name != "attach" {
				t.Errorf("%s: %d clients share by %s (%s)", name, n, way, why)
			}
		}
	}
}

// By turns no Step passes over all who have said what they use, but once a second.
func TestWorkByTurns(t *testing.T) {
	const events, n = 100, 1000
	c := New(Config{Mode: Auto})
	for id := range base.ClientID(n) {
		c.Step(0, Attach{Client: id + 1, Tenant: fmt.Sprint("t", id), Want: true})
		c.Step(0, timeslice.Utilization{Client: id + 1, Samples: 5, Busy: 5, Calls: 5})
	}
	before := c.Work()
	for i := range events {
		c.Step(base.Time(i)*base.Time(time.Millisecond), Tick{})
	}
	if passes := float64(c.Work()-before) * lookedPerWork / float64(events*n); passes > 0.1 {
		t.Errorf("beside %d clients in turns: a Step looks at each client %.1f times, want at most 0.1", n, passes)
	}
}

// A Step looks at each tenant with a limit that has a grant, and Work says so. That all reach their limits at the same
// time is as dear for each as that one does.
func TestWorkOfLimits(t *testing.T) {
	const events = 100
	for _, n := range []int{100, 1000} {
		c := New(Config{Mode: Concurrent, Intact: true})
		now := base.Time(time.Second)
		for id := range base.ClientID(n) {
			c.Step(now, Attach{Client: id + 1, Tenant: fmt.Sprint("t", id), Share: Share{Limit: 50}, Want: true})
		}
		before := c.looked
		for range events {
			now = now.Add(time.Microsecond)
			c.Step(now, Tick{})
		}
		if passes := float64(c.looked-before) / float64(events*n); passes < 1 || passes > 3 {
			t.Errorf("a Step looks at each of %d tenants with limits %.1f times, want between 1 and 3", n, passes)
		}
		before = c.looked
		at, _ := c.Deadline()
		c.Step(at.Add(time.Millisecond), Tick{})
		if passes := float64(c.looked-before) / float64(n); c.counters.Revokes != uint64(n) || passes > 10 {
			t.Errorf("%d of %d tenants reach their limits at the same time: the Step looks at each %.1f times, want at most 10", c.counters.Revokes, n, passes)
		}
	}
}

// The Step that judges a window of slices looks at each client and tenant a few times.
func TestWorkOfAWindow(t *testing.T) {
	for _, tenants := range []int{50, 500} {
		for _, n := range []int{100, 500} {
			s := newSliced(t, n, min(n, tenants))
			most, windows, looked := 0.0, 0, 0
			s.saw = func(_ base.Event, _ time.Duration, looks uint64) {
				per := float64(looks) / float64(n)
				most = max(most, per)
				looked += int(looks)
				if per > 5 {
					windows++
				}
			}
			const d = 10 * time.Second
			s.run(d)
			if most > 30 || windows == 0 {
				t.Errorf("%d clients of %d tenants: a Step looks at each client %.1f times at most, in %d windows", n, tenants, most, windows)
			}
			// And once a second at who can be sliced.
			if per := float64(looked) / float64(n) / d.Seconds(); per > 20 {
				t.Errorf("%d clients of %d tenants: each is looked at %.1f times a second", n, tenants, per)
			}
		}
	}
}

// BenchmarkStepBySlices is an event of one of many clients that share by slices.
func BenchmarkStepBySlices(b *testing.B) {
	for _, n := range benchClients(10, 100, 1000, 2000) {
		for name, hostile := range hostileBySlices {
			b.Run(fmt.Sprintf("%s/clients=%d", name, n), func(b *testing.B) {
				s := newSliced(b, n, 50)
				for i := 0; b.Loop(); i++ {
					s.now = s.now.Add(time.Microsecond)
					s.c.Step(s.now, hostile.event(i))
				}
			})
		}
	}
}

// BenchmarkLongestStepBySlices reports the longest Step of 30 s in which all share by slices, and of
// those with which they begin and end, in which each client is granted or revoked. All rounds have
// the same Steps, and each Step counts as in the round in which it was shortest: what else runs on
// the machine is left out.
func BenchmarkLongestStepBySlices(b *testing.B) {
	for _, n := range benchClients(100, 500, 1000, 2000) {
		for _, tenants := range []int{100, n} {
			b.Run(fmt.Sprintf("clients=%d/tenants=%d", n, tenants), func(b *testing.B) {
				var took []time.Duration
				var changes []bool
				for b.Loop() {
					s := newSliced(b, n, tenants)
					i, was := 0, true
					s.saw = func(_ base.Event, d time.Duration, _ uint64) {
						if i == len(took) {
							took, changes = append(took, d), append(changes, s.c.sliced() != was)
						}
						took[i] = min(took[i], d)
						i, was = i+1, s.c.sliced()
					}
					s.run(30 * time.Second)
				}
				longest := map[bool]time.Duration{}
				for i, d := range took {
					longest[changes[i]] = max(longest[changes[i]], d)
				}
				b.ReportMetric(float64(longest[false].Microseconds()), "longest-µs")
				b.ReportMetric(float64(longest[true].Microseconds()), "begins-or-ends-µs")
			})
		}
	}
}
