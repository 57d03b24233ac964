// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
	"github.com/nvshare/nvshare/sched/warden/order"
)

// A process that the warden holds is a client to the core of its GPU, as one with a shim is, and the warden
// is its gate: a grant puts its channels on, a revoke takes them off, and it releases the grant, preempted,
// when they are. So it has turns, time slices and a core limit like everybody, in its tenant's account. It
// asks for nothing itself, so it wants the GPU as long as the driver says that it uses it.
//
// A client with a shim whose grant is fenced is held in the same way: another client stands in for it,
// until it has released. So what it had begun comes to an end in its tenant's turns.

const (
	// onLeast is the least time on in which a look says something.
	onLeast = 50 * time.Millisecond
	// callRate stands for what a program that keeps the GPU busy does in a second.
	callRate = 1000
	// lateMost is how much of a turn a limit is not charged at most: an order to be on takes 0.6 ms, mostly.
	lateMost = 2 * time.Millisecond
)

type holding struct {
	w      *Watch
	gpu    *node.GPU
	peer   *peer.Peer    // closed: only what it says is used
	fenced *node.Client  // it has this shim, whose grant is fenced; nil: it has none
	id     base.ClientID // to the core; 0: it is none
	bytes  uint64        // of the GPU's memory; 0: not known
	told   uint64        // to the core

	groups int // of channels

	err   error // why it is not held
	tried base.Time
	busy  bool // an order is under way

	epoch   base.Epoch // of its grant; 0: it has none
	revoked bool
	paused  bool
	idle    bool          // it has no work: its channels are on, and it wants no grant
	slice   time.Duration // that it is to have; 0: the driver's own
	set     time.Duration // that it has
	own     time.Duration // the driver's own

	on    bool      // as of the latest order that was answered: then it has effect
	offAt base.Time // when it was last off
	mayAt base.Time // when it was last allowed to be on

	// What it got.
	counted          base.Time     // until then its time is counted
	looked           base.Time     // the latest look at what the driver says
	sampled          base.Time     // the latest one that said something
	grantOn          time.Duration // for how long it was on under its grant
	lookOn           time.Duration // the same since looked
	sampledOn        time.Duration // the same since sampled
	lately           span          // for which part of the time it was on
	samples          sampled       // what the driver says
	before           float64       // the part of the time before sampled
	onTrial          bool          // it is not sliced now, to see whether it keeps the GPU busy in turns
	turnsBefore      turns         // what was known of it before the trial
	tested, nextTest base.Time     // it is kept off until then at most, to see whether it is; 0: it is not; not again before that
	proofs           int           // looks since then in all of which it was off
	cheats           bool          // it has been said that it puts its channels on by itself
	debt             time.Duration // what it had too much
	owed             time.Duration // what it seems to have had too much beside others, and was not stopped for
	frozen           base.Time     // its container is stopped until then; 0: it is not
	freezes          time.Duration // for how long, until that has been told; 0: it has
	noFreeze         bool          // its container cannot be stopped
}

// hold makes a holding, of which nothing is known yet.
func (w *Watch) hold(g *node.GPU, p *peer.Peer) *holding {
	t := loop.Now()
	x := &holding{w: w, gpu: g, peer: p, on: true, counted: t, looked: t, sampled: t, lately: span{since: t, part: -1}, before: 1, samples: newSampled()}
	if len(w.Holder.Holdings) == 0 {
		w.Holder.renew.Set(t.Add(renewAfter))
	}
	w.Holder.Holdings[holdingKey{g, p.Process}] = x
	return x
}

func (x *holding) do(op order.Op, us time.Duration, then func(order.Result)) {
	o := order.Order{Op: op, PID: int(x.peer.PID), Start: x.peer.Start, Us: uint64(us.Microseconds()), Again: x.samples.excess >= againAt}
	if op == order.Freeze {
		o.Container = x.peer.Container
	}
	x.busy = true
	x.w.Holder.order(x.w, o, func(r order.Result) {
		x.busy = false
		if x.known() {
			then(r)
		}
	})
}

// known says whether the process is still one to hold.
func (x *holding) known() bool { return x.w.Holder.Holdings[holdingKey{x.gpu, x.peer.Process}] == x }

// look looks at a process before it is held.
func (x *holding) look() {
	x.tried = loop.Now()
	if x.busy || x.frozen != 0 {
		return
	}
	x.do(order.State, 0, func(r order.Result) {
		switch {
		case r.Error != "":
			x.fail(errors.New(r.Error))
		case r.Channels == 0:
			x.fail(errors.New("no channel was found"))
		case !slices.Equal(r.GPUs, []string{x.gpu.UUID}):
			x.fail(fmt.Errorf("it uses other GPUs too, or part of one: %s", strings.Join(r.GPUs, ", ")))
		default:
			x.begin(r)
		}
	})
}

// begin makes the process a client of the core.
func (x *holding) begin(r order.Result) {
	x.err, x.id = nil, x.w.NewID()
	x.own = time.Duration(r.SliceUs) * time.Microsecond
	x.w.Held[x.id] = x.peer
	if x.fenced != nil {
		x.w.Step(x.gpu, sched.HeldOff{Client: x.fenced.ID, Off: true})
	}
	core := x.peer.Account
	x.w.Step(x.gpu, sched.Attach{Client: x.id, Tenant: core, Share: x.w.ShareOf(x.gpu, core), Want: true})
	x.groups = r.Groups
	x.tellControls()
	x.tellMemory()
	x.drive()
}

// tellControls says how the GPU's scheduler can be steered for it.
func (x *holding) tellControls() {
	slicing := sched.ControlWorks
	if x.own == 0 || x.onTrial {
		slicing = sched.ControlUnseen
	}
	x.w.Step(x.gpu, sched.Controls{Client: x.id, Slices: slicing, Channels: sched.ControlWorks, Groups: x.groups})
}

// tellMemory has what it has of the GPU's memory counted, which never moves.
func (x *holding) tellMemory() {
	if x.id != 0 && x.fenced == nil && x.bytes != x.told {
		x.told = x.bytes
		x.w.Step(x.gpu, residency.Reserve{Client: x.id, Total: x.bytes, Force: true})
	}
}

// fail gives up to hold the process, for a while. The warden has put it on.
func (x *holding) fail(err error) {
	if x.err == nil {
		x.w.Log.Warnf("GPU %d: process %d is not held: %v", x.gpu.Index, x.peer.PID, err)
	}
	x.leave()
	x.err, x.on = err, true
}

// leave has the core forget it.
func (x *holding) leave() {
	if x.id == 0 {
		return
	}
	id := x.id
	x.id, x.epoch, x.revoked, x.paused, x.told, x.tested = 0, 0, false, false, 0, 0
	x.idle, x.onTrial = false, false
	x.samples.named()
	if x.fenced != nil {
		x.w.Step(x.gpu, sched.HeldOff{Client: x.fenced.ID})
	}
	x.w.Step(x.gpu, sched.Gone{Client: id})
	delete(x.w.Held, id)
}

// end lets the process go.
func (x *holding) end() {
	delete(x.w.Holder.Holdings, holdingKey{x.gpu, x.peer.Process})
	x.leave()
	x.w.Holder.order(x.w, order.Order{Op: order.On, PID: int(x.peer.PID), Start: x.peer.Start}, func(order.Result) {})
	if x.set != 0 {
		x.w.Holder.order(x.w, order.Order{Op: order.Slice, PID: int(x.peer.PID), Start: x.peer.Start, Us: uint64(x.own.Microseconds())}, func(order.Result) {})
	}
}

// mayBeOn says whether its channels are to be on.
func (x *holding) mayBeOn() bool {
	return x.id == 0 || x.tested == 0 && (x.idle || x.epoch != 0 && !x.revoked && !x.paused)
}

// drive gives the next order, if there is one to give.
func (x *holding) drive() {
	switch {
	case x.busy:
		return
	case x.frozen != 0:
		x.driveFrozen()
		return
	case x.id == 0:
		return
	}
	may, t := x.mayBeOn(), loop.Now()
	switch {
	case x.on && !may, !x.on && !may && !x.revoked && t.Sub(x.offAt) >= renewAfter/2:
		x.do(order.Off, 0, func(r order.Result) { x.switched(r, false) })
	case may && !x.on:
		x.do(order.On, 0, func(r order.Result) { x.switched(r, true) })
	case x.revoked:
		x.release(sched.Revoked, x.tested == 0) // else it asks after the test
	case x.slice != x.set && (x.slice != 0 || x.own != 0):
		x.set = x.slice
		x.do(order.Slice, cmp.Or(x.slice, x.own), func(r order.Result) { x.switched(r, x.on) })
	}
}

func (x *holding) switched(r order.Result, on bool) {
	x.count()
	switch {
	case r.Gone:
		x.end()
		return
	case r.Error != "":
		x.fail(errors.New(r.Error))
		return
	}
	t, was := loop.Now(), x.on
	x.on = on
	switch {
	case !on:
		x.offAt = t
	case !was:
		x.lately.turn(t)
		if x.epoch != 0 {
			// The way to the warden took time in which it was not on, and so did the way back, in which it was. A process with
			// many objects can prolong the order, of which some are on before its end.
			x.w.Step(x.gpu, sched.HeldOn{Client: x.id, Late: min((t.Sub(x.mayAt)+time.Duration(r.TookNs))/2, x.w.LateMost)})
		}
	}
	x.drive()
}

// release gives its grant back.
func (x *holding) release(why sched.Reason, preempted bool) {
	x.count()
	calls := callRate * x.grantOn.Seconds() * x.samples.use()
	epoch := x.epoch
	x.epoch, x.revoked, x.paused, x.grantOn = 0, false, false, 0
	x.w.Step(x.gpu, sched.Release{Client: x.id, Epoch: epoch, Reason: why, Preempted: preempted, Calls: uint64(calls)})
}

// CarryOut carries out what the core decided about a process that the warden holds.
func (w *Watch) CarryOut(g *node.GPU, id base.ClientID, action base.Action) {
	p := w.Held[id]
	if p == nil {
		return
	}
	x := w.Holder.Holdings[holdingKey{g, p.Process}]
	if x == nil || x.id != id {
		return
	}
	switch a := action.(type) {
	case sched.Grant:
		x.count()
		x.epoch, x.grantOn, x.mayAt = a.Epoch, 0, loop.Now()
	case sched.Revoke:
		x.revoked = true
	case sched.Pause:
		x.paused = true
	case sched.Resume:
		x.paused, x.mayAt = false, loop.Now()
	case sched.Slice:
		x.slice = a.D
	case sched.Fence:
		x.later(func() { x.fail(errors.New("it was not taken off the GPU in time")) })
	}
	x.later(x.drive)
}

// count adds up for how long it was on.
func (x *holding) count() {
	t := loop.Now()
	d := t.Sub(x.counted)
	if x.on {
		x.grantOn, x.lookOn, x.sampledOn = x.grantOn+d, x.lookOn+d, x.sampledOn+d
	}
	x.lately.add(t, d, x.on)
	x.counted = t
}

// noteUseOfHeld compares what the driver says processes had with the time in which they were on.
func (w *Watch) noteUseOfHeld(samples []metrics.GPUSample) {
	for _, s := range samples {
		g, sum, said := w.useOf(s)
		if g == nil {
			continue
		}
		here, on := w.Holder.heldOn(g), 0.0
		if len(here) == 0 {
			continue
		}
		all := max(sum, s.Utilization) // of several processes the driver may name less than they had
		for _, x := range here {
			on += x.onPart()
		}
		core := g.Core.Snapshot(loop.Now())
		if slices.ContainsFunc(core.Clients, func(c sched.ClientSnapshot) bool { return w.Held[c.ID] == nil && c.State != sched.StateIdle }) {
			on = 1 // one with a shim has the GPU, or waits for it: as far as is known
		}
		for _, x := range here {
			slice, others := x.ofSlices(core.Clients)
			x.used(s.Busy[uint32(x.peer.PID)], all, on, slice, others, said)
		}
		w.try(g, here, core)
	}
}

// onPart is the part of the time since the latest sample in which it was on.
func (x *holding) onPart() float64 {
	x.count()
	return x.sampledOn.Seconds() / max(loop.Now().Sub(x.sampled), 1).Seconds()
}

// used takes note of a sample: which part of the GPU the process had, and all had, who were on for a part of the
// time; slice is its part of the slices. said: the driver says that.
func (x *holding) used(part, all, anyOn, slice float64, others, said bool) {
	t, onPart, was := loop.Now(), x.onPart(), x.before
	on, span := x.lookOn, t.Sub(x.looked)
	x.lookOn, x.looked = 0, t
	if span <= 0 {
		return
	}
	if said {
		of := t.Sub(x.sampled)
		x.sampledOn, x.sampled, x.before = 0, t, onPart
		x.samples.add(part, all, onPart*slice)
		if x.judge(part, onPart, was, others, of) {
			return
		}
		x.noteIdle(x.samples.idle(slice == 1))
		switch {
		case slice < 1:
			x.samples.inSlices(all)
		case onPart >= turnPart && !x.idle:
			x.samples.inTurns(all, anyOn)
		}
	}
	x.endTest()
	if x.epoch == 0 || on < onLeast {
		return
	}
	looks := int(on.Seconds() * timeslice.LooksPerSecond)
	ev := timeslice.Utilization{Client: x.id, Samples: looks, Busy: looks, Calls: int(callRate * on.Seconds() * slice * x.gains())}
	switch {
	case slice == 1:
		ev.Busy = int(x.samples.use() * float64(looks))
	case said && x.w.ShareOf(x.gpu, x.peer.Account).Priority == sched.Latency: // it is charged what it uses
		ev.Busy = int(part * float64(looks))
	}
	if looks > 0 {
		x.w.Step(x.gpu, ev)
	}
}

// gains says how much of its slices it gets: nobody tells. One that keeps the GPU busy in its turns, or of which that is not known
// yet, loses a switch for each slice. One with gaps waits for slices of others, so it is the worse for each longer one.
func (x *holding) gains() float64 {
	length := cmp.Or(x.slice, timeslice.DriverSlice)
	if x.samples.hasGaps() {
		return min(float64(timeslice.DriverSlice)/float64(length), 1)
	}
	return length.Seconds() / (length + timeslice.SwitchTime).Seconds()
}

// ofSlices is its part of the time slices of those who hold the GPU now, and says whether others are there.
func (x *holding) ofSlices(clients []sched.ClientSnapshot) (part float64, others bool) {
	var mine, all time.Duration
	for _, c := range clients {
		others = others || c.ID != x.id
		if c.State == sched.StateHolding || c.ID == x.id {
			d := cmp.Or(c.Slice, timeslice.DriverSlice)
			if all += d; c.ID == x.id {
				mine = d
			}
		}
	}
	return mine.Seconds() / max(all, 1).Seconds(), others
}

// noteIdle has a process that has no work want no grant: who waits need not wait for it.
func (x *holding) noteIdle(idle bool) {
	if !idle {
		if x.idle {
			if x.idle = false; x.tested == 0 { // else it asks after the test
				x.w.Step(x.gpu, sched.Request{Client: x.id})
			}
			x.drive()
		}
		return
	}
	if x.idle || x.revoked {
		return
	}
	x.idle = true
	if x.epoch != 0 {
		x.release(sched.Idle, false)
	} else {
		x.w.Step(x.gpu, sched.Withdraw{Client: x.id})
	}
	x.drive()
}

// HowHeld says how the warden holds a client of the core; "": it does not.
func (w *Watch) HowHeld(g *node.GPU, id base.ClientID) string {
	if w.Holder == nil {
		return ""
	}
	if p := w.Held[id]; p != nil {
		return w.describeHeld(g, p)
	}
	if cl := w.Clients[id]; cl != nil {
		if x := w.Holder.Holdings[holdingKey{g, cl.Process}]; x != nil {
			return x.describe()
		}
	}
	return ""
}

// describeHeld says how a process without a shim is held; "": it is not.
func (w *Watch) describeHeld(g *node.GPU, p *peer.Peer) string {
	if w.Holder == nil {
		return ""
	}
	x := w.Holder.Holdings[holdingKey{g, p.Process}]
	if x == nil || x.id == 0 && x.err == nil && x.frozen == 0 {
		return ""
	}
	return x.describe()
}

func (x *holding) describe() string {
	if x.err != nil {
		return fmt.Sprintf("not held: %v", x.err)
	}
	if x.frozen != 0 {
		return "held from outside: it puts its channels on by itself, and its container is stopped for that"
	}
	if x.samples.excess >= cheatAt {
		return fmt.Sprintf("not held: it puts its channels on by itself, and had %.0f %% of the GPU's time", 100*x.samples.shown)
	}
	text := "held from outside"
	if x.tested != 0 {
		return text + ": it is kept off for seconds, to see whether it puts its channels on by itself"
	}
	if x.lately.part >= 0 {
		text += fmt.Sprintf(": its channels were on for %.1f %% of the time", 100*x.lately.part)
	}
	if x.samples.shownN > 0 {
		text += fmt.Sprintf(", and it had %.0f %% of the GPU", 100*x.samples.shown)
	}
	if limit := x.w.ShareOf(x.gpu, x.peer.Account).Limit; limit > 0 {
		text += fmt.Sprintf(", its core limit is %d %%", limit)
	}
	return text
}
