// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

const mib = 1 << 20

// The whole of an exchange: two tenants of 600 MiB on a GPU of 1 GiB. The one that is
// granted gets what is free at once, and the rest piece by piece as the other one
// moves out; nobody moves more than is lacking.
func TestSwap(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.Quantum = sched.MinQuantum })
	a, b := newSwapper(t, s), newSwapper(t, s)
	if a.page.Room(0) == 0 {
		t.Error("the page says that nothing is swapped")
	}
	a.allocates(600 * mib)
	if room := a.page.Room(0); room != 600*mib || a.page.Flags(0)&wire.SlotStill == 0 {
		t.Errorf("room for %d MiB while all fits, flags %#x", room>>20, a.page.Flags(0))
	}
	a.request()
	e := a.granted()
	a.in(e)
	b.allocates(600 * mib)
	if (a.page.Flags(0)|b.page.Flags(0))&wire.SlotStill != 0 {
		t.Error("more is reserved than the GPU has, and a page says that nothing has to leave")
	}
	b.request()
	if f := a.want(wire.TypeRevoke); f.Epoch != e {
		t.Fatalf("%+v", f)
	}
	a.release(e)
	eb := b.granted()
	if room := b.page.Room(0); room != 424*mib {
		t.Errorf("room for %d MiB, free are 424", room>>20)
	}
	b.in(eb)
	a.awaitLess(s, 424*mib)
	// In two pieces.
	a.has.Resident, a.has.Away, a.has.Out = 500*mib, 100*mib, 100*mib
	a.moved(0, 0)
	b.awaitRoom(s, 524*mib)
	a.out()
	b.awaitRoom(s, 600*mib)
	if c := b.status(s); !c.Moving {
		t.Errorf("moving before it is ready: %v", c)
	}
	b.in(eb)
	s.await("it is ready", func(*api.StatusResponse) bool { return !b.status(s).Moving })
	r := s.status().Gpus[0]
	sw := r.Swap
	if sw.CapacityBytes != gib || sw.PromisedBytes != 1200*mib || sw.ResidentBytes != 1024*mib || sw.AwayBytes != 176*mib ||
		sw.OutBytes != 176*mib || sw.Outs != 1 || sw.Ins != 2 || sw.SharePercent != 10 {
		t.Errorf("status %v", sw)
	}
	if r.EffectiveMode != api.Mode_MODE_EXCLUSIVE {
		t.Errorf("mode %v", r.EffectiveMode)
	}
	var kinds []string
	for _, e := range s.eventsOf(&api.EventsRequest{Gpu: "0"}).Events {
		if e.Type == api.EventType_EVENT_TYPE_SWAP_OUT || e.Type == api.EventType_EVENT_TYPE_SWAP_IN {
			kinds = append(kinds, strings.TrimPrefix(e.Type.String(), "EVENT_TYPE_"))
			if e.Bytes == 0 || e.Client == 0 {
				t.Errorf("event %v", e)
			}
		}
	}
	if got := strings.Join(kinds, " "); got != "SWAP_IN SWAP_OUT SWAP_IN" {
		t.Errorf("events %s", got)
	}
}

// What does not fit, on the GPU or in host memory, is refused when it is reserved,
// with the figures; what is there stays.
func TestSwapRefuses(t *testing.T) {
	var log strings.Builder
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.SwapMemory = 640 * mib; logTo(&log)(o) })
	a, b, c := newSwapper(t, s), newSwapper(t, s), newSwapper(t, s)
	if code := a.reserve(1025 * mib); code != wire.ErrArena {
		t.Errorf("more than the GPU has: code %d", code)
	}
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	if code := c.reserve(600 * mib); code != wire.ErrArena {
		t.Errorf("more than the arena holds: code %d", code)
	}
	if code := c.reserve(8 * mib); code != wire.OK {
		t.Errorf("little more: code %d", code)
	}
	old := newProc(t, s.dir, 0).connect().register(0).attach(0, gpuA, 0, 0)
	if old.page.Room(0) == 0 {
		t.Error("a client that cannot move does not hear that it has to ask")
	}
	if f := old.reserve(500*mib, 500*mib, 0); f.Code != wire.ErrMemory {
		t.Errorf("of a client that cannot move: code %d", f.Code)
	}
	r := s.status()
	if !slices.ContainsFunc(r.Gpus[0].Clients, func(c *api.Client) bool { return strings.Contains(c.FixedReason, "its driver has no virtual memory") }) {
		t.Error("it is not said that a client cannot move its memory")
	}
	if n := r.Gpus[0].Swap.Refused; n != 3 || len(r.Problems) != 0 {
		t.Errorf("%d refused, problems %v", n, r.Problems)
	}
	found := 0
	for _, e := range s.eventsOf(&api.EventsRequest{}).Events {
		if e.Type == api.EventType_EVENT_TYPE_NO_ROOM {
			found++
			if !strings.Contains(e.Reason, "MiB") || e.Bytes == 0 {
				t.Errorf("event %v", e)
			}
		}
	}
	s.stop()
	if found != 3 || !strings.Contains(log.String(), "--swap-memory") {
		t.Errorf("%d events; log:\n%s", found, log.String())
	}
}

// With --swap-memory 0 a client that could move is told nothing of it.
func TestNoSwap(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	w := newSwapper(t, s)
	if w.page.Room(0) != 0 || w.page.Flags(0) != 0 {
		t.Errorf("room %d, flags %#x", w.page.Room(0), w.page.Flags(0))
	}
	if code := w.reserve(8 * gib); code != wire.OK {
		t.Errorf("code %d", code)
	}
	if g := s.status().Gpus[0]; g.Swap != nil || g.NotSwapped != "--swap-memory is 0" || g.MemoryBytes != gib {
		t.Errorf("%v", g)
	}
}

// The arena is there before it is needed: as much as can have to leave, full of
// zeros, and neither larger nor smaller than was said. It ends with the client.
func TestArena(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	a := newSwapper(t, s)
	a.allocates(600 * mib)
	if r := s.status().Gpus[0].Swap; r.ArenaUsedBytes != 0 {
		t.Errorf("alone it has %d bytes of the arena", r.ArenaUsedBytes)
	}
	b := newSwapper(t, s)
	b.allocates(600 * mib)
	for _, w := range []*swapper{a, b} {
		sum := uint64(0)
		for sum < 176*mib {
			f, oob, err := w.recv()
			if err != nil {
				t.Fatal(err)
			}
			if f.Type != wire.TypeArena {
				continue
			}
			fd := rights(t, oob)
			sum += f.Arena.Size
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil || uint64(st.Size) != f.Arena.Size || f.Arena.Size%(2*mib) != 0 {
				t.Errorf("segment of %d bytes, said %d, %v", st.Size, f.Arena.Size, err)
			}
			if uint64(st.Blocks)*512 < f.Arena.Size {
				t.Errorf("%d of %d bytes are there", st.Blocks*512, f.Arena.Size)
			}
			if err := unix.Ftruncate(fd, int64(f.Arena.Size)*2); err == nil {
				t.Error("a client can make its segment larger")
			}
			file := os.NewFile(uintptr(fd), "segment")
			page := make([]byte, mib)
			if _, err := io.ReadFull(io.NewSectionReader(file, int64(f.Arena.Size)-mib, mib), page); err != nil || !bytes.Equal(page, make([]byte, mib)) {
				t.Errorf("not zeros, %v", err)
			}
			file.Close()
		}
	}
	s.await("all is made", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaUsedBytes == r.Gpus[0].Swap.ArenaBytes })
	if used := s.status().Gpus[0].Swap; used.ArenaBytes < 2*176*mib || used.ArenaBytes > 2*256*mib {
		t.Errorf("%v", used)
	}
	a.proc.kill()
	b.proc.kill()
	s.await("the arena is given back", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaUsedBytes == 0 })
}

// What a client had is the kernel's again at its end, whoever has a descriptor of it; and
// nothing is lost of what it has, when the scheduler ends.
func TestArenaPassedOn(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, swapping)
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(600 * mib)
	b.allocates(600 * mib)
	for len(a.fds) == 0 || len(b.fds) == 0 {
		a.reserve(600 * mib) // takes note of segments on the way
		b.reserve(600 * mib)
	}
	there := func(w *swapper) (sum uint64) {
		for _, fd := range w.fds {
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil {
				t.Fatal(err)
			}
			sum += uint64(st.Blocks) * 512
		}
		return sum
	}
	a.proc.kill() // a.fds are those of another process, then
	s.await("its memory is free", func(*api.StatusResponse) bool { return there(a) == 0 })
	if there(b) == 0 {
		t.Error("the other one's is free as well")
	}
	s.stop()
	if there(b) == 0 {
		t.Error("it is lost with the scheduler")
	}
}

// A client whose arena is too small for what it moves at a time gets more: all that it
// may have to move, if that takes nothing from others, and not before what it was given
// already is of use to it.
func TestArenaTooSmall(t *testing.T) {
	for _, c := range []struct {
		name         string
		limit, ready uint64
		more         bool
	}{
		{"there is more", 2 * gib, 256 * mib, true},
		{"what it was given is not ready yet", 2 * gib, 128 * mib, false},
		{"others need what there is", 800 * mib, 256 * mib, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.SwapMemory = c.limit })
			a := newSwapper(t, s)
			a.allocates(600 * mib)
			b := newSwapper(t, s)
			b.allocates(600 * mib)
			s.await("all is made", func(r *api.StatusResponse) bool {
				g := r.Gpus[0].Swap
				return g.ArenaUsedBytes >= 2*176*mib && g.ArenaUsedBytes == g.ArenaBytes
			})
			a.has.Arena = c.ready
			a.moved(wire.MovedStuck|wire.MovedNoArena, 0)
			a.has.Away += 8 * mib // seen after it
			a.moved(0, 0)
			s.await("its report", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.AwayBytes == 1208*mib })
			if !c.more {
				if g := s.status().Gpus[0].Swap; g.ArenaUsedBytes > 2*256*mib {
					t.Errorf("%d MiB of the arena", g.ArenaUsedBytes>>20)
				}
				return
			}
			s.await("room for all", func(r *api.StatusResponse) bool {
				g := r.Gpus[0].Swap
				return g.ArenaUsedBytes >= (600+176)*mib && g.ArenaUsedBytes == g.ArenaBytes
			})
		})
	}
}

// No host memory is taken while all that is reserved fits, however little is left.
func TestNoArenaWhileAllFits(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.SwapMemory = 256 * mib })
	a, b := newSwapper(t, s), newSwapper(t, s)
	a.allocates(500 * mib)
	b.allocates(524 * mib)
	if r := s.status().Gpus[0].Swap; r.ArenaUsedBytes != 0 {
		t.Errorf("%d bytes of the arena, at 1024 MiB of 1024", r.ArenaUsedBytes)
	}
	b.allocates(32 * mib)
	s.await("some of it", func(r *api.StatusResponse) bool {
		g := r.Gpus[0].Swap
		return g.ArenaBytes > 0 && g.ArenaUsedBytes == g.ArenaBytes
	})
}

// Whoever does not move is passed over, then reported; who waits gets the room from
// somebody else, or when the one that was stopped goes on, or dies.
func TestSwapStuckVictim(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.Quantum, o.Grace = sched.MinQuantum, sched.MinGrace })
	stuck, other, w := newSwapper(t, s), newSwapper(t, s), newSwapper(t, s)
	for _, x := range []*swapper{stuck, other} {
		x.allocates(400 * mib)
		x.request()
		e := x.granted()
		x.in(e)
		x.send(wire.Frame{Type: wire.TypeRelease, Epoch: e, Code: wire.ReleaseIdle})
		x.moved(0, 0)
	}
	w.allocates(600 * mib)
	w.request()
	e := w.granted()
	stuck.awaitLess(s, 24*mib) // granted before the other one: it is to go
	other.awaitLess(s, 24*mib) // once the first one has not moved
	other.out()
	w.awaitRoom(s, 600*mib)
	w.in(e)
	s.await("ready", func(*api.StatusResponse) bool { return !w.status(s).Moving })
	if r := s.status(); len(r.Problems) != 0 {
		t.Errorf("problems though nobody waits: %v", r.Problems)
	}
	// Now nobody is left but the stuck one.
	w.allocatesAsHolder(s, 824*mib)
	s.await("it is reported", func(r *api.StatusResponse) bool {
		return len(r.Problems) == 1 && strings.Contains(r.Problems[0], "does not move its memory") && strings.Contains(r.Problems[0], "or end it")
	})
	stuck.proc.kill()
	w.awaitRoom(s, 824*mib)
	s.await("no problem is left", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
	found := false
	for _, e := range s.eventsOf(&api.EventsRequest{}).Events {
		found = found || e.Type == api.EventType_EVENT_TYPE_STALL
	}
	if !found {
		t.Error("no event says so")
	}
}

// Whoever did not move twice in a row is a problem also while nobody waits, with what its shim says of it, until it moves.
func TestSwapStuckTwice(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.Quantum, o.Grace = sched.MaxQuantum, sched.MinGrace })
	stuck, w := newSwapper(t, s), newSwapper(t, s)
	stuck.allocates(600 * mib)
	w.allocates(600 * mib)
	idle := func(x *swapper, e uint64) {
		x.send(wire.Frame{Type: wire.TypeRelease, Epoch: e, Code: wire.ReleaseIdle})
		x.moved(0, 0)
		s.await("it has released", func(r *api.StatusResponse) bool { return x.status(s).State == api.ClientState_CLIENT_STATE_IDLE })
	}
	problem := func(r *api.StatusResponse) string { return strings.Join(r.Problems, "\n") }
	for n := range 2 {
		stuck.request()
		e := stuck.granted()
		stuck.in(e)
		idle(stuck, e)
		w.request()
		e = w.granted()
		stuck.awaitLess(s, 424*mib)
		stuck.moved(wire.MovedStuck|wire.MovedNoArena, 0)
		s.await("it is reported", func(r *api.StatusResponse) bool {
			return strings.Contains(problem(r), "others wait for 176 MiB: it says that it lacks host memory")
		})
		idle(w, e)
		s.await("nobody waits", func(r *api.StatusResponse) bool { return n == 1 || problem(r) == "" })
	}
	if p := problem(s.status()); !strings.Contains(p, "does not move its memory off the GPU, 2 times in a row: it says that it lacks host memory") {
		t.Errorf("problems: %q", p)
	}
	stuck.out()
	s.await("it moves", func(r *api.StatusResponse) bool { return problem(r) == "" })
}

// allocatesAsHolder reserves so much in all; the room comes when it comes.
func (w *swapper) allocatesAsHolder(s *scheduler, total uint64) {
	w.t.Helper()
	if code := w.reserve(total); code != wire.OK {
		w.t.Fatalf("reserve: code %d", code)
	}
}

// A client whose memory is never moved gets room before its reservation is answered;
// its mode is in its page, and can be refused where its memory does not fit.
func TestMemoryModes(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.Quantum = sched.MinQuantum })
	a := newSwapper(t, s)
	a.allocates(900 * mib)
	a.request()
	e := a.granted()
	a.in(e)
	a.send(wire.Frame{Type: wire.TypeRelease, Epoch: e, Code: wire.ReleaseIdle})
	a.moved(0, 0)

	c, err := api.Dial(context.Background(), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	set := func(m api.MemoryMode) error {
		l := limitRequest(t, "", 0)
		_, err := c.SetShare(context.Background(), &api.SetShareRequest{Container: l.Container, Uid: l.Uid, MemoryMode: &m})
		return err
	}
	b := newSwapper(t, s)
	b.allocates(900 * mib)
	if err := set(api.MemoryMode_MEMORY_MODE_RESIDENT); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "MiB") {
		t.Errorf("1800 MiB can stay on a GPU of 1 GiB: %v", err)
	}
	if code := b.reserve(0); code != wire.OK {
		t.Fatal(code)
	}
	b.has.Away = 0
	b.moved(0, 0)
	old := newProc(t, s.dir, 0).connect().register(0).attach(0, gpuA, 0, 0)
	old.send(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 100 * mib, Least: 100 * mib, Serial: 7}})
	if f := old.expect2(wire.TypeReserved); f.Code != wire.OK {
		t.Errorf("there is room: code %d", f.Code)
	}
	old.send(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 124 * mib, Least: 124 * mib, Serial: 8}})
	if f := old.expect2(wire.TypeReserved); f.Code != wire.OK {
		t.Errorf("there is room: code %d", f.Code)
	}
	if err := set(api.MemoryMode_MEMORY_MODE_RESIDENT); err != nil {
		t.Error(err)
	}
	if flags := a.page.Flags(0); flags&wire.SlotResident == 0 {
		t.Errorf("flags %#x", flags)
	}
	if err := set(api.MemoryMode_MEMORY_MODE_MANAGED); err != nil {
		t.Error(err)
	}
	if flags := a.page.Flags(0); flags&(wire.SlotResident|wire.SlotManaged) != wire.SlotManaged {
		t.Errorf("flags %#x", flags)
	}
}

// Turns are as long as moving needs, and a time quantum that is set leaves that as it is.
func TestSwapShareSetting(t *testing.T) {
	dir := t.TempDir()
	s := startFound(t, dir, swapping)
	inForce := func() [2]uint32 {
		t.Helper()
		r := s.status()
		return [2]uint32{r.Gpus[0].Swap.SharePercent, r.Gpus[1].Swap.SharePercent}
	}
	for _, step := range []struct {
		req  *api.SetRequest
		want [2]uint32
	}{
		{&api.SetRequest{QuantumNs: int64(time.Second)}, [2]uint32{10, 10}},
		{&api.SetRequest{Gpu: "0", SwapShare: proto.Uint32(25)}, [2]uint32{25, 10}},
		{&api.SetRequest{Gpu: "1", QuantumNs: int64(2 * time.Second)}, [2]uint32{25, 10}},
		{&api.SetRequest{SwapShare: proto.Uint32(5)}, [2]uint32{5, 5}},
		{&api.SetRequest{Gpu: "1", SwapShare: proto.Uint32(0)}, [2]uint32{5, 0}},
	} {
		before := inForce()
		for _, ch := range s.set(step.req).Changes {
			if ch.Uuid != "" && ch.Name == api.SwapShareSetting && (ch.Old != api.FormatPercent(before[ch.Index]) || ch.New != api.FormatPercent(step.want[ch.Index])) {
				t.Errorf("%v: GPU %d: %s → %s", step.req, ch.Index, ch.Old, ch.New)
			}
		}
		if got := inForce(); got != step.want {
			t.Errorf("%v: %v %%, want %v", step.req, got, step.want)
		}
	}
	if _, err := dial(t, s).Set(t.Context(), &api.SetRequest{SwapShare: proto.Uint32(51)}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("51 %%: %v", err)
	}
	s.stop()
	if s = startFound(t, dir, swapping); inForce() != [2]uint32{5, 0} {
		t.Errorf("after a restart: %v %%", inForce())
	}
}

// A time quantum that an earlier scheduler recorded, under which it meant no swap share, leaves the
// swap share too.
func TestRecordedQuantumLeavesTheSwapShare(t *testing.T) {
	dir := t.TempDir()
	record := `{"version":1,"all":{"quantum_ns":200000000}}`
	if err := os.WriteFile(filepath.Join(dir, "settings.json"), []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startFound(t, dir, swapping)
	r := s.status()
	if g, c := r.Gpus[0], r.Config[0]; g.QuantumNs != 200e6 || g.Swap.SharePercent != 10 || c.Origin != api.Origin_ORIGIN_HAND || c.Author != nil {
		t.Errorf("time quantum %v, swap share %d %%, %v", time.Duration(g.QuantumNs), g.Swap.SharePercent, c)
	}
}

// A GPU that is to look small does so to everybody.
func TestGPUMemory(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.GPUMemory = 512 * mib })
	_, c := newClient(t, s)
	c.shows(512*mib, 0)
	c.reserves(600*mib, 600*mib, 0, wire.ErrMemory, wire.Reserved{Limit: 512 * mib})
	c.reserves(500*mib, 500*mib, 0, wire.OK, wire.Reserved{Total: 500 * mib, Used: 500 * mib, Limit: 512 * mib})
	if g := s.status().Gpus[0]; g.MemoryBytes != 512*mib {
		t.Errorf("%d bytes", g.MemoryBytes)
	}
	s.limit("0", 256*mib)
	c.shows(256*mib, 500*mib)
}

// The status says why memory was refused of late: because others' cannot be moved, or because host memory is short;
// nothing of a reservation that has no place on any such GPU.
func TestWhyMemoryWasRefused(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.SwapMemory = 640 * mib })
	a, b, c := newSwapper(t, s), newSwapper(t, s), newSwapper(t, s)
	refused := func(bytes uint64, code api.ProblemCode, why string) {
		t.Helper()
		if got := c.reserve(bytes); got != wire.ErrArena {
			t.Fatalf("%d MiB: code %d", bytes>>20, got)
		}
		r := s.status()
		if why == "" && len(r.Problems) != 0 || why != "" && (len(r.Problems) != 1 || !strings.Contains(r.Problems[0], why) || r.ProblemCodes[0] != code) {
			t.Errorf("%d MiB refused: problems %v %q, want %v %q", bytes>>20, r.ProblemCodes, r.Problems, code, why)
		}
	}
	a.allocates(600 * mib)
	a.has = wire.Moved{Resident: 2 * mib, Fixed: 2 * mib, Away: 598 * mib}
	a.moved(0, 0)
	s.await("it has memory that cannot be moved", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.FixedBytes == 2*mib })
	refused(1025*mib, 0, "")
	refused(1023*mib, api.ProblemCode_PROBLEM_CODE_SWAP, "2 MiB that cannot be moved, of which")
	b.allocates(600 * mib)
	refused(600*mib, api.ProblemCode_PROBLEM_CODE_HOST_MEMORY, "of host memory, and there are 640 MiB (--swap-memory)")
}

// Without swapping all processes of a user share what a GPU is to look like, and it is
// said when that refuses one; with swapping it is as if the GPU were that small: each
// may have as much, and is shown its own use.
func TestGPUMemoryOfSeveral(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.GPUMemory = 512 * mib })
	_, a := newClient(t, s)
	_, b := newClient(t, s)
	a.reserves(400*mib, 400*mib, 0, wire.OK, wire.Reserved{Total: 400 * mib, Used: 400 * mib, Limit: 512 * mib})
	b.reserves(200*mib, 200*mib, 0, wire.ErrMemory, wire.Reserved{Used: 400 * mib, Limit: 512 * mib})
	found := false
	for _, e := range s.eventsOf(&api.EventsRequest{}).Events {
		found = found || e.Type == api.EventType_EVENT_TYPE_NO_ROOM && strings.Contains(e.Reason, "512 MiB (--gpu-memory), and have 400")
	}
	if !found {
		t.Error("no event")
	}

	s = start(t, t.TempDir(), func(o *Options) { swapping(o); o.GPUMemory, o.SwapHeadroom = 512*mib, 0 })
	x, y := newSwapper(t, s), newSwapper(t, s)
	x.allocates(400 * mib)
	y.allocates(400 * mib)
	y.shows(512*mib, 400*mib)
	if code := y.reserve(600 * mib); code != wire.ErrArena {
		t.Errorf("more than the GPU: code %d", code)
	}
	s.limit("0", 700*mib)
	y.shows(512*mib, 400*mib)
	if code := y.reserve(450 * mib); code != wire.ErrMemory {
		t.Errorf("more than the limit of both together: code %d", code)
	}
	s.limit("0", 500*mib)
	y.shows(500*mib, 800*mib)
}

// What a hostile client says of its memory, or reserves by force, takes none from
// others.
func TestSwapHostile(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.Quantum = sched.MinQuantum })
	liar, w := newSwapper(t, s), newSwapper(t, s)
	const all = ^uint64(0)
	for _, m := range []wire.Moved{{Resident: all, Fixed: all, Away: all, Out: all, In: all, Arena: all}, {Away: all}, {Fixed: all}, {}} {
		liar.has = m
		liar.moved(0, 0)
		liar.moved(wire.MovedStuck|wire.MovedNoArena, 5)
		liar.moved(wire.MovedReady, 77)
	}
	liar.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: all >> 8, Least: all >> 8, Serial: 1}})
	liar.want(wire.TypeReserved)
	liar.has = wire.Moved{}
	liar.moved(0, 0)
	w.allocates(900 * mib)
	w.request()
	e := w.granted()
	w.awaitRoom(s, 900*mib)
	w.in(e)
	s.await("ready", func(*api.StatusResponse) bool { return !w.status(s).Moving })
}

func (s *scheduler) eventsOf(req *api.EventsRequest) *api.EventsResponse {
	s.t.Helper()
	c, err := api.Dial(context.Background(), s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	defer c.Close()
	r, err := c.Events(context.Background(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// Where NVML does not tell how much memory a GPU has, --gpu-memory does, and without
// it nothing is swapped: a capacity of 0 would refuse every reservation.
func TestSwapMemoryUnknown(t *testing.T) {
	unknown := gpuA
	unknown.MemoryBytes = 0
	list := func(o *Options) {
		swapping(o)
		o.List = func(context.Context) ([]node.Found, error) { return []node.Found{unknown}, nil }
	}
	s := start(t, t.TempDir(), list)
	w := newSwapper(t, s)
	if code := w.reserve(8 * mib); code != wire.OK {
		t.Errorf("code %d", code)
	}
	if r := s.status(); r.Gpus[0].Swap != nil || !strings.HasPrefix(r.Gpus[0].NotSwapped, "NVML does not tell") || len(r.Problems) != 0 {
		t.Errorf("%v", r)
	}
	s = start(t, t.TempDir(), func(o *Options) { list(o); o.GPUMemory, o.SwapHeadroom = 512*mib, 0 })
	w = newSwapper(t, s)
	if code := w.reserve(400 * mib); code != wire.OK {
		t.Errorf("code %d", code)
	}
	if g := s.status().Gpus[0]; g.MemoryBytes != 512*mib || g.Swap.GetCapacityBytes() != 512*mib || g.NotSwapped != "" {
		t.Errorf("%v", g)
	}
}
