// SPDX-License-Identifier: Apache-2.0

// Command bench measures what the shim adds to calls of the driver, in instructions
// (counted by callgrind) and in nanoseconds (in pairs of runs with and without the shim).
// It also measures how long a hand-over takes. The driver does nothing (stub/driver.c);
// the grants come from a real nvshare-scheduler.
//
// tests/gpu measures the same calls on a real driver.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// scenario is one way to call the driver.
type scenario struct {
	Name    string   `json:"name"`
	Calls   []string `json:"calls"` // names for launch-cost --only
	Threads int      `json:"threads"`
	Streams int      `json:"streams"` // of each thread, used in turn; 0: the default stream
	GPUs    int      `json:"gpus"`
	Tenant  bool     `json:"tenant"` // another client is attached, and does not ask for the GPU
}

var (
	submits   = []string{"launch", "launch_ex", "copy", "copy_uva"}
	scenarios = []scenario{
		{"one thread, one stream", append(slices.Clone(submits), "event", "event_query", "alloc", "async", "async_kept"), 1, 1, 1, false},
		{"2 streams in turn", submits, 1, 2, 1, false},
		{"4 streams in turn", submits, 1, 4, 1, false},
		{"default stream", submits, 1, 0, 1, false},
		{"one stream, 2 GPUs", submits, 1, 1, 2, false},
		{"default stream, 2 GPUs", submits, 1, 0, 2, false},
		{"2 threads", submits, 2, 1, 1, false},
		{"4 threads", submits, 4, 1, 1, false},
		{"8 threads", submits, 8, 1, 1, false},
		{"a tenant present", append(slices.Clone(submits), "event", "event_query", "alloc", "async", "async_kept"), 1, 1, 1, true},
		{"a tenant present, 4 streams in turn", submits, 1, 4, 1, true},
		{"a tenant present, 2 threads", submits, 2, 1, 1, true},
	}
)

// limits is how many instructions the shim may add to a call, in the first scenario.
// They leave room for another compiler, but not for another look-up or lock.
var limits = map[string]float64{
	"launch": 110, "launch_ex": 100, "copy": 95, "copy_uva": 95, "event": 9, "event_query": 9, // a stub looks at one flag
	"rt_launch": 110, // by stub/runtime.c
	"async":     450, // a pair, where there is no limit: nothing is entered
}

const native = "native"

// figures are the results of one call in one scenario; result.Samples has the raw
// samples.
type figures struct {
	Native       float64  `json:"native_ns"`
	Added        spread   `json:"added_ns"` // over pairs
	Instructions *float64 `json:"native_instructions,omitempty"`
	AddedInstr   *float64 `json:"added_instructions,omitempty"`
}

type spread struct {
	Q1     float64 `json:"q1"`
	Median float64 `json:"median"`
	Q3     float64 `json:"q3"`
}

// result is one scenario's. Outer keys are "native" and names of libraries.
type result struct {
	scenario
	Samples map[string][]sample           `json:"samples"`
	Figures map[string]map[string]figures `json:"figures"` // of a library and a call
	Failed  map[string]string             `json:"failed,omitempty"`
}

type report struct {
	Date    string   `json:"date"`
	Commit  string   `json:"commit"`
	CPU     string   `json:"cpu"`
	Cores   int      `json:"cores"`
	Kernel  string   `json:"kernel"`
	Load    string   `json:"load"`
	Pairs   int      `json:"pairs"`
	Batches int      `json:"batches"`
	Count   int      `json:"calls_per_batch"`
	Shim    string   `json:"shim"`
	Peers   []string `json:"peers,omitempty"`
	Results []result `json:"results"`

	HandOver *handOver `json:"hand_over,omitempty"`
}

type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func main() {
	var peers list
	build := flag.String("build", ".build", "build `directory`")
	shim := flag.String("shim", "", "`library` to measure, instead of the build directory's")
	flag.Var(&peers, "peer", "another interposer's `library`, preloaded in the same run; may be repeated")
	results := flag.String("results", "", "`directory` for the table and the raw results")
	pairs := flag.Int("pairs", 25, "runs of each kind")
	only := flag.String("scenario", "", "only the scenarios whose names contain this `text`")
	check := flag.Bool("check", false, "only count instructions of the most common calls, and fail over the limit")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if *shim == "" {
		*shim = filepath.Join(*build, "lib", "libnvshare.so")
	}
	if err := run(ctx, *build, *shim, peers, *results, *pairs, *only, *check); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, build, shim string, peers []string, results string, pairs int, only string, check bool) error {
	b, err := newBench(build, shim, peers)
	if err != nil {
		return err
	}
	defer b.close()
	if err := b.startScheduler(ctx); err != nil {
		return err
	}
	if check {
		return b.check(ctx, os.Stdout)
	}
	r := describe(b, pairs)
	for _, s := range scenarios {
		if !strings.Contains(s.Name, only) {
			continue
		}
		fmt.Fprintln(os.Stderr, s.Name)
		one, err := b.measure(ctx, s, pairs)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		r.Results = append(r.Results, one)
	}
	if strings.Contains("hand-over", only) {
		if r.HandOver, err = b.handOver(ctx); err != nil {
			return err
		}
	}
	var text strings.Builder
	r.print(&text, b.libraries)
	fmt.Print(text.String())
	if results == "" {
		return nil
	}
	if err := os.MkdirAll(results, 0o755); err != nil {
		return err
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	name := filepath.Join(results, strings.NewReplacer(":", "", "-", "").Replace(r.Date)+"-"+r.Commit)
	return errors.Join(os.WriteFile(name+".json", append(data, '\n'), 0o644),
		os.WriteFile(name+".txt", []byte(text.String()), 0o644))
}

func describe(b *bench, pairs int) *report {
	r := &report{
		Date: time.Now().UTC().Format(time.RFC3339), Commit: "unknown", CPU: field("/proc/cpuinfo", "model name"),
		Cores: runtime.NumCPU(), Load: firstLine("/proc/loadavg"), Kernel: firstLine("/proc/sys/kernel/osrelease"),
		Pairs: pairs, Batches: batches, Count: perBatch, Shim: b.libraries[0].path,
	}
	if out, err := exec.Command("git", "describe", "--always", "--dirty").Output(); err == nil {
		r.Commit = strings.TrimSpace(string(out))
	} else if c := firstLine(filepath.Join(b.build, "commit")); c != "" { // of a bundle
		r.Commit = c
	}
	for _, l := range b.libraries[1:] {
		r.Peers = append(r.Peers, l.path)
	}
	return r
}

func firstLine(file string) string {
	data, _ := os.ReadFile(file)
	line, _, _ := strings.Cut(string(data), "\n")
	return line
}

// field is the value of the first "name : value" line.
func field(file, name string) string {
	data, _ := os.ReadFile(file)
	for line := range strings.Lines(string(data)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func (r *report) print(w io.Writer, libraries []library) {
	fmt.Fprintf(w, "%s, commit %s, %s, %d cores, Linux %s\n", r.Date, r.Commit, r.CPU, r.Cores, r.Kernel)
	fmt.Fprintf(w, "Added to a call of a driver that does nothing: median of %d pairs [quartiles], instructions by callgrind.\n", r.Pairs)
	fmt.Fprintf(w, "One thread: wall time; several: each thread's own.\n\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "SCENARIO\tCALL\tNATIVE ns")
	for _, l := range libraries {
		fmt.Fprintf(t, "\t%s ns\tINSTRUCTIONS", strings.ToUpper(l.name))
	}
	fmt.Fprintln(t)
	for _, res := range r.Results {
		for _, call := range res.Calls {
			fmt.Fprintf(t, "%s\t%s\t%.1f", res.Name, call, res.Figures[libraries[0].name][call].Native)
			for _, l := range libraries {
				f, ok := res.Figures[l.name][call]
				if !ok {
					fmt.Fprint(t, "\tfailed\t")
					continue
				}
				fmt.Fprintf(t, "\t%+.1f [%+.1f %+.1f]\t", f.Added.Median, f.Added.Q1, f.Added.Q3)
				if f.AddedInstr != nil {
					fmt.Fprintf(t, "%+.1f", *f.AddedInstr)
				}
			}
			fmt.Fprintln(t)
		}
	}
	t.Flush()
	if r.HandOver != nil {
		r.HandOver.print(w)
	}
	for _, res := range r.Results {
		for name, why := range res.Failed {
			fmt.Fprintf(w, "%s, %s: %s\n", res.Name, name, why)
		}
	}
}
