// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// Beside a tenant with a core limit two others have their turns together. Nothing of the
// limited one runs beside them, and it stays within its limit. That holds again when the
// scheduler was killed, and when one of the two was, in the middle of a turn.
func TestOthersShareBesideALimit(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("needs root to be three users")
	}
	s := newSite(t)
	const limited, second = 1000, 1001
	theirs := s.openTo(limited)
	s.startScheduler("--anti-thrash", "auto")
	s.until("there is a scheduler", func() error { _, err := s.status(); return err })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	s.check(err)
	defer conn.Close()
	_, err = conn.SetShare(ctx, &api.SetShareRequest{Uid: proto.Uint32(limited), CoreLimit: proto.Uint32(30)})
	s.check(err)

	a := s.startTenant("a") // root's makes the simulated devices
	s.awaitAttached(1)
	l := s.startTenant("limited", queued, theirs) // else a busy machine lets it leave gaps, and it joins the others
	s.startTenant("b", theirs, func(cmd *exec.Cmd) { cmd.SysProcAttr.Credential = &syscall.Credential{Uid: second, Gid: second} })
	s.awaitAttached(3)
	for _, fault := range []struct {
		of   func()
		left int // tenants
	}{
		{func() { s.endScheduler(syscall.SIGKILL); time.Sleep(away); s.startScheduler("--anti-thrash", "auto") }, 3},
		{func() { s.check(a.cmd.Process.Signal(syscall.SIGKILL)); <-a.end }, 2},
	} {
		s.awaitWay("turns", "share their turn by time slices")
		s.until("two hold the GPU at the same time", func() error { return s.holding(2) })
		began := judge.Now()
		s.until("the limited one has had 20 turns", func() error {
			if n := s.turnsOf("limited", began); n < 20 {
				return fmt.Errorf("it has had %d", n)
			}
			return nil
		})
		s.expectApart("limited", began, judge.Now(), 0.45) // 30 %, and what it may catch up
		s.until("two hold the GPU at the same time", func() error { return s.holding(2) })
		fault.of()
		s.awaitAttached(fault.left)
	}
	s.tenants = []*tenant{l, s.tenants[2]}
	s.awaitWay("turns", "core limit")
	s.expectTurns(3, s.tenants...)
	s.expectAlive()
}

// holding returns an error unless n clients hold the GPU.
func (s *site) holding(n int) error {
	r, err := s.status()
	if err != nil {
		return err
	}
	holders := 0
	for _, c := range r.Gpus[0].Clients {
		if c.State == api.ClientState_CLIENT_STATE_HOLDING {
			holders++
		}
	}
	if holders != n {
		return fmt.Errorf("%d do", holders)
	}
	return nil
}

// against has all tenants but one be one process, so that the judge sees that one against
// all others.
func (s *site) against(tenant string) judge.Trace {
	trace := s.trace()
	others := judge.Process{Tenant: "others"}
	for i := range trace.Intervals {
		if p := &trace.Intervals[i].Process; p.Tenant != tenant {
			*p = others
		}
	}
	return trace
}

func (s *site) turnsOf(tenant string, since int64) int {
	for _, g := range judge.Judge(s.against(tenant), judge.Options{Since: since}).GPUs {
		for _, u := range g.Tenants {
			if u.Tenant == tenant {
				return u.Turns
			}
		}
	}
	return 0
}

// expectApart fails if a tenant ran beside others, or for more than a part of the time.
func (s *site) expectApart(tenant string, since, until int64, most float64) {
	s.t.Helper()
	for _, g := range judge.Judge(s.against(tenant), judge.Options{Since: since, Until: until}).GPUs {
		if g.Overlaps.Count != 0 {
			s.t.Errorf("%s ran beside others %d times, for %v; first %+v", tenant, g.Overlaps.Count, time.Duration(g.Overlaps.Total), g.Overlaps.First)
		}
		for _, u := range g.Tenants {
			if part := float64(u.Occupied) / float64(until-since); u.Tenant == tenant && part > most {
				s.t.Errorf("%s had the GPU for %.2f of the time, want at most %.2f", tenant, part, most)
			}
		}
	}
}
