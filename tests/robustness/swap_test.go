// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// Two tenants that each fill 60 % of the GPU.
const (
	gpuMiB    = 320
	tenantMiB = 192
)

// talker is a process that the test talks to: it ends with its standard input.
type talker struct {
	*tenant
	in  io.WriteCloser
	out *bufio.Reader
}

// startTalker starts a program that is in the site's directory.
func (s *site) startTalker(name string, env []string, change []func(*exec.Cmd), program string, args ...string) *talker {
	s.t.Helper()
	x := &talker{tenant: &tenant{name: name, end: make(chan struct{})}}
	x.cmd = exec.Command(filepath.Join(s.dir, program), args...)
	x.cmd.Env, x.cmd.Stderr = env, os.Stderr
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	for _, f := range change {
		f(x.cmd)
	}
	var err error
	x.in, err = x.cmd.StdinPipe()
	s.check(err)
	r, w, err := os.Pipe() // not StdoutPipe, which Wait closes
	s.check(err)
	s.t.Cleanup(func() { r.Close() })
	x.cmd.Stdout, x.out = w, bufio.NewReader(r)
	s.check(x.cmd.Start())
	w.Close()
	go func() {
		x.err = x.cmd.Wait()
		close(x.end)
	}()
	s.tenants = append(s.tenants, x.tenant)
	return x
}

// swapTenant is a process of swap-tenant.
type swapTenant struct {
	*talker
	mib    int
	filled bool
}

// verdict is what swap-tenant prints at its end.
type verdict struct {
	Rounds, Wrong, MiB uint64
}

// buildTenant compiles a program of tests/workload.
func (s *site) buildTenant(name string) {
	s.t.Helper()
	cc := exec.Command("cc", "-std=c11", "-D_GNU_SOURCE", "-pthread", "-I../simgpu", "-o", filepath.Join(s.dir, name),
		"../workload/"+name+".c", filepath.Join(s.dir, "sim", "lib", "libcuda.so.1"))
	if out, err := cc.CombinedOutput(); err != nil {
		s.t.Fatalf("build %s: %v\n%s", name, err, out)
	}
}

func (s *site) startSwapTenant(name string, mib, seed int, more ...string) *swapTenant {
	s.t.Helper()
	env := s.env(append(more, "LD_PRELOAD="+filepath.Join(s.build, "lib", "libnvshare.so"),
		"NVSHARE_SIMGPU_TENANT="+name, "NVSHARE_SCHEDULER_LOSS=closed")...)
	return &swapTenant{talker: s.startTalker(name, env, nil, "swap-tenant", strconv.Itoa(mib), strconv.Itoa(seed)), mib: mib}
}

// fills waits until the tenant has its memory; false: it was refused some, and ends.
func (x *swapTenant) fills() bool {
	if !x.filled {
		line, _ := x.out.ReadString('\n')
		x.filled = line == "filled\n"
	}
	return x.filled
}

// finish makes the tenant check all its memory once more, and returns the verdict.
func (x *swapTenant) finish(s *site) (v verdict) {
	s.t.Helper()
	x.in.Close()
	select {
	case <-x.end:
	case <-time.After(patience):
		s.t.Fatalf("%s does not end: %s", x.name, s.swap())
	}
	s.check(x.err)
	if !x.fills() {
		s.t.Fatalf("%s has no memory", x.name)
	}
	s.check(json.NewDecoder(x.out).Decode(&v))
	if v.Wrong != 0 || v.MiB != uint64(x.mib) || v.Rounds < 2 {
		s.t.Errorf("%s: %+v", x.name, v)
	}
	return v
}

// swap is the part of the status about swapping.
func (s *site) swap() *api.Swap {
	r, err := s.status()
	if err != nil {
		return nil
	}
	return r.Gpus[0].Swap
}

// awaitSwaps waits until n more moves in have ended. What the tenants have is the same each time, so that
// most of it leaves without a copy, and such a move out is not counted.
func (s *site) awaitSwaps(n uint64) {
	s.t.Helper()
	var began *api.Swap
	s.until("memory moves out and in", func() error {
		now := s.swap()
		switch {
		case now == nil:
			return errors.New("no status")
		case began == nil:
			began = now
		}
		if now.Ins < began.Ins+n {
			return fmt.Errorf("now %v", now)
		}
		return nil
	})
}

// Two tenants whose memory does not fit together take turns, each with all its memory on
// the GPU. Each word of it keeps its value, also when the scheduler is killed, a tenant
// is stopped, or another tenant dies. The scheduler has no rights, where the test has any.
func TestSwap(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	if os.Getuid() == 0 {
		s.withoutRights()
	}
	s.configure(fmt.Sprintf("gpus=1\nmemory_mib=%d\n", gpuMiB))
	s.buildTenant("swap-tenant")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.log())
		}
	})
	args := []string{"--swap-memory", "1Gi", "--swap-headroom", "0", "--swap-share", "50"}
	s.startScheduler(args...)
	s.until("the scheduler swaps", func() error { // memory that was allocated earlier is not moved
		if s.swap() == nil {
			return errors.New("not yet")
		}
		return nil
	})
	a, b := s.startSwapTenant("a", tenantMiB, 1000), s.startSwapTenant("b", tenantMiB, 2000)
	s.awaitSwaps(3)
	if u := s.swap(); u.ResidentBytes > gpuMiB<<20 || u.PromisedBytes <= gpuMiB<<20 || u.ArenaBytes < (2*tenantMiB-gpuMiB)<<20 {
		t.Errorf("status %v", u)
	}

	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGKILL} { // at any moment of a move
		s.endScheduler(sig)
		s.startScheduler(args...)
		s.awaitAttached(2)
		s.awaitSwaps(1)
	}

	s.check(judge.Stop(a.cmd.Process.Pid))
	s.until("the stopped tenant holds up the other one, or does not want the GPU", func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		for _, c := range r.Gpus[0].Clients {
			if int(c.Pid) == a.cmd.Process.Pid && (c.State == api.ClientState_CLIENT_STATE_HOLDING || c.State == api.ClientState_CLIENT_STATE_DRAINING || c.State == api.ClientState_CLIENT_STATE_IDLE || c.Stalled) {
				return nil
			}
		}
		return errors.New("not yet")
	})
	s.check(a.cmd.Process.Signal(syscall.SIGCONT))
	s.awaitSwaps(1)

	c := s.startSwapTenant("c", tenantMiB, 3000)
	s.awaitSwaps(1)
	s.check(c.cmd.Process.Kill())
	<-c.end
	s.awaitSwaps(1)
	a.finish(s)
	b.finish(s)
	s.until("the arena is given back", func() error {
		if u := s.swap(); u == nil || u.ArenaUsedBytes != 0 {
			return fmt.Errorf("status %v", u)
		}
		return nil
	})
	s.expectKernelsAlone()
}

// expectKernelsAlone fails if kernels of two tenants ran at the same time. One may move in
// while the other moves out.
func (s *site) expectKernelsAlone() {
	s.t.Helper()
	trace := s.trace()
	trace.Intervals = slices.DeleteFunc(trace.Intervals, func(iv judge.Interval) bool { return iv.Kind != judge.Kernel })
	for _, g := range judge.Judge(trace, judge.Options{}).GPUs {
		if g.Overlaps.Count != 0 {
			s.t.Errorf("%d overlaps, %v in all; first %+v", g.Overlaps.Count, time.Duration(g.Overlaps.Total), g.Overlaps.First)
		}
	}
}
