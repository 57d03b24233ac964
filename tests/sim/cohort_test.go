// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
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
				parts, ofAlone = g.got(60 * time.Second)
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
				if p.gap > 0 { // a turn is its own, also where it leaves the GPU idle
					most, least = most*p.alone(), 0
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
