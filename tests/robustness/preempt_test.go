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
)

// longKernels has a tenant launch kernels of that length, one after the other.
func longKernels(length time.Duration) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) {
		cmd.Args = append(cmd.Args, "--kernel-us", fmt.Sprint(length.Microseconds()), "--depth", "1")
	}
}

// drains returns how long the drains took that ended since, of preempted grants and of
// others.
func (s *site) drains(since time.Time) (cut, whole []time.Duration) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	s.check(err)
	defer conn.Close()
	r, err := conn.Events(ctx, &api.EventsRequest{})
	s.check(err)
	for _, e := range r.Events {
		switch drained := time.Duration(e.DrainedNs); {
		case e.Type != api.EventType_EVENT_TYPE_RELEASE || drained == 0 || e.TimeNs < since.UnixNano():
		case e.Reason == "preempted":
			cut = append(cut, drained)
		default:
			whole = append(whole, drained)
		}
	}
	return cut, whole
}

// Tenants whose kernels take a second, and one with short kernels, have turns of 20 ms: a
// drain is cut in the middle of a kernel, which goes on with the next turn. No kernel runs
// beside another tenant's. The scheduler and a tenant are killed meanwhile: the others go
// on.
func TestLongKernels(t *testing.T) {
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
	if median := cut[len(cut)/2]; median > 100*time.Millisecond {
		t.Errorf("the median of the drains is %v, want 100 ms at most: kernels last for 50 ms and a second", median)
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
