// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestQuartile(t *testing.T) {
	values := []float64{5, 1, 4, 2, 3}
	for n, want := range []float64{1, 2, 3, 4, 5} {
		if got := quartile(values, n); got != want {
			t.Errorf("quartile %d of %v: %v, want %v", n, values, got, want)
		}
	}
	if got := quartile([]float64{1, 2}, 2); got != 1.5 {
		t.Errorf("median of 1 and 2: %v", got)
	}
	if got := quartile([]float64{7}, 3); got != 7 {
		t.Errorf("third quartile of one value: %v", got)
	}
}

func TestParseDump(t *testing.T) {
	for text, want := range map[string]struct {
		call  string
		total float64
	}{
		"# callgrind format\ndesc: Trigger: --dump-after=run_launch_ex\n\nevents: Ir\nsummary: 12\n\ntotals: 134132\n": {"launch_ex", 134132},
		"# callgrind format\ndesc: Trigger: --dump-before=run_launch\nevents: Ir\ntotals: 7\n":                         {"", 7},
		"# callgrind format\ndesc: Trigger: Program termination\nevents: Ir\n":                                         {"", 0},
	} {
		file := filepath.Join(t.TempDir(), "out.1-01")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		call, total, err := parseDump(file)
		if err != nil || call != want.call || total != want.total {
			t.Errorf("%q: %q, %v, %v", text, call, total, err)
		}
	}
}

func TestParseSample(t *testing.T) {
	s := parseSample([]byte(`{"batches":2,"launch_ns":3.25,"runtime":"12.8"}` + "\n"))
	if len(s) != 2 || s["launch_ns"] != 3.25 {
		t.Errorf("got %v", s)
	}
	for _, line := range []string{"", "ready\n", "[\"a\"]"} {
		if s := parseSample([]byte(line)); s != nil {
			t.Errorf("%q: got %v", line, s)
		}
	}
}

// Figures of pairs need a measurement in each run of a pair.
func TestFigures(t *testing.T) {
	b := &bench{libraries: []library{{name: "shim", ours: true}, {name: "peer"}}}
	r := result{scenario: scenario{Calls: []string{"launch"}, Threads: 1}, Samples: map[string][]sample{
		native: {{"launch_ns": 3}, {"launch_ns": 30}, {"launch_ns": 4}},
		"shim": {{"launch_ns": 8}, {"launch_ns": 36}, {"launch_ns": 8}},
	}}
	counts := map[string]map[string]float64{native: {"launch": 26}, "shim": {"launch": 144}}
	f := b.figures(r, counts)
	got := f["shim"]["launch"]
	if got.Native != 4 || got.Added.Median != 5 || got.AddedInstr == nil || *got.AddedInstr != 118 {
		t.Errorf("got %+v", got)
	}
	if f["peer"] != nil {
		t.Errorf("a peer that failed has figures: %+v", f["peer"])
	}
}

func TestHandOvers(t *testing.T) {
	for name, c := range map[string]struct {
		a, b []wait
		want []int64
	}{
		"in turn":                   {[]wait{{0, 105}, {200, 310}}, []wait{{100, 203}, {300, 420}}, []int64{5, 3, 10}},
		"the machine paused b":      {[]wait{{0, 105}}, []wait{{50, 60}, {100, 200}}, []int64{5}},
		"a waits for nothing first": {[]wait{{0, 10}, {20, 105}}, []wait{{100, 200}}, []int64{5}},
		"never":                     {[]wait{{0, 10}}, nil, nil},
	} {
		if got := handOvers(c.a, c.b); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

func TestFirstLaunches(t *testing.T) {
	a, b := []wait{{0, 105}, {200, 310}}, []wait{{100, 203}, {300, 420}}
	if got := firstLaunches([]int64{50, 202, 304, 500}, a, b); !slices.Equal(got, []int64{1, 6}) {
		t.Errorf("got %v", got)
	}
}
