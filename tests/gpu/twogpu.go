// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"
)

// twoGPUsWithin bounds the step.
const twoGPUsWithin = 4 * time.Minute

// gpuGrants is what the scheduler knows of one process on one GPU.
type gpuGrants struct {
	UUID       string `json:"uuid"`
	Index      uint32 `json:"index"`
	Process    string `json:"process"`
	Grants     uint64 `json:"grants"`
	Calls      uint64 `json:"calls"`
	Interposed uint32 `json:"interposed"`
	Bypassed   uint32 `json:"bypassed"`
	State      string `json:"state"`
}

type gpuWindow struct {
	Case    string                        `json:"case"`
	Tenants map[string]map[string]counted `json:"tenants"` // process, load@GPU
	Holders map[string][]string           `json:"holders,omitempty"`
}

type twoGPUResult struct {
	Backend  string                 `json:"backend"`
	Windows  []*gpuWindow           `json:"windows"`
	Grants   map[string][]gpuGrants `json:"grants"` // by when
	Checks   []string               `json:"checks"`
	Problems []string               `json:"problems,omitempty"`
}

// twoGPU is the step with one backend: processes a and b use both GPUs by
// ordinal; c sees only the second one, as its ordinal 0.
type twoGPU struct {
	b       *bench
	load    string
	least   float64 // part of its rate alone that a tenant must reach
	workers map[string]*worker
	r       twoGPUResult
}

func (b *bench) twoGPUs(ctx context.Context, work string) error {
	ctx, cancel := context.WithTimeout(ctx, twoGPUsWithin)
	defer cancel()
	status, err := b.node.Status(ctx)
	if err != nil {
		return err
	}
	if len(status.Gpus) > 0 && len(status.Gpus) < 2 {
		return errors.New("this machine has only one GPU")
	}
	var all []*twoGPUResult
	var errs []error
	// A kernel that spins shows the gates; PyTorch's the same for a framework.
	for _, backend := range []string{"driver", "torch"} {
		if b.simulated && backend == "torch" {
			continue
		}
		t := &twoGPU{b: b, load: map[string]string{"driver": "spin", "torch": "gemm"}[backend], workers: map[string]*worker{}, least: 0.9}
		if b.simulated {
			t.least = 0.2 // the machine's cores are what is shared there
		}
		t.r = twoGPUResult{Backend: backend, Grants: map[string][]gpuGrants{}}
		began := time.Now()
		err := t.run(ctx, filepath.Join(work, "private"))
		for _, w := range t.workers {
			err = errors.Join(err, w.quit())
		}
		if err != nil {
			t.r.Problems = append(t.r.Problems, err.Error())
		}
		fmt.Printf("two GPUs, %s, %.1f s\n", backend, time.Since(began).Seconds())
		for _, c := range t.r.Checks {
			fmt.Println("  ok      ", c)
		}
		for _, p := range t.r.Problems {
			fmt.Println("  PROBLEM ", p)
			errs = append(errs, errors.New(p))
		}
		all = append(all, &t.r)
	}
	return errors.Join(append(errs, b.saveJSON("two-gpu.json", all))...)
}

func (t *twoGPU) on(gpu int) string { return fmt.Sprintf("%s@%d", t.load, gpu) }

func (t *twoGPU) check(ok bool, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if ok {
		t.r.Checks = append(t.r.Checks, text)
	} else {
		t.r.Problems = append(t.r.Problems, text)
	}
}

func (t *twoGPU) run(ctx context.Context, dir string) error {
	for name, more := range map[string][]string{"a": nil, "b": nil, "c": {"CUDA_VISIBLE_DEVICES=1"}} {
		env := append(t.b.tenantEnv(name, ""), more...)
		w, err := startWorker(t.b.python, t.b.script("worker.py"), name, filepath.Join(t.b.results, "two-gpu-stderr.txt"), env, t.r.Backend)
		if err != nil {
			return err
		}
		t.workers[name] = w
	}
	a, b, c := t.workers["a"], t.workers["b"], t.workers["c"]
	all := []*worker{a, b, c}
	for _, do := range []func(*worker) error{
		func(w *worker) error { _, err := w.load(ctx); return err },
		func(w *worker) error { _, err := w.init(ctx); return err },
	} {
		if err := errors.Join(together(all, do)...); err != nil {
			return err
		}
	}
	like, err := a.build(ctx, t.on(0), built{})
	if err != nil {
		return err
	}
	loads := map[*worker][]string{a: {t.on(1)}, b: {t.on(0), t.on(1)}, c: {t.on(0)}}
	if err := errors.Join(together(all, func(w *worker) error {
		for _, load := range loads[w] {
			if _, err := w.build(ctx, load, like); err != nil {
				return err
			}
		}
		return nil
	})...); err != nil {
		return err
	}
	for _, phase := range []func(context.Context, *worker, *worker, *worker) error{t.alone, t.blocked, t.crossed, t.both, t.visible} {
		if err := phase(ctx, a, b, c); err != nil {
			return err
		}
	}
	return nil
}

// job is what a process does in a window, and how much longer than the
// others it works at both ends.
type job struct {
	w      *worker
	longer time.Duration
	loads  []string
}

func (t *twoGPU) window(ctx context.Context, name, quantum string, length time.Duration, jobs ...job) (*gpuWindow, error) {
	if _, err := t.b.node.Ctl(ctx, "-T", quantum); err != nil {
		return nil, err
	}
	var most time.Duration
	for _, j := range jobs {
		most = max(most, j.longer)
	}
	s := soon(besideLead+most, length)
	var workers []*worker
	for _, j := range jobs {
		workers = append(workers, j.w)
	}
	w := &gpuWindow{Case: name, Tenants: map[string]map[string]counted{}}
	counts := make([]map[string]counted, len(jobs))
	looked := make(chan struct{})
	go func() { // who holds what, in the middle
		defer close(looked)
		time.Sleep(besideLead + most + length/2)
		w.Holders = t.holders(ctx)
	}()
	err := errors.Join(together(workers, func(x *worker) (err error) {
		i := slices.Index(workers, x)
		mine := s
		mine.lead += (most - jobs[i].longer).Seconds()
		mine.end += jobs[i].longer.Seconds()
		counts[i], err = x.window(ctx, mine, jobs[i].loads...)
		return err
	})...)
	<-looked
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	for i, j := range jobs {
		w.Tenants[j.w.name] = counts[i]
	}
	t.r.Windows = append(t.r.Windows, w)
	return w, nil
}

// alone: one process uses one GPU, the other, and both at once.
func (t *twoGPU) alone(ctx context.Context, _, b, _ *worker) error {
	for gpu := range 2 {
		if _, err := t.window(ctx, fmt.Sprintf("alone on %d", gpu), "100ms", time.Second, job{w: b, loads: []string{t.on(gpu)}}); err != nil {
			return err
		}
	}
	w, err := t.window(ctx, "alone on both", "100ms", time.Second, job{w: b, loads: []string{t.on(0), t.on(1)}})
	if err != nil {
		return err
	}
	for gpu := range 2 {
		of := w.Tenants["b"][t.on(gpu)].Rate / t.rate(gpu)
		t.check(of > t.least, "one process on both GPUs: GPU %d at %.1f %% of using it alone", gpu, 100*of)
	}
	return nil
}

// rate is what process b reaches alone on a GPU.
func (t *twoGPU) rate(gpu int) float64 { return t.r.Windows[gpu].Tenants["b"][t.on(gpu)].Rate }

// blocked: a holds GPU 1 for seconds; b waits for it in one thread and goes
// on with GPU 0 in another.
func (t *twoGPU) blocked(ctx context.Context, a, b, _ *worker) error {
	w, err := t.window(ctx, "b waits for GPU 1", "2s", 5*time.Second,
		job{w: a, longer: 500 * time.Millisecond, loads: []string{t.on(1)}}, job{w: b, loads: []string{t.on(0), t.on(1)}})
	if err != nil {
		return err
	}
	free, waiting := w.Tenants["b"][t.on(0)], w.Tenants["b"][t.on(1)]
	t.check(waiting.LongestGap > 0.2, "b waited for GPU 1, once for %.2f s", waiting.LongestGap)
	t.check(free.LongestGap < waiting.LongestGap/2, "meanwhile b never paused on GPU 0 for longer than %.0f ms", 1000*free.LongestGap)
	of := free.Rate / t.rate(0)
	t.check(of > t.least, "b on GPU 0 meanwhile: %.1f %% of alone", 100*of)
	return nil
}

// crossed: each process has the other GPU.
func (t *twoGPU) crossed(ctx context.Context, a, b, _ *worker) error {
	w, err := t.window(ctx, "a on 0, b on 1", "100ms", 2*time.Second,
		job{w: a, loads: []string{t.on(0)}}, job{w: b, loads: []string{t.on(1)}})
	if err != nil {
		return err
	}
	for gpu, name := range []string{"a", "b"} {
		of := w.Tenants[name][t.on(gpu)].Rate / t.rate(gpu)
		t.check(of > t.least, "%s alone on GPU %d while the other has the other: %.1f %%", name, gpu, 100*of)
	}
	t.check(len(w.Holders) == 2, "both GPUs were held at the same time, by %v", w.Holders)
	return nil
}

// both: everybody uses everything.
func (t *twoGPU) both(ctx context.Context, a, b, _ *worker) error {
	loads := []string{t.on(0), t.on(1)}
	w, err := t.window(ctx, "a and b on both", "100ms", 3*time.Second, job{w: a, loads: loads}, job{w: b, loads: loads})
	if err != nil {
		return err
	}
	for gpu := range 2 {
		x, y := w.Tenants["a"][t.on(gpu)], w.Tenants["b"][t.on(gpu)]
		of := (x.Rate + y.Rate) / t.rate(gpu)
		t.check(of > t.least && x.Rate > 0 && y.Rate > 0, "two processes on GPU %d: %.2f %% of one alone, a %.0f/s, b %.0f/s", gpu, 100*of, x.Rate, y.Rate)
	}
	grants := t.grants(ctx)
	t.r.Grants["a and b on both"] = grants
	for gpu := range 2 {
		for _, name := range []string{"a", "b"} {
			i := slices.IndexFunc(grants, func(g gpuGrants) bool { return g.Process == name && g.Index == uint32(gpu) && g.Grants > 0 })
			t.check(i >= 0, "%s has grants of GPU %d by its UUID", name, gpu)
		}
	}
	return nil
}

// visible: ordinal 0 of c is the second GPU.
func (t *twoGPU) visible(ctx context.Context, _, _, c *worker) error {
	if _, err := t.window(ctx, "c, which sees only GPU 1", "100ms", time.Second, job{w: c, loads: []string{t.on(0)}}); err != nil {
		return err
	}
	grants := t.grants(ctx)
	t.r.Grants["c"] = grants
	var uuids []string
	for _, g := range grants {
		if g.Process == "c" && g.Grants > 0 {
			uuids = append(uuids, g.UUID)
			t.check(g.Index == 1, "c's only GPU is index %d, %s", g.Index, g.UUID)
		}
	}
	t.check(len(uuids) == 1, "c has grants of %v", uuids)
	return nil
}

func (t *twoGPU) grants(ctx context.Context) []gpuGrants {
	status, err := t.b.node.Status(ctx)
	if err != nil {
		return nil
	}
	names := t.names()
	var all []gpuGrants
	for _, g := range status.Gpus {
		for _, c := range g.Clients {
			all = append(all, gpuGrants{g.Uuid, g.Index, names[c.Pid], c.Grants, c.Calls, c.Interposed, c.Bypassed, c.State.String()})
		}
	}
	return all
}

func (t *twoGPU) names() map[uint32]string {
	names := map[uint32]string{}
	for name, w := range t.workers {
		names[uint32(w.pid())] = name
	}
	return names
}

// holders lists the processes that hold a GPU now, by its UUID.
func (t *twoGPU) holders(ctx context.Context) map[string][]string {
	held := map[string][]string{}
	for _, g := range t.grants(ctx) {
		if g.State == "CLIENT_STATE_HOLDING" {
			held[g.UUID] = append(held[g.UUID], g.Process)
		}
	}
	return held
}
