// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/nvshare/nvshare/sched/api"
)

const keysHelp = `↑ ↓ j k  select     s  sort by name, gets, waited, memory, moved
/  show only names with a text: Enter keeps it, Esc drops it     p  pause
t  processes below their tenants     g  one GPU after the other, or all
?  this help     q  end

GETS: part of the GPU's time now. MINUTE: the same over the last minute, a cell
for each interval, the newest on the right. DUE: what it gets in the long run; in
brackets: what it would get, but it does not want the GPU now. Those without
brackets add up to what the GPU has. WAIT: what half of the waits for a grant,
and 99 of 100, lasted at most, in the last minute. ON GPU, AWAY, LIMIT: its
memory. MOVED/s: between GPU and host.`

func (m *monitor) View() tea.View {
	v := tea.NewView(m.draw())
	v.AltScreen = true // the mouse stays the terminal's, which copies names with it
	return v
}

// draw returns the screen: at most height lines of width columns.
func (m *monitor) draw() string {
	gpus := m.arrange()
	foot := m.foot()
	top := m.top(gpus, max((m.height-len(foot))/2, 3))
	body := m.body(max(m.height-len(foot)-len(top), 2))
	lines := append(top, body...)
	if room := max(m.height-len(foot), 1); len(lines) > room {
		lines = lines[:room]
	}
	if m.help {
		lines = m.overlay(lines, max(m.height-len(foot), 1))
	}
	lines = append(lines, foot...)
	lines = lines[max(len(lines)-m.height, 0):]
	for i, text := range lines {
		lines[i] = ansi.Truncate(text, m.width, "…")
	}
	return strings.Join(lines, "\n")
}

// top returns the health and the GPUs, in at most room lines, and an empty one.
func (m *monitor) top(gpus []*api.GPU, room int) []string {
	var b strings.Builder
	io := streams{out: &b, colour: m.colour}
	printHealth(io, m.now, m.width)
	if m.err != nil {
		text := "no answer: "
		fmt.Fprintln(&b, io.paint(red, text)+printable(messageOf(m.err)))
	}
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	var long, short []string
	for _, g := range gpus {
		text := printable(describeGPU(g))
		long, short = append(long, wrap(text, m.width, "       ")...), append(short, text)
	}
	all := long
	if len(lines)+len(long) > room { // many GPUs, or a small terminal
		all = short
	}
	lines = append(lines, all...)
	if len(lines) > room {
		lines = append(lines[:room-1:room-1], fmt.Sprintf("… %d lines more; g shows one GPU", len(lines)-room+1))
	}
	return append(lines, "")
}

// layout says which columns there are.
type layout struct {
	strip              int // cells
	since, share, swap bool
}

// body returns the table of tenants, in room lines, with the selected one among them.
func (m *monitor) body(room int) []string {
	swaps := slices.ContainsFunc(m.lines, func(l line) bool { return l.gpu.Swap != nil })
	var t table
	n := min(m.stripLength(), 60)
	layouts := []layout{{n, true, true, swaps}, {n, true, false, swaps}, {min(n, 30), true, false, swaps}, {min(n, 15), true, false, swaps}, {min(n, 8), false, false, swaps}}
	for i, l := range layouts {
		if t = m.table(l); t.total() <= m.width {
			break
		}
		if i == len(layouts)-1 {
			t.gap = 1
		}
	}
	lines := t.lines(streams{colour: m.colour, size: func() (int, int) { return m.height, m.width }})
	head, rows := lines[0], lines[1:]
	from := min(max(m.cursor()-(room-1)/2, 0), max(len(rows)-(room-1), 0))
	out := []string{head}
	for i := from; i < len(rows) && len(out) < room; i++ {
		out = append(out, rows[i])
	}
	return out
}

func (m *monitor) table(with layout) table {
	t := table{names: 1, whole: map[int]string{}, head: []string{" GPU", "TENANT", "STATE", "GETS", "MINUTE", "DUE", "WAIT p50/p99", "ON GPU"}}
	if with.swap {
		t.head = append(t.head, "AWAY")
	}
	t.head = append(t.head, "LIMIT")
	if with.swap && with.since {
		t.head = append(t.head, "MOVED/s")
	}
	if with.share {
		t.head = append(t.head, "SHARE")
	}
	cursor := m.cursor()
	for i, l := range m.lines {
		cells, colours := m.cells(l, with)
		if i == cursor {
			cells[0], t.whole[i] = ">"+cells[0], marked
		} else {
			cells[0] = " " + cells[0]
			if l.isSuspended() {
				t.whole[i] = grey
			}
		}
		t.add(colours, cells...)
	}
	return t
}

// cells returns a row of the table, and its colours by column.
func (m *monitor) cells(l line, with layout) (cells []string, colours map[int]string) {
	state, since, colour := l.state()
	if c := l.client; c != nil {
		state, since, colour = api.Doing(c), "-", stateColour[c.State]
		if c.SinceNs != 0 {
			since = short(c.SinceNs)
		}
	}
	if with.since && since != "-" {
		state += " " + since
	}
	if c := l.client; c != nil {
		cells = []string{"", fmt.Sprintf("└ %d %s", c.Pid, c.Command), state, "", "", "", "", size(residentOf(l.gpu, c))}
		if with.swap {
			cells = append(cells, size(c.AwayBytes))
		}
		cells = append(cells, "")
		if with.swap && with.since {
			cells = append(cells, "")
		}
		if with.share {
			cells = append(cells, "")
		}
		return cells, map[int]string{2: colour}
	}
	strip := m.strips[l.key()]
	strip = strip[max(len(strip)-with.strip, 0):]
	limit := "-"
	if n := l.Memory.LimitBytes; n != 0 {
		limit = size(n)
	}
	cells = []string{fmt.Sprint(l.gpu.Index), l.name(), state, percent(l.part), strings.Repeat(" ", with.strip-len(strip)) + string(strip), l.due(), halfAndMost(l.Use.Waits), size(l.resident(l.gpu))}
	if with.swap {
		cells = append(cells, size(l.away()))
	}
	cells = append(cells, limit)
	colours = map[int]string{2: colour}
	if l.Memory.LimitBytes != 0 && l.Memory.UsedBytes > l.Memory.LimitBytes {
		colours[len(cells)-1] = red
	}
	if with.swap && with.since {
		cells = append(cells, size(uint64(l.moved)))
	}
	if with.share {
		cells = append(cells, l.share())
	}
	return cells, colours
}

func residentOf(g *api.GPU, c *api.Client) uint64 {
	if g.Swap == nil {
		return c.MemoryBytes
	}
	return c.ResidentBytes
}

// isSuspended tells whether all processes of a line are suspended.
func (l line) isSuspended() bool {
	if l.client != nil {
		return l.client.Suspended
	}
	return len(l.Clients) > 0 && !slices.ContainsFunc(l.Clients, func(c *api.Client) bool { return !c.Suspended })
}

// foot returns the last lines: the selected tenant in full, and what keys do or what is asked.
func (m *monitor) foot() []string {
	keys := fmt.Sprintf("every %v, sorted by %s   ? help  q end  s sort  / filter  t processes  p pause", m.interval, sortings[m.order].name)
	if m.filter != "" {
		keys = fmt.Sprintf("only %q (Esc shows all)   ", m.filter) + keys
	}
	if m.paused {
		keys = "PAUSED   " + keys
	}
	if m.typing {
		return []string{printable("filter: " + m.filter + "█")}
	}
	about := ""
	if len(m.lines) > 0 {
		about = m.lines[m.cursor()].about()
	}
	return []string{about, keys}
}

// about says of a tenant what the table has no room for.
func (l line) about() string {
	text := api.Tenant(l.Container, l.Uid)
	if share := l.share(); share != "" {
		text += ": " + share
	}
	text += fmt.Sprintf("; longest wait %s", short(l.longestWait()))
	if n := l.Use.OutOfMemory; n > 0 {
		text += fmt.Sprintf("; %d times out of memory", n)
	}
	return printable(text)
}

// overlay lays the help over a picture.
func (m *monitor) overlay(lines []string, room int) []string {
	help := strings.Split(keysHelp, "\n")
	for len(lines) < min(room, len(help)+2) {
		lines = append(lines, "")
	}
	from := max((len(lines)-len(help))/2, 0)
	for i, text := range help {
		if from+i < len(lines) {
			lines[from+i] = text
		}
	}
	return lines
}
