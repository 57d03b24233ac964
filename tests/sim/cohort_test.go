// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// Beside a tenant with a core limit the others share by time slices what the limit leaves:
// they get as much as they would alone in that time, and the limit holds.
func TestOthersShareBesideALimit(t *testing.T) {
	limit := func(n int, p program) process { return process{program: p, share: sched.Share{Limit: n}} }
	for _, test := range []struct {
		name   string
		limits []process
		others []process
		parts  []float64 // of the GPU that each is promised; nil: limits, or equal parts
	}{
		{"three language models", []process{limit(30, decoder)}, several(2, decoder), nil},
		{"products with a limit", []process{limit(30, gemm)}, several(3, decoder), nil},
		{"three that keep the GPU busy", []process{limit(20, gemm)}, several(2, gemm), nil},
		{"products beside a language model", []process{limit(25, gemm)}, []process{{program: gemm}, {program: decoder}}, nil},
		{"two limits", []process{limit(20, gemm), limit(10, decoder)}, several(3, decoder), nil},
		{"a limit of 10", []process{limit(10, gemmSync)}, []process{{program: training}, {program: decoder}}, nil},
		{"a limit of 60, which two others do not leave", []process{limit(60, gemm)}, several(2, gemm), nil},
		{"weights of the others", []process{limit(20, gemm)}, []process{{program: gemm, share: sched.Share{Weight: 300}}, {program: gemm, share: sched.Share{Weight: 100}}}, nil},
		{"a request of another one", []process{limit(20, gemm)}, []process{{program: gemm, share: sched.Share{Request: 50}}, {program: gemm}}, []float64{1. / 6, 2. / 3, 1. / 6}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			n := len(test.limits)
			run := func(mode sched.Mode, processes []process) (parts, ofAlone []float64, g *gpuModel) {
				g = newGPUModel(t, mode, processes...)
				g.run(30 * time.Second)
				parts, ofAlone = g.got(30 * time.Second)
				return
			}
			all := slices.Concat(test.limits, test.others)
			parts, got, g := run(sched.Auto, all)
			_, turns, _ := run(sched.Exclusive, all)
			_, alone, _ := run(sched.Auto, test.others)
			left := 1.
			for i, p := range test.limits {
				most := float64(p.share.Limit) / 100
				least := min(most, 1/float64(len(all)))
				if test.parts != nil {
					least = min(most, test.parts[i])
				}
				left -= least
				if p.gap > 0 { // it is charged what it uses, or needs less
					least = 0
				}
				t.Logf("limit of %d: %.4f of the GPU", p.share.Limit, parts[i])
				if parts[i] > most+0.01 || parts[i] < least-0.01 {
					t.Errorf("a limit of %d gives %.4f of the GPU, want %.4f to %.4f", p.share.Limit, parts[i], least, most)
				}
			}
			t.Logf("%.3f, by turns %.3f, without the limited ones %.3f times %.2f: %q", got, turns, alone, left, g.reasons)
			if sum(got[n:]) < 0.95*left*sum(alone) {
				t.Errorf("the others get %.3f together, want %.3f", sum(got[n:]), left*sum(alone))
			}
			if sum(got) < 0.98*sum(turns) {
				t.Errorf("all get %.3f together, by turns %.3f", sum(got), sum(turns))
			}
			for i := n; i < len(all); i++ {
				want := left * alone[i-n]
				if test.parts != nil {
					want = test.parts[i]
				}
				if got[i] < 0.93*want {
					t.Errorf("process %d gets %.3f of what it gets alone, want %.3f", i, got[i], want)
				}
			}
		})
	}
}

// A latency tenant does not end that: the others go on sharing, with short slices, the limit
// holds, and its requests wait for a slice of each of the others at most. Where the others keep
// the GPU busy, they take turns, which give more than such slices.
func TestOthersShareBesideALimitAndALatencyTenant(t *testing.T) {
	limit := func(n int, p program) process { return process{program: p, share: sched.Share{Limit: n}} }
	latency := func(limit int) process {
		return process{program: requests, share: sched.Share{Priority: sched.Latency, Limit: limit}}
	}
	weighs := func(n int) process { return process{program: decoder, share: sched.Share{Weight: n}} }
	alone := newGPUModel(t, sched.Auto, latency(0))
	alone.run(10 * time.Second)
	alone.got(10 * time.Second)
	for _, test := range []struct {
		name    string
		limits  []process
		latency process
		others  []process
		least   float64 // that each of the others gets of what it gets alone
		cohort  bool
	}{
		{"two language models", []process{limit(30, gemm)}, latency(0), several(2, decoder), 0.29, true},                                         // by turns 0.25
		{"three language models", []process{limit(20, gemm)}, latency(0), several(3, decoder), 0.25, true},                                       // 0.19
		{"a language model beside products", []process{limit(30, gemm)}, latency(0), []process{{program: gemm}, {program: decoder}}, 0.26, true}, // 0.05
		{"a latency tenant with a limit", []process{limit(30, gemm)}, latency(20), several(2, decoder), 0.27, true},                              // 0.25
		{"only the latency tenant has a limit", nil, latency(20), several(2, decoder), 0.48, true},                                               // 0.37
		{"two that keep the GPU busy", []process{limit(30, gemm)}, latency(0), several(2, gemm), 0.28, false},
		{"unequal parts", []process{limit(30, gemm)}, latency(0), []process{weighs(300), weighs(100)}, 0.33, true}, // 0.24
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			n := len(test.limits) + len(test.others)
			processes := append(slices.Concat(test.limits, test.others), test.latency)
			run := func(mode sched.Mode, processes []process) (parts, ofAlone []float64, g *gpuModel) {
				g = newGPUModel(t, mode, processes...)
				g.run(30 * time.Second)
				parts, ofAlone = g.got(30 * time.Second)
				return
			}
			parts, got, g := run(sched.Auto, processes)
			_, turns, _ := run(sched.Exclusive, processes)
			for i := range processes { // as without nvshare
				processes[i].own, processes[i].share = timeslice.DriverSlice, sched.Share{}
			}
			_, driver, d := run(sched.Concurrent, processes)
			request := g.processes[n].longest
			t.Logf("%.3f, by turns %.3f, the driver alone %.3f; a request %v, by the driver %v: %q", got, turns, driver, request, d.processes[n].longest, g.reasons)
			weights := 0
			for _, p := range append(slices.Clone(test.limits), test.others...) {
				weights += cmp.Or(p.share.Weight, sched.DefaultWeight)
			}
			for i, p := range test.limits {
				// Three share alike what the latency tenant leaves, its waits included: 84 to 86 %. A limit
				// of 30 is more than a third of that.
				if most := float64(p.share.Limit) / 100; parts[i] > most+0.01 || parts[i] < min(most, sched.DefaultWeight/float64(weights))-0.035 {
					t.Errorf("a limit of %d gives %.4f of the GPU", p.share.Limit, parts[i])
				}
			}
			if last := g.reasons[len(g.reasons)-1]; strings.HasSuffix(last, "time slices") != test.cohort {
				t.Errorf("they share at last because: %s", last)
			}
			if sum(got) < 0.98*sum(turns) {
				t.Errorf("all get %.3f, by turns %.3f", sum(got), sum(turns))
			}
			for i := len(test.limits); i < n; i++ {
				if got[i] < test.least {
					t.Errorf("process %d gets %.3f of what it gets alone, want %.3f", i, got[i], test.least)
				}
			}
			bound := alone.processes[0].longest + switchCost + 2*sched.LatencySlice
			if test.cohort {
				bound += time.Duration(len(test.others)) * (switchCost + sched.CrowdedSlice)
			} else {
				bound += switchCost // at a hand-over
			}
			if request > bound {
				t.Errorf("a request took %v, want %v at most", request, bound)
			}
		})
	}
}

// A latency tenant that comes and goes does not end the cohort: the others get as much as before
// once it has gone.
func TestLatencyTenantComesToACohort(t *testing.T) {
	processes := append([]process{{program: gemm, share: sched.Share{Limit: 30}}}, several(2, decoder)...)
	visitor := process{program: requests, share: sched.Share{Priority: sched.Latency}, starts: 60 * time.Second, ends: 90 * time.Second}
	g := newGPUModel(t, sched.Auto, append(processes, visitor)...)
	g.run(30 * time.Second)
	_, before := g.got(30 * time.Second)
	_, beside := g.got(30 * time.Second)
	g.run(10 * time.Second)
	_, after := g.got(30 * time.Second)
	t.Logf("%.3f, beside it %.3f, then %.3f: %q", before, beside, after, g.reasons)
	if len(g.reasons) != 2 {
		t.Errorf("the way was changed: %q", g.reasons)
	}
	for i := range processes {
		// As above, a third of what the latency tenant leaves is less than the limit.
		if beside[3] < 0.9 || beside[i] < 0.265 || after[i] < 0.98*before[i] {
			t.Errorf("process %d gets %.3f, beside the latency tenant %.3f, then %.3f", i, before[i], beside[i], after[i])
		}
	}
}

// An overlap group shares turns with the others beside a limit, and with a limit it has turns of its
// own, which hold it.
func TestGroupsBesideALimit(t *testing.T) {
	limited := func(processes []process, n int) []process {
		for i := range processes {
			processes[i].share.Limit = n
		}
		return processes
	}
	product := limited(several(1, gemm), 30)
	for _, test := range []struct {
		name           string
		limits, others []process
		limit          float64
		gain           float64 // of the others, to what they get by turns
	}{
		{"a group and a language model", product, append(group(2, decoder), process{program: decoder}), 0.3, 1.7},
		{"a group and a training", product, append(group(2, decoder), process{program: training}), 0.3, 1},
		{"a group and products", product, append(group(2, decoder), process{program: gemm}), 0.3, 1},
		{"a group with a limit", limited(group(2, gemm), 30), several(2, decoder), 0.3, 1.7},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			n := len(test.limits)
			all := slices.Concat(test.limits, test.others)
			run := func(mode sched.Mode) (parts, ofAlone []float64, g *gpuModel) {
				g = newGPUModel(t, mode, all...)
				g.run(30 * time.Second)
				parts, ofAlone = g.got(30 * time.Second)
				return
			}
			parts, got, g := run(sched.Auto)
			_, turns, _ := run(sched.Exclusive)
			t.Logf("limit %.3f; %.3f, by turns %.3f: %q", parts[:n], got, turns, g.reasons)
			if part := sum(parts[:n]) / float64(n); part > test.limit+0.01 || part < test.limit-0.03 {
				t.Errorf("a limit gives %.3f of the GPU, want %.3f", part, test.limit)
			}
			if sum(got[n:]) < test.gain*sum(turns[n:]) {
				t.Errorf("the others get %.3f, by turns %.3f, want %.2f times that", got[n:], turns[n:], test.gain)
			}
			if last := g.reasons[len(g.reasons)-1]; !strings.HasSuffix(last, "time slices") {
				t.Errorf("they share at last because: %s", last)
			}
		})
	}
}

// One of a cohort that slept while another tenant came and went gets its part from the moment in
// which it wakes: but for an uneven round of slices in each turn, until windows have shown that.
func TestOneOfACohortWakes(t *testing.T) {
	sleeper := program{time.Millisecond, 6000, 20 * time.Second}
	g := newGPUModel(t, sched.Auto,
		process{program: gemm, share: sched.Share{Limit: 25}}, process{program: gemm}, process{program: sleeper},
		process{program: gemm, share: sched.Share{Limit: 10}, starts: 22 * time.Second, ends: 25 * time.Second})
	g.run(28 * time.Second)
	p := g.processes[2]
	if p.wants() || g.now.Add(10*time.Second) < p.wakes {
		t.Fatalf("the sleeper is awake, or sleeps for another %v", p.wakes.Sub(g.now))
	}
	g.run(p.wakes.Sub(g.now))
	for _, least := range []float64{0.7, 0, 0.93} {
		parts, _ := g.got(5 * time.Second)
		t.Logf("%.3f: %q", parts, g.reasons)
		if parts[2] < least*parts[1] {
			t.Errorf("it gets %.3f of the GPU, and the other one %.3f", parts[2], parts[1])
		}
	}
}

// Programs that pause at the same time, as interactive ones do, get as much in between as without pauses:
// a window in which they paused is no reason for turns.
func TestPausesAreNoReasonForTurns(t *testing.T) {
	for _, pause := range []time.Duration{1250 * time.Millisecond, 2750 * time.Millisecond, 4500 * time.Millisecond} {
		g := newGPUModel(t, sched.Auto, process{program: decoder, share: sched.Share{Limit: 60}}, process{program: gemmSync, starts: 10 * time.Millisecond})
		sum := func(d time.Duration) float64 {
			_, got := g.got(d)
			return got[0] + got[1]
		}
		g.run(40 * time.Second)
		steady, paused := sum(10*time.Second), 0.0
		const rounds = 8
		for range rounds {
			for i, p := range g.processes {
				p.kernels, p.left, p.wakes = 0, 0, g.now.Add(pause+time.Duration(i)*300*time.Millisecond)
			}
			g.run(pause + 2*time.Second)
			paused += sum(4*time.Second) / rounds
		}
		if paused < 0.95*steady {
			t.Errorf("after pauses of %v programs get %.2f together, without them %.2f", pause, paused, steady)
		}
	}
}
