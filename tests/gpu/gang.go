// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nvshare/nvshare/tests/node"
)

const (
	gangsWithin = 6 * time.Minute
	// gangBeyond is how much longer than its window a cell may take before its
	// processes are killed.
	gangBeyond = 20 * time.Second
	// gangUser is the user of the first gang; the others' follow.
	gangUser = firstUser + 700
	// gangSteps and gangMarks are how much a rank does between two marks, and
	// how many marks ahead of the GPU: the same for all ranks.
	gangSteps, gangMarks = 1, 6
)

// A gangCell is some jobs at work together. A job is a gang with a rank on
// each of two GPUs, or a tenant of one GPU.
type gangCell struct {
	Case    string             `json:"case"`
	Mode    string             `json:"mode,omitempty"`    // of the scheduler
	Quantum string             `json:"quantum,omitempty"` // empty: natively
	Gangs   bool               `json:"gangs"`             // granted and revoked together
	Seconds float64            `json:"seconds"`
	Rates   map[string]counted `json:"rates"` // by process
	// Of the rate alone, by process, and their sum by GPU: 1 would be no loss.
	OfAlone  map[string]float64 `json:"of_alone,omitempty"`
	Use      [2]float64         `json:"use"`
	Limits   map[string]int     `json:"limits,omitempty"`   // core limits by job, percent
	Billed   map[string]float64 `json:"billed,omitempty"`   // percent of its GPU's time, by process with the shim
	Requests *requests          `json:"requests,omitempty"` // of a latency tenant on GPU 0
	Counters map[string]uint64  `json:"counters,omitempty"`
	Problem  string             `json:"problem,omitempty"`
}

// A gangRun is a cell that is to be measured.
type gangRun struct {
	name     string
	mode     string // of the scheduler; empty: natively
	quantum  string
	gangs    bool
	limits   map[string]int // percent, by job
	requests bool           // beside a latency tenant on GPU 0
	length   time.Duration
	jobs     []string
}

const (
	gangAndTenants = "a gang and a tenant on each GPU"
	gangLimit      = 30 // percent
	slowRequest    = 10 // ms; what the scheduler did in a cell with a slower one is kept
)

// gangRuns are all cells but those that measure what each does alone; --only chooses some by
// their names, and --quick the first four.
var gangRuns = []gangRun{
	{name: gangAndTenants, length: 4 * time.Second, jobs: []string{"nA", "ns", "nt"}},
	{name: gangAndTenants, mode: "on", quantum: "100ms", gangs: true, length: 6 * time.Second, jobs: []string{"A", "s", "t"}},
	{name: gangAndTenants, mode: "on", quantum: "20ms", gangs: true, length: 6 * time.Second, jobs: []string{"A", "s", "t"}},
	{name: "two gangs", mode: "on", quantum: "100ms", gangs: true, length: 6 * time.Second, jobs: []string{"A", "B"}},
	{name: "two gangs and a tenant on each GPU", mode: "on", quantum: "100ms", gangs: true, length: 6 * time.Second, jobs: []string{"A", "B", "s", "t"}},
	{name: gangAndTenants, mode: "on", quantum: "100ms", length: 6 * time.Second, jobs: []string{"A", "s", "t"}},
	{name: "two gangs", mode: "on", quantum: "100ms", length: 6 * time.Second, jobs: []string{"A", "B"}},
	{name: "a gang and a limited tenant on each GPU", mode: "on", quantum: "100ms", gangs: true, limits: map[string]int{"s": gangLimit, "t": gangLimit}, length: 12 * time.Second, jobs: []string{"A", "s", "t"}},
	{name: "a limited gang and a tenant on each GPU", mode: "on", quantum: "100ms", gangs: true, limits: map[string]int{"A": gangLimit}, length: 12 * time.Second, jobs: []string{"A", "s", "t"}},
	{name: "a limited gang", mode: "on", quantum: "100ms", gangs: true, limits: map[string]int{"A": gangLimit}, length: 12 * time.Second, jobs: []string{"A"}},
	{name: "short requests on GPU 0", requests: true, length: 6 * time.Second},
	{name: "short requests on GPU 0", mode: "on", quantum: "100ms", gangs: true, requests: true, length: 6 * time.Second},
	{name: "a gang and short requests on GPU 0", requests: true, length: 6 * time.Second, jobs: []string{"nA"}},
	{name: "a gang and short requests on GPU 0", mode: "on", quantum: "100ms", gangs: true, requests: true, length: 12 * time.Second, jobs: []string{"A"}},
	{name: "a gang and short requests on GPU 0", mode: "auto", quantum: "100ms", gangs: true, requests: true, length: 12 * time.Second, jobs: []string{"A"}},
	{name: "a gang, a tenant on each GPU, and short requests on GPU 0", requests: true, length: 6 * time.Second, jobs: []string{"nA", "ns", "nt"}},
	{name: "a gang, a tenant on each GPU, and short requests on GPU 0", mode: "on", quantum: "100ms", gangs: true, requests: true, length: 12 * time.Second, jobs: []string{"A", "s", "t"}},
	{name: "a gang, a tenant on each GPU, and short requests on GPU 0", mode: "auto", quantum: "100ms", gangs: true, requests: true, length: 12 * time.Second, jobs: []string{"A", "s", "t"}},
}

// gangs is the step.
type gangs struct {
	b       *bench
	p       *pool
	alone   map[string]counted
	workers map[string]*worker
	cells   []*gangCell
}

// gangRank is rank r of a job, which is on GPU r.
func gangRank(job string, r int) string { return job + strconv.Itoa(r) }

// gangJobs are the processes of each job. A job whose name begins with n is
// native; a gang has two.
var gangJobs = map[string][]string{
	"A": {gangRank("A", 0), gangRank("A", 1)}, "B": {gangRank("B", 0), gangRank("B", 1)},
	"s": {"s0"}, "t": {"t1"}, // t is on the second GPU
	"nA": {gangRank("nA", 0), gangRank("nA", 1)}, "ns": {"ns0"}, "nt": {"nt1"},
}

// gangUsers are the tenants among them.
var gangUsers = map[string]int{"A": 0, "B": 1, "s": 2, "t": 3}

// gangGPU is a process's GPU, by the end of its name.
func gangGPU(process string) int { return int(process[len(process)-1] - '0') }

// gangStep lets jobs on two GPUs share them with each other and with tenants
// of one.
func (b *bench) gangStep(ctx context.Context, _ string) error {
	ctx, cancel := context.WithTimeout(ctx, gangsWithin)
	defer cancel()
	status, err := b.node.Status(ctx)
	if err != nil {
		return err
	}
	if n := len(status.Gpus); n > 0 && n < 2 {
		return errors.New("this machine has only one GPU")
	}
	p, err := b.pool(ctx, 0, 0)
	if err != nil {
		return err
	}
	g := &gangs{b: b, p: p, alone: map[string]counted{}, workers: map[string]*worker{}}
	defer g.stop()
	err = g.start(ctx)
	if err == nil {
		err = g.run(ctx)
	}
	for _, c := range g.cells {
		fmt.Println("  " + c.line())
	}
	return errors.Join(err, p.quantum(ctx, longQuantum), saveCells(b.results, "gang.json", g.cells))
}

func (g *gangs) load(process string) string {
	kind := map[bool]string{true: "spin", false: "gemm"}[g.b.simulated]
	if len(g.job(process)) > 1 {
		kind = "ranks"
	}
	return fmt.Sprintf("%s@%d", kind, gangGPU(process))
}

func (g *gangs) job(process string) []string { return gangJobs[process[:len(process)-1]] }

// of are the processes of jobs.
func (g *gangs) of(jobs []string) []*worker {
	var workers []*worker
	for _, job := range jobs {
		for _, process := range gangJobs[job] {
			workers = append(workers, g.workers[process])
		}
	}
	return workers
}

// share says for each tenant whether its processes get the GPUs together, and its core limit.
func (g *gangs) share(ctx context.Context, together bool, limits map[string]int) error {
	for job, user := range gangUsers {
		s := share{Limit: limits[job]}
		if together && len(gangJobs[job]) > 1 {
			s.Gang = "true"
		}
		if err := g.p.setShare(ctx, gangUser+user, s); err != nil {
			return err
		}
	}
	return nil
}

func (g *gangs) start(ctx context.Context) error {
	began := time.Now()
	if err := g.share(ctx, true, nil); err != nil {
		return err
	}
	if err := g.p.setShare(ctx, requestUser, share{Priority: "latency"}); err != nil {
		return err
	}
	var all []*worker
	for job, processes := range gangJobs {
		i := -1
		if user, ok := gangUsers[job]; ok {
			i = gangUser - firstUser + user
		}
		for rank, name := range processes {
			backend := g.b.backend()
			if len(processes) > 1 {
				backend = []string{"nccl", g.p.home(i, "ranks-"+job), strconv.Itoa(rank), strconv.Itoa(len(processes))}
				if g.b.simulated {
					backend[0] = "driver"
				}
			}
			w, err := g.p.start(i, backend...)
			if err != nil {
				return err
			}
			w.name = name
			g.workers[name] = w
			all = append(all, w)
		}
	}
	if err := errors.Join(together(all, func(w *worker) error { _, err := w.load(ctx); return err })...); err != nil {
		return err
	}
	// A collective begins in init and in build: one gang after the other, or
	// two would wait for each other wherever they are not granted together.
	ready := func(w *worker) error {
		if _, err := w.init(ctx); err != nil {
			return err
		}
		like := built{}
		if len(g.job(w.name)) > 1 {
			like = built{Steps: gangSteps, Marks: gangMarks}
		}
		_, err := w.build(ctx, g.load(w.name), like)
		return err
	}
	for _, jobs := range [][]string{{"A"}, {"B"}, {"nA"}, {"s", "t", "ns", "nt"}} {
		if err := errors.Join(together(g.of(jobs), ready)...); err != nil {
			return err
		}
	}
	fmt.Printf("  %d processes started in %.1f s\n", len(all), time.Since(began).Seconds())
	return nil
}

func (g *gangs) stop() {
	var all []*worker
	for _, w := range g.workers {
		all = append(all, w)
	}
	for _, err := range together(all, (*worker).quit) {
		if err != nil {
			fmt.Println("  at its end:", err)
		}
	}
}

func (g *gangs) run(ctx context.Context) error {
	// Each by itself, the tenants of one GPU side by side.
	for _, jobs := range [][]string{{"A"}, {"B"}, {"s", "t"}, {"nA"}, {"ns", "nt"}} {
		c := g.cell(ctx, gangRun{name: "alone", length: 2 * time.Second, jobs: jobs})
		if c.Problem != "" {
			return errors.New(c.Problem)
		}
		for name, r := range c.Rates {
			g.alone[name] = r
		}
	}
	runs := gangRuns
	if g.b.cells.quick {
		runs = runs[:4]
	}
	defer func() { _, _ = g.b.node.Ctl(context.WithoutCancel(ctx), "-S", "on") }()
	for _, r := range runs {
		if only := g.b.cells.only; only != nil && !only.MatchString(r.name) {
			continue
		}
		if err := g.share(ctx, r.gangs, r.limits); err != nil {
			return err
		}
		if r.mode != "" {
			if _, err := g.b.node.Ctl(ctx, "-S", r.mode, "-T", r.quantum); err != nil {
				return err
			}
		}
		g.cell(ctx, r)
	}
	return nil
}

// cell lets the jobs work at the same time. What goes wrong is noted in it.
func (g *gangs) cell(ctx context.Context, r gangRun) *gangCell {
	c := &gangCell{Case: r.name, Mode: r.mode, Quantum: r.quantum, Gangs: r.gangs, Seconds: r.length.Seconds(), Rates: map[string]counted{}, Limits: r.limits}
	g.cells = append(g.cells, c)
	workers := g.of(r.jobs)
	lead := time.Second
	if r.requests {
		c.Requests, lead = &requests{}, requestReady
	}
	var log *timeline
	if r.requests && r.mode != "" {
		log = (&scheduler{b: g.b, dir: node.RunDir}).watch(ctx, time.Second)
		defer log.stop()
	}
	s := soon(lead, r.length)
	counts := make([]counted, len(workers))
	bills, err := g.b.during(ctx, time.Second, func() error {
		said := make(chan error, 1)
		go func() {
			var err error
			if r.requests {
				err = g.b.requests(ctx, s, r.mode == "", c.Requests)
			}
			said <- err
		}()
		errs := together(workers, func(w *worker) error {
			load := g.load(w.name)
			done, err := w.slices(ctx, s, 0, gangBeyond, load)
			counts[slices.Index(workers, w)] = done[load]
			return err
		})
		return errors.Join(append(errs, <-said)...)
	})
	c.Counters = counters(bills)
	if log != nil && c.Requests.Max > slowRequest {
		log.stop()
		err = errors.Join(err, g.b.saveJSON(fmt.Sprintf("gang-events-%d.json", len(g.cells)), log))
	}
	if err != nil {
		c.Problem = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	for i, w := range workers {
		c.Rates[w.name] = counts[i]
		if alone := g.alone[w.name].Rate; alone > 0 {
			if c.OfAlone == nil {
				c.OfAlone = map[string]float64{}
			}
			c.OfAlone[w.name] = round(counts[i].Rate/alone, 4)
			c.Use[gangGPU(w.name)] += counts[i].Rate / alone
		}
		if user, ok := gangUsers[w.name[:len(w.name)-1]]; ok {
			if c.Billed == nil {
				c.Billed = map[string]float64{}
			}
			gpu := gangGPU(w.name)
			c.Billed[w.name] = round(clockShare(bills, tenantOn{gangUser + user, uint32(gpu)}, s.start, s.end), 2)
		}
	}
	return c
}

func (c *gangCell) line() string {
	how := strings.TrimSpace(c.Mode + " " + c.Quantum)
	if c.Gangs {
		how += ", together"
	}
	var names []string
	for name := range c.Rates {
		names = append(names, name)
	}
	slices.Sort(names)
	line := fmt.Sprintf("%-40s %-20s", c.Case, how)
	for _, name := range names {
		line += fmt.Sprintf(" %s %.1f/s", name, c.Rates[name].Rate)
		if of, ok := c.OfAlone[name]; ok {
			line += fmt.Sprintf(" (%.1f %%)", 100*of)
		}
		line += fmt.Sprintf(" gap %.0f ms", 1000*c.Rates[name].LongestGap)
		if billed, ok := c.Billed[name]; ok && len(c.Limits) > 0 {
			line += fmt.Sprintf(" billed %.2f %%", billed)
		}
	}
	if r := c.Requests; r != nil {
		line += fmt.Sprintf(" requests p50 %.2f p99 %.2f max %.2f ms, %d behind", r.P50, r.P99, r.Max, r.Behind)
	}
	if c.OfAlone != nil {
		line += fmt.Sprintf("; use of GPU 0 %.1f %%, GPU 1 %.1f %%", 100*c.Use[0], 100*c.Use[1])
	}
	line += fmt.Sprintf("; %d revokes, %d preemptions, %d fences", c.Counters["revokes"], c.Counters["preemptions"], c.Counters["fences"])
	if c.Problem != "" {
		line += "\n      PROBLEM " + c.Problem[:min(600, len(c.Problem))]
	}
	return line
}

// home is a file in a tenant's own directory.
func (p *pool) home(i int, name string) string {
	id := 0
	if i >= 0 {
		id = firstUser + i
	}
	return filepath.Join(p.dir, "home-"+strconv.Itoa(id), name)
}
