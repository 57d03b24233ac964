// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/quantile"
)

const (
	suspendWithin = 9 * time.Minute
	suspendRounds = 10
	suspendCall   = 2 * time.Minute // an order, at most
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
	Used, Total int64
	PIDs        []int
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

// order suspends or resumes a user.
func (x *suspendBench) order(ctx context.Context, user uint32, call func(*api.Conn, context.Context, *api.SuspendRequest) (*api.SuspendResponse, error)) error {
	conn, err := api.Dial(ctx, x.s.dir)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = call(conn, ctx, &api.SuspendRequest{Uid: &user})
	return err
}

// client is what the scheduler says of a process.
func (x *suspendBench) client(ctx context.Context, pid uint32) (*api.Client, error) {
	r, err := x.s.status(ctx)
	if err != nil {
		return nil, err
	}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			if c.Pid == pid {
				return c, nil
			}
		}
	}
	return nil, errors.New("the scheduler does not know the process")
}

// awaitOff waits until nothing is left of a process on the GPU.
func (x *suspendBench) awaitOff(ctx context.Context, pid uint32) error {
	ctx, cancel := context.WithTimeout(ctx, suspendCall)
	defer cancel()
	for {
		c, err := x.client(ctx, pid)
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
	w, err := x.tenant(x.r.MiB)
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
	if err := x.order(ctx, w.user, (*api.Conn).Suspend); err != nil {
		return r, err
	}
	if err := x.awaitOff(ctx, w.clientPID()); err != nil {
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
	c, err := x.client(ctx, w.clientPID())
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

// tenant starts the process of the first part, which imports nothing yet.
func (x *suspendBench) tenant(mib int) (*worker, error) {
	kind := "torch"
	if x.simulated {
		kind = "driver"
	}
	env, _, who, err := x.asUser(suspendUser, x.s)
	if err != nil {
		return nil, err
	}
	w, err := startWorkerAs(who, x.python, filepath.Join(swapDir, "suspend.py"), "tenant", filepath.Join(x.results, "suspend-stderr.txt"), env, kind, fmt.Sprint(mib))
	if err == nil {
		w.user = who.Uid
	}
	return w, err
}
