// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// A job with a rank on each of two GPUs gets both at once, and gives both back;
// a rank that has drained makes a call for the one that has not.
func TestGang(t *testing.T) {
	dir := t.TempDir()
	openToAll(t, dir)
	s := sharing{start(t, dir, func(o *Options) { o.Quantum = sched.MinQuantum }), nil}
	s.Conn = dial(t, s.scheduler)
	uid := uint32(4711)
	if _, err := s.SetShare(context.Background(), &api.SetShareRequest{Uid: &uid, Gang: proto.String(api.GangOfItself)}); err != nil {
		t.Fatal(err)
	}
	_, alone, epoch := newHolder(t, s.scheduler)

	ranks := [2]*peerConn{}
	for i, g := range []node.Found{gpuA, gpuB} {
		ranks[i] = newProc(t, dir, uid).connect().register(0).attach(0, g, 0, 0)
	}
	ranks[1].request() // its GPU is free, the other is not
	if f := alone.expect(wire.TypeRevoke); f.Epoch != epoch {
		t.Fatalf("revoked: %+v", f)
	}
	alone.release(epoch)
	first, second := ranks[0].granted(), ranks[1].granted()
	alone.request()
	ranks[0].expect(wire.TypeRevoke)
	ranks[1].expect(wire.TypeRevoke)
	ranks[1].release(second).request()
	f := ranks[1].expect(wire.TypeRevoke)
	if f.Code != wire.RevokeStep || f.Epoch <= second {
		t.Fatalf("asked for a call: %+v", f)
	}
	ranks[1].release(f.Epoch)
	ranks[0].release(first)
	alone.granted()
}

// A gang outside of namespaces has its name only, whoever asks.
func TestGangOutsideNamespaces(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	uid := uint32(os.Getuid())
	if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, Gang: proto.String("ring")}); err != nil {
		t.Fatal(err)
	}
	newClient(t, s)
	r := s.status()
	if got := r.Settings[0].Share.Gang; got != "ring" {
		t.Errorf("the setting names %q", got)
	}
	for _, u := range r.Gpus[0].Tenants {
		if id := u.Container.Id; u.Share.Gang != "ring" || id != "" && id != "gang ring" {
			t.Errorf("a tenant: %v", u)
		}
	}
}

// The ranks of a job that hold their GPUs when the scheduler ends go on under what
// they hold, and the next scheduler asks for both at once.
func TestGangOutlivesTheScheduler(t *testing.T) {
	dir := t.TempDir()
	openToAll(t, dir)
	s := sharing{start(t, dir, nil), nil}
	s.Conn = dial(t, s.scheduler)
	uid := uint32(4711)
	if _, err := s.SetShare(context.Background(), &api.SetShareRequest{Uid: &uid, Gang: proto.String(api.GangOfItself)}); err != nil {
		t.Fatal(err)
	}
	gpus := [2]node.Found{gpuA, gpuB}
	var procs [2]*proc
	var ranks [2]*peerConn
	var epochs [2]uint64
	for i, g := range gpus {
		procs[i] = newProc(t, dir, uid)
		ranks[i] = procs[i].connect().register(0).attach(0, g, 0, 0)
	}
	ranks[0].request()
	for i := range ranks {
		epochs[i] = ranks[i].granted()
	}
	other, _ := newClient(t, s.scheduler)
	s.stop()

	s.scheduler = start(t, dir, func(o *Options) { o.Quantum = time.Minute })
	waits := other.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, wire.AttachWant)
	for i, g := range gpus {
		ranks[i] = procs[i].connect().register(wire.RegisterReconnect).attach(0, g, epochs[i], 0)
		if ranks[i].page.Word(0) != uint32(epochs[i]) {
			t.Errorf("rank %d is back with epoch %d, its word is %d", i, epochs[i], ranks[i].page.Word(0))
		}
	}
	s.set(&api.SetRequest{QuantumNs: int64(sched.MinQuantum)})
	for i := range ranks { // the turn of both is over, because of who waits for the first one's GPU
		if f := ranks[i].expect(wire.TypeRevoke); f.Epoch != epochs[i] || f.Code&wire.RevokeStep != 0 {
			t.Errorf("rank %d: %+v", i, f)
		}
	}
	ranks[0].release(epochs[0])
	ranks[1].release(epochs[1])
	waits.granted()
}
