// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
)

// plainEvery is the pace of lines where the output is not a terminal.
const plainEvery = time.Second

// redrawEvery is the pace of updates on a terminal.
const redrawEvery = 100 * time.Millisecond

// widestBar keeps the block's lines below 80 columns, because wrapped lines cannot be
// redrawn in place.
const widestBar = 18

// A screen shows the live state: on a terminal as a block below the messages, otherwise
// as one line a second.
type screen struct {
	out   *os.File
	tty   bool
	bold  bool
	began time.Time
	shown time.Time
	block int // lines of the block that is on the terminal now
}

func newScreen(out *os.File) *screen {
	_, err := unix.IoctlGetTermios(int(out.Fd()), unix.TCGETS)
	tty := err == nil
	return &screen{out: out, tty: tty, bold: tty && os.Getenv("NO_COLOR") == "", began: time.Now()}
}

// say prints a message that stays.
func (s *screen) say(format string, args ...any) {
	s.erase()
	text := fmt.Sprintf(format, args...)
	if text == "" {
		fmt.Fprintln(s.out)
		return
	}
	fmt.Fprintf(s.out, "%s  %s\n", s.clock(), text)
}

// print prints text as it is.
func (s *screen) print(text string) {
	s.erase()
	fmt.Fprint(s.out, text)
}

func (s *screen) clock() string { return fmt.Sprintf("%4.1f s", time.Since(s.began).Seconds()) }

func (s *screen) erase() {
	if s.tty {
		fmt.Fprint(s.out, "\r") // the terminal may have shown ^C
	}
	if s.block > 0 {
		fmt.Fprintf(s.out, "\x1b[%dA\x1b[J", s.block)
		s.block = 0
	}
}

// update shows the tenants' state, if it is time to.
func (s *screen) update(gpu *api.GPU, tenants []tenant) {
	every := plainEvery
	if s.tty {
		every = redrawEvery
	}
	if time.Since(s.shown) < every {
		return
	}
	s.shown = time.Now()
	if !s.tty {
		fmt.Fprintf(s.out, "%s  %s\n", s.clock(), line(gpu, tenants))
		return
	}
	s.erase()
	lines := s.table(gpu, tenants)
	fmt.Fprint(s.out, strings.Join(lines, "\n")+"\n")
	s.block = len(lines)
}

// line is the state in one line: who holds, who waits and for how long.
func line(gpu *api.GPU, tenants []tenant) string {
	holder := "nobody holds"
	var waiting, grants []string
	for _, t := range tenants {
		c := t.client(gpu)
		if c == nil {
			continue
		}
		switch since := ms(c.SinceNs); c.State {
		case api.ClientState_CLIENT_STATE_HOLDING:
			holder = fmt.Sprintf("%s holds (%s)", t.name, since)
		case api.ClientState_CLIENT_STATE_DRAINING:
			holder = fmt.Sprintf("%s drains (%s)", t.name, since)
		case api.ClientState_CLIENT_STATE_WAITING:
			waiting = append(waiting, t.name+" "+since)
		}
		grants = append(grants, fmt.Sprintf("%s %d", t.name, c.Grants))
	}
	if waiting == nil {
		waiting = []string{"nobody"}
	}
	return fmt.Sprintf("%-24s waiting: %-34s grants: %s", holder, strings.Join(waiting, ", "), strings.Join(grants, ", "))
}

var stateWords = map[api.ClientState]string{
	api.ClientState_CLIENT_STATE_IDLE:     "idle",
	api.ClientState_CLIENT_STATE_WAITING:  "waits",
	api.ClientState_CLIENT_STATE_HOLDING:  "HOLDS",
	api.ClientState_CLIENT_STATE_DRAINING: "drains",
	api.ClientState_CLIENT_STATE_FENCED:   "fenced",
}

func (s *screen) table(gpu *api.GPU, tenants []tenant) []string {
	lines := []string{
		fmt.Sprintf("%s  GPU %d  %s  time quantum %s", s.clock(), gpu.GetIndex(), gpu.GetName(), ms(gpu.GetQuantumNs())),
		fmt.Sprintf("        %-9s %-11s %-7s %8s %7s  %s", "TENANT", "ENGINE", "STATE", "FOR", "GRANTS", "GPU TIME"),
	}
	var sum int64
	for _, t := range tenants {
		sum += t.client(gpu).GetHeldNs()
	}
	for _, t := range tenants {
		c := t.client(gpu)
		if c == nil {
			lines = append(lines, fmt.Sprintf("        %-9s %-11s gone", t.name, t.engine))
			continue
		}
		bar := ""
		if sum > 0 {
			bar = strings.Repeat("█", int(widestBar*c.HeldNs/sum))
		}
		text := fmt.Sprintf("        %-9s %-11s %-7s %8s %7d  %5.1f s %s", t.name, t.engine,
			stateWords[c.State], ms(c.SinceNs), c.Grants, float64(c.HeldNs)/1e9, bar)
		if s.bold && c.State == api.ClientState_CLIENT_STATE_HOLDING {
			text = "\x1b[1m" + text + "\x1b[0m"
		}
		lines = append(lines, text)
	}
	return lines
}

func ms(ns int64) string {
	if ns >= int64(10*time.Second) {
		return fmt.Sprintf("%.0f s", float64(ns)/1e9)
	}
	return fmt.Sprintf("%d ms", ns/1e6)
}
