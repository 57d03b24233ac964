// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/wire"
)

// spins has the reader of a revoked client's connection look out for the
// release. long is for what must happen while it does: the test then says when.
func spins(o *Options) { o.Spin, o.Quantum = wire.SpinTime, sched.MinQuantum }

func spinsLong(o *Options) { o.Spin, o.Quantum = patience, sched.MinQuantum }

// The release is taken during the spin, and the announced client is granted.
func TestReleaseDuringSpin(t *testing.T) {
	s := start(t, t.TempDir(), spinsLong)
	_, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	a.expect(wire.TypeRevoke)
	s.await("the next client is announced", func(*api.StatusResponse) bool { return b.page.Flags(0) == wire.GrantNext })
	if b.page.Word(0) != wire.WordClosed {
		t.Error("announced is not granted: the gate is open")
	}
	a.release(e)
	e2 := b.granted()
	if e2 <= e || b.page.Word(0) != uint32(e2) || b.page.Flags(0) != 0 {
		t.Errorf("epoch %d after %d, word %d, flags %d", e2, e, b.page.Word(0), b.page.Flags(0))
	}
}

// A spin that ends without a frame leaves the connection as it was.
func TestReleaseAfterSpin(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.Spin, o.Quantum = time.Nanosecond, sched.MinQuantum })
	_, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	for range 100 {
		b.request()
		a.expect(wire.TypeRevoke)
		s.status() // the reader had time to give up, or did not: both are right
		a.release(e)
		e = b.granted()
		a, b = b, a
	}
	if r := s.status(); r.Connections != 2 || r.ProtocolErrors != 0 || r.Refused != 0 {
		t.Errorf("after it: %v", r)
	}
}

func TestDeathDuringSpin(t *testing.T) {
	s := start(t, t.TempDir(), spinsLong)
	pa, a, _ := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	a.expect(wire.TypeRevoke)
	pa.kill() // the connection stays open: the test has it
	e := b.granted()
	a.Close()
	s.await("only one connection is left", func(r *api.StatusResponse) bool { return r.Connections == 1 && r.Clients == 1 })

	// The connection ends during the spin, the process lives.
	pc, c := newClient(t, s)
	c.request()
	b.expect(wire.TypeRevoke)
	b.Close()
	s.await("the holder is lost", func(r *api.StatusResponse) bool {
		return stateOf(r, b.id) == api.ClientState_CLIENT_STATE_LOST
	})
	if c.page.Word(0) != wire.WordClosed {
		t.Error("granted on the word of a lost connection")
	}
	_ = e
	pc.kill()
}

// Garbage that arrives during the spin is refused as ever.
func TestGarbageDuringSpin(t *testing.T) {
	s := start(t, t.TempDir(), spinsLong)
	_, a, _ := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	a.expect(wire.TypeRevoke)
	a.raw([]byte("x"))
	a.expectRefused(wire.ErrProtocol)
}

// The announced client dies before its turn: the one behind it is served.
func TestAnnouncedClientDies(t *testing.T) {
	s := start(t, t.TempDir(), spinsLong)
	_, a, e := newHolder(t, s)
	pb, b := newClient(t, s)
	_, c := newClient(t, s)
	b.request()
	a.expect(wire.TypeRevoke)
	c.request()
	s.await("both wait", func(r *api.StatusResponse) bool {
		return stateOf(r, b.id) == api.ClientState_CLIENT_STATE_WAITING && stateOf(r, c.id) == api.ClientState_CLIENT_STATE_WAITING
	})
	pb.kill()
	s.await("it is gone", func(r *api.StatusResponse) bool { return r.Clients == 2 })
	a.release(e)
	c.granted()
}

// Turns as fast as they go, each with a revoke and a spin: none is lost, and
// the scheduler ends in the middle of one.
func TestManyRevokes(t *testing.T) {
	s := start(t, t.TempDir(), spins)
	_, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	for range 300 {
		b.request()
		a.expect(wire.TypeRevoke)
		a.release(e)
		next := b.granted()
		if next <= e {
			t.Fatalf("epoch %d after %d", next, e)
		}
		e = next
		a, b = b, a
	}
	b.request()
	a.expect(wire.TypeRevoke)
	s.stop()
}

// Anti-thrash on revokes everybody at once.
func TestRevokeOfMany(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { spins(o); o.Mode = sched.Concurrent })
	conns := make([]*peerConn, 12)
	epochs := make([]uint64, len(conns))
	for i := range conns {
		_, conns[i] = newClient(t, s)
		epochs[i] = conns[i].request().granted()
	}
	ctl := dial(t, s)
	if _, err := ctl.Set(t.Context(), &api.SetRequest{Mode: api.Mode_MODE_EXCLUSIVE}); err != nil {
		t.Fatal(err)
	}
	conns[0].request()
	for i, c := range conns {
		c.expect(wire.TypeRevoke)
		c.release(epochs[i])
	}
	conns[0].granted()
}

// Where several hold the GPU and are asked for it at once, nobody spins for a release: the first
// ones hand nothing over.
func TestNoSpinForOneOfMany(t *testing.T) {
	s := start(t, t.TempDir(), spinsLong)
	_, a := newClient(t, s)
	_, b := newClient(t, s)
	_, c := newClient(t, s)
	if err := s.Ask(t.Context(), func() { // a and b run in one overlap group, c is another tenant
		g := s.Gpus[uuidOf(gpuA)]
		for _, member := range []*peerConn{a, b} {
			cl := s.Clients[base.ClientID(member.id)]
			cl.Account = "container " + whole(fmt.Sprint(member.id))
			share := sched.Share{Overlap: tenants.OverlapTenant + "group"}
			s.step(g, sched.Attach{Client: cl.ID, Tenant: cl.Account, Share: share})
		}
	}); err != nil {
		t.Fatal(err)
	}
	first, second := a.request().granted(), b.request().granted()
	c.request()
	a.expect(wire.TypeRevoke)
	b.expect(wire.TypeRevoke)
	if err := s.Answers(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c.page.Flags(0) == wire.GrantNext {
		t.Error("the next client looks out for a grant that two releases are to come before")
	}
	a.release(first)
	b.release(second)
	c.granted()
}
