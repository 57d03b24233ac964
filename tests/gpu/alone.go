// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// alonePairs is how many native processes and how many tenants of each program take turns:
// two processes of the same program differ by up to a tenth, so one pair says nothing.
const alonePairs = 3

// An aloneCell is a program that has the GPU to itself, natively and with the shim.
type aloneCell struct {
	Program string      `json:"program"`
	Way     way         `json:"way"`
	Seconds float64     `json:"seconds"` // of a window
	Native  [][]float64 `json:"native"`  // steps per second of each process in each round
	Shim    [][]float64 `json:"shim"`
	Ratio   *interval   `json:"shim_of_native"`
	// CPU time of a process, its threads and its children, per step, in milliseconds.
	NativeCPU float64 `json:"native_cpu_ms"`
	ShimCPU   float64 `json:"shim_cpu_ms"`
}

// aloneStep measures what the shim costs programs that share the GPU with nobody: in mode auto,
// or the ways that --ways names; with --swapping also where memory may be swapped, in turns. The
// other tenants are there, and do nothing.
func (b *bench) aloneStep(ctx context.Context, _ string) error {
	defer func() { _, _ = b.node.Ctl(context.WithoutCancel(ctx), "-S", "on") }()
	var cells []*aloneCell
	if b.simulated {
		return b.alone(ctx, &cells, "driver", "spin", "phases")
	}
	return errors.Join(b.alone(ctx, &cells, "programs", "decode", "train", "embed", "compiled", "gemm"), b.alone(ctx, &cells, "driver", "phases"))
}

// alone adds a cell for each of the programs of a backend, and for each way.
func (b *bench) alone(ctx context.Context, cells *[]*aloneCell, backend string, programs ...string) error {
	defer b.poolOfPrograms()()
	b.backendName = []string{backend}
	length, rounds := 4*time.Second, 4
	switch {
	case b.simulated:
		length = time.Second
	case b.cells.quick:
		length = 3 * time.Second
	}
	if b.rounds > 0 {
		rounds = b.rounds
	}
	if b.cells.only != nil {
		programs = slices.DeleteFunc(programs, func(p string) bool { return !b.cells.only.MatchString(p) })
	}
	ways := []way{"auto"}
	if len(b.ways) > 0 {
		ways = slices.DeleteFunc(b.waysOf(), func(w way) bool { return w == nativeWay })
	}
	if len(programs) == 0 {
		return nil
	}
	runDir := ""
	if b.swapping {
		s, err := b.scheduler(ctx, "alone-"+backend, "--swap-memory", "16Gi")
		if err != nil {
			return err
		}
		defer s.stop()
		ways, runDir = []way{"on"}, s.dir
	}
	p, err := b.poolOf(ctx, alonePairs, alonePairs, runDir)
	if b.swapping && p != nil {
		defer func() { b.shared = nil; _ = p.stop() }() // its scheduler ends as well
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, program := range programs {
		if err := p.keepOnly(ctx, []string{program}); err != nil {
			errs = append(errs, err)
		}
		for _, w := range ways {
			c, err := p.compare(ctx, program, w, length, rounds)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s, %s: %w", program, w, err))
				continue
			}
			*cells = append(*cells, c)
			fmt.Printf("  %-8s %-4s %.3f of native (%.3f to %.3f); CPU %.2f ms a step natively, %.2f with the shim\n", program, w, c.Ratio.Ratio, c.Ratio.Low, c.Ratio.High, c.NativeCPU, c.ShimCPU)
			fmt.Printf("           native %.2f\n           shim   %.2f\n", c.Native, c.Shim)
			errs = append(errs, b.saveJSON("alone.json", *cells))
		}
	}
	return errors.Join(errs...)
}

// compare lets each process of both kinds work alone, on the same processors, in each round.
func (p *pool) compare(ctx context.Context, program string, by way, length time.Duration, rounds int) (*aloneCell, error) {
	all := slices.Concat(p.natives, p.tenants)
	for _, w := range all {
		if err := bind(w, p.b.processors.part(0, min(6, len(p.b.processors)))); err != nil {
			return nil, err
		}
	}
	if err := p.have(ctx, all, slices.Repeat([]string{program}, len(all))); err != nil {
		return nil, err
	}
	if p.runDir == "" { // else its scheduler takes turns
		if _, err := p.b.node.Ctl(ctx, "-S", string(by)); err != nil {
			return nil, err
		}
	}
	if by == "auto" { // until the way to share is chosen
		if _, err := p.work(ctx, soon(refLead, autoLead), 0, p.tenants[:1], []string{program}); err != nil {
			return nil, err
		}
	}
	c := &aloneCell{Program: program, Way: by, Seconds: length.Seconds()}
	cpu := map[bool][]float64{}
	for r := range rounds {
		rates := map[bool][]float64{false: make([]float64, alonePairs), true: make([]float64, alonePairs)}
		for k := range 2 * alonePairs {
			i, shim := k/2, k%2 == 1
			if r%2 == 1 { // there and back again: what drifts hits both
				i, shim = alonePairs-1-i, !shim
			}
			w := p.natives[i]
			if shim {
				w = p.tenants[i]
			}
			counts, ms, err := p.workAndCPU(ctx, soon(refLead, length), []*worker{w}, []string{program})
			if err != nil {
				return nil, err
			}
			rates[shim][i] = round(counts[0].Rate, 3)
			cpu[shim] = append(cpu[shim], ms[0])
		}
		c.Native, c.Shim = append(c.Native, rates[false]), append(c.Shim, rates[true])
	}
	c.Ratio = ratioOf(slices.Concat(c.Shim...), slices.Concat(c.Native...))
	c.NativeCPU, c.ShimCPU = round(median(cpu[false]), 3), round(median(cpu[true]), 3)
	return c, nil
}

// workAndCPU is work, and the CPU time that each worker's process took for a step, in ms. The
// lead's steps are taken to be as fast as those of the window.
func (p *pool) workAndCPU(ctx context.Context, s span, workers []*worker, loads []string) (counts []counted, ms []float64, err error) {
	before, err := cpuOfAll(workers, cpuOf)
	if err != nil {
		return nil, nil, err
	}
	if counts, err = p.work(ctx, s, 0, workers, loads); err != nil {
		return nil, nil, err
	}
	after, err := cpuOfAll(workers, cpuOf)
	if err != nil {
		return nil, nil, err
	}
	for i, c := range counts {
		ms = append(ms, cpuOfStep(after[i]-before[i], c, s.all()))
	}
	return counts, ms, nil
}

// cpuOfStep returns the CPU time of a step in ms, of what took so many seconds of CPU time. All
// steps are taken to be as fast as those that were counted.
func cpuOfStep(seconds float64, c counted, worked time.Duration) float64 {
	return 1000 * seconds / max(c.Rate*worked.Seconds(), 1e-9)
}

// cpuOfAll returns what of says of each worker's process, in seconds.
func cpuOfAll(workers []*worker, of func(pid int) (used, error)) (seconds []float64, err error) {
	for _, w := range workers {
		u, err := of(w.pid())
		if err != nil {
			return nil, err
		}
		seconds = append(seconds, u.all().Seconds())
	}
	return seconds, nil
}

// A used is CPU time.
type used struct{ user, system time.Duration }

func (u used) all() time.Duration { return u.user + u.system }

// A process is what /proc/PID/stat says, see proc(5).
type process struct {
	parent int
	used
}

func parseStat(text []byte) (p process, err error) {
	_, rest, _ := strings.Cut(string(text), ") ") // the name may contain anything
	f := strings.Fields(rest)
	if len(f) < 13 {
		return p, fmt.Errorf("stat of a process: %q", text)
	}
	ticks := func(field string) time.Duration {
		n, _ := strconv.ParseInt(field, 10, 64)
		return time.Duration(n) * 10 * time.Millisecond // USER_HZ is 100 on all that we run on
	}
	p.parent, _ = strconv.Atoi(f[1])
	p.used = used{ticks(f[11]), ticks(f[12])}
	return p, nil
}

// cpuOfOne returns the CPU time of a process without its descendants.
func cpuOfOne(pid int) (used, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return used{}, err
	}
	p, err := parseStat(text)
	return p.used, err
}

// cpuOf returns the CPU time of a process and its living descendants.
func cpuOf(pid int) (u used, err error) {
	dirs, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return u, err
	}
	all := map[int]process{}
	for _, path := range dirs {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		p, err := parseStat(text)
		if err != nil {
			return u, err
		}
		id, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		all[id] = p
	}
	for id, p := range all {
		for at := id; at > 1; at = all[at].parent {
			if at == pid {
				u.user, u.system = u.user+p.user, u.system+p.system
				break
			}
		}
	}
	return u, nil
}
