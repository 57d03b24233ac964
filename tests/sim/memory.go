// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// Memory, in some worlds: clients reserve it, and in most of these worlds they have
// more than the GPU, and move it as the shim does. The GPU refuses what it does not
// have. The daemon decides nothing: it carries events and actions.

const (
	// gpuMemory is what the GPU has. Sizes have no unit.
	gpuMemory = 100
	// memoryPiece moves at once, and takes up to pieceTime.
	memoryPiece = 8
	pieceTime   = 100 * time.Microsecond
	// refusedPause is how long a client waits after the driver had no memory.
	refusedPause = 5 * time.Millisecond
	// stallAfter is short, so that faults meet often.
	stallAfter = 10 * time.Millisecond
	// mostRoomWait is what the core has for an answer to Reserve, and a little more.
	mostRoomWait = 1600 * time.Millisecond
)

// memoryWorld says what memory is like in a world.
type memoryWorld struct {
	limits   bool    // clients reserve, within their tenants' limits
	capacity uint64  // of the GPU where memory is swapped; 0: it is not
	headroom uint64  // of that, what is kept free where more is promised
	arena    uint64  // host memory for what is away; 0: without bounds
	changes  float64 // odds that a client changes what it would like to have
	exports  bool    // clients make memory unmovable at times

	suspendAfter time.Duration // of all tenants that have no time of their own
	sleeps       float64       // odds that a client pauses for long

	others othersMemory
}

// memory is what one client has.
type memory struct {
	canMove bool
	old     bool   // its shim does not grow without a grant, nor say which room it knows
	want    uint64 // what it would like to have
	size    uint64 // what it has: resident and away

	resident, away, fixed uint64
	in                    uint64 // copied in, ever
	moving                bool   // a piece is on its way, or waited for
	answer                bool   // it was told to make room, and has not answered
	toldStuck             bool   // where others have memory: it said so, and is stuck since
	lacksFrom             base.Time

	asks   bool // RESERVE is on its way, or its answer
	asked  base.Time
	serial uint64
}

// newMemory chooses what memory is like.
func (w *world) newMemory() {
	w.mem.limits, w.mem.changes = w.chance(0.6), 0.05
	if !w.mem.limits || w.chance(0.3) {
		return
	}
	w.mem.capacity = gpuMemory
	w.mem.headroom = []uint64{0, 4}[w.rng.IntN(2)]
	w.mem.exports = w.chance(0.3)
	if w.chance(0.3) {
		w.mem.arena = 100 + w.rng.Uint64N(200)
	}
	w.daemon.swapShare = swapShares[w.rng.IntN(len(swapShares))]
	if w.chance(0.5) {
		w.mem.suspendAfter = residency.MinSuspendAfter
	}
	w.mem.sleeps = []float64{0, 0.01}[w.rng.IntN(2)]
}

// newLimit chooses a tenant's memory limit and mode.
func (w *world) newLimit(t *tenant) residency.SetTenantMemory {
	ev := residency.SetTenantMemory{Tenant: t.name}
	if w.chance(0.5) {
		ev.Limit = 1 + w.rng.Uint64N(100)
	}
	if w.chance(0.1) {
		ev.Keep = residency.Resident
	}
	if w.chance(0.5) {
		ev.SuspendAfter = []time.Duration{-1, 1, 2}[w.rng.IntN(3)] * residency.MinSuspendAfter
	}
	return ev
}

// allocates is a new client.
func (c *client) allocates() {
	if c.w.mem.limits {
		c.mem.want = 1 + c.w.rng.Uint64N(60)
		if c.w.chance(0.05) {
			c.mem.want = gpuMemory - c.w.rng.Uint64N(5)
		}
		c.wantsLittle()
		c.mem.canMove = !c.w.chance(0.1)
		c.mem.old = c.w.chance(0.1)
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

// stays is what a client has on the GPU that is never moved out, as things are.
func (c *client) stays() uint64 {
	switch {
	case c.hostile: // it does not release
		return max(c.mem.resident, c.page.room)
	case c.moves():
		return c.mem.fixed
	}
	return c.mem.size
}

// moves says whether a client's memory can be moved out.
func (c *client) moves() bool {
	return c.mem.canMove && (c.tenant == nil || c.tenant.memory.Keep == residency.Swapped)
}

// outOfRoom says whether a client has no place on the GPU because others hold
// theirs for good.
func (w *world) outOfRoom(c *client) bool {
	need := c.mem.size
	for _, other := range w.client {
		if other != nil && other != c && w.judge.ganged(c.id, other.id) {
			need += other.mem.size // a gang is on the GPU as a whole
			continue
		}
		if other != nil && other != c {
			need += other.stays()
		}
	}
	if w.mem.others.on {
		need += w.othersHave() + w.mem.headroom
	}
	return w.mem.capacity != 0 && need > w.mem.capacity
}

// reserve asks for what the client would like to have, or gives some back.
func (c *client) reserve() {
	m := &c.mem
	if !c.w.mem.limits || !c.attached || m.asks || m.want == m.size {
		return
	}
	if m.want < m.size { // freed first
		freed := min(m.size-m.want, m.size-m.fixed)
		gone := min(freed, m.away)
		m.away -= gone
		m.resident -= freed - gone
		m.size -= freed
		m.want = m.size
		c.ask(residency.Reserve{Total: m.size})
		c.report(false, false)
		return
	}
	spare := min(c.w.rng.Uint64N(4), m.want-m.size-1) // asked for beside that for which there is need
	c.ask(residency.Reserve{Total: m.want, Least: m.want - spare})
}

func (c *client) ask(ev residency.Reserve) {
	c.mem.serial++
	c.mem.asks, c.mem.asked = true, c.w.now
	ev.Client, ev.Serial = c.id, c.mem.serial
	c.send(ev)
}

// tellMemory tells a daemon, over a new connection, what it has.
func (c *client) tellMemory() {
	if !c.w.mem.limits {
		return
	}
	c.mem.asks = false // the answer is lost
	if c.mem.size != 0 {
		c.mem.want = c.mem.size
		c.ask(residency.Reserve{Total: c.mem.size, Force: true})
	} else {
		c.reserve()
	}
	c.report(false, false)
}

// onReserved is the answer.
func (c *client) onReserved(a residency.Reserved) {
	m, w := &c.mem, c.w
	if a.Serial != m.serial || !m.asks {
		return
	}
	m.asks = false
	if a.Refused != residency.NotRefused {
		m.want = m.size
		return
	}
	if a.Stands.Total <= m.size {
		return // it gave some back, or told a new daemon what it has
	}
	n := a.Stands.Total - m.size
	switch {
	case w.mem.capacity == 0: // the driver keeps the sum below what there is
		m.resident += n
	case c.moves() && c.mayGrow(n):
		m.away += n
		c.later(w.duration(0, 2*time.Millisecond), func() { c.grow(n) })
	case n <= w.freeMemory():
		m.resident += n
	default: // its room is to be there when the answer comes, unless that took too long
		if w.now.Sub(m.asked) < time.Second && !c.moves() {
			w.judge.refused(c)
		}
		m.want = m.size
		c.ask(residency.Reserve{Total: m.size})
		return
	}
	m.size += n
	m.want = m.size
	c.report(false, false)
	c.move()
}

// grow gives memory that was allocated its place without a grant, where all fits. That is said later.
func (c *client) grow(n uint64) {
	m, w := &c.mem, c.w
	n = min(n, m.away, c.page.room-min(c.page.room, m.resident))
	switch {
	case !w.daemon.still || !c.attached || m.old || !c.moves() || n == 0:
	case c.local != 0: // it moves in
	case n > w.freeMemory():
		w.judge.refused(c)
	default:
		m.resident += n
		m.away -= n
		w.report.Grown += int(n)
		c.later(w.duration(0, 100*time.Millisecond), func() { c.report(false, false) })
	}
}

// changeMemory is what a client's program does with its memory between bursts.
func (c *client) changeMemory() {
	w, m := c.w, &c.mem
	if !w.mem.limits {
		return
	}
	if w.chance(w.mem.changes) {
		m.want = w.rng.Uint64N(60)
		c.wantsLittle()
	}
	if w.mem.exports && c.moves() {
		switch {
		case w.chance(0.1) && m.resident > m.fixed:
			m.fixed += 1 + w.rng.Uint64N(m.resident-m.fixed)
			w.report.Exports++
			c.report(false, false)
		case w.chance(0.03) && m.fixed > 0:
			m.fixed = 0
			c.report(false, false)
		}
	}
	c.reserve()
}

// report says what is where.
func (c *client) report(ready, stuck bool) {
	if !c.attached || c.w.mem.capacity == 0 {
		return
	}
	m := &c.mem
	seen := c.page.seq
	if m.old {
		seen = 0
	}
	c.send(residency.Moved{
		Client: c.id, Epoch: c.local, Ready: ready, Stuck: stuck, NoMemory: stuck, Seen: seen,
		Report: residency.Report{Resident: m.resident, Fixed: m.fixed, Away: m.away, In: m.in},
	})
}

// move goes on with what there is to move.
func (c *client) move() {
	m := &c.mem
	if m.moving || c.w.mem.capacity == 0 {
		return
	}
	idle := c.local == 0 && c.closing == 0
	canMoveOut := func() bool { return c.moves() && !c.cut && m.resident > max(c.page.room, m.fixed) }
	switch {
	case idle && c.attached && canMoveOut():
		m.moving = true
		took := c.w.duration(0, pieceTime)
		if c.w.chance(c.w.faults.ignore / 4) {
			took = c.w.duration(0, 3*maxGrace)
		}
		c.later(took, func() {
			m.moving = false
			if c.local == 0 && c.closing == 0 && canMoveOut() {
				n := min(memoryPiece, m.resident-m.fixed)
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
			if c.moveIn() {
				c.move()
			} else {
				c.later(refusedPause, c.move)
			}
		})
	}
}

// moveIn moves a piece onto the GPU, if there is room; false: the driver has refused.
func (c *client) moveIn() bool {
	m := &c.mem
	n := min(memoryPiece, m.away)
	switch {
	case c.local == 0 || n == 0 || m.resident+n > c.page.room:
		m.toldStuck = false
		return true // it looks again
	case n > c.w.freeMemory():
		c.w.judge.refused(c)
		if !m.toldStuck {
			c.report(false, true)
		}
		m.toldStuck = c.w.mem.others.on
		return false
	}
	m.lacksFrom = 0
	m.resident += n
	m.away -= n
	m.in += n
	c.w.report.MovedIn += int(n)
	if m.away == 0 {
		m.toldStuck = false
		c.note("has all its memory")
	}
	c.report(m.away == 0, false)
	c.pass()
	return true
}

// refused: the GPU has no memory although the daemon has said so. After a restart the
// daemon does not know of all, and not of one that has ended before the daemon heard of
// it. And what was promised a place may have none any more: others have made memory
// unmovable since, or are granted together with the client.
func (j *judge) refused(c *client) {
	j.w.report.Refused++
	if j.w.report.Crashes == 0 && !j.w.mem.others.on && !j.w.mem.exports && !j.w.modesChange && !j.w.outOfRoom(c) {
		j.w.fail("client %d gets no memory: room for %d, has %d, all have %d", c.id, c.page.room, c.mem.resident, j.w.onGPU())
	}
}

// reserved holds the core to its word on memory limits: nothing more is granted that does
// not fit the limit.
func (j *judge) reserved(a residency.Reserved) {
	w := j.w
	late := j.asked[a.Client] != w.now // it was granted when it was asked for
	delete(j.asked, a.Client)
	has := j.has[a.Client]
	switch {
	case a.Refused == residency.NoPlace:
		w.report.NoPlace++
	case a.Refused != residency.NotRefused:
		w.report.OverLimit++
	default:
		w.report.Reserved++
		j.has[a.Client] = a.Stands.Total
	}
	c := w.byID[a.Client]
	if c == nil || c.tenant == nil || c.tenant.memory.Limit == 0 || j.has[a.Client] <= has || j.forced[a.Client] || late {
		return
	}
	sum := uint64(0)
	for id, n := range j.has {
		if w.joined[id] == c.tenant {
			sum += n
		}
	}
	if sum > c.tenant.memory.Limit {
		w.fail("%v: tenant %s has %d of %d", a, c.tenant.name, sum, c.tenant.memory.Limit)
	}
}

// asks notes that the daemon has heard an event.
func (j *judge) asks(ev base.Event) {
	if r, ok := ev.(residency.Reserve); ok {
		j.asked[r.Client] = j.w.now
		j.forced[r.Client] = j.forced[r.Client] || r.Force
	}
}

// checkReservations holds the core to its word that each RESERVE is answered in time.
func (j *judge) checkReservations() {
	for id, since := range j.asked {
		c := j.w.byID[id]
		if wait := j.w.now.Sub(max(since, j.w.stable)); c != nil && c.conn != nil && j.w.daemon.conns[id] == c.conn && wait > mostRoomWait {
			j.w.fail("client %d waits for the answer to RESERVE for %v", id, wait)
		}
	}
}

// forget is for a client that is dead, or a daemon that has ended.
func (j *judge) forget(id base.ClientID) {
	delete(j.has, id)
	delete(j.asked, id)
	delete(j.forced, id)
	delete(j.requested, id)
}

// gone tells the core that a process has ended.
func (d *daemon) gone(id base.ClientID) {
	d.w.judge.forget(id)
	delete(d.arenas, id)
	delete(d.promised, id)
	delete(d.keptOff, id)
	d.step(sched.Gone{Client: id})
}

// The daemon's side: it knows nothing but what it has to carry.

// memoryConfig is what a daemon starts with.
func (d *daemon) memoryConfig() residency.Config {
	if d.late {
		return residency.Config{}
	}
	return d.wholeMemory()
}

func (d *daemon) wholeMemory() residency.Config {
	return residency.Config{Swap: d.w.mem.capacity != 0, Capacity: d.w.mem.capacity - d.w.mem.headroom, Physical: d.w.mem.capacity, StallAfter: stallAfter, SuspendAfter: d.w.mem.suspendAfter}
}

// startMemory tells a new core what was set and recorded before.
func (d *daemon) startMemory() {
	w := d.w
	if d.core == nil {
		return
	}
	d.arenas = map[base.ClientID]uint64{}
	if w.mem.arena != 0 {
		d.node.Arenas.Bound(w.mem.arena, 0)
	}
	for _, t := range w.tenants {
		if t.memory.Tenant != "" {
			d.step(t.memory)
		}
	}
	if d.late {
		d.late = false
		ev := residency.SetGPUMemory{}
		if m := d.wholeMemory(); m.Swap {
			ev.Swap = &m
		}
		d.step(ev)
		if d.core == nil {
			return
		}
		d.still = d.core.Still()
	}
	for _, c := range w.client {
		if c == nil || d.core == nil || d.promised[c.id] == 0 || w.chance(0.1) { // it was not recorded yet
			continue
		}
		r := residency.RestoreMemory{Client: c.id, CanMove: c.mem.canMove, Bytes: d.promised[c.id], Gang: w.gangOf(c.id)}
		if c.tenant != nil {
			r.Tenant = c.tenant.name
		}
		d.restored[c.id] = true
		d.step(r)
	}
}

// before is for what a core has to know before an event.
func (d *daemon) before(ev base.Event) {
	if d.core.AsksHost(ev) {
		d.observeHost()
	}
}

// observeHost tells the core how much host memory there is.
func (d *daemon) observeHost() {
	sum := uint64(0)
	for _, n := range d.arenas {
		sum += n
	}
	d.node.Arenas.Observe(residency.Host{Used: sum})
}

// performMemory carries out what was decided about memory, and says whether the action
// was one of these.
func (d *daemon) performMemory(a base.Action) bool {
	w := d.w
	switch a := a.(type) {
	case residency.Still:
		d.still = a.On
	case residency.Room:
		if a.Less {
			w.judge.makesRoom(a.Client)
		}
		p := d.pages[a.Client]
		p.room, p.seq = a.Bytes, a.Seq
		d.send(a.Client, func(c *client) {
			c.mem.answer = c.mem.answer || a.Less
			c.move()
		})
	case residency.Reserved:
		w.judge.reserved(a)
		d.send(a.Client, func(c *client) { c.onReserved(a) })
	case residency.ArenaWanted:
		run, c := d.run, w.byID[a.Client]
		if c == nil {
			break
		}
		program := c.program
		w.after(w.latency(), func() {
			if d.run == run && d.core != nil && w.byID[a.Client] == c && c.program == program {
				d.arenas[a.Client] = max(d.arenas[a.Client], a.Bytes)
				d.step(residency.ArenaChanged{Client: a.Client, Bytes: d.arenas[a.Client]})
			}
		})
	case residency.Promised:
		d.promised[a.Client] = a.Bytes
		w.lookWhetherAllFits()
	case residency.SwapStalled:
		w.report.Stalls++
	case residency.Stranded:
		w.report.Stranded++
	case residency.Suspended:
		w.judge.leaves[a.Client] = true
		w.judge.suspended[a.Client] = w.now
		if a.Idle {
			w.report.Idle++
			w.judge.idle(a.Client)
		}
	case residency.LimitsChanged, residency.SwapDone, residency.ArenaFound:
	default:
		return false
	}
	return true
}
