// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"
)

// A contentCase is two programs of content.py whose memory does not fit together.
type contentCase struct {
	Program string `json:"program"`
	MiB     int    `json:"mib"`     // of each; pool: what it asks for
	GPUMiB  int    `json:"gpu_mib"` // that the GPU is made to look like; 0: as it is
	HostMiB int    `json:"host_mib"`
	Natives int    `json:"natives"` // how many fit natively

	Ways []*contentWay `json:"ways"`
}

// A contentWay is what they did: natively, as tenants, and as tenants with NVSHARE_MOVE_ALL.
type contentWay struct {
	Way     string    `json:"way"`
	MiB     []int     `json:"mib"`              // of each, as it has got it
	Rates   []float64 `json:"steps_per_second"` // of each
	Longest float64   `json:"seconds"`          // until the last had ended its last step
	Out     uint64    `json:"out_bytes"`        // over the link, while they worked
	In      uint64    `json:"in_bytes"`
	OutNs   int64     `json:"out_ns"`
	InNs    int64     `json:"in_ns"`
	Zero    int       `json:"zero_mib"` // that left without a copy, from the start of the processes
	Clean   int       `json:"unchanged_mib"`
	Wrong   int       `json:"wrong_pieces"`
	GBps    float64   `json:"gb_per_second,omitempty"` // kernel: how fast it reads
	OfPeak  float64   `json:"of_peak,omitempty"`       // of the memory's clock and width
	RunUs   float64   `json:"run_us,omitempty"`        // what a run of the shim takes, 128 MiB
	Problem string    `json:"problem,omitempty"`
}

const (
	contentWithin = 4 * time.Minute
	contentWindow = 15 * time.Second
	contentUser   = 900
)

// contentStep measures what moves of pools that are mostly zero, of weights that do not change, and
// of weights that do; against the same with all copied, and natively.
func (b *bench) contentStep(ctx context.Context, _ string) error {
	ctx, cancel := context.WithTimeout(ctx, contentWithin+time.Minute)
	defer cancel()
	room, err := hostRoom()
	if err != nil {
		return err
	}
	host := min(54<<10, int(room*hostPart/mib20))
	cases := []*contentCase{
		{Program: "kernel", MiB: 16 << 10, Natives: 1},
		{Program: "pool", HostMiB: host, Natives: 1},
		{Program: "model", MiB: 12 << 10, GPUMiB: 14 << 10, HostMiB: min(host, 26<<10), Natives: 2},
		{Program: "training", MiB: 12 << 10, GPUMiB: 14 << 10, HostMiB: min(host, 26<<10), Natives: 2},
	}
	window := contentWindow
	if b.window > 0 {
		window = b.window
	}
	if b.simulated {
		window = 2 * time.Second
		cases[0].MiB = 64
		cases[1].MiB, cases[1].GPUMiB, cases[1].HostMiB = 192, 256, 384
		for _, c := range cases[2:] {
			c.MiB, c.GPUMiB, c.HostMiB = 160, 256, 512
		}
	}
	var errs []error
	for _, c := range cases {
		if b.cells.only != nil && !b.cells.only.MatchString(c.Program) {
			continue
		}
		ways := []string{native, "tenants", "move-all"}
		if c.Program == "kernel" {
			ways = ways[:1]
		}
		for _, way := range ways {
			w := &contentWay{Way: way}
			if err := b.content(ctx, c, w, window); err != nil {
				w.Problem = err.Error()
				errs = append(errs, fmt.Errorf("%s, %s: %w", c.Program, way, err))
			}
			c.Ways = append(c.Ways, w)
			fmt.Printf("  %-9s %-9s %v MiB: %.1f steps/s, %.0f MiB out, %.0f in, moving took %.1f + %.1f s of %.1f; %d MiB zero, %d unchanged; %d pieces wrong %s\n", c.Program, way, w.MiB, w.Rates,
				float64(w.Out)/mib20, float64(w.In)/mib20, float64(w.OutNs)/1e9, float64(w.InNs)/1e9, w.Longest, w.Zero, w.Clean, w.Wrong, w.Problem)
			if w.GBps != 0 {
				fmt.Printf("    nvshare_look reads %.0f GB/s, %.3f of the peak: %s; a run of 128 MiB takes %.0f us\n", w.GBps, w.OfPeak, holds(w.OfPeak >= 0.8), w.RunUs)
			}
			if w.Wrong != 0 {
				errs = append(errs, fmt.Errorf("%s, %s: %d pieces are wrong", c.Program, way, w.Wrong))
			}
			errs = append(errs, b.saveJSON("content.json", cases))
		}
	}
	return errors.Join(errs...)
}

// content runs a case one way.
func (b *bench) content(ctx context.Context, c *contentCase, r *contentWay, window time.Duration) (err error) {
	name, n := "content-"+c.Program+"-"+r.Way, 2
	var s *scheduler
	if r.Way == native {
		n = c.Natives
		if err := b.installSwap(); err != nil {
			return err
		}
	} else {
		args := []string{"--swap-memory", fmt.Sprintf("%dMi", c.HostMiB), "--swap-ready", "100%"}
		if c.GPUMiB != 0 {
			args = append(args, "--gpu-memory", fmt.Sprintf("%dMi", c.GPUMiB))
		}
		if b.simulated {
			args = append(args, "--swap-headroom", "0")
		}
		if s, err = b.scheduler(ctx, name, args...); err != nil {
			return err
		}
		defer s.stop()
		s.awaitReady(ctx, uint64(c.HostMiB)<<20)
		if c.MiB == 0 {
			now, err := s.status(ctx)
			if err != nil {
				return err
			}
			c.MiB = int(now.Gpus[0].MemoryBytes >> 20 / 4 * 3)
		}
	}
	mib := c.MiB
	if mib == 0 {
		mib = 48 << 10 // alone, its size does not matter
	}
	var workers []*worker
	defer func() {
		for _, w := range workers {
			err = errors.Join(err, w.quit())
		}
		for i := range workers {
			zero, clean := leftUncopied(b.contentLog(name, i))
			r.Zero += zero
			r.Clean += clean
		}
	}()
	for i := range n {
		env, _, who, err := b.asUser(contentUser+i, s)
		if err != nil {
			return err
		}
		if r.Way == "move-all" {
			env = append(env, "NVSHARE_MOVE_ALL=1")
		}
		if s != nil {
			env = append(env, "NVSHARE_DEBUG=1")
		}
		w, err := startWorkerAs(who, b.python, filepath.Join(swapDir, "content.py"), fmt.Sprintf("%s %d", c.Program, i), b.contentLog(name, i), env, c.Program, strconv.Itoa(mib))
		if err != nil {
			return err
		}
		workers = append(workers, w)
		var has struct{ MiB int }
		if err := w.call(ctx, loadWithin, map[string]any{"op": "load"}, nil); err != nil {
			return err
		}
		if err := w.call(ctx, buildWithin, map[string]any{"op": "init"}, &has); err != nil {
			return err
		}
		r.MiB = append(r.MiB, has.MiB)
	}
	before, err := contentMoved(ctx, s)
	if err != nil {
		return err
	}
	did := make([]struct {
		Steps   int
		Seconds float64
		GBps    float64 `json:"gb_per_second"`
		OfPeak  float64 `json:"of_peak"`
		RunUs   float64 `json:"run_us"`
	}, n)
	until := float64(time.Now().Add(window).UnixMilli()) / 1e3
	at := map[*worker]int{}
	for i, w := range workers {
		at[w] = i
	}
	if err := errors.Join(together(workers, func(w *worker) error {
		return w.call(ctx, window+time.Minute, map[string]any{"op": "work", "until": until}, &did[at[w]])
	})...); err != nil {
		return err
	}
	after, err := contentMoved(ctx, s)
	if err != nil {
		return err
	}
	for _, d := range did {
		r.Rates = append(r.Rates, round(float64(d.Steps)/d.Seconds, 2))
		r.Longest = max(r.Longest, round(d.Seconds, 2))
		r.GBps, r.OfPeak, r.RunUs = round(d.GBps, 1), round(d.OfPeak, 3), round(d.RunUs, 1)
	}
	r.Out, r.In, r.OutNs, r.InNs = after.out-before.out, after.in-before.in, after.outNs-before.outNs, after.inNs-before.inNs
	for _, w := range workers {
		var found struct{ Wrong int }
		if err := w.call(ctx, time.Minute, map[string]any{"op": "check"}, &found); err != nil {
			return err
		}
		r.Wrong += found.Wrong
	}
	return nil
}

// contentLog is where a process writes, its shim too.
func (b *bench) contentLog(name string, i int) string {
	return filepath.Join(b.results, fmt.Sprintf("%s-%d-stderr.txt", name, i))
}

var soFar = regexp.MustCompile(`so far \d+ MiB were copied off it, (\d+) MiB were zero, (\d+) MiB were unchanged`)

// leftUncopied is what the shim of a process said last of what it did not copy, MiB.
func leftUncopied(log string) (zero, clean int) {
	text, _ := os.ReadFile(log)
	for _, m := range soFar.FindAllSubmatch(text, -1) {
		zero, _ = strconv.Atoi(string(m[1]))
		clean, _ = strconv.Atoi(string(m[2]))
	}
	return zero, clean
}

// linkMoves is what has gone over the link, by a scheduler's account.
type linkMoves struct {
	out, in     uint64
	outNs, inNs int64
}

// contentMoved asks for it; natively nothing moves.
func contentMoved(ctx context.Context, s *scheduler) (linkMoves, error) {
	if s == nil {
		return linkMoves{}, nil
	}
	now, err := s.status(ctx)
	if err != nil {
		return linkMoves{}, err
	}
	if len(now.Gpus) == 0 || now.Gpus[0].Swap == nil {
		return linkMoves{}, errors.New("the scheduler swaps nothing")
	}
	sw := now.Gpus[0].Swap
	return linkMoves{sw.OutBytes, sw.InBytes, sw.OutNs, sw.InNs}, nil
}
