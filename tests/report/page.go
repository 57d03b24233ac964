// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/web/page/uplot"
)

//go:embed page.html
var pageHTML string

//go:embed replay.js
var replayScript string

// placeOf returns the run and the step that a file of results is of. Below a directory of runs, called
// results, each has a folder; another directory is one run.
func placeOf(root, path string) (run, step string) {
	if whole, err := filepath.Abs(root); err == nil {
		root = whole
	}
	if whole, err := filepath.Abs(path); err == nil {
		path = whole
	}
	step, _ = filepath.Rel(root, path)
	step, run = filepath.ToSlash(step), filepath.Base(root)
	if run == "results" {
		first, rest, nested := strings.Cut(step, "/")
		if nested {
			return first, rest
		}
		run = filepath.Base(filepath.Dir(root)) // of bench, whose runs are files
	}
	return run, step
}

// page returns the page with the sections in it, the newest run first, and of the same step of a run the table that
// compares most.
func page(sections []*section) ([]byte, error) {
	type shown struct {
		Run           string     `json:"run"`
		Step          string     `json:"step"`
		Title         string     `json:"title"`
		About         string     `json:"about"`
		File          string     `json:"file"`
		Circumstances string     `json:"circumstances"`
		Head          []string   `json:"head"`
		Rows          [][]string `json:"rows"`
		SVG           string     `json:"svg"`
		Replays       []replay   `json:"replays,omitempty"`
	}
	var all []shown
	for _, s := range sections {
		picture := ""
		if s.bars != nil {
			picture = s.bars.svg(s.Title)
		}
		all = append(all, shown{s.run, s.step, s.Title, s.About, s.File, s.Run.String(), s.Head, s.Rows, picture, s.replays})
	}
	date := func(s shown) string {
		if s.Run > "9" { // what is not called by its date comes last
			return ""
		}
		return s.Run
	}
	kinds := map[string]int{}
	for _, s := range all {
		if _, ok := kinds[s.Title]; !ok {
			kinds[s.Title] = len(kinds)
		}
	}
	slices.SortStableFunc(all, func(a, b shown) int {
		return cmp.Or(strings.Compare(date(b), date(a)), kinds[a.Title]-kinds[b.Title], len(b.Head)-len(a.Head))
	})
	data, err := json.Marshal(all) // which leaves no < that could end the script
	parts := strings.NewReplacer("{{data}}", string(data), "{{plot style}}", uplot.Style, "{{plot}}", uplot.Script, "{{replay}}", replayScript)
	return []byte(parts.Replace(pageHTML)), err
}
