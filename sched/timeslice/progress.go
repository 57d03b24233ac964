// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"cmp"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Progress is how fast a client gets on. Its gated calls are the measure: a program makes
// about as many for the same piece of work, whether it waits for the GPU or not. In its
// turns it has the GPU alone; so its speed beside others, divided by that, is what it gets
// of what it would get alone.
//
// How precise that is depends on how even the program's calls are: within 1 % for a loop
// of matrix products, and worse for a program whose requests take longer than a window.
// What a client says about itself serves it badly if it is not true: see share.
type Progress struct {
	turns                         // lately
	others              int       // turns, one after the other, in which it made calls at quite another speed
	callsInTurns        float64   // since the client takes turns with others
	turnsFrom           base.Time // since then
	rateInTurnsTogether float64   // calls per second meanwhile, waiting included, at the end of that

	// Beside others, in the window so far.
	callsBeside float64
	over        time.Duration
	seen        base.Time     // the latest report
	shared      time.Duration // by the clock that runs while clients share the GPU by slices, at that time
	samples     int
	busySamples int

	// Beside others, lately.
	busyNow    float64 // the part of the time of its open gate in which the GPU had work of it
	rateBeside float64 // calls per second of that time; 0: not known

	doubt doubt
	waits float64 // as doubt.told, which its turns have shown to be a wait for slices of others; 0: nothing
	fast  bool    // it gets on faster beside others than in its turns
}

// doubt is about a client that gets on far more slowly beside others than by its even part: it does
// something else, or it waits for long slices of others. Turns of its own decide.
type doubt struct {
	on    bool
	told  float64 // how fast it got on, of its even part
	rate  float64 // calls per second of its turns before
	turns         // since then
}

// turns is what turns have shown.
type turns struct {
	calls      float64
	held       time.Duration // of the GPU
	paused     time.Duration // between turns, without a wish for the GPU
	looks, hot float64       // how often it was looked whether the GPU had work of the client, and had
}

const (
	// A client reports four times a second while it makes calls. After a longer silence
	// it has paused, which is no measure of anything.
	reportGap = 1500 * time.Millisecond
	// aloneMemory is over how much of its own time a client's speed alone is measured,
	// and aloneLeast the least that says something.
	aloneMemory = 4 * time.Second
	aloneLeast  = 300 * time.Millisecond
	// otherTurns turns of otherLeast or more, with calls otherSpeed times as fast or slow
	// as before, are of another program. Phases of one program differ less, or are shorter.
	otherTurns = 3
	otherLeast = 20 * time.Millisecond
	otherSpeed = 4.0
	// A client looks so often a second while its gate is open.
	LooksPerSecond = 200
	// recentReports is over how many reports, of a quarter of a second each, is told what a client
	// does now.
	recentReports = 4
	// slower is far slower than expected: a client that does the same varies less.
	slower = 0.5
	// turnsLeast is the least time of turns that says what a client gets in them.
	turnsLeast = 750 * time.Millisecond
)

// HadTurn notes a turn, drain included. A process may do something else now: a loop of
// matrix products makes a thousandth of the calls that a language model makes. What it did
// before is then no measure of what it does.
func (p *Progress) HadTurn(calls uint64, held time.Duration) {
	if held >= otherLeast && p.held > 0 {
		if now, was := float64(calls)/held.Seconds(), p.calls/p.held.Seconds(); now > otherSpeed*was || was > otherSpeed*now {
			p.others++
		} else {
			p.others = 0
		}
	}
	if p.others >= otherTurns {
		if p.others, p.waits = 0, 0; p.doubt.on {
			p.doubt.rate = 0 // what its turns show is what it does now
		} else {
			p.turns = turns{}
		}
	}
	p.calls += float64(calls)
	p.callsInTurns += float64(calls)
	p.held += held
	if p.doubt.on {
		p.doubt.calls += float64(calls)
		p.doubt.held += held
		p.decide()
	}
	if p.held+p.paused > aloneMemory {
		p.calls, p.held, p.paused, p.looks, p.hot = p.calls/2, p.held/2, p.paused/2, p.looks/2, p.hot/2
	}
}

// StartTurns and EndTurns note that clients take turns, and until when they did.
func (p *Progress) StartTurns(now base.Time) { p.callsInTurns, p.turnsFrom = 0, now }

func (p *Progress) EndTurns(at base.Time) {
	if d := at.Sub(p.turnsFrom); p.callsInTurns > 0 && d >= turnsLeast {
		p.rateInTurnsTogether = p.callsInTurns / d.Seconds()
	}
	p.StartWindow()
	p.seen = 0
}

// HadPause notes a pause between turns. A long one is not part of the work.
func (p *Progress) HadPause(d time.Duration) {
	if p.held > 0 && d < time.Second {
		p.paused += d
		p.doubt.paused += d
	}
}

// Report notes what a client said; alone: in its turn. Else shared is by the clock that runs while clients share the GPU by slices.
func (p *Progress) Report(now base.Time, ev Utilization, alone bool, shared time.Duration) {
	if alone {
		p.looks += float64(ev.Samples)
		p.hot += float64(ev.Busy)
		p.doubt.looks += float64(ev.Samples)
		p.doubt.hot += float64(ev.Busy)
		return
	}
	busy := float64(ev.Busy) / float64(ev.Samples)
	if p.seen == 0 {
		p.busyNow = busy
	}
	p.busyNow += (busy - p.busyNow) / recentReports
	if gap := now.Sub(p.seen); p.seen != 0 && gap < reportGap {
		p.callsBeside += float64(ev.Calls)
		p.over += shared - p.shared
		rate := float64(ev.Calls) * LooksPerSecond / float64(ev.Samples)
		p.rateBeside = cmp.Or(p.rateBeside, rate)
		p.rateBeside += (rate - p.rateBeside) / recentReports
	}
	p.seen, p.shared = now, shared
	p.samples += ev.Samples
	p.busySamples += ev.Busy
}

// Load is how much work of the client waits for the GPU, on average, as a part of one client's
// that always has work. One that has not said anything always has.
func (p *Progress) Load() float64 {
	if p.seen == 0 {
		return 1
	}
	return p.busyNow
}

// Use returns which part of the time of its open gate the client uses the GPU beside others with
// such a load: the greater of what its speed says, beside its speed alone, and of its even part of
// the time in which it has work. other: it gets on far more slowly than by its even part, or faster than in
// its turns, and turns of its own have to show whether it does something else (Doubt).
func (p *Progress) Use(others float64) (part float64, other bool) {
	if p.seen == 0 {
		return 1, false
	}
	even, told, known := p.fares(others)
	if !known {
		return p.busyNow, false
	}
	slow := told > 0 && told < slower*even && (p.waits == 0 || told < slower*p.waits*even)
	return min(max(even, told), p.busyNow), slow || p.fast
}

// Gets notes how fast the client gets on beside others, in calls per second. Nobody is faster there than in
// its own turns: those that say so were of another time, such as its start.
func (p *Progress) Gets(beside float64) {
	rate, _, known := p.Alone()
	p.fast = known && beside > Changed*rate
}

// fares returns a client's even part of the time in which it has work, and what its speed says.
func (p *Progress) fares(others float64) (even, told float64, known bool) {
	rate, busy, known := p.Alone()
	if !known || p.rateBeside == 0 {
		return 0, 0, false
	}
	return p.busyNow / (1 + others), p.rateBeside / rate * busy, true
}

// Doubt notes that the client has turns of its own because of what Use said of other.
func (p *Progress) Doubt(others float64) {
	if even, told, known := p.fares(others); known && even > 0 && !p.doubt.on {
		p.doubt = doubt{on: true, told: told / even, rate: p.calls / p.held.Seconds()}
	}
}

// Doubts says whether turns have yet to decide a doubt.
func (p *Progress) Doubts() bool { return p.doubt.on }

// decide ends a doubt once its turns show enough. Of a client that does the same in them as before it is known
// that it waits so long beside others. Of another one only these turns are known.
func (p *Progress) decide() {
	d := p.doubt
	if d.held < aloneLeast {
		return
	}
	p.doubt, p.fast, p.rateBeside, p.waits = doubt{}, false, 0, 0
	now := d.calls / d.held.Seconds()
	if now >= slower*d.rate && slower*now <= d.rate && d.told < slower {
		p.waits = d.told
	} else if now > 0 {
		p.turns = d.turns
	}
}

// StartWindow forgets what was measured beside others. The first report of a window is
// also about a moment before it.
func (p *Progress) StartWindow() {
	p.callsBeside, p.over, p.samples, p.busySamples = 0, 0, 0, 0
}

// Rate returns the calls per second beside others, while the client worked; false: it did so in less than
// half of the time for which these shared the GPU. Beside others it is seldom without work for longer
// than alone, so what goes beyond that is a pause of its own.
func (p *Progress) Rate(shared time.Duration) (float64, bool) {
	working := 1.0
	if _, busy, known := p.Alone(); known {
		working = min(2-p.Idle()-busy, 1)
	}
	return p.callsBeside / (p.over.Seconds() * working), working >= 0.5 && p.over >= shared/2 && p.callsBeside > 0
}

// Alone returns the calls per second in turns, and the part of that time in which the GPU
// had work of the client; false: too little is known.
func (p *Progress) Alone() (rate, busy float64, known bool) {
	if p.held < aloneLeast || p.calls == 0 {
		return 0, 0, false
	}
	whole := (p.held + p.paused).Seconds()
	busy = p.held.Seconds() / whole
	if p.looks > 0 {
		busy *= p.hot / p.looks
	}
	return p.calls / whole, busy, true
}

// ByTurns returns the calls per second in the turns that clients took with each other before they
// shared by slices, waiting included; 0: not known.
func (p *Progress) ByTurns() float64 { return p.rateInTurnsTogether }

// ForgetTurns is for turns that are another thing from now on.
func (p *Progress) ForgetTurns() { p.rateInTurnsTogether = 0 }

// Idle returns the part of the window in which the client had no work.
func (p *Progress) Idle() float64 {
	return 1 - float64(p.busySamples)/float64(max(p.samples, 1))
}

// Over returns for which part of the time that the GPU was shared in the window the client was active.
func (p *Progress) Over(shared time.Duration) float64 { return p.over.Seconds() / shared.Seconds() }

// Got returns what the client got of the GPU in that time: as much as the same calls take alone.
// False: its speed alone is not known.
func (p *Progress) Got(shared time.Duration) (part float64, known bool) {
	rate, busy, known := p.Alone()
	if !known {
		return 0, false
	}
	return min(p.callsBeside/shared.Seconds()/rate, 1) * busy, true
}

// Keeps says whether the GPU had work of the client for more than a part of its turns.
func (p *Progress) Keeps(part float64) bool { return p.hot > part*p.looks }

// Utilization says how often the GPU had work of a client, of so many times that the
// client looked while its gate was open and others were there, since the one before.
type Utilization struct {
	Client  base.ClientID
	Samples int `always:"samples=%v"`
	Busy    int `always:"busy=%v"`
	Calls   int `text:"calls=%v"` // gated calls since the one before
}

// Event makes it an event.
func (Utilization) Event() string { return "utilization" }
