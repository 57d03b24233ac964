// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// mostTries bounds how often something is killed at a moment that one process in two misses.
const mostTries = 60

// awaitPreempted waits until a tenant's drain was cut and it has had no grant since.
func (s *site) awaitPreempted(x *tenant) {
	s.t.Helper()
	s.until("its drain was cut", func() error {
		c, err := s.client(x)
		if err == nil && (c.Preemptions == 0 || c.State != api.ClientState_CLIENT_STATE_WAITING) {
			err = fmt.Errorf("%d preemptions, state %v", c.Preemptions, c.State)
		}
		return err
	})
}

// worked returns for how long the GPU has worked for a tenant, and when what it knows of
// such work ends: while the tenant's channels are off, in the past.
func (s *site) worked(x *tenant) (busy time.Duration, end int64) {
	s.t.Helper()
	for _, iv := range s.trace().Intervals {
		if iv.Process.Tenant == x.name {
			busy, end = busy+time.Duration(iv.Busy), max(end, iv.End)
		}
	}
	return busy, end
}

// wasOff says whether the channels of a tenant went off before a time and in the middle of a
// kernel of that length, and have not been on since.
func (s *site) wasOff(x *tenant, kernel time.Duration, at int64) bool {
	s.t.Helper()
	busy, end := s.worked(x)
	part := busy % kernel
	return end < at && part > time.Millisecond && part < kernel-time.Millisecond
}

// awaitEnd waits until a tenant has ended as it does when it is asked to.
func (s *site) awaitEnd(x *tenant) {
	s.t.Helper()
	s.until(x.name+" ends", func() error {
		select {
		case <-x.end:
			return nil
		default:
			return errors.New("it lives")
		}
	})
	if x.err != nil {
		s.t.Errorf("%s, in the end: %v", x.name, x.err)
	}
}

// Somebody is killed while a tenant's channels are off the GPU, in the middle of a kernel.
func TestDeathWhileChannelsAreOff(t *testing.T) {
	t.Parallel()
	t.Run("tenant", tenantsDieWhileOff)
	t.Run("scheduler, tenants wait for one", func(t *testing.T) { schedulerDiesWhileOff(t, "closed") })
	t.Run("scheduler, tenants run without", func(t *testing.T) { schedulerDiesWhileOff(t, "open") })
}

// Tenants are killed while their channels are off. The other one has the GPU, alone, and
// neither the scheduler nor the GPU knows the dead ones.
func tenantsDieWhileOff(t *testing.T) {
	const kernel, often = 10 * time.Minute, 3
	s := newSite(t)
	s.startScheduler()
	began := judge.Now()
	s.startTenant("other")
	s.awaitAttached(1)
	for off, tries := 0, 0; off < often; tries++ {
		if tries == mostTries {
			t.Fatalf("the channels were off at %d of %d deaths", off, tries)
		}
		x := s.startTenant(fmt.Sprint("x", tries), longKernels(kernel))
		s.awaitAttached(2)
		s.awaitPreempted(x)
		at := judge.Now()
		s.check(x.cmd.Process.Kill())
		<-x.end
		s.tenants = s.tenants[:1]
		if s.wasOff(x, kernel, at) { // or the next turn has come before the signal
			off++
		}
		s.until("the other tenant alone is left", func() error {
			r, err := s.status()
			if err != nil {
				return err
			}
			if g := r.Gpus[0]; r.Clients != 1 || len(g.Clients) != 1 || g.Clients[0].State != api.ClientState_CLIENT_STATE_HOLDING {
				return fmt.Errorf("%d clients, %v", r.Clients, g.Clients)
			}
			for _, l := range s.trace().Lives {
				if l.Process.Tenant == x.name && l.Exit == 0 {
					return errors.New("the GPU knows the dead one")
				}
			}
			return nil
		})
		alone := judge.Now()
		s.until("the other tenant works", func() error {
			if workOf(s.trace(), "other", alone, judge.Now()) == 0 {
				return errors.New("it does not")
			}
			return nil
		})
	}
	s.expectAlive()
	s.expectAlone(began)
	r, err := s.status()
	s.check(err)
	if r.Gpus[0].Fences != 0 {
		t.Errorf("%d fences", r.Gpus[0].Fences)
	}
}

// The scheduler is killed while a tenant's channels are off. They come on again with the
// next scheduler or, if the tenant runs without one, before. The kernel that was cut goes
// on to its end, and the next scheduler gives both tenants turns.
func schedulerDiesWhileOff(t *testing.T, loss string) {
	const kernel = 2 * time.Second
	s := newSite(t)
	s.startScheduler()
	began := judge.Now()
	policy := func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "NVSHARE_SCHEDULER_LOSS="+loss) }
	x, other := s.startTenant("x", longKernels(kernel), policy), s.startTenant("other", policy)
	var at int64
	for tries := 0; at == 0; tries++ {
		if tries == mostTries {
			t.Fatalf("the channels were off at none of %d deaths", tries)
		}
		s.awaitAttached(2)
		s.awaitPreempted(x)
		now := judge.Now()
		s.endScheduler(syscall.SIGKILL)
		if s.wasOff(x, kernel, now) {
			at = now
		} else { // the next turn has come before the signal
			s.startScheduler()
		}
	}
	on := func() {
		t.Helper()
		s.until("its channels come on", func() error {
			if _, end := s.worked(x); end < at {
				return errors.New("they are off")
			}
			return nil
		})
	}
	if loss == "open" {
		on()
	}
	s.startScheduler()
	on()
	s.awaitAttached(2)
	s.awaitPreempted(x)
	s.expectTurns(3, x, other)
	if loss == "open" { // both ran without turns
		began = judge.Now()
	}
	s.expectTurns(3, x, other)
	s.expectAlive()
	s.expectAlone(began)
	r, err := s.status()
	s.check(err)
	if r.Gpus[0].Fences != 0 || r.Clients != 2 {
		t.Errorf("%d fences, %d clients", r.Gpus[0].Fences, r.Clients)
	}
	s.check(x.cmd.Process.Signal(syscall.SIGTERM)) // it ends after the kernel that runs
	s.awaitEnd(x)
	busy, _ := s.worked(x)
	if rest := (busy + kernel/2) % kernel; (rest - kernel/2).Abs() > time.Millisecond {
		t.Errorf("the GPU worked for %v, which is no number of kernels of %v", busy, kernel)
	}
	s.check(other.cmd.Process.Signal(syscall.SIGTERM))
	s.awaitEnd(other)
}
