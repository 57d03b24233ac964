// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// page is a grant page with its one slot. It outlives the daemon that made it.
type page struct {
	word    base.Epoch
	latency bool
	leave   bool
	room    uint64
	seq     uint32 // of room
}

// conn is a connection. Frames arrive late, but in order; what has not arrived
// when an end is closed by the daemon is lost.
type conn struct {
	c        *client
	again    bool      // the program was attached before
	up, down base.Time // when the latest frame each way arrives
	closed   bool      // by the daemon
}

// daemon models what is around the core in the scheduler: it carries out
// actions, keeps what they persist, and dies.
type daemon struct {
	w *world

	// Survives a crash.
	persisted      sched.Persist
	quantum, grace time.Duration
	mode           sched.Mode
	tuning         account.Tuning
	swapShare      int
	promised       map[base.ClientID]uint64 // as it was recorded, see memory.go

	// Does not. core is nil while the daemon is down.
	core      *sched.GPU
	effective sched.Mode
	run       int // which life of the daemon this is
	conns     map[base.ClientID]*conn
	pages     map[base.ClientID]*page
	timer     base.Time // of the tick that is under way; 0: none
	restored  map[base.ClientID]bool

	// Memory, see memory.go and suspend.go.
	node    *sched.Node
	arenas  map[base.ClientID]uint64
	still   bool                   // as all pages say: nobody has to make room
	late    bool                   // how much memory the GPU has is not known yet
	keptOff map[base.ClientID]bool // clients of tenants that depart; whether they want the GPU
	departs *tenant
}

func (d *daemon) start() {
	d.run++
	d.conns = map[base.ClientID]*conn{}
	d.pages = map[base.ClientID]*page{}
	d.timer = 0
	d.restored = map[base.ClientID]bool{}
	d.departs, d.keptOff = nil, map[base.ClientID]bool{}
	d.node = sched.NewNode()
	d.late = d.w.mem.limits && d.persisted.Holders == [len(d.persisted.Holders)]sched.Holder{} && len(d.promised) == 0 && d.w.chance(0.3)
	d.core = sched.New(sched.Config{Quantum: d.quantum, Grace: d.grace, Mode: d.mode, Tuning: d.tuning, SwapShare: d.swapShare, LastEpoch: d.persisted.Epoch, Way: d.persisted.Way, Intact: true, Node: d.node, Memory: d.memoryConfig()})
	d.still = d.core.Still()
	if d.w.trace != nil {
		d.w.note("daemon", text(fmt.Sprintf("starts with %v, mode %v", d.persisted, d.mode)))
	}
	d.effective = d.core.Snapshot(d.w.now).Effective
	d.w.judge.restarted()
	if p := d.persisted; p.Unrecorded {
		d.step(sched.RestoreUnknown{Epoch: p.Epoch})
	}
	for _, h := range d.persisted.Holders {
		if c := d.w.byID[h.Client]; c != nil && d.core != nil {
			r := sched.Restore{Client: c.id, Epoch: h.Epoch, Shared: h.Shared}
			if c.tenant != nil {
				r.Tenant, r.Gang, r.Overlap = c.tenant.name, c.tenant.share.Gang, c.tenant.share.Overlap
			}
			d.w.judge.restored(r)
			d.restored[c.id] = true
			d.step(r)
		}
	}
	d.startMemory()
}

func (d *daemon) crash() {
	d.w.note("daemon", text("crashes"))
	d.w.report.Crashes++
	d.core = nil
	for _, c := range d.w.client {
		if c == nil {
			continue
		}
		if k := d.conns[c.id]; k != nil {
			k.closed = true
		}
		if k := c.conn; k != nil { // perhaps its ATTACH has not arrived yet
			k.closed = true
			c.endOfFile(k)
		}
	}
	if d.w.chance(0.2) {
		d.mode = sched.Mode(d.w.rng.IntN(3)) // started again with another option
	}
	d.w.after(d.w.duration(0, 150*time.Millisecond), d.start)
}

// step tells the core and carries out what it answers, unless a crash comes
// between.
func (d *daemon) step(ev base.Event) {
	w := d.w
	if d.core == nil || w.err != nil {
		return
	}
	w.report.Steps++
	w.note("event", ev)
	w.report.count(ev)
	w.judge.wants(ev)
	d.before(ev)
	acts := d.core.Step(w.now, ev)
	// A broken invariant rarely mends itself, and to check them costs more
	// than a step.
	if w.unasked++; w.unasked >= max(4, len(w.client)/4) || w.trace != nil {
		w.unasked = 0
		if err := d.core.Check(); err != nil {
			w.fail("after %v: invariant: %w", base.Text(ev), err)
		}
	}
	if lost, ok := ev.(sched.Lost); ok {
		w.judge.running(lost.Client, true)
	}
	attach, attaching := ev.(sched.Attach)
	for i, a := range acts {
		if r, ok := a.(residency.Room); ok && attaching && i == 0 && r.Client == attach.Client {
			p := d.pages[r.Client] // the new one, before ATTACHED
			p.room, p.seq = r.Bytes, r.Seq
			continue
		}
		if _, adopt := a.(sched.Adopt); attaching && !adopt {
			attaching = false
			d.attached(attach.Client)
		}
		if w.chance(w.faults.crash) {
			d.crash()
			return
		}
		d.perform(a)
	}
	if attaching {
		d.attached(attach.Client)
	}
	if at, ok := d.core.Deadline(); ok && at != d.timer {
		d.timer = at
		run := d.run
		w.at(at.Add(w.latency()), func() {
			if d.run == run && d.timer == at {
				d.timer = 0
				d.step(sched.Tick{})
			}
		})
	}
}

func (d *daemon) perform(a base.Action) {
	w := d.w
	w.note("action", a)
	switch a := a.(type) {
	case sched.Persist:
		d.persisted = a
	case sched.Grant:
		w.report.Grants++
		if a.Concurrent {
			w.report.Concurrent++
		}
		if a.Latency {
			w.report.Latency++
		}
		if a.Beside {
			w.report.Beside++
		}
		w.judge.granted(a)
		p := d.pages[a.Client]
		p.word, p.latency = a.Epoch, a.Latency
		c := d.conns[a.Client].c
		c.later(w.latency(), func() { c.wake(p) })
		d.send(a.Client, func(c *client) { c.onGrant(p, a.Epoch) })
	case sched.Revoke:
		w.report.Revokes++
		w.judge.running(a.Client, true)
		d.pages[a.Client].word = 0
		d.send(a.Client, func(c *client) { c.onRevoke(a.Epoch) })
	case sched.StepOne:
		w.judge.stepped(a)
		d.send(a.Client, func(c *client) { c.onStep(a.Epoch) })
	case sched.Close:
		d.pages[a.Client].word = 0
	case sched.Adopt:
		w.report.Adoptions++
		w.judge.adopted(a)
		d.pages[a.Client].word = a.Epoch
	case sched.Fence:
		w.report.Fences++
		w.judge.fence(a.Client)
	case sched.Pause:
		w.report.Pauses++
		w.judge.running(a.Client, false)
		d.pages[a.Client].word = 0
	case sched.Resume:
		w.judge.running(a.Client, true)
		w.judge.resumed(a)
		p := d.pages[a.Client]
		p.word = a.Epoch
		c := d.conns[a.Client].c
		c.later(w.latency(), func() { c.wake(p) })
	case sched.Notice:
		d.pages[a.Client].leave = a.Leave
	case sched.Slice: // this GPU runs whoever is let in, at once; slices_test.go has another
		w.report.Slices++
	case sched.Stand: // see the shim's tests: such a client asks all the same
	case sched.Released:
		w.judge.ended(a.Client)
		if a.Reason != sched.EndPreempted && a.Reason != sched.EndLost {
			delete(w.judge.leaves, a.Client)
		}
	case sched.ModeChosen:
		w.report.Modes++
		if a.Mode != d.effective {
			d.effective = a.Mode
			w.judge.modeSet(a.Mode)
		}
	default:
		if !d.performMemory(a) {
			w.fail("unknown action %T", a)
		}
	}
}

// send delivers a frame to the client, unless the connection ends first.
func (d *daemon) send(id base.ClientID, frame func(*client)) {
	k := d.conns[id]
	if k == nil {
		d.w.fail("a frame for client %d, which has no connection", id)
		return
	}
	k.down = max(k.down, d.w.now.Add(d.w.latency()))
	d.w.at(k.down, func() {
		k.c.run(func() {
			if k.c.conn == k {
				frame(k.c)
			}
		})
	})
}

// receive runs for each frame that arrives from a client.
func (d *daemon) receive(k *conn, ev base.Event) {
	if d.core == nil || k.closed {
		return
	}
	id := k.c.id
	attach, ok := ev.(sched.Attach)
	if !ok {
		if d.conns[id] == k && !d.keeps(ev) {
			d.w.judge.asks(ev)
			d.step(ev)
		}
		return
	}
	if old := d.conns[id]; old != nil && old != k {
		// The end of the old connection is still on its way; or this is the old one, whose frames
		// come late, and the client learns that the new one is closed.
		old.closed = true
		if old.c.conn == old {
			old.c.endOfFile(old)
		}
		if d.w.chance(0.5) {
			d.step(sched.Lost{Client: id})
			if d.core == nil {
				return
			}
		}
	}
	if !k.again && (d.pages[id] != nil || d.restored[id]) {
		d.replaced(id)
		if d.core == nil {
			return
		}
	}
	d.conns[id] = k
	d.pages[id] = &page{}
	d.w.judge.attaches(k.c)
	if t := k.c.tenant; t != nil {
		attach.Tenant, attach.Share = t.name, t.share
	}
	attach.CanMove, attach.Again = k.c.mem.canMove, k.again
	if t := k.c.tenant; t != nil && t == d.departs {
		d.keptOff[id] = attach.Want
		attach.Want = false
	}
	d.step(attach)
}

func (d *daemon) attached(id base.ClientID) {
	p := d.pages[id]
	d.send(id, func(c *client) { c.onAttached(p) })
}

// hangUp is the end of file from a client's side.
func (d *daemon) hangUp(k *conn) {
	if d.core == nil || k.closed || d.conns[k.c.id] != k {
		return
	}
	k.closed = true
	d.step(sched.Lost{Client: k.c.id})
	if d.core != nil {
		delete(d.conns, k.c.id)
	}
}

// cut ends a connection from the daemon's side.
func (d *daemon) cut(k *conn) {
	if d.core == nil || k.closed {
		return
	}
	d.hangUp(k)
	k.c.endOfFile(k)
}
