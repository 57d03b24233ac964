// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// fences makes grants end by a fence at once, if nobody answers.
func fences(kill bool) func(*Options) {
	return func(o *Options) { o.Quantum, o.Grace, o.FenceKill = sched.MinQuantum, sched.MinGrace, kill }
}

// fenced returns a client that ignores its revoke until it is fenced, and the
// one that is granted then.
func fenced(t *testing.T, s *scheduler) (pa *proc, a, b *peerConn, ea, eb uint64) {
	t.Helper()
	pa, a, ea = newHolder(t, s)
	_, b = newClient(t, s)
	eb = b.request().granted()
	a.expect(wire.TypeRevoke)
	return pa, a, b, ea, eb
}

// Nothing happens to a fenced client where no warden runs. Its late release is
// taken for what it is, and not for one of the grant that runs.
func TestFenceReports(t *testing.T) {
	s := start(t, t.TempDir(), fences(false))
	_, a, b, ea, eb := fenced(t, s)
	r := s.status()
	if stateOf(r, a.id) != api.ClientState_CLIENT_STATE_FENCED || r.Gpus[0].Fences != 1 || len(r.Problems) != 1 || r.Gpus[0].EffectiveMode != exclusive {
		t.Errorf("%v", r)
	}
	a.release(ea)
	r = s.await("the fence ends", func(r *api.StatusResponse) bool { return stateOf(r, a.id) == api.ClientState_CLIENT_STATE_IDLE })
	if stateOf(r, b.id) != api.ClientState_CLIENT_STATE_HOLDING || b.page.Word(0) != uint32(eb) || hasProblem(r, "is fenced") {
		t.Errorf("the late release took another's grant: %v", r)
	}
	a.release(ea) // and once more, of an epoch it has no more
	s.await("it is stale", func(r *api.StatusResponse) bool { return r.Gpus[0].StaleReleases == 1 })
	a.request() // it is let in again in its turn
	b.expect(wire.TypeRevoke)
	b.release(eb)
	if e := a.granted(); e <= eb {
		t.Errorf("epoch %d after %d", e, eb)
	}
}

// A word of a tenant has nobody killed: neither a grant that it only says it has,
// nor one that began before a restart.
func TestClaimsAreOnlyReported(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, fences(true))
	_, _, _ = newHolder(t, s) // and does not come back
	s.stop()
	s = start(t, dir, fences(true))
	p := newProc(t, dir, 0)
	c := p.connect().register(0).attach(0, gpuA, 12345, 0)
	s.await("both are fenced", func(r *api.StatusResponse) bool { return r.Gpus[0].Fences == 2 })
	_, b := newClient(t, s)
	b.request().granted()
	c.release(12345) // it lives
	s.await("the claim is given back", func(r *api.StatusResponse) bool { return stateOf(r, c.id) == api.ClientState_CLIENT_STATE_IDLE })
}

func TestFenceKills(t *testing.T) {
	var log strings.Builder
	s := start(t, t.TempDir(), func(o *Options) { fences(true)(o); logTo(&log)(o) })
	pa, _, _, _, _ := fenced(t, s)
	if err := pa.cmd.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("the process ended with %v", err)
	}
	s.await("it is gone", func(r *api.StatusResponse) bool { return r.Clients == 1 && len(r.Problems) == 0 })
	events, err := dial(t, s).Events(t.Context(), &api.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Events {
		if e.Type == api.EventType_EVENT_TYPE_FENCE && (e.Reason != "kill" || int(e.Pid) != pa.cmd.Process.Pid) {
			t.Errorf("event %v", e)
		}
	}
	if got := story(events.Events); !strings.HasSuffix(got, "reclaim:death unfence:death") {
		t.Errorf("got\n%s, want the death of who was fenced", got)
	}
	s.stop()
	if !strings.Contains(log.String(), "is killed") {
		t.Errorf("nothing is said about it:\n%s", log.String())
	}
}

// The scheduler is killed while it fences: the next one finds the one who did
// not answer, or does not; the others are served, and the late release is stale.
func TestKilledAtAFence(t *testing.T) {
	for _, point := range []node.Failpoint{node.Before("fence"), node.After("fence")} {
		dir := t.TempDir()
		died := make(chan struct{})
		o := testOptions(dir)
		fences(false)(&o)
		d, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		d.Failpoint = func(p node.Failpoint) {
			if p == point {
				d.abandon()
			}
		}
		go func() {
			defer close(died)
			_ = d.Run(t.Context())
		}()
		pa, _, ea := newHolder(t, &scheduler{t: t, dir: dir})
		pb, b := newClient(t, &scheduler{t: t, dir: dir})
		b.request()
		select {
		case <-died:
		case <-time.After(patience):
			t.Fatalf("never at: %s", point)
		}
		d.remains()
		s := start(t, dir, fences(false))
		b = pb.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, wire.AttachWant)
		if e := b.granted(); e <= ea {
			t.Errorf("killed %s: epoch %d after %d", point, e, ea)
		}
		a := pa.connect().register(wire.RegisterReconnect).attach(0, gpuA, ea, 0)
		if a.page.Word(0) == uint32(ea) {
			t.Errorf("killed %s: who was fenced may go on", point)
		}
		a.release(ea)
		s.await("its release", func(r *api.StatusResponse) bool { return stateOf(r, a.id) == api.ClientState_CLIENT_STATE_IDLE })
		s.stop()
	}
}

// A loop that hangs does not answer the watchdog.
func TestAnswers(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	if err := s.Answers(t.Context()); err != nil {
		t.Fatal(err)
	}
	hung, goOn := make(chan struct{}), make(chan struct{})
	s.Do(func() { close(hung); <-goOn })
	<-hung
	answer := make(chan error, 1)
	go func() { answer <- s.Answers(t.Context()) }()
	select {
	case err := <-answer:
		t.Errorf("it hangs, and answers %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(goOn)
	if err := <-answer; err != nil {
		t.Error(err)
	}
}
