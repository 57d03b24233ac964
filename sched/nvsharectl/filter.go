// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// eventFilter says which events to show.
type eventFilter struct {
	tenant string
	types  []string
	since  string

	from  int64 // by since, ns since 1970
	kinds map[api.EventType]bool
	known *tenants // nil: none yet
	whose meant    // by tenant, of those that are known
}

// turnEvents are what --type turn means: they come with each turn of a GPU.
var turnEvents = []api.EventType{
	api.EventType_EVENT_TYPE_GRANT, api.EventType_EVENT_TYPE_REVOKE, api.EventType_EVENT_TYPE_RELEASE,
	api.EventType_EVENT_TYPE_SWAP_OUT, api.EventType_EVENT_TYPE_SWAP_IN,
}

// parse reads what the flags say.
func (f *eventFilter) parse(now time.Time) error {
	if f.since != "" {
		from, err := parseSince(f.since, now)
		if err != nil {
			return usageError{fmt.Errorf("--since: %w", err)}
		}
		f.from = from.UnixNano()
	}
	for _, name := range f.types {
		kinds, err := eventTypes(name)
		if err != nil {
			return usageError{fmt.Errorf("--type: %w", err)}
		}
		if f.kinds == nil {
			f.kinds = map[api.EventType]bool{}
		}
		for _, k := range kinds {
			f.kinds[k] = true
		}
	}
	return nil
}

func eventTypes(name string) ([]api.EventType, error) {
	if name == "turn" {
		return turnEvents, nil
	}
	for n := range api.EventType_name {
		if t := api.EventType(n); t != api.EventType_EVENT_TYPE_UNSPECIFIED && word(t) == name {
			return []api.EventType{t}, nil
		}
	}
	names := eventTypeNames()
	return nil, fmt.Errorf("%q is no type of event%s: give some of %s", name, suggestion(name, names), strings.Join(names, ", "))
}

// eventTypeNames returns what --type takes.
func eventTypeNames() []string {
	names := []string{"turn"}
	for n := range api.EventType_name {
		if t := api.EventType(n); t != api.EventType_EVENT_TYPE_UNSPECIFIED {
			names = append(names, word(t))
		}
	}
	slices.Sort(names)
	return names
}

// parseSince reads how long ago, or when.
func parseSince(s string, now time.Time) (time.Time, error) {
	if d, err := api.ParseDuration(s); err == nil {
		return now.Add(-d), nil
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02 15:04:05", "2006-01-02T15:04:05", "2006-01-02 15:04", "2006-01-02"} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return t, nil
		}
	}
	for _, layout := range []string{"15:04:05", "15:04"} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			y, m, d := now.Date()
			at := time.Date(y, m, d, t.Hour(), t.Minute(), t.Second(), 0, now.Location())
			if at.After(now) { // nothing has happened since then: after midnight, 23:50 is yesterday's
				at = time.Date(y, m, d-1, t.Hour(), t.Minute(), t.Second(), 0, now.Location())
			}
			return at, nil
		}
	}
	return time.Time{}, errors.New(strconv.Quote(s) + " is no time: give how long ago (5m), or when (15:04, 2006-01-02 15:04:05)")
}

// shows tells whether to show an event.
func (f *eventFilter) shows(e *api.Event) bool {
	return e.TimeNs >= f.from && (f.kinds == nil || f.kinds[e.Type]) && (f.tenant == "" || f.isOf(e))
}

// isOf tells whether an event is of the tenant that is asked for.
func (f *eventFilter) isOf(e *api.Event) bool {
	return e.Container != nil && f.whose.has(e.Container, e.Uid)
}

// learn has the filter know the tenants of these events, before it is asked about them.
func (f *eventFilter) learn(events []*api.Event) {
	if f.tenant == "" {
		return
	}
	if f.known == nil {
		f.known = newTenants()
	}
	for _, e := range events {
		f.known.add(e.Container, e.Uid)
	}
	f.whose = f.known.meant(f.tenant)
}

func (f *eventFilter) of(events []*api.Event) (shown []*api.Event) {
	for _, e := range events {
		if f.shows(e) {
			shown = append(shown, e)
		}
	}
	return shown
}

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
