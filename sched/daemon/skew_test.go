// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/hex"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// golden returns the bytes of a frame as shims of version 1 send it. They are
// frozen, see package wire.
func golden(t *testing.T, name string) []byte {
	t.Helper()
	text := readFile(t, filepath.Join("../../tests/golden/v1", name+".hex"))
	b, err := hex.DecodeString(strings.Join(strings.Fields(text), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A shim of version 1 that knows nothing of RESERVE, nor of flags that came
// later, takes turns with others, also as a latency tenant and under limits.
func TestOldestShim(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, holder, e := newHolder(t, s)
	old := newProc(t, s.dir, 0).connect()
	old.raw(golden(t, "register"))
	w := old.expect(wire.TypeWelcome)
	const channel = 3 // as in the golden frame
	attach := golden(t, "attach")
	u := uuidOf(gpuA)
	copy(attach[16:], u[:])
	copy(attach[4:16], make([]byte, 12)) // wants nothing yet, and holds nothing
	old.raw(attach)
	if f := old.expect(wire.TypeAttached); f.Code != wire.OK || f.Channel != channel {
		t.Fatalf("%+v", f)
	}
	for name, share := range map[string]func(*api.SetShareRequest){
		"as it comes": func(*api.SetShareRequest) {},
		"limited":     func(r *api.SetShareRequest) { n := uint32(50); r.CoreLimit = &n },
		"latency":     func(r *api.SetShareRequest) { p := api.Priority_PRIORITY_LATENCY; r.Priority = &p },
	} {
		account := s.accountOfClient(w.Welcome.ClientID)
		req := &api.SetShareRequest{}
		if id, ok := strings.CutPrefix(account, peer.ContainerAccount); ok {
			req.Container = id
		} else {
			uid := uint32(0)
			for _, c := range s.status().Gpus[0].Clients {
				uid = c.Uid
			}
			req.Uid = &uid
		}
		share(req)
		if _, err := dial(t, s).SetShare(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		holder.release(e) // stale after the first time
		request := golden(t, "request")
		request[2] = channel
		old.raw(request)
		g := old.expect(wire.TypeGrant)
		if g.Channel != channel {
			t.Errorf("%s: %+v", name, g)
		}
		if g.Code&^wire.GrantConcurrent != 0 {
			t.Errorf("%s: GRANT has flags %#x that version 1 does not know", name, g.Code)
		}
		release := golden(t, "release")
		release[2] = channel
		for i := range 8 {
			release[8+i] = byte(g.Epoch >> (8 * i))
		}
		old.raw(release)
		s.await(name+": it is released", func(r *api.StatusResponse) bool {
			return stateOf(r, w.Welcome.ClientID) == api.ClientState_CLIENT_STATE_IDLE
		})
	}
}

func (s *scheduler) accountOfClient(id uint64) (account string) {
	s.t.Helper()
	if err := s.Ask(s.t.Context(), func() {
		for _, cl := range s.Clients {
			if uint64(cl.ID) == id {
				account = cl.Account
			}
		}
	}); err != nil {
		s.t.Fatal(err)
	}
	return account
}

// A newer shim that speaks version 1 too is served as one of version 1, and one
// that does not is told why not. Flags that we need not know change nothing.
func TestNewerShim(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p := newProc(t, s.dir, 0)
	b := golden(t, "register")
	b[0] = 2                // speaks 2, and 1 as well
	b[6], b[40] = 0x80, 0x7 // a flag and a field of version 2
	c := p.connect()
	c.raw(b)
	if f := c.expect(wire.TypeWelcome); f.Version != 1 {
		t.Errorf("answered in version %d", f.Version)
	}
	c.raw(encoded(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachWant | 1<<30, Attach: wire.Attach{UUID: uuidOf(gpuA)}}))
	c.expect(wire.TypeAttached)
	c.granted()

	b[16] = 2 // and no longer 1
	c = p.connect()
	c.raw(b)
	f := c.expect(wire.TypeRefused)
	if f.Code != wire.ErrVersion || f.Refused.String() != "protocol 2..2, scheduler speaks 1" {
		t.Errorf("refused with %d %q", f.Code, f.Refused.String())
	}
	c.expectClosed()
}
