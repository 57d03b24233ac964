// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
	"pgregory.net/rapid"
)

const (
	maxTestQuantum = 100 * time.Millisecond
	maxTestGrace   = 300 * time.Millisecond
)

// history judges a core from the outside: by its events and actions alone.
type history struct {
	epoch     base.Epoch          // of the latest grant
	used      map[base.Epoch]bool // by grants
	persisted Persist             // as a restart would find it
	live      map[base.ClientID]*liveGrant
	shares    map[base.ClientID]Share
	mode      Mode // in effect
}

// liveGrant is a grant that was given and not released, nor its client dead or
// fenced.
type liveGrant struct {
	epoch   base.Epoch
	latency bool
	beside  bool // and shuts nobody's gate
	shared  bool // one of a cohort
	open    bool // gate
	revoked bool
}

func (h *history) of(id base.ClientID) liveGrant {
	if g := h.live[id]; g != nil {
		return *g
	}
	return liveGrant{}
}

// batch returns the clients, but one, that have an exclusive grant.
func (h *history) batch(except base.ClientID) (ids []base.ClientID) {
	for id, g := range h.live {
		if id != except && !g.latency {
			ids = append(ids, id)
		}
	}
	return ids
}

// unshared returns those of the clients whose grant is not one of a cohort.
func (h *history) unshared(ids []base.ClientID) []base.ClientID {
	return slices.DeleteFunc(ids, func(id base.ClientID) bool { return h.live[id].shared })
}

// busy returns the clients beside which no exclusive grant may be given: all but
// latency ones that drain.
func (h *history) busy() []base.ClientID {
	ids := h.batch(0)
	for id, g := range h.live {
		if g.latency && !g.beside && g.open {
			ids = append(ids, id)
		}
	}
	return ids
}

// saw takes note of an event and the actions that answered it.
func (h *history) saw(ev base.Event, acts []base.Action) error {
	switch ev := ev.(type) {
	case Release:
		if h.of(ev.Client).epoch == ev.Epoch {
			delete(h.live, ev.Client)
		}
	case Gone:
		delete(h.live, ev.Client)
	case Exec: // without a connection: nothing is left of the earlier program's work
		if slices.ContainsFunc(acts, func(a base.Action) bool { r, ok := a.(Released); return ok && r.Client == ev.Client }) {
			delete(h.live, ev.Client)
		}
	case Attach:
		h.shares[ev.Client] = ev.Share
		if h.of(ev.Client).epoch != ev.Held {
			delete(h.live, ev.Client) // by its own word it does not hold that
		} else if g := h.live[ev.Client]; g != nil {
			g.open = false // its new page says nothing yet
		}
	}
	attach, _ := ev.(Attach)
	first := true // except the room on the new page
	for _, a := range acts {
		if _, ok := a.(Adopt); ok && !first {
			return fmt.Errorf("%v is not the first of %v", base.Text(a), acts)
		}
		if r, ok := a.(residency.Room); !ok || r.Client != attach.Client {
			first = false
		}
		switch a := a.(type) {
		case Persist:
			h.persisted = a
		case Fence:
			delete(h.live, a.Client)
		case ModeChosen:
			h.mode = a.Mode
			for _, g := range h.live {
				g.latency = g.latency && (!g.beside || g.revoked || h.mode != Concurrent) // else it is one like others from now on
			}
		case Pause:
			h.live[a.Client].open = false
		case Revoke:
			g := h.live[a.Client]
			g.open, g.revoked = false, true
		case Slice:
			if a.D != 0 && (a.D < LatencySlice || a.D > timeslice.MaxSlice) {
				return fmt.Errorf("%v", base.Text(a))
			}
		case Close:
			if g := h.live[a.Client]; g != nil {
				g.open = false
			}
		case Resume:
			if g := h.of(a.Client); g.epoch != a.Epoch || g.open {
				return fmt.Errorf("%v of %+v", base.Text(a), g)
			}
			h.live[a.Client].open = true
		case Grant:
			if err := h.granted(a); err != nil {
				return err
			}
		case Adopt:
			g := h.live[a.Client]
			if g == nil || g.epoch != a.Epoch {
				return fmt.Errorf("%v of %+v", base.Text(a), g)
			}
			g.latency = h.mode == Exclusive && (g.latency || h.shares[a.Client].Priority == Latency)
			g.open, g.beside, g.shared = true, false, a.Shared
			others := h.batch(a.Client)
			if g.shared {
				others = h.unshared(others)
			}
			if h.mode == Exclusive && !g.latency && len(others) > 0 {
				return fmt.Errorf("%v while these hold: %v", base.Text(a), others)
			}
		}
	}
	return nil
}

func (h *history) granted(a Grant) error {
	switch {
	case h.used[a.Epoch]:
		return fmt.Errorf("%v, again", base.Text(a))
	case uint32(a.Epoch) == 0 || uint32(a.Epoch) == 0xffffffff:
		return fmt.Errorf("%v uses a reserved word", base.Text(a))
	case a.Concurrent != (a.Latency || a.Beside || h.mode == Concurrent), (a.Latency || a.Beside) && h.mode != Exclusive, a.Latency && a.Beside:
		return fmt.Errorf("%v in %v mode", base.Text(a), h.mode)
	case a.Shared && (a.Concurrent || len(h.unshared(h.busy())) > 0), !a.Concurrent && !a.Shared && len(h.busy()) > 0:
		return fmt.Errorf("%v while these hold: %v", base.Text(a), h.busy())
	case h.live[a.Client] != nil:
		return fmt.Errorf("%v to one that holds epoch %d", base.Text(a), h.live[a.Client].epoch)
	case a.Beside: // may be recorded afterwards
	case a.Latency: // the same
		for id, g := range h.live {
			if g.open && !g.latency {
				return fmt.Errorf("%v while the gate of client %d is open", base.Text(a), id)
			}
		}
	case h.persisted.Epoch < a.Epoch:
		return fmt.Errorf("%v before epoch %d was persisted", base.Text(a), a.Epoch)
	case !h.persisted.Unrecorded && !slices.ContainsFunc(h.persisted.Holders[:], func(o Holder) bool { return o.Client == a.Client && o.Epoch == a.Epoch }):
		return fmt.Errorf("%v, but %v", base.Text(a), h.persisted)
	}
	h.used[a.Epoch] = true
	h.epoch = max(h.epoch, a.Epoch)
	h.live[a.Client] = &liveGrant{epoch: a.Epoch, latency: a.Latency || a.Beside, beside: a.Beside, shared: a.Shared, open: true}
	return nil
}

// TestAnyHistory drives a core with arbitrary events, those that no honest
// caller sends included, and checks safety after each and liveness at the end.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		durations := rapid.Int64Range(int64(MinQuantum), int64(maxTestQuantum))
		graces := rapid.Int64Range(int64(MinGrace), int64(maxTestGrace))
		modes := rapid.SampledFrom([]Mode{Exclusive, Exclusive, Concurrent, Auto})
		cfg := Config{
			Tuning: account.Tuning{
				Window:    time.Duration(rapid.IntRange(0, 1000).Draw(t, "window")) * time.Millisecond,
				DropCarry: rapid.IntRange(0, 100).Draw(t, "dropcarry"),
				DropTail:  rapid.IntRange(0, 100).Draw(t, "droptail"),
			},
			Quantum:   time.Duration(durations.Draw(t, "quantum")),
			Grace:     time.Duration(graces.Draw(t, "grace")),
			Mode:      modes.Draw(t, "mode"),
			LastEpoch: base.Epoch(rapid.SampledFrom([]uint64{0, 7, 0xfffffffc - unrecorded}).Draw(t, "last epoch")),
		}
		cfg.Way = rapid.SampledFrom([]Way{WayTurns, WaySlices, WayCohort, WayDriver}).Draw(t, "way")
		cfg.SwapShare = rapid.SampledFrom([]int{0, 10, 50}).Draw(t, "swap share")
		cfg.Memory = residency.Config{Swap: rapid.Bool().Draw(t, "swap"), Capacity: 100, Physical: rapid.Uint64Range(100, 110).Draw(t, "physical"), StallAfter: time.Duration(graces.Draw(t, "stall after")),
			Ceiling: rapid.SampledFrom([]uint64{0, 0, 90}).Draw(t, "ceiling")}
		bytes := rapid.OneOf(rapid.Uint64Range(0, 60), rapid.Uint64Range(0, 120), rapid.SampledFrom([]uint64{1 << 63, ^uint64(0)}))
		plain := rapid.Bool().Draw(t, "without shares")
		long := !plain && rapid.Bool().Draw(t, "for a while") // ways to share change in seconds
		c := New(cfg)
		h := &history{epoch: cfg.LastEpoch, used: map[base.Epoch]bool{}, live: map[base.ClientID]*liveGrant{}, shares: map[base.ClientID]Share{}}
		h.mode = c.Snapshot(0).Effective
		var now base.Time
		step := func(ev base.Event) {
			acts := c.Step(now, ev)
			t.Logf("%v %v -> %v", time.Duration(now), base.Text(ev), acts)
			if err := h.saw(ev, acts); err != nil {
				t.Fatal(err)
			}
			if err := c.Check(); err != nil {
				t.Fatalf("after %v: %v", base.Text(ev), err)
			}
		}
		for i := range rapid.IntRange(0, 3).Draw(t, "restored") {
			r := Restore{Client: base.ClientID(i + 1), Epoch: cfg.LastEpoch + base.Epoch(i) + 1}
			r.Shared = cfg.Mode == Auto && cfg.Way == WayCohort && rapid.Bool().Draw(t, "shared")
			h.live[r.Client] = &liveGrant{epoch: r.Epoch, shared: r.Shared}
			h.epoch = r.Epoch
			h.used[r.Epoch] = true
			h.persisted.Epoch = r.Epoch
			h.persisted.Holders[i] = Holder{r.Client, r.Epoch, r.Shared}
			step(r)
		}

		shares := rapid.Custom(func(t *rapid.T) Share {
			s := Share{
				Limit:    rapid.SampledFrom([]int{0, 0, 5, 50, 100}).Draw(t, "limit"),
				Request:  rapid.SampledFrom([]int{0, 0, 30, 100}).Draw(t, "request"),
				Weight:   rapid.SampledFrom([]int{0, 0, 50, 300}).Draw(t, "weight"),
				Priority: rapid.SampledFrom([]Priority{Batch, Batch, Latency}).Draw(t, "priority"),
			}
			if plain {
				return Share{}
			}
			return s
		})
		calls := rapid.SampledFrom([]uint64{0, 1, 100, 1 << 40})
		events := rapid.Custom(func(t *rapid.T) base.Event {
			id := base.ClientID(rapid.IntRange(1, 6).Draw(t, "client"))
			tenant := fmt.Sprint("t", id%3)
			if plain || id == 6 {
				tenant = ""
			}
			// An epoch that is likely to mean something.
			epoch := func() base.Epoch {
				own := h.of(id).epoch
				return rapid.SampledFrom([]base.Epoch{0, own, own, own, h.epoch, h.epoch + 5, 3}).Draw(t, "epoch")
			}
			switch rapid.IntRange(0, 31).Draw(t, "kind") {
			case 0, 1, 2:
				return Attach{id, tenant, shares.Draw(t, "share"), epoch(), rapid.Bool().Draw(t, "want"), rapid.IntRange(0, 3).Draw(t, "can move") > 0, rapid.Bool().Draw(t, "again"), rapid.Bool().Draw(t, "cut")}
			case 3, 4, 5, 6, 7:
				return Request{id}
			case 8, 9, 10, 11:
				return Release{id, epoch(), Reason(rapid.IntRange(1, 3).Draw(t, "reason")), rapid.Bool().Draw(t, "preempted"), calls.Draw(t, "calls")}
			case 12, 13:
				return Lost{id}
			case 14:
				return Gone{id}
			case 15:
				return SetQuantum{time.Duration(durations.Draw(t, "quantum"))}
			case 16:
				return HeldOn{id, time.Duration(durations.Draw(t, "late"))}
			case 17:
				return SetMode{modes.Draw(t, "mode")}
			case 18:
				return SetShare{tenant, shares.Draw(t, "share")}
			case 19:
				return rapid.SampledFrom([]base.Event{
					residency.SetTenantMemory{Tenant: tenant, Limit: bytes.Draw(t, "limit"), Keep: residency.Keep(rapid.IntRange(0, 2).Draw(t, "keep")), SuspendAfter: time.Duration(rapid.IntRange(-1, 3).Draw(t, "idle time")) * time.Second},
					residency.SetGPUMemory{Swap: &residency.Config{Swap: true, Capacity: bytes.Draw(t, "capacity")}}, residency.ArenaChanged{Client: id, Bytes: bytes.Draw(t, "arena")}, Exec{id}, Suspend{tenant}, ResumeTenant{tenant}, Called{id},
					residency.RestoreMemory{Client: id, Tenant: tenant, CanMove: rapid.Bool().Draw(t, "can move"), Bytes: bytes.Draw(t, "bytes"), Suspended: rapid.Bool().Draw(t, "suspended")},
				}).Draw(t, "memory")
			case 21, 26:
				return residency.Reserve{Client: id, Total: bytes.Draw(t, "total"), Least: bytes.Draw(t, "least"), Force: rapid.IntRange(0, 3).Draw(t, "force") == 0, Serial: 1}
			case 22, 23, 24:
				is := func(what string) bool { return rapid.IntRange(0, 2).Draw(t, what) == 0 }
				r := residency.Report{Resident: bytes.Draw(t, "resident"), Fixed: bytes.Draw(t, "fixed"), Away: bytes.Draw(t, "away"), Arena: bytes.Draw(t, "arena"), Out: bytes.Draw(t, "out"), In: bytes.Draw(t, "in")}
				return residency.Moved{Client: id, Epoch: epoch(), Report: r, Ready: is("ready"), Stuck: is("stuck"), NoMemory: is("no memory"), NoArena: is("no arena")}
			case 25:
				return SetSwapShare{rapid.IntRange(0, 60).Draw(t, "share")}
			case 27, 28:
				n := rapid.IntRange(-1, 1000).Draw(t, "samples")
				return timeslice.Utilization{Client: id, Samples: n, Busy: rapid.IntRange(0, max(n, 0)).Draw(t, "busy"), Calls: int(uint32(calls.Draw(t, "calls")))}
			case 29, 30:
				controls := rapid.SampledFrom([]Control{ControlWorks, ControlWorks, ControlWorks, ControlRefused, ControlUntried})
				return Controls{id, controls.Draw(t, "slices"), controls.Draw(t, "channels"), 1, rapid.IntRange(-8, 1).Draw(t, "bare"), ""}
			}
			return Tick{}
		})
		if !plain && cfg.Mode == Auto && !cfg.Memory.Swap && rapid.Bool().Draw(t, "in a cohort") {
			intoCohort(t, c, &now, step)
			switch s := (Share{Priority: Latency}); rapid.IntRange(0, 2).Draw(t, "beside the cohort") {
			case 1:
				step(Attach{Client: 6, Share: s, Want: true})
				if c.beside.n == 0 || !c.cohort.on {
					t.Fatalf("a latency tenant does not run beside the cohort: %v", c.auto.cause)
				}
			case 2:
				s.Limit = 30
				step(Attach{Client: 6, Share: s, Want: true})
				if c.latency.n == 0 || c.open.head.grant.state != paused || !c.cohort.on {
					t.Fatalf("a latency tenant is not let in before the cohort: %v", c.auto.cause)
				}
			}
		}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch at, ok := c.Deadline(); {
			case ok && rapid.IntRange(0, 3).Draw(t, "to the deadline") == 0:
				now = at
			default:
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(20*time.Millisecond)).Draw(t, "pause")))
				if long && rapid.IntRange(0, 5).Draw(t, "a while") == 0 {
					now = now.Add(time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "long pause")))
				}
				if long && rapid.IntRange(0, 50).Draw(t, "a minute") == 0 { // in which work that was cut is waited for
					for end := now.Add(61 * time.Second); ; step(Tick{}) {
						at, ok := c.Deadline()
						if !ok || at > end {
							break
						}
						now = at
					}
				}
			}
			step(events.Draw(t, "event"))
		}
		if plain {
			nobodyActs(t, c, &now, step)
		} else {
			allRelease(t, c, &now, step)
		}
	})
}

// intoCohort goes on until clients have a turn together beside a tenant with a limit.
func intoCohort(t *rapid.T, c *GPU, now *base.Time, step func(base.Event)) {
	for id := base.ClientID(1); id <= 5; id++ {
		share := Share{}
		if id%3 == 1 {
			share.Limit = 30
		}
		step(Attach{Client: id, Tenant: fmt.Sprint("t", id%3), Share: share, Want: true})
		step(Controls{Client: id, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	}
	for end := now.Add(time.Minute); c.open.n < 2; {
		if *now > end {
			t.Fatalf("no cohort after a minute: %v", c.auto.cause)
		}
		*now = now.Add(time.Millisecond)
		step(Tick{})
		for _, cl := range c.inOrder() {
			if cl.grant != nil && cl.grant.state == draining {
				step(Release{Client: cl.id, Epoch: cl.grant.epoch, Reason: Revoked, Calls: 10})
				step(Request{cl.id})
			}
		}
	}
}

// nobodyActs goes on without any more events: every client keeps what it gets
// until it is fenced. The k-th in the queue has its grant after k times a turn
// and a grace period, or two where memory does not get onto the GPU.
func nobodyActs(t *rapid.T, c *GPU, now *base.Time, step func(base.Event)) {
	start := *now
	queue := c.Snapshot(start).Queue
	// Some of them move memory and do not get on; turns after a move are longer.
	var stretch, away time.Duration
	for _, tn := range c.tenants {
		stretch = max(stretch, tn.stretch)
		away = max(away, tn.notBefore.Sub(start))
	}
	stretch = max(stretch, c.owedUntil.Sub(start))
	granted := map[base.ClientID]base.Time{}
	for {
		if _, ok := c.due(); !ok {
			break
		}
		at, _ := c.Deadline()
		*now = at
		before := c.Snapshot(at).Counters.Grants
		step(Tick{})
		if s := c.Snapshot(at); s.Counters.Grants > before {
			for _, id := range s.Holders {
				if _, ok := granted[id]; !ok {
					granted[id] = at
				}
			}
		}
	}
	for k, id := range queue {
		at, ok := granted[id]
		if bound := start.Add(away + time.Duration(k+1)*(2*maxTestQuantum+2*maxTestGrace+stretch)); !ok || at > bound {
			t.Fatalf("client %d waited at %v as number %d; granted: %t, at %v, bound %v", id, start, k+1, ok, at, bound)
		}
	}
	if q := c.Snapshot(*now).Queue; len(q) != 0 {
		t.Fatalf("these wait for ever: %v", q)
	}
}

// allRelease goes on with clients that release what is asked back, and want
// nothing more; those that are fenced end. Whatever they owe, all that wait get
// their grant: within the time in which six clients that had the GPU all the time
// repay that by a limit of 5 %, and as long as moves may make tenants wait.
func allRelease(t *rapid.T, c *GPU, now *base.Time, step func(base.Event)) {
	const most, least = 6, 5 // clients, percent
	bound := now.Add(time.Duration(*now)*most*100/least + most*2*maxStretch)
	for {
		s := c.Snapshot(*now)
		if len(s.Queue) == 0 {
			return
		}
		for _, cl := range s.Clients {
			switch cl.State {
			case StateDraining, StateHolding:
				step(Release{Client: cl.ID, Epoch: cl.Epoch, Reason: Revoked})
			case StateFenced, StateLost:
				step(Gone{cl.ID})
			}
		}
		if *now > bound {
			t.Fatalf("these still wait at %v: %v", time.Duration(*now), s.Queue)
		}
		at, ok := c.Deadline()
		if !ok {
			at = now.Add(time.Millisecond)
		}
		*now = at
		step(Tick{})
	}
}

// TestSameEventsSameActions holds a core to its word that it depends on
// nothing else, such as the order of a map.
func TestSameEventsSameActions(t *testing.T) {
	run := func() string {
		c := New(Config{Mode: Concurrent})
		out := ""
		step := func(now base.Time, ev base.Event) { out += fmt.Sprintln(c.Step(now, ev)) }
		for i := base.ClientID(1); i <= 50; i++ {
			step(base.Time(i), Attach{Client: i, Want: true})
		}
		for i := base.ClientID(1); i <= 50; i += 3 {
			step(100, Lost{i})
		}
		step(200, SetMode{Exclusive})
		for _, ok := c.due(); ok; _, ok = c.due() {
			at, _ := c.Deadline()
			step(at, Tick{})
		}
		return out + fmt.Sprintf("%+v", c.Snapshot(1000))
	}
	first := run()
	for range 5 {
		if again := run(); again != first {
			t.Fatalf("two runs differ:\n%s\n%s", first, again)
		}
	}
}

// BenchmarkStep shows that a step costs O(log n): ten times the clients add a
// few levels of a heap. Each client is a tenant, so n is that of the heap too.
func BenchmarkStep(b *testing.B) {
	for _, n := range []int{100, 1000, 10_000} {
		b.Run(fmt.Sprintf("clients=%d", n), func(b *testing.B) {
			c := New(Config{})
			for i := range n {
				c.Step(0, Attach{Client: base.ClientID(i + 1), Tenant: fmt.Sprint(i), Share: Share{Weight: 50 + i%100}, Want: true})
			}
			// A whole turn is three steps: the quantum ends, the holder asks
			// again, the holder releases.
			now := base.Time(0)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				holder := c.open.head
				if holder == nil {
					holder = c.closing.head
				}
				switch i % 3 {
				case 0:
					now, _ = c.Deadline()
					c.Step(now, Tick{})
				case 1:
					c.Step(now, Request{holder.id})
				case 2:
					c.Step(now, Release{Client: holder.id, Epoch: holder.grant.epoch, Reason: Revoked})
				}
			}
			if got := c.counters; got.Grants < uint64(b.N)/3 {
				b.Fatalf("%d steps made only %d grants", b.N, got.Grants)
			}
		})
	}
}

// A latency tenant whose grant beside others was asked back drains beside them, whatever the mode is meanwhile.
func TestBesideDrainsInAnyMode(t *testing.T) {
	c := New(Config{Mode: Auto, Quantum: time.Millisecond, Grace: time.Millisecond})
	h := &history{used: map[base.Epoch]bool{}, live: map[base.ClientID]*liveGrant{}, shares: map[base.ClientID]Share{}, mode: c.Snapshot(0).Effective}
	now := base.Time(0)
	step := func(ev base.Event) {
		if err := h.saw(ev, c.Step(now, ev)); err != nil {
			t.Fatalf("%v: %v", base.Text(ev), err)
		}
	}
	step(Attach{Client: 1, Tenant: "t1"})
	step(Attach{Client: 2, Tenant: "t2", Held: 1})
	now = base.Time(time.Millisecond) // its claim is fenced
	step(Tick{})
	step(Attach{Client: 5, Tenant: "t2", Share: Share{Priority: Latency}, Want: true})
	if c.beside.n != 1 {
		t.Fatal("nobody runs beside others")
	}
	step(Request{2})
	now = base.Time(time.Second)
	step(Attach{Client: 2, Tenant: "t2", Want: true})
	step(SetMode{Concurrent})
	step(Request{2})
	step(SetMode{Exclusive})
	before := c.Snapshot(now).Counters.Grants
	step(Release{Client: 2, Epoch: c.clients[2].grant.epoch, Reason: Revoked})
	if c.Snapshot(now).Counters.Grants == before || c.clients[5].grant == nil {
		t.Error("nobody was granted while it drained")
	}
}
