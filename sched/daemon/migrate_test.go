// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// carrier is a driver that checkpoints processes.
type carrier struct {
	mu     sync.Mutex
	calls  []string
	refuse func(call string) error // nil: nothing
}

func (c *carrier) call(text string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, text)
	if c.refuse != nil {
		return c.refuse(text)
	}
	return nil
}

func (c *carrier) Expect(int)                                         {}
func (c *carrier) Off(context.Context, int) (checkpoint.Times, error) { return nil, c.call("off") }
func (c *carrier) On(_ context.Context, pid int, pairs []checkpoint.Pair) (checkpoint.Times, error) {
	text := "on"
	for _, p := range pairs {
		text += fmt.Sprintf(" %s→%s", p.Old[len(p.Old)-1:], p.New[len(p.New)-1:])
	}
	return nil, c.call(text)
}

func (c *carrier) told() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.calls)
}

func migrating(c *carrier) func(*Options) {
	return func(o *Options) {
		swapping(o)
		o.Checkpoint = c
	}
}

type migrated struct {
	*api.MigrateResponse
	err error
}

// migrateSelf moves the user whose processes the test has.
func migrateSelf(t *testing.T, s *scheduler, gpu string) chan migrated {
	t.Helper()
	c := dial(t, s)
	uid := uint32(os.Getuid())
	done := make(chan migrated, 1)
	go func() {
		r, err := c.Migrate(context.Background(), &api.MigrateRequest{Uid: &uid, Gpu: gpu})
		done <- migrated{r, err}
	}()
	return done
}

// newWorking is a client that says this of itself, holds GPU 0, and has 256 MiB there.
func newWorking(t *testing.T, s *scheduler, flags uint32) (*swapper, uint64) {
	t.Helper()
	p := newProc(t, s.dir, 0)
	w := &swapper{peerConn: p.connect().register(flags), proc: p}
	w.attach(0, gpuA, 0, 0)
	w.moved(0, 0)
	w.allocates(256 * mib)
	w.request()
	e := w.granted()
	w.in(e)
	s.await("it has its memory", func(*api.StatusResponse) bool { return w.status(s).ResidentBytes == 256*mib })
	return w, e
}

// departs gives the grant back and moves all memory out, as a tenant that moves is asked to.
func (w *swapper) departs(s *scheduler, e uint64) {
	if f := w.want(wire.TypeRevoke); f.Epoch != e {
		w.t.Fatalf("%+v", f)
	}
	w.request() // at once again: it is to have no grant meanwhile
	w.gives256Back(s, e)
}

// arrivesOn is a process that attaches again, to the GPU on which it finds itself.
func (w *swapper) arrivesOn(g node.Found, flags uint32) *swapper {
	w.t.Helper()
	for {
		if _, _, err := w.recv(); err == io.EOF {
			break
		} else if err != nil {
			w.t.Fatalf("its connection is not cut: %v", err)
		}
	}
	n := &swapper{peerConn: w.proc.connect().register(wire.RegisterSwap | wire.RegisterSuspend | wire.RegisterReconnect), proc: w.proc, has: w.has}
	n.attach(0, g, 0, flags)
	total := w.has.Resident + w.has.Away
	n.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: total, Least: total, Serial: 1}})
	n.moved(0, 0)
	return n
}

// goesOn is its next turn, for which it asked when it attached.
func (w *swapper) goesOn() {
	w.t.Helper()
	e := w.granted()
	w.want(wire.TypeReserved)
	w.in(e)
}

func on(r *api.StatusResponse, gpu int, id uint64) *api.Client {
	for _, c := range r.Gpus[gpu].Clients {
		if c.Id == id {
			return c
		}
	}
	return nil
}

// A tenant that works moves to another GPU: it is not granted on the way, its process is
// checkpointed and restored with both GPUs exchanged, and it goes on there with its memory
// and its host memory. Nothing of it is left on the first GPU.
func TestMigrate(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c))
	a, e := newWorking(t, s, wire.RegisterSwap)
	done := migrateSelf(t, s, "1")
	a.departs(s, e)
	n := a.arrivesOn(gpuB, wire.AttachWant)
	r := <-done
	if r.err != nil || r.FromUuid != gpuA.UUID || r.ToUuid != gpuB.UUID || r.Processes != 1 || r.Bytes != 256*mib {
		t.Fatalf("%v, %v", r.MigrateResponse, r.err)
	}
	if got := c.told(); !slices.Equal(got, []string{"off", "on 0→1 1→0"}) {
		t.Errorf("calls %q", got)
	}
	n.goesOn()
	st := s.await("it is there", func(r *api.StatusResponse) bool {
		c := on(r, 1, n.id)
		return c != nil && c.ResidentBytes == 256*mib && c.ArenaBytes >= 256*mib
	})
	if st.Gpus[1].Migrations != 1 || on(st, 0, n.id) != nil || st.Gpus[0].Swap.PromisedBytes != 0 || st.Gpus[0].Swap.ArenaBytes != 0 {
		t.Errorf("left on GPU 0: %v; %d have come to GPU 1", st.Gpus[0].Swap, st.Gpus[1].Migrations)
	}
	events := s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_MIGRATE}}).Events
	if len(events) != 1 || events[0].Uuid != gpuB.UUID || events[0].Bytes != 256*mib || !strings.Contains(events[0].Reason, "from GPU 0") {
		t.Errorf("events %v", events)
	}
	// The next scheduler is to bring nothing back.
	if record, err := os.ReadFile(filepath.Join(s.dir, "migrating.json")); err != nil || !strings.Contains(string(record), `"processes": []`) {
		t.Errorf("off their GPUs: %s, %v", record, err)
	}
	n.proc.kill()
	s.await("it is gone", func(r *api.StatusResponse) bool { return r.Gpus[1].Swap.ArenaUsedBytes == 0 })
}

// A tenant that was suspended with its context moves, too: it comes back, moves, and is
// suspended on the other GPU.
func TestMigrateSuspended(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c), func(d *Daemon) { d.away.RestPause = time.Millisecond })
	l := newLeaverOf(t, s, nil, gpuA)
	l.suspended()
	l.says(wire.SuspendedReady)
	l.awaitContext(api.ContextState_CONTEXT_STATE_AWAY)
	if uses := drainGPU(t, s, &api.DrainRequest{Gpu: "0", Look: true}).Uses; len(uses) != 1 || uses[0].Stays != "" {
		t.Errorf("it can move: %v", uses)
	}
	done := migrateSelf(t, s, "1")
	l.wantSuspend(wire.SuspendOver)
	n := &leaver{l.arrivesOn(gpuB, 0), s, nil, 256 * mib}
	if r := <-done; r.err != nil || r.ToUuid != gpuB.UUID {
		t.Fatalf("%v, %v", r.MigrateResponse, r.err)
	}
	n.want(wire.TypeReserved)
	n.wantSuspend(wire.SuspendPrepare)
	n.says(wire.SuspendedReady)
	s.await("it is off GPU 1", func(r *api.StatusResponse) bool {
		c := on(r, 1, n.id)
		return c != nil && c.Context == api.ContextState_CONTEXT_STATE_AWAY
	})
	if got := c.told(); !slices.Equal(got, []string{"off", "on", "off", "on 0→1 1→0", "off"}) {
		t.Errorf("calls %q", got)
	}
}

// failsToMove is a move that ends on GPU 0, where it began, for this reason.
func (w *swapper) failsToMove(s *scheduler, e uint64, why string) *swapper {
	w.t.Helper()
	done := migrateSelf(w.t, s, "")
	w.departs(s, e)
	n := w.arrivesOn(gpuA, wire.AttachWant)
	n.goesOn()
	if r := <-done; status.Code(r.err) != codes.FailedPrecondition || !strings.Contains(r.err.Error(), why) {
		w.t.Errorf("%v, %v", r.MigrateResponse, r.err)
	}
	return n
}

// A process that cannot be restored on the other GPU goes on where it was.
func TestMigrateRefusedByTheDriver(t *testing.T) {
	for name, refused := range map[string]string{"checkpoint": "off", "restore": "on 0→1 1→0"} {
		t.Run(name, func(t *testing.T) {
			c := &carrier{refuse: func(call string) error {
				if call == refused {
					return errors.New("the driver says no")
				}
				return nil
			}}
			s := start(t, t.TempDir(), migrating(c))
			a, e := newWorking(t, s, wire.RegisterSwap)
			n := a.failsToMove(s, e, "the driver says no")
			if got := c.told(); got[len(got)-1] != "on" {
				t.Errorf("calls %q", got)
			}
			st := s.await("it goes on", func(r *api.StatusResponse) bool {
				c := on(r, 0, n.id)
				return c != nil && c.ResidentBytes == 256*mib
			})
			if on(st, 1, n.id) != nil || st.Gpus[1].Migrations != 0 || st.Gpus[1].Swap.PromisedBytes != 0 {
				t.Errorf("on GPU 1: %v", st.Gpus[1])
			}
		})
	}
}

// A tenant that dies on its way ends the move.
func TestMigrateDies(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c))
	a, e := newWorking(t, s, wire.RegisterSwap)
	c.refuse = func(string) error {
		a.proc.kill()
		return errors.New("no such process")
	}
	done := migrateSelf(t, s, "1")
	a.departs(s, e)
	if r := <-done; status.Code(r.err) != codes.FailedPrecondition {
		t.Errorf("%v, %v", r.MigrateResponse, r.err)
	}
	s.await("nothing is left", func(r *api.StatusResponse) bool {
		return r.Gpus[0].Swap.ArenaUsedBytes == 0 && len(r.Gpus[0].Clients)+len(r.Gpus[1].Clients) == 0
	})
}

// endsMidway is a process on GPU 0 whose scheduler has ended while the driver restored the
// process on GPU 1. It does not wait for the driver.
func endsMidway(t *testing.T, dir string) *swapper {
	t.Helper()
	reached, held := make(chan struct{}), make(chan struct{})
	s := start(t, dir, migrating(&carrier{refuse: func(call string) error {
		if strings.HasPrefix(call, "on ") {
			close(reached)
			<-held
		}
		return nil
	}}))
	a, e := newWorking(t, s, wire.RegisterSwap)
	migrateSelf(t, s, "1")
	a.departs(s, e)
	<-reached
	s.stop()
	close(held)
	return a
}

// A scheduler that ends while a process is off the GPUs has left a record: the next one has
// the process run, and learns from its ATTACH where it is.
func TestMigrateOverARestart(t *testing.T) {
	for name, now := range map[string]node.Found{"it has not moved": gpuA, "it has": gpuB} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			a := endsMidway(t, dir)

			next := &carrier{}
			s := start(t, dir, migrating(next))
			n := a.arrivesOn(now, wire.AttachWant)
			n.goesOn()
			st := s.await("it goes on", func(r *api.StatusResponse) bool {
				c := on(r, now.Index, n.id)
				return c != nil && c.ResidentBytes == 256*mib && slices.Equal(next.told(), []string{"on"})
			})
			if other := st.Gpus[1-now.Index]; on(st, 1-now.Index, n.id) != nil || other.Swap.PromisedBytes != 0 || other.Swap.ArenaBytes != 0 {
				t.Errorf("left on the other GPU: %v", other.Swap)
			}
		})
	}
}

// A scheduler that ends between two processes of a tenant leaves it on two GPUs. The next one has the
// second follow the first, or where it cannot, the first come back.
func TestMigrateTwoOverARestart(t *testing.T) {
	for name, stays := range map[string]bool{"the second follows": false, "the first comes back": true} {
		t.Run(name, func(t *testing.T) {
			dir, offs := t.TempDir(), 0
			reached, held := make(chan struct{}), make(chan struct{})
			s := start(t, dir, migrating(&carrier{refuse: func(call string) error {
				if call == "off" {
					if offs++; offs == 2 {
						close(reached)
						<-held
					}
				}
				return nil
			}}))
			a, e := newWorking(t, s, wire.RegisterSwap)
			b := newSwapper(t, s)
			migrateSelf(t, s, "1")
			a.departs(s, e)
			<-reached
			s.stop()
			close(held)

			refused := false
			s = start(t, dir, migrating(&carrier{refuse: func(call string) error {
				if stays && call == "off" && !refused {
					refused = true
					return errors.New("the driver says no")
				}
				return nil
			}}))
			a2, b2 := a.arrivesOn(gpuB, 0), b.arrivesOn(gpuA, 0)
			on, off := 1, 0
			if stays {
				b2.arrivesOn(gpuA, 0)
				a2.arrivesOn(gpuA, 0)
				on, off = 0, 1
			} else {
				b2.arrivesOn(gpuB, 0)
			}
			st := s.await("both are on one GPU", func(r *api.StatusResponse) bool {
				return len(r.Gpus[off].Clients) == 0 && len(r.Gpus[on].Clients) == 2
			})
			if other := st.Gpus[off]; other.Swap.PromisedBytes != 0 || other.Swap.ArenaBytes != 0 {
				t.Errorf("left on GPU %d: %v", off, other.Swap)
			}
			s.await("the move has ended", func(*api.StatusResponse) (ended bool) {
				return s.Ask(context.Background(), func() { ended = len(s.moves.Migrations) == 0 }) == nil && ended
			})
		})
	}
}

// A process that comes back when its move has ended without it follows the rest of its tenant.
func TestMigrateStraggler(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c))
	a, b := newSwapperOn(t, s, gpuA), newSwapperOn(t, s, gpuB)
	if err := s.Ask(context.Background(), func() { s.moves.From[s.Clients[base.ClientID(b.id)]] = s.FindGPU(gpuB.UUID) }); err != nil {
		t.Fatal(err)
	}
	b.CloseWrite()
	back := &swapper{peerConn: b.proc.connect().register(wire.RegisterSwap | wire.RegisterReconnect), proc: b.proc}
	back.attach(0, gpuB, 0, 0)
	back.arrivesOn(gpuA, 0)
	s.await("both are on GPU 0", func(r *api.StatusResponse) bool {
		return len(r.Gpus[0].Clients) == 2 && len(r.Gpus[1].Clients) == 0 && on(r, 0, a.id) != nil
	})
	if got := c.told(); !slices.Equal(got, []string{"off", "on 0→1 1→0"}) {
		t.Errorf("calls %q", got)
	}
}

// A process that cannot be restored is tried again, and does not hold up the rest of its tenant.
func TestMigrateNotBackYet(t *testing.T) {
	var back atomic.Bool
	c := &carrier{refuse: func(call string) error {
		if strings.HasPrefix(call, "on") && !back.Load() {
			return errors.New("the GPU is full")
		}
		return nil
	}}
	s := start(t, t.TempDir(), migrating(c))
	a, e := newWorking(t, s, wire.RegisterSwap)
	a.failsToMove(s, e, "the GPU is full")
	tries := len(c.told())
	s.await("it is tried again", func(*api.StatusResponse) bool { return len(c.told()) > tries })
	back.Store(true)
}

// A process that begins on the other GPU before it departs uses two GPUs, and stays.
func TestMigrateBeginsOnAnother(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c))
	a, e := newWorking(t, s, wire.RegisterSwap)
	done := migrateSelf(t, s, "1")
	if f := a.want(wire.TypeRevoke); f.Epoch != e {
		t.Fatalf("%+v", f)
	}
	a.attach(1, gpuB, 0, 0)
	a.request()
	a.gives256Back(s, e)
	if r := <-done; r.err == nil || !strings.Contains(r.err.Error(), "has begun on GPU 1 meanwhile") {
		t.Errorf("%v, %v", r.MigrateResponse, r.err)
	}
	if calls := c.told(); len(calls) != 0 {
		t.Errorf("calls %q", calls)
	}
	a.in(a.granted())
}

// A process that begins while the others are on their way goes after them.
func TestMigrateLatecomer(t *testing.T) {
	c, reached, held := &carrier{}, make(chan struct{}), make(chan struct{})
	s := start(t, t.TempDir(), migrating(c))
	a, e := newWorking(t, s, wire.RegisterSwap)
	var once sync.Once
	c.refuse = func(call string) error {
		if strings.HasPrefix(call, "on ") {
			once.Do(func() { close(reached); <-held })
		}
		return nil
	}
	done := migrateSelf(t, s, "1")
	a.departs(s, e)
	<-reached
	late := newSwapper(t, s) // of the same user
	close(held)
	a.arrivesOn(gpuB, 0)
	n := late.arrivesOn(gpuB, 0)
	if r := <-done; r.err != nil || r.Processes != 2 {
		t.Fatalf("%v, %v", r.MigrateResponse, r.err)
	}
	s.await("both are there", func(r *api.StatusResponse) bool {
		return len(r.Gpus[0].Clients) == 0 && len(r.Gpus[1].Clients) == 2 && on(r, 1, n.id) != nil
	})
}

// A tenant has moved although a process has ended that began meanwhile and was to go after the others.
func TestMigrateLatecomerEnds(t *testing.T) {
	for _, how := range []string{"as it is asked to leave", "as the driver moves it"} {
		t.Run(how, func(t *testing.T) {
			c, reached, held := &carrier{}, make(chan struct{}), make(chan struct{})
			s := start(t, t.TempDir(), migrating(c))
			a, e := newWorking(t, s, wire.RegisterSwap)
			var late *swapper
			offs := 0
			c.refuse = func(call string) error {
				switch call {
				case "off":
					if offs++; offs == 2 {
						late.proc.kill()
						return errors.New("no such process")
					}
				case "on 0→1 1→0":
					close(reached)
					<-held
				}
				return nil
			}
			done := migrateSelf(t, s, "1")
			a.departs(s, e)
			<-reached
			p := newProc(t, s.dir, 0) // of the same user
			late = &swapper{peerConn: p.connect().register(wire.RegisterSwap | wire.RegisterReconnect), proc: p}
			late.attach(0, gpuA, 0, 0)
			if how == "as it is asked to leave" {
				late.has.Resident = 64 * mib
				late.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: 64 * mib, Least: 64 * mib, Serial: 1}})
				late.want(wire.TypeReserved)
			}
			late.moved(0, 0)
			close(held)
			n := a.arrivesOn(gpuB, 0)
			if late.has.Resident != 0 {
				late.awaitLess(s, 1)
				late.proc.kill()
			}
			if r := <-done; r.err != nil || r.ToUuid != gpuB.UUID || r.Processes != 2 {
				t.Fatalf("%v, %v", r.MigrateResponse, r.err)
			}
			st := s.await("it is there", func(r *api.StatusResponse) bool { return len(r.Gpus[0].Clients) == 0 && on(r, 1, n.id) != nil })
			events := s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_MIGRATE}}).Events
			if st.Gpus[1].Migrations != 1 || len(events) != 1 || events[0].Uuid != gpuB.UUID || events[0].Client != n.id {
				t.Errorf("%d have come to GPU 1; events %v", st.Gpus[1].Migrations, events)
			}
		})
	}
}

// A process that comes back with memory on the GPU while its tenant departs is asked to move
// that memory out, too.
func TestMigrateComesBackMeanwhile(t *testing.T) {
	s := start(t, t.TempDir(), migrating(&carrier{}))
	a, e := newWorking(t, s, wire.RegisterSwap)
	done := migrateSelf(t, s, "1")
	if f := a.want(wire.TypeRevoke); f.Epoch != e {
		t.Fatalf("%+v", f)
	}
	p := newProc(t, s.dir, 0) // of the same user
	b := &swapper{peerConn: p.connect().register(wire.RegisterSwap | wire.RegisterReconnect), proc: p}
	b.attach(0, gpuA, 0, 0)
	b.has.Resident = 64 * mib
	b.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: 64 * mib, Least: 64 * mib, Serial: 1}})
	b.want(wire.TypeReserved)
	b.moved(0, 0)
	b.awaitLess(s, 1)
	b.out()
	a.gives256Back(s, e)
	a.arrivesOn(gpuB, 0)
	b.arrivesOn(gpuB, 0)
	if r := <-done; r.err != nil || r.Processes != 2 {
		t.Fatalf("%v, %v", r.MigrateResponse, r.err)
	}
}

// The record of processes that are off their GPUs keeps those of an earlier scheduler,
// whatever else moves.
func TestMigrateRecordKeeps(t *testing.T) {
	dir := t.TempDir()
	endsMidway(t, dir)

	never := &carrier{refuse: func(string) error { return errors.New("no room") }}
	s := start(t, dir, migrating(never))
	s.await("it is tried", func(*api.StatusResponse) bool { return len(never.told()) > 0 })
	if err := s.Ask(context.Background(), func() { _ = s.moves.RecordCarried() }); err != nil { // as the end of another move does
		t.Fatal(err)
	}
	s.stop()
	last := &carrier{}
	s = start(t, dir, migrating(last))
	s.await("it is brought back", func(*api.StatusResponse) bool { return slices.Equal(last.told(), []string{"on"}) })
}

// On a node with a MIG device nobody moves: a tenant would be stopped for nothing.
func TestMigrateBesideMIG(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c), func(d *Daemon) {
		list := d.own.List
		d.own.List = func(ctx context.Context) ([]node.Found, error) {
			gpus, err := list(ctx)
			return append(gpus, node.Found{Index: 2, UUID: "MIG-51600000-0000-4000-8000-000000000002", Name: "Test GPU MIG 1g", MemoryBytes: 1 << 30}), err
		}
	})
	a := newSwapper(t, s)
	a.allocates(256 * mib)
	if r := <-migrateSelf(t, s, "1"); r.err == nil || !strings.Contains(r.err.Error(), "GPU 2 of this node is a MIG device") {
		t.Errorf("%v", r.err)
	}
	if got := c.told(); len(got) != 0 {
		t.Errorf("calls %q", got)
	}
}

// What cannot move is named with the reason, and goes on.
func TestMigrateRefuses(t *testing.T) {
	refused := func(s *scheduler, gpu, why string) {
		t.Helper()
		if r := <-migrateSelf(t, s, gpu); status.Code(r.err) != codes.FailedPrecondition && status.Code(r.err) != codes.NotFound || !strings.Contains(r.err.Error(), why) {
			t.Errorf("%v, want %q", r.err, why)
		}
	}
	s := start(t, t.TempDir(), swapping)
	newSwapper(t, s)
	refused(s, "1", "nvshare-checkpoint is not there")
	s.stop()

	s = start(t, t.TempDir(), migrating(&carrier{}), func(d *Daemon) {
		list := d.own.List
		d.own.List = func(ctx context.Context) ([]node.Found, error) {
			gpus, err := list(ctx)
			return append(gpus, node.Found{Index: 2, UUID: "GPU-51600000-0000-4000-8000-000000000002", Name: "Another GPU", MemoryBytes: 1 << 30}), err
		}
	})
	refused(s, "1", "it uses no GPU")
	a := newSwapper(t, s)
	a.allocates(256 * mib)
	refused(s, "0", "it uses GPU 0 already")
	refused(s, "2", "GPU 2 is another model")
	refused(s, "7", "no such UUID or index")
	drainGPU(t, s, &api.DrainRequest{Gpu: "1"})
	refused(s, "1", "GPU 1 is drained")
	refused(s, "", "GPU 1 is drained; GPU 2 is another model")
	drainGPU(t, s, &api.DrainRequest{Gpu: "1", Undrain: true})
	uid := uint32(os.Getuid())
	set := func(change func(*api.SetShareRequest)) {
		t.Helper()
		req := &api.SetShareRequest{Uid: &uid}
		change(req)
		if _, err := dial(t, s).SetShare(context.Background(), req); err != nil {
			t.Fatal(err)
		}
	}
	gang, none, small, nothing := "true", "", uint64(128*mib), uint64(0)
	set(func(r *api.SetShareRequest) { r.Gang = &gang })
	refused(s, "1", "it is in gang true")
	set(func(r *api.SetShareRequest) { r.Gang = &none })
	set(func(r *api.SetShareRequest) { r.Gpu, r.MemoryBytes = "1", &small })
	refused(s, "1", "memory limit is 128 MiB there")
	set(func(r *api.SetShareRequest) { r.Gpu, r.MemoryBytes = "1", &nothing })
	b := newSwapperOn(t, s, gpuB)
	refused(s, "1", "it uses GPUs 0, 1")
	b.proc.kill()
	s.await("it uses one GPU", func(r *api.StatusResponse) bool { return len(r.Gpus[1].Clients) == 0 })
	if uses := drainGPU(t, s, &api.DrainRequest{Gpu: "0", Look: true}).Uses; len(uses) != 1 || uses[0].Stays != "" {
		t.Errorf("it can move: %v", uses)
	}
	old := newProc(t, s.dir, 0)
	old.connect().register(0).attach(0, gpuA, 0, 0)
	refused(s, "1", "its shim cannot move memory")
	if got := s.status().Problems; len(got) != 0 {
		t.Errorf("problems %q", got)
	}
}

// What does not fit on the other GPU stays.
func TestMigrateDoesNotFit(t *testing.T) {
	dir := t.TempDir()
	twoUsers(t, dir)
	s := start(t, dir, migrating(&carrier{}))
	b := newProc(t, dir, nobody)
	fixed := &swapper{peerConn: b.connect().register(wire.RegisterSwap), proc: b}
	fixed.attach(0, gpuB, 0, 0)
	fixed.allocates(600 * mib)
	fixed.request()
	e := fixed.granted()
	fixed.in(e)
	fixed.has.Fixed = 600 * mib
	fixed.moved(wire.MovedReady, e)
	s.await("it has memory that cannot move", func(r *api.StatusResponse) bool { return r.Gpus[1].Swap.FixedBytes == 600*mib })
	a := newSwapper(t, s)
	a.allocates(600 * mib)
	if r := <-migrateSelf(t, s, "1"); status.Code(r.err) != codes.FailedPrecondition || !strings.Contains(r.err.Error(), "GPU 1 has no place for it: 600 MiB that cannot be moved") {
		t.Errorf("%v, %v", r.MigrateResponse, r.err)
	}
}

// A tenant does not move to a GPU if the GPU or the host has no memory for it and for those that
// are on their way there. Where it may choose it goes to another GPU.
func TestMigrateTwoAtOnce(t *testing.T) {
	dir := t.TempDir()
	twoUsers(t, dir)
	c := &carrier{}
	var gpus []node.Found
	for i := range 4 {
		gpus = append(gpus, node.Found{Index: i, UUID: fmt.Sprintf("GPU-51600000-0000-4000-8000-%012d", i), Name: gpuA.Name, MemoryBytes: gib})
	}
	s := start(t, dir, func(o *Options) {
		migrating(c)(o)
		o.SwapMemory, o.List = 1000*mib, func(context.Context) ([]node.Found, error) { return gpus, nil }
	})
	newOf := func(uid uint32, g node.Found, bytes uint64) *swapper {
		p := newProc(t, dir, uid)
		w := &swapper{peerConn: p.connect().register(wire.RegisterSwap), proc: p}
		w.attach(0, g, 0, 0)
		w.allocates(bytes)
		return w
	}
	newOf(0, gpus[0], 768*mib)
	b := newOf(nobody, gpus[2], 128*mib)
	wants := func(gpu, want string) {
		t.Helper()
		got := ""
		if err := s.Ask(context.Background(), func() {
			g, err := s.moves.Destination(peer.AccountOfUser(nobody), s.Order[2], gpu)
			if got = fmt.Sprint(err); err == nil {
				got = g.UUID
			}
		}); err != nil || !strings.Contains(got, want) {
			t.Errorf("to GPU %q: %s, %v, want %s", gpu, got, err, want)
		}
	}
	wants("", gpus[1].UUID)
	migrateSelf(t, s, "1")
	s.await("it is on its way", func(*api.StatusResponse) (moves bool) {
		return s.Ask(context.Background(), func() { moves = len(s.moves.Migrations) == 1 }) == nil && moves
	})
	wants("", gpus[3].UUID)
	wants("1", gpus[1].UUID)
	b.allocates(640 * mib)
	wants("1", "GPU 1 has no place for it: what is away then may take 1536 MiB of host memory, and there are 1000 MiB")
}

// A tenant whose process ends before anything has moved has not moved, although another one has begun on the other GPU.
func TestMigrateEndsWhereAnotherBegins(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c))
	a, e := newWorking(t, s, wire.RegisterSwap)
	done := migrateSelf(t, s, "1")
	if f := a.want(wire.TypeRevoke); f.Epoch != e {
		t.Fatalf("%+v", f)
	}
	p := newProc(t, s.dir, 0) // of the same user
	b := &swapper{peerConn: p.connect().register(wire.RegisterSwap | wire.RegisterReconnect), proc: p}
	b.attach(0, gpuB, 0, 0)
	a.proc.kill()
	if r := <-done; r.err == nil {
		t.Fatalf("it has moved: %v", r.MigrateResponse)
	}
	if st := s.await("the first one is gone", func(r *api.StatusResponse) bool { return len(r.Gpus[0].Clients) == 0 }); st.Gpus[1].Migrations != 0 {
		t.Errorf("%d have come to GPU 1", st.Gpus[1].Migrations)
	}
}
