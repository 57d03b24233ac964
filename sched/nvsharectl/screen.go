// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/nvshare/nvshare/sched/api"
)

// printStatus prints the health, the GPUs and the tenants, within the terminal's width.
func printStatus(io streams, r *api.StatusResponse) {
	printHealth(io, r, io.width())
	tenants := table{names: 1, head: []string{"GPU", "TENANT", "STATE", "GETS", "WAITED", "MEMORY"}}
	if len(r.Gpus) > 0 {
		fmt.Fprintln(io.out)
	}
	for _, g := range r.Gpus {
		for _, line := range wrap(printable(describeGPU(g)), io.width(), "       ") {
			fmt.Fprintln(io.out, line)
		}
		for _, t := range tenantsOf(g) {
			t.addNarrow(&tenants, g)
		}
	}
	if len(tenants.rows) > 0 {
		fmt.Fprintln(io.out)
		tenants.print(io)
	}
}

// problems is how many there are, with those that only root may read.
func problems(r *api.StatusResponse) int {
	return len(r.Problems) + int(r.GetView().GetProblems())
}

// numbered is "1 problem", "2 problems".
func numbered(n int, one, several string) string {
	if n != 1 {
		one = several
	}
	return fmt.Sprintf("%d %s", n, one)
}

// printHealth prints whether all is well, and what is not, in lines of a width.
func printHealth(io streams, r *api.StatusResponse, width int) {
	health := io.paint(green, "OK")
	if n := problems(r); n > 0 {
		health = io.paint(red, numbered(n, "problem", "problems"))
	}
	fmt.Fprintf(io.out, "Health: %s. Scheduler %s, up %v, %s\n",
		health, printable(r.Version), time.Duration(r.UptimeNs).Round(time.Second), numbered(int(r.Clients), "process", "processes"))
	if view := viewOf(r); view != "" {
		for _, line := range wrap(printable(view), width, "  ") {
			fmt.Fprintln(io.out, line)
		}
	}
	for _, p := range r.Problems {
		const mark = "PROBLEM: "
		for i, line := range wrap(mark+printable(p), width, "  ") {
			if i == 0 {
				line = io.paint(red, mark) + strings.TrimPrefix(line, mark)
			}
			fmt.Fprintln(io.out, line)
		}
	}
}

// describeGPU says in one sentence what a GPU is and how it is shared.
func describeGPU(g *api.GPU) string {
	parts := []string{fmt.Sprintf("GPU %d  %s, %s reserved", g.Index, g.Name, memoryOf(g, " of ")), sharing(g)}
	if others := othersOf(g); others != "" {
		parts = append(parts, others)
	}
	if n := count(g, api.ClientState_CLIENT_STATE_FENCED); n > 0 {
		parts = append(parts, fmt.Sprintf("%d fenced", n))
	}
	if s := g.Swap; s != nil && s.AwayBytes+s.OutBytes+s.Refused > 0 {
		parts = append(parts, fmt.Sprintf("swap: %s away, %s of %s host memory", size(s.AwayBytes), size(s.ArenaBytes), size(s.ArenaLimitBytes)))
	}
	var promised uint32
	for _, p := range api.Promised(g) {
		promised += p.CoreRequest
	}
	if promised > 0 {
		parts = append(parts, fmt.Sprintf("%d%% promised", promised))
	}
	if g.Drained {
		parts = append(parts, "drained")
	}
	return strings.Join(parts, "; ")
}

// sharing says how tenants share a GPU, and where the scheduler chose, why.
func sharing(g *api.GPU) string {
	reason := wayReason(g)
	how := fmt.Sprintf("turns of %v", time.Duration(g.QuantumNs))
	switch g.Way {
	case "driver":
		how = "all at the same time"
	case "slices":
		how = "shared by time slices"
	}
	switch {
	case g.Mode == api.Mode_MODE_AUTO && unused(g):
		return how + " (auto: nobody uses it now)"
	case g.Mode == api.Mode_MODE_AUTO && reason != "":
		return how + " (auto: " + reason + ")"
	case g.Mode == api.Mode_MODE_AUTO:
		return how + " (auto)"
	case overridden(g) && reason != "":
		return how + " (" + reason + ")"
	}
	return how
}

// unused says whether no process is on a GPU: then nobody's work is the reason for a way.
func unused(g *api.GPU) bool { return len(g.Clients) == 0 && g.Others.GetClients() == 0 }

func (t *tenant) addNarrow(to *table, g *api.GPU) {
	state, since, colour := t.state()
	if since != "-" {
		state += " " + since
	}
	got := t.got()
	if limit := t.use.GetShare().GetCoreLimit(); limit != 0 && got != "-" {
		got += fmt.Sprintf(" of %d%%", limit)
	}
	memory, memoryColour := t.ofLimit(" of ")
	to.add(map[int]string{2: colour, 5: memoryColour},
		fmt.Sprint(g.Index), t.name(), state, got, t.waited(), memory)
}

// ending shortens a name to its end, which tells the pods of one controller apart.
func ending(name string, width int) string {
	if n := utf8.RuneCountInString(name); n > width {
		return "…" + string([]rune(name)[n-width+1:])
	}
	return name
}

// wrap breaks a line at spaces. Lines after the first begin with indent.
func wrap(text string, width int, indent string) (lines []string) {
	line := ""
	for i, word := range strings.Split(text, " ") {
		switch {
		case i == 0:
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width:
			lines = append(lines, line)
			line = indent + word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}
