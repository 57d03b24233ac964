// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/nvshare/nvshare/sched/api"
)

// stripTime is how much of the past the strips show.
const stripTime = time.Minute

// monitor is top on a terminal. It changes by messages only, so tests need no terminal.
type monitor struct {
	ask      func() answerMsg // by one goroutine at a time
	interval time.Duration
	colour   bool

	width, height int
	last, now     *api.StatusResponse
	err           error             // of the latest question
	strips        map[string][]rune // by line: what the tenant had in each interval

	order    int    // of sortings
	filter   string // of names
	gpu      string // the UUID of the only GPU that is shown; "": all
	selected string // the key of a line
	tree     bool   // processes below their tenants
	paused   bool
	help     bool
	typing   bool // the filter is being typed

	lines []line // of the latest picture, those that can be selected
}

type sorting struct {
	name string
	less func(a, b line) int
}

// sortings are the orders that the key s goes through. By name, rows stay where they are.
var sortings = []sorting{
	{"name", func(a, b line) int { return cmp.Compare(a.name(), b.name()) }},
	{"gets", func(a, b line) int { return cmp.Compare(b.part, a.part) }},
	{"waited", func(a, b line) int { return cmp.Compare(b.Use.WaitedPermille, a.Use.WaitedPermille) }},
	{"memory", func(a, b line) int { return cmp.Compare(b.Memory.UsedBytes, a.Memory.UsedBytes) }},
	{"moved", func(a, b line) int { return cmp.Compare(b.moved, a.moved) }},
}

type (
	tickMsg   struct{}
	answerMsg struct {
		r   *api.StatusResponse
		err error
	}
)

// line is a tenant on a GPU, or one of its processes.
type line struct {
	tenantRates
	gpu    *api.GPU
	client *api.Client // nil: the tenant
}

func (l line) key() string {
	key := l.gpu.Uuid + " " + l.tenant.Key()
	if l.client != nil {
		key += " " + strconv.FormatUint(l.client.Id, 10)
	}
	return key
}

// screen shows top until its user ends it.
func (f *topFlags) screen(ctx context.Context, runDir string, io streams, first *api.StatusResponse) error {
	m := newMonitor(func() answerMsg {
		r, err := f.ask(ctx, runDir)
		return answerMsg{r, err}
	}, f.interval, io.colour, first)
	_, err := tea.NewProgram(m, tea.WithContext(ctx)).Run()
	if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil || errors.Is(err, tea.ErrInterrupted) {
		err = nil // the user has seen enough
	}
	if err == nil && problems(m.now) > 0 {
		return errUnhealthy
	}
	return err
}

func newMonitor(ask func() answerMsg, interval time.Duration, colour bool, first *api.StatusResponse) *monitor {
	return &monitor{ask: ask, interval: interval, colour: colour, width: 80, height: 24, last: first, now: first, strips: map[string][]rune{}}
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
		return m, func() tea.Msg { return m.ask() }
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

// key does what a key means: to what is typed, or to the screen.
func (m *monitor) key(k tea.KeyPressMsg) tea.Cmd {
	name := k.String()
	switch {
	case name == "ctrl+c":
		return tea.Quit
	case m.typing:
		m.typed(k)
		return nil
	}
	switch name {
	case "q":
		return tea.Quit
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "s":
		m.order = (m.order + 1) % len(sortings)
	case "t":
		m.tree = !m.tree
	case "g":
		m.nextGPU()
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

// typed adds a key to the filter.
func (m *monitor) typed(k tea.KeyPressMsg) {
	switch k.String() {
	case "enter":
		m.typing = false
	case "esc":
		m.filter, m.typing = "", false
	case "backspace":
		if r := []rune(m.filter); len(r) > 0 {
			m.filter = string(r[:len(r)-1])
		}
	default:
		m.filter += k.Text
	}
}

// move selects another line.
func (m *monitor) move(by int) {
	if n := len(m.lines); n > 0 {
		m.selected = m.lines[min(max(m.cursor()+by, 0), n-1)].key()
	}
}

// cursor is the place of the selected line. The first line is selected where it has gone.
func (m *monitor) cursor() int {
	return max(slices.IndexFunc(m.lines, func(l line) bool { return l.key() == m.selected }), 0)
}

// nextGPU shows the next GPU alone, or all again.
func (m *monitor) nextGPU() {
	i := slices.IndexFunc(m.now.Gpus, func(g *api.GPU) bool { return g.Uuid == m.gpu })
	if m.gpu = ""; i+1 < len(m.now.Gpus) {
		m.gpu = m.now.Gpus[i+1].Uuid
	}
}

// levels are what a cell of a strip shows, from nothing to all of the GPU's time.
var levels = []rune("·▁▂▃▄▅▆▇█")

// record notes what each tenant had in the latest interval.
func (m *monitor) record() {
	strips := map[string][]rune{} // without those who have gone
	for _, g := range ratesOf(m.last, m.now) {
		for _, t := range g.tenants {
			key := line{tenantRates: t, gpu: g.gpu}.key()
			level := min(int(math.Ceil(t.part*float64(len(levels)-1)-0.02)), len(levels)-1)
			strip := append(m.strips[key], levels[max(level, 0)])
			strips[key] = strip[max(len(strip)-m.stripLength(), 0):]
		}
	}
	m.strips = strips
}

// stripLength is how many intervals a strip shows.
func (m *monitor) stripLength() int { return max(int(stripTime/m.interval), 1) }

// arrange returns the GPUs that are shown and the lines in their order.
func (m *monitor) arrange() (gpus []*api.GPU) {
	m.lines = nil
	for _, g := range ratesOf(m.last, m.now) {
		if m.gpu != "" && g.gpu.Uuid != m.gpu {
			continue
		}
		gpus = append(gpus, g.gpu)
		var lines []line
		for _, t := range g.tenants {
			if strings.Contains(t.name(), m.filter) {
				lines = append(lines, line{tenantRates: t, gpu: g.gpu})
			}
		}
		slices.SortStableFunc(lines, sortings[0].less)
		slices.SortStableFunc(lines, sortings[m.order].less)
		for _, l := range lines {
			m.lines = append(m.lines, l)
			if m.tree {
				for _, c := range l.Clients {
					m.lines = append(m.lines, line{l.tenantRates, g.gpu, c})
				}
			}
		}
	}
	return gpus
}
