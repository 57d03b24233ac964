// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"container/heap"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// A model of tenants that share a GPU on which their memory does not fit together,
// in virtual time: the GPU of the daemon, processes that work on the GPU and pause
// for what they do on the CPU as the shim has them do, and a link that moves memory
// at its bandwidth, both ways at the same time.

// use is how a tenant uses the GPU: so often, work and a pause.
type use struct {
	work, pause time.Duration
	pauses      []time.Duration // in place of pause, one after the other, again and again
	times       int
	bytes       uint64
	cold        bool      // the arena is made only while it is needed
	tenant      string    // "": its own
	served      *requests // in place of times
}

func (u use) after(i int) time.Duration {
	if len(u.pauses) > 0 {
		return u.pauses[i%len(u.pauses)]
	}
	return u.pause
}

// alone is how long it takes if nobody else is there.
func (u use) alone() (sum time.Duration) {
	for i := range u.times {
		sum += u.work + u.after(i)
	}
	return sum
}

// link is what the model moves memory by.
const (
	linkFrame = 50 * time.Microsecond // a frame's way to the scheduler, or back
	linkPiece = 64 << 20              // moved between two reports
	linkRate  = 50                    // bytes a nanosecond, one way
	coldRate  = 2                     // while the arena is still being made
	linkDrain = 2 * time.Millisecond  // what the GPU has in its queue
	linkStats = time.Second           // between two frames that say that it makes calls
	linkIdle  = time.Millisecond      // the shim gives the GPU back after so long without a call
	oneGiB    = uint64(1) << 30
)

// sharing is one run of the model.
type sharing struct {
	t     *testing.T
	now   base.Time
	queue eventHeap
	seq   int

	events   int
	core     *GPU
	capacity uint64
	host     *residency.Arenas // bounds what is away, and who is refused does not begin; nil: without bounds
	procs    map[base.ClientID]*proc
	order    []*proc
	tick     base.Time

	worked, moving time.Duration // of the GPU's time since begun
	bytesIn        uint64
	grants         int
	longest        time.Duration // wait
	begun          base.Time
	steady         float64   // part of the time that moving took while all were there
	parts          []float64 // of the GPU's work, that each did while all were there
}

// proc is one tenant's process.
type proc struct {
	w              *sharing
	id             base.ClientID
	use            use
	resident, away uint64
	room           uint64
	blank          uint64 // never touched
	cold           uint64 // of its arena: not made yet
	arena          uint64 // that it was given, where host memory is bounded
	in             uint64 // copied in, ever
	asked          bool   // to make room
	moving         bool
	epoch          base.Epoch // granted
	draining       bool
	open           bool // the gate
	waiters        bool // as its page says
	patient        bool
	left           time.Duration
	worked         time.Duration
	runs           bool
	since          base.Time
	calls          int // of run, stop and pause: what was planned before means nothing
	asking         bool
	askedAt        base.Time
	told           base.Time // it said that it makes calls
	suspends       []base.Time
	pausedAt       []base.Time
	done           bool
	end            base.Time
	times          int
}

type modelEvent struct {
	at  base.Time
	seq int
	do  func()
}
type eventHeap []modelEvent

func (h eventHeap) Len() int { return len(h) }
func (h eventHeap) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}
func (h eventHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *eventHeap) Push(x any)   { *h = append(*h, x.(modelEvent)) }
func (h *eventHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

func (w *sharing) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, modelEvent{w.now.Add(d), w.seq, do})
}

// share runs tenants on a GPU of so much memory until all are done. The quantum is
// fixed if the share of swapping is 0.
func share(t *testing.T, capacity uint64, quantum time.Duration, swapShare int, uses ...use) *sharing {
	t.Helper()
	w := newSharing(t, capacity, quantum, swapShare, uses...)
	w.share()
	return w
}

func newSharing(t *testing.T, capacity uint64, quantum time.Duration, swapShare int, uses ...use) *sharing {
	w := &sharing{t: t, capacity: capacity, procs: map[base.ClientID]*proc{}}
	w.core = New(Config{Quantum: quantum, SwapShare: swapShare, Memory: w.memory()})
	w.add(uses...)
	return w
}

func (w *sharing) memory() residency.Config {
	return residency.Config{Swap: true, Capacity: w.capacity}
}

// remake gives the GPU another memory than New did, before anybody uses it.
func (w *sharing) remake(cfg residency.Config, turns residency.Turns) {
	arenas := residency.NewArenas()
	w.core.mem = residency.New(cfg, &arenas, turns, w.core.do)
	w.core.View = w.core.mem.View()
}

// add has more tenants come.
func (w *sharing) add(uses ...use) {
	for _, u := range uses {
		p := &proc{w: w, id: base.ClientID(len(w.order) + 1), use: u, away: u.bytes, blank: u.bytes, times: 1, left: time.Millisecond}
		if u.cold {
			p.cold = u.bytes
		}
		w.procs[p.id], w.order = p, append(w.order, p)
		w.step(Attach{Client: p.id, Tenant: cmp.Or(u.tenant, fmt.Sprint("t", p.id)), CanMove: true})
		w.step(residency.Reserve{Client: p.id, Total: u.bytes, Least: u.bytes})
	}
}

// fillAll has one after the other fill its memory. Then all can begin.
func (w *sharing) fillAll() {
	w.t.Helper()
	for _, p := range w.order {
		p.wants(time.Millisecond)
		w.until(func() bool { return p.times == 0 })
		w.run(2 * time.Second)
	}
	w.begun, w.worked, w.moving, w.bytesIn, w.grants, w.longest = w.now, 0, 0, 0, 0, 0
}

func (w *sharing) share() {
	w.t.Helper()
	w.fillAll()
	for _, p := range w.order {
		p.times = p.use.times
		p.wants(p.use.work)
	}
	// Before their pauses are known, and when some have ended, is another matter.
	w.run(10 * time.Second)
	from, moved := w.now, w.moving
	for _, p := range w.order {
		p.worked = 0
	}
	w.until(func() bool { return slices.ContainsFunc(w.order, func(p *proc) bool { return p.done }) })
	if w.now > from {
		w.steady = (w.moving - moved).Seconds() / w.now.Sub(from).Seconds()
	}
	for _, p := range w.order {
		w.parts = append(w.parts, p.worked.Seconds()/max(w.now.Sub(from).Seconds(), 1e-9))
	}
	w.until(func() bool { return !slices.ContainsFunc(w.order, func(p *proc) bool { return !p.done }) })
}

// makespan is how long all took together.
func (w *sharing) makespan() time.Duration {
	end := w.begun
	for _, p := range w.order {
		end = max(end, p.end)
	}
	return end.Sub(w.begun)
}

// faster is how much faster that was than one after the other.
func (w *sharing) faster() float64 {
	var sum time.Duration
	for _, p := range w.order {
		sum += p.use.alone()
	}
	return sum.Seconds() / w.makespan().Seconds()
}

func (w *sharing) String() string {
	return fmt.Sprintf("%6.2f s, %4.2f times faster; the GPU works %3.0f %%, moving takes %2.0f %%, %3.0f GiB in, longest wait %.1f s",
		w.makespan().Seconds(), w.faster(), 100*w.worked.Seconds()/w.makespan().Seconds(), 100*w.moving.Seconds()/w.makespan().Seconds(),
		float64(w.bytesIn)/float64(oneGiB), w.longest.Seconds())
}

func (w *sharing) until(is func() bool) {
	w.t.Helper()
	for n := 0; !is(); n++ {
		if len(w.queue) == 0 || n > 10_000_000 || w.now > base.Time(24*time.Hour) {
			for _, p := range w.order {
				m, _ := w.core.ClientMemory(p.id)
				w.t.Logf("%+v\n%+v %+v", *p, m, *w.core.clients[p.id])
			}
			w.t.Fatalf("at %v, %d events: they do not get on", time.Duration(w.now), n)
		}
		e := heap.Pop(&w.queue).(modelEvent)
		w.now = e.at
		e.do()
	}
}

func (w *sharing) run(d time.Duration) {
	over := false
	w.after(d, func() { over = true })
	w.until(func() bool { return over })
}

// ---- the daemon ----

func (w *sharing) step(ev base.Event) {
	for _, a := range slices.Clone(w.core.Step(w.now, ev)) {
		switch a := a.(type) {
		case Grant:
			w.grants++
			p := w.procs[a.Client]
			w.longest = max(w.longest, w.now.Sub(p.askedAt))
			w.after(linkFrame, func() { p.granted(a.Epoch) })
		case Revoke:
			w.after(linkFrame, func() { w.procs[a.Client].revoked(a.Epoch) })
		case Released:
			w.moving += a.Moved
		case residency.Suspended:
			w.procs[a.Client].suspends = append(w.procs[a.Client].suspends, w.now)
		case residency.Room:
			p := w.procs[a.Client]
			p.room = a.Bytes
			w.after(linkFrame, func() {
				p.asked = p.asked || a.Less
				p.move()
			})
		case residency.Reserved:
			switch p := w.procs[a.Client]; {
			case a.Refused == residency.NotRefused:
			case w.host == nil:
				w.t.Fatalf("%v: %v", a, a.Why)
			default:
				p.done, p.end = true, w.now
				w.after(linkFrame, func() { w.step(Gone{Client: p.id}) })
			}
		case residency.ArenaWanted:
			if w.host != nil {
				w.after(linkFrame, func() { w.procs[a.Client].given(a.Bytes) })
			}
		case Notice:
			p := w.procs[a.Client]
			p.waiters, p.patient = a.Leave, a.Patient
			w.after(linkFrame, p.maybeIdle)
		}
	}
	// TestAnyHistory and tests/sim check after each event.
	if w.events++; w.events%16 == 0 {
		if err := w.core.Check(); err != nil {
			w.t.Fatalf("at %v, after %v: %v", time.Duration(w.now), base.Text(ev), err)
		}
	}
	sum := uint64(0)
	for _, p := range w.order {
		sum += p.resident
	}
	if sum > w.capacity {
		w.t.Fatalf("at %v: %d MiB are on the GPU", time.Duration(w.now), sum>>20)
	}
	if at, ok := w.core.Deadline(); ok && at != w.tick {
		w.tick = at
		w.after(at.Sub(w.now), func() {
			if w.tick == at {
				w.tick = 0
				w.step(Tick{})
			}
		})
	}
}

// ---- a process ----

func (p *proc) send(ev base.Event) {
	p.w.after(linkFrame, func() {
		if !p.done {
			p.w.step(ev)
		}
	})
}

// wants has it work on the GPU for so long.
func (p *proc) wants(d time.Duration) {
	p.left = d
	p.proceed()
}

func (p *proc) proceed() {
	switch {
	case p.runs || p.left == 0:
	case p.open:
		p.runs, p.since = true, p.w.now
		if p.w.now.Sub(p.told) >= linkStats {
			p.told = p.w.now
			p.send(Called{Client: p.id})
		}
		p.calls++
		calls := p.calls
		p.w.after(p.left, func() {
			if p.calls == calls {
				p.halt()
				p.pause()
			}
		})
	case !p.asking && p.epoch == 0:
		p.asking, p.askedAt = true, p.w.now
		p.send(Request{Client: p.id})
	}
}

// halt has it work no more, for now.
func (p *proc) halt() {
	if p.runs {
		did := p.w.now.Sub(p.since)
		p.left -= did
		p.w.worked += did
		p.worked += did
		p.runs = false
		p.calls++
	}
}

// pause is for what it does on the CPU.
func (p *proc) pause() {
	p.times--
	p.pausedAt = append(p.pausedAt, p.w.now)
	pause := p.use.after(p.times)
	if p.times == 0 && p.w.begun != 0 {
		p.w.after(pause, func() {
			p.done, p.end = true, p.w.now
			p.resident, p.away = 0, 0
			p.w.step(Gone{Client: p.id})
		})
		return
	}
	switch {
	case p.w.begun != 0 && p.use.served != nil:
		p.use.served.step(p)
	case p.times > 0:
		p.w.after(pause, func() { p.wants(p.use.work) })
	}
	p.maybeIdle()
}

// maybeIdle gives the GPU back if somebody waits.
func (p *proc) maybeIdle() {
	calls := p.calls
	if p.open && !p.runs && p.waiters && !p.done {
		idle := linkIdle
		if p.patient {
			idle = PatientIdle
		}
		p.w.after(idle, func() {
			if p.open && !p.runs && p.waiters && p.calls == calls && !p.done {
				p.release(Idle)
			}
		})
	}
}

func (p *proc) release(why Reason) {
	p.send(Release{Client: p.id, Epoch: p.epoch, Reason: why})
	p.epoch, p.open, p.draining = 0, false, false
	p.proceed()
	p.move()
}

func (p *proc) granted(epoch base.Epoch) {
	if p.done {
		return
	}
	p.epoch, p.asking = epoch, false
	p.fill()
}

// fill moves in what is away, and opens the gate.
func (p *proc) fill() {
	if p.away > 0 {
		p.move()
		return
	}
	p.open = true
	p.proceed()
	p.maybeIdle()
}

func (p *proc) revoked(epoch base.Epoch) {
	if p.epoch != epoch {
		return
	}
	if !p.open {
		p.draining = true
		if !p.moving {
			p.release(Revoked)
		}
		return
	}
	p.open = false
	drain := min(linkDrain, p.left)
	if !p.runs {
		drain = 0
	}
	p.w.after(drain, func() {
		done := p.runs && p.w.now.Sub(p.since) >= p.left
		p.halt()
		p.release(Revoked)
		if done {
			p.pause()
		}
	})
}

func (p *proc) move() {
	switch {
	case p.moving || p.done:
	case p.epoch == 0 && p.resident > p.room:
		p.piece(min(linkPiece, p.resident-p.room), true)
	case p.epoch == 0 && p.asked:
		p.asked = false
		p.report(false)
	case p.epoch != 0 && !p.open && !p.draining && p.away > 0 && p.resident < p.room:
		p.piece(min(linkPiece, p.away, p.room-p.resident), false)
	}
}

func (p *proc) piece(n uint64, out bool) {
	p.moving = true
	took := time.Duration(n / linkRate)
	if out && p.cold > 0 {
		p.cold -= min(p.cold, n)
		took = time.Duration(n / coldRate)
	}
	switch {
	case out:
	case p.blank > 0: // nothing is copied
		p.blank -= min(p.blank, n)
		took /= 50
	default:
		p.in += n
	}
	p.w.after(took, func() {
		p.moving = false
		if p.done {
			return
		}
		if out {
			p.resident, p.away = p.resident-n, p.away+n
			if p.w.host != nil && p.away-p.blank > p.arena {
				p.w.t.Fatalf("at %v: %d MiB of %d are away, in %d MiB of host memory", time.Duration(p.w.now), (p.away-p.blank)>>20, p.id, p.arena>>20)
			}
			p.report(false)
			p.move()
			return
		}
		p.resident, p.away = p.resident+n, p.away-n
		p.w.bytesIn += n
		p.report(p.away == 0)
		switch {
		case p.draining:
			p.release(Revoked)
		case p.away == 0:
			p.fill()
		default:
			p.move()
		}
	})
}

func (p *proc) report(ready bool) {
	p.send(residency.Moved{Client: p.id, Epoch: p.epoch, Report: residency.Report{Resident: p.resident, Away: p.away, In: p.in}, Ready: ready})
}
