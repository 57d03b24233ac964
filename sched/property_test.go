// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const (
	maxTestQuantum = 100 * time.Millisecond
	maxTestGrace   = 300 * time.Millisecond
)

// history judges a core from the outside: by its events and actions alone.
type history struct {
	epoch     Epoch              // of the latest grant
	persisted Persist            // as a restart would find it
	live      map[ClientID]Epoch // gate opened, not released, dead or fenced
	mode      Mode
}

// saw takes note of an event and the actions that answered it.
func (h *history) saw(ev Event, acts []Action) error {
	switch ev := ev.(type) {
	case Release:
		if h.live[ev.Client] == ev.Epoch {
			delete(h.live, ev.Client)
		}
	case Gone:
		delete(h.live, ev.Client)
	case Attach:
		if h.live[ev.Client] != ev.Held {
			delete(h.live, ev.Client) // by its own word it does not hold that
		}
	case SetMode:
		h.mode = ev.M
	}
	for i, a := range acts {
		if _, ok := a.(Adopt); ok && i > 0 {
			return fmt.Errorf("%v is not the first of %v", a, acts)
		}
		switch a := a.(type) {
		case Persist:
			h.persisted = a
		case Fence:
			delete(h.live, a.Client)
		case Grant:
			switch {
			case a.Epoch <= h.epoch:
				return fmt.Errorf("%v after epoch %d", a, h.epoch)
			case uint32(a.Epoch) == 0 || uint32(a.Epoch) == 0xffffffff:
				return fmt.Errorf("%v uses a reserved word", a)
			case a.Concurrent != (h.mode == Concurrent):
				return fmt.Errorf("%v in %v mode", a, h.mode)
			case !a.Concurrent && len(h.live) > 0:
				return fmt.Errorf("%v while these hold: %v", a, h.live)
			case h.live[a.Client] != 0:
				return fmt.Errorf("%v to one that holds epoch %d", a, h.live[a.Client])
			case h.persisted.Epoch < a.Epoch:
				return fmt.Errorf("%v before epoch %d was persisted", a, a.Epoch)
			case !h.persisted.Unrecorded && !slices.Contains(h.persisted.Holders[:], Holder{a.Client, a.Epoch}):
				return fmt.Errorf("%v, but %v", a, h.persisted)
			}
			h.epoch = a.Epoch
			h.live[a.Client] = a.Epoch
		case Adopt:
			if h.mode == Exclusive && (len(h.live) != 1 || h.live[a.Client] != a.Epoch) {
				return fmt.Errorf("%v while these hold: %v", a, h.live)
			}
		}
	}
	return nil
}

// TestAnyHistory drives a core with arbitrary events, those that no honest
// caller sends included, and checks safety after each and liveness at the end.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		durations := rapid.Int64Range(int64(MinQuantum), int64(maxTestQuantum))
		graces := rapid.Int64Range(int64(MinGrace), int64(maxTestGrace))
		cfg := Config{
			Quantum:   time.Duration(durations.Draw(t, "quantum")),
			Grace:     time.Duration(graces.Draw(t, "grace")),
			Mode:      Mode(rapid.IntRange(0, 1).Draw(t, "mode")),
			LastEpoch: Epoch(rapid.SampledFrom([]uint64{0, 7, 0xfffffffc}).Draw(t, "last epoch")),
		}
		c := New(cfg)
		h := &history{epoch: cfg.LastEpoch, mode: cfg.Mode, live: map[ClientID]Epoch{}}
		var now Time
		step := func(ev Event) {
			acts := c.Step(now, ev)
			t.Logf("%v %v -> %v", time.Duration(now), ev, acts)
			if err := h.saw(ev, acts); err != nil {
				t.Fatal(err)
			}
			if err := c.Check(); err != nil {
				t.Fatalf("after %v: %v", ev, err)
			}
		}
		if rapid.Bool().Draw(t, "restored") {
			r := Restore{Client: ClientID(rapid.IntRange(0, 2).Draw(t, "holder")), Epoch: cfg.LastEpoch + 1}
			if r.Client != 0 && cfg.Mode == Exclusive {
				h.live[r.Client] = r.Epoch
			}
			h.epoch = r.Epoch
			h.persisted = Persist{Epoch: r.Epoch, Holders: [MaxRecorded]Holder{{r.Client, r.Epoch}}}
			step(r)
		}

		events := rapid.Custom(func(t *rapid.T) Event {
			id := ClientID(rapid.IntRange(1, 6).Draw(t, "client"))
			// An epoch that is likely to mean something.
			epoch := func() Epoch {
				return rapid.SampledFrom([]Epoch{0, h.live[id], h.live[id], h.live[id], h.epoch, h.epoch + 5, 3}).Draw(t, "epoch")
			}
			switch rapid.IntRange(0, 19).Draw(t, "kind") {
			case 0, 1, 2:
				return Attach{Client: id, Held: epoch(), Want: rapid.Bool().Draw(t, "want")}
			case 3, 4, 5, 6, 7:
				return Request{id}
			case 8, 9, 10, 11:
				return Release{id, epoch(), Reason(rapid.IntRange(1, 3).Draw(t, "reason"))}
			case 12, 13:
				return Lost{id}
			case 14:
				return Gone{id}
			case 15:
				return SetQuantum{time.Duration(durations.Draw(t, "quantum"))}
			case 16:
				return SetGrace{time.Duration(graces.Draw(t, "grace"))}
			case 17:
				return SetMode{Mode(rapid.IntRange(0, 1).Draw(t, "mode"))}
			}
			return Tick{}
		})
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch at, ok := c.Deadline(); {
			case ok && rapid.IntRange(0, 3).Draw(t, "to the deadline") == 0:
				now = at
			default:
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(20*time.Millisecond)).Draw(t, "pause")))
			}
			step(events.Draw(t, "event"))
		}

		// From here on nobody does anything: every client keeps what it gets
		// until it is fenced. The k-th in the queue has its grant after k times
		// quantum and grace.
		start := now
		queue := c.Snapshot(now).Queue
		granted := map[ClientID]Time{}
		for {
			at, ok := c.Deadline()
			if !ok {
				break
			}
			now = at
			before := c.Snapshot(now).Counters.Grants
			step(Tick{})
			if s := c.Snapshot(now); s.Counters.Grants > before {
				granted[s.Holders[0]] = now
			}
		}
		for k, id := range queue {
			at, ok := granted[id]
			if bound := start.Add(time.Duration(k+1) * (maxTestQuantum + maxTestGrace)); !ok || at > bound {
				t.Fatalf("client %d waited at %v as number %d; granted: %t, at %v, bound %v", id, start, k+1, ok, at, bound)
			}
		}
		if q := c.Snapshot(now).Queue; len(q) != 0 {
			t.Fatalf("these wait for ever: %v", q)
		}
	})
}

// TestSameEventsSameActions holds a core to its word that it depends on
// nothing else, such as the order of a map.
func TestSameEventsSameActions(t *testing.T) {
	run := func() string {
		c := New(Config{Mode: Concurrent})
		out := ""
		step := func(now Time, ev Event) { out += fmt.Sprintln(c.Step(now, ev)) }
		for i := ClientID(1); i <= 50; i++ {
			step(Time(i), Attach{Client: i, Want: true})
		}
		for i := ClientID(1); i <= 50; i += 3 {
			step(100, Lost{i})
		}
		step(200, SetMode{Exclusive})
		for at, ok := c.Deadline(); ok; at, ok = c.Deadline() {
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
				c.Step(0, Attach{Client: ClientID(i + 1), Tenant: fmt.Sprint(i), Share: Share{Weight: 50 + i%100}, Want: true})
			}
			// A whole turn is three steps: the quantum ends, the holder asks
			// again, the holder releases.
			now := Time(0)
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
					c.Step(now, Release{holder.id, holder.epoch, Revoked})
				}
			}
			if got := c.counters; got.Grants < uint64(b.N)/3 {
				b.Fatalf("%d steps made only %d grants", b.N, got.Grants)
			}
		})
	}
}
