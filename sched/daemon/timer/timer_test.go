// SPDX-License-Identifier: Apache-2.0

package timer

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/nvshare/nvshare/sched/base"
)

func TestList(t *testing.T) {
	var l List
	if _, ok := l.Next(); ok {
		t.Error("an empty list has a time")
	}
	var none *Timer
	if none.Stop(); none.Planned() {
		t.Error("a nil timer is planned")
	}
	var done []string
	note := func(name string) func() { return func() { done = append(done, name) } }
	a, b, c := l.New(note("a")), l.New(note("b")), l.New(note("c"))
	expect := func(what string, now base.Time, want ...string) {
		t.Helper()
		done = nil
		if l.Run(now); !slices.Equal(done, want) {
			t.Errorf("%s: did %v, want %v", what, done, want)
		}
	}
	a.Set(30)
	b.Set(10)
	c.Set(20)
	if at, ok := l.Next(); !ok || at != 10 {
		t.Errorf("next at %d, %v", at, ok)
	}
	expect("too early", 9)
	expect("in order", 25, "b", "c")
	expect("once", 25)
	if at, ok := l.Next(); !ok || at != 30 || !a.Planned() || b.Planned() {
		t.Errorf("next at %d, %v; a planned %v, b planned %v", at, ok, a.Planned(), b.Planned())
	}
	a.Set(40) // later
	expect("moved", 39)
	b.Set(35)
	b.Set(50)
	c.Set(45)
	c.Stop()
	c.Stop()
	expect("stopped", 49, "a")
	expect("the last one", 50, "b")
	if _, ok := l.Next(); ok {
		t.Error("something is left")
	}
}

// What a timer does may set it again, set others and stop others.
func TestTimersSetTimers(t *testing.T) {
	var l List
	times := 0
	var again, victim *Timer
	again = l.New(func() {
		times++
		again.Set(1)
		victim.Stop()
	})
	victim = l.New(func() { t.Error("it was stopped") })
	again.Set(1)
	victim.Set(2)
	l.Run(3)
	if times != 1 {
		t.Fatalf("ran %d times", times)
	}
	if at, ok := l.Next(); !ok || at != 1 {
		t.Errorf("next at %d, %v", at, ok)
	}
	l.Run(3)
	if times != 2 {
		t.Errorf("ran %d times", times)
	}
	later := false
	again.Stop()
	put := l.New(func() { victim.Set(100) })
	victim = l.New(func() { later = true })
	put.Set(5)
	victim.Set(5)
	put.Set(4)
	if l.Run(6); later {
		t.Error("it was put off, and ran")
	}
}

// Against a list that is searched from end to end.
func TestListIsRight(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var l List
	want := map[int]base.Time{}
	var timers []*Timer
	now := base.Time(0)
	for i := range 20 {
		timers = append(timers, l.New(func() {
			if at, ok := want[i]; !ok || at > now {
				t.Errorf("timer %d at %d runs at %d", i, at, now)
			}
			delete(want, i)
		}))
	}
	for range 10000 {
		switch i := rnd.IntN(len(timers)); rnd.IntN(4) {
		case 0, 1:
			at := now + base.Time(rnd.IntN(100))
			timers[i].Set(at)
			want[i] = at
		case 2:
			timers[i].Stop()
			delete(want, i)
		case 3:
			now += base.Time(rnd.IntN(20))
			l.Run(now)
		}
		earliest, has := base.Time(0), false
		for _, at := range want {
			if !has || at < earliest {
				earliest, has = at, true
			}
		}
		if at, ok := l.Next(); ok != has || at != earliest {
			t.Fatalf("next at %d, %v; want %d, %v", at, ok, earliest, has)
		}
	}
}

// BenchmarkTurn is what each turn of the daemon's loop does: it plans what eight GPUs do next, and
// asks when to wake up. There is a timer for each of 8,000 processes.
func BenchmarkTurn(b *testing.B) {
	var l List
	for i := range 8000 {
		l.New(func() {}).Set(base.Time(1000 + i))
	}
	var gpus [8]*Timer
	for i := range gpus {
		gpus[i] = l.New(func() {})
	}
	at := base.Time(0)
	for b.Loop() {
		at++
		for _, g := range gpus {
			g.Set(at)
		}
		l.Next()
	}
}
