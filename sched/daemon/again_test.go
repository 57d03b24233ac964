// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/away"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/moves"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/wire"
)

// inLoop runs f as the daemon's loop does.
func (s *scheduler) inLoop(f func()) {
	s.t.Helper()
	if err := s.Ask(context.Background(), f); err != nil {
		s.t.Fatal(err)
	}
}

// The status has what the driver said of a GPU, and not what it said long ago.
func TestStatusHasTheLoad(t *testing.T) {
	s := newSharing(t, t.TempDir())
	s.inLoop(func() {
		s.noteSamples([]metrics.GPUSample{{UUID: gpuA.UUID, Utilization: 0.87, Watts: 312, Celsius: 64}})
	})
	if l := s.status().Gpus[0].Load; l.GetBusyPercent() != 87 || l.GetWatts() != 312 || l.GetCelsius() != 64 {
		t.Errorf("%v", l)
	}
	s.inLoop(func() { s.Order[0].LoadAt = s.Order[0].LoadAt.Add(-loadLife) })
	if l := s.status().Gpus[0].Load; l != nil {
		t.Errorf("it is old: %v", l)
	}
}

// Containers that come and go push nothing out of the events that an administrator needs.
func TestPodsPushNoFaultOut(t *testing.T) {
	s := newSharing(t, t.TempDir())
	s.inLoop(func() {
		s.noteSamples([]metrics.GPUSample{{UUID: gpuA.UUID, Faults: 1, Fault: "Xid 79: it has fallen off the bus"}})
		for i := range 1100 {
			s.tenants.SetPodTerms(&api.Container{Id: whole("a"), Namespace: "ml", Pod: "a", Name: "main", Share: &api.Share{Weight: uint32(100 + i%2)}})
			s.noteWarnings(&api.Container{Id: whole("a")}, []string{"a weight of its own"})
		}
	})
	found := false
	for _, e := range s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_GPU}}).Events {
		found = found || strings.Contains(e.Reason, "Xid 79")
	}
	if !found {
		t.Error("the fault is forgotten")
	}
}

// A tenant whose processes begin, are refused memory and end causes no more events than one
// whose process stays.
func TestOutOfMemoryOfManyProcesses(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	s.limit("", gib)
	for range 3 {
		p, c := newClient(t, s)
		c.reserve(2*gib, 2*gib, 0)
		p.kill()
		s.await("it is gone", func(r *api.StatusResponse) bool { return len(r.Gpus[0].Clients) == 0 })
	}
	if n := len(s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_OUT_OF_MEMORY}}).Events); n != 1 {
		t.Errorf("%d events of 3 processes", n)
	}
}

// A process that attaches again and again, and says each time that its memory cannot be moved,
// pushes no other tenant's events out.
func TestFixedAgainAndAgain(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	w := newSwapper(t, s)
	s.inLoop(func() {
		s.noteWarnings(&api.Container{Id: whole("a")}, []string{"a warning"})
		g := s.FindGPU(gpuA.UUID)
		for range 1100 {
			s.NoteFixed(&node.Attachment{Client: s.Clients[base.ClientID(w.id)], GPU: g}, wire.FixedRDMA)
		}
	})
	if len(s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_WARNING}}).Events) != 1 {
		t.Error("the warning is forgotten")
	}
}

// A fault that could not be recorded is recorded as soon as it can be.
func TestSettingsAreRecordedLater(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	recorded := func() bool {
		text, err := os.ReadFile(filepath.Join(s.dir, "settings.json"))
		return err == nil && strings.Contains(string(text), "Xid 79")
	}
	s.inLoop(func() {
		block := filepath.Join(s.dir, "settings.json.tmp")
		err := os.Mkdir(block, 0o755)
		s.noteSamples([]metrics.GPUSample{{UUID: gpuA.UUID, Faults: 1, Fault: "Xid 79"}})
		if err := errors.Join(err, os.Remove(block)); err != nil || recorded() {
			t.Errorf("it is recorded where nothing can be (%v)", err)
		}
	})
	s.await("it is recorded", func(*api.StatusResponse) bool { return recorded() })
}

// A GPU that comes back with another index, as after a start of the driver, is where that says.
func TestGPUsAreSortedAgain(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	a, b := gpuA, gpuB
	a.Index, b.Index = 1, 0
	s.inLoop(func() { s.finishDiscovery([]node.Found{a, b}, nil) })
	if r := s.status(); len(r.Gpus) != 2 || r.Gpus[0].Uuid != gpuB.UUID || r.Gpus[0].Index != 0 || r.Gpus[1].Index != 1 {
		t.Errorf("%v", r.Gpus)
	}
}

// cannotSay is a look for a process that finds nothing out.
func cannotSay(peer.Process) (*peer.Peer, error) { return nil, unix.EMFILE }

// An earlier holder of which nobody can say whether it lives may hold the GPU.
func TestHolderThatCannotBeFound(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.Quantum, o.Grace = sched.MaxQuantum, sched.MinGrace })
	s.inLoop(func() {
		s.Find = cannotSay
		s.restore(s.FindGPU(gpuA.UUID), state.Holder{PID: 1 << 21, StartTime: 1, Epoch: 7})
	})
	_, c := newClient(t, s)
	c.request()
	s.await("it waits", func(r *api.StatusResponse) bool {
		return stateOf(r, c.id) == api.ClientState_CLIENT_STATE_WAITING
	})
	s.inLoop(func() {
		if at, ok := s.FindGPU(gpuA.UUID).Core.Deadline(); !ok || at.Sub(loop.Now()) < sched.MaxQuantum/2 {
			t.Errorf("the next grant is in %v", at.Sub(loop.Now()))
		}
		s.Find = func(peer.Process) (*peer.Peer, error) { return nil, unix.ESRCH }
		s.restore(s.FindGPU(gpuB.UUID), state.Holder{PID: 1 << 21, StartTime: 1, Epoch: 7})
	})
	newProc(t, s.dir, 0).connect().register(0).attach(0, gpuB, 0, 0).request().granted()
}

// A container of which nobody can say whether it runs keeps what it was promised, and is
// looked at again.
func TestContainerThatCannotBeFound(t *testing.T) {
	s := newSharing(t, t.TempDir())
	first := firstOf(t, whole("a"))
	var e tenants.EngineContainer
	s.inLoop(func() {
		p, err := s.Peers.FindPID(int32(first.Process.Pid))
		if err != nil {
			t.Error(err)
			return
		}
		p.Close()
		e = tenants.EngineContainer{Engine: "podman", Name: "a", First: &p.Process}
		s.Names[whole("a")] = &api.Container{Id: whole("a"), Engine: "podman", Name: "a"}
		s.Find = cannotSay
		s.tenants.RestoreFirst(whole("a"), e)
		if s.Names[whole("a")] == nil {
			t.Error("it is forgotten")
		}
		s.Find = s.Peers.Find
	})
	watched := func() (yes bool) {
		s.inLoop(func() { yes = s.tenants.Firsts[whole("a")] != nil })
		return yes
	}
	s.await("it is watched", func(*api.StatusResponse) bool { return watched() })
	s.inLoop(func() {
		s.Find = func(peer.Process) (*peer.Peer, error) { return nil, errors.Join(unix.ESRCH) }
		s.tenants.Firsts[whole("a")].Close()
		delete(s.tenants.Firsts, whole("a"))
		s.tenants.RestoreFirst(whole("a"), e)
		if s.Names[whole("a")] != nil {
			t.Error("a container that has stopped is remembered")
		}
	})
}

// Memory of a process of which nobody can say whether it lives is kept for it once that is known.
func TestMemberThatCannotBeFound(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	newSwapper(t, s).reserve(64 * mib)
	p := newProc(t, s.dir, 0)
	kept := func() (bytes uint64) {
		s.inLoop(func() { bytes = s.FindGPU(gpuA.UUID).Core.MemorySnapshot().Promised })
		return bytes
	}
	s.inLoop(func() {
		who, err := s.Peers.FindPID(int32(p.cmd.Process.Pid))
		if err != nil {
			t.Error(err)
			return
		}
		who.Close()
		s.Find = cannotSay
		s.memory.Before = map[string][]memory.MemberState{gpuA.UUID: {{PID: who.PID, StartTime: who.Start, Bytes: 256 * mib, Movable: true}}}
		s.memory.AwaitMembers(s.FindGPU(gpuA.UUID))
		s.memory.Members.Keep()
		if m, err := memory.ReadMembers(&s.Opts, s.BootID); err != nil || len(m[gpuA.UUID]) != 2 {
			t.Errorf("recorded are %+v, %v", m, err)
		}
		s.Find = s.Peers.Find
	})
	s.await("its memory is kept", func(*api.StatusResponse) bool { return kept() == (64+256)*mib })
}

// What an earlier scheduler has in a file, or has taken off its GPU, stays recorded while nobody
// can say whether its process lives, and is restored once that is known.
func TestProcessOffItsGPUThatCannotBeFound(t *testing.T) {
	driver := &carrier{}
	s := start(t, t.TempDir(), migrating(driver))
	p := newProc(t, s.dir, 0)
	path := filepath.Join(t.TempDir(), "arena")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var who peer.Process
	recorded := func(file string) bool {
		text, err := os.ReadFile(filepath.Join(s.dir, file))
		return err == nil && strings.Contains(string(text), strconv.Itoa(int(who.PID)))
	}
	s.inLoop(func() {
		found, err := s.Peers.FindPID(int32(p.cmd.Process.Pid))
		if err != nil {
			t.Error(err)
			return
		}
		found.Close()
		who = found.Process
		s.Find = cannotSay
		file, carried := away.FileRecord{Process: who, Path: path, Saved: true}, moves.CarriedProcess{Process: who, From: gpuA.UUID}
		s.OnceKnown(file, "", func() error { return s.away.RestoreFile(file) })
		s.OnceKnown(carried, "", func() error { return s.moves.RestoreCarriedOne(carried) })
		if err := errors.Join(s.away.RecordFiles(), s.moves.RecordCarried()); err != nil || !recorded("files.json") || !recorded("migrating.json") {
			t.Errorf("it is forgotten: %v", err)
		}
		s.Find = s.Peers.Find
	})
	s.await("it is restored", func(*api.StatusResponse) (yes bool) {
		s.inLoop(func() {
			cl := s.ByProc[who]
			yes = cl != nil && s.away.Of(cl).File != nil && s.away.IsAway(cl) && s.moves.From[cl] == s.FindGPU(gpuA.UUID) && slices.Equal(driver.told(), []string{"on"})
		})
		return yes
	})
	p.kill()
	s.await("its file is removed", func(*api.StatusResponse) bool {
		_, err := os.Stat(path)
		return errors.Is(err, os.ErrNotExist)
	})
	s.inLoop(func() {
		if err := errors.Join(s.away.RecordFiles(), s.moves.RecordCarried()); err != nil || recorded("files.json") || recorded("migrating.json") {
			t.Errorf("it is still recorded: %v", err)
		}
	})
}

// A process that becomes another program gives back what the earlier one held, on all GPUs, and
// uses only those to which the new one attaches.
func TestExecOnAnotherGPU(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, _, _ := newHolder(t, s)
	_, waiter := newClient(t, s)
	waiter.request()
	s.await("it waits", func(r *api.StatusResponse) bool {
		return stateOf(r, waiter.id) == api.ClientState_CLIENT_STATE_WAITING
	})
	next := p.connect().register(0).attach(0, gpuB, 0, 0)
	waiter.granted() // within a grace period, which is a day
	s.inLoop(func() {
		cl := s.Clients[base.ClientID(next.id)]
		if a, b := s.FindGPU(gpuA.UUID), s.FindGPU(gpuB.UUID); cl.Attached[a] != nil || cl.Attached[b] == nil {
			t.Errorf("it uses GPUs %v", cl.Attached)
		}
	})
}
