// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/away"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// fakeDriver checkpoints nobody: each operation is told to the test, which says how it ends.
type fakeDriver struct {
	ops  chan string
	ends chan error
}

func (f *fakeDriver) do(op string) error {
	f.ops <- op
	return <-f.ends
}

func (f *fakeDriver) Off(context.Context, int) (checkpoint.Times, error) { return nil, f.do("off") }
func (f *fakeDriver) On(context.Context, int, []checkpoint.Pair) (checkpoint.Times, error) {
	return nil, f.do("on")
}
func (f *fakeDriver) Expect(int) {}

// next waits for an operation.
func (f *fakeDriver) next(t *testing.T, want string) {
	t.Helper()
	select {
	case op := <-f.ops:
		if op != want {
			t.Fatalf("%s, want %s", op, want)
		}
	case <-time.After(patience):
		t.Fatalf("never: %s", want)
	}
}

// leaver is a client whose shim understands SUSPEND, with 256 MiB mostly.
type leaver struct {
	*swapper
	s     *scheduler
	f     *fakeDriver
	bytes uint64
}

func newLeaver(t *testing.T, more ...func(*Daemon)) *leaver {
	t.Helper()
	f := &fakeDriver{make(chan string, 16), make(chan error)}
	return newLeaverOf(t, start(t, t.TempDir(), func(o *Options) { swapping(o); o.Checkpoint = f }, more...), f, gpuA)
}

func newLeaverOf(t *testing.T, s *scheduler, f *fakeDriver, g node.Found) *leaver {
	t.Helper()
	return newLeaverWith(t, s, f, g, 256*mib)
}

func newLeaverWith(t *testing.T, s *scheduler, f *fakeDriver, g node.Found, bytes uint64) *leaver {
	t.Helper()
	p := newProc(t, s.dir, 0)
	l := &leaver{&swapper{peerConn: p.connect().register(wire.RegisterSwap | wire.RegisterSuspend), proc: p}, s, f, bytes}
	l.attach(0, g, 0, 0)
	l.moved(0, 0)
	l.allocates(bytes)
	l.works()
	return l
}

// works gets a grant and has its memory on the GPU.
func (l *leaver) works() {
	l.t.Helper()
	l.request()
	l.in(l.granted())
	l.s.await("it has its memory", func(*api.StatusResponse) bool {
		c := l.status(l.s)
		return c.ResidentBytes == l.bytes && !c.Moving
	})
}

// suspended is told to leave, and has moved its memory out: it is asked to keep out of the driver.
func (l *leaver) suspended() {
	l.t.Helper()
	if _, err := suspendSelf(l.t, l.s); err != nil {
		l.t.Fatal(err)
	}
	f := l.want(wire.TypeRevoke)
	l.gives256Back(l.s, f.Epoch)
	l.wantSuspend(wire.SuspendPrepare)
}

func (l *leaver) wantSuspend(code uint32) {
	l.t.Helper()
	if f := l.want(wire.TypeSuspend); f.Code != code {
		l.t.Fatalf("SUSPEND with code %d, want %d", f.Code, code)
	}
}

func (l *leaver) says(code uint32) {
	l.t.Helper()
	l.send(wire.Frame{Type: wire.TypeSuspended, Code: code})
}

func (l *leaver) awaitContext(want api.ContextState) {
	l.t.Helper()
	l.s.await("its context is "+want.String(), func(*api.StatusResponse) bool { return l.status(l.s).Context == want })
}

// left is off the GPU with its context.
func (l *leaver) left() {
	l.t.Helper()
	l.suspended()
	l.leaves()
}

// leaves is a process that was asked to keep out of the driver.
func (l *leaver) leaves() {
	l.t.Helper()
	l.says(wire.SuspendedReady)
	l.f.next(l.t, "off")
	l.f.ends <- nil
	l.awaitContext(api.ContextState_CONTEXT_STATE_AWAY)
}

// returns is a process that something has woken.
func (l *leaver) returns() {
	l.t.Helper()
	l.f.next(l.t, "on")
	l.f.ends <- nil
	l.wantSuspend(wire.SuspendOver)
}

// A call brings the process back, before it has asked for a grant; so does resume.
func TestLeavesWithItsContext(t *testing.T) {
	l := newLeaver(t)
	l.left()
	l.says(wire.SuspendedWake)
	l.says(wire.SuspendedWake) // repeated
	l.reserve(256 * mib)       // is answered after both were heard
	l.returns()
	if c := l.status(l.s); c.RestoreNs <= 0 || c.ContextProblem != "" {
		t.Errorf("%v", c)
	}
	l.works()

	l.left()
	if r, err := resumeSelf(t, l.s); err != nil || len(r.Gpus) != 1 || !r.Gpus[0].Context {
		t.Fatalf("%v, %v", r, err)
	}
	l.returns()
	l.in(l.granted()) // without a request
}

// A process that came back for a call, and asks for no grant, stays for a while, whatever it
// says of its memory. Then it leaves again.
func TestLeavesAgainAfterARest(t *testing.T) {
	back := func(l *leaver) {
		l.left()
		l.says(wire.SuspendedWake)
		l.returns()
	}
	l := newLeaver(t)
	back(l)
	l.moved(0, 0) // would have it leave at once
	l.works()     // and is not told to leave before

	l = newLeaver(t, func(d *Daemon) { d.away.RestPause = 10 * time.Millisecond })
	back(l)
	l.wantSuspend(wire.SuspendPrepare)
	l.leaves()
}

// One process leaves at a time, and none while another comes back: the driver would have
// both wait for each other.
func TestLeaveOneAfterTheOther(t *testing.T) {
	a := newLeaver(t)
	b := newLeaverOf(t, a.s, a.f, gpuB) // which holds its grant beside the other
	notAsked := func(l *leaver) {
		t.Helper()
		l.reserve(256 * mib) // fails on SUSPEND
	}
	a.suspended()
	b.gives256Back(b.s, b.want(wire.TypeRevoke).Epoch)
	a.says(wire.SuspendedReady)
	a.f.next(t, "off")
	notAsked(b)
	a.f.ends <- nil
	b.wantSuspend(wire.SuspendPrepare)
	b.leaves()

	b.says(wire.SuspendedWake)
	b.returns()
	b.works()
	a.says(wire.SuspendedWake)
	a.f.next(t, "on")
	if _, err := suspendSelf(t, b.s); err != nil {
		t.Fatal(err)
	}
	b.gives256Back(b.s, b.want(wire.TypeRevoke).Epoch)
	notAsked(b)
	a.f.ends <- nil
	b.wantSuspend(wire.SuspendPrepare)
	b.leaves()

	// A process that ends no longer keeps others.
	b.says(wire.SuspendedWake)
	b.returns()
	b.works()
	a.wantSuspend(wire.SuspendOver)
	a.works()
	a.suspended()
	b.gives256Back(b.s, b.want(wire.TypeRevoke).Epoch)
	notAsked(b)
	a.proc.kill()
	b.wantSuspend(wire.SuspendPrepare)
}

// A process that ends while it comes back does not keep the others of its tenant from being
// resumed.
func TestResumeWithOneThatEnds(t *testing.T) {
	a := newLeaver(t)
	b := newLeaverOf(t, a.s, a.f, gpuB)
	a.suspended()
	b.gives256Back(b.s, b.want(wire.TypeRevoke).Epoch)
	a.leaves()
	b.wantSuspend(wire.SuspendPrepare)
	b.leaves()
	if r, err := resumeSelf(t, a.s); err != nil || len(r.Gpus) != 2 {
		t.Fatalf("%v, %v", r, err)
	}
	a.f.next(t, "on")
	a.f.next(t, "on")
	a.proc.kill()
	a.s.await("its end is noticed", func(r *api.StatusResponse) bool {
		return !slices.ContainsFunc(r.Gpus, func(g *api.GPU) bool {
			return slices.ContainsFunc(g.Clients, func(c *api.Client) bool { return c.Id == a.id })
		})
	})
	a.f.ends <- nil // of the one that has ended too
	a.f.ends <- nil
	b.wantSuspend(wire.SuspendOver)
	b.in(b.granted()) // without a request
}

// A process whose threads are in the driver, or whose call comes first, is left alone.
func TestTooBusyToLeave(t *testing.T) {
	l := newLeaver(t)
	l.suspended()
	l.says(wire.SuspendedBusy)
	l.wantSuspend(wire.SuspendOver)
	l.works()

	l.suspended()
	l.says(wire.SuspendedReady)
	l.f.next(t, "off")
	l.says(wire.SuspendedWake) // while the driver takes it off
	l.f.ends <- nil
	l.returns()
	l.works()
	l.says(wire.SuspendedReady) // of an order that is over
	l.wantSuspend(wire.SuspendOver)
}

// A shim that does not answer in time is asked again, and then the status says why the process
// stays.
func TestNoAnswerWhetherItCanLeave(t *testing.T) {
	l := newLeaver(t, func(d *Daemon) { d.away.PrepareLimit, d.away.BusyPause = 10*time.Millisecond, 10*time.Millisecond })
	l.suspended()
	for range away.BusyTries - 1 {
		l.wantSuspend(wire.SuspendOver)
		l.wantSuspend(wire.SuspendPrepare)
	}
	l.wantSuspend(wire.SuspendOver)
	l.s.await("why its context stays", func(*api.StatusResponse) bool {
		return strings.Contains(l.status(l.s).ContextProblem, "its shim does not answer")
	})
	l.says(wire.SuspendedReady) // too late
	l.wantSuspend(wire.SuspendOver)
	l.works()
	if c := l.status(l.s); c.ContextProblem != "" || c.Context != api.ContextState_CONTEXT_STATE_PRESENT {
		t.Errorf("%v", c)
	}
}

// What fails is said. A process that may be locked is put right first, and one that cannot
// come back yet is tried again.
func TestCannotLeaveOrComeBack(t *testing.T) {
	l := newLeaver(t)
	refused := &checkpoint.Error{Result: checkpoint.Result{State: checkpoint.Running, Step: "checkpoint", Code: 801, Error: "it shares memory"}}
	l.suspended()
	l.says(wire.SuspendedReady)
	l.f.next(t, "off")
	l.f.ends <- refused
	l.wantSuspend(wire.SuspendOver)
	if c := l.status(l.s); !strings.Contains(c.ContextProblem, "it shares memory") || c.Context != api.ContextState_CONTEXT_STATE_PRESENT {
		t.Errorf("%v", c)
	}
	l.works() // and it may be tried again

	l.suspended()
	l.says(wire.SuspendedReady)
	l.f.next(t, "off")
	l.f.ends <- errors.New("killed")
	l.returns()
	l.works()

	l.left()
	l.says(wire.SuspendedWake)
	l.f.next(t, "on")
	l.f.ends <- errors.New("no room")
	l.s.await("why it does not come back", func(*api.StatusResponse) bool {
		c := l.status(l.s)
		return strings.Contains(c.ContextProblem, "no room") && c.Context == api.ContextState_CONTEXT_STATE_RETURNING
	})
	l.returns()

	l.works()
	l.left()
	l.says(wire.SuspendedWake)
	l.f.next(t, "on")
	l.f.ends <- &checkpoint.Error{Result: checkpoint.Result{State: checkpoint.Failed, Error: "lost"}}
	l.wantSuspend(wire.SuspendOver) // its calls go to the driver, which refuses them
}

// A process that comes back over another connection is away if it says so.
func TestAwayOverAnotherConnection(t *testing.T) {
	l := newLeaver(t)
	l.left()
	again := func(flags uint32) {
		t.Helper()
		n := &swapper{peerConn: l.proc.connect().register(wire.RegisterSwap | wire.RegisterSuspend | wire.RegisterReconnect | flags), proc: l.proc, has: l.has}
		n.attach(0, gpuA, 0, 0)
		l.swapper.Close()
		l.swapper = n
	}
	again(wire.RegisterAway)
	l.awaitContext(api.ContextState_CONTEXT_STATE_AWAY)
	l.says(wire.SuspendedWake)
	l.returns()
	again(wire.RegisterAway) // the answer was lost
	l.awaitContext(api.ContextState_CONTEXT_STATE_AWAY)
	again(0) // another program of the same process
	l.awaitContext(api.ContextState_CONTEXT_STATE_PRESENT)
}

// A shim that does not know SUSPEND keeps its context, and the status says why.
func TestOldShimKeepsItsContext(t *testing.T) {
	f := &fakeDriver{make(chan string, 16), make(chan error)}
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.Checkpoint = f })
	a := newSwapper(t, s)
	l := &leaver{a, s, f, 256 * mib}
	a.allocates(256 * mib)
	l.works()
	if _, err := suspendSelf(t, s); err != nil {
		t.Fatal(err)
	}
	l.gives256Back(s, l.want(wire.TypeRevoke).Epoch)
	s.await("why its context stays", func(*api.StatusResponse) bool {
		return strings.Contains(a.status(s).ContextProblem, "its shim is too old")
	})
}

// The status says once why contexts stay.
func TestCheckpointCannotWork(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	if got := s.status().CheckpointProblem; !strings.Contains(got, "nvshare-checkpoint is not there") {
		t.Errorf("without the program: %q", got)
	}
	s.stop()
	s = start(t, t.TempDir(), func(o *Options) {
		swapping(o)
		o.Checkpoint = &fakeDriver{make(chan string, 16), make(chan error)}
		o.CheckpointCheck = func(context.Context) error { return errors.New("no driver") }
	})
	s.await("what the check found", func(r *api.StatusResponse) bool { return r.CheckpointProblem == "no driver" })
	s.stop()
	s = start(t, t.TempDir(), nil)
	if got := s.status().CheckpointProblem; got != "" {
		t.Errorf("nothing is swapped: %q", got)
	}
}
