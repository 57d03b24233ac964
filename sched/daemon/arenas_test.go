// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/wire"
)

// awaitArena waits for segments of so much in all.
func (w *swapper) awaitArena(bytes uint64) {
	w.t.Helper()
	sum := uint64(0)
	for _, a := range w.arenas {
		sum += a.Size
	}
	for sum < bytes {
		f, oob, err := w.recv()
		if err != nil {
			w.t.Fatal(err)
		}
		if f.Type == wire.TypeArena {
			fd := rights(w.t, oob)
			w.t.Cleanup(func() { unix.Close(fd) })
			w.fds, w.arenas = append(w.fds, fd), append(w.arenas, f.Arena)
			sum += f.Arena.Size
		}
	}
	if sum != bytes {
		w.t.Errorf("%d MiB of the arena, want %d", sum>>20, bytes>>20)
	}
}

// plenty is a host with any amount of memory, which makes segments of none.
type plenty struct{}

func (plenty) Free() (pages, huge uint64, ok bool) { return 1 << 40, 0, true }
func (plenty) Make(size uint64, _ func(uint64) error) (arena.Segment, error) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	return arena.Segment{File: os.NewFile(uintptr(fd), "test"), Size: size}, err
}

// What is ready is a client's as soon as that reserves beyond the GPU; the figures of the
// status add up; and when the clients have ended all of it is made again.
func TestReady(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.SwapReady = 512 * mib },
		func(d *Daemon) { d.memory.OpenArena(plenty{}, 4096, 4096) })
	ready := func(used, ready, clients uint64) func(*api.StatusResponse) bool {
		return func(r *api.StatusResponse) bool {
			if len(r.Gpus) == 0 {
				return false
			}
			g := r.Gpus[0].Swap
			return g.ArenaUsedBytes == used && g.ArenaReadyBytes == ready && g.ArenaBytes == clients && g.ArenaLimitBytes == 2*gib
		}
	}
	s.await("host memory is ready", ready(0, 512*mib, 0))
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.awaitArena(256 * mib) // 176, rounded, and what is moved at a time
	b.awaitArena(256 * mib)
	s.await("the stock is full again", ready(512*mib, 512*mib, 512*mib))
	a.proc.kill()
	b.proc.kill()
	s.await("they are gone", ready(0, 512*mib, 0))
}
