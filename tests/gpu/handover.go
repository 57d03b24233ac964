// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// handoverSeconds is how long two tenants take turns in each case.
const handoverSeconds = 4

// A handover case: how long the GPU stands still when it passes from one
// tenant to the other, by the stamps that the kernels take on the GPU.
type handoverResult struct {
	Quantum  string `json:"quantum"`
	KernelUS int    `json:"kernel_us"`
	Count    int    `json:"handovers"`
	Overlaps int    `json:"overlaps"`
	// From the end of one tenant's last kernel to the start of the other's
	// first, nanoseconds.
	P50   int64   `json:"p50_ns"`
	P90   int64   `json:"p90_ns"`
	P99   int64   `json:"p99_ns"`
	Busy  float64 `json:"busy"`  // part of the time from first to last kernel
	Alone float64 `json:"alone"` // the same for one of them without the shim
}

func (b *bench) handovers(ctx context.Context) error {
	var all []handoverResult
	for _, kernel := range []int{500, 1700} {
		alone, err := b.busyAlone(ctx, kernel)
		if err != nil {
			return err
		}
		for _, quantum := range []string{"100ms", "20ms", "5ms"} {
			if _, err := b.node.Ctl(ctx, "-T", quantum); err != nil {
				return err
			}
			trace, err := b.busyTenants(ctx, kernel, true, "a", "b")
			if err != nil {
				return err
			}
			r := handoverResult{Quantum: quantum, KernelUS: kernel, Alone: alone, Overlaps: judge.Judge(trace, judge.Options{}).Overlaps()}
			r.measure(trace)
			all = append(all, r)
			fmt.Printf("hand-over at %-5s kernels of %4d µs: p50 %3d µs, p90 %3d µs, p99 %3d µs (%d), %d overlaps; GPU busy %.2f %%, one native tenant alone %.2f %%\n",
				r.Quantum, r.KernelUS, r.P50/1000, r.P90/1000, r.P99/1000, r.Count, r.Overlaps, 100*r.Busy, 100*r.Alone)
		}
	}
	if _, err := b.node.Ctl(ctx, "-T", "100ms"); err != nil {
		return err
	}
	return b.saveJSON("handover.json", all)
}

func (r *handoverResult) measure(trace judge.Trace) {
	var gaps []int64
	work := byStart(trace)
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
	at := func(p int) int64 { return gaps[min(len(gaps)-1, len(gaps)*p/100)] }
	r.P50, r.P90, r.P99 = at(50), at(90), at(99)
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

// busyTenants runs cuda-busy processes at the same time and returns what the
// GPU recorded of them.
func (b *bench) busyTenants(ctx context.Context, kernel int, shim bool, names ...string) (judge.Trace, error) {
	var files []string
	var cmds []*exec.Cmd
	for _, name := range names {
		file := filepath.Join(b.node.Records, "handover-"+name)
		if err := os.RemoveAll(file); err != nil {
			return judge.Trace{}, err
		}
		files = append(files, file)
		cmd := exec.CommandContext(ctx, b.node.Bin("cuda-busy"), "--tenant", name, "--record", file,
			"--kernel-us", strconv.Itoa(kernel), "--seconds", strconv.Itoa(handoverSeconds))
		cmd.Env = os.Environ()
		if shim {
			cmd.Env = append(cmd.Env, "LD_PRELOAD="+b.node.Shim(), "NVSHARE_RUN_DIR="+node.RunDir)
		}
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
