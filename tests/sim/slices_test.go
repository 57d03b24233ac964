// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// A GPU that gives one process after the other its time slice, as an H200 does, and
// programs that use it under a core's grants and slices.
const (
	switchCost = 140 * time.Microsecond  // from one process to another
	aheadWork  = 2500 * time.Microsecond // submitted and not run yet, when a turn ends
	idleTime   = time.Millisecond        // without work before a turn is given back
	handOver   = 250 * time.Microsecond
	reportTime = 250 * time.Millisecond
)

// program is a loop: so many kernels, then a pause for the CPU's work.
type program struct {
	kernel time.Duration
	burst  int
	gap    time.Duration
}

var (
	gemm      = program{1700 * time.Microsecond, 1, 0}
	gemmSync  = program{1700 * time.Microsecond, 10, 30 * time.Microsecond} // waits for ten products
	decoder   = program{50 * time.Microsecond, 20, 1200 * time.Microsecond} // of a language model
	training  = program{time.Millisecond, 100, 50 * time.Millisecond}       // waits for data
	syncing   = program{time.Millisecond, 1, 20 * time.Microsecond}         // waits for each kernel
	requests  = program{26 * time.Microsecond, 20, 5 * time.Millisecond}
	smallWork = program{200 * time.Microsecond, 3, 3 * time.Millisecond}
)

// alone returns the part of the GPU that the program uses alone.
func (p program) alone() float64 {
	work := float64(p.kernel) * float64(p.burst)
	return work / (work + float64(p.gap))
}

type process struct {
	program
	name   string
	share  sched.Share
	starts time.Duration
	ends   time.Duration // 0: never
	lies   func(*timeslice.Utilization)
	own    time.Duration // it has this time slice, whatever it is told
	fixed  bool          // its driver refuses to set its time slice

	id         base.ClientID
	together   []*process // that have the GPU's slice with it: members of an overlap group, whose kernels are small
	attached   bool
	kernels    int           // of the burst, that have not begun
	left       time.Duration // of the kernel that has begun
	wakes      base.Time     // end of the pause
	idleFrom   base.Time
	requested  bool
	open       bool
	paused     bool
	revoked    bool
	latency    bool // its grant keeps others out
	concurrent bool // its grant is for any number at once
	shared     bool // its grant is for a cohort
	stays      bool // its grant keeps nobody out, and stays while it is idle
	leaves     bool // it gives the GPU back when it has nothing to do
	patient    bool // and waits longer for that
	epoch      base.Epoch
	drain      time.Duration // that it may still run
	slice      time.Duration
	present    bool          // it is told of others on the GPU
	openFor    time.Duration // in which it looked at its work since the latest report
	busyFor    time.Duration
	calls      int // since the latest report
	granted    uint64
	slices     int // messages

	work    time.Duration
	longest time.Duration // of its bursts, from the beginning to the end
	began   base.Time
}

func (p *process) wants() bool { return p.kernels > 0 || p.left > 0 }

// looks says whether the shim looks at what the GPU does of it, see contended in
// hook/core/utilization.c.
func (p *process) looks() bool {
	switch {
	case !p.open || p.latency:
		return false
	case p.concurrent:
		return p.present
	}
	return p.shared || p.leaves
}

func (p *process) idleTime() time.Duration {
	switch {
	case p.latency:
		return 200 * time.Microsecond
	case p.patient:
		return sched.PatientIdle
	}
	return idleTime
}

// running says whether the GPU may run something of it.
func (p *process) running() bool {
	return p.left > 0 || p.kernels > 0 && (p.open || p.revoked && p.drain > 0)
}

type gpuModel struct {
	t         *testing.T
	core      *sched.GPU
	now       base.Time
	processes []*process
	current   int // process that has the GPU
	sliceEnd  base.Time
	switching base.Time
	later     events
	seq       uint64
	modes     int
	reasons   []string
	due       base.Time // by the core, since the last step
	isDue     bool
	runs      []*process // of run, which keeps its memory
	ticks     int        // since ticksFrom
	ticksFrom base.Time
	steps     int
}

const (
	mostTicks  = 10000 // in a millisecond
	checkEvery = 16    // steps
)

func newGPUModel(t *testing.T, mode sched.Mode, processes ...process) *gpuModel {
	g := &gpuModel{t: t, core: sched.New(sched.Config{Mode: mode}), now: base.Time(time.Hour)}
	for i := range processes {
		p := processes[i]
		p.id, p.name = base.ClientID(i+1), cmp.Or(p.name, fmt.Sprint("t", i))
		g.processes = append(g.processes, &p)
		g.after(p.starts, func() { g.attach(&p) })
		if p.ends > 0 {
			g.after(p.ends, func() { g.end(&p) })
		}
	}
	for _, p := range g.processes {
		for _, q := range g.processes {
			if q == p || p.share.Overlap != "" && q.share.Overlap == p.share.Overlap {
				p.together = append(p.together, q)
			}
		}
	}
	g.after(reportTime, g.report)
	g.due, g.isDue = g.core.Deadline()
	return g
}

func (g *gpuModel) attach(p *process) {
	p.attached, p.wakes, p.slice = true, g.now, p.own
	g.step(sched.Attach{Client: p.id, Tenant: p.name, Share: p.share})
	g.after(100*time.Millisecond, func() {
		if p.share.Overlap != "" { // its channels are in a group that is the MPS server's
			g.step(sched.Controls{Client: p.id, Slices: sched.ControlUnseen, Channels: sched.ControlWorks, Bare: 2})
			return
		}
		controls := sched.Controls{Client: p.id, Slices: sched.ControlWorks, Channels: sched.ControlWorks, Groups: 1}
		if p.fixed {
			controls.Slices = sched.ControlRefused
		}
		g.step(controls)
	})
}

func (g *gpuModel) end(p *process) {
	p.attached, p.open, p.kernels, p.left = false, false, 0, 0
	g.step(sched.Gone{Client: p.id})
}

func (g *gpuModel) after(d time.Duration, do func()) {
	g.seq++
	g.later.push(event{g.now.Add(d), g.seq, do})
}

func (g *gpuModel) step(ev base.Event) {
	for _, a := range g.core.Step(g.now, ev) {
		switch a := a.(type) {
		case sched.Grant:
			p := g.processes[a.Client-1]
			g.after(handOver, func() {
				p.open, p.revoked, p.epoch, p.requested, p.idleFrom, p.latency, p.stays = true, false, a.Epoch, false, g.now, a.Latency, a.Beside
				p.concurrent, p.shared = a.Concurrent, a.Shared
			})
		case sched.Revoke:
			p := g.processes[a.Client-1]
			g.after(handOver, func() {
				if p.epoch == a.Epoch {
					p.open, p.paused, p.revoked, p.drain = false, false, true, aheadWork
				}
			})
		case sched.Pause:
			p := g.processes[a.Client-1]
			p.open, p.paused = false, true
		case sched.Resume:
			p := g.processes[a.Client-1]
			p.open, p.paused = true, false
		case sched.Notice:
			p := g.processes[a.Client-1]
			p.leaves, p.patient, p.present = a.Leave, a.Patient, a.Bound
		case sched.Slice:
			p := g.processes[a.Client-1]
			p.slices++
			if p.slice = cmp.Or(p.own, a.D); p.fixed {
				p.slice = 0
			}
		case sched.ModeChosen:
			if a.Mode == sched.Concurrent { // as Page.Share
				for _, p := range g.processes {
					p.concurrent, p.latency = true, false
				}
			}
			g.modes++
			g.reasons = append(g.reasons, fmt.Sprintf("%v %v: %v", time.Duration(g.now)-time.Hour, a.Mode, a.Cause))
		}
	}
	g.due, g.isDue = g.core.Deadline()
	// TestSim and TestAnyHistory check after each event; here it would take a third of the time.
	if g.steps++; g.steps%checkEvery != 0 {
		return
	}
	if err := g.core.Check(); err != nil {
		g.t.Fatalf("at the latest after %v: %v", base.Text(ev), err)
	}
}

func (g *gpuModel) release(p *process, why sched.Reason) {
	r := sched.Release{Client: p.id, Epoch: p.epoch, Reason: why, Calls: p.granted}
	p.open, p.revoked, p.epoch, p.drain, p.granted = false, false, 0, 0, 0
	g.step(r)
}

func (g *gpuModel) report() {
	g.after(reportTime, g.report)
	for _, p := range g.processes {
		ev := timeslice.Utilization{Client: p.id, Samples: int(p.openFor / (5 * time.Millisecond)), Calls: p.calls}
		ev.Busy = min(int(p.busyFor/(5*time.Millisecond)), ev.Samples)
		if p.openFor > 0 && p.busyFor == p.openFor {
			ev.Busy = ev.Samples
		}
		if ev.Samples == 0 {
			continue
		}
		p.calls = 0
		p.openFor -= time.Duration(ev.Samples) * 5 * time.Millisecond // the rest is of the next report
		p.busyFor = max(p.busyFor-time.Duration(ev.Busy)*5*time.Millisecond, 0)
		if p.lies != nil {
			p.lies(&ev)
		}
		g.step(ev)
	}
}

// settle does what is due now: bursts that begin, turns that are given back.
func (g *gpuModel) settle() {
	for _, p := range g.processes {
		if !p.attached {
			continue
		}
		if !p.wants() && g.now >= p.wakes {
			p.kernels, p.began = p.burst, g.now
		}
		switch {
		case p.epoch != 0 && p.revoked && !p.running():
			g.release(p, sched.Revoked)
		case p.open && !p.wants() && !p.stays && (p.leaves || p.latency) && g.now.Sub(p.idleFrom) >= p.idleTime():
			g.release(p, sched.Idle)
		}
		if p.wants() && p.epoch == 0 && !p.requested {
			p.requested = true
			g.step(sched.Request{Client: p.id})
		}
	}
}

// schedule gives the GPU to the next process if the slice is over or unused.
func (g *gpuModel) schedule() {
	now := g.processes[g.current].together
	runs := slices.ContainsFunc(now, (*process).running)
	if runs && g.now < g.sliceEnd {
		return
	}
	next := g.current
	for i := 1; i < len(g.processes); i++ {
		if o := (g.current + i) % len(g.processes); g.processes[o].running() && !slices.Contains(now, g.processes[o]) {
			next = o
			break
		}
	}
	switch {
	case next != g.current:
		g.switching = g.now.Add(switchCost)
	case runs:
		g.switching = g.now
	default:
		return
	}
	g.current = next
	g.sliceEnd = g.switching.Add(cmp.Or(g.processes[next].slice, timeslice.DriverSlice))
}

// tick lets the core do what is due. It fails if the core wants so many ticks in no time that a daemon
// would do nothing else.
func (g *gpuModel) tick() {
	if g.ticks++; g.now.Sub(g.ticksFrom) > time.Millisecond {
		g.ticks, g.ticksFrom = 0, g.now
	}
	if g.ticks > mostTicks {
		g.t.Errorf("the core wants %d ticks in %v", g.ticks, g.now.Sub(g.ticksFrom))
	}
	g.step(sched.Tick{})
}

// run lets time pass.
func (g *gpuModel) run(d time.Duration) {
	for end := g.now.Add(d); g.now < end; {
		for len(g.later) > 0 && g.later[0].at <= g.now {
			g.later.pop().do()
		}
		g.settle()
		if g.isDue && g.due <= g.now {
			if g.tick(); g.t.Failed() {
				return
			}
			continue
		}
		g.schedule()
		next := end
		until := func(at base.Time) {
			if at > g.now {
				next = min(next, at)
			}
		}
		if g.isDue {
			until(g.due)
		}
		until(g.later[0].at)
		for _, q := range g.processes {
			until(q.wakes)
			if q.open && !q.wants() {
				until(q.idleFrom.Add(q.idleTime()))
			}
		}
		now := g.runs[:0]
		for _, p := range g.processes[g.current].together {
			if p.running() {
				now = append(now, p)
			}
		}
		g.runs = now
		if g.now < g.switching {
			if len(now) > 0 {
				until(g.switching)
			}
			now = nil
		}
		for _, p := range now {
			if p.left == 0 {
				p.kernels--
				p.left = p.kernel
				p.calls++
				p.granted++
			}
			until(g.now.Add(p.left))
			until(g.sliceEnd)
		}
		passed := next.Sub(g.now)
		for _, q := range g.processes {
			if q.looks() {
				q.openFor += passed
				if q.wants() {
					q.busyFor += passed
				}
			}
		}
		g.now = next
		for _, p := range now {
			p.left -= passed
			p.work += passed
			if p.revoked {
				p.drain -= passed
			}
			if !p.wants() {
				p.longest = max(p.longest, g.now.Sub(p.began))
				p.wakes, p.idleFrom = g.now.Add(p.gap), g.now
				if p.gap == 0 { // it keeps work ahead of the GPU
					p.kernels, p.began = p.burst, g.now
				}
			}
		}
	}
}

// got returns what each process gets of the GPU over a time, and of what it gets alone.
func (g *gpuModel) got(d time.Duration) (parts, ofAlone []float64) {
	for _, p := range g.processes {
		p.work, p.longest = 0, 0
	}
	g.run(d)
	for _, p := range g.processes {
		part := p.work.Seconds() / d.Seconds()
		parts = append(parts, part)
		ofAlone = append(ofAlone, part/p.alone())
	}
	return
}

func sum(of []float64) (s float64) {
	for _, x := range of {
		s += x
	}
	return
}

func several(n int, p program) (all []process) {
	for range n {
		all = append(all, process{program: p})
	}
	return
}

// group returns the members of an overlap group.
func group(n int, p program) (all []process) {
	for i := range n {
		all = append(all, process{program: p, name: fmt.Sprint("member ", i), share: sched.Share{Overlap: "g"}})
	}
	return
}

var mixes = []struct {
	name      string
	processes []process
}{
	{"two that keep the GPU busy", several(2, gemm)},
	{"eight that keep the GPU busy", several(8, gemm)},
	{"two that wait for ten kernels", several(2, gemmSync)},
	{"three language models", several(3, decoder)},
	{"a language model beside products", []process{{program: gemm}, {program: decoder}}},
	{"training beside products", []process{{program: gemm}, {program: training}}},
	{"one that waits for each kernel beside products", []process{{program: gemm}, {program: syncing}}},
	{"one that waits for each kernel beside two", []process{{program: gemm}, {program: gemmSync}, {program: syncing}}},
	{"requests beside training", []process{{program: training}, {program: smallWork}}},
	{"a group of language models beside products", append(group(3, decoder), process{program: gemm})},
	{"a group of language models beside another one", append(group(3, decoder), process{program: decoder})},
	{"a group of language models beside training", append(group(2, decoder), process{program: training})},
	{"a group that keeps the GPU busy beside products", append(group(2, gemm), process{program: gemm})},
	{"a group beside two others", append(group(2, decoder), process{program: training}, process{program: gemmSync})},
	{"one comes later", []process{{program: gemm}, {program: gemm}, {program: decoder, starts: 60 * time.Second}}},
}

// TestAutoGivesTheMost compares the modes: for each mix auto gives as much as the better of
// turns and the driver's slices, and nobody much less than by either.
func TestAutoGivesTheMost(t *testing.T) {
	const windows = 10
	for _, mix := range mixes {
		t.Run(mix.name, func(t *testing.T) {
			t.Parallel()
			got := map[sched.Mode][]float64{}
			var least []float64 // in the worst ten seconds
			for _, mode := range []sched.Mode{sched.Exclusive, sched.Concurrent, sched.Auto} {
				g := newGPUModel(t, mode, mix.processes...)
				g.run(20 * time.Second)
				got[mode] = make([]float64, len(g.processes))
				least = slices.Repeat([]float64{2}, len(g.processes))
				for range windows {
					_, part := g.got(10 * time.Second)
					for i := range part {
						got[mode][i] += part[i] / windows
						if g.now > base.Time(time.Hour+g.processes[i].starts+10*time.Second) {
							least[i] = min(least[i], part[i])
						}
					}
				}
				if mode != sched.Auto {
					continue
				}
				for _, p := range g.processes {
					if p.slices > 20+10*windows {
						t.Errorf("%s was told %d slices in %d s", p.name, p.slices, 20+10*windows)
					}
				}
				if g.modes > 20 {
					t.Errorf("the way was changed %d times: %q", g.modes, g.reasons)
				}
				t.Logf("%q", g.reasons)
			}
			turns, driver, auto := sum(got[sched.Exclusive]), sum(got[sched.Concurrent]), sum(got[sched.Auto])
			t.Logf("of what each gets alone: turns %.3f, the driver %.3f, auto %.3f: %.3f", turns, driver, auto, got[sched.Auto])
			if auto < 0.98*max(turns, driver) {
				t.Errorf("auto gives %.3f, turns %.3f, the driver %.3f", auto, turns, driver)
			}
			for i, part := range got[sched.Auto] {
				worse := min(got[sched.Concurrent][i], got[sched.Exclusive][i])
				if part < 0.9*worse {
					t.Errorf("process %d gets %.3f, by turns and by the driver alone at least %.3f", i, part, worse)
				}
				if least[i] < worse/2 {
					t.Errorf("process %d gets %.3f in its worst ten seconds, by turns and by the driver alone at least %.3f", i, least[i], worse)
				}
			}
		})
	}
}

// Parts hold within 3 points, by slices or, where slices cannot, by turns.
func TestPartsHoldInSlices(t *testing.T) {
	request := func(n int) sched.Share { return sched.Share{Request: n} }
	weight := func(n int) sched.Share { return sched.Share{Weight: n} }
	for _, test := range []struct {
		name      string
		processes []process
		want      []float64
	}{
		{"requests 70 and 30", []process{{program: gemm, share: request(70)}, {program: gemm, share: request(30)}}, []float64{0.7, 0.3}},
		{"request 60 beside one without", []process{{program: gemm, share: request(60)}, {program: gemm}}, []float64{0.8, 0.2}},
		{"weights 1, 2, 7", []process{{program: gemm, share: weight(10)}, {program: gemm, share: weight(20)}, {program: gemm, share: weight(70)}}, []float64{0.1, 0.2, 0.7}},
		{"75 that waits for ten kernels", []process{{program: gemmSync, share: request(75)}, {program: gemmSync, share: request(25)}}, []float64{0.75, 0.25}},
		{"75 that waits for each kernel", []process{{program: syncing, share: request(75)}, {program: gemm, share: request(25)}}, []float64{0.75, 0.25}},
		{"a tenant of two processes", []process{{program: gemm, name: "a", share: weight(100)}, {program: gemm, name: "a", share: weight(100)}, {program: gemm, name: "b", share: weight(200)}}, []float64{1. / 6, 1. / 6, 2. / 3}},
		{"a group beside one", []process{{program: gemm, share: sched.Share{Overlap: "g"}}, {program: gemm}}, []float64{0.5, 0.5}},
		{"a group of weight 3", []process{{program: gemm, share: sched.Share{Overlap: "g", Weight: 300}}, {program: gemm}}, []float64{0.75, 0.25}},
		{"a group of request 20", []process{{program: gemm, share: sched.Share{Overlap: "g", Request: 20}}, {program: gemm, share: request(80)}}, []float64{0.2, 0.8}},
		{"a language model that wants less than its part", []process{{program: decoder, share: request(60)}, {program: gemm}}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			g := newGPUModel(t, sched.Auto, test.processes...)
			g.run(60 * time.Second)
			parts, ofAlone := g.got(60 * time.Second)
			t.Logf("%.3f, of alone %.3f: %q", parts, ofAlone, g.reasons)
			all := sum(parts)
			if all < 0.9 {
				t.Errorf("all get %.3f of the GPU", all)
			}
			for i, want := range test.want {
				if math.Abs(parts[i]/all-want) > 0.03 {
					t.Errorf("process %d has %.3f of what all have, want %.3f", i, parts[i]/all, want)
				}
			}
		})
	}
}

// Where all of the GPU is promised, a tenant without a promise keeps nobody from what he was promised.
func TestAllIsPromised(t *testing.T) {
	for _, request := range []int{40, 49, 50} {
		share := sched.Share{Request: request}
		g := newGPUModel(t, sched.Auto, process{program: gemm, share: share}, process{program: decoder, share: share}, process{program: gemm})
		g.run(60 * time.Second)
		if parts, _ := g.got(60 * time.Second); parts[0] < 0.42 || parts[1] < 0.19 { // which the driver's slices give a decoder
			t.Errorf("with requests of %d they get %.3f: %q", request, parts, g.reasons)
		}
	}
}

// A tenant that lies about its work takes nothing from an honest one: that has as much as
// beside an honest tenant, or as the driver alone gives it.
func TestLiesGainNothing(t *testing.T) {
	lies := map[string]func(*timeslice.Utilization){
		"idle": func(u *timeslice.Utilization) { u.Busy = 0 },
		"slow": func(u *timeslice.Utilization) { u.Calls /= 10 },
		"fast": func(u *timeslice.Utilization) { u.Calls *= 10 },
		"slower, slower": func() func(*timeslice.Utilization) {
			n := 1
			return func(u *timeslice.Utilization) { n++; u.Calls /= n }
		}(),
		"up and down": func() func(*timeslice.Utilization) {
			n := 0
			return func(u *timeslice.Utilization) { n++; u.Calls *= 1 + 9*(n/20%2) }
		}(),
		"out of all range": func(u *timeslice.Utilization) { u.Samples, u.Busy, u.Calls = 1_000_000, 1_000_000, math.MaxUint32 },
		"silent":           func(u *timeslice.Utilization) { u.Calls = 0 },
	}
	for _, honest := range []program{gemm, decoder} {
		run := func(mode sched.Mode, share sched.Share, lies func(*timeslice.Utilization)) float64 {
			g := newGPUModel(t, mode, process{program: honest, share: share}, process{program: gemm, share: share, lies: lies})
			g.run(20 * time.Second)
			_, got := g.got(60 * time.Second)
			return got[0]
		}
		for _, share := range []sched.Share{{}, {Request: 50}} {
			least := min(run(sched.Auto, share, nil), run(sched.Concurrent, share, nil), run(sched.Exclusive, share, nil))
			for name, lie := range lies {
				if got := run(sched.Auto, share, lie); got < 0.95*least {
					t.Errorf("beside one that says %q, %v, an honest one gets %.3f of what it gets alone, want %.3f", name, share, got, least)
				}
			}
		}
	}
}

// A driver that remembers slices and ignores them is found out by what it gives: tenants
// take turns, which give more. So is a program that takes longer slices than it was given.
func TestSlicesThatDoNotHold(t *testing.T) {
	for name, processes := range map[string][]process{
		"ignored":      {{program: gemm, own: timeslice.DriverSlice}, {program: gemm, own: timeslice.DriverSlice}},
		"uneven parts": {{program: gemm, own: timeslice.DriverSlice, share: sched.Share{Request: 70}}, {program: gemm, own: timeslice.DriverSlice}},
		"longer":       {{program: gemm}, {program: gemm, own: time.Second}},
	} {
		g := newGPUModel(t, sched.Auto, processes...)
		g.run(60 * time.Second)
		turns := newGPUModel(t, sched.Exclusive, processes...)
		turns.run(60 * time.Second)
		_, got := g.got(60 * time.Second)
		_, want := turns.got(60 * time.Second)
		t.Logf("%s: %.3f, by turns %.3f: %q", name, got, want, g.reasons)
		for i := range want {
			if math.Abs(got[i]-want[i]) > 0.07 {
				t.Errorf("%s: process %d gets %.3f of what it gets alone, by turns %.3f", name, i, got[i], want[i])
			}
		}
	}
}

// A latency tenant is served within microseconds whoever has the GPU, and the others have
// what it leaves.
func TestLatencyTenantBesideOthers(t *testing.T) {
	latency := process{program: requests, share: sched.Share{Priority: sched.Latency}}
	alone := newGPUModel(t, sched.Auto, latency)
	alone.run(10 * time.Second)
	alone.got(10 * time.Second)
	long := program{kernel: time.Second, burst: 1}
	for _, test := range []struct {
		name   string
		others []process
		least  float64 // that the others have together, of what one gets alone
	}{
		{"one", several(1, gemm), 0.85},
		{"three", several(3, gemm), 0.85},
		{"eight", several(8, gemm), 0.85},
		{"kernels of a second", several(2, long), 0.85},
		{"uneven parts", []process{{program: gemm, share: sched.Share{Request: 70}}, {program: gemm}}, 0.85},
		{"three that leave gaps", several(3, decoder), 1.04}, // 1.15 where their phases are kind to each other; by turns 0.86
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			g := newGPUModel(t, sched.Auto, append([]process{latency}, test.others...)...)
			g.run(20 * time.Second)
			_, got := g.got(60 * time.Second)
			t.Logf("a request %v, alone %v; the others %.3f: %q", g.processes[0].longest, alone.processes[0].longest, got[1:], g.reasons)
			// The model's change from one process to another costs more than that of the GPU
			// in the middle of a kernel; it happens once, or for each that runs at once.
			bound := alone.processes[0].longest + switchCost + 2*sched.LatencySlice
			if test.least > 1 {
				bound += 2 * (switchCost + sched.CrowdedSlice)
			}
			if len(test.others) == 2 && test.others[0].share.Request > 0 {
				bound += switchCost // at a hand-over
			}
			if g.processes[0].longest > bound {
				t.Errorf("a request took %v, alone %v", g.processes[0].longest, alone.processes[0].longest)
			}
			if sum(got[1:]) < test.least {
				t.Errorf("the others get %.3f of what one gets alone", got[1:])
			}
			for i, p := range test.others[:len(test.others)-1] {
				want := 1.
				if p.share.Request > 0 {
					want = 5.67 // 70 and half of the rest, to the other half
				}
				if math.Abs(got[1+i]/got[2+i]/want-1) > 0.1 {
					t.Errorf("the others get %.3f: one %.2f times the next, want %.2f", got[1:], got[1+i]/got[2+i], want)
				}
			}
		})
	}
}

// Latency tenants that saturate the GPU have half of it together, in whichever way it is shared.
func TestGreedyLatencyTenants(t *testing.T) {
	greedy := process{program: gemm, share: sched.Share{Priority: sched.Latency}}
	limited := process{program: gemm, share: sched.Share{Limit: 25}}
	for _, test := range []struct {
		name   string
		greedy int
		others []process
		least  float64 // hand-overs take some of their time
	}{
		{"one beside one", 1, several(1, gemm), 0.48},
		{"one beside three", 1, several(3, gemm), 0.45},
		{"two beside one", 2, several(1, gemm), 0.44},
		{"two beside two", 2, several(2, gemm), 0.43},
		{"one beside a limit and another", 1, []process{limited, {program: gemm}}, 0.45},
		{"one beside a limit and a cohort", 1, append(several(2, gemm), limited), 0.45},
		{"one beside three that leave gaps", 1, several(3, decoder), 0.35}, // which have the GPU at the same time
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var all []process
			for range test.greedy {
				all = append(all, greedy)
			}
			g := newGPUModel(t, sched.Auto, append(all, test.others...)...)
			g.run(20 * time.Second)
			for range 5 {
				got, _ := g.got(30 * time.Second)
				t.Logf("%.3f: %q", got, g.reasons)
				if latency := sum(got[:test.greedy]); latency > 0.51 || latency < test.least {
					t.Errorf("latency tenants that saturate the GPU have %.3f of it, want %.2f to 0.51: %.3f", latency, test.least, got)
				}
				if i := test.greedy - 1; math.Abs(got[i]-got[0]) > 0.01 {
					t.Errorf("they do not have the same: %.3f", got[:test.greedy])
				}
			}
		})
	}
}
