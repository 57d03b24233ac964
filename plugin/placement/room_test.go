// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// mover is a tenant that may move between g0, g1, g2.
func mover(id string, percent uint32, memory uint64) Tenant {
	return Tenant{Name: id, ID: id, Core: percent, Memory: memory, Reach: []string{"g0", "g1", "g2"}}
}

func TestMakeRoom(t *testing.T) {
	type on = map[int][]Tenant
	half := Request{Count: 1, Core: 60}
	stays := core("stays", 50)
	closed := gpus(2, on{0: {mover("a", 50, gib)}, 1: {mover("b", 50, gib)}})
	closed[1].Closed = "it is drained"
	for name, c := range map[string]struct {
		devices []Device
		request Request
		want    string // tenant, from, to, chosen; empty: no move helps
	}{
		"two halves":              {gpus(2, on{0: {mover("a", 50, gib)}, 1: {stays}}), half, "a g0 g1 [g0]"},
		"the lesser memory moves": {gpus(2, on{0: {mover("a", 50, 2*gib)}, 1: {mover("b", 50, gib)}}), half, "b g1 g0 [g1]"},
		"unlimited memory last":   {gpus(2, on{0: {mover("a", 50, 0)}, 1: {mover("b", 50, gib)}}), half, "b g1 g0 [g1]"},
		"then the lesser time":    {gpus(3, on{0: {mover("a", 50, gib)}, 1: {mover("b", 45, gib)}, 2: {core("c", 50)}}), half, "b g1 g0 [g1]"},
		"best fit":                {gpus(3, on{0: {mover("a", 45, gib)}, 1: {core("b", 50)}, 2: {core("c", 55)}}), half, "a g0 g2 [g0]"},
		"nobody may move":         {gpus(2, on{0: {stays}, 1: {stays}}), half, ""},
		"it does not fit there":   {gpus(2, on{0: {mover("a", 51, gib)}, 1: {stays}}), half, ""},
		"nor by memory": {gpus(2, on{0: {mover("a", 50, 9*gib)}, 1: {{Name: "b", Core: 50, Memory: 8 * gib}}}),
			half, ""},
		"not onto a closed one":   {closed, half, ""},
		"not where it may not be": {gpus(4, on{0: {mover("a", 50, gib)}, 1: {core("b", 60)}, 2: {core("c", 60)}, 3: {core("d", 50)}}), half, ""},
		"memory":                  {gpus(2, on{0: {mover("a", 0, 8*gib)}, 1: {{Name: "b", Memory: 8 * gib}}}), Request{Count: 1, Memory: 12 * gib}, "a g0 g1 [g0]"},
		"of two GPUs one is made free": {gpus(3, on{0: {core("x", 100)}, 1: {mover("a", 30, gib)}, 2: {core("y", 40)}}),
			Request{Count: 1, Core: 80}, "a g1 g2 [g1]"},
		"for two GPUs": {gpus(3, on{0: {core("x", 60)}, 1: {mover("a", 40, gib)}}), Request{Count: 2, Core: 70}, "a g1 g0 [g1 g2]"},
		"who excludes moves away": {gpus(2, on{0: {{Name: "a", ID: "a", Reach: []string{"g1"}, Labels: Labels{Exclusion: "ml"}}}, 1: {{Name: "b", Labels: Labels{Exclusion: "ml"}}}}),
			Request{Count: 1}, "a g0 g1 [g0]"},
		"labels hold there": {gpus(2, on{0: {{Name: "a", ID: "a", Core: 50, Reach: []string{"g1"}, Labels: Labels{AntiAffinity: "x"}}}, 1: {{Name: "b", Core: 50, Labels: Labels{AntiAffinity: "x"}}}}),
			half, ""},
		"two moves would help, one does not": {gpus(2, on{0: {mover("a", 30, gib), mover("b", 30, gib)}, 1: {stays}}), Request{Count: 1, Core: 90}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			if m, ok := MakeRoom(c.devices, c.request); ok {
				got = fmt.Sprint(m.Tenant.ID, " ", m.From.UUID, " ", m.To.UUID, " ", m.Chosen)
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// Whatever move is found: with it done, the moved tenant and the request fit, nobody else has
// changed, no other helpful move has less memory, and no order of the devices changes the answer. Where none is found, none helps.
func TestMakeRoomAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 4).Draw(t, "devices")
		devices := gpus(n, nil)
		for i := range devices {
			for k := range rapid.IntRange(0, 3).Draw(t, "tenants") {
				x := Tenant{Name: fmt.Sprintf("t%d-%d", i, k), Labels: Labels{drawLabel(t, "affinity"), drawLabel(t, "anti-affinity"), drawLabel(t, "exclusion")},
					Core:   rapid.SampledFrom([]uint32{0, 10, 30, 50, 60}).Draw(t, "core"),
					Memory: rapid.SampledFrom([]uint64{0, gib, 4 * gib, 8 * gib}).Draw(t, "memory")}
				if rapid.Bool().Draw(t, "may move") {
					x.ID = x.Name
					for j := range devices {
						if rapid.IntRange(0, 2).Draw(t, "reaches") > 0 {
							x.Reach = append(x.Reach, devices[j].UUID)
						}
					}
				}
				devices[i].Tenants = append(devices[i].Tenants, x)
			}
		}
		r := drawRequest(t)
		if _, err := Choose(devices, r); err == nil {
			t.Skip("it fits")
		}
		moved := func(from, to int, x Tenant) []Device {
			after := slices.Clone(devices)
			after[from].Tenants = slices.DeleteFunc(slices.Clone(after[from].Tenants), func(o Tenant) bool { return o.Name == x.Name })
			after[to].Tenants = append(slices.Clone(after[to].Tenants), x)
			return after
		}
		helps, least := false, uint64(math.MaxUint64) // and the fewest bytes that help
		for i, from := range devices {
			for _, x := range from.Tenants {
				for j, to := range devices {
					if x.ID != "" && i != j && slices.Contains(x.Reach, to.UUID) &&
						fits(to, Request{Core: x.Core, Memory: x.Memory, Labels: x.Labels}) {
						if best(moved(i, j, x), r) != nil {
							helps, least = true, min(least, cmp.Or(x.Memory, math.MaxUint64))
						}
					}
				}
			}
		}
		m, ok := MakeRoom(devices, r)
		if ok != helps {
			t.Fatalf("%+v on %+v: found %v, the model says %v", r, devices, ok, helps)
		}
		if !ok {
			return
		}
		if !slices.Contains(m.Tenant.Reach, m.To.UUID) || !strings.HasPrefix(m.Tenant.Name, fmt.Sprintf("t%d-", m.From.Index)) {
			t.Fatalf("%+v", m)
		}
		if got := cmp.Or(m.Tenant.Memory, math.MaxUint64); got != least {
			t.Fatalf("%+v moves %d bytes, and %d would do", m, got, least)
		}
		after := moved(m.From.Index, m.To.Index, m.Tenant)
		if !fits(m.To, Request{Core: m.Tenant.Core, Memory: m.Tenant.Memory, Labels: m.Tenant.Labels}) || !slices.Equal(m.Chosen, best(after, r)) {
			t.Fatalf("%+v for %+v on %+v", m, r, devices)
		}
		again, _ := MakeRoom(rapid.Permutation(devices).Draw(t, "order"), r)
		if again.Tenant.ID != m.Tenant.ID || again.To.UUID != m.To.UUID {
			t.Fatalf("%+v, in another order %+v", m, again)
		}
	})
}

// The runtime waits for the answer, and creates nothing meanwhile on the node.
func TestMakeRoomTakesNoTime(t *testing.T) {
	const gpus, tenants, limit = 16, 200, 2 * time.Second // it takes a tenth of that
	var reach []string
	for i := range gpus {
		reach = append(reach, fmt.Sprint("GPU-", i))
	}
	var devices []Device
	for i, uuid := range reach {
		d := Device{UUID: uuid, GPU: uuid, Name: uuid, Index: i, Memory: 80 * gib}
		for k := range tenants {
			d.Tenants = append(d.Tenants, Tenant{Name: "ns/pod/main", Memory: uint64(k + 1), ID: fmt.Sprint(uuid, "-", k), Reach: reach})
		}
		devices = append(devices, d)
	}
	begin := time.Now()
	if m, ok := MakeRoom(devices, Request{Count: 1, Memory: 80 * gib}); ok {
		t.Errorf("%v makes room for all of a GPU", m.Tenant.ID)
	}
	if took := time.Since(begin); took > limit {
		t.Errorf("it took %v", took)
	}
}
