// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// A job with a rank on each of two GPUs gets both at once, and gives both back;
// a rank that has drained makes a call for the one that has not.
func TestGang(t *testing.T) {
	dir := t.TempDir()
	openToAll(t, dir)
	s := sharing{start(t, dir, func(o *Options) { o.Quantum = sched.MinQuantum }), nil}
	s.awaitGPUs()
	s.Conn = dial(t, s.scheduler)
	uid := uint32(4711)
	if _, err := s.SetShare(context.Background(), &api.SetShareRequest{Uid: &uid, Gang: proto.String(api.GangOfItself)}); err != nil {
		t.Fatal(err)
	}
	_, alone, epoch := newHolder(t, s.scheduler)

	ranks := [2]*peerConn{}
	for i, g := range []GPU{gpuA, gpuB} {
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
