// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/nvshare/nvshare/sched/api"
)

// press sends keys to a monitor, and what they cause.
func press(m *monitor, keys ...string) {
	special := map[string]rune{"enter": tea.KeyEnter, "esc": tea.KeyEscape, "up": tea.KeyUp, "down": tea.KeyDown, "backspace": tea.KeyBackspace}
	for _, k := range keys {
		msg := tea.KeyPressMsg{Text: k, Code: []rune(k)[0]}
		if code, is := special[k]; is {
			msg = tea.KeyPressMsg{Code: code}
		}
		if _, cmd := m.Update(msg); cmd != nil {
			m.Update(cmd())
		}
	}
}

// spell is the keys of a text.
func spell(text string) []string { return strings.Split(text, "") }

// busyMinute is a monitor of a minute in which train-b had half of GPU 0.
func busyMinute(first, later func() *api.StatusResponse) *monitor {
	m := newMonitor(nil, 2*time.Second, false, first())
	for range 40 { // more than the strips show
		m.now = first()
		m.Update(answerMsg{r: later()})
	}
	return m
}

func swappedLater() *api.StatusResponse {
	r, s := twoSecondsLater(), swapped()
	for i, g := range s.Gpus {
		r.Gpus[i].Swap = g.Swap
		for j, c := range g.Clients {
			c.Calls, c.Grants, c.SwappedOutBytes = r.Gpus[i].Clients[j].Calls, r.Gpus[i].Clients[j].Grants, c.SwappedOutBytes+2<<30
		}
		r.Gpus[i].Clients = g.Clients
	}
	idle := r.Gpus[0].Clients[2]
	idle.Suspended, idle.AwayBytes = true, 4<<30
	return r
}

// The screens that people see, each within its terminal.
func TestTopOnATerminal(t *testing.T) {
	for _, tc := range []struct {
		name          string
		width, height int
		keys          []string
		swaps, colour bool
	}{
		{name: "80x24", width: 80, height: 24},
		{name: "120x40", width: 120, height: 40},
		{name: "80x24-swap", width: 80, height: 24, swaps: true},
		{name: "120x40-swap-tree", width: 120, height: 40, swaps: true, keys: []string{"t"}},
		{name: "80x24-help", width: 80, height: 24, keys: []string{"?"}},
		{name: "80x24-colour", width: 80, height: 24, swaps: true, colour: true},
		{name: "80x24-filter", width: 80, height: 24, keys: append([]string{"/"}, spell("train")...)},
	} {
		m := busyMinute(sample, twoSecondsLater)
		if tc.swaps {
			m = busyMinute(swapped, swappedLater)
		}
		m.colour = tc.colour
		m.Update(tea.WindowSizeMsg{Width: tc.width, Height: tc.height})
		m.draw()
		press(m, tc.keys...)
		golden(t, "top-"+tc.name+".txt", m.draw()+"\n")
	}
}

// No picture is larger than its terminal, whatever the terminal and the keys.
func TestTopFits(t *testing.T) {
	m := busyMinute(swapped, swappedLater)
	for range 6 { // more GPUs than there is room for
		for _, r := range []*api.StatusResponse{m.last, m.now} {
			r.Gpus = append(r.Gpus, swapped().Gpus[1])
		}
	}
	for _, size := range []tea.WindowSizeMsg{{Width: 200, Height: 60}, {Width: 80, Height: 24}, {Width: 80, Height: 6}, {Width: 40, Height: 10}, {Width: 1, Height: 1}, {}} {
		m.Update(size)
		for _, keys := range [][]string{{"t"}, {"?"}, {"?"}, {"c", "4", "enter"}, {"n"}, {"/", "t"}, {"esc"}, {"g"}, {"down", "down"}} {
			press(m, keys...)
			lines := strings.Split(m.draw(), "\n")
			if len(lines) > max(size.Height, 1) {
				t.Errorf("%v: %d lines", size, len(lines))
			}
			for _, line := range lines {
				if ansi.StringWidth(line) > size.Width {
					t.Errorf("%v: %d columns: %s", size, ansi.StringWidth(line), line)
				}
			}
		}
	}
}

func TestTopSortsAndFilters(t *testing.T) {
	m := busyMinute(sample, twoSecondsLater)
	m.Update(tea.WindowSizeMsg{Width: 120, Height: 40})
	screen := m.draw()
	if strings.Index(screen, "train-a") > strings.Index(screen, "train-b") {
		t.Errorf("by name:\n%s", screen)
	}
	press(m, "s", "s")
	if screen := m.draw(); strings.Index(screen, "train-b") > strings.Index(screen, "train-a") || !strings.Contains(screen, "sorted by waited") {
		t.Errorf("sorted by waited:\n%s", screen)
	}
	press(m, append(append([]string{"/"}, spell("train")...), "enter")...)
	if screen := m.draw(); strings.Contains(screen, "user 1000") || !strings.Contains(screen, "train-a") {
		t.Errorf("filtered:\n%s", screen)
	}
	press(m, "esc", "g")
	if screen := m.draw(); strings.Contains(screen, "GPU 1 ") || !strings.Contains(screen, "user 1000") {
		t.Errorf("only the first GPU:\n%s", screen)
	}
	press(m, "g", "g")
	if screen := m.draw(); !strings.Contains(screen, "GPU 1 ") || !strings.Contains(screen, "GPU 0 ") {
		t.Errorf("all GPUs again:\n%s", screen)
	}
	m.Update(answerMsg{err: errors.New("it has ended")})
	if screen := m.draw(); !strings.Contains(screen, "no answer: it has ended") || !strings.Contains(screen, "train-a") {
		t.Errorf("without scheduler:\n%s", screen)
	}
	if _, cmd := m.Update(tea.KeyPressMsg{Text: "q", Code: 'q'}); cmd == nil {
		t.Error("q does not end it")
	}
}

// DUE adds up: a latency tenant between two requests does not count, while others have what it is due.
func TestDueAddsUp(t *testing.T) {
	of := func(state api.ClientState, use *api.TenantUse) string {
		use.Container = &api.Container{Id: "x"}
		return (&tenant{&api.GPUTenant{Clients: []*api.Client{{State: state}}, Use: use}}).due()
	}
	if got := of(api.ClientState_CLIENT_STATE_HOLDING, &api.TenantUse{PromisedPermille: 750}); got != "75%" {
		t.Errorf("a holder is due %s", got)
	}
	if got := of(api.ClientState_CLIENT_STATE_IDLE, &api.TenantUse{PromisedPermille: 250, ThrottledNs: 1}); got != "25%" {
		t.Errorf("a tenant at its limit is due %s", got)
	}
	if got := of(api.ClientState_CLIENT_STATE_IDLE, &api.TenantUse{PromisedPermille: 380, Share: &api.Share{Priority: api.Priority_PRIORITY_LATENCY}}); got != "(38%)" {
		t.Errorf("an idle latency tenant is due %s", got)
	}
}
