// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/memory"
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

// silentHost does not tell what it has free.
type silentHost struct{ arena.Kernel }

func (silentHost) Free() (uint64, uint64, bool) { return 0, 0, false }

// Where the host has too little memory, or does not tell, nothing is swapped: no error, and the reason is said.
func TestSwapMemoryAutoWithoutHostMemory(t *testing.T) {
	for _, c := range []struct {
		host  arena.Host
		total uint64
		bytes uint64
		why   string
	}{
		{arena.Kernel{}, gib, 448 * mib, ""},
		{arena.Kernel{}, 100 * mib, 0, "has 100 MiB of memory only"},
		{arena.Kernel{}, 0, 0, "does not tell"},
		{silentHost{}, gib, 0, "does not tell"},
	} {
		if bytes, why := memory.AutoSwapMemory(c.host, c.total); bytes != c.bytes || (why == "") != (c.why == "") || !strings.Contains(why, c.why) {
			t.Errorf("of %d MiB: %d MiB, %q", c.total/mib, bytes/mib, why)
		}
	}
}
