// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Clients of other tenants have short slices as long as a latency tenant is there.
func TestSlices(t *testing.T) {
	c := New(Config{})
	now := base.Time(time.Second)
	told := func(ev base.Event) []Slice {
		now = now.Add(time.Millisecond)
		var got []Slice
		for _, a := range c.Step(now, ev) {
			if s, ok := a.(Slice); ok {
				got = append(got, s)
			}
		}
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
		return got
	}
	short := func(ids ...base.ClientID) (want []Slice) {
		for _, id := range ids {
			want = append(want, Slice{id, LatencySlice})
		}
		return want
	}
	latency := Share{Priority: Latency}
	for _, step := range []struct {
		ev   base.Event
		want []Slice
	}{
		{Attach{Client: 1, Tenant: "a", Want: true}, nil},
		{Attach{Client: 2, Tenant: "b"}, nil},
		{Attach{Client: 3, Tenant: "l", Share: latency}, short(1, 2)},
		{Request{3}, nil},
		{Attach{Client: 4, Tenant: "a"}, short(4)},
		{Attach{Client: 5, Tenant: "l", Share: latency}, nil},
		{Lost{3}, nil}, // another process of the tenant is there
		{Lost{2}, nil},
		{Attach{Client: 2, Tenant: "b"}, short(2)}, // a new connection knows nothing
		{SetShare{"l", Share{}}, []Slice{{1, 0}, {2, 0}, {4, 0}}},
		{SetShare{"b", latency}, short(1, 4, 5)},
		{Gone{2}, []Slice{{1, 0}, {4, 0}, {5, 0}}},
	} {
		if got := told(step.ev); !slices.Equal(got, step.want) {
			t.Fatalf("%v: %v, want %v", base.Text(step.ev), got, step.want)
		}
	}
}
