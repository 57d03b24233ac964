// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// client models a process with the shim: one thread that works in bursts, and
// the client thread.
type client struct {
	w       *world
	id      base.ClientID
	slot    int
	alive   bool
	stopped base.Time // SIGSTOP lasts until then
	hostile bool      // says what is not true of epochs, but holds the gate
	tenant  *tenant   // nil: none but itself

	conn     *conn // nil: none
	attached bool  // ATTACHED has come; false from the end of file on
	page     *page

	local    base.Epoch // the gate's; 0: closed
	closing  base.Epoch // drains under this epoch; 0: none
	released base.Epoch // the latest that was given back
	opened   base.Epoch // the latest that opened the gate since ATTACHED
	burst    int        // which burst of work this is
	pending  bool       // the thread has work
	busy     bool       // and is past the gate
	cut      bool       // its channels are off, and its work is not finished

	requested    bool      // since it was last granted
	blockedSince base.Time // when waiting began that is not its own fault
	blocked      bool

	reports  bool      // now and then
	reported int       // bursts up to the latest report
	told     int       // of these calls, by releases
	counted  int       // and by the latest statistics
	lately   base.Time // when those were sent

	mem      memory
	idleFrom base.Time // when it had the GPU last
	known    bool      // it was attached before
	program  int       // which one the process runs
}

func (w *world) spawn(slot int) {
	w.lastID++
	c := &client{w: w, id: w.lastID, slot: slot, alive: true, page: &page{}, hostile: w.chance(w.faults.hostile)}
	c.tenant = w.tenantOf[slot]
	w.client[slot] = c
	w.byID[c.id], w.joined[c.id] = c, c.tenant
	c.begin()
}

// begin is a program's start.
func (c *client) begin() {
	w := c.w
	c.idleFrom = w.now
	c.allocates()
	c.later(w.duration(0, 20*time.Millisecond), c.connect)
	c.later(w.duration(0, c.idlesFirst()), c.work)
	if c.hostile {
		c.later(w.duration(0, 50*time.Millisecond), c.annoy)
	}
}

// later calls do in this process, which may be stopped or dead by then, or run another
// program.
func (c *client) later(d time.Duration, do func()) {
	program := c.program
	c.w.after(d, func() {
		c.run(func() {
			if c.program == program {
				do()
			}
		})
	})
}

func (c *client) run(do func()) {
	switch {
	case !c.alive:
	case c.w.now < c.stopped:
		c.w.at(c.stopped, func() { c.run(do) })
	default:
		do()
	}
}

func (c *client) note(format string, args ...any) {
	if c.w.trace != nil {
		c.w.note(fmt.Sprintf("client %d", c.id), text(fmt.Sprintf(format, args...)))
	}
}

// Connection.

func (c *client) connect() {
	if c.conn != nil {
		return
	}
	if c.w.daemon.core == nil {
		c.later(c.w.duration(5*time.Millisecond, 50*time.Millisecond), c.connect)
		return
	}
	c.conn = &conn{c: c, again: c.known}
	held := max(c.local, c.closing)
	if held == 0 {
		c.w.judge.drained(c)
		c.released = 0 // a scheduler that lost its state may count anew
	}
	if held == 0 && c.hostile && c.w.chance(0.3) {
		held = base.Epoch(1 + c.w.rng.Uint64N(1000))
		c.note("claims epoch %d", held)
	}
	c.requested = c.blocked
	cut := c.cut || c.hostile && c.w.lulls != nil && c.w.lulls.IntN(3) == 0
	c.send(sched.Attach{Client: c.id, Held: held, Want: c.blocked, Cut: cut}) // tenant and share are not its to say
}

func (c *client) send(ev base.Event) {
	k := c.conn
	if k == nil {
		return
	}
	k.up = max(k.up, c.w.now.Add(c.w.latency()))
	c.w.at(k.up, func() { c.w.daemon.receive(k, ev) })
}

// endOfFile comes to the client when the daemon closed the connection.
func (c *client) endOfFile(k *conn) {
	c.later(c.w.latency(), func() {
		if c.conn == k {
			c.disconnected()
		}
	})
}

// hangUp closes the connection from this side; frames sent before it arrive.
func (c *client) hangUp() {
	if k := c.conn; k != nil {
		k.up = max(k.up, c.w.now.Add(c.w.duration(0, 20*time.Millisecond)))
		c.w.at(k.up, func() { c.w.daemon.hangUp(k) })
	}
}

func (c *client) disconnected() {
	c.note("is disconnected")
	c.conn = nil
	c.attached = false
	c.requested = false
	longest := 50 * time.Millisecond
	if c.w.chance(0.1) {
		longest = 3 * maxGrace
	}
	c.later(c.w.duration(0, longest), c.connect)
}

func (c *client) onAttached(p *page) {
	c.page = p
	c.attached = true
	c.opened = 0
	c.known = true
	c.blockedSince = c.w.now
	c.mem.answer = true
	defer c.move()
	c.prove()
	c.tellMemory()
	if c.local != 0 && p.word != c.local {
		c.close(sched.Revoked)
	}
	c.wake(p)
	c.pass()
}

func (c *client) onGrant(p *page, epoch base.Epoch) {
	if p.word == epoch {
		c.wake(p)
	}
}

// wake is a look at the page by whoever was woken: the gate opens under a word
// that is new to this client.
func (c *client) wake(p *page) {
	if p == c.page && c.local != 0 && p.word == c.local {
		c.pass() // no longer paused
		return
	}
	if p != c.page || !c.attached || c.local != 0 || c.closing != 0 || p.word == 0 || p.word == c.released {
		return
	}
	c.note("opens its gate, epoch %d", p.word)
	c.local, c.opened = p.word, p.word
	c.requested, c.cut = false, false
	c.w.judge.opened(c)
	c.move()
	c.pass()
	c.idle()
}

func (c *client) onRevoke(epoch base.Epoch) {
	switch epoch {
	case c.local:
		c.close(sched.Revoked)
	case c.closing, c.released:
	default:
		if epoch < c.opened {
			return // the page was faster than this frame: it gave that back since
		}
		// never opened
		c.released, c.idleFrom = epoch, c.w.now
		c.w.judge.drained(c)
		c.send(sched.Release{Client: c.id, Epoch: epoch, Reason: sched.Revoked, Preempted: c.cut}) // as before it
		c.requested = false
		c.pass()
	}
}

// onStep lets the thread make one call, and drains.
func (c *client) onStep(epoch base.Epoch) {
	if c.local != 0 || c.closing != 0 {
		c.w.fail("client %d is to make a call under epoch %d, gate %d, draining %d", c.id, epoch, c.local, c.closing)
		return
	}
	c.drain(epoch, sched.Revoked)
	c.pass() // it has another call
}

// close shuts the gate, drains, and releases.
func (c *client) close(why sched.Reason) {
	epoch := c.local
	c.local = 0
	c.drain(epoch, why)
	if c.busy {
		// The thread comes to the gate again, before or after the release.
		c.busy = false
		c.burst++
		c.later(c.w.duration(0, 5*time.Millisecond), c.pass)
	} else if c.pending {
		c.pass() // it waits for memory, and now for another grant
	}
}

// drain releases a grant when the work under it has ended.
func (c *client) drain(epoch base.Epoch, why sched.Reason) {
	c.closing = epoch
	c.requested = false
	often := c.w.faults.cutDrains
	if c.w.mem.capacity != 0 && !c.w.daemon.still { // then only a drain is cut that takes very long
		often /= 4
	}
	cut := c.pending && (c.busy || c.mem.away == 0) && c.w.chance(often) // else its work waits for memory
	drain := c.w.duration(0, 3*time.Millisecond)
	if c.w.chance(c.w.faults.ignore) {
		drain = c.w.duration(0, 3*maxGrace)
	}
	c.note("closes its gate, drains for %v", drain)
	c.later(drain, func() {
		c.released, c.closing = c.closing, 0
		c.blockedSince, c.idleFrom = c.w.now, c.w.now
		c.w.judge.drained(c)
		c.cut = cut
		c.send(sched.Release{Client: c.id, Epoch: c.released, Reason: why, Preempted: cut, Calls: uint64(c.burst - c.told)})
		c.told = c.burst
		if cut {
			c.preempted()
		}
		c.move()
		if why == sched.Idle {
			c.w.report.EarlyReleases++
		}
		c.wake(c.page)
	})
}

// preempted waits for the next grant with what is left of a burst of work, if that turns
// out to be anything.
func (c *client) preempted() {
	c.w.report.Preemptions++
	c.note("is preempted")
	c.pass()
	if c.w.chance(0.2) {
		c.later(c.w.duration(0, time.Millisecond), func() {
			if c.cut {
				c.note("has finished before that")
				c.cut, c.pending, c.blocked = false, false, false
				c.later(c.w.duration(0, time.Millisecond), c.work)
			}
		})
	}
}

// prove says whether the client's time slice can be set, and goes on to say how it gets on.
func (c *client) prove() {
	control := sched.ControlWorks
	if c.w.chance(0.05) && !c.w.even {
		control = sched.Control(c.w.rng.IntN(6))
	}
	c.send(sched.Controls{Client: c.id, Slices: control, Channels: control, Groups: 1})
	if !c.reports {
		c.reports = true
		c.later(reportEvery, c.sayHow)
	}
}

// sayHow says how often the GPU had work of the client, and how many calls it made: a
// hostile client says anything.
func (c *client) sayHow() {
	c.later(reportEvery, c.sayHow)
	u := timeslice.Utilization{Client: c.id, Samples: 50, Busy: 40 + c.w.rng.IntN(11), Calls: c.burst - c.reported}
	c.reported = c.burst
	if c.w.even {
		u.Busy -= 20
	}
	if c.hostile {
		u.Samples, u.Calls = c.w.rng.IntN(1_000_001), int(c.w.rng.Uint32())
		u.Busy = c.w.rng.IntN(u.Samples + 1)
	}
	if c.local != 0 && c.attached {
		c.send(u)
	}
	if c.attached && c.counted != c.burst && c.w.now.Sub(c.lately) >= statsEvery {
		c.counted, c.lately = c.burst, c.w.now
		c.send(sched.Called{Client: c.id})
	}
}

// Work.

// work begins a burst, again and again.
func (c *client) work() {
	if c.w.now < c.w.quiet {
		c.later(c.w.quiet.Sub(c.w.now), c.work)
		return
	}
	c.pending = true
	c.changeMemory()
	c.fate()
	c.pass()
}

// pass lets the thread through the gate if it is open; else it waits there.
func (c *client) pass() {
	if !c.pending || c.busy {
		return
	}
	if c.local != 0 && c.mem.away > 0 {
		return // it is moved in
	}
	if c.local == 0 || c.page.word != c.local {
		if !c.blocked {
			c.blocked = true
			c.blockedSince = c.w.now
		}
		if c.conn != nil && !c.requested {
			c.requested = true
			c.send(sched.Request{Client: c.id})
		}
		return
	}
	if c.blocked {
		c.blocked = false
		c.w.judge.waited(c)
	}
	c.busy = true
	c.burst++
	burst := c.burst
	c.later(c.w.duration(100*time.Microsecond, 30*time.Millisecond), func() {
		if c.burst != burst {
			return
		}
		c.busy, c.pending = false, false
		pause := c.w.duration(0, 500*time.Microsecond)
		if c.w.chance(0.3) {
			pause = c.w.duration(0, 100*time.Millisecond)
		}
		if c.w.chance(c.w.mem.sleeps) {
			pause = c.w.duration(0, 6*residency.MinSuspendAfter)
		}
		c.later(pause, c.work)
		c.idle()
	})
}

// idle releases early if somebody waits and no work came for a while.
func (c *client) idle() {
	if c.local == 0 || c.busy {
		return
	}
	burst, epoch := c.burst, c.local
	wait := time.Millisecond
	if c.page.latency {
		wait = 200 * time.Microsecond
	}
	c.later(wait, func() {
		if c.local != epoch || c.burst != burst || c.busy {
			return
		}
		if c.page.leave && c.page.word == c.local && c.mem.away == 0 {
			c.close(sched.Idle)
			return
		}
		c.later(2*time.Millisecond, c.idle)
	})
}

// Faults.

// fate decides what happens to this process while it works.
func (c *client) fate() {
	w := c.w
	switch {
	case w.chance(w.faults.kill):
		c.later(w.duration(0, 20*time.Millisecond), c.die)
	case w.chance(w.faults.exec):
		c.later(w.duration(0, 20*time.Millisecond), c.exec)
	case w.chance(w.faults.stop):
		c.later(w.duration(0, 20*time.Millisecond), func() {
			w.report.Stops++
			c.stop(w.duration(0, 3*maxGrace))
		})
	case w.chance(w.faults.cut):
		c.later(w.duration(0, 20*time.Millisecond), func() {
			if c.conn == nil {
				return
			}
			w.report.Cuts++
			if w.chance(0.5) {
				w.daemon.cut(c.conn)
				return
			}
			c.hangUp()
			c.disconnected()
		})
	}
}

func (c *client) stop(d time.Duration) {
	c.note("is stopped")
	c.stopped = c.w.now.Add(d)
	c.w.at(c.stopped, func() { c.run(func() { c.blockedSince = c.w.now }) })
}

func (c *client) die() {
	w := c.w
	w.report.Deaths++
	c.note("dies")
	if w.chance(0.3) {
		c.leave()
	}
	c.hangUp()
	c.alive = false
	w.judge.drained(c)
	w.client[c.slot] = nil
	delete(w.byID, c.id)
	id := c.id
	w.after(w.duration(0, 30*time.Millisecond), func() {
		w.daemon.gone(id)
	})
	w.after(w.duration(0, 100*time.Millisecond), func() { w.spawn(c.slot) })
}

// leave gives back what a process has that ends in good order.
func (c *client) leave() {
	switch {
	case !c.attached || c.closing != 0 || c.busy:
	case c.local != 0:
		c.w.judge.drained(c)
		c.send(sched.Release{Client: c.id, Epoch: c.local, Reason: sched.Exit, Calls: uint64(c.burst - c.told)})
	default:
		c.send(sched.Withdraw{Client: c.id, Exits: true})
	}
}

// exec has the process run another program: its connection ends, and with its address space
// all that it had on the GPU.
func (c *client) exec() {
	c.note("runs another program")
	c.hangUp()
	*c = client{w: c.w, id: c.id, slot: c.slot, alive: true, stopped: c.stopped, hostile: c.hostile, tenant: c.tenant, page: &page{}, program: c.program + 1}
	c.w.judge.drained(c)
	c.begin()
}

// annoy sends what an honest client would not: requests again, and releases of
// epochs that it has given back or never had.
func (c *client) annoy() {
	c.later(c.w.duration(0, 20*time.Millisecond), c.annoy)
	switch c.w.rng.IntN(3) {
	case 0:
		c.send(sched.Request{Client: c.id})
	case 1:
		c.send(sched.Release{Client: c.id, Epoch: c.released, Reason: sched.Idle})
	case 2:
		c.send(sched.Release{Client: c.id, Epoch: 1<<40 + c.released, Reason: sched.Revoked})
	}
}
