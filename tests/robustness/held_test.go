// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// withWarden returns a site with a warden, and a scheduler that knows it.
func withWarden(t *testing.T, flags ...string) *site {
	t.Helper()
	mayCopy(t)
	s := newSite(t)
	s.letAllEnter()
	s.check(os.Chmod(filepath.Join(s.dir, "sim", "run"), 0o777))
	warden := s.startWarden()
	t.Cleanup(func() { _ = warden.Process.Kill(); _ = warden.Wait() })
	s.startScheduler(append([]string{"--warden", s.dir + "/warden/warden.sock"}, flags...)...)
	s.until("the warden is there", func() error {
		r, err := s.status()
		if err == nil && !r.Warden {
			err = errors.New(r.WardenProblem)
		}
		return err
	})
	return s
}

// share sets the weight of a user's processes.
func (s *site) share(req *api.SetShareRequest) {
	s.t.Helper()
	s.until("a share is set", func() error {
		conn, err := api.Dial(s.t.Context(), filepath.Join(s.dir, "run"))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.SetShare(context.Background(), req)
		return err
	})
}

// awaitHeld waits until the warden holds processes without a shim.
func (s *site) awaitHeld(all ...*tenant) {
	s.t.Helper()
	for _, x := range all {
		s.until(x.name+" is held", func() error {
			if how := s.how(x); !strings.Contains(how, "held from outside: its channels") {
				return fmt.Errorf("it is %s", how)
			}
			return nil
		})
	}
}

func ahead(cmd *exec.Cmd) { cmd.Args = append(cmd.Args, "--kernel-us", "5000", "--depth", "8") } // needs little of the processor

// between fails if a part is not between two others.
func (s *site) between(what string, got, least, most float64) {
	s.t.Helper()
	s.t.Logf("%s: %.1f %%", what, 100*got)
	if got < least || got > most {
		s.t.Errorf("%s: %.1f %%, want %.0f to %.0f", what, 100*got, 100*least, 100*most)
	}
}

// A fenced process is off the GPU but in its tenant's turns, and on again when it has released.
func TestFenceIsHeld(t *testing.T) {
	s := withWarden(t, "--grace", "200ms", "--tq", "100ms")
	long := func(cmd *exec.Cmd) { // its shim does not see its channels, so that it cannot cut the drain
		cmd.Args = append(cmd.Args, "--kernel-us", "100000", "--depth", "20")
		cmd.Env = append(cmd.Env, "NVSHARE_SIMGPU_RM=hidden")
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 2001, Gid: 2001}
	}
	weight := uint32(300)
	uid := uint32(2002)
	s.share(&api.SetShareRequest{Uid: &uid, Weight: &weight})
	s.check(os.Chmod(s.dir+"/run", 0o755))
	x := s.startTenant("x", long)
	y := s.startTenant("y", ahead, func(cmd *exec.Cmd) { cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid} })
	fenced := func() (*api.Client, error) {
		c, err := s.client(x)
		if err == nil && c.State != api.ClientState_CLIENT_STATE_FENCED {
			err = fmt.Errorf("it is %v", c.State)
		}
		return c, err
	}
	s.until("x is fenced and held", func() error {
		c, err := fenced()
		if err == nil && !strings.Contains(c.Held, "held from outside") {
			err = fmt.Errorf("held: %q", c.Held)
		}
		return err
	})
	s.until("they take turns", func() error {
		c, err := s.client(y)
		if err == nil && c.Grants < 8 {
			err = fmt.Errorf("y has had %d", c.Grants)
		}
		return err
	})
	s.between("y beside it", s.part(y, 3*time.Second), 0.66, 0.84)
	if r, err := s.status(); err != nil || !strings.Contains(strings.Join(r.Problems, "\n"), "is fenced: it did not release the GPU in time; until it does, held from outside") {
		t.Errorf("problems %q, %v", r.GetProblems(), err)
	}
	s.until("x has released", func() error {
		c, err := s.client(x)
		if err == nil && (c.State == api.ClientState_CLIENT_STATE_FENCED || c.Held != "") {
			err = fmt.Errorf("it is %v, %s", c.State, c.Held)
		}
		return err
	})
	s.check(y.cmd.Process.Kill())
	s.until("x has the GPU", func() error {
		if got := s.part(x, 500*time.Millisecond); got < 0.8 {
			return fmt.Errorf("it has %.0f %%", 100*got)
		}
		return nil
	})
}

// Processes without a shim have turns, as those that have one.
func TestTurnsWithoutTheShim(t *testing.T) {
	s := withWarden(t, "--hold-all", "--tq", "100ms")
	bareOne := s.startTenant("bare", ahead, bare(2001))
	s.awaitHeld(bareOne)
	shim := s.startTenant("shim", ahead)
	s.awaitAttached(2)
	s.between("the one without a shim", s.part(bareOne, 3*time.Second), 0.38, 0.55)
	s.between("the one with it", s.part(shim, 3*time.Second), 0.38, 0.55)
	s.expectAlive()
}

// Processes without a shim share by time slices with those that have one, by the weight of their tenants.
func TestSlicesWithoutTheShim(t *testing.T) {
	s := withWarden(t, "--hold-all", "--anti-thrash", "auto")
	weight, uid := uint32(300), uint32(2001)
	s.share(&api.SetShareRequest{Uid: &uid, Weight: &weight})
	a, b := s.startTenant("a", ahead, bare(2001)), s.startTenant("b", ahead, bare(2002))
	s.awaitHeld(a, b)
	s.until("they share by slices", func() error {
		r, err := s.status()
		if err == nil && r.Gpus[0].Way != "slices" {
			err = fmt.Errorf("%s: %s", r.Gpus[0].Way, r.Gpus[0].WayReason)
		}
		return err
	})
	s.between("a", s.part(a, 3*time.Second), 0.65, 0.82)
	s.between("b", s.part(b, 3*time.Second), 0.18, 0.35)
}

// A process without a shim that is above its tenant's memory limit is killed; one that is below goes on.
func TestMemoryLimitWithoutTheShim(t *testing.T) {
	s := withWarden(t)
	uid, bytes := uint32(2001), uint64(256<<20)
	s.share(&api.SetShareRequest{Uid: &uid, MemoryBytes: &bytes})
	within := s.startTenant("within", ahead, bare(uid))
	s.awaitHeld(within)
	over := s.startTenant("over", ahead, bare(uid), func(cmd *exec.Cmd) { cmd.Args = append(cmd.Args, "--mem-mib", "1100") })
	s.until("it is killed", func() error {
		select {
		case <-over.end:
			return nil
		default:
			return errors.New("it lives")
		}
	})
	if over.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("it ended with %v", over.err)
	}
	s.tenants = s.tenants[:1]
	s.expectAlive()
	if got := s.part(within, time.Second); got < 0.8 {
		t.Errorf("the other one has %.0f %% of the GPU", 100*got)
	}
}
