// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A model that tries everything, written from the package's comment and not
// from its code.

// fits says whether one more tenant may have a device, by what would then hold.
func fits(d Device, r Request) bool {
	core, memory := r.Core, r.Memory
	there, like, alike, idle := true, false, true, true
	for _, t := range d.Tenants {
		core += t.Core
		memory += t.Memory
		if t.Outside {
			continue
		}
		idle = false
		alike = alike && t.Exclusion == r.Exclusion
		like = like || t.Affinity == r.Affinity
		there = there && (r.AntiAffinity == "" || t.AntiAffinity != r.AntiAffinity)
	}
	return (r.Core == 0 || core <= 100) && (r.Memory == 0 || d.Memory == 0 || memory <= d.Memory) &&
		alike && there && (r.Affinity == "" || idle || like)
}

// rank is the place of a device among those that fit; the least is the best.
func rank(d Device, r Request) []float64 {
	yes := func(b bool) float64 {
		if b {
			return 0
		}
		return 1
	}
	core, memory, containers, sharers, like := 100.0, float64(d.Memory), 0.0, 0.0, false
	for _, t := range d.Tenants {
		core -= float64(t.Core)
		memory -= float64(t.Memory)
		if t.Outside {
			continue
		}
		containers++
		if t.Core == 0 {
			sharers++
		}
		like = like || r.Affinity != "" && t.Affinity == r.Affinity
	}
	core, memory = max(core, 0), max(memory, 0)
	key := []float64{yes(slices.Contains(r.Had, d.UUID)), yes(like)}
	if r.Core > 0 {
		key = append(key, yes(containers > 0), core, memory)
	} else {
		key = append(key, -core/(sharers+1), containers, -memory)
	}
	return append(key, float64(d.Index))
}

// best tries every set of devices.
func best(devices []Device, r Request) []string {
	var found []Device
	var key [][]float64
	for set := range 1 << len(devices) {
		if bits.OnesCount(uint(set)) != r.Count {
			continue
		}
		var chosen []Device
		gpus := map[string]bool{}
		good := true
		for i, d := range devices {
			if set&(1<<i) != 0 {
				good = good && fits(d, r) && !gpus[d.GPU]
				gpus[d.GPU] = true
				chosen = append(chosen, d)
			}
		}
		if !good {
			continue
		}
		var keys [][]float64
		for _, d := range chosen {
			keys = append(keys, rank(d, r))
		}
		slices.SortFunc(keys, slices.Compare)
		if found == nil || slices.CompareFunc(keys, key, slices.Compare) < 0 {
			found, key = chosen, keys
		}
	}
	slices.SortFunc(found, func(a, b Device) int { return a.Index - b.Index })
	var uuids []string
	for _, d := range found {
		uuids = append(uuids, d.UUID)
	}
	return uuids
}

func drawLabel(t *rapid.T, name string) string {
	return rapid.SampledFrom([]string{"", "", "", "a", "b"}).Draw(t, name)
}

func drawRequest(t *rapid.T) Request {
	return Request{
		Count:  rapid.SampledFrom([]int{1, 1, 1, 2, 3}).Draw(t, "count"),
		Core:   rapid.SampledFrom([]uint32{0, 0, 1, 10, 25, 30, 40, 50, 60, 100}).Draw(t, "core"),
		Memory: rapid.SampledFrom([]uint64{0, 0, 1 << 20, 2 * gib, 5 * gib, 8 * gib, 16 * gib, 17 * gib}).Draw(t, "memory"),
		Labels: Labels{drawLabel(t, "affinity"), drawLabel(t, "anti-affinity"), drawLabel(t, "exclusion")},
	}
}

// Containers come and go, as a node sees them. Nothing is promised twice, and
// each gets what the model, which tries everything, finds best.
func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		devices := gpus(rapid.IntRange(0, 6).Draw(t, "devices"), nil)
		for i := range devices {
			devices[i].GPU = fmt.Sprintf("g%d", rapid.IntRange(0, i).Draw(t, "of GPU"))
			devices[i].Memory = rapid.SampledFrom([]uint64{0, 8 * gib, 16 * gib, 16 * gib}).Draw(t, "memory")
		}
		// Also what nobody would place so: promises from outside, of more than
		// there is.
		for i := range devices {
			if rapid.IntRange(0, 5).Draw(t, "outside") == 0 {
				devices[i].Tenants = []Tenant{{Name: "user", Core: rapid.Uint32Range(0, 120).Draw(t, "core"), Memory: uint64(rapid.IntRange(0, 20).Draw(t, "GiB")) * gib, Outside: true}}
			}
		}
		requests := map[string]Request{}
		has := map[string][]string{}
		end := func(name string) {
			for i := range devices {
				devices[i].Tenants = slices.DeleteFunc(slices.Clone(devices[i].Tenants), func(t Tenant) bool { return t.Name == name })
			}
			delete(requests, name)
		}
		for step := range rapid.IntRange(1, 25).Draw(t, "steps") {
			name := fmt.Sprintf("c%d", step)
			r := drawRequest(t)
			if running := sortedKeys(requests); len(running) > 0 {
				switch other := rapid.SampledFrom(running).Draw(t, "one of those"); rapid.IntRange(0, 3).Draw(t, "first") {
				case 0:
					end(other)
				case 1: // is started again
					name, r = other, requests[other]
					end(other)
					r.Had = has[other]
				}
			}
			got, err := Choose(devices, r)
			want := best(devices, r)
			if !slices.Equal(got, want) {
				t.Fatalf("%+v on %+v: got %v (%v), the model says %v", r, devices, got, err, want)
			}
			shuffled := rapid.Permutation(devices).Draw(t, "order")
			if again, _ := Choose(shuffled, r); !slices.Equal(got, again) {
				t.Fatalf("%+v: %v, in another order %v", r, got, again)
			}
			if err != nil {
				refusal := (*Refusal)(nil)
				if !errors.As(err, &refusal) || len(err.Error()) > 16<<10 {
					t.Fatalf("refused with %v", err)
				}
				for _, u := range refusal.Unable {
					if len(u.Why) == 0 || !strings.Contains(err.Error(), u.Device.Name) && refusal.GPUs >= r.Count {
						t.Fatalf("%s is not explained: %v", u.Device.Name, err)
					}
				}
				continue
			}
			requests[name], has[name] = r, got
			for i, d := range devices {
				if slices.Contains(got, d.UUID) {
					devices[i].Tenants = append(slices.Clone(d.Tenants), Tenant{Name: name, Core: r.Core, Memory: r.Memory, Labels: r.Labels})
				}
			}
			holds(t, devices, got, r)
		}
	})
}

// holds checks what no placement may break, counted from scratch.
func holds(t *rapid.T, devices []Device, got []string, r Request) {
	gpus := map[string]bool{}
	for _, d := range devices {
		if !slices.Contains(got, d.UUID) {
			continue
		}
		if gpus[d.GPU] {
			t.Fatalf("twice on GPU %s: %v", d.GPU, got)
		}
		gpus[d.GPU] = true
		var core, memory uint64
		exclusion, anti := map[string]bool{}, map[string]int{}
		for _, tenant := range d.Tenants {
			core += uint64(tenant.Core)
			memory += tenant.Memory
			if !tenant.Outside {
				exclusion[tenant.Exclusion] = true
				anti[tenant.AntiAffinity]++
			}
		}
		if r.Core > 0 && core > 100 || r.Memory > 0 && d.Memory > 0 && memory > d.Memory {
			t.Fatalf("%s: promised %d %% and %d bytes: %+v", d.UUID, core, memory, d)
		}
		if len(exclusion) > 1 || anti["a"] > 1 || anti["b"] > 1 {
			t.Fatalf("%s: these cannot be together: %+v", d.UUID, d.Tenants)
		}
	}
	if len(gpus) != r.Count {
		t.Fatalf("%d asked for, got %v", r.Count, got)
	}
}

func sortedKeys(m map[string]Request) (keys []string) {
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
