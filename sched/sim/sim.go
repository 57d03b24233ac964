// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"container/heap"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched"
)

// Options of a run; the zero value is a good one.
type Options struct {
	Clients int       // processes at a time; 0: the seed chooses 2 to 8
	Calm    bool      // no faults
	Trace   io.Writer // every event and action, as it happens; nil: none
}

// Report says what happened in a run.
type Report struct {
	Seed    uint64
	Steps   int           // of the core
	Virtual time.Duration // time that passed for the clients

	Grants, Concurrent     int // all grants, and those that were concurrent
	EarlyReleases, Revokes int
	Fences, Adoptions      int
	Deaths, Stops, Cuts    int // clients killed or stopped, connections lost
	Crashes                int // of the daemon
	Overlaps               int // of fenced clients with holders: allowed
	LongestWait            time.Duration
}

func (r Report) String() string {
	return fmt.Sprintf("seed %d: %d steps in %v: grants %d (concurrent %d), early releases %d, revokes %d, fences %d, adoptions %d; "+
		"deaths %d, stops %d, lost connections %d, daemon crashes %d; fenced overlaps %d, longest wait %v",
		r.Seed, r.Steps, r.Virtual.Round(time.Millisecond), r.Grants, r.Concurrent, r.EarlyReleases, r.Revokes, r.Fences, r.Adoptions,
		r.Deaths, r.Stops, r.Cuts, r.Crashes, r.Overlaps, r.LongestWait)
}

// Bounds of what the operator sets. Short, so that faults meet often.
const (
	minQuantum, maxQuantum = 2 * time.Millisecond, 20 * time.Millisecond
	minGrace, maxGrace     = 20 * time.Millisecond, 80 * time.Millisecond
)

// faults are the rates of what goes wrong, each a probability for each
// occasion. A seed turns each on or off, because faults hide each other.
type faults struct {
	kill, stop, cut, ignore, hostile, crash, operator float64
}

type world struct {
	rng    *rand.Rand
	now    sched.Time
	events events
	seq    uint64

	faults faults
	daemon *daemon
	judge  *judge
	client []*client // the living, by slot
	lastID sched.ClientID

	report Report
	err    error
	trace  io.Writer
	recent [64]string
	lines  int
}

// maxEventsPerStep ends a run in which nothing reaches the core any more, as
// when one client is alone.
const maxEventsPerStep = 50

// Run simulates until the core has made that many steps. The error, if any,
// names the seed and the broken promise, and ends with what happened before.
// The same seed, steps and options do the same.
func Run(seed uint64, steps int, opts Options) (report Report, err error) {
	w := &world{rng: rand.New(rand.NewPCG(seed, 0x6e76736861726531)), trace: opts.Trace}
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
			kill: rate(0.002), stop: rate(0.005), cut: rate(0.005), ignore: rate(0.02),
			hostile: rate(0.3), crash: rate(0.002), operator: rate(0.3),
		}
	}
	w.judge = newJudge(w)
	w.daemon = &daemon{w: w}
	if !opts.Calm && w.chance(0.2) {
		w.daemon.mode = sched.Concurrent
		w.faults.operator = 0.3 // concurrent holders alone give the core nothing to do
	}
	w.daemon.quantum = w.duration(minQuantum, maxQuantum)
	w.daemon.grace = w.duration(minGrace, maxGrace)
	w.daemon.start()

	n := opts.Clients
	if n == 0 {
		n = 2 + w.rng.IntN(7)
	}
	w.client = make([]*client, n)
	for slot := range w.client {
		w.spawn(slot)
	}
	w.everySoOften()

	for n := 0; w.report.Steps < steps && w.err == nil && n < maxEventsPerStep*steps; n++ {
		ev := heap.Pop(&w.events).(event)
		w.now = ev.at
		ev.do()
	}
	return
}

// everySoOften lets the operator and the starvation check have their turn.
func (w *world) everySoOften() {
	w.judge.checkStarvation()
	if w.chance(w.faults.operator) {
		switch w.rng.IntN(4) {
		case 0:
			w.daemon.quantum = w.duration(minQuantum, maxQuantum)
			w.daemon.step(sched.SetQuantum{D: w.daemon.quantum})
		case 1:
			w.daemon.grace = w.duration(minGrace, maxGrace)
			w.daemon.step(sched.SetGrace{D: w.daemon.grace})
		default:
			w.daemon.mode = sched.Mode(w.rng.IntN(2))
			w.daemon.step(sched.SetMode{M: w.daemon.mode})
		}
	}
	w.after(50*time.Millisecond, w.everySoOften)
}

// after calls do when d has passed; things due at once happen in the order in
// which they were asked for.
func (w *world) after(d time.Duration, do func()) { w.at(w.now.Add(d), do) }

func (w *world) at(t sched.Time, do func()) {
	w.seq++
	heap.Push(&w.events, event{t, w.seq, do})
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
func (w *world) note(who string, what fmt.Stringer) {
	if w.trace == nil {
		return
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

func (t text) String() string { return string(t) }

type event struct {
	at  sched.Time
	seq uint64
	do  func()
}

// events is a heap by time, then by order of arrival.
type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	(*e)[last] = event{}
	*e = (*e)[:last]
	return x
}
