// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// ready starts schedulers that keep so much host memory ready.
func ready(bytes uint64) func(*Options) {
	return func(o *Options) { swapping(o); o.SwapReady = bytes }
}

// roomy has the host's memory be none of a test's business.
func roomy(d *Daemon) {
	d.arena.memory = func() (uint64, uint64, bool) { return 1 << 40, 0, true }
}

// quick is roomy, and has segments made of no memory: how long that takes is another
// test's business, where all processors are busy.
func quick(d *Daemon) {
	roomy(d)
	d.arena.make = empty
}

func empty(size uint64, step func(uint64) error) (segment, error) {
	if err := step(0); err != nil {
		return segment{}, err
	}
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	return segment{fd: os.NewFile(uintptr(fd), "test"), size: size}, err
}

// inLoop runs something where the scheduler's tables may be looked at.
func (s *scheduler) inLoop(f func()) {
	s.t.Helper()
	if err := s.ask(context.Background(), f); err != nil {
		s.t.Fatal(err)
	}
}

func (s *scheduler) awaitReady(bytes uint64) {
	s.t.Helper()
	s.await("host memory is ready", func(r *api.StatusResponse) bool {
		return len(r.Gpus) > 0 && r.Gpus[0].Swap.ArenaReadyBytes == bytes
	})
}

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

// outOfOrder has no segment made from now on; it ends with the scheduler.
func (s *scheduler) outOfOrder() {
	s.inLoop(func() {
		s.arena.make = func(_ uint64, _ func(uint64) error) (segment, error) {
			<-s.ended
			return segment{}, unix.ENOMEM
		}
	})
}

// What is ready is a client's as soon as that reserves beyond the GPU: nothing is made
// for it; and the figures of the status add up.
func TestReady(t *testing.T) {
	s := start(t, t.TempDir(), ready(512*mib), quick)
	s.awaitReady(512 * mib)
	s.outOfOrder()
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.awaitArena(256 * mib) // 176, rounded, and what is moved at a time
	b.awaitArena(256 * mib)
	if r := s.status().Gpus[0].Swap; r.ArenaUsedBytes != 512*mib || r.ArenaReadyBytes != 0 || r.ArenaBytes != 512*mib || r.ArenaLimitBytes != 2*gib {
		t.Errorf("status %v", r)
	}
	if a.arenas[0].Size != minSegment {
		t.Errorf("the first segment has %d MiB: that takes long to pin", a.arenas[0].Size>>20)
	}
}

// What was taken of the stock is made again, and what a client had is not given again.
func TestReadyOnce(t *testing.T) {
	small := gpuA
	small.MemoryBytes = 64 * mib
	s := start(t, t.TempDir(), func(o *Options) {
		ready(128 * mib)(o)
		o.List = func(context.Context) ([]GPU, error) { return []GPU{small}, nil }
	}, roomy)
	seen := map[uint64]bool{}
	for range 2 {
		s.awaitReady(128 * mib)
		a, b := newSwapper(t, s), newSwapper(t, s)
		a.allocates(40 * mib)
		b.allocates(40 * mib)
		a.awaitArena(64 * mib)
		b.awaitArena(64 * mib)
		for _, fd := range append(a.fds, b.fds...) { // open until the test's end: no number comes again
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil || uint64(st.Blocks)*512 < uint64(st.Size) || st.Size != 64*mib {
				t.Errorf("%d of %d bytes are there, %v", st.Blocks*512, st.Size, err)
			}
			if seen[st.Ino] {
				t.Error("a segment was given to two clients")
			}
			seen[st.Ino] = true
		}
		a.proc.kill()
		b.proc.kill()
		s.await("they are gone", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaUsedBytes == 0 })
	}
}

// Two GPUs, near to different NUMA nodes, each with half of the stock. When all of the
// limit is taken, what cannot be of use to a client makes way to what it lacks.
func TestReadyMakesWay(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { twoNodes(o); swapping(o); o.SwapMemory, o.SwapReady = 768*mib, 768*mib }, nodes(t), quick)
	s.awaitReady(768 * mib)
	s.inLoop(func() {
		for _, node := range []int{0, 1} {
			sum := uint64(0)
			for _, p := range s.arena.stock.ready {
				if p.node == node {
					sum += p.size
				}
			}
			if sum != 384*mib {
				t.Errorf("%d MiB for node %d", sum>>20, node)
			}
		}
	})
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	within := func(r *api.StatusResponse) bool {
		g := r.Gpus[0].Swap
		if g.ArenaUsedBytes+g.ArenaReadyBytes > 768*mib {
			t.Errorf("%d MiB are used and %d ready, of 768", g.ArenaUsedBytes>>20, g.ArenaReadyBytes>>20)
		}
		return g.ArenaBytes == 512*mib
	}
	s.await("they have theirs", within)
	a.awaitArena(256 * mib)
	b.awaitArena(256 * mib)
	// A third one may still reserve what the limit allows, to the last.
	c := newSwapper(t, s)
	if code := c.reserve(64 * mib); code != wire.OK {
		t.Errorf("code %d, though what is ready is not in use", code)
	}
	s.await("it has its part", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaBytes == 704*mib })
}

// twoNodes gives the GPUs places in the fake sysfs of nodes.
func twoNodes(o *Options) {
	a, b := gpuA, gpuB
	a.PCIBusID, b.PCIBusID = "0000:17:00.0", "0000:9b:00.0"
	o.List = func(context.Context) ([]GPU, error) { return []GPU{a, b}, nil }
}

func nodes(t *testing.T) func(*Daemon) {
	dir := t.TempDir()
	for bus, node := range map[string]string{"0000:17:00.0": "0\n", "0000:9b:00.0": "1\n", "0000:05:00.0": "-1\n", "0000:06:00.0": "what\n"} {
		at := filepath.Join(dir, "bus/pci/devices", bus)
		if err := os.MkdirAll(at, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(at, "numa_node"), []byte(node), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return func(d *Daemon) { d.sysfs = dir }
}

func TestNUMANode(t *testing.T) {
	d := &Daemon{}
	nodes(t)(d)
	for bus, want := range map[string]int{
		"0000:17:00.0": 0, "0000:9b:00.0": 1, "0000:05:00.0": noNode, "0000:06:00.0": noNode, "0000:07:00.0": noNode, "": noNode, "../../../0000:9b:00.0": noNode,
	} {
		if got := numaNode(d.sysfs, bus); got != want {
			t.Errorf("%q: node %d, want %d", bus, got, want)
		}
	}
}

// A client is not held up by what is being made for nobody, and that stops if it is of
// no use to it.
func TestReadyYields(t *testing.T) {
	var released atomic.Bool
	s := start(t, t.TempDir(), func(o *Options) { twoNodes(o); ready(512 * mib)(o) }, func(d *Daemon) {
		// Clients are of the GPU of node 1, and the first piece is made for node 0.
		nodes(t)(d)
		roomy(d)
		d.arena.make = func(size uint64, step func(uint64) error) (segment, error) {
			for released.Load() || step(0) == nil {
				if released.Load() {
					return empty(size, step)
				}
				runtime.Gosched()
			}
			return segment{}, unix.ECANCELED
		}
	})
	s.awaitGPUs()
	var first *piece
	s.inLoop(func() {
		first = s.arena.stock.making[0]
		s.arena.make = empty
	})
	if first.node != 0 {
		t.Fatalf("node %d", first.node)
	}
	a, b := newSwapperOn(t, s, gpuB), newSwapperOn(t, s, gpuB)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.awaitArena(256 * mib)
	b.awaitArena(256 * mib)
	s.await("what is made for the other node is given up", func(*api.StatusResponse) bool {
		select {
		case <-first.gone:
			return true
		default:
			return false
		}
	})
	released.Store(true) // on machines of many processors more is being made
	s.awaitReady(512 * mib)
}

// The stock is only made of what the host can spare, shrinks when it cannot any more, and
// is host memory that a reservation can count on.
func TestReadyAndHostMemory(t *testing.T) {
	var host atomic.Uint64 // what there would be without the stock and what clients have
	host.Store(stockReserve + 127*mib)
	s := start(t, t.TempDir(), ready(512*mib), func(d *Daemon) {
		d.arena.make = empty
		d.arena.memory = func() (uint64, uint64, bool) { return less(host.Load(), d.arena.used+d.arena.stock.held()), 0, true }
	})
	s.awaitReady(64 * mib)
	s.inLoop(func() {
		st := &s.arena.stock
		if len(st.making) != 0 || !st.paused || !st.look.Planned() {
			t.Errorf("making %d, paused %v", len(st.making), st.paused)
		}
	})
	look := func(free uint64) { // as after stockPause
		host.Store(free)
		s.inLoop(s.lookAtStock)
	}
	look(2 * gib)
	s.awaitReady(512 * mib)
	look(512*mib + hostReserve - 150*mib)
	s.awaitReady(320 * mib) // three of 64 are given back
	s.await("it is with the host", func(*api.StatusResponse) bool {
		held := uint64(0)
		s.inLoop(func() { held = s.arena.stock.held() })
		return held == 320*mib
	})
	s.inLoop(s.lookAtStock) // that suffices, and is no reason to make more
	s.awaitReady(320 * mib)
	look(2 * gib)
	s.awaitReady(512 * mib)

	// Without what is ready there would be no host memory for these.
	host.Store(512*mib + hostReserve)
	s.outOfOrder()
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.awaitArena(256 * mib)
	b.awaitArena(256 * mib)
	if code := b.reserve(1000 * mib); code != wire.ErrArena {
		t.Errorf("more than the host has: code %d", code)
	}
}

// Where the host could not have both, what is ready for others makes way to what a client
// was promised; that is made when the host has it.
func TestReadyMakesWayOnHost(t *testing.T) {
	var host atomic.Uint64
	host.Store(2 * gib)
	var made atomic.Uint64
	var others []*piece
	s := start(t, t.TempDir(), func(o *Options) { twoNodes(o); ready(256 * mib)(o) }, nodes(t), func(d *Daemon) {
		d.arena.make = empty
		d.arena.memory = func() (uint64, uint64, bool) { return less(host.Load(), d.arena.used+d.arena.stock.held()), 0, true }
	})
	s.awaitReady(256 * mib)
	s.inLoop(func() {
		for _, p := range s.arena.stock.ready {
			if p.node == 1 {
				others = append(others, p)
			}
		}
		s.arena.make = func(size uint64, step func(uint64) error) (segment, error) {
			taken := made.Add(size)
			for _, p := range others {
				select {
				case <-p.gone:
				default:
					taken += p.size
				}
			}
			if taken > (256+256-128)*mib {
				t.Errorf("%d MiB are taken beside what was ready for the GPU: the host does not have that", taken>>20)
			}
			return empty(size, step)
		}
		host.Store((256+256)*mib + hostReserve)
	})
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	a.awaitArena(256 * mib)
	b.awaitArena(256 * mib)
	if n := s.status().Gpus[0].Swap.ArenaReadyBytes; n != 0 {
		t.Errorf("%d MiB are still ready", n>>20)
	}
	s.inLoop(func() { s.arena.make = empty }) // for when the clients end
}

// A client that grows for long, by little at a time, gets no more segments than a shim
// keeps; and what it gets beyond its need is not taken from others.
func TestManySegments(t *testing.T) {
	const size = 141 * gib
	big := gpuA
	big.MemoryBytes = size
	s := start(t, t.TempDir(), func(o *Options) {
		ready(64 * gib)(o)
		o.SwapMemory = 2*size + 2*gib
		o.List = func(context.Context) ([]GPU, error) { return []GPU{big}, nil }
	}, quick)
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(size)
	for total := uint64(64 * mib); total <= size; total += 64 * mib {
		if code := b.reserve(total); code != wire.OK {
			t.Fatalf("%d MiB: code %d", total>>20, code)
		}
	}
	r := s.await("all have theirs", func(r *api.StatusResponse) bool {
		g := r.Gpus[0].Swap
		return g.ArenaBytes >= 2*size && g.ArenaBytes == g.ArenaUsedBytes
	}).Gpus[0].Swap
	if r.ArenaUsedBytes > r.ArenaLimitBytes {
		t.Errorf("status %v", r)
	}
	s.inLoop(func() {
		for _, m := range s.order[0].swap.members {
			if m.arena.segments > 256 {
				t.Errorf("%d segments, of %d MiB", m.arena.segments, m.arena.given>>20)
			}
		}
	})
}

// What is taken of the stock, and in which order it is made.
func TestPick(t *testing.T) {
	s := &stock{}
	for _, size := range []uint64{64, 256, 128, 1024} {
		s.ready = append(s.ready, &piece{node: 1, size: size * mib})
	}
	s.ready = append(s.ready, &piece{node: 0, size: 512 * mib})
	for _, c := range []struct {
		node                   int
		has, least, most, want uint64 // MiB
	}{
		{1, 0, 0, 4096, 64},
		{1, 128, 0, 4096, 128},
		{1, 512, 0, 4096, 256},
		{1, 8192, 0, 4096, 1024},
		{1, 8192, 0, 192, 128},
		{1, 512, 256, 256, 256},
		{1, 0, 512, 4096, 1024},
		{0, 0, 0, 4096, 512},
		{0, 0, 0, 256, 0},
		{1, 0, 0, 30, 0},
		{noNode, 0, 0, 4096, 0},
	} {
		got := uint64(0)
		if p := s.pick(c.node, c.has*mib, c.least*mib, c.most*mib); p != nil {
			got = p.size / mib
		}
		if got != c.want {
			t.Errorf("%+v: %d MiB", c, got)
		}
	}

	s = &stock{}
	number := map[int]int{}
	for target := uint64(60 * gib); ; {
		node, size := s.next([]int{0, 1}, target)
		if size == 0 {
			break
		}
		if len(s.ready) < 2 && size != minSegment {
			t.Errorf("the first one has %d MiB", size>>20)
		}
		s.ready = append(s.ready, &piece{node: node, size: size})
		number[node]++
	}
	if s.bytes() != 60*gib || number[0] != number[1] || number[0] > 64 {
		t.Errorf("%d MiB in %v segments", s.bytes()>>20, number)
	}
}

// Memory is taken of the node that was asked for, where the kernel lets us say so, and the
// thread is afterwards as it was. A node that does not exist keeps nothing from being made.
func TestPlaced(t *testing.T) {
	runtime.LockOSThread() // that nicely uses, then
	defer runtime.UnlockOSThread()
	policy := func() (mode int32, nodes uint64) {
		var mask [16]uint64
		if _, _, e := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), uintptr(unsafe.Pointer(&mask)), 1024, 0, 0, 0); e != 0 {
			t.Skipf("get_mempolicy: %v", e)
		}
		return mode, mask[0]
	}
	mode, nodes := policy()
	err := nicely(0, func() {
		if _, err := newSegment(2*mib, func(uint64) error { return nil }); err != nil {
			t.Error(err)
		}
		if mode, nodes := policy(); mode != unix.MPOL_PREFERRED || nodes != 1 {
			t.Errorf("policy %d of nodes %#x, want %d of node 0", mode, nodes, unix.MPOL_PREFERRED)
		}
	})
	if err != nil {
		t.Skipf("not on this machine: %v", err)
	}
	if m, n := policy(); m != mode || n != nodes {
		t.Errorf("policy %d of nodes %#x afterwards, it was %d of %#x", m, n, mode, nodes)
	}
	did := false
	err = nicely(1000, func() { did = true })
	if m, n := policy(); err == nil || !did || m != mode || n != nodes {
		t.Errorf("of node 1000: %v, done %v; policy %d of nodes %#x", err, did, m, n)
	}
}

// A scheduler that makes its stock ends at once, and keeps nothing.
func TestReadyEnds(t *testing.T) {
	s := start(t, t.TempDir(), ready(2*gib), func(d *Daemon) {
		roomy(d)
		d.arena.make = func(size uint64, step func(uint64) error) (segment, error) {
			if size > minSegment { // the first ones do get ready
				for step(0) == nil {
					runtime.Gosched()
				}
				return segment{}, unix.ECANCELED
			}
			return empty(size, step)
		}
	})
	s.awaitReady(smallReady * minSegment)
	var all []*piece
	s.inLoop(func() { all = append(all, s.arena.stock.ready...) })
	s.stop()
	for _, p := range all {
		if err := p.segment.fd.Close(); err == nil {
			t.Error("a segment was still open")
		}
	}
}
