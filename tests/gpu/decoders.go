// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const besideGEMM = "decoder and GEMM"

// A mixedRow is a way in which a decoder and a GEMM program share the GPU.
type mixedRow struct {
	name, way string
	limit     int // --core-limit of the GEMM program
}

var mixedRows = []mixedRow{
	{name: native, way: native},
	{name: plainMPS, way: plainMPS},
	{name: inGroup, way: inGroup},
	{"group, GEMM at most 60 %", inGroup, 60},
	{"group, GEMM at most 80 %", inGroup, 80},
	{"group, GEMM at most 90 %", inGroup, 90},
}

// chosen: --only names this part, or nothing.
func (o *overlapBench) chosen(name string) bool {
	return o.cells.only == nil || o.cells.only.MatchString(name)
}

// mixed has a decoder beside a GEMM program, each way.
func (o *overlapBench) mixed(ctx context.Context) error {
	var chosen []mixedRow
	for _, row := range mixedRows {
		if o.chosen(besideGEMM + ", " + row.name) {
			chosen = append(chosen, row)
		}
	}
	if len(chosen) == 0 {
		return nil
	}
	alone := map[string]float64{}
	for _, load := range []string{"decode", "gemm"} {
		var err error
		if alone[load], err = o.alone(ctx, load); err != nil {
			return err
		}
	}
	for _, row := range chosen {
		c := besideCell{Way: row.name, What: "a decoder and a GEMM program, both members"}
		gemm := member{load: "gemm"}
		if row.limit != 0 {
			gemm.flags = []string{"--core-limit", strconv.Itoa(row.limit)}
		}
		all, err := o.together(ctx, row.way, []member{{load: "decode"}, gemm})
		if err != nil {
			c.Error = err.Error()
		} else {
			c.Members, c.Other = all[:1], all[1]
			c.OfAlone = []float64{round(all[0]/alone["decode"], 3), round(all[1]/alone["gemm"], 3)}
		}
		o.r.Beside = append(o.r.Beside, c)
		fmt.Printf("  decoder and GEMM, %-20s of alone: %.3f %s\n", c.Way, c.OfAlone, c.Error)
	}
	return nil
}

// decoders measures three and six decoders each way. Processes of all ways exist during all
// windows, and those of one way work at a time: what drifts hits all ways.
func (o *overlapBench) decoders(ctx context.Context) error {
	const load = "decode"
	alone, err := o.alone(ctx, load)
	if err != nil {
		return err
	}
	counts, rounds := []int{3, mostDecoders}, 4
	if o.cells.quick {
		counts, rounds = counts[:1], 2
	}
	most := counts[len(counts)-1]
	if err := o.startMPS(ctx); err != nil {
		return err
	}
	defer o.stopMPS()
	var all []*worker
	defer func() { o.quit(all) }()
	of := map[string][]*worker{}
	for _, way := range overlapWays {
		for i := range most {
			w, err := o.worker(ctx, way, i, nil)
			if err != nil {
				return err
			}
			all, of[way] = append(all, w), append(of[way], w)
		}
	}
	if err := errors.Join(together(all, func(w *worker) error { return prepare(ctx, w, load) })...); err != nil {
		return err
	}
	for _, n := range counts {
		cells, err := o.inTurn(ctx, overlapWays, of, load, n, rounds)
		if err != nil {
			return err
		}
		mps := 0.0
		for _, c := range cells {
			c.OfAlone = round(c.Sum/alone, 3)
			switch c.Way {
			case plainMPS:
				mps = c.Sum
			case inGroup:
				c.OfMPS = round(c.Sum/max(mps, 1e-9), 3)
			}
			o.r.Cells = append(o.r.Cells, c)
			fmt.Printf("  %d decoders, %-6s %.3f of one alone, median of %.2f steps/s", n, c.Way, c.OfAlone, c.Rounds)
			if c.OfMPS != 0 {
				fmt.Printf("; %.3f of plain MPS: %s", c.OfMPS, holds(c.OfMPS >= overlapTarget))
			}
			fmt.Println()
		}
	}
	return nil
}

// inTurn has the first n workers of each way work at the same time, the ways one after the
// other and back again, so that what drifts hits all.
func (o *overlapBench) inTurn(ctx context.Context, ways []string, of map[string][]*worker, load string, n, rounds int) ([]overlapCell, error) {
	cells := make([]overlapCell, len(ways))
	for i, way := range ways {
		cells[i] = overlapCell{Load: load, Way: way, N: n, Rates: make([]float64, n)}
	}
	for r := range rounds {
		for i := range ways {
			if r%2 == 1 {
				i = len(ways) - 1 - i
			}
			first := int(of[ways[i]][0].clientPID())
			before, err := cpuOf(first)
			if err != nil {
				return nil, err
			}
			rates, err := o.window(ctx, of[ways[i]][:n], slices.Repeat([]string{load}, n))
			if err != nil {
				return nil, err
			}
			after, err := cpuOf(first)
			if err != nil {
				return nil, err
			}
			cells[i].User = round(cells[i].User+(after.user-before.user).Seconds(), 3)
			cells[i].System = round(cells[i].System+(after.system-before.system).Seconds(), 3)
			cells[i].Rounds = append(cells[i].Rounds, round(sumOf(rates), 3))
			for k, rate := range rates {
				cells[i].Rates[k] += rate / float64(rounds)
			}
		}
	}
	for i := range cells {
		for k, rate := range cells[i].Rates {
			cells[i].Rates[k] = round(rate, 3)
		}
		cells[i].Sum = median(cells[i].Rounds)
	}
	return cells, nil
}

const besideTraining = "decoders beside a training"

// outsideTraining has two decoders of a group beside a training that is no member. Processes of
// all ways exist during all windows; the ways work in turn.
func (o *overlapBench) outsideTraining(ctx context.Context) error {
	const rounds, inTurns = 4, "group, by turns"
	loads := []string{"decode", "decode", "train"}
	if err := o.startMPS(ctx); err != nil {
		return err
	}
	defer o.stopMPS()
	of := map[string][]*worker{}
	var all []*worker
	defer func() { o.quit(all) }()
	outsider := map[string]string{native: native, plainMPS: native, inGroup: shim1}
	for _, way := range overlapWays {
		for i := range loads {
			who := way
			if i == len(loads)-1 {
				who = outsider[way]
			}
			w, err := o.worker(ctx, who, i, nil)
			if err != nil {
				return err
			}
			all, of[way] = append(all, w), append(of[way], w)
		}
	}
	if err := errors.Join(together(all, func(w *worker) error { return prepare(ctx, w, loads[slices.Index(all, w)%len(loads)]) })...); err != nil {
		return err
	}
	got := map[string][][]float64{} // a row for each window
	window := func(way string) error {
		rates, err := o.window(ctx, of[way], loads)
		got[way] = append(got[way], rates)
		return err
	}
	alone := make([]float64, len(loads))
	aloneOnce := func() error {
		for i := range loads {
			rates, err := o.window(ctx, of[native][i:i+1], loads[i:i+1])
			if err != nil {
				return err
			}
			alone[i] += rates[0] / 2
		}
		return nil
	}
	mode := func(m string) error {
		cmd := exec.CommandContext(ctx, o.node.Bin("nvsharectl"), "-S", m)
		cmd.Env = append(cmd.Environ(), "NVSHARE_RUN_DIR="+o.s.dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
		}
		return nil
	}
	steps := []func() error{aloneOnce, func() error { return window(inGroup) }} // turns say what each gets alone
	for r := range rounds {
		for i := range overlapWays {
			if r%2 == 1 {
				i = len(overlapWays) - 1 - i
			}
			steps = append(steps, func() error { return window(overlapWays[i]) })
		}
	}
	of[inTurns] = of[inGroup]
	steps = append(steps, aloneOnce, func() error { return o.noteWay(ctx) }, func() error { return mode("on") },
		func() error { return window(inTurns) }, func() error { return window(inTurns) }, func() error { return mode("auto") })
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	got[inGroup] = got[inGroup][1:]
	for _, way := range append(slices.Clone(overlapWays), inTurns) {
		c := besideCell{Way: way, What: "two decoders, and a training that is no member"}
		var sums []float64
		for i := range loads {
			var each []float64
			for _, rates := range got[way] {
				each = append(each, rates[i])
			}
			rate := median(each)
			c.OfAlone = append(c.OfAlone, round(rate/max(alone[i], 1e-9), 3))
			if i < len(loads)-1 {
				c.Members = append(c.Members, round(rate, 3))
			} else {
				c.Other = round(rate, 3)
			}
		}
		for _, rates := range got[way] {
			sum := 0.0
			for i := range rates {
				sum += rates[i] / max(alone[i], 1e-9)
			}
			sums = append(sums, round(sum, 3))
		}
		c.Rounds, c.Sum = sums, median(sums)
		o.r.Beside = append(o.r.Beside, c)
		fmt.Printf("  %s, %-15s of alone: %.3f, sum %.3f; rounds %.2f\n", c.What, way, c.OfAlone, c.Sum, sums)
	}
	return nil
}

// noteWay notes how the scheduler has tenants share.
func (o *overlapBench) noteWay(ctx context.Context) error {
	r, err := o.s.status(ctx)
	if err != nil || len(r.Gpus) == 0 {
		return errors.Join(err, errors.New("the scheduler has no GPU"))
	}
	o.r.Facts["way of sharing with a group and a training outside"] = r.Gpus[0].Way + ": " + r.Gpus[0].WayReason
	return nil
}

// alone is what a program does alone, natively, in steps per second.
func (o *overlapBench) alone(ctx context.Context, load string) (float64, error) {
	got, err := o.together(ctx, native, []member{{load: load}})
	if err != nil {
		return 0, fmt.Errorf("%s alone: %w", load, err)
	}
	fmt.Printf("  %s alone: %.3f steps/s\n", load, got[0])
	return got[0], nil
}

// member is a program that runs beside others.
type member struct {
	load  string
	flags []string // of nvsharectl run
}

// together runs programs at the same time, one way, and returns the steps per second of each.
func (o *overlapBench) together(ctx context.Context, way string, members []member) (all []float64, err error) {
	err = o.inWay(ctx, way, func() error {
		var workers []*worker
		var loads []string
		defer func() { o.quit(workers) }()
		for i, m := range members {
			w, err := o.worker(ctx, way, i, m.flags)
			if err != nil {
				return err
			}
			workers, loads = append(workers, w), append(loads, m.load)
		}
		if err := errors.Join(together(workers, func(w *worker) error { return prepare(ctx, w, loads[slices.Index(workers, w)]) })...); err != nil {
			return err
		}
		all, err = o.window(ctx, workers, loads)
		return err
	})
	return all, err
}

// worker starts the i-th program of a way. Its processes come with what prepare does.
func (o *overlapBench) worker(ctx context.Context, way string, i int, flags []string) (*worker, error) {
	dir := filepath.Join(swapDir, "overlap-python")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	cmd := o.command(ctx, way, flags, o.python)
	// startWorker gives a program the arguments of Python.
	script := filepath.Join(dir, fmt.Sprintf("%s-%d", way, i))
	text := "#!/bin/sh\nexec '" + strings.Join(cmd.Args, "' '") + "' \"$@\"\n"
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		return nil, err
	}
	var w *worker
	err := o.onProcessors(i, mostDecoders, func() (err error) {
		w, err = startWorker(script, o.script("worker.py"), fmt.Sprintf("%s %d", way, i), filepath.Join(o.results, "overlap-stderr.txt"), cmd.Env, "programs")
		return err
	})
	return w, err
}

// onProcessors runs f, which starts a process, so that the process has the i-th of n equal sets
// of processors, where there are so many. What the process starts inherits the set.
func (b *bench) onProcessors(i, n int, f func() error) error {
	each := len(b.processors) / n
	if each == 0 {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var old unix.CPUSet
	if err := unix.SchedGetaffinity(0, &old); err != nil {
		return err
	}
	if err := unix.SchedSetaffinity(0, b.processors.part(i, each)); err != nil {
		return fmt.Errorf("bind process %d of %d to processors: %w", i, n, err)
	}
	return errors.Join(f(), unix.SchedSetaffinity(0, &old))
}

// prepare has a worker build a load.
func prepare(ctx context.Context, w *worker, load string) error {
	if _, err := w.load(ctx); err != nil {
		return err
	}
	if _, err := w.init(ctx); err != nil {
		return err
	}
	_, err := w.build(ctx, load, built{})
	return err
}

// window has workers work at the same time, and returns the steps per second of each.
func (o *overlapBench) window(ctx context.Context, workers []*worker, loads []string) ([]float64, error) {
	s := soon(time.Second, o.length)
	all := make([]float64, len(loads))
	return all, errors.Join(together(workers, func(w *worker) error {
		i := slices.Index(workers, w)
		got, err := w.window(ctx, s, loads[i])
		all[i] = round(got[loads[i]].Rate, 3)
		return err
	})...)
}

func (o *overlapBench) quit(workers []*worker) {
	for _, e := range together(workers, (*worker).quit) {
		if e != nil {
			fmt.Printf("  %v\n", e)
		}
	}
}
