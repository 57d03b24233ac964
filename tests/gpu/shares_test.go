// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

func TestPromised(t *testing.T) {
	for _, c := range []struct {
		shares []share
		want   [][2]float64
	}{
		{[]share{{Limit: 25}}, [][2]float64{{25, 25}}},
		{[]share{{Limit: 30}, {Limit: 60}}, [][2]float64{{30, 30}, {60, 60}}},
		{[]share{{}, {}}, [][2]float64{{50, 50}, {50, 50}}},
		{[]share{{Limit: 10}, {}}, [][2]float64{{10, 10}, {90, 90}}},
		// The 40 that nobody was promised go to two, or to all three.
		{[]share{{Request: 60}, {}, {}}, [][2]float64{{60, 60 + 40.0/3}, {40.0 / 3, 20}, {40.0 / 3, 20}}},
	} {
		for i, want := range c.want {
			if low, high := promised(c.shares, i); !near(low, want[0]) || !near(high, want[1]) {
				t.Errorf("%v, tenant %d: %v to %v, want %v", c.shares, i, low, high, want)
			}
		}
	}
}

// A tenant that stands still for a while is found in the windows that hold
// the pause, and nowhere else.
func TestWindowShares(t *testing.T) {
	done := []float64{0, 30, 60, 90, 120, 120, 150, 180} // a slice is 1 s, alone 100/s
	got := windowShares(done, 1, 1, 2, 100)
	if want := []float64{30, 30, 15, 15, 30}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("shares %v, want %v", got, want)
	}
	if got := windowShares(done, 1, 1, 7, 100); len(got) != 0 {
		t.Errorf("a window longer than the cell: %v", got)
	}
}

func TestJudgeOfShares(t *testing.T) {
	slices := func(rate float64) []float64 {
		var done []float64
		for i := range 33 {
			done = append(done, rate*float64(i)*0.2)
		}
		return done
	}
	before := map[string]counted{"a": {Rate: 990, StepMS: 1}, "b": {Rate: 100, StepMS: 10}}
	after := map[string]counted{"a": {Rate: 1010, StepMS: 1}, "b": {Rate: 100, StepMS: 10}}
	c := shareCell{Slice: 0.2, Tenants: []shareTenant{
		{Load: "a", Low: 25, High: 25, Done: slices(262), StepMS: 0.95, Clock: 24},
		{Load: "b", Low: 60, High: 80, Done: slices(70), StepMS: 10, Clock: 70},
	}}
	c.judge(before, after)
	if math.Abs(c.Worst-1.2) > 1e-6 || math.Abs(c.ClockWorst-1) > 1e-6 {
		t.Errorf("worst %v, by our clock %v", c.Worst, c.ClockWorst)
	}
	// Its steps took 5 % less time than alone: so much more work in the same time.
	if got := c.Tenants[0].Time; math.Abs(got-26.2*0.95) > 1e-6 {
		t.Errorf("own time %v", got)
	}
	if got := c.Tenants[1].off(85); !near(got, 5) {
		t.Errorf("85 of 60 to 80 is off by %v", got)
	}
}

func TestClockShare(t *testing.T) {
	who, other := tenantOn{61000, 0}, tenantOn{61000, 1}
	at := func(at, used float64) billed {
		return billed{at: at, used: map[tenantOn]float64{who: used, other: 7 * at}, counters: map[string]uint64{"grants": uint64(10 * at)}}
	}
	bills := []billed{at(0, 5), at(1, 5.5), at(2, 5.75), at(3, 6), at(4, 7)}
	if got := clockShare(bills, who, 0.9, 3.5); !near(got, 25) {
		t.Errorf("share %v", got)
	}
	if got := clockShare(bills, who, 3.5, 4.5); got != 0 {
		t.Errorf("one answer makes %v", got)
	}
	if got := counters(bills)["grants"]; got != 40 {
		t.Errorf("%d grants", got)
	}
}

func TestParseClocks(t *testing.T) {
	s, err := parseClocks("1980, 503.77")
	if err != nil || s.mhz != 1980 || s.watts != 503.77 {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{"", "[N/A], 5", "1980", "1980, [N/A]"} {
		if _, err := parseClocks(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// runPython runs a program beside worker.py and returns its lines.
func runPython(t *testing.T, program string, args ...string) []string {
	t.Helper()
	cmd := exec.Command(python(t), append([]string{"-B", "-c", program}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// The slices of a window add up to it.
func TestSlices(t *testing.T) {
	lines := runPython(t, `
import json, worker
marks = [t + 0.01 * i for t in (0, 1, 2, 3) for i in range(51)]   # works half of each second
print(json.dumps(worker.count(marks, 4, 0.5, 2.5, 2.5, 0.25)))
`)
	var c counted
	if err := json.Unmarshal([]byte(lines[0]), &c); err != nil {
		t.Fatal(err)
	}
	want := []float64{0, 0, 0, 100, 204, 204, 204, 304, 408}
	if len(c.Done) != len(want) || !near(c.Done[0], 0) || math.Abs(c.Done[8]-c.Steps) > 0.01 {
		t.Fatalf("%v of %v", c.Done, c.Steps)
	}
	for i := range want {
		if math.Abs(c.Done[i]-want[i]) > 4.01 {
			t.Errorf("%v, want %v", c.Done, want)
			break
		}
	}
	if math.Abs(c.StepMS-2.5) > 1e-6 {
		t.Errorf("a step took %v ms", c.StepMS)
	}
}

// CPU time is taken to pass evenly between two steps.
func TestValueAt(t *testing.T) {
	lines := runPython(t, `
import worker
points = [(1, 10), (2, 12), (4, 13)]
print(*[worker.value_at(points, x) for x in (0, 1, 1.5, 2, 3, 4, 9)])
`)
	if want := "10 10 11.0 12.0 12.5 13.0 13"; lines[0] != want {
		t.Errorf("%s, want %s", lines[0], want)
	}
}

// Ranks that run at different speeds end their windows after the same step.
func TestRanksAgree(t *testing.T) {
	lines := runPython(t, `
import os, sys, time
from loads import common
pid = os.fork()
ranks = common.Ranks(sys.argv[1], 1 if pid == 0 else 0, 2)
for window in range(3):
    n = 0
    while ranks.more(n < 7 + window if pid else n < 3):
        n += 1
        ranks.meet()
    os.write(1, b"%d\n" % n)
if pid:
    os.waitpid(pid, 0)
`, filepath.Join(t.TempDir(), "ranks"))
	count := map[string]int{}
	for _, l := range lines {
		count[l]++
	}
	if fmt.Sprint(count) != "map[7:2 8:2 9:2]" {
		t.Errorf("windows of %v steps", lines)
	}
}
