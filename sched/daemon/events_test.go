// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

func events(t *testing.T, c *api.Conn, req *api.EventsRequest) *api.EventsResponse {
	t.Helper()
	r, err := c.Events(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// story is what the events say, one word each.
func story(events []*api.Event) string {
	var words []string
	for _, e := range events {
		word := strings.ToLower(strings.TrimPrefix(e.Type.String(), "EVENT_TYPE_"))
		if e.Reason != "" && e.Type != api.EventType_EVENT_TYPE_START && e.Type != api.EventType_EVENT_TYPE_GPU {
			word += ":" + e.Reason
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

func TestEventsTellTheStory(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	ctl := dial(t, s)
	p, a, e1 := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	s.await("b waits", func(r *api.StatusResponse) bool {
		return stateOf(r, b.id) == api.ClientState_CLIENT_STATE_WAITING
	})
	if _, err := ctl.Set(context.Background(), &api.SetRequest{Gpu: "0", QuantumNs: int64(sched.MinQuantum)}); err != nil {
		t.Fatal(err)
	}
	a.expect(wire.TypeRevoke)
	a.release(e1)
	e2 := b.granted()
	a.request()
	b.expect(wire.TypeRevoke)
	b.release(e2)
	e3 := a.granted()
	p.kill()
	s.await("a is gone", func(r *api.StatusResponse) bool { return r.Clients == 1 })

	r := events(t, ctl, &api.EventsRequest{})
	want := "start gpu gpu register grant register set revoke:quantum release:revoked grant revoke:quantum release:revoked grant end release:exit"
	if got := story(r.Events); got != want {
		t.Fatalf("got\n%s, want\n%s", got, want)
	}
	for i, e := range r.Events {
		if e.Sequence != uint64(i+1) || e.TimeNs == 0 || i > 0 && e.TimeNs < r.Events[i-1].TimeNs {
			t.Errorf("event %d: %v", i, e)
		}
	}
	if r.Lost != 0 || r.Next != uint64(len(r.Events)) {
		t.Errorf("lost %d, next %d", r.Lost, r.Next)
	}
	set, revoke, release, grant, exit := r.Events[6], r.Events[7], r.Events[8], r.Events[9], r.Events[14]
	if set.Setting != "turn-length" || set.Old != "24h0m0s" || set.New != "1ms" || set.Uuid != gpuA.UUID {
		t.Errorf("set %v", set)
	}
	if revoke.Client != a.id || revoke.Pid != uint32(p.cmd.Process.Pid) || revoke.Waiters != 1 || revoke.Epoch != e1 || revoke.Uuid != gpuA.UUID {
		t.Errorf("revoke %v", revoke)
	}
	if release.Client != a.id || release.Epoch != e1 || release.HeldNs <= 0 || release.DrainedNs <= 0 || release.DrainedNs > release.HeldNs {
		t.Errorf("release %v", release)
	}
	if grant.Client != b.id || grant.Epoch != e2 || grant.WaitedNs <= 0 {
		t.Errorf("grant %v", grant)
	}
	if exit.Client != a.id || exit.Epoch != e3 || exit.Fenced || exit.HeldNs <= 0 { // nobody knows whether it was killed
		t.Errorf("exit %v", exit)
	}

	// One GPU's only; after some; after all; of another run.
	if r := events(t, ctl, &api.EventsRequest{Gpu: "1"}); story(r.Events) != "gpu" {
		t.Errorf("GPU 1: %s", story(r.Events))
	}
	if got := events(t, ctl, &api.EventsRequest{Since: r.Next - 2, Run: r.Run}); story(got.Events) != "end release:exit" {
		t.Errorf("the last two: %s", story(got.Events))
	}
	if got := events(t, ctl, &api.EventsRequest{Since: r.Next, Run: r.Run}); len(got.Events) != 0 || got.Next != r.Next {
		t.Errorf("none: %v", got)
	}
	if got := events(t, ctl, &api.EventsRequest{Since: r.Next, Run: r.Run - 1}); len(got.Events) != len(r.Events) {
		t.Errorf("of another run: %s", story(got.Events))
	}
	if _, err := ctl.Events(context.Background(), &api.EventsRequest{Gpu: "7"}); status.Code(err) != codes.NotFound {
		t.Errorf("no such GPU: %v", err)
	}
}

func TestBypassIsAnEvent(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := newProc(t, s.dir, 0).connect()
	f := registerFrame()
	f.Register.Bypassed = 2
	c.send(f)
	c.expect(wire.TypeWelcome)
	c.attach(0, gpuA, 0, 0)
	r := events(t, dial(t, s), &api.EventsRequest{})
	if got := story(r.Events); !strings.HasSuffix(got, "register bypass:2 entry points of CUDA bypass the shim") {
		t.Errorf("got %s", got)
	}
}

// Who holds the GPU after a restart is told by the new scheduler's events.
func TestEventsAfterARestart(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	p, _, e := newHolder(t, s)
	old := events(t, dial(t, s), &api.EventsRequest{})
	s.stop()
	s = start(t, dir, nil)
	c := p.connect().register(wire.RegisterReconnect).attach(0, gpuA, e, 0)
	r := events(t, dial(t, s), &api.EventsRequest{Since: old.Next, Run: old.Run})
	if got := story(r.Events); got != "start gpu gpu register adopt" || r.Run == old.Run {
		t.Errorf("got %s", got)
	}
	if a := r.Events[len(r.Events)-1]; a.Client != c.id || a.Epoch != e || a.Uuid != gpuA.UUID {
		t.Errorf("adopt %v", a)
	}
}

// A call that waits returns when something happens, and when nothing does.
func TestEventsAreWaitedFor(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	ctl := dial(t, s)
	_, a := newClient(t, s)
	r := events(t, ctl, &api.EventsRequest{})
	began := time.Now()
	if got := events(t, ctl, &api.EventsRequest{Since: r.Next, Run: r.Run, WaitNs: int64(20 * time.Millisecond)}); len(got.Events) != 0 || time.Since(began) < 20*time.Millisecond {
		t.Errorf("after %v: %v", time.Since(began), got)
	}
	type answer struct {
		r   *api.EventsResponse
		err error
	}
	got := make(chan answer)
	for range 2 { // both are told
		go func() {
			r, err := ctl.Events(context.Background(), &api.EventsRequest{Since: r.Next, Run: r.Run, WaitNs: int64(patience)})
			got <- answer{r, err}
		}()
	}
	a.request().granted()
	for range 2 {
		if a := <-got; a.err != nil || story(a.r.Events) != "grant" {
			t.Errorf("%v, %v", a.r, a.err)
		}
	}
}

// The end of the scheduler ends a call that waits.
func TestEventsEndWithTheScheduler(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	ctl := dial(t, s)
	r := events(t, ctl, &api.EventsRequest{})
	done := make(chan error)
	go func() {
		_, err := ctl.Events(context.Background(), &api.EventsRequest{Since: r.Next, WaitNs: int64(patience)})
		done <- err
	}()
	s.await("it waits", func(*api.StatusResponse) bool {
		waits := false
		_ = s.Ask(context.Background(), func() { waits = s.History.AwaitedByAny() })
		return waits
	})
	s.stop()
	if err := <-done; err == nil {
		t.Error("no error")
	}
}

// An answer fits into a message, whatever names containers have.
func TestEventsFitIntoAMessage(t *testing.T) {
	long := strings.Repeat("x", maxName)
	names := &api.Container{Id: long, Name: long, Namespace: long, Pod: long, PodUid: long}
	for range maxGPUs {
		names.Gpus = append(names.Gpus, gpuA.UUID)
	}
	found := make([]history.Event, history.MaxAnswer)
	for i := range found {
		found[i] = history.Event{Seq: 1 << 63, At: 1 << 62, UUID: gpuA.UUID, Client: 1 << 63, Names: names, Epoch: 1 << 63,
			Peer: &peer.Peer{Process: peer.Process{PID: 1 << 22}}, Waited: 1 << 62, Held: 1 << 62, Drained: 1 << 62}
	}
	const message = 4 << 20 // of ttrpc
	if n := proto.Size(&api.EventsResponse{Events: history.API(found)}); n > message {
		t.Errorf("%d bytes", n)
	}
}

// Lines that tenants cause are limited, and the rest is counted.
func TestTenantLinesAreLimited(t *testing.T) {
	var log strings.Builder
	s := start(t, t.TempDir(), logTo(&log))
	noisy := node.Subject{Peer: &peer.Peer{Process: peer.Process{PID: 1}, Command: "noisy"}}
	if err := s.Ask(context.Background(), func() {
		for range 1000 {
			s.Tell(noisy, 3, "it talks") // warning
		}
		s.TenantLog = rate.NewLimiter(node.TenantLogRate, node.TenantLogBurst) // as after a pause
		s.Tell(noisy, 3, "again")
	}); err != nil {
		t.Fatal(err)
	}
	s.stop()
	if n := strings.Count(log.String(), "it talks"); n < node.TenantLogBurst || n > 2*node.TenantLogBurst {
		t.Errorf("%d lines", n)
	}
	if !strings.Contains(log.String(), "more lines than these") || s.Traffic.UnloggedLines < 1000-2*node.TenantLogBurst {
		t.Errorf("%d lines were left out, and nobody is told:\n%s", s.Traffic.UnloggedLines, log.String())
	}
}

// The events of a process have its container's name also after the name is forgotten: an engine
// says that a container has stopped before the end of its processes is seen.
func TestEventsKeepNames(t *testing.T) {
	d := bare(t)
	cl := &node.Client{ID: 7, Peer: &peer.Peer{Container: "abc"}}
	d.Clients[cl.ID], d.Names["abc"] = cl, &api.Container{Id: "abc", Name: "train"}
	d.NoteClient(cl, api.EventType_EVENT_TYPE_REGISTER, 0)
	delete(d.Names, "abc")
	d.NoteClient(cl, api.EventType_EVENT_TYPE_END, 0)
	found, _, _ := d.History.Since(0, "")
	for _, e := range history.API(found) {
		if e.Container.GetName() != "train" {
			t.Errorf("%v: of %v, want train", e.Type, e.Container)
		}
	}
	if len(found) != 2 {
		t.Errorf("%d events", len(found))
	}
}

// BenchmarkObserve is what a turn pays for events and metrics.
func BenchmarkObserve(b *testing.B) {
	d := bare(b)
	g := &node.GPU{Found: gpuA}
	for i := range base.ClientID(100) {
		id := fmt.Sprintf("%064x", i)
		d.Clients[i] = &node.Client{ID: i, Peer: &peer.Peer{Container: id}}
		d.Names[id] = &api.Container{Id: id, Namespace: "ml", Pod: "train", Name: "main"}
	}
	b.ReportAllocs()
	i := base.ClientID(0)
	for b.Loop() {
		i = (i + 1) % 100
		d.observe(g, sched.Revoke{Client: i, Epoch: 1, Why: sched.QuantumOver})
		d.observe(g, sched.Released{Client: i, Epoch: 1, Reason: sched.EndRevoked, Held: time.Millisecond, Drained: time.Microsecond})
		d.observe(g, sched.Grant{Client: i, Epoch: 2, Waited: time.Second})
	}
}

// Whoever claims grants that nobody gave is fenced each time, and a tenant with a limit that comes
// and goes changes how all share the GPU. Neither pushes out what no tenant causes, or fills the log.
func TestTenantsPushNothingOut(t *testing.T) {
	const times = 700 // two events each, in room for 1024
	for name, tc := range map[string]struct {
		line  string // of the log
		cause func(s *scheduler, p *proc, i int)
	}{
		"claims": {"fenced:", func(s *scheduler, p *proc, i int) {
			c := p.connect().register(0).attach(0, gpuA, uint64(1000+i), 0)
			c.release(uint64(1000 + i))
			c.Close()
		}},
		"limits": {"GPU 0: exclusive", func(s *scheduler, p *proc, i int) {
			p.connect().register(0).attach(0, gpuA, 0, 0).Close()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			dir := t.TempDir()
			s := start(t, dir, nil)
			_, a, e := newHolder(t, s)
			a.release(e)
			s.await("its release", func(r *api.StatusResponse) bool { return stateOf(r, a.id) == api.ClientState_CLIENT_STATE_IDLE })
			s.stop()
			s = start(t, dir, func(o *Options) { logTo(&log)(o); o.Mode = sched.Auto }, // it knows that nobody has a grant
				func(d *Daemon) { d.TenantLog = rate.NewLimiter(0, node.TenantLogBurst) }) // no room for more lines comes with time
			r := limitRequest(t, "", 0)
			if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Container: r.Container, Uid: r.Uid, CoreLimit: proto.Uint32(25)}); err != nil {
				t.Fatal(err)
			}
			newClient(t, s) // beside which others come and go: who is alone shares with nobody
			for range 2 {   // each may connect so often
				p := newProc(t, s.dir, 0)
				for i := range times / 2 {
					tc.cause(s, p, i)
				}
			}
			s.await("they are gone", func(r *api.StatusResponse) bool { return r.Connections == 1 })
			found := s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_SET}}).Events
			if len(found) == 0 {
				t.Error("that the limit was set is forgotten")
			}
			s.stop()
			if n := strings.Count(log.String(), tc.line); n == 0 || n > node.TenantLogBurst {
				t.Errorf("%d lines of log", n)
			}
		})
	}
}
