// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"unicode"

	"github.com/nvshare/nvshare/sched/api"
)

// Tenants choose their names and commands. Whatever they choose changes nothing in what
// is said about others: no line more, no control character, the same JSON.
func TestNamesHideNobody(t *testing.T) {
	// show asks for one output while the waiter, and the process without a container,
	// have a name.
	show := func(name string, args ...string) string {
		r, events := sample(), happened()
		holder, waiter, idle := r.Gpus[0].Clients[0], r.Gpus[0].Clients[1], r.Gpus[0].Clients[2]
		ct := waiter.Container
		for _, c := range []*api.Container{ct, r.Gpus[0].Memory[1].Container, r.Gpus[0].Tenants[1].Container} {
			c.Name, c.Pod, c.Namespace = name, name, name
		}
		waiter.Command, idle.Command = name, name
		r.Problems = []string{name + " is fenced", "the last problem"}
		for _, e := range events[:len(events)/2] {
			if e.Container.GetId() != "" {
				e.Container = ct
			}
			e.Reason = name
		}
		if holder.Container.Pod != "train-a" {
			t.Fatal("the sample has another holder")
		}
		dir := serve(t, &fake{status: r, events: func(req *api.EventsRequest) *api.EventsResponse {
			if req.Since != 0 {
				return &api.EventsResponse{Run: 1, Next: 99}
			}
			return &api.EventsResponse{Run: 1, Next: 99, Events: events}
		}})
		_, out, _ := ctl(append(args, "--run-dir", dir)...)
		return out
	}
	names := []string{
		"\",\"holder\":null,\"holders\":[],\"x\":\"", "a\nGPU 0 is idle\n", "a\r\x1b[2J\x1b[1A\x1b[8m", "\x00\x7f\u0085\u009b2J",
		"\u202e\u200b\u2028\ufeff", `\u001b[2J\`, strings.Repeat("long ", 5000), "null", "- holders: []\n---\n", "%s%n%!(EXTRA",
	}
	for _, args := range [][]string{{"status"}, {"-o", "wide"}, {"events"}} {
		plain := show("plain", args...)
		if !strings.Contains(plain, "plain") {
			t.Errorf("%v does not show the name: %s", args, plain)
		}
		for _, name := range names {
			out := show(name, args...)
			if strings.ContainsFunc(out, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
				t.Errorf("%v, name %.40q: control characters", args, name)
			}
			for line := range strings.Lines(plain) {
				if about := strings.Fields(line); !strings.Contains(line, "plain") && !hasLine(out, about) {
					t.Errorf("%v, name %.40q: no line %q", args, name, about)
				}
			}
			if got, want := strings.Count(out, "\n"), strings.Count(plain, "\n"); got != want && len(name) < 100 { // long ones are wrapped
				t.Errorf("%v, name %.40q: %d lines, not %d", args, name, got, want)
			}
		}
	}
	for _, name := range names {
		var got, want struct {
			GPUs []struct{ Clients []map[string]any }
		}
		if err := json.Unmarshal([]byte(show(name, "-o", "json")), &got); err != nil {
			t.Errorf("name %.40q: %v", name, err)
			continue
		}
		if err := json.Unmarshal([]byte(show("plain", "-o", "json")), &want); err != nil {
			t.Fatal(err)
		}
		if g, w := got.GPUs[0].Clients[0], want.GPUs[0].Clients[0]; !reflect.DeepEqual(g, w) {
			t.Errorf("name %.40q: %v", name, g)
		}
		if g := got.GPUs[0].Clients[1]["command"]; g != name {
			t.Errorf("the command %.40q is %.40q", name, g)
		}
		text := show(name, "events", "-o", "json")
		if got, want := strings.Count(text, "\n"), len(happened()); got != want {
			t.Errorf("events, name %.40q: %d lines, not %d", name, got, want)
		}
		for line := range strings.Lines(text) {
			if !json.Valid([]byte(line)) {
				t.Errorf("events, name %.40q: not JSON: %.200s", name, line)
			}
		}
	}
}

// hasLine tells whether a text has a line of these words.
func hasLine(text string, words []string) bool {
	for line := range strings.Lines(text) {
		if reflect.DeepEqual(strings.Fields(line), words) {
			return true
		}
	}
	return false
}
