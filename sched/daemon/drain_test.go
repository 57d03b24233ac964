// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

func drainGPU(t *testing.T, s *scheduler, req *api.DrainRequest) *api.DrainResponse {
	t.Helper()
	r, err := dial(t, s).Drain(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A drained GPU serves the tenants that it has, also their new processes, and lets others
// wait, over a restart too. Other GPUs admit everybody.
func TestDrainedGPUAdmitsNoNewTenants(t *testing.T) {
	dir := t.TempDir()
	twoUsers(t, dir)
	s := start(t, dir, nil)
	_, old, epoch := newHolder(t, s)
	if r := drainGPU(t, s, &api.DrainRequest{Gpu: "0"}); r.WasDrained || r.Uuid != gpuA.UUID || !slices.Equal(r.Tenants, []string{"user 0"}) {
		t.Errorf("drained: %v", r)
	}
	newProc(t, dir, nobody).connect().register(0).attach(0, gpuA, 0, 0).request()
	newProc(t, dir, nobody).connect().register(0).attach(0, gpuB, 0, 0).request().granted()
	r := s.await("the newcomer is held", func(r *api.StatusResponse) bool { return r.Gpus[0].Held == 1 })
	if !r.Gpus[0].Drained || r.Gpus[1].Drained || len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "1 new processes wait") {
		t.Errorf("GPU 0 %v, problems %q", r.Gpus[0].Drained, r.Problems)
	}
	if look := drainGPU(t, s, &api.DrainRequest{Gpu: "0", Look: true}); !look.WasDrained || !slices.Equal(look.Tenants, []string{"user 0"}) {
		t.Errorf("a look at the drained GPU: %v", look)
	}
	if drainGPU(t, s, &api.DrainRequest{Gpu: "1", Look: true}); s.status().Gpus[1].Drained {
		t.Error("a look has drained GPU 1")
	}
	old.release(epoch)
	_, more := newClient(t, s)
	more.release(more.request().granted()) // the newcomer waited longer
	s.await("nobody holds GPU 0", func(r *api.StatusResponse) bool {
		return !slices.ContainsFunc(r.Gpus[0].Clients, func(c *api.Client) bool { return c.State != api.ClientState_CLIENT_STATE_IDLE })
	})
	s.stop()
	s = start(t, dir, nil)
	if !s.status().Gpus[0].Drained {
		t.Error("a restart has undrained the GPU")
	}
	newcomer := newProc(t, dir, nobody).connect().register(0).attach(0, gpuA, 0, 0).request()
	s.await("the newcomer is held", func(r *api.StatusResponse) bool { return r.Gpus[0].Held == 1 })
	if r := drainGPU(t, s, &api.DrainRequest{Gpu: gpuA.UUID, Undrain: true}); !r.WasDrained {
		t.Errorf("undrained: %v", r)
	}
	newcomer.granted()
	if r := s.status(); r.Gpus[0].Drained || r.Gpus[0].Held != 0 || len(r.Problems) != 0 {
		t.Errorf("undrained: %v, %q", r.Gpus[0], r.Problems)
	}
}

// A process that waits for a drained GPU uses the GPU if it has memory there, as it can have that ran
// while there was no scheduler.
func TestHeldMemoryIsAUse(t *testing.T) {
	dir := t.TempDir()
	twoUsers(t, dir)
	s := start(t, dir, nil)
	drainGPU(t, s, &api.DrainRequest{Gpu: "0"})
	c := newProc(t, dir, nobody).connect().register(0).attach(0, gpuA, 0, 0)
	look := func() []*api.DrainTenant { return drainGPU(t, s, &api.DrainRequest{Gpu: "0", Look: true}).Uses }
	if u := look(); len(u) != 0 {
		t.Errorf("without memory: %v", u)
	}
	c.reserve(gib, gib, wire.ReserveForce)
	if u := look(); len(u) != 1 || u[0].Uid != nobody || !strings.Contains(u[0].Stays, "it has memory") {
		t.Errorf("with memory: %v", u)
	}
	c.reserve(0, 0, 0)
	if u := look(); len(u) != 0 {
		t.Errorf("without memory again: %v", u)
	}
}

// A process that waits for a drained GPU waits on when it comes back over another connection, also
// to another scheduler. Those that use the GPU go on, until an undrain and beyond.
func TestHeldProcessComesBack(t *testing.T) {
	dir := t.TempDir()
	twoUsers(t, dir)
	s := start(t, dir, nil)
	user, _ := newClient(t, s)
	drainGPU(t, s, &api.DrainRequest{Gpu: "0"})
	waits := newProc(t, dir, nobody)
	back := func(p *proc, held uint32) {
		t.Helper()
		p.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, 0)
		if n := s.status().Gpus[0].Held; n != held {
			t.Errorf("%d processes wait, want %d", n, held)
		}
	}
	waits.connect().register(0).attach(0, gpuA, 0, 0)
	back(waits, 1)
	s.stop()
	s = start(t, dir, nil)
	back(waits, 1)
	back(user, 1)
	drainGPU(t, s, &api.DrainRequest{Gpu: "0", Undrain: true})
	drainGPU(t, s, &api.DrainRequest{Gpu: "0"})
	s.stop()
	s = start(t, dir, nil)
	back(waits, 0)

	gone := newProc(t, dir, nobody+1)
	gone.connect().register(0).attach(0, gpuA, 0, 0)
	gone.kill()
	s.await("its end", func(r *api.StatusResponse) bool { return r.Clients == 1 })
	s.stop()
	if held := s.settings.Set.Held[gpuA.UUID]; len(held) != 0 {
		t.Errorf("still recorded: %v", held)
	}

	// It ends while no scheduler runs.
	s = start(t, dir, nil)
	gone, stays := newProc(t, dir, nobody+1), newProc(t, dir, nobody+1)
	gone.connect().register(0).attach(0, gpuA, 0, 0)
	stays.connect().register(0).attach(0, gpuA, 0, 0)
	s.stop()
	gone.kill()
	s = start(t, dir, nil)
	s.stop()
	if held := s.settings.Set.Held[gpuA.UUID]; len(held) != 1 || held[0].PID != int32(stays.cmd.Process.Pid) {
		t.Errorf("still recorded: %v", held)
	}
}

// A process that the scheduler cannot look at, as while no descriptor is free, may live.
func TestUnseenProcessHasNotEnded(t *testing.T) {
	d := bare(t)
	finder := d.Peers
	p := newProc(t, t.TempDir(), nobody)
	found, err := finder.FindPID(int32(p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	found.Close()
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	none := lim
	none.Cur = 0
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	unseen := d.HasEnded(found.Process)
	_, failed := d.moves.OnProcess(found.Process, nil)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	if unseen || d.HasEnded(found.Process) {
		t.Error("it lives")
	}
	if failed == nil {
		t.Error("it stays off its GPU")
	}
	if !d.HasEnded(peer.Process{PID: found.PID, Start: found.Start + 1}) {
		t.Error("another process has its pid")
	}
	p.kill()
	if !d.HasEnded(found.Process) {
		t.Error("it has ended")
	}
}

// A GPU that could not be opened is there for what is recorded of it, keeps what is known of it,
// and is looked at again when it is well.
func TestUnopenedGPU(t *testing.T) {
	dir := t.TempDir()
	found := func(a, b node.Found) func(o *Options) {
		return func(o *Options) {
			o.List = func(context.Context) ([]node.Found, error) { return []node.Found{a, b}, nil }
		}
	}
	lost := func(g node.Found) node.Found {
		g.MemoryBytes, g.Unopened = 0, true
		return g
	}
	s := start(t, dir, found(gpuA, gpuB))
	drainGPU(t, s, &api.DrainRequest{Gpu: "1"})
	s.stop()
	// Of GPU 0 nothing is recorded.
	s = start(t, dir, found(lost(gpuA), lost(gpuB)))
	if r := s.status(); len(r.Gpus) != 1 || r.Gpus[0].Uuid != gpuB.UUID || !r.Gpus[0].Drained || r.Gpus[0].MemoryBytes != 0 {
		t.Fatalf("both lost: %v", r.Gpus)
	}
	s.stop()
	var well atomic.Bool
	s = start(t, dir, func(o *Options) {
		swapping(o)
		o.List = func(context.Context) ([]node.Found, error) {
			if well.Load() {
				return []node.Found{lost(gpuA), gpuB}, nil
			}
			return []node.Found{gpuA, lost(gpuB)}, nil
		}
	})
	if r := s.status(); len(r.Gpus) != 2 || r.Gpus[0].MemoryBytes != gpuA.MemoryBytes || r.Gpus[1].MemoryBytes != 0 {
		t.Fatalf("one lost: %v", r.Gpus)
	}
	well.Store(true)
	if err := s.Ask(t.Context(), func() { s.discovered = loop.Now().Add(-rediscoverPause) }); err != nil {
		t.Fatal(err)
	}
	drainGPU(t, s, &api.DrainRequest{Gpu: "1", Undrain: true})
	r := s.await("the memory is known", func(r *api.StatusResponse) bool { return r.Gpus[1].MemoryBytes == gpuB.MemoryBytes })
	if r.Gpus[0].MemoryBytes != gpuA.MemoryBytes {
		t.Errorf("GPU 0 has %d bytes", r.Gpus[0].MemoryBytes)
	}
	if a, b := r.Gpus[0].Swap, r.Gpus[1].Swap; b == nil || b.CapacityBytes != a.CapacityBytes {
		t.Fatalf("GPU 1 swaps %v, GPU 0 %v", b, a)
	}
	c := newSwapperOn(t, s, gpuB)
	c.allocates(256 * mib)
	c.request()
	if c.granted(); c.page.Room(0) < 256*mib {
		t.Errorf("room for %d MiB", c.page.Room(0)>>20)
	}
}

// What the driver tells of a GPU that does no more work stays in the status until
// somebody says that the GPU is well, over restarts of the scheduler too, or until the machine
// starts.
func TestFaultStaysUntilUndrain(t *testing.T) {
	fault := make(chan string, 1)
	samples := []metrics.GPUSample{{UUID: gpuA.UUID}, {UUID: gpuB.UUID}}
	dir := t.TempDir()
	s := start(t, dir, func(o *Options) {
		o.Sample = func(context.Context) ([]metrics.GPUSample, error) {
			select {
			case why := <-fault:
				samples[1].Faults++
				samples[1].Fault = why
			default:
			}
			return slices.Clone(samples), nil
		}
	}, func(d *Daemon) { d.watch.LookPause = time.Millisecond })
	newClient(t, s)
	for _, why := range []string{"Xid 79", "Xid 48"} {
		fault <- why
		r := s.await("the fault", func(r *api.StatusResponse) bool { return r.Gpus[1].Fault == why })
		if r.Gpus[0].Fault != "" || len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "GPU 1: "+why) {
			t.Errorf("GPU 0: %q, problems %q", r.Gpus[0].Fault, r.Problems)
		}
		drainGPU(t, s, &api.DrainRequest{Gpu: "1", Undrain: true})
		if r := s.status(); r.Gpus[1].Fault != "" || len(r.Problems) != 0 {
			t.Errorf("after undrain: %q, %q", r.Gpus[1].Fault, r.Problems)
		}
	}
	fault <- "Xid 79"
	s.await("the fault", func(r *api.StatusResponse) bool { return r.Gpus[1].Fault != "" })
	restarted := func(want string, more ...func(*Daemon)) {
		t.Helper()
		s.stop()
		s = start(t, dir, nil, more...)
		if r := s.status(); r.Gpus[1].Fault != want || r.Gpus[0].Fault != "" {
			t.Errorf("after a restart: %q on GPU 1, want %q; %q on GPU 0", r.Gpus[1].Fault, want, r.Gpus[0].Fault)
		}
	}
	restarted("Xid 79")
	restarted("", func(d *Daemon) { d.BootID = "another" })
	restarted("Xid 79")
	drainGPU(t, s, &api.DrainRequest{Gpu: "1", Undrain: true})
	restarted("")
}
