// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// Options of a run; the zero value is a good one.
type Options struct {
	Clients int  // processes at a time; 0: the seed chooses 2 to 8
	Calm    bool // no faults
	Cohorts bool // only what clients have in which some share their turns, see cohort.go of sched; not calm
	Others  bool // others than clients have memory of the GPU, see others.go
	// Lulls are minutes without work, and hostile clients that say falsely that their work was cut.
	Lulls bool
	Trace io.Writer // every event and action, as it happens; nil: none
}

// Report says what happened in a run.
type Report struct {
	Seed    uint64
	Steps   int           // of the core
	Virtual time.Duration // time that passed for the clients

	Grants, Concurrent     int // all grants, and those that were concurrent
	Latency, Pauses        int // latency grants, and holders paused for them
	Beside                 int // grants beside holders that are not paused
	Shared                 int // grants in a turn of a cohort, beside other members of it
	SharedLatency          int // the same, while a latency tenant had the GPU beside them or before them
	SharedGroup            int // the same, of an overlap group and another one
	EarlyReleases, Revokes int
	Fences, Adoptions      int
	Preemptions            int
	Deaths, Stops, Cuts    int // clients killed or stopped, connections lost
	Crashes                int // of the daemon
	GangGrants, GangSteps  int // to clients of gangs, in their turn and while others drain
	Leaps, Lulls           int // of the clock; minutes without work
	Modes, Shares, Slices  int // changes
	Limits                 int // windows in which a limit was checked
	Overlaps               int // of fenced clients with holders: allowed
	MovedIn, MovedOut      int // memory, in units of no meaning
	Grown                  int // memory that was had without a grant, the same
	Stalls, Refused        int // clients that did not make room; requests that the GPU had no memory for
	Reserved, OverLimit    int // RESERVE granted; refused by a limit
	NoPlace, Stranded      int // refused as there is no place; clients that have none any more
	Exports, MemoryLimits  int // memory made unmovable; changes of memory limits and modes
	Suspends, Resumes      int // of tenants, by the operator
	IdleTimes, Idle        int // changes of the time after which a tenant's clients are suspended; clients for which it was over
	Withdrawals, Departed  int // clients that want nothing any more; tenants of which nothing was left on the GPU
	Calls, Execs           int // reports of calls; programs that another one has replaced
	Sizes, SwapShares      int // changes of the GPU's memory, and of what moving may take
	LongestWait            time.Duration
	Desktops               int           // changes of what others than clients have
	LongestLack            time.Duration // with a grant and without memory
}

func (r Report) String() string {
	return fmt.Sprintf("seed %d: %d steps in %v: grants %d (concurrent %d, latency %d, beside %d, shared %d, with a latency tenant %d, with a group %d, pauses %d), early releases %d, revokes %d, preemptions %d, fences %d, adoptions %d; "+
		"deaths %d, stops %d, lost connections %d, daemon crashes %d, leaps %d, lulls %d, changes of mode %d, of shares %d, of slices %d; "+
		"gang grants %d, steps %d; memory moved in %d, out %d, stalled %d times, refused %d; "+
		"reserved %d, over a limit %d, no place %d, stranded %d, exports %d, memory limits %d; "+
		"suspends %d, resumes %d, idle times %d, idle %d, withdrawals %d, departed %d, reports of calls %d, execs %d, sizes %d, swap shares %d; "+
		"fenced overlaps %d, limits checked %d, longest wait %v; desktops %d, longest lack %v",
		r.Seed, r.Steps, r.Virtual.Round(time.Millisecond), r.Grants, r.Concurrent, r.Latency, r.Beside, r.Shared, r.SharedLatency, r.SharedGroup, r.Pauses, r.EarlyReleases, r.Revokes, r.Preemptions, r.Fences, r.Adoptions,
		r.Deaths, r.Stops, r.Cuts, r.Crashes, r.Leaps, r.Lulls, r.Modes, r.Shares, r.Slices, r.GangGrants, r.GangSteps, r.MovedIn, r.MovedOut, r.Stalls, r.Refused,
		r.Reserved, r.OverLimit, r.NoPlace, r.Stranded, r.Exports, r.MemoryLimits,
		r.Suspends, r.Resumes, r.IdleTimes, r.Idle, r.Withdrawals, r.Departed, r.Calls, r.Execs, r.Sizes, r.SwapShares, r.Overlaps, r.Limits, r.LongestWait, r.Desktops, r.LongestLack)
}

// Bounds of what the operator sets. Short, so that faults meet often.
const (
	minQuantum, maxQuantum = 2 * time.Millisecond, 20 * time.Millisecond
	minGrace, maxGrace     = 20 * time.Millisecond, 80 * time.Millisecond
)

// faults are the rates of what goes wrong, each a probability for each
// occasion. A seed turns each on or off, because faults hide each other.
type faults struct {
	kill, exec, stop, cut, ignore, hostile, crash, leap, operator float64
	cutDrains                                                     float64 // no fault: drains that are cut
}

type world struct {
	rng    *rand.Rand
	now    base.Time
	events events
	seq    uint64

	faults faults
	daemon *daemon
	judge  *judge
	client []*client // the living, by slot
	byID   map[base.ClientID]*client
	// The tenants of slots: some have one in common, others are on their own.
	tenants    []*tenant
	tenantOf   []*tenant
	joined     map[base.ClientID]*tenant // of clients, also of the dead: grants may be on their way to them
	indebted   map[string]bool           // gangs and overlap groups that hostile clients have left
	lastID     base.ClientID
	mem        memoryWorld
	onlyLimits bool // shares have limits and weights alone: others share by slices what these leave
	even       bool // or limits and priorities, and clients leave the GPU idle: others share beside a latency tenant, too
	// modesChange says that memory which could be moved was told to stay at times.
	modesChange bool

	report  Report
	lulls   *rand.Rand // decides on them; nil: none. Of its own, so that seeds go on as they did
	quiet   base.Time  // until then nobody has work
	stable  base.Time  // since then nobody's share has changed
	unasked int        // steps since the core checked its invariants
	err     error
	trace   io.Writer
	recent  [64]string
	lines   int
}

// maxEventsPerStep ends a run in which nothing reaches the core any more, as
// when one client is alone.
const maxEventsPerStep = 50

// Run simulates until the core has made that many steps. The error, if any,
// names the seed and the broken promise, and ends with what happened before.
// The same seed, steps and options do the same.
func Run(seed uint64, steps int, opts Options) (report Report, err error) {
	w := &world{rng: rand.New(rand.NewPCG(seed, 0x6e76736861726531)), trace: opts.Trace, byID: map[base.ClientID]*client{}, joined: map[base.ClientID]*tenant{}, indebted: map[string]bool{}}
	w.report.Seed = seed
	defer func() {
		report = w.report
		report.Virtual = time.Duration(w.now)
		if p := recover(); p != nil {
			w.fail("panic: %v", p)
		}
		if w.err != nil {
			err = fmt.Errorf("seed %d, step %d, at %v: %w\nbefore that:\n%s", seed, w.report.Steps, time.Duration(w.now), w.err, w.history())
		}
	}()

	if !opts.Calm {
		rate := func(p float64) float64 {
			if w.chance(0.5) {
				return 0
			}
			return p
		}
		w.faults = faults{
			kill: rate(0.002), exec: rate(0.002), stop: rate(0.005), cut: rate(0.005), ignore: rate(0.02),
			hostile: rate(0.3), crash: rate(0.002), leap: rate(0.01), operator: rate([]float64{0.3, 0.3, 0.005}[w.rng.IntN(3)]),
		}
	}
	if opts.Lulls && !opts.Calm {
		w.lulls = rand.New(rand.NewPCG(seed, 0x6c756c6c))
	}
	w.faults.cutDrains = []float64{0, 0.1, 0.9}[w.rng.IntN(3)]
	w.judge = newJudge(w)
	w.daemon = &daemon{w: w, promised: map[base.ClientID]uint64{}}
	if !opts.Calm && w.chance(0.3) {
		w.daemon.mode = sched.Mode(1 + w.rng.IntN(2))
		w.faults.operator = 0.3 // concurrent holders alone give the core nothing to do
	}
	w.daemon.quantum = w.duration(minQuantum, maxQuantum)
	w.daemon.grace = w.duration(minGrace, maxGrace)
	if w.onlyLimits = !opts.Calm && (w.chance(0.15) || opts.Cohorts); w.onlyLimits {
		w.daemon.mode = sched.Auto
		w.even = w.chance(0.6) || opts.Cohorts
	}
	if !w.onlyLimits && opts.Clients < 1000 { // or it is quadratic
		w.newMemory()
	}
	if !opts.Calm && w.chance(0.3) {
		w.daemon.tuning = account.Tuning{Window: w.duration(0, time.Second), Sample: w.duration(0, 100*time.Millisecond), DropCarry: w.rng.IntN(101), DropTail: w.rng.IntN(101)}
	}
	if opts.Others {
		w.newOthers()
	}
	w.daemon.start()

	n := opts.Clients
	if n == 0 {
		n = 2 + w.rng.IntN(7)
		if w.chance(0.1) {
			n += 8 // more than a Persist names
		}
	}
	w.client = make([]*client, n)
	w.tenantOf = make([]*tenant, n)
	w.newTenants()
	for slot := range w.client {
		if len(w.tenants) > 0 && w.chance(0.9) {
			w.tenantOf[slot] = w.tenants[w.rng.IntN(len(w.tenants))]
			w.tenantOf[slot].clients++
		}
		w.spawn(slot)
	}
	w.everySoOften()

	for n := 0; w.report.Steps < steps && w.err == nil && n < maxEventsPerStep*steps; n++ {
		ev := w.events.pop()
		w.now = max(w.now, ev.at) // late, if the clock has leapt
		ev.do()
	}
	return
}

// everySoOften lets the operator, the clock and the checks have their turn.
func (w *world) everySoOften() {
	w.judge.checkStarvation()
	w.judge.checkLimits()
	w.judge.checkReservations()
	w.judge.checkIdle()
	w.judge.checkFills()
	w.othersChange()
	if w.chance(w.faults.leap) {
		w.leap()
	}
	if w.now >= w.quiet && w.chance(w.faults.operator) {
		w.operate()
	}
	if w.now >= w.quiet && w.lulls != nil && w.lulls.Float64() < 0.01 {
		w.lull()
	}
	w.after(often, w.everySoOften)
}

func (w *world) operate() {
	d := w.daemon
	if w.mem.limits && w.chance(0.5) {
		w.operateMemory()
		return
	}
	switch w.rng.IntN(7) {
	case 0:
		d.quantum = w.duration(minQuantum, maxQuantum)
		d.step(sched.SetQuantum{D: d.quantum})
	case 1, 2:
		if w.even && d.mode == sched.Auto {
			return
		}
		d.mode = sched.Mode(w.rng.IntN(3))
		d.step(sched.SetMode{M: d.mode})
	case 3:
		if len(w.tenants) == 0 || !w.mem.limits {
			return
		}
		t := w.tenants[w.rng.IntN(len(w.tenants))]
		was := t.memory.SuspendAfter
		t.memory, t.kept = w.newLimit(t), w.now
		w.modesChange = w.modesChange || t.memory.Keep != residency.Swapped
		w.report.MemoryLimits++
		if t.memory.SuspendAfter != was && w.mem.capacity != 0 {
			w.report.IdleTimes++
		}
		d.step(t.memory)
	default:
		if len(w.tenants) == 0 {
			return
		}
		t := w.tenants[w.rng.IntN(len(w.tenants))]
		for _, c := range w.client {
			if c != nil && c.tenant == t && c.hostile && t.share.Group() != "" {
				w.indebted[t.share.Group()] = true
			}
		}
		t.share = w.newShare(t)
		w.report.Shares++
		w.changed()
		d.step(sched.SetShare{Tenant: t.name, Share: t.share})
	}
}

// changed notes that what was owed or waited for so far means nothing now.
func (w *world) changed() {
	w.stable = w.now
	for _, t := range w.tenants {
		t.changed(w.now)
	}
}

// leap has the clock go on without anybody having noticed, as when a virtual
// machine was stopped: all that was due meanwhile happens now.
func (w *world) leap() {
	d := w.duration(0, time.Second)
	if w.chance(0.1) {
		d = w.duration(0, time.Hour)
	}
	w.report.Leaps++
	w.note("clock", text(fmt.Sprintf("leaps by %v", d)))
	w.now = w.now.Add(d)
	w.changed()
	w.othersLeap()
}

// lull has honest processes have no work for longer than anything is waited for, and hostile ones do nothing.
func (w *world) lull() {
	d := time.Duration(w.lulls.Int64N(int64(2 * time.Minute)))
	w.report.Lulls++
	w.note("all", text(fmt.Sprintf("have no work for %v", d)))
	w.quiet = w.now.Add(d)
	for _, c := range w.client {
		if c != nil && c.hostile {
			c.stop(d)
		}
	}
}

// gangOf returns the gang of a client, or its overlap group, dead or alive, "": none.
func (w *world) gangOf(id base.ClientID) string {
	if t := w.joined[id]; t != nil {
		return t.share.Group()
	}
	return ""
}

// ofOneGang says whether two clients are of one gang, or of one overlap group.
func (w *world) ofOneGang(a, b base.ClientID) bool {
	gang := w.gangOf(a)
	return gang != "" && gang == w.gangOf(b)
}

// after calls do when d has passed; things due at once happen in the order in
// which they were asked for.
func (w *world) after(d time.Duration, do func()) { w.at(w.now.Add(d), do) }

func (w *world) at(t base.Time, do func()) {
	w.seq++
	w.events.push(event{t, w.seq, do})
}

func (w *world) chance(p float64) bool { return p > 0 && w.rng.Float64() < p }

func (w *world) duration(lo, hi time.Duration) time.Duration {
	return lo + time.Duration(w.rng.Int64N(int64(hi-lo)+1))
}

// latency is that of frames and wake-ups: short, with a tail.
func (w *world) latency() time.Duration {
	if w.chance(0.02) {
		return w.duration(0, 5*time.Millisecond)
	}
	return w.duration(0, 100*time.Microsecond)
}

func (w *world) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

// note keeps a line for the history of a failure.
func (w *world) note(who string, what any) {
	if w.trace == nil {
		return
	}
	if _, said := what.(text); !said {
		what = base.Text(what)
	}
	line := fmt.Sprintf("%14v %-9s %v", time.Duration(w.now), who, what)
	w.recent[w.lines%len(w.recent)] = line
	w.lines++
	fmt.Fprintln(w.trace, line)
}

func (w *world) history() string {
	if w.trace == nil {
		return "(run the seed again with a trace)"
	}
	var b strings.Builder
	for i := max(0, w.lines-len(w.recent)); i < w.lines; i++ {
		fmt.Fprintln(&b, w.recent[i%len(w.recent)])
	}
	return b.String()
}

type text string
