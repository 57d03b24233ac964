// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"sync/atomic"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/wire"
)

// With --swap-memory auto nothing of the host's memory is taken before somebody needs it. What there is
// then counts, and an eighth of the host's memory is left to others.
func TestSwapMemoryAuto(t *testing.T) {
	total := arena.Total()
	if total < 8*gib {
		t.Skip("this host has less than 8 GiB")
	}
	free := &atomic.Uint64{}
	free.Store(total/8 + 256*mib)
	s := start(t, t.TempDir(), func(o *Options) { o.SwapAuto, o.SwapShare = true, 10 }, func(d *Daemon) { d.memory.Pool.Host = hostOf{arena.Kernel{}, free} })
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	if code := b.reserve(600 * mib); code != wire.ErrArena {
		t.Errorf("while something else has the host's memory: code %d", code)
	}
	if g := s.status().Gpus[0].Swap; g.ArenaLimitBytes != 128*mib || g.ArenaUsedBytes != 0 || g.ArenaReadyBytes != 0 {
		t.Errorf("%v", g)
	}
	free.Store(total/8 + 4*gib)
	b.allocates(600 * mib)
	a.awaitArena(256 * mib)
	s.await("both have host memory", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaLimitBytes >= 2*gib })
}
