// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
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
	s.startWarden()
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

// between waits until a tenant has had between two parts of the GPU's time for a while: on a machine
// that does much else, the warden is late, or lets a process be for a time.
func (s *site) between(what string, x *tenant, length time.Duration, least, most float64) {
	s.t.Helper()
	s.until(fmt.Sprintf("%s has %.0f to %.0f %% of the GPU", what, 100*least, 100*most), func() error {
		got := s.part(x, length)
		s.t.Logf("%s: %.1f %%; %s", what, 100*got, s.how(x))
		if got < least || got > most {
			return fmt.Errorf("it has %.1f %%", 100*got)
		}
		return nil
	})
}

// A fenced process is off the GPU but in its tenant's turns, and on again when it has released.
func TestFenceIsHeld(t *testing.T) {
	t.Parallel()
	s := withWarden(t, "--grace", "200ms", "--tq", "100ms")
	long := func(cmd *exec.Cmd) { // its shim does not see its channels, so that it cannot cut the drain
		cmd.Args = append(cmd.Args, "--kernel-us", "100000", "--depth", "60")
		cmd.Env = append(cmd.Env, "NVSHARE_SIMGPU_RM=hidden")
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 2001, Gid: 2001}
	}
	weight := uint32(300)
	uid := uint32(2002)
	s.share(&api.SetShareRequest{Uid: &uid, Weight: &weight})
	s.check(os.Chmod(s.dir+"/run", 0o755))
	x := s.startTenant("x", long)
	y := s.startTenant("y", ahead, func(cmd *exec.Cmd) { cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid} })
	s.until("x is fenced and held, and the status says so", func() error { // until it has released, and soon again
		r, err := s.status()
		if err == nil && !strings.Contains(strings.Join(r.Problems, "\n"), "is fenced: it did not release the GPU in time; until it does, held from outside") {
			err = fmt.Errorf("problems %q", r.Problems)
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
	s.between("y beside it", y, 3*time.Second, 0.66, 0.84)
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

// queued has a second of work queued, so that the GPU has work also where the machine does much else.
func queued(cmd *exec.Cmd) { cmd.Args = append(cmd.Args, "--kernel-us", "20000", "--depth", "60") }

// ofBoth returns which part of what two tenants get of the GPU in a time the first one gets. What the GPU
// is idle does not count: on a machine that does much else, hand-overs take long.
func (s *site) ofBoth(a, b *tenant, length time.Duration) float64 {
	fromA, _ := s.worked(a)
	fromB, _ := s.worked(b)
	time.Sleep(length) // what is measured
	toA, _ := s.worked(a)
	toB, _ := s.worked(b)
	return float64(toA-fromA) / float64(toA-fromA+toB-fromB)
}

// Processes without a shim have turns, as those that have one.
func TestTurnsWithoutTheShim(t *testing.T) {
	t.Parallel()
	s := withWarden(t, "--hold-all", "--tq", "100ms")
	bareOne := s.startTenant("bare", queued, bare(2001))
	s.awaitHeld(bareOne)
	shim := s.startTenant("shim", queued)
	s.awaitAttached(2)
	s.until("both have as much of the GPU", func() error {
		part := s.ofBoth(bareOne, shim, 3*time.Second)
		s.t.Logf("the one without a shim has %.1f %% of what both have; %s", 100*part, s.how(bareOne))
		if part < 0.42 || part > 0.58 {
			return fmt.Errorf("the one without a shim has %.1f %%", 100*part)
		}
		return nil
	})
	s.expectAlive()
}

// Processes without a shim share by time slices with those that have one, by the weight of their tenants.
func TestSlicesWithoutTheShim(t *testing.T) {
	t.Parallel()
	// Who leaves the GPU idle in turns gets no slices: so turns are long.
	s := withWarden(t, "--hold-all", "--anti-thrash", "auto", "--tq", "500ms")
	weight, uid := uint32(300), uint32(2001)
	s.share(&api.SetShareRequest{Uid: &uid, Weight: &weight})
	a, b := s.startTenant("a", queued, bare(2001)), s.startTenant("b", queued, bare(2002))
	s.awaitHeld(a, b)
	bySlices := func() error {
		r, err := s.status()
		if err == nil && r.Gpus[0].Way != "slices" {
			err = fmt.Errorf("%s: %s", r.Gpus[0].Way, r.Gpus[0].WayReason)
		}
		return err
	}
	s.until("a has three times what b has", func() error {
		before := bySlices()
		part := s.ofBoth(a, b, 6*time.Second)
		if err := errors.Join(before, bySlices()); err != nil {
			return err // before the slices began, or a busy machine let the GPU be idle
		}
		s.t.Logf("a has %.1f %% of what both have", 100*part)
		if part < 0.68 || part > 0.8 {
			return fmt.Errorf("a has %.1f %%", 100*part)
		}
		return nil
	})
}

// A process without a shim that is above its tenant's memory limit is killed; one that is below goes on.
func TestMemoryLimitWithoutTheShim(t *testing.T) {
	t.Parallel()
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
	s.between("the other one", within, time.Second, 0.8, 1)
}

// A process that puts its channels on by itself is named.
func TestCheatWithoutTheShim(t *testing.T) {
	t.Parallel()
	s := withWarden(t)
	s.limit(2001, 30)
	x := s.startTenant("x", bare(2001), func(cmd *exec.Cmd) {
		cmd.Path = filepath.Join(s.build, "bin", "channels-on")
		cmd.Args = []string{cmd.Path, "5"}
	})
	s.until("it is named", func() error {
		if how := s.how(x); !strings.Contains(how, "puts its channels on by itself") {
			return fmt.Errorf("it is %s", how)
		}
		return nil
	})
}

// guards returns the pids of the guards of wardens of this site.
func (s *site) guards() (pids []int) {
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	s.check(err)
	for _, path := range all {
		text, _ := os.ReadFile(path)
		if words := strings.Split(string(text), "\x00"); slices.Contains(words, "--guard") && slices.Contains(words, s.dir+"/warden") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// The warden, its guard, both, the scheduler and tenants are killed at any moment. Nobody stays off the GPU, and those
// who are left are held again.
func TestKillsWhileHeld(t *testing.T) {
	t.Parallel()
	const kills, seed = 15, 11 // three of each kind
	s := withWarden(t, "--hold-all")
	kill := func(pids ...int) {
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	t.Cleanup(func() { kill(s.guards()...) })
	start := func(i int) *tenant { return s.startTenant(fmt.Sprint("bare", i), ahead, bare(uint32(2001+i%2))) }
	all := []*tenant{start(0), start(1)}
	shim := s.startTenant("shim", ahead)
	s.awaitHeld(all...)
	random := rand.New(rand.NewPCG(seed, seed))
	for i := range kills {
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond) // the moment of the kill
		switch warden := s.warden; i % 5 {
		case 0, 1, 2:
			guards := s.guards()
			if i%5 == 1 {
				kill(guards...)
				continue
			}
			_ = warden.Process.Kill()
			if i%5 == 2 {
				kill(guards...)
			}
			_ = warden.Wait()
			s.startWarden()
		case 3:
			s.endScheduler(syscall.SIGKILL)
			s.startScheduler("--warden", s.dir+"/warden/warden.sock", "--hold-all")
		case 4:
			x := all[i/5%2]
			_ = x.cmd.Process.Kill()
			<-x.end
			all[i/5%2] = start(2 + i)
		}
	}
	s.awaitHeld(all...)
	_ = s.warden.Process.Kill()
	_ = s.warden.Wait()
	for _, x := range append(all, shim) {
		s.until(x.name+" goes on", func() error {
			if s.part(x, 200*time.Millisecond) < 0.05 {
				return errors.New("it stands still")
			}
			return nil
		})
	}
	if r, err := s.status(); err != nil || strings.Contains(strings.Join(r.Problems, " "), "bug in nvshare") {
		t.Errorf("problems %q, %v", r.GetProblems(), err)
	}
}
