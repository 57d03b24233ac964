// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	aloneLead  = 100 * time.Millisecond
	besideLead = 250 * time.Millisecond // two turns at the longer quantum

	// morePairs are added for loads that are only run alone.
	morePairs = 5

	longQuantum, shortQuantum = "100ms", "5ms"

	// differenceFactor is by how much more two results of the same seeds may
	// differ than two native ones did.
	differenceFactor = 2
)

// measure does one cell. What fails is noted, and the rest goes on as far as
// it can.
func (r *running) measure(ctx context.Context, c *cell) {
	note := func(what string, err error) bool {
		var why skipped
		switch {
		case err == nil:
			return true
		case errors.As(err, &why):
			c.Skipped = why.Error()
		default:
			c.Problems = append(c.Problems, what+": "+err.Error())
			if problems := r.m.schedulerSays(ctx); problems != "" {
				c.Notes = append(c.Notes, "scheduler: "+problems)
			}
		}
		return false
	}
	if err := r.m.arbiter.setQuantum(ctx, longQuantum); !note("set the quantum", err) {
		return
	}
	before := r.m.proofs(ctx)

	// Native first: it compiles what the others find in the cache, and says
	// how much goes between two marks.
	c.Built = map[string]built{}
	like, err := r.workers[native].build(ctx, c.Load, built{})
	if !note("build", err) {
		return
	}
	c.Built[native] = like
	others := r.all()[1:]
	said := make([]built, len(others))
	for i, err := range together(others, func(w *worker) (err error) {
		said[slices.Index(others, w)], err = w.build(ctx, c.Load, like)
		return err
	}) {
		// What native can, the others must be able to.
		name := others[i].name
		var why skipped
		switch {
		case name == peer && err != nil:
			c.Notes = append(c.Notes, err.Error())
		case errors.As(err, &why):
			c.Problems = append(c.Problems, name+": only native can: "+why.Error())
		case note("build", err):
			c.Built[name] = said[i]
			if n := said[i].Note; n != like.Note {
				c.Problems = append(c.Problems, fmt.Sprintf("%s: %q, native: %q", name, n, like.Note))
			}
		}
	}
	r.askAllocator(ctx)
	if like.Note != "" {
		c.Notes = append(c.Notes, like.Note)
	}
	defer func() {
		for _, err := range together(r.all(), func(w *worker) error {
			if w.dead != nil {
				return nil
			}
			return w.drop(ctx, c.Load)
		}) {
			note("drop", err)
		}
	}()

	c.Results = &results{Verdict: "-"}
	note("results", r.compare(ctx, c))
	note("rates", r.rates(ctx, c))
	r.m.proofsSince(ctx, before, r.workers, c)
}

// askAllocator asks PyTorch once which allocator it uses.
func (r *running) askAllocator(ctx context.Context) {
	if r.backend != "torch" || r.r.Allocates != nil {
		return
	}
	r.r.Allocates = map[string]map[string]any{}
	for _, who := range []string{native, shim1} {
		var said map[string]any
		if err := r.workers[who].call(ctx, dropWithin, map[string]any{"op": "call", "function": "allocator"}, &said); err != nil {
			continue
		}
		delete(said, "id")
		r.r.Allocates[who] = said
		as := map[string]bool{
			"default":    said["backend"] == "native",
			"expandable": said["backend"] == "native" && said["expandable"] == said["segments"],
			"async":      said["backend"] == "cudaMallocAsync",
		}
		if !as[r.allocator] {
			r.problem("%s: PyTorch does not use the allocator that it should: %v", who, said)
		}
	}
}

// compare computes the load's result with and without the shim.
func (r *running) compare(ctx context.Context, c *cell) error {
	const seed = 7
	ask := func(who string) (digested, error) { return r.workers[who].check(ctx, c.Load, seed) }
	first, err := ask(native)
	if err != nil {
		return err
	}
	again, err := ask(native)
	if err != nil {
		return err
	}
	c.Results.Native, c.Results.Again = first.Digest, again.Digest
	ours, err := ask(shim1)
	if err != nil {
		return err
	}
	c.Results.Shim = ours.Digest
	natives := []digested{first, again}
	if ours.Digest != first.Digest && r.workers[native2] != nil {
		// Another native process may tune or compile differently.
		other, err := ask(native2)
		if err != nil {
			return err
		}
		c.Results.Other = other.Digest
		natives = append(natives, other)
	}
	if r.workers[peer] != nil {
		if d, err := ask(peer); err == nil {
			c.Results.Peer = d.Digest
		}
	}
	c.Results.judge(natives, ours)
	return nil
}

// judge compares a result with native ones, of which there are at least two.
func (r *results) judge(natives []digested, ours digested) {
	r.ShimDifference = math.Inf(1)
	varies := false // natively, from run to run
	for i, a := range natives {
		r.ShimDifference = min(r.ShimDifference, difference(a.Samples, ours.Samples))
		for _, b := range natives[:i] {
			r.NativeDifference = max(r.NativeDifference, difference(a.Samples, b.Samples))
			varies = varies || a.Digest != b.Digest
		}
	}
	same := func(d digested) bool { return d.Digest == ours.Digest }
	switch {
	case slices.ContainsFunc(natives, same):
		r.Verdict = "same bits"
	case varies && r.ShimDifference <= differenceFactor*r.NativeDifference:
		r.Verdict = "as near as native"
	default:
		r.Verdict = "DIFFERS"
	}
}

// difference is the largest difference, by the largest number of a.
func difference(a, b []float64) float64 {
	if len(a) != len(b) {
		return math.MaxFloat64
	}
	var most, scale float64
	for i := range a {
		most, scale = max(most, math.Abs(a[i]-b[i])), max(scale, math.Abs(a[i]))
	}
	if scale == 0 {
		return most
	}
	return most / scale
}

// rates measures alone and beside a second tenant, in turns, so that what
// drifts hits all.
func (r *running) rates(ctx context.Context, c *cell) error {
	var next int
	pair := func() error {
		who := []string{native, shim1}
		if r.workers[peer] != nil {
			who = append(who, peer)
		}
		if next%2 == 1 {
			slices.Reverse(who)
		}
		for _, w := range who {
			counted, err := r.workers[w].window(ctx, soon(aloneLead, r.m.alone), c.Load)
			if err != nil {
				if w == peer {
					c.Notes = append(c.Notes, err.Error())
					continue
				}
				return err
			}
			c.Alone = append(c.Alone, aloneWindow{w, next, counted[c.Load].Rate, counted[c.Load].LongestGap})
		}
		next++
		return nil
	}
	defer func() {
		c.Shim, c.Peer = c.ratios(shim1), c.ratios(peer)
	}()
	before := r.m.before
	if solo[c.Load] {
		before += morePairs
	}
	for range before {
		if err := pair(); err != nil {
			return err
		}
	}
	for _, quantum := range []string{longQuantum, shortQuantum} {
		var w *besideWindow
		if !solo[c.Load] {
			var err error
			if w, err = r.besideAt(ctx, c.Load, quantum); err != nil {
				return err
			}
			c.Beside = append(c.Beside, w)
		}
		if quantum == shortQuantum {
			if err := r.besideResult(ctx, c); err != nil {
				return err
			}
		}
		if err := pair(); err != nil {
			return err
		}
		if w != nil {
			w.refer(c.rate(native, next-2, next-1), c.rate(shim1, next-2, next-1))
		}
	}
	if r.workers[native2] != nil && !solo[c.Load] {
		w, err := r.shared(ctx, c.Load, r.m.beside*2/3, native, native2)
		if err != nil {
			return err
		}
		w.refer(c.rate(native, next-2, next-1), 0)
		c.NativePair = w
	}
	return nil
}

// besideAt lets both tenants with the shim work at the same time.
func (r *running) besideAt(ctx context.Context, load, quantum string) (*besideWindow, error) {
	if err := r.m.arbiter.setQuantum(ctx, quantum); err != nil {
		return nil, err
	}
	before := r.m.proofs(ctx)
	w, err := r.shared(ctx, load, r.m.beside, shim1, shim2)
	if err != nil {
		return nil, fmt.Errorf("two at %s: %w", quantum, err)
	}
	now := r.m.proofs(ctx)
	w.Quantum, w.Revokes, w.Preemptions = quantum, now.revokes-before.revokes, now.preemptions-before.preemptions
	if quantum != longQuantum {
		err = r.m.arbiter.setQuantum(ctx, longQuantum)
	}
	return w, err
}

func (r *running) shared(ctx context.Context, load string, length time.Duration, who ...string) (*besideWindow, error) {
	var workers []*worker
	for _, name := range who {
		workers = append(workers, r.workers[name])
	}
	counts := make([]map[string]counted, len(workers))
	s := soon(besideLead, length)
	if err := errors.Join(together(workers, func(w *worker) (err error) {
		counts[slices.Index(workers, w)], err = w.window(ctx, s, load)
		return err
	})...); err != nil {
		return nil, err
	}
	b := &besideWindow{Tenants: map[string]counted{}}
	for i, name := range who {
		b.Tenants[name] = counts[i][load]
		b.Sum += counts[i][load].Rate
	}
	return b, nil
}

// besideResult computes the result again while another tenant works, at the
// short quantum: captures, compiles and copies among revokes.
func (r *running) besideResult(ctx context.Context, c *cell) error {
	if err := r.m.arbiter.setQuantum(ctx, shortQuantum); err != nil {
		return err
	}
	var d digested
	s := soon(20*time.Millisecond, r.m.test)
	err := errors.Join(together([]*worker{r.workers[shim1], r.workers[shim2]}, func(w *worker) (err error) {
		if w.name == shim2 {
			_, err = w.window(ctx, s, c.Load)
			return err
		}
		time.Sleep(100 * time.Millisecond) // until the other is in full swing
		d, err = w.check(ctx, c.Load, 7)
		return err
	})...)
	if err != nil {
		return fmt.Errorf("result beside another: %w", err)
	}
	c.Results.Beside = d.Digest
	if d.Digest != c.Results.Shim && c.Results.Verdict == "same bits" && c.Results.Native == c.Results.Again {
		c.Results.Verdict = "DIFFERS beside another"
	}
	err = r.m.arbiter.setQuantum(ctx, longQuantum)
	return err
}

// rate is a worker's mean in the given pairs.
func (c *cell) rate(who string, pairs ...int) float64 {
	var sum float64
	var n int
	for _, w := range c.Alone {
		if w.Who == who && slices.Contains(pairs, w.Pair) {
			sum += w.Rate
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return sum / float64(n)
}

// ratios are a worker's rates by native's of the same pair.
func (c *cell) ratios(who string) *spread {
	var v []float64
	for _, w := range c.Alone {
		if base := c.rate(native, w.Pair); w.Who == who && base > 0 {
			v = append(v, w.Rate/base)
		}
	}
	return newSpread(v)
}

func (w *besideWindow) refer(native, shim float64) {
	w.Native, w.Shim = native, shim
	if native > 0 {
		w.OfNative = w.Sum / native
	}
	if shim > 0 {
		w.OfShim = w.Sum / shim
	}
}

// proofs is what the scheduler knows of each process now, and of GPU 0.
type proofs struct {
	clients     map[uint32]*api.Client
	revokes     uint64
	fences      uint64
	preemptions uint64
}

func (m *matrix) proofs(ctx context.Context) proofs {
	p := proofs{clients: map[uint32]*api.Client{}}
	status, err := m.arbiter.Status(ctx)
	if err != nil {
		return p
	}
	for _, g := range status.Gpus {
		p.revokes += g.Revokes
		p.fences += g.Fences
		p.preemptions += g.Preemptions
		for _, c := range g.Clients {
			if p.clients[c.Pid] == nil {
				p.clients[c.Pid] = c
			}
		}
	}
	return p
}

// proofsSince adds to c what the scheduler knows of the workers with the shim.
func (m *matrix) proofsSince(ctx context.Context, before proofs, workers map[string]*worker, c *cell) {
	now := m.proofs(ctx)
	c.Revokes, c.Fences = now.revokes-before.revokes, now.fences-before.fences
	c.Proof = map[string]*proof{}
	for _, who := range slices.Sorted(maps.Keys(workers)) {
		if who != shim1 && who != shim2 {
			continue
		}
		client := now.clients[workers[who].clientPID()]
		if client == nil {
			c.Problems = append(c.Problems, "the scheduler does not know "+who)
			continue
		}
		old := before.clients[client.Pid]
		if old == nil {
			old = &api.Client{}
		}
		c.Proof[who] = &proof{
			Interposed: client.Interposed, Bypassed: client.Bypassed, ShimVersion: client.ShimVersion,
			Calls: client.Calls - old.Calls, GateWaits: client.Waits - old.Waits, Grants: client.Grants - old.Grants,
			MemoryPeak: client.MemoryPeakBytes, Held: float64(client.HeldNs-old.HeldNs) / 1e9,
		}
		if client.Bypassed > 0 || client.Interposed == 0 || client.Calls == old.Calls {
			c.Problems = append(c.Problems, fmt.Sprintf("%s: %d entry points interposed, %d bypassed, %d calls gated",
				who, client.Interposed, client.Bypassed, client.Calls-old.Calls))
		}
	}
	if c.Fences > 0 {
		c.Problems = append(c.Problems, fmt.Sprintf("%d fences", c.Fences))
	}
}

// schedulerSays is the state of the clients in one line, for a failure.
func (m *matrix) schedulerSays(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	status, err := m.arbiter.Status(ctx)
	if err != nil {
		return err.Error()
	}
	var text string
	for _, g := range status.Gpus {
		for _, c := range g.Clients {
			text += fmt.Sprintf("GPU %d pid %d %v for %v, %d calls, %d waits; ", g.Index, c.Pid, c.State, time.Duration(c.SinceNs), c.Calls, c.Waits)
		}
	}
	return text
}
