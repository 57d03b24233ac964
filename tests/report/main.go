// SPDX-License-Identifier: Apache-2.0

// Command report makes one report of raw results: report.html, a page that shows a step of a
// run at a time and needs no network; report.md, a picture for each section that has one, and
// report.json with every figure of the tables. It reads what tests/gpu
// and tests/bench have left in directories, computes nothing but sums and quantiles of
// them, and names for each table its file, date, commit, hardware and driver.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A section is what one file of results says.
type section struct {
	Kind  string     `json:"kind"`
	Title string     `json:"title"`
	About string     `json:"about"` // units, and what is compared with what
	File  string     `json:"file"`
	run   string     // the folder of the run
	step  string     // the file in it
	Run   run        `json:"run"`
	Head  []string   `json:"head"`
	Rows  [][]string `json:"rows"`
	bars  *chart     // nil: no picture

	replays []replay // none: the page has nothing to play
}

// A run is the circumstances of some results, from host.txt beside them.
type run struct {
	Date   string `json:"date"`
	Commit string `json:"commit"`
	Kernel string `json:"kernel,omitempty"`
	GPU    string `json:"gpu,omitempty"`
	Driver string `json:"driver,omitempty"`
	Cores  string `json:"cores,omitempty"`
}

func (r run) String() string {
	var parts []string
	for _, p := range []struct{ what, value string }{{"", r.Date}, {"commit ", r.Commit}, {"", r.GPU}, {"driver ", r.Driver}, {"", r.Kernel}, {"cores: ", r.Cores}} {
		if p.value != "" {
			parts = append(parts, p.what+p.value)
		}
	}
	if len(parts) == 0 {
		return "circumstances not recorded"
	}
	return strings.Join(parts, "; ")
}

// simulated begins the line of host.txt that says of a run that no GPU was there.
const simulated = "simulated GPU"

func (r run) onGPU() bool { return !strings.HasPrefix(r.GPU, simulated) }

// A kind is a file of results that the report knows.
type kind struct {
	pattern string // of its name
	read    func([]byte) (*section, error)
}

// kinds are the results that the report knows, in the order of the report: real
// programs first.
var kinds = []kind{
	{"programs.json", programs},
	{"servers.jsonl", servers},
	{"alone.json", alone},
	{"oversub.json", oversub},
	{"suspend.json", suspend},
	{"migrate.json", migrate},
	{"overlap.json", overlap},
	{"groups-in-pods.json", groupsInPods},
	{"makespan.json", makespan},
	{"rl.json", rl},
	{"priority-cells.json", priority},
	{"preempt.json", preempt},
	{"shares-*.json", shares},
	{"memory.json", memory},
	{"gemm.json", containers},
	{"tenants.json", tenants},
	{"gang.json", gang},
	{"two-gpu.json", twoGPUs},
	{"matrix.json", matrix},
	{"handover.json", handover},
	{"swap.json", swap},
	{"launch.json", launch},
	{"alloc.json", alloc},
	{"starts.json", starts},
	{"[0-9]*-*.json", calls},
}

func main() {
	out := flag.String("o", "report", "`directory` for the report")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: report [-o DIRECTORY] RESULTS...\n\nRESULTS are directories of raw results of tests/gpu and tests/bench.")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := report(*out, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
	fmt.Println(filepath.Join(*out, "report.html"))
}

func report(out string, roots []string) error {
	sections, other, err := collect(roots)
	if err != nil {
		return err
	}
	if len(sections) == 0 {
		return fmt.Errorf("no results that the report knows in %s", strings.Join(roots, ", "))
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	var errs []error
	pictures := map[int]string{}
	for i, s := range sections {
		if s != pictured(sections, s.Kind) {
			continue
		}
		pictures[i] = strings.TrimSuffix(s.Kind, filepath.Ext(s.Kind)) + ".svg"
		errs = append(errs, os.WriteFile(filepath.Join(out, pictures[i]), []byte(s.bars.svg(s.Title)), 0o644))
	}
	html, err := page(sections)
	errs = append(errs, err, os.WriteFile(filepath.Join(out, "report.html"), html, 0o644))
	data, err := json.MarshalIndent(map[string]any{"sections": sections, "only_raw": other}, "", "  ")
	errs = append(errs, err,
		os.WriteFile(filepath.Join(out, "report.json"), append(data, '\n'), 0o644),
		os.WriteFile(filepath.Join(out, "report.md"), []byte(markdown(sections, pictures, other)), 0o644))
	return errors.Join(errs...)
}

// pictured is the section of a kind that has the picture: the newest that compares three cases
// or more, or else the newest; nil for a kind without pictures.
func pictured(sections []*section, kind string) (first *section) {
	for _, s := range sections {
		switch {
		case s.Kind != kind || s.bars == nil:
		case len(s.bars.labels) >= 3:
			return s
		case first == nil:
			first = s
		}
	}
	return first
}

// collect reads the results below roots, in the report's order and newest first, and
// lists the raw files that it does not know.
func collect(roots []string) (sections []*section, other []string, err error) {
	for _, root := range roots {
		if _, err := os.Stat(root); err != nil {
			return nil, nil, fmt.Errorf("results: %w (name directories of raw results, as tests/gpu/run.sh and make bench write them: make report RESULTS=DIRECTORY)", err)
		}
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !slices.Contains([]string{".json", ".jsonl"}, filepath.Ext(path)) || d.Name() == "report.json" {
				return err
			}
			i := slices.IndexFunc(kinds, func(k kind) bool {
				ok, _ := filepath.Match(k.pattern, filepath.Base(path))
				return ok
			})
			if i < 0 {
				other = append(other, filepath.ToSlash(path))
				return nil
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			s, err := kinds[i].read(data)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if len(s.Rows) == 0 { // a part of the step that has no table
				other = append(other, filepath.ToSlash(path))
				return nil
			}
			s.Kind, s.File = kinds[i].pattern, filepath.ToSlash(path)
			s.run, s.step = placeOf(root, path)
			if s.Run == (run{}) {
				s.Run = circumstances(root, filepath.Dir(path))
			}
			sections = append(sections, s)
			return nil
		})
		if err != nil {
			return nil, nil, err
		}
	}
	order := func(s *section) int {
		return slices.IndexFunc(kinds, func(k kind) bool { return k.pattern == s.Kind })
	}
	slices.SortStableFunc(sections, func(a, b *section) int {
		if a.Kind != b.Kind {
			return order(a) - order(b)
		}
		if a.Run.onGPU() != b.Run.onGPU() { // runs on a simulated GPU come last
			return strings.Compare(fmt.Sprint(b.Run.onGPU()), fmt.Sprint(a.Run.onGPU()))
		}
		return strings.Compare(b.Run.Date, a.Run.Date)
	})
	slices.Sort(other)
	return sections, other, nil
}

// circumstances reads the nearest host.txt from dir up to root: date, commit, kernel, a
// line for each GPU, and the number of cores.
func circumstances(root, dir string) (r run) {
	for ; ; dir = filepath.Dir(dir) {
		data, err := os.ReadFile(filepath.Join(dir, "host.txt"))
		if err != nil {
			if dir == root || dir == "." || dir == "/" {
				return r
			}
			continue
		}
		var gpus []string
		for line := range strings.Lines(string(data)) {
			line = strings.TrimSpace(line)
			fields := strings.Split(line, ", ")
			switch {
			case strings.HasPrefix(line, "commit "):
				r.Commit = strings.TrimPrefix(line, "commit ")
			case len(fields) >= 4:
				gpus = append(gpus, fields[0]+" ("+fields[3]+")")
				r.Driver = fields[2]
			case strings.HasPrefix(line, simulated):
				gpus = append(gpus, line)
			case strings.HasPrefix(line, "Linux "):
				r.Kernel = line
			case len(line) > 10 && line[4] == '-':
				r.Date = line
			case line != "" && strings.Trim(line, "0123456789") == "":
				r.Cores = line
			}
		}
		r.GPU = strings.Join(slices.Compact(gpus), ", ")
		if len(gpus) > 1 && !strings.Contains(r.GPU, ",") {
			r.GPU = fmt.Sprintf("%d × %s", len(gpus), gpus[0])
		}
		return r
	}
}

func markdown(sections []*section, pictures map[int]string, other []string) string {
	var b strings.Builder
	newest := ""
	for _, s := range sections {
		newest = max(newest, s.Run.Date)
	}
	fmt.Fprintf(&b, "# nvshare: measurements\n\nGenerated from raw results, the newest of %s. Each table names its file and its\ncircumstances. The newest run of a kind comes first, runs on a simulated GPU last; the\npicture is of the newest run with three cases or more.\n", newest)
	for i, s := range sections {
		if i == 0 || sections[i-1].Kind != s.Kind {
			fmt.Fprintf(&b, "\n## %s\n\n%s\n", s.Title, s.About)
		}
		fmt.Fprintf(&b, "\nSource: `%s`. %s.\n\n", s.File, s.Run)
		fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(s.Head, " | "), strings.Repeat("---|", len(s.Head)))
		for _, row := range s.Rows {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		}
		if pictures[i] != "" {
			fmt.Fprintf(&b, "\n![%s](%s)\n", s.Title, pictures[i])
		}
	}
	if len(other) > 0 {
		fmt.Fprintf(&b, "\n## Raw results without a table\n\n")
		for _, path := range other {
			fmt.Fprintf(&b, "- `%s`\n", path)
		}
	}
	return b.String()
}
