// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"text/tabwriter"
)

// line is a cell in short, for the log.
func (c *cell) line() string {
	name := fmt.Sprintf("%s %s %s", c.Framework, c.Allocator, c.Load)
	if c.Skipped != "" {
		return name + ": skipped: " + c.Skipped
	}
	row := c.row()
	return name + ": " + strings.Join(row[3:], ", ") + c.remarks()
}

func (c *cell) remarks() string {
	var text string
	for _, p := range c.Problems {
		text += "\n            problem: " + p
	}
	for _, n := range c.Notes {
		text += "\n            " + n
	}
	return text
}

var columns = []string{"framework", "allocator", "load", "step", "with the shim / native, quartiles",
	"two at 100 ms", "two at 5 ms", "two native", "results", "interposed, bypassed"}

func (c *cell) row() []string {
	row := []string{c.Framework, c.Allocator, c.Load}
	if c.Skipped != "" {
		return append(row, "skipped: "+c.Skipped, "", "", "", "", "", "")
	}
	step := "-"
	if rate := c.rate(native, 0); rate > 0 {
		step = fmt.Sprintf("%.3g ms", 1000/rate)
	}
	two := map[string]string{longQuantum: "-", shortQuantum: "-"}
	for _, w := range c.Beside {
		two[w.Quantum] = percent(w.OfNative)
	}
	pair := "-"
	if c.NativePair != nil {
		pair = percent(c.NativePair.OfNative)
	}
	verdict := "-"
	if c.Results != nil {
		verdict = c.Results.Verdict
	}
	said := "-"
	if p := c.Proof[shim1]; p != nil {
		said = fmt.Sprintf("%d, %d", p.Interposed, p.Bypassed)
	}
	return append(row, step, c.Shim.String(), two[longQuantum], two[shortQuantum], pair, verdict, said)
}

func percent(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f %%", 100*v)
}

func (s *spread) String() string {
	if s == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f %% (%.2f to %.2f)", 100*s.Median, 100*s.Q1, 100*s.Q3)
}

// rows of the table, with the peer's column if there was one.
func (m *matrix) rows() [][]string {
	head := columns
	if m.o.peer != "" {
		head = append(append([]string{}, columns...), "peer / native")
	}
	rows := [][]string{head}
	for _, c := range m.r.Cells {
		row := c.row()
		if m.o.peer != "" {
			row = append(row, c.Peer.String())
		}
		rows = append(rows, row)
	}
	return rows
}

func (m *matrix) table() []string {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, row := range m.rows() {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush()
	return strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
}

// markdown is the same table for a document.
func (m *matrix) markdown() []string {
	var lines []string
	for i, row := range m.rows() {
		lines = append(lines, "| "+strings.Join(row, " | ")+" |")
		if i == 0 {
			lines = append(lines, strings.Repeat("|---", len(row))+"|")
		}
	}
	return lines
}
