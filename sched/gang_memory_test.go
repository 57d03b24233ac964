// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// A model of jobs on several GPUs on which their memory does not fit together, in virtual time. A job works
// while all its ranks may, as one whose ranks wait for each other in collectives. It always wants to.

const gangPiece = 512 << 20 // moved between two reports

// gangJob is a job with so much memory on each GPU, GiB; 0: it has no rank there. With several ranks it is a gang.
type gangJob struct {
	bytes []uint64

	ranks  []*gangRank
	since  base.Time // it works; 0: it does not
	worked time.Duration
	gap    time.Duration // the longest time without work
	last   base.Time     // it worked then
}

// gangRank is a process of a job.
type gangRank struct {
	w                             *gangModel
	job                           *gangJob
	gpu                           int
	id                            base.ClientID
	resident, away, room, in, out uint64
	asked, moving, open, draining bool
	leaves, idle                  bool // its page says so; it makes no calls
	epoch                         base.Epoch
}

// gangModel is one run.
type gangModel struct {
	t        *testing.T
	now      base.Time
	queue    eventHeap
	seq      int
	capacity uint64
	cores    []*GPU
	node     *Node
	jobs     []*gangJob
	ranks    map[base.ClientID]*gangRank
	ticks    []base.Time
	moved    []time.Duration // by GPU: what moving in took
}

func newGangModel(t *testing.T, gpus int, capacity uint64, cfg Config, jobs ...[]uint64) *gangModel {
	t.Helper()
	w := &gangModel{t: t, capacity: capacity, node: NewNode(), ranks: map[base.ClientID]*gangRank{}, ticks: make([]base.Time, gpus), moved: make([]time.Duration, gpus)}
	for i := range gpus {
		cfg.Node, cfg.GPU, cfg.Memory = w.node, strconv.Itoa(i), residency.Config{Swap: true, Capacity: capacity, MoveUnit: gangPiece}
		w.cores = append(w.cores, New(cfg))
	}
	for i, bytes := range jobs {
		j, share := &gangJob{bytes: bytes}, Share{}
		w.jobs = append(w.jobs, j)
		if on := slices.DeleteFunc(slices.Clone(bytes), func(n uint64) bool { return n == 0 }); len(on) > 1 {
			share.Gang = fmt.Sprint("g", i)
		}
		for gpu, n := range j.bytes {
			if n *= oneGiB; n == 0 {
				continue
			}
			r := &gangRank{w: w, job: j, gpu: gpu, id: base.ClientID(len(w.ranks) + 1), away: n}
			j.ranks, w.ranks[r.id] = append(j.ranks, r), r
			w.step(gpu, Attach{Client: r.id, Tenant: fmt.Sprint("t", i), Share: share, CanMove: true})
			w.step(gpu, residency.Reserve{Client: r.id, Total: n, Least: n})
			r.report(false)
			r.send(Request{r.id})
		}
	}
	return w
}

func (w *gangModel) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, modelEvent{w.now.Add(d), w.seq, do})
}

// run goes on for so long.
func (w *gangModel) run(d time.Duration) {
	end := w.now.Add(d)
	for n := 0; len(w.queue) > 0 && w.queue[0].at <= end; n++ {
		if n > 3_000_000 {
			w.t.Fatalf("at %v it does not get on", time.Duration(w.now))
		}
		e := heap.Pop(&w.queue).(modelEvent)
		w.now = e.at
		e.do()
	}
	w.now = end
	for _, j := range w.jobs {
		j.look()
		if j.since == 0 {
			j.gap = max(j.gap, w.now.Sub(j.last))
		}
	}
}

// step gives an event to a GPU, and lets the gangs go on.
func (w *gangModel) step(gpu int, ev base.Event) {
	for todo := w.one(gpu, ev); len(todo) > 0; todo = todo[1:] {
		i, _ := strconv.Atoi(todo[0])
		todo = append(todo, w.one(i, GangMoved{})...)
	}
	if err := w.node.Check(); err != nil {
		w.t.Fatal(err)
	}
}

func (w *gangModel) one(gpu int, ev base.Event) (todo []string) {
	c := w.cores[gpu]
	for _, a := range slices.Clone(c.Step(w.now, ev)) {
		switch a := a.(type) {
		case Grant:
			r := w.ranks[a.Client]
			w.after(linkFrame, func() { r.granted(a.Epoch) })
		case StepOne:
			r := w.ranks[a.Client]
			w.after(linkFrame, func() { r.epoch = a.Epoch; r.release() })
		case Revoke:
			r := w.ranks[a.Client]
			w.after(linkFrame, func() { r.revoked(a.Epoch) })
		case Released:
			w.moved[gpu] += a.Moved
		case Notice:
			w.ranks[a.Client].leaves = a.Leave
		case residency.Room:
			r := w.ranks[a.Client]
			r.room = a.Bytes
			w.after(linkFrame, func() { r.asked = r.asked || a.Less; r.move() })
		case StepGPU:
			todo = append(todo, a.GPU)
		}
	}
	if err := c.Check(); err != nil {
		w.t.Fatalf("at %v, GPU %d, after %v: %v", time.Duration(w.now), gpu, base.Text(ev), err)
	}
	sum := uint64(0)
	for _, r := range w.ranks {
		if r.gpu == gpu {
			sum += r.resident
		}
	}
	if sum > w.capacity {
		w.t.Fatalf("at %v: %d MiB are on GPU %d", time.Duration(w.now), sum>>20, gpu)
	}
	if at, ok := c.Deadline(); ok && at != w.ticks[gpu] {
		w.ticks[gpu] = at
		w.after(at.Sub(w.now), func() {
			if w.ticks[gpu] == at {
				w.ticks[gpu] = 0
				w.step(gpu, Tick{})
			}
		})
	}
	return todo
}

// look notes whether the job works.
func (j *gangJob) look() {
	w := j.ranks[0].w
	works := !slices.ContainsFunc(j.ranks, func(r *gangRank) bool { return !r.open })
	if j.since != 0 {
		j.worked += w.now.Sub(j.since)
		j.since, j.last = 0, w.now
	} else if works {
		j.gap = max(j.gap, w.now.Sub(j.last))
	}
	if works {
		j.since = w.now
	}
}

func (r *gangRank) send(ev base.Event) { r.w.after(linkFrame, func() { r.w.step(r.gpu, ev) }) }

func (r *gangRank) granted(epoch base.Epoch) {
	r.epoch = epoch
	if r.away > 0 {
		r.move()
		return
	}
	r.open = true
	r.job.look()
	if r.idle {
		r.w.after(PatientIdle, r.pause)
	}
}

func (r *gangRank) revoked(epoch base.Epoch) {
	switch {
	case r.epoch != epoch:
	case r.open:
		r.open = false
		r.job.look()
		r.w.after(linkDrain, r.release)
	case r.moving:
		r.draining = true
	default:
		r.release()
	}
}

func (r *gangRank) release() {
	r.send(Release{Client: r.id, Epoch: r.epoch, Reason: Revoked})
	r.epoch, r.open, r.draining = 0, false, false
	if !r.idle {
		r.send(Request{r.id})
	}
	r.move()
}

// rest has the rank make no calls from now on, and pause has it give the GPU back, if it is to.
func (r *gangRank) rest() {
	r.idle = true
	r.w.after(PatientIdle, r.pause)
}

func (r *gangRank) pause() {
	if r.idle && r.leaves && r.open {
		r.send(Release{Client: r.id, Epoch: r.epoch, Reason: Idle})
		r.epoch, r.open = 0, false
		r.job.look()
		r.move()
	}
}

// goOn has it make calls again.
func (r *gangRank) goOn() {
	if r.idle = false; r.epoch == 0 {
		r.send(Request{r.id})
	}
}

func (r *gangRank) move() {
	switch {
	case r.moving:
	case r.epoch == 0 && r.resident > r.room:
		r.piece(min(gangPiece, r.resident-r.room), true)
	case r.epoch == 0 && r.asked:
		r.asked = false
		r.report(false)
	case r.epoch != 0 && !r.open && r.away > 0 && r.resident < r.room:
		r.piece(min(gangPiece, r.away, r.room-r.resident), false)
	}
}

func (r *gangRank) piece(n uint64, out bool) {
	r.moving = true
	r.w.after(time.Duration(n/linkRate), func() {
		r.moving = false
		if out {
			r.resident, r.away, r.out = r.resident-n, r.away+n, r.out+n
			r.report(false)
			r.move()
			return
		}
		r.resident, r.away, r.in = r.resident+n, r.away-n, r.in+n
		r.report(r.away == 0)
		switch {
		case r.draining:
			r.release()
		case r.away == 0:
			r.granted(r.epoch)
		default:
			r.move()
		}
	})
}

func (r *gangRank) report(ready bool) {
	r.send(residency.Moved{Client: r.id, Epoch: r.epoch, Report: residency.Report{Resident: r.resident, Away: r.away, In: r.in, Out: r.out}, Ready: ready})
}

// Jobs with memory get on, however they lie on the GPUs: moving takes no more than its share on any GPU, nobody is left
// behind, and the GPU that works most works nearly all the time.
func TestGangsWithMemory(t *testing.T) {
	const length, percent = 300 * time.Second, 10
	for _, c := range []struct {
		name  string
		jobs  [][]uint64
		least float64 // that each works
		whole float64 // that they work together on GPU 1
	}{
		{"two gangs", [][]uint64{{60, 60}, {60, 60}}, 0.44, 0.9},
		{"two gangs that fit on GPU 0", [][]uint64{{20, 60}, {20, 60}}, 0.44, 0.9},
		{"a gang and a tenant on each", [][]uint64{{60, 60}, {60, 0}, {0, 60}}, 0.44, 0.9},
		{"a gang and a tenant on each, which fit on GPU 0", [][]uint64{{20, 60}, {20, 0}, {0, 60}}, 0.44, 0.9},
		{"a gang and a tenant on GPU 1", [][]uint64{{60, 60}, {0, 60}}, 0.44, 0.9},
		{"two gangs and a small tenant", [][]uint64{{60, 60}, {60, 60}, {2, 0}}, 0.2, 0.6},
		{"two gangs that fit on GPU 0, and a small tenant", [][]uint64{{20, 60}, {20, 60}, {2, 0}}, 0.2, 0.6},
		{"two gangs that meet on GPU 1", [][]uint64{{60, 60, 0}, {0, 60, 60}}, 0.44, 0.9},
		{"a gang and two tenants on each", [][]uint64{{40, 60}, {40, 0}, {40, 0}, {0, 60}, {0, 60}}, 0.2, 0.85},
		{"two gangs and a tenant on each", [][]uint64{{40, 60}, {40, 60}, {40, 0}, {0, 60}}, 0.2, 0.85},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newGangModel(t, 3, 80*oneGiB, Config{Quantum: 100 * time.Millisecond, Grace: 10 * time.Second, SwapShare: percent}, c.jobs...)
			w.run(20 * time.Second)
			for _, j := range w.jobs {
				j.worked, j.gap = 0, 0
			}
			clear(w.moved)
			w.run(length)
			whole := 0.0
			for i, j := range w.jobs {
				part := j.worked.Seconds() / length.Seconds()
				if j.bytes[1] > 0 {
					whole += part
				}
				t.Logf("job %d worked %.1f %%, longest gap %.1f s", i, 100*part, j.gap.Seconds())
				if part < c.least {
					t.Errorf("job %d worked %.1f %% of the time, want %.1f", i, 100*part, 100*c.least)
				}
			}
			if whole < c.whole {
				t.Errorf("GPU 1 works %.1f %% of the time, want %.1f", 100*whole, 100*c.whole)
			}
			for gpu, took := range w.moved {
				if part := took.Seconds() / length.Seconds(); part > percent/100.0+0.005 {
					t.Errorf("on GPU %d moving takes %.1f %% of the time", gpu, 100*part)
				}
			}
		})
	}
}

// TestAnyJobsWithMemory has any jobs on three GPUs get on.
func TestAnyJobsWithMemory(t *testing.T) {
	for seed := range uint64(40) {
		dice := rand.New(rand.NewPCG(seed, 0))
		var jobs [][]uint64
		for range 2 + dice.IntN(4) {
			bytes := make([]uint64, 3)
			for i := range bytes {
				if dice.IntN(2) == 0 {
					bytes[i] = 1 + dice.Uint64N(75)
				}
			}
			if slices.Max(bytes) > 0 {
				jobs = append(jobs, bytes)
			}
		}
		t.Run(fmt.Sprint(seed, " ", jobs), func(t *testing.T) {
			const length = 200 * time.Second
			w := newGangModel(t, 3, 80*oneGiB, Config{Quantum: 100 * time.Millisecond, Grace: 10 * time.Second, SwapShare: 10}, jobs...)
			w.run(length)
			for i, j := range w.jobs {
				part := j.worked.Seconds() / length.Seconds()
				t.Logf("job %d worked %.1f %%, longest gap %.1f s", i, 100*part, j.gap.Seconds())
				if part < 0.5/float64(len(jobs)) {
					t.Errorf("job %d worked %.1f %%", i, 100*part)
				}
			}
			for gpu, took := range w.moved {
				if part := took.Seconds() / length.Seconds(); part > 0.115 {
					t.Errorf("on GPU %d moving takes %.1f %% of the time", gpu, 100*part)
				}
			}
		})
	}
}

// A gang all of whose ranks are idle does not keep its GPUs for as long as moving in took demands. While one of them works
// the turn goes on, and one that makes calls again goes on at once.
func TestIdleGangLeaves(t *testing.T) {
	w := newGangModel(t, 2, 80*oneGiB, Config{Quantum: 100 * time.Millisecond, Grace: 10 * time.Second, SwapShare: 10}, []uint64{60, 60}, []uint64{60, 60})
	a, b := w.jobs[0], w.jobs[1]
	for a.since == 0 {
		w.run(time.Millisecond)
	}
	w.run(100 * time.Millisecond)
	a.ranks[0].rest()
	w.run(200 * time.Millisecond)
	if !a.ranks[1].open || b.ranks[0].epoch != 0 || a.ranks[0].open {
		t.Fatalf("one rank is idle: %+v, the other has %+v, and the other job %+v", *a.ranks[0], *a.ranks[1], *b.ranks[0])
	}
	a.ranks[0].goOn()
	w.run(time.Millisecond)
	if a.since == 0 {
		t.Fatal("the rank that was idle does not go on in its turn")
	}
	for _, r := range a.ranks {
		r.rest()
	}
	b.gap, b.last = 0, w.now
	w.run(3 * time.Second)
	if b.since == 0 || b.gap > 1500*time.Millisecond {
		t.Fatalf("the other job waits for %v", b.gap)
	}
}
