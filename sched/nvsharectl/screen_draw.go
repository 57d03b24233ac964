// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/nvshare/nvshare/sched/api"
)

const keysHelp = `↑ ↓ j k  select, also by click and wheel   q  end
s        sort by state, gets, waited, memory, moved, name; or click a head
/        show only names with a text: Enter keeps it, Esc drops it
t        processes below their tenants      g  one GPU after the other, or all
p        pause                              ?  these keys

The strip has a letter for each interval of the last minute: of the tenant that
had most of the GPU; "." nobody had a tenth. Behind it is who waits, the longest
first. GETS: part of the GPU's time now. DUE: what it gets in the long run.
WAIT: what half of the waits for a grant, and 99 of 100, lasted at most, in the
last minute. ON GPU, AWAY, LIMIT: its memory. MOVED/s: between GPU and host.`

// heads is where a click on a column's head sorts.
type heads struct {
	row    int
	starts []int
	order  []int // of sortings, by column; -1: none
}

func (h heads) at(x, y int) (order int, there bool) {
	if y != h.row || len(h.starts) == 0 || x < 0 {
		return 0, false
	}
	for i, start := range h.starts {
		if x >= start {
			order = h.order[i]
		}
	}
	return order, order >= 0
}

func (m *monitor) View() tea.View {
	v := tea.NewView(m.draw())
	v.AltScreen, v.MouseMode = true, tea.MouseModeCellMotion
	return v
}

// draw returns the screen: at most height lines of width columns.
func (m *monitor) draw() string {
	gpus := m.arrange()
	foot := m.foot()
	top := m.top(gpus, max((m.height-len(foot))/2, 3))
	body := m.body(len(top), max(m.height-len(foot)-len(top), 2))
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
		strip := m.strip(g)
		long = append(append(long, wrap(printable(describeGPU(g)), m.width, "       ")...), "       "+strip)
		short = append(short, fmt.Sprintf("GPU %-2d %s", g.Index, strip))
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

// strip says who had a GPU over the last minute, and who waits for it.
func (m *monitor) strip(g *api.GPU) string {
	strip := m.strips[g.Uuid]
	text := strings.Repeat(" ", m.stripLength()-len(strip)) + string(strip)
	if room := max(m.width/2, 10); m.stripLength() > room {
		text = string([]rune(text)[m.stripLength()-room:])
	}
	return text + "  " + m.queue(g)
}

// queue names the tenants that wait for a GPU, the one that waits longest first.
func (m *monitor) queue(g *api.GPU) string {
	since := map[string]int64{}
	var keys []string
	for _, t := range tenantsOf(g) {
		for _, c := range t.clients {
			if c.State != api.ClientState_CLIENT_STATE_WAITING {
				continue
			}
			if _, there := since[t.key()]; !there {
				keys = append(keys, t.key())
			}
			since[t.key()] = max(since[t.key()], c.SinceNs)
		}
	}
	if len(keys) == 0 {
		return "nobody waits"
	}
	slices.SortStableFunc(keys, func(a, b string) int { return cmp.Compare(since[b], since[a]) })
	text := "queue:"
	for _, key := range keys {
		text += fmt.Sprintf(" %c %s", m.letter(key), brief(since[key]))
	}
	return text
}

// layout says which columns there are.
type layout struct{ bars, since, share, swap bool }

// body returns the table of tenants, in room lines, with the selected one among them.
func (m *monitor) body(top, room int) []string {
	swaps := slices.ContainsFunc(m.lines, func(l line) bool { return l.gpu.Swap != nil })
	var t table
	layouts := []layout{{true, true, true, swaps}, {true, true, false, swaps}, {false, true, false, swaps}, {false, false, false, swaps}}
	for i, l := range layouts {
		if t = m.table(l); t.total() <= m.width {
			break
		}
		if i == len(layouts)-1 {
			t.gap = 1
		}
	}
	lines, starts := t.lines(streams{colour: m.colour, size: func() (int, int) { return m.height, m.width }})
	m.heads = heads{row: top, starts: starts}
	for _, head := range t.head {
		m.heads.order = append(m.heads.order, slices.IndexFunc(sortings, func(s sorting) bool { return s.column == head }))
	}
	m.places = map[int]string{}
	head, rows := lines[0], lines[1:]
	from := min(max(m.cursor()-(room-1)/2, 0), max(len(rows)-(room-1), 0))
	out := []string{head}
	for i := from; i < len(rows) && len(out) < room; i++ {
		m.places[top+len(out)] = m.lines[i].key()
		out = append(out, rows[i])
	}
	return out
}

func (m *monitor) table(with layout) table {
	t := table{names: 1, whole: map[int]string{}, head: []string{" GPU", "TENANT", "STATE", "GETS", "DUE", "WAIT p50/p99", "ON GPU"}}
	if with.swap {
		t.head = append(t.head, "AWAY")
	}
	t.head = append(t.head, "LIMIT")
	if with.swap {
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
		state, since, colour = doing(c), "-", stateColour[c.State]
		if c.SinceNs != 0 {
			since = short(c.SinceNs)
		}
	}
	if with.since && since != "-" {
		state += " " + since
	}
	number := fmt.Sprintf("%d %c", l.gpu.Index, m.letter(l.tenant.key()))
	if c := l.client; c != nil {
		cells = []string{"", fmt.Sprintf("└ %d %s", c.Pid, c.Command), state, "", "", "", size(residentOf(l.gpu, c))}
		if with.swap {
			cells = append(cells, size(c.AwayBytes))
		}
		cells = append(cells, "")
		if with.swap {
			cells = append(cells, "")
		}
		if with.share {
			cells = append(cells, "")
		}
		return cells, map[int]string{2: colour}
	}
	gets := fmt.Sprintf("%.0f%%", 100*l.part)
	if with.bars {
		gets = bar(l.part) + " " + percent(l.part)
	}
	due := "-"
	if l.use.Container != nil {
		due = fmt.Sprintf("%d%%", (l.use.PromisedPermille+5)/10)
	}
	limit := "-"
	if n := l.memory.LimitBytes; n != 0 {
		limit = size(n)
	}
	cells = []string{number, l.name(), state, gets, due, halfAndMost(l.use.Waits), size(l.resident(l.gpu))}
	if with.swap {
		cells = append(cells, size(l.away()))
	}
	cells = append(cells, limit)
	colours = map[int]string{2: colour}
	if l.memory.LimitBytes != 0 && l.memory.UsedBytes > l.memory.LimitBytes {
		colours[len(cells)-1] = red
	}
	if with.swap {
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
	return len(l.clients) > 0 && !slices.ContainsFunc(l.clients, func(c *api.Client) bool { return !c.Suspended })
}

// foot returns the last lines: the selected tenant in full, and what keys do or what is asked.
func (m *monitor) foot() []string {
	keys := fmt.Sprintf("every %v, sorted by %s   q end  s sort  / filter  t tree  p pause  ? keys", m.interval, sortings[m.order].name)
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
	text := api.Tenant(l.container, l.uid)
	if share := l.share(); share != "" {
		text += ": " + share
	}
	text += fmt.Sprintf("; longest wait %s", brief(l.longestWait()))
	if n := l.use.OutOfMemory; n > 0 {
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
