// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

const (
	// makespanWithin: no case begins that would end later.
	makespanWithin = 240 * time.Second

	adaptive = "adaptive"
)

// A jobKind is how a tenant uses the GPU: bursts of work with pauses for what it
// does on the CPU, so many times. A sleep stands for the CPU's work: cores there
// are enough of.
type jobKind struct {
	Name   string  `json:"name"`
	Burst  float64 `json:"burst_ms"`
	Pause  float64 `json:"pause_ms"`
	Bursts int     `json:"bursts"`
	// How much faster than one after the other all are to be done.
	Target float64 `json:"target"`
	Alone  float64 `json:"native_alone_s"`
}

// A makespanCase is tenants that begin at the same time.
type makespanCase struct {
	Kind     string  `json:"kind"`
	Promised float64 `json:"promised_of_gpu"`
	Tenants  int     `json:"tenants"`
	MiB      int     `json:"tenant_mib"`
	Quantum  string  `json:"quantum"`

	Together float64   `json:"together_s"` // from the start to the end of the last
	Each     []float64 `json:"each_s"`
	After    float64   `json:"one_after_the_other_s"` // natively
	Faster   float64   `json:"faster"`
	Out      uint64    `json:"out_bytes"`
	In       uint64    `json:"in_bytes"`
	Ready    uint64    `json:"host_memory_ready_bytes"`
	Skipped  string    `json:"skipped,omitempty"`
	Problem  string    `json:"problem,omitempty"`
}

type makespanResult struct {
	GPUMiB int             `json:"gpu_mib"`
	Kinds  []*jobKind      `json:"kinds"`
	Cases  []*makespanCase `json:"cases"`
}

// makespanStep compares how long tenants take together, whose memory does not fit
// together, with one after the other natively.
func (b *bench) makespanStep(ctx context.Context, _ string) error {
	if err := b.installSwap(); err != nil {
		return err
	}
	deadline := time.Now().Add(makespanWithin)
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(30*time.Second))
	defer cancel()
	// Small, for time: what is moved in a second takes turns of ten.
	r := &makespanResult{GPUMiB: 8192, Kinds: []*jobKind{
		{Name: "90 % GPU", Burst: 450, Pause: 50, Bursts: 6, Target: 0.98},
		{Name: "50 % GPU", Burst: 500, Pause: 500, Bursts: 5, Target: 1.3},
	}}
	fixed := []string{"1", "5", "30"}
	if b.simulated || b.cells.quick {
		for _, k := range r.Kinds {
			k.Bursts = 2
		}
		fixed = []string{"1"}
	}
	if b.simulated {
		r.GPUMiB = 256
	}
	var errs []error
	for _, k := range r.Kinds {
		took, err := b.together(ctx, k, 1, r.GPUMiB/2-32, nil) // always the same: its work is by the GPU's clock
		if err != nil {
			return fmt.Errorf("%s natively: %w", k.Name, err)
		}
		k.Alone = took[0]
		fmt.Printf("  %s, natively, one alone: %.2f s\n", k.Name, k.Alone)
	}
	add := func(kind *jobKind, tenants, mib int, promised float64, quantum string) {
		c := &makespanCase{Kind: kind.Name, Promised: promised, Tenants: tenants, MiB: mib, Quantum: quantum, After: float64(tenants) * kind.Alone}
		r.Cases = append(r.Cases, c)
		if left := time.Until(deadline); left.Seconds() < c.After+5 {
			c.Skipped = fmt.Sprintf("%.0f s left", left.Seconds())
		} else if err := b.makespan(ctx, r, c, kind); err != nil {
			c.Problem = err.Error()
			errs = append(errs, fmt.Errorf("%s, %d tenants, %s: %w", c.Kind, c.Tenants, c.Quantum, err))
		}
		fmt.Println("  " + c.line(kind))
		if err := b.saveJSON("makespan.json", r); err != nil {
			errs = append(errs, err)
		}
	}
	// Two of these fit together: each a little less than a half.
	half := r.GPUMiB/2 - 32
	for _, kind := range r.Kinds {
		add(kind, 3, half, 1.5, adaptive)
		add(kind, 4, half, 2, adaptive)
		add(kind, 6, half, 3, adaptive)
	}
	for _, kind := range r.Kinds { // no two of which fit together
		add(kind, 2, r.GPUMiB*3/4, 1.5, adaptive)
	}
	for _, quantum := range fixed {
		for _, kind := range r.Kinds {
			add(kind, 4, half, 2, quantum)
		}
	}
	held := true
	for _, c := range r.Cases {
		if c.Quantum == adaptive && c.Tenants > 2 {
			held = held && c.Faster >= r.kind(c.Kind).Target
		}
	}
	fmt.Printf("  makespan: 50 %% GPU at least %.1f times faster than one after the other, 90 %% GPU never under %.2f: %s\n",
		r.Kinds[1].Target, r.Kinds[0].Target, holds(held))
	return errors.Join(append(errs, b.saveJSON("makespan.json", r), b.save("makespan.svg", plotMakespan(r)))...)
}

func (r *makespanResult) kind(name string) *jobKind {
	return r.Kinds[slices.IndexFunc(r.Kinds, func(k *jobKind) bool { return k.Name == name })]
}

// makespan runs one case with a scheduler of its own.
func (b *bench) makespan(ctx context.Context, r *makespanResult, c *makespanCase, kind *jobKind) error {
	// The host memory is there before they come, as on a node that has been up for a
	// while: else jobs of seconds wait for it.
	swap := uint64(c.Tenants*c.MiB+1024) << 20
	args := []string{"--gpu-memory", fmt.Sprintf("%dMi", r.GPUMiB), "--swap-headroom", "0",
		"--swap-memory", fmt.Sprintf("%dMi", swap>>20), "--swap-ready", "100%"}
	if c.Quantum != adaptive {
		args = append(args, "--tq", c.Quantum, "--swap-share", "none")
	}
	s, err := b.scheduler(ctx, fmt.Sprintf("makespan-%d", len(r.Cases)), args...)
	if err != nil {
		return err
	}
	defer s.stop()
	c.Ready = s.awaitReady(ctx, swap)
	took, err := b.together(ctx, kind, c.Tenants, c.MiB, s)
	if err != nil {
		return err
	}
	c.Each, c.Together = took, slices.Max(took)
	c.Faster = c.After / c.Together
	if now, err := s.status(ctx); err == nil && len(now.Gpus) > 0 && now.Gpus[0].Swap != nil {
		c.Out, c.In = now.Gpus[0].Swap.OutBytes, now.Gpus[0].Swap.InBytes
	}
	return nil
}

// together has so many tenants work at the same time, natively without a
// scheduler, and returns how long each took from the common start, seconds.
func (b *bench) together(ctx context.Context, kind *jobKind, tenants, mib int, s *scheduler) ([]float64, error) {
	one := float64(kind.Bursts) * (kind.Burst + kind.Pause) / 1000
	within := time.Duration((2*one*float64(tenants) + 15) * float64(time.Second))
	ctx, cancel := context.WithTimeout(ctx, within+time.Minute)
	defer cancel()
	var loads []*swapLoad
	defer func() { killAll(loads) }()
	for i := range tenants {
		l, err := b.startSwapLoad(i, s, within+time.Minute, "--mib", strconv.Itoa(mib), "--piece-mib", "128",
			"--burst-ms", fmt.Sprint(kind.Burst), "--pause-ms", fmt.Sprint(kind.Pause), "--bursts", strconv.Itoa(kind.Bursts))
		if err != nil {
			return nil, err
		}
		loads = append(loads, l)
	}
	if err := each(loads, func(_ int, l *swapLoad) error {
		_, err := l.await(ctx, "ready", 45*time.Second)
		return err
	}); err != nil {
		return nil, err
	}
	time.Sleep(300 * time.Millisecond) // arenas are made in the background
	began := monotonic()
	for _, l := range loads {
		if err := l.begin(); err != nil {
			return nil, err
		}
	}
	took := make([]float64, tenants)
	err := each(loads, func(i int, l *swapLoad) error {
		done, _, err := l.results(ctx, within)
		took[i] = float64(done.Ended-began) / 1e9
		return err
	})
	return took, err
}

func (c *makespanCase) line(kind *jobKind) string {
	text := fmt.Sprintf("%s, %.1f times the GPU's memory (%d tenants of %d MiB), quantum %s: ", c.Kind, c.Promised, c.Tenants, c.MiB, c.Quantum)
	switch {
	case c.Skipped != "":
		return text + "skipped: " + c.Skipped
	case c.Problem != "":
		return text + "PROBLEM: " + c.Problem
	}
	text += fmt.Sprintf("%.2f s, one after the other natively %.2f s: %.2f times faster; %.1f GiB out, %.1f in",
		c.Together, c.After, c.Faster, float64(c.Out)/(1<<30), float64(c.In)/(1<<30))
	if c.Quantum == adaptive && c.Tenants > 2 {
		text += ": " + holds(c.Faster >= kind.Target)
	}
	return text
}
