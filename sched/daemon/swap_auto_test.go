// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// With --swap-memory auto nothing of the host's memory is taken before somebody needs it.
func TestSwapMemoryAuto(t *testing.T) {
	if pages, _, known := (arena.Kernel{}).Free(); !known || memory.HalfOfSpare(pages, arena.Total()) < gib {
		t.Skip("this host has less than 2 GiB to spare")
	}
	s := start(t, t.TempDir(), func(o *Options) { o.SwapAuto, o.SwapShare = true, 10 })
	g := s.status().Gpus[0].Swap
	if g == nil || g.ArenaLimitBytes < gib/2 || g.ArenaLimitBytes > arena.Total()/2 || g.ArenaUsedBytes != 0 || g.ArenaReadyBytes != 0 {
		t.Fatalf("of %d MiB: %v", arena.Total()>>20, g)
	}
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.awaitArena(256 * mib)
}

// Host memory that processes have kept over a restart of the scheduler counts as free, so
// that --swap-memory auto is no less after the restart; that of dead processes does not.
func TestHeldBefore(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, swapping)
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	s.await("both have host memory", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaBytes == 512*mib })
	s.stop()
	held := func(bootID string, find func(peer.Process) (*peer.Peer, error)) uint64 {
		before, err := memory.ReadMembers(&s.Opts, bootID)
		if err != nil {
			t.Fatal(err)
		}
		return memory.HeldBefore(before, find) >> 20
	}
	if n := held(s.BootID, s.Peers.Find); n != 512 {
		t.Errorf("%d MiB", n)
	}
	if n := held("another boot", s.Peers.Find); n != 0 {
		t.Errorf("%d MiB since another boot", n)
	}
	a.proc.kill()
	if n := held(s.BootID, s.Peers.Find); n != 256 {
		t.Errorf("%d MiB, with one dead", n)
	}
	if n := held(s.BootID, cannotSay); n != 512 {
		t.Errorf("%d MiB, where nobody can say who is dead", n)
	}
}
