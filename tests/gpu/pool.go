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
	"syscall"
	"time"
)

const (
	// firstUser is the user of the pool's first tenant. Outside containers a
	// user's processes are a tenant of the scheduler.
	firstUser = 61000
	// Windows in which nobody else works: the lead is long enough for the
	// clocks of a busy GPU to settle.
	refLead, refLength = 800 * time.Millisecond, 2 * time.Second
)

// share is what `nvsharectl set` gives a tenant.
type share struct {
	Limit    int    `json:"limit,omitempty"`
	Request  int    `json:"request,omitempty"`
	Weight   int    `json:"weight,omitempty"`
	Priority string `json:"priority,omitempty"`
	Gang     string `json:"gang,omitempty"`
}

// A pool is the processes of several steps, started once, for a framework's
// start takes long: tenants, each with the shim and a user of its own, and
// native processes.
type pool struct {
	b       *bench
	dir     string // that every user can read: the tree may lie where they can't
	runDir  string // of the tenants' scheduler; "": the node's
	tenants []*worker
	natives []*worker
	built   map[*worker]map[string]built
	like    map[string]built // how much of a load goes between two marks
	shares  map[int]share    // by user
}

// pool makes it, or makes it greater.
func (b *bench) pool(ctx context.Context, tenants, natives int) (*pool, error) {
	return b.poolOf(ctx, tenants, natives, "")
}

// poolOf is pool, of the scheduler with a run directory.
func (b *bench) poolOf(ctx context.Context, tenants, natives int, runDir string) (*pool, error) {
	if b.shared == nil {
		p := &pool{b: b, dir: "/run/gpu-tenants", runDir: runDir, built: map[*worker]map[string]built{}, like: map[string]built{}, shares: map[int]share{}}
		if err := p.install(); err != nil {
			return nil, err
		}
		b.shared = p
	}
	p := b.shared
	began := time.Now()
	var fresh []*worker
	for len(p.tenants) < tenants {
		w, err := p.start(len(p.tenants), b.backend()...)
		if err != nil {
			return nil, err
		}
		p.tenants, fresh = append(p.tenants, w), append(fresh, w)
	}
	for len(p.natives) < natives {
		w, err := p.start(-1, b.backend()...)
		if err != nil {
			return nil, err
		}
		p.natives, fresh = append(p.natives, w), append(fresh, w)
	}
	if len(fresh) == 0 {
		return p, nil
	}
	err := errors.Join(together(fresh, func(w *worker) error {
		if _, err := w.load(ctx); err != nil {
			return err
		}
		_, err := w.init(ctx)
		return err
	})...)
	fmt.Printf("  %d processes started in %.1f s\n", len(fresh), time.Since(began).Seconds())
	return p, err
}

func (b *bench) backend() []string {
	if b.backendName != nil {
		return b.backendName
	}
	if b.simulated {
		return []string{"driver"}
	}
	return []string{"torch", "rates"}
}

// install copies what tenants run.
func (p *pool) install() error {
	files := map[string]string{"libnvshare.so": p.b.node.Shim(), "worker.py": p.b.script("worker.py"), "short-request": p.b.node.Bin("short-request")}
	loads, err := filepath.Glob(filepath.Join(filepath.Dir(p.b.script("worker.py")), "loads", "*.py"))
	if err != nil {
		return err
	}
	for _, l := range loads {
		files[filepath.Join("loads", filepath.Base(l))] = l
	}
	if err := os.MkdirAll(filepath.Join(p.dir, "loads"), 0o755); err != nil {
		return err
	}
	for to, from := range files {
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(p.dir, to), data, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// environ is the environment of tenant i, or with -1 of a native process.
func (p *pool) environ(i int) ([]string, *syscall.Credential, error) {
	who, id := native, 0
	if i >= 0 {
		id = firstUser + i
		who = "t" + strconv.Itoa(i)
	}
	home := p.home(i, "")
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, nil, err
	}
	if err := os.Chown(home, id, id); err != nil {
		return nil, nil, err
	}
	// Without a name in passwd a library may give up.
	env := []string{"HOME=" + home, "USER=" + who, "LOGNAME=" + who, "TMPDIR=" + home, "CUDA_CACHE_PATH=" + home, "TRITON_CACHE_DIR=" + home,
		"PYTHONWARNINGS=ignore"}
	for _, e := range p.b.tenantEnv(who, "") {
		if strings.HasPrefix(e, "LD_PRELOAD=") {
			e = "LD_PRELOAD=" + filepath.Join(p.dir, "libnvshare.so")
		}
		env = append(env, e)
	}
	if p.runDir != "" {
		env = append(env, "NVSHARE_RUN_DIR="+p.runDir)
	}
	if i < 0 {
		return env, nil, nil
	}
	return env, &syscall.Credential{Uid: uint32(id), Gid: uint32(id)}, nil
}

// start starts a worker as tenant i, or with -1 as a native process.
func (p *pool) start(i int, backend ...string) (*worker, error) {
	env, who, err := p.environ(i)
	if err != nil {
		return nil, err
	}
	name := native
	if i >= 0 {
		name = fmt.Sprintf("tenant %d", i)
	}
	return startWorkerAs(who, p.b.python, filepath.Join(p.dir, "worker.py"), name, filepath.Join(p.b.results, "tenants-stderr.txt"), env, backend...)
}

// stop ends the processes.
func (p *pool) stop() error {
	return errors.Join(together(slices.Concat(p.tenants, p.natives), (*worker).quit)...)
}

// have builds loads where they are not yet: loads[i] by workers[i].
func (p *pool) have(ctx context.Context, workers []*worker, loads []string) error {
	build := func(w *worker, load string) (built, error) {
		b, err := w.build(ctx, load, p.like[load])
		if err != nil {
			err = fmt.Errorf("%s: build %s: %w", w.name, load, err)
		}
		return b, err
	}
	// The first of each kind says how much goes between two marks.
	for i, load := range loads {
		if _, known := p.like[load]; known {
			continue
		}
		b, err := build(workers[i], load)
		if err != nil {
			return err
		}
		p.like[load] = b
		p.note(workers[i], load, b)
	}
	said := make([]built, len(workers))
	err := errors.Join(together(workers, func(w *worker) (err error) {
		i := slices.Index(workers, w)
		if _, done := p.built[w][loads[i]]; !done {
			said[i], err = build(w, loads[i])
		}
		return err
	})...)
	for i, w := range workers {
		if said[i].Steps > 0 {
			p.note(w, loads[i], said[i])
		}
	}
	return err
}

func (p *pool) note(w *worker, load string, b built) {
	if p.built[w] == nil {
		p.built[w] = map[string]built{}
	}
	p.built[w][load] = b
}

// drop frees all loads.
func (p *pool) drop(ctx context.Context) error {
	err := errors.Join(together(slices.Concat(p.tenants, p.natives), func(w *worker) error {
		for load := range p.built[w] {
			if err := w.drop(ctx, load); err != nil {
				return err
			}
		}
		return nil
	})...)
	clear(p.built)
	return err
}

// work lets workers[i] work with loads[i], which they have, all in the same
// window.
func (p *pool) work(ctx context.Context, s span, every time.Duration, workers []*worker, loads []string) ([]counted, error) {
	counts := make([]counted, len(workers))
	err := errors.Join(together(workers, func(w *worker) error {
		i := slices.Index(workers, w)
		said, err := w.slices(ctx, s, every, windowBeyond, loads[i])
		counts[i] = said[loads[i]]
		return err
	})...)
	return counts, err
}

// alone is what one worker reaches by itself.
func (p *pool) alone(ctx context.Context, w *worker, load string) (counted, error) {
	if err := p.have(ctx, []*worker{w}, []string{load}); err != nil {
		return counted{}, err
	}
	c, err := p.work(ctx, soon(refLead, refLength), 0, []*worker{w}, []string{load})
	return c[0], err
}

// setShare changes what user id may have and is promised.
func (p *pool) setShare(ctx context.Context, id int, s share) error {
	old := p.shares[id]
	if old == s {
		return nil
	}
	args := []string{"set", "--user", strconv.Itoa(id)}
	change := func(flag, old, now string) {
		if now == "" || now == "0" {
			now = "none"
		}
		if old != now && (old != "" && old != "0" || now != "none") {
			args = append(args, flag, now)
		}
	}
	change("--core-limit", strconv.Itoa(old.Limit), strconv.Itoa(s.Limit))
	change("--core-request", strconv.Itoa(old.Request), strconv.Itoa(s.Request))
	change("--weight", strconv.Itoa(old.Weight), strconv.Itoa(s.Weight))
	change("--priority", old.Priority, s.Priority)
	change("--gang", old.Gang, s.Gang)
	if _, err := p.b.node.Ctl(ctx, args...); err != nil {
		return err
	}
	p.shares[id] = s
	return nil
}

// setShares gives tenant i shares[i], and those after them none.
func (p *pool) setShares(ctx context.Context, shares ...share) error {
	for i := range p.tenants {
		var s share
		if i < len(shares) {
			s = shares[i]
		}
		if err := p.setShare(ctx, firstUser+i, s); err != nil {
			return err
		}
	}
	return nil
}

func (p *pool) quantum(ctx context.Context, d string) error {
	_, err := p.b.node.Ctl(ctx, "-T", d)
	return err
}

// billed is what the scheduler has counted up to a time.
type billed struct {
	at       float64              // seconds of CLOCK_MONOTONIC
	used     map[tenantOn]float64 // seconds of a GPU
	promised map[tenantOn]float64 // percent of it
	counters map[string]uint64    // of all GPUs
}

// A tenantOn is a user's processes on the GPU with an index.
type tenantOn struct {
	user int
	gpu  uint32
}

// bill asks the scheduler.
func (b *bench) bill(ctx context.Context) (billed, error) {
	before := monotonic()
	status, err := b.node.Status(ctx)
	now := billed{at: float64(before+monotonic()) / 2e9, used: map[tenantOn]float64{}, promised: map[tenantOn]float64{}, counters: map[string]uint64{}}
	if err != nil {
		return now, err
	}
	for _, g := range status.Gpus {
		now.counters["grants"] += g.Grants
		now.counters["revokes"] += g.Revokes
		now.counters["fences"] += g.Fences
		now.counters["preemptions"] += g.Preemptions
		for _, t := range g.Tenants {
			who := tenantOn{int(t.Uid), g.Index}
			now.used[who] = float64(t.UsedNs) / 1e9
			now.promised[who] = float64(t.PromisedPermille) / 10
		}
	}
	return now, nil
}

// during runs f and meanwhile asks the scheduler every so often.
func (b *bench) during(ctx context.Context, every time.Duration, f func() error) ([]billed, error) {
	done := make(chan struct{})
	bills := make(chan []billed, 1)
	go func() {
		var all []billed
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			if now, err := b.bill(ctx); err == nil {
				all = append(all, now)
			}
			select {
			case <-done:
				bills <- all
				return
			case <-tick.C:
			}
		}
	}()
	err := f()
	close(done)
	return <-bills, err
}
