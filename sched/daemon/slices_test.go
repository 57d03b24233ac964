// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

func autoMode(o *Options) { o.Mode = sched.Auto }

// prove says that the client's time slices and channels can be controlled, or how not.
func (c *peerConn) prove(result wire.Control) {
	c.t.Helper()
	f := wire.Frame{Type: wire.TypeControls, Controls: wire.Controls{Slices: result, Channels: result, Groups: 1}}
	copy(f.Controls.Driver[:], "580.159.04")
	c.send(f)
}

// awaitWay waits until GPU A is shared in that way; meanwhile the client says that it works.
func awaitWay(t *testing.T, s *scheduler, way string, works *peerConn) *api.GPU {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		g := s.status().Gpus[0]
		switch {
		case g.Way == way:
			return g
		case time.Now().After(end):
			t.Fatalf("the GPU is shared by %s (%s), want %s", g.Way, g.WayReason, way)
		}
		works.send(wire.Frame{Type: wire.TypeUtil, Util: wire.Util{Samples: 50, Busy: 50, Calls: 20}})
		time.Sleep(10 * time.Millisecond)
	}
}

// Clients that have proved their time slices share the GPU by these, before and after a
// restart of the scheduler; once one cannot be sliced they take turns, and the status says
// which, and why.
func TestClientsShareBySlices(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, autoMode)
	pa, a, ea := newHolder(t, s)
	pb, b := newClient(t, s)
	b.request()
	a.prove(wire.ControlWorks)
	b.prove(wire.ControlWorks)
	awaitWay(t, s, "slices", a)
	eb := b.granted()
	for _, c := range s.status().Gpus[0].Clients {
		if p := c.Controls; p == nil || p.Slices != "works" || p.Channels != "works" || p.Groups != 1 || p.Driver != "580.159.04" || !p.Listed {
			t.Errorf("the status says of client %d: %v", c.Id, p)
		}
	}

	s.stop()
	s = start(t, dir, autoMode)
	a = pa.connect().register(wire.RegisterReconnect)
	b = pb.connect().register(wire.RegisterReconnect)
	for _, c := range []struct {
		*peerConn
		epoch uint64
	}{{a, ea}, {b, eb}} {
		c.attach(0, gpuA, c.epoch, 0)
		if c.page.Word(0) != uint32(c.epoch) {
			t.Errorf("client %d may not go on under epoch %d: its word is %d", c.id, c.epoch, c.page.Word(0))
		}
		c.prove(wire.ControlWorks)
	}
	if g := s.status().Gpus[0]; g.Way != "slices" || g.Mode == api.Mode_MODE_EXCLUSIVE {
		t.Errorf("after the restart the GPU is shared by %s (%s)", g.Way, g.WayReason)
	}

	b.prove(wire.ControlRefused)
	if f := a.expect(wire.TypeRevoke); f.Epoch != ea {
		t.Errorf("revoked epoch %d, want %d", f.Epoch, ea)
	}
	if f := b.expect(wire.TypeRevoke); f.Epoch != eb {
		t.Errorf("revoked epoch %d, want %d", f.Epoch, eb)
	}
	g := s.status().Gpus[0]
	if want := fmt.Sprintf("client %d cannot be sliced: time slices: driver refused", b.id); g.Way != "turns" || !strings.Contains(g.WayReason, want) {
		t.Errorf("the GPU is shared by %s (%s), want turns (%s)", g.Way, g.WayReason, want)
	}
}

// However many share the GPU, a restart of the scheduler takes it from nobody.
func TestRestartDropsNobody(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, autoMode)
	const n = 40
	procs, clients, epochs := make([]*proc, n), make([]*peerConn, n), make([]uint64, n)
	for i := range procs {
		procs[i], clients[i] = newClient(t, s)
		clients[i].request().prove(wire.ControlWorks)
	}
	awaitWay(t, s, "slices", clients[0])
	for i, c := range clients {
		epochs[i] = c.granted()
	}
	s.stop()
	if st := readState(t, dir).GPUs[gpuA.UUID]; len(st.Holders) != n || st.Unrecorded || st.Way != sched.WaySlices {
		t.Errorf("%d holders are recorded (others: %t), who share the GPU by %v", len(st.Holders), st.Unrecorded, st.Way)
	}
	s = start(t, dir, autoMode)
	for i, p := range procs {
		clients[i] = p.connect().register(wire.RegisterReconnect).attach(0, gpuA, epochs[i], 0)
		clients[i].prove(wire.ControlWorks)
	}
	g := s.status().Gpus[0]
	if g.Way != "slices" {
		t.Errorf("the GPU is shared by %s (%s)", g.Way, g.WayReason)
	}
	for i, c := range clients {
		if got := c.page.Word(0); got != uint32(epochs[i]) {
			t.Errorf("client %d may not go on under epoch %d: its word is %d", c.id, epochs[i], got)
		}
		if f := c.page.Flags(0); f != wire.GrantConcurrent { // or it reports nothing, and the slices stay as they are
			t.Errorf("client %d shares the GPU, and its page has the flags %#x", c.id, f)
		}
	}
}

// The page of a client that shares its turn says so. The client then reports its work although
// nobody waits, and the scheduler finds the best time slices by these reports.
func TestPageSaysThatATurnIsShared(t *testing.T) {
	dir := t.TempDir()
	openToAll(t, dir)
	s := start(t, dir, autoMode)
	if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: proto.Uint32(nobody), CoreLimit: proto.Uint32(30)}); err != nil {
		t.Fatal(err)
	}
	pa, a, epoch := newHolder(t, s)
	pb, b := newClient(t, s)
	limited := newProc(t, dir, nobody).connect().register(0).attach(0, gpuA, 0, 0)
	for _, c := range []*peerConn{a, b, limited} {
		c.prove(wire.ControlWorks)
	}
	b.request()
	s.await("a cohort", func(r *api.StatusResponse) bool {
		a.send(wire.Frame{Type: wire.TypeUtil, Util: wire.Util{Samples: 50, Busy: 50, Calls: 20}})
		return r.Gpus[0].WayCode == "cohort"
	})
	a.release(epoch).request()
	shared := map[*proc]uint64{pa: a.granted(), pb: b.granted()}
	for _, c := range []*peerConn{a, b} {
		if c.page.Flags(0)&wire.GrantShared == 0 {
			t.Errorf("the page of client %d does not say that its turn is shared", c.id)
		}
	}
	if limited.page.Flags(0)&wire.GrantShared != 0 {
		t.Error("the turn of the tenant with a limit is shared")
	}

	s.stop()
	start(t, dir, autoMode)
	for p, epoch := range shared {
		c := p.connect().register(wire.RegisterReconnect).attach(0, gpuA, epoch, 0)
		if c.page.Word(0) != uint32(epoch) || c.page.Flags(0)&wire.GrantShared == 0 {
			t.Errorf("after a restart client %d with epoch %d has the word %d, and flags %#x", c.id, epoch, c.page.Word(0), c.page.Flags(0))
		}
	}
}

// A latency tenant that was let in beside others keeps its grant when all begin to share the GPU.
// Its page then says what those of the others say: it reports, and does not leave at once when idle.
func TestLatencyGrantWhenTurnsEnd(t *testing.T) {
	dir := t.TempDir()
	openToAll(t, dir)
	s := start(t, dir, nil)
	s.setLatency(t, dir)
	newHolder(t, s)
	_, waiting := newClient(t, s)
	waiting.request()
	latency := newProc(t, dir, nobody).connect().register(0).attach(0, gpuA, 0, 0)
	latency.request().granted()
	if f := latency.page.Flags(0); f != wire.GrantConcurrent|wire.GrantLatency {
		t.Fatalf("flags %#x beside a holder", f)
	}
	if _, err := dial(t, s).Set(t.Context(), &api.SetRequest{Mode: api.Mode_MODE_CONCURRENT}); err != nil {
		t.Fatal(err)
	}
	waiting.granted()
	if f := latency.page.Flags(0); f != wire.GrantConcurrent {
		t.Errorf("flags %#x now that all share the GPU", f)
	}
}

func TestControlsOnTheWire(t *testing.T) {
	for code, want := range map[wire.Control]sched.Control{
		wire.ControlUntried: sched.ControlUntried, wire.ControlWorks: sched.ControlWorks, wire.ControlUnseen: sched.ControlUnseen,
		wire.ControlRefused: sched.ControlRefused, wire.ControlFaked: sched.ControlFaked, wire.ControlFailed: sched.ControlFailed,
	} {
		if sched.Control(code) != want {
			t.Errorf("result %d is %v, want %v", code, sched.Control(code), want)
		}
	}
}
