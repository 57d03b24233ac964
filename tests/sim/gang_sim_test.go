// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
)

// ganged simulates processes on several GPUs that share gangs. A process has one
// thread that makes calls, and one stream: calls are queued, some ahead of the
// GPU, and run in order. The ranks of a job make the same calls; some are
// collectives, which run when all ranks have launched them and come to them. Ranks call
// collectives from a millisecond after all of them have come to the scheduler: they meet
// before, as those of NCCL make a communicator, which takes longer. A drain that takes
// longer than 10 ms is cut: what is left of the work goes on under the next grant.
type ganged struct {
	t      testing.TB
	rng    *rand.Rand
	now    base.Time
	events events
	seq    uint64
	calm   bool

	node      *sched.Node
	cores     []*sched.GPU
	persisted []sched.Persist // by GPU
	life      int             // of the scheduler; 0: it is down
	lives     int
	procs     map[base.ClientID]*rank
	last      base.ClientID
	jobs      []*job

	fences, steps, grants, revokes, deaths, crashes, adopted, drained int
	leaps, cuts, stops, preempted                                     int
	leapt                                                             base.Time              // the latest
	away                                                              time.Duration          // the sum of them
	leapOdds                                                          int                    // one in so many revokes of a gang meets a suspension; 0: none
	wait                                                              map[bool]time.Duration // the longest, by: is a gang's
	used                                                              []time.Duration        // time the GPU worked, by GPU
	err                                                               error
}

// job is a tenant: a gang with a rank on each of its GPUs, or one process.
type job struct {
	g     *ganged
	name  string
	gpus  []int
	ranks []*rank
	seed  uint64
}

type rank struct {
	j            *job
	gpu          int
	id           base.ClientID
	dead, fenced bool
	came         base.Time // to a scheduler; 0: it did not

	word         base.Epoch // of its page
	local, drain base.Epoch // under which its gate is open; it drains
	released     base.Epoch
	up, down     base.Time
	gone         bool   // it is dead, and that is known
	life         int    // of the scheduler to which it is connected; 0: to none
	made         int    // calls made
	done         int    // and ended
	work         *work  // what runs; nil: nothing
	off          bool   // its channels are off, and its work is not finished
	saidIn       [2]int // the life of the scheduler, and the connection, in which it said so
	waits        bool
	since        base.Time
	thinks       bool
	conn         int       // which connection
	stopped      base.Time // by SIGSTOP, until then
}

const (
	gangQuantum = 20 * time.Millisecond
	gangGrace   = 150 * time.Millisecond
	gangAhead   = 6
	gangLate    = 10 * time.Millisecond // a drain that takes longer is cut
)

// work is a call that runs, or one of each rank that run together.
type work struct {
	of    []*rank
	left  time.Duration // when it began to run
	since base.Time     // it runs; 0: it does not
	runs  int           // how often it began to
}

func (g *ganged) at(t base.Time, do func()) {
	g.seq++
	g.events.push(event{t, g.seq, do})
}
func (g *ganged) after(d time.Duration, do func()) { g.at(g.now.Add(d), do) }
func (g *ganged) dur(lo, hi time.Duration) time.Duration {
	return lo + time.Duration(g.rng.Int64N(int64(hi-lo)+1))
}

func (g *ganged) fail(format string, args ...any) {
	if g.err == nil {
		g.err = fmt.Errorf("at %v: %s", time.Duration(g.now), fmt.Sprintf(format, args...))
	}
}

// Calls.

func (j *job) collective(i int) bool {
	return len(j.gpus) > 1 && (uint64(i)*2654435761+j.seed)%3 == 0
}

func (j *job) met() bool {
	return !slices.ContainsFunc(j.ranks, func(r *rank) bool { return r.came == 0 || j.g.now < r.came.Add(time.Millisecond) })
}

// think lets the thread make calls until its gate is shut or it is far ahead.
func (r *rank) think() {
	g := r.j.g
	if r.dead || r.thinks || r.made-r.done >= gangAhead {
		return
	}
	if r.j.collective(r.made) && !r.j.met() {
		r.thinks = true
		g.after(50*time.Microsecond, func() { r.thinks = false; r.think() })
		return
	}
	if g.now < r.stopped {
		g.at(r.stopped, r.think)
		return
	}
	if r.local == 0 || r.word != r.local {
		if !r.waits {
			r.waits, r.since = true, g.now
			r.send(sched.Request{Client: r.id})
		}
		return
	}
	if r.waits {
		r.waits = false
		long := len(r.j.gpus) > 1
		g.wait[long] = max(g.wait[long], g.now.Sub(r.since))
	}
	r.call()
}

// call makes one call; the next comes after a while.
func (r *rank) call() {
	g := r.j.g
	r.made++
	r.thinks = true
	pause := g.dur(5*time.Microsecond, 50*time.Microsecond)
	if g.rng.IntN(100) == 0 {
		pause = g.dur(0, 3*time.Millisecond)
	}
	g.after(pause, func() { r.thinks = false; r.think() })
	r.run()
}

// run has the stream go on.
func (r *rank) run() {
	g := r.j.g
	if r.dead || r.off || r.work != nil || r.done == r.made {
		return
	}
	if r.j.collective(r.done) {
		for _, o := range r.j.ranks {
			if o.dead || o.off || o.done != r.done || o.made == o.done || o.work != nil {
				return // the last one that comes begins it
			}
		}
		g.begin(r.j.ranks, g.dur(50*time.Microsecond, 500*time.Microsecond))
		return
	}
	g.begin([]*rank{r}, g.dur(100*time.Microsecond, 2*time.Millisecond))
}

func (g *ganged) begin(of []*rank, d time.Duration) {
	w := &work{of: of, left: d}
	for _, r := range of {
		r.work = w
		g.used[r.gpu] += d
	}
	g.resume(w)
}

// resume has work go on, if nobody's part of it is off.
func (g *ganged) resume(w *work) {
	if w == nil || w.since != 0 || slices.ContainsFunc(w.of, func(r *rank) bool { return r.off }) {
		return
	}
	w.since = g.now
	w.runs++
	runs := w.runs
	g.after(w.left, func() {
		if w.since == 0 || w.runs != runs {
			return
		}
		for _, r := range w.of {
			if r.dead {
				continue
			}
			r.work = nil
			r.done++
			r.drained()
			r.run()
			r.think()
		}
	})
}

// cutLater ends the drain under an epoch if it takes for too long.
func (r *rank) cutLater(epoch base.Epoch) {
	g := r.j.g
	var look func()
	look = func() {
		switch {
		case r.dead || r.drain != epoch || r.made == r.done:
		case g.now < r.stopped:
			g.at(r.stopped, look)
		case r.life == 0: // no grant would bring the work back
			g.after(gangLate, look)
		default:
			g.preempted++
			r.off = true
			if w := r.work; w != nil && w.since != 0 {
				w.left = max(w.left-g.now.Sub(w.since), 0) // the machine may have been suspended
				w.since = 0
			}
			r.drained()
		}
	}
	g.after(gangLate, look)
}

// on has its channels go on.
func (r *rank) on() {
	if r.off {
		r.off = false
		r.j.g.resume(r.work)
		r.run()
	}
}

// drained releases once nothing runs.
func (r *rank) drained() {
	if r.drain == 0 || r.made != r.done && !r.off {
		return
	}
	r.released, r.drain = r.drain, 0
	if r.off {
		r.saidIn = [2]int{r.life, r.conn}
	}
	r.send(sched.Release{Client: r.id, Epoch: r.released, Reason: sched.Revoked, Preempted: r.off})
	if r.waits {
		r.send(sched.Request{Client: r.id})
	}
}

// Frames.

func (r *rank) send(ev base.Event) {
	g := r.j.g
	if r.gone || r.life == 0 {
		return
	}
	r.up = max(r.up, g.now.Add(g.dur(10*time.Microsecond, 100*time.Microsecond)))
	life := r.life
	g.at(r.up, func() {
		if g.life == life { // else what was sent is lost
			r.came = cmp.Or(r.came, g.now)
			g.step(r.gpu, ev)
		}
	})
}

func (r *rank) receive(do func()) {
	g := r.j.g
	r.down = max(r.down, g.now.Add(g.dur(10*time.Microsecond, 100*time.Microsecond)))
	life, conn := g.life, r.conn
	var arrive func()
	arrive = func() {
		switch {
		case r.dead || r.life != life || r.conn != conn:
		case g.now < r.stopped:
			g.at(r.stopped, arrive)
		default:
			do()
		}
	}
	g.at(r.down, arrive)
}

func (g *ganged) step(gpu int, ev base.Event) {
	for todo := g.one(gpu, ev); len(todo) > 0; todo = todo[1:] {
		i, _ := strconv.Atoi(todo[0])
		todo = append(todo, g.one(i, sched.GangMoved{})...)
	}
	if err := g.node.Check(); err != nil {
		g.fail("after %v: %v", base.Text(ev), err)
	}
}

// one returns the GPUs that are to be stepped next.
func (g *ganged) one(gpu int, ev base.Event) (todo []string) {
	acts := g.cores[gpu].Step(g.now, ev)
	if err := g.cores[gpu].Check(); err != nil {
		g.fail("GPU %d after %v: %v", gpu, base.Text(ev), err)
	}
	if ev, ok := ev.(sched.Attach); ok && ev.Held != 0 {
		r := g.procs[ev.Client]
		if len(acts) > 0 && acts[0] == (sched.Adopt{Client: r.id, Epoch: ev.Held}) {
			g.adopted++
			r.word = ev.Held
			r.receive(r.think)
		} else { // its new page says that it is to drain
			g.drained++
			r.receive(func() {
				if r.local == ev.Held {
					r.word = 0
					r.revoked(ev.Held)
				}
			})
		}
	}
	for _, a := range acts {
		switch a := a.(type) {
		case sched.Persist:
			g.persisted[gpu] = a
		case sched.Grant:
			g.grants++
			g.alone(gpu, a.Client)
			r := g.procs[a.Client]
			r.word = a.Epoch
			r.receive(func() {
				if r.word == a.Epoch && r.drain == 0 {
					r.local = a.Epoch
					r.on()
					r.think()
				}
			})
		case sched.Revoke:
			g.revokes++
			r := g.procs[a.Client]
			r.word = 0
			r.receive(func() { r.revoked(a.Epoch) })
			if g.leapOdds != 0 && len(r.j.gpus) > 1 && g.rng.IntN(g.leapOdds) == 0 {
				g.after(g.dur(0, time.Millisecond), g.leap)
			}
		case sched.StepOne:
			g.steps++
			g.alone(gpu, a.Client)
			r := g.procs[a.Client]
			if r.off && r.saidIn == [2]int{r.life, r.conn} {
				g.fail("client %d of %s is to make a call, and its channels are off", r.id, r.j.name)
			}
			r.receive(func() {
				r.drain = a.Epoch
				if r.waits && !r.thinks && !r.off {
					r.waits = false
					r.call()
				}
				r.drained()
				r.cutLater(a.Epoch)
			})
		case sched.Close:
			g.procs[a.Client].word = 0
		case sched.StepGPU:
			todo = append(todo, a.GPU)
		case sched.Fence:
			g.fences++
			if g.calm {
				g.fail("%v: %s", base.Text(a), g.procs[a.Client].j)
			}
			g.procs[a.Client].fenced = true
			g.procs[a.Client].j.end() // what the job's owner does
		}
	}
	return todo
}

func (r *rank) revoked(epoch base.Epoch) {
	r.local, r.drain = 0, epoch
	r.drained()
	r.cutLater(epoch)
}

// alone fails if others than ranks of the same job have work on the GPU.
func (g *ganged) alone(gpu int, id base.ClientID) {
	r := g.procs[id]
	for _, o := range g.procs {
		if o != r && !o.dead && !o.fenced && o.gpu == gpu && o.j != r.j && (o.local != 0 && o.word == o.local || o.drain != 0 || o.made != o.done && !o.off) {
			g.fail("client %d of %s is granted GPU %d, while %d of %s is on it: %+v", id, r.j.name, gpu, o.id, o.j.name, *o)
		}
	}
}

func (j *job) String() string {
	s := j.name
	for _, r := range j.ranks {
		s += fmt.Sprintf("; client %d made %d, done %d, busy %t, waits %t, thinks %t, gate %d, drains %d, next is collective %t", r.id, r.made, r.done, r.work != nil, r.waits, r.thinks, r.local, r.drain, j.collective(r.done))
	}
	return s
}

// Life.

func (j *job) start() {
	g := j.g
	j.ranks = nil
	j.seed = g.rng.Uint64() % 1000
	for _, gpu := range j.gpus {
		g.last++
		r := &rank{j: j, gpu: gpu, id: g.last, life: g.life, waits: true, since: g.now}
		g.procs[r.id] = r
		j.ranks = append(j.ranks, r)
	}
	for _, r := range j.ranks {
		r.attach()
	}
}

func (j *job) share() (s sched.Share) {
	if len(j.gpus) > 1 {
		s.Gang = j.name
	}
	return s
}

func (r *rank) attach() {
	r.send(sched.Attach{Client: r.id, Tenant: r.j.name, Share: r.j.share(), Held: max(r.local, r.drain), Want: r.waits || r.off})
}

func (r *rank) die() {
	g := r.j.g
	if r.dead {
		return
	}
	g.deaths++
	r.send(sched.Lost{Client: r.id})
	r.dead, r.gone = true, true
	r.up = max(r.up, g.now.Add(g.dur(0, 3*time.Millisecond)))
	life := g.life
	g.at(r.up, func() {
		if life != 0 && g.life == life {
			g.step(r.gpu, sched.Gone{Client: r.id})
		}
	})
}

// leap suspends the machine: only the clock goes on. What was about to happen comes
// at once, before or after the scheduler looks at the clock; all else comes later.
func (g *ganged) leap() {
	g.leaps++
	d := g.dur(2*time.Second, time.Hour)
	soon := g.now.Add(g.dur(0, time.Millisecond))
	for i := range g.events {
		if g.events[i].at > soon {
			g.events[i].at = g.events[i].at.Add(d) // their order stays
		}
	}
	g.now = g.now.Add(d)
	g.leapt = g.now
	g.away += d
}

// cut ends a rank's connection; it connects again.
func (r *rank) cut() {
	g := r.j.g
	if r.dead || r.life == 0 {
		return
	}
	g.cuts++
	r.send(sched.Lost{Client: r.id})
	r.life, r.word = 0, 0
	r.conn++
	g.after(g.dur(0, 30*time.Millisecond), func() {
		if !r.dead && r.life == 0 && g.life != 0 {
			r.life = g.life
			r.up = max(r.up, g.now)
			r.attach()
		}
	})
}

// crash ends the scheduler. Who holds a GPU goes on, and connects again when the
// next one is there.
func (g *ganged) crash() {
	g.crashes++
	g.life = 0
	for _, r := range g.procs {
		r.life = 0
	}
	g.after(g.dur(0, 20*time.Millisecond), g.boot)
}

// boot starts a scheduler, with what the one before has persisted.
func (g *ganged) boot() {
	g.lives++
	g.life = g.lives
	g.node, g.cores = sched.NewNode(), nil
	for i, p := range g.persisted {
		g.cores = append(g.cores, sched.New(sched.Config{Quantum: gangQuantum, Grace: gangGrace, Node: g.node, GPU: strconv.Itoa(i), LastEpoch: p.Epoch}))
	}
	for i, p := range slices.Clone(g.persisted) {
		if p.Unrecorded {
			g.step(i, sched.RestoreUnknown{Epoch: p.Epoch})
		}
		for _, h := range p.Holders {
			if r := g.procs[h.Client]; r != nil && !r.dead {
				g.step(i, sched.Restore{Client: r.id, Epoch: h.Epoch, Tenant: r.j.name, Gang: r.j.share().Gang})
			}
		}
	}
	life := g.life
	for _, id := range slices.Sorted(maps.Keys(g.procs)) {
		r := g.procs[id]
		if r.dead {
			continue
		}
		g.after(g.dur(0, 5*time.Millisecond), func() {
			if !r.dead && g.life == life {
				r.life = life
				r.attach()
			}
		})
	}
}

// end kills what is left of a job, and starts it anew.
func (j *job) end() {
	alive := false
	for _, r := range j.ranks {
		alive = alive || !r.dead
		j.g.after(j.g.dur(0, 5*time.Millisecond), r.die)
	}
	if alive {
		ranks := j.ranks
		j.g.after(50*time.Millisecond, func() {
			if &j.ranks[0] == &ranks[0] {
				j.start()
			}
		})
	}
}

// fate kills a process now and then; its job may notice soon, late or never.
func (g *ganged) fate() {
	g.after(g.dur(0, 300*time.Millisecond), g.fate)
	j := g.jobs[g.rng.IntN(len(g.jobs))]
	if len(j.ranks) == 0 {
		return
	}
	r := j.ranks[g.rng.IntN(len(j.ranks))]
	switch g.rng.IntN(4) {
	case 0:
		r.cut()
		return
	case 1:
		g.stops++
		r.stopped = g.now.Add(g.dur(0, 2*gangGrace))
		return
	}
	r.die()
	if g.rng.IntN(2) == 0 || len(j.ranks) == 1 {
		j.end()
	} else {
		g.after(g.dur(0, 400*time.Millisecond), j.end)
	}
}

func (g *ganged) starvation() {
	g.after(10*time.Millisecond, g.starvation)
	bound := time.Duration(len(g.jobs)+2) * (2*gangQuantum + gangGrace)
	if g.calm {
		bound = time.Duration(len(g.jobs)+2) * 2 * gangQuantum
	}
	if g.crashes > 0 { // no turn ends meanwhile, they begin anew, and gangs gather
		bound = 2*bound + 1200*time.Millisecond
	}
	for _, j := range g.jobs {
		for _, r := range j.ranks {
			if since := max(r.since, g.leapt); r.waits && !r.dead && g.now >= r.stopped && g.now.Sub(max(since, r.stopped)) > bound {
				g.fail("%s, client %d waits for the GPU %d for %v, since %v", j.name, r.id, r.gpu, g.now.Sub(r.since), time.Duration(r.since))
			}
		}
	}
}

// gangFaults are what goes wrong; the zero value is nothing.
type gangFaults struct {
	fate    bool          // ranks die, are stopped and lose their connections
	crashes time.Duration // about so often the scheduler ends; 0: never
	leaps   int           // one in so many revokes of a rank meets a suspension of the machine; 0: none
	rush    bool          // all jobs start within 100 µs, not 20 ms
}

// runGanged runs jobs for some time of their own: suspensions do not count.
func runGanged(t testing.TB, seed uint64, faults gangFaults, length time.Duration, jobs ...[]int) *ganged {
	gpus, calm, crashes := 3, !faults.fate, faults.crashes
	g := &ganged{t: t, rng: rand.New(rand.NewPCG(seed, 7)), calm: calm, leapOdds: faults.leaps, procs: map[base.ClientID]*rank{},
		persisted: make([]sched.Persist, gpus), wait: map[bool]time.Duration{}, used: make([]time.Duration, gpus)}
	g.boot()
	starts := 20 * time.Millisecond
	if faults.rush {
		starts = 100 * time.Microsecond
	}
	for i, gpus := range jobs {
		j := &job{g: g, name: fmt.Sprintf("job%d%v", i, gpus), gpus: gpus}
		g.jobs = append(g.jobs, j)
		g.after(g.dur(0, starts), j.start)
	}
	if !calm {
		g.after(0, g.fate)
	}
	if crashes != 0 {
		var crash func()
		crash = func() {
			g.after(g.dur(crashes/2, crashes*3/2), crash)
			if g.life != 0 {
				g.crash()
			}
		}
		g.after(crashes, crash)
	}
	g.after(0, g.starvation)
	ended := false
	g.after(length, func() { ended = true })
	for g.err == nil && !ended {
		due, at := -1, g.events[0].at
		for i, c := range g.cores {
			if t, ok := c.Deadline(); ok && t < at && g.life != 0 {
				due, at = i, t
			}
		}
		g.now = max(g.now, at)
		if due >= 0 {
			g.step(due, sched.Tick{})
			continue
		}
		g.events.pop().do()
	}
	if g.err != nil {
		t.Fatalf("seed %d: %v", seed, g.err)
	}
	return g
}

func (g *ganged) String() string {
	awake := time.Duration(g.now) - g.away
	s := fmt.Sprintf("grants %d, revokes %d, steps %d, fences %d, deaths %d, stops %d, lost connections %d, suspensions %d, cut drains %d, crashes %d, adopted %d, drained after one %d; longest wait %v, of a gang %v; use of GPUs",
		g.grants, g.revokes, g.steps, g.fences, g.deaths, g.stops, g.cuts, g.leaps, g.preempted, g.crashes, g.adopted, g.drained, g.wait[false], g.wait[true])
	for _, u := range g.used {
		s += fmt.Sprintf(" %.0f %%", 100*u.Seconds()/awake.Seconds())
	}
	return s
}
