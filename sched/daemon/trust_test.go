// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

func hasProblem(r *api.StatusResponse, text string) bool {
	return strings.Contains(strings.Join(r.Problems, "\n"), text)
}

// A client that invents a grant after a restart keeps nobody waiting where the record is
// there. With the record lost it is believed for a while, as it may be honest.
func TestInventedClaimAfterARestart(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	p, a, e := newHolder(t, s)
	a.release(e)
	s.stop()
	s = start(t, dir, nil) // the grace period is longer than the test waits
	liar := newProc(t, dir, 0).connect().register(wire.RegisterReconnect).attach(0, gpuA, e+1000, 0)
	honest := p.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, wire.AttachWant)
	honest.granted()
	if r := s.status(); stateOf(r, liar.id) != api.ClientState_CLIENT_STATE_FENCED {
		t.Errorf("who invented a grant is %v", stateOf(r, liar.id))
	}
}

// Memory that a client says it has, and never reserved, is no reason to refuse others.
// Where memory is refused, the tenant with most that cannot be moved is named.
func TestReportsAreBelievedAsFarAsReserved(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	liar, honest := newSwapper(t, s), newSwapper(t, s)
	if code := liar.reserve(100 * mib); code != wire.OK {
		t.Fatalf("code %d", code)
	}
	liar.has.Resident, liar.has.Fixed = gib, gib
	liar.moved(0, 0)
	liar.reserve(100 * mib) // the report is read before
	if code := honest.reserve(800 * mib); code != wire.OK {
		t.Errorf("800 of 1024 MiB beside 100 that were reserved: code %d", code)
	}
	if code := honest.reserve(1000 * mib); code != wire.ErrArena {
		t.Errorf("1000 of 1024 MiB beside 100 that cannot be moved: code %d", code)
	}
	if r := s.status(); !hasProblem(r, "of which user 0 has most") && ownContainer(t) == "" {
		t.Errorf("problems %q", r.Problems)
	}
}

// Processes that have the scheduler make host memory, and end, slow down those of their
// account that come after them, and nobody else.
func TestArenasThrownAway(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	first, second := newSwapper(t, s), newSwapper(t, s)
	// The account owes so much that it does so however slow the machine is.
	const owed = 10_000 * gib
	until := func(charge uint64) (at time.Time) {
		if err := s.Ask(t.Context(), func() {
			for c := range s.conns {
				now := time.Now()
				c.Account.ChargeArena(charge, now)
				at = now.Add(c.Account.AwaitArena(now))
				return // they have the same one
			}
		}); err != nil {
			t.Fatal(err)
		}
		return at
	}
	before := until(owed)
	first.allocates(900 * mib)
	second.allocates(900 * mib)
	s.await("they have their arenas", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaBytes >= 1600*mib })
	if more := until(0).Sub(before); more < time.Second {
		t.Errorf("1600 MiB of host memory were made, and the next process waits for %v longer", more)
	}
}

// A tenant that drains for long is named, and has less time the next time.
func TestSlowDrainIsNamed(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.Quantum, o.Grace = time.Millisecond, patience })
	_, a, e := newHolder(t, s)
	b := newProc(t, s.dir, 0).connect().register(0).attach(0, gpuA, 0, wire.AttachWant)
	a.expect(wire.TypeRevoke)
	time.Sleep(1200 * time.Millisecond) // that is what it does
	a.release(e)
	b.granted()
	if r := s.status(); !hasProblem(r, "too long to release the GPU") {
		t.Errorf("problems %q", r.Problems)
	}
	// A tenant that has the GPU alone may not be asked again for weeks.
	if err := s.Ask(t.Context(), func() { s.slowLately = time.Nanosecond }); err != nil {
		t.Fatal(err)
	}
	if r := s.status(); hasProblem(r, "too long to release the GPU") {
		t.Errorf("long after: problems %q", r.Problems)
	}
}

// Where /proc hides processes of other users from the scheduler, that is a problem which names the
// remedy; after that, it is none any more.
func TestProcHidesProcesses(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to mount /proc, and to have a scheduler of another user")
	}
	const user = 800
	for _, option := range []string{"hidepid=1", "hidepid=2"} {
		dir := t.TempDir()
		openToAll(t, dir)
		self, err := os.Open("/proc/self/exe")
		if err := errors.Join(err, os.Chown(dir, user, user)); err != nil {
			t.Fatal(err)
		}
		cmd := startProcessBy(t, dir, func(cmd *exec.Cmd) {
			cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c",
				"mount --make-rprivate / && mount -t proc -o " + option + " proc /proc && exec setpriv --reuid 800 --regid 800 --clear-groups /proc/self/fd/3"}
			cmd.ExtraFiles = []*os.File{self}
			cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS
		})
		self.Close()
		s := &scheduler{t: t, dir: dir}
		const problem = "mount -o remount,hidepid=2,gid=800 /proc"
		newProc(t, dir, 0).connect().expectRefused(wire.ErrInternal)
		s.await(option+" is a problem", func(r *api.StatusResponse) bool { return hasProblem(r, problem) })
		newProc(t, dir, user).connect().register(0) // its own user's are there all the same
		if !hasProblem(s.status(), problem) {
			t.Errorf("%s: the problem has gone", option)
		}
		remedy := exec.Command("nsenter", "-t", strconv.Itoa(cmd.Process.Pid), "-m", "sh", "-c", problem)
		if out, err := remedy.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		newProc(t, dir, 0).connect().register(0)
		if r := s.status(); hasProblem(r, "hidepid") {
			t.Errorf("%s: after the remedy: %q", option, r.Problems)
		}
	}
}
