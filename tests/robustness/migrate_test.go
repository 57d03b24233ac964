// SPDX-License-Identifier: Apache-2.0

package robustness

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
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
)

// newPair is a site with two simulated GPUs and a tenant that fills a part of the first one.
func newPair(t *testing.T, env ...string) (s *site, a *swapTenant) {
	t.Helper()
	return newPairOf(t, gpuMiB, env...)
}

// newPairOf is newPair with GPUs of so much memory.
func newPairOf(t *testing.T, mib int, env ...string) (s *site, a *swapTenant) {
	t.Helper()
	s = newSite(t)
	s.configure(fmt.Sprintf("gpus=2\nmemory_mib=%d\n", mib))
	s.put(checkpoint.Name)
	s.buildTenant("swap-tenant")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.log())
		}
	})
	s.startSwapping()
	a = s.startSwapTenant("a", tenantMiB, 1000, env...)
	s.awaitOn(0, a)
	return s, a
}

// awaitOn waits until a tenant has all its memory on a GPU, and nothing on the other one.
func (s *site) awaitOn(gpu int, a *swapTenant) {
	s.t.Helper()
	s.until(fmt.Sprintf("%s is on GPU %d", a.name, gpu), func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		there := false
		for i, g := range r.Gpus {
			for _, c := range g.Clients {
				if int(c.Pid) != a.cmd.Process.Pid {
					continue
				}
				if i != gpu {
					return fmt.Errorf("it is on GPU %d: %v", i, c)
				}
				there = c.Connected && c.ResidentBytes >= tenantMiB<<20
			}
		}
		if !there {
			return fmt.Errorf("it is not there: %v", r.Gpus[gpu].Clients)
		}
		return nil
	})
}

// migrate moves the one process of this user.
func (s *site) migrate(gpu int) error {
	s.t.Helper()
	r, err := s.migrates(gpu)
	if err == nil && (int(r.ToIndex) != gpu || r.Processes != 1) {
		s.t.Errorf("moved: %v", r)
	}
	return err
}

// migrates moves the processes of this user.
func (s *site) migrates(gpu int) (*api.MigrateResponse, error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	s.check(err)
	defer conn.Close()
	uid := uint32(os.Getuid())
	return conn.Migrate(ctx, &api.MigrateRequest{Uid: &uid, Gpu: strconv.Itoa(gpu)})
}

// awaitLog waits until the scheduler has said a text.
func (s *site) awaitLog(text string) {
	s.t.Helper()
	s.until("the scheduler says "+text, func() error {
		if !strings.Contains(s.log(), text) {
			return errors.New("not yet")
		}
		return nil
	})
}

// awaitControls waits until the tenant says that it has proved its time slices where it is.
func (s *site) awaitControls(gpu int, a *swapTenant) {
	s.t.Helper()
	s.until(a.name+" has proved its time slices", func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		for _, c := range r.Gpus[gpu].Clients {
			if int(c.Pid) == a.cmd.Process.Pid && c.Controls.GetSlices() == "works" {
				return nil
			}
		}
		return fmt.Errorf("GPU %d: %v", gpu, r.Gpus[gpu].Clients)
	})
}

// A tenant that works goes to another GPU and back, twice. Each word of its memory keeps its value,
// and it proves its time slices on each GPU.
func TestMigrate(t *testing.T) {
	t.Parallel()
	s, a := newPair(t)
	for i := range 4 {
		to := 1 - i%2
		if err := s.migrate(to); err != nil {
			t.Fatalf("move %d: %v\n%s", i+1, err, s.log())
		}
		s.awaitOn(to, a)
		s.awaitControls(to, a)
	}
	a.finish(s)
	s.until("nothing is left", func() error {
		if u := s.swap(); u == nil || u.ArenaUsedBytes != 0 {
			return fmt.Errorf("status %v", u)
		}
		return nil
	})
}

// Whatever fails on the way, the tenant goes on with all its memory, or ends.
func TestMigrateFaults(t *testing.T) {
	t.Parallel()
	s, a := newPair(t)
	for _, call := range []string{"lock", "checkpoint", "restore", "unlock"} {
		s.faults(call + " 304")
		failed := make(chan error, 1)
		go func() { failed <- s.migrate(1) }()
		if call == "unlock" || call == "restore" { // it is tried until it works
			s.awaitLog(call + ": CUDA error 304")
			s.faults("")
		}
		err := <-failed
		s.faults("")
		if call == "unlock" { // it was restored there already
			s.check(err)
			s.awaitOn(1, a)
			s.check(s.migrate(0))
		} else if err == nil || !strings.Contains(err.Error(), call) {
			t.Errorf("%s fails: %v", call, err)
		}
		s.awaitOn(0, a)
	}

	// The helper is killed.
	s.faults("restore hang")
	failed := make(chan error, 1)
	go func() { failed <- s.migrate(1) }()
	pid := s.hanging()
	s.faults("")
	s.check(syscall.Kill(pid, syscall.SIGKILL))
	if err := <-failed; err == nil {
		t.Error("no error, although the helper was killed")
	}
	s.awaitOn(0, a)

	// The scheduler is killed.
	s.faults("restore hang")
	go func() { failed <- s.migrate(1) }()
	pid = s.hanging()
	s.endScheduler(syscall.SIGKILL)
	s.faults("")
	s.check(syscall.Kill(pid, syscall.SIGKILL))
	<-failed
	s.startSwapping()
	s.awaitOn(0, a)
	s.check(s.migrate(1))
	s.awaitOn(1, a)
	a.finish(s)
}

// A tenant that is killed on its way leaves nothing behind.
func TestMigrateKilled(t *testing.T) {
	t.Parallel()
	s, a := newPair(t)
	s.faults("restore hang")
	failed := make(chan error, 1)
	go func() { failed <- s.migrate(1) }()
	pid := s.hanging()
	s.check(a.cmd.Process.Kill())
	<-a.end
	s.faults("")
	s.check(syscall.Kill(pid, syscall.SIGKILL))
	select {
	case err := <-failed:
		if err == nil {
			t.Error("a dead tenant has moved")
		}
	case <-time.After(patience):
		t.Fatal("the move does not end")
	}
	s.until("nothing is left", func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		for _, g := range r.Gpus {
			if len(g.Clients) != 0 || g.Swap.ArenaUsedBytes != 0 {
				return fmt.Errorf("GPU %d: %v, %v", g.Index, g.Clients, g.Swap)
			}
		}
		return nil
	})
}

// A process that has mapped OptiX says so before anybody needs its memory. It stays where it
// is, and the answer names the reason.
func TestMigrateRefusesForeignMemory(t *testing.T) {
	t.Parallel()
	library := filepath.Join(t.TempDir(), "libnvoptix.so.1")
	if err := os.WriteFile(library, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	s, a := newPair(t, "SWAP_TENANT_MAPS="+library)
	const want = "OptiX uses it (libnvoptix is mapped)"
	s.until("it says what its memory is used by", func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		for _, c := range r.Gpus[0].Clients {
			if c.FixedReason == want && c.FixedBytes >= tenantMiB<<20 {
				return nil
			}
		}
		return fmt.Errorf("GPU 0: %v", r.Gpus[0].Clients)
	})
	if err := s.migrate(1); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("migrate: %v", err)
	}
	s.awaitOn(0, a)
}

// A scheduler is killed at each step of the move of a tenant of two processes, while
// nvshare-checkpoint works on. The next one has the whole tenant on one GPU, and each process goes on
// with all its memory.
func TestMigrateTwoKilled(t *testing.T) {
	t.Parallel()
	s, a := newPairOf(t, 3*tenantMiB)
	b := s.startSwapTenant("b", tenantMiB, 2000)
	s.awaitOn(0, b)
	for _, x := range []*swapTenant{a, b} {
		for _, call := range []string{"lock", "checkpoint", "restore", "unlock"} {
			from := s.together(a, b)
			s.faults(fmt.Sprintf("%s wait %d", call, x.cmd.Process.Pid))
			failed := make(chan error, 1)
			go func() {
				_, err := s.migrates(1 - from)
				failed <- err
			}()
			helper := s.hanging()
			s.endScheduler(syscall.SIGKILL)
			<-failed
			s.startSwapping()
			s.faults("")
			s.until("the earlier helper has ended", func() error {
				if all := s.helpers(); slices.Contains(all, helper) {
					return fmt.Errorf("%d: %v", helper, all)
				}
				return nil
			})
			t.Logf("killed at %s of %s: from GPU %d to GPU %d", call, x.name, from, s.together(a, b))
		}
	}
	a.finish(s)
	b.finish(s)
}

// together waits until tenants are on one GPU, and on no other, and returns which.
func (s *site) together(all ...*swapTenant) (gpu int) {
	s.t.Helper()
	s.until("all are on one GPU", func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		for i, g := range r.Gpus {
			there := 0
			for _, c := range g.Clients {
				if c.Connected && c.ResidentBytes >= tenantMiB<<20 {
					there++
				}
			}
			if there == len(all) && there == len(g.Clients) && len(r.Gpus[1-i].Clients) == 0 {
				gpu = i
				return nil
			}
		}
		return fmt.Errorf("GPU 0: %v; GPU 1: %v", r.Gpus[0].Clients, r.Gpus[1].Clients)
	})
	return gpu
}
