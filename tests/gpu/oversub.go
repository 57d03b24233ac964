// SPDX-License-Identifier: Apache-2.0

package main

import (
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
	Rates    []float64   `json:"steps_per_second"`
	Of       []float64   `json:"of_alone"`
	Sum      float64     `json:"sum"`
	Longest  []float64   `json:"longest_gaps_s"`
	Moving   float64     `json:"moving"` // part of the time
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
	o.Windows = make([][]float64, n)
	alone := func() error {
		if err := p.have(ctx, p.natives, o.Programs); err != nil {
			return err
		}
		for range 2 {
			for i, program := range o.Programs { // on the same processors as the tenant
				c, err := p.work(ctx, soon(refLead, aloneLength), 0, p.natives[i:i+1], []string{program})
				if err != nil {
					return err
				}
				o.Windows[i] = append(o.Windows[i], round(c[0].Rate, 3))
			}
		}
		return nil
	}
	if err := alone(); err != nil {
		return err
	}
	if err := p.keepOnly(ctx, nil); err != nil { // what others use of the GPU is not there to share
		return err
	}
	if err := p.have(ctx, p.tenants, o.Programs); err != nil {
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
	counts, err := p.work(ctx, soon(lead, length), 0, p.tenants, o.Programs)
	if err != nil {
		return err
	}
	after, err := s.swapped(ctx)
	if err != nil {
		return err
	}
	o.Promised = round(float64(after.promised)/float64(o.GPUMiB<<20), 2)
	o.In = after.in - before.in
	o.Moving = round((after.took-before.took).Seconds()/(lead+length).Seconds(), 4)
	if err := alone(); err != nil {
		return err
	}
	for i, c := range counts {
		windows := o.Windows[i]
		o.Alone = append(o.Alone, round(sumOf(windows)/float64(len(windows)), 3))
		of := c.Rate / o.Alone[i]
		o.Rates, o.Of, o.Longest = append(o.Rates, round(c.Rate, 3)), append(o.Of, round(of, 4)), append(o.Longest, round(c.LongestGap, 3))
		o.Sum += of
	}
	o.Sum = round(o.Sum, 4)
	return nil
}

// moves are what a scheduler has counted of moving in, and what is promised.
type moves struct {
	in, promised uint64
	took         time.Duration
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
	return moves{g.Swap.InBytes, g.Swap.PromisedBytes, time.Duration(g.Swap.InNs)}, nil
}

func (o *oversub) line() string {
	text := fmt.Sprintf("%s on %d MiB: ", strings.Join(o.Programs, " + "), o.GPUMiB)
	if o.Problem != "" {
		return text + "PROBLEM: " + o.Problem
	}
	return text + fmt.Sprintf("alone %.1f; sum %.3f of alone (%.3f), %.2f times the GPU's memory, moving takes %.1f %%, longest gaps %.1f s: %s",
		o.Alone, o.Sum, o.Of, o.Promised, 100*o.Moving, o.Longest, holds(o.Sum >= 0.98))
}
