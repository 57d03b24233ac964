// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// manyTenants are the numbers of tenants that saturate the GPU together, and
// how many of those natively too.
var (
	manyTenants = []int{2, 4, 8, 16}
	manyNatives = []int{2, 8}
)

// manyRounds is how many turns each tenant gets at least in a window.
const manyRounds = 5

// A crowd is so many tenants that work at the same time.
type crowd struct {
	Load    string            `json:"load"`
	Quantum string            `json:"quantum,omitempty"` // empty: natively
	Tenants int               `json:"tenants"`
	Seconds float64           `json:"seconds"`
	Rates   []float64         `json:"rates"`
	Turns   []int             `json:"turns"`
	Gaps    []float64         `json:"longest_gaps_s"`
	Sum     float64           `json:"sum"`
	Native  float64           `json:"native_alone"` // mean of before and after
	Shim    float64           `json:"shim_alone"`
	Of      float64           `json:"of_native_alone"`
	Spread  float64           `json:"max_by_min"`
	Clock   []float64         `json:"percent_by_our_clock,omitempty"`
	Counted map[string]uint64 `json:"counters,omitempty"`
}

// tenantsStep measures what 2 to 16 tenants get done together.
func (b *bench) tenantsStep(ctx context.Context, _ string) error {
	most, natives := 16, 8
	if b.cells.quick || b.simulated {
		most, natives = 4, 2
	}
	p, err := b.pool(ctx, most, natives)
	if err != nil {
		return err
	}
	if err := p.setShares(ctx); err != nil {
		return err
	}
	type run struct{ load, quantum string }
	runs := []run{{"gemm", "100ms"}, {"gemm", "5ms"}, {"add", "100ms"}}
	if b.simulated {
		runs = []run{{"spin", "100ms"}, {"spin", "5ms"}}
	}
	var all []*crowd
	var errs []error
	for i, r := range runs {
		if i > 0 && r.load != runs[i-1].load {
			if err := p.drop(ctx); err != nil {
				return err
			}
		}
		crowds, err := b.crowds(ctx, r.load, r.quantum, most, natives)
		all = append(all, crowds...)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s at %s: %w", r.load, r.quantum, err))
		}
	}
	errs = append(errs, p.drop(ctx), p.quantum(ctx, longQuantum), saveCells(b.results, "tenants.json", all))
	held := true
	for _, c := range all {
		if c.Quantum != "" {
			held = held && c.Of >= c.target()
		}
	}
	fmt.Println("  tenants: sum of all at least 99.5 % of one alone natively at 100 ms, 99 % at 5 ms: " + holds(held))
	return errors.Join(errs...)
}

func (c *crowd) target() float64 {
	if c.Quantum == shortQuantum {
		return 0.99
	}
	return 0.995
}

// crowds measures one load at one quantum with every number of tenants, with
// one alone natively before and after each, and one alone with the shim first.
func (b *bench) crowds(ctx context.Context, load, quantum string, most, natives int) ([]*crowd, error) {
	p := b.shared
	if err := p.quantum(ctx, quantum); err != nil {
		return nil, err
	}
	if err := p.have(ctx, append(p.tenants[:most:most], p.natives[:natives]...), same(load, most+natives)); err != nil {
		return nil, err
	}
	native, err := p.alone(ctx, p.natives[0], load)
	if err != nil {
		return nil, err
	}
	shim, err := p.alone(ctx, p.tenants[0], load)
	if err != nil {
		return nil, err
	}
	var all []*crowd
	measure := func(n int, quantum string) error {
		c, err := b.crowd(ctx, load, quantum, n)
		if err != nil {
			return err
		}
		next, err := p.alone(ctx, p.natives[0], load)
		if err != nil {
			return err
		}
		c.Native, c.Shim = (native.Rate+next.Rate)/2, shim.Rate
		c.Of = c.Sum / c.Native
		native = next
		all = append(all, c)
		fmt.Println("  " + c.line())
		return nil
	}
	if quantum == longQuantum && !b.simulated {
		for _, n := range manyNatives {
			if n <= natives {
				if err := measure(n, ""); err != nil {
					return all, err
				}
			}
		}
	}
	for _, n := range manyTenants {
		if n <= most {
			if err := measure(n, quantum); err != nil {
				return all, err
			}
		}
	}
	return all, nil
}

func same(load string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = load
	}
	return all
}

// crowd measures n tenants, or natively with an empty quantum.
func (b *bench) crowd(ctx context.Context, load, quantum string, n int) (*crowd, error) {
	p := b.shared
	workers, length, lead := p.natives, 2*time.Second, 500*time.Millisecond
	if quantum != "" {
		turn, err := time.ParseDuration(quantum)
		if err != nil {
			return nil, err
		}
		round := time.Duration(n) * turn
		workers, length, lead = p.tenants, max(3*time.Second, manyRounds*round), lead+round
	}
	workers = workers[:n]
	s := soon(lead, length)
	var counts []counted
	bills, err := b.during(ctx, 500*time.Millisecond, func() (err error) {
		counts, err = p.work(ctx, s, 0, workers, same(load, n))
		return err
	})
	if err != nil {
		return nil, err
	}
	c := &crowd{Load: load, Quantum: quantum, Tenants: n, Seconds: length.Seconds()}
	low, high := counts[0].Rate, counts[0].Rate
	for i, k := range counts {
		c.Rates = append(c.Rates, round(k.Rate, 2))
		c.Turns = append(c.Turns, k.Turns)
		c.Gaps = append(c.Gaps, round(k.LongestGap, 4))
		c.Sum += k.Rate
		low, high = min(low, k.Rate), max(high, k.Rate)
		if quantum != "" {
			c.Clock = append(c.Clock, round(clockShare(bills, tenantOn{firstUser + i, 0}, s.start, s.end), 2))
		}
	}
	if low > 0 {
		c.Spread = round(high/low, 4)
	}
	if quantum != "" {
		c.Counted = counters(bills)
	}
	return c, nil
}

func (c *crowd) line() string {
	how := c.Quantum
	if how == "" {
		how = "native"
	}
	line := fmt.Sprintf("%2d tenants, %-5s %-6s sum %8.1f/s = %6.2f %% of one alone natively (%.1f/s; with the shim %.1f/s); most by least %.3f",
		c.Tenants, c.Load, how, c.Sum, 100*c.Of, c.Native, c.Shim, c.Spread)
	if c.Counted["fences"] > 0 {
		line += fmt.Sprintf("; %d FENCES", c.Counted["fences"])
	}
	return line
}
