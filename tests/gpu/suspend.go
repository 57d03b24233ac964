// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/quantile"
)

const (
	suspendWithin = 9 * time.Minute
	suspendRounds = 10
	suspendCall   = 2 * time.Minute // an order, at most
	// serverMiB is the memory of each model server, of which serverGiB look like the GPU's.
	serverMiB = 4608
	serverGPU = "24Gi"
	// zipf is the exponent by which requests go to servers.
	zipf = 1.0
)

// A suspendRound is one suspension and what came of it. Times are seconds.
type suspendRound struct {
	Off        float64 `json:"off"`         // from the order until nothing is left on the GPU
	On         float64 `json:"on"`          // the first call, which brings the process back
	Restore    float64 `json:"restore"`     // of that, the driver's
	Again      float64 `json:"again"`       // the same call after that
	UsedBefore int64   `json:"used_before"` // on the GPU, by NVML, bytes
	UsedOff    int64   `json:"used_off"`
	UsedAfter  int64   `json:"used_after"`
	Listed     bool    `json:"listed_while_off"` // NVML names the process
	Wrong      int64   `json:"wrong"`            // words
}

// servers are model servers of which few fit the GPU.
type servers struct {
	N        int                  `json:"servers"`
	MiB      int                  `json:"mib_each"`
	Fit      int                  `json:"fit_without_nvshare"`
	Requests int                  `json:"requests"`
	Errors   []string             `json:"errors,omitempty"`
	First    map[string][]float64 `json:"first_token_s"` // by where the server was: resident, swapped, suspended, filed (suspended, in a file)
	UsedIdle int64                `json:"used_when_all_are_suspended"`
}

type suspendResult struct {
	MiB       int            `json:"mib"`
	Rounds    []suspendRound `json:"rounds"`
	UsedEmpty int64          `json:"used_empty"` // before any process
	Servers   *servers       `json:"model_servers,omitempty"`
	Events    []string       `json:"events"`
	Problems  []string       `json:"problems,omitempty"`
}

// suspendBench is what the step has at hand.
type suspendBench struct {
	*bench
	s     *scheduler
	watch *worker
	r     *suspendResult
}

// suspendStep takes a process off the GPU, context included, and back, ten times; then as
// many model servers as host memory holds answer requests.
func (b *bench) suspendStep(ctx context.Context, _ string) error {
	ctx, cancel := context.WithTimeout(ctx, suspendWithin)
	defer cancel()
	x := &suspendBench{bench: b, r: &suspendResult{MiB: 8 << 10}}
	if b.simulated {
		x.r.MiB = 192
	}
	if b.tenantMiB > 0 {
		x.r.MiB = b.tenantMiB
	}
	var err error
	x.watch, err = startWorker(b.python, b.script("suspend.py"), "watch", filepath.Join(b.results, "suspend-stderr.txt"), b.tenantEnv(native, ""), "watch")
	if err != nil {
		return err
	}
	defer func() { _ = x.watch.quit() }()
	if err := x.watch.call(ctx, suspendCall, map[string]any{"op": "load"}, nil); err != nil {
		return err
	}
	var errs []error
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{{"rounds", x.one}, {"servers", x.many}} {
		if b.cells.only == nil || b.cells.only.MatchString(part.name) {
			errs = append(errs, part.run(ctx), b.saveJSON("suspend.json", x.r))
		}
	}
	for _, p := range x.r.Problems {
		errs = append(errs, errors.New(p))
	}
	return errors.Join(errs...)
}

// seen is what NVML says.
type seen struct {
	Used int64
	PIDs []int
}

func (x *suspendBench) look(ctx context.Context) (s seen, err error) {
	err = x.watch.call(ctx, suspendCall, map[string]any{"op": "watch"}, &s)
	return s, err
}

// start starts the scheduler of a part.
func (x *suspendBench) start(ctx context.Context, name string, hostMiB int, more ...string) (err error) {
	x.s, err = x.scheduler(ctx, name, append([]string{"--swap-memory", fmt.Sprintf("%dMi", hostMiB), "--checkpoint", x.node.Bin("nvshare-checkpoint")}, more...)...)
	if err == nil {
		x.s.awaitReady(ctx, uint64(hostMiB)<<20/4)
	}
	return err
}

// suspendUser is that of the first tenant.
const suspendUser = 800

// order suspends or resumes the user of a process.
func (x *suspendBench) order(ctx context.Context, w *worker, call func(*api.Conn, context.Context, *api.SuspendRequest) (*api.SuspendResponse, error)) error {
	conn, err := api.Dial(ctx, x.s.dir)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = call(conn, ctx, &api.SuspendRequest{Uid: &w.user})
	return err
}

// client is what the scheduler says of a process.
func (x *suspendBench) client(ctx context.Context, w *worker) (*api.Client, error) {
	r, err := x.s.status(ctx)
	if err != nil {
		return nil, err
	}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			if c.Pid == w.clientPID() {
				return c, nil
			}
		}
	}
	return nil, errors.New("the scheduler does not know the process")
}

// awaitOff waits until nothing is left of a process on the GPU.
func (x *suspendBench) awaitOff(ctx context.Context, w *worker) error {
	ctx, cancel := context.WithTimeout(ctx, suspendCall)
	defer cancel()
	for {
		c, err := x.client(ctx, w)
		switch {
		case err != nil:
			return err
		case c.Context == api.ContextState_CONTEXT_STATE_AWAY:
			return nil
		case c.ContextProblem != "":
			return fmt.Errorf("it stays on the GPU: %s", c.ContextProblem)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it does not leave the GPU: suspended %t, %v, %d MiB resident, %d away", c.Suspended, c.Context, c.ResidentBytes>>20, c.AwayBytes>>20)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// awaitHost waits until so much of --swap-memory is left, because files have taken the rest,
// beside what the scheduler keeps for the largest file to come back.
func (x *suspendBench) awaitHost(ctx context.Context, want uint64) error {
	ctx, cancel := context.WithTimeout(ctx, suspendCall)
	defer cancel()
	for {
		r, err := x.s.status(ctx)
		if err != nil {
			return err
		}
		s := r.Gpus[0].Swap
		if s.ArenaUsedBytes+2*want <= s.ArenaLimitBytes {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("of %d MiB of host memory %d are used, %d are in files, and no more goes there", s.ArenaLimitBytes>>20, s.ArenaUsedBytes>>20, s.ArenaFileBytes>>20)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

type worked struct{ Seconds float64 }

// one is the first part.
func (x *suspendBench) one(ctx context.Context) error {
	if err := x.start(ctx, "suspend", 2*x.r.MiB); err != nil {
		return err
	}
	defer x.s.stop()
	empty, err := x.look(ctx)
	if err != nil {
		return err
	}
	x.r.UsedEmpty = empty.Used
	w, err := x.tenant(0, x.r.MiB)
	if err != nil {
		return err
	}
	defer func() { _ = w.quit() }()
	if err := w.call(ctx, loadWithin, map[string]any{"op": "load"}, nil); err != nil {
		return err
	}
	if err := w.call(ctx, buildWithin, map[string]any{"op": "init"}, nil); err != nil {
		return err
	}
	follow := x.s.watch(ctx, 100*time.Millisecond)
	for range suspendRounds {
		round, err := x.round(ctx, w)
		if err != nil {
			x.r.Problems = append(x.r.Problems, err.Error())
			break
		}
		x.r.Rounds = append(x.r.Rounds, round)
		fmt.Printf("  off %.3f s, first call %.3f s (the driver's restore %.3f), then %.3f; GPU memory %d MiB, off %d MiB, %d wrong words\n",
			round.Off, round.On, round.Restore, round.Again, round.UsedBefore>>20, round.UsedOff>>20, round.Wrong)
		if round.Listed || round.Wrong != 0 {
			x.r.Problems = append(x.r.Problems, fmt.Sprintf("while it was off NVML named the process: %t; %d words wrong afterwards", round.Listed, round.Wrong))
		}
	}
	follow.stop()
	for _, e := range follow.Events {
		if e.Type == "suspend" || e.Type == "context" {
			x.r.Events = append(x.r.Events, strings.TrimSpace(e.Type+" "+e.Reason))
		}
	}
	var off, on []float64
	for _, r := range x.r.Rounds {
		off, on = append(off, r.Off), append(on, r.On)
	}
	fmt.Printf("  %d MiB, %d rounds: off p50 %.3f, p99 %.3f s; on p50 %.3f, p99 %.3f s; %d MiB of the GPU used before any process\n",
		x.r.MiB, len(off), quantile.Of(off, 0.5), quantile.Of(off, 0.99), quantile.Of(on, 0.5), quantile.Of(on, 0.99), x.r.UsedEmpty>>20)
	return nil
}

func (x *suspendBench) round(ctx context.Context, w *worker) (r suspendRound, err error) {
	before, err := x.look(ctx)
	if err != nil {
		return r, err
	}
	began := time.Now()
	if err := x.order(ctx, w, (*api.Conn).Suspend); err != nil {
		return r, err
	}
	if err := x.awaitOff(ctx, w); err != nil {
		return r, err
	}
	r.Off = time.Since(began).Seconds()
	off, err := x.look(ctx)
	if err != nil {
		return r, err
	}
	var first, again worked
	if err := w.call(ctx, suspendCall, map[string]any{"op": "work"}, &first); err != nil {
		return r, err
	}
	if err := w.call(ctx, suspendCall, map[string]any{"op": "work"}, &again); err != nil {
		return r, err
	}
	c, err := x.client(ctx, w)
	if err != nil {
		return r, err
	}
	var words struct{ Wrong int64 }
	if err := w.call(ctx, suspendCall, map[string]any{"op": "check"}, &words); err != nil {
		return r, err
	}
	after, err := x.look(ctx)
	r.On, r.Again, r.Restore = first.Seconds, again.Seconds, time.Duration(c.RestoreNs).Seconds()
	r.UsedBefore, r.UsedOff, r.UsedAfter, r.Wrong = before.Used, off.Used, after.Used, words.Wrong
	r.Listed = slices.Contains(off.PIDs, int(w.clientPID()))
	return r, err
}

// many is the second part.
func (x *suspendBench) many(ctx context.Context) error {
	m := &servers{N: 20, MiB: serverMiB, Requests: 200, First: map[string][]float64{}}
	args := []string{"--gpu-memory", serverGPU, "--suspend-after", "3s"}
	gpu := 24 << 10
	if x.simulated {
		m.N, m.MiB, m.Requests, gpu = 4, 64, 24, 160
		args = []string{"--gpu-memory", "160Mi", "--suspend-after", "1s", "--swap-headroom", "0"}
	}
	if x.cells.quick {
		m.N, m.Requests = min(m.N, 8), min(m.Requests, 60)
	}
	// Beside its weights a server takes memory for each answer: PyTorch's pool grows to some
	// 300 MiB more.
	more := 512
	if x.simulated {
		more = 16
	}
	host := m.MiB + more
	if x.suspendDir != "" { // files keep the other half
		if err := os.MkdirAll(x.suspendDir, 0o700); err != nil {
			return err
		}
		m.N = max(m.N, 16) // a quarter of the first half has room for two, see awaitHost
		host /= 2
		args = append(args, "--suspend-dir", x.suspendDir)
	}
	room, err := hostRoom()
	if err == nil && !x.simulated { // PyTorch itself takes memory of the host as well
		m.N = min(m.N, int(room/mib20)/(host+1536))
	}
	m.Fit = gpu / (m.MiB + 500)
	x.r.Servers = m
	if err := x.start(ctx, "suspend-servers", m.N*host, args...); err != nil {
		return err
	}
	defer x.s.stop()
	all := make([]*worker, m.N)
	var wg sync.WaitGroup
	var mu sync.Mutex
	failed := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		m.Errors = append(m.Errors, err.Error())
	}
	for i := range all { // they import at the same time
		w, err := x.tenant(1+i, m.MiB)
		if err != nil {
			return err
		}
		all[i] = w
		defer func() { _ = w.kill(errors.New("the step is over")) }()
		wg.Go(func() {
			if err := w.call(ctx, loadWithin, map[string]any{"op": "load"}, nil); err != nil {
				failed(err)
			}
		})
	}
	wg.Wait()
	for _, w := range all {
		if err := w.call(ctx, buildWithin, map[string]any{"op": "init"}, nil); err != nil {
			return err
		}
		if x.suspendDir == "" {
			continue
		}
		// What is resident could have to leave to host memory, which holds half of the servers.
		if err := errors.Join(x.order(ctx, w, (*api.Conn).Suspend), x.awaitOff(ctx, w), x.awaitHost(ctx, uint64(m.MiB+more)<<20)); err != nil {
			return err
		}
	}
	for _, w := range all {
		if err := x.awaitOff(ctx, w); err != nil {
			m.Errors = append(m.Errors, err.Error())
		}
	}
	if idle, err := x.look(ctx); err == nil {
		m.UsedIdle = idle.Used
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range m.Requests {
		w := all[byZipf(random, m.N)]
		where := "suspended"
		if c, err := x.client(ctx, w); err == nil && c.Context == api.ContextState_CONTEXT_STATE_PRESENT {
			where = "resident"
			if c.AwayBytes > 0 {
				where = "swapped"
			}
		} else if err == nil && c.FileBytes > 0 {
			where = "filed"
		}
		var took worked
		if err := w.call(ctx, suspendCall, map[string]any{"op": "work"}, &took); err != nil {
			m.Errors = append(m.Errors, err.Error())
			continue
		}
		m.First[where] = append(m.First[where], took.Seconds)
		select {
		case <-time.After(time.Duration(random.IntN(400)) * time.Millisecond): // between requests
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	fmt.Printf("  %d servers of %d MiB on a GPU that looks like %s (%d fit without nvshare); all suspended: %d MiB used on the GPU; %d errors\n",
		m.N, m.MiB, serverGPU, m.Fit, m.UsedIdle>>20, len(m.Errors))
	for _, where := range []string{"resident", "swapped", "suspended", "filed"} {
		if first := m.First[where]; len(first) > 0 {
			fmt.Printf("  first token, %s: p50 %.3f, p99 %.3f s of %d\n", where, quantile.Of(first, 0.5), quantile.Of(first, 0.99), len(first))
		}
	}
	if len(m.Errors) > 0 {
		x.r.Problems = append(x.r.Problems, fmt.Sprintf("%d errors of model servers, first: %s", len(m.Errors), m.Errors[0]))
	}
	return nil
}

// tenant starts a process of a user of its own, which imports nothing yet.
func (x *suspendBench) tenant(i, mib int) (*worker, error) {
	kind := "torch"
	if x.simulated {
		kind = "driver"
	}
	env, _, who, err := x.asUser(suspendUser+i, x.s)
	if err != nil {
		return nil, err
	}
	w, err := startWorkerAs(who, x.python, filepath.Join(swapDir, "suspend.py"), fmt.Sprintf("tenant %d", i), filepath.Join(x.results, "suspend-stderr.txt"), env, kind, fmt.Sprint(mib))
	if err == nil {
		w.user = who.Uid
	}
	return w, err
}

// byZipf draws one of n, the first most often.
func byZipf(r *rand.Rand, n int) int {
	sum := 0.0
	for i := range n {
		sum += 1 / math.Pow(float64(i+1), zipf)
	}
	at := r.Float64() * sum
	for i := range n {
		if at -= 1 / math.Pow(float64(i+1), zipf); at < 0 {
			return i
		}
	}
	return n - 1
}
