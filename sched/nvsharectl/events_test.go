// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/nvshare/nvshare/sched/api"
)

// happened is one event of each type, and of each kind of text.
func happened() []*api.Event {
	at := time.Date(2026, 11, 21, 12, 30, 15, 123_456_000, time.UTC).UnixNano()
	pod := &api.Container{Id: strings.Repeat("a", 64), Namespace: "ml", Pod: "train-a", Name: "main"}
	var all []*api.Event
	add := func(kind api.EventType, change func(*api.Event)) {
		e := &api.Event{Sequence: uint64(len(all) + 1), TimeNs: at + int64(len(all))*1_234_567, Type: kind}
		change(e)
		all = append(all, e)
	}
	of := func(change func(*api.Event)) func(*api.Event) {
		return func(e *api.Event) {
			e.Uuid, e.Client, e.Pid, e.Container, e.Epoch = "GPU-51600000-0000-4000-8000-000000000000", 7, 4711, pod, 1<<60+7
			if change != nil {
				change(e)
			}
		}
	}
	add(api.EventType_EVENT_TYPE_START, func(e *api.Event) { e.Reason = "version 0.1.0" })
	add(api.EventType_EVENT_TYPE_GPU, func(e *api.Event) { e.Uuid, e.Index, e.Reason = "GPU-x", 1, "NVIDIA SimGPU" })
	add(api.EventType_EVENT_TYPE_REGISTER, of(func(e *api.Event) { e.Uuid, e.Epoch = "", 0 }))
	add(api.EventType_EVENT_TYPE_BYPASS, of(func(e *api.Event) {
		e.Uuid, e.Epoch, e.Container, e.Uid = "", 0, &api.Container{}, 1000
		e.Reason = "3 entry points of CUDA bypass the shim"
	}))
	add(api.EventType_EVENT_TYPE_GRANT, of(func(e *api.Event) { e.WaitedNs = 12_345_678 }))
	add(api.EventType_EVENT_TYPE_GRANT, of(func(e *api.Event) { e.Concurrent, e.Latency = true, true }))
	add(api.EventType_EVENT_TYPE_REVOKE, of(func(e *api.Event) { e.Reason, e.Waiters = "quantum", 1 }))
	add(api.EventType_EVENT_TYPE_REVOKE, of(func(e *api.Event) { e.Reason, e.Waiters = "of a later version", 2 }))
	add(api.EventType_EVENT_TYPE_RELEASE, of(func(e *api.Event) { e.Reason, e.HeldNs, e.DrainedNs = "revoked", 102_000_000, 2_000_000 }))
	add(api.EventType_EVENT_TYPE_RELEASE, of(func(e *api.Event) { e.Reason, e.HeldNs = "idle", 1_000_000 }))
	add(api.EventType_EVENT_TYPE_FENCE, of(nil))
	add(api.EventType_EVENT_TYPE_RECLAIM, of(func(e *api.Event) { e.Reason, e.HeldNs, e.Fenced = "death", 61_000_000_000, true }))
	add(api.EventType_EVENT_TYPE_END, of(func(e *api.Event) { e.Uuid, e.Epoch = "", 0 }))
	add(api.EventType_EVENT_TYPE_MODE, func(e *api.Event) { e.Uuid, e.Concurrent, e.Reason = "GPU-x", true, "all memory fits" })
	add(api.EventType_EVENT_TYPE_SET, func(e *api.Event) { e.Uuid, e.Setting, e.Old, e.New = "GPU-x", "time quantum", "100ms", "30ms" })
	add(api.EventType_EVENT_TYPE_SET, func(e *api.Event) {
		e.Uuid, e.Container, e.Setting, e.Old, e.New = "GPU-x", pod, "core limit", "none", "25%"
	})
	add(api.EventType_EVENT_TYPE_ADOPT, of(nil))
	add(api.EventType_EVENT_TYPE_SWAP_OUT, of(func(e *api.Event) { e.Bytes, e.TookNs = 16<<30, 312_000_000 }))
	add(api.EventType_EVENT_TYPE_SWAP_IN, of(func(e *api.Event) { e.Bytes, e.TookNs = 600<<20, 0 }))
	add(api.EventType_EVENT_TYPE_NO_ROOM, of(func(e *api.Event) { e.Bytes, e.Reason = 90<<30, "there is no place for it" }))
	add(api.EventType_EVENT_TYPE_STALL, of(func(e *api.Event) { e.Reason = "it does not move 600 MiB off the GPU" }))
	add(api.EventType_EVENT_TYPE_UNFENCE, of(func(e *api.Event) { e.Reason, e.HeldNs = "death", 61_000_000_000 }))
	add(api.EventType_EVENT_TYPE_OUT_OF_MEMORY, of(func(e *api.Event) { e.Reason = "the limit of 1024 MiB" }))
	add(api.EventType_EVENT_TYPE_WARNING, func(e *api.Event) { e.Container, e.Reason = pod, "annotations without effect: x" })
	add(api.EventType_EVENT_TYPE_UNMANAGED, of(func(e *api.Event) {
		e.Client, e.Epoch, e.Container, e.Uid = 0, 0, &api.Container{}, 1001
		e.Reason = "uses the GPU without nvshare: nvshare does not schedule its work"
	}))
	add(99, func(e *api.Event) { e.Reason = "what a later\x1b[2J scheduler says" })
	return all
}

func TestEvents(t *testing.T) {
	defer func(l *time.Location) { time.Local = l }(time.Local)
	time.Local = time.UTC
	f := &fake{events: func(req *api.EventsRequest) *api.EventsResponse {
		if req.Since != 0 || req.WaitNs != 0 {
			return &api.EventsResponse{Run: 1, Next: 22}
		}
		return &api.EventsResponse{Run: 1, Next: 22, Events: happened()}
	}}
	dir := serve(t, f)
	for name, args := range map[string][]string{"events.txt": {"events"}, "events.jsonl": {"events", "-o", "json"}} {
		code, out, errs := ctl(append(args, "--run-dir", dir)...)
		if code != exitOK || errs != "" {
			t.Errorf("%v: exit %d, %q", args, code, errs)
		}
		golden(t, name, out)
		for line := range strings.Lines(out) {
			if strings.HasSuffix(name, "jsonl") && !json.Valid([]byte(line)) {
				t.Errorf("not JSON: %s", line)
			}
		}
	}
}

func TestEventsTakesAllPages(t *testing.T) {
	all := happened()
	asked := 0
	f := &fake{events: func(req *api.EventsRequest) *api.EventsResponse {
		asked++
		if req.Gpu != "0" || req.Since != 0 && req.Run != 5 {
			t.Errorf("request %v", req)
		}
		if req.Since >= uint64(len(all)) { // and it never ends
			return &api.EventsResponse{Run: 5, Next: req.Since + 1, Events: []*api.Event{{Sequence: req.Since + 1, TimeNs: time.Now().UnixNano()}}}
		}
		return &api.EventsResponse{Run: 5, Lost: 3, Next: req.Since + 1, Events: all[req.Since : req.Since+1]}
	}}
	code, out, errs := ctl("events", "--gpu", "0", "--run-dir", serve(t, f))
	if n := strings.Count(out, "\n"); code != exitOK || n != len(all)+1 || asked != len(all)+1 {
		t.Errorf("exit %d, %d lines, asked %d times", code, n, asked)
	}
	if !strings.Contains(errs, "3 earlier events are no longer kept") || !strings.Contains(errs, "3 events are lost") {
		t.Errorf("stderr %q", errs)
	}
}

// Events from before the clock was set back, whose times are still to come, end no search.
func TestEventsOfTheFuture(t *testing.T) {
	pages := 0
	dir := serve(t, &fake{status: sample(), events: func(req *api.EventsRequest) *api.EventsResponse {
		pages++
		resp := &api.EventsResponse{Run: 5, Next: min(req.Since+1, 2)}
		if ahead := []time.Duration{time.Hour, -time.Minute}; req.Since < 2 {
			resp.Events = []*api.Event{{Sequence: resp.Next, TimeNs: time.Now().Add(ahead[req.Since]).UnixNano()}}
		}
		return resp
	}})
	for _, args := range [][]string{{"events"}, {"events", "--last", "9"}, {"why", "train-a"}} {
		pages = 0
		if code, _, errs := ctl(append(args, "--run-dir", dir)...); code != exitOK || pages != 3 {
			t.Errorf("%v: exit %d, asked %d times, %s", args, code, pages, errs)
		}
	}
}

// --last counts from the end, over all pages.
func TestLastEvents(t *testing.T) {
	all := happened()
	dir := serve(t, &fake{events: func(req *api.EventsRequest) *api.EventsResponse {
		at := min(req.Since, uint64(len(all)))
		return &api.EventsResponse{Run: 5, Lost: 3, Next: at + 1, Events: all[at:min(at+1, uint64(len(all)))]}
	}})
	_, text, _ := ctl("events", "--run-dir", dir)
	lines := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n")
	for last, want := range map[string]string{"0": "", "2": strings.Join(lines[len(lines)-2:], "") + "\n", "1000": text} {
		if code, out, errs := ctl("events", "--last", last, "--run-dir", dir); code != exitOK || out != want || errs != "" {
			t.Errorf("--last %s: exit %d, %q, printed\n%swant\n%s", last, code, errs, out, want)
		}
	}
}

// until cancels a context when a text was written.
type until struct {
	bytes.Buffer
	text   string
	cancel func()
}

func (u *until) Write(b []byte) (int, error) {
	n, err := u.Buffer.Write(b)
	if strings.Contains(u.String(), u.text) {
		u.cancel()
	}
	return n, err
}

// With -f it goes on until the user ends it, also over a restart.
func TestEventsFollow(t *testing.T) {
	calls := 0
	f := &fake{}
	dir := serve(t, f)
	f.events = func(req *api.EventsRequest) *api.EventsResponse {
		calls++
		switch calls {
		case 1:
			return &api.EventsResponse{Run: 1, Next: 1, Events: happened()[:1]}
		case 2:
			if req.Since != 1 || req.Run != 1 || req.WaitNs <= 0 {
				t.Errorf("request %v", req)
			}
			// Gone for a moment: the next call finds no socket.
			if err := os.Rename(api.SocketPath(dir), api.SocketPath(dir)+".away"); err != nil {
				t.Error(err)
			}
			return &api.EventsResponse{Run: 1, Next: 1}
		}
		return &api.EventsResponse{Run: 2, Next: 1, Events: []*api.Event{{Reason: "the end"}}}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	out := &until{text: "the end", cancel: cancel}
	errs := &until{text: "waiting for the next one", cancel: func() {
		if err := os.Rename(api.SocketPath(dir)+".away", api.SocketPath(dir)); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}}
	if code := run(ctx, []string{"events", "-f", "-n", "-1", "--run-dir", dir}, streams{out: out, err: errs}); code != exitOK {
		t.Errorf("exit %d, %s", code, errs)
	}
	if strings.Count(out.String(), "\n") != 2 || strings.Count(errs.String(), "\n") != 1 {
		t.Errorf("%s%s", out, errs)
	}
}

// -f shows what happens from now on. Of the past it shows what is asked for.
func TestEventsFollowFromNow(t *testing.T) {
	past := &api.Event{Sequence: 1, TimeNs: time.Now().Add(-time.Minute).UnixNano(), Reason: "the past"}
	for flags, want := range map[string]int{"": 0, "--since 5m": 1, "--since 30s": 0, "-n 1": 1, "-n -1": 1} {
		f := &fake{events: func(req *api.EventsRequest) *api.EventsResponse {
			switch req.Since {
			case 0:
				return &api.EventsResponse{Run: 1, Next: 1, Events: []*api.Event{past}}
			case 1: // comes while the command reads the past
				return &api.EventsResponse{Run: 1, Next: 2, Events: []*api.Event{{Sequence: 2, TimeNs: time.Now().UnixNano(), Reason: "as it began"}}}
			case 2:
				return &api.EventsResponse{Run: 1, Next: 3, Events: []*api.Event{{Sequence: 3, TimeNs: time.Now().UnixNano(), Reason: "the end"}}}
			}
			return &api.EventsResponse{Run: 1, Next: 3}
		}}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		out := &until{text: "the end", cancel: cancel}
		args := append([]string{"events", "-f", "--run-dir", serve(t, f)}, strings.Fields(flags)...)
		if code := run(ctx, args, streams{out: out, err: out}); code != exitOK {
			t.Errorf("%v: exit %d", args, code)
		}
		if got := out.String(); strings.Count(got, "the past") != want || strings.Count(got, "as it began") != 1 || strings.Count(got, "the end") != 1 {
			t.Errorf("-f %s:\n%s", flags, got)
		}
		cancel()
	}
}

// A process's name may have any character: those that control a terminal, C1 ones too, never
// get there.
func TestJSONKeepsControlsFromTheTerminal(t *testing.T) {
	const name = "\u007f\u0085\u009b31m\x1bred"
	f := &fake{status: sample(), events: func(req *api.EventsRequest) *api.EventsResponse {
		if req.Since != 0 {
			return &api.EventsResponse{Run: 1, Next: 9}
		}
		return &api.EventsResponse{Run: 1, Next: 9, Events: []*api.Event{{Type: api.EventType_EVENT_TYPE_WARNING, Reason: name}}}
	}}
	f.status.Gpus[0].Clients[0].Command = name
	f.status.Gpus[0].Tenants[0].Container.Name = name
	dir := serve(t, f)
	for _, args := range []string{"status -o json", "status -o yaml", "events -o json"} {
		code, out, errs := ctl(append(strings.Fields(args), "--run-dir", dir)...)
		if code != exitOK || !strings.Contains(out, "31m") || strings.ContainsFunc(out, func(r rune) bool { return r != '\n' && unicode.IsControl(r) }) {
			t.Errorf("%s: exit %d, %q %q", args, code, out, errs)
		}
		if strings.HasSuffix(args, "json") && !strings.Contains(out, `\u007f\u0085\u009b31m\u001bred`) {
			t.Errorf("%s: the name is changed: %q", args, out)
		}
	}
}

// Probes ask once whether the scheduler answers, however many events it keeps.
func TestEventsAsAProbe(t *testing.T) {
	asked := 0
	f := &fake{events: func(req *api.EventsRequest) *api.EventsResponse {
		if asked++; req.Since == 20 {
			return &api.EventsResponse{Run: 1, Next: req.Since}
		}
		return &api.EventsResponse{Run: 1, Next: req.Since + 1, Events: []*api.Event{{Sequence: req.Since + 1}}}
	}}
	if code, out, errs := ctl("events", "--last=0", "--run-dir", serve(t, f)); code != exitOK || out+errs != "" || asked != 1 {
		t.Errorf("exit %d after %d questions: %q, %q", code, asked, out, errs)
	}
}
