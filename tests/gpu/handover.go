// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
)

// handoverSeconds is how long two tenants take turns in each case. Then the second goes
// on alone for aloneSeconds.
const (
	handoverSeconds = 4
	aloneSeconds    = 1
)

// A handover case: how long the GPU stands still when it passes from one
// tenant to the other, by the stamps that the kernels take on the GPU.
type handoverResult struct {
	Quantum  string `json:"quantum"`
	KernelUS int    `json:"kernel_us"`
	Count    int    `json:"handovers"`
	Overlaps int    `json:"overlaps"`
	// From the end of one tenant's last kernel to the start of the other's
	// first, nanoseconds, until the first tenant ends.
	P50 int64 `json:"p50_ns"`
	P90 int64 `json:"p90_ns"`
	P99 int64 `json:"p99_ns"`
	Max int64 `json:"max_ns"`
	// The longest pause of the other in the second after the first tenant's last kernel:
	// the driver destroys a context then. The same for two processes without the shim.
	End       int64   `json:"end_ns"`
	NativeEnd int64   `json:"native_end_ns"`
	Busy      float64 `json:"busy"`  // part of the time until the first tenant ends
	Alone     float64 `json:"alone"` // the same for one of them without the shim
}

// handoverLimit is what a hand-over costs two processes that need nobody to
// arbitrate, as hand-over (tests/workload) prints it.
type handoverLimit struct {
	QuantumMS  float64 `json:"quantum_ms"`
	KernelUS   float64 `json:"kernel_us"`
	AloneGapNS float64 `json:"alone_gap_ns"` // per turn, of one process
	AloneBusy  float64 `json:"alone_busy"`
	TwoGapNS   float64 `json:"two_gap_ns"` // per turn, of two in turn
	TwoBusy    float64 `json:"two_busy"`
}

func (b *bench) handoverLimit(ctx context.Context, quantum, kernel string) (handoverLimit, error) {
	var l handoverLimit
	cmd := exec.CommandContext(ctx, filepath.Join(b.bundle, "bin", "hand-over"), quantum, kernel, "1.5")
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), b.tenantEnv(native, "")...)
	out, err := cmd.Output()
	if err != nil {
		return l, fmt.Errorf("hand-over: %w", err)
	}
	return l, json.Unmarshal(out, &l)
}

func (b *bench) handovers(ctx context.Context, _ string) error {
	var all []handoverResult
	var limits []handoverLimit
	for _, kernel := range []int{500, 1700} {
		for _, quantum := range []string{"5", "20"} {
			l, err := b.handoverLimit(ctx, quantum, strconv.Itoa(kernel))
			if err != nil {
				return err
			}
			limits = append(limits, l)
			fmt.Printf("limit, turns of exactly %2g ms, kernels of %4g µs: hand-over %3.0f µs; GPU busy %.2f %%\n",
				l.QuantumMS, l.KernelUS, l.TwoGapNS/1000, 100*l.TwoBusy)
		}
		alone, err := b.busyAlone(ctx, kernel)
		if err != nil {
			return err
		}
		both, err := b.busyTenants(ctx, kernel, false, "a", "b")
		if err != nil {
			return err
		}
		nativeEnd := pauseAfterEnd(byStart(both))
		for _, quantum := range []string{"100ms", "20ms", "5ms"} {
			if _, err := b.node.Ctl(ctx, "-T", quantum); err != nil {
				return err
			}
			trace, err := b.busyTenants(ctx, kernel, true, "a", "b")
			if err != nil {
				return err
			}
			r := handoverResult{Quantum: quantum, KernelUS: kernel, Alone: alone, NativeEnd: nativeEnd, Overlaps: judge.Judge(trace, judge.Options{}).Overlaps()}
			r.measure(trace)
			all = append(all, r)
			fmt.Printf("hand-over at %-5s kernels of %4d µs: p50 %3d µs, p90 %3d µs, p99 %3d µs, longest %d µs (%d), %d overlaps; GPU busy %.2f %%, one native tenant alone %.2f %%; pause when a tenant ends %d µs, natively %d µs\n",
				r.Quantum, r.KernelUS, r.P50/1000, r.P90/1000, r.P99/1000, r.Max/1000, r.Count, r.Overlaps, 100*r.Busy, 100*r.Alone, r.End/1000, r.NativeEnd/1000)
		}
	}
	if _, err := b.node.Ctl(ctx, "-T", "100ms"); err != nil {
		return err
	}
	return b.saveJSON("handover.json", map[string]any{"limits": limits, "cases": all})
}

func (r *handoverResult) measure(trace judge.Trace) {
	var gaps []int64
	work := byStart(trace)
	r.End = pauseAfterEnd(work)
	_, end := firstEnd(work)
	work = slices.DeleteFunc(work, func(w judge.Interval) bool { return w.Start >= end })
	for i, next := range work[1:] {
		if last := work[i]; last.Process != next.Process {
			gaps = append(gaps, next.Start-last.End)
		}
	}
	r.Count, r.Busy = len(gaps), busy(work)
	if len(gaps) == 0 {
		return
	}
	slices.Sort(gaps)
	r.Max = gaps[len(gaps)-1]
	at := func(p int) int64 { return gaps[min(len(gaps)-1, len(gaps)*p/100)] }
	r.P50, r.P90, r.P99 = at(50), at(90), at(99)
}

// firstEnd is the process whose last work ended first, and when that was.
func firstEnd(work []judge.Interval) (judge.Process, int64) {
	ends := map[judge.Process]int64{}
	for _, w := range work {
		ends[w.Process] = max(ends[w.Process], w.End)
	}
	var first judge.Process
	for p, end := range ends {
		if first == (judge.Process{}) || end < ends[first] {
			first = p
		}
	}
	return first, ends[first]
}

// pauseAfterEnd is the longest time without work of the others, ns, in the second after the
// end of the process that ended first. work: by its start.
func pauseAfterEnd(work []judge.Interval) int64 {
	first, at := firstEnd(work)
	until := at + aloneSeconds*int64(time.Second)
	var longest int64
	for _, w := range work {
		if w.Process != first && w.End > at && w.Start < until {
			longest = max(longest, w.Start-at)
			at = w.End
		}
	}
	return longest
}

func (b *bench) busyAlone(ctx context.Context, kernel int) (float64, error) {
	trace, err := b.busyTenants(ctx, kernel, false, "n")
	if err != nil {
		return 0, err
	}
	return busy(byStart(trace)), nil
}

func byStart(trace judge.Trace) []judge.Interval {
	work := slices.Clone(trace.Intervals)
	slices.SortFunc(work, func(a, b judge.Interval) int { return int(a.Start - b.Start) })
	return work
}

func busy(work []judge.Interval) float64 {
	var sum, end int64
	for _, w := range work {
		sum += w.Busy
		end = max(end, w.End)
	}
	return float64(sum) / float64(end-work[0].Start)
}

// busyTenants runs cuda-busy processes at the same time, each aloneSeconds longer than the
// one before, and returns what the GPU recorded of them.
func (b *bench) busyTenants(ctx context.Context, kernel int, shim bool, names ...string) (judge.Trace, error) {
	var files []string
	var cmds []*exec.Cmd
	for i, name := range names {
		file := filepath.Join(b.node.Records, "handover-"+name)
		if err := os.RemoveAll(file); err != nil {
			return judge.Trace{}, err
		}
		files = append(files, file)
		cmd := exec.CommandContext(ctx, b.node.Bin("cuda-busy"), "--tenant", name, "--record", file,
			"--kernel-us", strconv.Itoa(kernel), "--seconds", strconv.Itoa(handoverSeconds+i*aloneSeconds))
		who := native
		if shim {
			who = name
		}
		cmd.Env = append(os.Environ(), b.tenantEnv(who, "")...)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			return judge.Trace{}, err
		}
		cmds = append(cmds, cmd)
	}
	for _, cmd := range cmds {
		if err := cmd.Wait(); err != nil {
			return judge.Trace{}, fmt.Errorf("%v: %w", cmd.Args, err)
		}
	}
	trace, err := judge.ReadRecords(files...)
	if err == nil && len(trace.Intervals) == 0 {
		err = fmt.Errorf("%v recorded no work", files)
	}
	return trace, err
}
