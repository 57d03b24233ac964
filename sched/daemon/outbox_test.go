// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"slices"
	"testing"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// While nothing can be recorded, tenants that come, ask and go do not fill the scheduler's
// memory. Once it can, the one that waits is granted, and nobody is told of what was taken back.
func TestOutboxStaysShort(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	var g *gpu
	broken := t.TempDir() + "/none"
	s.inLoop(func() { g = s.findGPU(gpuA.UUID); s.opts.RunDir, broken = broken, s.opts.RunDir })
	const rounds = 3000
	c := newProc(t, s.dir, 0).connect().register(0).attach(0, gpuA, 0, 0)
	longest := 0
	s.inLoop(func() {
		for range rounds { // as a tenant that asks and guesses the epoch, as fast as it can
			s.step(g, sched.Request{Client: sched.ClientID(c.id)})
			i := slices.IndexFunc(g.core.Snapshot(now()).Clients, func(cs sched.ClientSnapshot) bool { return uint64(cs.ID) == c.id })
			s.step(g, sched.Release{Client: sched.ClientID(c.id), Epoch: g.core.Snapshot(now()).Clients[i].Epoch, Reason: sched.Reason(wire.ReleaseIdle)})
			longest = max(longest, len(g.outbox))
		}
	})
	if longest > shortOutbox {
		t.Errorf("the outbox had up to %d entries in %d rounds", longest, rounds)
	}
	c.request()
	s.await("it is to be granted", func(r *api.StatusResponse) bool {
		return stateOf(r, c.id) == api.ClientState_CLIENT_STATE_HOLDING && len(r.Problems) > 0
	})
	s.inLoop(func() { s.opts.RunDir = broken })
	f := c.expect(wire.TypeGrant)
	if c.page.Word(0) != uint32(f.Epoch) {
		t.Errorf("granted with epoch %d; its word is %d", f.Epoch, c.page.Word(0))
	}
	if n := len(s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_GRANT}}).Events); n != 1 {
		t.Errorf("%d grants were noted", n)
	}
	record, err := os.ReadFile(s.dir + "/state.json")
	if err != nil || len(record) == 0 {
		t.Errorf("state %q, %v", record, err)
	}
}
