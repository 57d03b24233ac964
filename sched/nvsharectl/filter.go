// SPDX-License-Identifier: Apache-2.0

package main

import (
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

	from  int64                  // by since, ns since 1970
	kinds map[api.EventType]bool // nil: all
	known tenants
	whose func(*api.Container, uint32) bool // by tenant, of those that are known
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

// withoutTurns leaves out what a GPU may have hundreds of a second.
func (f *eventFilter) withoutTurns() {
	f.kinds = map[api.EventType]bool{}
	for n := range api.EventType_name {
		f.kinds[api.EventType(n)] = !slices.Contains(turnEvents, api.EventType(n))
	}
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
	for _, layout := range []string{time.RFC3339, time.DateTime} { // the latter is how events prints times
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return t, nil
		}
	}
	return time.Time{}, errors.New(strconv.Quote(s) + " is no time: give how long ago (5m), or when (2006-01-02 15:04:05)")
}

func (f *eventFilter) shows(e *api.Event) bool {
	return e.TimeNs >= f.from && (f.kinds == nil || f.kinds[e.Type]) && (f.tenant == "" || f.isOf(e))
}

// isOf tells whether an event is of the tenant that is asked for.
func (f *eventFilter) isOf(e *api.Event) bool {
	return e.Container != nil && f.whose(e.Container, e.Uid)
}

// learn has the filter know the tenants of these events, before it is asked about them.
func (f *eventFilter) learn(events []*api.Event) {
	if f.tenant == "" {
		return
	}
	for _, e := range events {
		f.known.add(e.Container)
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
