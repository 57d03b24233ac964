// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/judge"
)

// The pictures of a run on the simulated GPU, made from its raw results.
func TestPlot(t *testing.T) {
	dir := t.TempDir()
	data, err := os.ReadFile("testdata/swap.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := save(dir, "swap.json", string(data)); err != nil {
		t.Fatal(err)
	}
	makespan, err := json.Marshal(makespanResult{
		Kinds: []*jobKind{{Name: "90 % <GPU>"}},
		Cases: []*makespanCase{
			{Kind: "90 % <GPU>", Promised: 1.5, Quantum: adaptive, Faster: 0.99}, {Kind: "90 % <GPU>", Promised: 3, Quantum: adaptive, Faster: 0.98},
			{Kind: "90 % <GPU>", Promised: 2, Quantum: "30", Faster: 1}, {Kind: "90 % <GPU>", Promised: 2, Quantum: "5", Skipped: "no time"},
		}})
	if err != nil {
		t.Fatal(err)
	}
	if err := save(dir, "makespan.json", string(makespan)); err != nil {
		t.Fatal(err)
	}
	for file, lines := range map[string]int{"swap.json": 4, "makespan.json": 2} { // out, in, two tenants; two quanta
		if err := plotFile(filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
		picture := "makespan.svg"
		if file == "swap.json" {
			picture = "swap-192.svg"
		}
		svg, err := os.ReadFile(filepath.Join(dir, picture))
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(svg), "<polyline"); n != lines {
			t.Errorf("%s has %d lines, want %d", picture, n, lines)
		}
		if strings.Contains(string(svg), "NaN") || strings.Contains(string(svg), "Inf") {
			t.Errorf("%s has what is no number", picture)
		}
		for d := xml.NewDecoder(strings.NewReader(string(svg))); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", picture, err)
			}
		}
	}
	// A case that failed before anything was measured has a picture too.
	if svg := plotSwap(&swapCase{Name: "nothing"}); strings.Contains(svg, "NaN") {
		t.Error(svg)
	}
}

// A switch is from one tenant's last kernel to the other's first, with what was
// moved meanwhile, and its limit is what the link needs for that.
func TestSwitches(t *testing.T) {
	const gb, s = 1e9, int64(1e9)
	c := &swapCase{TenantMiB: 64, Link: linkLimit{OutBoth: 50, InBoth: 40, OutExchange: 50, InExchange: 20}, RealToClock: 100 * s}
	c.Timeline = &timeline{}
	var trace judge.Trace
	for i := range int64(5) { // turns of 1 s, 2 s apart
		pid := uint32(1 + i%2)
		trace.Intervals = append(trace.Intervals, judge.Interval{GPU: "GPU-0", Process: judge.Process{PID: pid}, Kind: judge.Kernel, Start: 2 * i * s, End: 2*i*s + s, Busy: s})
		c.Timeline.Events = append(c.Timeline.Events,
			swapEvent{At: 100*s + 2*i*s + 15*s/10, Type: "swap_out", PID: pid, Bytes: 40 * gb, Took: s / 2},
			swapEvent{At: 100*s + 2*i*s + 19*s/10, Type: "swap_in", PID: 3 - pid, Bytes: 20 * gb, Took: s / 2})
	}
	c.measure(trace)
	if len(c.Switches) != 4 || c.Gap == nil || c.Gap.N != 2 {
		t.Fatalf("%+v", c)
	}
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	near("gap", c.Gap.Median, 1)
	near("out", c.Switches[1].Out, 40*gb)
	near("in", c.Switches[1].In, 20*gb)
	near("limit", c.Switches[1].Limit, 0.8)
	near("of the limit", c.OfLimit.Median, 1.25)
	near("of a bare exchange", c.OfExchange.Median, 1)
	near("of the link", c.LinkUsed.Median, 60.0/90)
	near("out rate", c.OutRate.Median, 80)
	near("in rate", c.InRate.Median, 40)
}

// A worker behind two FIFOs, as in a container, does as it is told, ends with its
// relay, and what it prints is told when it fails.
func TestPipe(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out")
	for _, fifo := range []string{in, out} {
		if err := unix.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	there := exec.Command(python(t), "-B", "pipe.py", "serve", in, out, "fake")
	there.Stderr = os.Stderr
	if err := there.Start(); err != nil {
		t.Fatal(err)
	}
	w, err := startWorker(python(t), "pipe.py", "piped", filepath.Join(dir, "stderr"), nil, "relay", in, out)
	if err != nil {
		t.Fatal(err)
	}
	w.client, w.more = there.Process.Pid, func() string { return "what the container printed" }
	if got := w.clientPID(); got != uint32(there.Process.Pid) {
		t.Errorf("client %d", got)
	}
	ctx := context.Background()
	if _, err := w.load(ctx); err != nil {
		t.Fatal(err)
	}
	if b, err := w.build(ctx, "count", built{}); err != nil || b.Steps == 0 {
		t.Fatalf("build: %+v, %v", b, err)
	}
	if !strings.Contains(w.tail(), "what the container printed") {
		t.Errorf("tail: %q", w.tail())
	}
	if err := w.quit(); err != nil {
		t.Error(err)
	}
	if err := there.Wait(); err != nil {
		t.Errorf("behind the FIFOs: %v", err)
	}
}
