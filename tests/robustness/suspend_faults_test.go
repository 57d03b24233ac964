// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
)

// otherUser is a tenant that nobody suspends.
const otherUser = 61234

// faultSite has a tenant that is to be suspended, and another one beside it. What is done
// to the first must not touch the second.
func faultSite(t *testing.T) (s *site, x, other *suspendTenant) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: the tenants are two users")
	}
	s = suspendSite(t)
	x = s.startSuspendTenant("x")
	other = s.startSuspendTenant("other", s.openTo(otherUser))
	t.Cleanup(func() {
		if !t.Failed() {
			other.does("k")
			other.awaits("is attached", func(c *api.Client) bool { return c.Connected }) // a scheduler may have come meanwhile
			if c := other.client(); c.Suspended || c.Context != api.ContextState_CONTEXT_STATE_PRESENT {
				t.Errorf("the other tenant is %v", c)
			}
		}
	})
	return s, x, other
}

// awaitState waits for what the driver says of a process.
func (x *suspendTenant) awaitState(want checkpoint.State) {
	x.t.Helper()
	x.until(fmt.Sprintf("%s is %v", x.name, want), func() error {
		if got := x.state(); got != want {
			return fmt.Errorf("it is %v", got)
		}
		return nil
	})
}

// A process that is killed while it leaves, is away or comes back is forgotten.
func TestSuspendTenantDies(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"leaving", "away", "returning"} {
		t.Run(when, func(t *testing.T) {
			s, x, _ := faultSite(t)
			if when == "leaving" {
				s.faults("checkpoint hang")
			}
			s.suspend()
			switch when {
			case "leaving":
				x.awaitState(checkpoint.Locked)
			case "away":
				x.awaitsAway()
			case "returning":
				x.awaitsAway()
				s.faults("restore hang")
				x.asks("k")
				s.hanging()
			}
			s.check(x.cmd.Process.Kill())
			<-x.end
			s.until("the scheduler has forgotten it", func() error {
				if c := x.client(); c != nil {
					return fmt.Errorf("it says %v", c)
				}
				return nil
			})
			s.faults("")
			for _, pid := range s.helpers() { // one hangs
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		})
	}
}

// A helper that is killed leaves a process that runs on.
func TestSuspendHelperDies(t *testing.T) {
	t.Parallel()
	s, x, _ := faultSite(t)
	s.faults("checkpoint hang")
	s.suspend()
	x.awaitState(checkpoint.Locked)
	x.asks("q") // it waits in the shim
	pid := s.hanging()
	s.faults("")
	s.check(unix.Kill(pid, unix.SIGKILL))
	x.says("q", 0)
	x.awaits("keeps its context, with a reason", func(c *api.Client) bool {
		return c.Context == api.ContextState_CONTEXT_STATE_PRESENT
	})
	x.does("k")

	s.suspend()
	x.awaitsAway()
	s.faults("restore hang")
	x.asks("k")
	pid = s.hanging()
	s.faults("")
	s.check(unix.Kill(pid, unix.SIGKILL))
	x.says("k", 0)
}

// A scheduler that is killed at any moment, and comes back, finds a process that is away.
func TestSuspendSchedulerDies(t *testing.T) {
	t.Parallel()
	s, x, _ := faultSite(t)
	restart := func() {
		s.endScheduler(syscall.SIGKILL)
		s.startSwapping()
	}
	s.suspend()
	x.awaitsAway()
	restart()
	x.awaits("is still away, and suspended", func(c *api.Client) bool {
		return c.Context == api.ContextState_CONTEXT_STATE_AWAY && c.Suspended && c.Connected
	})
	x.does("k")

	s.suspend()
	x.awaitsAway()
	restart()
	s.until("it can be resumed", func() error {
		if c := x.client(); c == nil || c.Context != api.ContextState_CONTEXT_STATE_AWAY {
			return fmt.Errorf("it is %v", c)
		}
		return nil
	})
	s.resume()
	x.awaitsPresent()
	x.does("k")

	s.faults("checkpoint hang")
	s.suspend()
	x.awaitState(checkpoint.Locked)
	pid := s.hanging()
	s.faults("")
	restart()
	s.check(unix.Kill(pid, unix.SIGKILL))
	x.does("k")

	s.suspend()
	x.awaitsAway()
	s.faults("restore hang")
	x.asks("k")
	pid = s.hanging()
	s.faults("")
	restart()
	s.check(unix.Kill(pid, unix.SIGKILL))
	x.says("k", 0)

	s.suspend()
	x.awaitsAway()
	s.endScheduler(syscall.SIGTERM)
	x.asks("i") // with no scheduler it waits for one
	s.startSwapping()
	x.says("i", 0)
	x.does("k")
}

// A scheduler that ends for good leaves a process that a person brings back: it goes on without
// one, with its memory. The next scheduler serves it, and suspends it again.
func TestSuspendRestoredByHand(t *testing.T) {
	t.Parallel()
	s, x, _ := faultSite(t)
	s.suspend()
	x.awaitsAway()
	s.endScheduler(syscall.SIGKILL)
	x.asks("k")
	r := &checkpoint.Runner{Program: filepath.Join(s.dir, checkpoint.Name), Env: s.env()}
	_, err := r.On(context.Background(), x.cmd.Process.Pid, nil)
	s.check(err)
	x.says("k", 0)

	s.startSwapping()
	x.awaits("is there again", func(c *api.Client) bool {
		return c.Connected && c.Context == api.ContextState_CONTEXT_STATE_PRESENT
	})
	x.does("k") // ends that it is suspended, which the scheduler had recorded
	x.awaitsPresent()
	s.suspend()
	x.awaitsAway()
	x.does("k")
}

// A process that the driver refuses keeps its context, and the status says why.
func TestSuspendRefused(t *testing.T) {
	t.Parallel()
	s, x, _ := faultSite(t)
	x.does("h")
	s.suspend()
	x.awaits("says why it keeps its context", func(c *api.Client) bool {
		return strings.Contains(c.ContextProblem, "error 801") && strings.Contains(c.ContextProblem, "managed memory") &&
			c.Context == api.ContextState_CONTEXT_STATE_PRESENT
	})
	x.does("q")
	x.does("k")
}

// A restore that is refused is tried again, and a process that has failed for good ends.
func TestSuspendCannotComeBack(t *testing.T) {
	t.Parallel()
	s, x, _ := faultSite(t)
	s.suspend()
	x.awaitsAway()
	s.faults("restore 2")
	x.asks("k")
	x.awaits("says why it does not come back", func(c *api.Client) bool {
		return c.Context == api.ContextState_CONTEXT_STATE_RETURNING && strings.Contains(c.ContextProblem, "out of memory")
	})
	s.faults("")
	x.says("k", 0)
	x.awaits("has come back", func(c *api.Client) bool { return c.ContextProblem == "" && c.RestoreNs > 0 })

	s.suspend()
	x.awaitsAway()
	s.faults("restore fail")
	x.asks("k")
	<-x.end // its call has failed
	if x.err == nil {
		t.Error("it ended as if nothing had happened")
	}
}

// A GPU that others have filled meanwhile: the process waits until there is room.
func TestSuspendFullGPU(t *testing.T) {
	t.Parallel()
	s, x, _ := faultSite(t)
	s.suspend()
	x.awaitsAway()
	hog := s.startSuspendTenant("hog", func(cmd *exec.Cmd) { // without the shim
		cmd.Args[1] = "240"
		cmd.Env = s.env()
	})
	x.asks("k")
	x.awaits("waits for memory", func(c *api.Client) bool {
		return c.Context == api.ContextState_CONTEXT_STATE_PRESENT && c.State == api.ClientState_CLIENT_STATE_HOLDING && c.AwayBytes > 0
	})
	s.check(hog.cmd.Process.Kill())
	<-hog.end
	x.says("k", 0)
}
