// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// swapping starts schedulers for GPUs of 1 GiB that swap.
func swapping(o *Options) {
	o.SwapMemory, o.SwapShare = 2*gib, 10
}

// swapper is a client that can move memory. What it has is what it says.
type swapper struct {
	*peerConn
	proc   *proc
	has    wire.Moved
	arenas []wire.Arena
	fds    []int
	rooms  int // ROOM frames
}

func newSwapper(t *testing.T, s *scheduler) *swapper {
	t.Helper()
	return newSwapperOn(t, s, gpuA)
}

func newSwapperOn(t *testing.T, s *scheduler, g node.Found) *swapper {
	t.Helper()
	p := newProc(t, s.dir, 0)
	w := &swapper{peerConn: p.connect().register(wire.RegisterSwap), proc: p}
	w.attach(0, g, 0, 0)
	w.moved(0, 0)
	return w
}

// next returns the next frame that is neither a NOTICE nor about room or the arena;
// those are taken note of.
func (w *swapper) next() wire.Frame {
	w.t.Helper()
	for {
		f, oob, err := w.recv()
		if err != nil {
			w.t.Fatal(err)
		}
		switch f.Type {
		case wire.TypeNotice:
		case wire.TypeRoom:
			w.rooms++
		case wire.TypeArena:
			fd := rights(w.t, oob)
			w.t.Cleanup(func() { unix.Close(fd) })
			w.fds = append(w.fds, fd)
			w.arenas = append(w.arenas, f.Arena)
		default:
			return f
		}
	}
}

func (w *swapper) want(typ wire.Type) wire.Frame {
	w.t.Helper()
	f := w.next()
	if f.Type != typ {
		w.t.Fatalf("got %v (code %d epoch %d), want %v", f.Type, f.Code, f.Epoch, typ)
	}
	return f
}

// reserve asks for memory in all, and returns the answer's code.
func (w *swapper) reserve(total uint64) uint32 {
	w.t.Helper()
	w.send(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: total, Least: total, Serial: 1}})
	return w.want(wire.TypeReserved).Code
}

// moved reports what it has.
func (w *swapper) moved(code uint32, epoch uint64) {
	w.t.Helper()
	w.send(wire.Frame{Type: wire.TypeMoved, Code: code, Epoch: epoch, Moved: w.has})
}

// allocates without having the GPU: nothing is on it yet.
func (w *swapper) allocates(bytes uint64) {
	w.t.Helper()
	if code := w.reserve(w.has.Resident + w.has.Away + bytes); code != wire.OK {
		w.t.Fatalf("reserve: code %d", code)
	}
	w.has.Away += bytes
	w.moved(0, 0)
}

// out has it move out what its room demands, and say so.
func (w *swapper) out() {
	w.t.Helper()
	if room := w.page.Room(0); w.has.Resident > room {
		n := w.has.Resident - room
		w.has.Resident -= n
		w.has.Away += n
		w.has.Out += n
	}
	w.moved(0, 0)
}

// in has it move in all that is away, as far as there is room, and say so.
func (w *swapper) in(epoch uint64) {
	w.t.Helper()
	n := min(w.has.Away, w.page.Room(0)-min(w.page.Room(0), w.has.Resident))
	w.has.Resident += n
	w.has.Away -= n
	w.has.In += n
	code := uint32(0)
	if w.has.Away == 0 {
		code = wire.MovedReady
	}
	w.moved(code, epoch)
}

// granted waits for a grant.
func (w *swapper) granted() uint64 {
	w.t.Helper()
	return w.want(wire.TypeGrant).Epoch
}

func (w *swapper) status(s *scheduler) *api.Client {
	w.t.Helper()
	for _, g := range s.status().Gpus {
		for _, c := range g.Clients {
			if c.Id == w.id {
				return c
			}
		}
	}
	w.t.Fatal("not in the status")
	return nil
}

// awaitRoom waits until the page has at least that room.
func (w *swapper) awaitRoom(s *scheduler, room uint64) {
	w.t.Helper()
	s.await("room", func(*api.StatusResponse) bool { return w.page.Room(0) >= room })
}

// awaitLess waits until the page has no more room than that.
func (w *swapper) awaitLess(s *scheduler, room uint64) {
	w.t.Helper()
	s.await("less room", func(*api.StatusResponse) bool { return w.page.Room(0) <= room })
}
