// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// putsChannelsOn makes a tenant run kernels of that length, and put the channels on all
// the time that the shim takes off.
func putsChannelsOn(s *site, length time.Duration) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) {
		cmd.Path = filepath.Join(s.build, "bin", "channels-on")
		cmd.Args = []string{cmd.Path, fmt.Sprint(length.Milliseconds())}
	}
}

// withoutShim makes a tenant a process that nobody arbitrates.
func withoutShim(cmd *exec.Cmd) {
	cmd.Env = slices.DeleteFunc(cmd.Env, func(s string) bool { return strings.HasPrefix(s, "LD_PRELOAD=") })
}

// shareOf waits until a tenant has had so many turns, and returns its part of the time in
// which the GPU worked.
func (s *site) shareOf(x *tenant, turns uint64) float64 {
	s.t.Helper()
	began := judge.Now()
	s.expectTurns(turns, x)
	for _, g := range judge.Judge(s.trace(), judge.Options{Since: began, Until: judge.Now()}).GPUs {
		for _, u := range g.Tenants {
			if u.Tenant == x.name {
				return u.Share
			}
		}
	}
	return 0
}

// A tenant whose process puts its channels on again, while it holds no grant, runs beside
// the holder. Its neighbour gets as much as beside a tenant that has a process with the
// shim and one without it, goes on, and is not fenced.
func TestChannelsPutOnAgain(t *testing.T) {
	t.Parallel()
	const turns = 8
	beside := func(tenants func(s *site)) float64 {
		s := newSite(t)
		s.startScheduler("--tq", "200ms")
		tenants(s)
		victim := s.startTenant("victim", longKernels(100*time.Millisecond))
		s.expectTurns(2, victim)
		share := s.shareOf(victim, turns)
		r, err := s.status()
		s.check(err)
		if n := r.Gpus[0].Fences; n != 0 {
			t.Errorf("there were %d fences", n)
		}
		s.expectAlive()
		return share
	}
	plain := beside(func(s *site) {
		s.startTenant("long", longKernels(time.Second))
		s.startTenant("long", longKernels(time.Second), withoutShim)
	})
	hostile := beside(func(s *site) { s.startTenant("hostile", putsChannelsOn(s, time.Second)) })
	t.Logf("the neighbour has %.3f of the GPU's work beside a process without the shim, %.3f beside a hostile one", plain, hostile)
	if hostile < 0.6*plain {
		t.Errorf("the neighbour has %.3f of the GPU's work beside a hostile process, and %.3f beside one without the shim", hostile, plain)
	}
}

// The status names a tenant that puts its channels on again, when the driver shows it
// working while it has no grant, and not the one whose turn it is.
func TestChannelsPutOnAgainAreNamed(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.startScheduler()
	s.startTenant("hostile", putsChannelsOn(s, 10*time.Minute))
	s.until("it works", func() error {
		trace, err := judge.ReadLog(filepath.Join(s.dir, "sim", "run", "log"))
		if err == nil && workOf(trace, "hostile", 0, judge.Now()) == 0 {
			err = errors.New("not yet")
		}
		return err
	})
	victim := s.startTenant("victim", longKernels(10*time.Minute)) // it has no pause, which would end its turn
	s.expectTurns(1, victim)
	conn, err := api.Dial(t.Context(), filepath.Join(s.dir, "run"))
	s.check(err)
	defer conn.Close()
	// The victim's turn becomes longer than the periods that the driver remembers.
	s.until("the victim has a long turn", func() error {
		_, err := conn.Set(t.Context(), &api.SetRequest{QuantumNs: int64(time.Hour)})
		s.check(err)
		if s.holder() == victim {
			return nil
		}
		_, err = conn.Set(t.Context(), &api.SetRequest{QuantumNs: int64(20 * time.Millisecond)})
		s.check(err)
		return errors.New("the other one has it")
	})
	var named []string
	s.until("one is named", func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		named = slices.DeleteFunc(r.Problems, func(p string) bool { return !strings.Contains(p, "had no grant") })
		if len(named) == 0 {
			return fmt.Errorf("problems %q", r.Problems)
		}
		return nil
	})
	t.Log(named)
	if want := fmt.Sprintf("(pid %d)", s.tenants[0].cmd.Process.Pid); len(named) != 1 || !strings.Contains(named[0], want) {
		t.Errorf("named: %q, want %s alone", named, want)
	}
}
