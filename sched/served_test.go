// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// requests come to a server as a Poisson process, on average every so often. The server gives each
// one that is there a token in each of its steps.
type requests struct {
	every time.Duration
	rng   *rand.Rand

	there []*answer
	first []time.Duration // until the first token of each
}

type answer struct {
	asked base.Time
	left  int // tokens
}

const (
	answerTokens = 256
	tokenStep    = 10 * ms
	tokenGap     = ms / 2 // on the CPU, between steps
)

// come has requests come to a process.
func (r *requests) come(p *proc) {
	p.w.after(time.Duration(r.rng.ExpFloat64()*float64(r.every)), func() {
		r.there = append(r.there, &answer{p.w.now, answerTokens})
		if len(r.there) == 1 {
			p.wants(tokenStep)
		}
		r.come(p)
	})
}

// step is after one.
func (r *requests) step(p *proc) {
	for _, a := range r.there {
		if a.left == answerTokens {
			r.first = append(r.first, p.w.now.Sub(a.asked))
		}
		a.left--
	}
	r.there = slices.DeleteFunc(r.there, func(a *answer) bool { return a.left == 0 })
	if len(r.there) > 0 {
		p.w.after(tokenGap, func() { p.wants(tokenStep) })
	}
}

// Who waits for a server's first token waits for turns that are little longer than the share of
// moving demands, ten times the 0.24 s of a move: found on an H100, where they were 10 s. Programs that never
// pause have long turns, also while a server has no requests, and moving takes next to nothing.
func TestFirstTokens(t *testing.T) {
	for _, c := range []struct {
		name             string
		servers, busy    int
		every            time.Duration
		p99, moves, work float64 // seconds; parts of the time: at most, at most, at least
	}{
		{"two servers, half a request in flight each", 2, 0, 5200 * ms, 4, 0.1, 0},
		{"two servers, one in flight each", 2, 0, 2600 * ms, 4, 0.1, 0},
		{"a server and a training", 1, 1, 5200 * ms, 5, 0.1, 0.55},
		{"a server that is seldom asked and a training", 1, 1, time.Minute, 3, 0.03, 0.9},
		{"a server that is seldom asked and two trainings", 1, 2, time.Minute, 5, 0.05, 0.9},
		{"two trainings", 0, 2, 0, 0, 0.03, 0.97},
	} {
		var uses []use
		for i := range c.servers {
			uses = append(uses, use{bytes: 18 * oneGiB, served: &requests{every: c.every, rng: rand.New(rand.NewPCG(1, uint64(i)))}})
		}
		uses = append(uses, several(c.busy, use{work: time.Hour, times: 1, bytes: 18 * oneGiB})...)
		w := newSharing(t, 24*oneGiB, 0, 10, uses...)
		w.fillAll()
		for _, p := range w.order {
			p.worked, p.times = 0, math.MaxInt
			if r := p.use.served; r != nil {
				r.come(p)
				continue
			}
			p.wants(p.use.work)
		}
		const whole = 1000 * time.Second
		w.run(whole)
		first, work := []time.Duration{0}, time.Duration(0)
		for _, p := range w.order {
			if r := p.use.served; r != nil {
				first = append(first, r.first...)
				continue
			}
			p.halt()
			work += p.worked
		}
		slices.Sort(first)
		p99 := first[len(first)*99/100].Seconds()
		moves, works := w.moving.Seconds()/whole.Seconds(), work.Seconds()/whole.Seconds()
		t.Logf("%s: first token of %d p50 %.2f s, p99 %.2f s, longest %.2f s; moving takes %.1f %%, trainings have %.1f %%",
			c.name, len(first)-1, first[len(first)/2].Seconds(), p99, first[len(first)-1].Seconds(), 100*moves, 100*works)
		if p99 > c.p99 || moves > c.moves || works < c.work {
			t.Errorf("%s: want a p99 of at most %.0f s, moving at most %.1f %%, trainings at least %.1f %%", c.name, c.p99, 100*c.moves, 100*c.work)
		}
	}
}

// A pause now and then does not make a program a server for long: turns grow while it works.
func TestTurnsGrow(t *testing.T) {
	u := use{work: 10 * ms, times: 18000, bytes: 5 * oneGiB, pauses: slices.Repeat([]time.Duration{tokenGap}, 3000)}
	u.pauses[0] = 5 * time.Second
	w := share(t, 13*oneGiB/2, 0, 10, several(2, u)...)
	t.Logf("30 s of work and a pause of 5 s, in turn: %v", w)
	if w.steady > 0.025 {
		t.Errorf("moving takes %.1f %%", 100*w.steady)
	}
}
