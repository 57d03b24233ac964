// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/quantile"
)

// mixes are the programs that share the GPU, two or three at a time. One with "@N" has a core
// limit of N percent, unless it runs natively.
var mixes = [][]string{
	{"decode", "decode"},
	{"decode", "decode", "decode"},
	{"decode", "gemm"},
	{"decode", "train"},
	{"embed", "train"},
	{"embed", "gemm"},
	{"train", "train"},
	{"compiled", "decode"},
	{"compiled", "compiled"},
	{"embed", "embed", "embed"},
	{"decode", "embed", "train"},
	{"gemm", "gemm"},
	{"decode@30", "decode", "decode"},
	{"gemm@30", "decode", "decode"},
	{"gemm@20", "gemm", "gemm"},
}

// loadsOf separates the programs of a mix from their limits.
func loadsOf(mix []string) (loads []string, shares []share) {
	for _, m := range mix {
		load, limit, _ := strings.Cut(m, "@")
		n, _ := strconv.Atoi(limit)
		loads, shares = append(loads, load), append(shares, share{Limit: n})
	}
	return loads, shares
}

// A way is how the programs of a mix share: natively, or with the shim in a mode
// that nvsharectl -S sets.
type way string

const nativeWay way = "native"

// allWays ends with auto: there and back again, its second round follows the first.
var allWays = []way{nativeWay, "on", "off", "auto"}

// autoLead is what mode auto takes to find the length of slices, before it is measured; and
// limitLead beside a tenant with a core limit, where it sees less of the time.
const autoLead, limitLead = 14 * time.Second, 24 * time.Second

// A ran is a mix that ran one way.
type ran struct {
	Way     way         `json:"way"`
	Mode    string      `json:"mode,omitempty"`   // why the scheduler chose turns, or none
	Slices  []string    `json:"slices,omitempty"` // each client's at the end of each round
	Rounds  [][]float64 `json:"rounds"`           // steps per second of each program in each round
	Rates   []float64   `json:"steps_per_second"`
	Of      []float64   `json:"of_alone"` // of the program's native rate alone, in this run
	Sum     float64     `json:"sum"`
	Sums    []float64   `json:"sums"`                     // of each round
	Native  *interval   `json:"of_native,omitempty"`      // the sum, of the native one
	P50     []float64   `json:"request_p50_ms,omitempty"` // of programs that answer requests; 0: others
	P99     []float64   `json:"request_p99_ms,omitempty"`
	Longest []float64   `json:"longest_gaps_s"`
	// CPU time of each program's process for a step, in ms, in each round: the process itself,
	// without a DataLoader's workers.
	CPU [][]float64 `json:"cpu_ms_per_step"`
}

// An interval is a ratio of two sums of windows, and what 95 % of 2,000 samples of the rounds
// (bootstrap, with both ways' windows of a round together) have. Processors that are shared
// with other machines have windows differ by a tenth, so that a ratio alone says little.
type interval struct {
	Ratio float64 `json:"ratio"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
}

// ratioOf compares windows by rounds.
func ratioOf(of, to []float64) *interval {
	n := min(len(of), len(to))
	random := rand.New(rand.NewPCG(1, 2))
	var samples []float64
	for range 2000 {
		var a, b float64
		for range n {
			k := random.IntN(n)
			a, b = a+of[k], b+to[k]
		}
		samples = append(samples, a/max(b, 1e-9))
	}
	return &interval{round(sumOf(of[:n])/max(sumOf(to[:n]), 1e-9), 4), round(quantile.Of(samples, 0.025), 4), round(quantile.Of(samples, 0.975), 4)}
}

// A mixed is all that was measured of a mix.
type mixed struct {
	Programs []string `json:"programs"`
	Runs     []ran    `json:"runs"`
}

// programResults is programs.json.
type programResults struct {
	Seconds float64            `json:"seconds"`
	Native  map[string]float64 `json:"native_alone"` // steps per second, the mean of before and after
	Shim    map[string]float64 `json:"shim_alone"`
	Embed   map[string]float64 `json:"embed_alone_ms"`
	Mixes   []*mixed           `json:"mixes"`
	Notes   []string           `json:"notes,omitempty"`
}

// poolOfPrograms has the step make a pool of its own, whose processes run programs. What it
// returns ends that pool.
func (b *bench) poolOfPrograms() func() {
	old := b.shared
	b.shared, b.backendName = nil, []string{"programs"}
	return func() {
		if b.shared != nil {
			_ = b.shared.stop()
		}
		b.shared, b.backendName = old, nil
	}
}

// programsStep measures real programs that share the GPU, natively and in each mode.
func (b *bench) programsStep(ctx context.Context, _ string) error {
	defer b.poolOfPrograms()()
	chosen, length := mixes, 5*time.Second
	if b.cells.quick {
		length = 3 * time.Second
	}
	if b.window > 0 {
		length = b.window
	}
	if b.cells.only != nil {
		chosen = slices.DeleteFunc(slices.Clone(mixes), func(m []string) bool { return !b.cells.only.MatchString(strings.Join(m, "+")) })
	}
	if b.simulated {
		b.backendName = []string{"driver"}
		chosen, length = [][]string{{"spin", "spin"}}, time.Second
	}
	most := 0
	for _, m := range chosen {
		most = max(most, len(m))
	}
	p, err := b.pool(ctx, most, most)
	if err != nil {
		return err
	}
	if err := p.setShares(ctx); err != nil {
		return err
	}
	if err := p.pin(); err != nil {
		return err
	}
	r := &programResults{Seconds: length.Seconds(), Native: map[string]float64{}, Shim: map[string]float64{}, Embed: map[string]float64{}}
	var errs []error
	for i, m := range chosen {
		if i > 0 {
			loads, _ := loadsOf(m)
			if err := p.keepOnly(ctx, loads); err != nil {
				errs = append(errs, err)
			}
		}
		got, err := b.mix(ctx, r, m, length)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", strings.Join(m, " + "), err))
		}
		if got == nil {
			continue
		}
		r.Mixes = append(r.Mixes, got)
		for _, line := range got.lines() {
			fmt.Println("  " + line)
		}
		errs = append(errs, b.saveJSON("programs.json", r)) // what there is, if a later mix hangs
	}
	_, err = b.node.Ctl(ctx, "-S", "on")
	return errors.Join(append(errs, err)...)
}

// pin gives the native process i and tenant i processors of their own, and the same ones:
// they never work at the same time. Where processes move about the processors, the rates of
// programs that are bound by them vary by a quarter.
func (p *pool) pin() error {
	most := max(len(p.tenants), len(p.natives))
	each := (len(p.b.processors) - 1) / most // the scheduler has the rest
	if each == 0 {
		fmt.Printf("  processes are not bound to processors: %d for %d tenants\n", len(p.b.processors), most)
		return nil
	}
	if each > 1 {
		each -= each % 2 // siblings of a core stay together
	}
	for _, workers := range [][]*worker{p.tenants, p.natives} {
		for i, w := range workers {
			if err := bind(w, p.b.processors.part(i, each)); err != nil {
				return err
			}
		}
	}
	return nil
}

// bind has a worker's threads, and those that come, use these processors only.
func bind(w *worker, set *unix.CPUSet) error {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", w.clientPID()))
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err == nil {
			err = unix.SchedSetaffinity(tid, set)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("%s: bind it to %d processors: %w", w.name, set.Count(), err)
		}
	}
	return nil
}

// keepOnly frees the loads that the next mix does not need.
func (p *pool) keepOnly(ctx context.Context, loads []string) error {
	return errors.Join(together(slices.Concat(p.tenants, p.natives), func(w *worker) error {
		for load := range p.built[w] {
			if !slices.Contains(loads, load) {
				if err := w.drop(ctx, load); err != nil {
					return err
				}
				delete(p.built[w], load)
			}
		}
		return nil
	})...)
}

func (b *bench) mix(ctx context.Context, r *programResults, of []string, length time.Duration) (*mixed, error) {
	programs, shares := loadsOf(of)
	p, n, ways := b.shared, len(programs), b.waysOf()
	if err := p.have(ctx, append(p.natives[:n:n], p.tenants[:n]...), append(slices.Clone(programs), programs...)); err != nil {
		return nil, err
	}
	for _, name := range programs {
		if _, known := r.Native[name]; known {
			continue
		}
		i := slices.Index(programs, name)
		for _, of := range []struct {
			w  *worker
			to map[string]float64
		}{{p.natives[i], r.Native}, {p.tenants[i], r.Shim}} {
			s := soon(refLead, length)
			c, err := p.work(ctx, s, 0, []*worker{of.w}, []string{name})
			if err != nil {
				return nil, err
			}
			of.to[name] = round(c[0].Rate, 3)
			if lat, err := of.w.latencies(ctx, name, s); err == nil && len(lat) > 0 && of.w == p.natives[i] {
				r.Embed["p50"], r.Embed["p99"] = inMS(lat)
			}
		}
		fmt.Printf("  %s alone: %.2f steps/s natively, %.2f with the shim (%.1f %%)\n", name, r.Native[name], r.Shim[name], 100*r.Shim[name]/r.Native[name])
	}
	if err := p.setShares(ctx, shares...); err != nil {
		return nil, err
	}
	m := &mixed{Programs: of, Runs: make([]ran, len(ways))}
	lats := make([][][]float64, len(ways))
	for i, how := range ways {
		m.Runs[i] = ran{Way: how, Longest: make([]float64, n)}
		lats[i] = make([][]float64, n)
	}
	// There and back again, as often as there are rounds, so that what drifts hits all.
	order := make([]int, 0, 2*len(ways))
	for i := range ways {
		order = append(order, i)
	}
	for i := range ways {
		order = append(order, len(ways)-1-i)
	}
	rounds := 4
	switch {
	case b.rounds > 0:
		rounds = b.rounds
	case b.cells.quick:
		rounds = 1
	}
	var err error
	for k := range rounds * len(ways) {
		i := order[k%len(order)]
		if err = b.round(ctx, &m.Runs[i], lats[i], programs, length); err != nil {
			err = fmt.Errorf("%s: %w", ways[i], err)
			break
		}
	}
	m.Runs = slices.DeleteFunc(m.Runs, func(r ran) bool { return len(r.Rounds) == 0 })
	for i := range m.Runs { // also of a run that was ended
		m.Runs[i].sum(r.Native, programs, lats[slices.Index(ways, m.Runs[i].Way)])
		if first := m.Runs[0]; i > 0 && first.Way == nativeWay {
			m.Runs[i].Native = ratioOf(m.Runs[i].Sums, first.Sums)
		}
	}
	return m, err
}

// waysOf are the ways that --ways names, or all.
func (b *bench) waysOf() []way {
	if len(b.ways) == 0 {
		return allWays
	}
	return slices.DeleteFunc(slices.Clone(allWays), func(w way) bool { return !slices.Contains(b.ways, string(w)) })
}

// round lets the programs work once, one way.
func (b *bench) round(ctx context.Context, r *ran, lats [][]float64, programs []string, length time.Duration) error {
	p, n := b.shared, len(programs)
	workers, lead := p.natives[:n], refLead
	if r.Way != nativeWay {
		if _, err := b.node.Ctl(ctx, "-S", string(r.Way)); err != nil {
			return err
		}
		workers = p.tenants[:n]
	}
	changed := slices.ContainsFunc(b.waysOf(), func(w way) bool { return w != nativeWay && w != "auto" })
	if r.Way == "auto" && (changed || len(r.Rounds) == 0) {
		lead += autoLead
		if slices.ContainsFunc(slices.Collect(maps.Values(p.shares)), func(s share) bool { return s.Limit > 0 }) {
			lead += limitLead - autoLead
		}
	}
	before, err := cpuOfAll(workers, cpuOfOne)
	if err != nil {
		return err
	}
	s := soon(lead, length)
	counts, err := p.work(ctx, s, 0, workers, programs)
	if err != nil {
		return err
	}
	after, err := cpuOfAll(workers, cpuOfOne)
	if err != nil {
		return err
	}
	if r.Way == "auto" {
		if st, err := b.node.Status(ctx); err == nil && len(st.Gpus) > 0 {
			r.Mode = st.Gpus[0].WayReason
			var round []string
			for _, c := range st.Gpus[0].Clients {
				round = append(round, fmt.Sprintf("%d: %v", c.Pid, time.Duration(c.SliceNs)))
			}
			r.Slices = append(r.Slices, strings.Join(round, ", "))
		}
	}
	rates, ms := make([]float64, n), make([]float64, n)
	for i, c := range counts {
		rates[i] = round(c.Rate, 3)
		ms[i] = round(cpuOfStep(after[i]-before[i], c, lead+length), 3)
		r.Longest[i] = max(r.Longest[i], round(c.LongestGap, 4))
		more, err := workers[i].latencies(ctx, programs[i], s)
		if err != nil {
			return err
		}
		lats[i] = append(lats[i], more...)
	}
	r.Rounds, r.CPU = append(r.Rounds, rates), append(r.CPU, ms)
	return nil
}

// cpuOf is the median CPU time of program i's steps, in ms.
func (r *ran) cpuOf(i int) float64 {
	var ms []float64
	for _, round := range r.CPU {
		ms = append(ms, round[i])
	}
	return median(ms)
}

// sum adds up what the rounds said, by what each program reaches alone.
func (r *ran) sum(alone map[string]float64, programs []string, lats [][]float64) {
	for i, name := range programs {
		rate := 0.0
		for _, round := range r.Rounds {
			rate += round[i] / float64(len(r.Rounds))
		}
		r.Rates = append(r.Rates, round(rate, 3))
		r.Of = append(r.Of, round(rate/alone[name], 4))
		r.Sum += rate / alone[name]
		p50, p99 := inMS(lats[i])
		r.P50, r.P99 = append(r.P50, p50), append(r.P99, p99)
	}
	r.Sum = round(r.Sum, 4)
	for _, rates := range r.Rounds {
		sum := 0.0
		for i, name := range programs {
			sum += rates[i] / alone[name]
		}
		r.Sums = append(r.Sums, round(sum, 4))
	}
}

// latencies are those of a program that answers requests, in seconds; empty for others.
func (w *worker) latencies(ctx context.Context, load string, s span) ([]float64, error) {
	if load != "embed" && load != "notebook" {
		return nil, nil
	}
	var r struct {
		Latencies []float64 `json:"latencies"`
	}
	err := w.call(ctx, dropWithin, map[string]any{"op": "call", "function": "latencies", "args": []any{load, s.start, s.end}}, &r)
	return r.Latencies, err
}

// inMS are median and 99th percentile of seconds, in milliseconds; zeros for none.
func inMS(seconds []float64) (p50, p99 float64) {
	if len(seconds) == 0 {
		return 0, 0
	}
	return round(1000*quantile.Of(seconds, 0.5), 3), round(1000*quantile.Of(seconds, 0.99), 3)
}

func (m *mixed) lines() []string {
	best := 0.0
	for _, r := range m.Runs {
		best = max(best, r.Sum)
	}
	lines := []string{strings.Join(m.Programs, " + ")}
	for _, r := range m.Runs {
		line := fmt.Sprintf("  %-6s sum %.3f of alone = %5.1f %% of the best;", r.Way, r.Sum, 100*r.Sum/best)
		for i, of := range r.Of {
			line += fmt.Sprintf(" %s %.3f", m.Programs[i], of)
			if r.P99[i] > 0 {
				line += fmt.Sprintf(" (p50 %.1f, p99 %.1f ms)", r.P50[i], r.P99[i])
			}
		}
		if i := r.Native; i != nil && len(r.Sums) > 1 {
			line += fmt.Sprintf("; %.3f of native (%.3f to %.3f)", i.Ratio, i.Low, i.High)
		}
		if len(r.Sums) > 1 {
			line += fmt.Sprintf("; rounds %.2f", r.Sums)
		}
		line += "; CPU"
		for i := range r.Of {
			line += fmt.Sprintf(" %.2f", r.cpuOf(i))
		}
		line += " ms a step"
		if r.Mode != "" {
			line += " [" + r.Mode + "]"
		}
		lines = append(lines, line)
	}
	return lines
}
