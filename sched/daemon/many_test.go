// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"testing"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// A process on as many GPUs as a connection has channels holds, gives back and is listed on
// each of them.
func TestProcessOnAllGPUs(t *testing.T) {
	const gpus = wire.MaxChannels
	var all []node.Found
	for i := range gpus {
		g := gpuA
		g.Index, g.UUID = i, fmt.Sprintf("GPU-51600000-0000-4000-8000-%012d", i)
		all = append(all, g)
	}
	s := start(t, t.TempDir(), func(o *Options) {
		o.Quantum, o.List = sched.MinQuantum, func(context.Context) ([]node.Found, error) { return all, nil }
	})
	many := newProc(t, s.dir, 0).connect().registerOn(gpus, 0)
	epochs := make([]uint64, gpus)
	for i, g := range all {
		many.attach(uint16(i), g, 0, 0)
	}
	for i := range all {
		many.send(wire.Frame{Type: wire.TypeRequest, Channel: uint16(i)})
		f := many.expect(wire.TypeGrant)
		if int(f.Channel) != i || many.page.Word(uint16(i)) != uint32(f.Epoch) {
			t.Fatalf("asked for GPU %d, granted %+v; its word is %d", i, f, many.page.Word(uint16(i)))
		}
		epochs[i] = f.Epoch
	}
	for i := range all {
		other := newProc(t, s.dir, 0).connect().register(0).attach(0, all[i], 0, 0).request()
		if f := many.expect(wire.TypeRevoke); int(f.Channel) != i || f.Epoch != epochs[i] || many.page.Word(uint16(i)) != 0 {
			t.Fatalf("GPU %d is wanted, revoked is %+v; its word is %d", i, f, many.page.Word(uint16(i)))
		}
		many.send(wire.Frame{Type: wire.TypeRelease, Channel: uint16(i), Epoch: epochs[i], Code: wire.ReleaseRevoked})
		other.granted()
	}
	s.await("it is listed on each GPU, once", func(r *api.StatusResponse) bool {
		for _, g := range r.Gpus {
			n := 0
			for _, c := range g.Clients {
				if c.Id == many.id && c.Grants == 1 && c.State == api.ClientState_CLIENT_STATE_IDLE {
					n++
				}
			}
			if n != 1 || len(g.Clients) != 2 {
				return false
			}
		}
		return len(r.Gpus) == gpus
	})
}
