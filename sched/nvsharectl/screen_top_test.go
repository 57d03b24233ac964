// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	m := newMonitor(node{}, 2*time.Second, false, first())
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
		{name: "80x24-ask", width: 80, height: 24, keys: append(append([]string{"down", "c"}, spell("40")...), "enter")},
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
	m.draw()
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

// A click selects a line, and sorts at a column's head; the wheel moves.
func TestTopMouse(t *testing.T) {
	m := busyMinute(sample, twoSecondsLater)
	if mode := m.View().MouseMode; mode != tea.MouseModeCellMotion {
		t.Errorf("mouse mode %v", mode)
	}
	find := func(text string) (x, y int) {
		for y, line := range strings.Split(m.draw(), "\n") {
			if x := strings.Index(line, text); x >= 0 {
				return x, y
			}
		}
		t.Fatalf("%q is not there:\n%s", text, m.draw())
		return 0, 0
	}
	marked := func() string {
		for _, line := range strings.Split(m.draw(), "\n") {
			if strings.HasPrefix(line, ">") {
				return line
			}
		}
		return ""
	}
	_, y := find("ml/train-b/main")
	if m.Update(tea.MouseClickMsg{X: 20, Y: y, Button: tea.MouseLeft}); !strings.Contains(marked(), "train-b") {
		t.Errorf("after a click %q is selected", marked())
	}
	if m.Update(tea.MouseWheelMsg{Button: tea.MouseWheelUp}); !strings.Contains(marked(), "train-a") {
		t.Errorf("after the wheel %q is selected", marked())
	}
	x, y := find("GETS")
	m.Update(tea.MouseClickMsg{X: x + 1, Y: y, Button: tea.MouseLeft})
	if screen := m.draw(); !strings.Contains(screen, "sorted by gets") || strings.Index(screen, "train-b") > strings.Index(screen, "train-a") {
		t.Errorf("after a click at GETS:\n%s", screen)
	}
}

// Nothing changes before y, and everything that was typed is what changes.
func TestTopChanges(t *testing.T) {
	var set *api.SetShareRequest
	var suspended *api.SuspendRequest
	var refused error
	m := busyMinute(sample, twoSecondsLater)
	m.node.set = func(req *api.SetShareRequest) (*api.SetShareResponse, error) {
		set = req
		return &api.SetShareResponse{Container: m.now.Gpus[0].Clients[1].Container, Changes: []*api.ShareChange{{Uuid: "GPU-x", Old: &api.Share{CoreLimit: 50}, New: &api.Share{CoreLimit: 40}}}}, refused
	}
	m.node.suspend = func(req *api.SuspendRequest) (*api.SuspendResponse, error) {
		suspended = req
		return &api.SuspendResponse{Uid: 1000, Gpus: []*api.Suspended{{Bytes: 3 << 30}}}, refused
	}
	m.draw()
	press(m, "down", "c", "4", "x", "backspace", "0", "enter")
	if screen := m.draw(); set != nil || !strings.Contains(screen, "Set the core limit of ml/train-b/main on GPU 0 from 50% to 40%? y/n") {
		t.Fatalf("before y: %v\n%s", set, screen)
	}
	press(m, "n")
	if screen := m.draw(); set != nil || !strings.Contains(screen, "nothing was changed") {
		t.Fatalf("after n: %v\n%s", set, screen)
	}
	press(m, "c", "4", "0", "enter", "y")
	if set.GetContainer() != m.now.Gpus[0].Clients[1].Container.Id || set.Uid != nil || set.Gpu != m.now.Gpus[0].Uuid || set.GetCoreLimit() != 40 || set.Weight != nil {
		t.Errorf("asked for %v", set)
	}
	if screen := m.draw(); !strings.Contains(screen, "GPU 0, ml/train-b/main: core limit 50% → 40%") {
		t.Errorf("after y:\n%s", screen)
	}
	set = nil
	for _, wrong := range [][]string{{"c", "1", "0", "1", "enter"}, {"w", "enter"}, {"m", "x", "enter"}} {
		press(m, wrong...)
		if screen := m.draw(); m.question != nil || !strings.Contains(screen, "or none") {
			t.Errorf("%v:\n%s", wrong, screen)
		}
	}
	press(m, append(append([]string{"m"}, spell("none")...), "enter", "y")...)
	if set == nil || set.MemoryBytes == nil || *set.MemoryBytes != 0 {
		t.Errorf("the memory limit is removed by %v", set)
	}
	// A user outside containers is named by number, also for suspending.
	refused = status.Error(codes.FailedPrecondition, "nothing is swapped")
	press(m, "down", "z")
	if screen := m.draw(); suspended != nil || !strings.Contains(screen, "Suspend user 1000 on GPU 0?") {
		t.Fatalf("before y: %v\n%s", suspended, screen)
	}
	press(m, "y")
	if suspended.GetUid() != 1000 || suspended.GetContainer() != "" || !strings.Contains(m.draw(), "not changed: nothing is swapped") {
		t.Errorf("%v\n%s", suspended, m.draw())
	}
	refused = nil
	press(m, "z", "y")
	if screen := m.draw(); !strings.Contains(screen, "user 1000: 3Gi leave the GPU") {
		t.Errorf("suspended:\n%s", screen)
	}
}

func TestBrief(t *testing.T) {
	for ns, want := range map[int64]string{0: "0", 999: "0", 1500: "1.5µs", 12_345_678: "12ms", 9_990_000: "9.9ms", 90e9: "1.5m", 4e12: "1.1h"} {
		if got := brief(ns); got != want {
			t.Errorf("%d ns: %q, want %q", ns, got, want)
		}
	}
}
