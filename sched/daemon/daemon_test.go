// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/wire"
)

func readState(t *testing.T, dir string) state.File {
	t.Helper()
	var s state.File
	text, err := os.ReadFile(filepath.Join(dir, "state.json"))
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestTurns(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.Quantum = sched.MinQuantum })
	pa, a, e1 := newHolder(t, s)
	if got := a.page.Word(0); got != uint32(e1) {
		t.Errorf("word %d at GRANT of epoch %d", got, e1)
	}
	st := readState(t, s.dir).GPUs[gpuA.UUID]
	if uint64(st.Epoch) != e1 || len(st.Holders) != 1 || int(st.Holders[0].PID) != pa.cmd.Process.Pid {
		t.Errorf("state file at GRANT: %+v, holders %+v", st, st.Holders)
	}
	_, b := newClient(t, s)
	n := a.expect(wire.TypeNotice)
	waiters, present := a.page.Hints(0)
	if waiters != 0 || present != 1 || n.Notice != (wire.Notice{Present: 1}) {
		t.Errorf("NOTICE %+v, page %d waiters %d present", n.Notice, waiters, present)
	}
	b.request()
	revoke := a.expect(wire.TypeRevoke)
	if revoke.Epoch != e1 || a.page.Word(0) != wire.WordClosed || revoke.Revoke.Waiters != 1 {
		t.Errorf("REVOKE %+v with word %d", revoke.Revoke, a.page.Word(0))
	}
	if b.page.Word(0) != wire.WordClosed {
		t.Error("second gate open before the release")
	}
	a.release(e1)
	e2 := b.granted()
	if e2 <= e1 || b.page.Word(0) != uint32(e2) || a.page.Word(0) != wire.WordClosed {
		t.Errorf("epochs %d then %d, words %d and %d", e1, e2, a.page.Word(0), b.page.Word(0))
	}
	a.request() // the TQ is over: revoke at once
	b.expect(wire.TypeRevoke)
	b.release(e2)
	if e3 := a.granted(); e3 <= e2 {
		t.Errorf("epoch %d after %d", e3, e2)
	}
}

// The descriptor that a client gets is that of a sealed page.
func TestPageIsSealed(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, c := newClient(t, s)
	if mem, err := unix.Mmap(c.fd, 0, wire.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		unix.Munmap(mem)
		t.Error("a client can map its grant page writable")
	}
}

func TestHolderIsKilled(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, _, _ := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	p.kill() // the connection stays open, as it would in a forked child
	b.granted()
	if r := s.status(); r.Gpus[0].Reclaims != 1 || len(r.Gpus[0].Clients) != 1 || r.Clients != 1 {
		t.Errorf("after the death: %v", r)
	}
}

func TestWaiterIsKilled(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, a, e := newHolder(t, s)
	p, b := newClient(t, s)
	b.request()
	_, c := newClient(t, s)
	c.request()
	p.kill()
	a.release(e)
	c.granted()
}

func TestLostConnectionProvesNothing(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, a, _ := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	a.Close()
	s.await("the holder is lost", func(r *api.StatusResponse) bool {
		return stateOf(r, a.id) == api.ClientState_CLIENT_STATE_LOST
	})
	if a.page.Word(0) != wire.WordClosed {
		t.Error("gate open without a connection")
	}
	if b.page.Word(0) != wire.WordClosed {
		t.Error("granted on the word of a lost connection")
	}
	p.kill()
	b.granted()
}

func TestReconnect(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, a, e := newHolder(t, s)
	a.Close()
	again := p.connect().register(wire.RegisterReconnect)
	if again.id != a.id {
		t.Errorf("the same process is client %d, then %d", a.id, again.id)
	}
	again.attach(0, gpuA, e, 0)
	if again.page.Word(0) != uint32(e) {
		t.Errorf("word %d after ATTACHED, the client holds %d", again.page.Word(0), e)
	}
	// A second connection while the first lives: the newest one counts.
	third := p.connect().register(0).attach(0, gpuA, 0, wire.AttachWant)
	again.expectClosed()
	if e3 := third.granted(); e3 <= e {
		t.Errorf("epoch %d after %d", e3, e)
	}
	if r := s.status(); r.Clients != 1 {
		t.Errorf("%d clients of one process", r.Clients)
	}
}

func TestStoppedHolderIsFenced(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) {
		o.Quantum, o.Grace = sched.MinQuantum, 20*time.Millisecond
	})
	p, a, e := newHolder(t, s)
	if err := p.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	_, b := newClient(t, s)
	b.request()
	e2 := b.granted()
	r := s.status()
	if stateOf(r, a.id) != api.ClientState_CLIENT_STATE_FENCED || len(r.Problems) == 0 || r.Gpus[0].Fences != 1 {
		t.Errorf("status after the fence: %v", r)
	}
	if a.page.Word(0) != wire.WordClosed {
		t.Error("gate of the fenced client is open")
	}
	// It wakes up and obeys at last.
	if err := p.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	a.expect(wire.TypeRevoke)
	a.release(e).request()
	b.expect(wire.TypeRevoke)
	b.release(e2)
	a.granted()
	s.await("no problem is left after the late release", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
}

func TestSeveralGPUs(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, a, _ := newHolder(t, s)
	_, b := newClient(t, s)
	b.attach(1, gpuB, 0, wire.AttachWant)
	if f := b.expect(wire.TypeGrant); f.Channel != 1 || b.page.Word(1) != uint32(f.Epoch) {
		t.Errorf("grant on channel %d, word %d", f.Channel, b.page.Word(1))
	}
	if a.page.Word(0) == wire.WordClosed || b.page.Word(0) != wire.WordClosed {
		t.Error("one GPU's grant changed another's")
	}
}

func TestAttachErrors(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, c := newClient(t, s)
	for name, tc := range map[string]struct {
		channel uint16
		uuid    wire.UUID
		code    uint32
	}{
		"channel attached twice":  {0, uuidOf(gpuB), wire.ErrChannel},
		"channel beyond REGISTER": {2, uuidOf(gpuB), wire.ErrChannel},
		"GPU attached twice":      {1, uuidOf(gpuA), wire.ErrChannel},
		"unknown GPU":             {1, wire.UUID{1}, wire.ErrUnknownGPU},
	} {
		c.send(wire.Frame{Type: wire.TypeAttach, Channel: tc.channel, Attach: wire.Attach{UUID: tc.uuid}})
		if f := c.expect(wire.TypeAttached); f.Code != tc.code || f.Channel != tc.channel {
			t.Errorf("%s: code %d on channel %d, want %d on %d", name, f.Code, f.Channel, tc.code, tc.channel)
		}
	}
	c.request().granted() // none of it did harm
	// Of these, the process runs on the unknown GPU.
	text := fmt.Sprintf("user 0 (pid %d) runs without scheduling on GPU-01000000-0000-0000-0000-000000000000: no such GPU is known here", p.cmd.Process.Pid)
	if r := s.status(); len(r.Problems) != 1 || r.Problems[0] != text {
		t.Errorf("problems %q, want %q", r.Problems, text)
	}
	p.kill() // and its socket stays open, as where a child has it
	s.await("no problem is left of a dead process", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
}

// However many processes of a tenant run on GPUs that the scheduler lacks, they are a few
// problems, and for a while one event.
func TestUnknownGPUsAreToldOfOnce(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	var last *peerConn
	for range node.MaxNamed + 2 {
		last = newProc(t, s.dir, 0).connect().register(0)
		for i := range byte(2) {
			last.send(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: wire.UUID{i + 1}}})
			last.expect(wire.TypeAttached)
		}
	}
	r := s.status()
	if n := len(r.Problems); n != node.MaxNamed+1 || !strings.HasPrefix(r.Problems[n-1], "2 more processes") {
		t.Errorf("%d problems: %q", n, r.Problems)
	}
	var own []problem
	if err := s.Ask(t.Context(), func() { own = s.ownProblems() }); err != nil || len(own) != 0 {
		t.Errorf("a tenant makes the scheduler itself unwell: %v, %v", own, err)
	}
	warnings := func() []*api.Event {
		t.Helper()
		r, err := dial(t, s).Events(t.Context(), &api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_WARNING}})
		if err != nil {
			t.Fatal(err)
		}
		return r.Events
	}
	if all := warnings(); len(all) != 1 || all[0].Pid == 0 || !strings.Contains(all[0].Reason, "GPU GPU-01000000-") {
		t.Errorf("events %v, want one", all)
	}
	if err := s.Ask(t.Context(), func() {
		for what, told := range s.Told {
			s.Told[what] = told.Add(-node.RefusalPause)
		}
	}); err != nil {
		t.Fatal(err)
	}
	last.send(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: wire.UUID{3}}})
	last.expect(wire.TypeAttached)
	if all := warnings(); len(all) != 2 {
		t.Errorf("events %v, want another one after the pause", all)
	}
}

// A search that fails is not taken for a driver that is not there.
func TestWhyNoGPU(t *testing.T) {
	said := &lastWords{}
	s := begin(t, t.TempDir(), func(o *Options) {
		o.Log.Logger.SetOutput(said)
		o.List = func(context.Context) ([]node.Found, error) { return nil, errors.New("simulated GPU /x: not there") }
	})
	for until := time.Now().Add(patience); !slices.Contains(s.status().Problems, "no GPU found: simulated GPU /x: not there"); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("problems: %v", s.status().Problems)
		}
	}
	if text := said.String(); !strings.Contains(text, "simulated GPU /x: not there") || strings.Contains(text, "driver") {
		t.Errorf("the scheduler said:\n%s", text)
	}
}

// A GPU that appears after the start is found by the first client that uses
// it. What that client sends meanwhile is not lost.
func TestGPUFoundLater(t *testing.T) {
	found := make(chan []node.Found, 2)
	s := begin(t, t.TempDir(), func(o *Options) {
		o.List = func(ctx context.Context) ([]node.Found, error) {
			select {
			case g := <-found:
				return g, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	})
	c := newProc(t, s.dir, 0).connect().register(0)
	c.send(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	c.request()
	found <- nil
	if f := c.expect(wire.TypeAttached); f.Code != wire.ErrUnknownGPU {
		t.Errorf("code %d before the GPU is there", f.Code)
	}
	unarbitrated := func(r *api.StatusResponse, why string) bool {
		return slices.ContainsFunc(r.Problems, func(p string) bool {
			return strings.Contains(p, "runs without scheduling on "+gpuA.UUID) && strings.HasSuffix(p, why)
		})
	}
	if r := s.status(); len(r.Problems) != 2 || !unarbitrated(r, "no such GPU is known here") {
		t.Errorf("problems without a GPU: %v", r.Problems)
	}
	other := newProc(t, s.dir, 0).connect().register(0)
	other.send(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	other.expect(wire.TypeAttached)
	if err := s.Ask(context.Background(), func() { s.discovered = 0 }); err != nil { // as after the pause
		t.Fatal(err)
	}
	c.send(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	c.request()
	found <- []node.Found{gpuA}
	if f := c.expect(wire.TypeAttached); f.Code != wire.OK {
		t.Errorf("code %d after the GPU appeared", f.Code)
	}
	c.granted()
	if r := s.status(); len(r.Problems) != 1 || !unarbitrated(r, "it was found later: restart the process") {
		t.Errorf("the other process goes on as before: %v", r.Problems)
	}
	other.attach(0, gpuA, 0, 0)
	if r := s.status(); len(r.Problems) != 0 {
		t.Errorf("both are arbitrated: %v", r.Problems)
	}
}

func TestConcurrentMode(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	ctl, err := api.Dial(context.Background(), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ctl.Close()
	set := func(m api.Mode) {
		if _, err := ctl.Set(context.Background(), &api.SetRequest{Mode: m}); err != nil {
			t.Fatal(err)
		}
	}
	set(api.Mode_MODE_CONCURRENT)
	f := b.expect(wire.TypeGrant)
	if f.Code != wire.GrantConcurrent || b.page.Flags(0) != wire.GrantConcurrent || a.page.Word(0) != uint32(e) {
		t.Errorf("grant %+v, flags %d, first word %d", f, b.page.Flags(0), a.page.Word(0))
	}
	if a.page.Flags(0) != wire.GrantConcurrent {
		t.Errorf("flags %d of the client that held the GPU before: it goes on as if others waited", a.page.Flags(0))
	}
	if st := readState(t, s.dir).GPUs[gpuA.UUID]; len(st.Holders) != 2 {
		t.Errorf("state file does not name both holders: %+v", st)
	}
	set(api.Mode_MODE_EXCLUSIVE)
	a.expect(wire.TypeRevoke)
	b.expect(wire.TypeRevoke)
	a.request().release(e)
	if a.page.Word(0) != wire.WordClosed {
		t.Error("granted while the other still drains")
	}
	b.release(f.Epoch)
	a.granted()
}

// A child of a dead process may map its page. The page does not say that the child
// may run.
func TestPageOfTheDeadIsShut(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, a, e := newHolder(t, s) // a is in this process, so it outlives p
	if a.page.Word(0) != uint32(e) {
		t.Fatalf("word %d under grant %d", a.page.Word(0), e)
	}
	_, b := newClient(t, s)
	b.request()
	p.kill()
	b.granted()
	if got := a.page.Word(0); got != wire.WordClosed {
		t.Errorf("word %d: the gate of the dead is open while another tenant has the GPU", got)
	}
}

// On a full disk nothing is granted that could not be recorded, and the status says
// why. Once the state file has its blocks, grants need no more of them.
func TestStateDiskIsFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k,mode=755"); err != nil {
		t.Skipf("mount a small disk: %v", err)
	}
	s := start(t, dir, nil)
	t.Cleanup(func() { s.stop(); _ = unix.Unmount(dir, unix.MNT_DETACH) })
	filler := filepath.Join(dir, "filler")
	fill := func() {
		t.Helper()
		if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("fill the disk: %v", err)
		}
	}
	fill()
	_, a := newClient(t, s)
	a.request()
	s.await("the problem is reported", func(r *api.StatusResponse) bool {
		return len(r.Problems) == 1 && strings.Contains(r.Problems[0], "no space left on device")
	})
	if a.page.Word(0) != wire.WordClosed {
		t.Error("granted without a record")
	}
	quantum := func() error {
		_, err := dial(t, s).Set(context.Background(), &api.SetRequest{QuantumNs: int64(time.Second)})
		return err
	}
	if err := quantum(); err == nil || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("a setting that would be lost: %v", err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	e := a.granted()
	s.await("the problem is over", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
	a.release(e)
	a.request()
	e = a.granted() // both files that change places have their blocks now
	fill()
	a.release(e)
	a.request()
	a.granted()
}

// While the state file cannot be written, nothing is granted that a restart
// would not know of. Reservations are answered.
func TestStateFileCannotBeWritten(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, a := newClient(t, s)
	block := filepath.Join(s.dir, "state.json.tmp")
	if err := os.Mkdir(block, 0o755); err != nil {
		t.Fatal(err)
	}
	a.request()
	s.await("the problem is reported", func(r *api.StatusResponse) bool { return len(r.Problems) == 1 })
	if a.page.Word(0) != wire.WordClosed {
		t.Error("granted without a record")
	}
	a.reserves(1<<20, 1<<20, 0, wire.OK, wire.Reserved{Total: 1 << 20, Used: 1 << 20}) // that needs no record
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	a.granted()
	s.await("the problem is over", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
}
