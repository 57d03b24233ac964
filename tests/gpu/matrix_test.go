// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

func TestJudgeOfResults(t *testing.T) {
	d := func(digest string, samples ...float64) digested { return digested{digest, samples} }
	for _, c := range []struct {
		name    string
		natives []digested
		ours    digested
		want    string
	}{
		{"the same", []digested{d("a", 1), d("a", 1)}, d("a", 1), "same bits"},
		{"one of native's", []digested{d("a", 1), d("b", 1.1)}, d("b", 1.1), "same bits"},
		{"within native's difference", []digested{d("a", 1, 10), d("b", 1.1, 10)}, d("c", 1.2, 10), "as near as native"},
		{"samples agree where the rest varies", []digested{d("a", 1), d("b", 1)}, d("c", 1), "as near as native"},
		{"samples do not", []digested{d("a", 1), d("b", 1)}, d("c", 1.5), "DIFFERS"},
		{"further", []digested{d("a", 1, 10), d("b", 1.1, 10)}, d("c", 2, 10), "DIFFERS"},
		{"native is exact", []digested{d("a", 1), d("a", 1)}, d("c", 1), "DIFFERS"},
		{"other shape", []digested{d("a", 1), d("b", 2)}, d("c", 1, 2), "DIFFERS"},
	} {
		var r results
		if r.judge(c.natives, c.ours); r.Verdict != c.want {
			t.Errorf("%s: %s, want %s", c.name, r.Verdict, c.want)
		}
	}
}

func python(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	return path
}

// The sum of two tenants is as exact as the count of work in a window, of
// which the ends fall between marks and into pauses.
func TestCount(t *testing.T) {
	program := `
import json, sys, worker
for marks, steps, start, end in json.load(sys.stdin):
    print(json.dumps(worker.count(marks, steps, start, end, end)))
`
	steady := make([]float64, 100)
	for i := range steady {
		steady[i] = 1 + 0.01*float64(i)
	}
	// Ten marks in a turn, then nine turns' worth of pause.
	var turns []float64
	for i := range 30 {
		turns = append(turns, float64(i/10)+0.01*float64(i%10))
	}
	cases := []struct {
		name       string
		marks      []float64
		steps      int
		start, end float64
		want       float64
	}{
		{"steady", steady, 4, 1.1, 1.9, 320},
		{"ends between marks", steady, 4, 1.105, 1.9, 318},
		{"over a pause", turns, 1, 0.045, 1.045, 10},
		{"ends in a pause", turns, 1, 0.045, 0.5, 5.5 - 1},
		{"begins in a pause", turns, 1, 0.5, 1.095, 10},
		{"begins before the first mark", turns, 1, -0.5, 0.09, 10},
	}
	var in []any
	for _, c := range cases {
		in = append(in, []any{c.marks, c.steps, c.start, c.end})
	}
	data, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python(t), "-B", "-c", program)
	cmd.Stdin, cmd.Stderr = strings.NewReader(string(data)), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	for i, c := range cases {
		var got counted
		if err := json.Unmarshal([]byte(lines[i]), &got); err != nil {
			t.Fatal(err)
		}
		if math.Abs(got.Steps-c.want) > 1e-6 {
			t.Errorf("%s: %v steps, want %v", c.name, got.Steps, c.want)
		}
	}
}

// fakeArbiter knows the matrix's workers as the scheduler would.
type fakeArbiter struct {
	m        *matrix
	quantums []string
	calls    uint64
}

func (f *fakeArbiter) setQuantum(_ context.Context, q string) error {
	f.quantums = append(f.quantums, q)
	return nil
}

func (f *fakeArbiter) Status(context.Context) (*api.StatusResponse, error) {
	f.calls += 10
	g := &api.GPU{}
	for _, r := range f.m.all {
		for _, w := range r.all() {
			c := &api.Client{Pid: uint32(w.pid()), Interposed: 5, Calls: f.calls}
			if w.name == shim2 {
				c.Bypassed = 1
			}
			g.Clients = append(g.Clients, c)
		}
	}
	return &api.StatusResponse{Gpus: []*api.GPU{g}}, nil
}

// The whole coordinator, with workers that only count: cells that fail are
// noted and do not keep the others from being measured.
func TestMatrixGoesOn(t *testing.T) {
	m, err := newMatrix(matrixOptions{minutes: 5}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeArbiter{m: m}
	m.arbiter, m.python, m.script, m.results = f, python(t), "worker.py", t.TempDir()
	m.tenantEnv = func(string, string) []string { return nil }
	m.alone, m.beside, m.test, m.before = 50*time.Millisecond, 100*time.Millisecond, 50*time.Millisecond, 1
	err = m.run(context.Background(), []loadGroup{
		{framework: "fake", allocator: "default", backend: "fake", loads: []string{"bad", "absent", "die", "count"}, pair: true},
		{framework: "none", allocator: "default", backend: "nothing", loads: []string{"count"}},
	})
	if err == nil {
		t.Error("cells failed, and the run did not say so")
	}
	cells := map[string]*cell{}
	for _, c := range m.r.Cells {
		cells[c.Framework+"/"+c.Load] = c
	}
	has := func(c *cell, want string) {
		t.Helper()
		if text := strings.Join(c.Problems, "; "); !strings.Contains(text, want) {
			t.Errorf("%s: problems %q, want %q in them", c.Load, text, want)
		}
	}
	has(cells["fake/bad"], "ValueError: as ordered")
	has(cells["fake/die"], "exit status 3")
	if !strings.Contains(cells["fake/absent"].Skipped, "not here") {
		t.Errorf("absent: skipped %q", cells["fake/absent"].Skipped)
	}
	if cells["none/count"].Skipped == "" {
		t.Error("a group whose processes cannot start is not skipped")
	}
	c := cells["fake/count"]
	if c.Shim == nil || c.Shim.N != 3 || len(c.Beside) != 2 || c.NativePair == nil || c.Results == nil {
		t.Fatalf("not all measured: %+v", c)
	}
	if c.Results.Verdict != "same bits" || c.Results.Beside != c.Results.Native {
		t.Errorf("results: %+v", c.Results)
	}
	for _, w := range c.Beside {
		if w.Sum <= 0 || w.Native <= 0 || w.OfNative <= 0 || len(w.Tenants) != 2 {
			t.Errorf("beside: %+v", w)
		}
	}
	if p := c.Proof[shim1]; p == nil || p.Interposed != 5 || p.Calls == 0 {
		t.Errorf("proof: %+v", p)
	}
	has(c, "shim2: 5 entry points interposed, 1 bypassed")
	if len(c.Problems) != 1 {
		t.Errorf("problems: %v", c.Problems)
	}
	if !strings.Contains(strings.Join(f.quantums, " "), "100ms 5ms 100ms") {
		t.Errorf("quantums set: %v", f.quantums)
	}
	for _, name := range []string{"matrix.json", "matrix.md", "matrix-stderr.txt"} {
		if st, err := os.Stat(filepath.Join(m.results, name)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A worker that hangs is killed, and its Python stacks are kept.
func TestHungWorker(t *testing.T) {
	log := filepath.Join(t.TempDir(), "stderr")
	w, err := startWorker(python(t), "worker.py", "w", log, nil, "fake")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.load(context.Background()); err != nil {
		t.Fatal(err)
	}
	err = w.call(context.Background(), 300*time.Millisecond, map[string]any{"op": "build", "load": "hang"}, nil)
	if err == nil || !strings.Contains(err.Error(), "no answer") {
		t.Fatalf("%v", err)
	}
	if text, err := os.ReadFile(log); err != nil || !strings.Contains(string(text), "time.sleep") && !strings.Contains(string(text), "in build") {
		t.Errorf("%v: %s", err, text)
	}
	if _, err := w.load(context.Background()); err == nil {
		t.Error("a dead worker answers")
	}
}
