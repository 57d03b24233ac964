// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"
)

// The flags win over the environment: STEPS and SEED, as `make sim` sets them.
var (
	steps = flag.Int("steps", int(fromEnv("STEPS", 300_000)), "steps of the core in all")
	seed  = flag.Uint64("seed", fromEnv("SEED", 0), "first seed; 0: a new one")
	trace = flag.Bool("events", false, "print every event and action of that one seed")
)

// stepsPerSeed is short enough for many mixes of faults, and long enough for
// each of them to meet.
const stepsPerSeed = 10_000

func fromEnv(name string, otherwise uint64) uint64 {
	s := os.Getenv(name)
	if s == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		panic(fmt.Sprintf("%s=%s: not a number", name, s))
	}
	return n
}

func TestSim(t *testing.T) {
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano()) % 1_000_000_000 * 1000
	}
	if *trace {
		report, err := Run(first, min(*steps, stepsPerSeed), Options{Trace: os.Stdout})
		t.Log(report)
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Logf("first seed %d", first)
	var total Report
	for s, left := first, *steps; left > 0; s, left = s+1, left-stepsPerSeed {
		n := min(left, stepsPerSeed)
		report, err := Run(s, n, Options{})
		if err != nil {
			again, traced := Run(s, n, Options{Trace: discard{}})
			if again.String() != report.String() {
				t.Errorf("the same seed did something else:\n%v\n%v", report, again)
			}
			t.Fatalf("%v\n%v\nrun it again: go test ./sched/sim -run 'TestSim$' -seed %d -steps %d -events", traced, report, s, n)
		}
		total = add(total, report)
	}
	total.Seed = first
	t.Log(total)
	// A run that never met what it is for would prove nothing.
	if *steps >= 300_000 {
		for what, n := range map[string]int{
			"grant": total.Grants, "concurrent grant": total.Concurrent, "early release": total.EarlyReleases,
			"revoke": total.Revokes, "fence": total.Fences, "adoption": total.Adoptions, "death": total.Deaths,
			"stop": total.Stops, "lost connection": total.Cuts, "crash": total.Crashes, "fenced overlap": total.Overlaps,
		} {
			if n == 0 {
				t.Errorf("not one %s in %d steps", what, *steps)
			}
		}
	}
}

func TestSameSeedSameRun(t *testing.T) {
	for s := uint64(1); s <= 5; s++ {
		first, err := Run(s, 3000, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Run(s, 3000, Options{Trace: discard{}}); err != nil || again != first {
			t.Errorf("two runs differ, error %v:\n%v\n%v", err, first, again)
		}
	}
}

// TestCalm runs without faults, where nobody may be fenced or wait for more
// than the others' turns.
func TestCalm(t *testing.T) {
	for s := uint64(1); s <= 5; s++ {
		report, err := Run(s, 5000, Options{Calm: true, Clients: 4})
		if err != nil {
			t.Fatal(err)
		}
		if report.Fences != 0 || report.Overlaps != 0 || report.Grants == 0 {
			t.Errorf("%v", report)
		}
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func add(a, b Report) Report {
	a.Steps += b.Steps
	a.Virtual += b.Virtual
	a.Grants += b.Grants
	a.Concurrent += b.Concurrent
	a.EarlyReleases += b.EarlyReleases
	a.Revokes += b.Revokes
	a.Fences += b.Fences
	a.Adoptions += b.Adoptions
	a.Deaths += b.Deaths
	a.Stops += b.Stops
	a.Cuts += b.Cuts
	a.Crashes += b.Crashes
	a.Overlaps += b.Overlaps
	a.LongestWait = max(a.LongestWait, b.LongestWait)
	return a
}
