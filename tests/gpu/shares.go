// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/tests/quantile"
)

const (
	// The first second of a cell is not judged; after it any five are.
	sharesSettle = time.Second
	sharesWindow = 5 * time.Second
	sharesSlice  = 200 * time.Millisecond

	// sharesTarget is the error that the issue allows, percentage points.
	sharesTarget = 2
)

// shareCases are what tenants are given, by number.
var shareCases = []struct {
	name   string
	shares []share
}{
	{"limit 25 alone", []share{{Limit: 25}}},
	{"limit 50 alone", []share{{Limit: 50}}},
	{"limit 75 alone", []share{{Limit: 75}}},
	{"limit 90 alone", []share{{Limit: 90}}},
	{"limits 25/75", []share{{Limit: 25}, {Limit: 75}}},
	{"limits 30/60", []share{{Limit: 30}, {Limit: 60}}},
	{"limits 10/90", []share{{Limit: 10}, {Limit: 90}}},
	{"limits 5 x 20", []share{{Limit: 20}, {Limit: 20}, {Limit: 20}, {Limit: 20}, {Limit: 20}}},
	{"request 60 beside two", []share{{Request: 60}, {}, {}}},
}

// shareLoads are what tenants do. In a mixture each of several does another
// kind, and one by itself does all kinds in turn.
var shareLoads = map[string]func(i, n int) string{
	"gemm":  func(int, int) string { return "calm-gemm" },
	"add":   func(int, int) string { return "add" },
	"graph": func(int, int) string { return "calm-graph" },
	"mix": func(i, n int) string {
		if n == 1 {
			return "mix"
		}
		return []string{"calm-gemm", "add", "calm-graph", "mix"}[i%4]
	},
	// Not by default: the work that these do in some time depends on how much
	// else the GPU does. See loads/torch.py, sparse.
	"hot-gemm":  func(int, int) string { return "gemm" },
	"hot-graph": func(int, int) string { return "graph" },
	"spin":      func(int, int) string { return "spin" },
}

var sharesByDefault = []string{"gemm", "add", "graph", "mix"}

// A shareCell is some tenants at work together.
type shareCell struct {
	Load    string        `json:"load"`
	Case    string        `json:"case"`
	Slice   float64       `json:"slice_s"`
	Tenants []shareTenant `json:"tenants"`
	// Of all windows and tenants, percentage points, by the tenants' own work.
	Worst  float64 `json:"worst_error"`
	Median float64 `json:"median_error"`
	// The same by our clock, over all windows together.
	ClockWorst float64           `json:"worst_error_by_our_clock"`
	Counters   map[string]uint64 `json:"counters"`
	Clocks     *clocks           `json:"gpu,omitempty"`
}

type shareTenant struct {
	Share share  `json:"share"`
	Load  string `json:"load"`
	// What it should get, percent: no less, no more.
	Low  float64 `json:"low"`
	High float64 `json:"high"`
	// What the scheduler says that it should get, halfway.
	Promised float64 `json:"promised"`
	// Steps per second alone, and the time of a step alone and here: while it
	// runs its steps may take less time here, where the GPU is cooler.
	Alone       float64   `json:"alone_per_s"`
	AloneStepMS float64   `json:"alone_step_ms"`
	StepMS      float64   `json:"step_ms"`
	Work        []float64 `json:"work"` // percent of alone, of each window
	Time        float64   `json:"time"` // percent of the GPU's time by its own steps, over all windows
	Clock       float64   `json:"clock"`
	Done        []float64 `json:"done"` // steps at the end of each slice
}

type sharesResult struct {
	Target float64      `json:"target"`
	Cells  []*shareCell `json:"cells"`
}

// sharesStep measures how exact compute shares are.
func (b *bench) sharesStep(ctx context.Context, _ string) error {
	loads := sharesByDefault
	if len(b.loads) > 0 {
		loads = b.loads
	}
	if b.simulated {
		loads = []string{"spin"}
	}
	for _, l := range loads {
		if shareLoads[l] == nil {
			return fmt.Errorf("shares: no load %q", l)
		}
	}
	p, err := b.pool(ctx, 5, 0)
	if err != nil {
		return err
	}
	if err := p.quantum(ctx, longQuantum); err != nil {
		return err
	}
	if err := p.setShares(ctx); err != nil {
		return err
	}
	watch := watchClocks(ctx)
	defer watch.stop()
	r := sharesResult{Target: sharesTarget}
	var errs []error
	for _, load := range loads {
		before, err := p.references(ctx, load)
		if err != nil {
			return err
		}
		var cells []*shareCell
		for _, c := range shareCases {
			cell, err := b.shareCell(ctx, load, c.name, c.shares, watch)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s, %s: %w", load, c.name, err))
				continue
			}
			cells = append(cells, cell)
		}
		// What drifts over the cells' time goes half and half.
		var after map[string]counted
		err = p.setShares(ctx)
		if err == nil {
			after, err = p.references(ctx, load)
		}
		if err != nil {
			errs, after = append(errs, err), before
		}
		for _, c := range cells {
			c.judge(before, after)
			fmt.Println("  " + c.line())
		}
		r.Cells = append(r.Cells, cells...)
		if err := saveCells(b.results, "shares-"+load+".json", cells); err != nil {
			return err
		}
	}
	fmt.Println("  " + r.verdict())
	return errors.Join(append(errs, p.drop(ctx))...)
}

// references are what one tenant without a share reaches by itself with each
// kind of load that the cells have.
func (p *pool) references(ctx context.Context, load string) (map[string]counted, error) {
	refs := map[string]counted{}
	for _, c := range shareCases {
		for i := range c.shares {
			kind := shareLoads[load](i, len(c.shares))
			if _, done := refs[kind]; done {
				continue
			}
			ref, err := p.alone(ctx, p.tenants[0], kind)
			if err != nil {
				return nil, err
			}
			refs[kind] = ref
		}
	}
	return refs, nil
}

func (b *bench) shareCell(ctx context.Context, load, name string, shares []share, watch *clockWatch) (*shareCell, error) {
	p := b.shared
	workers := p.tenants[:len(shares)]
	var kinds []string
	for i := range shares {
		kinds = append(kinds, shareLoads[load](i, len(shares)))
	}
	if err := p.have(ctx, workers, kinds); err != nil {
		return nil, err
	}
	if err := p.setShares(ctx, shares...); err != nil {
		return nil, err
	}
	cell := &shareCell{Load: load, Case: name, Slice: sharesSlice.Seconds()}
	s := soon(0, b.cell())
	var counts []counted
	bills, err := b.during(ctx, 500*time.Millisecond, func() (err error) {
		counts, err = p.work(ctx, s, sharesSlice, workers, kinds)
		return err
	})
	if err == nil && len(bills) == 0 {
		err = errors.New("the scheduler does not answer")
	}
	if err != nil {
		return nil, err
	}
	for i, c := range counts {
		low, high := promised(shares, i)
		cell.Tenants = append(cell.Tenants, shareTenant{
			Share: shares[i], Load: kinds[i], Low: low, High: high, StepMS: c.StepMS, Done: c.Done,
			Promised: bills[len(bills)/2].promised[tenantOn{firstUser + i, 0}],
			Clock:    clockShare(bills, tenantOn{firstUser + i, 0}, s.start+sharesSettle.Seconds(), s.end),
		})
	}
	cell.Counters = counters(bills)
	cell.Clocks = watch.between(s.start+sharesSettle.Seconds(), s.end)
	return cell, nil
}

// cell is how long a cell of shares lasts: one window and a little more, so
// that there are several, unless it is told.
func (b *bench) cell() time.Duration {
	if b.cellSeconds > 0 {
		return time.Duration(b.cellSeconds * float64(time.Second))
	}
	return 6600 * time.Millisecond
}

// promised is what tenant i should get while all want all, percent. What
// nobody was promised may go to those without a promise, or to all by weight.
func promised(shares []share, i int) (low, high float64) {
	rest, without, open := 100.0, 0.0, 0.0
	for _, s := range shares {
		rest -= float64(s.Limit + s.Request)
		if s.Limit == 0 {
			open++
			if s.Request == 0 {
				without++
			}
		}
	}
	switch s := shares[i]; {
	case s.Limit > 0:
		return float64(s.Limit), float64(s.Limit)
	case s.Request > 0:
		return float64(s.Request), float64(s.Request) + rest/open
	}
	return rest / open, rest / without
}

// judge computes the cell's errors from what was done and the references
// before and after.
func (c *shareCell) judge(before, after map[string]counted) {
	var errs []float64
	from := int(math.Round(sharesSettle.Seconds() / c.Slice))
	length := int(math.Round(sharesWindow.Seconds() / c.Slice))
	for i := range c.Tenants {
		t := &c.Tenants[i]
		a, b := before[t.Load], after[t.Load]
		t.Alone, t.AloneStepMS = (a.Rate+b.Rate)/2, (a.StepMS+b.StepMS)/2
		t.Work = windowShares(t.Done, c.Slice, from, length, t.Alone)
		t.Time = ownTime(t.Done, c.Slice, from, *t)
		for _, w := range t.Work {
			errs = append(errs, t.off(w))
		}
		c.ClockWorst = max(c.ClockWorst, t.off(t.Clock))
		for j := range t.Work {
			t.Work[j] = round(t.Work[j], 3)
		}
	}
	if len(errs) > 0 {
		c.Worst, c.Median = slices.Max(errs), quantile.Of(errs, 0.5)
	}
}

// off is how far a share is from what was wanted, percentage points.
func (t *shareTenant) off(got float64) float64 {
	return max(0, t.Low-got, got-t.High)
}

// windowShares are the parts of what it would have done alone that a tenant
// did in every window of so many slices after the first ones, percent.
func windowShares(done []float64, slice float64, from, length int, alone float64) []float64 {
	var all []float64
	for i := from; i+length < len(done); i++ {
		all = append(all, 100*(done[i+length]-done[i])/(float64(length)*slice*alone))
	}
	return all
}

// ownTime is the GPU time of the steps that a tenant did after the first
// slices, by what a step takes while it runs, percent; alone would be 100.
func ownTime(done []float64, slice float64, from int, t shareTenant) float64 {
	if from >= len(done)-1 || t.Alone*t.AloneStepMS == 0 {
		return 0
	}
	rate := (done[len(done)-1] - done[from]) / (float64(len(done)-1-from) * slice)
	return 100 * rate * t.StepMS / (t.Alone * t.AloneStepMS)
}

// clockShare is a tenant's part of a GPU's time as the scheduler billed it
// between two times, percent; 0 without two answers in it.
func clockShare(bills []billed, who tenantOn, from, to float64) float64 {
	var in []billed
	for _, b := range bills {
		if b.at >= from && b.at <= to {
			in = append(in, b)
		}
	}
	if len(in) < 2 {
		return 0
	}
	first, last := in[0], in[len(in)-1]
	return 100 * (last.used[who] - first.used[who]) / (last.at - first.at)
}

// counters are what the scheduler's counters rose by.
func counters(bills []billed) map[string]uint64 {
	by := map[string]uint64{}
	if len(bills) > 0 {
		for name, n := range bills[len(bills)-1].counters {
			by[name] = n - bills[0].counters[name]
		}
	}
	return by
}

func round(v float64, digits int) float64 {
	scale := math.Pow(10, float64(digits))
	return math.Round(v*scale) / scale
}

func (c *shareCell) line() string {
	var own, clock, time []string
	for _, t := range c.Tenants {
		low, high := t.Clock, t.Clock
		if len(t.Work) > 0 {
			low, high = slices.Min(t.Work), slices.Max(t.Work)
		}
		own = append(own, fmt.Sprintf("%.1f-%.1f", low, high))
		clock = append(clock, fmt.Sprintf("%.1f", t.Clock))
		time = append(time, fmt.Sprintf("%.1f", t.Time))
	}
	line := fmt.Sprintf("%-8s %-22s error max %5.2f median %5.2f pp; work %% %s; own GPU time %% %s; our clock %% %s",
		c.Load, c.Case, c.Worst, c.Median, strings.Join(own, " "), strings.Join(time, " "), strings.Join(clock, " "))
	if c.Clocks != nil {
		line += fmt.Sprintf("; %.0f MHz, %.0f W", c.Clocks.MHz, c.Clocks.Watts)
	}
	if c.Counters["fences"] > 0 {
		line += fmt.Sprintf("; %d FENCES", c.Counters["fences"])
	}
	return line
}

// verdict sums up by load.
func (r *sharesResult) verdict() string {
	var parts []string
	worst := map[string]float64{}
	var medians []float64
	for _, c := range r.Cells {
		worst[c.Load] = max(worst[c.Load], c.Worst)
		medians = append(medians, c.Median)
	}
	held := true
	var names []string
	for load := range worst {
		names = append(names, load)
	}
	slices.Sort(names)
	for _, load := range names {
		parts = append(parts, fmt.Sprintf("%s %.2f", load, worst[load]))
		held = held && worst[load] <= sharesTarget
	}
	if len(medians) == 0 {
		return "shares: nothing measured"
	}
	return fmt.Sprintf("shares: largest error by load, percentage points: %s; median of medians %.2f; target %d: %s",
		strings.Join(parts, ", "), quantile.Of(medians, 0.5), sharesTarget, holds(held))
}

func holds(ok bool) string {
	if ok {
		return "held"
	}
	return "MISSED"
}

// saveCells writes one line a cell: raw numbers would fill pages otherwise.
func saveCells[T any](dir, name string, cells []T) error {
	var text strings.Builder
	for i, c := range cells {
		data, err := json.Marshal(c)
		if err != nil {
			return err
		}
		sep := ",\n"
		if i == 0 {
			sep = "[\n"
		}
		text.WriteString(sep)
		text.Write(data)
	}
	if len(cells) == 0 {
		text.WriteString("[")
	}
	return save(dir, name, text.String()+"\n]\n")
}
