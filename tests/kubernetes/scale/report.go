// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// report draws the results in a directory into scale.svg beside them, and writes their
// table into the README above the directory.
func report(dir string) error {
	all, err := results(dir)
	if err != nil {
		return err
	}
	if err := drawResults(dir, all); err != nil {
		return err
	}
	return writeTable(filepath.Join(filepath.Dir(dir), "README.md"), all)
}

// results reads the runs in a directory, in the order of their profiles and nodes.
func results(dir string) (all []result, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		r := result{file: strings.TrimSuffix(f, ".json")}
		data, err := os.ReadFile(f)
		if err == nil {
			err = json.Unmarshal(data, &r)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		all = append(all, r)
	}
	slices.SortStableFunc(all, func(a, b result) int {
		if c := strings.Compare(a.Profile, b.Profile); c != 0 {
			return c
		}
		return a.Nodes - b.Nodes
	})
	return all, nil
}

// The lines of the README between which the table stands.
const tableBegin, tableEnd = "<!-- results: written by run.sh -->\n", "<!-- end of results -->\n"

// writeTable replaces the table of a README.
func writeTable(file string, all []result) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, found := strings.Cut(string(text), tableBegin)
	_, after, ends := strings.Cut(rest, tableEnd)
	if !found || !ends {
		return fmt.Errorf("%s lacks the line %q or %q", file, tableBegin, tableEnd)
	}
	return os.WriteFile(file, []byte(before+tableBegin+table(all)+tableEnd+after), 0o644)
}

// table writes the runs in Markdown.
func table(all []result) string {
	var b strings.Builder
	b.WriteString("| run | date | nodes | pods | seconds | others kept busy | processor seconds of all parts | kube-scheduler, ms a pod | GPUs used / bound | devices above what they have |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range all {
		var cpu float64
		for name, s := range r.CPU {
			if name != "machine" {
				cpu += s
			}
		}
		name := "`" + filepath.Base(r.file) + "`"
		if r.GOGC != "" {
			name += ", `GOGC=" + r.GOGC + "`"
		}
		date, _, _ := strings.Cut(r.Date, "T")
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %.0f | %.1f of %d cores | %.0f | %.1f | %d / %d = %.2f | %d |\n",
			name, date, r.Nodes, r.Pods, r.Seconds, r.Others, r.Cores, cpu, r.PerPod, r.Audit.Devices, r.Bound, float64(r.Audit.Devices)/float64(r.Bound), len(r.Audit.Overcommit)+len(r.Audit.Wrong))
	}
	return b.String()
}
