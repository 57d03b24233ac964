// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/wire"
)

// expect2 is expect where ROOM may come between.
func (c *peerConn) expect2(typ wire.Type) wire.Frame {
	c.t.Helper()
	for {
		f, _, err := c.recv()
		if err != nil {
			c.t.Fatal(err)
		}
		if f.Type == typ {
			return f
		}
	}
}

// After a restart clients say what they have; nobody gets room before.
func TestSwapRestart(t *testing.T) {
	dir := t.TempDir()
	tune := func(o *Options) { swapping(o); o.Quantum = sched.MinQuantum }
	s := start(t, dir, tune)
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.request()
	ea := a.granted()
	a.in(ea)
	b.request()
	a.want(wire.TypeRevoke)
	a.release(ea)
	eb := b.granted()
	b.in(eb) // as far as there is room: 424 MiB
	s.await("it has said so", func(*api.StatusResponse) bool { return b.status(s).ResidentBytes == 424*mib })
	s.stop()

	s = start(t, dir, tune)
	again := func(w *swapper, held uint64) *swapper {
		n := &swapper{peerConn: w.proc.connect().register(wire.RegisterSwap | wire.RegisterReconnect), proc: w.proc, has: w.has}
		n.attach(0, gpuA, held, 0)
		if n.page.Room(0) < w.has.Resident {
			t.Errorf("back with %d MiB and room for %d", w.has.Resident>>20, n.page.Room(0)>>20)
		}
		n.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: 600 * mib, Least: 600 * mib, Serial: 1}})
		n.want(wire.TypeReserved)
		return n
	}
	b = again(b, eb)
	b.moved(0, eb)
	a = again(a, 0)
	a.moved(0, 0)
	a.awaitLess(s, 424*mib)
	a.out()
	b.awaitRoom(s, 600*mib)
	b.in(eb)
	s.await("ready", func(r *api.StatusResponse) bool {
		return r.Gpus[0].Swap.ResidentBytes == gib && b.status(s).AwayBytes == 0
	})
}

// A tenant makes memory unmovable, so that another one has no place any more, whose
// grant would keep the GPU from it for nothing: that one waits for a place, and says so.
func TestSwapStranded(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.Quantum = sched.MinQuantum })
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.request()
	e := a.granted()
	a.in(e)
	a.has.Fixed = 500 * mib
	a.moved(0, e)
	a.release(e)
	b.request()
	e = b.granted()
	a.awaitLess(s, 500*mib)
	a.out()
	b.awaitRoom(s, 600*mib) // the driver has the last word
	b.has.Resident, b.has.Away = 524*mib, 76*mib
	b.moved(wire.MovedStuck|wire.MovedNoMemory, e)
	a.request()
	b.want(wire.TypeRevoke)
	b.release(e)
	b.request()
	e = a.granted()
	s.await("it is said", func(r *api.StatusResponse) bool {
		return len(r.Problems) == 1 && strings.Contains(r.Problems[0], "76 MiB do not fit")
	})
	b.awaitLess(s, 424*mib)
	b.out()
	a.awaitRoom(s, 600*mib)
	a.in(e)
	a.release(e)
	a.request()
	e = a.granted() // and not b, which is behind
	if state := b.status(s).State; state != api.ClientState_CLIENT_STATE_WAITING {
		t.Errorf("%v", state)
	}
	a.has.Fixed = 0
	a.moved(0, e)
	a.release(e)
	b.granted()
	if r := s.status(); len(r.Problems) != 0 {
		t.Error(r.Problems)
	}
}

// After a restart nobody gets room that somebody has who is not back yet; who never
// comes back keeps what it was promised.
func TestSwapRestartWithout(t *testing.T) {
	for _, comes := range []bool{true, false} {
		dir := t.TempDir()
		s := start(t, dir, swapping)
		a := newSwapper(t, s)
		a.allocates(600 * mib)
		a.request()
		e := a.granted()
		a.in(e)
		a.release(e)
		s.await("it has said so, and has no grant", func(*api.StatusResponse) bool {
			c := a.status(s)
			return c.ResidentBytes == 600*mib && c.State != api.ClientState_CLIENT_STATE_HOLDING
		})
		s.stop()

		s = start(t, dir, swapping)
		b := newSwapper(t, s)
		b.allocates(500 * mib)
		b.request()
		b.granted()
		if room := b.page.Room(0); room > 424*mib {
			t.Errorf("%d MiB for the first to come; 600 of 1024 are another's", room>>20)
		}
		if !comes {
			b.awaitRoom(s, 424*mib)
			a.proc.kill()
			b.awaitRoom(s, 500*mib)
			continue
		}
		n := &swapper{peerConn: a.proc.connect().register(wire.RegisterSwap | wire.RegisterReconnect), proc: a.proc, has: a.has}
		n.attach(0, gpuA, 0, 0)
		n.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: 600 * mib, Least: 600 * mib, Serial: 1}})
		n.want(wire.TypeReserved)
		n.moved(0, 0)
		n.awaitLess(s, 524*mib)
		n.out()
		b.awaitRoom(s, 500*mib)
	}
}

// After a restart the memory of a client that holds the GPU can be moved as before: others may
// reserve memory while it is not back.
func TestSwapRestartWhileHeld(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, swapping)
	a := newSwapper(t, s)
	a.allocates(600 * mib)
	a.request()
	a.in(a.granted())
	s.await("it has said so", func(*api.StatusResponse) bool { return a.status(s).ResidentBytes == 600*mib })
	s.stop()
	s = start(t, dir, swapping)
	newSwapper(t, s).allocates(500 * mib)
}

// Who has memory is recorded as soon as that can be, though nothing more changes.
func TestMembersCannotBeRecorded(t *testing.T) {
	dir := t.TempDir()
	block := memory.MembersPath(dir) + ".tmp"
	if err := os.Mkdir(block, 0o755); err != nil {
		t.Fatal(err)
	}
	s := start(t, dir, swapping)
	a := newSwapper(t, s)
	a.allocates(256 * mib)
	s.await("it is known that they are not recorded", func(*api.StatusResponse) (unrecorded bool) {
		if err := s.Ask(t.Context(), func() { unrecorded = s.memory.Members.Err != nil }); err != nil {
			t.Fatal(err)
		}
		return unrecorded
	})
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	s.await("it is recorded", func(*api.StatusResponse) bool {
		m, err := state.ReadRecord[memory.Members](memory.MembersPath(dir), memory.MembersVersion)
		return err == nil && len(m.GPUs[gpuA.UUID]) == 1
	})
}
