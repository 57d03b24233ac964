// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// longKernels has a tenant launch kernels of that length, one after the other.
func longKernels(length time.Duration) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) {
		cmd.Args = append(cmd.Args, "--kernel-us", fmt.Sprint(length.Microseconds()), "--depth", "1")
	}
}

// events returns those of a kind that the scheduler has kept. An answer has a part of them.
func (s *site) events(kind api.EventType) (all []*api.Event, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	for next := uint64(0); ; {
		r, err := conn.Events(ctx, &api.EventsRequest{Since: next, Types: []api.EventType{kind}})
		if err != nil || len(r.Events) == 0 {
			return all, err
		}
		all, next = append(all, r.Events...), r.Next
	}
}

// drains returns how long the drains took that ended since, of preempted grants and of
// others.
func (s *site) drains(since time.Time) (cut, whole []time.Duration) {
	s.t.Helper()
	all, err := s.events(api.EventType_EVENT_TYPE_RELEASE)
	s.check(err)
	for _, e := range all {
		switch drained := time.Duration(e.DrainedNs); {
		case drained == 0 || e.TimeNs < since.UnixNano():
		case e.Reason == "preempted":
			cut = append(cut, drained)
		default:
			whole = append(whole, drained)
		}
	}
	return cut, whole
}

// registrations counts the programs of a tenant's process that have become clients.
func (s *site) registrations(x *tenant) (n int, err error) {
	all, err := s.events(api.EventType_EVENT_TYPE_REGISTER)
	for _, e := range all {
		if int(e.Pid) == x.cmd.Process.Pid {
			n++
		}
	}
	return n, err
}

// A process calls exec() while its channels are off: its work is gone with its context, the
// others' turns go on, and the new program is a client like any other. So it is when
// exec() comes during a turn.
func TestExecWhileChannelsAreOff(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.startScheduler()
	began := judge.Now()
	x := s.startTenant("execs", longKernels(10*time.Minute))
	other := s.startTenant("other")
	s.awaitAttached(2)
	for i, state := range []api.ClientState{api.ClientState_CLIENT_STATE_WAITING, api.ClientState_CLIENT_STATE_WAITING, api.ClientState_CLIENT_STATE_HOLDING} {
		var had uint64
		preempted := func() error {
			c, err := s.client(x)
			if err == nil && (c.Preemptions == had || c.State != state) {
				err = fmt.Errorf("%d preemptions, state %v", c.Preemptions, c.State)
			}
			return err
		}
		s.until("its kernel was preempted", preempted)
		s.check(x.cmd.Process.Signal(syscall.SIGUSR2))
		s.until("the new program has registered", func() error {
			n, err := s.registrations(x)
			if err == nil && n != 2+i {
				err = fmt.Errorf("%d programs have", n)
			}
			return err
		})
		s.until("the new program is attached", func() error { // a moment after it has registered
			c, err := s.client(x)
			had = c.GetPreemptions()
			return err
		})
		s.until("the new program's kernel was preempted", preempted)
		s.expectTurns(3, other)
	}
	s.expectAlive()
	s.expectAlone(began)
	r, err := s.status()
	s.check(err)
	if r.Gpus[0].Fences != 0 || r.Clients != 2 {
		t.Errorf("%d fences, %d clients", r.Gpus[0].Fences, r.Clients)
	}
}

// Tenants whose kernels take a second, and one with short kernels, have turns of 20 ms: a
// drain is cut in the middle of a kernel, which goes on with the next turn. No kernel runs
// beside another tenant's. The scheduler and a tenant are killed meanwhile: the others go
// on.
func TestLongKernels(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.startScheduler()
	start := time.Now()
	s.startTenant("a", longKernels(time.Second))
	b := s.startTenant("b", longKernels(50*time.Millisecond))
	s.startTenant("c")
	s.awaitAttached(3)
	preempted := func(n int) {
		t.Helper()
		s.until(fmt.Sprintf("%d grants were preempted", n), func() error {
			cut, _ := s.drains(start)
			if len(cut) < n {
				return fmt.Errorf("%d were", len(cut))
			}
			return nil
		})
	}
	preempted(60)
	cut, whole := s.drains(start)
	report(t, "drains that were cut", cut)
	report(t, "drains that were not", whole)
	// Some milliseconds, but on a machine that is busy with other work.
	if median := cut[len(cut)/2]; median > 400*time.Millisecond {
		t.Errorf("the median of the drains is %v, want 400 ms at most: kernels last for 50 ms and a second", median)
	}

	s.endScheduler(syscall.SIGKILL)
	time.Sleep(away)
	start = time.Now()
	s.startScheduler()
	s.awaitAttached(3)
	preempted(20)

	s.check(b.cmd.Process.Signal(syscall.SIGKILL))
	<-b.end
	s.tenants = []*tenant{s.tenants[0], s.tenants[2]}
	start = time.Now()
	preempted(10)
	s.expectAlive()
	s.expectAlone(0)
	// The kernel of a second ends, piece by piece.
	s.until("a kernel of a second has ended", func() error {
		busy := time.Duration(0)
		for _, iv := range s.trace().Intervals {
			if iv.Process.Tenant == "a" {
				busy += time.Duration(iv.Busy)
			}
		}
		if busy < 1100*time.Millisecond {
			return fmt.Errorf("%v of it have run", busy)
		}
		return nil
	})
	s.expectAlone(0)
}
