// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched"
)

// Memory, in some worlds: clients have more of it than the GPU, and move it as the
// shim does, while the daemon says how much each may have there. The GPU refuses
// what it does not have.

// memoryPiece is what moves at once, and how long that takes.
const (
	memoryPiece = 8
	pieceTime   = 100 * time.Microsecond
	stallAfter  = 10 * time.Millisecond
)

// memory is what one client has.
type memory struct {
	size, resident, away uint64
	moving               bool // a piece is on its way, or waited for
	answer               bool // it was told to make room, and has not answered
}

// newMemory chooses whether there is any.
func (w *world) newMemory() {
	if !w.chance(0.4) {
		return
	}
	w.capacity = 100
	w.daemon.swapShare = []int{0, 50}[w.rng.IntN(2)]
	w.after(stallAfter, w.lookAtVictims)
}

// allocates is a new client.
func (c *client) allocates() {
	if c.w.capacity != 0 {
		c.mem.size = 1 + c.w.rng.Uint64N(60)
		c.mem.away = c.mem.size
	}
}

// onGPU is what all that live have there.
func (w *world) onGPU() (sum uint64) {
	for _, c := range w.client {
		if c != nil {
			sum += c.mem.resident
		}
	}
	return sum
}

// outOfRoom says whether a client has no place on the GPU because others hold
// theirs for good: who does not release, and never ends, is never moved out.
func (w *world) outOfRoom(c *client) bool {
	need := c.mem.size
	for _, other := range w.client {
		if gang := w.gangOf(c.id); other != nil && other != c && gang != "" && gang == w.gangOf(other.id) {
			need += other.mem.size // a gang is on the GPU as a whole
			continue
		}
		if other != nil && other != c && other.hostile {
			need += max(other.mem.resident, other.page.room)
		}
	}
	return w.capacity != 0 && need > w.capacity
}

// report says what is where.
func (c *client) report(ready, stuck bool) {
	k := c.conn
	if k == nil || !c.attached || c.w.capacity == 0 {
		return
	}
	m, epoch := c.mem, c.local
	k.up = max(k.up, c.w.now.Add(c.w.latency()))
	c.w.at(k.up, func() {
		if d := c.w.daemon; d.core != nil && !k.closed && d.conns[c.id] == k {
			d.moved(c.id, m, epoch, ready, stuck)
		}
	})
}

// move goes on with what there is to move.
func (c *client) move() {
	m := &c.mem
	if m.moving || c.w.capacity == 0 {
		return
	}
	idle := c.local == 0 && c.closing == 0
	switch {
	case idle && c.attached && m.resident > c.page.room:
		m.moving = true
		c.later(c.w.duration(0, pieceTime), func() {
			m.moving = false
			if c.local == 0 && c.closing == 0 && m.resident > c.page.room {
				n := min(memoryPiece, m.resident)
				m.resident -= n
				m.away += n
				c.w.report.MovedOut += int(n)
				c.report(false, false)
			}
			c.move()
		})
	case idle && m.answer:
		m.answer = false
		c.report(false, false)
	case c.local != 0 && m.away > 0:
		m.moving = true
		c.later(c.w.duration(pieceTime/2, pieceTime), func() {
			m.moving = false
			c.moveIn()
			c.move()
		})
	}
}

func (c *client) moveIn() {
	m := &c.mem
	n := min(memoryPiece, m.away)
	switch {
	case c.local == 0 || n == 0 || m.resident+n > c.page.room:
		return // it looks again
	case c.w.onGPU()+n > c.w.capacity:
		c.w.judge.refused(c)
		c.report(false, true)
		return
	}
	m.resident += n
	m.away -= n
	c.w.report.MovedIn += int(n)
	if m.away == 0 {
		c.note("has all its memory")
	}
	c.report(m.away == 0, false)
	c.pass()
}

// refused: the GPU has no memory although the daemon has said so. After a restart it
// does not know of all, and not of one that has ended before it heard of it.
func (j *judge) refused(c *client) {
	j.w.report.Refused++
	if j.w.report.Crashes == 0 {
		j.w.fail("client %d gets no memory: room for %d, has %d, all have %d", c.id, c.page.room, c.mem.resident, j.w.onGPU())
	}
}

// The daemon's side.

// attachMemory comes before ATTACHED.
func (d *daemon) attachMemory(c *client, again bool) {
	if d.w.capacity == 0 {
		return
	}
	if _, known := d.residency.Occupancy(c.id); !known {
		d.residency.Attach(c.id, sched.Swapped, "", again)
		d.since[c.id] = d.w.now
	}
	d.residency.Promise(c.id, c.mem.size, d.w.capacity)
	o, _ := d.residency.Occupancy(c.id)
	d.pages[c.id].room = o.Room
	d.unsettled = true
}

// room carries out what the Residency has decided.
func (d *daemon) room() {
	for _, r := range d.residency.Plan() {
		if r.Less {
			d.since[r.Client] = d.w.now
		}
		p := d.pages[r.Client]
		if p == nil || d.conns[r.Client] == nil {
			continue
		}
		p.room = r.Bytes
		less := r.Less
		d.send(r.Client, func(c *client) {
			c.mem.answer = c.mem.answer || less
			c.move()
		})
	}
	if err := d.residency.Check(); err != nil {
		d.w.fail("residency: %w", err)
	}
}

// settle tells the Residency who has a grant, and the core who has memory away.
func (d *daemon) settle() {
	if d.core == nil || d.settling || d.w.capacity == 0 {
		return
	}
	d.settling = true
	defer func() { d.settling = false }()
	for d.unsettled && d.core != nil {
		d.unsettled = false
		ids := d.residency.IDs()
		for _, id := range ids {
			d.residency.SetActive(id, d.core.Active(id))
		}
		d.room()
		for _, id := range ids {
			if away := d.residency.Away(id); away != d.away[id] && d.core != nil {
				d.away[id] = away
				d.step(sched.SetAway{Client: id, Away: away})
			}
		}
		if n := d.residency.Promised(); n != d.promised && d.core != nil {
			d.promised = n
			d.step(sched.SetMemory{Reserved: n, Total: d.w.capacity, Swap: true})
		}
	}
}

func (d *daemon) moved(id sched.ClientID, m memory, epoch sched.Epoch, ready, stuck bool) {
	before, _ := d.residency.Occupancy(id)
	d.residency.Moved(id, m.resident, 0, m.away, stuck)
	if stuck {
		d.residency.Refused(id)
	}
	d.since[id] = d.w.now
	d.unsettled = true
	switch {
	case ready && epoch != 0:
		d.away[id] = false
		d.residency.Ready()
		d.step(sched.Ready{Client: id, Epoch: epoch, Bytes: m.resident})
	case epoch != 0:
		d.step(sched.Moving{Client: id, Epoch: epoch})
	default:
		for _, other := range d.residency.IDs() {
			if d.core == nil {
				return
			}
			if e, moving := d.core.Grant(other); moving {
				d.step(sched.Moving{Client: other, Epoch: e})
			}
		}
	}
	if before.Stalled && !stuck {
		d.goOn()
	}
	d.settle()
}

// goOn tells the core that there may be room.
func (d *daemon) goOn() {
	for _, id := range d.residency.IDs() {
		if d.core != nil {
			d.step(sched.Moving{Client: id})
		}
	}
}

func (d *daemon) dropMemory(id sched.ClientID) {
	if d.core == nil || d.w.capacity == 0 {
		return
	}
	d.residency.Drop(id)
	delete(d.away, id)
	d.unsettled = true
	d.settle()
	if d.core != nil {
		d.goOn()
	}
}

// lookAtVictims passes over those that do not move.
func (w *world) lookAtVictims() {
	w.after(stallAfter, w.lookAtVictims)
	d := w.daemon
	if d.core == nil {
		return
	}
	for _, id := range slices.Clone(d.residency.Victims()) {
		if w.now.Sub(d.since[id]) >= stallAfter && d.residency.Stall(id) {
			w.report.Stalls++
			d.unsettled = true
		}
	}
	d.settle()
}

func (d *daemon) startMemory() {
	d.residency = sched.NewResidency(d.w.capacity)
	d.residency.Later = d.core.Later
	d.since, d.away = map[sched.ClientID]sched.Time{}, map[sched.ClientID]bool{}
	d.promised, d.unsettled, d.settling = 0, false, false
}
