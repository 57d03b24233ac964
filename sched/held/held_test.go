// SPDX-License-Identifier: Apache-2.0

package held

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// run switches as an Account says, and each switch takes some time; it returns for how long
// they were on, from their first time off, and the longest time off.
func run(t *rapid.T, a *Account, length time.Duration, most time.Duration, others int) (on, span, longest time.Duration) {
	const none = -1
	var now, onSince, offSince, first time.Duration = 0, 0, none, none
	for now < length {
		want, until := a.Step(now)
		took := time.Duration(rapid.Int64Range(0, int64(most)).Draw(t, "took"))
		switch {
		case want && offSince != none:
			longest = max(longest, now-offSince)
			onSince, offSince = now, none
		case !want && offSince == none:
			now += took
			a.IsOff(now)
			if first == none {
				first = now
			} else {
				on += now - onSince
			}
			offSince = now
		}
		if others > 0 {
			a.Charge(max(until-now, 0) * time.Duration(others) / 100)
		}
		now = max(now, until)
	}
	if first == none {
		t.Fatal("they were never off")
	}
	if offSince == none {
		on += now - onSince
	}
	return on, now - first, longest
}

// Whatever switching takes, the limit holds over time, and nobody stays off for long.
func TestLimitHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 99).Draw(t, "limit")
		a := New(limit, 0)
		on, span, longest := run(t, a, 20*time.Second, 3*time.Millisecond, 0)
		want := span * time.Duration(limit) / 100
		if most := want + 2*a.period*time.Duration(limit)/100 + 3*time.Millisecond; on > most {
			t.Errorf("limit %d %%: on for %v of %v, want %v at most", limit, on, span, most)
		}
		if least := want - 2*a.period*time.Duration(limit)/100 - 3*time.Millisecond; on < least {
			t.Errorf("limit %d %%: on for %v of %v, want %v at least", limit, on, span, least)
		}
		if longest > 2*a.period {
			t.Errorf("limit %d %%: off for %v", limit, longest)
		}
	})
}

// What the tenant's other processes use is taken from it, but for a part.
func TestOthersOfTheTenantCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		used := rapid.IntRange(0, 100).Draw(t, "used")
		on, span, _ := run(t, New(30, 0), 20*time.Second, time.Millisecond, used)
		want := max(30-used, 3)
		if got := 100 * float64(on) / float64(span); got < float64(want)-1 || got > float64(want)+1 {
			t.Errorf("others use %d %%: they had %.1f %%, want %d", used, got, want)
		}
	})
}

// An order that fails for a minute is not made up for in a minute.
func TestDebtIsBounded(t *testing.T) {
	a := New(50, 0)
	a.Step(0)
	a.Step(time.Minute)
	a.IsOff(time.Minute)
	if on, until := a.Step(time.Minute); on || until > time.Minute+3*maxDebt*Period {
		t.Errorf("on: %v, until %v", on, until)
	}
}
