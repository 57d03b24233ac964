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
	{Programs: []string{"decode", "train"}, GPUMiB: 5 << 10},
	{Programs: []string{"notebook", "train"}, GPUMiB: 5 << 10},
	{Programs: []string{"decode", "decode"}, GPUMiB: 15 << 8},
	{Programs: []string{"decode", "decode", "decode", "decode"}, GPUMiB: 13 << 8},
}

// An oversub is what programs did together on a GPU that was made to look so small.
type oversub struct {
	Programs []string    `json:"programs"`
	GPUMiB   int         `json:"gpu_mib"`
	Promised float64     `json:"promised_of_gpu"`
	Alone    []float64   `json:"native_alone"`   // steps per second, the mean of the windows
	Windows  [][]float64 `json:"native_windows"` // of each, before and after what they do together
	Own      [][]float64 `json:"tenant_windows"` // of the tenants, each alone, before and after each round
	Rounds   [][]float64 `json:"rounds"`         // steps per second of each in each round together
	CPUMS    [][]float64 `json:"cpu_ms"`         // CPU time of its process for a step: natively, as a tenant alone, together
	Ran      [][]float64 `json:"ran"`            // part of the time that each ran on a CPU: natively, as a tenant alone, together
	OfRan    float64     `json:"of_ran"`         // the sum of what they ran together, each relative to the same tenant alone
	Rates    []float64   `json:"steps_per_second"`
	Of       []float64   `json:"of_alone"`
	Sum      float64     `json:"sum"`
	OfOwn    *interval   `json:"of_tenants_alone"` // the sum, each relative to the same tenant alone
	Longest  []float64   `json:"longest_gaps_s"`
	// Seconds of an answer, median and longest, of programs that have a user: natively, as a
	// tenant alone, together.
	Answers [][][]float64 `json:"answers_s,omitempty"`
	Moving  float64       `json:"moving"` // part of the time
	Held    float64       `json:"held"`   // by tenants, as they are billed, part of the time
	In      uint64        `json:"in_bytes"`
	Problem string        `json:"problem,omitempty"`
}

// notebookPeriod is PERIOD_S of loads/programs.py: the windows of a notebook are whole periods.
const notebookPeriod = 10 * time.Second

// ownWindows is how many windows each program has alone, before and after each round.
const ownWindows = 2

// oversubStep measures real programs whose memory does not fit together, against each alone.
func (b *bench) oversubStep(ctx context.Context, _ string) error {
	old := b.shared
	defer func() { b.shared, b.backendName = old, nil }()
	b.backendName = []string{"programs"}
	all, rounds := oversubs, 3
	if b.cells.quick {
		all, rounds = oversubs[:2], 2
	}
	if b.rounds > 0 {
		rounds = b.rounds
	}
	if b.simulated {
		b.backendName = []string{"driver"}
		all, rounds = []oversub{{Programs: []string{"spin", "spin"}, GPUMiB: 256}}, min(rounds, 2)
	}
	all = slices.Clone(all)
	var errs []error
	for i := range all {
		o := &all[i]
		if b.cells.only != nil && !b.cells.only.MatchString(fmt.Sprintf("%s/%d", strings.Join(o.Programs, "+"), o.GPUMiB)) {
			continue
		}
		if err := b.oversub(ctx, o, fmt.Sprintf("oversub-%d", i), rounds); err != nil {
			o.Problem = err.Error()
			errs = append(errs, fmt.Errorf("%s: %w", strings.Join(o.Programs, " + "), err))
		}
		fmt.Println("  " + o.line())
		errs = append(errs, b.saveJSON("oversub.json", all))
	}
	return errors.Join(errs...)
}

func (b *bench) oversub(ctx context.Context, o *oversub, name string, rounds int) (err error) {
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
	w := &oversubRun{
		pool: p, oversub: o, scheduler: s, aloneLength: 4 * time.Second, length: 24 * time.Second,
		cpu: map[*worker][]float64{}, ran: map[*worker][]float64{}, answersAlone: map[*worker][]float64{}, answers: map[*worker][]float64{}, together: make([][]counted, n), togetherCPU: make([][]float64, n),
	}
	if b.window > 0 {
		w.length = b.window
	}
	if slices.Contains(o.Programs, "notebook") {
		w.aloneLength, w.length = notebookPeriod, (w.length + notebookPeriod - 1).Truncate(notebookPeriod)
	}
	lead := 15 * time.Second // until their pauses are known
	if b.simulated {
		lead, w.aloneLength, w.length = time.Second, time.Second, time.Second
	}
	if err := w.addAlone(ctx, p.natives, o.Windows); err != nil {
		return err
	}
	if err := p.keepOnly(ctx, nil); err != nil { // what others use of the GPU is not there to share
		return err
	}
	if err := w.addAlone(ctx, p.tenants, o.Own); err != nil {
		return err
	}
	for range rounds {
		if err := w.addTogether(ctx, lead); err != nil {
			return err
		}
		if err := w.addAlone(ctx, p.tenants, o.Own); err != nil {
			return err
		}
		lead = min(lead, 4*time.Second)
	}
	if err := w.addAlone(ctx, p.natives, o.Windows); err != nil {
		return err
	}
	w.sumUp()
	return nil
}

// An oversubRun measures the programs of an oversub, alone and together in turn.
type oversubRun struct {
	*pool
	*oversub
	scheduler   *scheduler
	aloneLength time.Duration // of each window of a program alone
	length      time.Duration // of what they do together in a round; turns take up to 10 s

	cpu         map[*worker][]float64 // ms of CPU time a step, of each window alone
	ran         map[*worker][]float64 // part of the time, of each window alone
	together    [][]counted           // of each program in each round
	togetherCPU [][]float64

	answersAlone, answers map[*worker][]float64 // seconds

	moved  moves
	worked time.Duration // together, leads included
}

// addAlone adds two windows of each program, in which the others do nothing.
func (w *oversubRun) addAlone(ctx context.Context, workers []*worker, windows [][]float64) error {
	if err := w.have(ctx, workers, w.Programs); err != nil {
		return err
	}
	for range ownWindows {
		for i, program := range w.Programs { // on the same processors natively and as tenants
			at := soon(refLead, w.aloneLength)
			c, ms, err := w.workAndCPU(ctx, at, workers[i:i+1], []string{program})
			if err != nil {
				return err
			}
			if err := w.addAnswers(ctx, w.answersAlone, workers[i], program, at); err != nil {
				return err
			}
			windows[i] = append(windows[i], round(c[0].Rate, 3))
			w.cpu[workers[i]], w.ran[workers[i]] = append(w.cpu[workers[i]], ms[0]), append(w.ran[workers[i]], c[0].Ran)
		}
	}
	return nil
}

// addTogether adds a round in which all tenants work.
func (w *oversubRun) addTogether(ctx context.Context, lead time.Duration) error {
	before, err := w.scheduler.swapped(ctx)
	if err != nil {
		return err
	}
	at := soon(lead, w.length)
	counts, ms, err := w.workAndCPU(ctx, at, w.tenants, w.Programs)
	if err != nil {
		return err
	}
	for i, program := range w.Programs {
		if err := w.addAnswers(ctx, w.answers, w.tenants[i], program, at); err != nil {
			return err
		}
	}
	after, err := w.scheduler.swapped(ctx)
	if err != nil {
		return err
	}
	for i, c := range counts {
		w.together[i], w.togetherCPU[i] = append(w.together[i], c), append(w.togetherCPU[i], ms[i])
	}
	w.Promised = round(float64(after.promised)/float64(w.GPUMiB<<20), 2)
	w.moved.in += after.in - before.in
	w.moved.took += after.took - before.took
	w.moved.used += after.used - before.used
	w.worked += lead + w.length
	return nil
}

// addAnswers adds how long the answers of a program that has a user took, from start to end.
func (w *oversubRun) addAnswers(ctx context.Context, to map[*worker][]float64, of *worker, program string, at span) error {
	more, err := of.latencies(ctx, program, at)
	to[of] = append(to[of], more...)
	return err
}

func (w *oversubRun) sumUp() {
	w.Held = round(w.moved.used.Seconds()/w.worked.Seconds(), 4)
	w.Moving = round(w.moved.took.Seconds()/w.worked.Seconds(), 4)
	w.In = w.moved.in
	rounds := len(w.together[0])
	sums, own := make([]float64, rounds), make([]float64, rounds)
	for i := range w.Programs {
		w.Alone = append(w.Alone, round(meanOf(w.Windows[i]), 3))
		ownRate, rates, ran, longest := meanOf(w.Own[i]), []float64{}, []float64{}, 0.0
		for r, c := range w.together[i] {
			ran = append(ran, c.Ran)
			rates, longest = append(rates, round(c.Rate, 3)), max(longest, c.LongestGap)
			sums[r] += c.Rate / ownRate
			// The windows before and after what they did together.
			own[r] += meanOf(w.Own[i][r*ownWindows:(r+2)*ownWindows]) / ownRate / float64(len(w.Programs))
		}
		of := meanOf(rates) / w.Alone[i]
		w.Rounds, w.Rates = append(w.Rounds, rates), append(w.Rates, round(meanOf(rates), 3))
		w.Of, w.Longest = append(w.Of, round(of, 4)), append(w.Longest, round(longest, 3))
		w.Sum += of
		var cpu []float64
		for _, ms := range [][]float64{w.cpu[w.natives[i]], w.cpu[w.tenants[i]], w.togetherCPU[i]} {
			cpu = append(cpu, round(median(ms), 2))
		}
		w.CPUMS = append(w.CPUMS, cpu)
		natively, alone, together := meanOf(w.ran[w.natives[i]]), meanOf(w.ran[w.tenants[i]]), meanOf(ran)
		w.Ran = append(w.Ran, []float64{round(natively, 4), round(alone, 4), round(together, 4)})
		w.OfRan += together / alone
		var answers [][]float64
		for _, seconds := range [][]float64{w.answersAlone[w.natives[i]], w.answersAlone[w.tenants[i]], w.answers[w.tenants[i]]} {
			if len(seconds) > 0 {
				answers = append(answers, []float64{round(median(seconds), 3), round(slices.Max(seconds), 3)})
			}
		}
		w.Answers = append(w.Answers, answers)
	}
	w.Sum, w.OfRan = round(w.Sum, 4), round(w.OfRan, 4)
	w.OfOwn = ratioOf(sums, own)
}

func meanOf(x []float64) float64 { return sumOf(x) / float64(max(len(x), 1)) }

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
		own += meanOf(windows) / o.Alone[i] / float64(len(o.Own))
	}
	return text + fmt.Sprintf("alone %.1f, as tenants %.3f of it; sum %.3f of alone (%.3f), %.3f of the tenants alone (%.3f to %.3f; rounds %.2f), %.2f times the GPU's memory, held for %.1f %% of the time, moving takes %.1f %%, longest gaps %.1f s; CPU time of a step natively, as tenants alone, together %.1f ms; they ran %.3f of the time, together %.3f of the tenants alone; answers natively, as tenants alone, together %.2f s (median, longest): %s",
		o.Alone, own, o.Sum, o.Of, o.OfOwn.Ratio, o.OfOwn.Low, o.OfOwn.High, o.Rounds, o.Promised, 100*o.Held, 100*o.Moving, o.Longest, o.CPUMS, o.Ran, o.OfRan, o.Answers, holds(o.Sum >= 0.98))
}
