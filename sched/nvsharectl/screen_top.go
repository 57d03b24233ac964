// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/nvshare/nvshare/sched/api"
)

// stripTime is how much of the past the strips show.
const stripTime = time.Minute

// monitor is top on a terminal. It changes by messages only, so tests need no terminal.
type monitor struct {
	ask      func() (*api.StatusResponse, error)
	interval time.Duration
	colour   bool

	width, height int
	last, now     *api.StatusResponse
	err           error // of the latest question
	letters       map[string]rune
	strips        map[string][]rune // by GPU: who had most of it, in each interval
	order         int               // of sortings
	filter        string
	typing        bool // the filter
	help, paused  bool
}

// sortings are the orders that the key s goes through.
var sortings = []struct {
	name string
	less func(a, b tenantRates) int
}{
	{"state", func(a, b tenantRates) int { return 0 }}, // as they come
	{"gets", func(a, b tenantRates) int { return cmp.Compare(b.part, a.part) }},
	{"waited", func(a, b tenantRates) int { return cmp.Compare(b.use.WaitedPermille, a.use.WaitedPermille) }},
	{"memory", func(a, b tenantRates) int { return cmp.Compare(b.memory.UsedBytes, a.memory.UsedBytes) }},
	{"name", func(a, b tenantRates) int { return cmp.Compare(a.name(), b.name()) }},
}

const keysHelp = `q  end        s  sort by state, gets, waited, memory, name
p  pause      /  show only names with a text; Enter ends, Esc drops it
?  these keys
Strip: a letter for each interval of the last minute, of the tenant that had
most of the GPU; "." nobody had a tenth. The letters stand before the names.`

type (
	tickMsg   struct{}
	answerMsg struct {
		r   *api.StatusResponse
		err error
	}
)

// screen shows top until its user ends it.
func (f *topFlags) screen(ctx context.Context, runDir string, io streams, first *api.StatusResponse) error {
	m := newMonitor(func() (*api.StatusResponse, error) { return f.ask(ctx, runDir) }, f.interval, io.colour, first)
	_, err := tea.NewProgram(m, tea.WithContext(ctx), tea.WithOutput(io.out)).Run()
	if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil || errors.Is(err, tea.ErrInterrupted) {
		err = nil // the user has seen enough
	}
	if err == nil && len(m.now.Problems) > 0 {
		return errUnhealthy
	}
	return err
}

func newMonitor(ask func() (*api.StatusResponse, error), interval time.Duration, colour bool, first *api.StatusResponse) *monitor {
	return &monitor{ask: ask, interval: interval, colour: colour, width: 80, height: 24, last: first, now: first,
		letters: map[string]rune{}, strips: map[string][]rune{}}
}

func (m *monitor) tick() tea.Cmd {
	return tea.Tick(m.interval, func(time.Time) tea.Msg { return tickMsg{} })
}

func (m *monitor) Init() tea.Cmd { return m.tick() }

func (m *monitor) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tickMsg:
		if m.paused {
			return m, m.tick()
		}
		return m, func() tea.Msg {
			r, err := m.ask()
			return answerMsg{r, err}
		}
	case answerMsg:
		if m.err = msg.err; msg.err == nil {
			m.last, m.now = m.now, msg.r
			m.record()
		}
		return m, m.tick()
	case tea.KeyPressMsg:
		return m, m.key(msg)
	}
	return m, nil
}

// key does what a key means.
func (m *monitor) key(k tea.KeyPressMsg) tea.Cmd {
	if m.typing {
		switch k.String() {
		case "enter":
			m.typing = false
		case "esc", "ctrl+c":
			m.typing, m.filter = false, ""
		case "backspace":
			if r := []rune(m.filter); len(r) > 0 {
				m.filter = string(r[:len(r)-1])
			}
		default:
			m.filter += k.Text
		}
		return nil
	}
	switch k.String() {
	case "q", "ctrl+c":
		return tea.Quit
	case "s":
		m.order = (m.order + 1) % len(sortings)
	case "/":
		m.typing = true
	case "esc":
		m.filter, m.help = "", false
	case "p", "space":
		m.paused = !m.paused
	case "?", "h":
		m.help = !m.help
	}
	return nil
}

// letter returns the letter of a tenant, the same as long as top runs.
func (m *monitor) letter(key string) rune {
	l, ok := m.letters[key]
	if !ok {
		const all = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
		l = '*'
		if n := len(m.letters); n < len(all) {
			l = rune(all[n])
		}
		m.letters[key] = l
	}
	return l
}

// record notes who had most of each GPU in the latest interval.
func (m *monitor) record() {
	all, _ := ratesOf(m.last, m.now)
	for _, g := range all {
		most, cell := 0.1, '.'
		for _, t := range g.tenants {
			l := m.letter(t.key())
			if t.part > most {
				most, cell = t.part, l
			}
		}
		strip := append(m.strips[g.gpu.Uuid], cell)
		m.strips[g.gpu.Uuid] = strip[max(len(strip)-int(stripTime/m.interval), 0):]
	}
}

func (m *monitor) View() tea.View {
	v := tea.NewView(m.draw())
	v.AltScreen = true
	return v
}

// draw returns the screen: at most height lines of width columns.
func (m *monitor) draw() string {
	var b strings.Builder
	io := streams{out: &b, colour: m.colour, size: func() (int, int) { return m.height, m.width }}
	printHealth(io, m.now, m.width)
	if m.err != nil {
		fmt.Fprintln(&b, io.paint(red, "no answer: ")+printable(m.err.Error()))
	}
	if m.help {
		fmt.Fprintln(&b, "\n"+keysHelp)
	}
	all, _ := ratesOf(m.last, m.now)
	tenants := topTable()
	for _, g := range all {
		for _, line := range wrap(printable(describeGPU(g.gpu)), m.width, "       ") {
			fmt.Fprintln(&b, line)
		}
		strip := m.strips[g.gpu.Uuid]
		fmt.Fprintf(&b, "       %s\n", string(strip[max(len(strip)-max(m.width-7, 0), 0):]))
		slices.SortStableFunc(g.tenants, sortings[m.order].less)
		for _, t := range g.tenants {
			if strings.Contains(t.name(), m.filter) {
				t.addTo(&tenants, fmt.Sprintf("%d %c", g.gpu.Index, m.letter(t.key())))
			}
		}
	}
	fmt.Fprintln(&b)
	tenants.print(io)
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	foot := fmt.Sprintf("every %v, sorted by %s   q end  s sort  / filter  p pause  ? keys", m.interval, sortings[m.order].name)
	switch {
	case m.typing:
		foot = "filter: " + m.filter + "█"
	case m.filter != "":
		foot = fmt.Sprintf("only %q (Esc shows all)   ", m.filter) + foot
	}
	if m.paused {
		foot = "PAUSED   " + foot
	}
	if room := max(m.height-1, 1); len(lines) > room {
		lines = append(lines[:room-1:room-1], fmt.Sprintf("… %d lines more", len(lines)-room+1))
	}
	return strings.Join(append(lines, string([]rune(foot)[:min(len([]rune(foot)), m.width)])), "\n")
}
