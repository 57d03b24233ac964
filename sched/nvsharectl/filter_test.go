// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
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
		"17:30":                now,
		"17:30:01":             time.Date(2026, 11, 21, 17, 30, 1, 0, now.Location()), // yesterday: it is not yet
		"23:50":                time.Date(2026, 11, 21, 23, 50, 0, 0, now.Location()),
		"15:04":                time.Date(2026, 11, 22, 15, 4, 0, 0, now.Location()),
		"2026-11-21":           time.Date(2026, 11, 21, 0, 0, 0, 0, now.Location()),
		"2026-11-21 08:09:10":  time.Date(2026, 11, 21, 8, 9, 10, 0, now.Location()),
		"2026-11-21T08:09:10Z": time.Date(2026, 11, 21, 8, 9, 10, 0, time.UTC),
	} {
		if got, err := parseSince(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v, want %v", text, got, err, want)
		}
	}
}

// A GPU has hundreds of turns a second: people who follow see one line for them, and
// each of the other events.
func TestTurnsAreSummedUp(t *testing.T) {
	defer func(l *time.Location) { time.Local = l }(time.Local)
	time.Local = time.UTC
	var s turnSums
	var lines []string
	at := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC).UnixNano()
	for i := range 20 {
		for _, kind := range []api.EventType{api.EventType_EVENT_TYPE_GRANT, api.EventType_EVENT_TYPE_RELEASE} {
			got, taken := s.take(&api.Event{Type: kind, TimeNs: at + int64(i)*100_000_000, Uid: uint32(1000 + i%2), HeldNs: int64(i%2+1) * 10_000_000})
			if !taken {
				t.Errorf("%v is shown by itself", kind)
			}
			lines = append(lines, got...)
		}
	}
	got, taken := s.take(&api.Event{Type: api.EventType_EVENT_TYPE_FENCE, TimeNs: at + 2_500_000_000})
	if taken {
		t.Error("a fence is summed up")
	}
	lines = append(lines, got...)
	want := "2026-11-22 12:00:01.000000 UTC  GPU 0  turns          10 in the last second: user 1001 5 for 100ms, user 1000 5 for 50ms\n" +
		"2026-11-22 12:00:02.000000 UTC  GPU 0  turns          10 in the last second: user 1001 5 for 100ms, user 1000 5 for 50ms"
	if strings.Join(lines, "\n") != want {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(lines, "\n"), want)
	}
}

// The lines about turns have the time at which their second is over: times never go backwards from
// line to line, and no second has two lines, however events arrive.
func TestTimesOfTurnsRise(t *testing.T) {
	defer func(l *time.Location) { time.Local = l }(time.Local)
	time.Local = time.UTC
	at := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	var s turnSums
	var lines []string
	for _, ms := range []int{100, 500, 600, 1200, 1300, 2900} {
		when := at.Add(time.Duration(ms) * time.Millisecond)
		e := &api.Event{Type: api.EventType_EVENT_TYPE_RELEASE, TimeNs: when.UnixNano()}
		if ms == 500 || ms == 1200 {
			e.Type = api.EventType_EVENT_TYPE_FENCE
		}
		more, taken := s.take(e)
		if lines = append(lines, more...); !taken {
			lines = append(lines, describeEvent(streams{}, e))
		}
		lines = append(lines, s.over(when)...) // an answer without an event that is shown
	}
	lines = append(lines, s.over(at.Add(5*time.Second))...) // and nothing comes any more
	if !slices.IsSorted(lines) || len(lines) != 5 || len(s.gpus) > 0 {
		t.Errorf("printed\n%s", strings.Join(lines, "\n"))
	}
}

// A tenant that is not there, and never was as far as is known, is answered with those that are.
func TestEventsOfNobody(t *testing.T) {
	of := &api.Container{Id: "f00", Name: "gone"}
	f := &fake{status: sample(), events: func(req *api.EventsRequest) *api.EventsResponse {
		if req.Since > 0 {
			return &api.EventsResponse{Run: 1, Next: req.Since}
		}
		return &api.EventsResponse{Run: 1, Next: 1, Events: []*api.Event{{Type: api.EventType_EVENT_TYPE_END, Container: of, Client: 1, Sequence: 1, TimeNs: 5}}}
	}}
	dir := serve(t, f)
	for tenant, want := range map[string]string{
		"nobody":  `nvsharectl: no event is kept of a tenant "nobody", and none is on a GPU now; tenants now: ml/train-a/main, `,
		"gone":    "", // its events are kept
		"train-a": "", // it is there
	} {
		for _, more := range []string{"", "--type grant", "-n 3"} {
			args := append([]string{"events", "--run-dir", dir, "--tenant", tenant}, strings.Fields(more)...)
			if code, _, errs := ctl(args...); code != exitOK || !strings.HasPrefix(errs, want) || want == "" && errs != "" {
				t.Errorf("%s %s: exit %d, %q, want %q", tenant, more, code, errs, want)
			}
		}
	}
}
