// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// Two jobs that do not fit together have, together, the weights that they have alone.
func TestRLOnSimulatedGPU(t *testing.T) {
	var r rlResult
	runStep(t, "rl.json", &r, "-simulated-mib", "256", "-rounds", "3", "rl")
	if !strings.HasPrefix(r.Natively, "failed: ") {
		t.Errorf("natively at once: %s", r.Natively)
	}
	if !r.Same || len(r.Alone) != rlJobs || len(r.Together) != rlJobs || r.Alone[0].Steps[1].Weights == r.Alone[1].Steps[1].Weights {
		t.Errorf("%+v", r)
	}
	for _, job := range r.Together {
		if len(job.Steps) != 3 {
			t.Errorf("%d iterations of 3", len(job.Steps))
		}
	}
	if r.Out == 0 || r.In == 0 || r.Promised < 1.2 {
		t.Errorf("%d bytes left the GPU and %d came back, of %.2f times its memory", r.Out, r.In, r.Promised)
	}
}

// What a job does together is compared with as many iterations alone, and its weights with those alone.
func TestRLSum(t *testing.T) {
	steps := func(weights ...string) (all []rlStep) {
		for i, w := range weights {
			s := rlStep{Generate: 3, Reward: 5, Train: 1, Weights: w}
			if i == 0 {
				s.Generate, s.Reward = 4, 0.5 // the first one loads kernels, and does not wait
			}
			all = append(all, s)
		}
		return all
	}
	result := func(second string) *rlResult {
		r := &rlResult{Reward: 5, Alone: []rlJob{{Steps: steps("a", "b")}, {Steps: steps("c", "d")}},
			Together: []rlJob{{Steps: steps("a", "b", "x", "y"), Ended: 40}, {Steps: steps("c", second, "z", "z"), Ended: 42}}}
		r.sumUp()
		return r
	}
	// Each alone: 5 + 3 * 4 on the GPU, and four rewards of 5.
	if r := result("d"); !r.Same || r.After != 74 || r.Seconds != 42 || r.Faster != 1.762 || r.Most != 2.056 || r.Rate != 0.1905 {
		t.Errorf("%+v", r)
	}
	if r := result("e"); r.Same {
		t.Error("other weights are the same")
	}
}
