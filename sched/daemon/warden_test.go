// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/wire"
)

// aWarden answers orders, and remembers them.
type aWarden struct {
	*testing.T
	path string

	mu     sync.Mutex
	orders []order.Order
	fail   map[int]string // by pid: what its orders to be taken off answer
	frozen string         // what orders to stop a container answer
	shim   int            // the pid of one that has the shim
	before func(order.Op) // each answer; nil: nothing
	limits []string       // what the next orders of a memory limit answer
	socks  []*net.UnixConn
	listen *net.UnixListener
}

func newWarden(t *testing.T) *aWarden {
	w := &aWarden{T: t, path: filepath.Join(t.TempDir(), "w.sock"), fail: map[int]string{}}
	w.open()
	t.Cleanup(w.end)
	return w
}

func (w *aWarden) open() {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: w.path, Net: "unixpacket"})
	if err != nil {
		w.Fatal(err)
	}
	w.mu.Lock()
	w.listen = l
	w.mu.Unlock()
	go func() {
		for {
			sock, err := l.AcceptUnix()
			if err != nil {
				return
			}
			w.mu.Lock()
			w.socks = append(w.socks, sock)
			w.mu.Unlock()
			go w.serve(order.NewConn(sock))
		}
	}()
}

func (w *aWarden) serve(c *order.Conn) {
	for {
		var r order.Request
		if c.Receive(&r) != nil {
			return
		}
		reply := order.Reply{ID: r.ID}
		w.mu.Lock()
		for _, o := range r.Orders {
			w.orders = append(w.orders, o)
			began := time.Now()
			result := order.Result{GPUs: []string{gpuA.UUID}, Clients: 1, Groups: 1, Channels: 1}
			if o.Op == order.Off {
				result.Error = w.fail[o.PID]
			}
			if o.Op == order.Freeze {
				result.Error = w.frozen
			}
			if o.Op == order.Kill && o.PID == w.shim {
				result.Error = order.HasShim
			}
			if o.Op == order.Limit && len(w.limits) > 0 {
				result.Error, w.limits = w.limits[0], w.limits[1:]
			}
			if before := w.before; before != nil {
				w.mu.Unlock()
				before(o.Op)
				w.mu.Lock()
			}
			result.TookNs = time.Since(began).Nanoseconds()
			reply.Results = append(reply.Results, result)
		}
		w.mu.Unlock()
		if c.Send(reply) != nil {
			return
		}
	}
}

func (w *aWarden) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listen.Close()
	for _, s := range w.socks {
		s.Close()
	}
}

// last returns the latest order about a process, and how many were of a kind.
func (w *aWarden) last(p *proc, op order.Op) (last order.Op, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.orders {
		if o.PID == p.cmd.Process.Pid {
			if last = o.Op; o.Op == op {
				n++
			}
		}
	}
	return last, n
}

func (w *aWarden) until(what string, ok func() bool) {
	w.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("never: %s", what)
		}
	}
}

// occupants says who uses GPU A, and which part of it they had.
type occupants struct {
	mu   sync.Mutex
	pids []uint32
	busy map[uint32]float64
	size uint64 // of each of them; 0: 1 MiB
	err  error

	asked atomic.Int64 // how often
}

func (o *occupants) set(busy map[uint32]float64, processes ...*proc) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pids, o.busy = nil, busy
	for _, p := range processes {
		o.pids = append(o.pids, uint32(p.cmd.Process.Pid))
	}
}

func (o *occupants) sample(context.Context) ([]metrics.GPUSample, error) {
	o.asked.Add(1)
	o.mu.Lock()
	defer o.mu.Unlock()
	all := map[uint32]uint64{}
	for _, pid := range o.pids {
		all[pid] = cmp.Or(o.size, 1<<20)
	}
	return []metrics.GPUSample{{UUID: gpuA.UUID, Processes: all, Busy: o.busy}}, o.err
}

func withWarden(t *testing.T, w *aWarden, nvml *occupants) *scheduler {
	return start(t, t.TempDir(), func(o *Options) { o.Sample, o.Warden = nvml.sample, w.path }, func(d *Daemon) { d.watch.LookPause, d.watch.KillPause = time.Millisecond, 0 })
}

func (s *scheduler) limitUser(uid, percent uint32) {
	s.t.Helper()
	if _, err := dial(s.t, s).SetShare(context.Background(), &api.SetShareRequest{Uid: &uid, CoreLimit: &percent}); err != nil {
		s.t.Fatal(err)
	}
}

// A process without a shim is switched as long as its tenant has a limit and it has not
// registered. One whose tenant has no limit is let alone.
func TestHeldByTheWarden(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	s := withWarden(t, w, &nvml)
	held, free := newProc(t, s.dir, 0), newProc(t, s.dir, 1001)
	nvml.set(nil, held, free)
	s.limitUser(0, 30)
	w.until("it is taken off and put on", func() bool {
		_, off := w.last(held, order.Off)
		_, on := w.last(held, order.On)
		return off > 1 && on > 1
	})
	s.await("the status says so", func(r *api.StatusResponse) bool {
		return r.Warden && slices.ContainsFunc(r.Unmanaged, func(u *api.Unmanaged) bool { return strings.Contains(u.Held, "held from outside") }) && hasProblem(r, "held from outside")
	})
	s.limitUser(0, 0)
	w.until("without a limit it is on", func() bool { last, _ := w.last(held, order.On); return last == order.On })
	s.limitUser(0, 30)
	_, before := w.last(held, order.Off)
	w.until("it is held again", func() bool { _, n := w.last(held, order.Off); return n > before })
	held.connect().register(0).attach(0, gpuA, 0, 0)
	s.await("a client is not held", func(*api.StatusResponse) bool {
		held := 0
		if err := s.Ask(t.Context(), func() { held = len(s.watch.Holder.Holdings) }); err != nil {
			t.Fatal(err)
		}
		return held == 0
	})
	w.until("a client is on", func() bool { last, _ := w.last(held, order.On); return last == order.On })
	if _, n := w.last(free, order.State); n != 0 {
		t.Error("a process whose tenant has no limit was looked at")
	}
}

// The limit of a process is charged from when it is on, not from when that was ordered.
func TestChargedFromWhenItIsOn(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	s := withWarden(t, w, &nvml)
	if err := s.Ask(t.Context(), func() { s.watch.LateMost = time.Minute }); err != nil {
		t.Fatal(err)
	}
	held := newProc(t, s.dir, 0)
	tenant := func() (ts sched.TenantSnapshot) {
		if err := s.Ask(t.Context(), func() { ts = s.Order[0].Core.Snapshot(loop.Now()).Tenants[0] }); err != nil {
			t.Error(err)
		}
		return ts
	}
	on, debts := false, make(chan time.Duration, 1)
	w.before = func(op order.Op) {
		switch {
		case op == order.On && !on:
			used := tenant().Used
			w.until("it is billed for a second", func() bool { return tenant().Used > used+time.Second })
			on = true
		case op == order.Off && on && len(debts) == 0:
			debts <- tenant().Debt
		}
	}
	nvml.set(nil, held)
	s.limitUser(0, 30)
	if debt := <-debts; debt != 0 {
		t.Errorf("its limit was charged: %v too much", debt)
	}
}

// One that cannot be taken off does not keep the others of its tenant off.
func TestOneCannotBeHeld(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	s := withWarden(t, w, &nvml)
	bad, good := newProc(t, s.dir, 0), newProc(t, s.dir, 0)
	w.fail[bad.cmd.Process.Pid] = "the driver answers status 0x1b"
	nvml.set(nil, bad, good)
	s.limitUser(0, 50)
	s.await("the status says why", func(r *api.StatusResponse) bool {
		return hasProblem(r, "status 0x1b") && hasProblem(r, "held from outside")
	})
	_, before := w.last(good, order.On)
	w.until("the other one has its part", func() bool { _, n := w.last(good, order.On); return n > before+3 })
}

// One that puts its channels on by itself is named.
func TestCheatIsNamed(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	s := withWarden(t, w, &nvml)
	cheat := newProc(t, s.dir, 0)
	nvml.set(map[uint32]float64{uint32(cheat.cmd.Process.Pid): 0.9}, cheat)
	s.limitUser(0, 30)
	s.await("it is named", func(r *api.StatusResponse) bool { return hasProblem(r, "puts its channels on by itself, and had 90 %") })
	nvml.set(map[uint32]float64{uint32(cheat.cmd.Process.Pid): 0.3}, cheat)
	s.await("it is held", func(r *api.StatusResponse) bool { return hasProblem(r, "held from outside") })
}

// The warden goes and comes back.
func TestWardenComesAndGoes(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	s := withWarden(t, w, &nvml)
	held := newProc(t, s.dir, 0)
	nvml.set(nil, held)
	s.limitUser(0, 30)
	s.await("it is held", func(r *api.StatusResponse) bool { return hasProblem(r, "held from outside") })
	w.end()
	s.await("nobody holds it", func(r *api.StatusResponse) bool {
		return !r.Warden && r.WardenProblem != "" && hasProblem(r, "uses the GPU without nvshare")
	})
	w.open()
	s.await("it is held again", func(r *api.StatusResponse) bool { return r.Warden && hasProblem(r, "held from outside") })
}

// Who does not release is kept off the GPU until it does; another client has its tenant's turns for it.
func TestFenceHolds(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	dir := t.TempDir()
	s := start(t, dir, func(o *Options) { fences(false)(o); o.Sample, o.Warden = nvml.sample, w.path })
	s.await("the warden is there", func(r *api.StatusResponse) bool { return r.Warden })
	pa, a, b, ea, eb := fenced(t, s)
	w.until("it is taken off", func() bool { last, _ := w.last(pa, order.Off); return last == order.Off })
	if r := s.status(); stateOf(r, a.id) != api.ClientState_CLIENT_STATE_FENCED || !hasProblem(r, "is fenced: it did not release the GPU in time; until it does, held from outside") {
		t.Errorf("problems %q", r.Problems)
	}
	b.expect(wire.TypeRevoke) // for the one that stands in
	b.release(eb)
	w.until("it is on in its turn", func() bool { last, _ := w.last(pa, order.On); return last == order.On })
	w.end()
	s.await("the warden is lost", func(r *api.StatusResponse) bool { return !r.Warden && hasProblem(r, "and may still use it") })
	w.open()
	s.await("the next warden holds it", func(r *api.StatusResponse) bool { return hasProblem(r, "until it does, held from outside") })
	_, before := w.last(pa, order.On)
	a.release(ea)
	w.until("it is on", func() bool { last, n := w.last(pa, order.On); return last == order.On && n > before })
	s.await("nobody is fenced", func(r *api.StatusResponse) bool {
		return stateOf(r, a.id) == api.ClientState_CLIENT_STATE_IDLE && !hasProblem(r, "fenced") && len(r.Gpus[0].Clients) == 2
	})
	events, err := dial(t, s).Events(t.Context(), &api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_FENCE}})
	if err != nil || len(events.Events) == 0 || events.Events[0].Reason != "hold" || int(events.Events[0].Pid) != pa.cmd.Process.Pid {
		t.Errorf("events %v, %v", events, err)
	}
}

// Who is above the memory limit of its tenant without a shim is killed, and nobody else.
func TestOverItsMemoryLimit(t *testing.T) {
	const gib = 1 << 30
	nvml := occupants{size: 3 * gib}
	w := newWarden(t)
	s := withWarden(t, w, &nvml)
	over, other := newProc(t, s.dir, 0), newProc(t, s.dir, 1001)
	shim, c := newClient(t, s)
	c.reserve(gib, gib, 0)
	nvml.set(nil, over, other, shim)
	uid, bytes := uint32(0), uint64(3*gib+gib/2)
	s.await("the other process is known", func(r *api.StatusResponse) bool { return len(r.Unmanaged) == 2 })
	if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, MemoryBytes: &bytes}); err != nil {
		t.Fatal(err)
	}
	s.await("it is held within its limit", func(r *api.StatusResponse) bool { return hasProblem(r, "held from outside") })
	bytes = 3 * gib
	if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, MemoryBytes: &bytes}); err != nil {
		t.Fatal(err)
	}
	w.until("it is killed", func() bool { _, n := w.last(over, order.Kill); return n > 0 })
	for _, p := range []*proc{other, shim} {
		if _, n := w.last(p, order.Kill); n != 0 {
			t.Error("another one was killed")
		}
	}
	r := s.await("it is counted", func(r *api.StatusResponse) bool { return r.Gpus[0].OomKills > 0 })
	events, err := dial(t, s).Events(t.Context(), &api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_OOM_KILL}})
	if err != nil || len(events.Events) != int(r.Gpus[0].OomKills) || int(events.Events[0].Pid) != over.cmd.Process.Pid || events.Events[0].Reason == "" {
		t.Errorf("events %v, %v", events, err)
	}
}

// A process that has the shim, and could not register again after a restart, is not killed; nor is anybody soon after it.
func TestWhoHasTheShimIsNotKilled(t *testing.T) {
	const gib = 1 << 30
	nvml := occupants{size: 3 * gib}
	w := newWarden(t)
	s := start(t, t.TempDir(), func(o *Options) { o.Sample, o.Warden = nvml.sample, w.path })
	shim, other := newProc(t, s.dir, 0), newProc(t, s.dir, 0)
	w.mu.Lock()
	w.shim = shim.cmd.Process.Pid
	w.mu.Unlock()
	uid, bytes := uint32(0), uint64(gib)
	nvml.set(nil, shim, other)
	if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, MemoryBytes: &bytes}); err != nil {
		t.Fatal(err)
	}
	before := nvml.asked.Load()
	w.until("they are above the limit for seconds", func() bool { return nvml.asked.Load() > before+8 })
	for _, p := range []*proc{shim, other} {
		if _, n := w.last(p, order.Kill); n != 0 {
			t.Error("one was killed at the start")
		}
	}
	if err := s.Ask(t.Context(), func() { s.watch.KillPause = 0 }); err != nil {
		t.Fatal(err)
	}
	w.until("the other is killed, again and again", func() bool { _, n := w.last(other, order.Kill); return n > 1 })
	if _, n := w.last(shim, order.Kill); n > 1 {
		t.Error("a process that has the shim was to be killed again")
	}
}

// The container of one that goes on to put its channels on is stopped for what it had too much, and then goes on.
func TestCheatIsStopped(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	began := withWarden(t, w, &nvml)
	s := sharing{began, dial(t, began)}
	cheat := &proc{cmd: firstOf(t, whole("c"))}
	s.describe("c", &api.Share{CoreLimit: 30}, gpuA.UUID)
	nvml.set(map[uint32]float64{uint32(cheat.cmd.Process.Pid): 0.9}, cheat)
	w.until("its container is stopped", func() bool { last, _ := w.last(cheat, order.Freeze); return last == order.Freeze })
	s.await("the status says so", func(r *api.StatusResponse) bool { return hasProblem(r, "its container is stopped for that") })
	nvml.set(map[uint32]float64{uint32(cheat.cmd.Process.Pid): 0.3}, cheat)
	s.await("it goes on, and is held", func(r *api.StatusResponse) bool { return hasProblem(r, "held from outside: its channels") })
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.orders {
		if o.Op == order.Freeze && o.Container != whole("c") {
			t.Errorf("order %+v", o)
		}
	}
}

// Beside others a suspect is kept off, to see whether it is.
func TestCheatBesideOthers(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	began := withWarden(t, w, &nvml)
	s := sharing{began, dial(t, began)}
	cheat, other := &proc{cmd: firstOf(t, whole("c"))}, newProc(t, s.dir, 1001)
	s.describe("c", &api.Share{CoreLimit: 30}, gpuA.UUID)
	s.limitUser(1001, 30)
	nvml.set(map[uint32]float64{uint32(cheat.cmd.Process.Pid): 0.99}, cheat, other)
	w.until("its container is stopped", func() bool { last, _ := w.last(cheat, order.Freeze); return last == order.Freeze })
	if _, n := w.last(other, order.Freeze); n != 0 {
		t.Error("the other one is stopped")
	}
	nvml.set(map[uint32]float64{uint32(other.cmd.Process.Pid): 0.99}, cheat, other)
	s.await("it goes on, and is held", func(r *api.StatusResponse) bool { return !hasProblem(r, "its container is stopped") })
}

// A suspect is not kept off for ever where the driver says nothing more of use.
func TestSuspectGoesOn(t *testing.T) {
	for what, then := range map[string]func(*occupants, map[uint32]float64){
		"not who has the GPU":    func(o *occupants, _ map[uint32]float64) { o.busy = nil },
		"more than all there is": func(o *occupants, all map[uint32]float64) { o.busy = all },
		"nothing":                func(o *occupants, _ map[uint32]float64) { o.err = errors.New("the GPU is lost") },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var nvml occupants
			w := newWarden(t)
			s := withWarden(t, w, &nvml)
			suspect, other := newProc(t, s.dir, 0), newProc(t, s.dir, 1001)
			a, b := uint32(suspect.cmd.Process.Pid), uint32(other.cmd.Process.Pid)
			s.limitUser(0, 30)
			s.limitUser(1001, 30)
			nvml.set(map[uint32]float64{a: 0.99}, suspect, other)
			// Where it is off for seconds before, it is named at once, and tests do not show: it is tested all the same.
			s.await("it is suspect", func(r *api.StatusResponse) bool { return hasProblem(r, "puts its channels on by itself") })
			nvml.mu.Lock()
			then(&nvml, map[uint32]float64{a: 0.9, b: 0.9})
			nvml.mu.Unlock()
			s.await("it goes on", func(r *api.StatusResponse) bool { return !hasProblem(r, "kept off for seconds") })
			_, before := w.last(suspect, order.On)
			w.until("it is on in its turns", func() bool { _, n := w.last(suspect, order.On); return n > before+1 })
		})
	}
}

// Where its container cannot be stopped, it is taken off again and again, and nothing says that it was stopped.
func TestCheatCannotBeStopped(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	w.frozen = "read-only file system"
	began := withWarden(t, w, &nvml)
	s := sharing{began, dial(t, began)}
	cheat := &proc{cmd: firstOf(t, whole("c"))}
	s.describe("c", &api.Share{CoreLimit: 30}, gpuA.UUID)
	nvml.set(map[uint32]float64{uint32(cheat.cmd.Process.Pid): 0.9}, cheat)
	w.until("its container is to be stopped", func() bool { _, n := w.last(cheat, order.Freeze); return n > 0 })
	_, before := w.last(cheat, order.Off)
	w.until("it is taken off", func() bool { _, n := w.last(cheat, order.Off); return n > before+4 })
	s.await("it is named", func(r *api.StatusResponse) bool { return hasProblem(r, "puts its channels on by itself, and had 90 %") })
	if _, n := w.last(cheat, order.Freeze); n != 1 {
		t.Errorf("its container was to be stopped %d times", n)
	}
	events, err := s.Events(t.Context(), &api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_WARNING}})
	if err != nil || len(events.Events) != 0 {
		t.Errorf("events %v, %v", events, err)
	}
}

// The warden is told each memory limit once, and each change, so that the kernel holds it too.
func TestKernelIsToldMemoryLimits(t *testing.T) {
	var nvml occupants
	w := newWarden(t)
	s := withWarden(t, w, &nvml)
	p := newProc(t, s.dir, 1001)
	nvml.set(nil, p)
	told := func() (all []uint64) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, o := range w.orders {
			if o.Op == order.Limit && o.PID == p.cmd.Process.Pid && o.UID == 1001 && slices.Contains(o.GPU, gpuA.UUID) {
				all = append(all, o.Bytes)
			}
		}
		return all
	}
	uid := uint32(1001)
	w.mu.Lock()
	w.limits = []string{"the disk is full"}
	w.mu.Unlock()
	want := []uint64{3 << 30} // which fails, and is told again
	for _, limit := range []uint64{3 << 30, 4 << 30, 0} {
		if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, MemoryBytes: &limit}); err != nil {
			t.Fatal(err)
		}
		want = append(want, limit)
		if limit == 0 { // somebody has to have something, or nobody is looked for
			s.limitUser(1001, 50)
		}
		w.until("the kernel is told", func() bool { return slices.Equal(told(), want) })
	}
	// The next warden is told that there is none: a limit may have been removed meanwhile.
	w.end()
	s.await("the warden is lost", func(r *api.StatusResponse) bool { return !r.Warden })
	w.open()
	want = append(want, 0)
	w.until("the kernel is told again", func() bool { return slices.Equal(told(), want) })
}

// A scheduler that ends does not wait for the answer of a warden that it has just found.
func TestEndsWithoutTheWarden(t *testing.T) {
	path := filepath.Join(t.TempDir(), "w.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := start(t, t.TempDir(), func(o *Options) { o.Sample, o.Warden = (&occupants{}).sample, path })
	sock, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer sock.Close()
	if err := order.NewConn(sock).Receive(&order.Request{}); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	go func() { s.stop(); close(stopped) }()
	if err := sock.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil { // a warden may take three times that
		t.Fatal(err)
	}
	if n, err := sock.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the connection goes on: %d, %v", n, err)
	}
	<-stopped
}
