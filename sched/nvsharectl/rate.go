// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// maxTurnsNamed is how many tenants a line about turns names.
const maxTurnsNamed = 4

// turnSums replaces the events of turns, of which a GPU may have hundreds a second, by
// one line for each GPU and second.
type turnSums struct {
	second int64
	gpus   []turnSum
}

type turnSum struct {
	index   uint32
	tenants []tenantTurns
}

type tenantTurns struct {
	name  string
	turns int
	held  time.Duration
}

// take adds an event of a turn and tells whether it is one. Lines of earlier seconds
// are returned when a later event comes.
func (s *turnSums) take(e *api.Event) (lines []string, taken bool) {
	if second := e.TimeNs / int64(time.Second); second != s.second {
		lines = s.flush()
		s.second = second
	}
	if !slices.Contains(turnEvents, e.Type) {
		return lines, false
	}
	if e.Type != api.EventType_EVENT_TYPE_RELEASE {
		return lines, true
	}
	i := slices.IndexFunc(s.gpus, func(g turnSum) bool { return g.index == e.Index })
	if i < 0 {
		i = len(s.gpus)
		s.gpus = append(s.gpus, turnSum{index: e.Index})
	}
	g, name := &s.gpus[i], api.Tenant(e.Container, e.Uid)
	j := slices.IndexFunc(g.tenants, func(t tenantTurns) bool { return t.name == name })
	if j < 0 {
		j = len(g.tenants)
		g.tenants = append(g.tenants, tenantTurns{name: name})
	}
	g.tenants[j].turns++
	g.tenants[j].held += time.Duration(e.HeldNs)
	return lines, true
}

// over returns the lines of the second if no event of it can come any more at this time.
func (s *turnSums) over(now time.Time) []string {
	if now.Unix() < s.second+2 { // one may be on its way
		return nil
	}
	return s.flush()
}

// flush returns the lines of the second and forgets them. Their time is the end of the second, so
// that they come after its other events in the order of times, too.
func (s *turnSums) flush() (lines []string) {
	for _, g := range s.gpus {
		slices.SortStableFunc(g.tenants, func(a, b tenantTurns) int { return cmp.Compare(b.held, a.held) })
		turns, parts := 0, []string{}
		for i, t := range g.tenants {
			turns += t.turns
			if i < maxTurnsNamed {
				parts = append(parts, fmt.Sprintf("%s %d for %s", t.name, t.turns, short(int64(t.held))))
			}
		}
		if more := len(g.tenants) - maxTurnsNamed; more > 0 {
			parts = append(parts, fmt.Sprintf("%d tenants more", more))
		}
		lines = append(lines, eventLine((s.second+1)*int64(time.Second), fmt.Sprintf("GPU %d", g.index), fmt.Sprintf("%-13s", "turns"),
			fmt.Sprintf("%d in the last second: %s", turns, printable(strings.Join(parts, ", ")))))
	}
	s.gpus = nil
	return lines
}
