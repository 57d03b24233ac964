// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// Filters leave the events of one tenant, of some types, and of some time.
func TestEventFilters(t *testing.T) {
	f := &fake{events: func(req *api.EventsRequest) *api.EventsResponse {
		if req.Since != 0 {
			return &api.EventsResponse{Run: 1, Next: 99}
		}
		return &api.EventsResponse{Run: 1, Next: 99, Events: happened()}
	}}
	dir := serve(t, f)
	for _, tc := range []struct {
		args []string
		want []string // of types, in order
	}{
		{[]string{"--type", "fence,end"}, []string{"fence", "end"}},
		{[]string{"--type", "turn", "--last", "2"}, []string{"swap-out", "swap-in"}},
		{[]string{"--tenant", "ml/train-a", "--type", "set"}, []string{"set"}},
		{[]string{"--tenant", "user 1000"}, []string{"bypass"}},
		{[]string{"--tenant", "1000"}, []string{"bypass"}},
		{[]string{"--tenant", "aaaa", "--type", "fence"}, []string{"fence"}},
		{[]string{"--tenant", "ml/train", "--type", "fence"}, nil},
		{[]string{"--since", "1s"}, nil},
		{[]string{"--since", "2026-11-21T12:30:15.149Z", "--type", "99,stall"}, nil}, // refused below
	} {
		code, out, errs := ctl(append(append([]string{"events", "--run-dir", dir}, tc.args...), "-o", "json")...)
		if strings.Contains(strings.Join(tc.args, " "), "99") {
			if code != exitUsage || !strings.Contains(errs, "no type of event") {
				t.Errorf("%v: exit %d, %q", tc.args, code, errs)
			}
			continue
		}
		var got []string
		for line := range strings.Lines(out) {
			_, rest, _ := strings.Cut(line, `"type":"`)
			kind, _, _ := strings.Cut(rest, `"`)
			got = append(got, kind)
		}
		if code != exitOK || strings.Join(got, " ") != strings.Join(tc.want, " ") {
			t.Errorf("%v: exit %d, %v, want %v", tc.args, code, got, tc.want)
		}
	}
	if code, _, errs := ctl("events", "--type", "fense"); code != exitUsage || !strings.Contains(errs, "did you mean fence?") {
		t.Errorf("a typing error: exit %d, %q", code, errs)
	}
	if code, _, errs := ctl("events", "--since", "soon"); code != exitUsage || !strings.Contains(errs, "how long ago (5m)") {
		t.Errorf("no time: exit %d, %q", code, errs)
	}
}

func TestParseSince(t *testing.T) {
	now := time.Date(2026, 11, 22, 17, 30, 0, 0, time.FixedZone("X", 3600))
	for text, want := range map[string]time.Time{
		"5m":                   now.Add(-5 * time.Minute),
		"90":                   now.Add(-90 * time.Second),
		"2026-11-21 08:09:10":  time.Date(2026, 11, 21, 8, 9, 10, 0, now.Location()),
		"2026-11-21T08:09:10Z": time.Date(2026, 11, 21, 8, 9, 10, 0, time.UTC),
	} {
		if got, err := parseSince(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v, want %v", text, got, err, want)
		}
	}
}

// A GPU has hundreds of turns a second: who follows sees them only if asked for.
func TestTurnsAreLeftOut(t *testing.T) {
	var f eventFilter
	f.withoutTurns()
	for kind, want := range map[api.EventType]bool{api.EventType_EVENT_TYPE_GRANT: false, api.EventType_EVENT_TYPE_RELEASE: false, api.EventType_EVENT_TYPE_FENCE: true} {
		if f.shows(&api.Event{Type: kind}) != want {
			t.Errorf("%v: shown %v", kind, !want)
		}
	}
}
