// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/timer"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// patience bounds every wait in these tests. It only has to be longer than any
// machine takes.
const patience = 5 * time.Minute

// testHost is a host of which a test says what it has, and how segments are made.
type testHost struct {
	make func(size uint64, step func(uint64) error) (Segment, error)
	free func() (pages, huge uint64, ok bool)
	mu   sync.Mutex // over make
	pool *Pool
}

func (h *testHost) Make(size uint64, step func(uint64) error) (Segment, error) {
	h.mu.Lock()
	make := h.make
	h.mu.Unlock()
	return make(size, step)
}

func (h *testHost) Free() (uint64, uint64, bool) { return h.free() }

// set changes how segments are made from now on.
func (h *testHost) set(make func(size uint64, step func(uint64) error) (Segment, error)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.make = make
}

// roomy has any amount of memory; segments are made of none, because how long that
// takes is another test's business.
func roomy() *testHost {
	return &testHost{make: empty, free: func() (uint64, uint64, bool) { return 1 << 40, 0, true }}
}

func empty(size uint64, step func(uint64) error) (Segment, error) {
	if err := step(0); err != nil {
		return Segment{}, err
	}
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	return Segment{File: os.NewFile(uintptr(fd), "test"), Size: size}, err
}

// none makes no segment until the loop has ended.
func (f *fixture) none(uint64, func(uint64) error) (Segment, error) {
	<-f.ended
	return Segment{}, unix.ENOMEM
}

// fixture is a Pool with its loop. Timers do not run; a test calls what they would.
type fixture struct {
	t      *testing.T
	pool   *Pool
	gpus   []*GPU
	timers timer.List
	events chan func()
	ended  chan struct{}
	wg     sync.WaitGroup
	stop   func()
}

func (f *fixture) Do(do func()) bool {
	select {
	case f.events <- do:
		return true
	case <-f.ended:
		return false
	}
}

func (f *fixture) Go(do func())           { f.wg.Go(do) }
func (f *fixture) Ended() <-chan struct{} { return f.ended }
func (f *fixture) Now() base.Time         { return 1 }

// start makes a Pool for one GPU for each node.
func start(t *testing.T, limit, ready uint64, host *testHost, nodes ...int) *fixture {
	t.Helper()
	f := &fixture{t: t, events: make(chan func(), 16), ended: make(chan struct{})}
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	f.pool = New(Config{
		Limit: limit, Ready: ready, MaxReady: 4096, MaxHeld: 4096,
		Spare: func(more uint64) bool { return f.pool.Used()+more <= limit },
		Loop:  f, Timers: &f.timers, Host: host, Log: logrus.NewEntry(logger),
	})
	host.pool = f.pool
	for _, node := range nodes {
		f.gpus = append(f.gpus, f.pool.AddGPU(node))
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case do := <-f.events:
				do()
			case <-quit:
				return
			}
		}
	}()
	f.stop = sync.OnceFunc(func() {
		close(quit)
		<-done
		close(f.ended)
		f.wg.Wait()
		f.pool.Close()
	})
	t.Cleanup(f.stop)
	f.inLoop(f.pool.Prepare)
	return f
}

// inLoop runs something where the Pool may be looked at.
func (f *fixture) inLoop(do func()) {
	f.t.Helper()
	done := make(chan struct{})
	f.Do(func() { defer close(done); do() })
	select {
	case <-done:
	case <-time.After(patience):
		f.t.Fatal("the loop is stuck")
	}
}

// await polls: what the Pool does beside the loop sends a test nothing to wait for.
func (f *fixture) await(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		is := false
		f.inLoop(func() { is = ok() })
		if is {
			return
		}
		if time.Now().After(end) {
			f.inLoop(func() {
				f.t.Fatalf("never: %s; used %d MiB, ready %d, held %d, %v", what, f.pool.Used()>>20, f.pool.Ready()>>20, f.pool.Held()>>20, f.pool.Err())
			})
			f.t.FailNow()
		}
	}
}

func (f *fixture) awaitReady(bytes uint64) {
	f.t.Helper()
	f.await("host memory is ready", func() bool { return f.pool.Ready() == bytes })
}

// owner is a client that needs so much.
type owner struct {
	f     *fixture
	needs uint64
	away  bool
	*Client
	got []Segment
}

func (o *owner) Needs() uint64 { return o.needs }
func (o *owner) Changed()      {}
func (o *owner) Send(number uint64, s Segment) bool {
	if o.away {
		return false
	}
	if want := uint64(len(o.got) + 1); number != want {
		o.f.t.Errorf("segment number %d, want %d", number, want)
	}
	o.got = append(o.got, s)
	return true
}

// client adds one to a GPU, which needs so much.
func (f *fixture) client(gpu int, needs uint64) *owner {
	f.t.Helper()
	o := &owner{f: f}
	f.inLoop(func() { o.Client = f.gpus[gpu].AddClient(o) })
	o.need(needs)
	return o
}

func (o *owner) need(bytes uint64) {
	o.f.t.Helper()
	o.f.inLoop(func() {
		o.needs = bytes
		o.gpu.Prepare()
	})
}

// await waits until it has got so much.
func (o *owner) await(bytes uint64) {
	o.f.t.Helper()
	o.f.await("a client has its memory", func() bool { return o.sum() == bytes })
}

func (o *owner) sum() (sum uint64) {
	for _, s := range o.got {
		sum += s.Size
	}
	return sum
}
