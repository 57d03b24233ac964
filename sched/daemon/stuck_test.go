// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"testing"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// While nothing can be recorded, a client that adds to what waits for a record is disconnected where
// that is much, and so is who comes then. Once it can, they are taken in, and granted; a grant that has
// ended before opens no gate.
func TestStuckOutboxDisconnects(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p := newProc(t, s.dir, 0)
	c := p.connect().register(0).attach(0, gpuA, 0, 0)
	broken := t.TempDir() + "/none"
	longest := 0
	s.inLoop(func() {
		s.Opts.RunDir, broken = broken, s.Opts.RunDir
		g, cl := s.FindGPU(gpuA.UUID), s.Clients[base.ClientID(c.id)]
		for conn := cl.Conn; !conn.Dead; longest = max(longest, len(g.Outbox)) { // it asks and guesses the epoch
			s.frame(conn, &wire.Frame{Type: wire.TypeRequest})
			all := g.Core.Snapshot(loop.Now()).Clients
			i := slices.IndexFunc(all, func(cs sched.ClientSnapshot) bool { return cs.ID == cl.ID })
			s.frame(conn, &wire.Frame{Type: wire.TypeRelease, Epoch: uint64(all[i].Epoch), Code: wire.ReleaseIdle})
		}
	})
	if longest > node.MaxOutbox+10 {
		t.Errorf("%d decisions waited", longest)
	}
	c.expectClosed()
	again := p.connect().register(0)
	again.send(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	again.expectClosed()
	s.inLoop(func() { s.Opts.RunDir = broken })
	s.await("the problem is over", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
	p.connect().register(0).attach(0, gpuA, 0, wire.AttachWant).granted()
	if n := len(s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_GRANT}}).Events); n > 2 { // the one that it had when its connection was cut
		t.Errorf("%d grants were noted", n)
	}
}
