//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

const (
	coreLimitAnnotation   = "nvshare.com/gpu-core-limit"
	coreRequestAnnotation = "nvshare.com/gpu-core-request"
	weightAnnotation      = "nvshare.com/gpu-weight"
	priorityAnnotation    = "nvshare.com/gpu-priority"
	gangAnnotation        = "nvshare.com/gpu-gang"

	// window is the GPU time over which shares are judged, and points how far a share
	// may be off, in percent of the window: turns last a tenth of a second, and the
	// tenants' own work competes for the machine's few cores.
	window = 2 * time.Second
	points = 10
)

// corePod starts a busy pod on the first GPU, with annotations about its share.
func corePod(t *testing.T, name string, share map[string]string, args ...string) *node.Pod {
	t.Helper()
	annotations := map[string]string{gpuAnnotation: firstGPU}
	for k, v := range share {
		annotations[k] = v
	}
	return startPod(t, name, annotations, busy(name, args...))
}

// awaitShares waits for a window in which each tenant did the wanted part of the work,
// in percent. Other work on the machine may spoil some windows; wrong shares spoil all.
func awaitShares(t *testing.T, ctx context.Context, want map[string]int) {
	t.Helper()
	seen := ""
	from := judge.Now()
	err := node.UntilEvery(ctx, readEvery, "shares of the work", func() error {
		e := observe(t, from)
		var all int64
		for _, u := range e.firstGPU().Tenants {
			all += u.Busy
		}
		if all < int64(window) {
			return fmt.Errorf("only %v of work since the last window;%s", time.Duration(all), seen)
		}
		from = judge.Now()
		right, parts := true, ""
		for name, percent := range want {
			got := 100 * float64(e.tenant(name).Busy) / float64(all)
			right = right && got > float64(percent-points) && got < float64(percent+points)
			parts += fmt.Sprintf(" %s %.1f %% (%d)", name, got, percent)
		}
		seen += parts + ";"
		if !right {
			return fmt.Errorf("windows:%s", seen)
		}
		return nil
	})
	t.Logf("parts of the work, and what they should be:%s", seen)
	check(t, err)
}

func (e *evidence) firstGPU() judge.GPUReport {
	for _, g := range e.report.GPUs {
		if g.GPU == judge.UUID(0) {
			return g
		}
	}
	return judge.GPUReport{}
}

// Pods get the parts of a GPU that their annotations say, and later the parts that
// nvsharectl sets.
func TestCoreLimits(t *testing.T) {
	ctx := within(t)
	start := judge.Now()
	corePod(t, "core-25", map[string]string{coreLimitAnnotation: "25"})
	corePod(t, "core-75", map[string]string{coreLimitAnnotation: "75%"})
	awaitTurns(t, ctx, "core-25", start, 1)
	awaitTurns(t, ctx, "core-75", start, 1)
	awaitShares(t, ctx, map[string]int{"core-25": 25, "core-75": 75})

	for name, percent := range map[string]string{"core-25": "60", "core-75": "40"} {
		who := "default/" + name + "/main"
		out := must(shared.Ctl(ctx, "set", "--container", who, "--gpu", "0", "--core-limit", percent, "--weight", "200"))(t)
		want := fmt.Sprintf("GPU 0, %s: core limit %s%% → %s%%, weight 100 → 200\n", who, name[len("core-"):], percent)
		if out != want {
			t.Errorf("set prints %q, want %q", out, want)
		}
	}
	awaitShares(t, ctx, map[string]int{"core-25": 60, "core-75": 40})

	// What nvsharectl set outlives the scheduler.
	restartScheduler(t)
	awaitShares(t, ctx, map[string]int{"core-25": 60, "core-75": 40})
	for _, name := range []string{"core-25", "core-75"} {
		check(t, node.Until(ctx, "the plugin to say the names again", func() error {
			_, err := shared.Ctl(ctx, "set", "--container", "default/"+name+"/main", "--gpu", "0", "--core-limit", "none", "--weight", "none")
			return err
		}))
	}
	awaitShares(t, ctx, map[string]int{"core-25": 25, "core-75": 75})
	observe(t, start).noOverlap(t)
}

// A limit also holds for a tenant that is alone.
func TestCoreLimitAlone(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	corePod(t, "alone-25", map[string]string{coreLimitAnnotation: "25"}, "--depth", "20") // 10 ms of work at once
	awaitTurns(t, ctx, "alone-25", from, 1)
	from = judge.Now()
	var got float64
	awaitEvidence(t, ctx, "work under the limit", from, func(e *evidence) error {
		u := e.tenant("alone-25")
		got = 100 * float64(u.Busy) / float64(judge.Now()-from)
		if u.Busy < int64(window/4) {
			return fmt.Errorf("%v of work", time.Duration(u.Busy))
		}
		return nil
	})
	t.Logf("alone, limited to 25 %%: %.1f %% of the time", got)
	if got > 25+points {
		t.Errorf("the tenant used %.1f %% of the GPU's time", got)
	}
}

// A request is kept, whatever the others' weights are; the rest is shared by weight.
func TestCoreRequests(t *testing.T) {
	ctx := within(t)
	start := judge.Now()
	corePod(t, "req-50", map[string]string{coreRequestAnnotation: "50"})
	corePod(t, "req-w1", map[string]string{weightAnnotation: "1000"})
	corePod(t, "req-w3", map[string]string{weightAnnotation: "3000"})
	names := []string{"req-50", "req-w1", "req-w3"}
	for _, name := range names {
		awaitTurns(t, ctx, name, start, 1)
	}
	e := map[string]int{"req-50": 51, "req-w1": 12, "req-w3": 37}
	awaitShares(t, ctx, e)
	observe(t, start).noOverlap(t)

	// More than 100 % cannot be promised.
	name := "req-too-much"
	pod, err := shared.RunPod(ctx, name, map[string]string{gpuAnnotation: firstGPU, coreRequestAnnotation: "51"}, sleeper("main", nil))
	if err == nil {
		removePod(t, pod)
		t.Fatal("101 % were promised")
	}
	for _, want := range []string{"default/" + name, "main", coreRequestAnnotation, `"51"`, judge.UUID(0) + ") has 50 % ", "default/req-50/main has 50 %"} {
		if !strings.Contains(unescaped(err.Error()), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
	out, err := shared.Ctl(ctx, "set", "--container", "default/req-w1/main", "--core-request", "51")
	if text := fmt.Sprint(out, err); err == nil || !strings.Contains(text, "50 % to default/req-50/main") {
		t.Errorf("set: %s", text)
	}
	startPod(t, "req-fits", map[string]string{gpuAnnotation: firstGPU, coreRequestAnnotation: "50"}, sleeper("main", nil))
}

// A latency tenant does not wait for turns of two seconds.
func TestLatencyBesideBatch(t *testing.T) {
	ctx := within(t)
	must(shared.Ctl(ctx, "-T", "2s"))(t)
	t.Cleanup(func() {
		if _, err := shared.Ctl(within(t), "-T", "100ms"); err != nil {
			t.Error(err)
		}
	})
	const depth = 4
	from := judge.Now()
	corePod(t, "batch", nil)
	corePod(t, "latency", map[string]string{priorityAnnotation: "latency"}, "--depth", strconv.Itoa(depth), "--kernel-us", "500", "--idle-ms", "20")
	awaitTurns(t, ctx, "latency", from, 1)
	awaitTurns(t, ctx, "batch", from, 1)
	from = judge.Now()
	awaitEvidence(t, ctx, "the batch tenant's work", from, func(e *evidence) error {
		if got := e.tenant("batch").Busy; got < int64(window) {
			return fmt.Errorf("%v", time.Duration(got))
		}
		return nil
	})
	e := observe(t, from)
	fast, slow := e.tenant("latency"), e.tenant("batch")
	t.Logf("latency: %d kernels, longest wait %v; batch: %v of work", fast.Work, time.Duration(fast.LongestWait), time.Duration(slow.Busy))
	// A request is depth kernels. With turns the tenant would have made a few requests. Its
	// requests are no turns of their own: it works while batch's kernels still run.
	if requests := fast.Work / depth; requests < 15 {
		t.Errorf("the latency tenant made %d requests while batch worked for %v", requests, time.Duration(slow.Busy))
	}
}
