// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/wire"
)

// driver says which processes use GPU A.
type driver struct {
	mu    sync.Mutex
	users map[uint32]uint64
	err   error
	asked int
	open  bool
}

func (d *driver) set(err error, users map[uint32]uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.users, d.err, d.asked = users, err, 0
}

func (d *driver) sample(context.Context) ([]metrics.GPUSample, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked++
	d.open = true
	return []metrics.GPUSample{{UUID: gpuA.UUID, Processes: d.users}, {UUID: gpuB.UUID}}, d.err
}

func (d *driver) release(context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open = false
}

func (d *driver) isOpen() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.open
}

func (d *driver) answered(n int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked >= n
}

// A process on the GPU that is no client is a problem, in the status and the events,
// until it is gone. A client is none, and neither is a process that has ended.
func TestProcessesThatAreNoClientsAreSeen(t *testing.T) {
	var nvml driver
	s := start(t, t.TempDir(), func(o *Options) { o.Sample = nvml.sample }, func(d *Daemon) { d.watch.LookPause = time.Millisecond })
	client, _ := newClient(t, s)
	bypass := newProc(t, s.dir, 0)
	const ended = 1 << 30 // no such process
	users := map[uint32]uint64{uint32(client.cmd.Process.Pid): 1 << 20, uint32(bypass.cmd.Process.Pid): 2 << 20, ended: 0}
	nvml.set(nil, users)
	r := s.await("the process is seen", func(r *api.StatusResponse) bool { return len(r.Unmanaged) > 0 })
	pid := uint32(bypass.cmd.Process.Pid)
	u := r.Unmanaged[0]
	if len(r.Unmanaged) != 1 || u.Pid != pid || u.Uuid != gpuA.UUID || u.MemoryBytes != 2<<20 || u.Uid != 0 || u.Command == "" {
		t.Errorf("seen: %v", r.Unmanaged)
	}
	if len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "GPU 0") || !strings.Contains(r.Problems[0], "without nvshare") {
		t.Errorf("problems %q", r.Problems)
	}
	var own []problem
	if err := s.Ask(context.Background(), func() { own = s.ownProblems() }); err != nil || len(own) != 0 {
		t.Errorf("a tenant makes the scheduler itself unwell: %v, %v", own, err)
	}
	events, err := dial(t, s).Events(context.Background(), &api.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range events.Events {
		if e.Type == api.EventType_EVENT_TYPE_UNMANAGED {
			n++
			if e.Pid != pid || e.Uuid != gpuA.UUID || e.Bytes != 2<<20 || e.Reason == "" {
				t.Errorf("event %v", e)
			}
		}
	}
	if n != 1 {
		t.Errorf("%d events, want one for the process", n)
	}
	// It registers after all.
	bypass.connect().register(0).attach(0, gpuA, 0, 0)
	s.await("a client is no problem", func(r *api.StatusResponse) bool { return len(r.Unmanaged)+len(r.Problems) == 0 })
}

// A process that has just begun may be on the GPU before it registers: it is not told of
// when it is seen once. Where nobody shares a GPU, the driver is not asked.
func TestStrangersAreSeenTwice(t *testing.T) {
	var nvml driver
	s := start(t, t.TempDir(), func(o *Options) { o.Sample = nvml.sample }, func(d *Daemon) { d.watch.LookPause = time.Millisecond })
	if nvml.answered(1) {
		t.Error("the driver was asked although nobody uses nvshare")
	}
	newClient(t, s)
	me := map[uint32]uint64{uint32(os.Getpid()): 0}
	for _, look := range []func(){
		func() {
			s.watch.FinishLook(s.watch.StrangersIn([]metrics.GPUSample{{UUID: gpuA.UUID, Processes: me}}, nil), nil)
		},
		func() { s.watch.FinishLook(nil, nil) },
		func() { s.watch.FinishLook(nil, errors.New("NVML hangs")) },
	} {
		if err := s.Ask(context.Background(), func() {
			delete(s.watch.Strangers, s.Order[0])
			look()
			if all, problems := s.watch.StrangersStatus(s.Order[0]); len(all)+len(problems) != 0 {
				t.Errorf("told of %v %q", all, problems)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// The driver can be unloaded, and a GPU be reset, while nobody shares: nothing of it is open then, also
// where somebody reads the metrics.
func TestDriverIsClosedWhileNobodyShares(t *testing.T) {
	var nvml driver
	s := start(t, t.TempDir(), func(o *Options) { o.Sample, o.Release = nvml.sample, nvml.release }, func(d *Daemon) { d.watch.LookPause = time.Millisecond })
	p, _ := newClient(t, s)
	s.await("the driver is asked", func(*api.StatusResponse) bool { return nvml.isOpen() })
	p.kill()
	closed := func(*api.StatusResponse) bool { return !nvml.isOpen() }
	s.await("the driver is closed", closed)
	if err := s.Ask(t.Context(), func() { s.watch.LookPause = time.Hour }); err != nil {
		t.Fatal(err)
	}
	if _, body := get(t, s, "/metrics"); !strings.Contains(body, "nvshare_nvml_up 1") {
		t.Errorf("the metrics lack what the driver says:\n%s", body)
	}
	s.await("the driver is closed again", closed)
}

// However many processes a tenant has on a GPU, nobody else's are overlooked; the status names some.
func TestAllStrangersAreSeen(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	users := map[uint32]uint64{}
	for range 70 {
		c := exec.Command("sleep", "600")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Process.Kill(); c.Wait() })
		users[uint32(c.Process.Pid)] = 1
	}
	found := s.watch.StrangersIn([]metrics.GPUSample{{UUID: gpuA.UUID, Processes: users}}, nil)
	if n := len(found[gpuA.UUID]); n != len(users) {
		t.Errorf("%d of %d processes are found", n, len(users))
	}
	if err := s.Ask(t.Context(), func() {
		s.watch.FinishLook(found, nil)
		s.watch.FinishLook(found, nil)
		if all, _ := s.watch.StrangersStatus(s.Order[0]); len(all) != 64 {
			t.Errorf("the status names %d, want 64", len(all))
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// A shim that does not reserve its memory does not hold a memory limit, and is named.
func TestShimTooOldForItsLimit(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	const mib = 1 << 20
	uid := uint32(0)
	if _, err := dial(t, s).SetShare(context.Background(), &api.SetShareRequest{Uid: &uid, MemoryBytes: proto.Uint64(100 * mib)}); err != nil {
		t.Fatal(err)
	}
	_, old := newClient(t, s)
	old.send(wire.Frame{Type: wire.TypeStats, Stats: wire.Stats{MemBytes: 200 * mib}})
	s.await("the old shim is named", func(r *api.StatusResponse) bool {
		return len(r.Problems) == 1 && strings.Contains(r.Problems[0], "too old to hold a memory limit") && strings.Contains(r.Problems[0], "200 MiB")
	})
	old.reserve(50*mib, 50*mib, 0)
	s.await("a shim that reserves is not", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
}

// A desktop's programs draw on the GPU, and are nobody's concern until their user has a limit or another term.
func TestStrangersThatDraw(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	me := uint32(os.Getpid())
	found := s.watch.StrangersIn([]metrics.GPUSample{{UUID: gpuA.UUID, Processes: map[uint32]uint64{me: 0}, Draws: map[uint32]bool{me: true}}}, nil)
	if len(found[gpuA.UUID]) != 1 {
		_, err := s.Peers.Look(int32(me))
		t.Fatalf("this process is not found: %v, %v", found, err)
	}
	named := func() (n int) {
		t.Helper()
		if err := s.Ask(t.Context(), func() {
			s.watch.FinishLook(found, nil)
			s.watch.FinishLook(found, nil)
			all, problems := s.watch.StrangersStatus(s.Order[0])
			n = len(all) + len(problems)
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := named(); n != 0 {
		t.Errorf("a program that draws is named %d times", n)
	}
	uid, limit := uint32(os.Getuid()), uint32(50)
	if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, CoreLimit: &limit}); err != nil {
		t.Fatal(err)
	}
	if n := named(); n != 2 {
		t.Errorf("one of a user with a limit is named %d times, want in the status and as a problem", n)
	}
}
