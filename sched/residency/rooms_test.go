// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"slices"
	"testing"

	"github.com/nvshare/nvshare/sched/base"
	"pgregory.net/rapid"
)

// mover models a client that moves its memory as the shim does: it looks at its
// room before each piece, and says on the way what it has.
type mover struct {
	id             base.ClientID
	keep           Keep
	resident, away uint64 // really
	fixed          uint64
	reserved       uint64
	room           uint64 // its page
	seq            uint32 // of room; 0: an old shim does not say it, and does not grow without a grant
	old            bool   // it is an old shim
	granted        bool   // as it knows
	stopped        bool
	cut            bool // it was taken off the GPU with work left: its memory stays
	answer         bool // it was told to move out, and has not said that it has
	sent           []func(r *rooms)
}

func (m *mover) total() uint64 { return m.resident + m.away }

// report says what the client has now; the frame arrives later, in order.
func (m *mover) report() {
	resident, fixed, away := m.resident, m.fixed, m.away
	seen := m.seq
	m.sent = append(m.sent, func(r *rooms) { r.moved(m.id, resident, fixed, away, seen, false) })
}

// piece is what moves at once.
const piece = 16

// grow gives memory that was allocated without a grant its place on the GPU, which is said later, if it is.
func (m *mover) grow(n uint64) {
	n = min(n, m.away, less(m.room, m.resident))
	m.resident += n
	m.away -= n
}

// step does the next thing that a client does by itself, and reports whether
// there was anything to do.
func (m *mover) step() bool {
	if m.stopped {
		return false
	}
	switch {
	case m.resident > m.room && m.resident > m.fixed && !m.cut:
		n := min(piece, m.resident-m.fixed)
		m.resident -= n
		m.away += n
	case m.granted && m.away > 0 && m.resident < m.room:
		n := min(piece, m.away, m.room-m.resident)
		m.resident += n
		m.away -= n
	case m.answer:
		m.answer = false
	default:
		return false
	}
	m.report()
	return true
}

type moving struct {
	t        *rapid.T
	r        *rooms
	clients  []*mover
	capacity uint64
	still    bool   // as the pages say
	guessed  bool   // one was passed over before it said, after a restart, what it has made unmovable
	holder   *mover // has the grant, as the scheduler knows
	last     base.ClientID
}

func (w *moving) plan() {
	w.still = w.r.still()
	for _, room := range w.r.plan() {
		if w.still && room.Less {
			w.t.Fatalf("nobody has to make room, and client %d has to", room.Client)
		}
		for _, m := range w.clients {
			if m.id == room.Client {
				if room.Less && m.cut && w.holder != m && w.r.clients[m.id].cut {
					w.t.Fatalf("client %d was cut, and is to make room", m.id)
				}
				m.room = room.Bytes
				if !m.old {
					m.seq = room.Seq
				}
				m.answer = m.answer || room.Less
			}
		}
	}
	if err := w.r.check(); err != nil {
		w.t.Fatal(err)
	}
	sum := uint64(0)
	for _, m := range w.clients {
		sum += m.resident
		if m.total() > m.reserved {
			w.t.Fatalf("client %d has %d of %d", m.id, m.total(), m.reserved)
		}
	}
	if sum > w.capacity && !w.guessed {
		w.t.Fatalf("%d bytes are on the GPU of %d: %s", sum, w.capacity, w.show())
	}
}

func (w *moving) rooms() *rooms {
	r := newRooms(100)
	r.physical = w.capacity
	return r
}

func (w *moving) show() (s string) {
	for _, m := range w.clients {
		s += fmt.Sprintf("\n%+v; known: %+v", *m, *w.r.clients[m.id])
	}
	return s
}

func (w *moving) some() *mover {
	if len(w.clients) == 0 {
		return nil
	}
	return w.clients[rapid.IntRange(0, len(w.clients)-1).Draw(w.t, "client")]
}

// deliver has the oldest frame of a client arrive.
func (w *moving) deliver(m *mover) bool {
	if len(m.sent) == 0 {
		return false
	}
	m.sent[0](w.r)
	m.sent = m.sent[1:]
	w.plan()
	return true
}

func (w *moving) grant(m *mover) {
	w.holder = m
	w.r.setActive(m.id, true)
	w.plan()
	m.granted, m.cut = true, false
}

// release sends it; it counts when it has arrived. Cut: with work left.
func (w *moving) release(m *mover, cut bool) {
	m.granted, m.cut = false, cut
	m.sent = append(m.sent, func(r *rooms) {
		r.setCut(m.id, cut)
		r.setActive(m.id, false)
		if w.holder == m {
			w.holder = nil
		}
	})
}

// reserve comes after all that the client has sent before.
func (w *moving) reserve(m *mover, n uint64) bool {
	for w.deliver(m) {
	}
	for _, other := range w.clients { // what is exported is known only when it was said
		for w.r.clients[other.id].unknown && w.deliver(other) {
		}
	}
	if n > m.reserved {
		if _, err := w.r.fits(m.id, n, w.capacity); err != nil {
			return false
		}
	}
	m.reserved = n
	w.r.promise(m.id, n, w.capacity)
	w.plan()
	return true
}

// settle runs all until nothing happens any more.
func (w *moving) settle() {
	for busy := true; busy; {
		busy = false
		for _, m := range w.clients {
			busy = m.step() || busy
			for w.deliver(m) {
				busy = true
			}
		}
	}
}

// untold leaves out what pages say beside rooms.
func untold(rooms []Room) []Room {
	for i := range rooms {
		rooms[i].Seq = 0
	}
	return rooms
}

// Whatever clients do, and however late their frames come: no more is on the GPU
// than it has, no byte is lost, and who has the grant gets all its memory there as
// soon as the others can move.
func TestResidency(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &moving{t: t, capacity: 100 + rapid.Uint64Range(0, 10).Draw(t, "headroom")}
		w.r = w.rooms()
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			m := w.some()
			op := rapid.IntRange(0, 12).Draw(t, "op")
			switch {
			case m == nil || op == 0 && len(w.clients) < 6:
				w.last++
				m = &mover{id: w.last, keep: Keep(rapid.IntRange(0, 1).Draw(t, "keep")), old: rapid.IntRange(0, 3).Draw(t, "old") == 0}
				w.clients = append(w.clients, m)
				w.r.attach(m.id, m.keep, "", false)
				w.plan()
			case op <= 2: // it allocates
				n := rapid.Uint64Range(1, 40).Draw(t, "bytes")
				if w.reserve(m, m.reserved+n) {
					m.away += n
					m.report()
				}
			case op == 3 && m.total() > m.fixed: // it frees
				n := rapid.Uint64Range(1, m.total()-m.fixed).Draw(t, "bytes")
				gone := min(n, m.away)
				m.away -= gone
				m.resident -= n - gone
				w.reserve(m, m.reserved-n)
			case op == 4 && w.holder == nil:
				w.grant(m)
			case op == 5 && m.granted:
				w.release(m, w.r.still() && rapid.Bool().Draw(t, "cut"))
			case op == 6 && m.granted && m.resident > m.fixed && m.keep == Swapped:
				if known := w.r.clients[m.id]; m.away == 0 {
					was, knew := m.fixed, known.fixed
					m.fixed += rapid.Uint64Range(1, m.resident-m.fixed).Draw(t, "exported")
					known.fixed = m.fixed
					w.r.recount(known)
					if _, err := w.r.fits(m.id, m.reserved, w.capacity); err != nil {
						m.fixed = was // somebody could not be placed beside it any more
					}
					known.fixed = knew
					w.r.recount(known)
					m.report()
					for w.deliver(m) { // or somebody is promised meanwhile what it has
					}
				}
			case op == 12 && w.still && !m.old && m.keep == Swapped:
				m.grow(rapid.Uint64Range(1, 40).Draw(t, "grows"))
			case op == 7:
				m.stopped = !m.stopped
			case op == 8:
				for _, o := range w.r.late() {
					w.guessed = w.guessed || o.unknown
					w.r.stall(o.id)
				}
				w.plan()
			case op == 9 && m.reserved > 0 && rapid.IntRange(0, 9).Draw(t, "dies") == 0:
				w.r.drop(m.id)
				if w.holder == m {
					w.holder = nil
				}
				for i := range w.clients {
					if w.clients[i] == m {
						w.clients = append(w.clients[:i], w.clients[i+1:]...)
						break
					}
				}
				w.plan()
			case op == 10 && rapid.IntRange(0, 9).Draw(t, "restarts") == 0:
				w.r = w.rooms()
				for _, m := range w.clients {
					w.r.attach(m.id, m.keep, "", true)
					w.r.promise(m.id, m.reserved, w.capacity)
					w.r.setActive(m.id, w.holder == m)
					m.room, m.sent, m.answer = w.capacity, nil, false
					if seq := w.r.clients[m.id].tell(); !m.old {
						m.seq = seq
					}
					if w.holder == m && !m.granted {
						w.release(m, m.cut) // again, after it was lost
					}
					m.report()
				}
				w.plan()
			default:
				m.step()
				w.deliver(m)
			}
		}
		for _, m := range w.clients {
			m.stopped = false
		}
		if w.holder != nil && w.holder.granted {
			w.release(w.holder, false)
		}
		w.settle()
		for _, m := range w.clients { // who was cut finishes first
			if m.cut {
				w.grant(m)
				w.settle()
				w.release(m, false)
				w.settle()
			}
		}
		for _, m := range w.clients {
			w.grant(m)
			w.settle()
			if m.away != 0 {
				t.Fatalf("client %d has the grant, and %d bytes are away: %s", m.id, m.away, w.show())
			}
			w.release(m, false)
			w.settle()
		}
		if fits := max(w.r.promised(), w.r.sum.may) <= w.r.usable(); fits != w.r.still() {
			t.Fatalf("all fits: %t, still: %t: %s", fits, w.r.still(), w.show())
		}
	})
}

// A client that has nearly the whole GPU has it as long as it wants: others get what is left. Where more than the GPU
// has is promised, what the driver needs to move memory is left free.
func TestHeadroomIsForMoving(t *testing.T) {
	r := newRooms(96)
	r.physical = 100
	r.attach(1, Swapped, "", false)
	r.attach(2, Swapped, "", false)
	r.setActive(1, true)
	if _, err := r.fits(1, 99, 100); err != nil {
		t.Fatal(err)
	}
	r.promise(1, 99, 100)
	r.plan()
	if o := r.clients[1]; o.room != 99 || !r.still() {
		t.Errorf("room %d, still: %t", o.room, r.still())
	}
	if _, err := r.fits(2, 1, 100); err != nil {
		t.Error(err)
	}
	if _, err := r.fits(2, 2, 100); err == nil {
		t.Error("2 beside 99: made unmovable, they leave 1 of the 99 no place")
	}
	r.promise(1, 60, 100)
	r.moved(1, 60, 0, 0, 0, false)
	r.setActive(1, false)
	r.setCut(1, true)
	r.plan()
	if _, err := r.fits(2, 50, 100); err != nil {
		t.Fatal(err)
	}
	r.promise(2, 50, 100)
	r.setActive(2, true)
	if got := untold(r.plan()); r.still() || len(got) != 1 || got[0] != (Room{Client: 2, Bytes: 36}) {
		t.Errorf("%v; client 1 has work left, and the GPU 36 bytes", got)
	}
	r.setActive(2, false)
	r.setActive(1, true)
	r.setActive(1, false) // it has finished
	r.moved(1, 60, 0, 0, 0, false)
	r.setActive(2, true)
	if got := untold(r.plan()); len(got) != 1 || got[0] != (Room{Client: 1, Bytes: 46, Less: true}) {
		t.Errorf("%v, want 14 of client 1", got)
	}
}

// Where something else has memory of the GPU, more of the others' is moved out, until
// it seems to be gone.
func TestResidencyOutside(t *testing.T) {
	r := newRooms(100)
	for id := base.ClientID(1); id <= 2; id++ {
		r.attach(id, Swapped, "", false)
		r.promise(id, 50, 100)
	}
	fill := func(id base.ClientID, n uint64) {
		r.setActive(id, true)
		r.plan()
		r.moved(id, n, 0, 50-n, 0, false)
	}
	fill(1, 50)
	r.setActive(1, false)
	r.moved(1, 50, 0, 0, 0, false)
	fill(2, 30) // there is no more: something has 20
	r.moved(2, 30, 0, 20, 0, true)
	r.refused(2)
	if rooms := untold(r.plan()); len(rooms) != 1 || rooms[0] != (Room{Client: 1, Bytes: 30, Less: true}) {
		t.Fatalf("%v, want 20 of client 1", rooms)
	}
	r.moved(1, 30, 0, 20, 0, false)
	r.moved(2, 50, 0, 0, 0, false)
	r.filled()
	r.setActive(2, false)
	r.moved(2, 50, 0, 0, 0, false)
	r.setActive(1, true)
	// 18 are still thought to be away; not for ever.
	for range 40 {
		r.filled()
	}
	r.plan()
	if o := r.clients[1]; o.room != 50 {
		t.Errorf("room %d", o.room)
	}
	if len(r.late()) != 0 {
		t.Errorf("%d are still to move", len(r.late()))
	}
}

// The least recently granted has to leave first, and only what is lacking; who has a
// grant stays, and so does what is fixed.
func TestResidencyVictims(t *testing.T) {
	r := newRooms(100)
	for id := base.ClientID(1); id <= 4; id++ {
		r.attach(id, Swapped, "", false)
	}
	for id, n := range map[base.ClientID]uint64{1: 30, 2: 30, 3: 40} {
		r.promise(id, n, 100)
	}
	for _, id := range []base.ClientID{2, 1, 3} {
		r.setActive(id, true)
		r.plan()
		room := r.clients[id].room
		fixed := uint64(0)
		if id == 2 {
			fixed = 5
		}
		r.moved(id, room, fixed, 0, 0, false)
		if id != 3 {
			r.setActive(id, false)
			r.moved(id, room, fixed, 0, 0, false)
		}
	}
	r.promise(4, 40, 100)
	r.setActive(4, true)
	want := []Room{{2, 5, true, 0}, {1, 15, true, 0}}
	if got := untold(r.plan()); len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("%v, want %v", got, want)
	}
	if _, err := r.fits(4, 96, 100); err == nil {
		t.Error("96 beside 5 that cannot be moved")
	}
	if arena, err := r.fits(4, 50, 100); err != nil || arena == 0 {
		t.Errorf("%d, %v", arena, err)
	}
}

// A client that moves much at a time needs an arena for what it moves too much; one that
// says that even this does not do gets one for all that it has.
func TestResidencyMovesInUnits(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		unit  uint64
		short bool
		want  uint64
	}{{0, false, 240 * mib}, {512 * mib, false, 688 * mib}, {0, true, 16000 * mib}} {
		r := newRooms(16896 * mib)
		r.moveUnit, r.arenaUnit = c.unit, mib
		for id := base.ClientID(1); id <= 2; id++ {
			r.attach(id, Swapped, "", false)
		}
		r.promise(1, 16000*mib, 32<<30)
		r.promise(2, 1072*mib, 32<<30)
		if c.short {
			r.shortOfArena(1, func() bool { return false })
			if got := r.arenaOf(r.clients[1]); got != 240*mib {
				t.Errorf("what did not fit: %d MiB", got/mib)
			}
			r.shortOfArena(1, func() bool { return r.arenaOf(r.clients[1]) == c.want })
		}
		if got := r.arenaOf(r.clients[1]); got != c.want {
			t.Errorf("unit %d MiB, short %v: %d MiB, want %d", c.unit/mib, c.short, got/mib, c.want/mib)
		}
	}
}

// Two clients with grants that do not fit together wait for each other's end; found in
// simulation, where one of them was given room that there was not. Members of a gang
// have nobody to wait for: the driver has the last word.
func TestResidencyOverdraws(t *testing.T) {
	for _, c := range []struct {
		groups [2]string
		want   bool
	}{{[2]string{"", ""}, false}, {[2]string{"a", "b"}, false}, {[2]string{"a", "a"}, true}} {
		r := newRooms(100)
		for i, group := range c.groups {
			id := base.ClientID(i + 1)
			r.attach(id, Swapped, group, false)
			r.promise(id, 50, 100)
			r.setActive(id, true)
			r.plan()
			r.moved(id, 50, 0, 0, 0, false)
		}
		r.promise(1, 55, 100)
		r.promise(2, 57, 100)
		r.plan()
		if got := r.clients[1].room+r.clients[2].room > 100; got != c.want {
			t.Errorf("groups %q: rooms %d and %d of 100", c.groups, r.clients[1].room, r.clients[2].room)
		}
	}
}

// A report says what a client had before it saw its room. What it has got meanwhile without a grant, as it may
// where all fits, is not free for others.
func TestGrowsBetweenReports(t *testing.T) {
	r := newRooms(100)
	for id := base.ClientID(1); id <= 2; id++ {
		r.attach(id, Swapped, "", false)
	}
	r.plan()
	first := r.clients[1].tell()
	r.moved(1, 0, 0, 0, first, false)
	r.promise(1, 60, 100)
	known := r.plan()[0].Seq
	r.moved(1, 0, 0, 60, known, false) // and goes on to 60
	r.promise(2, 80, 100)
	r.setActive(2, true)
	got := untold(slices.Clone(r.plan()))
	if want := []Room{{1, 20, true, 0}, {2, 40, false, 0}}; !slices.Equal(got, want) {
		t.Fatalf("%v, want %v", got, want)
	}
	r.moved(1, 40, 0, 20, known, false) // it was on its way
	if got := r.plan(); len(got) != 0 {
		t.Fatalf("%v: client 1 may have 60", got)
	}
	r.moved(1, 20, 0, 40, r.clients[1].seq, false)
	if got := untold(r.plan()); len(got) != 1 || got[0] != (Room{Client: 2, Bytes: 80}) {
		t.Errorf("%v", got)
	}
}
