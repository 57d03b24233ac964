// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/page"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

const gib = 1 << 30

// reserve asks for memory on channel 0 and returns the answer.
func (c *peerConn) reserve(total, least uint64, flags uint32) wire.Frame {
	c.t.Helper()
	serial := rand.Uint64()
	c.send(wire.Frame{Type: wire.TypeReserve, Code: flags, Reserve: wire.Reserve{Total: total, Least: least, Serial: serial}})
	f := c.expect(wire.TypeReserved)
	if f.Reserved.Serial != serial || f.Channel != 0 {
		c.t.Fatalf("answer %+v on channel %d to serial %d", f.Reserved, f.Channel, serial)
	}
	return f
}

// reserves is reserve with what the answer must be.
func (c *peerConn) reserves(total, least uint64, flags, code uint32, want wire.Reserved) {
	c.t.Helper()
	f := c.reserve(total, least, flags)
	want.Serial = f.Reserved.Serial
	if f.Code != code || f.Reserved != want {
		c.t.Errorf("reserve %d, at least %d: code %d %+v, want %d %+v", total, least, f.Code, f.Reserved, code, want)
	}
}

// shows checks what the page says of channel 0.
func (c *peerConn) shows(limit, used uint64) {
	c.t.Helper()
	if l := c.page.Limits(0); l != (wire.Limits{Memory: limit, Used: used}) {
		c.t.Errorf("the page has %+v, want %d of %d", l, used, limit)
	}
}

// observe asks for the limits of a GPU over a connection of its own.
func (p *proc) observe(g node.Found) *peerConn {
	p.t.Helper()
	c := p.connect().register(0)
	c.send(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve, Attach: wire.Attach{UUID: uuidOf(g)}})
	if f := c.expect(wire.TypeAttached); f.Code != wire.OK || f.Epoch != 0 {
		p.t.Fatalf("observe: code %d epoch %d", f.Code, f.Epoch)
	}
	return c
}

// limitRequest names this process's own account: that of all processes that
// the tests start.
func limitRequest(t *testing.T, gpu string, bytes uint64) *api.SetShareRequest {
	t.Helper()
	r := &api.SetShareRequest{Gpu: gpu, MemoryBytes: proto.Uint64(bytes)}
	if r.Container = ownContainer(t); r.Container == "" {
		uid := uint32(os.Getuid())
		r.Uid = &uid
	}
	return r
}

// limit limits the account of all processes of the test.
func (s *scheduler) limit(gpu string, bytes uint64) *api.SetShareResponse {
	s.t.Helper()
	if gpu != "" {
		s.await("the GPUs", func(r *api.StatusResponse) bool { return len(r.Gpus) > 0 })
	}
	c, err := api.Dial(context.Background(), s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	defer c.Close()
	r, err := c.SetShare(context.Background(), limitRequest(s.t, gpu, bytes))
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// A limit holds for the processes of a tenant together, on one GPU; all of
// them see it, and nobody else does.
func TestLimitIsShared(t *testing.T) {
	dir := t.TempDir()
	openToAll(t, dir)
	s := start(t, dir, nil)
	_, a := newClient(t, s)
	_, b := newClient(t, s)
	b.attach(1, gpuB, 0, 0)
	a.shows(0, 0)
	a.reserves(2*gib, 2*gib, 0, wire.OK, wire.Reserved{Total: 2 * gib, Used: 2 * gib})
	s.limit("0", 8*gib)
	a.shows(8*gib, 2*gib)
	b.shows(8*gib, 2*gib)
	a.reserves(5*gib, 5*gib, 0, wire.OK, wire.Reserved{Total: 5 * gib, Used: 5 * gib, Limit: 8 * gib})
	b.shows(8*gib, 5*gib)
	b.reserves(4*gib, 4*gib, 0, wire.ErrMemory, wire.Reserved{Used: 5 * gib, Limit: 8 * gib})
	b.reserves(4*gib, gib, 0, wire.OK, wire.Reserved{Total: 3 * gib, Used: 8 * gib, Limit: 8 * gib})
	a.shows(8*gib, 8*gib)
	a.reserves(gib, 0, 0, wire.OK, wire.Reserved{Total: gib, Used: 4 * gib, Limit: 8 * gib})
	b.shows(8*gib, 4*gib)
	if l := b.page.Limits(1); l != (wire.Limits{}) {
		t.Errorf("the limit shows on another GPU: %+v", l)
	}
	_, late := newClient(t, s)
	late.shows(8*gib, 4*gib)

	r := s.status()
	if m := r.Gpus[0].Memory; len(m) != 1 || m[0].LimitBytes != 8*gib || m[0].UsedBytes != 4*gib {
		t.Errorf("status of the account: %v", m)
	}
	if c := r.Gpus[0].Clients; c[0].ReservedBytes != gib || c[1].ReservedBytes != 3*gib || len(r.Gpus[1].Memory) != 0 || len(r.Problems) != 0 {
		t.Errorf("status: %v", r)
	}

	if own := ownContainer(t); os.Getuid() != 0 || own != "" {
		t.Log("not root outside containers: there is only one tenant here")
		return
	}
	stranger := newProc(t, s.dir, nobody).connect().register(0).attach(0, gpuA, 0, 0)
	stranger.shows(0, 0)
	stranger.reserves(100*gib, 100*gib, 0, wire.OK, wire.Reserved{Total: 100 * gib, Used: 100 * gib})
	a.shows(8*gib, 4*gib)
	s.limit("0", 6*gib)
	stranger.shows(0, 100*gib)
}

// Only death returns memory: a lost connection proves nothing about it.
func TestReservationsEndWithTheProcess(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	s.limit("", 8*gib)
	p, a := newClient(t, s)
	_, b := newClient(t, s)
	a.reserve(6*gib, 0, 0)
	a.Close()
	s.await("the connection is lost", func(r *api.StatusResponse) bool { return r.Connections == 1 })
	b.reserves(4*gib, 4*gib, 0, wire.ErrMemory, wire.Reserved{Used: 6 * gib, Limit: 8 * gib})

	again := p.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, 0)
	again.shows(8*gib, 6*gib)
	again.reserves(7*gib, 7*gib, wire.ReserveForce, wire.OK, wire.Reserved{Total: 7 * gib, Used: 7 * gib, Limit: 8 * gib})
	b.shows(8*gib, 7*gib)

	p.kill()
	s.await("everything is returned", func(r *api.StatusResponse) bool { return r.Gpus[0].Memory[0].UsedBytes == 0 })
	b.shows(8*gib, 0)
	b.reserves(8*gib, 8*gib, 0, wire.OK, wire.Reserved{Total: 8 * gib, Used: 8 * gib, Limit: 8 * gib})
}

// A process that registers for the first time twice has executed another
// program: what the first one had is gone.
func TestExecReturnsMemory(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, a := newClient(t, s)
	a.attach(1, gpuB, 0, 0)
	a.send(wire.Frame{Type: wire.TypeReserve, Channel: 1, Reserve: wire.Reserve{Total: gib}})
	a.expect(wire.TypeReserved)
	_, b := newClient(t, s)
	a.reserve(gib, 0, 0)
	b.shows(0, gib)
	p.connect().register(0).attach(0, gpuA, 0, 0)
	b.shows(0, 0)
	if r := s.status(); len(r.Gpus[1].Memory) != 0 {
		t.Errorf("left on the other GPU: %v", r.Gpus[1].Memory)
	}
}

func TestForcedOverTheLimitIsReported(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, a := newClient(t, s)
	a.reserve(9*gib, 0, 0)
	r := s.limit("0", 8*gib)
	if len(r.Changes) != 1 || r.Changes[0].UsedMemoryBytes != 9*gib {
		t.Errorf("lowered below what is used: %v", r)
	}
	a.shows(8*gib, 9*gib)
	a.reserves(9*gib+1, 1, 0, wire.ErrMemory, wire.Reserved{Total: 9 * gib, Used: 9 * gib, Limit: 8 * gib})
	if p := s.status().Problems; len(p) != 1 || !strings.Contains(p[0], "over its limit of 8192 MiB") {
		t.Errorf("problems %q", p)
	}
	a.reserve(8*gib, 0, 0)
	if p := s.status().Problems; len(p) != 0 {
		t.Errorf("problems %q", p)
	}
}

func TestReserveOutOfOrder(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p := newProc(t, s.dir, 0)
	reg := encoded(registerFrame())
	attach := encoded(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	observe := encoded(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	reserve := encoded(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 1}})
	elsewhere := encoded(wire.Frame{Type: wire.TypeReserve, Channel: 1, Reserve: wire.Reserve{Total: 1}})
	for name, packets := range map[string][][]byte{
		"first":                   {reserve},
		"before attach":           {reg, reserve},
		"on another channel":      {reg, attach, elsewhere},
		"as an observer":          {reg, observe, reserve},
		"request of an observer":  {reg, observe, encoded(wire.Frame{Type: wire.TypeRequest})},
		"a flag that is none":     {reg, attach, append([]byte{1, 6, 0, 0, 2}, reserve[5:]...)},
		"a frame of ours":         {reg, attach, encoded(wire.Frame{Type: wire.TypeReserved})},
		"observe and want":        {reg, append([]byte{1, 2, 0, 0, 3}, attach[5:]...)},
		"more than fits, reserve": {reg, attach, append(reserve, 0)},
	} {
		c := p.connect()
		for _, b := range packets {
			c.raw(b)
		}
		for {
			f, _, err := c.recv()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if f.Type == wire.TypeRefused {
				break
			}
		}
		c.expectClosed()
	}
}

// What comes while a GPU is searched for is answered once it is found: a
// client that is back declares at once what it has.
func TestReserveBeforeTheGPUIsFound(t *testing.T) {
	found := make(chan []node.Found)
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
	s.limit("", 3*gib)
	p := newProc(t, s.dir, 0)
	attach := wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}}
	reserve := wire.Frame{Type: wire.TypeReserve}
	c, greedy, watcher := p.connect().register(0), p.connect().register(0), p.connect().register(0)
	for _, c := range []*peerConn{c, greedy} {
		c.send(attach)
		for i := range uint64(maxEarlyReserves) {
			reserve.Reserve = wire.Reserve{Total: i * gib, Serial: i}
			c.send(reserve)
		}
	}
	greedy.send(reserve)
	greedy.expectRefused(wire.ErrProtocol)
	attach.Code = wire.AttachObserve
	watcher.send(attach)
	// The last thing sent is dealt with last.
	other := p.connect()
	other.raw([]byte("x"))
	other.expectRefused(wire.ErrProtocol)
	found <- []node.Found{gpuA}
	c.expect(wire.TypeAttached)
	for i := range uint64(maxEarlyReserves) {
		f := c.expect(wire.TypeReserved)
		if want := min(i, 3) * gib; f.Reserved.Serial != i || f.Reserved.Total != want || f.Reserved.Limit != 3*gib {
			t.Errorf("answer %d: code %d %+v", i, f.Code, f.Reserved)
		}
	}
	watcher.expect(wire.TypeAttached)
	if l := watcher.page.Limits(0); l.Memory != 3*gib {
		t.Errorf("the observer reads %+v", l)
	}
}

// Who only asks is no client of the GPU, and does nobody any harm.
func TestObserve(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, a, e := newHolder(t, s)
	s.limit("0", 8*gib)
	a.reserve(2*gib, 0, 0)
	other := newProc(t, s.dir, 0)
	for _, asks := range []*proc{p, other} { // also beside the connection of a client
		c := asks.observe(gpuA)
		c.shows(8*gib, 2*gib)
		a.reserve(3*gib, 0, 0)
		c.shows(8*gib, 2*gib) // as it was
		c.send(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
		c.expect(wire.TypeAttached)
		c.shows(8*gib, 3*gib) // asked again
		c.send(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve, Attach: wire.Attach{UUID: wire.UUID{1}}})
		if f := c.expect(wire.TypeAttached); f.Code != wire.ErrUnknownGPU {
			t.Errorf("unknown GPU: code %d", f.Code)
		}
		c.send(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve, Channel: 2, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
		if f := c.expect(wire.TypeAttached); f.Code != wire.ErrChannel {
			t.Errorf("channel beyond REGISTER: code %d", f.Code)
		}
		a.reserve(2*gib, 0, 0)
		if _, present := a.page.Hints(0); present != 0 {
			t.Errorf("%d are present beside the holder", present)
		}
		if r := s.status(); len(r.Gpus[0].Clients) != 1 || a.page.Word(0) != uint32(e) {
			t.Errorf("clients %v, word %d", r.Gpus[0].Clients, a.page.Word(0))
		}
		c.Close()
	}
	s.await("the observers are gone", func(r *api.StatusResponse) bool { return r.Connections == 1 })
	if stateOf(s.status(), a.id) != api.ClientState_CLIENT_STATE_HOLDING {
		t.Error("the holder lost something by being asked beside")
	}
	// One that asked may use the GPU later, over the same connection.
	c := other.observe(gpuA)
	c.attach(0, gpuA, 0, wire.AttachWant)
	if r := s.status(); stateOf(r, c.id) != api.ClientState_CLIENT_STATE_WAITING {
		t.Errorf("status %v", r.Gpus[0])
	}
	// On a channel that is in use there is nothing to ask: the page has it.
	c.send(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve, Attach: wire.Attach{UUID: uuidOf(gpuB)}})
	if f := c.expect(wire.TypeAttached); f.Code != wire.ErrChannel {
		t.Errorf("observe on an attached channel: code %d", f.Code)
	}
	c.shows(8*gib, 2*gib)
	other.kill()
	s.await("the death is noticed", func(r *api.StatusResponse) bool { return r.Clients == 1 })
}

// A program that looks at its limits all the time leaves nothing behind and
// fills no log.
func TestManyObservers(t *testing.T) {
	var log strings.Builder
	s := start(t, t.TempDir(), logTo(&log))
	s.limit("", gib)
	p := newProc(t, s.dir, 0)
	const n = 500 // more than may be open at once
	for range n {
		c := p.observe(gpuA)
		c.shows(gib, 0)
		c.Close()
	}
	p.kill()
	r := s.await("nothing is left", func(r *api.StatusResponse) bool { return r.Clients == 0 && r.Connections == 0 })
	if r.Refused != 0 || r.ProtocolErrors != 0 || len(r.Gpus[0].Clients) != 0 {
		t.Errorf("status %v", r)
	}
	if err := s.Ask(context.Background(), func() {
		if len(s.ByAccount) != 0 || len(s.ByProc) != 0 {
			t.Errorf("left behind: %d accounts, %d processes", len(s.ByAccount), len(s.ByProc))
		}
	}); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(readFile(t, "/proc/self/maps")) {
		if strings.Contains(line, "nvshare-grant") && strings.Contains(line, " rw-s ") {
			t.Fatalf("the scheduler still maps a page: %s", line)
		}
	}
	s.stop()
	if lines := strings.Count(log.String(), "\n"); lines > 20 {
		t.Errorf("%d lines for %d questions:\n%.2000s", lines, n, log.String())
	}
}

// The socket of a dead process, in another's hands, makes nobody a client.
func TestInheritedConnection(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p := newProc(t, s.dir, 0)
	c := p.connect().register(0)
	p.kill()
	s.await("the death is noticed", func(r *api.StatusResponse) bool { return r.Clients == 0 })
	c.send(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	c.expectClosed()
	if r := s.status(); len(r.Gpus[0].Clients) != 0 || len(r.Problems) != 0 {
		t.Errorf("status %v", r)
	}
}

// Whatever a tenant reserves, its own figures stay right and others' too.
func TestHostileReservations(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	s.limit("0", 8*gib)
	_, a := newClient(t, s)
	p, b := newClient(t, s)
	_, honest := newClient(t, s)
	honest.attach(1, gpuB, 0, 0)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	values := []uint64{0, 1, gib, 8 * gib, 1 << 63, math.MaxUint64 - 1, math.MaxUint64}
	total := map[*peerConn]uint64{}
	for range 500 {
		c := []*peerConn{a, b}[rnd.IntN(2)]
		flags := rnd.Uint32N(2)
		f := c.reserve(values[rnd.IntN(len(values))], values[rnd.IntN(len(values))], flags)
		if f.Code == wire.ErrMemory && f.Reserved.Total != total[c] || flags != 0 && f.Code != wire.OK {
			t.Fatalf("it had %d: code %d %+v", total[c], f.Code, f.Reserved)
		}
		total[c] = f.Reserved.Total
		if want := total[a] + total[b]; f.Reserved.Used != want || want < total[a] {
			t.Fatalf("%d and %d, used %d", total[a], total[b], f.Reserved.Used)
		}
	}
	b.reserve(math.MaxUint64, 0, wire.ReserveForce)
	p.kill()
	s.await("the death is noticed", func(r *api.StatusResponse) bool { return r.Clients == 2 })
	honest.shows(8*gib, total[a])
	honest.send(wire.Frame{Type: wire.TypeReserve, Channel: 1, Reserve: wire.Reserve{Total: gib, Least: gib}})
	if f := honest.expect(wire.TypeReserved); f.Code != wire.OK || f.Reserved.Used != gib || f.Reserved.Limit != 0 {
		t.Errorf("on the other GPU: %+v", f)
	}
}

// A flood of RESERVE is read as slowly as any other, and others are served.
func TestReserveFlood(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, flooder := newClient(t, s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		packet := encoded(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 1}})
		for {
			if _, err := flooder.Write(packet); err != nil {
				return // it does not read the answers: disconnected
			}
		}
	}()
	_, honest := newClient(t, s)
	for i := range uint64(100) {
		honest.reserve(i, 0, 0)
	}
	honest.request().granted()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("never disconnected")
	}
}

// BenchmarkReserve is one reservation of a container with as many processes
// as it may have, except the frames.
func BenchmarkReserve(b *testing.B) {
	g := &node.GPU{Core: sched.New(sched.Config{})}
	g.Core.Step(0, sched.Attach{Client: 1, Tenant: "c"})
	all := map[*node.Client]struct{}{}
	d := bare(b)
	d.ByAccount["c"] = all
	for range admission.MaxPerAccount {
		page, fd, err := page.New(1)
		if err != nil {
			b.Fatal(err)
		}
		fd.Close()
		defer page.Unmap()
		cl := &node.Client{Page: page, Conn: &node.Conn{}}
		att := &node.Attachment{Client: cl, GPU: g}
		cl.Conn.Channels[0] = att
		cl.Attached = map[*node.GPU]*node.Attachment{g: att}
		all[cl] = struct{}{}
	}
	for i := 0; b.Loop(); i++ {
		g.Core.Step(0, residency.Reserve{Client: 1, Total: uint64(i), Force: true})
		d.memory.ShowLimits(g, "c")
	}
}

// An allocation that a limit refuses leaves a count, and one event for many of them.
func TestOutOfMemoryIsSeen(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	s.limit("", gib)
	_, c := newClient(t, s)
	for range 3 {
		c.reserve(2*gib, 2*gib, 0)
	}
	r := s.status()
	if u := r.Gpus[0].Tenants; len(u) != 1 || u[0].OutOfMemory != 3 {
		t.Errorf("counted: %v", u)
	}
	events, err := dial(t, s).Events(context.Background(), &api.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range events.Events {
		if e.Type == api.EventType_EVENT_TYPE_OUT_OF_MEMORY {
			n++
			if e.Pid == 0 || e.Bytes != 2*gib || !strings.Contains(e.Reason, "limit of 1024 MiB") {
				t.Errorf("event %v", e)
			}
		}
	}
	if n != 1 {
		t.Errorf("%d events of 3 refusals", n)
	}
}
