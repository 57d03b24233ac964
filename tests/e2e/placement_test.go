//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

const exclusionAnnotation = "nvshare.com/gpu-exclusion"

// given returns the indices of the simulated GPUs that a container got.
func given(t *testing.T, c *node.Container) string {
	t.Helper()
	env := must(c.Environ())(t)
	var has []string
	for _, index := range []string{"0", "1"} {
		if _, ok := env["NVSHARE_SIMGPU_GPU_"+index]; ok {
			has = append(has, index)
		}
	}
	return strings.Join(has, " ")
}

// The plugin places pods that name no GPU where they fit, also after a restart of the
// plugin. A pod that fits nowhere is refused, with the figures of each GPU.
func TestPlacement(t *testing.T) {
	ctx := within(t)
	start := judge.Now()
	part := func(request, memory string) map[string]string {
		return map[string]string{coreRequestAnnotation: request, limitAnnotation: memory}
	}
	place := func(name, want string, annotations map[string]string) *node.Pod {
		t.Helper()
		pod := startPod(t, name, annotations, busy(name))
		if got := given(t, pod.Containers[0]); got != want {
			t.Errorf("%s with %v is on GPU %q, want %q", name, annotations, got, want)
		}
		return pod
	}
	refuse := func(name string, annotations map[string]string, says ...string) {
		t.Helper()
		pod, err := shared.RunPod(ctx, name, annotations, busy(name))
		if err == nil {
			removePod(t, pod)
			t.Errorf("%s with %v was accepted", name, annotations)
			return
		}
		for _, want := range says {
			if !strings.Contains(unescaped(err.Error()), want) {
				t.Errorf("%s with %v: the error lacks %q: %v", name, annotations, want, err)
			}
		}
	}
	figures := func(when string) {
		t.Helper()
		refuse("placed-"+when, part("50", "9Gi"),
			`annotation nvshare.com/gpu-core-request="50": no GPU can give it 50 % and 9Gi`,
			"GPU 0 ("+judge.UUID(0)+") has 10 % and 4Gi of 16Gi left (default/placed-a/main has 60 % and 8Gi, default/placed-b/main has 30 % and 4Gi): too little time, too little memory",
			"GPU 1 ("+judge.UUID(1)+") has 60 % and 8Gi of 16Gi left (default/placed-c/main has 40 % and 8Gi): too little memory")
	}

	place("placed-a", "0", part("60", "8Gi"))
	place("placed-b", "0", part("30", "4Gi")) // the best fit, on a's GPU
	c := place("placed-c", "1", part("40", "8Gi"))
	figures("new")
	refuse("placed-3", map[string]string{gpuAnnotation: "3"}, "3 different GPUs are asked for, and this node has 2")
	for name, turns := range map[string]int{"placed-a": turnsEach, "placed-b": turnsEach, "placed-c": 1} { // c is alone
		awaitTurns(t, ctx, name, start, turns)
	}
	observe(t, start).noOverlap(t)
	table := must(shared.Ctl(ctx, "-o", "wide"))(t)
	for _, want := range []string{
		"GPU 0: 90% of its time is promised: 60% to default/placed-a/main, 30% to default/placed-b/main",
		"GPU 0: memory limits add up to 12Gi of its 16Gi: 8Gi of default/placed-a/main, 4Gi of default/placed-b/main",
		"GPU 1: 40% of its time is promised: 40% to default/placed-c/main",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("nvsharectl does not show %q:\n%s", want, table)
		}
	}

	shared.Plugin.Kill()
	check(t, shared.StartPlugin(ctx))
	figures("after-restart")
	accepted := shared.PluginAccepts()
	shared.Containerd.Kill()
	check(t, shared.StartContainerd(ctx))
	check(t, shared.PluginAccepted(ctx, accepted))
	figures("after-containerd")

	// A container that cannot be started, or is refused, keeps no part of a GPU.
	for range 2 {
		broken := part("60", "8Gi")
		if pod, err := shared.RunPod(ctx, "placed-broken", broken, node.ContainerSpec{Args: []string{"/no/such/program"}}); err == nil {
			removePod(t, pod)
			t.Error("a program that is not there runs")
		} else if !strings.Contains(err.Error(), "no such") {
			t.Errorf("refused for another reason: %v", err)
		}
	}
	check(t, c.Stop(ctx)) // the container has ended and is not removed
	both := place("placed-both", "0 1", map[string]string{gpuAnnotation: "2", coreRequestAnnotation: "10"})
	refuse("placed-alone", map[string]string{gpuAnnotation: "1", exclusionAnnotation: "alone"}, `exclusion label "default/alone"`)
	check(t, both.Stop(ctx))
	place("placed-alone", "1", map[string]string{gpuAnnotation: "1", exclusionAnnotation: "alone"})
	refuse("placed-intruder", map[string]string{gpuAnnotation: "nvshare.com/gpu=1"}, "GPU 1 ("+judge.UUID(1)+`): it is only for exclusion label "default/alone", which default/placed-alone/main has`)
}

// A container with a count of GPUs works on each.
func TestTwoGPUsOfOneContainer(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	second := busy("two-b", "--device", "1")
	second.Name = "second"
	startPod(t, "two", map[string]string{gpuAnnotation: "2"}, busy("two-a", "--device", "0"), second)
	awaitEvidence(t, ctx, "work on both GPUs", from, func(e *evidence) error {
		return errors.Join(worksOn(e, "two-a", 0), worksOn(e, "two-b", 1))
	})
}

func worksOn(e *evidence, tenant string, gpu int) error {
	for _, g := range e.report.GPUs {
		for _, u := range g.Tenants {
			if g.GPU == judge.UUID(gpu) && u.Tenant == tenant && u.Turns > 0 {
				return nil
			}
		}
	}
	return errors.New(tenant + " has not worked on " + judge.UUID(gpu))
}
