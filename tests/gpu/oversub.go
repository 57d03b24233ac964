// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// oversubs are real programs that share a GPU on which their memory does not fit. A decoder
// has 2.5 GiB.
var oversubs = []oversub{
	{Programs: []string{"decode", "decode"}, GPUMiB: 13 << 8},
	{Programs: []string{"decode", "decode", "decode"}, GPUMiB: 13 << 8},
	{Programs: []string{"decode", "decode", "decode"}, GPUMiB: 5 << 10},
	{Programs: []string{"train", "train"}, GPUMiB: 6 << 10},
	{Programs: []string{"decode", "train"}, GPUMiB: 6 << 10},
}

// An oversub is what programs did together on a GPU that was made to look so small.
type oversub struct {
	Programs []string    `json:"programs"`
	GPUMiB   int         `json:"gpu_mib"`
	Promised float64     `json:"promised_of_gpu"`
	Alone    []float64   `json:"native_alone"`   // steps per second, the mean of the windows
	Windows  [][]float64 `json:"native_windows"` // of each, before and after what they do together
	Own      [][]float64 `json:"tenant_windows"` // likewise, of the tenants, each alone
	StepMS   [][]float64 `json:"step_ms"`        // of each while it has the GPU: natively, as a tenant alone, together
	CPUMS    [][]float64 `json:"cpu_ms"`         // likewise, CPU time of its process for a step
	Rates    []float64   `json:"steps_per_second"`
	Of       []float64   `json:"of_alone"`
	Sum      float64     `json:"sum"`
	Longest  []float64   `json:"longest_gaps_s"`
	Moving   float64     `json:"moving"` // part of the time
	Held     float64     `json:"held"`   // by tenants, as they are billed, part of the time
	In       uint64      `json:"in_bytes"`
	Problem  string      `json:"problem,omitempty"`
}

// aloneLength is that of each window of a program alone, of which there are four.
const aloneLength = 4 * time.Second

// oversubStep measures real programs whose memory does not fit together, against each alone.
func (b *bench) oversubStep(ctx context.Context, _ string) error {
	old := b.shared
	defer func() { b.shared, b.backendName = old, nil }()
	b.backendName = []string{"programs"}
	all, length := oversubs, 70*time.Second
	if b.cells.quick {
		all, length = oversubs[:2], 45*time.Second
	}
	if b.simulated {
		b.backendName = []string{"driver"}
		all, length = []oversub{{Programs: []string{"spin", "spin"}, GPUMiB: 256}}, time.Second
	}
	all = slices.Clone(all)
	var errs []error
	for i := range all {
		o := &all[i]
		if b.cells.only != nil && !b.cells.only.MatchString(strings.Join(o.Programs, "+")) {
			continue
		}
		if err := b.oversub(ctx, o, fmt.Sprintf("oversub-%d", i), length); err != nil {
			o.Problem = err.Error()
			errs = append(errs, fmt.Errorf("%s: %w", strings.Join(o.Programs, " + "), err))
		}
		fmt.Println("  " + o.line())
		errs = append(errs, b.saveJSON("oversub.json", all))
	}
	return errors.Join(errs...)
}

func (b *bench) oversub(ctx context.Context, o *oversub, name string, length time.Duration) (err error) {
	n := len(o.Programs)
	s, err := b.scheduler(ctx, name, "--gpu-memory", fmt.Sprintf("%dMi", o.GPUMiB), "--swap-memory", fmt.Sprintf("%dMi", o.GPUMiB*n+1024), "--swap-ready", "100%")
	if err != nil {
		return err
	}
	defer s.stop()
	s.awaitReady(ctx, uint64(o.GPUMiB*n+1024)<<20)
	b.shared = nil
	p, err := b.poolOf(ctx, n, n, s.dir)
	if p != nil {
		defer func() { err = errors.Join(err, p.stop()) }()
	}
	if err != nil {
		return err
	}
	if err := p.pin(); err != nil {
		return err
	}
	o.Windows, o.Own = make([][]float64, n), make([][]float64, n)
	// alone adds two windows of each program, in which the others do nothing.
	steps := map[*worker]float64{} // ms, the least
	cpu := map[*worker][]float64{} // ms of CPU time a step, of each window
	alone := func(workers []*worker, windows [][]float64) error {
		if err := p.have(ctx, workers, o.Programs); err != nil {
			return err
		}
		for range 2 {
			for i, program := range o.Programs { // on the same processors natively and as tenants
				w := workers[i]
				c, ms, err := p.workAndCPU(ctx, refLead, aloneLength, []*worker{w}, []string{program})
				if err != nil {
					return err
				}
				windows[i], cpu[w] = append(windows[i], round(c[0].Rate, 3)), append(cpu[w], ms[0])
				steps[w] = min(cmp.Or(steps[w], c[0].StepMS), c[0].StepMS)
			}
		}
		return nil
	}
	if err := alone(p.natives, o.Windows); err != nil {
		return err
	}
	if err := p.keepOnly(ctx, nil); err != nil { // what others use of the GPU is not there to share
		return err
	}
	if err := alone(p.tenants, o.Own); err != nil {
		return err
	}
	lead := 15 * time.Second // until their pauses are known
	if b.simulated {
		lead = time.Second
	}
	before, err := s.swapped(ctx)
	if err != nil {
		return err
	}
	counts, together, err := p.workAndCPU(ctx, lead, length, p.tenants, o.Programs)
	if err != nil {
		return err
	}
	after, err := s.swapped(ctx)
	if err != nil {
		return err
	}
	o.Held = round((after.used-before.used).Seconds()/(lead+length).Seconds(), 4)
	o.Promised = round(float64(after.promised)/float64(o.GPUMiB<<20), 2)
	o.In = after.in - before.in
	o.Moving = round((after.took-before.took).Seconds()/(lead+length).Seconds(), 4)
	if err := errors.Join(alone(p.tenants, o.Own), alone(p.natives, o.Windows)); err != nil {
		return err
	}
	for i, c := range counts {
		windows := o.Windows[i]
		o.Alone = append(o.Alone, round(sumOf(windows)/float64(len(windows)), 3))
		of := c.Rate / o.Alone[i]
		o.Rates, o.Of, o.Longest = append(o.Rates, round(c.Rate, 3)), append(o.Of, round(of, 4)), append(o.Longest, round(c.LongestGap, 3))
		o.Sum += of
		o.CPUMS = append(o.CPUMS, []float64{round(median(cpu[p.natives[i]]), 2), round(median(cpu[p.tenants[i]]), 2), round(together[i], 2)})
		o.StepMS = append(o.StepMS, []float64{round(steps[p.natives[i]], 2), round(steps[p.tenants[i]], 2), round(c.StepMS, 2)})
	}
	o.Sum = round(o.Sum, 4)
	return nil
}

// moves are what a scheduler has counted of moving in, and what is promised.
type moves struct {
	in, promised uint64
	took         time.Duration
	used         time.Duration // by all tenants
}

func (s *scheduler) swapped(ctx context.Context) (moves, error) {
	st, err := s.status(ctx)
	if err != nil {
		return moves{}, err
	}
	if len(st.Gpus) == 0 || st.Gpus[0].Swap == nil {
		return moves{}, errors.New("the scheduler swaps nothing")
	}
	g := st.Gpus[0]
	m := moves{in: g.Swap.InBytes, promised: g.Swap.PromisedBytes, took: time.Duration(g.Swap.InNs)}
	for _, t := range g.Tenants {
		m.used += time.Duration(t.UsedNs)
	}
	return m, nil
}

func (o *oversub) line() string {
	text := fmt.Sprintf("%s on %d MiB: ", strings.Join(o.Programs, " + "), o.GPUMiB)
	if o.Problem != "" {
		return text + "PROBLEM: " + o.Problem
	}
	own := 0.0
	for i, windows := range o.Own {
		own += sumOf(windows) / float64(len(windows)) / o.Alone[i] / float64(len(o.Own))
	}
	return text + fmt.Sprintf("alone %.1f, as tenants %.3f of it; sum %.3f of alone (%.3f), %.2f times the GPU's memory, held for %.1f %% of the time, moving takes %.1f %%, longest gaps %.1f s; ms a step natively, as tenants alone, together %.1f, of CPU time %.1f: %s",
		o.Alone, own, o.Sum, o.Of, o.Promised, 100*o.Held, 100*o.Moving, o.Longest, o.StepMS, o.CPUMS, holds(o.Sum >= 0.98))
}
