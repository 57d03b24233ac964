// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	// allocPairs is how often alloc-cost is run in each of the three ways, and
	// trioPairs how many windows of PyTorch's loads are compared.
	allocPairs = 9
	trioPairs  = 7

	// allocTarget and stepTarget: not slower than native, a step within 0.5 %.
	allocTarget = 1.02
	stepTarget  = 0.995

	withSwap = "swap" // beside native and shim1
)

var threeWays = []string{native, shim1, withSwap}

type allocResult struct {
	Runs   map[string][]launchSample `json:"runs"`
	Median map[string]launchSample   `json:"median_ns"`
	// Medians of what shim and swap took, of native in the same round.
	OfNative map[string]launchSample `json:"of_native"`
	Trios    []*trio                 `json:"torch"`
	IPC      json.RawMessage         `json:"torch_ipc,omitempty"` // what ipc.py said, with swap
	Problems []string                `json:"problems,omitempty"`
}

// A trio is one load of one allocator, natively, with the shim and with the shim
// under a scheduler that swaps, while all fits.
type trio struct {
	Allocator string               `json:"allocator"`
	Load      string               `json:"load"`
	Rates     map[string][]float64 `json:"rates"` // steps per second, by window
	// Of native's rate between the windows before and after.
	OfNative map[string]*spread `json:"of_native"`
	Problem  string             `json:"problem,omitempty"`
}

// allocStep measures what allocations cost, and what swapping costs while all fits.
func (b *bench) allocStep(ctx context.Context, work string) error {
	ctx, cancel := context.WithTimeout(ctx, 6*time.Minute)
	defer cancel()
	room, err := hostRoom()
	if err != nil {
		return err
	}
	arena := min(64<<10, int(room*hostPart/mib20)) // of which nothing is used: all fits
	if b.simulated {
		arena = 1024
	}
	s, err := b.scheduler(ctx, "alloc", "--swap-memory", fmt.Sprintf("%dMi", arena))
	if err != nil {
		return err
	}
	defer s.stop()
	s.awaitReady(ctx, uint64(arena)<<20/4) // that is done once, and slows others down meanwhile
	r := &allocResult{Runs: map[string][]launchSample{}, Median: map[string]launchSample{}, OfNative: map[string]launchSample{}}
	errs := []error{b.allocCost(ctx, s, r), b.saveJSON("alloc.json", r)}
	for _, g := range b.trioGroups() {
		errs = append(errs, b.trios(ctx, work, s, g, r), b.saveJSON("alloc.json", r))
	}
	if !b.simulated {
		errs = append(errs, b.ipc(ctx, s, r), b.saveJSON("alloc.json", r))
	}
	return errors.Join(errs...)
}

// ipc has two processes of PyTorch share memory by CUDA IPC while swapping is on:
// what the driver refuses for the kind of memory that can be moved.
func (b *bench) ipc(ctx context.Context, s *scheduler, r *allocResult) error {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.python, "-B", b.script("ipc.py"))
	cmd.Env, cmd.Stderr = append(os.Environ(), s.env(withSwap)...), os.Stderr
	out, err := cmd.Output()
	if json.Valid(out) {
		r.IPC = out
	}
	fmt.Printf("  torch.multiprocessing with swap on: %s: %s\n", strings.TrimSpace(string(out)), holds(err == nil))
	if err != nil {
		return fmt.Errorf("torch.multiprocessing: %w", err)
	}
	return nil
}

// allocCost runs alloc-cost in the three ways in turn.
func (b *bench) allocCost(ctx context.Context, s *scheduler, r *allocResult) error {
	pairs := allocPairs
	if b.cells.quick || b.simulated {
		pairs = 3
	}
	var rounds [2][]launchSample
	for i := range pairs {
		round := map[string]launchSample{}
		for j := range threeWays {
			who := threeWays[(i+j)%len(threeWays)] // what drifts hits all
			env := b.tenantEnv(who, "")
			if who == withSwap {
				env = s.env(who)
			}
			ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
			cmd := exec.CommandContext(ctx, b.node.Bin("alloc-cost"))
			cmd.Env, cmd.Stderr = append(os.Environ(), env...), os.Stderr
			out, err := cmd.Output()
			cancel()
			if err != nil {
				return fmt.Errorf("alloc-cost, %s: %w", who, err)
			}
			sample := launchSample{}
			if err := json.Unmarshal(out, &sample); err != nil {
				return err
			}
			round[who] = sample
			r.Runs[who] = append(r.Runs[who], sample)
		}
		for k, who := range threeWays[1:] {
			of := launchSample{}
			for name, ns := range round[who] {
				of[name] = ns / round[native][name]
			}
			rounds[k] = append(rounds[k], of)
		}
	}
	for k, who := range threeWays[1:] {
		r.OfNative[who] = medians(rounds[k])
	}
	for _, who := range threeWays {
		r.Median[who] = medians(r.Runs[who])
	}
	fmt.Printf("  %-22s %12s %12s %12s\n", "ns per call", "native", "shim", "with swap")
	held := true
	for _, name := range slices.Sorted(maps.Keys(r.Median[native])) {
		of := r.OfNative[withSwap][name]
		held = held && of <= allocTarget
		fmt.Printf("  %-22s %12.0f %12.0f %12.0f   of native: shim %.3f, with swap %.3f\n", strings.TrimSuffix(name, "_ns"),
			r.Median[native][name], r.Median[shim1][name], r.Median[withSwap][name], r.OfNative[shim1][name], of)
	}
	fmt.Printf("  alloc: with swap not slower than native (%.2f times at most): %s\n", allocTarget, holds(held))
	return nil
}

// trioGroups are PyTorch's allocators, with a training step, and for the default
// one also what all pay while all fits.
func (b *bench) trioGroups() []loadGroup {
	if b.simulated {
		return []loadGroup{{framework: "driver", allocator: "default", backend: "driver", loads: []string{"spin"}}}
	}
	return []loadGroup{
		{framework: "torch", allocator: "default", backend: "torch", loads: []string{"conv", "gemm", "allocs"}},
		{framework: "torch", allocator: "expandable", backend: "torch", loads: []string{"conv"},
			env: []string{"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}},
		{framework: "torch", allocator: "async", backend: "torch", loads: []string{"conv"},
			env: []string{"PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"}},
	}
}

// trios measures the loads of one allocator.
func (b *bench) trios(ctx context.Context, work string, s *scheduler, g loadGroup, r *allocResult) error {
	dir := filepath.Join(work, "private", "alloc")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var all []*worker
	defer func() {
		_ = together(all, (*worker).quit)
	}()
	for _, who := range threeWays {
		env := b.tenantEnv(who, "")
		if who == withSwap {
			env = s.env(who)
		}
		env = append(append([]string{"PYTHONWARNINGS=ignore", "CUDA_CACHE_PATH=" + filepath.Join(dir, "cuda")}, g.env...), env...)
		w, err := startWorker(b.python, b.script("worker.py"), who, filepath.Join(b.results, "alloc-stderr.txt"), env, b.backend()...)
		if err != nil {
			return err
		}
		all = append(all, w)
	}
	if err := errors.Join(together(all, func(w *worker) error {
		if _, err := w.load(ctx); err != nil {
			return err
		}
		_, err := w.init(ctx)
		return err
	})...); err != nil {
		return fmt.Errorf("%s: %w", g.allocator, err)
	}
	var errs []error
	for _, load := range g.loads {
		t := &trio{Allocator: g.allocator, Load: load, Rates: map[string][]float64{}, OfNative: map[string]*spread{}}
		r.Trios = append(r.Trios, t)
		if err := b.trio(ctx, all, t); err != nil {
			t.Problem = err.Error()
			errs = append(errs, fmt.Errorf("%s %s: %w", t.Allocator, t.Load, err))
		}
		fmt.Println("  " + t.line())
	}
	return errors.Join(errs...)
}

// trio has the three work on one load in turn: native, shim, native, swap, and so
// on, and compares each with native around it.
func (b *bench) trio(ctx context.Context, all []*worker, t *trio) error {
	var like built
	for _, w := range all { // the first compiles
		said, err := w.build(ctx, t.Load, like)
		if err != nil {
			return err
		}
		if like.Steps == 0 {
			like = said
		}
	}
	defer func() {
		for _, w := range all {
			if w.dead == nil {
				_ = w.drop(ctx, t.Load)
			}
		}
	}()
	length, pairs := 700*time.Millisecond, trioPairs
	if b.cells.quick || b.simulated {
		length, pairs = 300*time.Millisecond, 3
	}
	window := func(w *worker) (float64, error) {
		c, err := w.window(ctx, soon(100*time.Millisecond, length), t.Load)
		t.Rates[w.name] = append(t.Rates[w.name], c[t.Load].Rate)
		return c[t.Load].Rate, err
	}
	of := map[string][]float64{}
	before, err := window(all[0])
	if err != nil {
		return err
	}
	for range pairs {
		for _, w := range all[1:] {
			rate, err := window(w)
			if err != nil {
				return err
			}
			after, err := window(all[0])
			if err != nil {
				return err
			}
			if before+after > 0 {
				of[w.name] = append(of[w.name], 2*rate/(before+after))
			}
			before = after
		}
	}
	for who, v := range of {
		t.OfNative[who] = newSpread(v)
	}
	return nil
}

func (t *trio) line() string {
	text := fmt.Sprintf("%s, %s: ", t.Allocator, t.Load)
	if t.Problem != "" {
		return text + "PROBLEM: " + t.Problem
	}
	swap := t.OfNative[withSwap]
	if swap == nil {
		return text + "nothing measured: " + holds(false)
	}
	return text + fmt.Sprintf("%.1f steps/s natively; with the shim %s; with swap on and all fitting %s: %s",
		medianOf(t.Rates[native]), t.OfNative[shim1], swap, holds(swap.Median >= stepTarget))
}
