// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What is ready is a client's as soon as the client needs it: nothing is made for it.
func TestReady(t *testing.T) {
	host := roomy()
	f := start(t, 2*gib, 512*mib, host, 0)
	f.awaitReady(512 * mib)
	host.set(f.none)
	a, b := f.client(0, 256*mib), f.client(0, 256*mib)
	a.await(256 * mib)
	b.await(256 * mib)
	f.inLoop(func() {
		if f.pool.Used() != 512*mib || f.pool.Ready() != 0 {
			t.Errorf("%d MiB used, %d ready", f.pool.Used()>>20, f.pool.Ready()>>20)
		}
	})
	if a.got[0].Size != MinSegment {
		t.Errorf("the first segment has %d MiB: that takes long to pin", a.got[0].Size>>20)
	}
}

// What was taken of the stock is made again, and what a client had is not given again.
// Each segment is there, and has no other client.
func TestReadyOnce(t *testing.T) {
	host := roomy()
	host.make = newSegment
	f := start(t, 2*gib, 128*mib, host, 0)
	seen := map[uint64]bool{}
	var open []int // until the test's end: no number comes again
	defer func() {
		for _, fd := range open {
			unix.Close(fd)
		}
	}()
	for range 2 {
		f.awaitReady(128 * mib)
		a, b := f.client(0, 64*mib), f.client(0, 64*mib)
		a.await(64 * mib)
		b.await(64 * mib)
		f.inLoop(func() {
			for _, s := range append(slices.Clone(a.got), b.got...) {
				fd, err := unix.Dup(int(s.File.Fd()))
				if err != nil {
					t.Fatal(err)
				}
				open = append(open, fd)
				var st unix.Stat_t
				if err := unix.Fstat(fd, &st); err != nil || uint64(st.Blocks)*512 < s.Size || uint64(st.Size) != s.Size {
					t.Errorf("%d of %d bytes are there, %v", st.Blocks*512, st.Size, err)
				}
				if seen[st.Ino] {
					t.Error("a segment was given to two clients")
				}
				seen[st.Ino] = true
			}
			a.Drop()
			b.Drop()
			f.pool.Prepare()
			if f.pool.Used() != 0 {
				t.Errorf("%d MiB are used by nobody", f.pool.Used()>>20)
			}
		})
		f.await("their memory is the kernel's", func() bool {
			for _, fd := range open {
				var st unix.Stat_t
				if unix.Fstat(fd, &st) != nil || st.Blocks != 0 {
					return false
				}
			}
			return true
		})
	}
}

// Two GPUs, near to different NUMA nodes, each with half of the stock. When all of the
// limit is taken, what cannot be of use to a client makes way to what it lacks.
func TestReadyMakesWay(t *testing.T) {
	f := start(t, 768*mib, 768*mib, roomy(), 0, 1)
	f.awaitReady(768 * mib)
	f.inLoop(func() {
		for _, node := range []int{0, 1} {
			sum := uint64(0)
			for _, p := range f.pool.stock.ready {
				if p.node == node {
					sum += p.size
				}
			}
			if sum != 384*mib {
				t.Errorf("%d MiB for node %d", sum>>20, node)
			}
		}
	})
	a, b := f.client(0, 256*mib), f.client(0, 256*mib)
	within := func() bool {
		if f.pool.Used()+f.pool.stock.bytes() > 768*mib {
			t.Errorf("%d MiB are used and %d in the stock, of 768", f.pool.Used()>>20, f.pool.stock.bytes()>>20)
		}
		return a.sum() == 256*mib && b.sum() == 256*mib
	}
	f.await("they have theirs", within)
	// A third one gets what the limit allows, to the last.
	c := f.client(0, 256*mib)
	c.await(256 * mib)
	f.inLoop(func() { within() })
}

func TestNUMANode(t *testing.T) {
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
	for bus, want := range map[string]int{
		"0000:17:00.0": 0, "0000:9b:00.0": 1, "0000:05:00.0": NoNode, "0000:06:00.0": NoNode, "0000:07:00.0": NoNode, "": NoNode, "../../../0000:9b:00.0": NoNode,
	} {
		if got := NUMANode(dir, bus); got != want {
			t.Errorf("%q: node %d, want %d", bus, got, want)
		}
	}
}

// A client is not held up by what is being made for nobody, and that stops if it is of
// no use to the client.
func TestReadyYields(t *testing.T) {
	var released atomic.Bool
	var begun atomic.Int32
	host := roomy()
	host.make = func(size uint64, step func(uint64) error) (Segment, error) {
		begun.Add(1)
		for released.Load() || step(0) == nil {
			if released.Load() {
				return empty(size, step)
			}
			runtime.Gosched()
		}
		return Segment{}, unix.ECANCELED
	}
	// Clients are of the GPU of node 1, and the first piece is made for node 0.
	f := start(t, 2*gib, 512*mib, host, 0, 1)
	var first *piece
	f.inLoop(func() { first = f.pool.stock.making[0] })
	// Else one that begins later is made at once, and clients lack nothing.
	f.await("all that is made has begun", func() bool { return int(begun.Load()) == len(f.pool.stock.making) })
	host.set(empty)
	if first.node != 0 {
		t.Fatalf("node %d", first.node)
	}
	a, b := f.client(1, 256*mib), f.client(1, 256*mib)
	a.await(256 * mib)
	b.await(256 * mib)
	select {
	case <-first.gone:
	case <-time.After(patience):
		t.Fatal("what is made for the other node is not given up")
	}
	released.Store(true) // on machines of many processors more is being made
	f.awaitReady(512 * mib)
}

// limited has so much memory beside what the Pool has.
func limited(host *atomic.Uint64) *testHost {
	h := &testHost{make: empty}
	h.free = func() (uint64, uint64, bool) {
		return less(host.Load(), h.pool.used+h.pool.stock.held()), 0, true
	}
	return h
}

// The stock is only made of what the host can spare, and shrinks when it cannot any more.
func TestReadyAndHostMemory(t *testing.T) {
	var host atomic.Uint64
	from := limited(&host)
	f := start(t, 2*gib, 512*mib, from, 0)
	look := func(free uint64) { // as after stockPause
		host.Store(free)
		f.inLoop(f.pool.lookAtStock)
	}
	look(stockReserve + 127*mib)
	f.awaitReady(64 * mib)
	f.inLoop(func() {
		st := &f.pool.stock
		if len(st.making) != 0 || !st.paused || !st.look.Planned() {
			t.Errorf("making %d, paused %v", len(st.making), st.paused)
		}
	})
	look(2 * gib)
	f.awaitReady(512 * mib)
	look(512*mib + HostReserve - 150*mib)
	f.awaitReady(320 * mib) // three of 64 are given back
	f.await("it is with the host", func() bool { return f.pool.Held() == 320*mib })
	f.inLoop(f.pool.lookAtStock) // that suffices, and is no reason to make more
	f.awaitReady(320 * mib)
	look(2 * gib)
	f.awaitReady(512 * mib)

	// Without what is ready there would be no host memory for these.
	host.Store(512*mib + HostReserve)
	from.set(f.none)
	a, b := f.client(0, 256*mib), f.client(0, 256*mib)
	a.await(256 * mib)
	b.await(256 * mib)
}

// What nobody needs yet leaves a part of the host's memory to others.
func TestReadyLeavesThePartOfOthers(t *testing.T) {
	var host atomic.Uint64
	f := start(t, 4*gib, 512*mib, limited(&host), 0)
	look := func(free uint64) {
		host.Store(free)
		f.inLoop(func() {
			f.pool.Leave = 2 * gib
			f.pool.lookAtStock()
		})
	}
	look(2*gib + 127*mib)
	f.awaitReady(64 * mib)
	look(4 * gib)
	f.awaitReady(512 * mib)
	look(512*mib + gib - 150*mib) // others need it now
	f.awaitReady(320 * mib)
}

// Where the host could not have both, what is ready for others makes way to what a client
// needs; that is made when the host has it.
func TestReadyMakesWayOnHost(t *testing.T) {
	var host, made atomic.Uint64
	host.Store(2 * gib)
	from := limited(&host)
	f := start(t, 2*gib, 256*mib, from, 0, 1)
	f.awaitReady(256 * mib)
	var others []*piece
	f.inLoop(func() {
		for _, p := range f.pool.stock.ready {
			if p.node == 1 {
				others = append(others, p)
			}
		}
	})
	from.set(func(size uint64, step func(uint64) error) (Segment, error) {
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
		return empty(size, func(uint64) error { return nil }) // the steps ask for what the loop only knows
	})
	host.Store((256+256)*mib + HostReserve)
	a, b := f.client(0, 256*mib), f.client(0, 256*mib)
	a.await(256 * mib)
	b.await(256 * mib)
	f.awaitReady(0)
}

// What is ready for another NUMA node makes way where the host has memory left, but no more than its floor.
func TestReadyMakesWayForTheFloor(t *testing.T) {
	var pages atomic.Uint64
	pages.Store(32 * gib)
	host := roomy()
	host.free = func() (uint64, uint64, bool) { return pages.Load(), 0, true }
	f := start(t, 4*gib, gib, host, 0, 1)
	f.awaitReady(gib)
	f.inLoop(func() { f.pool.Floor, f.pool.Leave = 2*gib, 4*gib })
	a := f.client(0, 600*mib) // all that is ready for its node
	a.await(600 * mib)
	pages.Store(2*gib + 16*mib) // somebody else has the rest
	a.need(2 * gib)
	for range 20 {
		f.inLoop(func() {
			if at, ok := f.timers.Next(); ok {
				f.timers.Run(at)
			}
		})
	}
	f.inLoop(func() {
		if has, ready := a.Bytes(), f.pool.Ready(); has < 2*gib && ready >= 100*mib {
			t.Errorf("the client has %d of 2048 MiB, and %d MiB are ready for nobody", has>>20, ready>>20)
		}
	})
}

// What comes back out of a file is above the floor.
func TestFiledMakesWayForTheFloor(t *testing.T) {
	var pages atomic.Uint64
	pages.Store(32 * gib)
	host := roomy()
	host.free = func() (uint64, uint64, bool) { return pages.Load(), 0, true }
	f := start(t, 4*gib, 512*mib, host, 0)
	a := f.client(0, 512*mib)
	a.await(512 * mib)
	f.inLoop(func() { a.SetFiled(true) })
	f.awaitReady(512 * mib)
	f.inLoop(func() {
		f.pool.Floor = 2 * gib
		pages.Store(2*gib + 512*mib) // as much as comes back
		a.SetFiled(false)
		if f.pool.Ready() != 512*mib {
			t.Errorf("%d of 512 MiB are ready where the host has enough", f.pool.Ready()>>20)
		}
		a.SetFiled(true)
		pages.Store(2 * gib)
		a.SetFiled(false)
	})
	f.inLoop(func() {
		if n := f.pool.Ready(); n != 0 {
			t.Errorf("%d MiB are ready that the host needs", n>>20)
		}
	})
}

// When a segment cannot be made, that is said, and tried again after a pause only.
func TestMakingFails(t *testing.T) {
	host := roomy()
	var tries atomic.Int64
	host.make = func(uint64, func(uint64) error) (Segment, error) {
		tries.Add(1)
		return Segment{}, unix.ENOMEM
	}
	f := start(t, 2*gib, 0, host, 0)
	a := f.client(0, 64*mib)
	f.await("it is said", func() bool { return f.pool.Err() != nil })
	a.need(128 * mib)
	f.inLoop(func() {
		if n := tries.Load(); n != 1 || a.Bytes() != 0 || f.pool.Used() != 0 {
			t.Errorf("tried %d times; %d bytes counted", n, a.Bytes())
		}
	})
	host.set(empty)
	f.again()
	a.await(128 * mib)
	f.inLoop(func() {
		if f.pool.Err() != nil {
			t.Errorf("still said: %v", f.pool.Err())
		}
	})
}

// Since a client was promised host memory somebody else may have taken it: it is not made below the floor, so that
// nobody is killed for it, but of huge pages that are reserved, and when the host has it again.
func TestMakingLeavesTheFloor(t *testing.T) {
	var pages, huge atomic.Uint64
	host := roomy()
	host.free = func() (uint64, uint64, bool) { return pages.Load(), huge.Load(), true }
	f := start(t, 2*gib, 0, host, 0)
	f.inLoop(func() { f.pool.Floor = HostReserve })
	pages.Store(HostReserve + 64*mib - 1)
	a := f.client(0, 64*mib)
	f.await("it is said", func() bool { return f.pool.Err() != nil && a.Bytes() == 0 })
	pages.Store(HostReserve + 64*mib)
	f.again()
	a.await(64 * mib)
	pages.Store(0)
	huge.Store(64 * mib)
	a.need(128 * mib)
	a.await(128 * mib)
	f.inLoop(func() {
		if f.pool.Err() != nil {
			t.Errorf("still said: %v", f.pool.Err())
		}
	})
}

// filling is a host that has so many bytes, of which a segment takes one half after the other. at is called when it was
// asked whether to take a half, and once the first one is taken.
func filling(host, taken *atomic.Uint64, at func()) *testHost {
	return &testHost{
		free: func() (uint64, uint64, bool) { return less(host.Load(), taken.Load()), 0, true },
		make: func(size uint64, step func(uint64) error) (Segment, error) {
			for _, filled := range []uint64{0, size / 2} {
				if filled > 0 {
					at()
				}
				err := step(filled)
				at()
				if err != nil {
					taken.Add(-filled)
					return Segment{}, err
				}
				taken.Add(size / 2)
			}
			return empty(size, func(uint64) error { return nil })
		},
	}
}

// retried waits until the host has too little for what clients need, and nothing is being made.
func (f *fixture) retried() {
	f.t.Helper()
	f.await("it is to be tried again", func() bool { return f.pool.jobs == 0 && f.pool.retry.Planned() && f.pool.Err() != nil })
}

// again is for when it is to be tried again.
func (f *fixture) again() {
	f.t.Helper()
	f.inLoop(func() {
		at, ok := f.timers.Next()
		if !ok {
			f.t.Error("it is not tried again")
		}
		f.timers.Run(at)
	})
}

// Of what a client was promised and the host does not have any more, it gets what the host has; so does another
// client whose next segment is smaller.
func TestWhatFitsIsMade(t *testing.T) {
	var host, taken atomic.Uint64
	host.Store(HostReserve + 500*mib)
	f := start(t, 4*gib, 0, filling(&host, &taken, func() {}), 0)
	f.inLoop(func() { f.pool.Floor = HostReserve })
	a := f.client(0, gib)
	f.retried()
	f.inLoop(func() {
		if a.Given() != 448*mib || f.pool.Used() != a.Given() {
			t.Errorf("the client has %d MiB of the 500 that there are, %d are counted", a.Given()>>20, f.pool.Used()>>20)
		}
		a.Client.segments = someSegments // its next one is large: a shim keeps so many only
	})
	host.Add(100 * mib)
	b := f.client(0, 128*mib)
	f.again()
	b.await(128 * mib)
	f.retried()
	host.Store(4 * gib)
	f.again()
	f.await("it has all", func() bool { return a.Given() >= gib && f.pool.Err() == nil && !f.pool.retry.Planned() })
}

// What is being made at the same time leaves the floor to the host together: else each one fails, and each one again.
func TestMakersTogetherLeaveTheFloor(t *testing.T) {
	const has, room = 512 * mib, 600 * mib
	var host, taken atomic.Uint64
	host.Store(HostReserve + room)
	var f *fixture
	var came atomic.Int32
	both := [3]chan struct{}{make(chan struct{}), make(chan struct{}), make(chan struct{})} // the first two are there, again and again
	from := filling(&host, &taken, func() {
		n := came.Add(1) - 1
		if n%2 == 1 && int(n) < 2*len(both) {
			close(both[n/2])
		}
		if int(n) < 2*len(both) {
			select {
			case <-both[n/2]:
			case <-f.ended:
			}
		}
	})
	f = start(t, 8*gib, 0, from, 0)
	clients := []*owner{f.client(0, 0), f.client(0, 0)}
	f.inLoop(func() {
		f.pool.Floor, f.pool.fillers = HostReserve, 2
		for _, c := range clients {
			c.given, c.needs = has, 3*has
			f.pool.used += has
		}
		f.pool.Prepare()
	})
	f.retried()
	f.inLoop(func() {
		if made := clients[0].sum() + clients[1].sum(); made != room/MinSegment*MinSegment {
			t.Errorf("%d MiB were made of the %d that there are", made>>20, uint64(room)>>20)
		}
	})
}

// A failure is forgotten when nobody needs what could not be made: else clients would be refused
// more for ever, and nobody would find out that it can be had again.
func TestFailureIsForgotten(t *testing.T) {
	host := roomy()
	host.make = func(uint64, func(uint64) error) (Segment, error) { return Segment{}, unix.ENOMEM }
	f := start(t, 2*gib, 0, host, 0)
	a := f.client(0, 64*mib)
	f.await("it is said", func() bool { return f.pool.Err() != nil })
	f.again()
	f.await("it has failed again", func() bool { return f.pool.jobs == 0 && f.pool.retry.Planned() })
	f.inLoop(func() {
		if f.pool.Err() == nil {
			t.Error("it is not said while somebody needs it")
		}
		a.Drop()
	})
	f.again()
	f.inLoop(func() {
		if err := f.pool.Err(); err != nil {
			t.Errorf("still said, and nobody needs it: %v", err)
		}
	})
}

// A client that is away gets its segments when it is back, each once.
func TestClientIsAway(t *testing.T) {
	f := start(t, 2*gib, 0, roomy(), 0)
	a := &owner{f: f, away: true, needs: 256 * mib}
	f.inLoop(func() {
		a.Client = f.gpus[0].AddClient(a)
		f.gpus[0].Prepare()
	})
	f.await("they are made", func() bool { return a.Given() == 256*mib })
	f.inLoop(func() {
		if len(a.got) != 0 || len(a.unsent) == 0 {
			t.Errorf("%d sent, %d to be sent", len(a.got), len(a.unsent))
		}
		a.away = false
		a.Flush()
		a.Flush()
		if a.sum() != 256*mib {
			t.Errorf("it got %d MiB", a.sum()>>20)
		}
	})
}

// The first segment is soon there, and the last ones are there together.
func TestSegments(t *testing.T) {
	const need = 64 * gib
	n, largest := 0, uint64(0)
	for has := uint64(0); has < need; n++ {
		size := nextSegment(has, need-has, fillers())
		switch {
		case size == 0 || size%MinSegment != 0 || size > MaxSegment || has+size > need:
			t.Fatalf("%d MiB after %d", size>>20, has>>20)
		case n == 0 && size != MinSegment:
			t.Errorf("the first one has %d MiB", size>>20)
		case has+size == need && size > max(need/uint64(fillers()), tailSegment):
			t.Errorf("the last one has %d MiB", size>>20)
		}
		has, largest = has+size, max(largest, size)
	}
	if largest != MaxSegment || n > 128 { // shims keep 256
		t.Errorf("%d segments, of %d MiB at most", n, largest>>20)
	}
}

// A client that grows for long, by little at a time, gets no more segments than a shim
// keeps; and what it gets beyond its need is not taken from others.
func TestManySegments(t *testing.T) {
	const size = 141 * gib
	f := start(t, 2*size+2*gib, 64*gib, roomy(), 0)
	a, b := f.client(0, size), f.client(0, 0)
	for total := uint64(64 * mib); total <= size; total += 64 * mib {
		b.need(total)
	}
	f.await("all have theirs", func() bool { return a.Given() >= size && b.Given() >= size && f.pool.jobs == 0 })
	f.inLoop(func() {
		if f.pool.Used() > f.pool.Limit {
			t.Errorf("%d MiB of %d", f.pool.Used()>>20, f.pool.Limit>>20)
		}
		for _, o := range []*owner{a, b} {
			if o.segments > 256 {
				t.Errorf("%d segments, of %d MiB", o.segments, o.Given()>>20)
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
		{NoNode, 0, 0, 4096, 0},
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
		if len(s.ready) < 2 && size != MinSegment {
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

// A Pool whose loop ends while the stock is made ends at once, and keeps nothing.
func TestReadyEnds(t *testing.T) {
	host := roomy()
	host.make = func(size uint64, step func(uint64) error) (Segment, error) {
		if size > MinSegment { // the first ones do get ready
			for step(0) == nil {
				runtime.Gosched()
			}
			return Segment{}, unix.ECANCELED
		}
		return empty(size, step)
	}
	f := start(t, 2*gib, 2*gib, host, 0)
	f.awaitReady(smallReady * MinSegment)
	var all []*piece
	f.inLoop(func() { all = append(all, f.pool.stock.ready...) })
	f.stop()
	for _, p := range all {
		if err := p.segment.File.Close(); err == nil {
			t.Error("a segment was still open")
		}
	}
}
