// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"

	"github.com/nvshare/nvshare/sched/api"
)

// twoSecondsLater is sample() after some work.
func twoSecondsLater() *api.StatusResponse {
	r := sample()
	r.UptimeNs += 2_000_000_000
	g := r.Gpus[0]
	g.Grants += 20
	g.Tenants[0].UsedNs += 500_000_000
	g.Clients[0].Calls += 3000
	g.Clients[0].Grants += 10
	g.Tenants[0].Grants = g.Clients[0].Grants
	g.Tenants[1].UsedNs += 994_000_000
	g.Clients[2].Calls = 1 // another process
	return r
}

func TestTop(t *testing.T) {
	later := twoSecondsLater()
	again := twoSecondsLater()
	again.UptimeNs += 1_000_000_000
	again.Problems = []string{"GPU 1: it is fenced"}
	for _, tc := range []struct {
		golden string
		args   []string
		code   int
	}{
		{"top.txt", []string{"top", "--once"}, exitOK},
		{"top.txt", []string{"top", "-n", "1"}, exitOK},
		{"top-twice.txt", []string{"top", "-n", "2"}, exitFailed},
		{"top-gpu1.txt", []string{"top", "--once", "--gpu", "1"}, exitOK},
	} {
		f := &fake{status: sample(), later: []*api.StatusResponse{later, again}}
		code, out, errs := ctl(append(tc.args, "-d", "10ms", "--run-dir", serve(t, f))...)
		if code != tc.code || errs != "" {
			t.Errorf("%v: exit %d, %q", tc.args, code, errs)
		}
		golden(t, tc.golden, out)
	}
}

// A scheduler that began anew, and one of an older version, have rates too.
func TestTopOfAnotherScheduler(t *testing.T) {
	fresh := older(sample())
	fresh.UptimeNs = 100_000_000_000
	var out bytes.Buffer
	printTop(streams{out: &out}, sample(), fresh)
	if !strings.Contains(out.String(), "61.2%") { // 61.2 s of 100
		t.Errorf("got\n%s", out.String())
	}
}

func press(m *monitor, keys ...string) {
	for _, k := range keys {
		msg := tea.KeyPressMsg{Text: k, Code: []rune(k)[0]}
		if code, special := map[string]rune{"enter": tea.KeyEnter, "esc": tea.KeyEscape}[k]; special {
			msg = tea.KeyPressMsg{Code: code}
		}
		m.Update(msg)
	}
}

// On a terminal the strips tell who had the GPU, keys sort and filter, and no line and
// no screen is larger than the terminal.
func TestTopOnATerminal(t *testing.T) {
	m := newMonitor(nil, 2*time.Second, false, sample())
	for range 40 { // more than the strips show
		m.now = sample()
		m.Update(answerMsg{r: twoSecondsLater()})
	}
	screen := m.draw()
	golden(t, "top-screen.txt", screen+"\n")
	if n := strings.Count(screen, " "+strings.Repeat("b", 30)+"\n"); n != 1 {
		t.Errorf("train-b had half of the GPU, and the strip does not show it:\n%s", screen)
	}
	press(m, "s", "s")
	if screen := m.draw(); strings.Index(screen, "train-b") > strings.Index(screen, "train-a") || !strings.Contains(screen, "sorted by waited") {
		t.Errorf("sorted by waited:\n%s", screen)
	}
	press(m, "/", "t", "r", "a", "i", "n", "enter")
	if screen := m.draw(); strings.Contains(screen, "user 1000") || !strings.Contains(screen, "train-a") {
		t.Errorf("filtered:\n%s", screen)
	}
	press(m, "esc", "?")
	if screen := m.draw(); !strings.Contains(screen, "user 1000") || !strings.Contains(screen, "a letter for each interval") {
		t.Errorf("help:\n%s", screen)
	}
	m.Update(answerMsg{err: errors.New("it has ended")})
	if screen := m.draw(); !strings.Contains(screen, "no answer: it has ended") || !strings.Contains(screen, "train-a") {
		t.Errorf("without scheduler:\n%s", screen)
	}
	for _, size := range []tea.WindowSizeMsg{{Width: 80, Height: 24}, {Width: 80, Height: 6}, {Width: 62, Height: 10}} {
		m.Update(size)
		lines := strings.Split(m.draw(), "\n")
		if len(lines) > size.Height {
			t.Errorf("%d lines in %d", len(lines), size.Height)
		}
		for _, line := range lines {
			if utf8.RuneCountInString(line) > 80 {
				t.Errorf("%d columns in %d: %s", utf8.RuneCountInString(line), size.Width, line)
			}
		}
	}
	if _, cmd := m.Update(tea.KeyPressMsg{Text: "q", Code: 'q'}); cmd == nil {
		t.Error("q does not end it")
	}
}

func TestTopJSON(t *testing.T) {
	f := &fake{status: sample(), later: []*api.StatusResponse{twoSecondsLater()}}
	code, out, errs := ctl("top", "--once", "-o", "json", "-d", "0.01", "--run-dir", serve(t, f))
	var got topJSON
	if err := json.Unmarshal([]byte(out), &got); code != exitOK || err != nil || strings.Count(out, "\n") != 1 {
		t.Fatalf("exit %d, %v, %s %s", code, err, out, errs)
	}
	if a := got.GPUs[0].Tenants[0]; a.Tenant != "ml/train-a/main" || a.Gets != 0.25 || a.Grants != 5 || a.LimitBytes != 8<<30 || got.Seconds != 2 {
		t.Errorf("got %+v", got)
	}
}
