// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"testing"
	"time"
)

// TestGangsShare lets two gangs and tenants of one GPU share GPUs. Nobody may be
// fenced, so no drain waits for a rank whose gate is shut; and all get turns.
func TestGangsShare(t *testing.T) {
	for _, jobs := range [][][]int{
		{{0, 1}},
		{{0, 1}, {0}, {1}},
		{{0, 1}, {0, 1}},
		{{0, 1}, {0, 1}, {0}, {1}, {2}},
		{{0, 1}, {1, 2}, {0, 2}, {0}},
		{{0, 1, 2}, {1, 2}, {0}, {1}, {1}},
	} {
		var last *ganged
		for seed := uint64(1); seed <= 3; seed++ {
			last = runGanged(t, seed, gangFaults{}, 2*time.Second, jobs...)
			if last.fences != 0 {
				t.Errorf("jobs %v: %v", jobs, last)
			}
			last.progressed(t)
		}
		t.Logf("jobs on GPUs %v: %v", jobs, last)
	}
}

// TestGangsStartTogether has jobs start on the same GPUs in turns: each has one GPU
// first, and the other's rank waits for that. Nobody may be fenced.
func TestGangsStartTogether(t *testing.T) {
	for _, jobs := range [][][]int{
		{{0, 1}, {1, 0}},
		{{0, 1, 2}, {1, 2, 0}, {2, 0, 1}},
		{{0, 1}, {1, 2}, {2, 0}},
	} {
		for seed := uint64(1); seed <= 100; seed++ {
			runGanged(t, seed, gangFaults{rush: true}, 2*gangGrace, jobs...).progressed(t)
		}
	}
}

// TestGangsOutliveSuspensions suspends the machine while gangs stop. Nobody may be
// fenced: it had no time to drain.
func TestGangsOutliveSuspensions(t *testing.T) {
	for _, jobs := range [][][]int{
		{{0, 1}, {0}, {1}},
		{{0, 1}, {1, 2}, {0, 2}, {0}},
	} {
		for seed := uint64(1); seed <= 5; seed++ {
			g := runGanged(t, seed, gangFaults{leaps: 20}, 10*time.Second, jobs...)
			if g.fences != 0 || g.leaps < 5 || g.steps == 0 {
				t.Errorf("jobs %v: %v", jobs, g)
			}
			g.progressed(t)
		}
	}
}

// TestGangsSurvive has ranks and jobs die, stop and lose their connections, while the
// machine is suspended now and then.
func TestGangsSurvive(t *testing.T) {
	surviveTogether(t, gangFaults{fate: true, leaps: 50}, 4*time.Second)
}

// TestGangsOutliveTheScheduler ends the scheduler meanwhile, and now and then
// ranks as well. A gang that holds when it ends goes on with the next one: it is
// a gang again at once, so that no drain waits for a rank whose gate is shut.
func TestGangsOutliveTheScheduler(t *testing.T) {
	for _, jobs := range [][][]int{
		{{0, 1}},
		{{0, 1}, {0}, {1}},
		{{0, 1}, {1, 2}, {0, 2}, {0}},
	} {
		for seed := uint64(1); seed <= 2; seed++ {
			g := runGanged(t, seed, gangFaults{crashes: 3 * time.Second}, 30*time.Second, jobs...)
			if g.fences != 0 || g.adopted < 5 {
				t.Errorf("jobs %v: %v", jobs, g)
			}
			g.progressed(t)
		}
	}
	g := surviveTogether(t, gangFaults{fate: true, crashes: 3 * time.Second, leaps: 100}, 20*time.Second)
	if g.crashes < 50 || g.adopted == 0 || g.drained == 0 {
		t.Errorf("the scheduler ended too rarely, or nobody went on: %v", g)
	}
}

// surviveTogether returns the sum of ten runs, in which all that these tests are about
// has happened.
func surviveTogether(t *testing.T, faults gangFaults, length time.Duration) ganged {
	t.Helper()
	var sum ganged
	for seed := uint64(1); seed <= 10; seed++ {
		g := runGanged(t, seed, faults, length, []int{0, 1}, []int{1, 2}, []int{0, 1, 2}, []int{0}, []int{1}, []int{2})
		for _, n := range []struct {
			sum *int
			of  int
		}{
			{&sum.grants, g.grants}, {&sum.revokes, g.revokes}, {&sum.steps, g.steps}, {&sum.fences, g.fences}, {&sum.deaths, g.deaths}, {&sum.stops, g.stops},
			{&sum.cuts, g.cuts}, {&sum.preempted, g.preempted}, {&sum.leaps, g.leaps}, {&sum.adopted, g.adopted}, {&sum.drained, g.drained}, {&sum.crashes, g.crashes},
		} {
			*n.sum += n.of
		}
		if seed == 10 {
			t.Log(g)
		}
	}
	for what, n := range map[string]int{"grant": sum.grants, "revoke": sum.revokes, "step": sum.steps, "fence": sum.fences,
		"death": sum.deaths, "stop": sum.stops, "lost connection": sum.cuts, "cut drain": sum.preempted, "suspension": sum.leaps} {
		if n < 10 {
			t.Errorf("%d times a %s in ten runs: too few to prove anything", n, what)
		}
	}
	return sum
}

// progressed fails unless every rank has worked.
func (g *ganged) progressed(t *testing.T) {
	t.Helper()
	for _, j := range g.jobs {
		for _, r := range j.ranks {
			if r.done < 50 {
				t.Errorf("%s on GPU %d made only %d calls", j.name, r.gpu, r.done)
			}
		}
	}
}
